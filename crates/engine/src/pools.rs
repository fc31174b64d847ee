//! Slots, state checkpoints and pages of the caches, lent by guards.
//!
//! A guard gives back what it holds when it is dropped, whatever the reason: the end of a sequence, an abort, a refusal
//! between a prefix hit and the admission, an error on the way. [`Slot`] is one owner's; [`Page`] is shared by its clones;
//! the prefix tree keeps pages beside their holders, so a page that only the tree keeps is *idle*: it can be hit again, and
//! it can be evicted.
//!
//! Invariant: a page is in exactly one of three places: free (nobody holds it, the tree does not keep it), idle (only the
//! tree keeps it), held. All counts are kept, never recounted.
//!
//! [`need`] is the only place that knows what a sequence takes: sizing at boot, admission and allocation call it. A request
//! that needs more than there is in all is refused when it is submitted; every other one fits as soon as what runs before
//! it ends, so nothing waits forever.

mod table;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use glimmer_tensor::PAGE_TOKENS;

pub use table::PageTable;

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

/// The slots and pages of one model. Clones are the same pools.
#[derive(Debug, Clone)]
pub struct Pools {
    shared: Arc<Shared>,
}

impl Pools {
    /// Pools of so many slots of running sequences (ids `0 .. slots`), slots of state checkpoints (ids
    /// `slots .. slots + checkpoints`, so the model's cache has both) and pages, all free.
    pub fn new(slots: usize, checkpoints: usize, pages: usize) -> Self {
        let descending = |from: usize, n: usize| (from as u32..(from + n) as u32).rev().collect();
        let state = State {
            slots: descending(0, slots),
            checkpoints: descending(slots, checkpoints),
            free: descending(0, pages),
            pages: vec![PageState::default(); pages],
            idle: 0,
            released: Vec::new(),
        };
        let all = Need { slots, pages };
        Self { shared: Arc::new(Shared { all, checkpoints, state: Mutex::new(state) }) }
    }

    /// All slots of running sequences and all pages, lent or not.
    pub fn all(&self) -> Need {
        self.shared.all
    }

    /// Free slots of running sequences and free pages. Idle pages are not among them.
    pub fn free(&self) -> Need {
        let state = self.shared.lock();
        Need { slots: state.slots.len(), pages: state.free.len() }
    }

    /// Pages that only the prefix tree keeps.
    pub fn idle(&self) -> usize {
        self.shared.lock().idle
    }

    /// All slots of state checkpoints.
    pub fn all_checkpoints(&self) -> usize {
        self.shared.checkpoints
    }

    /// Free slots of state checkpoints.
    pub fn free_checkpoints(&self) -> usize {
        self.shared.lock().checkpoints.len()
    }

    /// A slot for a running sequence, `None` when all are lent.
    pub fn slot(&self) -> Option<Slot> {
        let id = self.shared.lock().slots.pop()?;
        Some(Slot { id, shared: Arc::clone(&self.shared) })
    }

    /// A slot for a state checkpoint, `None` when all are lent ([`crate::prefix::PrefixTree::evict_state`] gives one up).
    pub fn checkpoint(&self) -> Option<Slot> {
        let id = self.shared.lock().checkpoints.pop()?;
        Some(Slot { id, shared: Arc::clone(&self.shared) })
    }

    /// A free page, `None` when there is none ([`crate::prefix::PrefixTree::evict_pages`] frees idle ones).
    pub fn page(&self) -> Option<Page> {
        let mut state = self.shared.lock();
        let id = state.free.pop()?;
        state.pages[id as usize].holders = 1;
        drop(state);
        Some(self.shared.page(id))
    }

    /// So many free pages, all or nothing.
    pub fn pages(&self, count: usize) -> Option<Vec<Page>> {
        let mut state = self.shared.lock();
        let keep = state.free.len().checked_sub(count)?;
        let ids = state.free.split_off(keep);
        for &id in &ids {
            state.pages[id as usize].holders = 1;
        }
        drop(state);
        Some(ids.into_iter().rev().map(|id| self.shared.page(id)).collect())
    }

