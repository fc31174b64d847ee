//! The stream of an API with one answer and events of its own: Anthropic's messages and OpenAI's responses.

use std::sync::Arc;

use glimmer_text::Event;

use crate::answer::{AnswerState, Ending};
use crate::app::App;
use crate::chat::job::{Plan, Submitted};
use crate::chat::stream::first_error;
use crate::chat::whole::usage;
use crate::engine::Parcel;
use crate::error::ApiError;
use crate::frames::{Frames, Produced};
use crate::run::{BATCH, Run};
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
    let first = run.wait_for(app.options.keep_alive).await?;
    first_error(first.as_ref())?;
    let body = Produced::new(|frames| produce(app, plan, run, first, frames, wire));
    Ok(crate::event_stream(body))
}

async fn produce(
    app: Arc<App>,
    plan: Plan,
    mut run: Run,
    mut next: Option<Parcel>,
    mut frames: Frames,
    mut wire: impl Wire,
) {
    let mut state = AnswerState::new(app.model.format.tokenizer(), &plan.rules);
    let mut events = Vec::new();
    wire.begin(frames.out());
    let failure = 'stream: loop {
        for _ in 0..BATCH {
            let Some((choice, event)) = next.take().map(Parcel::open) else { break };
            if let Err(error) = run.feed(choice, &event, &mut state, &mut events) {
                break 'stream Some(error);
            }
            for event in events.drain(..) {
                wire.event(&event, frames.out());
            }
            next = run.ready();
        }
        if run.open() == 0 {
            break None;
        }
        if frames.send().await.is_err() {
            return;
        }
        if next.is_none() {
            match run.wait_for(app.options.keep_alive).await {
                Ok(None) => wire.keep_alive(frames.out()),
                Ok(event) => next = event,
                Err(error) => break Some(error),
            }
        }
    };
    match (&failure, &state.ending) {
        (None, Some(ending)) => {
            let usage = usage(&app, &plan, &run, std::iter::once(&state));
            wire.end(ending, usage, frames.out());
        }
        (Some(error), _) => wire.failed(error, frames.out()),
        (None, None) => wire.failed(&ApiError::internal(), frames.out()),
    }
    drop(run);
    frames.finish();
}

/// Appends `event: <name>`, `data: <text>` and the empty line.
pub fn event(name: &str, data: &str, out: &mut Vec<u8>) {
    for part in ["event: ", name, "\ndata: ", data, "\n\n"] {
        out.extend_from_slice(part.as_bytes());
    }
}
