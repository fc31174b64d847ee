//! Latent attention as a step calls it, between its projections: writing latents and pool keys, choosing tokens, absorption with
//! attention and values. [`super::attention`] measures its inner kernels over more contexts.

use glimmer_tensor::{
    Backend, CacheShape, Columns, DsaColumns, DsaWeights, IndexerWeights, Norm, PAGE_TOKENS, Result, Segment, Step,
};

use glimmer_checkpoint::TextConfig;

use super::{
    Contents, Row, Unit, fill, random_matrix,
    slice::{RANKS, ROWS, of_ranks, sequences, slice},
    timed,
};
use crate::{
    backend::Cuda,
    cache::CudaCache,
    types::{CudaBuffer, CudaSelection, CudaVector},
};

/// Tokens before and within a step: a prompt of 8192 and half of its answer. Prompts of a step end there or begin with the context.
const CONTEXT: usize = 8704;
/// Layers in turn, so that neither weights nor latents of small steps stay in the second-level cache.
const LAYERS: usize = 4;
const CALLS: usize = 8;

fn vector(cuda: &Cuda, len: usize) -> Result<CudaVector> {
    Ok(CudaVector { memory: cuda.memory.upload("a parameter vector", &vec![0.5f32; len])?, len })
}

fn floats(cuda: &Cuda, rows: usize, width: usize) -> Result<CudaBuffer> {
    let buffer = cuda.buffer(rows, width)?;
    fill(cuda, &buffer.memory, Contents::Floats)?;
    Ok(buffer)
}

/// A step whose sequences end at the context.
fn step(rows: usize) -> Step {
    let [count, each] = sequences(rows);
    let pages = CONTEXT.div_ceil(PAGE_TOKENS);
    let mut step = Step { tokens: vec![0; rows], ..Step::default() };
    for slot in 0..count {
        step.segments.push(Segment {
            slot: slot as u32,
            position: (CONTEXT - each) as u32,
            rows: each as u32,
            fold: 0,
            commit: if each > 3 { each as u32 } else { 1 },
            first_page: step.pages.len() as u32,
            pages: pages as u32,
        });
        // A stride that is no divisor scatters a sequence's pages.
        step.pages.extend((0..pages).map(|p| ((p * count + slot) * 7919 % (pages * count)) as u32));
    }
    step
}

fn cache(cuda: &Cuda, text: &TextConfig, sequences: usize) -> Result<CudaCache> {
    let shape = CacheShape {
        kda_layers: 0,
        kda_heads: 1,
        kda_head_dim: 32,
        conv_kernel: 4,
        dsa_layers: LAYERS,
        latent: text.mla.kv_lora_rank,
        index_dim: text.indexer.head_dim,
        kpool: text.indexer.kpool,
        slots: sequences,
        pages: sequences * CONTEXT.div_ceil(PAGE_TOKENS),
        max_draft: 2,
    };
    let cache = CudaCache::new(&cuda.memory, &shape, cuda.device().properties().capability.0 == 9)?;
    for layer in 0..LAYERS {
        let held = cache.dsa(layer)?;
        // Pairs of bf16 between -1 and 1 are halves between -1.9 and 1.9.
        fill(cuda, &held.latents, Contents::Bf16)?;
        fill(cuda, &held.pool_keys, Contents::Bf16)?;
        fill(cuda, &held.tails, Contents::Floats)?;
    }
    Ok(cache)
}

fn weights(cuda: &Cuda, text: &TextConfig) -> Result<DsaWeights<Cuda>> {
    let (mla, indexer) = (&text.mla, &text.indexer);
    let norm = |len| -> Result<Norm<Cuda>> { Ok(Norm { weight: vector(cuda, len)?, bias: None, eps: 1e-5 }) };
    Ok(DsaWeights {
        q_norm: norm(mla.q_lora_rank)?,
        kv_norm: norm(mla.kv_lora_rank)?,
        kv_b: random_matrix(cuda, mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)?,
        indexer: Some(IndexerWeights {
            k_norm: Norm {
                weight: vector(cuda, indexer.head_dim)?,
                bias: Some(vector(cuda, indexer.head_dim)?),
                eps: 1e-6,
            },
            ape: vector(cuda, indexer.kpool * indexer.head_dim)?,
            heads: indexer.num_heads,
            dim: indexer.head_dim,
            kpool: indexer.kpool,
            topk: indexer.topk,
        }),
        heads: mla.num_heads,
        qk_dim: mla.qk_nope_head_dim,
        v_dim: mla.v_head_dim,
    })
}

/// What a number of rows needs, whatever the ranks.
struct Setting {
    rows: usize,
    sequences: usize,
    columns: DsaColumns,
    cache: CudaCache,
    proj: CudaBuffer,
    selection: CudaSelection,
}