    /// Makes the tree a keeper of a held page. `None` when it already keeps it.
    pub(crate) fn keep(&self, page: &Page) -> Option<Kept> {
        let kept = &mut self.shared.lock().pages[page.id as usize].kept;
        (!std::mem::replace(kept, true)).then(|| Kept { id: page.id, shared: Arc::clone(&self.shared) })
    }

    /// Pages that became idle since the last call and still are, appended to `into`.
    pub(crate) fn take_released(&self, into: &mut Vec<u32>) {
        let state = &mut *self.shared.lock();
        for id in state.released.drain(..) {
            let page = &mut state.pages[id as usize];
            page.queued = false;
            if page.kept && page.holders == 0 {
                into.push(id);
            }
        }
    }
}

/// A slot of the model's cache, one owner's; given back on drop.
#[derive(Debug)]
pub struct Slot {
    id: u32,
    shared: Arc<Shared>,
}

impl Slot {
    /// Index in the model's cache.
    pub fn id(&self) -> u32 {
        self.id
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if (self.id as usize) < self.shared.all.slots {
            state.slots.push(self.id);
        } else {
            state.checkpoints.push(self.id);
        }
    }
}

/// A page, shared by its clones and given back when the last one is dropped.
#[derive(Debug, Clone)]
pub struct Page {
    id: u32,
    lease: Arc<Lease>,
}

impl Page {
    /// Index in the model's cache.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Whether another holder or the prefix tree has it too. A shared page is full and final: nobody writes it.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.lease) > 1 || {
            let page = &self.lease.shared.lock().pages[self.id as usize];
            page.kept || page.holders > 1
        }
    }

    /// Whether anybody but this holder has it, the prefix tree not counted.
    pub(crate) fn has_other_holders(&self) -> bool {
        Arc::strong_count(&self.lease) > 1
    }

    pub(crate) fn weak(&self) -> WeakPage {
        WeakPage(Arc::downgrade(&self.lease))
    }
}

/// Finds the holders of a page without being one.
#[derive(Debug)]
pub(crate) struct WeakPage(Weak<Lease>);

impl WeakPage {
    /// Whether somebody holds the page.
    pub(crate) fn is_held(&self) -> bool {
        self.0.strong_count() > 0
    }
}

/// The tree's share of a page.
#[derive(Debug)]
pub(crate) struct Kept {
    id: u32,
    shared: Arc<Shared>,
}

impl Kept {
    /// Another holder of the page.
    pub(crate) fn hold(&self, holders: &mut WeakPage) -> Page {
        if let Some(lease) = holders.0.upgrade() {
            return Page { id: self.id, lease };
        }
        let mut state = self.shared.lock();
        let page = &mut state.pages[self.id as usize];
        page.holders += 1;
        if page.holders == 1 {
            state.idle -= 1;
        }
        drop(state);
        let page = self.shared.page(self.id);
        *holders = page.weak();
        page
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let state = &mut *self.shared.lock();
        let page = &mut state.pages[self.id as usize];
        page.kept = false;
        if page.holders == 0 {
            state.idle -= 1;
            state.free.push(self.id);
        }
    }
}

/// What the clones of a [`Page`] share.
#[derive(Debug)]
struct Lease {
    id: u32,
    shared: Arc<Shared>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let state = &mut *self.shared.lock();
        let page = &mut state.pages[self.id as usize];
        page.holders -= 1;
        if page.holders > 0 {
            return;
        }
        if !page.kept {
            state.free.push(self.id);
            return;
        }
        state.idle += 1;
        if !page.queued {
            page.queued = true;
            state.released.push(self.id);
        }
    }
}

#[derive(Debug)]
struct Shared {
    all: Need,
    checkpoints: usize,
    state: Mutex<State>,
}

impl Shared {
    /// Every list and count is valid whenever the lock is free, so a panic elsewhere does not spoil them.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A guard of a page whose holder is counted already.
    fn page(self: &Arc<Self>, id: u32) -> Page {
        Page { id, lease: Arc::new(Lease { id, shared: Arc::clone(self) }) }
    }
}

#[derive(Debug)]
struct State {
    /// Free ones; the last is lent next. So are the others.
    slots: Vec<u32>,
    checkpoints: Vec<u32>,
    free: Vec<u32>,
    /// By page.
    pages: Vec<PageState>,
    /// Pages kept and not held.
    idle: usize,
    /// Pages that became idle and of which the tree has not heard; each at most once.
    released: Vec<u32>,
}

