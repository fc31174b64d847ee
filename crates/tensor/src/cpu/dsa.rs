//! Sparse attention, the part that writes the cache and chooses tokens.
//!
//! [`dsa_write`] norms the query residual, writes each row's latent to its page, and keeps the indexer's pools: every
//! row's normed index key and pool gate go to the slot's tail ring, and whenever a row completes a pool of `kpool`
//! tokens the pool's key `K[d] = sum_j softmax_j(gate_j[d] + ape_j[d]) key_j[d]` goes to its page. Rows are taken in order,
//! so a chunk may start or end anywhere in a pool; a row that is computed again after a rejected draft replaces its ring
//! entry and, when it completes the pool, the pool's key.
//!
//! [`dsa_select`] scores every complete pool that lies in the row's past,
//! `score[p] = sum_h w[h] heads^-1/2 relu(q[h] . K[p] dim^-1/2)`, keeps the best `topk / kpool` (equal scores: the lower
//! pool) and adds the tail, the tokens after the last complete pool. The row's own pool has no privilege: when the row
//! completes it, it competes like any other, and the row may not see itself.

use super::{
    Chunks, Cpu, CpuBuffer, CpuCache, CpuSelection,
    simd::{
        Isa,
        index::{index_scores, pool_key},
    },
    types::{LANES, require, require_equal},
};
use crate::{CacheShape, Columns, DsaColumns, DsaWeights, Error, IndexerWeights, PAGE_TOKENS, Placed, Result};

/// Norms, latents, index keys and pools.
pub(super) fn dsa_write(
    cpu: &mut Cpu,
    weights: &DsaWeights<Cpu>,
    columns: DsaColumns,
    proj: &CpuBuffer,
    indexer: bool,
    cache: &mut CpuCache,
    layer: usize,
    q_residual: &mut CpuBuffer,
) -> Result<()> {
    let rows = cpu.step.rows();
    let DsaColumns { q_lora, latent } = columns;
    let indexer = if indexer { weights.indexer.as_ref() } else { None };
    let shape = cache.shape().clone();
    let needed = q_lora + latent + indexer.map_or(0, |i| 2 * i.dim + i.heads);
    proj.require("dsa_write: projections", rows, needed)?;
    q_residual.require("dsa_write: query residual", rows, q_lora)?;
    require_equal("dsa_write: query norm", q_lora, weights.q_norm.weight.len())?;
    require_equal("dsa_write: latent norm", latent, weights.kv_norm.weight.len())?;
    require_equal("dsa_write: latent of the cache", latent, shape.latent)?;
    check_pages(cpu, shape.pages)?;
    if let Some(i) = indexer {
        check_indexer(i, &shape)?;
    }

    let isa = cpu.isa;
    let width = q_residual.width();
    cpu.pool.split(Chunks::new(&mut q_residual.as_mut_slice()[..rows * width], width), |row, out, _| {
        let x = &proj.row(row)[..q_lora];
        isa.rms_norm(x, weights.q_norm.weight.as_slice(), weights.q_norm.eps, &mut out[..q_lora]);
    });

    let dsa = cache.dsa_mut(layer)?;
    for placed in cpu.step.placed() {
        for t in 0..placed.segment.rows as usize {
            let position = placed.segment.position as usize + t;
            let page = placed.pages[position / PAGE_TOKENS] as usize;
            let slot = position % PAGE_TOKENS;
            let row = proj.row(placed.row + t);
            let to = &mut dsa.latents[(page * PAGE_TOKENS + slot) * latent..][..latent];
            let kv_norm = &weights.kv_norm;
            isa.rms_norm(&row[q_lora..][..latent], kv_norm.weight.as_slice(), kv_norm.eps, to);

            let Some(i) = indexer else { continue };
            let (dim, kpool) = (i.dim, i.kpool);
            let ring = kpool + shape.max_draft;
            let tail = &mut dsa.tails[placed.segment.slot as usize * ring * 2 * dim..][..ring * 2 * dim];
            let (key, gate) = tail[position % ring * 2 * dim..][..2 * dim].split_at_mut(dim);
            let raw = &row[q_lora + latent..];
            let (norm, bias) = (&i.k_norm, i.k_norm.bias.as_ref().map_or(&[][..], |b| b.as_slice()));
            isa.layer_norm(&raw[..dim], norm.weight.as_slice(), bias, norm.eps, key);
            gate.copy_from_slice(&raw[dim + i.heads..][..dim]);
            if (position + 1).is_multiple_of(kpool) {
                let pools = PAGE_TOKENS / kpool;
                let to = &mut dsa.pool_keys[(page * pools + slot / kpool) * dim..][..dim];
                pool_key(isa, tail, position + 1 - kpool, i.ape.as_slice(), to);
            }
        }
    }
    Ok(())
}

