//! Tokens from rows of logits.

use glimmer_tensor::{Backend, Draw, Result, SampleRow, Samples};

use super::{Contents, Row, Unit, fill, timed};
use crate::{backend::Cuda, kernels::sampler};

const VOCABULARY: usize = 154_880;

/// Logits in turn are larger than the second-level cache by this much.
const ROTATION: usize = 480 << 20;

pub(super) fn rows(cuda: &mut Cuda, each: &mut dyn FnMut(Row)) -> Result<()> {
    for rows in [1, 3, 24, 96, 768] {
        let bytes = 4 * rows * VOCABULARY;
        let sets = (0..(ROTATION / bytes + 1).min(24))
            .map(|_| {
                let logits = cuda.buffer(rows, VOCABULARY)?;
                fill(cuda, &logits.memory, Contents::Floats)?;
                Ok(logits)
            })
            .collect::<Result<Vec<_>>>()?;
        let tokens = cuda.memory.uninitialized("tokens", 4 * rows)?;
        let micros = timed(cuda, sets.len().max(8), |cuda, i| {
            sampler::largest(cuda, rows, &sets[i % sets.len()], VOCABULARY, tokens.address())
        })?;
        each(Row {
            kernel: "largest logit".to_owned(),
            rows,
            micros,
            bytes: bytes as f64,
            flops: (rows * VOCABULARY) as f64,
            unit: Unit::Float,
        });
    }
    draws(cuda, each)
}

/// Name, temperature, top-k, top-p.
const DRAWS: [(&str, f32, u32, f32); 4] = [
    ("temperature alone", 1.0, 0, 1.0),
    ("top-k 50", 1.0, 50, 1.0),
    ("top-p 0.95", 1.0, 0, 0.95),
    ("top-k 50, top-p 0.95", 1.0, 50, 0.95),
];

/// Draws from logits of two spreads: normal with a deviation of 3, and one of 2.5 with 40 tokens 12 to 16 above.
fn draws(cuda: &mut Cuda, each: &mut dyn FnMut(Row)) -> Result<()> {
    let mut state = 1u64;
    let mut unit = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    for (spread, name) in [(3.0, "normal"), (2.5, "peaked")] {
        let mut kinds = Vec::new();
        for _ in 0..8 {
            // A sum of twelve is as good as normal.
            let mut row: Vec<f32> =
                (0..VOCABULARY).map(|_| spread * ((0..12).map(|_| unit()).sum::<f32>() - 6.0)).collect();
            if name == "peaked" {
                (0..40).for_each(|_| row[(unit() * VOCABULARY as f32) as usize % VOCABULARY] += 12.0 + 4.0 * unit());
            }
            kinds.push(row);
        }
        for rows in [1, 24, 96, 768] {
            let bytes = 4 * rows * VOCABULARY;
            let mut sets = Vec::new();
            for _ in 0..(ROTATION / bytes + 1).min(16) {
                let mut logits = cuda.buffer(rows, VOCABULARY)?;
                (0..rows).try_for_each(|row| cuda.write(&mut logits, row, &kinds[row % kinds.len()]))?;
                sets.push(logits);
            }
            let tokens = cuda.memory.uninitialized("tokens", 4 * rows)?;
            for (what, temperature, top_k, top_p) in DRAWS {
                let mut asked = Samples::default();
                asked.rows.extend((0..rows as u32).map(|row| {
                    let draw = Draw { temperature, min_p: 0.0, top_k, top_p, uniform: f64::from(unit()) };
                    SampleRow { row, changes: 0..0, mask: None, draw: Some(draw) }
                }));
                let order: Vec<usize> = (0..rows).collect();
                let rules = sampler::send(cuda, &asked, &order, 0)?;
                let micros = timed(cuda, sets.len().max(8), |cuda, i| {
                    sampler::draw(cuda, 0..rows, &sets[i % sets.len()], VOCABULARY, rules, tokens.address())
                })?;
                each(Row {
                    kernel: format!("draw, {name}, {what}"),
                    rows,
                    micros,
                    bytes: bytes as f64,
                    flops: (rows * VOCABULARY) as f64,
                    unit: Unit::Float,
                });
            }
        }
    }
    Ok(())
}
