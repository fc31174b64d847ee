//! An engine without a model: it plays scripts of tokens.
//!
//! For tests of the front end, for its bench and for fuzzing. A script is chosen by the request, so that the same server can
//! play many at once; the schedule of each is exact, and every abort is counted.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use glimmer_engine::constraint::{Constraint, ConstraintError, Grammars, TokenMask};
use glimmer_engine::request::{
    Cost, Finish, FinishReason, Logprobs, Request, RequestError, Structure, Token, TokenEvent,
};
use tokio::sync::Notify;

use crate::engine::{Asked, Counters, Engine, EventSender, Refusal, Status, Ticket};

/// What is played to a request.
#[derive(Clone, Debug)]
pub struct Script {
    /// Tokens, a list for each step.
    pub steps: Vec<Vec<u32>>,
    /// How it ends.
    pub end: End,
    /// Time before the first step.
    pub first: Duration,
    /// Time between steps; zero plays everything at once.
    pub pace: Duration,
}

/// The end of a script.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// An answer that ends for this reason; a limit of tokens is kept before.
    Finish(FinishReason),
    /// The request fails.
    Fail(RequestError),
    /// Nothing more comes, and the request stays.
    Hang,
    /// The sender goes away without an end.
    Die,
}

impl Script {
    /// Tokens, one a step, at once; the last one is the model's end token.
    #[must_use]
    pub fn of(ids: &[u32]) -> Self {
        Self {
            steps: ids.iter().map(|&id| vec![id]).collect(),
            end: End::Finish(FinishReason::EndToken),
            first: Duration::ZERO,
            pace: Duration::ZERO,
        }
    }
}

/// Grammars that allow everything, for tests of what is asked for. A regular expression that is no text of balanced
/// parentheses is refused.
#[derive(Debug)]
pub struct AnyShape;

impl Grammars for AnyShape {
    fn compile(&self, structure: &Structure) -> Result<Box<dyn Constraint>, ConstraintError> {
        match structure {
            Structure::Regex(text) if text.matches('(').count() != text.matches(')').count() => {
                Err(ConstraintError(format!("{text:?}: a parenthesis is not closed")))
            }
            Structure::JsonSchema(text) if text == "false" => {
                Err(ConstraintError("nothing fits the schema".to_owned()))
            }
            _ => Ok(Box::new(Free)),
        }
    }
}

/// Allows everything.
#[derive(Debug)]
struct Free;

impl Constraint for Free {
    fn mask(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        mask.fill(true);
        Ok(())
    }

    fn advance(&mut self, _token: u32) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn rollback(&mut self, _tokens: usize) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn valid_prefix(&mut self, tokens: &[u32]) -> usize {
        tokens.len()
    }
}

type Chooser = dyn Fn(&Request) -> Result<Script, Refusal> + Send + Sync;

/// The engine.
pub struct Scripted {
    choose: Box<Chooser>,
    state: Arc<State>,
}

impl std::fmt::Debug for Scripted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scripted").field("running", &self.running()).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct State {
    running: AtomicUsize,
    aborted: AtomicUsize,
    constrained: AtomicUsize,
    ended: Notify,
    seen: Mutex<Vec<Request>>,
    status: Mutex<Status>,
    counters: Mutex<Counters>,
}

impl Scripted {
    /// An engine that plays what `choose` returns.
    #[must_use]
    pub fn new(choose: impl Fn(&Request) -> Result<Script, Refusal> + Send + Sync + 'static) -> Self {
        Self { choose: Box::new(choose), state: Arc::default() }
    }

    /// An engine that plays one script to everybody.
    #[must_use]
    pub fn playing(script: Script) -> Self {
        Self::new(move |_| Ok(script.clone()))
    }

    /// Requests being played.
    #[must_use]
    pub fn running(&self) -> usize {
        self.state.running.load(Ordering::SeqCst)
    }

    /// Requests whose ticket was dropped before their end.
    #[must_use]
    pub fn aborted(&self) -> usize {
        self.state.aborted.load(Ordering::SeqCst)
    }

    /// Requests that came with a compiled shape.
    #[must_use]
    pub fn constrained(&self) -> usize {
        self.state.constrained.load(Ordering::SeqCst)
    }

    /// Waits until nothing is played.
    pub async fn idle(&self) {
        loop {
            let ended = self.state.ended.notified();
            if self.running() == 0 {
                return;
            }
            ended.await;
        }
    }

    /// Requests so far.
    #[must_use]
    pub fn seen(&self) -> Vec<Request> {
        lock(&self.state.seen).clone()
    }

    /// Sets what [`Engine::status`] says.
    pub fn set_status(&self, status: Status) {
        *lock(&self.state.status) = status;
    }

    /// Sets what [`Engine::counters`] says.
    pub fn set_counters(&self, counters: Counters) {
        *lock(&self.state.counters) = counters;
    }
}

