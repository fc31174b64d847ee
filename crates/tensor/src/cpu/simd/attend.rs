//! Kernels of attention: scores of paged keys, softmax, weighted sums.

#![allow(clippy::needless_range_loop, reason = "several arrays are walked by one index")]

use std::ops::Range;

use super::{
    lanes::{LANES, multiversion, sum_lanes},
    math::exp,
    tile::{accumulate, blocks_of, lines, lines_mut, products},
};
use crate::PAGE_TOKENS;

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
    /// `out[h, i] = scale * (q[h] . key[i])`: `q` `[heads, width]`, `out` `[heads, count]`.
    pub(crate) fn scores(q: &[f32], keys: Keys<'_>, count: usize, width: usize, scale: f32, out: &mut [f32]) {
        let heads = q.len() / width;
        for start in (0..count).step_by(TOKENS) {
            let tokens = start..(start + TOKENS).min(count);
            // Larger tiles do not stay in registers.
            for h in (0..heads / 4 * 4).step_by(4) {
                scores_heads::<4, 2>(q, h, keys, tokens.clone(), count, width, scale, out);
            }
            for h in heads / 4 * 4..heads {
                scores_heads::<1, 4>(q, h, keys, tokens.clone(), count, width, scale, out);
            }
        }
    }
}

/// Tokens whose vectors stay in the first-level cache while all heads pass.
const TOKENS: usize = 16;

#[inline(always)]
fn scores_heads<const H: usize, const T: usize>(
    q: &[f32],
    h: usize,
    keys: Keys<'_>,
    tokens: Range<usize>,
    count: usize,
    width: usize,
    scale: f32,
    out: &mut [f32],
) {
    let whole = tokens.start + tokens.len() / T * T;
    for i in (tokens.start..whole).step_by(T) {
        scores_tile::<H, T>(q, h, keys, i, count, width, scale, out);
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

/// The vectors of `N` tokens from the `i`-th on.
#[inline(always)]
fn keys_of<'a, const N: usize>(keys: &Keys<'a>, i: usize, width: usize) -> [&'a [f32]; N] {
    let mut all = [&[][..]; N];
    for (t, key) in all.iter_mut().enumerate() {
        *key = keys.key(i + t, width);
    }
    all
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
            let mut h = heads / 4 * 4;
            if heads - h >= 2 {
                weighted_heads::<2>(&p[h * count..], keys, tokens.clone(), count, width, &mut out[h * width..]);
                h += 2;
            }
            if h < heads {
                weighted_heads::<1>(&p[h * count..], keys, tokens, count, width, &mut out[h * width..]);
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
