//! Products of many rows with BF16 weights, by the library.
//!
//! | rows | activations | weights |
//! |---|---|---|
//! | up to 24 | f32 split in the kernel, `few.rs` | as stored |
//! | 9 to 24, large matrices | f32 split in the kernel, `several.rs` | as stored |
//! | 25 to 96, large matrices | two planes of bf16 that both meet the weights at once, `several.rs` | as stored |
//! | 25 to 511 | two planes of bf16, the low one below the high one as rows of one product | as stored |
//! | 512 and more | one plane of halves | halves, made for each product in scratch |
//!
//! One plane of bf16 (8 bits, an error of a product of 1.7e-3) is as fast as one of halves and was not enough: of 200 answers of
//! the micro model three differed from the CPU's, one of them by more than a near tie. Halves have 11 bits (2e-4). A BF16
//! weight times 64 is a half to within 2^-31, so weights lose nothing that counts; turning them costs a read and a write of
//! the matrix, which many rows pay for and few do not. Two planes keep 16 bits and double the sums, which is little where
//! reading weights is what takes the time.
//!
//! The library sums the columns of an output in one order whatever its plan, so the bits of a row depend on which line of
//! the table its step is in, not on the other rows.

use std::hash::{DefaultHasher, Hash, Hasher};

use glimmer_tensor::{Linear, Result};

use super::{
    dense,
    gemm::{self, Input, Planes},
};
use crate::{
    backend::Cuda,
    launch::{Arguments, Grid},
    library::{self, OWN_ROWS, Operand, Product},
    types::{BLOCK, CudaBuffer, CudaMatrix, Format, Kind, unique},
};

/// Fewest rows whose products take halves.
const HALF_ROWS: usize = 512;

/// What weights are multiplied by as halves, so that small ones keep their bits; those of 1024 and more do not fit.
const SCALE: f32 = 64.0;

/// Bytes of scratch for sums of both planes; larger sums are taken in two products.
const SUMS: usize = 256 << 20;

/// Bytes of a matrix that is turned to halves.
const HALVES: usize = 256 << 20;

/// Rows of a matrix that is too small for a product of its own where others stand beside it.
const SMALL: usize = 512;

/// Rows of gate and up that are held at a time.
const TURN: usize = 2048;

/// Rows as operand of the library.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    planes: Planes,
    half: bool,
}

impl Rows {
    /// Elements a row.
    pub(crate) fn pitch(self) -> usize {
        self.planes.pitch
    }

    /// Whether the low plane of so many rows lies right behind the high one.
    fn is_pair(self, rows: usize) -> bool {
        !self.half && self.planes.plane == rows * self.planes.pitch
    }

    /// Rows that are halves already.
    pub(crate) fn of_halves(address: u64, pitch: usize) -> Self {
        Self { planes: Planes { address, plane: 0, pitch }, half: true }
    }

    /// From a row on.
    pub(crate) fn from(self, row: usize) -> Self {
        let address = self.planes.address + (2 * row * self.planes.pitch) as u64;
        Self { planes: Planes { address, ..self.planes }, ..self }
    }
}

/// Whether products of so many rows are the library's.
pub(crate) fn wide(cuda: &Cuda, rows: usize) -> bool {
    rows > OWN_ROWS && cuda.library.is_some()
}

/// Whether so many rows take a matrix as halves.
pub(crate) fn halved(rows: usize, matrix: &CudaMatrix) -> bool {
    rows >= HALF_ROWS && 2 * matrix.out * matrix.pitch <= HALVES
}

/// The rows of a buffer, which may be planes already, for products with some matrices.
fn rows_of(cuda: &mut Cuda, rows: usize, input: Input<'_>, half: bool) -> Result<Rows> {
    if let Format::Planes { half, rows: held, pitch } = input.buffer.format {
        let planes = Planes { address: input.buffer.memory.address(), plane: held * pitch, pitch };
        return Ok(Rows { planes, half });
    }
    let from = (input.buffer.at(0), input.buffer.width);
    Ok(Rows { planes: gemm::split(cuda, "activations as planes", rows, from, input, half)?, half })
}

