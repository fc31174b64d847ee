//! Grouped products of BF16 experts, as the draft layer has them; see `experts_bf16.cu` and `experts_bf16_many.cu`.
//!
//! For devices of compute capability 9.0 and matrices of one, two, four or eight slices of columns; everything else takes the
//! products of [`super::gemm`], whose sums have another order.
//!
//! | rows of a step | products | activations |
//! |---|---|---|
//! | up to [`FEW_ROWS`] | of warps, items of [`FEW_TOKENS`] tokens, clusters share the columns | f32, split in the kernel |
//! | more | of warpgroups, items of 16 to 128 tokens | planes of bf16 in slots |
//!
//! Both take an f32 activation as two planes of bf16 (16 to 17 bits). One plane would halve the products, which is time at 8192
//! rows alone: up to 2048 rows it is the weights that take long. It would have 8 bits, which for the other products were not
//! enough (see [`super::wide`]), and experts as they are stored are not the draft layer's only: a model that is not quantized has
//! no others. A row's bits do not depend on the rows beside it as long as the line of the table is the same.
//!
//! Chain of 288 experts, 8 a row, 4096 wide, slices of 1024 features, in per cent of the read rate at 1, 3, 8 and 24 rows: the
//! products of [`super::gemm`] 38, 52, 55, 56; these, set up early, 68, 86, 84, 70; set up when the launch in front has ended, 90 at 8
//! and 94 at 24. Rows at a time and us of the chain with the combination: 256, 768, 2048 and 8192 rows took 2684, 3263, 5454 and
//! 18651 by the products of [`super::gemm`], and take 1721, 1854, 2246 and 6170 by those of warpgroups. See
//! `benches/records/h200-experts.md`.

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::Result;

use super::few;
use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    types::{CudaBuffer, CudaMatrix, Format},
};

/// Few tokens an expert.
pub(crate) static FEW: File = File {
    name: "experts_bf16.cu",
    text: include_str!("experts_bf16.cu"),
    constants: &["PLANES", "CLUSTER", "SWIGLU", "STAGES"],
};

/// Many tokens an expert.
pub(crate) static MANY: File = File {
    name: "experts_bf16_many.cu",
    text: include_str!("experts_bf16_many.cu"),
    constants: &["SWIGLU", "PLANES", "NMAX", "STAGES"],
};

/// Rows of a step up to which its tokens are few.
pub(crate) const FEW_ROWS: usize = 128;

/// Choices of a work item of few rows.
pub(crate) const FEW_TOKENS: usize = 8;

/// Choices of the items of many rows by the rows that they go up to, and of all others. A wider product takes longer although its
/// columns are empty.
const TOKENS: [(usize, usize); 3] = [(320, 16), (1024, 32), (2560, 80)];
const MOST_TOKENS: usize = 128;

/// Columns of a block.
const SLICE: usize = 512;

/// Stages of weights on their way, of [`STAGE_BYTES`].
const STAGES: usize = 4;
const STAGE_BYTES: usize = 16 << 10;

/// Sums of a tile, and what a block needs beside stages and the sums of a round.
const TILE_BYTES: usize = 512;
const FIXED_BYTES: usize = 128 + 2 * 2 * 8 * TILE_BYTES;

const THREADS: usize = 256;

/// Arguments of the kernel for few rows, as it declares them.
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

/// Whether the kernel for few rows multiplies experts of these columns with so many rows of a step, held in `x`.
pub(crate) fn takes_few(cuda: &Cuda, rows: usize, columns: usize, x: &CudaBuffer) -> bool {
    rows <= FEW_ROWS
        && cuda.device().properties().capability == (9, 0)
        && x.format == Format::Float
        && x.width.is_multiple_of(4)
        && cluster(columns).is_some()
}

/// Launches the products of a work list with items of up to [`FEW_TOKENS`] choices: gate and up with the activation, or down.
pub(crate) fn run_few(cuda: &mut Cuda, swiglu: bool, columns: usize, mut args: Args) -> Result<()> {
    let Some((constants, cluster)) = constants(swiglu, columns, cuda.planes).zip(cluster(columns)) else {
        return Ok(());
    };
    let kernel = cuda.kernels.get(&FEW, &constants, "few_experts")?;
    args.tiles = args.outputs.unsigned_abs().div_ceil(if swiglu { 8 } else { 16 }) as i32;
    // Sums of two rounds, of each tile from every block of the cluster.
    let round = (few::SHARED - FIXED_BYTES - STAGES * STAGE_BYTES) / (2 * TILE_BYTES) / cluster * cluster;
    (args.round, args.slots) = (round as i32, round as i32);
    let blocks = few::groups(cuda, kernel, cluster, true)? * cluster;
    let grid = Grid { blocks: [blocks, 1, 1], threads: THREADS, shared: few::SHARED };
    Ok(cuda.kernels.launch_whole(kernel, grid, cluster, Arguments::new().with(args))?)
}

