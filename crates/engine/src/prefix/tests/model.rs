//! Random histories against a naive reference: a map from whole token prefixes to pages and states, in which everything is
//! found by scanning.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::super::*;

const CHECKPOINTS: usize = 5;
const PAGES: usize = 24;
const SEQUENCES: usize = 4;

/// Salt and tokens.
type Prefix = (u8, Vec<u32>);

struct Running {
    salt: u8,
    tokens: Vec<u32>,
    keys: PageKeys,
    table: PageTable,
    ticket: Option<(Prefix, Ticket)>,
}

#[derive(Clone)]
struct Known {
    page: u32,
    /// When the last holder let go.
    used: u64,
    held: bool,
    state: Option<KnownState>,
}

#[derive(Clone)]
struct KnownState {
    slot: u32,
    fold: usize,
    used: u64,
    saved: u64,
    tip: bool,
    hits: u32,
}

struct World {
    pools: Pools,
    tree: PrefixTree,
    running: Vec<Running>,
    known: BTreeMap<Prefix, Known>,
    time: u64,
}

impl World {
    fn new() -> Self {
        let pools = Pools::new(SEQUENCES, CHECKPOINTS, PAGES);
        let tree = PrefixTree::new(&pools);
        Self { pools, tree, running: Vec::new(), known: BTreeMap::new(), time: 0 }
    }

    /// Two kinds of tokens in runs of half a page, so that prefixes meet often.
    fn tokens(choices: u16, count: usize) -> Vec<u32> {
        (0..count).map(|i| u32::from(choices >> (i / 32 % 16) & 1) + 2 * (i % 64) as u32).collect()
    }

    fn keys(salt: u8, tokens: &[u32]) -> PageKeys {
        let mut keys = PageKeys::new((salt > 0).then_some("s"), Vec::new());
        keys.extend(tokens);
        keys
    }

    /// Page boundaries of a prefix that the map knows, by scanning.
    fn depth(&self, salt: u8, tokens: &[u32], most: usize, with_state: bool) -> Option<Prefix> {
        let fits = |(s, prefix): &&Prefix| *s == salt && prefix.len() <= most && tokens.starts_with(prefix);
        let found = self.known.keys().filter(fits);
        found.filter(|p| !with_state || self.known[*p].state.is_some()).max_by_key(|p| p.1.len()).cloned()
    }

    fn victim(&self) -> Option<Prefix> {
        let leaf = |p: &Prefix| {
            !self.known.keys().any(|(s, other)| *s == p.0 && other.len() > p.1.len() && other.starts_with(&p.1))
        };
        let idle = self.known.iter().filter(|(p, known)| !known.held && leaf(p));
        idle.min_by_key(|(_, known)| (known.state.is_some(), known.used)).map(|(p, _)| p.clone())
    }

    fn oldest_state(&self) -> Option<Prefix> {
        let states = self.known.iter().filter_map(|(p, known)| Some((p, known.state.as_ref()?)));
        states.min_by_key(|(_, state)| (!(state.tip && state.hits == 1), state.used)).map(|s| s.0.clone())
    }

    fn start(&mut self, salt: u8, tokens: Vec<u32>) -> Result<(), TestCaseError> {
        let keys = Self::keys(salt, &tokens);
        let most = tokens.len() - 1;
        let expected = self.depth(salt, &tokens, most, true);
        prop_assert_eq!(self.tree.peek(&keys, most), expected.as_ref().map_or(0, |p| p.1.len()));
        let mut table = PageTable::default();
        match self.tree.longest(&keys, most) {
            Ok(hit) => {
                let Some(prefix) = expected else { return Err(TestCaseError::fail("a hit on nothing")) };
                prop_assert_eq!(hit.position, prefix.1.len());
                for (page, id) in hit.table.ids().iter().enumerate() {
                    prop_assert_eq!(self.known[&(salt, tokens[..(page + 1) * 64].to_vec())].page, *id);
                }
                let state = self.known.get_mut(&prefix).and_then(|known| known.state.as_mut()).unwrap();
                prop_assert_eq!((hit.state.id(), hit.fold), (state.slot, state.fold));
                state.used = self.time;
                state.hits += 1;
                table = hit.table;
            }
            Err(miss) => {
                prop_assert!(expected.is_none());
                let first = self.known.contains_key(&(salt, tokens.get(..64).unwrap_or_default().to_vec()));
                let reason = match (most / 64, first, salt) {
                    (0, ..) => Miss::TooShort,
                    (_, true, _) => Miss::NoState,
                    (_, false, 0) => Miss::NoPage,
                    (_, false, _) => Miss::Salt,
                };
                prop_assert_eq!(miss, reason);
            }
        }
        self.running.push(Running { salt, tokens, keys, table, ticket: None });
        self.hold();
        let last = self.running.len() - 1;
        self.advance(last, 0)
    }

