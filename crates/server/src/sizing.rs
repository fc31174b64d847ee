//! How many sequences and pages a budget of memory holds.
//!
//! Slots (a sequence's recurrent state) and pages (tokens) share the budget. Invariant: what is given out always holds one
//! sequence of the full context, so that no request which passes the length check waits for ever; otherwise the server does
//! not start. Where sequences do not fit they are fewer, which costs throughput only, and that is said.

use crate::flags::config::MaxModelLen;

/// Bytes of the units that the budget is spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitBytes {
    /// One slot over all layers.
    pub slot: u64,
    /// One page over all layers.
    pub page: u64,
    /// Tokens of a page.
    pub page_tokens: u64,
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Running sequences.
    pub sequences: u64,
    /// Whether somebody asked for just that many.
    pub sequences_given: bool,
    /// Saved states for prefix reuse; none without prefix caching.
    pub checkpoints: u64,
    /// Length of a sequence.
    pub length: MaxModelLen,
    /// Most tokens that the model was made for.
    pub longest: u64,
    /// Whether pages beyond those of all sequences at full length are of use.
    pub prefix_caching: bool,
}

/// What is given out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Running sequences.
    pub sequences: u64,
    /// Saved states.
    pub checkpoints: u64,
    /// Most tokens of a sequence.
    pub length: u64,
    /// Pages.
    pub pages: u64,
    /// What became less than asked for; the flag says whether it was asked for explicitly.
    pub notes: Vec<(bool, String)>,
}

/// Why nothing can be given out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Not one sequence of the length fits.
    #[error(
        "error: --max-model-len {length}: one sequence of that length needs {needed} bytes of cache, and there are \
         {budget}; the longest that fits is about {fits} tokens (--max-model-len auto takes it), or give more memory with \
         --kv-cache-memory-bytes or --gpu-memory-utilization"
    )]
    Length {
        /// Tokens asked for.
        length: u64,
        /// Bytes for them.
        needed: u64,
        /// Bytes there are.
        budget: u64,
        /// Tokens that would fit.
        fits: u64,
    },
    /// Not even one page and one slot fit.
    #[error(
        "error: the cache gets {budget} bytes, and one sequence of one page needs {needed}; give more memory with \
         --kv-cache-memory-bytes or --gpu-memory-utilization"
    )]
    Nothing {
        /// Bytes for it.
        needed: u64,
        /// Bytes there are.
        budget: u64,
    },
    /// A device is too small.
    #[error("error: {0}")]
    Device(String),
    /// More was asked for than is free.
    #[error("error: --kv-cache-memory-bytes {asked}: only {free} bytes are free on this machine")]
    NotFree {
        /// Bytes asked for.
        asked: u64,
        /// Bytes free.
        free: u64,
    },
}

/// Share of what is left beside running sequences that saved states may take.
const CHECKPOINT_SHARE: u64 = 4;

/// Spends the budget.
///
/// # Errors
/// [`SizeError`] when one sequence of the full length does not fit.
pub fn spend(budget: u64, unit: UnitBytes, wish: &Wish) -> Result<Sizes, SizeError> {
    let least = unit.slot + unit.page;
    if budget < least {
        return Err(SizeError::Nothing { needed: least, budget });
    }
    let pages_of = |tokens: u64| tokens.div_ceil(unit.page_tokens);
    let fits = ((budget - unit.slot) / unit.page).saturating_mul(unit.page_tokens).min(wish.longest);
    let length = match wish.length {
        MaxModelLen::WhatFits => fits,
        MaxModelLen::Tokens(tokens) => tokens as u64,
    };
    let needed = unit.slot.saturating_add(pages_of(length).saturating_mul(unit.page));
    if needed > budget {
        return Err(SizeError::Length { length, needed, budget, fits });
    }
    let mut notes = Vec::new();
    // Beside the pages of one full sequence each further one pins its slot and at least one page.
    let room = 1 + (budget - needed) / least;
    let sequences = wish.sequences.min(room);
    if sequences < wish.sequences {
        let what = format!("--max-num-seqs {}: the cache holds the states of {sequences} sequences", wish.sequences);
        notes.push((wish.sequences_given, what));
    }
    let rest = budget - needed - (sequences - 1) * least;
    let checkpoints = if wish.prefix_caching { wish.checkpoints.min(rest / CHECKPOINT_SHARE / unit.slot) } else { 0 };
    if wish.prefix_caching && checkpoints < wish.checkpoints {
        notes.push((false, format!("--state-checkpoints {}: there is room for {checkpoints}", wish.checkpoints)));
    }
    let most_pages = (budget - (sequences + checkpoints) * unit.slot) / unit.page;
    let useful = if wish.prefix_caching { u64::MAX } else { sequences.saturating_mul(pages_of(length)) };
    // Pages have 32-bit numbers.
    let pages = most_pages.min(useful).min(u64::from(u32::MAX));
    Ok(Sizes { sequences, checkpoints, length, pages, notes })
}

/// Bytes of memory of this machine: all and free, within the limits of its control group. `None` where the system does not
/// tell.
#[must_use]
pub fn host_memory() -> Option<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let (total, free) = (meminfo(&text, "MemTotal:")?, meminfo(&text, "MemAvailable:")?);
    let number = |path: &str| std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok());
    let limit = number("/sys/fs/cgroup/memory.max").unwrap_or(u64::MAX);
    let used = number("/sys/fs/cgroup/memory.current").unwrap_or(0);
    Some((total.min(limit), free.min(limit.saturating_sub(used))))
}

