//! Grouped products of INT4 experts; see `experts_few.cu` and `experts.cu`.
//!
//! For devices of compute capability 9.0 alone. Others take the products of [`super::gemm`], whose sums have another order.
//!
//! # Form of the activations
//! One IEEE half: 11 bits, three more than bf16 has. Two halves carried 22 bits at 1.15 times the time of a decode step's
//! experts; what the shorter form costs in the result is measured by `parity`. Outputs of experts are halves as well, before
//! their weighted sum in f32. Values beyond 16376 are cut: a normed row, a clamped activation do not come near.
//!
//! # Which kernel
//! Up to [`FEW_ROWS`] rows a step: items of up to 8 or 16 tokens, products of warps, a sum's order a function of the columns
//! alone, so that a row's bits do not depend on the rows beside it. Beyond: items of up to 32, 80 or 128 tokens, products of
//! warpgroups; a row's bits may differ from those of a smaller step in the rounding of the sum.
//!
//! # Versions
//! Times of the chain (288 experts, 8 a row, 4096 wide, slices of 1024 features) on one H200; see `benches/records/h200-experts.md`.
//! Few rows, at 24 and 96: a stream a warp through registers 256 and 511 us; products of warpgroups with shares of segments 268
//! and 539; this one 232 and 427. Copying alone, in any pattern, reads at 99 to 100 % of the read rate, so what cost time was
//! what came behind it: a warpgroup's steps of unpack, issue and wait take 200 instructions for 128 columns of 16 rows a warp, of
//! which half are not the unpacking. Many rows, at 8192: 3650 us; list read ahead and the fast activation 3570; products of the
//! item's size by eighths 3410; results through shared memory and the copy engine 3210; the list in three launches 3080 to 3160.
//! The width of a tile's products decided once instead of before each batch, and batches of 64 columns, one under way: 740 to 767
//! us became 694 to 729 at 768 rows; that and items of up to 80 instead of 64 tokens, which most experts of 2048 rows are: 1160 became
//! 1060. A tile that ends behind a group of the next one: 577 to 589 became 559 to 569 at 256 rows.
//! Without gain: tokens multicast to two blocks of a cluster (3530), two warpgroups of 128 rows (3200 to 3310), three batches
//! under way for items of 64 (1130 against 1130 us at 2048 rows), products of warps for items of 32 (750 to 870 against 655 to
//! 720 us at 768 rows), rows taken by their numbers, 16 bytes a thread, instead of from slots (gate and up of 8192 rows 2150 to 2270
//! against 1900 us, which is more than the slots cost), code - 8 by an addition instead of a product with constants (600 against
//! 555 us at 256 rows).

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::{Error, Result};

use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid, Kernel},
    types::{GROUP, INT4_BLOCK_BYTES},
};

/// Few tokens an expert.
pub(crate) static FEW: File = File {
    name: "experts_few.cu",
    text: include_str!("experts_few.cu"),
    constants: &["SWIGLU", "TILES", "ROWS", "PARTS", "TOGETHER", "STAGES"],
};

/// Many tokens an expert.
pub(crate) static MANY: File =
    File { name: "experts.cu", text: include_str!("experts.cu"), constants: &["SWIGLU", "NMAX", "STAGES", "UNROLL"] };

/// Rows of a step up to which a row's bits do not depend on the others.
pub(crate) const FEW_ROWS: usize = 320;

/// Tokens of an item by the rows of a step that they go up to. A wider product takes longer although its columns are empty.
const TOKENS: [(usize, usize); 4] = [(128, 8), (FEW_ROWS, 16), (1024, 32), (2560, 80)];
const MOST_TOKENS: usize = 128;

/// Bytes of shared memory of a block at most.
const SHARED: usize = 227 << 10;

/// Bytes of 64 rows by a group of columns.
const STRIP_GROUP_BYTES: usize = 8 * INT4_BLOCK_BYTES;

/// Arguments of the kernels, as they declare them.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Args {
    pub(crate) table: u64,
    pub(crate) items: u64,
    pub(crate) item_count: u64,
    pub(crate) x: u64,
    pub(crate) y: u64,
    pub(crate) slots: i32,
    pub(crate) outputs: i32,
    pub(crate) groups: i32,
    pub(crate) strips: i32,
    pub(crate) limit: f32,
    /// Whether the work list was there before the launch in front of this one began.
    pub(crate) early: i32,
}

/// Tokens of the items of a step.
pub(crate) fn tokens(cuda: &Cuda, rows: usize) -> usize {
    let own = || TOKENS.iter().find(|(most, _)| rows <= *most).map_or(MOST_TOKENS, |&(_, tokens)| tokens);
    cuda.tuning.unwrap_or_else(own)
}

