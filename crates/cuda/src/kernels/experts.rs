//! Grouped products of INT4 experts, streamed by every warp for itself; see `experts.cu`.
//!
//! For devices with bulk copies (compute capability 9 and newer). Others, and work lists too long for a block's share (steps
//! of more than about fourteen thousand rows), take the products of [`super::gemm`], whose sums have another order.
//!
//! Tried on the way on one NVIDIA H200, gate and up of 24 rows at width 1024, share of the read rate: a warp a tile with
//! registers ahead 57 %; bulk copies, a job a warp 61 %; codes as halves, fewer operations a weight 69 %; half as many stages,
//! which leaves the first-level cache to the activations, and two sums under way at once, one plane 77 %. Jobs split among
//! warps against an uneven last round gained nothing by themselves.

use glimmer_tensor::Result;

use super::gemm::Args;
use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    types::{GROUP, INT4_BLOCK_BYTES},
};

pub(crate) static FILE: File = File {
    name: "experts.cu",
    text: include_str!("experts.cu"),
    constants: &["SWIGLU", "PLANES", "NT", "GROUPS", "WARPS", "DEPTH", "UNROLL", "SEGMENTS"],
};

/// Work items from which sixteen warps a block beat twelve: with fewer, room for activations in the first-level cache is worth
/// more. The sizes do not touch the order of a sum.
const MANY: usize = 256;

/// Work items of a block at most.
const MAX_ITEMS: usize = 32;

/// Bytes of the sums of 32 rows by 8 tokens.
const PIECE_BYTES: usize = 4 * 32 * 8;

/// Sizes of a variant: groups of 128 columns a stage, warps, stages of a warp, groups unrolled.
pub(crate) type Sizes = [i64; 4];

/// Segments of the columns whose sums are taken apart: a function of the columns alone, as the order of a sum.
fn segments(groups: usize) -> usize {
    match groups {
        16.. if groups.is_multiple_of(4) => 4,
        4.. if groups.is_multiple_of(2) => 2,
        _ => 1,
    }
}

/// The sizes for `planes` planes of activations, items of `tiles` tiles of 8 tokens and `groups` groups of columns.
pub(crate) fn sizes(planes: usize, tiles: usize, groups: usize, many: bool) -> Sizes {
    let sizes = match (tiles, planes) {
        (1, 1) if many => [2, 16, 2, 1],
        (1, _) => [2, 12, 2, 1],
        (2, 1) => [4, 12, 2, 1],
        (2, _) => [4, 8, 3, 1],
        _ => [4, 8, 2, 1],
    };
    divided(sizes, groups)
}

/// Fewer groups a stage where a segment does not fall into whole stages; more stages instead.
fn divided([mut stage, warps, mut depth, unroll]: Sizes, groups: usize) -> Sizes {
    let segment = groups / segments(groups);
    while !segment.is_multiple_of(stage.unsigned_abs() as usize) {
        (stage, depth) = (stage / 2, depth * 2);
    }
    [stage, warps, depth, unroll.min(stage)]
}

/// The constants of a variant.
pub(crate) fn constants(
    swiglu: bool,
    planes: usize,
    tiles: usize,
    groups: usize,
    [stage, warps, depth, unroll]: Sizes,
) -> [i64; 8] {
    let segments = segments(groups) as i64;
    [i64::from(swiglu), planes as i64, tiles as i64, stage, warps, depth, unroll, segments]
}

/// Launches the products of a work list of up to `most` items. `false` when this kernel does not take them.
pub(crate) fn run(cuda: &Cuda, swiglu: bool, tiles: usize, most: usize, args: Args) -> Result<bool> {
    let properties = cuda.device().properties();
    let blocks = properties.multiprocessors;
    if properties.capability.0 < 9 || most / blocks + 2 > MAX_ITEMS {
        return Ok(false);
    }
    let groups = args.columns as usize / GROUP;
    let sizes = match cuda.tuning {
        Some(sizes) => divided(sizes, groups),
        None => sizes(cuda.planes, tiles, groups, most >= MANY),
    };
    let [stage, warps, depth, _] = sizes.map(|n| n.unsigned_abs() as usize);
    // Pieces of shared jobs for few tokens, running sums for many.
    let pieces = match tiles {
        1 => warps * segments(groups) * PIECE_BYTES,
        2 => 0,
        _ => warps * tiles * PIECE_BYTES,
    };
    let shared = warps * depth * 4 * stage * INT4_BLOCK_BYTES + pieces;
    let kernel = cuda.kernels.get(&FILE, &constants(swiglu, cuda.planes, tiles, groups, sizes), "experts")?;
    let grid = Grid { blocks: [blocks, 1, 1], threads: 32 * warps, shared };
    cuda.kernels.launch(kernel, grid, Arguments::new().with(args))?;
    Ok(true)
}
