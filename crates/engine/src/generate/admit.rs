//! Before a step: the scheduler's decision, and carrying it out.
//!
//! Sequences become plain views, the decision comes back as ids, and what it promises is held against what the pools give:
//! a promise that cannot be kept is a defect and an error, never a wait.

use std::sync::Arc;

use glimmer_tensor::Backend;

use super::{Generator, Sink};
use crate::{
    EngineError, SequenceId,
    features::FeatureKey,
    pools::PageTable,
    request::{Finish, FinishReason, RequestError, TokenEvent},
    schedule::{Decision, Refusal, Resources, View, Views, schedule},
    sequence::{Cursor, Place, Sequence},
};

/// Steps without a row that the scheduler may need to make room; more of them in a row would be a wait without an end.
const MOST_IDLE_STEPS: u32 = 3;

impl<B: Backend> Generator<B> {
    /// Decides about the next step.
    pub(super) fn decide(&self, now: f64) -> Decision {
        let running: Vec<View> = self.running.iter().map(|s| s.view((0, 0), self.max_logits)).collect();
        let waiting: Vec<View> = self.waiting.iter().map(|s| s.view(self.expected_hit(s), self.max_logits)).collect();
        let free = self.pools.free();
        let resources = Resources {
            rows: self.max_rows,
            logits: self.max_logits,
            free_slots: free.slots,
            free_pages: free.pages + self.tree.evictable_pages(),
            all_pages: self.pools.all().pages,
            sequences: self.pools.all().slots,
            step: self.steps,
        };
        let views = Views { running: &running, waiting: &waiting };
        schedule(&views, &resources, &self.settings.policy, &self.rates, now)
    }

    /// Carries out all of a decision but its rows: preempts, refuses, admits, and gives the pages that the rows need.
    pub(super) fn carry_out(&mut self, decision: &Decision, now: f64, sink: Sink<'_>) -> Result<(), EngineError> {
        for &id in &decision.preempt {
            let at = self.running.iter().position(|s| s.id == id);
            let at = at.ok_or(EngineError::Broken("only running sequences are preempted"))?;
            let mut sequence = self.running.remove(at);
            sequence.preempt();
            self.counters.preemptions += 1;
            self.waiting.push_front(sequence);
        }
        for (id, refusal) in &decision.refuse {
            self.refuse(*id, refusal, now, sink)?;
        }
        for &id in &decision.admit {
            self.admit(id, now, sink)?;
        }
        let mut cursor = Cursor::default();
        for work in &decision.work {
            // A sequence that failed on its way in has no rows.
            let Some(index) = cursor.find(&self.running, work.id) else { continue };
            let sequence = &mut self.running[index];
            let place = sequence.place.as_mut().ok_or(EngineError::Broken("a running sequence has a place"))?;
            if !self.tree.grow(&mut place.table, work.pages_after) {
                return Err(EngineError::Broken("the pages that the scheduler gives are there"));
            }
            // Drafts without a row are void.
            sequence.drafts.truncate(work.drafts);
        }
        self.queue = decision.waiting;
        Ok(())
    }

    /// Holds against the clock of steps that something advances while something waits.
    pub(super) fn check_progress(&mut self, rows: usize) -> Result<(), EngineError> {
        let pending = !self.running.is_empty() || !self.waiting.is_empty();
        self.idle_steps = if rows > 0 || !pending { 0 } else { self.idle_steps + 1 };
        if self.idle_steps > MOST_IDLE_STEPS {
            return Err(EngineError::Broken("some sequence advances while sequences wait"));
        }
        Ok(())
    }

    /// Tokens that a waiting sequence would get from the prefix cache, and pages of them that others hold.
    fn expected_hit(&self, sequence: &Sequence) -> (usize, usize) {
        let most = sequence.tokens.len() - 1;
        sequence.keys.as_ref().map_or((0, 0), |keys| self.tree.peek_held(keys, most))
    }

    fn refuse(&mut self, id: SequenceId, refusal: &Refusal, now: f64, sink: Sink<'_>) -> Result<(), EngineError> {
        let at = self.waiting.iter().position(|s| s.id == id);
        let sequence = at.and_then(|at| self.waiting.remove(at));
        let sequence = sequence.ok_or(EngineError::Broken("only waiting sequences are refused"))?;
        self.fail(&sequence, RequestError::Internal(refusal.to_string()), now, sink);
        Ok(())
    }

    /// The last event of a sequence that failed and runs no more.
    fn fail(&mut self, sequence: &Sequence, error: RequestError, now: f64, sink: Sink<'_>) {
        self.counters.failed += 1;
        let finish = Finish { reason: FinishReason::Error(error), cost: sequence.times.cost(sequence.cost, now) };
        self.hand_out(sequence.id, TokenEvent { finish: Some(finish), ..TokenEvent::default() }, sink);
    }

    /// Gives a waiting sequence a slot and what the prefix cache has for it.
    fn admit(&mut self, id: SequenceId, now: f64, sink: Sink<'_>) -> Result<(), EngineError> {
        let at = self.waiting.iter().position(|s| s.id == id);
        let sequence = at.and_then(|at| self.waiting.remove(at));
        let mut sequence = sequence.ok_or(EngineError::Broken("only waiting sequences are admitted"))?;
        let slot = self.pools.slot().ok_or(EngineError::Broken("the slots that the scheduler gives are there"))?;
        let most = sequence.tokens.len() - 1;
        let mut table = PageTable::default();
        match &sequence.keys {
            Some(keys) => {
                if let Ok(hit) = self.tree.longest(keys, most) {
                    // The saved slot stays reserved until the copy is made, and is never a running sequence's own.
                    self.model.copy_slot(hit.state.id(), slot.id())?;
                    (sequence.computed, sequence.fold, table) = (hit.position, hit.fold, hit.table);
                }
            }
            None => {
                self.tree.unused();
            }
        }
        sequence.cached = sequence.computed;
        if sequence.cost.preemptions == 0 {
            sequence.cost.cached_tokens = sequence.cached as u32;
            sequence.times.started = Some(now);
        }
        sequence.place = Some(Place { slot, table });
        match self.media_features(&sequence) {
            Ok(features) => {
                sequence.features = features;
                self.running.push(sequence);
            }
            // The tower's limits and errors are about this request's pictures.
            Err(error) => self.fail(&sequence, RequestError::Internal(error.to_string()), now, sink),
        }
        Ok(())
    }

    /// Features of a sequence's media, from the cache where it has them; none of media before what is computed.
    fn media_features(&mut self, sequence: &Sequence) -> Result<Vec<Arc<[f32]>>, EngineError> {
        let mut all = Vec::with_capacity(sequence.request.media.len());
        let mut ordinal = 0;
        for item in sequence.request.media.iter() {
            ordinal += item.tokens;
            let last = ordinal.checked_sub(1).and_then(|last| sequence.placeholders.get(last));
            if last.is_none_or(|&last| last < sequence.computed) {
                all.push([].into());
                continue;
            }
            let key = FeatureKey { digest: item.digest, kind: item.kind, tokens: item.tokens };
            let features = match self.features.find(&key) {
                Some(features) => features,
                None => {
                    let features: Arc<[f32]> = Arc::from(self.features(&item.patches)?);
                    self.features.keep(key, Arc::clone(&features));
                    features
                }
            };
            all.push(features);
        }
        Ok(all)
    }
}
