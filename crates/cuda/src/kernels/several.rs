//! Products of BF16 matrices with several rows: a step's projections while it decodes many sequences; see `several.cu`.
//!
//! For devices of compute capability 9.0, from [`LEAST_ROWS`] to [`MOST_ROWS`] rows, where the library is there for more: fewer are
//! [`super::few`]'s, and where the library is not, a row's bits are promised not to depend on how many rows there are. Several
//! matrices of one input are one launch, behind one that turns more than [`FEW_ROWS`] rows into planes.
//!
//! # One order of summation
//! How the columns are divided is a function of the matrices of the launch and of the device. So a row's bits do not depend on the
//! rows beside it up to [`FEW_ROWS`] and from there to [`MOST_ROWS`].

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::{Linear, Result};

use super::{few::Part, gemm::Input};
use crate::{
    backend::Cuda,
    compile::Unit,
    launch::{Arguments, File, Grid},
    types::{CudaBuffer, CudaMatrix, Format, Kind},
};

pub(crate) static FILE: File =
    File { name: "several.cu", text: include_str!("several.cu"), constants: &["NT", "WARPGROUPS", "STAGES", "SWIGLU"] };

/// Fewest and most rows of a product, and most that need no launch of their own to become planes.
pub(crate) const LEAST_ROWS: usize = 9;
pub(crate) const FEW_ROWS: usize = 24;
pub(crate) const MOST_ROWS: usize = 96;

/// Most matrices of a launch.
const MOST_PARTS: usize = 8;

/// Columns of a chunk, rows of an operand, outputs and threads of a warpgroup.
const CHUNK: usize = 64;
const OPERAND: usize = 8;
const GROUP: usize = 64;
const GROUP_THREADS: usize = 128;

/// Arguments of the kernel, as it declares them.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Args {
    parts: [Part; MOST_PARTS],
    x: u64,
    list: u64,
    sums: u64,
    counts: u64,
    rows: i32,
    tiles: i32,
    chunks: i32,
    splits: i32,
    w_bytes: i32,
    x_stride: i32,
    y_stride: i32,
    outputs: i32,
    limit: f32,
    padding: i32,
}

/// A variant of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Variant {
    /// Tiles of eight rows.
    operands: usize,
    /// Warpgroups of a block, 64 rows of weights each.
    warpgroups: usize,
    swiglu: bool,
}

/// Tiles of eight rows that there are variants for.
const OPERANDS: [usize; 6] = [2, 3, 4, 6, 8, 12];

impl Variant {
    /// Whether the rows come as planes that another launch has made.
    fn planes(self) -> bool {
        8 * self.operands > FEW_ROWS
    }

    /// Bytes of a stage: a chunk of the weights and of both planes.
    fn stage_bytes(self) -> usize {
        2 * CHUNK * (GROUP * self.warpgroups + 2 * OPERAND * self.operands)
    }

    /// Blocks of a multiprocessor.
    fn resident(self) -> usize {
        if self.planes() || self.warpgroups > 2 { 1 } else { 2 }
    }

    /// Stages of the ring.
    fn stages(self) -> usize {
        let room = if self.resident() == 2 { 112 << 10 } else { 220 << 10 };
        (room / self.stage_bytes()).min(6)
    }

    fn constants(self) -> [i64; 4] {
        [self.operands, self.warpgroups, self.stages(), usize::from(self.swiglu)].map(|n| n as i64)
    }

    /// Threads: those that multiply, that copy weights and, without planes, that make them.
    fn threads(self) -> usize {
        GROUP_THREADS * (self.warpgroups + if self.planes() { 1 } else { 2 })
    }

    /// Rows of weights of a tile.
    fn tile(self) -> usize {
        GROUP * self.warpgroups
    }

    /// Bytes of a block's sums of one tile.
    fn sum_bytes(self) -> usize {
        4 * self.tile() * OPERAND * self.operands
    }
}

/// How a launch is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Division {
    variant: Variant,
    /// Tiles of weights.
    tiles: usize,
    /// Parts of a tile's columns, a block each; 0 where blocks share all chunks evenly.
    splits: usize,
    blocks: usize,
}

/// Most parts of a tile's columns.
const MOST_SPLITS: usize = 12;

