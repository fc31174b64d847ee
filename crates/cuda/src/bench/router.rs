//! The router as a step has it (scores, choice, and the experts' work list with the rows in their slots), and the low-rank gates
//! of delta attention.

use glimmer_tensor::{Backend, Columns, Linear, Result, RouterRule};

use super::{Contents, Row, Unit, fill, random_matrix, timed};
use crate::{
    backend::Cuda,
    kernels::{dense, moe, router},
    types::CudaVector,
};

const HIDDEN: usize = 4096;
const EXPERTS: usize = 288;
const RULE: RouterRule = RouterRule { top: 8, groups: 1, top_groups: 1, normalize: true, scale: 2.5 };
/// Gates in turn: as many as a forward pass has, so that they come from memory.
const LAYERS: usize = 42;

pub(super) fn rows(cuda: &mut Cuda, report: &mut dyn FnMut(Row)) -> Result<()> {
    let gates = (0..LAYERS).map(|_| random_matrix(cuda, EXPERTS, HIDDEN)).collect::<Result<Vec<_>>>()?;
    let bias = CudaVector { memory: cuda.memory.upload("random parameters", &[0.0f32; EXPERTS])?, len: EXPERTS };
    for rows in [1, 3, 8, 24, 96, 256, 768, 2048, 8192] {
        let x = cuda.buffer(rows, HIDDEN)?;
        fill(cuda, &x.memory, Contents::Floats)?;
        let mut routing = cuda.routing(rows, RULE.top, EXPERTS)?;
        let calls = if rows < 256 { LAYERS } else { 12 };
        let alone =
            timed(cuda, calls, |cuda, i| router::route(cuda, rows, &gates[i % LAYERS], &bias, RULE, &x, &mut routing))?;
        let listed = timed(cuda, calls, |cuda, i| {
            router::route(cuda, rows, &gates[i % LAYERS], &bias, RULE, &x, &mut routing)?;
            moe::list_for(cuda, rows, &routing, &x)
        })?;
        for (what, micros, slots) in [("router", alone, 0), ("router with the work list", listed, 2 * RULE.top)] {
            report(Row {
                kernel: what.to_owned(),
                rows,
                micros,
                bytes: (2 * EXPERTS * HIDDEN + rows * HIDDEN * (4 + slots)) as f64,
                flops: (2 * rows * EXPERTS * HIDDEN) as f64,
                unit: Unit::Float,
            });
        }
    }
    low_rank(cuda, report)
}

fn low_rank(cuda: &mut Cuda, report: &mut dyn FnMut(Row)) -> Result<()> {
    let (width, rank) = (8192, 128);
    let gate = |cuda: &Cuda| -> Result<_> { Ok(Linear { weight: random_matrix(cuda, width, rank)?, bias: None }) };
    let pairs = (0..34).map(|_| -> Result<_> { Ok([gate(cuda)?, gate(cuda)?]) }).collect::<Result<Vec<_>>>()?;
    for rows in [1, 3, 8, 24, 96, 256, 768] {
        let x = cuda.buffer(rows, 2 * rank)?;
        fill(cuda, &x.memory, Contents::Floats)?;
        let mut y = cuda.buffer(rows, 2 * width)?;
        let micros = timed(cuda, pairs.len(), |cuda, i| {
            let part = |k: usize| (Columns { buffer: &x, start: k * rank, width: rank }, &pairs[i][k], k * width);
            dense::linear_each(cuda, rows, &[part(0), part(1)], &mut y)
        })?;
        report(Row {
            kernel: format!("low-rank gates 2 x [{width}, {rank}]"),
            rows,
            micros,
            bytes: (2 * width * rank * 2 + 8 * rows * (rank + width)) as f64,
            flops: (4 * rows * width * rank) as f64,
            unit: Unit::Float,
        });
    }
    Ok(())
}
