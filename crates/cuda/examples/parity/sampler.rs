//! Tokens from rows of logits on the device against the engine's sampler.

use std::collections::BTreeMap;

use glimmer_cuda::Cuda;
use glimmer_engine::{
    Flow, Generator, Sampler, SequenceId, Settings,
    request::{Request, Sampling},
    rows::token,
};
use glimmer_tensor::{Backend, Draw, LogitChange, SampleRow, Samples};

use crate::{harness, material::Random};

/// Logits of a row: how they are spread decides how many are equal, and where the largest is.
fn logits(random: &mut Random, kind: usize, width: usize) -> Vec<f32> {
    let mut row: Vec<f32> = (0..width)
        .map(|_| match kind % 5 {
            0 => 4.0 * random.unit() * random.unit(),
            1 => (8.0 * random.unit()).round() / 8.0,
            2 => 0.25,
            3 => random.unit() - if random.below(2) == 0 { 60.0 } else { 0.0 },
            // Both zeros, and nothing above them.
            _ => {
                if random.below(3) == 0 {
                    0.0
                } else {
                    -0.0
                }
            }
        })
        .collect();
    match kind % 11 {
        7 => row[random.below(width)] = f32::NAN,
        8 => row[random.below(width)] = f32::INFINITY,
        9 => row.fill(f32::NEG_INFINITY),
        10 => {
            row.fill(f32::NEG_INFINITY);
            row[random.below(width)] = -1e30;
        }
        _ => {}
    }
    row
}

/// Temperature, min-p, top-k, top-p of draws.
const DRAWS: [(f32, f32, u32, f32); 18] = [
    (1.0, 0.0, 0, 1.0),
    (1.0, 0.0, 0, 0.95),
    (1.0, 0.0, 0, 0.9),
    (0.7, 0.0, 0, 0.8),
    (1.0, 0.0, 50, 1.0),
    (1.0, 0.0, 50, 0.95),
    (0.6, 0.0, 20, 0.95),
    (1.0, 0.05, 0, 1.0),
    (1.0, 0.02, 0, 0.9),
    (1.0, 0.05, 40, 0.9),
    (2.0, 0.0, 0, 0.5),
    (0.3, 0.0, 0, 0.99),
    (1.0, 0.0, 0, 0.02),
    (1.0, 0.0, 1, 1.0),
    (1.3, 0.0, 700, 1.0),
    (1.0, 0.001, 1000, 0.7),
    (1.0, 0.0, 0, 0.999_999),
    (0.05, 0.0, 0, 0.95),
];

/// Changes, a mask, both or neither; from 4 on drawn.
fn ask(random: &mut Random, asked: &mut Samples, row: u32, vocabulary: usize, kind: usize) {
    let start = asked.changes.len();
    if kind & 1 == 1 {
        let step = [1, 3, 97, 1 + vocabulary / 5][random.below(4)];
        for token in (random.below(step)..vocabulary).step_by(step).take(7000) {
            let mut change = LogitChange::none(token as u32);
            if random.below(2) == 0 {
                change.bias = 3.0 * random.unit();
            }
            if random.below(2) == 0 {
                change.repetition = 1.0 + random.unit() / 2.0;
                change.minus = random.unit();
            }
            if random.below(9) == 0 {
                change.minus = f32::INFINITY;
            }
            asked.changes.push(change);
        }
    }
    let mask = (kind & 2 == 2).then(|| {
        let first = asked.masks.len();
        let rare = random.below(3) == 0;
        for _ in 0..vocabulary.div_ceil(64) {
            let bits = random.bits() & random.bits();
            asked.masks.push(if rare { bits & random.bits() & random.bits() & random.bits() } else { bits });
        }
        if random.below(8) == 0 {
            asked.masks[first..].fill(0);
        }
        first
    });
    let draw = (kind & 4 == 4).then(|| {
        let (temperature, min_p, top_k, top_p) = DRAWS[random.below(DRAWS.len())];
        Draw { temperature, min_p, top_k, top_p, uniform: (random.bits() >> 11) as f64 / (1u64 << 53) as f64 }
    });
    asked.rows.push(SampleRow { row, changes: start..asked.changes.len(), mask, draw });
}

