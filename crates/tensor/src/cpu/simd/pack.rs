//! The order in which a product wants its activations, so that stored weights need no repacking.
//!
//! Lane `w` of a register of weights holds, as they lie in memory,
//! - F32: column `16 b + w` of block `b`;
//! - BF16: columns `32 b + 2 w` (low half of word `w`) and then `32 b + 2 w + 1` (high half);
//! - INT4: columns `128 g + 8 w + p` for `p = 0..8` (nibble `p` of word `w`) of group `g`.
//!
//! A row of activations is brought into the same order once, padded with zeros to whole blocks.

use super::{Kernel, Simd};
use crate::cpu::types::{CpuMatrix, GROUP, LANES};

/// The order of a packed row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// For F32 weights: as is.
    Plain,
    /// For BF16 weights: even columns of a block, then its odd columns.
    Pairs,
    /// For INT4 weights: transposed from `[16 words, 8 nibbles]` to `[8, 16]`.
    Nibbles,
}

impl Order {
    /// The order that a matrix needs.
    pub(crate) fn of(matrix: &CpuMatrix) -> Self {
        match matrix {
            CpuMatrix::F32 { .. } => Self::Plain,
            CpuMatrix::Bf16 { .. } => Self::Pairs,
            CpuMatrix::Int4 { .. } => Self::Nibbles,
        }
    }

    /// Values of a block.
    pub(crate) fn block(self) -> usize {
        match self {
            Self::Plain => LANES,
            Self::Pairs => 2 * LANES,
            Self::Nibbles => GROUP,
        }
    }

    /// Length of a packed row of `width` columns.
    pub(crate) fn padded(self, width: usize) -> usize {
        width.next_multiple_of(self.block())
    }
}

/// Packs one row.
#[derive(Debug)]
pub(crate) struct Pack<'a> {
    /// The wanted order.
    pub(crate) order: Order,
    /// `[width]`.
    pub(crate) row: &'a [f32],
    /// `[order.padded(width)]`.
    pub(crate) packed: &'a mut [f32],
}

impl Kernel for Pack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        match self.order {
            Order::Plain => {
                let (head, tail) = self.packed.split_at_mut(self.row.len());
                head.copy_from_slice(self.row);
                tail.fill(0.0);
            }
            Order::Pairs => blocks::<{ 2 * LANES }>(self.row, self.packed, |from, to| {
                for w in 0..LANES {
                    to[w] = from[2 * w];
                    to[LANES + w] = from[2 * w + 1];
                }
            }),
            Order::Nibbles => blocks::<GROUP>(self.row, self.packed, |from, to| {
                for p in 0..8 {
                    for w in 0..LANES {
                        to[LANES * p + w] = from[8 * w + p];
                    }
                }
            }),
        }
    }
}

#[inline(always)]
fn blocks<const N: usize>(row: &[f32], packed: &mut [f32], pack: impl Fn(&[f32; N], &mut [f32; N])) {
    let (whole, rest) = row.as_chunks::<N>();
    let (targets, _) = packed.as_chunks_mut::<N>();
    for (from, to) in whole.iter().zip(&mut *targets) {
        pack(from, to);
    }
    if !rest.is_empty() {
        let mut last = [0.0; N];
        last[..rest.len()].copy_from_slice(rest);
        pack(&last, &mut targets[whole.len()]);
    }
}
