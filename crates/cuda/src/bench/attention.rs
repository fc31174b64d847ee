//! Sparse attention over caches of halves: index scores with the choice of pools, attention over selected tokens.

use glimmer_tensor::{
    Backend, CacheShape, Columns, DsaColumns, IndexerWeights, Norm, PAGE_TOKENS, Result, Segment, Step,
};

use super::{Contents, Row, Unit, fill, timed};
use crate::{
    backend::Cuda,
    kernels::{
        dsa,
        sparse::{self, Attended},
    },
    types::{CudaSelection, CudaVector},
};

const LATENT: usize = 512;
const TOPK: usize = 2048;
const KPOOL: usize = 4;
const INDEX_HEADS: usize = 32;
const INDEX_DIM: usize = 128;
/// Heads of two ranks.
const HEADS: usize = 32;
/// Pages of the measured cache at most (16 GB of latents); longer contexts of many sequences name pages several times.
const PAGES: usize = 256 << 10;
const CALLS: usize = 8;

/// A step of `sequences` sequences with `rows` rows each at the end of `context` tokens.
fn step(sequences: usize, rows: usize, context: usize, pages: usize) -> Step {
    let each = context.div_ceil(PAGE_TOKENS);
    let mut step = Step::default();
    for i in 0..sequences {
        step.segments.push(Segment {
            slot: i as u32,
            position: (context - rows) as u32,
            rows: rows as u32,
            fold: 0,
            commit: 1,
            first_page: step.pages.len() as u32,
            pages: each as u32,
        });
        // A stride that is no divisor scatters a sequence's pages.
        step.pages.extend((0..each).map(|p| ((p * sequences + i) * 7919 % pages) as u32));
        step.tokens.extend((0..rows).map(|_| 0));
    }
    step
}

/// Random lists, another one for each row, or the same ones for the rows of a sequence.
fn selection(cuda: &Cuda, sequences: usize, rows: usize, context: usize, shared: bool) -> Result<CudaSelection> {
    let most = TOPK + KPOOL - 1;
    let mut selection = cuda.selection(sequences * rows, most)?;
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut list: Vec<u32> = Vec::new();
    for row in 0..sequences * rows {
        if !shared || row % rows == 0 || list.is_empty() {
            // One token of each of `most` stretches of the context.
            let end = context + 1 - rows;
            let count = most.min(end);
            list.clear();
            list.extend((0..count).map(|i| {
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                let (from, to) = (i * end / count, (i + 1) * end / count);
                (from + (state >> 33) as usize % (to - from)) as u32
            }));
        }
        cuda.write_selection(&mut selection, row, &list)?;
    }
    Ok(selection)
}

fn vector(cuda: &Cuda, len: usize) -> Result<CudaVector> {
    Ok(CudaVector { memory: cuda.memory.upload("a parameter vector", &vec![0.5f32; len])?, len })
}

/// A cache of halves with random contents, its step begun.
fn begin(cuda: &mut Cuda, sequences: usize, rows: usize, context: usize) -> Result<crate::cache::CudaCache> {
    let pages = (sequences * context.div_ceil(PAGE_TOKENS)).min(PAGES);
    let shape = CacheShape {
        kda_layers: 0,
        kda_heads: 1,
        kda_head_dim: 32,
        conv_kernel: 4,
        dsa_layers: 1,
        latent: LATENT,
        index_dim: INDEX_DIM,
        kpool: KPOOL,
        slots: sequences,
        pages,
        max_draft: 2,
    };
    let cache = crate::cache::CudaCache::new(&cuda.memory, &shape, true)?;
    let held = cache.dsa(0)?;
    // Pairs of bf16 between -1 and 1 are halves between -1.9 and 1.9.
    fill(cuda, &held.latents, Contents::Bf16)?;
    fill(cuda, &held.pool_keys, Contents::Bf16)?;
    cuda.begin(&step(sequences, rows, context, pages))?;
    Ok(cache)
}

