//! A response as events, each with its number.

use std::sync::Arc;

use glimmer_text::Event;
use serde_json::{Value, json};

use super::whole::{Echo, Items, Kind, object, status};
use crate::answer::Ending;
use crate::app::App;
use crate::chat::job::Plan;
use crate::error::{ApiError, Dialect};
use crate::json::Json;
use crate::single::{Wire, event};
use crate::usage::Usage;

/// Writes the events.
pub(super) struct Writer {
    app: Arc<App>,
    id: String,
    created: u64,
    echo: Echo,
    items: Items,
    /// Events so far.
    sequence: u64,
}

impl Writer {
    pub(super) fn new(app: Arc<App>, plan: &Plan, echo: Echo) -> Self {
        let items = Items::default();
        Self { app, id: plan.id.clone(), created: plan.created, echo, items, sequence: 0 }
    }

    fn response(&self, status: &str, details: &Value, usage: Option<Usage>) -> Value {
        object(&self.app, (&self.id, self.created), &self.echo, status, details, &self.items.done, usage)
    }

    /// An event with fields of its own.
    fn send(&mut self, name: &str, mut fields: Value, out: &mut Vec<u8>) {
        fields["type"] = name.into();
        fields["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        event(name, &fields.to_string(), out);
    }

    /// `item_id`, `output_index` and, but for calls, `content_index` of the open item.
    fn place(&self) -> Value {
        let item = self.items.open.as_ref();
        let mut place = json!({"item_id": item.map(|item| &item.id), "output_index": self.items.done.len()});
        if item.is_some_and(|item| item.kind != Kind::Call) {
            place["content_index"] = 0.into();
        }
        place
    }

    fn close(&mut self, status: &str, out: &mut Vec<u8>) {
        let Some(item) = self.items.open.clone() else { return };
        let (name, key) = match item.kind {
            Kind::Reasoning => ("response.reasoning_text.done", "text"),
            Kind::Message => ("response.output_text.done", "text"),
            Kind::Call => ("response.function_call_arguments.done", "arguments"),
        };
        let mut fields = self.place();
        fields[key] = item.text.as_str().into();
        if let (Kind::Call, Some((_, function))) = (item.kind, &item.call) {
            fields["name"] = function.as_str().into();
        }
        if item.kind == Kind::Message {
            fields["logprobs"] = json!([]);
        }
        self.send(name, fields, out);
        if item.kind != Kind::Call {
            let mut fields = self.place();
            fields["part"] = item.part();
            self.send("response.content_part.done", fields, out);
        }
        let fields = json!({"output_index": self.items.done.len(), "item": item.value(status)});
        self.send("response.output_item.done", fields, out);
        self.items.close(status);
    }

    /// The event of every token, written by hand.
    fn delta(&mut self, text: &str, out: &mut Vec<u8>) {
        let Some(item) = &self.items.open else { return };
        let (name, tail) = match item.kind {
            Kind::Reasoning => ("response.reasoning_text.delta", ",\"content_index\":0}\n\n"),
            Kind::Message => ("response.output_text.delta", ",\"content_index\":0,\"logprobs\":[]}\n\n"),
            Kind::Call => ("response.function_call_arguments.delta", "}\n\n"),
        };
        let mut json = Json::new(out);
        json.raw("event: ").raw(name).raw("\ndata: {\"type\":\"").raw(name).raw("\",\"sequence_number\":");
        json.number(self.sequence).raw(",\"item_id\":").text(&item.id).raw(",\"output_index\":");
        json.number(self.items.done.len() as u64).raw(",\"delta\":").text(text).raw(tail);
        self.sequence += 1;
    }
}

impl Wire for Writer {
    fn begin(&mut self, out: &mut Vec<u8>) {
        for name in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress", &Value::Null, None);
            self.send(name, json!({ "response": response }), out);
        }
    }

    fn event(&mut self, piece: &Event, out: &mut Vec<u8>) {
        if let Event::CallEnd { .. } = piece {
            return self.close("completed", out);
        }
        if self.items.begins(piece) {
            self.close("completed", out);
            let app = Arc::clone(&self.app);
            self.items.push(&app, &opening(piece));
            let index = self.items.done.len();
            let item = self.items.open.as_ref().map(|item| item.value("in_progress"));
            self.send("response.output_item.added", json!({"output_index": index, "item": item}), out);
            let part = self.items.open.as_ref().filter(|item| item.kind != Kind::Call).map(super::whole::Item::part);
            if let Some(part) = part {
                let mut fields = self.place();
                fields["part"] = part;
                self.send("response.content_part.added", fields, out);
            }
        }
        if let Event::Reasoning(text) | Event::Content(text) | Event::CallArguments { fragment: text, .. } = piece {
            let app = Arc::clone(&self.app);
            self.items.push(&app, piece);
            self.delta(text, out);
        }
    }

    fn end(&mut self, ending: &Ending, usage: Usage, out: &mut Vec<u8>) {
        let (status, details) = status(ending);
        self.close(status, out);
        let response = self.response(status, &details, Some(usage));
        self.send(&format!("response.{status}"), json!({ "response": response }), out);
    }

    fn failed(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        let mut body = Vec::new();
        error.write(Dialect::OpenAi, &mut body);
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        let mut fields = json!({"code": error.kind, "message": error.message, "param": error.param});
        fields["error"] = body["error"].clone();
        self.send("error", fields, out);
        let mut response = self.response("failed", &Value::Null, None);
        response["error"] = json!({"code": "server_error", "message": error.message});
        self.send("response.failed", json!({ "response": response }), out);
    }

    fn keep_alive(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(b": keep-alive\n\n");
    }
}

/// The event that opens an item, without its text.
fn opening(piece: &Event) -> Event {
    match piece {
        Event::Reasoning(_) => Event::Reasoning(String::new()),
        Event::Content(_) => Event::Content(String::new()),
        other => other.clone(),
    }
}
