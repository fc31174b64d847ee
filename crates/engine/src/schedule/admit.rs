//! The queue: who of the waiting starts in this step.
//!
//! The whole of a prompt must fit, not only its first chunk, beside what the admitted prompts still need (a ledger, so that
//! two long ones cannot both count on the same pages) and beside a reserve for decoding sequences to grow into. The reserve
//! is waived when nothing runs: whatever fits the empty caches is admitted then, and what does not is refused, since nothing
//! would ever free more.

use super::{
    Refusal, need,
    step::{Lane, Pass, Prompt, by_priority, queue_rank},
};
use crate::pools::Need;

impl Pass<'_> {
    /// The waiting long prompt that may start now: the first by [`Pass::long_key`] when its lane has room, or when it is so
    /// short that it goes before those that run.
    pub(super) fn best_waiting_long(&self, quantum: usize) -> Option<usize> {
        let long = self.waiting.iter().enumerate().filter(|(_, view)| view.lane(self.policy) == Lane::Long);
        let key = |left: usize, view| self.long_key(view, left);
        let left = |view: &super::View| view.known.saturating_sub(view.cached);
        let (best, view) = long.min_by(|(_, a), (_, b)| {
            let keys = key(left(a), a).total_cmp(&key(left(b), b));
            by_priority(self.policy, a, b).then(keys).then_with(|| queue_rank(self.policy, a, b))
        })?;
        let lane = self.policy.long_prefills.max(1);
        let mut running: Vec<&Prompt<'_>> = self.prompts.iter().filter(|prompt| prompt.lane == Lane::Long).collect();
        running.sort_by(|a, b| self.long_order(a, b));
        // Those that can end in this step make room already, or their last chunk would leave rows unused.
        let mut rows = quantum;
        let staying = running.iter().filter(|prompt| {
            let ends = prompt.left() <= rows;
            rows -= if ends { prompt.left() } else { 0 };
            !ends
        });
        if staying.count() < lane {
            return Some(best);
        }
        let first = running.first()?;
        let ahead = by_priority(self.policy, view, first.view)
            .then(key(left(view), view).total_cmp(&key(first.left(), first.view)))
            .is_lt();
        (ahead && running.len() < 2 * lane).then_some(best)
    }

    /// Admits from the queue: short prompts get their rows of `short` here, the long one later of `share`.
    pub(super) fn admit(&mut self, short: &mut usize, share: usize, best: Option<usize>, anywhere: bool) {
        if self.waiting.is_empty() {
            return;
        }
        if !self.decision.preempt.is_empty() {
            // Those that just gave way are first in line.
            self.decision.waiting.pages = self.waiting.len();
            return;
        }
        if self.alive() > 0 && !self.has_slot() {
            self.decision.waiting.slots = self.waiting.len();
            return;
        }
        let mut queue: Vec<usize> = (0..self.waiting.len()).collect();
        queue.sort_by(|&a, &b| queue_rank(self.policy, &self.waiting[a], &self.waiting[b]));
        let all = Need { slots: self.resources.sequences, pages: self.resources.all_pages };
        let spoken: usize =
            self.prompts.iter().map(|prompt| need(prompt.view.known).pages.saturating_sub(prompt.pages)).sum();
        let mut headroom = self.pages.saturating_sub(spoken);
        let reserve = (self.policy.watermark * self.resources.all_pages as f64).ceil() as usize;
        let mut short_is_full = false;
        for (place, &index) in queue.iter().enumerate() {
            let view = &self.waiting[index];
            let most = need(view.max_len.max(view.known));
            if most.slots > all.slots || most.pages > all.pages {
                self.decision.refuse.push((view.id, Refusal::Never { need: most, all }));
                continue;
            }
            let alone = self.alive() == 0;
            let whole = need(view.known);
            let own = whole.pages.saturating_sub(view.shared);
            let behind = queue.len() - place;
            if !self.has_slot() || own + if alone { 0 } else { reserve } > headroom {
                if alone {
                    let free = Need { slots: self.slots, pages: self.pages };
                    self.decision.refuse.push((view.id, Refusal::Stuck { need: whole, free }));
                    continue;
                }
                // The first that does not fit holds up all behind it, or large requests would wait for ever.
                if self.has_slot() {
                    self.decision.waiting.pages += behind;
                } else {
                    self.decision.waiting.slots += behind;
                }
                return;
            }
            let lane = view.lane(self.policy);
            if lane == Lane::Long && best != Some(index) {
                self.decision.waiting.lane += 1;
                continue;
            }
            if lane == Lane::Short && short_is_full {
                self.decision.waiting.rows += 1;
                continue;
            }
            let computed = view.cached.min(view.known.saturating_sub(1));
            let pages = need(computed).pages;
            let taken = pages.saturating_sub(view.shared);
            self.pages -= taken;
            let number = self.prompts.len();
            self.prompts.push(Prompt { view, lane, computed, pages, rows: 0 });
            let starts = match lane {
                Lane::Short => {
                    let rows = self.grow(number, *short, anywhere);
                    *short -= rows;
                    rows > 0
                }
                Lane::Long => {
                    let rows = (*short + share).min(self.rows);
                    self.prompts[number].chunk(rows, self.logits, self.pages, anywhere) > 0
                }
            };
            if !starts {
                self.prompts.pop();
                self.pages += taken;
                self.decision.waiting.rows += 1;
                short_is_full |= lane == Lane::Short;
                continue;
            }
            self.slots -= 1;
            headroom -= own;
            self.decision.admit.push(view.id);
        }
    }

    fn has_slot(&self) -> bool {
        self.slots > 0 && self.alive() < self.resources.sequences
    }
}
