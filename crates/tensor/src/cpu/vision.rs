//! Stages of the vision tower: attention inside a frame, merging of patch groups, the merger's norm and GELU.
//!
//! Patches stand in merge-block order: 2 x 2 blocks row by row, inside a block row by row. A patch's rotary angles come from
//! its place in the unmerged grid: `[y f_j | x f_j]` with `f_j = 10000^(-2 j / (dim / 2))`, used for both halves of the head
//! (`out = v cos + [-v2, v1] sin`).

use super::{
    Chunks, Cpu, CpuBuffer, Panels,
    simd::{
        attend::{Keys, exp_shifted, scores, weighted_sum},
        gelu::gelu,
    },
    types::{AlignedVec, require, require_equal},
};
use crate::{Error, Norm, PatchGrid, Result};

/// Side of a merge block; configurations with another one are refused when they are read.
const MERGE: usize = 2;

/// Base of the rotary frequencies.
const THETA: f64 = 10_000.0;

/// Query rows whose probabilities are held together.
const QUERIES: usize = 4;

/// q/k norm, rotary embedding, bidirectional attention inside each frame.
pub(super) fn vision_attention(
    cpu: &mut Cpu,
    grid: PatchGrid,
    heads: usize,
    q_norm: &Norm<Cpu>,
    k_norm: &Norm<Cpu>,
    qkv: &CpuBuffer,
    out: &mut CpuBuffer,
) -> Result<()> {
    let dim = q_norm.weight.len();
    let patches = grid.height * grid.width;
    let (rows, hidden) = (grid.frames * patches, heads * dim);
    qkv.require("vision_attention: q, k, v", rows, 3 * hidden)?;
    out.require("vision_attention: output", rows, hidden)?;
    require_equal("vision_attention: k norm", dim, k_norm.weight.len())?;
    if !dim.is_multiple_of(4) || !grid.height.is_multiple_of(MERGE) || !grid.width.is_multiple_of(MERGE) {
        let what = "vision_attention: head width in quarters, grid in merge blocks";
        return Err(Error::Capacity { what, needed: 0, available: dim % 4 + grid.height % MERGE + grid.width % MERGE });
    }
    let rotary = Rotary::new(grid, dim)?;
    let isa = cpu.isa;
    let scale = 1.0 / (dim as f32).sqrt();
    let stride = out.width();
    let panels = Panels::new(out.as_mut_slice(), rows, stride, 0, hidden, dim);
    cpu.pool.split(panels, |head, mut panel, scratch| {
        let [keys, values, queries, p, sums] =
            scratch.floats([patches * dim, patches * dim, QUERIES * dim, QUERIES * patches, QUERIES * dim]);
        let part = |row: usize, part: usize| &qkv.row(row)[part * hidden + head * dim..][..dim];
        for frame in 0..grid.frames {
            let first = frame * patches;
            for (i, (key, value)) in keys.chunks_exact_mut(dim).zip(values.chunks_exact_mut(dim)).enumerate() {
                isa.rms_norm(part(first + i, 1), k_norm.weight.as_slice(), k_norm.eps, key);
                rotary.turn(i, key);
                value.copy_from_slice(part(first + i, 2));
            }
            for start in (0..patches).step_by(QUERIES) {
                let n = QUERIES.min(patches - start);
                for (i, query) in queries.chunks_exact_mut(dim).take(n).enumerate() {
                    isa.rms_norm(part(first + start + i, 0), q_norm.weight.as_slice(), q_norm.eps, query);
                    rotary.turn(start + i, query);
                }
                let p = &mut p[..n * patches];
                scores(isa, &queries[..n * dim], Keys::Dense(keys), patches, dim, scale, p);
                let mut total = [0.0; QUERIES];
                for (total, p) in total.iter_mut().zip(p.chunks_exact_mut(patches)) {
                    *total = exp_shifted(isa, p);
                }
                let sums = &mut sums[..n * dim];
                sums.fill(0.0);
                weighted_sum(isa, p, Keys::Dense(values), patches, dim, sums);
                for (i, sums) in sums.chunks_exact(dim).enumerate() {
                    for (out, sum) in panel.row_mut(first + start + i).iter_mut().zip(sums) {
                        *out = sum / total[i];
                    }
                }
            }
        }
    });
    Ok(())
}