/// Every shape, kind of logits and kind of rule.
pub(crate) fn check(mut cuda: Cuda) -> usize {
    let mut failures = 0;
    let mut total = 0;
    for (width, vocabulary, rows) in [
        (154_880, 154_856, 30),
        (154_880, 154_880, 1),
        (154_880, 154_878, 3),
        (81_920, 81_920, 7),
        (5000, 4999, 66),
        (1001, 1001, 40),
        (1026, 1000, 40),
        (129, 129, 150),
        (4, 3, 50),
        (1, 1, 5),
    ] {
        let random = &mut Random((width + rows) as u64);
        let mut buffer = cuda.buffer(rows, width).unwrap();
        let mut values = Vec::new();
        for row in 0..rows {
            let mut row_values = logits(random, row, vocabulary);
            // Columns that do not exist hold what must not be chosen.
            row_values.resize(width, f32::NAN);
            cuda.write(&mut buffer, row, &row_values).unwrap();
            values.push(row_values);
        }
        // The rows as they are; a part of them by rules of all kinds, in another order; the first again.
        let mut plain = Samples::default();
        (0..rows).for_each(|row| ask(random, &mut plain, row as u32, vocabulary, 0));
        let mut mixed = Samples::default();
        (0..rows).rev().step_by(2).for_each(|row| ask(random, &mut mixed, row as u32, vocabulary, row / 2));
        let mut all = Samples::default();
        (0..2 * rows).for_each(|row| ask(random, &mut all, (row % rows) as u32, vocabulary, 3));
        // Where the vocabulary is large, rules of more bytes than are sent at once.
        let mut many = Samples::default();
        (0..14 * rows).for_each(|row| ask(random, &mut many, (row % rows) as u32, vocabulary, 3));
        let mut drawn = Samples::default();
        for row in 0..3 * rows {
            let kind = if row < rows { 4 } else { row % 8 };
            ask(random, &mut drawn, (row % rows) as u32, vocabulary, kind);
        }
        let (mut scratch, mut sampler) = (Vec::new(), Sampler::default());
        for (name, asked) in [
            ("plain", &plain),
            ("mixed", &mixed),
            ("changes and masks", &all),
            ("many changes and masks", &many),
            ("drawn", &drawn),
            ("plain", &plain),
        ] {
            let mut tokens = Vec::new();
            cuda.sample(&buffer, vocabulary, asked, &mut tokens).unwrap();
            let mut expect = |row: &SampleRow| {
                let logits = &values[row.row as usize][..vocabulary];
                token(asked, row, logits, &mut sampler, &mut scratch)
            };
            let expected: Vec<Option<u32>> = asked.rows.iter().map(&mut expect).collect();
            total += expected.len();
            // A draw may be left to the host; a largest logit may not, where there is one.
            let drawn = |i: usize| asked.rows[i].draw.is_some();
            let wrong: Vec<usize> = (0..expected.len())
                .filter(|&i| tokens[i] != expected[i] && !(drawn(i) && tokens[i].is_none()))
                .collect();
            let none = expected.iter().filter(|token| token.is_none()).count();
            let left = tokens.iter().filter(|token| token.is_none()).count() - none;
            let count = expected.len();
            println!(
                "sampler [{rows}, {width}] of {vocabulary}, {name}: {} wrong of {count}, {none} without a token, {left} left",
                wrong.len()
            );
            if let Some(&i) = wrong.first() {
                println!("  row {:?}: {:?}, expected {:?}", asked.rows[i], tokens.get(i), expected[i]);
                failures += 1;
            }
        }
    }
    println!("sampler: {total} rows");
    failures
}

/// Requests of all kinds; `read` asks for log-probabilities, so that the host reads every row.
fn requests(read: bool) -> impl Iterator<Item = Request> {
    (0..24u32).map(move |i| {
        let (temperature, min_p, top_k, top_p) = DRAWS[i as usize % DRAWS.len()];
        let mut sampling = Sampling { seed: Some(i64::from(i)), ..Sampling::greedy() };
        if i % 3 > 0 {
            sampling = Sampling { temperature, min_p, top_k: Some(top_k), top_p, ..sampling };
        }
        if i % 4 == 1 {
            sampling.repetition_penalty = 1.2;
            sampling.presence_penalty = 0.3;
            sampling.frequency_penalty = 0.1;
        }
        if i % 5 == 2 {
            sampling.logit_bias = vec![(320 + i, 4.0), (40, -3.0)];
            sampling.bad_words = vec![vec![300 + i], vec![301, 302]];
        }
        if i % 7 == 3 {
            sampling.allowed_tokens = Some((20..500).collect());
        }
        let mut request = Request::new(vec![300 + i, 301, 302, 40 + i], 80);
        request.sampling = sampling;
        request.limits.min_tokens = 20 * (i % 2);
        request.limits.ignore_eos = i % 6 == 0;
        request.logprobs = read.then_some(0);
        request
    })
}

/// Answers of the micro model.
fn answers(cuda: Cuda, read: bool) -> Vec<Vec<u32>> {
    let settings = Settings {
        sequences: 9,
        depth: 3,
        prefix_caching: false,
        context: Some(2048),
        rows: 64,
        ..Settings::default()
    };
    let mut generator = Generator::load(cuda, &harness::micro(), &settings).unwrap();
    let mut answers = BTreeMap::<SequenceId, Vec<u32>>::new();
    for request in requests(read) {
        answers.insert(generator.submit(request).unwrap(), Vec::new());
    }
    generator
        .run(&mut |id, event| {
            answers.entry(id).or_default().extend(event.tokens.iter().map(|token| token.id));
            Flow::Continue
        })
        .unwrap();
    answers.into_values().collect()
}

/// Answers whose tokens are found on the device against those whose logits the host reads.
pub(crate) fn engine(open: &dyn Fn() -> Cuda) -> usize {
    let (found, read) = (answers(open(), false), answers(open(), true));
    let same = found.iter().zip(&read).filter(|(a, b)| a == b).count();
    let tokens: usize = read.iter().map(Vec::len).sum();
    println!("sampler: {same} of {} answers are those of logits that the host reads, {tokens} tokens", read.len());
    read.len() - same
}
