//! The best tokens of a row, without sorting it.
//!
//! One order holds everywhere: the higher logit first, then the lower token id. A vocabulary has some hundred thousand
//! entries and hardly ever more than a few are wanted, so the best are kept in a short list that grows to twice its size
//! and is cut again; nearly every entry costs one comparison.

use std::cmp::Ordering;

/// A logit and its token.
pub(crate) type Entry = (f32, u32);

/// Higher logit first, then lower token. Adding zero makes both zeros one.
pub(crate) fn by_rank(a: &Entry, b: &Entry) -> Ordering {
    (b.0 + 0.0).total_cmp(&(a.0 + 0.0)).then(a.1.cmp(&b.1))
}

/// Leaves the `n` first of `entries` by [`by_rank`] in `kept`, in no order; all when there are fewer. Entries must come
/// by ascending token.
pub(crate) fn select(entries: impl Iterator<Item = Entry>, n: usize, kept: &mut Vec<Entry>) {
    kept.clear();
    if n == 0 {
        return;
    }
    let room = n.saturating_mul(2).max(64);
    let mut least = f32::NEG_INFINITY;
    let mut full = false;
    for entry in entries {
        // An equal logit comes with a higher token, behind the `n` that are already there.
        if full && entry.0 <= least {
            continue;
        }
        kept.push(entry);
        if kept.len() == room {
            least = cut(kept, n);
            full = true;
        }
    }
    if kept.len() > n {
        cut(kept, n);
    }
}

/// Keeps the first `n` of more than `n` entries and gives the last one's logit.
fn cut(kept: &mut Vec<Entry>, n: usize) -> f32 {
    kept.select_nth_unstable_by(n - 1, by_rank);
    kept.truncate(n);
    kept[n - 1].0
}

/// Token and value of the largest logit, the first of equals.
pub(crate) fn largest(logits: &[f32]) -> Result<(u32, f32), &'static str> {
    const LANES: usize = 16;
    // The maximum skips what is not a number, so that is looked for on its own; both loops are plain enough for vectors.
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut sound = true;
    let chunks = logits.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = if logit > *lane { logit } else { *lane };
            sound &= !logit.is_nan();
        }
    }
    let max = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |max, &logit| if logit > max { logit } else { max });
    if !sound || rest.iter().any(|logit| logit.is_nan()) {
        return Err("a logit is not a number; the weights are damaged or the computation overflowed");
    }
    if max == f32::INFINITY {
        return Err("a logit is infinite; the weights are damaged or the computation overflowed");
    }
    if max == f32::NEG_INFINITY {
        return Err("every token is excluded");
    }
    let at = logits.iter().position(|&logit| logit >= max).unwrap_or(0);
    Ok((at as u32, max))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_best_are_those_of_a_sorted_row(
            // Few values, so that ties are common.
            row in proptest::collection::vec((-6i8..6).prop_map(|v| if v == 5 { -0.0 } else { f32::from(v) / 2.0 }), 1..400),
            n in 0usize..420,
        ) {
            let mut sorted: Vec<Entry> = row.iter().copied().zip(0u32..).collect();
            sorted.sort_by(by_rank);
            sorted.truncate(n);
            let mut kept = Vec::new();
            select(row.iter().copied().zip(0u32..), n, &mut kept);
            kept.sort_by(by_rank);
            prop_assert_eq!(kept, sorted);
        }

        #[test]
        fn the_largest_is_the_first_of_equals(row in proptest::collection::vec(-9i8..9, 1..100)) {
            let row: Vec<f32> = row.into_iter().map(f32::from).collect();
            let mut sorted: Vec<Entry> = row.iter().copied().zip(0u32..).collect();
            sorted.sort_by(by_rank);
            prop_assert_eq!(largest(&row), Ok((sorted[0].1, sorted[0].0)));
        }
    }

    #[test]
    fn damage_is_seen_anywhere() {
        for at in [0, 15, 16, 31, 32, 36] {
            let mut row = vec![1.0f32; 37];
            row[at] = f32::NAN;
            assert!(largest(&row).is_err(), "{at}");
            row[at] = f32::INFINITY;
            assert!(largest(&row).is_err(), "{at}");
        }
        assert!(largest(&[f32::NEG_INFINITY; 40]).is_err());
        assert!(largest(&[]).is_err());
        assert_eq!(largest(&[-0.0, 0.0]), Ok((0, -0.0)));
    }
}
