//! Products of BF16 matrices with few rows: a step's projections while it decodes; see `few.cu`.
//!
//! For devices of compute capability 9.0, up to [`MOST_ROWS`] rows and whole slices of columns; large matrices with more than eight
//! rows are [`super::several`]'s, everything else takes the products of [`super::gemm`], whose sums have another order. Several matrices of one input are one launch, and the input is taken
//! in f32, so that nothing has to be prepared.
//!
//! # One order of summation
//! How the columns are divided is a function of their number alone. So a row's bits depend neither on the rows beside it nor on
//! the matrices that share the launch, up to [`MOST_ROWS`] rows.

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::{Linear, Result};

use super::gemm::Input;
use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid, Kernel},
    types::{CudaBuffer, CudaMatrix, Format, Kind},
};

pub(crate) static FILE: File = File {
    name: "few.cu",
    text: include_str!("few.cu"),
    constants: &["NT", "PLANES", "CLUSTER", "PASSES", "SWIGLU", "STAGES"],
};

/// Most rows of a product.
pub(crate) const MOST_ROWS: usize = 24;

/// Most matrices of a launch.
const MOST_PARTS: usize = 8;

/// Columns that a block multiplies at a time.
const SLICE: usize = 512;

/// Rows of a matrix in a tile, rows of an input that share an operand, bytes of a stage.
const TILE: usize = 16;
const OPERAND: usize = 8;
const STAGE_BYTES: usize = 16 << 10;

const THREADS: usize = 256;

/// Shared memory with which two blocks fit a multiprocessor.
pub(crate) const SHARED: usize = 113 << 10;

/// One matrix of a launch, as this kernel and `several.cu` declare it.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Part {
    pub(super) w: u64,
    pub(super) up: u64,
    pub(super) bias: u64,
    pub(super) up_bias: u64,
    pub(super) y: u64,
    pub(super) last: i32,
    pub(super) outputs: i32,
}

/// Arguments of the kernel, as it declares them.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Args {
    parts: [Part; MOST_PARTS],
    x: u64,
    list: u64,
    rows: i32,
    tiles: i32,
    w_bytes: i32,
    x_stride: i32,
    y_stride: i32,
    round: i32,
    slots: i32,
    areas: i32,
    limit: f32,
    aligned: i32,
}

/// How the columns are divided: blocks of a cluster, slices of a block. Clusters cost multiprocessors, as not all of a part of the
/// device fit whole ones; slices of one block after the other cost reading the input again.
fn division(columns: usize, tiles: usize) -> Option<(usize, usize)> {
    let slices = columns / SLICE;
    let most = match slices {
        0 => return None,
        1..4 => 1,
        4 => 2,
        5..9 if tiles >= 512 => 2,
        _ => 8,
    };
    let cluster = (1..=most).rev().find(|c| slices.is_multiple_of(*c))?;
    columns.is_multiple_of(SLICE).then_some((cluster, slices / cluster))
}

/// Stages of weights on their way, by tiles of eight rows.
const STAGES: [usize; 3] = [5, 4, 3];

/// The constants of a variant, or `None` for what the kernel does not take.
pub(crate) fn constants(rows: usize, columns: usize, tiles: usize, swiglu: bool, planes: usize) -> Option<[i64; 6]> {
    let (cluster, passes) = division(columns, tiles)?;
    let operands = rows.div_ceil(OPERAND);
    let stages = *STAGES.get(operands.checked_sub(1)?)?;
    Some([operands, planes, cluster, passes, usize::from(swiglu), stages].map(|n| n as i64))
}

/// How tiles lie in a block's shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rounds {
    /// Tiles whose sums a block holds at a time.
    round: usize,
    /// Places for sums of slices.
    slots: usize,
    /// 2 when a round may begin while sums of the one before are read.
    areas: usize,
    /// Bytes in all.
    shared: usize,
}

/// Rounds of a block with `tiles` tiles at most.
fn rounds(constants: [i64; 6], tiles: usize) -> Rounds {
    let [operands, _, cluster, passes, _, stages] = constants.map(|n| n.unsigned_abs() as usize);
    let sums = 128 * operands * 4;
    // Sums of eight warps: two buffers of two tiles while they are small.
    let fixed = 128 + stages * STAGE_BYTES + if operands == 1 { 4 } else { 1 } * 8 * sums;
    let of = |count: usize| {
        let round = tiles.div_ceil(count);
        let (slots, areas) = (round.next_multiple_of(cluster), if count == 1 { 1 } else { 2 });
        let shared = fixed + if passes > 1 { round * sums } else { 0 } + areas * slots * sums;
        Rounds { round, slots, areas, shared }
    };
    (1..tiles).map(of).find(|r| r.shared <= SHARED).unwrap_or_else(|| of(tiles.max(1)))
}

/// Whether the kernel multiplies this matrix with so many rows of an input.
pub(crate) fn takes(cuda: &Cuda, rows: usize, input: Input<'_>, matrix: &CudaMatrix) -> bool {
    rows <= MOST_ROWS
        && cuda.device().properties().capability == (9, 0)
        && input.buffer.format == Format::Float
        && matrix.kind == Kind::Bf16
        && division(matrix.columns, 1).is_some()
}

/// How many of these matrices, from the first, one launch multiplies.
pub(crate) fn together(cuda: &Cuda, rows: usize, input: Input<'_>, weights: &[&Linear<Cuda>]) -> usize {
    weights.iter().take(MOST_PARTS).take_while(|w| takes(cuda, rows, input, &w.weight)).count()
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
    let mut launch = Launch::new(rows, input, out, false);
    let mut column = start;
    for linear in weights {
        launch.add(&linear.weight, None, [linear.bias.as_ref().map_or(0, |b| b.address()), 0], out.at(column));
        column += linear.weight.out;
    }
    launch.run(cuda)
}

