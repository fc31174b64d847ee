//! Products of stored weights with packed activations: `y[row, o] = W[o] . x[row]`.
//!
//! Every sum has sixteen lanes that run over the columns in the order of [`super::pack`]; an INT4 group is summed first and
//! enters its row's sum by one more fused multiply-add with the scale. A tile of several outputs and rows shares loads, and
//! long rows are taken in pieces whose weights stay in the first-level cache while the rows of activations go by; but each
//! sum is its own and goes on where it was, so a result depends neither on the tiling nor on the pieces.

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by output and row alike")]

use std::ops::Range;

use super::{Kernel, Simd};
use crate::cpu::types::{CpuMatrix, GROUP, LANES, widen};

/// Outputs of a tile.
const WIDE_OUTPUTS: usize = 8;
const NARROW_OUTPUTS: usize = 4;

/// Blocks of 64 bytes of a row that are taken at a time when there are several rows of activations.
const PIECE: usize = 32;

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
    rows * WIDE_OUTPUTS * LANES
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

/// Stored rows of one kind.
trait Weights: Copy {
    /// Blocks of a row, the last one possibly partial.
    fn blocks(self) -> usize;

    /// Adds the products of a piece of the columns to the sums of `O` outputs (from `output` on) with `R` rows. Asks for the
    /// same piece of the next `O` outputs in advance.
    fn add<S: Simd, const O: usize, const R: usize>(
        self,
        simd: S,
        output: usize,
        piece: Range<usize>,
        x: [&[f32]; R],
        sums: &mut [[S::V; O]; R],
    );
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

impl Task<'_> {
    #[inline(always)]
    fn run<S: Simd, W: Weights>(mut self, simd: S, weights: W) {
        let mut column = 0;
        while column < self.width {
            let left = self.width - column;
            column += if S::WIDE && left >= WIDE_OUTPUTS {
                self.strip::<S, W, WIDE_OUTPUTS>(simd, weights, column)
            } else if left >= NARROW_OUTPUTS {
                self.strip::<S, W, NARROW_OUTPUTS>(simd, weights, column)
            } else {
                self.strip::<S, W, 1>(simd, weights, column)
            };
        }
    }

    /// `O` outputs with all rows.
    #[inline(always)]
    fn strip<S: Simd, W: Weights, const O: usize>(&mut self, simd: S, weights: W, column: usize) -> usize {
        let blocks = weights.blocks();
        // One row needs no pieces: nothing is used twice.
        let size = if self.rows == 1 { blocks } else { PIECE };
        let mut begin = 0;
        loop {
            let piece = begin..blocks.min(begin + size);
            let mut row = 0;
            while row < self.rows {
                let left = self.rows - row;
                // A tile's sums, its activations and a weight fill the registers.
                row += if S::WIDE && (left == 3 || left > 4) {
                    self.tile::<S, W, O, 3>(simd, weights, column, row, piece.clone(), blocks)
                } else if (S::WIDE || O == 1) && left >= 2 {
                    self.tile::<S, W, O, 2>(simd, weights, column, row, piece.clone(), blocks)
                } else {
                    self.tile::<S, W, O, 1>(simd, weights, column, row, piece.clone(), blocks)
                };
            }
            begin = piece.end;
            if begin >= blocks {
                return O;
            }
        }
    }

    /// A piece of the columns of `O` outputs with `R` rows.
    #[inline(always)]
    fn tile<S: Simd, W: Weights, const O: usize, const R: usize>(
        &mut self,
        simd: S,
        weights: W,
        column: usize,
        row: usize,
        piece: Range<usize>,
        blocks: usize,
    ) -> usize {
        let mut sums = [[simd.splat(0.0); O]; R];
        let kept = &mut self.sums[row * WIDE_OUTPUTS..(row + R) * WIDE_OUTPUTS];
        if piece.start > 0 {
            for r in 0..R {
                for o in 0..O {
                    sums[r][o] = simd.load(&kept[r * WIDE_OUTPUTS + o]);
                }
            }
        }
        let mut inputs = [self.x.data; R];
        for (r, input) in inputs.iter_mut().enumerate() {
            *input = self.x.row(row + r);
        }
        let last = piece.end == blocks;
        weights.add::<S, O, R>(simd, self.first + column, piece, inputs, &mut sums);
        for r in 0..R {
            for o in 0..O {
                if last {
                    self.y[(row + r) * self.width + column + o] = simd.sum(sums[r][o]);
                } else {
                    simd.store(sums[r][o], &mut kept[r * WIDE_OUTPUTS + o]);
                }
            }
        }
        R
    }
}

/// Splits `O` rows of `size` bytes into whole blocks and copies of the partial last blocks, padded with zeros.
#[inline(always)]
fn byte_rows<const O: usize>(bytes: &[u8], output: usize, size: usize) -> ([&[[u8; 64]]; O], [[u8; 64]; O]) {
    let (mut whole, mut last) = ([&[] as &[[u8; 64]]; O], [[0; 64]; O]);
    for o in 0..O {
        let (blocks, rest) = bytes[(output + o) * size..(output + o + 1) * size].as_chunks::<64>();
        whole[o] = blocks;
        if !size.is_multiple_of(64) {
            last[o][..rest.len()].copy_from_slice(rest);
        }
    }
    (whole, last)
}

