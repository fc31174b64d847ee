//! Log-probabilities of a row: of one token, its rank, and the best ones.
//!
//! They are those of the raw logits, before bias, penalties and temperature. Ranks count by logit, then by token id, so
//! the token of rank `r` is the `r`-th of the best ones. Sums are in f64; ids that do not exist (their logits are minus
//! infinity) have no share and are never among the best.

use crate::{
    best::{Entry, by_rank, largest, select},
    request::Logprobs,
    softmax::Weighing,
};

/// Reads log-probabilities off rows, with reusable scratch.
#[derive(Debug, Default)]
pub struct Reader {
    kept: Vec<Entry>,
}

impl Reader {
    /// Log-probabilities at a row of raw logits `[vocabulary]` that predicts `token`, and of the `best` best tokens (fewer
    /// when fewer exist).
    ///
    /// # Errors
    /// Says what is wrong with the logits, or that the row has no such token.
    pub fn read(&mut self, logits: &[f32], token: u32, best: usize) -> Result<Logprobs, &'static str> {
        let own = *logits.get(token as usize).ok_or("the token is beyond the vocabulary")?;
        let (_, max) = largest(logits)?;
        let log_sum = f64::from(max) + Weighing::plain(max).mass(logits).ln();
        let logprob = |logit: f32| (f64::from(logit) - log_sum) as f32;
        let (before, behind) = logits.split_at(token as usize);
        let ahead = before.iter().filter(|&&l| l >= own).count() + behind.iter().filter(|&&l| l > own).count();
        let existing = logits.iter().copied().zip(0u32..).filter(|entry| entry.0 > f32::NEG_INFINITY);
        select(existing, best, &mut self.kept);
        self.kept.sort_unstable_by(by_rank);
        let top = self.kept.iter().map(|&(logit, id)| (id, logprob(logit))).collect();
        Ok(Logprobs { id: token, logprob: logprob(own), rank: ahead as u32 + 1, top })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn probabilities_ranks_and_the_best() {
        let row = [0.1f32, 0.4, 0.2, 0.3].map(f32::ln);
        let read = Reader::default().read(&row, 2, 3).unwrap();
        assert_eq!((read.id, read.rank), (2, 3));
        assert!((read.logprob - 0.2f32.ln()).abs() < 1e-6);
        assert_eq!(read.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 3, 2]);
        assert!((read.top[0].1 - 0.4f32.ln()).abs() < 1e-6);
        assert!(Reader::default().read(&row, 2, 0).unwrap().top.is_empty());
    }

    #[test]
    fn all_of_the_vocabulary_can_be_asked_for_and_what_does_not_exist_is_left_out() {
        let row = [1.0, f32::NEG_INFINITY, 3.0, 2.0, f32::NEG_INFINITY];
        let read = Reader::default().read(&row, 0, 5).unwrap();
        assert_eq!(read.top.iter().map(|t| t.0).collect::<Vec<_>>(), [2, 3, 0]);
        let mass: f32 = read.top.iter().map(|t| t.1.exp()).sum();
        assert!((mass - 1.0).abs() < 1e-6);
    }

    #[test]
    fn unusable_rows_are_refused() {
        let mut reader = Reader::default();
        for row in [vec![0.0, f32::NAN], vec![f32::NEG_INFINITY; 2], vec![0.0, f32::INFINITY]] {
            assert!(reader.read(&row, 0, 1).is_err());
        }
        assert!(reader.read(&[0.0, 1.0], 2, 1).is_err());
    }

    proptest! {
        #[test]
        fn the_token_of_a_rank_is_the_one_at_that_place(
            row in proptest::collection::vec((-8i8..8).prop_map(f32::from), 1..100),
            token: prop::sample::Index,
        ) {
            let token = token.index(row.len()) as u32;
            let read = Reader::default().read(&row, token, row.len()).unwrap();
            let place = read.top[read.rank as usize - 1];
            prop_assert_eq!((place.0, place.1.to_bits()), (token, read.logprob.to_bits()));
            prop_assert!(read.top.windows(2).all(|w| w[0].1 >= w[1].1));
        }
    }
}
