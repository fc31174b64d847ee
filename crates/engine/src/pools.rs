//! Slots and pages of the caches, lent by guards.
//!
//! A sequence needs one slot and the pages of its longest possible extent ([`need`], the only place that knows). Both are
//! taken when it is admitted and come back when its [`Reservation`] is dropped, whatever the reason. A request that needs
//! more than there is in all is refused when it is submitted; every other one fits as soon as what runs before it ends, so
//! nothing waits forever.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use glimmer_tensor::PAGE_TOKENS;

/// What a sequence needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    /// Slots.
    pub slots: usize,
    /// Pages.
    pub pages: usize,
}

/// What a sequence of up to `tokens` tokens (prompt, output and nothing beyond) needs.
pub fn need(tokens: usize) -> Need {
    Need { slots: 1, pages: tokens.div_ceil(PAGE_TOKENS) }
}

/// The slots and pages of one model.
#[derive(Debug, Clone)]
pub struct Pools {
    free: Arc<Mutex<Free>>,
    all: Need,
}

#[derive(Debug)]
struct Free {
    /// Free ones; the last is lent next.
    slots: Vec<u32>,
    pages: Vec<u32>,
}

/// A slot and pages, given back on drop.
#[derive(Debug)]
pub struct Reservation {
    slot: u32,
    pages: Vec<u32>,
    free: Arc<Mutex<Free>>,
}

impl Pools {
    /// Pools of so many slots and pages, all free.
    pub fn new(slots: usize, pages: usize) -> Self {
        let descending = |n: usize| (0..n as u32).rev().collect();
        let free = Free { slots: descending(slots), pages: descending(pages) };
        Self { free: Arc::new(Mutex::new(free)), all: Need { slots, pages } }
    }

    /// All slots and pages, lent or not.
    pub fn all(&self) -> Need {
        self.all
    }

    /// Free slots and pages.
    pub fn free(&self) -> Need {
        let free = lock(&self.free);
        Need { slots: free.slots.len(), pages: free.pages.len() }
    }

    /// Takes what is needed, all or nothing.
    pub fn reserve(&self, need: Need) -> Option<Reservation> {
        let mut free = lock(&self.free);
        if need.slots > free.slots.len() || need.pages > free.pages.len() {
            return None;
        }
        let slot = free.slots.pop()?;
        let keep = free.pages.len() - need.pages;
        let mut pages = free.pages.split_off(keep);
        pages.reverse();
        Some(Reservation { slot, pages, free: Arc::clone(&self.free) })
    }
}

impl Reservation {
    /// The slot.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// The page table: page `i` holds tokens `64 i .. 64 i + 63`.
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut free = lock(&self.free);
        free.slots.push(self.slot);
        free.pages.extend(self.pages.drain(..).rev());
    }
}

/// The lists are valid after every statement, so a panic elsewhere does not spoil them.
fn lock(free: &Mutex<Free>) -> MutexGuard<'_, Free> {
    free.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn need_counts_whole_pages() {
        assert_eq!((need(1).pages, need(64).pages, need(65).pages), (1, 1, 2));
        assert_eq!(need(1).slots, 1);
    }

    #[test]
    fn all_or_nothing() {
        let pools = Pools::new(2, 3);
        let first = pools.reserve(Need { slots: 1, pages: 2 }).unwrap();
        assert!(pools.reserve(Need { slots: 1, pages: 2 }).is_none());
        assert_eq!(pools.free(), Need { slots: 1, pages: 1 });
        drop(first);
        assert_eq!(pools.free(), pools.all());
    }

    proptest::proptest! {
        #[test]
        fn nothing_is_lent_twice_and_everything_comes_back(actions in proptest::collection::vec((0usize..200, 0usize..8), 1..120)) {
            let pools = Pools::new(4, 12);
            let mut held: Vec<Reservation> = Vec::new();
            for (tokens, victim) in actions {
                match pools.reserve(need(tokens + 1)) {
                    Some(reservation) => held.push(reservation),
                    // Whatever fits the pools in all fits once nothing runs.
                    None if held.is_empty() => proptest::prop_assert!(need(tokens + 1).pages > pools.all().pages),
                    None => drop(held.swap_remove(victim % held.len())),
                }
                let slots: BTreeSet<u32> = held.iter().map(Reservation::slot).collect();
                let pages: Vec<u32> = held.iter().flat_map(|r| r.pages().iter().copied()).collect();
                let distinct: BTreeSet<u32> = pages.iter().copied().collect();
                proptest::prop_assert_eq!(slots.len(), held.len());
                proptest::prop_assert_eq!(distinct.len(), pages.len());
                proptest::prop_assert_eq!(pools.free().pages + pages.len(), pools.all().pages);
                proptest::prop_assert_eq!(pools.free().slots + held.len(), pools.all().slots);
            }
            drop(held);
            proptest::prop_assert_eq!(pools.free(), pools.all());
        }
    }
}
