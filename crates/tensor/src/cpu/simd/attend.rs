//! Kernels of attention: products with stored weights, scores of paged keys, weighted sums, softmax, norms of a row.

#![allow(clippy::needless_range_loop, reason = "several arrays are walked by one index")]

use std::ops::Range;

use super::lanes::{
    Bf16, F32, LANES, Lanes, Stored, exp, fma, fma_scalar, inverse_rms, multiversion, padded, sum_lanes, tree,
};
use crate::PAGE_TOKENS;

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

/// Vectors of equal width, one a token.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Keys<'a> {
    /// `[tokens, width]`.
    Dense(&'a [f32]),
    /// Chosen tokens of a sequence whose vectors lie in pages.
    Paged {
        /// `[pages, PAGE_TOKENS, width]`.
        arena: &'a [f32],
        /// The sequence's page table.
        pages: &'a [u32],
        /// The tokens.
        tokens: &'a [u32],
    },
}

impl<'a> Keys<'a> {
    #[inline(always)]
    fn key(&self, i: usize, width: usize) -> &'a [f32] {
        match self {
            Keys::Dense(all) => &all[i * width..][..width],
            Keys::Paged { arena, pages, tokens } => {
                let token = tokens[i] as usize;
                let page = pages[token / PAGE_TOKENS] as usize;
                &arena[(page * PAGE_TOKENS + token % PAGE_TOKENS) * width..][..width]
            }
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

/// The first `R` rows of `[rows, width]`, each as whole blocks and the rest.
#[inline(always)]
fn lines_mut<const R: usize>(out: &mut [f32], width: usize) -> [(&mut [Lanes], &mut [f32]); R] {
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
fn accumulate<const N: usize>(sums: &mut Lanes, x: &[f32; N], w: &[Lanes; N]) {
    let mut acc = *sums;
    for i in 0..N {
        fma_scalar(&mut acc, x[i], &w[i]);
    }
    *sums = acc;
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
    let mut o = 0;
    while o < outs {
        let four = outs - o >= 4;
        let mut r = 0;
        while r < rows {
            match (four, rows - r >= 4) {
                (true, true) => dots_tile::<S, 4, 4>(bytes, o, width, x, r, out, stride),
                (true, false) => dots_tile::<S, 4, 1>(bytes, o, width, x, r, out, stride),
                (false, true) => dots_tile::<S, 1, 4>(bytes, o, width, x, r, out, stride),
                (false, false) => dots_tile::<S, 1, 1>(bytes, o, width, x, r, out, stride),
            }
            r += if rows - r >= 4 { 4 } else { 1 };
        }
        o += if four { 4 } else { 1 };
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

multiversion! {
    /// `out[h, i] = scale * (q[h] . key[i])`: `q` `[heads, width]`, `out` `[heads, count]`.
    pub(crate) fn scores(q: &[f32], keys: Keys<'_>, count: usize, width: usize, scale: f32, out: &mut [f32]) {
        let heads = q.len() / width;
        for start in (0..count).step_by(TOKENS) {
            let tokens = start..(start + TOKENS).min(count);
            for h in (0..heads / 4 * 4).step_by(4) {
                scores_heads::<4>(q, h, keys, tokens.clone(), count, width, scale, out);
            }
            for h in heads / 4 * 4..heads {
                scores_heads::<1>(q, h, keys, tokens.clone(), count, width, scale, out);
            }
        }
    }
}

/// Tokens whose vectors stay in the first-level cache while all heads pass.
const TOKENS: usize = 16;

#[inline(always)]
fn scores_heads<const H: usize>(
    q: &[f32],
    h: usize,
    keys: Keys<'_>,
    tokens: Range<usize>,
    count: usize,
    width: usize,
    scale: f32,
    out: &mut [f32],
) {
    let whole = tokens.start + tokens.len() / 4 * 4;
    for i in (tokens.start..whole).step_by(4) {
        scores_tile::<H, 4>(q, h, keys, i, count, width, scale, out);
    }
    for i in whole..tokens.end {
        scores_tile::<H, 1>(q, h, keys, i, count, width, scale, out);
    }
}

#[inline(always)]
fn scores_tile<const H: usize, const T: usize>(
    q: &[f32],
    h: usize,
    keys: Keys<'_>,
    i: usize,
    count: usize,
    width: usize,
    scale: f32,
    out: &mut [f32],
) {
    let products = products::<H, T>(&lines(&q[h * width..], width), &keys_of(&keys, i, width), width);
    for j in 0..H {
        let out = &mut out[(h + j) * count + i..][..T];
        for t in 0..T {
            out[t] = products[j][t] * scale;
        }
    }
}

/// All products of some vectors with some others, each in the order of
/// [`dot_lanes`](super::lanes::dot_lanes).
#[inline(always)]
fn products<const H: usize, const T: usize>(q: &[&[f32]; H], k: &[&[f32]; T], width: usize) -> [[f32; T]; H] {
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
fn blocks_of<'a, const N: usize>(slices: &[&'a [f32]; N], blocks: usize) -> [&'a [Lanes]; N] {
    let mut all = [&[][..]; N];
    for i in 0..N {
        all[i] = &slices[i].as_chunks::<LANES>().0[..blocks];
    }
    all
}

/// The first `N` rows of `[rows, width]`.
#[inline(always)]
fn lines<const N: usize>(x: &[f32], width: usize) -> [&[f32]; N] {
    let mut all = [&[][..]; N];
    for (i, line) in all.iter_mut().enumerate() {
        *line = &x[i * width..][..width];
    }
    all
}

/// The vectors of `N` tokens from the `i`-th on.
#[inline(always)]
fn keys_of<'a, const N: usize>(keys: &Keys<'a>, i: usize, width: usize) -> [&'a [f32]; N] {
    let mut all = [&[][..]; N];
    for (t, key) in all.iter_mut().enumerate() {
        *key = keys.key(i + t, width);
    }
    all
}

#[inline(always)]
fn sums<const H: usize, const T: usize>(acc: [[Lanes; T]; H]) -> [[f32; T]; H] {
    let mut sums = [[0.0; T]; H];
    for j in 0..H {
        for t in 0..T {
            sums[j][t] = tree(&acc[j][t]);
        }
    }
    sums
}

multiversion! {
    /// `out[h] += sum_i p[h, i] key[i]`: `p` `[heads, count]`, `out` `[heads, width]`; `i` ascending.
    pub(crate) fn weighted_sum(p: &[f32], keys: Keys<'_>, count: usize, width: usize, out: &mut [f32]) {
        let heads = out.len() / width;
        for start in (0..count).step_by(TOKENS) {
            let tokens = start..(start + TOKENS).min(count);
            for h in (0..heads / 4 * 4).step_by(4) {
                weighted_heads::<4>(&p[h * count..], keys, tokens.clone(), count, width, &mut out[h * width..]);
            }
            for h in heads / 4 * 4..heads {
                weighted_heads::<1>(&p[h * count..], keys, tokens.clone(), count, width, &mut out[h * width..]);
            }
        }
    }
}

#[inline(always)]
fn weighted_heads<const H: usize>(
    p: &[f32],
    keys: Keys<'_>,
    tokens: Range<usize>,
    count: usize,
    width: usize,
    out: &mut [f32],
) {
    let whole = tokens.start + tokens.len() / 4 * 4;
    for i in (tokens.start..whole).step_by(4) {
        weighted_tile::<H, 4>(p, keys, i, count, width, out);
    }
    for i in whole..tokens.end {
        weighted_tile::<H, 1>(p, keys, i, count, width, out);
    }
}

#[inline(always)]
fn weighted_tile<const H: usize, const T: usize>(
    p: &[f32],
    keys: Keys<'_>,
    i: usize,
    count: usize,
    width: usize,
    out: &mut [f32],
) {
    let blocks = width / LANES;
    let k = keys_of::<T>(&keys, i, width);
    let mut factors = [[0.0; T]; H];
    for h in 0..H {
        factors[h].copy_from_slice(&p[h * count + i..][..T]);
    }
    let out = lines_mut::<H>(out, width);
    let whole = blocks_of(&k, blocks);
    for c in 0..blocks {
        let mut w = [[0.0; LANES]; T];
        for t in 0..T {
            w[t] = whole[t][c];
        }
        for h in 0..H {
            accumulate(&mut out[h].0[c], &factors[h], &w);
        }
    }
    for h in 0..H {
        for (c, sum) in out[h].1.iter_mut().enumerate() {
            for t in 0..T {
                *sum = factors[h][t].mul_add(k[t][blocks * LANES + c], *sum);
            }
        }
    }
}

multiversion! {
    /// `x = exp(x - max x)` in place; returns the sum. NaN gives NaN.
    pub(crate) fn exp_shifted(x: &mut [f32]) -> f32 {
        let mut top = [f32::NEG_INFINITY; LANES];
        let (blocks, rest) = x.as_chunks::<LANES>();
        for x in blocks {
            for l in 0..LANES {
                top[l] = if x[l] > top[l] { x[l] } else { top[l] };
            }
        }
        let top = top.iter().chain(rest).fold(f32::NEG_INFINITY, |m, &v| if v > m { v } else { m });
        for v in &mut *x {
            *v = exp(*v - top);
        }
        sum_lanes(x)
    }
}

multiversion! {
    /// Index scores of contiguous pool keys: `out[p] = sum_h w[h] relu(scale * (q[h] . key[p]))`, `h` ascending. `q` is
    /// `[heads, width]`, `keys` `[pools, width]`. A negative zero becomes zero, so that ties are ties.
    pub(crate) fn index_scores(q: &[f32], w: &[f32], keys: &[f32], width: usize, scale: f32, out: &mut [f32]) {
        let whole = out.len() / 4 * 4;
        for p in (0..whole).step_by(4) {
            index_tile::<4>(q, w, keys, p, width, scale, out);
        }
        for p in whole..out.len() {
            index_tile::<1>(q, w, keys, p, width, scale, out);
        }
    }
}

#[inline(always)]
fn index_tile<const T: usize>(q: &[f32], w: &[f32], keys: &[f32], p: usize, width: usize, scale: f32, out: &mut [f32]) {
    let k = lines::<T>(&keys[p * width..], width);
    let mut score = [0.0f32; T];
    let whole = w.len() / 4 * 4;
    for h in (0..whole).step_by(4) {
        let products = products::<4, T>(&lines(&q[h * width..], width), &k, width);
        for j in 0..4 {
            add_rectified(w[h + j], scale, &products[j], &mut score);
        }
    }
    for h in whole..w.len() {
        let products = products::<1, T>(&[&q[h * width..][..width]], &k, width);
        add_rectified(w[h], scale, &products[0], &mut score);
    }
    for (out, score) in out[p..].iter_mut().zip(score) {
        *out = score + 0.0;
    }
}

/// `score += w relu(scale * product)`; NaN passes.
#[inline(always)]
fn add_rectified<const T: usize>(w: f32, scale: f32, products: &[f32; T], score: &mut [f32; T]) {
    for t in 0..T {
        let product = products[t] * scale;
        let rectified = if product < 0.0 { 0.0 } else { product };
        score[t] = w.mul_add(rectified, score[t]);
    }
}

multiversion! {
    /// RMSNorm: `out = x / sqrt(mean(x^2) + eps) * weight`.
    pub(crate) fn rms_norm(eps: f32, weight: &[f32], x: &[f32], out: &mut [f32]) {
        let scale = inverse_rms(x, eps);
        for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
            *out = x * scale * w;
        }
    }
}

multiversion! {
    /// LayerNorm: `out = (x - mean) / sqrt(variance + eps) * weight + bias`.
    pub(crate) fn layer_norm(eps: f32, weight: &[f32], bias: &[f32], x: &[f32], out: &mut [f32]) {
        let mean = sum_lanes(x) / x.len() as f32;
        for (out, x) in out.iter_mut().zip(x) {
            *out = x - mean;
        }
        let scale = inverse_rms(out, eps);
        for ((out, w), b) in out.iter_mut().zip(weight).zip(bias) {
            *out = (*out * scale).mul_add(*w, *b);
        }
    }
}

multiversion! {
    /// Pool key: `out[d] = sum_j softmax_j(gate[j, d] + ape[j, d]) key[j, d]`. `ring` is `[slots, 2, width]` of key and
    /// gate; slot `j` of the pool is ring entry `(first + j) % slots`. `ape` is `[kpool, width]`.
    pub(crate) fn pool_key(ring: &[f32], first: usize, ape: &[f32], out: &mut [f32]) {
        let width = out.len();
        let slots = ring.len() / (2 * width);
        let entry = |j: usize| (first + j) % slots * 2 * width;
        let kpool = ape.len() / width;
        for (c, out) in out.chunks_mut(LANES).enumerate() {
            let at = c * LANES;
            let n = out.len();
            let logit = |j: usize| {
                let mut x = padded(&ring[entry(j) + width + at..][..n]);
                let ape = padded(&ape[j * width + at..][..n]);
                for l in 0..LANES {
                    x[l] += ape[l];
                }
                x
            };
            let mut top = logit(0);
            for j in 1..kpool {
                let x = logit(j);
                for l in 0..LANES {
                    top[l] = if x[l] > top[l] { x[l] } else { top[l] };
                }
            }
            let mut sum = [0.0; LANES];
            let mut acc = [0.0; LANES];
            for j in 0..kpool {
                let x = logit(j);
                let key = padded(&ring[entry(j) + at..][..n]);
                for l in 0..LANES {
                    let e = exp(x[l] - top[l]);
                    sum[l] += e;
                    acc[l] = e.mul_add(key[l], acc[l]);
                }
            }
            for ((out, acc), sum) in out.iter_mut().zip(acc).zip(sum) {
                *out = acc / sum;
            }
        }
    }
}
