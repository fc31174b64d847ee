//! Products of each head's own matrix around latent attention over caches of halves; see `heads.cu`.
//!
//! For devices of compute capability 9.0, latents of 512 and BF16 weights, up to [`MOST_ROWS`] rows where the library has the others, and
//! all rows where it is not there.
//!
//! # One order of summation
//! It depends on the widths of a head alone, so a row's bits depend on nothing beside it.

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::{Columns, DsaWeights, Result};

use super::sparse::LATENT;
use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    types::{CudaBuffer, Format, Kind},
};

pub(crate) static FILE: File = File { name: "heads.cu", text: include_str!("heads.cu"), constants: &["QK", "NT"] };

/// Most rows where the library has the others.
pub(crate) const MOST_ROWS: usize = 511;

/// Rows of an operand, and most operands that a block takes at a time.
const OPERAND: usize = 8;
const MOST_OPERANDS: usize = 3;
/// Most times that a block takes more rows.
const MOST_TURNS: usize = 4;

/// Width of a warp's part of a matrix, warps of a block, bytes of its part.
const SQUARE: usize = 64;
const WARPS: usize = 8;
const PART_BYTES: usize = 2 * WARPS * SQUARE * SQUARE;

/// Arguments of the kernels, as they declare them.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Args {
    x: u64,
    w: u64,
    y: u64,
    x_stride: u64,
    y_stride: u64,
    w_head: u64,
    w_bytes: u64,
    x_head: i32,
    y_head: i32,
    parts: i32,
    rows: i32,
    through: i32,
    unused: i32,
}

/// Constants for so many rows of queries.
pub(crate) fn constants(qk: usize, rows: usize) -> [i64; 2] {
    [qk as i64, rows.div_ceil(OPERAND).clamp(1, MOST_OPERANDS) as i64]
}

/// Whether heads of these widths are taken.
pub(crate) fn fits(qk: usize, v: usize) -> bool {
    [1, 2, 4, 8].map(|n| n * SQUARE).contains(&qk) && v.is_multiple_of(SQUARE)
}

/// Whether the kernels have absorption and values of so many rows.
pub(crate) fn takes(cuda: &Cuda, rows: usize, weights: &DsaWeights<Cuda>, query: Columns<'_, Cuda>) -> bool {
    (rows <= MOST_ROWS || !cuda.has_library())
        && cuda.device().properties().capability == (9, 0)
        && fits(weights.qk_dim, weights.v_dim)
        && weights.kv_b.columns == LATENT
        && weights.kv_b.kind == Kind::Bf16
        && query.buffer.format == Format::Float
        && query.start.is_multiple_of(2)
        && query.buffer.width.is_multiple_of(2)
}

/// `absorbed[row, head] = K^T q` in halves, `[rows, heads, LATENT]`.
pub(crate) fn absorb(
    cuda: &Cuda,
    rows: usize,
    weights: &DsaWeights<Cuda>,
    query: Columns<'_, Cuda>,
    absorbed: u64,
) -> Result<()> {
    let (heads, qk) = (weights.heads, weights.qk_dim);
    let args = Args {
        x: query.buffer.at(query.start),
        y: absorbed,
        x_stride: query.buffer.width as u64,
        y_stride: (heads * LATENT) as u64,
        x_head: qk as i32,
        y_head: LATENT as i32,
        parts: (LATENT * qk / (WARPS * SQUARE * SQUARE)) as i32,
        ..of(weights, 0)
    };
    launch(cuda, "absorb_few", rows, weights, args)
}

/// `out[row, head] = V latent` of attended latents in f32, `[rows, heads, LATENT]`.
pub(crate) fn values(
    cuda: &Cuda,
    rows: usize,
    weights: &DsaWeights<Cuda>,
    attended: u64,
    out: &mut CudaBuffer,
) -> Result<()> {
    let (heads, v) = (weights.heads, weights.v_dim);
    let args = Args {
        x: attended,
        y: out.at(0),
        x_stride: (heads * LATENT) as u64,
        y_stride: out.width as u64,
        x_head: LATENT as i32,
        y_head: v as i32,
        parts: (v / SQUARE) as i32,
        ..of(weights, weights.qk_dim)
    };
    out.format = Format::Float;
    launch(cuda, "values_few", rows, weights, args)
}

/// A layer's matrices from a row of each head's on.
fn of(weights: &DsaWeights<Cuda>, row: usize) -> Args {
    let bytes = 2 * weights.kv_b.pitch as u64;
    Args {
        w: weights.kv_b.address() + row as u64 * bytes,
        w_head: (weights.qk_dim + weights.v_dim) as u64 * bytes,
        w_bytes: bytes,
        ..Args::zeroed()
    }
}

/// Rows that a block goes through, `most` at a time, where there is room for so many blocks a part of the matrices.
fn through(rows: usize, most: usize, blocks: usize) -> usize {
    rows.div_ceil(blocks.max(1)).next_multiple_of(most).min(MOST_TURNS * most)
}

fn launch(cuda: &Cuda, entry: &'static str, rows: usize, weights: &DsaWeights<Cuda>, args: Args) -> Result<()> {
    let constants = constants(weights.qk_dim, rows);
    let operands = constants[1].unsigned_abs() as usize;
    // As many blocks as are resident at a time, two a multiprocessor; each goes through some of the rows.
    let most = OPERAND * operands;
    let places = 2 * cuda.device().properties().multiprocessors;
    let across = weights.heads * args.parts.unsigned_abs() as usize;
    let through = through(rows, most, places / across);
    let args = Args { rows: rows as i32, through: through as i32, ..args };
    let blocks = [across, rows.div_ceil(through), 1];
    let grid = Grid { blocks, threads: 32 * WARPS, shared: PART_BYTES + 4 * WARPS * SQUARE * most };
    let kernel = cuda.kernels.get(&FILE, &constants, entry)?;
    Ok(cuda.kernels.launch_early(kernel, grid, Arguments::new().with(args))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_taken_in_squares() {
        assert!(fits(256, 256) && fits(64, 192) && fits(512, 64));
        assert!(!fits(32, 64) && !fits(192, 64) && !fits(256, 40) && !fits(1024, 64));
        assert_eq!([1, 8, 9, 24, 25, 511].map(|rows| constants(256, rows)[1]), [1, 1, 2, 3, 3, 3]);
    }

    #[test]
    fn blocks_share_rows_until_the_device_is_full() {
        assert_eq!(
            [(3, 8, 2), (24, 24, 2), (96, 24, 2), (96, 24, 1), (96, 24, 4)].map(|(r, m, b)| through(r, m, b)),
            [8, 24, 48, 96, 24]
        );
        // More rows take several waves, and matrices that fill the device by themselves none.
        assert_eq!([through(511, 24, 2), through(511, 24, 0), through(25, 24, 8)], [96, 96, 24]);
    }
}