/// The division for so many rows of weights in all: parts of a tile for as many blocks as there are multiprocessors at most, or even
/// runs where there are more tiles. `None` beyond [`MOST_ROWS`].
fn division(rows: usize, outputs: usize, columns: usize, swiglu: bool, multiprocessors: usize) -> Option<Division> {
    let operands = *OPERANDS.iter().find(|&&n| OPERAND * n >= rows)?;
    let of = |warpgroups| Variant { operands, warpgroups, swiglu };
    let planes = of(2).planes();
    let chunks = columns / CHUNK;
    let parts = [2, 3].into_iter().flat_map(|warpgroups| (1..=MOST_SPLITS.min(chunks)).map(move |s| (warpgroups, s)));
    let divided = parts
        .map(|(warpgroups, splits)| {
            let tiles = outputs.div_ceil(GROUP * warpgroups);
            // What a block copies, weights and rows, and what it costs to add up.
            let cost = chunks.div_ceil(splits) * (4 * warpgroups + if planes { 6 } else { 1 }) + 4 * splits;
            (cost, Division { variant: of(warpgroups), tiles, splits, blocks: tiles * splits })
        })
        .filter(|(_, division)| division.blocks <= multiprocessors)
        .min_by_key(|&(cost, _)| cost);
    Some(divided.map(|(_, division)| division).unwrap_or_else(|| {
        let variant = of(if planes { 3 } else { 2 });
        let tiles = outputs.div_ceil(variant.tile());
        Division { variant, tiles, splits: 0, blocks: variant.resident() * multiprocessors }
    }))
}

/// Fewest weights of a launch for which this kernel is faster than the others: beside [`super::few`], beside the library, and beside
/// the library with gate and up.
const LEAST_WEIGHTS: [usize; 3] = [6 << 20, 12 << 20, 4 << 20];

/// Fewer columns are worth it beside the library for twice as many weights only.
const LONG: usize = 2048;

/// Whether the kernel multiplies the BF16 matrices among these with so many rows of an input.
pub(crate) fn takes(cuda: &Cuda, rows: usize, input: Input<'_>, weights: &[&Linear<Cuda>]) -> bool {
    let multiprocessors = cuda.device().properties().multiprocessors;
    let outputs = weights.iter().filter(|l| l.weight.kind == Kind::Bf16).map(|l| l.weight.out).sum();
    // Rows of weights that leave many multiprocessors without a block are the others'.
    division(rows, outputs, input.width, false, multiprocessors).is_some_and(|d| 20 * d.blocks >= 17 * multiprocessors)
        && takes_of(cuda, rows, input, weights, least_weights(rows, input.width))
}

/// Fewest weights of a launch without an activation.
fn least_weights(rows: usize, columns: usize) -> usize {
    match (rows <= FEW_ROWS, columns < LONG) {
        (true, _) => LEAST_WEIGHTS[0],
        (false, short) => LEAST_WEIGHTS[1] * if short { 2 } else { 1 },
    }
}

fn takes_of(cuda: &Cuda, rows: usize, input: Input<'_>, weights: &[&Linear<Cuda>], least: usize) -> bool {
    let mut stored = weights.iter().map(|l| &l.weight).filter(|m| m.kind == Kind::Bf16);
    let size = stored.clone().map(|m| m.out * m.columns).sum::<usize>();
    (LEAST_ROWS..=MOST_ROWS).contains(&rows)
        && size >= least
        && cuda.has_library()
        && cuda.planes == 2
        && cuda.device().properties().capability == (9, 0)
        && input.buffer.format == Format::Float
        && input.buffer.at(input.start).is_multiple_of(16)
        && input.buffer.width.is_multiple_of(4)
        && stored.all(|m| m.columns.is_multiple_of(CHUNK) && m.pitch == m.columns)
}

/// How many of these matrices, from the first, one launch multiplies where [`takes`] takes them all.
pub(crate) fn together(weights: &[&Linear<Cuda>]) -> usize {
    weights.iter().take(MOST_PARTS).take_while(|l| l.weight.kind == Kind::Bf16).count()
}

