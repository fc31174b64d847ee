//! What the prefix cache did.

use serde::{Deserialize, Serialize};

/// Why a look-up found nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Miss {
    /// Less than one full page may be taken.
    TooShort,
    /// The first page is not there.
    NoPage,
    /// The first page is not there under this salt.
    Salt,
    /// Pages are there, but no state checkpoint at the end of one of them.
    NoState,
    /// The request does not use the cache.
    Unused,
}

impl Miss {
    /// All reasons.
    pub const ALL: [Self; 5] = [Self::TooShort, Self::NoPage, Self::Salt, Self::NoState, Self::Unused];

    /// Name, for a metric's label.
    pub fn name(self) -> &'static str {
        match self {
            Self::TooShort => "too_short",
            Self::NoPage => "no_page",
            Self::Salt => "salt",
            Self::NoState => "no_state",
            Self::Unused => "unused",
        }
    }
}

/// Counts since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Look-ups.
    pub queries: u64,
    /// Tokens that they could have had.
    pub query_tokens: u64,
    /// Look-ups that found a state.
    pub hits: u64,
    /// Tokens that they got.
    pub hit_tokens: u64,
    /// Look-ups that found none, by place in [`Miss::ALL`]; requests that did not look come last.
    pub misses: [u64; 5],
    /// Pages that became visible.
    pub published_pages: u64,
    /// Pages given up because an equal one was visible already.
    pub merged_pages: u64,
    /// State checkpoints that became visible.
    pub saved_states: u64,
    /// Pages evicted for room.
    pub evicted_pages: u64,
    /// State checkpoints evicted for room, alone or with their page.
    pub evicted_states: u64,
}

impl Counters {
    pub(super) fn miss(&mut self, reason: Miss) {
        self.misses[reason as usize] += 1;
    }

    /// Misses of one reason.
    pub fn misses_by(&self, reason: Miss) -> u64 {
        self.misses[reason as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_counted_apart_and_named_once() {
        let mut counters = Counters::default();
        for (times, reason) in Miss::ALL.into_iter().enumerate() {
            (0..=times).for_each(|_| counters.miss(reason));
        }
        assert_eq!(Miss::ALL.map(|reason| counters.misses_by(reason)), [1, 2, 3, 4, 5]);
        assert_eq!(counters.misses, [1, 2, 3, 4, 5]);
        let names: std::collections::BTreeSet<&str> = Miss::ALL.iter().map(|m| m.name()).collect();
        assert_eq!(names.len(), 5);
    }
}
