//! Acceptance by decree, for measuring speed at a chosen acceptance.
//!
//! With random weights no draft would ever stand. A bench names the share of steps in which the first draft, the first two,
//! and so on shall stand; whether draft `i` stands is then a draw with probability `rate[i] / rate[i - 1]`, whatever the
//! logits say. The output is no longer the model's: never for serving.

use serde::{Deserialize, Serialize};

use crate::{
    EngineError,
    random::{Purpose, uniform},
};

/// Which drafts stand.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<f64>", into = "Vec<f64>")]
pub struct SyntheticAcceptance {
    rates: Vec<f64>,
}

impl SyntheticAcceptance {
    /// From the share of steps in which at least the first `i + 1` drafts stand, for each `i`. Drafts beyond never stand.
    ///
    /// # Errors
    /// [`EngineError::Setting`] unless the rates lie in [0, 1] and do not rise.
    pub fn from_rates(rates: Vec<f64>) -> Result<Self, EngineError> {
        let falling = rates.windows(2).all(|pair| pair[1] <= pair[0]);
        if rates.is_empty() || !falling || !rates.iter().all(|rate| (0.0..=1.0).contains(rate)) {
            return Err(EngineError::Setting {
                setting: "synthetic acceptance rates",
                expected: "one or more numbers from 0 to 1 that do not rise".to_owned(),
                found: format!("{rates:?}"),
            });
        }
        Ok(Self { rates })
    }

    /// From the mean number of tokens of a step at `depth`, the step's own token included: as many drafts always stand as
    /// fit, one more stands so often that the mean is met.
    ///
    /// # Errors
    /// [`EngineError::Setting`] unless the length lies in [1, depth + 1].
    pub fn from_mean_length(length: f64, depth: usize) -> Result<Self, EngineError> {
        let drafts = length - 1.0;
        if depth == 0 || !(0.0..=depth as f64).contains(&drafts) {
            return Err(EngineError::Setting {
                setting: "synthetic acceptance length",
                expected: format!("a number from 1 to {} at a depth of at least 1", depth + 1),
                found: format!("{length} at depth {depth}"),
            });
        }
        Self::from_rates((0..depth).map(|i| (drafts - i as f64).clamp(0.0, 1.0)).collect())
    }

    /// Whether the draft of index `i` of a step stands, given that those before it did; it is for `position`.
    pub fn stands(&self, seed: u64, position: usize, i: usize) -> bool {
        let before = if i == 0 { 1.0 } else { self.rates.get(i - 1).copied().unwrap_or(0.0) };
        let rate = self.rates.get(i).copied().unwrap_or(0.0);
        before > 0.0 && uniform(seed, position, Purpose::Synthetic) * before < rate
    }
}

impl TryFrom<Vec<f64>> for SyntheticAcceptance {
    type Error = EngineError;

    fn try_from(rates: Vec<f64>) -> Result<Self, EngineError> {
        Self::from_rates(rates)
    }
}

impl From<SyntheticAcceptance> for Vec<f64> {
    fn from(acceptance: SyntheticAcceptance) -> Self {
        acceptance.rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::DraftCounts;

    fn counts(acceptance: &SyntheticAcceptance, depth: usize) -> DraftCounts {
        let (mut counts, mut position) = (DraftCounts::default(), 0);
        for _ in 0..40_000 {
            let accepted = (0..depth).take_while(|&i| acceptance.stands(3, position + i, i)).count();
            counts.record(depth, accepted);
            position += accepted + 1;
        }
        counts
    }

    #[test]
    fn rates_come_out_as_asked() {
        let acceptance = SyntheticAcceptance::from_rates(vec![0.8, 0.5, 0.5, 0.1]).unwrap();
        let counts = counts(&acceptance, 5);
        for (i, expected) in [0.8, 0.5, 0.5, 0.1, 0.0].into_iter().enumerate() {
            let found = counts.rate(i).unwrap();
            // Five standard deviations of 40,000 trials at most.
            assert!((found - expected).abs() < 0.0125, "draft {i}: {found}, not {expected}");
        }
    }

    #[test]
    fn mean_lengths_come_out_as_asked() {
        for (length, depth) in [(1.0, 1), (2.06, 2), (3.0, 2), (2.5, 7), (6.3, 7)] {
            let acceptance = SyntheticAcceptance::from_mean_length(length, depth).unwrap();
            let found = counts(&acceptance, depth).mean_length();
            assert!((found - length).abs() < 0.0125, "depth {depth}: {found}, not {length}");
        }
    }

    #[test]
    fn impossible_wishes_are_refused() {
        for rates in [vec![], vec![0.5, 0.6], vec![1.1], vec![f64::NAN], vec![-0.1]] {
            assert!(SyntheticAcceptance::from_rates(rates).is_err());
        }
        for (length, depth) in [(0.9, 2), (3.1, 2), (1.0, 0), (f64::NAN, 2)] {
            assert!(SyntheticAcceptance::from_mean_length(length, depth).is_err());
        }
        let json = serde_json::to_string(&SyntheticAcceptance::from_rates(vec![0.5]).unwrap()).unwrap();
        assert_eq!(json, "[0.5]");
        assert!(serde_json::from_str::<SyntheticAcceptance>("[0.5, 0.7]").is_err());
    }
}