/// Whether the kernels run on the device.
pub(crate) fn available(cuda: &Cuda) -> bool {
    cuda.device().properties().capability == (9, 0)
}

/// A variant of one of the kernels.
#[derive(Debug, Clone)]
pub(crate) struct Variant {
    pub(crate) file: &'static File,
    pub(crate) constants: Vec<i64>,
    /// Rows of the matrix that a tile gives (features, with the activation).
    outputs: usize,
    threads: usize,
    shared: usize,
}

impl Variant {
    /// For matrices of `groups` groups of columns and items of up to `tokens` tokens.
    fn new(swiglu: bool, tokens: usize, groups: usize) -> Self {
        if tokens <= 16 { Self::few(swiglu, tokens.div_ceil(8), groups) } else { Self::many(swiglu, tokens, groups) }
    }

    fn few(swiglu: bool, tiles: usize, groups: usize) -> Self {
        // Gate and up have many columns and few rows; four times four warps for a long sum's parts would need smaller tiles.
        let widest = if swiglu { 8 } else { 4 };
        let parts = (0..).map(|i| widest >> i).find(|&parts| groups.is_multiple_of(parts)).unwrap_or(1);
        let rows = match parts {
            8 => 2,
            4 => 4,
            2 => 2,
            _ => 4,
        };
        let together = parts.min(if tiles == 1 || swiglu { 2 } else { 1 });
        let stage = together * (rows * STRIP_GROUP_BYTES + tiles * 8 * GROUP * 2);
        let sums = parts * rows * 64 * tiles * 8 * 4;
        // Room to begin at a multiple of 128; two barriers and a note a stage, two barriers of tiles.
        let fixed = 128 + sums + 16;
        let stages = ((SHARED - fixed) / (stage + 32)).min(12);
        let warps = rows * parts;
        Self {
            file: &FEW,
            constants: [usize::from(swiglu), tiles, rows, parts, together, stages].map(|c| c as i64).to_vec(),
            outputs: if swiglu { 32 } else { 64 } * rows,
            threads: 32 * warps + 128,
            shared: stages * (stage + 32) + fixed,
        }
    }

    fn many(swiglu: bool, tokens: usize, groups: usize) -> Self {
        let stage = 2 * tokens * GROUP + 17 * 1024;
        let room = tokens.next_multiple_of(32) * if swiglu { 256 } else { 512 };
        // Room to begin at a multiple of 1024.
        let stages = ((SHARED - 1024 - room) / (stage + 32)).min(8);
        // Stages whose places are constants; with fewer than four in the ring that is not worth a stage.
        let unroll =
            if stages < 4 { 1 } else { [4, 2, 1].into_iter().find(|u| groups.is_multiple_of(*u)).unwrap_or(1) };
        let stages = stages / unroll * unroll;
        Self {
            file: &MANY,
            constants: [usize::from(swiglu), tokens, stages, unroll].map(|c| c as i64).to_vec(),
            outputs: if swiglu { 128 } else { 256 },
            threads: 640,
            shared: stages * (stage + 32) + room + 1024,
        }
    }
}

/// All variants for matrices of `groups` groups of columns.
pub(crate) fn variants(swiglu: bool, groups: usize) -> Vec<Variant> {
    let tokens = TOKENS.map(|(_, tokens)| tokens).into_iter().chain([MOST_TOKENS]);
    tokens.map(|tokens| Variant::new(swiglu, tokens, groups)).collect()
}

/// Launches the products of a work list with items of up to `tokens` tokens: gate and up with the activation, or down.
pub(crate) fn run(cuda: &Cuda, swiglu: bool, tokens: usize, mut args: Args) -> Result<()> {
    let variant = Variant::new(swiglu, tokens, args.groups.unsigned_abs() as usize);
    args.strips = (args.outputs.unsigned_abs() as usize).div_ceil(variant.outputs) as i32;
    let kernel: Kernel = cuda.kernels.get(variant.file, &variant.constants, "experts")?;
    let blocks = [cuda.device().properties().multiprocessors, 1, 1];
    let grid = Grid { blocks, threads: variant.threads, shared: variant.shared };
    Ok(cuda.kernels.launch_early(kernel, grid, Arguments::new().with(args))?)
}

/// The kernels hold `scale (code - 8) / 64` as a half: a scale of 1 or more, or one that is no number, is given back.
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

/// Columns in fours.
pub(crate) fn check_columns(what: &'static str, buffer: usize) -> Result<()> {
    if buffer.is_multiple_of(4) { Ok(()) } else { Err(Error::Capacity { what, needed: 4, available: buffer % 4 }) }
}