/// The tokens of each row.
pub(super) fn dsa_select(
    cpu: &mut Cpu,
    weights: &IndexerWeights<Cpu>,
    columns: DsaColumns,
    query: Columns<'_, Cpu>,
    proj: &CpuBuffer,
    cache: &CpuCache,
    layer: usize,
    selection: &mut CpuSelection,
) -> Result<()> {
    let rows = cpu.step.rows();
    let shape = cache.shape().clone();
    let (heads, dim, kpool) = (weights.heads, weights.dim, weights.kpool);
    let head_weights = columns.q_lora + columns.latent + dim;
    check_indexer(weights, &shape)?;
    check_pages(cpu, shape.pages)?;
    proj.require("dsa_select: projections", rows, head_weights + heads)?;
    query.buffer.require("dsa_select: index queries", rows, query.start + query.width)?;
    require_equal("dsa_select: width of the index queries", heads * dim, query.width)?;
    require("dsa_select: rows of the selection", rows, selection.rows())?;
    let keep = weights.topk / kpool;
    require("dsa_select: width of the selection", selection_width(cpu, keep, kpool), selection.width())?;

    let stage = Select { isa: cpu.isa, weights, keep, pool_keys: &cache.dsa(layer)?.pool_keys };
    let factor = 1.0 / (heads as f32).sqrt();
    let read = |row: usize, w: &mut [f32]| {
        for (w, x) in w.iter_mut().zip(&proj.row(row)[head_weights..]) {
            *w = x * factor;
        }
        &query.buffer.row(row)[query.start..][..query.width]
    };
    if rows < cpu.pool.threads() {
        // Too few rows for the threads: they share the pools of a row.
        let Cpu { pool, step, index_scores, .. } = cpu;
        index_scores.grow("index scores", 2 * most_pools(step.placed(), kpool) + heads.next_multiple_of(LANES))?;
        for row in 0..rows {
            let Some((placed, position)) = locate(step.placed(), row) else { continue };
            let pools = (position + 1) / kpool;
            let (w, rest) = index_scores.as_mut_slice().split_at_mut(heads.next_multiple_of(LANES));
            let (scores, rest) = rest.split_at_mut(pools);
            let w = &mut w[..heads];
            let q = read(row, w);
            if pools > keep {
                let page_pools = PAGE_TOKENS / kpool;
                let share = pools.div_ceil(4 * pool.threads()).next_multiple_of(page_pools);
                let w = &*w;
                pool.split(Chunks::new(scores, share), |task, scores, _| {
                    stage.score(&placed.pages[task * share / page_pools..], q, w, scores);
                });
            }
            let (tokens, len) = selection.row_mut(row);
            *len = stage.choose(position, scores, &mut rest[..pools], tokens) as u32;
        }
        return Ok(());
    }
    let step = &cpu.step;
    let width = selection.width();
    let outputs =
        (Chunks::new(&mut selection.tokens[..rows * width], width), Chunks::new(&mut selection.lens[..rows], 1));
    cpu.pool.split(outputs, |row, (tokens, len), scratch| {
        let Some((placed, position)) = locate(step.placed(), row) else { return };
        let pools = (position + 1) / kpool;
        let [scores, ranked, w] = scratch.floats([pools, pools, heads]);
        let q = read(row, w);
        if pools > keep {
            stage.score(placed.pages, q, w, scores);
        }
        len[0] = stage.choose(position, scores, ranked, tokens) as u32;
    });
    Ok(())
}

/// What selecting needs besides the row.
struct Select<'a> {
    isa: Isa,
    weights: &'a IndexerWeights<Cpu>,
    /// Pools kept.
    keep: usize,
    pool_keys: &'a [f32],
}

