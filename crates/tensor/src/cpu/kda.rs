//! Kimi delta attention (KDA): linear attention whose state forgets by key channel and is corrected by the delta rule.
//!
//! Per head, with `q`, `k`, `v` after a causal convolution and SiLU, `q` and `k` of unit length (`q` also divided by the
//! root of the width), and the state `S` `[key, value]`:
//!
//! - `g[d] = bound sigmoid(exp(A_log) (f[d] + dt_bias[d]))`, between `bound` (-5) and 0; `beta = sigmoid(b)`,
//! - `S = diag(exp(g)) S`, `u = beta (v - S^T k)`, `S = S + k u^T`, `o = S^T q`,
//! - output `rms_norm(o) * sigmoid(z)`.
//!
//! # Order of work
//! One task a head. For each segment: fold the accepted records into the state, then go over the rows in blocks. A block's
//! convolution window, gates and norms are prepared first; the recurrence then passes over it in tiles of value columns,
//! which do not depend on each other. Blocks change neither order nor operations, so any chunking gives the same bits.

use super::{
    Cpu, CpuBuffer, CpuCache, CpuMatrix, Panel, Panels, Scratch,
    cache::KdaUnit,
    simd::{
        Isa,
        delta::{COLUMNS, DeltaRows, conv_silu, delta, exp_in_place, fold, gated_norm, log_decays, normalize},
        math,
    },
    types::{LANES, require, require_equal, widen},
};
use crate::{CacheShape, KdaForm, KdaWeights, Placed, Result};

mod chunk;

use chunk::Chunk;

/// Committed rows of a block, and rows of a chunk.
const BLOCK: usize = 64;

/// What all heads read.
struct Stage<'a> {
    isa: Isa,
    form: KdaForm,
    weights: &'a KdaWeights<Cpu>,
    proj: &'a CpuBuffer,
    gates: &'a CpuBuffer,
    taps: usize,
    max_draft: usize,
}

/// Rows of a block and their first position.
#[derive(Debug, Clone, Copy)]
struct Block {
    /// First row in the step.
    row: usize,
    /// Rows.
    rows: usize,
    /// Rows whose effect the stored state includes.
    commit: usize,
    /// Position of the first row.
    position: usize,
}

/// The stage.
pub(super) fn kda(
    cpu: &mut Cpu,
    weights: &KdaWeights<Cpu>,
    form: KdaForm,
    proj: &CpuBuffer,
    gates: &CpuBuffer,
    cache: &mut CpuCache,
    layer: usize,
    out: &mut CpuBuffer,
) -> Result<()> {
    let (heads, dim) = (weights.heads, weights.dim);
    let (rows, inner) = (cpu.step.rows(), heads * dim);
    let shape = cache.shape();
    proj.require("kda: projections", rows, 3 * inner + heads)?;
    gates.require("kda: gates", rows, 2 * inner)?;
    out.require("kda: output", rows, inner)?;
    require_equal("kda: heads of the cache", heads, shape.kda_heads)?;
    require_equal("kda: head width of the cache", dim, shape.kda_head_dim)?;
    require_equal("kda: taps", weights.conv.columns(), shape.conv_kernel)?;
    require_equal("kda: channels of the convolution", 3 * inner, weights.conv.out())?;
    require_equal("kda: A_log", heads, weights.a_log.len())?;
    require_equal("kda: dt_bias", inner, weights.dt_bias.len())?;
    require_equal("kda: o_norm", dim, weights.o_norm.weight.len())?;
    cache.check_kda(layer)?;
    for s in &cpu.step.segments {
        require("kda: slots of the cache", s.slot as usize + 1, shape.slots)?;
        require("kda: uncommitted rows", s.rows.saturating_sub(s.commit) as usize, shape.max_draft)?;
        require("kda: records to fold", s.fold as usize, shape.max_draft.min(s.position as usize))?;
    }

    let stage = Stage { isa: cpu.isa, form, weights, proj, gates, taps: shape.conv_kernel, max_draft: shape.max_draft };
    let (step, stride, cache) = (&cpu.step, out.width(), &*cache);
    let panels = Panels::new(out.as_mut_slice(), rows, stride, 0, inner, dim);
    cpu.pool.split(panels, |head, mut panel, scratch| {
        for placed in step.placed() {
            let mut unit = cache.unit(layer, placed.segment.slot as usize, head);
            stage.segment(head, &placed, &mut unit, scratch, &mut panel);
        }
    });
    Ok(())
}