    /// Computes and publishes all of a sequence and so many more tokens.
    fn advance(&mut self, index: usize, more: usize) -> Result<(), TestCaseError> {
        let (free, idle) = (self.free(), self.idle());
        let mut running = self.running.swap_remove(index);
        let tokens = running.tokens.len() + more;
        running.tokens.extend(Self::tokens(running.tokens.len() as u16, more));
        running.keys.extend(&running.tokens);
        let pages = tokens.div_ceil(64);
        let more = pages.saturating_sub(running.table.len());
        let grown = self.tree.grow(&mut running.table, pages);
        prop_assert_eq!(grown, more <= free + idle);
        if grown {
            (0..more.saturating_sub(free)).for_each(|_| self.forget(true));
            self.tree.publish(&mut running.table, &running.keys, tokens);
            for end in (64..=tokens).step_by(64) {
                let page = running.table.ids()[end / 64 - 1];
                let prefix = (running.salt, running.tokens[..end].to_vec());
                // Pages shared since before the tree was cleared wait until they have one holder.
                if !self.known.contains_key(&prefix) && self.running.iter().any(|r| r.table.ids().contains(&page)) {
                    break;
                }
                let known = self.known.entry(prefix).or_insert(Known { page, used: 0, held: true, state: None });
                prop_assert_eq!(known.page, page, "equal pages are one");
            }
            self.running.push(running);
        }
        Ok(())
    }

    fn save(&mut self, index: usize, fold: usize, replace: bool, tip: bool) -> Result<(), TestCaseError> {
        let running = &mut self.running[index];
        let end = running.tokens.len() / 64 * 64;
        let prefix = (running.salt, running.tokens[..end].to_vec());
        let Some(key) = running.keys.ending_at(end) else { return Ok(()) };
        let wanted = self.known.get(&prefix).is_some_and(|known| known.state.is_none());
        prop_assert_eq!(self.tree.wants_state(&key), wanted);
        let mut slot = None;
        if let Some((owned, ticket)) = running.ticket.take().filter(|_| replace) {
            let known = self.known.get_mut(&owned).map(|known| &mut known.state);
            let mine = known.filter(|s| s.as_ref().is_some_and(|s| s.saved == ticket.saved && s.hits == 0));
            slot = self.tree.withdraw(ticket);
            prop_assert_eq!(slot.as_ref().map(Slot::id), mine.and_then(Option::take).map(|s| s.slot));
        }
        let wanted = self.tree.wants_state(&key);
        if slot.is_none() && wanted {
            let evicts = self.pools.free_checkpoints() == 0;
            slot = self.tree.slot_for_state();
            prop_assert!(slot.is_some(), "nobody copies");
            if evicts {
                let oldest = self.oldest_state().unwrap();
                let state = self.known.get_mut(&oldest).and_then(|known| known.state.take()).unwrap();
                prop_assert_eq!(slot.as_ref().map(Slot::id), Some(state.slot));
            }
        }
        let Some(slot) = slot else { return Ok(()) };
        let id = slot.id();
        let saved = SavedState { slot, fold };
        let ticket = if tip { self.tree.save_tip(&key, saved) } else { self.tree.save_state(&key, saved) };
        prop_assert_eq!(ticket.is_some(), wanted);
        if let Some(ticket) = ticket {
            let state = KnownState { slot: id, fold, used: self.time, saved: ticket.saved, tip, hits: 0 };
            self.known.get_mut(&prefix).unwrap().state = Some(state);
            self.running[index].ticket = Some((prefix, ticket));
        }
        Ok(())
    }

    /// The reference's eviction of one page.
    fn forget(&mut self, expected: bool) {
        let victim = self.victim();
        assert!(victim.is_some() || !expected);
        victim.map(|prefix| self.known.remove(&prefix));
    }

