mod model;
mod policy;

use super::*;

/// A sequence as the engine holds it.
struct Holder {
    tokens: Vec<u32>,
    keys: PageKeys,
    table: PageTable,
}

struct Bench {
    pools: Pools,
    tree: PrefixTree,
}

impl Bench {
    fn new(checkpoints: usize, pages: usize) -> Self {
        let pools = Pools::new(4, checkpoints, pages);
        Self { tree: PrefixTree::new(&pools), pools }
    }

    /// A sequence that has computed these tokens and published.
    fn run(&mut self, tokens: &[u32]) -> Holder {
        self.salted(None, tokens)
    }

    fn salted(&mut self, salt: Option<&str>, tokens: &[u32]) -> Holder {
        let mut keys = PageKeys::new(salt, Vec::new());
        keys.extend(tokens);
        let mut holder = Holder { tokens: tokens.to_vec(), keys, table: PageTable::default() };
        assert!(self.tree.grow(&mut holder.table, tokens.len().div_ceil(PAGE_TOKENS)));
        self.tree.publish(&mut holder.table, &holder.keys, tokens.len());
        holder
    }

    fn save(&mut self, holder: &Holder, position: usize) -> Option<Ticket> {
        let slot = self.tree.slot_for_state()?;
        self.tree.save_state(&holder.keys.ending_at(position)?, SavedState { slot, fold: position % 3 })
    }

    fn look(&mut self, tokens: &[u32]) -> Result<Hit, Miss> {
        let mut keys = PageKeys::new(None, Vec::new());
        keys.extend(tokens);
        self.tree.longest(&keys, tokens.len() - 1)
    }

    fn peek(&self, tokens: &[u32]) -> usize {
        let mut keys = PageKeys::new(None, Vec::new());
        keys.extend(tokens);
        self.tree.peek(&keys, tokens.len() - 1)
    }
}

fn tokens(seed: u32, pages: usize) -> Vec<u32> {
    (0..(pages * PAGE_TOKENS) as u32).map(|i| seed * 100_000 + i).collect()
}

#[test]
fn a_hit_is_the_deepest_state_and_lends_its_whole_chain() {
    let mut bench = Bench::new(4, 16);
    let mut first = bench.run(&tokens(1, 5));
    for position in [64, 192] {
        bench.save(&first, position).unwrap();
    }
    let ids = first.table.ids().to_vec();
    let hit = bench.look(&tokens(1, 5)).unwrap();
    assert_eq!((hit.position, hit.fold, hit.table.ids()), (192, 192 % 3, &ids[..3]));
    assert!(hit.state.id() >= 4, "a slot of the checkpoints");
    // A sequence that parts earlier gets the earlier state.
    let mut parting = tokens(1, 5);
    parting[150] = 7;
    assert_eq!(bench.look(&parting).unwrap().position, 64);
    parting[3] = 7;
    assert_eq!(bench.look(&parting).unwrap_err(), Miss::NoPage);
    assert_eq!(bench.tree.publish(&mut first.table, &first.keys, 320), 0, "nothing is published twice");
    drop((first, hit));
    assert_eq!((bench.tree.evictable_pages(), bench.pools.free().pages), (5, 11));
}

#[test]
fn a_row_is_always_left_to_compute() {
    let mut bench = Bench::new(4, 16);
    let first = bench.run(&tokens(1, 3));
    for position in [64, 128, 192] {
        bench.save(&first, position).unwrap();
    }
    let all = tokens(1, 3);
    assert_eq!(bench.look(&all).unwrap().position, 128);
    assert_eq!(bench.look(&[&all[..], &[5]].concat()).unwrap().position, 192);
    assert_eq!(bench.look(&all[..65]).unwrap().position, 64);
    assert_eq!(bench.look(&all[..64]).unwrap_err(), Miss::TooShort);
    assert_eq!(bench.peek(&all), 128);
}

