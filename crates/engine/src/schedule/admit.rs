//! The queue: who of the waiting starts in this step.
//!
//! The whole of a prompt must fit, not only its first chunk, beside what the admitted prompts still need (a ledger, so that
//! two long ones cannot both count on the same pages) and beside a reserve for decoding sequences to grow into. The reserve
//! is waived when nothing runs: whatever fits the empty caches is admitted then, and what does not is refused, since nothing
//! would ever free more.

use std::{cmp::Reverse, collections::BinaryHeap};

use super::{
    Refusal, View, need,
    step::{Lane, Pass, Prompt, queue_rank},
};
use crate::pools::Need;

impl Pass<'_> {
    /// The waiting long prompt that may start now: the first by [`Pass::long_rank`] when its lane has room, or when it is so
    /// short that it goes before those that run.
    pub(super) fn best_waiting_long(&self, quantum: usize) -> Option<usize> {
        let rank = |view: &View| self.long_rank(view, view.known.saturating_sub(view.cached));
        let long = self.waiting.iter().enumerate().filter(|(_, view)| view.lane(self.policy) == Lane::Long);
        let (rank, best) = long.map(|(index, view)| (rank(view), index)).min()?;
        let lane = self.policy.long_prefills.max(1);
        let running = self.prompts.iter().filter(|prompt| prompt.lane == Lane::Long);
        let mut running: Vec<_> = running.map(|p| (self.long_rank(p.view, p.left()), p.left())).collect();
        running.sort_unstable();
        // Those that can end in this step make room already, or their last chunk would leave rows unused.
        let mut rows = quantum;
        let staying = running.iter().filter(|(_, left)| {
            let ends = *left <= rows;
            rows -= if ends { *left } else { 0 };
            !ends
        });
        if staying.count() < lane {
            return Some(best);
        }
        let overtakes = running.first().is_some_and(|(first, _)| (rank.0, rank.1) < (first.0, first.1));
        (overtakes && running.len() < 2 * lane).then_some(best)
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
        let spoken: usize =
            self.prompts.iter().map(|prompt| need(prompt.view.known).pages.saturating_sub(prompt.pages)).sum();
        let mut headroom = self.pages.saturating_sub(spoken);
        let reserve = (self.policy.watermark * self.resources.all_pages as f64).ceil() as usize;
        // A heap, since most of a long queue is not even looked at in order.
        let queue = self.waiting.iter().enumerate().map(|(i, view)| Reverse((queue_rank(self.policy, view), i)));
        let mut queue: BinaryHeap<_> = queue.collect();
        let (mut short_is_open, mut long_is_open) = (true, best.is_some());
        while let Some(Reverse((_, index))) = queue.pop() {
            let view = &self.waiting[index];
            if self.refuses(view) {
                continue;
            }
            let lane = view.lane(self.policy);
            if lane == Lane::Long && best != Some(index) {
                self.passes(lane);
                continue;
            }
            let alone = self.alive() == 0;
            let own = need(view.known).pages.saturating_sub(view.shared);
            if !self.has_slot() || own + if alone { 0 } else { reserve } > headroom {
                if alone {
                    let free = Need { slots: self.slots, pages: self.pages };
                    self.decision.refuse.push((view.id, Refusal::Stuck { need: need(view.known), free }));
                    continue;
                }
                // The first that does not fit holds up all behind it, or large requests would wait for ever.
                let behind = queue.len() + 1;
                if self.has_slot() {
                    self.decision.waiting.pages += behind;
                } else {
                    self.decision.waiting.slots += behind;
                }
                return;
            }
            if lane == Lane::Short && !short_is_open {
                self.passes(lane);
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
            if starts {
                self.slots -= 1;
                headroom -= own;
                self.decision.admit.push(view.id);
            } else {
                self.prompts.pop();
                self.pages += taken;
                self.decision.waiting.rows += 1;
                short_is_open &= lane == Lane::Long;
            }
            long_is_open &= lane == Lane::Short;
            if !short_is_open && !long_is_open {
                for Reverse((_, index)) in queue {
                    let view = &self.waiting[index];
                    if !self.refuses(view) {
                        self.passes(view.lane(self.policy));
                    }
                }
                return;
            }
        }
    }

    /// Refuses what needs more than there is in all.
    fn refuses(&mut self, view: &View) -> bool {
        let all = Need { slots: self.resources.sequences, pages: self.resources.all_pages };
        let need = need(view.max_len.max(view.known));
        let never = need.slots > all.slots || need.pages > all.pages;
        if never {
            self.decision.refuse.push((view.id, Refusal::Never { need, all }));
        }
        never
    }

    /// Leaves one in the queue because its lane is full.
    fn passes(&mut self, lane: Lane) {
        match lane {
            Lane::Short => self.decision.waiting.rows += 1,
            Lane::Long => self.decision.waiting.lane += 1,
        }
    }

    /// Another sequence may run.
    pub(super) fn has_slot(&self) -> bool {
        self.slots > 0 && self.alive() < self.resources.sequences
    }
}