fn meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1 << 10)
}

/// Bytes of the cache on the CPU where nobody says: enough to work with, little enough to share the machine.
pub(crate) const CPU_DEFAULT: u64 = 4 << 30;

/// Bytes that the cache may take on the CPU: what was asked for, or a share of the machine beside the weights, or a modest
/// default.
///
/// # Errors
/// [`SizeError::NotFree`].
pub fn cpu_budget(
    asked: Option<u64>,
    share: Option<f64>,
    weights: u64,
    host: Option<(u64, u64)>,
) -> Result<u64, SizeError> {
    match (asked, share, host) {
        (Some(asked), _, Some((_, free))) if asked > free => Err(SizeError::NotFree { asked, free }),
        (Some(asked), _, _) => Ok(asked),
        (None, Some(share), Some((total, free))) => {
            Ok(((total as f64 * share) as u64).saturating_sub(weights).min(free))
        }
        (None, _, Some((_, free))) => Ok(CPU_DEFAULT.min(free)),
        (None, _, None) => Ok(CPU_DEFAULT),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UNIT: UnitBytes = UnitBytes { slot: 1000, page: 100, page_tokens: 64 };

    fn wish(sequences: u64, tokens: usize) -> Wish {
        Wish {
            sequences,
            sequences_given: true,
            checkpoints: 8,
            length: MaxModelLen::Tokens(tokens),
            longest: 1 << 20,
            prefix_caching: false,
        }
    }

    #[test]
    fn plenty_gives_what_was_asked_for() {
        let sizes = spend(1 << 30, UNIT, &wish(4, 6400)).unwrap();
        assert_eq!((sizes.sequences, sizes.length, sizes.pages, sizes.checkpoints), (4, 6400, 400, 0));
        assert!(sizes.notes.is_empty());
        let sizes = spend(100_000, UNIT, &Wish { prefix_caching: true, ..wish(4, 640) }).unwrap();
        assert_eq!((sizes.checkpoints, sizes.pages), (8, (100_000 - 12_000) / 100));
    }

    #[test]
    fn sequences_that_do_not_fit_are_fewer_and_that_is_said() {
        // One full sequence takes 2000; 8000 more are seven slots with a page each.
        let sizes = spend(10_000, UNIT, &wish(512, 640)).unwrap();
        assert_eq!((sizes.sequences, sizes.pages), (8, 20));
        assert_eq!(sizes.notes.len(), 1);
        assert!(sizes.notes[0].0 && sizes.notes[0].1.contains("--max-num-seqs 512"), "{:?}", sizes.notes);
    }

    #[test]
    fn a_length_that_does_not_fit_is_refused_with_the_one_that_does() {
        let error = spend(2000, UNIT, &wish(1, 641)).unwrap_err();
        assert_eq!(error, SizeError::Length { length: 641, needed: 2100, budget: 2000, fits: 640 });
        let sizes = spend(2000, UNIT, &Wish { length: MaxModelLen::WhatFits, ..wish(1, 0) }).unwrap();
        assert_eq!((sizes.length, sizes.sequences, sizes.pages), (640, 1, 10));
        assert!(matches!(spend(1099, UNIT, &wish(1, 1)), Err(SizeError::Nothing { needed: 1100, .. })));
    }

    #[test]
    fn the_budget_is_what_was_asked_for_or_a_share_or_modest() {
        let host = Some((100 << 30, 50 << 30));
        assert_eq!(cpu_budget(Some(1), None, 0, host), Ok(1));
        assert_eq!(
            cpu_budget(Some(60 << 30), None, 0, host),
            Err(SizeError::NotFree { asked: 60 << 30, free: 50 << 30 })
        );
        assert_eq!(cpu_budget(None, Some(0.5), 10 << 30, host), Ok(40 << 30));
        assert_eq!(cpu_budget(None, Some(0.9), 10 << 30, host), Ok(50 << 30), "no more than is free");
        assert_eq!(cpu_budget(None, None, 0, host), Ok(4 << 30));
        assert_eq!(cpu_budget(None, None, 0, Some((2 << 30, 1 << 30))), Ok(1 << 30));
    }

    #[test]
    fn the_systems_figures_are_read() {
        assert_eq!(meminfo("MemTotal:       24 kB\nMemAvailable:   3 kB\n", "MemAvailable:"), Some(3072));
        assert_eq!(meminfo("", "MemTotal:"), None);
    }

    proptest! {
        #[test]
        fn whatever_is_given_out_fits_and_holds_one_full_sequence(
            budget in 0_u64..1_000_000, slot in 1_u64..5000, page in 1_u64..500, sequences in 1_u64..600,
            tokens in 1_usize..100_000, fits in any::<bool>(), prefix_caching in any::<bool>(), checkpoints in 0_u64..100,
        ) {
            let unit = UnitBytes { slot, page, page_tokens: 64 };
            let length = if fits { MaxModelLen::WhatFits } else { MaxModelLen::Tokens(tokens) };
            let wish = Wish { length, prefix_caching, checkpoints, ..wish(sequences, tokens) };
            if let Ok(sizes) = spend(budget, unit, &wish) {
                prop_assert!((sizes.sequences + sizes.checkpoints) * slot + sizes.pages * page <= budget);
                prop_assert!(sizes.pages >= sizes.length.div_ceil(64) && sizes.sequences >= 1 && sizes.length >= 1);
                prop_assert!(sizes.pages >= sizes.sequences);
                prop_assert!(sizes.sequences <= sequences && sizes.checkpoints <= checkpoints);
            }
        }
    }
}
