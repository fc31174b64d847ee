//! Who goes first when room is needed.
//!
//! Leaves without a state first: nothing can hit them. Then leaves with a state. Both by the time of their last use, which
//! is when their last holder let go of them. Pages become idle without the tree being called; the pools remember which, and
//! the tree takes them in at its next call.
//!
//! States alone go by the time of the last hit, or of saving, but *passed tips* go before all others. A tip is a state at
//! the end of what a sequence knew; the sequence that continues it saves newer ones, so after one hit it is most likely
//! behind its conversation. A second hit shows the opposite and makes it recent like any other. In simulated agent
//! conversations with more states than slots this leaves up to a quarter less to compute than the plain order of last use
//! and is no worse where requests only share their beginnings, because those states are no tips.

use std::sync::Arc;

use super::{Node, PrefixTree, Rank, State};
use crate::pools::{PageTable, Slot};

impl PrefixTree {
    /// Gives up the first state in the order of eviction that nobody copies from. Its slot is free when the guard is dropped.
    pub fn evict_state(&mut self) -> Option<Slot> {
        self.settle();
        let unused =
            |&(.., id): &Rank| self.node(id).state.as_ref().is_some_and(|state| Arc::strong_count(&state.slot) == 1);
        let (.., victim) = self.states.iter().copied().find(unused)?;
        self.counters.evicted_states += 1;
        self.take_state(victim)
    }

    /// A slot for a state checkpoint: a free one, else that of [`PrefixTree::evict_state`].
    pub fn slot_for_state(&mut self) -> Option<Slot> {
        self.pools.checkpoint().or_else(|| self.evict_state())
    }

    /// Frees so many idle pages, fewer when there are not so many; gives how many. States at their ends go with them.
    pub fn evict_pages(&mut self, count: usize) -> usize {
        self.settle();
        let mut freed = 0;
        while freed < count {
            let Some((_, _, id)) = self.leaves.pop_first() else { break };
            self.remove_leaf(id);
            freed += 1;
        }
        self.counters.evicted_pages += freed as u64;
        freed
    }

    /// Grows a table, evicting what is needed for it, or does nothing when that cannot be enough: whether it has so many
    /// pages now.
    pub fn grow(&mut self, table: &mut PageTable, pages: usize) -> bool {
        let more = pages.saturating_sub(table.len());
        let free = self.pools.free().pages;
        if more > free {
            if more > free + self.pools.idle() {
                return false;
            }
            self.evict_pages(more - free);
        }
        table.grow(&self.pools, pages)
    }

    /// Removes a leaf that is in no order of eviction any more.
    fn remove_leaf(&mut self, id: u32) {
        let Some(node) = self.nodes[id as usize].take() else { return };
        self.by_key.remove(&node.key);
        if let Some(state) = &node.state {
            self.states.remove(&state.rank(id));
            self.counters.evicted_states += 1;
        }
        let Some(parent) = node.parent else { return };
        let above = self.node_mut(parent);
        above.children -= 1;
        if above.children == 0 && above.idle {
            let rank = above.rank(parent);
            self.leaves.insert(rank);
        }
    }

    /// Takes the state of a node, unless somebody copies from it.
    pub(super) fn take_state(&mut self, id: u32) -> Option<Slot> {
        let state = self.set_state(id, None)?;
        match Arc::try_unwrap(state.slot) {
            Ok(slot) => Some(slot),
            Err(slot) => {
                self.set_state(id, Some(State { slot, ..state }));
                None
            }
        }
    }
}

impl State {
    pub(super) fn rank(&self, id: u32) -> Rank {
        let passed = self.tip && self.hits == 1;
        (!passed, self.used, id)
    }
}

impl Node {
    pub(super) fn rank(&self, id: u32) -> Rank {
        (self.state.is_some(), self.used, id)
    }
}
