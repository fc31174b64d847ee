//! Tensor-core products with BF16 and INT4 weights: projections, SwiGLU, grouped experts.
//!
//! # One order of summation
//! The kernel's variants differ in how many tokens share a weight (`NT` tiles of 8) and in how many warps share the columns
//! (`WK`). The first does not touch the order of a token's sum; the second is a function of the number of columns. So a
//! result does not depend on the other rows of the step: verification of drafts equals sequential decoding bit for bit.
//!
//! # Precision
//! Activations go in as two planes: bf16 beside BF16 weights (16 to 17 bits of an f32), IEEE halves beside INT4 (22 bits; values
//! beyond 65504 are cut, which the inputs of experts, a normed row and a clamped activation, do not reach). Products and sums
//! are f32; a group of 128 columns is summed by the tensor core, groups in f32. Weights are exact. With one plane the low
//! parts are left out.

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::{Error, Linear, Result};

use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    types::{BLOCK, CudaBuffer, CudaMatrix, Format, Kind, require},
};

pub(crate) static FILE: File = File {
    name: "gemm.cu",
    text: include_str!("gemm.cu"),
    constants: &["INT4", "SWIGLU", "GROUPED", "PLANES", "NT", "WK"],
};

const WARPS: usize = 4;
/// Outputs of a warp.
const TILE: usize = 32;

/// Arguments of the kernel, as it declares them.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Args {
    pub(crate) w0: u64,
    pub(crate) w1: u64,
    pub(crate) table: u64,
    pub(crate) items: u64,
    pub(crate) item_count: u64,
    pub(crate) list: u64,
    pub(crate) x: u64,
    pub(crate) b0: u64,
    pub(crate) b1: u64,
    pub(crate) y: u64,
    pub(crate) plane: u64,
    pub(crate) y_plane: u64,
    pub(crate) rows: i32,
    pub(crate) outputs: i32,
    pub(crate) columns: i32,
    pub(crate) pitch: i32,
    pub(crate) w_pitch: i32,
    pub(crate) y_stride: i32,
    pub(crate) divisor: i32,
    pub(crate) down: i32,
    pub(crate) limit: f32,
    pub(crate) padding: i32,
}

/// A variant of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Variant {
    pub(crate) int4: bool,
    pub(crate) swiglu: bool,
    pub(crate) grouped: bool,
    /// Tiles of 8 tokens.
    pub(crate) tiles: usize,
    /// Columns of the matrix.
    pub(crate) columns: usize,
}

/// Warps that share the columns: a function of their number alone, and one for INT4, as in [`super::experts`].
fn column_warps(int4: bool, columns: usize) -> usize {
    match columns {
        _ if int4 => 1,
        0..2048 => 1,
        2048..4096 => 2,
        _ => 4,
    }
}

/// Tiles of 8 tokens for `tokens` tokens that share a matrix.
pub(crate) fn tiles(int4: bool, tokens: usize) -> usize {
    match tokens {
        0..=8 => 1,
        9..=16 => 2,
        17..=32 => 4,
        _ if int4 => 4,
        _ => 8,
    }
}

impl Variant {
    pub(crate) fn constants(self, planes: usize) -> [i64; 6] {
        let flag = i64::from;
        [
            flag(self.int4),
            flag(self.swiglu),
            flag(self.grouped),
            planes as i64,
            self.tiles as i64,
            column_warps(self.int4, self.columns) as i64,
        ]
    }

    /// Outputs of a block.
    pub(crate) fn outputs(self) -> usize {
        let rows = WARPS / column_warps(self.int4, self.columns) * TILE;
        if self.swiglu { rows / 2 } else { rows }
    }
}

/// Rows as planes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Planes {
    pub(crate) address: u64,
    /// Elements from the high to the low plane.
    pub(crate) plane: usize,
    /// Elements a row.
    pub(crate) pitch: usize,
}

/// Which rows and columns of a buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Input<'a> {
    pub(crate) buffer: &'a CudaBuffer,
    pub(crate) start: usize,
    pub(crate) width: usize,
    /// Device list of rows, or 0 for the first ones.
    pub(crate) list: u64,
}

/// The rows as planes for matrices of a kind: a view of a buffer that holds planes already, or scratch.
pub(crate) fn planes(cuda: &mut Cuda, rows: usize, input: Input<'_>, kind: Kind) -> Result<Planes> {
    let half = kind == Kind::Int4;
    if let Format::Slots { .. } = input.buffer.format {
        return Err(Error::Weight {
            name: "matrix behind experts".to_owned(),
            expected: "an expert's, of the same routing".to_owned(),
            found: format!("{kind:?}"),
        });
    }
    let pitch = input.width.next_multiple_of(BLOCK);
    if let Format::Planes { half: held_half, rows: held, pitch: held_pitch } = input.buffer.format {
        if half != held_half {
            return Err(Error::Weight {
                name: "matrix behind a SwiGLU".to_owned(),
                expected: "the kind of the gate's".to_owned(),
                found: format!("{kind:?}"),
            });
        }
        require("planes: rows", rows, held)?;
        require("planes: columns", pitch, held_pitch)?;
        return Ok(Planes { address: input.buffer.memory.address(), plane: held * held_pitch, pitch: held_pitch });
    }
    let what = if half { "activations as planes of halves" } else { "activations as planes" };
    split(cuda, what, rows, (input.buffer.at(0), input.buffer.width), input, half)
}

