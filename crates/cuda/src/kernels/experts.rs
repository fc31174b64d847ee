//! Grouped products of INT4 experts, streamed by every warp for itself; see `experts.cu`.
//!
//! For devices with bulk copies (compute capability 9 and newer). Others, and work lists too long for a block's share, take
//! the products of [`super::gemm`], which give the same bits.

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
    constants: &["SWIGLU", "PLANES", "NT", "GROUPS", "WARPS", "DEPTH", "UNROLL"],
};

/// Work items of a block at most.
const MAX_ITEMS: usize = 32;

/// Sizes of a variant: groups of 128 columns a stage, warps, stages of a warp, groups unrolled.
pub(crate) type Sizes = [i64; 4];

/// The sizes for items of `tiles` tiles of 8 tokens and `groups` groups of columns.
pub(crate) fn sizes(tiles: usize, groups: usize) -> Sizes {
    let [stage, warps, depth, unroll] = match tiles {
        1 => [2, 16, 3, 1],
        2 => [4, 12, 2, 1],
        _ => [4, 8, 3, 1],
    };
    divided([stage, warps, depth, unroll], groups)
}

/// Fewer groups a stage where the columns do not fall into whole stages; more stages instead.
pub(crate) fn divided([mut stage, warps, mut depth, unroll]: Sizes, groups: usize) -> Sizes {
    while !groups.is_multiple_of(stage.unsigned_abs() as usize) {
        (stage, depth) = (stage / 2, depth * 2);
    }
    [stage, warps, depth, unroll.min(stage)]
}

/// The constants of a variant.
pub(crate) fn constants(swiglu: bool, planes: usize, tiles: usize, [stage, warps, depth, unroll]: Sizes) -> [i64; 7] {
    [i64::from(swiglu), planes as i64, tiles as i64, stage, warps, depth, unroll]
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
        None => sizes(tiles, groups),
    };
    let [stage, warps, depth, _] = sizes.map(|n| n.unsigned_abs() as usize);
    let kernel = cuda.kernels.get(&FILE, &constants(swiglu, cuda.planes, tiles, sizes), "experts")?;
    let shared = warps * depth * 4 * stage * INT4_BLOCK_BYTES;
    let grid = Grid { blocks: [blocks, 1, 1], threads: 32 * warps, shared };
    cuda.kernels.launch(kernel, grid, Arguments::new().with(args))?;
    Ok(true)
}
