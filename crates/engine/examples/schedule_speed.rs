//! Time of one decision with many sequences: `cargo run --release -p glimmer-engine --example schedule_speed`.
#![allow(clippy::print_stdout, reason = "the report is the purpose")]

use std::{hint::black_box, time::Instant};

use glimmer_engine::{
    SequenceId,
    policy::{Order, Policy},
    pools::need,
    rates::Rates,
    schedule::{Resources, View, Views, schedule},
};

const RUNNING: u64 = 512;
const ROUNDS: usize = 2000;

fn view(id: u64, known: usize, computed: usize, decoding: bool) -> View {
    View {
        id: SequenceId(id),
        arrival: id as f64 * 1e-3,
        priority: (id % 3) as i64,
        prompt: known - usize::from(decoding),
        known,
        computed,
        drafts: if decoding { 2 } else { 0 },
        decoding,
        pages: need(computed).pages,
        shared: 0,
        next_stop: None,
        max_rows: None,
        cached: 0,
        preempted: 0,
        max_len: known + 1000,
    }
}

/// Median microseconds of a decision.
fn median(running: &[View], waiting: &[View], resources: &Resources, policy: &Policy) -> f64 {
    let mut rates = Rates::default();
    rates.record(8192, 0, 0.8);
    rates.record(0, 1024, 0.05);
    let views = Views { running, waiting };
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|round| {
            let start = Instant::now();
            black_box(schedule(black_box(&views), resources, policy, &rates, 1000.0 + round as f64));
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[ROUNDS / 2]
}

fn main() {
    let resources = Resources {
        rows: 8192,
        logits: 4096,
        free_slots: 8,
        free_pages: 50_000,
        all_pages: 100_000,
        sequences: 520,
        step: 0,
    };
    // Lengths of every kind: about one in 64 needs another page.
    let decoding: Vec<View> =
        (0..RUNNING).map(|i| view(i, 2000 + 37 * i as usize, 1999 + 37 * i as usize, true)).collect();
    let mut mixed = decoding.clone();
    (0..64).for_each(|i| mixed[i * 8] = view(i as u64 * 8, 4000 + 200 * i, 640, false));
    let queue: Vec<View> = (0..1000).map(|i| view(RUNNING + i, 500 + 17 * i as usize, 0, false)).collect();
    let shuffled: Vec<View> = (0..1000).map(|i| queue[i * 619 % 1000]).collect();
    let none = Resources { free_pages: 0, ..resources };
    let priority = Policy { order: Order::Priority, ..Policy::default() };
    let fcfs = Policy::default();
    for (name, running, waiting, resources, policy) in [
        ("all decoding", &decoding, &[][..], &resources, &fcfs),
        ("all decoding, 1000 waiting, 8 slots", &decoding, &queue[..], &resources, &fcfs),
        ("64 of them prompts", &mixed, &[][..], &resources, &fcfs),
        ("64 of them prompts, 1000 waiting", &mixed, &queue[..], &resources, &fcfs),
        ("the same by priority, queue shuffled", &mixed, &shuffled[..], &resources, &priority),
        ("no page free, some give way", &mixed, &queue[..], &none, &fcfs),
    ] {
        println!("{RUNNING} running, {name}: {:.1} us", median(running, waiting, resources, policy));
    }
}