/// Lengths of taps, raw columns, convolved columns, decays, beta, a tile of the state, updates, outputs and, for the chunked
/// form, its matrices.
fn scratch(dim: usize, taps: usize, max_draft: usize, chunked: bool) -> [usize; 9] {
    let (most, triple) = (BLOCK + max_draft, 3 * dim);
    [
        taps * triple,
        (most + taps.saturating_sub(1)) * triple,
        most * triple,
        most * dim,
        most,
        dim * COLUMNS,
        most * dim,
        most * dim,
        if chunked { chunk::work_floats(dim) } else { 0 },
    ]
}

/// Floats of scratch that a thread needs for caches of this shape.
pub(super) fn scratch_floats(shape: &CacheShape) -> usize {
    // Each part starts at a cache line.
    scratch(shape.kda_head_dim, shape.conv_kernel, shape.max_draft, true)
        .iter()
        .map(|n| n.next_multiple_of(LANES))
        .sum()
}

impl Stage<'_> {
    /// One head of one segment.
    fn segment(
        &self,
        head: usize,
        placed: &Placed<'_>,
        unit: &mut KdaUnit,
        scratch: &mut Scratch,
        out: &mut Panel<'_>,
    ) {
        let segment = placed.segment;
        let (position, fold_rows) = (segment.position as usize, segment.fold as usize);
        if position == fold_rows {
            // Nothing precedes the first record or row: whatever the slot held belongs to another sequence.
            unit.state.fill(0.0);
        }
        for p in position - fold_rows..position {
            unit.fold(p, |state, [key, decay, update]| fold(self.isa, key, decay, update, state));
        }

        let (rows, commit) = (segment.rows as usize, segment.commit as usize);
        let mut done = 0;
        while done < rows {
            let at = position + done;
            // Blocks end at multiples of BLOCK from position 0, the anchors of the chunked form.
            let committed = commit.saturating_sub(done).min(BLOCK - at % BLOCK);
            let chunked = self.form == KdaForm::Chunked && committed == BLOCK;
            let rest = if done + committed == commit && !chunked { rows - commit } else { 0 };
            let block = Block {
                row: placed.row + done,
                rows: if committed == 0 { rows - done } else { committed + rest },
                commit: committed,
                position: at,
            };
            self.block(head, block, placed, unit, scratch, out);
            done += block.rows;
        }

        let keep = rows.min(unit.column_ring());
        for t in rows - keep..rows {
            let column = unit.column_mut(position + t);
            self.read_column(head, placed.row + t, column);
        }
    }

    /// Lengths of what a task works in.
    fn scratch(&self) -> [usize; 9] {
        let chunked = self.form == KdaForm::Chunked;
        scratch(self.weights.dim, self.taps, self.max_draft, chunked)
    }

    /// Raw q, k, v of a row of the step.
    fn read_column(&self, head: usize, row: usize, column: &mut [f32]) {
        let (dim, inner) = (self.weights.dim, self.weights.heads * self.weights.dim);
        let proj = self.proj.row(row);
        for (part, values) in column.chunks_exact_mut(dim).enumerate() {
            values.copy_from_slice(&proj[part * inner + head * dim..][..dim]);
        }
    }

    /// One head of a block of rows.
    fn block(
        &self,
        head: usize,
        block: Block,
        placed: &Placed<'_>,
        unit: &mut KdaUnit,
        scratch: &mut Scratch,
        out: &mut Panel<'_>,
    ) {
        let (isa, w) = (self.isa, self.weights);
        let (dim, inner) = (w.dim, w.heads * w.dim);
        let (rows, triple) = (block.rows, 3 * dim);
        let [taps, raw, qkv, decay, beta, tile, update, o, work] = scratch.floats(self.scratch());
        let (qkv, decay) = (&mut qkv[..rows * triple], &mut decay[..rows * dim]);
        let (beta, update, o) = (&mut beta[..rows], &mut update[..rows * dim], &mut o[..rows * dim]);

        self.read_taps(head, taps);
        let history = self.taps - 1;
        for (i, column) in raw.chunks_exact_mut(triple).take(history + rows).enumerate() {
            // Position `block.position + i - history`.
            let position = block.position + i;
            if position < history {
                column.fill(0.0);
            } else if position - history < placed.segment.position as usize {
                column.copy_from_slice(unit.column(position - history));
            } else {
                let t = position - history - placed.segment.position as usize;
                self.read_column(head, placed.row + t, column);
            }
        }
        conv_silu(isa, taps, triple, raw, qkv);

        let rate = math::exp(w.a_log.as_slice()[head]);
        let bias = &w.dt_bias.as_slice()[head * dim..][..dim];
        let query_factor = 1.0 / (dim as f32).sqrt();
        for t in 0..rows {
            let row = block.row + t;
            let (q, rest) = qkv[t * triple..][..triple].split_at_mut(dim);
            normalize(isa, query_factor, q);
            normalize(isa, 1.0, &mut rest[..dim]);
            let f = &self.gates.row(row)[head * dim..][..dim];
            log_decays(isa, w.gate_lower_bound, rate, f, bias, &mut decay[t * dim..][..dim]);
            beta[t] = math::sigmoid(self.proj.row(row)[3 * inner + head]);
        }

        if self.form == KdaForm::Chunked && block.commit == BLOCK {
            Chunk { qkv, beta, dim }.run(isa, decay, work, &mut unit.state, o);
        } else {
            exp_in_place(isa, decay);
            let prepared = DeltaRows { qkv, decay, beta, dim };
            delta(isa, &prepared, block.commit, &mut unit.state, tile, update, o);
        }
        for t in block.commit..rows {
            let record = unit.record_mut(block.position + t);
            let values = [&qkv[t * triple + dim..][..dim], &decay[t * dim..][..dim], &update[t * dim..][..dim]];
            for (to, from) in record.into_iter().zip(values) {
                to.copy_from_slice(from);
            }
        }

        for (t, o) in o.chunks_exact(dim).enumerate() {
            let z = &self.gates.row(block.row + t)[inner + head * dim..][..dim];
            gated_norm(isa, w.o_norm.eps, w.o_norm.weight.as_slice(), z, o, out.row_mut(block.row + t));
        }
    }

    /// The head's taps as `[taps, q | k | v]`, from rows `[channel, taps]`.
    fn read_taps(&self, head: usize, taps: &mut [f32]) {
        match &self.weights.conv {
            CpuMatrix::Bf16 { bytes, .. } => self.turn_taps(head, bytes.as_slice().as_chunks().0, widen, taps),
            CpuMatrix::F32 { bytes, .. } => {
                self.turn_taps(head, bytes.as_slice().as_chunks().0, f32::from_le_bytes, taps);
            }
            CpuMatrix::Int4 { .. } => taps.fill(f32::NAN),
        }
    }

    fn turn_taps<const N: usize>(&self, head: usize, stored: &[[u8; N]], value: fn([u8; N]) -> f32, taps: &mut [f32]) {
        let (dim, inner) = (self.weights.dim, self.weights.heads * self.weights.dim);
        for part in 0..3 {
            let channels = &stored[(part * inner + head * dim) * self.taps..][..dim * self.taps];
            for (d, channel) in channels.chunks_exact(self.taps).enumerate() {
                for (j, tap) in channel.iter().enumerate() {
                    taps[j * 3 * dim + part * dim + d] = value(*tap);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
