//! Kernels of the indexer: scores of pools, keys of pools.

#![allow(clippy::needless_range_loop, reason = "several arrays are walked by one index")]

use super::{
    lanes::{LANES, multiversion, padded},
    math::exp,
    tile::{lines, products},
};

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
