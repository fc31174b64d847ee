//! Register tiles: some vectors against some others, all sums in registers.

#![allow(clippy::needless_range_loop, reason = "several arrays are walked by one index")]

use super::lanes::{LANES, Lanes, fma, fma_scalar, padded, tree};

/// The first `R` rows of `[rows, width]`, each as whole blocks and the rest.
#[inline(always)]
pub(super) fn lines_mut<const R: usize>(out: &mut [f32], width: usize) -> [(&mut [Lanes], &mut [f32]); R] {
    let mut rest = out;
    let mut lines: [(&mut [Lanes], &mut [f32]); R] = std::array::from_fn(|_| Default::default());
    for line in &mut lines {
        let (first, others) = rest.split_at_mut(width);
        rest = others;
        let (blocks, tail) = first.as_chunks_mut::<LANES>();
        *line = (&mut blocks[..width / LANES], tail);
    }
    lines
}

/// `sums += x[0] w[0] + x[1] w[1] + ...`, in this order.
#[inline(always)]
pub(super) fn accumulate<const N: usize>(sums: &mut Lanes, x: &[f32; N], w: &[Lanes; N]) {
    let mut acc = *sums;
    for i in 0..N {
        fma_scalar(&mut acc, x[i], &w[i]);
    }
    *sums = acc;
}

/// All products of some vectors with some others, each in the order of
/// [`dot_lanes`](super::lanes::dot_lanes).
#[inline(always)]
pub(super) fn products<const H: usize, const T: usize>(
    q: &[&[f32]; H],
    k: &[&[f32]; T],
    width: usize,
) -> [[f32; T]; H] {
    let whole = width / LANES;
    let mut acc = lane_products(q, k, whole);
    if whole * LANES < width {
        for j in 0..H {
            for t in 0..T {
                fma(&mut acc[j][t], &padded(&q[j][whole * LANES..]), &padded(&k[t][whole * LANES..]));
            }
        }
    }
    sums(acc)
}

/// The whole blocks of [`products`]. By itself, with its sums as a value: so they stay in registers.
#[inline(always)]
fn lane_products<const H: usize, const T: usize>(q: &[&[f32]; H], k: &[&[f32]; T], blocks: usize) -> [[Lanes; T]; H] {
    let (q, k) = (blocks_of(q, blocks), blocks_of(k, blocks));
    let mut acc = [[[0.0; LANES]; T]; H];
    for c in 0..blocks {
        for j in 0..H {
            for t in 0..T {
                fma(&mut acc[j][t], &q[j][c], &k[t][c]);
            }
        }
    }
    acc
}

/// Each slice as its first `blocks` blocks.
#[inline(always)]
pub(super) fn blocks_of<'a, const N: usize>(slices: &[&'a [f32]; N], blocks: usize) -> [&'a [Lanes]; N] {
    let mut all = [&[][..]; N];
    for i in 0..N {
        all[i] = &slices[i].as_chunks::<LANES>().0[..blocks];
    }
    all
}

/// The first `N` rows of `[rows, width]`.
#[inline(always)]
pub(super) fn lines<const N: usize>(x: &[f32], width: usize) -> [&[f32]; N] {
    let mut all = [&[][..]; N];
    for (i, line) in all.iter_mut().enumerate() {
        *line = &x[i * width..][..width];
    }
    all
}

/// The sums of the lanes.
#[inline(always)]
pub(super) fn sums<const H: usize, const T: usize>(acc: [[Lanes; T]; H]) -> [[f32; T]; H] {
    let mut sums = [[0.0; T]; H];
    for j in 0..H {
        for t in 0..T {
            sums[j][t] = tree(&acc[j][t]);
        }
    }
    sums
}