impl Select<'_> {
    /// Writes the tokens of the row at `position`, ascending; returns their number. `scores` are those of all pools in its
    /// past, unless these fit anyway; `ranked` is scratch of the same length.
    fn choose(&self, position: usize, scores: &[f32], ranked: &mut [f32], tokens: &mut [u32]) -> usize {
        let kpool = self.weights.kpool;
        let pools = scores.len();
        let mut len = 0;
        let mut add = |from: usize, to: usize| {
            for token in from..to {
                tokens[len] = token as u32;
                len += 1;
            }
        };
        if pools <= self.keep {
            add(0, position + 1);
            return len;
        }
        ranked.copy_from_slice(scores);
        choose(scores, ranked, self.keep, |pool| add(pool * kpool, (pool + 1) * kpool));
        add(pools * kpool, position + 1);
        len
    }

    /// Scores of consecutive pools from the start of the first of `pages`.
    fn score(&self, pages: &[u32], q: &[f32], w: &[f32], scores: &mut [f32]) {
        let dim = self.weights.dim;
        let page_pools = PAGE_TOKENS / self.weights.kpool;
        let scale = 1.0 / (dim as f32).sqrt();
        for (scores, &page) in scores.chunks_mut(page_pools).zip(pages) {
            let keys = &self.pool_keys[page as usize * page_pools * dim..][..page_pools * dim];
            index_scores(self.isa, q, w, keys, dim, scale, scores);
        }
    }
}

/// Calls `take` with the `keep` best pools, ascending; among equal scores the lower pool is better and NaN is worst.
/// `ranked` is scratch holding the scores.
fn choose(scores: &[f32], ranked: &mut [f32], keep: usize, mut take: impl FnMut(usize)) {
    let Some(last) = keep.checked_sub(1) else { return };
    let rank = |score: f32| if score.is_nan() { f32::NEG_INFINITY } else { score };
    let (better, threshold, _) = ranked.select_nth_unstable_by(last, |a, b| rank(*b).total_cmp(&rank(*a)));
    let threshold = rank(*threshold);
    let mut ties = keep - better.iter().filter(|&&s| rank(s) > threshold).count();
    for (pool, &score) in scores.iter().enumerate() {
        let score = rank(score);
        if score > threshold {
            take(pool);
        } else if score >= threshold && ties > 0 {
            ties -= 1;
            take(pool);
        }
    }
}

/// Segment and position of a row.
pub(super) fn locate<'a>(mut placed: impl Iterator<Item = Placed<'a>>, row: usize) -> Option<(Placed<'a>, usize)> {
    placed.find(|p| row < p.row + p.segment.rows as usize).map(|p| (p, p.segment.position as usize + row - p.row))
}

/// Pools in the past of the step's furthest row.
fn most_pools<'a>(placed: impl Iterator<Item = Placed<'a>>, kpool: usize) -> usize {
    placed.map(|p| (p.segment.position as usize + p.segment.rows as usize) / kpool).max().unwrap_or(0)
}

/// Most tokens that a row of this step selects.
fn selection_width(cpu: &Cpu, keep: usize, kpool: usize) -> usize {
    let end = cpu.step.segments.iter().map(|s| s.position as usize + s.rows as usize).max().unwrap_or(0);
    end.min((keep + 1) * kpool - 1)
}

fn check_indexer(i: &IndexerWeights<Cpu>, shape: &CacheShape) -> Result<()> {
    require_equal("indexer: width of an index key in the cache", i.dim, shape.index_dim)?;
    require_equal("indexer: tokens a pool of the cache", i.kpool, shape.kpool)?;
    require_equal("indexer: norm of the key", i.dim, i.k_norm.weight.len())?;
    require_equal("indexer: ape", i.kpool * i.dim, i.ape.len())?;
    match &i.k_norm.bias {
        Some(bias) => require_equal("indexer: bias of the key's norm", i.dim, bias.len()),
        None => Err(Error::Weight {
            name: "indexer k_norm".to_owned(),
            expected: "a LayerNorm with a bias".to_owned(),
            found: "no bias".to_owned(),
        }),
    }
}

/// Every page and slot of the step exists in the cache, and the page tables cover the rows.
pub(super) fn check_pages(cpu: &Cpu, pages: usize) -> Result<()> {
    for placed in cpu.step.placed() {
        let end = placed.segment.position as usize + placed.segment.rows as usize;
        require("dsa: pages of a segment", end.div_ceil(PAGE_TOKENS), placed.pages.len())?;
        for &page in placed.pages {
            require("dsa: pages of the cache", page as usize + 1, pages)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
