//! How many drafted tokens the model accepts.
//!
//! A step drafts some tokens; those before the first one that the model would not have chosen are accepted. The rate of
//! position `i` is the share of steps that drafted that far in which the first `i` drafts were all accepted, so rates never
//! rise with `i`; a step yields one token more than it accepts.

use glimmer_engine::DraftCounts;
use serde::{Deserialize, Serialize};

/// Rates by position.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Acceptance {
    /// Steps with drafts.
    pub steps: u64,
    /// Share of steps in which the first `i + 1` drafts were accepted, from 0 to 1.
    pub by_position: Vec<f64>,
    /// Accepted tokens over drafted ones, from 0 to 1.
    pub rate: f64,
    /// Tokens a step, the model's own one included.
    pub mean_length: f64,
}

impl From<&DraftCounts> for Acceptance {
    fn from(counts: &DraftCounts) -> Self {
        let (accepted, drafted): (u64, u64) = (counts.accepted.iter().sum(), counts.drafted.iter().sum());
        Self {
            steps: counts.steps(),
            by_position: (0..counts.drafted.len()).filter_map(|position| counts.rate(position)).collect(),
            rate: if drafted == 0 { 0.0 } else { accepted as f64 / drafted as f64 },
            mean_length: counts.mean_length(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_by_position() {
        let mut counts = DraftCounts::default();
        for accepted in [2, 2, 1, 0] {
            counts.record(2, accepted);
        }
        let acceptance = Acceptance::from(&counts);
        assert_eq!(acceptance.by_position, [0.75, 0.5]);
        assert_eq!((acceptance.steps, acceptance.rate, acceptance.mean_length), (4, 0.625, 2.25));
    }

    #[test]
    fn steps_near_the_end_draft_less() {
        let mut counts = DraftCounts::default();
        counts.record(3, 3);
        counts.record(1, 1);
        counts.record(0, 0);
        assert_eq!(Acceptance::from(&counts).by_position, [1.0, 1.0, 1.0]);
        assert_eq!(counts.drafted, [2, 1, 1]);
    }

    #[test]
    fn no_drafts_is_no_division() {
        let acceptance = Acceptance::from(&DraftCounts::default());
        assert_eq!((acceptance.steps, acceptance.rate, acceptance.mean_length), (0, 0.0, 1.0));
        assert!(acceptance.by_position.is_empty());
    }
}
