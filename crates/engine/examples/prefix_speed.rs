//! What the prefix cache costs a page: hashing, publishing, looking in vain, hitting, releasing, evicting.
//!
//! `cargo run --release -p glimmer-engine --example prefix_speed [pages]` prints nanoseconds a page, the best of five passes
//! over that many pages (default 16384, a context of a million tokens).
#![allow(clippy::print_stdout, reason = "a measuring program prints")]

use std::{hint::black_box, time::Instant};

use glimmer_engine::{
    PageKeys, PageTable, Pools, PrefixTree,
    prefix::{Miss, SavedState},
};
use glimmer_tensor::PAGE_TOKENS;

const PASSES: usize = 5;

fn main() {
    let pages = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(16_384);
    let mut best: Vec<(&str, f64)> = Vec::new();
    for _ in 0..PASSES {
        for (place, (name, nanos)) in pass(pages).into_iter().enumerate() {
            match best.get_mut(place) {
                Some(known) => known.1 = known.1.min(nanos),
                None => best.push((name, nanos)),
            }
        }
    }
    println!("{pages} pages");
    for (name, nanos) in &best {
        println!("{name:34}{nanos:10.1} ns a page");
    }
    let cold: f64 = best.iter().take(3).map(|(_, nanos)| nanos).sum();
    let rate = 20_000.0;
    let page = PAGE_TOKENS as f64 / rate * 1e9;
    println!("hash + look-up + publish: {:.4} % of a prefill of {rate} tokens/s", 100.0 * cold / page);
}

/// One sequence that misses, one that hits, and the eviction of all.
fn pass(pages: usize) -> Vec<(&'static str, f64)> {
    let tokens: Vec<u32> = (0..(pages * PAGE_TOKENS) as u32).map(|i| i.wrapping_mul(2_654_435_761) >> 15).collect();
    let pools = Pools::new(1, 1, pages);
    let mut tree = PrefixTree::new(&pools);
    let mut times = Vec::new();
    let mut time = |name, start: Instant| times.push((name, start.elapsed().as_secs_f64() * 1e9 / pages as f64));

    let start = Instant::now();
    let mut keys = PageKeys::new(None, Vec::new());
    keys.extend(&tokens);
    time("hash", start);

    // As many look-ups as pages, against a tree that holds another conversation.
    let other = {
        let mut keys = PageKeys::new(Some("other"), Vec::new());
        keys.extend(&tokens);
        keys
    };
    let mut table = PageTable::default();
    tree.grow(&mut table, pages);
    tree.publish(&mut table, &other, tokens.len());
    let start = Instant::now();
    for _ in 0..pages {
        assert_eq!(black_box(tree.longest(&keys, tokens.len() - 1)).err(), Some(Miss::NoPage));
    }
    time("look-up in vain (each)", start);
    drop(table);
    tree.clear();

    let mut table = PageTable::default();
    tree.grow(&mut table, pages);
    let start = Instant::now();
    for page in 1..=pages {
        tree.publish(&mut table, &keys, page * PAGE_TOKENS);
    }
    time("publish, page by page", start);

    let start = Instant::now();
    for token in 0..pages {
        black_box(tree.publish(&mut table, &keys, pages * PAGE_TOKENS - token % 64));
    }
    time("publish with nothing new (each)", start);

    let start = Instant::now();
    drop(table);
    time("release", start);

    if let (Some(slot), Some(key)) = (pools.checkpoint(), keys.keys().last()) {
        tree.save_state(key, SavedState { slot, fold: 0 });
    }
    let start = Instant::now();
    let hit = tree.longest(&keys, tokens.len());
    time("hit", start);
    assert_eq!(hit.as_ref().map_or(0, |hit| hit.position), tokens.len());
    drop(hit);

    let start = Instant::now();
    assert_eq!(tree.evict_pages(pages), pages);
    time("evict", start);
    times
}
