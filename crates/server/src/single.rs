//! The stream of an API with one answer and events of its own: Anthropic's messages and OpenAI's responses.

use std::sync::Arc;

use glimmer_engine::request::TokenEvent;
use glimmer_text::Event;

use crate::answer::{AnswerState, Ending};
use crate::app::App;
use crate::chat::job::{Plan, Submitted};
use crate::chat::whole::usage;
use crate::error::ApiError;
use crate::frames::Produced;
use crate::run::Run;
use crate::streamed;
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
    let first = streamed::first(&mut run, app.options.keep_alive).await?;
    let body = Produced::new(|frames| async move {
        let state = AnswerState::new(app.model.format.tokenizer(), &plan.rules);
        let writer = Single { app: &app, plan: &plan, state, events: Vec::new(), wire };
        streamed::write(writer, run, first, app.options.keep_alive, frames).await;
    });
    Ok(crate::event_stream(body))
}

/// Writes the one answer of a request.
struct Single<'a, W> {
    app: &'a App,
    plan: &'a Plan,
    state: AnswerState<'a>,
    events: Vec<Event>,
    wire: W,
}

impl<W: Wire> streamed::Writer for Single<'_, W> {
    fn begin(&mut self, out: &mut Vec<u8>) {
        self.wire.begin(out);
    }

    fn event(&mut self, run: &mut Run, choice: usize, event: TokenEvent, out: &mut Vec<u8>) -> Result<(), ApiError> {
        run.feed(choice, &event, &mut self.state, &mut self.events)?;
        for event in self.events.drain(..) {
            self.wire.event(&event, out);
        }
        Ok(())
    }

    fn keep_alive(&mut self, out: &mut Vec<u8>) {
        self.wire.keep_alive(out);
    }

    fn end(&mut self, run: &Run, failure: Option<&ApiError>, out: &mut Vec<u8>) {
        match (failure, &self.state.ending) {
            (None, Some(ending)) => {
                let usage = usage(self.app, self.plan, run, std::iter::once(&self.state));
                self.wire.end(ending, usage, out);
            }
            (Some(error), _) => self.wire.failed(error, out),
            (None, None) => self.wire.failed(&ApiError::internal(), out),
        }
    }
}

/// Appends `event: <name>`, `data: <text>` and the empty line.
pub fn event(name: &str, data: &str, out: &mut Vec<u8>) {
    for part in ["event: ", name, "\ndata: ", data, "\n\n"] {
        out.extend_from_slice(part.as_bytes());
    }
}
