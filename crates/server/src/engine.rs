//! The seam to the engine: requests in, token events out, a status to look at.
//!
//! The front end knows nothing of scheduling; it submits a request with the sending end of a channel and keeps a
//! [`Ticket`]. Invariant: dropping the ticket aborts the request, so that whatever ends an HTTP exchange (a closed socket,
//! a stop string, a failed write) frees the engine's resources without a special case.

use std::fmt;
use std::sync::Arc;

use glimmer_engine::constraint::{Constraint, Grammars};
use glimmer_engine::request::{Request, Token, TokenEvent};
use glimmer_text::ChatFormat;
use tokio::sync::mpsc::UnboundedSender;

/// An engine as the front end sees it.
pub trait Engine: Send + Sync + 'static {
    /// Queues a request. Never blocks.
    ///
    /// # Errors
    /// [`Refusal`] when it is not taken; nothing is sent to `events` then.
    fn submit(&self, asked: Asked, events: EventSender) -> Result<Ticket, Refusal>;

    /// What is going on.
    fn status(&self) -> Status;

    /// Counters since the start.
    fn counters(&self) -> Counters;

    /// Ends the engine and waits for its last step. Requests that still run are aborted.
    fn shutdown(&self) {}

    /// Drops the prefix cache; false if it is in use and stays.
    fn reset_prefix_cache(&self) -> bool {
        false
    }
}

/// A request, ready for the engine.
#[derive(Debug)]
pub struct Asked {
    /// What to do.
    pub request: Request,
    /// [`Request::structure`], compiled.
    pub constraint: Option<Box<dyn Constraint>>,
}

impl From<Request> for Asked {
    /// A request whose answer may have any shape.
    fn from(request: Request) -> Self {
        Self { request, constraint: None }
    }
}

/// Sending end of one answer. A request for several answers shares one channel; `choice` tells them apart.
#[derive(Clone, Debug)]
pub struct EventSender {
    choice: usize,
    channel: UnboundedSender<Parcel>,
}

/// An event on its way to the front end, in as little memory as can be: with a thousand streams none of it was touched lately, and
/// the most of what an event may carry it hardly ever carries.
#[derive(Debug)]
pub struct Parcel {
    choice: usize,
    load: Load,
}

/// Tokens that travel without an allocation.
const FEW: usize = 4;

#[derive(Debug)]
enum Load {
    /// The first so many ids, and nothing else.
    Ids(u8, [u32; FEW]),
    Whole(Box<TokenEvent>),
}

impl Parcel {
    fn new(choice: usize, event: TokenEvent) -> Self {
        let plain = event.finish.is_none() && event.prompt_logprobs.is_none() && event.tokens.len() <= FEW;
        if !plain || event.tokens.iter().any(|token| token.logprobs.is_some()) {
            return Self { choice, load: Load::Whole(Box::new(event)) };
        }
        let mut ids = [0; FEW];
        ids.iter_mut().zip(&event.tokens).for_each(|(id, token)| *id = token.id);
        Self { choice, load: Load::Ids(event.tokens.len() as u8, ids) }
    }

    /// The event, if it carries more than ids.
    #[must_use]
    pub fn whole(&self) -> Option<&TokenEvent> {
        match &self.load {
            Load::Ids(..) => None,
            Load::Whole(event) => Some(event),
        }
    }

    /// The number of the answer, and its event.
    #[must_use]
    pub fn open(self) -> (usize, TokenEvent) {
        let event = match self.load {
            Load::Whole(event) => *event,
            Load::Ids(count, ids) => {
                let tokens = ids[..usize::from(count)].iter().map(|&id| Token { id, logprobs: None }).collect();
                TokenEvent { tokens, ..TokenEvent::default() }
            }
        };
        (self.choice, event)
    }
}

impl EventSender {
    /// The sender of answer `choice`.
    #[must_use]
    pub fn new(choice: usize, channel: UnboundedSender<Parcel>) -> Self {
        Self { choice, channel }
    }

    /// Hands an event over; false when nobody listens any more.
    pub fn send(&self, event: TokenEvent) -> bool {
        self.channel.send(Parcel::new(self.choice, event)).is_ok()
    }
}

