//! What anybody asks of an engine, and what comes back: plain data.
//!
//! A [`Request`] is one continuation of one prompt; a client's `n` answers are `n` requests of the same
//! [`Request::group`]. Everything that shapes the tokens is in it, so that a request replays anywhere. The answer is a
//! sequence of [`TokenEvent`]s, one for each step that produced something; exactly the last one carries
//! [`TokenEvent::finish`].

use std::sync::Arc;

use glimmer_model::vision::Patches;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// A prompt to continue, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Id for logs, unique within the front end.
    pub id: String,
    /// Requests of one client call; an engine may let them share the prompt.
    pub group: u64,
    /// Token ids, media placeholders expanded; never empty.
    pub prompt: Arc<[u32]>,
    /// Images and clips, in the order of their placeholders.
    pub media: Arc<[Media]>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// When to stop.
    pub limits: Limits,
    /// Report the log-probability of each chosen token, and of this many best ones.
    pub logprobs: Option<u32>,
    /// Report the log-probabilities of the prompt's tokens, and of this many best ones; needs the whole prompt computed.
    pub prompt_logprobs: Option<u32>,
    /// Lower is earlier; only the priority policy reads it.
    pub priority: i64,
    /// Prompts with different salts share no cache.
    pub cache_salt: Option<String>,
    /// Shape of the answer behind the reasoning.
    pub structure: Option<Structure>,
    /// Most tokens of reasoning before its end is forced; `None` is no limit.
    pub thinking_budget: Option<u32>,
    /// Whether the prompt ends inside reasoning: a structure and a thinking budget start from here.
    pub starts_in_reasoning: bool,
    /// Index in the prompt where its last turn begins: a later turn of the same conversation shares the tokens before it.
    pub turn_start: Option<usize>,
    /// Most drafts a step; `None` takes the engine's depth.
    pub depth: Option<u32>,
}

impl Request {
    /// A greedy request for up to `max_tokens` tokens, without pictures.
    pub fn new(prompt: impl Into<Arc<[u32]>>, max_tokens: u32) -> Self {
        Self {
            id: String::new(),
            group: 0,
            prompt: prompt.into(),
            media: Arc::default(),
            sampling: Sampling::greedy(),
            limits: Limits { max_tokens, ..Limits::default() },
            logprobs: None,
            prompt_logprobs: None,
            priority: 0,
            cache_salt: None,
            structure: None,
            thinking_budget: None,
            starts_in_reasoning: false,
            turn_start: None,
            depth: None,
        }
    }

    /// The same request, going on behind the model's own end tokens.
    #[must_use]
    pub fn ignoring_eos(mut self) -> Self {
        self.limits.ignore_eos = true;
        self
    }
}

/// One image or clip of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Media {
    /// Image or clip.
    pub kind: MediaKind,
    /// The encoded file (PNG, JPEG, WebP, GIF, BMP), already checked to decode; may be empty, the engine does not read it.
    pub bytes: Arc<[u8]>,
    /// Identity in the caches of prefixes and features: equal digests mean equal patches.
    pub digest: [u8; 32],
    /// Its pixels, as the vision tower takes them.
    pub patches: Arc<Patches>,
    /// Index in the prompt of the first placeholder.
    pub start: usize,
    /// Placeholders, over all frames.
    pub tokens: usize,
}

impl Media {
    /// Media of one kind from patches alone, whose first placeholder is at `start`; the digest is that of the patches.
    pub fn from_patches(kind: MediaKind, patches: Arc<Patches>, start: usize) -> Self {
        let grid = [patches.grid.frames, patches.grid.height, patches.grid.width, patches.width, patches.merge];
        let mut hash = Sha256::new();
        grid.iter().for_each(|side| hash.update((*side as u64).to_le_bytes()));
        patches.values.iter().for_each(|value| hash.update(value.to_le_bytes()));
        let (digest, tokens) = (hash.finalize().into(), patches.tokens());
        Self { kind, bytes: Arc::default(), digest, patches, start, tokens }
    }
}

/// Kind of a [`Media`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MediaKind {
    /// One picture.
    Image,
    /// An animation: several frame pairs, each a run of placeholders.
    Video,
}

/// How a token is chosen, applied in the order bias, allowed and bad words, penalties, temperature, `min_p`, `top_k` and
/// `top_p`, draw.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// 0 to 2; below 1e-5 the most probable token is taken.
    pub temperature: f32,
    /// Mass of the most probable tokens to keep, in (0, 1].
    pub top_p: f32,
    /// Number of the most probable tokens to keep; `None` keeps all.
    pub top_k: Option<u32>,
    /// Tokens below this share of the best probability are dropped, in [0, 1].
    pub min_p: f32,
    /// Subtracted once for each token that the output has, in [-2, 2].
    pub presence_penalty: f32,
    /// Subtracted for each occurrence in the output, in [-2, 2].
    pub frequency_penalty: f32,
    /// Divides (positive) or multiplies (negative) logits of tokens in the prompt or output; 1 is none.
    pub repetition_penalty: f32,
    /// Added to logits, each within [-100, 100].
    pub logit_bias: Vec<(u32, f32)>,
    /// If given, only these tokens may be chosen.
    pub allowed_tokens: Option<Vec<u32>>,
    /// Token sequences whose last token is forbidden where the others precede it.
    pub bad_words: Vec<Vec<u32>>,
    /// Seed of this request's random draws; without one the engine takes its own.
    pub seed: Option<i64>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: None,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            allowed_tokens: None,
            bad_words: Vec::new(),
            seed: None,
        }
    }
}

