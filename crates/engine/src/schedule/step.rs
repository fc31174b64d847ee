//! What is left to give in this step.

use glimmer_tensor::PAGE_TOKENS;

use super::{Decision, Order, Policy, Rates, Resources, SequenceId, View, Views, Work, need};

/// Which queue for prompt rows a sequence stands in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// At most [`Policy::long_prompt`] tokens to compute.
    Short,
    /// More.
    Long,
}

impl View {
    /// The lane, by what there was to compute at admission: a prompt does not change lanes on its way.
    pub fn lane(&self, policy: &Policy) -> Lane {
        if self.known.saturating_sub(self.cached) > policy.long_prompt { Lane::Long } else { Lane::Short }
    }

    /// Pages that come back when it is preempted.
    pub(super) fn returns(&self) -> usize {
        self.pages.saturating_sub(self.shared)
    }
}

/// A sequence with known tokens to compute, running or just admitted.
#[derive(Debug)]
pub(super) struct Prompt<'a> {
    pub(super) view: &'a View,
    pub(super) lane: Lane,
    /// Computed tokens; for one just admitted those of its prefix hit.
    pub(super) computed: usize,
    /// Pages held, this step's included.
    pub(super) pages: usize,
    /// Rows of this step.
    pub(super) rows: usize,
}

impl Prompt<'_> {
    pub(super) fn left(&self) -> usize {
        self.view.known.saturating_sub(self.computed)
    }

    /// Logits that so many rows want.
    fn logits(&self, rows: usize) -> usize {
        if self.view.max_rows.is_some() { rows } else { usize::from(rows > 0 && rows == self.left()) }
    }

    /// Rows of a chunk within a budget of rows, logits and further pages. It ends with the known tokens, at the next stop or
    /// at the end of a page; elsewhere only if `anywhere`, or if the logits of its rows bound it.
    pub(super) fn chunk(&self, rows: usize, logits: usize, pages: usize, anywhere: bool) -> usize {
        let (start, known) = (self.computed, self.view.known);
        let paged = (self.pages + pages).saturating_mul(PAGE_TOKENS).saturating_sub(start);
        let scored = self.view.max_rows.map_or(usize::MAX, |most| most.max(1).min(logits));
        let mut end = known.min(start.saturating_add(rows.min(paged).min(scored)));
        let stop = self.view.next_stop.filter(|&stop| stop > start);
        end = stop.map_or(end, |stop| end.min(stop));
        if end == known && logits == 0 {
            end = known.saturating_sub(1);
        }
        if end <= start {
            return 0;
        }
        let aligned = end / PAGE_TOKENS * PAGE_TOKENS;
        if end == known || stop == Some(end) {
            end - start
        } else if aligned > start {
            aligned - start
        } else if anywhere || self.view.max_rows.is_some() {
            end - start
        } else {
            0
        }
    }
}

/// A step in the making.
#[derive(Debug)]
pub(super) struct Pass<'a> {
    pub(super) running: &'a [View],
    pub(super) waiting: &'a [View],
    pub(super) resources: &'a Resources,
    pub(super) policy: &'a Policy,
    pub(super) rates: &'a Rates,
    pub(super) now: f64,
    /// Indices of `running`, first in order first.
    pub(super) order: Vec<usize>,
    /// Running sequences preempted in this step.
    pub(super) gone: Vec<bool>,
    pub(super) rows: usize,
    pub(super) logits: usize,
    pub(super) slots: usize,
    pub(super) pages: usize,
    pub(super) prompts: Vec<Prompt<'a>>,
    pub(super) decision: Decision,
}

impl<'a> Pass<'a> {
    pub(super) fn new(
        views: &Views<'a>,
        resources: &'a Resources,
        policy: &'a Policy,
        rates: &'a Rates,
        now: f64,
    ) -> Self {
        let running = views.running;
        let mut order: Vec<usize> = (0..running.len()).collect();
        order.sort_by_key(|&index| rank(policy, &running[index]));
        let work = Vec::with_capacity(running.len() + 1);
        Self {
            running,
            waiting: views.waiting,
            resources,
            policy,
            rates,
            now,
            order,
            gone: vec![false; running.len()],
            rows: resources.rows,
            logits: resources.logits,
            slots: resources.free_slots,
            pages: resources.free_pages,
            prompts: Vec::new(),
            decision: Decision { work, ..Decision::default() },
        }
    }

    /// Running sequences after this step's preemptions and admissions.
    pub(super) fn alive(&self) -> usize {
        self.running.len() - self.decision.preempt.len() + self.decision.admit.len()
    }

    /// Gives a prompt as many further rows as its budget and all that is left allow; how many that were.
    pub(super) fn grow(&mut self, index: usize, budget: usize, anywhere: bool) -> usize {
        let prompt = &mut self.prompts[index];
        let had = prompt.rows;
        let wanted = prompt.logits(had);
        let rows = prompt.chunk(had + budget.min(self.rows), wanted + self.logits, self.pages, anywhere);
        if rows <= had {
            return 0;
        }
        self.rows -= rows - had;
        self.logits = self.logits + wanted - prompt.logits(rows);
        let after = need(prompt.computed + rows).pages.max(prompt.pages);
        self.pages -= after - prompt.pages;
        (prompt.rows, prompt.pages) = (rows, after);
        rows - had
    }

    /// Takes slot and pages of a running sequence.
    pub(super) fn preempt(&mut self, index: usize) {
        let view = &self.running[index];
        self.gone[index] = true;
        self.slots += 1;
        self.pages += view.returns();
        self.decision.preempt.push(view.id);
    }

    /// Something runs, and not a single row was found for it.
    pub(super) fn is_stuck(&self) -> bool {
        self.rows > 0
            && self.decision.work.is_empty()
            && self.alive() > 0
            && self.prompts.iter().all(|prompt| prompt.rows == 0)
    }

    pub(super) fn finish(mut self) -> Decision {
        for prompt in self.prompts.iter().filter(|prompt| prompt.rows > 0) {
            self.decision.work.push(Work {
                id: prompt.view.id,
                rows: prompt.rows,
                drafts: 0,
                pages_after: prompt.pages,
                scored: prompt.view.max_rows.is_some(),
            });
        }
        self.decision
    }
}

/// Order of running sequences, smallest first.
pub(super) fn rank(policy: &Policy, view: &View) -> (i64, i64, SequenceId) {
    (importance(policy, view), ascending(view.arrival), view.id)
}

/// Order of the queue: as [`rank`], but those that were preempted go in front of their equals.
pub(super) fn queue_rank(policy: &Policy, view: &View) -> (i64, bool, i64, SequenceId) {
    (importance(policy, view), view.preempted == 0, ascending(view.arrival), view.id)
}

/// The priority where it counts.
pub(super) fn importance(policy: &Policy, view: &View) -> i64 {
    match policy.order {
        Order::Fcfs => 0,
        Order::Priority => view.priority,
    }
}

/// An integer in the order of [`f64::total_cmp`].
pub(super) fn ascending(value: f64) -> i64 {
    let bits = value.to_bits().cast_signed();
    bits ^ ((bits >> 63).cast_unsigned() >> 1).cast_signed()
}