/// Rows of an address, so many elements apart, as planes in scratch; `input` says which columns and rows.
pub(crate) fn split(
    cuda: &mut Cuda,
    what: &'static str,
    rows: usize,
    from: (u64, usize),
    input: Input<'_>,
    half: bool,
) -> Result<Planes> {
    let pitch = input.width.next_multiple_of(BLOCK);
    let plane = rows * pitch;
    let address = cuda.scratch(what, 4 * plane)?;
    let kernel = cuda.kernels.get(&super::dense::FILE, &[], "split")?;
    let arguments = Arguments::new()
        .with(from.0)
        .int(from.1)
        .int(input.start)
        .int(input.width)
        .int(pitch)
        .with(input.list)
        .int(usize::from(half))
        .with(address)
        .with(plane as u64);
    cuda.kernels.launch_early(kernel, Grid::new([pitch.div_ceil(4 * 128), rows, 1], 128), arguments)?;
    Ok(Planes { address, plane, pitch })
}

fn arguments(x: Planes, rows: usize, matrix: &CudaMatrix) -> Args {
    Args {
        w0: matrix.address(),
        x: x.address,
        plane: x.plane as u64,
        rows: rows as i32,
        outputs: matrix.out as i32,
        columns: matrix.columns as i32,
        pitch: x.pitch as i32,
        w_pitch: matrix.pitch as i32,
        divisor: 1,
        ..Args::zeroed()
    }
}

/// `out[row, start ..] = W x + bias`.
pub(crate) fn product(
    cuda: &mut Cuda,
    rows: usize,
    x: Planes,
    linear: &Linear<Cuda>,
    out: &CudaBuffer,
    start: usize,
) -> Result<()> {
    product_of(cuda, rows, x, &linear.weight, linear.bias.as_ref().map_or(0, |b| b.address()), out, start)
}

/// [`product`] of a matrix and the address of a bias or 0.
pub(crate) fn product_of(
    cuda: &mut Cuda,
    rows: usize,
    x: Planes,
    matrix: &CudaMatrix,
    bias: u64,
    out: &CudaBuffer,
    start: usize,
) -> Result<()> {
    let args = Args { b0: bias, y: out.at(start), y_stride: out.width as i32, ..arguments(x, rows, matrix) };
    let int4 = matrix.kind == Kind::Int4;
    let tiles = tiles(int4, rows);
    let variant = Variant { int4, swiglu: false, grouped: false, tiles, columns: matrix.columns };
    run(cuda, variant, [matrix.out.div_ceil(variant.outputs()), rows.div_ceil(8 * tiles), 1], args)
}

/// `act[row] = silu(min(gate x, limit)) * clamp(up x)`; `act` becomes planes when it can hold them.
pub(crate) fn gated(
    cuda: &mut Cuda,
    rows: usize,
    x: Planes,
    gate: &Linear<Cuda>,
    up: &Linear<Cuda>,
    limit: f32,
    down: Kind,
    act: &mut CudaBuffer,
) -> Result<()> {
    let matrix = &gate.weight;
    same_kind(matrix, &up.weight)?;
    let mut args = Args {
        w1: up.weight.address(),
        b0: gate.bias.as_ref().map_or(0, |b| b.address()),
        b1: up.bias.as_ref().map_or(0, |b| b.address()),
        limit,
        ..arguments(x, rows, matrix)
    };
    into_planes(act, rows, matrix.out, [matrix.kind, down], &mut args);
    let int4 = matrix.kind == Kind::Int4;
    let tiles = tiles(int4, rows);
    let variant = Variant { int4, swiglu: true, grouped: false, tiles, columns: matrix.columns };
    run(cuda, variant, [matrix.out.div_ceil(variant.outputs()), rows.div_ceil(8 * tiles), 1], args)
}

/// Makes `act` the output of `args`: planes when whole blocks fit and the matrices before and behind it are of one kind, f32
/// otherwise.
pub(crate) fn into_planes(act: &mut CudaBuffer, rows: usize, width: usize, kinds: [Kind; 2], args: &mut Args) {
    args.y = act.at(0);
    if width.is_multiple_of(BLOCK) && kinds[0] == kinds[1] {
        act.format = Format::Planes { half: kinds[0] == Kind::Int4, rows, pitch: width };
        (args.y_stride, args.y_plane) = (width as i32, (rows * width) as u64);
    } else {
        act.format = Format::Float;
        args.y_stride = act.width as i32;
    }
}

/// Two matrices that one launch multiplies are stored alike.
pub(crate) fn same_kind(a: &CudaMatrix, b: &CudaMatrix) -> Result<()> {
    if a.kind == b.kind && a.multiplies() && b.multiplies() {
        return Ok(());
    }
    Err(Error::Weight {
        name: "matrices of a SwiGLU".to_owned(),
        expected: "all BF16 or all INT4, at least 32 columns".to_owned(),
        found: format!("{:?} [{}, {}] and {:?} [{}, {}]", a.kind, a.out, a.columns, b.kind, b.out, b.columns),
    })
}

/// Launches a variant.
pub(crate) fn run(cuda: &Cuda, variant: Variant, blocks: [usize; 3], args: Args) -> Result<()> {
    let kernel = cuda.kernels.get(&FILE, &variant.constants(cuda.planes), "gemm")?;
    cuda.kernels.launch_early(kernel, Grid::new(blocks, 32 * WARPS), Arguments::new().with(args))?;
    Ok(())
}