#[test]
fn pages_without_a_state_are_no_hit_and_every_reason_is_counted() {
    let mut bench = Bench::new(4, 16);
    let first = bench.run(&tokens(1, 3));
    assert_eq!(bench.look(&tokens(1, 3)).unwrap_err(), Miss::NoState);
    assert_eq!(bench.look(&tokens(2, 3)).unwrap_err(), Miss::NoPage);
    assert_eq!(bench.look(&tokens(1, 1)).unwrap_err(), Miss::TooShort);
    bench.save(&first, 64).unwrap();
    let mut salted = PageKeys::new(Some("a"), Vec::new());
    salted.extend(&first.tokens);
    assert_eq!(bench.tree.longest(&salted, 191).unwrap_err(), Miss::Salt);
    assert_eq!(bench.tree.unused(), Miss::Unused);
    assert!(bench.look(&tokens(1, 3)).is_ok());
    let counters = *bench.tree.counters();
    assert_eq!(Miss::ALL.map(|m| counters.misses_by(m)), [1; 5]);
    assert_eq!((counters.queries, counters.query_tokens), (5, 191 + 191 + 63 + 191 + 191));
    assert_eq!((counters.hits, counters.hit_tokens), (1, 64));
    assert_eq!((counters.published_pages, counters.saved_states), (3, 1));
}

#[test]
fn salts_are_separate_worlds() {
    let mut bench = Bench::new(4, 16);
    let a = bench.salted(Some("a"), &tokens(1, 2));
    let b = bench.salted(Some("b"), &tokens(1, 2));
    let none = bench.run(&tokens(1, 2));
    assert_eq!(bench.tree.len(), 6, "nothing is merged");
    bench.save(&a, 64).unwrap();
    assert_eq!(bench.tree.longest(&b.keys, 127).unwrap_err(), Miss::NoState);
    assert_eq!(bench.tree.longest(&none.keys, 127).unwrap_err(), Miss::NoState);
    assert_eq!(bench.tree.longest(&a.keys, 127).unwrap().position, 64);
}

#[test]
fn nothing_beyond_computed_and_no_partial_page_is_published() {
    let mut bench = Bench::new(4, 16);
    let mut keys = PageKeys::new(None, Vec::new());
    let mut table = PageTable::default();
    let all = tokens(1, 3);
    keys.extend(&all[..150]);
    assert!(bench.tree.grow(&mut table, 3));
    let published: Vec<usize> =
        [0, 63, 64, 127, 150, 192].iter().map(|&computed| bench.tree.publish(&mut table, &keys, computed)).collect();
    assert_eq!(published, [0, 0, 1, 0, 1, 0], "the third page has no key as long as its tokens are not known");
    keys.extend(&all);
    assert_eq!(bench.tree.publish(&mut table, &keys, 191), 0);
    assert_eq!(bench.tree.publish(&mut table, &keys, 192), 1);
}

#[test]
fn equal_pages_are_merged_when_they_are_published() {
    let mut bench = Bench::new(4, 16);
    let first = bench.run(&tokens(1, 3));
    let mut longer = tokens(1, 3);
    longer.extend(tokens(2, 1));
    let second = bench.run(&longer);
    assert_eq!(second.table.ids()[..3], *first.table.ids());
    assert_eq!((bench.pools.free().pages, bench.tree.len()), (12, 4));
    assert_eq!(bench.tree.counters().merged_pages, 3);
    drop(first);
    assert_eq!(bench.tree.evictable_pages(), 0, "the second sequence holds them");
    drop(second);
    assert_eq!(bench.tree.evictable_pages(), 4);
}

#[test]
fn only_idle_leaves_are_evicted_and_children_go_before_parents() {
    let mut bench = Bench::new(4, 8);
    let first = bench.run(&tokens(1, 4));
    assert_eq!(bench.tree.evict_pages(8), 0, "all are held");
    let mut fork = tokens(1, 2);
    fork.extend(tokens(2, 1));
    let second = bench.run(&fork);
    drop(first);
    // Of the first sequence's pages the second holds two.
    assert_eq!((bench.tree.evictable_pages(), bench.tree.evict_pages(8)), (2, 2));
    assert_eq!(bench.pools.free().pages, 5);
    drop(second);
    assert_eq!(bench.tree.evict_pages(2), 2);
    assert_eq!((bench.tree.len(), bench.pools.free().pages), (1, 7));
    bench.run(&tokens(1, 1));
    assert_eq!((bench.tree.len(), bench.tree.counters().merged_pages), (1, 3), "the root page went last");
}

