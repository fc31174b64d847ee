//! The stream of an API with one answer and events of its own: Anthropic's messages and OpenAI's responses.

use std::sync::Arc;

use bytes::Bytes;
use glimmer_engine::request::TokenEvent;
use glimmer_text::Event;

use crate::answer::{AnswerState, Ending};
use crate::app::App;
use crate::chat::job::{Plan, Submitted};
use crate::chat::stream::first_error;
use crate::chat::whole::usage;
use crate::error::ApiError;
use crate::frames::{Frames, Produced};
use crate::usage::Usage;

/// How an API writes its events.
pub trait Wire: Send + 'static {
    /// Before the first output.
    fn begin(&mut self, out: &mut Vec<u8>);
    /// A piece of the answer.
    fn event(&mut self, event: &Event, out: &mut Vec<u8>);
    /// The end.
    fn end(&mut self, ending: &Ending, usage: Usage, out: &mut Vec<u8>);
    /// A failure behind the headers.
    fn failed(&mut self, error: &ApiError, out: &mut Vec<u8>);
    /// Something that says that the connection lives.
    fn keep_alive(&mut self, out: &mut Vec<u8>);
}

/// Answers a request with a stream.
///
/// # Errors
/// What happens before the first output.
pub async fn respond(
    app: Arc<App>,
    submitted: Submitted,
    wire: impl Wire,
) -> Result<axum::http::Response<axum::body::Body>, ApiError> {
    let Submitted { plan, mut run } = submitted;
    let mut batch = Vec::new();
    run.wait_for(app.options.keep_alive, &mut batch).await?;
    first_error(&batch)?;
    let body = Produced::new(|frames| produce(app, plan, run, batch, frames, wire));
    Ok(crate::event_stream(body.boxed()))
}

async fn produce(
    app: Arc<App>,
    plan: Plan,
    mut run: crate::run::Run,
    mut batch: Vec<(usize, TokenEvent)>,
    mut frames: Frames,
    mut wire: impl Wire,
) {
    let mut state = AnswerState::new(app.model.format.tokenizer(), &plan.rules);
    let mut out = Vec::with_capacity(1 << 10);
    let mut events = Vec::new();
    wire.begin(&mut out);
    let failure = 'stream: loop {
        for (choice, event) in batch.drain(..) {
            if let Err(error) = run.feed(choice, &event, &mut state, &mut events) {
                break 'stream Some(error);
            }
            for event in events.drain(..) {
                wire.event(&event, &mut out);
            }
        }
        if run.open() == 0 {
            break None;
        }
        if !out.is_empty() {
            let next = Vec::with_capacity(out.len());
            frames.send(Bytes::from(std::mem::replace(&mut out, next))).await;
        }
        match run.wait_for(app.options.keep_alive, &mut batch).await {
            Ok(true) => {}
            Ok(false) => wire.keep_alive(&mut out),
            Err(error) => break Some(error),
        }
    };
    match (&failure, &state.ending) {
        (None, Some(ending)) => {
            let usage = usage(&app, &plan, &run, std::slice::from_ref(&state));
            wire.end(ending, usage, &mut out);
        }
        (Some(error), _) => wire.failed(error, &mut out),
        (None, None) => wire.failed(&ApiError::internal(), &mut out),
    }
    drop(run);
    frames.send(Bytes::from(out)).await;
}

/// Appends `event: <name>`, `data: <text>` and the empty line.
pub fn event(name: &str, data: &str, out: &mut Vec<u8>) {
    for part in ["event: ", name, "\ndata: ", data, "\n\n"] {
        out.extend_from_slice(part.as_bytes());
    }
}