/// Possession of a running request; dropping it aborts the request within one step.
pub struct Ticket(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Ticket {
    /// A ticket that calls `abort` when dropped. Aborting a finished request must do nothing.
    #[must_use]
    pub fn new(abort: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(abort)))
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ticket")
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(abort) = self.0.take() {
            abort();
        }
    }
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A queue limit is reached.
    #[error("the server is busy: {reason}; try again in {retry_after_s} s")]
    Overloaded {
        /// Which limit, with its value.
        reason: String,
        /// Seconds until the backlog is worked off, at least 1.
        retry_after_s: u64,
    },
    /// The engine has ended; the process will, too.
    #[error("the engine is not running")]
    Dead,
    /// The request itself cannot be served.
    #[error("{message}")]
    Invalid {
        /// Field of the request.
        param: String,
        /// What is wrong and what is possible.
        message: String,
    },
    /// A passing trouble inside.
    #[error("{0}; try again")]
    Retryable(String),
}

/// A look at the engine.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Status {
    /// Running sequences.
    pub running: usize,
    /// Waiting for room.
    pub waiting_capacity: usize,
    /// Held back by policy.
    pub waiting_deferred: usize,
    /// Share of the cache pages in use, 0 to 1.
    pub kv_usage: f64,
    /// Tokens of prompts still to be computed.
    pub backlog_tokens: u64,
    /// Prompt tokens computed a second, lately; 0 before the first.
    pub prefill_rate: f64,
    /// Why steps are no longer recorded, if they should be.
    pub record_error: Option<String>,
    /// Why the engine has ended, if it has.
    pub dead: Option<String>,
    /// Whether work is pending and no step has finished for too long.
    pub stuck: bool,
}

impl Status {
    /// Milliseconds until a prompt of so many tokens would get its first token, by the work before it and the speed of late;
    /// `None` before anything was measured.
    #[must_use]
    pub fn estimated_first_token_ms(&self, prompt: usize) -> Option<u64> {
        let tokens = self.backlog_tokens as f64 + prompt as f64;
        (self.prefill_rate > 0.0).then(|| (1000.0 * tokens / self.prefill_rate).ceil() as u64)
    }
}

/// Counters of the engine since its start.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Counters {
    /// Tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Tokens found in it.
    pub prefix_hits: u64,
    /// Lookups that found a saved state to go on from.
    pub state_hits: u64,
    /// Lookups that found none, by reason.
    pub state_misses: Vec<(String, u64)>,
    /// Images looked up in the feature cache.
    pub media_queries: u64,
    /// Images found in it.
    pub media_hits: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Steps by number of tokens: for each bound of [`Counters::STEP_BOUNDS`], then above all.
    pub steps: [u64; 16],
    /// Tokens over all steps.
    pub step_tokens: u64,
    /// Verification steps with at least one draft, a sequence each.
    pub drafts: u64,
    /// Tokens proposed.
    pub draft_tokens: u64,
    /// Tokens accepted, by position in the draft.
    pub accepted_by_position: Vec<u64>,
    /// Page size in tokens.
    pub page_tokens: u64,
    /// Pages of the cache.
    pub pages: u64,
}

impl Counters {
    /// Upper bounds of the buckets of [`Counters::steps`].
    pub const STEP_BOUNDS: [u64; 15] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384];

    /// Tokens accepted.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.accepted_by_position.iter().sum()
    }
}

/// What the front end has to know of the model.
#[derive(Debug)]
pub struct Model {
    /// Tokenizer and chat template.
    pub format: Arc<ChatFormat>,
    /// Names under which clients may ask for it; the first is echoed. Never empty.
    pub served_names: Vec<String>,
    /// Where it was loaded from.
    pub root: String,
    /// Most tokens of prompt and answer together.
    pub max_model_len: usize,
    /// Rows of the embedding: token ids below are legal.
    pub vocab_size: usize,
    /// Sampling defaults of the checkpoint's `generation_config.json`.
    pub defaults: GenerationDefaults,
    /// Picture settings; `None` for a server that takes no images.
    pub processors: Option<glimmer_model::vision::Processors>,
    /// Makes the constraints of structured answers; `None` for a server that cannot constrain them.
    pub grammars: Option<Arc<dyn Grammars>>,
}

