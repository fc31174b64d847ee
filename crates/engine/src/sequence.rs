//! A request and the life of its sequence.
//!
//! ```text
//! waiting --slot and pages--> prefill --last prompt row--> decode --stop--> finished
//! ```
//! Invariants: `computed` positions have final rows in the caches; a decoding sequence has exactly one token (the newest)
//! beyond them, which its next step feeds; `fold` of them are still records of the slot's ring. Finishing drops the
//! reservation, nothing else does.

use std::collections::BTreeSet;

use glimmer_model::HiddenSource;

use crate::{
    pools::Reservation,
    sampling::{History, SamplingParams},
    speculate::Draft,
    stats::DraftCounts,
};

/// Identifies a sequence of a [`crate::Generator`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

/// What to generate from, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The prompt, image placeholders expanded.
    pub prompt: Vec<u32>,
    /// Image features `[placeholders, hidden]`, in prompt order.
    pub features: Vec<f32>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most new tokens; fewer when the context ends before.
    pub max_tokens: usize,
    /// Stop tokens cannot be chosen before so many new tokens.
    pub min_tokens: usize,
    /// Stop tokens besides the model's own.
    pub stop_tokens: Vec<u32>,
    /// Goes on at the model's own stop tokens.
    pub ignore_eos: bool,
    /// Draft depth; `None` takes the generator's.
    pub depth: Option<usize>,
}

impl Request {
    /// A greedy request for up to `max_tokens` tokens.
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            prompt,
            features: Vec::new(),
            sampling: SamplingParams::default(),
            max_tokens,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            ignore_eos: false,
            depth: None,
        }
    }
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A stop token was chosen (it is not part of the output).
    StopToken(u32),
    /// The most tokens, or the end of the context.
    Length,
    /// The consumer of the events said so.
    Consumer,
    /// [`crate::Generator::abort`].
    Aborted,
}

/// What a consumer of events wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// More.
    Continue,
    /// No more of this sequence; the token just seen is the last.
    Stop,
}

/// Something happened to a sequence.
#[derive(Debug, Clone, PartialEq)]
pub enum TokenEvent {
    /// A token of the output.
    Token {
        /// The sequence.
        sequence: SequenceId,
        /// The token.
        token: u32,
        /// Its index in the output.
        index: usize,
    },
    /// The end; nothing follows for this sequence.
    Finished {
        /// The sequence.
        sequence: SequenceId,
        /// The result.
        output: Output,
    },
}

/// The result of a sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// The new tokens, without a stop token.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Drafts judged and accepted.
    pub drafts: DraftCounts,
}

/// Where a sequence is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Prompt rows are left.
    Prefill,
    /// One row a step, and its drafts.
    Decode,
    /// Over.
    Finished(Finish),
}

/// A sequence that holds a slot and pages.
#[derive(Debug)]
pub struct Sequence {
    pub(crate) id: SequenceId,
    pub(crate) request: Request,
    /// Prompt and output.
    pub(crate) tokens: Vec<u32>,
    /// Most tokens that `tokens` may reach.
    pub(crate) limit: usize,
    /// Positions with final rows in the caches.
    pub(crate) computed: usize,
    /// Of these, the last so many are records that the next step folds.
    pub(crate) fold: usize,
    /// Proposals for the positions after the newest token.
    pub(crate) drafts: Vec<Draft>,
    /// Most drafts a step.
    pub(crate) depth: usize,
    pub(crate) phase: Phase,
    pub(crate) reservation: Reservation,
    pub(crate) history: History,
    /// Positions of image placeholders, ascending; the index is the feature's row.
    pub(crate) placeholders: Vec<usize>,
    /// All stop tokens.
    pub(crate) stops: BTreeSet<u32>,
    /// `stops` as a list, for bans.
    pub(crate) stop_list: Vec<u32>,
    pub(crate) counts: DraftCounts,
}

impl Sequence {
    /// New tokens so far.
    pub(crate) fn output(&self) -> &[u32] {
        &self.tokens[self.request.prompt.len()..]
    }

    /// Tokens that cannot be chosen as the output token of this index.
    pub(crate) fn banned(&self, index: usize) -> &[u32] {
        if index < self.request.min_tokens { &self.stop_list } else { &[] }
    }

    /// Adds a chosen token; gives whether it became part of the output. Sets the phase when it ends the sequence.
    pub(crate) fn push(&mut self, token: u32) -> bool {
        if self.stops.contains(&token) {
            self.phase = Phase::Finished(Finish::StopToken(token));
            return false;
        }
        self.tokens.push(token);
        self.history.push(token);
        if self.tokens.len() >= self.limit {
            self.phase = Phase::Finished(Finish::Length);
        }
        true
    }

    /// How many drafts the next step can use: with the token of its own it must not exceed the limit.
    pub(crate) fn useful_drafts(&self) -> usize {
        self.depth.min((self.limit - self.tokens.len()).saturating_sub(1))
    }

    pub(crate) fn is_finished(&self) -> bool {
        matches!(self.phase, Phase::Finished(_))
    }

    pub(crate) fn into_output(self, finish: Finish) -> Output {
        Output { tokens: self.output().to_vec(), finish, prompt_tokens: self.request.prompt.len(), drafts: self.counts }
    }
}

/// Rows of the draft layer for one sequence, relative to a step of the trunk or of the draft layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trail {
    /// Index of the sequence among the running ones.
    pub(crate) index: usize,
    /// First position.
    pub(crate) position: usize,
    /// Number of rows.
    pub(crate) rows: usize,
    /// Row of the first hidden state in its step.
    pub(crate) source: u32,
    /// Which step.
    pub(crate) from: HiddenSource,
}