/// Cosines and sines of the patches of a frame.
struct Rotary {
    /// `[patches, 2, dim / 2]`: cosines, sines.
    turns: AlignedVec,
    half: usize,
}

impl Rotary {
    fn new(grid: PatchGrid, dim: usize) -> Result<Self> {
        let (half, quarter) = (dim / 2, dim / 4);
        let mut turns = AlignedVec::zeroed("rotary angles", grid.height * grid.width * dim)?;
        for (i, turn) in turns.as_mut_slice().chunks_exact_mut(dim).enumerate() {
            let (y, x) = place(i, grid.width);
            let (cos, sin) = turn.split_at_mut(half);
            for j in 0..quarter {
                let frequency = THETA.powf(-2.0 * j as f64 / half as f64) as f32;
                for (at, coordinate) in [(j, y), (quarter + j, x)] {
                    let angle = f64::from(coordinate as f32 * frequency);
                    (cos[at], sin[at]) = (angle.cos() as f32, angle.sin() as f32);
                }
            }
        }
        Ok(Self { turns, half })
    }

    /// Turns the vector of patch `i`.
    fn turn(&self, i: usize, v: &mut [f32]) {
        let turn = &self.turns.as_slice()[i * 2 * self.half..][..2 * self.half];
        let (cos, sin) = turn.split_at(self.half);
        let (a, b) = v.split_at_mut(self.half);
        for (((a, b), c), s) in a.iter_mut().zip(b).zip(cos).zip(sin) {
            (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
        }
    }
}

/// Row and column of patch `i` of a frame.
fn place(i: usize, width: usize) -> (usize, usize) {
    let block = MERGE * MERGE;
    let (blocks, inside) = (i / block, i % block);
    let across = width / MERGE;
    (blocks / across * MERGE + inside / MERGE, blocks % across * MERGE + inside % MERGE)
}

/// Groups of consecutive rows side by side.
pub(super) fn group_rows(cpu: &mut Cpu, rows: usize, group: usize, x: &CpuBuffer, out: &mut CpuBuffer) -> Result<()> {
    let _ = cpu;
    let width = x.width();
    require("group_rows: rows", rows * group, x.rows())?;
    out.require("group_rows: output", rows, group * width)?;
    for row in 0..rows {
        let from = &x.as_slice()[row * group * width..][..group * width];
        out.row_mut(row)[..group * width].copy_from_slice(from);
    }
    Ok(())
}

/// `x = gelu(layer_norm(x))`.
pub(super) fn norm_gelu(cpu: &mut Cpu, rows: usize, norm: &Norm<Cpu>, x: &mut CpuBuffer) -> Result<()> {
    let width = norm.weight.len();
    require_equal("norm_gelu: width", width, x.width())?;
    require("norm_gelu: rows", rows, x.rows())?;
    let Some(bias) = &norm.bias else {
        return Err(Error::Weight {
            name: "norm of the merger".to_owned(),
            expected: "a LayerNorm with a bias".to_owned(),
            found: "no bias".to_owned(),
        });
    };
    let isa = cpu.isa;
    cpu.pool.split(Chunks::new(&mut x.as_mut_slice()[..rows * width], width.max(1)), |_, x, scratch| {
        let [normed] = scratch.floats([width]);
        isa.layer_norm(x, norm.weight.as_slice(), bias.as_slice(), norm.eps, normed);
        for (x, v) in x.iter_mut().zip(normed) {
            *x = gelu(*v);
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests;
