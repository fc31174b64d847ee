//! A message as events.

use std::sync::Arc;

use glimmer_text::Event;

use super::whole::{SIGNATURE, head, stop, tool_use_id, usage};
use crate::answer::Ending;
use crate::app::App;
use crate::chat::job::Plan;
use crate::error::{ApiError, Dialect};
use crate::json::Json;
use crate::single::{Wire, event};
use crate::usage::Usage;

/// Writes the events: blocks open and close one after the other.
pub(super) struct Writer {
    app: Arc<App>,
    id: String,
    prompt_tokens: u64,
    /// Blocks opened so far.
    blocks: u64,
    open: Open,
    called: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Open {
    Nothing,
    Thinking,
    Text,
    Call,
}

impl Writer {
    pub(super) fn new(app: Arc<App>, plan: &Plan) -> Self {
        let prompt_tokens = plan.prompt.len() as u64;
        Self { app, id: plan.id.clone(), prompt_tokens, blocks: 0, open: Open::Nothing, called: false }
    }

    /// Closes the open block unless it is of this kind, and opens one with the JSON text of `block`.
    fn switch(&mut self, kind: Open, block: &str, out: &mut Vec<u8>) {
        if self.open == kind && kind != Open::Call {
            return;
        }
        self.close(out);
        self.open = kind;
        event(
            "content_block_start",
            &format!("{{\"type\":\"content_block_start\",\"index\":{},\"content_block\":{block}}}", self.blocks),
            out,
        );
        self.blocks += 1;
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        if self.open == Open::Thinking {
            self.delta("signature_delta", "signature", SIGNATURE, out);
        }
        if self.open != Open::Nothing {
            let data = format!("{{\"type\":\"content_block_stop\",\"index\":{}}}", self.blocks - 1);
            event("content_block_stop", &data, out);
        }
        self.open = Open::Nothing;
    }

    fn delta(&self, kind: &str, key: &str, text: &str, out: &mut Vec<u8>) {
        let mut json = Json::new(out);
        json.raw("event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":");
        json.number(self.blocks.saturating_sub(1)).raw(",\"delta\":{\"type\":\"").raw(kind).raw("\",\"").raw(key);
        json.raw("\":").text(text).raw("}}\n\n");
    }
}

impl Wire for Writer {
    fn begin(&mut self, out: &mut Vec<u8>) {
        let mut json = Json::new(out);
        json.raw("event: message_start\ndata: {\"type\":\"message_start\",\"message\":");
        head(&self.app, &self.id, &mut json);
        json.raw(",\"content\":[],\"stop_reason\":null,\"stop_sequence\":null,\"usage\":");
        usage(Usage { prompt: self.prompt_tokens, ..Usage::default() }, &mut json);
        json.raw("}}\n\n");
        self.keep_alive(out);
    }

    fn event(&mut self, piece: &Event, out: &mut Vec<u8>) {
        match piece {
            Event::Reasoning(text) => {
                self.switch(Open::Thinking, r#"{"type":"thinking","thinking":"","signature":""}"#, out);
                self.delta("thinking_delta", "thinking", text, out);
            }
            Event::Content(text) => {
                self.switch(Open::Text, r#"{"type":"text","text":""}"#, out);
                self.delta("text_delta", "text", text, out);
            }
            Event::CallStart { name, .. } => {
                let mut block = Vec::new();
                let mut json = Json::new(&mut block);
                json.raw("{\"type\":\"tool_use\",\"id\":").text(&tool_use_id(&self.app)).raw(",\"name\":").text(name);
                json.raw(",\"input\":{}}");
                self.called = true;
                self.switch(Open::Call, &String::from_utf8_lossy(&block), out);
            }
            Event::CallArguments { fragment, .. } => self.delta("input_json_delta", "partial_json", fragment, out),
            Event::CallEnd { .. } => self.close(out),
        }
    }

    fn end(&mut self, ending: &Ending, used: Usage, out: &mut Vec<u8>) {
        self.close(out);
        let mut json = Json::new(out);
        json.raw("event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{");
        let start = json.0.len();
        stop(ending, self.called, &mut json);
        // The comma of a field that follows others.
        json.0.remove(start);
        json.raw("},\"usage\":");
        usage(used, &mut json);
        json.raw("}\n\n");
        event("message_stop", r#"{"type":"message_stop"}"#, out);
    }

    fn failed(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        out.extend_from_slice(b"event: error\ndata: ");
        error.write(Dialect::Anthropic, out);
        out.extend_from_slice(b"\n\n");
    }

    fn keep_alive(&mut self, out: &mut Vec<u8>) {
        event("ping", r#"{"type":"ping"}"#, out);
    }
}
