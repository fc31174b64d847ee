//! Products of matrices with few columns, each with columns of its own: the low-rank gates of delta attention; see `narrow.cu`.
//!
//! Up to [`MOST_ROWS`] rows; beyond, arithmetic without tensor cores is what takes the time. Where the library is not there all rows go
//! this way, however many: a row's bits do not depend on the other rows, which is promised for the own products.

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::{Columns, Linear, Result};

use super::dense;
use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    types::{CudaBuffer, Format, Kind},
};

pub(crate) static FILE: File = File { name: "narrow.cu", text: include_str!("narrow.cu"), constants: &[] };

/// Most rows where the library has the others.
const MOST_ROWS: usize = 64;

/// Most matrices, and most columns of one, as the kernel has them.
const MOST_PARTS: usize = 4;
const MOST_COLUMNS: usize = 128;

/// Outputs of a warp, and warps of a block.
const TILE: usize = 16;
const WARPS: usize = 4;

/// One matrix, as the kernel declares it.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct Part {
    w: u64,
    x: u64,
    bias: u64,
    y: u64,
    last: i32,
    outputs: i32,
    columns: i32,
    pitch: i32,
}

/// Arguments of the kernel, as it declares them.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Args {
    parts: [Part; MOST_PARTS],
    rows: i32,
    x_stride: i32,
    y_stride: i32,
    tile: i32,
}

/// Whether the kernel multiplies these matrices with so many rows.
pub(crate) fn takes(cuda: &Cuda, rows: usize, parts: &[(Columns<'_, Cuda>, &Linear<Cuda>, usize)]) -> bool {
    let Some((first, _, _)) = parts.first() else { return false };
    let (one, stride) = (first.buffer.at(0), first.buffer.width);
    (rows <= MOST_ROWS || !cuda.has_library())
        && parts.len() <= MOST_PARTS
        && stride.is_multiple_of(4)
        && parts.iter().all(|(x, linear, _)| {
            x.buffer.at(0) == one
                && x.buffer.format == Format::Float
                && x.start.is_multiple_of(4)
                && x.width <= MOST_COLUMNS
                && x.width.is_multiple_of(8)
                && linear.weight.kind == Kind::Bf16
                && linear.weight.pitch.is_multiple_of(8)
        })
}

/// `out[row, start ..] = W x + bias` for each `(x, W, start)`.
pub(crate) fn products(
    cuda: &Cuda,
    rows: usize,
    parts: &[(Columns<'_, Cuda>, &Linear<Cuda>, usize)],
    out: &mut CudaBuffer,
) -> Result<()> {
    // Rows that a block goes through, two at a time: all of few, half of some, so that all blocks run at once.
    let through = match rows {
        0..=8 => rows.max(1).next_multiple_of(2),
        9..=24 => rows.div_ceil(2).next_multiple_of(2),
        _ => 24,
    };
    let mut args = Args { rows: rows as i32, y_stride: out.width as i32, tile: through as i32, ..Args::zeroed() };
    let mut tiles = 0;
    for (part, (x, linear, start)) in args.parts.iter_mut().zip(parts) {
        x.buffer.require("linear_each: the input", rows, x.start + x.width)?;
        dense::check("linear_each: columns of the input", linear, x.width)?;
        out.require("linear_each: the output", rows, start + linear.weight.out)?;
        args.x_stride = x.buffer.width as i32;
        tiles += linear.weight.out.div_ceil(TILE);
        *part = Part {
            w: linear.weight.address(),
            x: x.buffer.at(x.start),
            bias: linear.bias.as_ref().map_or(0, |b| b.address()),
            y: out.at(*start),
            last: tiles as i32,
            outputs: linear.weight.out as i32,
            columns: x.width as i32,
            pitch: linear.weight.pitch as i32,
        };
    }
    out.format = Format::Float;
    let kernel = cuda.kernels.get(&FILE, &[], "narrow")?;
    let grid = Grid::new([tiles.div_ceil(WARPS), rows.div_ceil(through), 1], 32 * WARPS);
    Ok(cuda.kernels.launch_early(kernel, grid, Arguments::new().with(args))?)
}
