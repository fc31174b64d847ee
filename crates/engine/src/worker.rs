//! A [`Generator`] on a thread of its own, for front ends that serve many clients.
//!
//! ```text
//! submit, abort -> inbox -> thread { take the inbox in, step } -> events -> sinks
//! ```
//! [`Worker`] is a handle that any thread may hold. Submitting checks the request and the limits of the queue and never
//! waits; what was taken gets exactly one event with [`TokenEvent::finish`], whatever happens to the engine: an error of a
//! step or a panic ends every request with a reason and leaves the worker dead.
//!
//! Invariant: a request is in the inbox, in the generator, or has had its last event; `sinks` of the thread are exactly those
//! in the generator.

use std::{
    collections::{HashMap, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use glimmer_tensor::Backend;

use crate::{
    EngineError, Flow, Generator, Rules, SequenceId,
    constraint::Constraint,
    request::{Cost, Finish, FinishReason, Request, RequestError, TokenEvent},
    stats::Snapshot,
};

/// Takes the events of one request, on the worker's thread: it must not wait.
pub trait EventSink: Send {
    /// Takes an event; false when nobody listens any more, which aborts the request.
    fn send(&self, event: TokenEvent) -> bool;
}

/// Limits and times of a [`Worker`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerSettings {
    /// Most requests that wait; further ones are refused.
    pub queued_requests: Option<usize>,
    /// Most prompt tokens still to be computed; requests beyond are refused.
    pub queued_tokens: Option<u64>,
    /// With work pending and no step finished for this long the worker counts as stuck.
    pub step_timeout: Duration,
}

impl Default for WorkerSettings {
    fn default() -> Self {
        Self { queued_requests: None, queued_tokens: None, step_timeout: Duration::from_secs(300) }
    }
}

/// What a loaded engine is, for start-up messages and front ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// What requests are held against.
    pub rules: Rules,
    /// Most sequences at once.
    pub sequences: usize,
    /// State checkpoints of the prefix cache; 0 without one.
    pub state_checkpoints: usize,
    /// Most rows of a step.
    pub rows: usize,
    /// Tokens a page.
    pub page_tokens: usize,
}

/// Why a request was not taken. Nothing is sent to its sink.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// A limit of the queue is reached.
    #[error("the server is busy: {limit}; try again in {retry_seconds} s")]
    Overloaded {
        /// Which limit, with its value.
        limit: String,
        /// Seconds until the backlog is worked off, at least 1.
        retry_seconds: u64,
    },
    /// The engine has ended, for this reason.
    #[error("the engine is not running: {0}")]
    Dead(String),
    /// The request itself cannot be served.
    #[error("{message}")]
    Invalid {
        /// Field of the request.
        field: &'static str,
        /// What is wrong and what is possible.
        message: String,
    },
}

/// Handle of an engine that runs on its own thread.
#[derive(Clone)]
pub struct Worker {
    shared: Arc<Shared>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("snapshot", &self.snapshot()).finish_non_exhaustive()
    }
}

struct Shared {
    settings: WorkerSettings,
    rules: Rules,
    state: Mutex<State>,
    news: Condvar,
}

struct State {
    next_id: u64,
    inbox: VecDeque<Submission>,
    aborts: Vec<u64>,
    reset: bool,
    shutdown: bool,
    /// Requests in the inbox, or taken from it and not started.
    waiting: usize,
    /// Prompt tokens of the inbox and of the generator that are still to be computed.
    backlog: u64,
    /// As of the last step.
    snapshot: Snapshot,
    /// Whether anything is to be done.
    busy: bool,
    /// When the last step finished, or work came to an idle thread.
    progress: Instant,
}

struct Submission {
    id: u64,
    request: Request,
    constraint: Option<Box<dyn Constraint>>,
    sink: Box<dyn EventSink>,
}

impl Worker {
    /// Starts the thread, loads the engine there and waits until it is loaded.
    ///
    /// # Errors
    /// Those of `load`; [`EngineError::Thread`] when the thread cannot be started or panics while loading.
    pub fn spawn<B, L>(load: L, settings: WorkerSettings) -> Result<(Self, Facts), EngineError>
    where
        B: Backend,
        L: FnOnce() -> Result<Generator<B>, EngineError> + Send + 'static,
    {
        let (report, loaded) = std::sync::mpsc::sync_channel(1);
        let run = move || {
            let mut generator = match load() {
                Ok(generator) => generator,
                Err(error) => {
                    // A caller that has gone needs no report.
                    let _gone = report.send(Err(error));
                    return;
                }
            };
            let shared = Arc::new(Shared::new(settings, &generator));
            if report.send(Ok((Arc::clone(&shared), generator.facts()))).is_ok() {
                Engine { shared: &shared, sinks: HashMap::new() }.run(&mut generator);
            }
        };
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(run)
            .map_err(|error| EngineError::Thread(error.to_string()))?;
        match loaded.recv() {
            Ok(loaded) => {
                let (shared, facts) = loaded?;
                Ok((Self { shared, thread: Arc::new(Mutex::new(Some(thread))) }, facts))
            }
            Err(_) => Err(EngineError::Thread("it panicked while it loaded the model".to_owned())),
        }
    }

