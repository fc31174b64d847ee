//! Reuse of what earlier sequences computed for the same beginning.
//!
//! A page of latents and pool keys is named by a hash chain over everything up to its end ([`PageKey`]), so equal names
//! mean equal contents, and the named pages form a tree. Pages alone continue nothing: the recurrent layers need their
//! state at the place where a sequence goes on. States are saved in slots of their own at a few page boundaries
//! ([`Stops`]). A hit is the deepest saved state on the sequence's chain; it yields guards of the pages before it and of the
//! slot to copy from.
//!
//! # Invariants
//! - What is in the tree is final: pages and states are published after the step that wrote them has been taken in, and only
//!   full pages have keys.
//! - A node's parent is in the tree, so the chain of every state is complete. Only leaves are evicted, and a state goes with
//!   its page.
//! - Whoever holds the page of a node holds the pages of all its ancestors: [`PrefixTree::publish`] exchanges pages for
//!   equal ones that are there already and adds none that others hold, and a hit lends the whole chain. Hence every idle
//!   page ([`Pools::idle`]) can be evicted, and their number is that of the evictable pages.
//!
//! All costs are O(log n) a page or state; nothing scans the tree.

mod counters;
mod evict;
mod keys;
mod stops;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use glimmer_tensor::PAGE_TOKENS;

use crate::pools::{Kept, Page, PageTable, Pools, Slot, WeakPage};

pub use counters::{Counters, Miss};
pub use keys::{MediaSpan, PageKey, PageKeys};
pub use stops::{LONG_STRIDE, Stops, newest_boundary};

/// The tree. There is one for its [`Pools`].
#[derive(Debug)]
pub struct PrefixTree {
    pools: Pools,
    /// By page.
    nodes: Vec<Option<Node>>,
    by_key: HashMap<PageKey, u32>,
    /// Idle leaves, next victim first.
    leaves: BTreeSet<Rank>,
    /// Nodes with a state, next victim first.
    states: BTreeSet<Rank>,
    /// Rises with every call.
    tick: u64,
    /// Rises when the tree is cleared, so that tables know that nothing of theirs is in it.
    generation: u64,
    /// Room for what the pools report.
    released: Vec<u32>,
    counters: Counters,
}

/// A page in the tree.
#[derive(Debug)]
struct Node {
    key: PageKey,
    page: Kept,
    holders: WeakPage,
    parent: Option<u32>,
    children: u32,
    /// Pages up to its end.
    depth: u32,
    /// Nobody holds the page, as far as the tree has heard.
    idle: bool,
    /// When it became idle.
    used: u64,
    state: Option<State>,
}

#[derive(Debug)]
struct State {
    slot: Arc<Slot>,
    fold: usize,
    used: u64,
    /// Tick of saving: identity.
    saved: u64,
    tip: bool,
    hits: u64,
}

/// Place in an order of eviction: whether it stays longer (a page with a state, a state that is no passed tip), last use,
/// page.
type Rank = (bool, u64, u32);

/// A state to save: a slot of [`Pools::checkpoint`] into which the sequence's slot was copied.
#[derive(Debug)]
pub struct SavedState {
    /// The copy. Its state covers all positions before the boundary but the last `fold`.
    pub slot: Slot,
    /// Records of its ring to fold in before the boundary.
    pub fold: usize,
}

/// Names a saved state for its owner, see [`PrefixTree::withdraw`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket {
    node: u32,
    saved: u64,
}

/// Keeps the slot of a saved state from being reused while somebody copies from it.
#[derive(Debug, Clone)]
pub struct SlotRef(Arc<Slot>);

impl SlotRef {
    /// Index in the model's cache.
    pub fn id(&self) -> u32 {
        self.0.id()
    }
}

/// What a look-up found.
#[derive(Debug)]
pub struct Hit {
    /// Tokens that need not be computed, a multiple of [`PAGE_TOKENS`].
    pub position: usize,
    /// Their pages.
    pub table: PageTable,
    /// Slot to copy into the sequence's own.
    pub state: SlotRef,
    /// Records to fold at the first step.
    pub fold: usize,
}

impl PrefixTree {
    /// An empty tree over the pools.
    pub fn new(pools: &Pools) -> Self {
        Self {
            pools: pools.clone(),
            nodes: std::iter::repeat_with(|| None).take(pools.all().pages).collect(),
            by_key: HashMap::new(),
            leaves: BTreeSet::new(),
            states: BTreeSet::new(),
            tick: 0,
            generation: 1,
            released: Vec::new(),
            counters: Counters::default(),
        }
    }

    /// Counts since the start.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Counts a request that does not look, and says so.
    pub fn unused(&mut self) -> Miss {
        self.missed(Miss::Unused)
    }

    /// Pages in the tree.
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// States in the tree.
    pub fn states(&self) -> usize {
        self.states.len()
    }

    /// Pages that [`PrefixTree::evict_pages`] can free.
    pub fn evictable_pages(&self) -> usize {
        self.pools.idle()
    }

