//! Products with dense weights as stored, rows in plain order: the small matrices inside a fused stage.

#![allow(clippy::needless_range_loop, reason = "several arrays are walked by one index")]

use super::{
    lanes::{Bf16, F32, LANES, Lanes, Stored, fma, multiversion, padded},
    tile::{accumulate, blocks_of, lines, lines_mut, sums},
};

/// A weight matrix `[out, columns]` as stored.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Weights<'a> {
    /// Little-endian BF16.
    Bf16(&'a [u8]),
    /// Little-endian F32.
    F32(&'a [u8]),
}

impl Weights<'_> {
    /// Rows `start .. start + rows` of a matrix with `columns` columns.
    pub(crate) fn rows(&self, start: usize, rows: usize, columns: usize) -> Self {
        match self {
            Self::Bf16(bytes) => Self::Bf16(&bytes[2 * start * columns..2 * (start + rows) * columns]),
            Self::F32(bytes) => Self::F32(&bytes[4 * start * columns..4 * (start + rows) * columns]),
        }
    }
}

multiversion! {
    /// `out[r] += W^T x[r]`: `W` is `[inner, width]`, `x` `[rows, inner]` at a stride, `out` `[rows, width]`. Sums go up by
    /// inner index, from what `out` holds.
    pub(crate) fn transposed(
        weights: Weights<'_>,
        inner: usize,
        width: usize,
        x: &[f32],
        stride: usize,
        out: &mut [f32],
    ) {
        match weights {
            Weights::Bf16(bytes) => transposed_stored::<Bf16>(bytes, inner, width, x, stride, out),
            Weights::F32(bytes) => transposed_stored::<F32>(bytes, inner, width, x, stride, out),
        }
    }
}

#[inline(always)]
fn transposed_stored<S: Stored>(bytes: &[u8], inner: usize, width: usize, x: &[f32], stride: usize, out: &mut [f32]) {
    let whole = inner / 4 * 4;
    for (block, out) in out.chunks_mut(4 * width).enumerate() {
        let x = &x[4 * block * stride..];
        for d in (0..whole).step_by(4) {
            if out.len() == 4 * width {
                transposed_tile::<S, 4, 4>(bytes, d, width, x, stride, out);
            } else {
                for (r, out) in out.chunks_exact_mut(width).enumerate() {
                    transposed_tile::<S, 1, 4>(bytes, d, width, &x[r * stride..], stride, out);
                }
            }
        }
        for d in whole..inner {
            for (r, out) in out.chunks_exact_mut(width).enumerate() {
                transposed_tile::<S, 1, 1>(bytes, d, width, &x[r * stride..], stride, out);
            }
        }
    }
}

/// `R` rows and `N` inner indices at a time: a weight is widened once for `R` rows, a sum is loaded once for `N` products.
#[inline(always)]
fn transposed_tile<S: Stored, const R: usize, const N: usize>(
    bytes: &[u8],
    d: usize,
    width: usize,
    x: &[f32],
    stride: usize,
    out: &mut [f32],
) {
    let line = width * S::BYTES;
    let size = LANES * S::BYTES;
    let whole = width / LANES * LANES;
    let mut weights = [&[][..]; N];
    let mut factors = [[0.0; N]; R];
    for i in 0..N {
        weights[i] = &bytes[(d + i) * line..][..line];
        for r in 0..R {
            factors[r][i] = x[r * stride + d + i];
        }
    }
    let out = lines_mut::<R>(out, width);
    for c in 0..width / LANES {
        let mut w = [[0.0; LANES]; N];
        for i in 0..N {
            w[i] = S::lanes(&weights[i][c * size..][..size]);
        }
        for r in 0..R {
            accumulate(&mut out[r].0[c], &factors[r], &w);
        }
    }
    if whole < width {
        let mut w = [[0.0; LANES]; N];
        for i in 0..N {
            w[i] = S::partial(&weights[i][whole * S::BYTES..]);
        }
        for r in 0..R {
            let rest = &mut *out[r].1;
            let mut sums = padded(rest);
            accumulate(&mut sums, &factors[r], &w);
            rest.copy_from_slice(&sums[..rest.len()]);
        }
    }
}

multiversion! {
    /// `out[r, o] = W[o] . x[r]`: `W` `[outs, width]`, `x` `[rows, width]`; `out` has `stride` columns a row.
    pub(crate) fn dots(weights: Weights<'_>, outs: usize, width: usize, x: &[f32], out: &mut [f32], stride: usize) {
        match weights {
            Weights::Bf16(bytes) => dots_stored::<Bf16>(bytes, outs, width, x, out, stride),
            Weights::F32(bytes) => dots_stored::<F32>(bytes, outs, width, x, out, stride),
        }
    }
}

#[inline(always)]
fn dots_stored<S: Stored>(bytes: &[u8], outs: usize, width: usize, x: &[f32], out: &mut [f32], stride: usize) {
    let rows = x.len() / width;
    // Tiles of the sizes that stay in registers: a weight serves several rows, or a single row several weights.
    let fours = rows / 4 * 4;
    for r in (0..fours).step_by(4) {
        for o in (0..outs / 2 * 2).step_by(2) {
            dots_tile::<S, 2, 4>(bytes, o, width, x, r, out, stride);
        }
        if !outs.is_multiple_of(2) {
            dots_tile::<S, 1, 4>(bytes, outs - 1, width, x, r, out, stride);
        }
    }
    for r in fours..rows {
        for o in (0..outs / 4 * 4).step_by(4) {
            dots_tile::<S, 4, 1>(bytes, o, width, x, r, out, stride);
        }
        for o in outs / 4 * 4..outs {
            dots_tile::<S, 1, 1>(bytes, o, width, x, r, out, stride);
        }
    }
}

#[inline(always)]
fn dots_tile<S: Stored, const O: usize, const R: usize>(
    bytes: &[u8],
    o: usize,
    width: usize,
    x: &[f32],
    r: usize,
    out: &mut [f32],
    stride: usize,
) {
    let line = width * S::BYTES;
    let whole = width / LANES;
    let mut w = [&[][..]; O];
    for i in 0..O {
        w[i] = &bytes[(o + i) * line..][..line];
    }
    let x = lines::<R>(&x[r * width..], width);
    let mut acc = stored_products::<S, O, R>(&w, &x, whole);
    if whole * LANES < width {
        for i in 0..O {
            let w = S::partial(&w[i][whole * LANES * S::BYTES..]);
            for j in 0..R {
                fma(&mut acc[i][j], &w, &padded(&x[j][whole * LANES..]));
            }
        }
    }
    let sums = sums(acc);
    for i in 0..O {
        for j in 0..R {
            out[(r + j) * stride + o + i] = sums[i][j];
        }
    }
}

/// The whole blocks of [`dots_tile`], as [`lane_products`].
#[inline(always)]
fn stored_products<S: Stored, const O: usize, const R: usize>(
    w: &[&[u8]; O],
    x: &[&[f32]; R],
    blocks: usize,
) -> [[Lanes; R]; O] {
    let x = blocks_of(x, blocks);
    let mut acc = [[[0.0; LANES]; R]; O];
    for c in 0..blocks {
        for i in 0..O {
            let w = S::lanes(&w[i][c * LANES * S::BYTES..][..LANES * S::BYTES]);
            for j in 0..R {
                fma(&mut acc[i][j], &w, &x[j][c]);
            }
        }
    }
    acc
}
