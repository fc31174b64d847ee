//! A response in one piece, and what it shares with a streamed one.

use axum::body::Body;
use axum::http::Response;
use glimmer_text::Event;
use serde_json::{Map, Value, json};

use crate::answer::Ending;
use crate::app::App;
use crate::chat::Job;
use crate::chat::job::Submitted;
use crate::chat::whole::collect;
use crate::error::ApiError;
use crate::usage::Usage;

/// Fields of the request that a response repeats.
#[derive(Clone, Debug)]
pub(super) struct Echo(Map<String, Value>);

impl Echo {
    pub(super) fn new(map: &Map<String, Value>, job: &Job) -> Self {
        let given = |key: &str, default: Value| (key.to_owned(), map.get(key).cloned().unwrap_or(default));
        let sampling = &job.common.sampling;
        Self(Map::from_iter([
            given("instructions", Value::Null),
            given("max_output_tokens", Value::Null),
            given("metadata", json!({})),
            given("parallel_tool_calls", true.into()),
            given("reasoning", json!({"effort": null, "summary": null})),
            given("temperature", sampling.temperature.into()),
            given("text", json!({"format": {"type": "text"}})),
            given("tool_choice", "auto".into()),
            given("tools", json!([])),
            given("top_p", sampling.top_p.into()),
            given("truncation", "disabled".into()),
        ]))
    }
}

/// Answers the request in one piece.
///
/// # Errors
/// When the engine fails it.
pub(super) async fn respond(app: &App, submitted: Submitted, echo: &Echo) -> Result<Response<Body>, ApiError> {
    let Submitted { plan, run } = submitted;
    let mut collected = collect(app, &plan, run).await?;
    let Some(finished) = collected.answers.pop() else { return Err(ApiError::internal()) };
    let mut items = Items::default();
    for event in &finished.events {
        items.push(app, event);
    }
    let (status, details) = status(&finished.ending);
    items.close(status);
    let response = object(app, (&plan.id, plan.created), echo, status, &details, &items.done, Some(collected.usage));
    Ok(crate::json_response(response.to_string().into_bytes()))
}

/// Status and details of an ended response.
pub(super) fn status(ending: &Ending) -> (&'static str, Value) {
    match ending.reason {
        "length" => ("incomplete", json!({"reason": "max_output_tokens"})),
        "abort" => ("incomplete", json!({"reason": "aborted"})),
        _ => ("completed", Value::Null),
    }
}

/// The response object.
pub(super) fn object(
    app: &App,
    (id, created): (&str, u64),
    echo: &Echo,
    status: &str,
    details: &Value,
    output: &[Value],
    usage: Option<Usage>,
) -> Value {
    let usage = usage.map(|usage| {
        json!({
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached.unwrap_or(0), "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning.unwrap_or(0)},
            "total_tokens": usage.prompt + usage.completion,
        })
    });
    let mut object = json!({
        "id": id, "object": "response", "created_at": created, "status": status, "background": false,
        "error": null, "incomplete_details": details, "model": app.served_name(), "output": output,
        "previous_response_id": null, "store": false, "service_tier": "auto", "usage": usage,
    });
    if let Value::Object(map) = &mut object {
        map.extend(echo.0.clone());
    }
    object
}

/// The output items of an answer: neighbouring events of a kind make one.
#[derive(Debug, Default)]
pub(super) struct Items {
    /// Finished items.
    pub(super) done: Vec<Value>,
    /// The item being written.
    pub(super) open: Option<Item>,
}

/// An item being written.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) kind: Kind,
    pub(super) id: String,
    /// Text or arguments so far.
    pub(super) text: String,
    /// Id and name of a call.
    pub(super) call: Option<(String, String)>,
}

/// Kind of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Reasoning,
    Message,
    Call,
}

impl Item {
    /// The item as JSON.
    pub(super) fn value(&self, status: &str) -> Value {
        let done = status != "in_progress";
        match self.kind {
            Kind::Reasoning => json!({
                "type": "reasoning", "id": self.id, "summary": [], "encrypted_content": null, "status": status,
                "content": if done { json!([self.part()]) } else { json!([]) },
            }),
            Kind::Message => json!({
                "type": "message", "id": self.id, "status": status, "role": "assistant",
                "content": if done { json!([self.part()]) } else { json!([]) },
            }),
            Kind::Call => {
                let (call_id, name) = self.call.clone().unwrap_or_default();
                json!({
                    "type": "function_call", "id": self.id, "call_id": call_id, "name": name, "arguments": self.text,
                    "status": status,
                })
            }
        }
    }

    /// The only part of a reasoning or message item.
    pub(super) fn part(&self) -> Value {
        match self.kind {
            Kind::Reasoning => json!({"type": "reasoning_text", "text": self.text}),
            _ => json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}),
        }
    }
}

impl Items {
    /// Whether this event begins an item.
    pub(super) fn begins(&self, event: &Event) -> bool {
        let open = self.open.as_ref().map(|item| item.kind);
        match event {
            Event::Reasoning(_) => open != Some(Kind::Reasoning),
            Event::Content(_) => open != Some(Kind::Message),
            Event::CallStart { .. } => true,
            Event::CallArguments { .. } | Event::CallEnd { .. } => false,
        }
    }

    /// Takes an event in; an item that it ends must be closed before by whoever wants to see it.
    pub(super) fn push(&mut self, app: &App, event: &Event) {
        if self.begins(event) {
            self.close("completed");
            let (kind, prefix) = match event {
                Event::Reasoning(_) => (Kind::Reasoning, "rs"),
                Event::Content(_) => (Kind::Message, "msg"),
                _ => (Kind::Call, "fc"),
            };
            let call = match event {
                Event::CallStart { name, .. } => Some((format!("call_{}", app.fresh_id()), name.clone())),
                _ => None,
            };
            self.open = Some(Item { kind, id: format!("{prefix}_{}", app.fresh_id()), text: String::new(), call });
        }
        if let (
            Some(item),
            Event::Reasoning(text) | Event::Content(text) | Event::CallArguments { fragment: text, .. },
        ) = (&mut self.open, event)
        {
            item.text.push_str(text);
        }
        if matches!(event, Event::CallEnd { .. }) {
            self.close("completed");
        }
    }

    /// Ends the open item; only the last one can be incomplete.
    pub(super) fn close(&mut self, status: &str) {
        if let Some(item) = self.open.take() {
            self.done.push(item.value(status));
        }
    }
}