    /// Queues a request. Never waits. The id is for [`Worker::abort`].
    ///
    /// # Errors
    /// [`Refused`]; the request is then not taken.
    pub fn submit(
        &self,
        request: Request,
        constraint: Option<Box<dyn Constraint>>,
        sink: Box<dyn EventSink>,
    ) -> Result<u64, Refused> {
        let invalid = |error: EngineError| Refused::Invalid { field: error.field(), message: error.to_string() };
        self.shared.rules.check(&request).map_err(invalid)?;
        let tokens = request.prompt.len() as u64;
        let mut state = self.shared.lock();
        if let Some(reason) = &state.snapshot.dead {
            return Err(Refused::Dead(reason.clone()));
        }
        let settings = &self.shared.settings;
        if let Some(most) = settings.queued_requests.filter(|&most| state.waiting >= most) {
            return Err(state.overloaded(format!("{most} requests are waiting (the limit)")));
        }
        // A prompt larger than the limit is taken when nothing else waits: otherwise it could never be served.
        if let Some(most) = settings.queued_tokens.filter(|&most| state.backlog > 0 && state.backlog + tokens > most) {
            let limit = format!("{} prompt tokens are waiting, the limit is {most}", state.backlog);
            return Err(state.overloaded(limit));
        }
        let id = state.next_id;
        state.next_id += 1;
        state.waiting += 1;
        state.backlog += tokens;
        state.inbox.push_back(Submission { id, request, constraint, sink });
        self.shared.wake(&mut state);
        Ok(id)
    }

    /// Ends a request before the next step, if it has not ended. Its sink gets a last event.
    pub fn abort(&self, id: u64) {
        let mut state = self.shared.lock();
        if state.snapshot.dead.is_none() {
            state.aborts.push(id);
            self.shared.wake(&mut state);
        }
    }

    /// Forgets all cached prefixes before the next step; what running sequences use stays theirs.
    pub fn reset_prefix_cache(&self) {
        let mut state = self.shared.lock();
        state.reset = true;
        self.shared.wake(&mut state);
    }

    /// What is going on.
    pub fn snapshot(&self) -> Snapshot {
        let state = self.shared.lock();
        let stuck = state.busy && state.progress.elapsed() > self.shared.settings.step_timeout;
        let waiting_capacity = state.snapshot.waiting_capacity + state.inbox.len();
        Snapshot { stuck, waiting_capacity, backlog_tokens: state.backlog, ..state.snapshot.clone() }
    }

    /// Aborts everything, ends the thread and waits for it. Later calls do nothing.
    pub fn shutdown(&self) {
        let mut state = self.shared.lock();
        state.shutdown = true;
        self.shared.wake(&mut state);
        drop(state);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic of the thread has been reported as the reason of its death.
            let _reported = thread.join();
        }
    }
}

impl State {
    fn overloaded(&self, limit: String) -> Refused {
        let rate = self.snapshot.prefill_rate;
        let seconds = if rate > 0.0 { (self.backlog as f64 / rate).ceil() } else { 1.0 };
        Refused::Overloaded { limit, retry_seconds: seconds.clamp(1.0, 86_400.0) as u64 }
    }
}

impl Shared {
    fn new<B: Backend>(settings: WorkerSettings, generator: &Generator<B>) -> Self {
        let state = State {
            next_id: 0,
            inbox: VecDeque::new(),
            aborts: Vec::new(),
            reset: false,
            shutdown: false,
            waiting: 0,
            backlog: 0,
            snapshot: generator.snapshot(),
            busy: false,
            progress: Instant::now(),
        };
        Self { settings, rules: *generator.rules(), state: Mutex::new(state), news: Condvar::new() }
    }

    /// The state is valid after every statement, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self, state: &mut State) {
        if !state.busy {
            state.busy = true;
            state.progress = Instant::now();
        }
        self.news.notify_one();
    }
}

/// What the inbox held.
struct Taken {
    submissions: VecDeque<Submission>,
    aborts: Vec<u64>,
    reset: bool,
    shutdown: bool,
}

