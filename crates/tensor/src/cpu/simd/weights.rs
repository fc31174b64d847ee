//! Stored rows as a product reads them: BF16, F32 and INT4 with a scale a group.
//!
//! Lanes take the columns in the order of [`super::pack`]. An INT4 group is summed first and enters the row's sum by one more
//! fused multiply-add with its scale.

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by output and row alike")]

use std::ops::Range;

use super::Simd;
use crate::cpu::types::{GROUP, LANES};

/// Stored rows of one kind.
pub(super) trait Weights: Copy {
    /// Columns of a block.
    const BLOCK: usize;
    /// Outputs of a tile with a single row where registers are many: enough sums to cover the latency of one.
    const OUTPUTS: usize;

    /// Columns of a row.
    fn columns(self) -> usize;

    /// Adds the products of some blocks of the columns to the sums of `O` outputs (from `output` on) with `R` rows, asking
    /// for later weights in advance as `ahead` says.
    fn add<S: Simd, const O: usize, const R: usize>(
        self,
        simd: S,
        output: usize,
        blocks: Range<usize>,
        x: [&[f32]; R],
        ahead: Ahead,
        sums: &mut [[S::V; O]; R],
    );
}

/// Which weights a tile asks for before they are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ahead {
    /// None: they are in a cache.
    Nothing,
    /// The same place in the next tile, or, where rows are so long that the hardware notices them, some lines.
    Tile,
    /// What follows the whole tile in memory, line after line, into the second-level cache: memory gives a sequence faster
    /// than the same lines in the order in which several rows need them.
    Sequence,
}

/// How far behind the end of the tile a sequence is asked for, bytes.
const LEAD: usize = 1 << 12;

/// Longest way to the end of a tile, bytes: the cache holds it several times.
const FAR: usize = 1 << 17;

/// Asks for the weights that come after a tile of `O` rows.
#[derive(Clone, Copy)]
struct Asking<const O: usize> {
    ahead: Ahead,
    /// Where output `o` begins to ask: at `starts[o]`.
    starts: [*const u8; O],
    /// Bytes from block to block.
    step: usize,
}

impl<const O: usize> Asking<O> {
    #[inline(always)]
    fn new(ahead: Ahead, rows: [*const u8; O], size: usize) -> Self {
        let tile = O * size;
        let mut starts = rows;
        if ahead == Ahead::Sequence {
            for o in 0..O {
                starts[o] = rows[0].wrapping_add(tile.min(FAR) + LEAD + 64 * o);
            }
            return Self { ahead, starts, step: 64 * O };
        }
        for o in 0..O {
            starts[o] = rows[o].wrapping_add(if tile <= 1 << 14 { tile } else { 1 << 10 });
        }
        Self { ahead, starts, step: 64 }
    }

    /// Asks for a line while output `o` is at `block`.
    #[inline(always)]
    fn ask<S: Simd>(&self, simd: S, o: usize, block: usize) {
        let address = self.starts[o].wrapping_add(self.step * block);
        match self.ahead {
            Ahead::Nothing => {}
            Ahead::Tile => simd.prefetch(address),
            Ahead::Sequence => simd.prefetch_second(address),
        }
    }
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
pub(super) struct Bf16<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) columns: usize,
}

impl Weights for Bf16<'_> {
    const BLOCK: usize = 2 * LANES;
    const OUTPUTS: usize = 8;

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
        ahead: Ahead,
        sums: &mut [[S::V; O]; R],
    ) {
        let size = 2 * self.columns;
        let rows = row_pointers::<O>(self.bytes, output, size);
        let inputs = input_pointers(x, blocks.end * Self::BLOCK);
        let asking = Asking::new(ahead, rows, size);
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
                asking.ask(simd, o, b);
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
pub(super) struct F32<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) columns: usize,
}

impl Weights for F32<'_> {
    const BLOCK: usize = LANES;
    const OUTPUTS: usize = 8;

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
        ahead: Ahead,
        sums: &mut [[S::V; O]; R],
    ) {
        let size = 4 * self.columns;
        let rows = row_pointers::<O>(self.bytes, output, size);
        let inputs = input_pointers(x, blocks.end * Self::BLOCK);
        let asking = Asking::new(ahead, rows, size);
        let whole = blocks.end.min(size / 64);
        for b in blocks.start..whole {
            let mut activations = [simd.splat(0.0); R];
            for r in 0..R {
                // SAFETY: `input_pointers` has found all blocks in the row.
                activations[r] = unsafe { simd.load_at(inputs[r].add(16 * b)) };
            }
            for o in 0..O {
                asking.ask(simd, o, b);
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
pub(super) struct Int4<'a> {
    pub(super) packed: &'a [u8],
    pub(super) scale: &'a [u8],
    pub(super) columns: usize,
}

impl Weights for Int4<'_> {
    const BLOCK: usize = GROUP;
    // The sums of the next group start anew, so those of two groups run at the same time.
    const OUTPUTS: usize = 4;

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
        ahead: Ahead,
        sums: &mut [[S::V; O]; R],
    ) {
        let groups = self.columns / GROUP;
        let size = 64 * groups;
        let rows = row_pointers::<O>(self.packed, output, size);
        let inputs = input_pointers(x, blocks.end * Self::BLOCK);
        let asking = Asking::new(ahead, rows, size);
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
                asking.ask(simd, o, g);
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
                let scale = simd.splat_bf16(scales[o][g]);
                for r in 0..R {
                    sums[r][o] = simd.fma(scale, group[r][o], sums[r][o]);
                }
            }
        }
    }
}