/// Whether the kernel multiplies gate and up.
pub(crate) fn takes_gate(cuda: &Cuda, rows: usize, input: Input<'_>, pair: [&Linear<Cuda>; 2]) -> bool {
    let least = LEAST_WEIGHTS[if rows > FEW_ROWS { 2 } else { 0 }];
    pair.iter().all(|l| l.weight.kind == Kind::Bf16) && takes_of(cuda, rows, input, &pair, least)
}

/// The variants of the kernel; `reduced`, the largest of each kind.
pub(crate) fn units(reduced: bool) -> impl Iterator<Item = Unit> {
    let all = OPERANDS
        .into_iter()
        .filter(move |n| !reduced || [3, 12].contains(n))
        .flat_map(|operands| [2, 3].map(|warpgroups| (operands, warpgroups)));
    all.flat_map(|(operands, warpgroups)| {
        [false, true].map(|swiglu| FILE.unit(&Variant { operands, warpgroups, swiglu }.constants()))
    })
}

/// `out[row, start ..] = [W0 x + bias0 | W1 x + bias1 | ...]`.
pub(crate) fn product(
    cuda: &mut Cuda,
    rows: usize,
    input: Input<'_>,
    weights: &[&Linear<Cuda>],
    out: &CudaBuffer,
    start: usize,
) -> Result<()> {
    let mut launch = Launch::new(rows, input, out);
    let mut column = start;
    for linear in weights {
        launch.add(&linear.weight, 0, [linear.bias.as_ref().map_or(0, |b| b.address()), 0], out.at(column));
        column += linear.weight.out;
    }
    launch.run(cuda, false)
}

/// The logits of listed rows: whether the kernel took the product.
pub(crate) fn head(
    cuda: &mut Cuda,
    rows: usize,
    input: Input<'_>,
    matrix: &CudaMatrix,
    logits: &CudaBuffer,
) -> Result<bool> {
    let linear = Linear { weight: matrix.view(), bias: None };
    if matrix.kind != Kind::Bf16 || !takes(cuda, rows, input, &[&linear]) {
        return Ok(false);
    }
    product(cuda, rows, input, &[&linear], logits, 0)?;
    Ok(true)
}

/// `act[row] = silu(min(gate x, limit)) * clamp(up x)` in f32.
pub(crate) fn gated(
    cuda: &mut Cuda,
    rows: usize,
    input: Input<'_>,
    [gate, up]: [&Linear<Cuda>; 2],
    limit: f32,
    act: &mut CudaBuffer,
) -> Result<()> {
    act.format = Format::Float;
    let mut launch = Launch::new(rows, input, act);
    launch.args.limit = limit;
    let biases = [gate, up].map(|l| l.bias.as_ref().map_or(0, |b| b.address()));
    launch.add(&gate.weight, up.weight.address(), biases, act.at(0));
    launch.run(cuda, true)
}

/// A launch that is being put together.
struct Launch {
    args: Args,
    columns: usize,
    parts: usize,
}

impl Launch {
    fn new(rows: usize, input: Input<'_>, out: &CudaBuffer) -> Self {
        let args = Args {
            x: input.buffer.at(input.start),
            list: input.list,
            rows: rows as i32,
            chunks: (input.width / CHUNK) as i32,
            x_stride: input.buffer.width as i32,
            y_stride: out.width as i32,
            ..Args::zeroed()
        };
        Self { args, columns: input.width, parts: 0 }
    }

    fn add(&mut self, matrix: &CudaMatrix, up: u64, biases: [u64; 2], y: u64) {
        self.args.outputs += matrix.out as i32;
        self.args.w_bytes = 2 * matrix.pitch as i32;
        self.args.parts[self.parts] = Part {
            w: matrix.address(),
            up,
            bias: biases[0],
            up_bias: biases[1],
            y,
            last: self.args.outputs,
            outputs: matrix.out as i32,
        };
        self.parts += 1;
    }

