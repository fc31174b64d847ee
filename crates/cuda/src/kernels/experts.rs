//! Grouped products of INT4 experts on warpgroup instructions; see `experts.cu`.
//!
//! For devices of compute capability 9.0 alone. Others take the products of [`super::gemm`], whose sums have another order.
//!
//! # Form of the activations
//! One IEEE half: 11 bits, three more than bf16 has. Two halves carried 22 bits at 1.15 times the time of a decode step's
//! experts; what the shorter form costs in the result is measured by `parity`. Outputs of experts are halves as well, before
//! their weighted sum in f32. Values beyond 65504 are cut: a normed row, a clamped activation do not come near.
//!
//! # Shapes of one kernel
//! Up to [`FEW_ROWS`] rows a step: items of up to 8 or 16 tokens, four warpgroups of 64 rows, shares of segments, a sum's order
//! a function of the columns alone, so that a row's bits do not depend on the rows beside it. Beyond: items of up to 64 or 128
//! tokens, whole tiles; a row's bits may differ from those of a smaller step in the rounding of the sum.

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::{Error, Result};

use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    types::{GROUP, INT4_ROWS},
};

pub(crate) static FILE: File = File {
    name: "experts.cu",
    text: include_str!("experts.cu"),
    constants: &["SWIGLU", "NMAX", "CW", "MT", "STAGES", "SEGMENTS"],
};

/// Rows of a step from which on a tile's sum is taken in one piece.
pub(crate) const FEW_ROWS: usize = 320;

/// Rows of a tile.
const TILE: usize = 256;

/// Sizes of a shape: tokens of an item, warpgroups, 64-row tiles of a warpgroup, stages.
pub(crate) type Sizes = [i64; 4];

/// Shapes by the rows of a step that they go up to. A wider product takes longer although its columns are empty.
const SHAPES: [(usize, Sizes); 3] = [(128, [8, 4, 1, 11]), (FEW_ROWS, [16, 4, 1, 10]), (2560, [64, 4, 1, 6])];
const MANY: Sizes = [128, 4, 1, 4];

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
    pub(crate) pieces: u64,
    pub(crate) flags: u64,
    pub(crate) slots: i32,
    pub(crate) outputs: i32,
    pub(crate) groups: i32,
    pub(crate) strips: i32,
    pub(crate) y_stride: i32,
    pub(crate) limit: f32,
}

/// The sizes for a step.
pub(crate) fn sizes(cuda: &Cuda, rows: usize) -> Sizes {
    let shape = || SHAPES.iter().find(|(most, _)| rows <= *most).map_or(MANY, |&(_, sizes)| sizes);
    cuda.tuning.unwrap_or_else(shape)
}

/// Tokens of an item.
pub(crate) fn tokens(sizes: Sizes) -> usize {
    sizes[0].unsigned_abs() as usize
}

/// Whether the kernel runs on the device.
pub(crate) fn available(cuda: &Cuda) -> bool {
    cuda.device().properties().capability == (9, 0)
}

/// Parts of the columns whose sums are taken apart.
fn segments(sizes: Sizes, groups: usize) -> i64 {
    match groups {
        // Beyond `FEW_ROWS`: the end of every segment empties the pipeline, which costs a fifth of the time at 768 rows.
        _ if sizes[0] > 16 => 1,
        8.. if groups.is_multiple_of(4) => 4,
        2.. if groups.is_multiple_of(2) => 2,
        _ => 1,
    }
}

/// The constants of a variant.
fn constants(swiglu: bool, groups: usize, sizes: Sizes) -> [i64; 6] {
    let [tokens, warpgroups, tiles, stages] = sizes;
    [i64::from(swiglu), tokens, warpgroups, tiles, stages, segments(sizes, groups)]
}

/// The constants of all variants for matrices of `groups` groups of columns.
pub(crate) fn variants(swiglu: bool, groups: usize) -> [[i64; 6]; 4] {
    let [a, b, c] = SHAPES.map(|(_, sizes)| sizes);
    [a, b, c, MANY].map(|sizes| constants(swiglu, groups, sizes))
}

/// Launches the products of a work list: gate and up with the activation, or down.
pub(crate) fn run(cuda: &mut Cuda, swiglu: bool, sizes: Sizes, mut args: Args) -> Result<()> {
    let blocks = cuda.device().properties().multiprocessors;
    let [tokens, warpgroups, _, stages] = sizes.map(|n| n.unsigned_abs() as usize);
    let constants = constants(swiglu, args.groups.unsigned_abs() as usize, sizes);
    let segments = constants[5].unsigned_abs() as usize;
    if segments > 1 {
        args.pieces =
            cuda.scratch("parts of the experts' sums", blocks * segments * tokens / 2 * 128 * warpgroups * 4)?;
        if cuda.flags.is_none() {
            cuda.flags = Some(cuda.memory.zeroed("counters of the experts' kernel", 4 * blocks)?);
        }
        args.flags = cuda.flags.as_ref().map_or(0, |f| f.address());
    }
    args.strips = (args.outputs.unsigned_abs() as usize).div_ceil(if swiglu { TILE / 2 } else { TILE }) as i32;
    let stage = 2 * tokens * GROUP + 17 * 1024;
    // Room to begin at a multiple of 1024; two barriers a stage.
    let shared = stages * stage + 1024 + 16 * stages;
    let kernel = cuda.kernels.get(&FILE, &constants, "experts")?;
    let grid = Grid { blocks: [blocks, 1, 1], threads: 128 * (warpgroups + 1), shared };
    Ok(cuda.kernels.launch_early(kernel, grid, Arguments::new().with(args))?)
}

/// Slots of a work list: every expert's begin at an eighth one.
pub(crate) fn slots(choices: usize, experts: usize) -> usize {
    (choices + 7 * experts.min(choices)).next_multiple_of(8)
}

/// Bytes of rows in slots.
pub(crate) fn slot_bytes(slots: usize, columns: usize) -> usize {
    slots * columns.next_multiple_of(INT4_ROWS) * 2
}

/// The kernel holds `scale (code - 8) / 64` as a half: a scale of 1 or more, or one that is no number, is given back.
pub(crate) fn check_scales(raw: &[u8]) -> std::result::Result<(), f32> {
    const ONE: u16 = 0x3f80;
    let scales = || raw.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b));
    // A maximum is many times faster than a search, and nearly always enough.
    if scales().fold(0, |most, s| most.max(s & 0x7fff)) < ONE {
        return Ok(());
    }
    let found = scales().find(|s| s & 0x7fff >= ONE).unwrap_or(ONE);
    Err(f32::from_bits(u32::from(found) << 16))
}

/// Columns in whole groups.
pub(crate) fn check_columns(what: &'static str, buffer: usize) -> Result<()> {
    if buffer.is_multiple_of(4) { Ok(()) } else { Err(Error::Capacity { what, needed: 4, available: buffer % 4 }) }
}