    /// Tokens that [`PrefixTree::longest`] would give, without counting or holding anything.
    pub fn peek(&self, keys: &PageKeys, most_tokens: usize) -> usize {
        self.deepest(keys, most_tokens).map_or(0, |node| self.node(node).depth as usize * PAGE_TOKENS)
    }

    /// As [`PrefixTree::peek`], and how many pages of the hit sequences hold now: the first ones of its chain.
    pub fn peek_held(&self, keys: &PageKeys, most_tokens: usize) -> (usize, usize) {
        let tokens = self.peek(keys, most_tokens);
        let held = |key: &PageKey| self.by_key.get(key).is_some_and(|&id| self.node(id).holders.is_held());
        (tokens, keys.keys()[..tokens / PAGE_TOKENS].partition_point(held))
    }

    /// The deepest saved state at a position of at most `most_tokens` on the chain of `keys`, with all pages before it.
    ///
    /// A sequence passes one less than its tokens, so that a row is left to compute.
    ///
    /// # Errors
    /// [`Miss`] says why there is none.
    pub fn longest(&mut self, keys: &PageKeys, most_tokens: usize) -> Result<Hit, Miss> {
        self.settle();
        self.counters.queries += 1;
        self.counters.query_tokens += most_tokens as u64;
        let found = match self.deepest(keys, most_tokens) {
            Ok(node) => node,
            Err(miss) => return Err(self.missed(miss)),
        };
        let position = self.node(found).depth as usize * PAGE_TOKENS;
        let tick = self.tick;
        let node = self.node_mut(found);
        let Some(state) = &mut node.state else { return Err(self.missed(Miss::NoState)) };
        let before = state.rank(found);
        state.used = tick;
        state.hits += 1;
        let (after, slot, fold) = (state.rank(found), SlotRef(Arc::clone(&state.slot)), state.fold);
        self.states.remove(&before);
        self.states.insert(after);

        let up = std::iter::successors(Some(found), |&id| self.node(id).parent);
        let chain: Vec<u32> = up.collect();
        let mut table = PageTable::default();
        for &id in chain.iter().rev() {
            table.push(self.hold(id));
        }
        table.published.generation = self.generation;
        table.published.pages = table.len();
        self.counters.hits += 1;
        self.counters.hit_tokens += position as u64;
        Ok(Hit { position, table, state: slot, fold })
    }

    /// Makes the table's pages below `computed` visible and gives how many became so. Pages that are visible already with
    /// equal contents are taken in exchange, and the table's own go back. Costs nothing when no page was completed since
    /// the last call.
    ///
    /// The rows of these pages must be final: call this after the step that wrote them has been taken in. `keys` are those
    /// of the table's sequence.
    pub fn publish(&mut self, table: &mut PageTable, keys: &PageKeys, computed: usize) -> usize {
        let full = (computed / PAGE_TOKENS).min(keys.keys().len()).min(table.len());
        let first = if table.published.generation == self.generation { table.published.pages } else { 0 };
        if first >= full {
            return 0;
        }
        self.settle();
        let mut parent = first.checked_sub(1).map(|page| table.ids()[page]);
        let mut new = 0;
        let mut done = first;
        for (index, key) in keys.keys().iter().enumerate().take(full).skip(first) {
            let id = match self.by_key.get(key) {
                Some(&id) => {
                    if id != table.ids()[index] {
                        table.exchange(index, self.hold(id));
                        self.counters.merged_pages += 1;
                    }
                    id
                }
                None => {
                    let page = &table.pages()[index];
                    // Another holder, from before the tree was cleared, may hold other pages for the beginning than the tree
                    // has by now; as a child of those the page would keep them from being evicted while nobody holds them.
                    if page.has_other_holders() {
                        break;
                    }
                    // A page has one name; that of a sequence whose tokens changed stays what it was.
                    let Some(kept) = self.pools.keep(page) else { break };
                    let node = Node {
                        key: *key,
                        page: kept,
                        holders: page.weak(),
                        parent,
                        children: 0,
                        depth: index as u32 + 1,
                        idle: false,
                        used: self.tick,
                        state: None,
                    };
                    self.nodes[page.id() as usize] = Some(node);
                    self.by_key.insert(*key, page.id());
                    if let Some(parent) = parent {
                        self.node_mut(parent).children += 1;
                    }
                    new += 1;
                    page.id()
                }
            };
            parent = Some(id);
            done = index + 1;
        }
        table.published.generation = self.generation;
        table.published.pages = done;
        self.counters.published_pages += new as u64;
        new
    }

    /// Whether a state at the end of this page would be of use: the page is there and has none.
    pub fn wants_state(&self, key: &PageKey) -> bool {
        self.by_key.get(key).is_some_and(|&id| self.node(id).state.is_none())
    }