#[test]
fn pages_that_no_state_makes_reachable_go_first_then_those_used_longest_ago() {
    let mut bench = Bench::new(4, 12);
    let old = bench.run(&tokens(1, 2));
    bench.save(&old, 64).unwrap();
    drop(old);
    let newer = bench.run(&tokens(2, 2));
    bench.save(&newer, 128).unwrap();
    drop(newer);
    let newest = bench.run(&tokens(3, 1));
    drop(newest);
    let here = |bench: &Bench| [1, 2, 3].map(|seed| bench.peek(&tokens(seed, 3)));
    assert_eq!(here(&bench), [64, 128, 0]);
    // Behind the old state and the page without any.
    assert_eq!(bench.tree.evict_pages(2), 2);
    assert_eq!((here(&bench), bench.tree.len()), ([64, 128, 0], 3));
    // A hit makes the old chain the newer one.
    drop(bench.look(&tokens(1, 3)).unwrap());
    bench.tree.evict_pages(1);
    assert_eq!((here(&bench), bench.tree.states()), ([64, 0, 0], 1));
    assert_eq!(bench.pools.free_checkpoints(), 3, "a state goes with its page");
    bench.tree.evict_pages(9);
    assert_eq!((bench.pools.free(), bench.pools.free_checkpoints()), (bench.pools.all(), 4));
    assert_eq!(bench.tree.counters().evicted_states, 2);
}

#[test]
fn states_are_evicted_by_their_last_hit() {
    let mut bench = Bench::new(2, 12);
    let holders = [1, 2, 3].map(|seed| bench.run(&tokens(seed, 2)));
    bench.save(&holders[0], 64).unwrap();
    bench.save(&holders[1], 64).unwrap();
    drop(bench.look(&tokens(1, 2)).unwrap());
    bench.save(&holders[2], 64).unwrap();
    assert_eq!([1, 2, 3].map(|seed| bench.peek(&tokens(seed, 2))), [64, 0, 64]);
    assert_eq!((bench.tree.states(), bench.tree.counters().evicted_states), (2, 1));
}

#[test]
fn a_tip_that_was_continued_once_goes_first_and_one_continued_twice_is_recent() {
    for (hits, gone) in [(0, 1), (1, 2), (2, 1)] {
        let mut bench = Bench::new(3, 12);
        let holders = [1, 2, 3, 4].map(|seed| bench.run(&tokens(seed, 2)));
        for holder in &holders[..3] {
            let slot = bench.pools.checkpoint().unwrap();
            let key = holder.keys.ending_at(64).unwrap();
            bench.tree.save_tip(&key, SavedState { slot, fold: 0 }).unwrap();
        }
        (0..hits).for_each(|_| drop(bench.look(&tokens(2, 2)).unwrap()));
        bench.save(&holders[3], 64).unwrap();
        let lost: Vec<u32> = (1..=4).filter(|&seed| bench.peek(&tokens(seed, 2)) == 0).collect();
        assert_eq!(lost, [gone], "{hits} hits");
    }
}

#[test]
fn a_state_that_is_copied_from_is_not_given_up() {
    let mut bench = Bench::new(2, 8);
    let holder = bench.run(&tokens(1, 3));
    let ticket = bench.save(&holder, 64).unwrap();
    bench.save(&holder, 128).unwrap();
    let hit = bench.look(&tokens(1, 2)).unwrap();
    assert_eq!(hit.position, 64);
    let other = bench.tree.evict_state().unwrap();
    assert_ne!(other.id(), hit.state.id());
    assert!(bench.tree.evict_state().is_none() && bench.tree.withdraw(ticket).is_none());
    // The guard outlives even the tree.
    let id = hit.state.id();
    drop((other, bench.tree, holder));
    assert_eq!(bench.pools.free_checkpoints(), 1);
    assert_eq!((hit.state.id(), bench.pools.free().pages), (id, 7));
    drop(hit);
    assert_eq!((bench.pools.free(), bench.pools.free_checkpoints()), (bench.pools.all(), 2));
}

#[test]
fn an_owner_replaces_its_state_unless_it_was_used() {
    let mut bench = Bench::new(1, 8);
    let holder = bench.run(&tokens(1, 3));
    let ticket = bench.save(&holder, 64).unwrap();
    let slot = bench.tree.withdraw(ticket).unwrap();
    assert!(bench.tree.withdraw(ticket).is_none(), "once");
    assert_eq!(bench.peek(&tokens(1, 3)), 0);
    let key = holder.keys.ending_at(128).unwrap();
    let ticket = bench.tree.save_state(&key, SavedState { slot, fold: 1 }).unwrap();
    drop(bench.look(&tokens(1, 3)).unwrap());
    assert!(bench.tree.withdraw(ticket).is_none(), "somebody used it");
    assert_eq!(bench.peek(&tokens(1, 3)), 128);
    // A later state in the same place is another one.
    drop(bench.tree.evict_state().unwrap());
    let later = bench.save(&holder, 128).unwrap();
    assert!(bench.tree.withdraw(ticket).is_none());
    assert!(bench.tree.withdraw(later).is_some());
}