#[derive(Debug, Clone, Default)]
struct PageState {
    /// Leases, not clones of pages: 0 or 1 but for the moment in which one ends while the tree makes another.
    holders: u32,
    kept: bool,
    /// In `released`.
    queued: bool,
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
        let pools = Pools::new(2, 0, 3);
        let mut table = PageTable::default();
        assert!(table.grow(&pools, 2));
        assert!(pools.pages(2).is_none() && !PageTable::default().grow(&pools, 2));
        assert_eq!(pools.free(), Need { slots: 2, pages: 1 });
        drop(table);
        assert_eq!(pools.free(), pools.all());
    }

    #[test]
    fn slots_of_sequences_and_of_checkpoints_are_apart_and_return_to_their_own() {
        let pools = Pools::new(2, 3, 0);
        let running: Vec<Slot> = std::iter::from_fn(|| pools.slot()).collect();
        let saved: Vec<Slot> = std::iter::from_fn(|| pools.checkpoint()).collect();
        assert_eq!(running.iter().map(Slot::id).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(saved.iter().map(Slot::id).collect::<Vec<_>>(), [2, 3, 4]);
        drop(saved);
        assert_eq!((pools.free().slots, pools.free_checkpoints()), (0, 3));
        drop(running);
        assert_eq!((pools.free().slots, pools.free_checkpoints()), (2, 3));
    }

    #[test]
    fn a_page_returns_with_its_last_clone() {
        let pools = Pools::new(0, 0, 1);
        let page = pools.page().unwrap();
        assert!(!page.is_shared());
        let clone = page.clone();
        assert!(page.is_shared() && clone.id() == page.id());
        drop(page);
        assert!(pools.page().is_none() && !clone.is_shared());
        drop(clone);
        assert_eq!(pools.free().pages, 1);
    }

    #[test]
    fn a_kept_page_is_idle_until_it_is_held_and_free_when_the_tree_lets_go() {
        let pools = Pools::new(0, 0, 1);
        let page = pools.page().unwrap();
        let kept = pools.keep(&page).unwrap();
        assert!(pools.keep(&page).is_none(), "one keeper");
        assert!(page.is_shared());
        let mut holders = page.weak();
        assert_eq!(pools.idle(), 0);
        drop(page);
        assert_eq!((pools.idle(), pools.free().pages), (1, 0));
        let again = kept.hold(&mut holders);
        let twice = kept.hold(&mut holders);
        assert_eq!((pools.idle(), again.id(), twice.id()), (0, 0, 0));
        drop((again, twice));
        let mut released = Vec::new();
        pools.take_released(&mut released);
        assert_eq!(released, [0], "two releases between two looks are one");
        drop(kept);
        assert_eq!((pools.idle(), pools.free().pages), (0, 1));
        pools.take_released(&mut released);
        assert_eq!(released, [0]);
    }

    #[test]
    fn a_held_page_outlives_the_tree() {
        let pools = Pools::new(0, 0, 1);
        let page = pools.page().unwrap();
        drop(pools.keep(&page));
        assert_eq!((pools.idle(), pools.free().pages), (0, 0));
        drop(page);
        assert_eq!(pools.free().pages, 1);
    }

    proptest::proptest! {
        #[test]
        fn nothing_is_lent_twice_and_everything_comes_back(actions in proptest::collection::vec((0usize..200, 0usize..8), 1..120)) {
            let pools = Pools::new(4, 0, 12);
            let mut held: Vec<(Slot, PageTable)> = Vec::new();
            for (tokens, victim) in actions {
                let mut table = PageTable::default();
                let slot = pools.slot().filter(|_| table.grow(&pools, need(tokens + 1).pages));
                match slot {
                    Some(slot) => held.push((slot, table)),
                    // Whatever fits the pools in all fits once nothing runs.
                    None if held.is_empty() => proptest::prop_assert!(need(tokens + 1).pages > pools.all().pages),
                    None => drop(held.swap_remove(victim % held.len())),
                }
                let slots: BTreeSet<u32> = held.iter().map(|(slot, _)| slot.id()).collect();
                let pages: Vec<u32> = held.iter().flat_map(|(_, table)| table.ids().iter().copied()).collect();
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