/// f32 rows of an address as operand of products with a matrix, in scratch.
pub(crate) fn split(
    cuda: &mut Cuda,
    what: &'static str,
    rows: usize,
    from: (u64, usize),
    input: Input<'_>,
    matrix: &CudaMatrix,
) -> Result<Rows> {
    let half = halved(rows, matrix);
    Ok(Rows { planes: gemm::split(cuda, what, rows, from, input, half)?, half })
}

/// Products of the same rows, side by side in `out` from column `start` on: whether the library took them.
pub(crate) fn linear(
    cuda: &mut Cuda,
    rows: usize,
    input: Input<'_>,
    weights: &[&Linear<Cuda>],
    out: &mut CudaBuffer,
    start: usize,
) -> Result<bool> {
    let taken = |linear: &&Linear<Cuda>| match linear.weight.kind {
        Kind::Bf16 => linear.weight.multiplies() && linear.weight.out.is_multiple_of(4),
        Kind::F32 => input.buffer.format == Format::Float,
        Kind::Int4 => false,
    };
    let aligned = start.is_multiple_of(4) && out.width.is_multiple_of(4);
    if !wide(cuda, rows) || !aligned || !weights.iter().all(taken) {
        return Ok(false);
    }
    if weights.iter().any(|linear| linear.weight.kind == Kind::Bf16) {
        let half = weights.iter().all(|linear| halved(rows, &linear.weight));
        let x = rows_of(cuda, rows, input, half)?;
        let groups = groups(cuda, weights)?;
        let width = groups.iter().map(|group| group.out).sum::<usize>();
        let plain_parts = weights.iter().all(|l| l.weight.kind == Kind::Bf16 && l.bias.is_none());
        if plain_parts && groups.len() > 1 && x.is_pair(rows) && 8 * rows * width <= SUMS {
            if !together(cuda, rows, x, &groups, width, (out.at(start), out.width))? {
                return Ok(false);
            }
        } else {
            for group in groups {
                let y = (out.at(start + group.column), out.width);
                if !plain(cuda, rows, x, &group.matrix, group.bias, y)? {
                    return Ok(false);
                }
            }
        }
    }
    let mut column = start;
    for linear in weights {
        let bias = linear.bias.as_ref().map_or(0, |b| b.address());
        if linear.weight.kind == Kind::F32 {
            dense::dot(cuda, rows, input, &linear.weight, bias, (out.at(column), out.width))?;
        }
        column += linear.weight.out;
    }
    out.format = Format::Float;
    Ok(true)
}

/// A matrix of a product with what is its own.
#[derive(Debug)]
struct Group {
    matrix: CudaMatrix,
    out: usize,
    /// First column of the output, from that of the first matrix.
    column: usize,
    bias: u64,
}

/// BF16 matrices of a product, small ones behind each other as one.
fn groups(cuda: &mut Cuda, weights: &[&Linear<Cuda>]) -> Result<Vec<Group>> {
    let small = |l: &Linear<Cuda>| l.weight.kind == Kind::Bf16 && l.bias.is_none() && l.weight.out <= SMALL;
    let (mut groups, mut column, mut left) = (Vec::new(), 0, weights);
    while let Some(first) = left.first() {
        let run = left.iter().take_while(|l| small(l) && l.weight.pitch == first.weight.pitch).count().max(1);
        let out = left[..run].iter().map(|l| l.weight.out).sum();
        if first.weight.kind == Kind::Bf16 {
            let matrix = if run > 1 { stacked(cuda, &left[..run])? } else { first.weight.view() };
            groups.push(Group { matrix, out, column, bias: first.bias.as_ref().map_or(0, |b| b.address()) });
        }
        column += out;
        left = &left[run..];
    }
    Ok(groups)
}

/// Matrices one below the other, copied when they are first used so.
fn stacked(cuda: &mut Cuda, weights: &[&Linear<Cuda>]) -> Result<CudaMatrix> {
    let mut hash = DefaultHasher::new();
    weights.iter().for_each(|l| l.weight.id.hash(&mut hash));
    let key = hash.finish();
    if let Some(matrix) = cuda.stacks.get(&key) {
        return Ok(matrix.view());
    }
    let first = &weights[0].weight;
    let out = weights.iter().map(|l| l.weight.out).sum::<usize>();
    let data = cuda.memory.uninitialized("matrices one below the other", 2 * out * first.pitch)?;
    cuda.kernels.settle()?;
    let mut at = 0;
    for linear in weights {
        let bytes = 2 * linear.weight.out * first.pitch;
        data.copy_from(at, &linear.weight.data, 0, bytes)?;
        at += bytes;
    }
    let matrix = CudaMatrix { kind: Kind::Bf16, out, columns: first.columns, pitch: first.pitch, data, id: unique() };
    let view = matrix.view();
    cuda.stacks.insert(key, matrix);
    Ok(view)
}

