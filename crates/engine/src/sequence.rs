//! The life of a sequence.
//!
//! ```text
//! waiting --slot and pages--> prefill --last prompt row--> decode --stop--> finished
//! ```
//! Invariants: `computed` positions have final rows in the caches; a decoding sequence has exactly one token (the newest)
//! beyond them, which its next step feeds; `fold` of them are still records of the slot's ring. Finishing drops the
//! reservation, nothing else does.

use std::sync::Arc;

use glimmer_model::HiddenSource;

use crate::{
    pools::Reservation,
    request::{Cost, FinishReason, Logprobs, Request, Token, TokenEvent},
    sampling::History,
    speculate::Draft,
};

/// Identifies a sequence of a [`crate::Generator`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

/// What a consumer of events wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// More.
    Continue,
    /// No more of this sequence: it is aborted, and nothing follows.
    Stop,
}

/// Where a sequence is in its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// Prompt rows are left.
    Prefill,
    /// One row a step, and its drafts.
    Decode,
    /// Over.
    Finished(FinishReason),
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
    /// Features of the request's media, `[tokens, hidden]` each; empty once the prompt is computed.
    pub(crate) features: Vec<Arc<[f32]>>,
    /// The model's own end tokens, none when the request goes on behind them.
    pub(crate) ends: Arc<[u32]>,
    /// Chosen in the step being taken in, and the end if it came.
    pub(crate) event: TokenEvent,
    /// What the sequence cost so far.
    pub(crate) cost: Cost,
    /// Seconds of the engine's clock: submission, first step, first token.
    pub(crate) times: Times,
}

/// When a sequence reached its stations, in seconds of the engine's clock.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Times {
    pub(crate) submitted: f64,
    pub(crate) started: Option<f64>,
    pub(crate) first_token: Option<f64>,
}

impl Times {
    /// The seconds between the stations, for a request that ends now.
    pub(crate) fn cost(&self, cost: Cost, now: f64) -> Cost {
        let started = self.started.unwrap_or(now);
        let first = self.first_token.unwrap_or(now);
        Cost {
            queue_seconds: started - self.submitted,
            prefill_seconds: first - started,
            decode_seconds: now - first,
            ..cost
        }
    }
}

impl Sequence {
    /// New tokens so far.
    pub(crate) fn output(&self) -> &[u32] {
        &self.tokens[self.request.prompt.len()..]
    }

    /// Tokens that cannot be chosen as the output token of this index.
    pub(crate) fn banned(&self, index: usize) -> impl Iterator<Item = u32> + '_ {
        let early = index < self.request.limits.min_tokens as usize;
        let tokens = self.ends.iter().chain(&self.request.limits.stop_tokens);
        tokens.copied().filter(move |_| early)
    }

    /// Adds a chosen token. Sets the phase when it ends the sequence.
    pub(crate) fn push(&mut self, token: u32, logprobs: Option<Box<Logprobs>>) {
        self.tokens.push(token);
        self.history.push(token);
        self.event.tokens.push(Token { id: token, logprobs });
        if self.ends.contains(&token) {
            self.phase = Phase::Finished(FinishReason::EndToken);
        } else if self.request.limits.stop_tokens.contains(&token) {
            self.phase = Phase::Finished(FinishReason::StopToken(token));
        } else if self.tokens.len() >= self.limit {
            self.phase = Phase::Finished(FinishReason::Length);
        }
    }

    /// How many drafts the next step can use: with the token of its own it must not exceed the limit.
    pub(crate) fn useful_drafts(&self) -> usize {
        self.depth.min((self.limit - self.tokens.len()).saturating_sub(1))
    }

    pub(crate) fn is_finished(&self) -> bool {
        matches!(self.phase, Phase::Finished(_))
    }

    /// Features of the `ordinal`-th placeholder, `[hidden]`.
    pub(crate) fn feature(&self, ordinal: usize, hidden: usize) -> Option<&[f32]> {
        let mut row = ordinal;
        for features in &self.features {
            let rows = features.len() / hidden;
            if row < rows {
                return Some(&features[row * hidden..(row + 1) * hidden]);
            }
            row -= rows;
        }
        None
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