/// Arguments of the kernel for many rows, as it declares them.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct ManyArgs {
    pub(crate) maps: u64,
    pub(crate) items: u64,
    pub(crate) item_count: u64,
    pub(crate) list: u64,
    pub(crate) x: u64,
    pub(crate) y: u64,
    pub(crate) slots: i32,
    pub(crate) outputs: i32,
    pub(crate) pieces: i32,
    pub(crate) strips: i32,
    pub(crate) y_stride: i32,
    pub(crate) limit: f32,
}

/// Columns of a stage of many rows, and the features that lie together in slots.
const PIECE: usize = 64;

/// Rows of a box of weights.
const BOX_ROWS: u32 = 128;

/// Threads of a block of many rows: two warpgroups that multiply and a warp that copies.
const MANY_THREADS: usize = 2 * 128 + 32;

/// Bytes of shared memory of a block at most.
const SHARED: usize = 227 << 10;

/// Whether the kernel for many rows multiplies experts of `hidden` by `width` with so many rows of a step.
pub(crate) fn takes_many(cuda: &Cuda, rows: usize, hidden: usize, width: usize) -> bool {
    rows > FEW_ROWS
        && cuda.device().properties().capability == (9, 0)
        && cluster(hidden).is_some()
        && width.is_multiple_of(PIECE)
}

/// Choices of the items of a step of many rows.
pub(crate) fn many_tokens(rows: usize) -> usize {
    TOKENS.iter().find(|(most, _)| rows <= *most).map_or(MOST_TOKENS, |&(_, tokens)| tokens)
}

/// The constants of the kernel for many rows with items of up to `tokens` choices, and its bytes of shared memory.
fn many(swiglu: bool, tokens: usize, planes: usize) -> ([i64; 4], usize) {
    let stage = 2 * BOX_ROWS as usize * PIECE * 2 + planes * tokens * PIECE * 2;
    // Activations on their way out; room to begin at a multiple of 1024; two barriers and a note a stage.
    let room = if swiglu { 2 * planes * 32 * PIECE * 2 } else { 0 };
    let fixed = 1024 + 16 + room;
    let stages = ((SHARED - fixed) / (stage + 32)).min(8);
    ([usize::from(swiglu), planes, tokens, stages].map(|c| c as i64), stages * (stage + 32) + fixed)
}

/// The constants of all variants for many rows.
pub(crate) fn many_constants(swiglu: bool, planes: usize) -> impl Iterator<Item = [i64; 4]> {
    TOKENS.map(|(_, tokens)| tokens).into_iter().chain([MOST_TOKENS]).map(move |tokens| many(swiglu, tokens, planes).0)
}

/// What the copy engine must know of a matrix.
pub(crate) fn map(matrix: &CudaMatrix) -> Result<[u64; 16]> {
    Ok(matrix.data.boxes(matrix.out, matrix.columns, matrix.pitch, BOX_ROWS)?)
}

/// Launches the products of a work list with items of up to `tokens` choices: gate and up with the activation, or down.
pub(crate) fn run_many(cuda: &Cuda, swiglu: bool, tokens: usize, columns: usize, mut args: ManyArgs) -> Result<()> {
    let (constants, shared) = many(swiglu, tokens, cuda.planes);
    args.pieces = columns.div_ceil(PIECE) as i32;
    let boxes = args.outputs.unsigned_abs().div_ceil(BOX_ROWS);
    args.strips = if swiglu { boxes } else { boxes.div_ceil(2) } as i32;
    let kernel = cuda.kernels.get(&MANY, &constants, "many_experts")?;
    let blocks = [cuda.device().properties().multiprocessors, 1, 1];
    let grid = Grid { blocks, threads: MANY_THREADS, shared };
    Ok(cuda.kernels.launch_early(kernel, grid, Arguments::new().with(args))?)
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

    #[test]
    fn rings_of_many_rows_fit_into_shared_memory_with_stages_to_spare() {
        for (swiglu, planes) in [(true, 1), (true, 2), (false, 1), (false, 2)] {
            for tokens in [1, 320, 321, 1024, 2560, 2561, 8192].map(many_tokens) {
                let (constants, shared) = many(swiglu, tokens, planes);
                assert!(shared <= SHARED && constants[3] >= 3, "{constants:?} takes {shared} bytes");
            }
        }
    }
}
