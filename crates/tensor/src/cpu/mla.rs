//! Latent attention over the selected tokens, in the absorbed form.
//!
//! A token's cache is one latent `c` shared by all heads. Per head, with the key rows `K` `[qk, latent]` and the value rows
//! `V` `[v, latent]` of `kv_b` (interleaved by head): `q~ = K^T q`, `p = softmax(q~ . c qk^-1/2)` over the selected tokens,
//! `out = V sum p c`. The scale is that of the query's width, not of the latent's. Tokens are taken in ascending order.

use super::{
    Cpu, CpuBuffer, CpuCache, CpuSelection, Panels,
    dsa::{check_pages, locate},
    mhc::stored,
    simd::{
        attend::{Keys, exp_shifted, scores, weighted_sum},
        stored::{dots, transposed},
    },
    types::{require, require_equal},
};
use crate::{Columns, DsaWeights, Result};

/// Rows whose absorbed queries are made together, so that the key rows are read once for all of them.
const ROWS: usize = 16;

/// Most heads of a task: they share the loads of the latents.
const HEADS: usize = 16;

/// The stage.
pub(super) fn mla(
    cpu: &mut Cpu,
    weights: &DsaWeights<Cpu>,
    query: Columns<'_, Cpu>,
    selection: &CpuSelection,
    cache: &CpuCache,
    layer: usize,
    out: &mut CpuBuffer,
) -> Result<()> {
    let (heads, qk, v) = (weights.heads, weights.qk_dim, weights.v_dim);
    let rows = cpu.step.rows();
    let shape = cache.shape();
    let latent = shape.latent;
    require_equal("mla: width of the queries", heads * qk, query.width)?;
    query.buffer.require("mla: queries", rows, query.start + query.width)?;
    out.require("mla: output", rows, heads * v)?;
    require("mla: rows of the selection", rows, selection.rows())?;
    require_equal("mla: columns of kv_b", latent, weights.kv_b.columns())?;
    require_equal("mla: rows of kv_b", heads * (qk + v), weights.kv_b.out())?;
    check_pages(cpu, shape.pages)?;
    for placed in cpu.step.placed() {
        for row in placed.row..placed.row + placed.segment.rows as usize {
            let last = selection.row(row).last().map_or(0, |&t| t as usize + 1);
            require("mla: selected tokens", last, placed.pages.len() * crate::PAGE_TOKENS)?;
        }
    }
    let kv_b = stored("mla: kv_b", &weights.kv_b)?;
    let dsa = cache.dsa(layer)?;

    let (isa, step, stride) = (cpu.isa, &cpu.step, out.width());
    let scale = 1.0 / (qk as f32).sqrt();
    let group = HEADS.min(heads.div_ceil(cpu.pool.threads())).max(1);
    let panels = Panels::new(out.as_mut_slice(), rows, stride, 0, heads * v, group * v);
    cpu.pool.split(panels, |task, mut panel, scratch| {
        let first = task * group;
        let count = group.min(heads - first);
        let most = selection.width();
        let [q, line, p, sums, values] =
            scratch.floats([ROWS * latent * count, ROWS * latent, count * most, ROWS * count * latent, ROWS * v]);
        for row in (0..rows).step_by(ROWS) {
            let n = ROWS.min(rows - row);
            // Absorbed queries [row, head, latent].
            for h in 0..count {
                let head = first + h;
                let keys = kv_b.rows(head * (qk + v), qk, latent);
                let x = &query.buffer.as_slice()[row * query.buffer.width() + query.start + head * qk..];
                let line = &mut line[..n * latent];
                line.fill(0.0);
                transposed(isa, keys, qk, latent, x, query.buffer.width(), line);
                for (r, line) in line.chunks_exact(latent).enumerate() {
                    q[(r * count + h) * latent..][..latent].copy_from_slice(line);
                }
            }
            // Attended latents [head, row, latent].
            for r in 0..n {
                let Some((placed, _)) = locate(step.placed(), row + r) else { continue };
                let tokens = selection.row(row + r);
                let keys = Keys::Paged { arena: &dsa.latents, pages: placed.pages, tokens };
                let p = &mut p[..count * tokens.len()];
                scores(isa, &q[r * count * latent..][..count * latent], keys, tokens.len(), latent, scale, p);
                let mut total = [0.0; HEADS];
                for (total, p) in total.iter_mut().zip(p.chunks_exact_mut(tokens.len().max(1))) {
                    *total = exp_shifted(isa, p);
                }
                let line = &mut line[..count * latent];
                line.fill(0.0);
                weighted_sum(isa, p, keys, tokens.len(), latent, line);
                for (h, line) in line.chunks_exact(latent).enumerate() {
                    let to = &mut sums[(h * ROWS + r) * latent..][..latent];
                    for (to, a) in to.iter_mut().zip(line) {
                        *to = a / total[h];
                    }
                }
            }
            // Values.
            for h in 0..count {
                let value_rows = kv_b.rows((first + h) * (qk + v) + qk, v, latent);
                dots(isa, value_rows, v, latent, &sums[h * ROWS * latent..][..n * latent], values, v);
                for (r, values) in values.chunks_exact(v).take(n).enumerate() {
                    panel.row_mut(row + r)[h * v..][..v].copy_from_slice(values);
                }
            }
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests;
