//! The depth of drafts follows acceptance: steps of the micro model, on a clock that a table of times drives.

use glimmer_tensor::cpu::Cpu;

use super::*;
use crate::{depth::DepthPolicy, request::Sampling, synthetic::SyntheticAcceptance};

const SEQUENCES: usize = 4;
const DEPTH: usize = 3;

fn judge(generator: &Generator<Cpu>, rates: [f64; DEPTH]) -> RowJudge {
    let acceptance = SyntheticAcceptance::from_rates(rates.to_vec()).unwrap();
    RowJudge::new(generator.model.config().vocab_size).with_synthetic(acceptance)
}

/// Makes so many steps and gives the rows of each sequence in them: one and its drafts. A step takes half a second and a tenth
/// for every draft that it proposes.
fn go(generator: &mut Generator<Cpu>, now: &mut f64, steps: usize) -> Vec<usize> {
    let mut rows = Vec::with_capacity(steps);
    for _ in 0..steps {
        let depth = generator.depth.clone().depth(SEQUENCES, *now);
        let end = *now + 0.5 + 0.1 * depth as f64;
        generator.clock.feed([*now, end]);
        let before = generator.counters.step_rows;
        assert!(generator.step(&mut |_, _| Flow::Continue).unwrap(), "sequences are long enough");
        rows.push((generator.counters.step_rows - before) as usize / SEQUENCES);
        *now = end;
    }
    rows
}

/// Share of the steps in which sequences had so many rows.
fn share(rows: &[usize], of: usize) -> f64 {
    rows.iter().filter(|&&n| n == of).count() as f64 / rows.len() as f64
}

/// Most steps in a row in which sequences had so many rows.
fn longest(rows: &[usize], of: usize) -> usize {
    rows.split(|&n| n != of).map(<[usize]>::len).max().unwrap_or(0)
}

#[test]
fn the_adaptive_depth_falls_when_nothing_stands_and_rises_when_everything_does() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16");
    let settings = Settings {
        sequences: SEQUENCES,
        depth: DEPTH,
        depth_policy: DepthPolicy::Adaptive,
        prefix_caching: false,
        context: Some(4096),
        rows: 64,
        ..Settings::default()
    };
    let mut generator = Generator::load(Cpu::new(1), &Checkpoint::open(path).unwrap(), &settings).unwrap();
    generator.clock = Clock::recorded();
    for seed in 0..SEQUENCES as u32 {
        generator.submit(Request::new(vec![300 + seed, 301, 302], 2000).ignoring_eos()).unwrap();
    }
    let mut now = 0.0;
    generator.judge = judge(&generator, [0.02, 0.0, 0.0]);
    go(&mut generator, &mut now, 60);
    let low = go(&mut generator, &mut now, 120);
    // Sweeps over all depths, every 30 s, are the only drafts.
    assert!(share(&low, 1) > 0.5, "useless drafts are switched off: {low:?}");
    assert!(longest(&low, 1) > 40, "between sweeps there are none: {low:?}");
    let drafted = generator.stats.drafts.clone();
    assert!(drafted.steps() > 0 && drafted.accepted.iter().sum::<u64>() * 10 < drafted.steps(), "{drafted:?}");

    generator.judge = judge(&generator, [0.95, 0.9, 0.85]);
    go(&mut generator, &mut now, 120);
    let high = go(&mut generator, &mut now, 60);
    assert!(share(&high, 1 + DEPTH) > 0.5, "a sweep finds that drafts are good again: {high:?}");
    assert!(longest(&high, 1 + DEPTH) > 15, "{high:?}");
}

#[test]
fn rows_are_described_only_to_a_backend_that_finds_them() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16");
    let settings = Settings { sequences: 1, context: Some(256), rows: 64, ..Settings::default() };
    let mut generator = Generator::load(Cpu::new(1), &Checkpoint::open(path).unwrap(), &settings).unwrap();
    for greedy in [true, false] {
        let mut request = Request::new(vec![300, 301, 302], 4).ignoring_eos();
        if !greedy {
            request.sampling = Sampling { temperature: 0.8, top_k: Some(20), ..Sampling::greedy() };
        }
        generator.submit(request).unwrap();
        while generator.step(&mut |_, _| Flow::Continue).unwrap() {
            assert_eq!(
                generator.asked.rows.len(),
                usize::from(greedy),
                "the CPU finds the largest logit and draws nothing"
            );
            assert_eq!(generator.given.len(), usize::from(greedy));
        }
    }
}
