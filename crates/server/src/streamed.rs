//! The loop of every streamed answer: events of the engine in, frames of an API's events out.
//!
//! One frame a batch of ready events. The headers wait for the first output, so that a request which fails before it is an
//! HTTP error; only when that takes longer than the keep-alive interval they go out early, because proxies cut silent
//! connections.

use std::time::Duration;

use glimmer_engine::request::{FinishReason, TokenEvent};

use crate::engine::Parcel;
use crate::error::ApiError;
use crate::frames::Frames;
use crate::run::Run;

/// Most events that share a frame.
const BATCH: usize = 256;

/// How an API writes what the engine says.
pub(crate) trait Writer {
    /// Before the first output.
    fn begin(&mut self, _out: &mut Vec<u8>) {}

    /// An event of answer `choice`, which the run has to be fed with.
    ///
    /// # Errors
    /// Those of [`Run::feed`].
    fn event(&mut self, run: &mut Run, choice: usize, event: TokenEvent, out: &mut Vec<u8>) -> Result<(), ApiError>;

    /// Something that says that the connection lives.
    fn keep_alive(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(b": keep-alive\n\n");
    }

    /// The end of all answers, or a failure behind the headers.
    fn end(&mut self, run: &Run, failure: Option<&ApiError>, out: &mut Vec<u8>);
}

/// Waits for the first event; `None` if none came within the keep-alive interval.
///
/// # Errors
/// A failure that nothing precedes: it is still an HTTP error.
pub(crate) async fn first(run: &mut Run, keep_alive: Option<Duration>) -> Result<Option<Parcel>, ApiError> {
    let first = run.wait_for(keep_alive).await?;
    match first.as_ref().and_then(Parcel::whole) {
        Some(TokenEvent { tokens, finish: Some(finish), .. }) if tokens.is_empty() => match &finish.reason {
            FinishReason::Error(error) => Err(error.into()),
            _ => Ok(first),
        },
        _ => Ok(first),
    }
}

/// Writes all answers of a run, of which `next` is the first event if it is there already.
pub(crate) async fn write(
    mut writer: impl Writer,
    mut run: Run,
    mut next: Option<Parcel>,
    keep_alive: Option<Duration>,
    mut frames: Frames,
) {
    writer.begin(frames.out());
    let failure = 'answers: loop {
        for _ in 0..BATCH {
            let Some((choice, event)) = next.take().map(Parcel::open) else { break };
            if let Err(error) = writer.event(&mut run, choice, event, frames.out()) {
                break 'answers Some(error);
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
            match run.wait_for(keep_alive).await {
                Ok(None) => writer.keep_alive(frames.out()),
                Ok(event) => next = event,
                Err(error) => break Some(error),
            }
        }
    };
    writer.end(&run, failure.as_ref(), frames.out());
    // The engine's resources are free before the client knows that the answer is complete.
    drop(run);
    frames.finish();
}