/// Sampling parameters where a request does not give them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GenerationDefaults {
    /// Temperature.
    pub temperature: f32,
    /// Nucleus.
    pub top_p: f32,
    /// Most probable tokens; `None` is all.
    pub top_k: Option<u32>,
    /// Least share of the best probability.
    pub min_p: f32,
    /// Repetition penalty.
    pub repetition_penalty: f32,
    /// Most new tokens.
    pub max_new_tokens: Option<u32>,
}

impl Default for GenerationDefaults {
    /// Values that change nothing.
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: None, min_p: 0.0, repetition_penalty: 1.0, max_new_tokens: None }
    }
}

impl GenerationDefaults {
    /// Takes over what a `generation_config.json` object says, key by key; other keys are ignored.
    #[must_use]
    pub fn with(mut self, config: &serde_json::Map<String, serde_json::Value>) -> Self {
        let number = |key: &str| config.get(key).and_then(serde_json::Value::as_f64).map(|v| v as f32);
        let count = |key: &str| config.get(key).and_then(serde_json::Value::as_u64).and_then(|v| u32::try_from(v).ok());
        self.temperature = number("temperature").unwrap_or(self.temperature);
        self.top_p = number("top_p").unwrap_or(self.top_p);
        self.min_p = number("min_p").unwrap_or(self.min_p);
        self.repetition_penalty = number("repetition_penalty").unwrap_or(self.repetition_penalty);
        self.max_new_tokens = count("max_new_tokens").or(self.max_new_tokens);
        let top_k = config.get("top_k").and_then(serde_json::Value::as_i64);
        self.top_k = top_k.map_or(self.top_k, |k| u32::try_from(k).ok().filter(|&k| k > 0));
        self
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use glimmer_engine::request::{Cost, Finish, FinishReason, Logprobs};
    use serde_json::json;

    use super::*;

    #[test]
    fn a_dropped_ticket_aborts_once() {
        let count = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&count);
        drop(Ticket::new(move || {
            seen.fetch_add(1, Ordering::SeqCst);
        }));
        assert_eq!(count.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn events_come_out_of_their_parcels_as_they_went_in() {
        let token = |id| Token { id, logprobs: None };
        let plain = |count: u32| TokenEvent { tokens: (0..count).map(token).collect(), ..TokenEvent::default() };
        let logprobs = Logprobs { id: 3, logprob: -1.0, rank: 1, top: vec![(3, -1.0)] };
        let finish = Finish { reason: FinishReason::StopToken(7), cost: Cost::default() };
        let events = (0..10).map(plain).chain([
            TokenEvent { finish: Some(finish), ..plain(1) },
            TokenEvent { prompt_logprobs: Some(vec![None]), ..plain(2) },
            TokenEvent { tokens: vec![token(1), Token { id: 3, logprobs: Some(Box::new(logprobs)) }], ..plain(0) },
        ]);
        for event in events {
            assert_eq!(Parcel::new(5, event.clone()).open(), (5, event));
        }
        assert!(size_of::<Parcel>() <= 32);
    }

    #[test]
    fn the_first_token_is_estimated_from_the_work_before_it() {
        let status = Status { backlog_tokens: 900, prefill_rate: 2000.0, ..Status::default() };
        assert_eq!(status.estimated_first_token_ms(100), Some(500));
        assert_eq!(Status::default().estimated_first_token_ms(100), None);
    }

    #[test]
    fn a_generation_config_overrides_key_by_key() {
        let file = json!({"temperature": 0.6, "top_k": 0, "eos_token_id": [1], "do_sample": false});
        let defaults = GenerationDefaults { top_k: Some(7), ..GenerationDefaults::default() };
        let read = defaults.with(file.as_object().unwrap());
        assert_eq!(read, GenerationDefaults { temperature: 0.6, top_k: None, ..defaults });
        let off = json!({"top_k": -1});
        assert_eq!(defaults.with(off.as_object().unwrap()).top_k, None);
    }
}