    fn held(&self) -> BTreeSet<u32> {
        self.running.iter().flat_map(|r| r.table.ids().iter().copied()).collect()
    }

    fn idle(&self) -> usize {
        self.known.values().filter(|known| !known.held).count()
    }

    fn free(&self) -> usize {
        let mut taken = self.held();
        taken.extend(self.known.values().map(|known| known.page));
        PAGES - taken.len()
    }

    /// Recounts who holds what.
    fn hold(&mut self) {
        let held = self.held();
        for known in self.known.values_mut() {
            let holds = held.contains(&known.page);
            if known.held && !holds {
                known.used = self.time;
            }
            known.held = holds;
        }
    }

    fn act(&mut self, kind: u8, a: u16, b: u16) -> Result<(), TestCaseError> {
        self.time += 1;
        let pick = (!self.running.is_empty()).then(|| a as usize % self.running.len().max(1));
        match (kind, pick) {
            (0..=3, _) if self.running.len() < SEQUENCES => {
                self.start(a.is_multiple_of(8).into(), Self::tokens(b, 1 + (a / 8) as usize % 500))?;
            }
            (4..=6, Some(index)) => self.advance(index, b as usize % 150)?,
            (7..=10, Some(index)) => self.save(index, b as usize % 4, b & 64 > 0, b & 128 > 0)?,
            (11..=13, Some(index)) => drop(self.running.swap_remove(index)),
            (14, _) => {
                let count = b as usize % 4;
                let expected = count.min(self.idle());
                prop_assert_eq!(self.tree.evict_pages(count), expected);
                (0..expected).for_each(|_| self.forget(true));
            }
            (15, _) => {
                let oldest = self.oldest_state();
                let gone = self.tree.evict_state().map(|slot| slot.id());
                let state = oldest.and_then(|p| self.known.get_mut(&p).and_then(|known| known.state.take()));
                prop_assert_eq!(gone, state.map(|s| s.slot));
            }
            (16, _) if b.is_multiple_of(4) => {
                self.tree.clear();
                self.known.clear();
            }
            _ => {}
        }
        self.hold();
        // Lets the tree hear of releases now, as the reference does.
        self.tree.evict_pages(0);
        self.agree()
    }

    fn agree(&self) -> Result<(), TestCaseError> {
        prop_assert_eq!(self.tree.len(), self.known.len());
        for ((salt, tokens), known) in &self.known {
            let key = Self::keys(*salt, tokens).ending_at(tokens.len()).unwrap();
            prop_assert_eq!(self.tree.by_key.get(&key), Some(&known.page));
        }
        let states: Vec<&KnownState> = self.known.values().filter_map(|known| known.state.as_ref()).collect();
        prop_assert_eq!(self.tree.states(), states.len());
        prop_assert_eq!(self.pools.free_checkpoints(), CHECKPOINTS - states.len());
        prop_assert_eq!(self.tree.evictable_pages(), self.idle());
        prop_assert_eq!(self.pools.free().pages, self.free());
        // Who shares a page has all tokens up to its end in common; the pages that are still written are one's own.
        let mut contents: BTreeMap<u32, Prefix> = BTreeMap::new();
        for running in &self.running {
            for (page, id) in running.table.ids().iter().enumerate() {
                let end = (page + 1) * 64;
                let prefix = (running.salt, running.tokens[..end.min(running.tokens.len())].to_vec());
                match contents.get(id) {
                    Some(other) => prop_assert!(*other == prefix && prefix.1.len() == end),
                    None => drop(contents.insert(*id, prefix)),
                }
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn agrees_with_a_map_of_prefixes(
        actions in proptest::collection::vec((0u8..17, any::<u16>(), 0u16..512), 1..120),
    ) {
        let mut world = World::new();
        for (kind, a, b) in actions {
            world.act(kind, a, b)?;
        }
        let World { pools, mut tree, running, .. } = world;
        drop(running);
        let evictable = tree.evictable_pages();
        prop_assert_eq!(evictable + pools.free().pages, PAGES);
        prop_assert_eq!(tree.evict_pages(PAGES + 1), evictable);
        prop_assert_eq!(pools.free(), pools.all());
        prop_assert_eq!(pools.free_checkpoints(), CHECKPOINTS);
        prop_assert!(tree.is_empty() && tree.states() == 0 && tree.leaves.is_empty());
    }
}
