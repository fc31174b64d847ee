//! A message in one piece, and what it shares with a streamed one.

use axum::body::Body;
use axum::http::Response;
use glimmer_text::Event;
use serde_json::Value;

use crate::answer::{Ending, StopCause};
use crate::app::App;
use crate::chat::job::Submitted;
use crate::chat::whole::collect;
use crate::error::ApiError;
use crate::json::Json;
use crate::usage::Usage;

/// Thinking blocks carry a signature, which clients send back; this server checks none.
pub(super) const SIGNATURE: &str = "glimmer";

/// Answers the request in one piece.
///
/// # Errors
/// When the engine fails it.
pub(super) async fn respond(app: &App, submitted: Submitted) -> Result<Response<Body>, ApiError> {
    let Submitted { plan, run } = submitted;
    let mut collected = collect(app, &plan, run).await?;
    let Some(finished) = collected.answers.pop() else { return Err(ApiError::internal()) };
    let blocks = blocks(finished.events);
    let called = blocks.iter().any(|block| matches!(block, Block::Call { .. }));
    let mut body = Vec::new();
    let mut json = Json::new(&mut body);
    head(app, &plan.id, &mut json);
    json.raw(",\"content\":").list(blocks, |json, block| write(app, &block, json));
    stop(&finished.ending, called, &mut json);
    json.raw(",\"usage\":");
    usage(collected.usage, &mut json);
    json.raw("}");
    Ok(crate::json_response(body))
}

/// A block of content.
enum Block {
    Thinking(String),
    Text(String),
    Call { name: String, arguments: String },
}

/// Neighbouring events of a kind make a block.
fn blocks(events: Vec<Event>) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    for event in events {
        match (blocks.last_mut(), event) {
            (Some(Block::Thinking(last)), Event::Reasoning(text)) | (Some(Block::Text(last)), Event::Content(text)) => {
                last.push_str(&text);
            }
            (_, Event::Reasoning(text)) => blocks.push(Block::Thinking(text)),
            (_, Event::Content(text)) => blocks.push(Block::Text(text)),
            (_, Event::CallStart { name, .. }) => blocks.push(Block::Call { name, arguments: String::new() }),
            (Some(Block::Call { arguments, .. }), Event::CallArguments { fragment, .. }) => {
                arguments.push_str(&fragment);
            }
            (_, Event::CallArguments { .. } | Event::CallEnd { .. }) => {}
        }
    }
    blocks
}

fn write(app: &App, block: &Block, json: &mut Json<'_>) {
    match block {
        Block::Thinking(text) => {
            json.raw("{\"type\":\"thinking\",\"thinking\":").text(text).raw(",\"signature\":").text(SIGNATURE).raw("}");
        }
        Block::Text(text) => {
            json.raw("{\"type\":\"text\",\"text\":").text(text).raw("}");
        }
        Block::Call { name, arguments } => {
            // A call that was cut off has no input that could be told; the stop reason says so. Clients look for such a last
            // block to ask again with more tokens.
            let input: Value = serde_json::from_str(arguments).unwrap_or_else(|_| Value::Object(Default::default()));
            json.raw("{\"type\":\"tool_use\",\"id\":").text(&tool_use_id(app)).raw(",\"name\":").text(name);
            json.raw(",\"input\":").value(&input).raw("}");
        }
    }
}

/// A fresh id of a call.
pub(super) fn tool_use_id(app: &App) -> String {
    format!("toolu_{}", app.fresh_id())
}

/// The object up to its content.
pub(super) fn head(app: &App, id: &str, json: &mut Json<'_>) {
    json.raw("{\"id\":")
        .text(id)
        .raw(",\"type\":\"message\",\"role\":\"assistant\",\"model\":")
        .text(app.served_name());
}

/// `,"stop_reason":..,"stop_sequence":..`.
pub(super) fn stop(ending: &Ending, called: bool, json: &mut Json<'_>) {
    let reason = match (ending.reason, &ending.stop) {
        ("length", _) => "max_tokens",
        ("stop" | "tool_calls", Some(StopCause::Text(_))) => "stop_sequence",
        ("stop" | "tool_calls", _) if called => "tool_use",
        _ => "end_turn",
    };
    json.raw(",\"stop_reason\":").text(reason).raw(",\"stop_sequence\":");
    match &ending.stop {
        Some(StopCause::Text(text)) => json.text(text),
        _ => json.raw("null"),
    };
}

/// Anthropic counts cached tokens apart.
pub(super) fn usage(usage: Usage, json: &mut Json<'_>) {
    let cached = usage.cached.unwrap_or(0);
    json.raw("{\"input_tokens\":").number(usage.prompt.saturating_sub(cached));
    json.raw(",\"cache_creation_input_tokens\":0,\"cache_read_input_tokens\":").number(cached);
    json.raw(",\"output_tokens\":").number(usage.completion).raw("}");
}
