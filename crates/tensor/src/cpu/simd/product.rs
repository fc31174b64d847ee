//! Products of stored weights with packed activations: `y[row, o] = W[o] . x[row]`.
//!
//! Every sum has sixteen lanes that run over the columns in the order of [`super::pack`]; an INT4 group is summed first and
//! enters its row's sum by one more fused multiply-add with the scale.
//!
//! A tile of several outputs and rows shares loads, and long rows are taken in pieces: a piece of the tile's activations
//! stays in the first-level cache while the weights go by. But each sum is its own and goes on where it was, so a result
//! depends neither on the tiling nor on the pieces.

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by output and row alike")]

use std::ops::Range;

use super::{
    Kernel, Simd,
    weights::{Ahead, Bf16, F32, Int4, Weights},
};
use crate::cpu::types::{CpuMatrix, LANES};

/// Columns of a piece, a multiple of every block.
const PIECE: usize = 1024;

/// Outputs that go through all pieces together.
const STRIP: usize = 64;

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

/// f32 of scratch that a product of `rows` rows needs.
pub(crate) const fn scratch(rows: usize) -> usize {
    if rows == 1 { 0 } else { rows * STRIP * LANES }
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
    /// `[scratch(rows)]`, any contents.
    pub(crate) sums: &'a mut [f32],
    /// `[rows, outputs]`.
    pub(crate) y: &'a mut [f32],
}

impl Kernel for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let columns = self.matrix.columns();
        let task = Task {
            first: self.outputs.start,
            width: self.outputs.len(),
            x: self.x,
            rows: self.rows,
            sums: self.sums.as_chunks_mut::<LANES>().0,
            y: self.y,
        };
        match self.matrix {
            CpuMatrix::Bf16 { bytes, .. } => task.run(simd, Bf16 { bytes: bytes.as_slice(), columns }),
            CpuMatrix::F32 { bytes, .. } => task.run(simd, F32 { bytes: bytes.as_slice(), columns }),
            CpuMatrix::Int4 { packed, scale, .. } => {
                task.run(simd, Int4 { packed: packed.as_slice(), scale: scale.as_slice(), columns });
            }
        }
    }
}

/// A product without its weights.
struct Task<'a> {
    first: usize,
    width: usize,
    x: PackedRows<'a>,
    rows: usize,
    sums: &'a mut [[f32; LANES]],
    y: &'a mut [f32],
}

/// Where a tile is.
#[derive(Clone, Copy)]
struct Place {
    column: usize,
    row: usize,
    /// First column of the strip.
    strip: usize,
}

impl Task<'_> {
    #[inline(always)]
    fn run<S: Simd, W: Weights>(mut self, simd: S, weights: W) {
        let blocks = weights.columns().div_ceil(W::BLOCK);
        if self.rows == 1 {
            // Weights are used once, so there is nothing to keep near.
            let mut column = 0;
            while column < self.width {
                let place = Place { column, row: 0, strip: 0 };
                let (all, ahead) = (0..blocks, Ahead::Sequence);
                column += match self.width - column {
                    left if S::WIDE && W::OUTPUTS == 8 && left >= 8 => {
                        self.tile::<S, W, 8, 1>(simd, weights, place, all, blocks, ahead)
                    }
                    left if left >= 4 => self.tile::<S, W, 4, 1>(simd, weights, place, all, blocks, ahead),
                    _ => self.tile::<S, W, 1, 1>(simd, weights, place, all, blocks, ahead),
                };
            }
            return;
        }
        for strip in (0..self.width).step_by(STRIP) {
            let end = self.width.min(strip + STRIP);
            let mut begin = 0;
            loop {
                let piece = begin..blocks.min(begin + PIECE / W::BLOCK);
                let mut row = 0;
                while row < self.rows {
                    row += match self.rows - row {
                        left if S::WIDE && left >= 4 => {
                            self.outputs::<S, W, 4, 4>(simd, weights, row, strip..end, piece.clone(), blocks)
                        }
                        left if S::WIDE && left == 3 => {
                            self.outputs::<S, W, 4, 3>(simd, weights, row, strip..end, piece.clone(), blocks)
                        }
                        left if S::WIDE && left == 2 => {
                            self.outputs::<S, W, 4, 2>(simd, weights, row, strip..end, piece.clone(), blocks)
                        }
                        left if !S::WIDE && left >= 2 => {
                            self.outputs::<S, W, 2, 2>(simd, weights, row, strip..end, piece.clone(), blocks)
                        }
                        _ => self.outputs::<S, W, 4, 1>(simd, weights, row, strip..end, piece.clone(), blocks),
                    };
                }
                begin = piece.end;
                if begin >= blocks {
                    break;
                }
            }
        }
    }

    /// A piece of the columns of a strip of outputs with `R` rows.
    #[inline(always)]
    fn outputs<S: Simd, W: Weights, const O: usize, const R: usize>(
        &mut self,
        simd: S,
        weights: W,
        row: usize,
        strip: Range<usize>,
        piece: Range<usize>,
        blocks: usize,
    ) -> usize {
        // Narrow tiles have no registers left for a choice.
        let fresh = R == 1 || (S::WIDE && row == 0);
        let ahead = if fresh { Ahead::Tile } else { Ahead::Nothing };
        let mut column = strip.start;
        while column < strip.end {
            let place = Place { column, row, strip: strip.start };
            column += if strip.end - column >= O {
                self.tile::<S, W, O, R>(simd, weights, place, piece.clone(), blocks, ahead)
            } else {
                self.tile::<S, W, 1, R>(simd, weights, place, piece.clone(), blocks, ahead)
            };
        }
        R
    }

    /// A piece of the columns of `O` outputs with `R` rows.
    #[inline(always)]
    fn tile<S: Simd, W: Weights, const O: usize, const R: usize>(
        &mut self,
        simd: S,
        weights: W,
        place: Place,
        piece: Range<usize>,
        blocks: usize,
        ahead: Ahead,
    ) -> usize {
        let Place { column, row, strip } = place;
        let mut sums = [[simd.splat(0.0); O]; R];
        if piece.start > 0 {
            for r in 0..R {
                for o in 0..O {
                    sums[r][o] = simd.load(&self.sums[(row + r) * STRIP + column - strip + o]);
                }
            }
        }
        let mut inputs = [self.x.data; R];
        for r in 0..R {
            inputs[r] = self.x.row(row + r);
        }
        let last = piece.end == blocks;
        weights.add::<S, O, R>(simd, self.first + column, piece, inputs, ahead, &mut sums);
        for r in 0..R {
            if last {
                let y = &mut self.y[(row + r) * self.width + column..][..O];
                let (fours, rest) = y.as_chunks_mut::<4>();
                let (sums, single) = sums[r].as_chunks::<4>();
                for (y, sums) in fours.iter_mut().zip(sums) {
                    *y = simd.sums(*sums);
                }
                for (y, sum) in rest.iter_mut().zip(single) {
                    *y = simd.sum(*sum);
                }
            } else {
                for o in 0..O {
                    simd.store(sums[r][o], &mut self.sums[(row + r) * STRIP + column - strip + o]);
                }
            }
        }
        O
    }
}