/// [`product`] of one matrix without a bias.
pub(crate) fn product_of(
    cuda: &mut Cuda,
    rows: usize,
    input: Input<'_>,
    matrix: &CudaMatrix,
    out: &CudaBuffer,
) -> Result<()> {
    let mut launch = Launch::new(rows, input, out, false);
    launch.add(matrix, None, [0; 2], out.at(0));
    launch.run(cuda)
}

/// `act[row] = silu(min(gate x, limit)) * clamp(up x)` in f32.
pub(crate) fn gated(
    cuda: &mut Cuda,
    rows: usize,
    input: Input<'_>,
    gate: &Linear<Cuda>,
    up: &Linear<Cuda>,
    limit: f32,
    act: &mut CudaBuffer,
) -> Result<()> {
    act.format = Format::Float;
    let mut launch = Launch::new(rows, input, act, true);
    launch.args.limit = limit;
    let biases = [gate, up].map(|l| l.bias.as_ref().map_or(0, |b| b.address()));
    launch.add(&gate.weight, Some(&up.weight), biases, act.at(0));
    launch.run(cuda)
}

/// A launch that is being put together.
struct Launch {
    args: Args,
    columns: usize,
    swiglu: bool,
    parts: usize,
}

impl Launch {
    fn new(rows: usize, input: Input<'_>, out: &CudaBuffer, swiglu: bool) -> Self {
        let (x, stride) = (input.buffer.at(input.start), input.buffer.width);
        let args = Args {
            x,
            list: input.list,
            rows: rows as i32,
            x_stride: stride as i32,
            y_stride: out.width as i32,
            aligned: i32::from(x.is_multiple_of(16) && stride.is_multiple_of(4)),
            ..Args::zeroed()
        };
        Self { args, columns: input.width, swiglu, parts: 0 }
    }

    fn add(&mut self, matrix: &CudaMatrix, up: Option<&CudaMatrix>, biases: [u64; 2], y: u64) {
        let rows = if self.swiglu { TILE / 2 } else { TILE };
        self.args.tiles += matrix.out.div_ceil(rows) as i32;
        self.args.w_bytes = 2 * matrix.pitch as i32;
        self.args.parts[self.parts] = Part {
            w: matrix.address(),
            up: up.map_or(0, CudaMatrix::address),
            bias: biases[0],
            up_bias: biases[1],
            y,
            last: self.args.tiles,
            outputs: matrix.out as i32,
        };
        self.parts += 1;
    }

    fn run(mut self, cuda: &mut Cuda) -> Result<()> {
        let [rows, tiles] = [self.args.rows, self.args.tiles].map(|n| n.unsigned_abs() as usize);
        let Some(constants) = constants(rows, self.columns, tiles, self.swiglu, cuda.planes) else { return Ok(()) };
        let cluster = constants[2].unsigned_abs() as usize;
        let kernel = cuda.kernels.get(&FILE, &constants, "few")?;
        let multiprocessors = cuda.device().properties().multiprocessors;
        // With few tiles a second block a multiprocessor is worth more to the launch behind.
        let both = tiles * self.columns / SLICE >= 10 * multiprocessors;
        let groups = groups(cuda, kernel, cluster, both)?.min(tiles);
        let rounds = rounds(constants, tiles.div_ceil(groups));
        self.args.round = rounds.round as i32;
        self.args.slots = rounds.slots as i32;
        self.args.areas = rounds.areas as i32;
        let grid = Grid { blocks: [groups * cluster, 1, 1], threads: THREADS, shared: SHARED };
        Ok(cuda.kernels.launch_clusters(kernel, grid, cluster, Arguments::new().with(self.args))?)
    }
}

/// Clusters that the device holds at a time, one block or `both` a multiprocessor.
pub(crate) fn groups(cuda: &mut Cuda, kernel: Kernel, cluster: usize, both: bool) -> Result<usize> {
    if let Some(&groups) = cuda.few_groups.get(&(cluster, both)) {
        return Ok(groups);
    }
    let shared = if both { SHARED } else { 2 * SHARED - (2 << 10) };
    let grid = Grid { blocks: [cluster, 1, 1], threads: THREADS, shared };
    let groups = match cluster {
        1 => cuda.device().properties().multiprocessors * if both { 2 } else { 1 },
        _ => cuda.kernels.resident_clusters(kernel, grid, cluster)?.max(1),
    };
    cuda.few_groups.insert((cluster, both), groups);
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_divided_into_whole_slices() {
        assert_eq!(division(4096, 1556), Some((2, 4)));
        assert_eq!(division(4096, 256), Some((8, 1)));
        assert_eq!(division(1536, 512), Some((1, 3)));
        assert_eq!(division(12288, 256), Some((8, 3)));
        assert_eq!(division(6144, 256), Some((6, 2)));
        assert_eq!(division(2048, 256), Some((2, 2)));
        assert_eq!((division(128, 9), division(0, 9), division(4100, 9)), (None, None, None));
    }

    #[test]
    fn sums_fit_the_shared_memory_of_half_a_multiprocessor() {
        for rows in [1, 9, 24] {
            for columns in [512, 1536, 4096, 8192, 12288, 16384] {
                for tiles in [1, 2, 5, 8, 17, 98, 700] {
                    let constants = constants(rows, columns, tiles, false, 2).unwrap();
                    let r = rounds(constants, tiles);
                    assert!(r.shared <= SHARED && r.round <= tiles && r.slots >= r.round, "{rows} {columns} {r:?}");
                    assert!(r.areas == 2 || r.round == tiles, "{r:?}");
                }
            }
        }
        assert_eq!(constants(25, 4096, 9, false, 2), None);
    }
}