#[test]
fn a_state_needs_its_page_and_a_page_takes_one() {
    let mut bench = Bench::new(3, 8);
    let holder = bench.run(&tokens(1, 2));
    let [here, there] = [1, 2].map(|seed| {
        let mut keys = PageKeys::new(None, Vec::new());
        keys.extend(&tokens(seed, 1));
        keys.keys()[0]
    });
    assert!(bench.tree.wants_state(&here) && !bench.tree.wants_state(&there));
    let slot = bench.pools.checkpoint().unwrap();
    assert!(bench.tree.save_state(&there, SavedState { slot, fold: 0 }).is_none());
    assert!(bench.save(&holder, 64).is_some() && !bench.tree.wants_state(&here));
    assert!(bench.save(&holder, 64).is_none());
    assert_eq!((bench.pools.free_checkpoints(), bench.tree.states()), (2, 1));
}

#[test]
fn clearing_forgets_and_takes_nothing_from_sequences() {
    let mut bench = Bench::new(3, 8);
    let mut running = bench.run(&tokens(1, 3));
    let ticket = bench.save(&running, 64).unwrap();
    drop(bench.run(&tokens(2, 2)));
    let hit = bench.look(&tokens(1, 3)).unwrap();
    bench.tree.clear();
    assert!(bench.tree.is_empty() && bench.tree.states() == 0 && bench.tree.withdraw(ticket).is_none());
    assert_eq!((bench.pools.free().pages, bench.tree.evictable_pages(), bench.pools.free_checkpoints()), (5, 0, 2));
    drop(hit);
    assert_eq!(bench.pools.free_checkpoints(), 3);
    // Another sequence fills the tree anew; the running one joins it with all its pages.
    let other = bench.run(&tokens(1, 2));
    assert_ne!(other.table.ids()[0], running.table.ids()[0]);
    assert_eq!(bench.tree.publish(&mut running.table, &running.keys, 192), 1);
    assert_eq!(running.table.ids()[..2], *other.table.ids());
    drop(other);
    assert_eq!(bench.tree.evictable_pages(), 0);
    drop(running);
    assert_eq!((bench.tree.evictable_pages(), bench.tree.evict_pages(9)), (3, 3));
    assert_eq!(bench.pools.free(), bench.pools.all());
}

#[test]
fn pages_shared_since_before_a_clearing_never_pin_pages_that_nobody_holds() {
    let mut bench = Bench::new(3, 8);
    let mut first = bench.run(&tokens(1, 3));
    bench.save(&first, 128).unwrap();
    let second = bench.look(&tokens(1, 3)).unwrap();
    bench.tree.clear();
    // The tree knows the first page by another sequence's copy; `first` takes that in exchange, `second` does not.
    let third = bench.run(&tokens(1, 1));
    assert_eq!(bench.tree.publish(&mut first.table, &first.keys, 192), 0, "the second page has two holders");
    drop((first, third));
    assert_eq!((bench.tree.evictable_pages(), bench.tree.evict_pages(9)), (1, 1), "what counts as idle can be evicted");
    drop(second);
    assert_eq!(bench.pools.free(), bench.pools.all());
}

#[test]
fn growing_evicts_what_it_needs_and_nothing_in_vain() {
    let mut bench = Bench::new(0, 6);
    drop(bench.run(&tokens(1, 4)));
    let mut table = PageTable::default();
    assert!(!bench.tree.grow(&mut table, 7));
    assert_eq!((bench.tree.len(), table.len()), (4, 0), "a refusal evicts nothing");
    assert!(bench.tree.grow(&mut table, 3));
    assert_eq!((bench.tree.len(), bench.pools.free().pages), (3, 0));
    assert!(bench.tree.grow(&mut table, 6));
    assert!(bench.tree.is_empty());
}

#[test]
fn pools_and_tree_may_move_to_another_thread() {
    fn movable<T: Send>() {}
    movable::<PrefixTree>();
    movable::<Hit>();
    movable::<PageTable>();
}