/// All numbers of rows; attention for the heads of one, two and four ranks.
pub(super) fn rows(cuda: &mut Cuda, each: &mut dyn FnMut(Row)) -> Result<()> {
    let text = slice(1)?.text;
    let (mla, indexer) = (&text.mla, &text.indexer);
    let sets = (0..LAYERS).map(|_| weights(cuda, &text)).collect::<Result<Vec<_>>>()?;
    let slices = RANKS
        .map(|ranks| {
            let text = slice(ranks)?.text;
            let sets = (0..LAYERS).map(|_| weights(cuda, &text)).collect::<Result<Vec<_>>>()?;
            Ok::<_, glimmer_tensor::Error>((ranks, text, sets))
        })
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    for rows in ROWS {
        let [sequences, _] = sequences(rows);
        let width = mla.q_lora_rank + mla.kv_lora_rank + 2 * indexer.head_dim + indexer.num_heads;
        let mut setting = Setting {
            rows,
            sequences,
            columns: DsaColumns { q_lora: mla.q_lora_rank, latent: mla.kv_lora_rank },
            cache: cache(cuda, &text, sequences)?,
            proj: floats(cuda, rows, width)?,
            selection: cuda.selection(rows, indexer.topk + indexer.kpool - 1)?,
        };
        cuda.begin(&step(rows))?;
        write(cuda, &text, &sets, &mut setting, each)?;
        select(cuda, &text, &sets, &mut setting, each)?;
        for (ranks, text, sets) in &slices {
            attend(cuda, text, sets, &setting, *ranks, each)?;
        }
    }
    Ok(())
}

fn write(
    cuda: &mut Cuda,
    text: &TextConfig,
    sets: &[DsaWeights<Cuda>],
    setting: &mut Setting,
    each: &mut dyn FnMut(Row),
) -> Result<()> {
    let Setting { rows, columns, cache, proj, .. } = setting;
    let (rows, mla, dim) = (*rows, &text.mla, text.indexer.head_dim);
    let mut residual = cuda.buffer(rows, mla.q_lora_rank)?;
    let micros = timed(cuda, CALLS, |cuda, i| {
        cuda.dsa_write(&sets[i % LAYERS], *columns, proj, true, cache, i % LAYERS, &mut residual)
    })?;
    // Read as f32; the residual is written as f32, latents and tails of pools as halves and f32.
    let read = 4 * (mla.q_lora_rank + mla.kv_lora_rank + 2 * dim);
    let written = 4 * mla.q_lora_rank + 2 * mla.kv_lora_rank + 8 * dim;
    each(Row {
        kernel: "DSA norms, latents and pool keys written".to_owned(),
        rows,
        micros,
        bytes: (rows * (read + written)) as f64,
        flops: (8 * rows * (mla.q_lora_rank + mla.kv_lora_rank + dim)) as f64,
        unit: Unit::Float,
    });
    Ok(())
}

fn select(
    cuda: &mut Cuda,
    text: &TextConfig,
    sets: &[DsaWeights<Cuda>],
    setting: &mut Setting,
    each: &mut dyn FnMut(Row),
) -> Result<()> {
    let Setting { rows, sequences, columns, cache, proj, selection } = setting;
    let (rows, indexer) = (*rows, &text.indexer);
    let width = indexer.num_heads * indexer.head_dim;
    let query = floats(cuda, rows, width)?;
    let micros = timed(cuda, CALLS, |cuda, i| {
        let Some(weights) = &sets[i % LAYERS].indexer else { return Ok(()) };
        let query = Columns { buffer: &query, start: 0, width };
        cuda.dsa_select(weights, *columns, query, proj, cache, i % LAYERS, selection)
    })?;
    let pools = CONTEXT / indexer.kpool;
    // Rows of a prompt see fewer pools the earlier they are.
    let seen =
        if *sequences == 1 && rows > 3 { pools as f64 - (rows / (2 * indexer.kpool)) as f64 } else { pools as f64 };
    each(Row {
        kernel: format!("DSA index scores and {} of {pools} pools", indexer.topk / indexer.kpool),
        rows,
        micros,
        bytes: (*sequences * pools * indexer.head_dim * 2 + 4 * rows * width) as f64,
        flops: 2.0 * (rows * width) as f64 * seen,
        unit: Unit::Tensor,
    });
    Ok(())
}

/// Absorption, attention over what was chosen last, values.
fn attend(
    cuda: &mut Cuda,
    text: &TextConfig,
    sets: &[DsaWeights<Cuda>],
    setting: &Setting,
    ranks: usize,
    each: &mut dyn FnMut(Row),
) -> Result<()> {
    let Setting { rows, sequences, cache, selection, .. } = setting;
    let (rows, mla) = (*rows, &text.mla);
    let (heads, latent, qk, v) = (mla.num_heads, mla.kv_lora_rank, mla.qk_nope_head_dim, mla.v_head_dim);
    let query = floats(cuda, rows, heads * qk)?;
    let mut out = cuda.buffer(rows, heads * v)?;
    let micros = timed(cuda, CALLS, |cuda, i| {
        let query = Columns { buffer: &query, start: 0, width: heads * qk };
        cuda.mla(&sets[i % LAYERS], query, selection, cache, i % LAYERS, &mut out)
    })?;
    let chosen = (text.indexer.topk + text.indexer.kpool - 1).min(CONTEXT);
    // kv_b; latents once a sequence, of a prompt all; queries and output.
    let latents = if *sequences == 1 && rows > 3 { CONTEXT } else { sequences * chosen };
    let bytes = 2 * heads * (qk + v) * latent + 2 * latents * latent + 4 * rows * heads * (qk + v);
    each(Row {
        kernel: format!("DSA absorption, attention over {chosen}, values, {heads} heads, {}", of_ranks(ranks)),
        rows,
        micros,
        bytes: bytes as f64,
        flops: 2.0 * (rows * heads * latent) as f64 * (qk + v + 2 * chosen) as f64,
        unit: Unit::Tensor,
    });
    Ok(())
}