    /// Saves a state at the end of a published page. `None`, and the slot goes back, where the page is not there or has a
    /// state already ([`PrefixTree::wants_state`] tells before the copy is made).
    pub fn save_state(&mut self, key: &PageKey, saved: SavedState) -> Option<Ticket> {
        self.save(key, saved, false)
    }

    /// As [`PrefixTree::save_state`], for a state at the end of what its sequence knows: of its prompt, or of its answer so
    /// far. Not for places where other sequences are expected to part from it (the start of a turn, strides of a long
    /// prompt).
    pub fn save_tip(&mut self, key: &PageKey, saved: SavedState) -> Option<Ticket> {
        self.save(key, saved, true)
    }

    fn save(&mut self, key: &PageKey, saved: SavedState, tip: bool) -> Option<Ticket> {
        self.settle();
        let node = *self.by_key.get(key)?;
        if self.node(node).state.is_some() {
            return None;
        }
        let tick = self.tick;
        let state = State { slot: Arc::new(saved.slot), fold: saved.fold, used: tick, saved: tick, tip, hits: 0 };
        self.set_state(node, Some(state));
        self.counters.saved_states += 1;
        Some(Ticket { node, saved: tick })
    }

    /// Takes a state back, for its owner has a newer one; its slot can hold that. `None` when it is gone, or when somebody
    /// has used it: then it is worth keeping.
    pub fn withdraw(&mut self, ticket: Ticket) -> Option<Slot> {
        let node = self.nodes.get(ticket.node as usize)?.as_ref()?;
        node.state.as_ref().filter(|state| state.saved == ticket.saved && state.hits == 0)?;
        self.take_state(ticket.node)
    }

    /// Forgets everything. Pages that sequences hold stay theirs.
    pub fn clear(&mut self) {
        self.leaves.clear();
        self.states.clear();
        self.by_key.clear();
        self.nodes.iter_mut().for_each(|node| *node = None);
        self.generation += 1;
        self.settle();
    }

    /// The node of the deepest state.
    fn deepest(&self, keys: &PageKeys, most_tokens: usize) -> Result<u32, Miss> {
        let usable = keys.keys().len().min(most_tokens / PAGE_TOKENS);
        let chain = &keys.keys()[..usable];
        let Some(first) = chain.first() else { return Err(Miss::TooShort) };
        if !self.by_key.contains_key(first) {
            return Err(if keys.is_salted() { Miss::Salt } else { Miss::NoPage });
        }
        // The pages that are there are the first ones: where the chain leaves the tree is found by doubling and halving.
        let mut there = 1;
        while there < usable && self.by_key.contains_key(&chain[(2 * there).min(usable) - 1]) {
            there = (2 * there).min(usable);
        }
        let end = (2 * there).min(usable);
        there += chain[there..end].partition_point(|key| self.by_key.contains_key(key));

        let mut at = self.by_key.get(&chain[there - 1]).copied();
        while let Some(id) = at {
            let node = self.node(id);
            if node.state.is_some() {
                return Ok(id);
            }
            at = node.parent;
        }
        Err(Miss::NoState)
    }

    fn missed(&mut self, reason: Miss) -> Miss {
        self.counters.miss(reason);
        reason
    }

    /// A guard of the node's page, which is then not idle.
    fn hold(&mut self, id: u32) -> Page {
        let node = self.node_mut(id);
        let page = node.page.hold(&mut node.holders);
        if std::mem::replace(&mut node.idle, false) {
            let rank = node.rank(id);
            self.leaves.remove(&rank);
        }
        page
    }

    /// Takes in which pages became idle.
    fn settle(&mut self) {
        self.tick += 1;
        let mut released = std::mem::take(&mut self.released);
        self.pools.take_released(&mut released);
        for id in released.drain(..) {
            let tick = self.tick;
            let Some(node) = self.nodes.get_mut(id as usize).and_then(Option::as_mut) else { continue };
            if std::mem::replace(&mut node.idle, true) {
                self.leaves.remove(&node.rank(id));
            }
            node.used = tick;
            if node.children == 0 {
                self.leaves.insert(node.rank(id));
            }
        }
        self.released = released;
    }

    /// Sets or takes the state of a node, in every order that knows of it.
    fn set_state(&mut self, id: u32, state: Option<State>) -> Option<State> {
        if let Some(new) = &state {
            self.states.insert(new.rank(id));
        }
        let node = self.node_mut(id);
        let (before, old) = (node.rank(id), std::mem::replace(&mut node.state, state));
        let after = node.rank(id);
        if self.leaves.remove(&before) {
            self.leaves.insert(after);
        }
        if let Some(old) = &old {
            self.states.remove(&old.rank(id));
        }
        old
    }

    fn node(&self, id: u32) -> &Node {
        self.nodes[id as usize].as_ref().expect("maps, orders and parents name only nodes of the tree")
    }

    fn node_mut(&mut self, id: u32) -> &mut Node {
        self.nodes[id as usize].as_mut().expect("maps, orders and parents name only nodes of the tree")
    }
}
