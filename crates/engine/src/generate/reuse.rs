//! Behind a step: what it computed becomes visible to later requests.
//!
//! Full pages are published and states are saved only here, after the step that wrote them has been taken in and the draft
//! layer has filled its rows. A state is saved at a page boundary that the slot still reaches: its state covers all positions
//! up to the first row of the step and the ring holds the records behind.

use glimmer_tensor::Backend;

use super::Generator;
use crate::{
    EngineError,
    plan::Entry,
    prefix::{SavedState, newest_boundary},
    request::FinishReason,
    sequence::Phase,
};

impl<B: Backend> Generator<B> {
    /// Publishes what the rows of `entry` completed; they began at position `began`.
    pub(super) fn publish(&mut self, entry: &Entry, began: usize) -> Result<(), EngineError> {
        let sequence = &mut self.running[entry.index];
        let (Some(keys), Some(place)) = (&mut sequence.keys, &mut sequence.place) else { return Ok(()) };
        if matches!(sequence.phase, Phase::Finished(FinishReason::Error(_))) {
            return Ok(());
        }
        keys.extend(&sequence.tokens);
        self.tree.publish(&mut place.table, keys, sequence.computed);

        let covered = began + entry.rows - entry.drafts;
        let Some((position, fold)) = newest_boundary(covered, sequence.computed) else { return Ok(()) };
        // Chunks of known tokens end at their stops; behind them every boundary is the newest one of a growing answer.
        let growing = sequence.phase != Phase::Prefill;
        if position <= sequence.saved.1 || !(growing || sequence.stops.contains(position)) {
            return Ok(());
        }
        let Some(key) = keys.ending_at(position).filter(|key| self.tree.wants_state(key)) else { return Ok(()) };
        // One state follows the answer; those of the prompt stay for other answers.
        let stale = sequence.saved.0.take().and_then(|ticket| self.tree.withdraw(ticket));
        let Some(slot) = stale.or_else(|| self.tree.slot_for_state()) else { return Ok(()) };
        self.model.copy_slot(place.slot.id(), slot.id())?;
        let ticket = self.tree.save_state(&key, SavedState { slot, fold });
        sequence.saved = (ticket.filter(|_| growing), position);
        Ok(())
    }
}
