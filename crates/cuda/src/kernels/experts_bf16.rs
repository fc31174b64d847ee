//! Grouped products of BF16 experts with few tokens an expert, as the draft layer has them; see `experts_bf16.cu`.
//!
//! For devices of compute capability 9.0, up to [`MOST_ROWS`] rows a step and matrices of one, two, four or eight slices of
//! columns; everything else takes the products of [`super::gemm`], whose sums have another order. Activations go in and come out
//! in f32.
//!
//! Chain of 288 experts, 8 a row, 4096 wide, slices of 1024 features, in per cent of the read rate at 1, 3, 8 and 24 rows: the
//! products of [`super::gemm`] 38, 52, 55, 56; these, set up early, 68, 86, 84, 70; set up when the launch in front has ended, 90 at 8
//! and 94 at 24. See `benches/records/h200-experts.md`.

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::Result;

use super::few;
use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    types::{CudaBuffer, Format},
};

pub(crate) static FILE: File = File {
    name: "experts_bf16.cu",
    text: include_str!("experts_bf16.cu"),
    constants: &["PLANES", "CLUSTER", "SWIGLU", "STAGES"],
};

/// Most rows of a step.
pub(crate) const MOST_ROWS: usize = 128;

/// Choices of a work item.
pub(crate) const TOKENS: usize = 8;

/// Columns of a block.
const SLICE: usize = 512;

/// Stages of weights on their way, of [`STAGE_BYTES`].
const STAGES: usize = 4;
const STAGE_BYTES: usize = 16 << 10;

/// Sums of a tile, and what a block needs beside stages and the sums of a round.
const TILE_BYTES: usize = 512;
const FIXED_BYTES: usize = 128 + 2 * 2 * 8 * TILE_BYTES;

const THREADS: usize = 256;

/// Arguments of the kernel, as it declares them.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Args {
    pub(crate) table: u64,
    pub(crate) items: u64,
    pub(crate) item_count: u64,
    pub(crate) list: u64,
    pub(crate) x: u64,
    pub(crate) y: u64,
    pub(crate) outputs: i32,
    pub(crate) tiles: i32,
    pub(crate) w_bytes: i32,
    pub(crate) x_stride: i32,
    pub(crate) y_stride: i32,
    pub(crate) divisor: i32,
    pub(crate) round: i32,
    pub(crate) slots: i32,
    pub(crate) limit: f32,
    pub(crate) padding: i32,
}

/// Blocks of a cluster for matrices of so many columns, or `None` for what the kernel does not take.
fn cluster(columns: usize) -> Option<usize> {
    let slices = columns / SLICE;
    (columns.is_multiple_of(SLICE) && matches!(slices, 1 | 2 | 4 | 8)).then_some(slices)
}

/// The constants for matrices of so many columns, if the kernel takes them.
pub(crate) fn constants(swiglu: bool, columns: usize, planes: usize) -> Option<[i64; 4]> {
    Some([planes, cluster(columns)?, usize::from(swiglu), STAGES].map(|c| c as i64))
}

/// Whether the kernel multiplies experts of these columns with so many rows of a step, held in `x`.
pub(crate) fn takes(cuda: &Cuda, rows: usize, columns: usize, x: &CudaBuffer) -> bool {
    rows <= MOST_ROWS
        && cuda.device().properties().capability == (9, 0)
        && x.format == Format::Float
        && x.width.is_multiple_of(4)
        && cluster(columns).is_some()
}

/// Launches the products of a work list with items of up to [`TOKENS`] choices: gate and up with the activation, or down.
pub(crate) fn run(cuda: &mut Cuda, swiglu: bool, columns: usize, mut args: Args) -> Result<()> {
    let Some((constants, cluster)) = constants(swiglu, columns, cuda.planes).zip(cluster(columns)) else {
        return Ok(());
    };
    let kernel = cuda.kernels.get(&FILE, &constants, "few_experts")?;
    args.tiles = args.outputs.unsigned_abs().div_ceil(if swiglu { 8 } else { 16 }) as i32;
    // Sums of two rounds, of each tile from every block of the cluster.
    let round = (few::SHARED - FIXED_BYTES - STAGES * STAGE_BYTES) / (2 * TILE_BYTES) / cluster * cluster;
    (args.round, args.slots) = (round as i32, round as i32);
    let blocks = few::groups(cuda, kernel, cluster, true)? * cluster;
    let grid = Grid { blocks: [blocks, 1, 1], threads: THREADS, shared: few::SHARED };
    Ok(cuda.kernels.launch_whole(kernel, grid, cluster, Arguments::new().with(args))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_whole_slices_of_a_cluster() {
        let clusters = [512, 1024, 2048, 4096].map(cluster);
        assert_eq!(clusters, [1, 2, 4, 8].map(Some));
        assert_eq!([0, 128, 1536, 4100, 8192].map(cluster), [None; 5]);
    }
}
