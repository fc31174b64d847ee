//! Stages of the vision tower: attention inside a frame, merging of patch groups.
//!
//! Patches stand in merge-block order: 2 x 2 blocks row by row, inside a block row by row. A patch's rotary angles come from
//! its place in the unmerged grid: `[y f_j | x f_j]` with `f_j = 10000^(-2 j / (dim / 2))`, for both halves of the head.
//! Their cosines and sines are computed on the host once for each size of a picture.

use std::f32::consts::LOG2_E;

use glimmer_tensor::{Error, Norm, PatchGrid, Result};

use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    types::{CudaBuffer, Format, require, require_equal},
};

pub(crate) static FILE: File = File { name: "vision.cu", text: include_str!("vision.cu"), constants: &["DIM"] };

/// Side of a merge block.
const MERGE: usize = 2;
/// Base of the rotary frequencies.
const THETA: f64 = 10_000.0;
/// Heads of a block that cuts queries, keys and values into planes.
const HEADS: usize = 8;
/// Keys of a tile.
const KEYS: usize = 64;

/// [`glimmer_tensor::Backend::vision_attention`].
pub(crate) fn vision_attention(
    cuda: &mut Cuda,
    grid: PatchGrid,
    heads: usize,
    q_norm: &Norm<Cuda>,
    k_norm: &Norm<Cuda>,
    qkv: &CudaBuffer,
    out: &mut CudaBuffer,
) -> Result<()> {
    let dim = q_norm.weight.len;
    let patches = grid.height * grid.width;
    let (rows, hidden) = (grid.frames * patches, heads * dim);
    qkv.require("vision_attention: q, k, v", rows, 3 * hidden)?;
    out.require("vision_attention: output", rows, hidden)?;
    require_equal("vision_attention: k norm", dim, k_norm.weight.len)?;
    if dim == 0 || !dim.is_multiple_of(32) || dim > 128 || grid.height % MERGE + grid.width % MERGE != 0 {
        let what = "vision_attention: head width in warps up to 128, grid in merge blocks";
        return Err(Error::Capacity {
            what,
            needed: 0,
            available: dim % 32 + grid.height % MERGE + grid.width % MERGE,
        });
    }
    let turns = turns(cuda, grid, dim)?;
    let q = cuda.scratch("queries of patches", 4 * rows * hidden)?;
    let k = cuda.scratch("keys of patches", 4 * rows * hidden)?;
    let v = cuda.scratch("values of patches", 4 * rows * hidden)?;
    let constants = [dim as i64];
    let arguments = Arguments::new()
        .with(qkv.at(0))
        .int(qkv.width)
        .int(heads)
        .int(patches)
        .with(q_norm.weight.address())
        .with(q_norm.eps)
        .with(k_norm.weight.address())
        .with(k_norm.eps)
        .with(turns)
        .with(q)
        .with(k)
        .with(v);
    let kernel = cuda.kernels.get(&FILE, &constants, "prepare")?;
    cuda.kernels.launch(kernel, Grid::new([rows, heads.div_ceil(HEADS), 1], 32 * HEADS), arguments)?;
    // Exponentials are powers of two.
    let scale = LOG2_E / (dim as f32).sqrt();
    let arguments =
        Arguments::new().with(q).with(k).with(v).int(patches).int(rows).with(scale).with(out.at(0)).int(out.width);
    out.format = Format::Float;
    let kernel = cuda.kernels.get(&FILE, &constants, "attend")?;
    // A warp's queries are two fragments of 16 rows where registers allow. Two tiles of keys and values, each in two planes of rows
    // with 16 bytes between them.
    let queries = if dim <= 64 { 128 } else { 64 };
    let shared = 2 * 4 * KEYS * (2 * dim + 16);
    let grid = Grid { blocks: [patches.div_ceil(queries), heads, grid.frames], threads: 128, shared };
    Ok(cuda.kernels.launch(kernel, grid, arguments)?)
}

/// Cosines and sines of the patches of a frame on the device, `[patches, 2, dim / 2]`.
fn turns(cuda: &mut Cuda, grid: PatchGrid, dim: usize) -> Result<u64> {
    let key = (grid.height, grid.width, dim);
    if let Some((last, memory)) = &cuda.turns
        && *last == key
    {
        return Ok(memory.address());
    }
    let (half, quarter) = (dim / 2, dim / 4);
    let mut turns = vec![0.0f32; grid.height * grid.width * dim];
    for (i, turn) in turns.chunks_exact_mut(dim).enumerate() {
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
    let memory = cuda.memory.upload("rotary angles", &turns)?;
    let address = memory.address();
    cuda.turns = Some((key, memory));
    Ok(address)
}

/// Row and column of patch `i` of a frame.
fn place(i: usize, width: usize) -> (usize, usize) {
    let block = MERGE * MERGE;
    let (blocks, inside) = (i / block, i % block);
    let across = width / MERGE;
    (blocks / across * MERGE + inside / MERGE, blocks % across * MERGE + inside % MERGE)
}

/// [`glimmer_tensor::Backend::group_rows`].
pub(crate) fn group_rows(rows: usize, group: usize, x: &CudaBuffer, out: &mut CudaBuffer) -> Result<()> {
    let width = group * x.width;
    require("group_rows: rows", rows * group, x.rows)?;
    out.require("group_rows: output", rows, width)?;
    out.format = Format::Float;
    if out.width == width {
        out.memory.copy_from(0, &x.memory, 0, 4 * rows * width)?;
        return Ok(());
    }
    for row in 0..rows {
        out.memory.copy_from(4 * row * out.width, &x.memory, 4 * row * width, 4 * width)?;
    }
    Ok(())
}
