//! Kimi delta attention between the projections and `o_proj`: decoding and verification of drafts.

use glimmer_tensor::{Backend, CacheShape, KdaForm, KdaWeights, Norm, Result, Segment, Step};

use super::{
    Contents, Row, Unit, fill, random_matrix,
    slice::{RANKS, of_ranks, slice},
    timed,
};
use crate::{
    backend::Cuda,
    cache::CudaCache,
    types::{CudaMatrix, CudaVector, Kind, unique},
};

const DIM: usize = 128;
const TAPS: usize = 4;
/// Drafts a step.
const DRAFTS: usize = 2;
/// States of all layers in turn, in bytes: several times the second-level cache.
const ROTATION: usize = 768 << 20;

fn vector(cuda: &Cuda, len: usize) -> Result<CudaVector> {
    let memory = cuda.memory.uninitialized("random parameters", 4 * len)?;
    fill(cuda, &memory, Contents::Floats)?;
    Ok(CudaVector { memory, len })
}

/// Random weights of `heads` heads.
fn weights(cuda: &Cuda, heads: usize) -> Result<KdaWeights<Cuda>> {
    let channels = 3 * heads * DIM;
    let taps = random_matrix(cuda, channels * TAPS / 128, 128)?;
    Ok(KdaWeights {
        conv: CudaMatrix { kind: Kind::Bf16, out: channels, columns: TAPS, pitch: TAPS, data: taps.data, id: unique() },
        a_log: vector(cuda, heads)?,
        dt_bias: vector(cuda, heads * DIM)?,
        o_norm: Norm { weight: vector(cuda, DIM)?, bias: None, eps: 1e-5 },
        heads,
        dim: DIM,
        gate_lower_bound: -5.0,
    })
}

fn cache(cuda: &Cuda, layers: usize, heads: usize, slots: usize) -> Result<CudaCache> {
    let cache = cuda.cache(&CacheShape {
        kda_layers: layers,
        kda_heads: heads,
        kda_head_dim: DIM,
        conv_kernel: TAPS,
        dsa_layers: 0,
        latent: 0,
        index_dim: 0,
        kpool: 1,
        slots,
        pages: 0,
        max_draft: DRAFTS,
    })?;
    for layer in 0..layers {
        let layer = cache.kda(layer)?;
        for memory in [&layer.state, &layer.records, &layer.columns] {
            fill(cuda, memory, Contents::Floats)?;
        }
    }
    Ok(cache)
}

/// A step of `sequences` segments alike.
fn step(sequences: usize, position: usize, rows: usize, fold: usize, commit: usize) -> Step {
    let segment = |slot| Segment {
        slot: slot as u32,
        position: position as u32,
        rows: rows as u32,
        fold: fold as u32,
        commit: commit as u32,
        first_page: 0,
        pages: 0,
    };
    Step { tokens: vec![0; sequences * rows], segments: (0..sequences).map(segment).collect(), ..Step::default() }
}

/// Decoding (one row) and verification (three rows, one record folded in) for the heads of one, two and four ranks.
pub(super) fn rows(cuda: &mut Cuda, report: &mut dyn FnMut(Row)) -> Result<()> {
    for ranks in RANKS {
        let heads = slice(ranks)?.text.kda.num_heads;
        let weights = weights(cuda, heads)?;
        for sequences in [1, 8, 32, 256] {
            let state = sequences * heads * DIM * DIM * 4;
            let layers = ROTATION.div_ceil(state).clamp(2, 64);
            let mut cache = cache(cuda, layers, heads, sequences)?;
            for (rows, fold) in [(1, 0), (3, 1)] {
                report(decode(cuda, &weights, &mut cache, [sequences, rows, fold, ranks])?);
            }
        }
        for prompt in [2048, 8192, 16384] {
            prefill(cuda, &weights, prompt, ranks, report)?;
        }
    }
    Ok(())
}

/// One prompt, row after row and in chunks.
fn prefill(
    cuda: &mut Cuda,
    weights: &KdaWeights<Cuda>,
    prompt: usize,
    ranks: usize,
    report: &mut dyn FnMut(Row),
) -> Result<()> {
    let (heads, inner) = (weights.heads, weights.heads * DIM);
    let mut cache = cache(cuda, 1, heads, 1)?;
    cuda.begin(&step(1, 0, prompt, 0, prompt))?;
    let (proj, gates) = (cuda.buffer(prompt, 3 * inner + heads)?, cuda.buffer(prompt, 2 * inner)?);
    let mut out = cuda.buffer(prompt, inner)?;
    fill(cuda, &proj.memory, Contents::Floats)?;
    fill(cuda, &gates.memory, Contents::Floats)?;
    for (name, form) in [("row after row", KdaForm::Recurrent), ("in chunks", KdaForm::Chunked)] {
        let micros = timed(cuda, 1, |cuda, _| cuda.kda(weights, form, &proj, &gates, &mut cache, 0, &mut out))?;
        // The state, and every row's q, k, v, f, z and output once.
        let bytes = 4.0 * heads as f64 * (2 * DIM * DIM + 6 * DIM * prompt) as f64;
        // Of the chunked form with 64 rows, whatever the form.
        let flops = (2 * (4 * DIM * DIM + 3 * 64 * DIM + 64 * 64 / 3)) as f64 * (prompt * heads) as f64;
        let kernel = format!("KDA prompt, {heads} heads, {name}, {}", of_ranks(ranks));
        report(Row { kernel, rows: prompt, micros, bytes, flops, unit: Unit::Tensor });
    }
    Ok(())
}

fn decode(
    cuda: &mut Cuda,
    weights: &KdaWeights<Cuda>,
    cache: &mut CudaCache,
    [sequences, rows, fold, ranks]: [usize; 4],
) -> Result<Row> {
    let (heads, layers) = (weights.heads, cache.shape.kda_layers);
    let (inner, total) = (heads * DIM, sequences * rows);
    cuda.begin(&step(sequences, 1000, rows, fold, 1))?;
    let (proj, gates) = (cuda.buffer(total, 3 * inner + heads)?, cuda.buffer(total, 2 * inner)?);
    let mut out = cuda.buffer(total, inner)?;
    fill(cuda, &proj.memory, Contents::Floats)?;
    fill(cuda, &gates.memory, Contents::Floats)?;
    let micros = timed(cuda, 2 * layers.clamp(4, 32), |cuda, i| {
        cuda.kda(weights, KdaForm::Recurrent, &proj, &gates, cache, i % layers, &mut out)
    })?;
    // State read and written; projections, gates, output; columns of the convolution; records.
    let head = 2 * DIM * DIM + 6 * DIM * rows + 3 * DIM * (TAPS - 1 + rows) + 3 * DIM * (fold + rows - 1);
    Ok(Row {
        kernel: format!("KDA {sequences} x {rows}, {heads} heads, {}", of_ranks(ranks)),
        rows: total,
        micros,
        bytes: 4.0 * (sequences * heads * head) as f64,
        flops: 8.0 * (total * heads * DIM * DIM) as f64,
        unit: Unit::Float,
    })
}
