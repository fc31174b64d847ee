//! Where states are saved.
//!
//! While a prompt is computed: at the last page boundary that leaves a row to compute, at the last one before the last turn
//! starts (what follows may be rendered differently the next time), and every [`LONG_STRIDE`] tokens, so that prompts which
//! part late share most of their work. While decoding: at the newest page boundary that a step crossed.

use glimmer_tensor::PAGE_TOKENS;

/// Tokens between the states of a long prompt.
pub const LONG_STRIDE: usize = 32_768;

/// Boundaries of a prompt at which its state is saved, so its chunks end there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stops {
    /// The last boundary that leaves a row, 0 for none.
    last: usize,
    /// The last boundary before the last turn, 0 for none.
    turn: usize,
}

impl Stops {
    /// Stops of a prompt of so many tokens (for a sequence that starts anew after preemption: of all its known tokens) whose
    /// last turn starts at `turn_start`.
    pub fn new(tokens: usize, turn_start: Option<usize>) -> Self {
        let floor = |position: usize| position / PAGE_TOKENS * PAGE_TOKENS;
        let last = floor(tokens.saturating_sub(1));
        Self { last, turn: floor(turn_start.unwrap_or(0)).min(last) }
    }

    /// The first stop behind `computed`.
    pub fn after(&self, computed: usize) -> Option<usize> {
        let stride = (computed / LONG_STRIDE + 1) * LONG_STRIDE;
        [self.turn, self.last, stride.min(self.last)].into_iter().filter(|&stop| stop > computed).min()
    }

    /// Whether other sequences are expected to part from this one at `position`: the start of the last turn, or a stride.
    pub fn is_fork(&self, position: usize) -> bool {
        position > 0 && position <= self.last && (position == self.turn || position.is_multiple_of(LONG_STRIDE))
    }

    /// Whether `position` is a stop.
    pub fn contains(&self, position: usize) -> bool {
        position > 0 && self.after(position - 1) == Some(position)
    }
}

/// The newest page boundary that a slot can be saved at, and the records that fold into it there: `covered` positions are in
/// the slot's state, those up to `computed` are final, and the records between are in its ring.
pub fn newest_boundary(covered: usize, computed: usize) -> Option<(usize, usize)> {
    let position = computed / PAGE_TOKENS * PAGE_TOKENS;
    let fold = position.checked_sub(covered)?;
    (position > 0).then_some((position, fold))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(tokens: usize, turn_start: Option<usize>, from: usize) -> Vec<usize> {
        let stops = Stops::new(tokens, turn_start);
        std::iter::successors(stops.after(from), |&stop| stops.after(stop)).collect()
    }

    #[test]
    fn a_row_is_always_left() {
        for (tokens, expected) in [(1, vec![]), (64, vec![]), (65, vec![64]), (128, vec![64]), (129, vec![128])] {
            assert_eq!(all(tokens, None, 0), expected, "{tokens} tokens");
        }
        assert!(all(0, Some(7), 0).is_empty());
    }

    #[test]
    fn the_last_turn_and_long_strides_are_stops() {
        assert_eq!(all(1000, Some(700), 0), [640, 960]);
        assert_eq!(all(1000, Some(640), 0), [640, 960], "a turn that starts on a boundary");
        assert_eq!(all(1000, Some(63), 0), [960], "no boundary before the turn");
        assert_eq!(all(1000, Some(5000), 0), [960], "a start beyond the prompt");
        assert_eq!(all(1000, Some(990), 0), [960]);
        assert_eq!(all(1000, Some(700), 640), [960], "behind a hit");
        assert_eq!(all(80_000, Some(40_000), 0), [32_768, 40_000, 65_536, 79_936]);
        assert_eq!(all(65_537, None, 0), [32_768, 65_536]);
        assert_eq!(all(65_536, None, 0), [32_768, 65_472]);
    }

    #[test]
    fn turns_and_strides_are_forks_and_ends_are_not() {
        let forks = |tokens, turn| -> Vec<usize> {
            let stops = Stops::new(tokens, turn);
            (0..=100_000).filter(|&p| stops.is_fork(p)).collect()
        };
        assert_eq!(forks(80_000, Some(40_000)), [32_768, 40_000, 65_536]);
        assert_eq!(forks(1000, Some(980)), [960], "a short turn ends where it starts");
        assert!(forks(1000, None).is_empty());
    }

    #[test]
    fn membership_is_that_of_the_walk() {
        let stops = Stops::new(70_000, Some(40_000));
        let walk = all(70_000, Some(40_000), 0);
        let members: Vec<usize> = (0..=70_000).filter(|&p| stops.contains(p)).collect();
        assert_eq!(members, walk);
    }

    #[test]
    fn a_boundary_crossed_by_drafts_is_saved_with_records() {
        assert_eq!(newest_boundary(61, 63), None);
        assert_eq!(newest_boundary(61, 64), Some((64, 3)));
        assert_eq!(newest_boundary(63, 66), Some((64, 1)));
        assert_eq!(newest_boundary(64, 66), Some((64, 0)));
        assert_eq!(newest_boundary(65, 66), None, "the state is beyond it");
        assert_eq!(newest_boundary(0, 3), None);
        assert_eq!(newest_boundary(60, 130), Some((128, 68)));
    }
}
