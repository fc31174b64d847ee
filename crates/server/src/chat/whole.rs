//! A chat answer in one piece.

use std::sync::Arc;

use axum::body::Body;
use axum::http::Response;
use glimmer_engine::request::{Logprobs, Token};
use glimmer_text::{Answer, Event};

use super::job::{Plan, Submitted};
use crate::answer::{AnswerState, Ending, StopCause};
use crate::app::App;
use crate::error::ApiError;
use crate::json::Json;
use crate::logprobs::TokenNames;
use crate::run::Run;
use crate::usage::Usage;

/// A finished answer.
#[derive(Debug)]
pub struct Finished {
    /// Reasoning, content and calls.
    pub answer: Answer,
    /// The same, in the order in which they came.
    pub events: Vec<Event>,
    /// How it ended.
    pub ending: Ending,
    /// Tokens that count.
    pub tokens: u64,
    /// Those of them that are reasoning.
    pub reasoning_tokens: u64,
    /// Tokens that may be reported, when they are.
    pub reported: Vec<Token>,
}

/// All answers of a request.
#[derive(Debug)]
pub struct Collected {
    /// The answers in order.
    pub answers: Vec<Finished>,
    /// Log-probabilities of the prompt.
    pub prompt_logprobs: Option<Vec<Option<Logprobs>>>,
    /// What was used.
    pub usage: Usage,
}

/// Waits for all answers.
///
/// # Errors
/// When the engine fails one of them.
pub async fn collect(app: &App, plan: &Plan, mut run: Run) -> Result<Collected, ApiError> {
    let tokenizer = app.model.format.tokenizer();
    let mut states: Vec<AnswerState<'_>> = (0..plan.n).map(|_| AnswerState::new(tokenizer, &plan.rules)).collect();
    let mut events: Vec<Vec<Event>> = vec![Vec::new(); plan.n];
    let mut reported: Vec<Vec<Token>> = vec![Vec::new(); plan.n];
    let mut prompt_logprobs = None;
    while run.open() > 0 {
        let (choice, mut event) = run.wait().await?;
        prompt_logprobs = event.prompt_logprobs.take().or(prompt_logprobs);
        let state = &mut states[choice];
        let hidden = !plan.rules.include_reasoning && state.in_reasoning();
        let counted = run.feed(choice, &event, state, &mut events[choice])?;
        if (plan.logprobs || plan.token_ids) && !hidden {
            reported[choice].extend(event.tokens.drain(..counted));
        }
    }
    let usage = usage(app, plan, &run, states.iter());
    let finished = states.iter_mut().zip(events).zip(reported).map(|((state, events), reported)| {
        let mut answer = Answer::from_events(&events);
        if let Some(echo) = &plan.echo {
            answer.content = Some(format!("{echo}{}", answer.content.unwrap_or_default()));
        }
        let ending = state.ending.take().unwrap_or(Ending { reason: "stop", stop: None });
        Finished { answer, events, ending, tokens: state.tokens, reasoning_tokens: state.reasoning_tokens, reported }
    });
    let answers: Vec<Finished> = finished.collect();
    if app.options.log_outputs {
        for finished in &answers {
            tracing::info!(id = plan.id, answer = ?finished.answer, reason = finished.ending.reason, "Generated response");
        }
    }
    Ok(Collected { answers, prompt_logprobs, usage })
}

/// Counts of the answers so far.
#[must_use]
pub fn usage<'s, 'a: 's>(
    app: &App,
    plan: &Plan,
    run: &Run,
    states: impl Iterator<Item = &'s AnswerState<'a>>,
) -> Usage {
    let (completion, reasoning) =
        states.fold((0, 0), |(all, thought), state| (all + state.tokens, thought + state.reasoning_tokens));
    Usage {
        prompt: plan.prompt.len() as u64,
        completion,
        cached: app.options.prompt_tokens_details.then(|| u64::from(run.cached_tokens())),
        reasoning: plan.rules.parse.reasoning.then_some(reasoning),
    }
}

/// Answers the request in one piece.
///
/// # Errors
/// When the engine fails it.
pub async fn respond(app: Arc<App>, submitted: Submitted) -> Result<Response<Body>, ApiError> {
    let Submitted { plan, run } = submitted;
    let collected = collect(&app, &plan, run).await?;
    let mut body = Vec::new();
    write(&app, &plan, &collected, &mut body);
    Ok(crate::json_response(body))
}

fn write(app: &App, plan: &Plan, collected: &Collected, out: &mut Vec<u8>) {
    let names = TokenNames { tokenizer: app.model.format.tokenizer(), as_ids: plan.tokens_as_ids };
    let mut json = Json::new(out);
    json.raw("{\"id\":").text(&plan.id).raw(",\"object\":\"chat.completion\",\"created\":").number(plan.created);
    json.raw(",\"model\":").text(app.served_name()).raw(",\"choices\":");
    json.list(collected.answers.iter().enumerate(), |json, (index, finished)| {
        json.raw("{\"index\":").number(index as u64).raw(",\"message\":");
        message(app, &finished.answer, json);
        json.raw(",\"logprobs\":");
        if plan.logprobs {
            json.raw("{\"content\":[");
            names.chat(json, &finished.reported, true);
            json.raw("]}");
        } else {
            json.raw("null");
        }
        json.raw(",\"finish_reason\":").text(finished.ending.reason).raw(",\"stop_reason\":");
        stop_reason(json, finished.ending.stop.as_ref());
        if plan.token_ids {
            json.raw(",\"token_ids\":").list(&finished.reported, |json, token| {
                json.number(u64::from(token.id));
            });
        }
        json.raw("}");
    });
    json.raw(",\"usage\":");
    collected.usage.write(&mut json, true);
    json.raw(",\"system_fingerprint\":").text(crate::FINGERPRINT).raw(",\"prompt_logprobs\":");
    match &collected.prompt_logprobs {
        Some(positions) => names.prompt(&mut json, positions),
        None => {
            json.raw("null");
        }
    }
    if plan.token_ids {
        json.raw(",\"prompt_token_ids\":").list(plan.prompt.iter(), |json, &id| {
            json.number(u64::from(id));
        });
    }
    json.raw("}");
}

fn message(app: &App, answer: &Answer, json: &mut Json<'_>) {
    json.raw("{\"role\":").text(&app.options.response_role).raw(",\"content\":");
    let content = answer.content.as_deref();
    // Only an answer of nothing but calls has no content.
    json.optional_text(if answer.calls.is_empty() { Some(content.unwrap_or_default()) } else { content });
    for key in [",\"reasoning\":", ",\"reasoning_content\":"] {
        json.raw(key).optional_text(answer.reasoning.as_deref());
    }
    if !answer.calls.is_empty() {
        json.raw(",\"tool_calls\":").list(&answer.calls, |json, call| {
            json.raw("{\"id\":").text(&tool_call_id(app)).raw(",\"type\":\"function\",\"function\":{\"name\":");
            json.text(&call.name).raw(",\"arguments\":").text(&call.arguments).raw("}}");
        });
    }
    json.raw("}");
}

/// A fresh id of a call.
#[must_use]
pub fn tool_call_id(app: &App) -> String {
    format!("chatcmpl-tool-{}", app.fresh_id())
}

/// The stop string or token that ended an answer, or null.
pub fn stop_reason(json: &mut Json<'_>, cause: Option<&StopCause>) {
    match cause {
        None => json.raw("null"),
        Some(StopCause::Text(text)) => json.text(text),
        Some(StopCause::Token(id)) => json.number(u64::from(*id)),
    };
}