fn attend(cuda: &mut Cuda, sequences: usize, rows: usize, context: usize, shared: bool) -> Result<Row> {
    let cache = begin(cuda, sequences, rows, context)?;
    let chosen = selection(cuda, sequences, rows, context, shared)?;
    let m = sequences * rows;
    let queries = cuda.memory.uninitialized("measurement", 2 * m * HEADS * LATENT)?;
    fill(cuda, &queries, Contents::Bf16)?;
    let out = cuda.memory.uninitialized("measurement", 4 * m * HEADS * LATENT)?;
    let latents = cache.dsa(0)?.latents.address();
    let micros = timed(cuda, CALLS, |cuda, _| {
        sparse::attend(
            cuda,
            0..m,
            &chosen,
            latents,
            queries.address(),
            Attended::Floats(out.address()),
            HEADS,
            1.0 / 16.0,
        )
    })?;
    let tokens = (TOPK + KPOOL - 1).min(context);
    let lists = if shared { sequences } else { m };
    // Latents cannot be read more often than there are.
    let bytes = (lists * tokens).min(sequences * context) * 2 * LATENT + m * HEADS * LATENT * 6;
    let what = if shared { "one list a sequence" } else { "a list a row" };
    Ok(Row {
        kernel: format!("latent attention, {HEADS} heads, {tokens} of {context}, {what}"),
        rows: m,
        micros,
        bytes: bytes as f64,
        flops: (4 * m * HEADS * tokens * LATENT) as f64,
        unit: Unit::Tensor,
    })
}

fn select(cuda: &mut Cuda, sequences: usize, rows: usize, context: usize) -> Result<Row> {
    let cache = begin(cuda, sequences, rows, context)?;
    let m = sequences * rows;
    let columns = DsaColumns { q_lora: 32, latent: LATENT };
    let weights = IndexerWeights {
        k_norm: Norm { weight: vector(cuda, INDEX_DIM)?, bias: Some(vector(cuda, INDEX_DIM)?), eps: 1e-6 },
        ape: vector(cuda, KPOOL * INDEX_DIM)?,
        heads: INDEX_HEADS,
        dim: INDEX_DIM,
        kpool: KPOOL,
        topk: TOPK,
    };
    let proj = cuda.buffer(m, 32 + LATENT + 2 * INDEX_DIM + INDEX_HEADS)?;
    fill(cuda, &proj.memory, Contents::Floats)?;
    let query = cuda.buffer(m, INDEX_HEADS * INDEX_DIM)?;
    fill(cuda, &query.memory, Contents::Floats)?;
    let mut chosen = cuda.selection(m, TOPK + KPOOL - 1)?;
    let micros = timed(cuda, CALLS, |cuda, _| {
        let q = Columns { buffer: &query, start: 0, width: INDEX_HEADS * INDEX_DIM };
        dsa::dsa_select(cuda, &weights, columns, q, &proj, &cache, 0, &mut chosen)
    })?;
    let pools = context / KPOOL;
    Ok(Row {
        kernel: format!("index scores and {} of {pools} pools", TOPK / KPOOL),
        rows: m,
        micros,
        bytes: (sequences * pools * INDEX_DIM * 2 + m * INDEX_HEADS * INDEX_DIM * 4) as f64,
        flops: (2 * m * INDEX_HEADS * pools * INDEX_DIM) as f64,
        unit: Unit::Tensor,
    })
}

/// Sequences of three rows over several contexts, then a prompt.
pub(super) fn rows(cuda: &mut Cuda, each: &mut dyn FnMut(Row)) -> Result<()> {
    for (sequences, context) in
        [(1, 16 << 10), (8, 16 << 10), (32, 8 << 10), (32, 128 << 10), (32, 1 << 20), (256, 16 << 10)]
    {
        for shared in [false, true] {
            each(attend(cuda, sequences, 3, context, shared)?);
        }
    }
    each(attend(cuda, 1, 2048, 16 << 10, false)?);
    for (sequences, context) in
        [(1, 16 << 10), (1, 128 << 10), (8, 128 << 10), (32, 16 << 10), (32, 128 << 10), (4, 1 << 20)]
    {
        each(select(cuda, sequences, 3, context)?);
    }
    Ok(())
}
