//! What all routes share: the engine, the model's facts, the options and the counters.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use glimmer_text::{ParseOptions, UnknownTools};
use serde_json::{Map, Value};
use tokio::sync::Notify;

use crate::engine::{Engine, Model};
use crate::metrics::Metrics;

/// State of the server, shared by all connections.
pub struct App {
    /// Where requests go.
    pub engine: Arc<dyn Engine>,
    /// The served model.
    pub model: Model,
    /// How to serve it.
    pub options: Options,
    /// Counters of the front end.
    pub metrics: Metrics,
    /// Seconds since 1970 at the start.
    pub started: u64,
    ids: Ids,
    draining: AtomicBool,
    in_flight: AtomicUsize,
    idle: Notify,
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("App").field("model", &self.model.served_names).finish_non_exhaustive()
    }
}

/// Options of the HTTP front end.
#[derive(Clone, Debug)]
pub struct Options {
    /// Accepted keys; none leaves the server open.
    pub api_keys: Vec<String>,
    /// Origins of browsers that may call; `*` is all.
    pub allowed_origins: Vec<String>,
    /// Methods that they may use; `*` is all.
    pub allowed_methods: Vec<String>,
    /// Headers that they may send; `*` is all.
    pub allowed_headers: Vec<String>,
    /// Whether they may send credentials.
    pub allow_credentials: bool,
    /// Role of answers.
    pub response_role: String,
    /// Separate reasoning from content.
    pub reasoning: bool,
    /// Recognise tool calls.
    pub tools: bool,
    /// Let the model decide whether to call.
    pub auto_tool_choice: bool,
    /// Calls of functions that the request does not declare.
    pub unknown_tools: UnknownTools,
    /// Report an answer that never closed its reasoning as content, too.
    pub answer_without_think_is_content: bool,
    /// Template variables below those of the request.
    pub template_kwargs: Map<String, Value>,
    /// Renames values of `reasoning_effort`.
    pub effort_map: Map<String, Value>,
    /// Tokens of reasoning where a request gives no budget.
    pub thinking_budget: Option<u32>,
    /// Most log-probabilities of a position; `None` is the vocabulary.
    pub max_logprobs: Option<u32>,
    /// Most answers to one request.
    pub max_answers: usize,
    /// Most images in a request.
    pub max_images: usize,
    /// Most clips in a request.
    pub max_videos: usize,
    /// Hosts from which images are fetched; `*` is every public one.
    pub media_domains: Vec<String>,
    /// Longest body.
    pub max_body_bytes: usize,
    /// Tokens in an event of a stream; the first and the last come at once.
    pub stream_interval: u32,
    /// Time after which a silent stream gets a comment.
    pub keep_alive: Option<Duration>,
    /// Report cached tokens.
    pub prompt_tokens_details: bool,
    /// End every stream with the usage.
    pub force_include_usage: bool,
    /// Add a request id to every response.
    pub request_id_headers: bool,
    /// Log every request.
    pub log_requests: bool,
    /// Log every answer.
    pub log_outputs: bool,
    /// Log throughput every ten seconds.
    pub log_stats: bool,
    /// Whether requests may have a priority.
    pub priority_policy: bool,
    /// Offer routes for development.
    pub development: bool,
    /// How long running requests may go on after the signal to stop.
    pub shutdown_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        let all = || vec!["*".to_owned()];
        Self {
            api_keys: Vec::new(),
            allowed_origins: all(),
            allowed_methods: all(),
            allowed_headers: all(),
            allow_credentials: false,
            response_role: "assistant".to_owned(),
            reasoning: false,
            tools: false,
            auto_tool_choice: false,
            unknown_tools: UnknownTools::Forward,
            answer_without_think_is_content: true,
            template_kwargs: Map::new(),
            effort_map: Map::new(),
            thinking_budget: None,
            max_logprobs: Some(20),
            max_answers: 128,
            max_images: 999,
            max_videos: 999,
            media_domains: Vec::new(),
            max_body_bytes: 64 << 20,
            stream_interval: 1,
            keep_alive: Some(Duration::from_secs(15)),
            prompt_tokens_details: false,
            force_include_usage: false,
            request_id_headers: false,
            log_requests: false,
            log_outputs: false,
            log_stats: true,
            priority_policy: false,
            development: false,
            shutdown_timeout: Duration::from_secs(30),
        }
    }
}

impl Options {
    /// Switches of the answer parser, before a request's own.
    #[must_use]
    pub fn parse_options(&self) -> ParseOptions {
        ParseOptions {
            reasoning: self.reasoning,
            unknown_tools: self.unknown_tools,
            answer_without_think_is_content: self.answer_without_think_is_content,
            ..ParseOptions::default()
        }
    }
}

impl App {
    /// A server over an engine.
    #[must_use]
    pub fn new(engine: Arc<dyn Engine>, model: Model, options: Options) -> Arc<Self> {
        let metrics = Metrics::new(&model.served_names[0], model.max_model_len);
        Arc::new(Self {
            engine,
            model,
            options,
            metrics,
            started: unix_seconds(),
            ids: Ids::new(),
            draining: AtomicBool::new(false),
            in_flight: AtomicUsize::new(0),
            idle: Notify::new(),
        })
    }

    /// A fresh id: 32 hexadecimal digits.
    #[must_use]
    pub fn fresh_id(&self) -> String {
        self.ids.next()
    }

    /// The name under which answers go out.
    #[must_use]
    pub fn served_name(&self) -> &str {
        &self.model.served_names[0]
    }

    /// Refuses new requests from now on.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    /// Whether new requests are refused.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Requests whose answers are not complete.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::SeqCst)
    }

    /// Waits until no request is in flight.
    pub async fn idle(&self) {
        loop {
            let notified = self.idle.notified();
            if self.in_flight() == 0 {
                return;
            }
            notified.await;
        }
    }

    /// Counts a request until the guard is dropped.
    #[must_use]
    pub fn enter(self: &Arc<Self>) -> InFlight {
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        InFlight(Arc::clone(self))
    }
}

/// A request in flight.
#[derive(Debug)]
pub struct InFlight(Arc<App>);

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.0.in_flight.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}

/// Unguessable-enough ids without a source of randomness in the dependencies: a keyed hash of a counter, the key being
/// the process's own random hash seed.
#[derive(Debug)]
struct Ids {
    keys: [std::hash::RandomState; 2],
    count: AtomicU64,
}

impl Ids {
    fn new() -> Self {
        Self { keys: [std::hash::RandomState::new(), std::hash::RandomState::new()], count: AtomicU64::new(0) }
    }

    fn next(&self) -> String {
        use std::hash::BuildHasher as _;
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        let [high, low] = [0, 1].map(|half: usize| self.keys[half].hash_one((count, half)));
        format!("{high:016x}{low:016x}")
    }
}

/// Seconds since 1970.
#[must_use]
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ_and_have_one_length() {
        let ids = Ids::new();
        let drawn: std::collections::HashSet<String> = (0..1000).map(|_| ids.next()).collect();
        assert_eq!(drawn.len(), 1000);
        assert!(drawn.iter().all(|id| id.len() == 32));
        assert_ne!(Ids::new().next(), Ids::new().next());
    }
}
