//! Products of stored weights with packed activations: `y[row, o] = W[o] . x[row]`.
//!
//! Every sum has sixteen lanes that run over the columns in the order of [`super::pack`]; an INT4 group is summed first and
//! enters its row's sum by one more fused multiply-add with the scale. Tiles of several outputs and rows share loads, but
//! each sum of a tile is its own, so a result does not depend on the tiling.

use std::ops::Range;

use super::{Kernel, Simd};
use crate::cpu::types::{CpuMatrix, GROUP, LANES, widen};

/// Packed rows that a product reads: row `i` of the product is row `list[first + i] / divisor` of `data`, or row `first + i`
/// without a list.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackedRows<'a> {
    /// `[.., stride]`.
    pub(crate) data: &'a [f32],
    /// Length of a packed row.
    pub(crate) stride: usize,
    /// First row or list entry.
    pub(crate) first: usize,
    /// Which rows.
    pub(crate) list: Option<&'a [u32]>,
    /// Entries of the list a row.
    pub(crate) divisor: usize,
}

impl<'a> PackedRows<'a> {
    #[inline(always)]
    fn row(self, i: usize) -> &'a [f32] {
        let row = self.list.map_or(self.first + i, |list| list[self.first + i] as usize / self.divisor);
        &self.data[row * self.stride..(row + 1) * self.stride]
    }
}

/// Some outputs of some rows.
#[derive(Debug)]
pub(crate) struct Product<'a> {
    /// The weights.
    pub(crate) matrix: &'a CpuMatrix,
    /// Rows of the matrix.
    pub(crate) outputs: Range<usize>,
    /// Activations in the matrix's order.
    pub(crate) x: PackedRows<'a>,
    /// Number of rows of activations.
    pub(crate) rows: usize,
    /// `[rows, outputs]`.
    pub(crate) y: &'a mut [f32],
}

impl Kernel for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let columns = self.matrix.columns();
        match self.matrix {
            CpuMatrix::Bf16 { bytes, .. } => {
                tiles(simd, Bf16 { bytes: bytes.as_slice(), columns }, self.outputs, self.x, self.rows, self.y);
            }
            CpuMatrix::F32 { bytes, .. } => {
                tiles(simd, F32 { bytes: bytes.as_slice(), columns }, self.outputs, self.x, self.rows, self.y);
            }
            CpuMatrix::Int4 { packed, scale, .. } => {
                let weights = Int4 { packed: packed.as_slice(), scale: scale.as_slice(), columns };
                tiles(simd, weights, self.outputs, self.x, self.rows, self.y);
            }
        }
    }
}

/// Stored rows of one kind.
trait Weights: Copy {
    /// Sums of `O` outputs (from `output` on) with `R` rows.
    fn tile<S: Simd, const O: usize, const R: usize>(self, simd: S, output: usize, x: [&[f32]; R]) -> [[S::V; O]; R];
}

#[inline(always)]
fn tiles<S: Simd, W: Weights>(
    simd: S,
    weights: W,
    outputs: Range<usize>,
    x: PackedRows<'_>,
    rows: usize,
    y: &mut [f32],
) {
    let width = outputs.len();
    let mut output = outputs.start;
    while output < outputs.end {
        let column = output - outputs.start;
        let left = outputs.end - output;
        // A tile's sums fill half of the registers at most.
        output += if left >= 4 {
            strip::<S, W, 4>(simd, weights, output, column, width, x, rows, y)
        } else {
            strip::<S, W, 1>(simd, weights, output, column, width, x, rows, y)
        };
    }
}

#[inline(always)]
fn strip<S: Simd, W: Weights, const O: usize>(
    simd: S,
    weights: W,
    output: usize,
    column: usize,
    width: usize,
    x: PackedRows<'_>,
    rows: usize,
    y: &mut [f32],
) -> usize {
    let mut row = 0;
    while row < rows {
        let left = rows - row;
        row += if S::WIDE && left >= 4 {
            tile::<S, W, O, 4>(simd, weights, output, column, width, x, row, y)
        } else if !S::WIDE && left >= 2 && O == 1 {
            tile::<S, W, O, 2>(simd, weights, output, column, width, x, row, y)
        } else {
            tile::<S, W, O, 1>(simd, weights, output, column, width, x, row, y)
        };
    }
    O
}

#[inline(always)]
fn tile<S: Simd, W: Weights, const O: usize, const R: usize>(
    simd: S,
    weights: W,
    output: usize,
    column: usize,
    width: usize,
    x: PackedRows<'_>,
    row: usize,
    y: &mut [f32],
) -> usize {
    let inputs = std::array::from_fn(|r| x.row(row + r));
    let sums = weights.tile::<S, O, R>(simd, output, inputs);
    for r in 0..R {
        for o in 0..O {
            y[(row + r) * width + column + o] = simd.sum(sums[r][o]);
        }
    }
    R
}

/// BF16 rows.
#[derive(Debug, Clone, Copy)]
struct Bf16<'a> {
    bytes: &'a [u8],
    columns: usize,
}