    fn run(mut self, cuda: &mut Cuda, swiglu: bool) -> Result<()> {
        let [rows, outputs] = [self.args.rows, self.args.outputs].map(|n| n.unsigned_abs() as usize);
        let multiprocessors = cuda.device().properties().multiprocessors;
        let weights = if swiglu { 2 * outputs } else { outputs };
        let Some(division) = division(rows, weights, self.columns, swiglu, multiprocessors) else { return Ok(()) };
        let Division { variant, tiles, splits, blocks } = division;
        (self.args.tiles, self.args.splits) = (tiles as i32, splits as i32);
        self.args.sums = cuda.scratch("sums of runs", 2 * blocks * variant.sum_bytes())?;
        self.args.counts = cuda.zeroed_scratch("counts of tiles", 4 * tiles)?;
        if variant.planes() {
            self.turn(cuda, variant)?;
        }
        let kernel = cuda.kernels.get(&FILE, &variant.constants(), "several")?;
        // The ring begins at a multiple of a kilobyte.
        let shared = variant.stages() * variant.stage_bytes() + 1024;
        let grid = Grid { blocks: [blocks, 1, 1], threads: variant.threads(), shared };
        Ok(cuda.kernels.launch_early(kernel, grid, Arguments::new().with(self.args))?)
    }

    /// Has the rows turned into planes as the kernel copies them.
    fn turn(&mut self, cuda: &mut Cuda, variant: Variant) -> Result<()> {
        const THREADS: usize = 256;
        let pieces = self.columns / CHUNK * OPERAND * variant.operands * CHUNK / 8;
        let planes = cuda.scratch("activations in chunks", 32 * pieces)?;
        let arguments = Arguments::new()
            .with(self.args.x)
            .with(self.args.list)
            .with(self.args.rows)
            .with(self.args.x_stride)
            .with(self.args.chunks)
            .with(planes);
        let kernel = cuda.kernels.get(&FILE, &variant.constants(), "turn")?;
        cuda.kernels.launch_early(kernel, Grid::new([pieces.div_ceil(THREADS), 1, 1], THREADS), arguments)?;
        self.args.x = planes;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Warpgroups, parts of a tile and blocks of a product of the released model on 132 multiprocessors.
    fn shape(rows: usize, outputs: usize, columns: usize) -> [usize; 3] {
        let d = division(rows, outputs, columns, false, 132).unwrap();
        [d.variant.warpgroups, d.splits, d.blocks]
    }

    #[test]
    fn blocks_are_nearly_as_many_as_multiprocessors() {
        assert_eq!(shape(24, 24_896, 4096), [3, 1, 130]);
        assert_eq!(shape(96, 24_896, 4096), [3, 1, 130]);
        assert_eq!(shape(24, 12_576, 4096), [3, 2, 132]);
        assert_eq!(shape(24, 4096, 8192), [2, 4, 128]);
        assert_eq!(shape(96, 4096, 8192), [3, 6, 132]);
        assert_eq!(shape(96, 16_384, 1536), [2, 1, 128]);
        assert_eq!((shape(24, 154_880, 4096), shape(96, 154_880, 4096)), ([2, 0, 264], [3, 0, 132]));
        // Not taken.
        assert_eq!(shape(24, 6416, 4096), [2, 2, 102]);
        assert_eq!(division(97, 4096, 4096, false, 132), None);
    }

    #[test]
    fn the_division_does_not_depend_on_the_rows_of_a_kind() {
        for (outputs, columns) in [(24_896, 4096), (4096, 16_384), (2336, 4096), (100, 64), (200_000, 128)] {
            assert_eq!(shape(9, outputs, columns), shape(FEW_ROWS, outputs, columns));
            assert_eq!(shape(FEW_ROWS + 1, outputs, columns), shape(MOST_ROWS, outputs, columns));
        }
    }

    #[test]
    fn stages_fit_the_shared_memory() {
        for operands in OPERANDS {
            for warpgroups in [2, 3] {
                let v = Variant { operands, warpgroups, swiglu: false };
                // Addresses of rows, barriers, what the driver keeps of a block.
                let block = v.stages() * v.stage_bytes() + 1024 + 8 * v.tile() + 16 * v.stages() + 1024;
                assert!(v.stages() >= 3 && v.resident() * block <= 228 << 10, "{v:?}");
                // Registers: accumulators of both planes in a multiplier's.
                assert!(v.threads() * v.resident() <= if v.planes() { 512 } else { 1024 });
            }
        }
    }
}
