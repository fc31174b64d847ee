//! Tokens from rows of logits.

use glimmer_tensor::{Backend, Result};

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
    Ok(())
}
