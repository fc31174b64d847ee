//! Log-probabilities of given tokens (teacher forcing), for comparing models.
//!
//! The tokens go through the trunk in chunks; every row's logits become log-probabilities over the ids that exist. A row's
//! values do not depend on the chunks.

use glimmer_tensor::{Backend, FeatureRow, Segment, Step};

use crate::{
    EngineError, Generator,
    pools::{PageTable, need},
    sampling::largest,
    softmax::Weighing,
};

/// What a model says after one position.
#[derive(Debug, Clone, Copy)]
pub struct ScoredRow<'a> {
    /// The position: the row predicts token `position + 1`.
    pub position: usize,
    /// Natural logarithms of the probabilities of all ids that exist, `[real vocabulary]`.
    pub log_probabilities: &'a [f32],
    /// The most probable id, the first of equals.
    pub top: u32,
}

impl<B: Backend> Generator<B> {
    /// Ids that exist: the length of [`ScoredRow::log_probabilities`].
    pub fn vocabulary(&self) -> usize {
        self.rules.vocabulary
    }

    /// Scores `tokens` (with `features` `[placeholders, hidden]` when they hold image placeholders) and calls `row` for
    /// every position in order. Takes a slot beside running sequences and gives it back.
    ///
    /// # Errors
    /// As for a prompt in [`Generator::submit`] (a panel may fill the whole context); [`EngineError::NeverFits`] when
    /// running sequences leave no room; [`EngineError::NoToken`] for unusable logits.
    pub fn score(
        &mut self,
        tokens: &[u32],
        features: &[f32],
        row: &mut dyn FnMut(&ScoredRow<'_>),
    ) -> Result<(), EngineError> {
        if tokens.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if tokens.len() > self.rules.context {
            return Err(EngineError::PromptTooLong { prompt: tokens.len(), context: self.rules.context });
        }
        self.rules.check_tokens(tokens)?;
        self.rules.check_features(tokens, features.len() / self.model.config().hidden_size)?;
        let needed = need(tokens.len());
        let no_room = || EngineError::NeverFits { need: needed.pages, available: self.pools.free().pages };
        let slot = self.pools.slot().ok_or_else(no_room)?;
        let mut table = PageTable::default();
        if !self.tree.grow(&mut table, needed.pages) {
            return Err(no_room());
        }
        let hidden = self.model.config().hidden_size;
        let placeholders: Vec<usize> = self.rules.placeholders(tokens).collect();
        let chunk = self.model.limits().max_rows.min(self.model.limits().max_logits);
        for position in (0..tokens.len()).step_by(chunk) {
            let rows = chunk.min(tokens.len() - position);
            let mut step = Step {
                tokens: tokens[position..position + rows].to_vec(),
                pages: table.ids().to_vec(),
                logits: (0..rows as u32).collect(),
                ..Step::default()
            };
            step.segments.push(Segment {
                slot: slot.id(),
                position: position as u32,
                rows: rows as u32,
                fold: 0,
                commit: rows as u32,
                first_page: 0,
                pages: step.pages.len() as u32,
            });
            let inside = placeholders.iter().enumerate().filter(|(_, p)| (position..position + rows).contains(p));
            for (feature, place) in inside {
                let buffer_row = step.features.len();
                self.model.set_feature(buffer_row, &features[feature * hidden..(feature + 1) * hidden])?;
                step.features.push(FeatureRow { row: (place - position) as u32, feature: buffer_row as u32 });
            }
            self.model.forward(&step, &mut ())?;
            for i in 0..rows {
                let (_, values) = self.judge.scratch();
                self.model.logits(i, values)?;
                let at = position + i;
                let top = log_softmax(values).map_err(|reason| EngineError::NoToken { position: at + 1, reason })?;
                row(&ScoredRow { position: at, log_probabilities: &values[..self.rules.vocabulary], top });
            }
        }
        Ok(())
    }
}

/// Logits to log-probabilities in place, to the bit those of [`crate::logprobs`]; gives the largest.
fn log_softmax(logits: &mut [f32]) -> Result<u32, &'static str> {
    let (top, max) = largest(logits)?;
    let log = f64::from(max) + Weighing::plain(max).mass(logits).ln();
    for logit in logits {
        *logit = (f64::from(*logit) - log) as f32;
    }
    Ok(top)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_softmax_is_normalised() {
        let mut row = vec![3.0f32, -1.0, 80.0, 79.0];
        assert_eq!(log_softmax(&mut row).unwrap(), 2);
        let sum: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6);
        assert!((f64::from(row[2] - row[3]) - 1.0).abs() < 1e-5);
        assert!(log_softmax(&mut [f32::NAN]).is_err());
    }
}