impl Weights for Bf16<'_> {
    #[inline(always)]
    fn tile<S: Simd, const O: usize, const R: usize>(self, simd: S, output: usize, x: [&[f32]; R]) -> [[S::V; O]; R] {
        let size = 2 * self.columns;
        let mut sums = [[simd.splat(0.0); O]; R];
        let rows: [&[u8]; O] = std::array::from_fn(|o| &self.bytes[(output + o) * size..(output + o + 1) * size]);
        let whole = size / 64;
        let weights = rows.map(|row| &row.as_chunks::<64>().0[..whole]);
        let inputs = x.map(|x| &x.as_chunks::<LANES>().0[..2 * size.div_ceil(64)]);
        for b in 0..whole {
            pair_step(simd, weights.map(|w| &w[b]), inputs, b, &mut sums);
        }
        if !size.is_multiple_of(64) {
            let mut last = [[0; 64]; O];
            for o in 0..O {
                last[o][..size % 64].copy_from_slice(&rows[o][whole * 64..]);
            }
            pair_step(simd, last.each_ref(), inputs, whole, &mut sums);
        }
        sums
    }
}

#[inline(always)]
fn pair_step<S: Simd, const O: usize, const R: usize>(
    simd: S,
    weights: [&[u8; 64]; O],
    inputs: [&[[f32; LANES]]; R],
    b: usize,
    sums: &mut [[S::V; O]; R],
) {
    let mut even = [simd.splat(0.0); O];
    let mut odd = even;
    for o in 0..O {
        (even[o], odd[o]) = simd.bf16(weights[o]);
    }
    for r in 0..R {
        let (first, second) = (simd.load(&inputs[r][2 * b]), simd.load(&inputs[r][2 * b + 1]));
        for o in 0..O {
            sums[r][o] = simd.fma(odd[o], second, simd.fma(even[o], first, sums[r][o]));
        }
    }
}

/// F32 rows.
#[derive(Debug, Clone, Copy)]
struct F32<'a> {
    bytes: &'a [u8],
    columns: usize,
}

impl Weights for F32<'_> {
    #[inline(always)]
    fn tile<S: Simd, const O: usize, const R: usize>(self, simd: S, output: usize, x: [&[f32]; R]) -> [[S::V; O]; R] {
        let size = 4 * self.columns;
        let mut sums = [[simd.splat(0.0); O]; R];
        let rows: [&[u8]; O] = std::array::from_fn(|o| &self.bytes[(output + o) * size..(output + o + 1) * size]);
        let whole = size / 64;
        let weights = rows.map(|row| &row.as_chunks::<64>().0[..whole]);
        let inputs = x.map(|x| &x.as_chunks::<LANES>().0[..size.div_ceil(64)]);
        for b in 0..whole {
            plain_step(simd, weights.map(|w| &w[b]), inputs, b, &mut sums);
        }
        if !size.is_multiple_of(64) {
            let mut last = [[0; 64]; O];
            for o in 0..O {
                last[o][..size % 64].copy_from_slice(&rows[o][whole * 64..]);
            }
            plain_step(simd, last.each_ref(), inputs, whole, &mut sums);
        }
        sums
    }
}

#[inline(always)]
fn plain_step<S: Simd, const O: usize, const R: usize>(
    simd: S,
    weights: [&[u8; 64]; O],
    inputs: [&[[f32; LANES]]; R],
    b: usize,
    sums: &mut [[S::V; O]; R],
) {
    let mut w = [simd.splat(0.0); O];
    for o in 0..O {
        w[o] = simd.f32_bytes(weights[o]);
    }
    for r in 0..R {
        let x = simd.load(&inputs[r][b]);
        for o in 0..O {
            sums[r][o] = simd.fma(w[o], x, sums[r][o]);
        }
    }
}

/// INT4 rows with a scale a group.
#[derive(Debug, Clone, Copy)]
struct Int4<'a> {
    packed: &'a [u8],
    scale: &'a [u8],
    columns: usize,
}

impl Weights for Int4<'_> {
    #[inline(always)]
    fn tile<S: Simd, const O: usize, const R: usize>(self, simd: S, output: usize, x: [&[f32]; R]) -> [[S::V; O]; R] {
        let groups = self.columns / GROUP;
        let words: [&[[u8; 64]]; O] = std::array::from_fn(|o| {
            let first = (output + o) * groups * 64;
            &self.packed[first..first + groups * 64].as_chunks::<64>().0[..groups]
        });
        let scales: [&[[u8; 2]]; O] = std::array::from_fn(|o| {
            let first = (output + o) * groups * 2;
            &self.scale[first..first + groups * 2].as_chunks::<2>().0[..groups]
        });
        let inputs: [&[[[f32; LANES]; 8]]; R] =
            std::array::from_fn(|r| &x[r].as_chunks::<LANES>().0.as_chunks::<8>().0[..groups]);
        let zero = simd.splat(0.0);
        let mut sums = [[zero; O]; R];
        for g in 0..groups {
            let mut group = [[zero; O]; R];
            let mut left = [simd.words(&words[0][g]); O];
            for o in 1..O {
                left[o] = simd.words(&words[o][g]);
            }
            #[allow(clippy::needless_range_loop, reason = "`p` is the nibble of every row")]
            for p in 0..8 {
                let mut codes = [zero; O];
                for o in 0..O {
                    codes[o] = simd.codes(left[o]);
                    left[o] = simd.next_nibble(left[o]);
                }
                for r in 0..R {
                    let x = simd.load(&inputs[r][g][p]);
                    for o in 0..O {
                        group[r][o] = simd.fma(codes[o], x, group[r][o]);
                    }
                }
            }
            for o in 0..O {
                let scale = simd.splat(widen(scales[o][g]));
                for r in 0..R {
                    sums[r][o] = simd.fma(scale, group[r][o], sums[r][o]);
                }
            }
        }
        sums
    }
}