/// BF16 rows.
#[derive(Debug, Clone, Copy)]
struct Bf16<'a> {
    bytes: &'a [u8],
    columns: usize,
}

impl Weights for Bf16<'_> {
    #[inline(always)]
    fn blocks(self) -> usize {
        (2 * self.columns).div_ceil(64)
    }

    #[inline(always)]
    fn add<S: Simd, const O: usize, const R: usize>(
        self,
        simd: S,
        output: usize,
        piece: Range<usize>,
        x: [&[f32]; R],
        sums: &mut [[S::V; O]; R],
    ) {
        let size = 2 * self.columns;
        let (rows, last) = byte_rows::<O>(self.bytes, output, size);
        let whole = piece.end.min(size / 64);
        let mut inputs = [&[] as &[[[f32; LANES]; 2]]; R];
        for r in 0..R {
            inputs[r] = &x[r].as_chunks::<LANES>().0.as_chunks::<2>().0[..piece.end];
        }
        for o in 0..O {
            assert!(rows[o].len() >= whole, "the piece lies in the row");
        }
        for b in piece.start..whole {
            for o in 0..O {
                simd.prefetch(rows[o][b].as_ptr().wrapping_add(O * size));
            }
            for half in 0..2 {
                let mut activations = [simd.splat(0.0); R];
                for r in 0..R {
                    activations[r] = simd.load(&inputs[r][b][half]);
                }
                for o in 0..O {
                    let w = simd.bf16(&rows[o][b], half);
                    for r in 0..R {
                        sums[r][o] = simd.fma(w, activations[r], sums[r][o]);
                    }
                }
            }
        }
        if whole < piece.end {
            for half in 0..2 {
                for o in 0..O {
                    let w = simd.bf16(&last[o], half);
                    for r in 0..R {
                        sums[r][o] = simd.fma(w, simd.load(&inputs[r][whole][half]), sums[r][o]);
                    }
                }
            }
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
    fn blocks(self) -> usize {
        (4 * self.columns).div_ceil(64)
    }

    #[inline(always)]
    fn add<S: Simd, const O: usize, const R: usize>(
        self,
        simd: S,
        output: usize,
        piece: Range<usize>,
        x: [&[f32]; R],
        sums: &mut [[S::V; O]; R],
    ) {
        let size = 4 * self.columns;
        let (rows, last) = byte_rows::<O>(self.bytes, output, size);
        let whole = piece.end.min(size / 64);
        let mut inputs = [&[] as &[[f32; LANES]]; R];
        for r in 0..R {
            inputs[r] = &x[r].as_chunks::<LANES>().0[..piece.end];
        }
        for o in 0..O {
            assert!(rows[o].len() >= whole, "the piece lies in the row");
        }
        for b in piece.start..piece.end {
            let mut activations = [simd.splat(0.0); R];
            for r in 0..R {
                activations[r] = simd.load(&inputs[r][b]);
            }
            for o in 0..O {
                let w = simd.f32_bytes(if b < whole { &rows[o][b] } else { &last[o] });
                for r in 0..R {
                    sums[r][o] = simd.fma(w, activations[r], sums[r][o]);
                }
            }
        }
    }
}

/// INT4 rows with a scale a group; a group's codes are a block.
#[derive(Debug, Clone, Copy)]
struct Int4<'a> {
    packed: &'a [u8],
    scale: &'a [u8],
    columns: usize,
}

impl Weights for Int4<'_> {
    #[inline(always)]
    fn blocks(self) -> usize {
        self.columns / GROUP
    }

    #[inline(always)]
    fn add<S: Simd, const O: usize, const R: usize>(
        self,
        simd: S,
        output: usize,
        piece: Range<usize>,
        x: [&[f32]; R],
        sums: &mut [[S::V; O]; R],
    ) {
        let groups = self.blocks();
        let mut words = [&[] as &[[u8; 64]]; O];
        let mut scales = [&[] as &[[u8; 2]]; O];
        for o in 0..O {
            words[o] = &self.packed.as_chunks::<64>().0[(output + o) * groups..(output + o + 1) * groups][..piece.end];
            scales[o] = &self.scale.as_chunks::<2>().0[(output + o) * groups..(output + o + 1) * groups][..piece.end];
        }
        let mut inputs = [&[] as &[[[f32; LANES]; 8]]; R];
        for r in 0..R {
            inputs[r] = &x[r].as_chunks::<LANES>().0.as_chunks::<8>().0[..piece.end];
        }
        for g in piece {
            for o in 0..O {
                simd.prefetch(words[o][g].as_ptr().wrapping_add(O * groups * 64));
            }
            let mut group = [[simd.splat(0.0); O]; R];
            for p in 0..8 {
                let mut activations = [simd.splat(0.0); R];
                for r in 0..R {
                    activations[r] = simd.load(&inputs[r][g][p]);
                }
                for o in 0..O {
                    let codes = simd.codes(simd.words(&words[o][g]), p as u32);
                    for r in 0..R {
                        group[r][o] = simd.fma(codes, activations[r], group[r][o]);
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
    }
}
