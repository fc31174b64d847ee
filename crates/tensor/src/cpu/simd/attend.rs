//! Kernels of attention: products with stored weights, scores of paged keys, weighted sums, softmax, norms of a row.

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
    for d in (0..whole).step_by(4) {
        transposed_rows::<S, 4>(bytes, d, width, x, stride, out);
    }
    for d in whole..inner {
        transposed_rows::<S, 1>(bytes, d, width, x, stride, out);
    }
}

/// `N` inner indices at a time: the matrix streams through once, and the sums are loaded once for `N` products.
#[inline(always)]
fn transposed_rows<S: Stored, const N: usize>(
    bytes: &[u8],
    d: usize,
    width: usize,
    x: &[f32],
    stride: usize,
    out: &mut [f32],
) {
    let line = width * S::BYTES;
    let weights: [&[u8]; N] = std::array::from_fn(|i| &bytes[(d + i) * line..][..line]);
    for (r, out) in out.chunks_exact_mut(width).enumerate() {
        let x: [f32; N] = std::array::from_fn(|i| x[r * stride + d + i]);
        let (out, rest) = out.as_chunks_mut::<LANES>();
        for (c, out) in out.iter_mut().enumerate() {
            let mut acc = *out;
            for i in 0..N {
                let w = S::lanes(&weights[i][c * LANES * S::BYTES..][..LANES * S::BYTES]);
                fma_scalar(&mut acc, x[i], &w);
            }
            *out = acc;
        }
        if !rest.is_empty() {
            let mut acc = padded(rest);
            for i in 0..N {
                let w = S::lanes(&weights[i][out.len() * LANES * S::BYTES..]);
                fma_scalar(&mut acc, x[i], &w);
            }
            rest.copy_from_slice(&acc[..rest.len()]);
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
    let w: [&[u8]; O] = std::array::from_fn(|i| &bytes[(o + i) * line..][..line]);
    let x: [&[f32]; R] = std::array::from_fn(|i| &x[(r + i) * width..][..width]);
    let blocks: [&[Lanes]; R] = x.map(|x| &x.as_chunks::<LANES>().0[..whole]);
    let mut acc = [[[0.0; LANES]; R]; O];
    for c in 0..whole {
        for i in 0..O {
            let w = S::lanes(&w[i][c * LANES * S::BYTES..][..LANES * S::BYTES]);
            for j in 0..R {
                fma(&mut acc[i][j], &w, &blocks[j][c]);
            }
        }
    }
    if whole * LANES < width {
        for i in 0..O {
            let w = S::lanes(&w[i][whole * LANES * S::BYTES..]);
            for j in 0..R {
                fma(&mut acc[i][j], &w, &padded(&x[j][whole * LANES..]));
            }
        }
    }
    for i in 0..O {
        for j in 0..R {
            out[(r + j) * stride + o + i] = tree(&acc[i][j]);
        }
    }
}

multiversion! {
    /// `out[h, i] = scale * (q[h] . key[i])`: `q` `[heads, width]`, `out` `[heads, count]`.
    pub(crate) fn scores(q: &[f32], keys: Keys<'_>, count: usize, width: usize, scale: f32, out: &mut [f32]) {
        let heads = q.len() / width;
        let mut h = 0;
        while h < heads {
            if heads - h >= 4 {
                scores_heads::<4>(q, h, keys, count, width, scale, out);
                h += 4;
            } else {
                scores_heads::<1>(q, h, keys, count, width, scale, out);
                h += 1;
            }
        }
    }
}

#[inline(always)]
fn scores_heads<const H: usize>(
    q: &[f32],
    h: usize,
    keys: Keys<'_>,
    count: usize,
    width: usize,
    scale: f32,
    out: &mut [f32],
) {
    let whole = count / 4 * 4;
    for i in (0..whole).step_by(4) {
        scores_tile::<H, 4>(q, h, keys, i, count, width, scale, out);
    }
    for i in whole..count {
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
    let q: [&[f32]; H] = std::array::from_fn(|j| &q[(h + j) * width..][..width]);
    let k: [&[f32]; T] = std::array::from_fn(|j| keys.key(i + j, width));
    let products = products(q, k, width);
    for (j, products) in products.iter().enumerate() {
        for (t, p) in products.iter().enumerate() {
            out[(h + j) * count + i + t] = p * scale;
        }
    }
}

/// All products of some vectors with some others, each in the order of [`dot_lanes`].
#[inline(always)]
fn products<const H: usize, const T: usize>(q: [&[f32]; H], k: [&[f32]; T], width: usize) -> [[f32; T]; H] {
    let whole = width / LANES;
    let qs = q.map(|q| &q.as_chunks::<LANES>().0[..whole]);
    let ks = k.map(|k| &k.as_chunks::<LANES>().0[..whole]);
    let mut acc = [[[0.0; LANES]; T]; H];
    for c in 0..whole {
        for j in 0..H {
            for t in 0..T {
                fma(&mut acc[j][t], &qs[j][c], &ks[t][c]);
            }
        }
    }
    if whole * LANES < width {
        for j in 0..H {
            for t in 0..T {
                fma(&mut acc[j][t], &padded(&q[j][whole * LANES..]), &padded(&k[t][whole * LANES..]));
            }
        }
    }
    std::array::from_fn(|j| std::array::from_fn(|t| tree(&acc[j][t])))
}

multiversion! {
    /// `out[h] += sum_i p[h, i] key[i]`: `p` `[heads, count]`, `out` `[heads, width]`; `i` ascending.
    pub(crate) fn weighted_sum(p: &[f32], keys: Keys<'_>, count: usize, width: usize, out: &mut [f32]) {
        let heads = out.len() / width;
        let whole = count / 4 * 4;
        let mut h = 0;
        while h < heads {
            let step = if heads - h >= 4 { 4 } else { 1 };
            let out = &mut out[h * width..(h + step) * width];
            let p = &p[h * count..(h + step) * count];
            for i in (0..whole).step_by(4) {
                if step == 4 {
                    weighted_tile::<4, 4>(p, keys, i, count, width, out);
                } else {
                    weighted_tile::<1, 4>(p, keys, i, count, width, out);
                }
            }
            for i in whole..count {
                if step == 4 {
                    weighted_tile::<4, 1>(p, keys, i, count, width, out);
                } else {
                    weighted_tile::<1, 1>(p, keys, i, count, width, out);
                }
            }
            h += step;
        }
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
    let whole = width / LANES;
    let k: [&[f32]; T] = std::array::from_fn(|t| keys.key(i + t, width));
    let ks = k.map(|k| &k.as_chunks::<LANES>().0[..whole]);
    let p: [[f32; T]; H] = std::array::from_fn(|h| std::array::from_fn(|t| p[h * count + i + t]));
    for c in 0..whole {
        let k = ks.map(|k| k[c]);
        for h in 0..H {
            let out = out[h * width + c * LANES..].first_chunk_mut::<LANES>().expect("the block lies in the row");
            let mut acc = *out;
            for t in 0..T {
                fma_scalar(&mut acc, p[h][t], &k[t]);
            }
            *out = acc;
        }
    }
    for c in whole * LANES..width {
        for h in 0..H {
            for t in 0..T {
                out[h * width + c] = p[h][t].mul_add(k[t][c], out[h * width + c]);
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
    let k: [&[f32]; T] = std::array::from_fn(|t| &keys[(p + t) * width..][..width]);
    let mut score = [0.0f32; T];
    let mut add = |w: f32, products: &[f32; T]| {
        for (score, product) in score.iter_mut().zip(products) {
            let product = product * scale;
            let rectified = if product < 0.0 { 0.0 } else { product };
            *score = w.mul_add(rectified, *score);
        }
    };
    let whole = w.len() / 4 * 4;
    for h in (0..whole).step_by(4) {
        let q: [&[f32]; 4] = std::array::from_fn(|j| &q[(h + j) * width..][..width]);
        for (j, products) in products(q, k, width).iter().enumerate() {
            add(w[h + j], products);
        }
    }
    for h in whole..w.len() {
        add(w[h], &products([&q[h * width..][..width]], k, width)[0]);
    }
    for (out, score) in out[p..].iter_mut().zip(score) {
        *out = score + 0.0;
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
