//! Decoding rows come first, and who gives way when pages run out.
//!
//! Whoever needs a page takes it only from sequences behind it in order, so the first in order is never a victim. Among those
//! behind, the one that loses least work gives way: the fewest computed tokens, under priorities the least important first. A
//! prompt that is more than half done gives way to nobody who came later. When nobody is left, the sequence itself gives way.

use std::cmp::Reverse;

use glimmer_tensor::PAGE_TOKENS;

use super::{
    View, Work, need,
    step::{Pass, importance, rank},
};

impl Pass<'_> {
    /// Gives every decoding sequence the row of its newest token, and drafts.
    pub(super) fn decode(&mut self) {
        let decoding: Vec<usize> = self.order.iter().copied().filter(|&i| self.running[i].decoding).collect();
        let mut served = Vec::with_capacity(decoding.len());
        for &index in &decoding {
            if self.gone[index] || served.len() == self.rows.min(self.logits) {
                continue;
            }
            let view = &self.running[index];
            let further = need(view.computed + 1).pages.saturating_sub(view.pages);
            if self.make_room(index, further) {
                self.pages -= further;
                served.push(index);
            }
        }
        self.rows -= served.len();
        self.logits -= served.len();
        // Prompts that may advance keep rows, up to a page's, and a logit, so that drafts cannot hold them up; and no more
        // than the pace will give them, so that they cannot hold up drafts.
        let prefilling = self.running.len() - self.decision.preempt.len() > served.len();
        let joining = !self.waiting.is_empty() && self.has_slot();
        let pending = (prefilling || joining) && self.is_prompt_step(served.len());
        let mut rows = self.rows.saturating_sub(if pending { self.quantum(served.len()).min(PAGE_TOKENS) } else { 0 });
        let mut logits = self.logits.saturating_sub(usize::from(pending));
        for index in served {
            let view = &self.running[index];
            let held = view.pages.max(need(view.computed + 1).pages);
            let paged = (held + self.pages).saturating_mul(PAGE_TOKENS).saturating_sub(view.computed + 1);
            let within = view.max_len.saturating_sub(view.known + 1);
            let drafts = view.drafts.min(rows).min(logits).min(paged).min(within);
            let pages_after = held.max(need(view.computed + 1 + drafts).pages);
            self.pages -= pages_after - held;
            (rows, logits) = (rows - drafts, logits - drafts);
            (self.rows, self.logits) = (self.rows - drafts, self.logits - drafts);
            self.decision.work.push(Work { id: view.id, rows: 1 + drafts, drafts, pages_after, scored: false });
        }
    }

    /// Makes `further` pages free for a running sequence, preempting others, at last itself; whether it goes on.
    pub(super) fn make_room(&mut self, index: usize, further: usize) -> bool {
        while further > self.pages {
            let Some(victim) = self.victim(index) else {
                self.preempt(index);
                return false;
            };
            self.preempt(victim);
        }
        true
    }

    /// Who gives way to `index`.
    fn victim(&self, index: usize) -> Option<usize> {
        let (policy, running) = (self.policy, self.running);
        let asking = &running[index];
        let yields = |view: &View| {
            let half_done = !view.decoding && view.computed.saturating_mul(2) > view.known;
            view.returns() > 0
                && rank(policy, view) > rank(policy, asking)
                && !(half_done && asking.arrival > view.arrival)
        };
        // The order is ascending, so the last of equals came last.
        let candidates = self.order.iter().copied().filter(|&i| !self.gone[i] && yields(&running[i]));
        candidates.max_by_key(|&i| (importance(policy, &running[i]), Reverse(running[i].computed)))
    }

    /// The last resort when prompts hold all pages and none of them can go on: the first in order takes what it needs.
    pub(super) fn force(&mut self) {
        let Some(index) = self.order.iter().copied().find(|&i| !self.gone[i]) else { return };
        let Some(prompt) = self.prompts.iter().position(|prompt| prompt.view.id == self.running[index].id) else {
            return;
        };
        let first = self.prompts[prompt].computed + 1;
        let further = need(first).pages.saturating_sub(self.prompts[prompt].pages);
        if self.make_room(index, further) {
            self.grow(prompt, self.rows, true);
        }
    }
}
