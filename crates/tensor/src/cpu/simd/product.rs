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

use super::{Kernel, Simd};
use crate::cpu::types::{CpuMatrix, GROUP, LANES, widen};

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

/// Stored rows of one kind.
trait Weights: Copy {
    /// Columns of a block.
    const BLOCK: usize;

    /// Columns of a row.
    fn columns(self) -> usize;

    /// Adds the products of some blocks of the columns to the sums of `O` outputs (from `output` on) with `R` rows. When the
    /// weights are `fresh`, not in a cache yet, later ones are asked for in advance.
    fn add<S: Simd, const O: usize, const R: usize>(
        self,
        simd: S,
        output: usize,
        blocks: Range<usize>,
        x: [&[f32]; R],
        fresh: bool,
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
            // Weights are used once, so there is nothing to keep near. Many outputs at a time cover the latency of a sum.
            let mut column = 0;
            while column < self.width {
                let place = Place { column, row: 0, strip: 0 };
                column += match self.width - column {
                    left if S::WIDE && left >= 8 => self.tile::<S, W, 8, 1>(simd, weights, place, 0..blocks, blocks),
                    left if left >= 4 => self.tile::<S, W, 4, 1>(simd, weights, place, 0..blocks, blocks),
                    _ => self.tile::<S, W, 1, 1>(simd, weights, place, 0..blocks, blocks),
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
        let mut column = strip.start;
        while column < strip.end {
            let place = Place { column, row, strip: strip.start };
            column += if strip.end - column >= O {
                self.tile::<S, W, O, R>(simd, weights, place, piece.clone(), blocks)
            } else {
                self.tile::<S, W, 1, R>(simd, weights, place, piece.clone(), blocks)
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
        weights.add::<S, O, R>(simd, self.first + column, piece, inputs, row == 0, &mut sums);
        for r in 0..R {
            for o in 0..O {
                if last {
                    self.y[(row + r) * self.width + column + o] = simd.sum(sums[r][o]);
                } else {
                    simd.store(sums[r][o], &mut self.sums[(row + r) * STRIP + column - strip + o]);
                }
            }
        }
        O
    }
}

/// How many bytes ahead weights are asked for: the same place in the next tile, or, where rows are so long that the hardware
/// notices them, some lines.
#[inline(always)]
fn ahead(tile_bytes: usize) -> usize {
    if tile_bytes <= 1 << 14 { tile_bytes } else { 1 << 10 }
}

/// Pointers to `O` rows of `size` bytes that start with `output`.
#[inline(always)]
fn row_pointers<const O: usize>(bytes: &[u8], output: usize, size: usize) -> [*const u8; O] {
    let rows = &bytes[output * size..(output + O) * size];
    let mut pointers = [rows.as_ptr(); O];
    for o in 0..O {
        pointers[o] = rows[o * size..].as_ptr();
    }
    pointers
}

/// Pointers to activations of at least `len` values.
#[inline(always)]
fn input_pointers<const R: usize>(x: [&[f32]; R], len: usize) -> [*const f32; R] {
    let mut pointers = [std::ptr::null(); R];
    for r in 0..R {
        pointers[r] = x[r][..len].as_ptr();
    }
    pointers
}

/// BF16 rows.
#[derive(Debug, Clone, Copy)]
struct Bf16<'a> {
    bytes: &'a [u8],
    columns: usize,
}

impl Weights for Bf16<'_> {
    const BLOCK: usize = 2 * LANES;

    #[inline(always)]
    fn columns(self) -> usize {
        self.columns
    }

    #[inline(always)]
    fn add<S: Simd, const O: usize, const R: usize>(
        self,
        simd: S,
        output: usize,
        blocks: Range<usize>,
        x: [&[f32]; R],
        fresh: bool,
        sums: &mut [[S::V; O]; R],
    ) {
        let size = 2 * self.columns;
        let rows = row_pointers::<O>(self.bytes, output, size);
        let inputs = input_pointers(x, blocks.end * Self::BLOCK);
        let ahead = ahead(O * size);
        let whole = blocks.end.min(size / 64);
        for b in blocks.start..whole {
            let mut even = [simd.splat(0.0); R];
            let mut odd = even;
            for r in 0..R {
                // SAFETY: `input_pointers` has found all blocks in the row.
                (even[r], odd[r]) =
                    unsafe { (simd.load_at(inputs[r].add(32 * b)), simd.load_at(inputs[r].add(32 * b + 16))) };
            }
            for o in 0..O {
                if fresh {
                    simd.prefetch(rows[o].wrapping_add(64 * b + ahead));
                }
                // SAFETY: `row_pointers` has found whole rows, and the block is whole.
                let words = unsafe { simd.words_at(rows[o].add(64 * b)) };
                let (first, second) = (simd.low_bf16(words), simd.high_bf16(words));
                for r in 0..R {
                    sums[r][o] = simd.fma(second, odd[r], simd.fma(first, even[r], sums[r][o]));
                }
            }
        }
        if whole < blocks.end {
            let rest = size % 64;
            for o in 0..O {
                let mut last = [0; 64];
                last[..rest].copy_from_slice(&self.bytes[(output + o + 1) * size - rest..(output + o + 1) * size]);
                let words = simd.words(&last);
                let (first, second) = (simd.low_bf16(words), simd.high_bf16(words));
                for r in 0..R {
                    let x = &x[r].as_chunks::<LANES>().0[2 * whole..];
                    sums[r][o] = simd.fma(first, simd.load(&x[0]), sums[r][o]);
                    sums[r][o] = simd.fma(second, simd.load(&x[1]), sums[r][o]);
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
    const BLOCK: usize = LANES;

    #[inline(always)]
    fn columns(self) -> usize {
        self.columns
    }

    #[inline(always)]
    fn add<S: Simd, const O: usize, const R: usize>(
        self,
        simd: S,
        output: usize,
        blocks: Range<usize>,
        x: [&[f32]; R],
        fresh: bool,
        sums: &mut [[S::V; O]; R],
    ) {
        let size = 4 * self.columns;
        let rows = row_pointers::<O>(self.bytes, output, size);
        let inputs = input_pointers(x, blocks.end * Self::BLOCK);
        let ahead = ahead(O * size);
        let whole = blocks.end.min(size / 64);
        for b in blocks.start..whole {
            let mut activations = [simd.splat(0.0); R];
            for r in 0..R {
                // SAFETY: `input_pointers` has found all blocks in the row.
                activations[r] = unsafe { simd.load_at(inputs[r].add(16 * b)) };
            }
            for o in 0..O {
                if fresh {
                    simd.prefetch(rows[o].wrapping_add(64 * b + ahead));
                }
                // SAFETY: `row_pointers` has found whole rows, and the block is whole.
                let w = simd.as_f32(unsafe { simd.words_at(rows[o].add(64 * b)) });
                for r in 0..R {
                    sums[r][o] = simd.fma(w, activations[r], sums[r][o]);
                }
            }
        }
        if whole < blocks.end {
            let rest = size % 64;
            for o in 0..O {
                let mut last = [0; 64];
                last[..rest].copy_from_slice(&self.bytes[(output + o + 1) * size - rest..(output + o + 1) * size]);
                let w = simd.as_f32(simd.words(&last));
                for r in 0..R {
                    sums[r][o] = simd.fma(w, simd.load(&x[r].as_chunks::<LANES>().0[whole]), sums[r][o]);
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
    const BLOCK: usize = GROUP;

    #[inline(always)]
    fn columns(self) -> usize {
        self.columns
    }

    #[inline(always)]
    fn add<S: Simd, const O: usize, const R: usize>(
        self,
        simd: S,
        output: usize,
        blocks: Range<usize>,
        x: [&[f32]; R],
        fresh: bool,
        sums: &mut [[S::V; O]; R],
    ) {
        let groups = self.columns / GROUP;
        let size = 64 * groups;
        let rows = row_pointers::<O>(self.packed, output, size);
        let inputs = input_pointers(x, blocks.end * Self::BLOCK);
        let ahead = ahead(O * size);
        let mut scales = [&[] as &[[u8; 2]]; O];
        for o in 0..O {
            scales[o] = &self.scale.as_chunks::<2>().0[(output + o) * groups..][..blocks.end];
        }
        for g in blocks {
            let zero = simd.splat(0.0);
            let mut group = [[zero; O]; R];
            // SAFETY: `row_pointers` has found whole rows, which have this group.
            let mut words = [unsafe { simd.words_at(rows[0].add(64 * g)) }; O];
            for o in 0..O {
                if fresh {
                    simd.prefetch(rows[o].wrapping_add(64 * g + ahead));
                }
                // SAFETY: as above.
                words[o] = unsafe { simd.words_at(rows[o].add(64 * g)) };
            }
            for p in 0..8 {
                let mut activations = [zero; R];
                for r in 0..R {
                    // SAFETY: `input_pointers` has found all groups in the row.
                    activations[r] = unsafe { simd.load_at(inputs[r].add(GROUP * g + LANES * p)) };
                }
                for o in 0..O {
                    let codes = simd.codes(words[o]);
                    words[o] = simd.next_nibble(words[o]);
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
