//! Who is admitted, preempted, refused, and which rows the next step computes. Pure: views, limits and the time in, a
//! [`Decision`] out; no clock, no pool, no model.
//!
//! One step has no phase: every sequence wants its computed tokens to catch up with its known ones.
//!
//! | file | idea |
//! |---|---|
//! | `schedule/step.rs` | what is left to give in this step, and chunks of prompts |
//! | `schedule/decode.rs` | decoding rows come first; who gives way when pages run out |
//! | `schedule/prompt.rs` | how many prompt rows a step takes, and who gets them |
//! | `schedule/admit.rs` | the queue: ledger of pages, lanes, refusals |
//!
//! Invariants:
//! - one function, [`crate::pools::need`], says what tokens cost; [`boot_check`], admission and growth all use it;
//! - rows, wanted logits, pages, slots and sequences never exceed [`Resources`];
//! - the first sequence in order is never preempted for another one, so something always advances;
//! - when nothing runs, the head of the queue is admitted or refused in this very step: nothing waits for what cannot come.

mod admit;
mod decode;
mod prompt;
mod step;

use crate::{
    SequenceId,
    policy::{Order, Policy},
    pools::{Need, need},
    rates::Rates,
};

pub use step::Lane;

/// What the scheduler sees of a sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct View {
    /// Which one.
    pub id: SequenceId,
    /// When it was submitted, in seconds of the clock of `now`; a preempted sequence keeps it.
    pub arrival: f64,
    /// Smaller is earlier, under [`Order::Priority`].
    pub priority: i64,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens of prompt and output, drafts not included.
    pub known: usize,
    /// Tokens whose rows are final; 0 while it waits.
    pub computed: usize,
    /// Proposals behind the newest token.
    pub drafts: usize,
    /// All known tokens but the newest, which is an output token, are computed.
    pub decoding: bool,
    /// Pages held, those shared with others included; 0 while it waits.
    pub pages: usize,
    /// Of its pages (while it waits: of those of its prefix hit) so many are held by others or by the hit's own guards. They
    /// are not among [`Resources::free_pages`], cost nothing at admission and do not come back on preemption.
    pub shared: usize,
    /// Position that a chunk of the prompt may reach but not cross in this step.
    pub next_stop: Option<usize>,
    /// Every row wants its logits (log-probabilities of the prompt), and at most so many fit a step.
    pub max_rows: Option<usize>,
    /// Tokens that a prefix hit would give while it waits, or gave at admission; a multiple of a page, less than `known`.
    pub cached: usize,
    /// How often it was preempted.
    pub preempted: u32,
    /// Most tokens that it may come to have.
    pub max_len: usize,
}

/// All sequences that have not ended.
#[derive(Debug, Clone, Copy, Default)]
pub struct Views<'a> {
    /// Those that hold a slot, in any order.
    pub running: &'a [View],
    /// Those that do not, in any order.
    pub waiting: &'a [View],
}

/// What there is to give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resources {
    /// Most rows of a step.
    pub rows: usize,
    /// Most rows with logits.
    pub logits: usize,
    /// Slots that no sequence holds.
    pub free_slots: usize,
    /// Pages that no sequence holds: free ones and those that the prefix tree would give up.
    pub free_pages: usize,
    /// Pages in all.
    pub all_pages: usize,
    /// Most sequences at once.
    pub sequences: usize,
    /// Number of this step, for [`Policy::interval`].
    pub step: u64,
}

/// Rows of one sequence in the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Which one.
    pub id: SequenceId,
    /// Rows from its first token that is not computed, drafts included.
    pub rows: usize,
    /// Drafts among the rows: the last ones.
    pub drafts: usize,
    /// Pages that it must hold for them, in all.
    pub pages_after: usize,
    /// Every row wants its logits ([`View::max_rows`]).
    pub scored: bool,
}

/// Why a request is refused; waiting would be in vain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It needs more than there is in all.
    #[error(
        "needs {} slot and {} pages, but there are {} slots and {} pages in all; ask for fewer tokens or serve with more pages",
        need.slots, need.pages, all.slots, all.pages
    )]
    Never {
        /// For its most tokens.
        need: Need,
        /// In all.
        all: Need,
    },
    /// Nothing runs whose end would free more, and what is free does not do.
    #[error(
        "needs {} slot and {} pages, but only {} slots and {} pages are free while nothing runs, and nothing will free more",
        need.slots, need.pages, free.slots, free.pages
    )]
    Stuck {
        /// For its known tokens.
        need: Need,
        /// Free ones.
        free: Need,
    },
}

/// How many requests wait, by what they wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Waiting {
    /// A slot, or for fewer sequences to run.
    pub slots: usize,
    /// Pages.
    pub pages: usize,
    /// Rows of a step.
    pub rows: usize,
    /// A place among the long prompts.
    pub lane: usize,
}

/// What to do, in this order: preempt, refuse, admit, work.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Decision {
    /// Running sequences that give up slot and pages and go back to the queue, with nothing computed.
    pub preempt: Vec<SequenceId>,
    /// Waiting sequences that fail.
    pub refuse: Vec<(SequenceId, Refusal)>,
    /// Waiting sequences that get a slot, and the pages of their prefix hit.
    pub admit: Vec<SequenceId>,
    /// Rows of the step: decoding sequences first.
    pub work: Vec<Work>,
    /// What is left in the queue.
    pub waiting: Waiting,
}

impl Decision {
    /// Nothing to do: neither rows nor anybody to move.
    pub fn is_idle(&self) -> bool {
        self.preempt.is_empty() && self.refuse.is_empty() && self.admit.is_empty() && self.work.is_empty()
    }
}

/// Decides about the next step at time `now`.
///
/// Decoding sequences get their newest token's row each, then drafts as rows, logits and pages last; pages for newest tokens
/// are taken from others if need be, drafts are not worth that. Prompts get what the pace leaves: short ones in order, at most
/// half of it while a long one advances; long ones by what they have left and how old they are; what one lane does not use
/// goes to the other. The queue is served in order; a request that waits for pages or a slot holds up all behind it, one that
/// waits for the long lane or for rows only itself.
///
/// `resources.rows` and `resources.logits` of at least one a running sequence let all of them decode in every step.
pub fn schedule(views: &Views<'_>, resources: &Resources, policy: &Policy, rates: &Rates, now: f64) -> Decision {
    let mut pass = step::Pass::new(views, resources, policy, rates, now);
    pass.decode();
    pass.prompts();
    if pass.is_stuck() {
        pass.force();
    }
    pass.finish()
}

/// Whether every request of up to `max_len` tokens can be served by so many slots and pages. When it holds, whatever is
/// submitted within `max_len` is admitted as soon as nothing else runs.
///
/// # Errors
/// [`Refusal::Never`] with both figures.
pub fn boot_check(max_len: usize, all: Need) -> Result<(), Refusal> {
    let need = need(max_len);
    if need.slots > all.slots || need.pages > all.pages { Err(Refusal::Never { need, all }) } else { Ok(()) }
}

/// How many sequences can run at once: `wanted`, or fewer where slots or pages (each sequence pins what its first token
/// needs) do not reach.
pub fn most_sequences(wanted: usize, all: Need) -> usize {
    let least = need(1);
    wanted.min(all.slots / least.slots.max(1)).min(all.pages / least.pages.max(1))
}

#[cfg(test)]
mod tests;
