//! The best tokens of a row, without sorting it.
//!
//! One order holds everywhere: the higher logit first, then the lower token id. A vocabulary has some hundred thousand
//! entries and hardly ever more than a few are wanted, so the best are kept in a short list that grows to twice its size
//! and is cut again; nearly every entry costs one comparison.

use std::cmp::Ordering;

pub(crate) use glimmer_tensor::sample::largest;

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
}
