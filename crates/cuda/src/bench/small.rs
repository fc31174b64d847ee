//! What lies between the products: embedding, residuals with norms, the router, the input of the draft layer; and the attention of
//! the vision tower. Every rank computes these whole.

use glimmer_tensor::{Backend, Norm, PatchGrid, Result, RouterRule, Segment, Step, Streams};

use super::{
    Contents, Row, Unit, fill, random_matrix,
    slice::{ROWS, sequences, slice},
    timed,
};
use crate::{
    backend::Cuda,
    types::{CudaBuffer, CudaVector},
};

/// Bytes of activations in turn where there are many rows, and of matrices.
const ROTATION: usize = 240 << 20;
const MOST_SETS: usize = 8;

fn vector(cuda: &Cuda, len: usize) -> Result<CudaVector> {
    let memory = cuda.memory.uninitialized("random parameters", 4 * len)?;
    fill(cuda, &memory, Contents::Floats)?;
    Ok(CudaVector { memory, len })
}

fn floats(cuda: &Cuda, rows: usize, width: usize) -> Result<CudaBuffer> {
    let buffer = cuda.buffer(rows, width)?;
    fill(cuda, &buffer.memory, Contents::Floats)?;
    Ok(buffer)
}

/// A step of `rows` rows without caches, with different tokens.
pub(super) fn step(rows: usize) -> Step {
    let [count, each] = sequences(rows);
    let segment = |slot: usize| Segment {
        slot: slot as u32,
        position: 0,
        rows: each as u32,
        fold: 0,
        commit: 1,
        first_page: 0,
        pages: 0,
    };
    let tokens = (0..rows).map(|i| (i * 7919 % 30_011) as u32).collect();
    Step { tokens, segments: (0..count).map(segment).collect(), ..Step::default() }
}

/// As many sets of activations as the second-level cache cannot hold; one where rows are few, which a step leaves there.
fn turns(rows: usize, bytes: usize) -> usize {
    if rows < 96 { 1 } else { ROTATION.div_ceil(bytes.max(1)).clamp(1, MOST_SETS) }
}

fn report(kernel: &str, rows: usize, micros: [f64; 3], bytes: usize, flops: usize, unit: Unit) -> Row {
    Row { kernel: kernel.to_owned(), rows, micros, bytes: bytes as f64, flops: flops as f64, unit }
}

/// All numbers of rows.
pub(super) fn rows(cuda: &mut Cuda, each: &mut dyn FnMut(Row)) -> Result<()> {
    let text = slice(1)?.text;
    let (hidden, n) = (text.hidden_size, text.mhc.streams);
    let table = random_matrix(cuda, text.vocab_size, hidden)?;
    let norm = |cuda: &Cuda| -> Result<Norm<Cuda>> {
        Ok(Norm { weight: vector(cuda, hidden)?, bias: None, eps: text.rms_norm_eps })
    };
    let (first, second) = (norm(cuda)?, norm(cuda)?);
    let moe = &text.moe;
    let gates = (0..24).map(|_| random_matrix(cuda, moe.num_experts, hidden)).collect::<Result<Vec<_>>>()?;
    let bias = vector(cuda, moe.num_experts)?;
    let rule = RouterRule {
        top: moe.experts_per_token,
        groups: moe.num_groups,
        top_groups: moe.topk_groups,
        normalize: moe.normalize,
        scale: moe.routed_scaling_factor,
    };
    for rows in ROWS {
        let source: Vec<u32> = (0..rows as u32).collect();
        cuda.begin_step(&step(rows), [&source, &[], &[]])?;
        embed(cuda, rows, [hidden, n], &table, each)?;
        let count = turns(rows, 8 * rows * hidden);
        let mut sets = Vec::new();
        for _ in 0..count {
            sets.push([floats(cuda, rows, hidden)?, floats(cuda, rows, hidden)?, cuda.buffer(rows, hidden)?]);
        }
        let micros = timed(cuda, (2 * count).max(8), |cuda, i| {
            let [x, y, out] = &mut sets[i % count];
            cuda.add_norm(rows, Some(y), &first, x, out)
        })?;
        each(report("residual and norm", rows, micros, 16 * rows * hidden, 6 * rows * hidden, Unit::Float));
        let mut out = cuda.buffer(rows, 2 * hidden)?;
        let micros =
            timed(cuda, 8, |cuda, i| cuda.mtp_input(&table, &first, &second, &sets[i % count][0], &source, &mut out))?;
        let bytes = rows * hidden * (2 + 4 + 8);
        each(report("input of the draft layer", rows, micros, bytes, 8 * rows * hidden, Unit::Float));
        let mut routing = cuda.routing(rows, rule.top, moe.num_experts)?;
        let micros = timed(cuda, gates.len(), |cuda, i| {
            cuda.route(rows, &gates[i % gates.len()], &bias, rule, &sets[i % count][0], &mut routing)
        })?;
        let (size, choices) = (moe.num_experts * hidden, rows * rule.top);
        each(report(
            &format!("router [{}, {hidden}] in f32 and top {}", moe.num_experts, rule.top),
            rows,
            micros,
            2 * size + 4 * rows * hidden + 8 * choices,
            2 * rows * size,
            Unit::Float,
        ));
    }
    vision(cuda, each)
}

/// Attention within pictures of two sizes; the rows are patches.
fn vision(cuda: &mut Cuda, each: &mut dyn FnMut(Row)) -> Result<()> {
    let Some(vision) = slice(1)?.vision else { return Ok(()) };
    let (hidden, heads) = (vision.hidden_size, vision.num_heads);
    let norm = |cuda: &Cuda| -> Result<Norm<Cuda>> {
        Ok(Norm { weight: vector(cuda, hidden / heads)?, bias: None, eps: vision.rms_norm_eps })
    };
    let (queries, keys) = (norm(cuda)?, norm(cuda)?);
    for side in [32, 64] {
        let rows = side * side;
        let qkv = floats(cuda, rows, 3 * hidden)?;
        let mut out = cuda.buffer(rows, hidden)?;
        let grid = PatchGrid { frames: 1, height: side, width: side };
        let micros = timed(cuda, 8, |cuda, _| cuda.vision_attention(grid, heads, &queries, &keys, &qkv, &mut out))?;
        let name = format!("attention of a picture of {side} x {side} patches, {heads} heads");
        each(report(&name, rows, micros, 16 * rows * hidden, 4 * rows * rows * hidden, Unit::Tensor));
    }
    Ok(())
}

fn embed(
    cuda: &mut Cuda,
    rows: usize,
    [hidden, n]: [usize; 2],
    table: &crate::types::CudaMatrix,
    each: &mut dyn FnMut(Row),
) -> Result<()> {
    let features = cuda.buffer(1, hidden)?;
    let count = turns(rows, 4 * rows * hidden * n);
    let mut sets = Vec::new();
    for _ in 0..count {
        sets.push(Streams::<Cuda> {
            x: cuda.buffer(rows, n * hidden)?,
            post: cuda.buffer(1, n)?,
            comb: cuda.buffer(1, n * n)?,
            collapsed: cuda.buffer(1, hidden)?,
        });
    }
    let micros = timed(cuda, (2 * count).max(8), |cuda, i| cuda.embed(table, &features, &mut sets[i % count], n))?;
    let bytes = rows * hidden * (2 + 4 * n);
    each(report("embedding into the streams", rows, micros, bytes, 0, Unit::Float));
    Ok(())
}