impl Sampling {
    /// The most probable token, nothing else switched on.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }
}

/// When an answer ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Most tokens, at least 1.
    pub max_tokens: u32,
    /// Before this many tokens neither the model's own end tokens nor `stop_tokens` can be chosen.
    pub min_tokens: u32,
    /// Go on behind the model's own end tokens.
    pub ignore_eos: bool,
    /// Further tokens that end the answer.
    pub stop_tokens: Vec<u32>,
}

impl Default for Limits {
    /// As many tokens as the context holds, ended by the model's own end tokens alone.
    fn default() -> Self {
        Self { max_tokens: u32::MAX, min_tokens: 0, ignore_eos: false, stop_tokens: Vec::new() }
    }
}

/// Shape that the answer must have, behind its reasoning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Structure {
    /// Any JSON object.
    JsonObject,
    /// JSON of this schema (JSON text).
    JsonSchema(String),
    /// Text that the regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Text of this grammar.
    Grammar(String),
    /// A structural tag description (JSON text).
    StructuralTag(String),
    /// One or more tool calls in the model's own markup.
    ToolCalls {
        /// Tool definitions (JSON text each).
        tools: Vec<String>,
        /// The only function that may be called.
        only: Option<String>,
        /// At most one call.
        single: bool,
    },
}

/// What one step produced for a request.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct TokenEvent {
    /// Tokens, in order; with speculation there may be several. The token that ended the answer is among them.
    pub tokens: Vec<Token>,
    /// Log-probabilities of the prompt, with the first event, when asked for: `None` for the first token.
    pub prompt_logprobs: Option<Vec<Option<Logprobs>>>,
    /// The end; nothing follows.
    pub finish: Option<Finish>,
}

/// A token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Its log-probability and the best ones, when asked for.
    pub logprobs: Option<Box<Logprobs>>,
}

/// Log-probabilities at one position, of the model before temperature and penalties.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Token at this position.
    pub id: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// Rank of the token, from 1.
    pub rank: u32,
    /// Best tokens, most probable first.
    pub top: Vec<(u32, f32)>,
}

/// How an answer ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// Why.
    pub reason: FinishReason,
    /// What the request cost.
    pub cost: Cost,
}

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// One of the model's own end tokens, the last token.
    EndToken,
    /// One of [`Limits::stop_tokens`], the last token.
    StopToken(u32),
    /// [`Limits::max_tokens`] or the context.
    Length,
    /// Cancelled by the engine.
    Abort,
    /// The request failed; others go on.
    Error(RequestError),
}

/// Why a request failed behind its admission.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum RequestError {
    /// A fault of the engine; the text goes to the log, never to the client.
    #[error("internal: {0}")]
    Internal(String),
    /// The same request may succeed later or elsewhere.
    #[error("retry: {0}")]
    Retryable(String),
    /// What the request demands contradicts itself: it leaves no token at a position of its text.
    #[error("the request excludes every token at position {0}")]
    Excluded(usize),
}

/// Where a request's time went, and what its prompt took.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Cost {
    /// Seconds between submission and the first step.
    pub queue_seconds: f64,
    /// Seconds between the first step and the first token.
    pub prefill_seconds: f64,
    /// Seconds between the first and the last token.
    pub decode_seconds: f64,
    /// Prompt tokens taken from the prefix cache.
    pub cached_tokens: u32,
    /// How often the request was preempted.
    pub preemptions: u32,
    /// Verifying steps with at least one draft.
    pub draft_steps: u32,
    /// Drafts judged.
    pub drafted: u32,
    /// Of these, the ones that stood.
    pub accepted: u32,
}

/// An answer collected from its events, for consumers that do not stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// The new tokens, without the token that ended the answer.
    pub tokens: Vec<u32>,
    /// Log-probabilities of `tokens`, when asked for.
    pub logprobs: Vec<Logprobs>,
    /// Log-probabilities of the prompt, when asked for.
    pub prompt_logprobs: Option<Vec<Option<Logprobs>>>,
    /// Why it ended.
    pub finish: FinishReason,
    /// What it cost.
    pub cost: Cost,
}

/// Collects the events of one answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Collector {
    tokens: Vec<Token>,
    prompt_logprobs: Option<Vec<Option<Logprobs>>>,
}

impl Collector {
    /// Takes an event in; gives the answer when it was the last one.
    pub fn take(&mut self, event: TokenEvent) -> Option<Output> {
        self.tokens.extend(event.tokens);
        if event.prompt_logprobs.is_some() {
            self.prompt_logprobs = event.prompt_logprobs;
        }
        let finish = event.finish?;
        if matches!(finish.reason, FinishReason::EndToken | FinishReason::StopToken(_)) {
            self.tokens.pop();
        }
        let tokens = std::mem::take(&mut self.tokens);
        Some(Output {
            tokens: tokens.iter().map(|token| token.id).collect(),
            logprobs: tokens.into_iter().filter_map(|token| token.logprobs.map(|l| *l)).collect(),
            prompt_logprobs: self.prompt_logprobs.take(),
            finish: finish.reason,
            cost: finish.cost,
        })
    }
}
