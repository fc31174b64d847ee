//! How many prompt rows a step takes, and who gets them.

use glimmer_tensor::PAGE_TOKENS;

use super::{
    SequenceId, View,
    step::{Lane, Pass, Prompt, ascending, importance},
};

/// How much longer than its target, or than decoding alone where that takes longer, a step may become so that prompts advance,
/// as a share of it. Tokens then come within one and a half times the target wherever decoding alone keeps it.
const OVERRUN: f64 = 0.5;
/// How much a long prompt gains on shorter ones while it waits, as a share of what could be computed meanwhile. A prompt is
/// overtaken only by those that come within `remaining / (AGEING * rate)` seconds.
const AGEING: f64 = 0.5;

impl Pass<'_> {
    /// Gives rows to prompts, running and waiting.
    pub(super) fn prompts(&mut self) {
        for &index in &self.order {
            let view = &self.running[index];
            if !self.gone[index] && !view.decoding {
                let lane = view.lane(self.policy);
                let (computed, pages) = (view.computed, view.pages);
                self.prompts.push(Prompt { view, lane, computed, pages, rows: 0 });
            }
        }
        let quantum = self.quantum(self.decision.work.iter().map(|work| work.rows).sum());
        if quantum == 0 {
            self.decision.waiting.rows = self.waiting.len();
            return;
        }
        // With room for less than a page in each lane, chunks end where the room ends.
        let anywhere = quantum < 2 * PAGE_TOKENS;
        let best = self.best_waiting_long(quantum);
        let share = self.long_share(quantum, best);
        let mut short = quantum - share;
        self.grow_short(&mut short, anywhere);
        self.admit(&mut short, share, best, anywhere);
        let mut left = short + share;
        self.grow_long(&mut left, anywhere);
        self.grow_short(&mut left, anywhere);
    }

    fn grow_short(&mut self, left: &mut usize, anywhere: bool) {
        for index in 0..self.prompts.len() {
            if self.prompts[index].lane == Lane::Short {
                *left -= self.grow(index, *left, anywhere);
            }
        }
    }

    /// The first in the lane share what is left evenly; what they cannot use goes down the line.
    fn grow_long(&mut self, left: &mut usize, anywhere: bool) {
        let mut line: Vec<usize> = (0..self.prompts.len()).filter(|&i| self.prompts[i].lane == Lane::Long).collect();
        line.sort_by_cached_key(|&i| self.long_rank(self.prompts[i].view, self.prompts[i].left()));
        let cap = self.long_cap();
        let abreast = self.policy.long_prefills.clamp(1, line.len().max(1));
        let even = (*left / abreast).max(PAGE_TOKENS);
        for (budget, members) in [(even, &line[..abreast.min(line.len())]), (usize::MAX, &line[..])] {
            for &index in members {
                let most = cap.saturating_sub(self.prompts[index].rows).min(budget).min(*left);
                *left -= self.grow(index, most, anywhere);
            }
        }
    }

    /// Whether prompts are admitted and advance in this step, with so many sequences decoding.
    pub(super) fn is_prompt_step(&self, decoding: usize) -> bool {
        decoding == 0 || self.resources.step.is_multiple_of(self.policy.interval.max(1))
    }

    /// Prompt rows of this step beside so many decoding rows.
    pub(super) fn quantum(&self, decoding: usize) -> usize {
        if decoding == 0 {
            return self.rows;
        }
        if !self.is_prompt_step(decoding) {
            return 0;
        }
        let Some(target) = self.policy.itl_target else { return self.rows };
        let paced = whole_pages(self.rates.prompt_rows_within(target, decoding).unwrap_or(0));
        paced.max(self.least_quantum(target, decoding)).min(self.rows)
    }

    /// Prompt rows of a step for which the target leaves no time: what [`OVERRUN`] allows at the measured rate, so that the same
    /// policy does on a machine of ten tokens a second and on one of ten thousand.
    fn least_quantum(&self, target: f64, decoding: usize) -> usize {
        let most = self.policy.min_quantum;
        let Some(rate) = self.rates.prefill_rate() else { return most };
        let seconds = OVERRUN * target.max(self.rates.decode_seconds(decoding));
        let rows = (seconds * rate) as usize;
        (if rows < PAGE_TOKENS { rows.max(1) } else { whole_pages(rows) }).min(most)
    }

    /// Rows set aside for long prompts: what they can use, at most half (the larger one).
    fn long_share(&self, quantum: usize, best: Option<usize>) -> usize {
        let running = self.prompts.iter().filter(|prompt| prompt.lane == Lane::Long).map(Prompt::left);
        let waiting = best.map(|i| self.waiting[i].known.saturating_sub(self.waiting[i].cached));
        let demand = running.chain(waiting).map(|left| left.min(self.long_cap())).sum::<usize>();
        demand.min(quantum - quantum / 2)
    }

    /// Most rows of a long prompt in a step.
    fn long_cap(&self) -> usize {
        match self.policy.long_prefill_tokens {
            Some(cap) if self.running.len() + self.waiting.len() > 1 => cap.max(PAGE_TOKENS),
            _ => usize::MAX,
        }
    }

    /// Smaller is earlier: the tokens left, less what waiting is worth.
    fn long_key(&self, view: &View, left: usize) -> f64 {
        let age = (self.now - view.arrival).max(0.0);
        left as f64 - age * AGEING * self.rates.prefill_rate().unwrap_or(0.0)
    }

    /// Order of the long lane, smallest first.
    pub(super) fn long_rank(&self, view: &View, left: usize) -> (i64, i64, SequenceId) {
        (importance(self.policy, view), ascending(self.long_key(view, left)), view.id)
    }
}

fn whole_pages(rows: usize) -> usize {
    rows / PAGE_TOKENS * PAGE_TOKENS
}