impl Engine for Scripted {
    fn submit(&self, asked: Asked, events: EventSender) -> Result<Ticket, Refusal> {
        if lock(&self.state.status).dead.is_some() {
            return Err(Refusal::Dead);
        }
        let request = asked.request;
        self.state.constrained.fetch_add(usize::from(asked.constraint.is_some()), Ordering::SeqCst);
        let script = (self.choose)(&request)?;
        let state = Arc::clone(&self.state);
        state.running.fetch_add(1, Ordering::SeqCst);
        if script.first.is_zero() && script.pace.is_zero() && !matches!(script.end, End::Hang) {
            let player = Player { state, done: false };
            player.play_at_once(&request, script, &events);
            lock(&self.state.seen).push(request);
            return Ok(Ticket::new(|| {}));
        }
        lock(&self.state.seen).push(request.clone());
        // Made here: a task that is aborted before it began drops only what it owns.
        let player = Player { state, done: false };
        let task = tokio::spawn(player.play(request, script, events));
        let abort = task.abort_handle();
        Ok(Ticket::new(move || abort.abort()))
    }

    fn status(&self) -> Status {
        let status = lock(&self.state.status).clone();
        Status { running: self.running(), ..status }
    }

    fn counters(&self) -> Counters {
        lock(&self.state.counters).clone()
    }
}

/// One request being played; dropped, it is over.
struct Player {
    state: Arc<State>,
    done: bool,
}

impl Drop for Player {
    fn drop(&mut self) {
        if !self.done {
            self.state.aborted.fetch_add(1, Ordering::SeqCst);
        }
        self.state.running.fetch_sub(1, Ordering::SeqCst);
        self.state.ended.notify_waiters();
    }
}

impl Player {
    fn play_at_once(mut self, request: &Request, script: Script, events: &EventSender) {
        for event in timeline(request, script).0 {
            if !events.send(event) {
                return;
            }
        }
        self.done = true;
    }

    async fn play(mut self, request: Request, script: Script, events: EventSender) {
        let (first, pace, end) = (script.first, script.pace, script.end.clone());
        tokio::time::sleep(first).await;
        let (timeline, over) = timeline(&request, script);
        for (index, event) in timeline.into_iter().enumerate() {
            if index > 0 && !pace.is_zero() {
                tokio::time::sleep(pace).await;
            }
            if !events.send(event) {
                return;
            }
        }
        if end == End::Hang && !over {
            std::future::pending::<()>().await;
        }
        self.done = true;
    }
}

/// The events of a script under the request's limits, and whether the last one ends the answer.
fn timeline(request: &Request, script: Script) -> (Vec<TokenEvent>, bool) {
    let limit = request.limits.max_tokens as usize;
    let mut sent = 0;
    let mut events = Vec::with_capacity(script.steps.len() + 1);
    let finish = |reason: FinishReason| Some(Finish { reason, cost: Cost::default() });
    let last = script.steps.len().saturating_sub(1);
    let whole = script.steps.iter().map(Vec::len).sum::<usize>() <= limit;
    for (index, step) in script.steps.into_iter().enumerate() {
        let mut event = TokenEvent::default();
        if index == 0 && request.prompt_logprobs.is_some() {
            let positions = request.prompt.iter().enumerate();
            event.prompt_logprobs = Some(positions.map(|(at, &id)| (at > 0).then(|| logprobs(id, 1))).collect());
        }
        for id in step {
            if sent == limit {
                break;
            }
            sent += 1;
            let found = request.logprobs.map(|top| Box::new(logprobs(id, top)));
            event.tokens.push(Token { id, logprobs: found });
        }
        if !whole && sent == limit {
            event.finish = finish(FinishReason::Length);
            events.push(event);
            return (events, true);
        }
        if let End::Finish(reason) = &script.end
            && index == last
        {
            event.finish = finish(reason.clone());
        }
        events.push(event);
    }
    if events.is_empty()
        && let End::Finish(reason) = &script.end
    {
        events.push(TokenEvent { finish: finish(reason.clone()), ..TokenEvent::default() });
    }
    let over = match script.end {
        End::Fail(error) => {
            events.push(TokenEvent { finish: finish(FinishReason::Error(error)), ..TokenEvent::default() });
            true
        }
        End::Finish(_) => true,
        End::Hang | End::Die => false,
    };
    (events, over)
}

/// Made-up log-probabilities that tests can foretell: `-id / 1000` and the ids that follow.
fn logprobs(id: u32, top: u32) -> Logprobs {
    let value = |id: u32| -(id as f32) / 1000.0;
    Logprobs { id, logprob: value(id), rank: 1, top: (id..id.saturating_add(top)).map(|id| (id, value(id))).collect() }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