/// Products of both planes with several matrices, whose sums are added by one launch: whether the library took them.
fn together(cuda: &mut Cuda, rows: usize, x: Rows, groups: &[Group], width: usize, y: (u64, usize)) -> Result<bool> {
    let sums = cuda.scratch("sums of both planes", 8 * rows * width)?;
    for group in groups {
        let product = Product {
            operand: Operand::Bf16,
            outputs: group.out,
            columns: group.matrix.columns,
            across: false,
            pitches: [group.matrix.pitch, x.pitch(), width],
            batch: 1,
            strides: [0; 3],
        };
        let addresses = [group.matrix.address(), x.planes.address, sums + 4 * group.column as u64];
        if !library::product(cuda, 2 * rows, product, addresses, [1.0, 0.0])? {
            return Ok(false);
        }
    }
    add(cuda, rows, width, [sums, sums + (4 * rows * width) as u64], width, 0, y)?;
    Ok(true)
}

/// The logits of listed rows: whether the library took the product.
pub(crate) fn head(
    cuda: &mut Cuda,
    rows: usize,
    input: Input<'_>,
    matrix: &CudaMatrix,
    logits: &CudaBuffer,
) -> Result<bool> {
    let whole = logits.width.is_multiple_of(4) && matrix.out.is_multiple_of(4);
    if !wide(cuda, rows) || matrix.kind != Kind::Bf16 || !matrix.multiplies() || !whole {
        return Ok(false);
    }
    let x = rows_of(cuda, rows, input, halved(rows, matrix))?;
    plain(cuda, rows, x, matrix, 0, (logits.at(0), logits.width))
}

/// `act[row] = silu(min(gate x, limit)) * clamp(up x)` as planes for a product with `down`: whether the library took them.
pub(crate) fn gated(
    cuda: &mut Cuda,
    rows: usize,
    input: Input<'_>,
    [gate, up]: [&Linear<Cuda>; 2],
    down: &CudaMatrix,
    limit: f32,
    act: &mut CudaBuffer,
) -> Result<bool> {
    let (a, b) = (&gate.weight, &up.weight);
    let stored = [a, b, down].iter().all(|m| m.kind == Kind::Bf16 && m.multiplies());
    if !wide(cuda, rows) || !stored || !a.out.is_multiple_of(BLOCK) || !down.out.is_multiple_of(4) {
        return Ok(false);
    }
    let half = [a, b, down].iter().all(|m| halved(rows, m));
    let x = rows_of(cuda, rows, input, half)?;
    let (width, turn) = (a.out, rows.div_ceil(rows.div_ceil(TURN)));
    let sums = cuda.scratch("gate and up", 8 * turn * width)?;
    let second = sums + (4 * turn * width) as u64;
    for first in (0..rows).step_by(turn) {
        let count = turn.min(rows - first);
        for (linear, y) in [(gate, sums), (up, second)] {
            let bias = linear.bias.as_ref().map_or(0, |b| b.address());
            if !plain(cuda, count, x.from(first), &linear.weight, bias, (y, width))? {
                return Ok(false);
            }
        }
        let arguments = Arguments::new()
            .with(sums)
            .with(second)
            .int(width)
            .with(limit)
            .with(act.at(0) + (2 * first * width) as u64)
            .with((rows * width) as u64)
            .int(usize::from(half));
        let kernel = cuda.kernels.get(&dense::FILE, &[], "activate")?;
        cuda.kernels.launch(kernel, Grid::new([width.div_ceil(4 * 128), count, 1], 128), arguments)?;
    }
    act.format = Format::Planes { half, rows, pitch: width };
    Ok(true)
}

