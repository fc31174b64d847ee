//! The life of a sequence.
//!
//! ```text
//! waiting --slot, pages of a prefix hit--> prefill --newest token's row--> decode --end--> finished
//!    ^----------------------- preemption: slot and pages go, tokens stay ----------'
//! ```
//! Invariants: a sequence runs exactly while it has a [`Place`]; `computed` positions have final rows in the caches; a
//! decoding sequence has exactly one token (the newest) beyond them, which its next step feeds; `fold` of them are still
//! records of the slot's ring. Everything that shapes tokens is in the [`Answer`], which preemption leaves alone. Whatever
//! ends a sequence drops its place, and with it slot and pages come back.

use std::sync::Arc;

use glimmer_model::HiddenSource;

use crate::{
    pools::{PageTable, Slot},
    prefix::{PageKeys, Stops, Ticket},
    request::{Cost, FinishReason, Logprobs, Request, TokenEvent},
    rows::Answer,
    schedule::View,
    speculate::Draft,
};

/// Identifies a sequence of a [`crate::Generator`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
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
    /// Known tokens before the newest one are left to compute.
    Prefill,
    /// One row a step, and its drafts.
    Decode,
    /// Over.
    Finished(FinishReason),
}

/// What a running sequence holds of the caches.
#[derive(Debug)]
pub struct Place {
    pub(crate) slot: Slot,
    pub(crate) table: PageTable,
}

/// A request on its way to an answer.
#[derive(Debug)]
pub struct Sequence {
    pub(crate) id: SequenceId,
    pub(crate) request: Request,
    /// Prompt and output.
    pub(crate) tokens: Vec<u32>,
    /// What decides about its tokens.
    pub(crate) answer: Answer,
    /// Most drafts a step.
    pub(crate) depth: usize,
    /// Positions of media placeholders, ascending; the index is the feature's row.
    pub(crate) placeholders: Vec<usize>,
    /// Names of its pages; `None` when it does not use the prefix cache.
    pub(crate) keys: Option<PageKeys>,
    /// Log-probabilities of the prompt so far, where they are asked for and not handed out.
    pub(crate) prompt_logprobs: Option<Vec<Option<Logprobs>>>,
    /// Chosen in the step being taken in, and the end if it came.
    pub(crate) event: TokenEvent,
    /// What the sequence cost so far.
    pub(crate) cost: Cost,
    pub(crate) times: Times,
    pub(crate) phase: Phase,
    /// The state saved last while decoding, and its position.
    pub(crate) saved: (Option<Ticket>, usize),
    // From here on: of the present run, fresh after preemption.
    pub(crate) place: Option<Place>,
    /// Positions with final rows in the caches.
    pub(crate) computed: usize,
    /// Of these, the last so many are records that the next step folds.
    pub(crate) fold: usize,
    /// Tokens that the prefix hit gave.
    pub(crate) cached: usize,
    /// Where the state of the known tokens is saved on the way.
    pub(crate) stops: Stops,
    /// Proposals for the positions after the newest token.
    pub(crate) drafts: Vec<Draft>,
    /// Drafts to propose in this step.
    pub(crate) wanted: usize,
    /// Features of the request's media, `[tokens, hidden]` each; empty for media that need not be computed.
    pub(crate) features: Vec<Arc<[f32]>>,
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
    /// A waiting sequence.
    pub(crate) fn new(id: SequenceId, request: Request, answer: Answer, submitted: f64) -> Self {
        Self {
            id,
            tokens: request.prompt.to_vec(),
            answer,
            depth: 0,
            placeholders: Vec::new(),
            keys: None,
            prompt_logprobs: request.prompt_logprobs.map(|_| vec![None]),
            event: TokenEvent::default(),
            cost: Cost::default(),
            times: Times { submitted, ..Times::default() },
            phase: Phase::Prefill,
            saved: (None, 0),
            place: None,
            computed: 0,
            fold: 0,
            cached: 0,
            stops: Stops::new(request.prompt.len(), request.turn_start),
            drafts: Vec::new(),
            wanted: 0,
            features: Vec::new(),
            request,
        }
    }

