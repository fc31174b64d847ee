//! Products with BF16 matrices of one rank of two and four, each with the splitting of its activations, in a chain.

use glimmer_tensor::{Columns, Linear, Result};

use super::{Contents, Row, Unit, fill, random_matrix, timed};
use crate::{backend::Cuda, kernels::dense};
use glimmer_tensor::Backend;

/// Name, outputs, columns.
const SHAPES: [(&str, usize, usize); 10] = [
    ("KDA in_proj /1", 24896, 4096),
    ("KDA in_proj /2", 12576, 4096),
    ("DSA o_proj /1", 4096, 16384),
    ("DSA o_proj /2", 4096, 8192),
    ("KDA o_proj /2", 4096, 4096),
    ("DSA q_b /2", 8192, 1536),
    ("KDA o_proj /4", 4096, 2048),
    ("DSA q_b /4", 4096, 1536),
    ("shared gate, up /4", 1024, 4096),
    ("shared down /2", 4096, 1024),
];

/// Weights in turn are larger than the second-level cache by this much.
const ROTATION: usize = 240 << 20;

pub(super) fn rows(cuda: &mut Cuda, each: &mut dyn FnMut(Row)) -> Result<()> {
    for (name, out, columns) in SHAPES {
        let size = 2 * out * columns;
        let sets = (0..(ROTATION / size + 2).min(24))
            .map(|_| Ok(Linear { weight: random_matrix(cuda, out, columns)?, bias: None }))
            .collect::<Result<Vec<_>>>()?;
        for rows in [1, 3, 8, 24, 96, 256, 768, 2048, 8192] {
            let x = cuda.buffer(rows, columns)?;
            fill(cuda, &x.memory, Contents::Floats)?;
            let mut y = cuda.buffer(rows, out)?;
            let micros = timed(cuda, sets.len().max(8), |cuda, i| {
                let x = Columns { buffer: &x, start: 0, width: columns };
                dense::linear(cuda, rows, x, &[&sets[i % sets.len()]], &mut y, 0)
            })?;
            each(Row {
                kernel: format!("{name} [{out}, {columns}]"),
                rows,
                micros,
                bytes: (size + 4 * rows * (columns + out)) as f64,
                flops: 2.0 * (rows * out * columns) as f64,
                unit: Unit::Tensor,
            });
        }
    }
    Ok(())
}