/// The product of a matrix and the address of a bias or 0; `y` is an address and elements a row.
fn plain(cuda: &mut Cuda, rows: usize, x: Rows, matrix: &CudaMatrix, bias: u64, y: (u64, usize)) -> Result<bool> {
    let product = Product {
        operand: Operand::Bf16,
        outputs: matrix.out,
        columns: matrix.columns,
        across: false,
        pitches: [matrix.pitch, x.pitch(), y.1],
        batch: 1,
        strides: [0; 3],
    };
    multiply(cuda, rows, x, product, (matrix, 0), bias, y.0)
}

/// A product of the library with a matrix from an element on, by the table above, which also says what its operands are.
/// Products side by side lie side by side in `y`; of rows of halves without a bias, results may be halves.
pub(crate) fn multiply(
    cuda: &mut Cuda,
    rows: usize,
    x: Rows,
    product: Product,
    (matrix, skip): (&CudaMatrix, usize),
    bias: u64,
    y: u64,
) -> Result<bool> {
    let Rows { planes, half } = x;
    let (width, pitch) = (product.batch * product.outputs, product.pitches[2]);
    if half {
        let operand = if product.operand == Operand::HalfToHalf { product.operand } else { Operand::Half };
        let product = Product { operand, ..product };
        let w = halves(cuda, matrix)? + 2 * skip as u64;
        let done = library::product(cuda, rows, product, [w, planes.address, y], [1.0 / SCALE, 0.0])?;
        if done && bias != 0 {
            add(cuda, rows, width, [y, 0], pitch, bias, (y, pitch))?;
        }
        return Ok(done);
    }
    let product = Product { operand: Operand::Bf16, ..product };
    let w = matrix.address() + 2 * skip as u64;
    if x.is_pair(rows) && 8 * rows * width <= SUMS {
        let sums = cuda.scratch("sums of both planes", 8 * rows * width)?;
        let [of_w, of_x, _] = product.strides;
        let both = Product {
            pitches: [product.pitches[0], product.pitches[1], width],
            strides: [of_w, of_x, if product.batch > 1 { product.outputs } else { 0 }],
            ..product
        };
        let done = library::product(cuda, 2 * rows, both, [w, planes.address, sums], [1.0, 0.0])?;
        if done {
            add(cuda, rows, width, [sums, sums + (4 * rows * width) as u64], width, bias, (y, pitch))?;
        }
        return Ok(done);
    }
    let low = planes.address + 2 * planes.plane as u64;
    let done = library::product(cuda, rows, product, [w, planes.address, y], [1.0, 0.0])?
        && library::product(cuda, rows, product, [w, low, y], [1.0, 1.0])?;
    if done && bias != 0 {
        add(cuda, rows, width, [y, 0], pitch, bias, (y, pitch))?;
    }
    Ok(done)
}

/// `y = a + b + bias` of rows of `width` columns; the address of `b` or of the bias may be 0.
fn add(
    cuda: &Cuda,
    rows: usize,
    width: usize,
    [a, b]: [u64; 2],
    pitch: usize,
    bias: u64,
    (y, y_pitch): (u64, usize),
) -> Result<()> {
    let arguments = Arguments::new().with(a).with(b).int(pitch).with(bias).int(width).with(y).int(y_pitch);
    let kernel = cuda.kernels.get(&dense::FILE, &[], "add_rows")?;
    Ok(cuda.kernels.launch(kernel, Grid::new([width.div_ceil(4 * 128), rows, 1], 128), arguments)?)
}

/// A matrix as halves times [`SCALE`], in scratch until the next one.
fn halves(cuda: &mut Cuda, matrix: &CudaMatrix) -> Result<u64> {
    let count = matrix.out * matrix.pitch;
    let address = cuda.scratch("a matrix as halves", 2 * count)?;
    if cuda.halved != Some((matrix.id, address)) {
        let arguments = Arguments::new().with(matrix.address()).with(count as u64).with(SCALE).with(address);
        let kernel = cuda.kernels.get(&dense::FILE, &[], "turn_to_halves")?;
        cuda.kernels.launch(kernel, Grid::new([count.div_ceil(8 * 256), 1, 1], 256), arguments)?;
        cuda.halved = Some((matrix.id, address));
    }
    Ok(address)
}