/// The thread's side.
struct Engine<'a> {
    shared: &'a Shared,
    /// Requests in the generator: the worker's id and the sink.
    sinks: HashMap<SequenceId, (u64, Box<dyn EventSink>)>,
}

impl Engine<'_> {
    fn run<B: Backend>(mut self, generator: &mut Generator<B>) {
        let mut busy = false;
        loop {
            let taken = self.take(busy);
            if taken.shutdown {
                self.end(taken.submissions, &FinishReason::Abort, "it was shut down");
                return;
            }
            // The engine's data may be half changed after a panic; nothing touches it any more then.
            let result = catch_unwind(AssertUnwindSafe(|| self.turn(generator, taken)));
            busy = match result {
                Ok(Ok(busy)) => busy,
                Ok(Err(error)) => return self.die(&error.to_string()),
                Err(panic) => return self.die(&format!("a defect: {}", panic_text(&*panic))),
            };
            let snapshot = generator.snapshot();
            let mut state = self.shared.lock();
            let inbox: u64 = state.inbox.iter().map(|s| s.request.prompt.len() as u64).sum();
            state.waiting = state.inbox.len() + snapshot.waiting_capacity + snapshot.waiting_deferred;
            state.backlog = inbox + snapshot.backlog_tokens;
            state.snapshot = snapshot;
            state.progress = Instant::now();
        }
    }

    /// Waits for something to do and takes the inbox.
    fn take(&self, busy: bool) -> Taken {
        let mut state = self.shared.lock();
        state.busy = busy;
        while !busy && !state.shutdown && state.inbox.is_empty() && state.aborts.is_empty() && !state.reset {
            state.busy = false;
            state = self.shared.news.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if !state.busy {
            state.busy = true;
            state.progress = Instant::now();
        }
        Taken {
            submissions: std::mem::take(&mut state.inbox),
            aborts: std::mem::take(&mut state.aborts),
            reset: std::mem::take(&mut state.reset),
            shutdown: state.shutdown,
        }
    }

    /// Takes news in and makes one step: whether there is more to do.
    fn turn<B: Backend>(&mut self, generator: &mut Generator<B>, taken: Taken) -> Result<bool, EngineError> {
        if taken.reset {
            generator.reset_prefix_cache();
        }
        for Submission { id, request, constraint, sink } in taken.submissions {
            match generator.submit_constrained(request, constraint) {
                Ok(sequence) => {
                    self.sinks.insert(sequence, (id, sink));
                }
                Err(error) => send_end(&*sink, FinishReason::Error(RequestError::Internal(error.to_string()))),
            }
        }
        for id in taken.aborts {
            let sequence = self.sinks.iter().find(|(_, (own, _))| *own == id).map(|(&sequence, _)| sequence);
            let Some(sequence) = sequence else { continue };
            let finish = generator.abort(sequence);
            if let (Some((_, sink)), Some(finish)) = (self.sinks.remove(&sequence), finish) {
                // Whoever aborted need not listen.
                let _gone = sink.send(TokenEvent { finish: Some(finish), ..TokenEvent::default() });
            }
        }
        let sinks = &mut self.sinks;
        generator.step(&mut |sequence, event| {
            let last = event.finish.is_some();
            let listening = sinks.get(&sequence).is_some_and(|(_, sink)| sink.send(event));
            if last || !listening {
                sinks.remove(&sequence);
            }
            if listening { Flow::Continue } else { Flow::Stop }
        })
    }

    fn die(self, reason: &str) {
        let submissions = std::mem::take(&mut self.shared.lock().inbox);
        let error = RequestError::Internal(reason.to_owned());
        self.end(submissions, &FinishReason::Error(error), reason);
    }

    /// Marks the worker dead and ends every request.
    fn end(mut self, mut submissions: VecDeque<Submission>, finish: &FinishReason, reason: &str) {
        {
            let mut state = self.shared.lock();
            state.snapshot = Snapshot {
                dead: Some(reason.to_owned()),
                counters: std::mem::take(&mut state.snapshot.counters),
                ..Snapshot::default()
            };
            (state.busy, state.waiting, state.backlog) = (false, 0, 0);
            // Nothing enters the inbox from here on.
            submissions.append(&mut state.inbox);
        }
        let running = self.sinks.drain().map(|(_, (_, sink))| sink);
        for sink in running.chain(submissions.into_iter().map(|s| s.sink)) {
            send_end(&*sink, finish.clone());
        }
    }
}

fn send_end(sink: &dyn EventSink, reason: FinishReason) {
    let finish = Some(Finish { reason, cost: Cost::default() });
    // A sink whose owner has gone needs no end.
    let _gone = sink.send(TokenEvent { finish, ..TokenEvent::default() });
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without a text".to_owned())
}