    /// Slot and page table, while it runs.
    pub(crate) fn place(&self) -> Option<(u32, &[u32])> {
        self.place.as_ref().map(|place| (place.slot.id(), place.table.ids()))
    }

    /// How many drafts can be of use behind the newest token.
    pub(crate) fn useful_drafts(&self) -> usize {
        self.depth.min(self.answer.useful_drafts(self.tokens.len()))
    }

    /// Whether drafts are to be proposed behind its newest token.
    pub(crate) fn drafting(&self) -> bool {
        self.phase == Phase::Decode && self.wanted > 0
    }

    pub(crate) fn is_finished(&self) -> bool {
        matches!(self.phase, Phase::Finished(_))
    }

    /// Whether rows of the prompt are still to be scored.
    pub(crate) fn is_scored(&self) -> bool {
        self.prompt_logprobs.as_ref().is_some_and(|done| done.len() < self.request.prompt.len())
    }

    /// Tokens of the prompt that are still to be computed.
    pub(crate) fn backlog(&self) -> usize {
        self.request.prompt.len().saturating_sub(self.computed)
    }

    /// Features of the `ordinal`-th placeholder, `[hidden]`.
    pub(crate) fn feature(&self, ordinal: usize, hidden: usize) -> Option<&[f32]> {
        let mut row = ordinal;
        for (media, features) in self.request.media.iter().zip(&self.features) {
            if row < media.tokens {
                return features.get(row * hidden..(row + 1) * hidden);
            }
            row -= media.tokens;
        }
        None
    }

    /// What the scheduler sees. `hit` is what a waiting sequence would get from the prefix cache: tokens, and pages of them
    /// that others hold.
    pub(crate) fn view(&self, hit: (usize, usize), most_logits: usize) -> View {
        let table = self.place.as_ref().map(|place| &place.table);
        let prefill = self.phase == Phase::Prefill;
        // A waiting sequence begins behind its hit.
        let from = self.computed.max(hit.0);
        View {
            id: self.id,
            arrival: self.times.submitted,
            priority: self.request.priority,
            prompt: self.request.prompt.len(),
            known: self.tokens.len(),
            computed: self.computed,
            drafts: self.drafts.len(),
            decoding: self.phase == Phase::Decode,
            pages: table.map_or(0, PageTable::len),
            shared: table.map_or(hit.1, PageTable::shared),
            next_stop: self.keys.as_ref().filter(|_| prefill).and_then(|_| self.stops.after(from)),
            max_rows: self.is_scored().then_some(most_logits),
            cached: if table.is_some() { self.cached } else { hit.0 },
            preempted: self.cost.preemptions,
            max_len: self.answer.limit(),
        }
    }

    /// Gives up slot and pages; everything known stays.
    pub(crate) fn preempt(&mut self) {
        self.place = None;
        (self.computed, self.fold, self.cached) = (0, 0, 0);
        self.drafts.clear();
        self.features.clear();
        self.phase = Phase::Prefill;
        self.cost.preemptions += 1;
        self.stops = Stops::new(self.tokens.len(), self.request.turn_start);
        if self.is_scored() {
            // The rows come again from the first one on.
            self.prompt_logprobs = Some(vec![None]);
        }
    }
}

/// Finds sequences by their ids. A decision names them nearly in the order in which they stand, so looking on from the last
/// place finds the next one at once.
#[derive(Debug, Default)]
pub(crate) struct Cursor(usize);

impl Cursor {
    pub(crate) fn find(&mut self, sequences: &[Sequence], id: SequenceId) -> Option<usize> {
        let from = self.0.min(sequences.len());
        let found = (from..sequences.len()).chain(0..from).find(|&index| sequences[index].id == id)?;
        self.0 = found + 1;
        Some(found)
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
