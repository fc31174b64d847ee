//! A request on its way through the engine, whatever API it came by.
//!
//! [`Run`] owns the tickets of all answers, so dropping it (a closed connection, an error, a panic) aborts them within one
//! step; it also feeds the metrics. Invariant: every answer that was submitted is recorded exactly once.

use std::future::{Future as _, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Body;
use axum::http::Response;
use glimmer_engine::request::TokenEvent;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::answer::AnswerState;
use crate::app::{App, InFlight};
use crate::each::Each;
use crate::engine::{Asked, EventSender, Parcel, Refusal, Ticket};
use crate::error::ApiError;
use crate::metrics::Meter;

/// A submitted request.
#[derive(Debug)]
pub struct Run {
    app: Arc<App>,
    events: UnboundedReceiver<Parcel>,
    answers: Each<Following>,
    open: usize,
    cached_tokens: u32,
    first_token_ms: Option<u64>,
    silence: Option<Silence>,
    _in_flight: InFlight,
}

/// How long nothing came. The timer runs on while tokens come and is set anew only when it rings, and nobody looks at it before:
/// it is memory of its own, and with many streams fetching that costs as much as writing an event.
#[derive(Debug)]
struct Silence {
    since: Instant,
    timer: Pin<Box<Sleep>>,
    rings: Instant,
    /// Whom it wakes.
    wakes: Option<Waker>,
}

impl Silence {
    fn new(patience: Duration) -> Self {
        let rings = Instant::now() + patience;
        Self { since: rings, timer: Box::pin(sleep_until(rings)), rings, wakes: None }
    }

    /// Ready when nothing came for so long.
    fn poll(&mut self, patience: Duration, context: &mut Context<'_>) -> Poll<()> {
        let asked = self.wakes.as_ref().is_some_and(|waker| waker.will_wake(context.waker()));
        if asked && Instant::now() < self.rings {
            return Poll::Pending;
        }
        while self.timer.as_mut().poll(context).is_ready() {
            let end = self.since + patience;
            let over = Instant::now() >= end;
            self.rings = if over { end + patience } else { end };
            self.timer.as_mut().reset(self.rings);
            if over {
                self.wakes = None;
                return Poll::Ready(());
            }
        }
        self.wakes = Some(context.waker().clone());
        Poll::Pending
    }
}

/// Milliseconds to the first token, as far as the engine can tell beforehand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate(Option<u64>);

impl Estimate {
    /// Adds it to a response.
    #[must_use]
    pub fn stamp(self, mut response: Response<Body>) -> Response<Body> {
        if let Some(milliseconds) = self.0 {
            response.headers_mut().insert("x-estimated-ttft-ms", milliseconds.into());
        }
        response
    }
}

/// What is kept of one answer.
#[derive(Debug)]
struct Following {
    ticket: Option<Ticket>,
    meter: Meter,
}

impl Run {
    /// Submits all answers of a request. If one is refused, those before it are aborted.
    ///
    /// # Errors
    /// The engine's refusal.
    pub fn start(app: &Arc<App>, requests: Vec<Asked>) -> Result<Self, ApiError> {
        let in_flight = app.enter();
        let (sender, events) = unbounded_channel();
        let n = requests.len();
        let prompt = requests.first().map_or(0, |first| first.request.prompt.len());
        let first_token_ms = app.engine.status().estimated_first_token_ms(prompt);
        if let Some(first) = requests.first() {
            app.metrics.submitted(n, first.request.limits.max_tokens);
        }
        let mut tickets = Vec::with_capacity(n);
        let mut meters = Vec::with_capacity(n);
        for (index, asked) in requests.into_iter().enumerate() {
            meters.push(Meter::new(asked.request.prompt.len(), index == 0));
            match app.engine.submit(asked, EventSender::new(index, sender.clone())) {
                Ok(ticket) => tickets.push(ticket),
                Err(refusal) => {
                    if matches!(refusal, Refusal::Overloaded { .. }) {
                        app.metrics.rejected();
                    }
                    return Err(refusal.into());
                }
            }
        }
        let following = tickets.into_iter().zip(meters);
        let answers = following.map(|(ticket, meter)| Following { ticket: Some(ticket), meter }).collect();
        let app = Arc::clone(app);
        Ok(Self {
            app,
            events,
            answers,
            open: n,
            cached_tokens: 0,
            first_token_ms,
            silence: None,
            _in_flight: in_flight,
        })
    }

    /// What the client may be told of the wait, as it was when the request came.
    #[must_use]
    pub fn estimate(&self) -> Estimate {
        Estimate(self.first_token_ms)
    }

    /// Answers that have not ended.
    #[must_use]
    pub fn open(&self) -> usize {
        self.open
    }

    /// Prompt tokens that came from the cache.
    #[must_use]
    pub fn cached_tokens(&self) -> u32 {
        self.cached_tokens
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// When the engine ends without ending the request.
    pub async fn wait(&mut self) -> Result<(usize, TokenEvent), ApiError> {
        self.parcel().await.map(Parcel::open)
    }

    async fn parcel(&mut self) -> Result<Parcel, ApiError> {
        self.events.recv().await.ok_or_else(|| ApiError::engine_dead(true))
    }

    /// As [`Run::wait`], for at most `patience`; `None` if nothing came.
    ///
    /// # Errors
    /// As [`Run::wait`].
    pub async fn wait_for(&mut self, patience: Option<Duration>) -> Result<Option<Parcel>, ApiError> {
        let Some(patience) = patience else { return self.parcel().await.map(Some) };
        let (events, silence, mut begun) = (&mut self.events, &mut self.silence, false);
        poll_fn(|context| match events.poll_recv(context) {
            Poll::Ready(Some(parcel)) => Poll::Ready(Ok(Some(parcel))),
            Poll::Ready(None) => Poll::Ready(Err(ApiError::engine_dead(true))),
            // Most of the time something is there already, and then no timer is set.
            Poll::Pending => {
                let silence = silence.get_or_insert_with(|| Silence::new(patience));
                if !std::mem::replace(&mut begun, true) {
                    silence.since = Instant::now();
                }
                silence.poll(patience, context).map(|()| Ok(None))
            }
        })
        .await
    }

    /// The next event, if it is there already.
    pub fn ready(&mut self) -> Option<Parcel> {
        self.events.try_recv().ok()
    }

    /// Feeds an event to its answer; returns how many of its tokens count. An answer that has ended gets no more.
    ///
    /// # Errors
    /// When the engine failed the answer.
    pub fn feed(
        &mut self,
        choice: usize,
        event: &TokenEvent,
        state: &mut AnswerState<'_>,
        out: &mut Vec<glimmer_text::Event>,
    ) -> Result<usize, ApiError> {
        if state.ending.is_some() {
            return Ok(0);
        }
        let following = &mut self.answers[choice];
        let counted = state.feed(event, out);
        let tokens = counted.as_ref().copied().unwrap_or(0);
        following.meter.step(&self.app.metrics, tokens);
        if let Some(finish) = &event.finish {
            self.cached_tokens = self.cached_tokens.max(finish.cost.cached_tokens);
            following.meter.finished(&finish.reason, finish.cost);
        } else if state.ending.is_some() {
            following.meter.stopped();
        }
        if state.ending.is_some() || counted.is_err() {
            // Frees the engine's resources if a stop string ended the answer; else it is a formality.
            following.ticket = None;
            self.open -= 1;
        }
        if self.open == 0 {
            self.app.metrics.longest(state.tokens);
        }
        counted
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        for following in self.answers.iter() {
            following.meter.record(&self.app.metrics);
        }
    }
}
