//! The exactness matrix: what an engine yields must not depend on how it got there.
//!
//! Every [`Case`] is answered once in the plainest way (no prefix cache, no drafts, the whole prompt in one step, alone).
//! The [`matrix`] then repeats all cases in every combination of prefix cache, draft depth, chunk size and company, and the
//! [`scenes`] force what a matrix meets only by chance: every kind of saved state, and preemption; [`agents`] converse through
//! the chat template. One differing token is a defect. Everything is generic over the backend, so the same command checks a
//! GPU.

mod agent;
mod cases;
mod drive;
mod matrix;
mod scenes;

use glimmer_engine::Settings;
use serde::Serialize;

use crate::error::BenchError;
use cases::turn_start;

pub use agent::agents;
pub use cases::{Case, CaseKind, cases};
pub(crate) use drive::Dice;
pub use matrix::{Cell, Company, MATRIX, matrix};
pub use scenes::scenes;

/// Makes a fresh backend.
pub type Opener<'a, B> = &'a mut dyn FnMut() -> Result<B, BenchError>;

/// What was compared under one condition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Comparison {
    /// The condition.
    pub condition: String,
    /// Answers compared.
    pub answers: usize,
    /// Tokens compared.
    pub tokens: usize,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: u64,
    /// Drafts that stood.
    pub accepted_drafts: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// The first few differences, in words.
    pub differences: Vec<String>,
    /// All differences.
    pub different: usize,
}

/// Differences told in full, for one condition.
const TOLD: usize = 3;

impl Comparison {
    fn new(condition: impl Into<String>) -> Self {
        Self {
            condition: condition.into(),
            answers: 0,
            tokens: 0,
            cached_tokens: 0,
            accepted_drafts: 0,
            preemptions: 0,
            differences: Vec::new(),
            different: 0,
        }
    }

    /// Whether everything was equal, and something was compared.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.different == 0 && self.answers > 0
    }

    /// Compares an answer with what it has to be.
    fn compare(&mut self, what: &str, expected: &Given, found: &Given) {
        self.answers += 1;
        self.tokens += expected.tokens.len();
        if expected == found {
            return;
        }
        let equal = expected.tokens.iter().zip(&found.tokens).take_while(|(a, b)| a == b).count();
        self.differ(format!(
            "{what}: equal up to token {equal}; expected {:?} and {:?}, found {:?} and {:?}",
            expected.tokens.get(equal),
            expected.finish,
            found.tokens.get(equal),
            found.finish
        ));
    }

    fn differ(&mut self, difference: String) {
        self.different += 1;
        if self.differences.len() < TOLD {
            self.differences.push(difference);
        }
    }

    /// Requires that the condition was really met: a comparison that never hits a cache proves nothing about it.
    fn require(&mut self, met: bool, what: &str) {
        if !met {
            self.differ(format!("the condition was not met: {what}"));
        }
    }
}

/// An answer as it is compared.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Given {
    tokens: Vec<u32>,
    finish: String,
}

/// Sizes that all conditions share.
#[derive(Clone, Debug)]
pub struct Base {
    /// Settings of the model: vocabulary, end tokens.
    pub settings: Settings,
    /// Most tokens of a sequence.
    pub context: usize,
    /// Seed of everything random: order, company, aborts.
    pub seed: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(tokens: &[u32]) -> Given {
        Given { tokens: tokens.to_vec(), finish: "Length".to_owned() }
    }

    #[test]
    fn a_difference_names_the_first_token() {
        let mut comparison = Comparison::new("x");
        assert!(!comparison.holds(), "nothing was compared");
        comparison.compare("a", &given(&[1, 2, 3]), &given(&[1, 2, 3]));
        assert!(comparison.holds());
        comparison.compare("b", &given(&[1, 2, 3]), &given(&[1, 9, 3]));
        comparison.compare("c", &given(&[1, 2]), &given(&[1]));
        assert!(!comparison.holds() && comparison.different == 2);
        assert!(comparison.differences[0].contains("b: equal up to token 1"), "{:?}", comparison.differences);
        assert_eq!((comparison.answers, comparison.tokens), (3, 8));
    }

    #[test]
    fn a_condition_that_was_not_met_does_not_hold() {
        let mut comparison = Comparison::new("x");
        comparison.compare("a", &given(&[1]), &given(&[1]));
        comparison.require(false, "no preemption");
        assert!(!comparison.holds());
    }
}
