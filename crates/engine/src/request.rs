//! What a front end asks of an engine, and what it gets back: plain data, no behaviour.
//!
//! A [`Request`] is one continuation of one prompt; a client's `n` answers are `n` requests of the same
//! [`Request::group`]. Everything that shapes the tokens is in it, so that a request replays anywhere. The answer is a
//! sequence of [`TokenEvent`]s, one for each step that produced something; exactly the last one carries
//! [`TokenEvent::finish`].

use std::sync::Arc;

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
}

/// One image or clip of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Media {
    /// Image or clip.
    pub kind: MediaKind,
    /// The encoded file (PNG, JPEG, WebP, GIF, BMP), already checked to decode.
    pub bytes: Arc<[u8]>,
    /// SHA-256 of `bytes`: identity in the prefix cache.
    pub digest: [u8; 32],
    /// Index in the prompt of the first placeholder.
    pub start: usize,
    /// Placeholders, over all frames.
    pub tokens: usize,
}

/// Kind of a [`Media`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MediaKind {
    /// One picture.
    Image,
    /// An animation: several frame pairs, each a run of placeholders.
    Video,
}

/// How a token is chosen, applied in the order bias, allowed and bad words, penalties, temperature, `min_p`, `top_k` and
/// `top_p`, draw.
#[derive(Clone, Debug, PartialEq)]
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

/// When an answer ends.
#[derive(Clone, Debug, PartialEq, Eq)]
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

/// Shape that the answer must have, behind its reasoning.
#[derive(Clone, Debug, PartialEq)]
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
#[derive(Clone, Debug, PartialEq, Eq)]
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
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// A fault of the engine; the text goes to the log, never to the client.
    #[error("internal: {0}")]
    Internal(String),
    /// The same request may succeed later or elsewhere.
    #[error("retry: {0}")]
    Retryable(String),
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
}
