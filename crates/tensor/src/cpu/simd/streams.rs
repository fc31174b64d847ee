//! Kernels of hyper-connections: one row of residual streams.

#![allow(clippy::needless_range_loop, reason = "several arrays are walked by one index")]

use super::lanes::{LANES, Lanes, dot_lanes, fma_scalar, multiversion, padded};
use super::math::{exp, sigmoid};

/// Most residual streams.
pub(crate) const MAX_STREAMS: usize = 8;

multiversion! {
    /// `s[j] = post[j] y + sum_i comb[i, j] s[i]`, `i` ascending. `s` is `[n, width]`, `comb` `[old, new]`.
    pub(crate) fn merge(post: &[f32], comb: &[f32], y: &[f32], s: &mut [f32]) {
        match post.len() {
            1 => merge_streams::<1>(post, comb, y, s),
            2 => merge_streams::<2>(post, comb, y, s),
            4 => merge_streams::<4>(post, comb, y, s),
            _ => merge_streams::<MAX_STREAMS>(post, comb, y, s),
        }
    }
}

/// `M` is the number of streams or, where that is not known, at least as many.
#[inline(always)]
fn merge_streams<const M: usize>(post: &[f32], comb: &[f32], y: &[f32], s: &mut [f32]) {
    let n = post.len().min(M);
    let width = y.len();
    let (blocks, rest) = y.as_chunks::<LANES>();
    // Whole blocks have a length that the compiler knows: they are copied in registers, without a call.
    for (c, y) in blocks.iter().enumerate() {
        let at = c * LANES;
        let mut old = [[0.0; LANES]; M];
        for i in 0..n {
            old[i].copy_from_slice(&s[i * width + at..][..LANES]);
        }
        for j in 0..n {
            let new = merged(post[j], y, &comb[j..], n, &old);
            s[j * width + at..][..LANES].copy_from_slice(&new);
        }
    }
    if !rest.is_empty() {
        let (at, len) = (blocks.len() * LANES, rest.len());
        let y = padded(rest);
        let mut old = [[0.0; LANES]; M];
        for i in 0..n {
            old[i] = padded(&s[i * width + at..][..len]);
        }
        for j in 0..n {
            let new = merged(post[j], &y, &comb[j..], n, &old);
            s[j * width + at..][..len].copy_from_slice(&new[..len]);
        }
    }
}

/// `post y + sum_i comb[n i] old[i]` for the `n` streams, `i` ascending.
#[inline(always)]
fn merged<const M: usize>(post: f32, y: &Lanes, comb: &[f32], n: usize, old: &[Lanes; M]) -> Lanes {
    let mut new = [0.0; LANES];
    for l in 0..LANES {
        new[l] = post * y[l];
    }
    for i in 0..n {
        fma_scalar(&mut new, comb[i * n], &old[i]);
    }
    new
}

/// What turns a row's mixing products into its coefficients; see module `mhc`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mixing<'a> {
    /// `[2 n + n^2]`.
    pub(crate) base: &'a [f32],
    /// `[3]`.
    pub(crate) scale: &'a [f32],
    /// Added to weights and to the sums that are divided by.
    pub(crate) eps: f32,
    /// Column normalisations.
    pub(crate) iters: usize,
}

multiversion! {
    /// The coefficients of `n` streams from the normalised mixing products `m` `[2 n + n^2]`: `pre` and `post` `[n]`, `comb`
    /// `[n, n]`.
    pub(crate) fn coefficients(mixing: Mixing<'_>, m: &[f32], pre: &mut [f32], post: &mut [f32], comb: &mut [f32]) {
        let n = post.len();
        let Mixing { base, scale, eps, iters } = mixing;
        for i in 0..n {
            pre[i] = sigmoid(m[i].mul_add(scale[0], base[i])) + eps;
            post[i] = 2.0 * sigmoid(m[n + i].mul_add(scale[1], base[n + i]));
        }
        for ((c, m), base) in comb.iter_mut().zip(&m[2 * n..]).zip(&base[2 * n..]) {
            *c = m.mul_add(scale[2], *base);
        }
        for row in comb.chunks_exact_mut(n) {
            let top = row.iter().copied().fold(f32::NEG_INFINITY, |m, v| if v > m { v } else { m });
            for c in row {
                *c -= top;
            }
        }
        for c in &mut *comb {
            *c = exp(*c);
        }
        for row in comb.chunks_exact_mut(n) {
            let sum: f32 = row.iter().sum();
            for c in row {
                *c = *c / sum + eps;
            }
        }
        if n == 4 && let Ok(square) = comb.as_chunks_mut::<4>().0.try_into() {
            sinkhorn_of_four(iters, eps, square);
        } else {
            sinkhorn(n, iters, eps, comb);
        }
    }
}

/// [`sinkhorn`] of four streams, all columns at a time.
#[inline(always)]
fn sinkhorn_of_four(iters: usize, eps: f32, comb: &mut [[f32; 4]; 4]) {
    const N: usize = 4;
    for k in 0..iters {
        if k > 0 {
            for row in &mut *comb {
                let mut sum = row[0];
                for j in 1..N {
                    sum += row[j];
                }
                sum += eps;
                for j in 0..N {
                    row[j] /= sum;
                }
            }
        }
        let mut sums = comb[0];
        for i in 1..N {
            for j in 0..N {
                sums[j] += comb[i][j];
            }
        }
        for sum in &mut sums {
            *sum += eps;
        }
        for row in &mut *comb {
            for j in 0..N {
                row[j] /= sums[j];
            }
        }
    }
}

/// `iters` column normalisations with row normalisations between them.
#[inline(always)]
pub(crate) fn sinkhorn(n: usize, iters: usize, eps: f32, comb: &mut [f32]) {
    for k in 0..iters {
        if k > 0 {
            for row in comb.chunks_exact_mut(n) {
                let sum = row.iter().sum::<f32>() + eps;
                for c in row {
                    *c /= sum;
                }
            }
        }
        for j in 0..n {
            let sum = (0..n).map(|i| comb[i * n + j]).sum::<f32>() + eps;
            for i in 0..n {
                comb[i * n + j] /= sum;
            }
        }
    }
}

multiversion! {
    /// `out = sum_i weight[i] s[i]`, `i` ascending.
    pub(crate) fn collapse(weight: &[f32], s: &[f32], out: &mut [f32]) {
        let width = out.len();
        for (o, x) in out.iter_mut().zip(s) {
            *o = weight[0] * x;
        }
        for i in 1..weight.len() {
            for (o, x) in out.iter_mut().zip(&s[i * width..][..width]) {
                *o = weight[i].mul_add(*x, *o);
            }
        }
    }
}

multiversion! {
    /// `sum x^2`.
    pub(crate) fn sum_of_squares(x: &[f32]) -> f32 {
        dot_lanes(x, x)
    }
}

#[cfg(test)]
mod tests {
    use super::{sinkhorn, sinkhorn_of_four};

    #[test]
    fn four_streams_give_the_bits_of_the_general_form() {
        for seed in 1..50_u16 {
            let value = |i: u16| f32::from((i * 37 + seed * 11) % 101) / f32::from(seed) + 1e-6;
            let mut general: Vec<f32> = (0..16).map(value).collect();
            let mut four: [[f32; 4]; 4] = std::array::from_fn(|i| std::array::from_fn(|j| general[4 * i + j]));
            for iters in [0, 1, 2, 20] {
                sinkhorn(4, iters, 1e-6, &mut general);
                sinkhorn_of_four(iters, 1e-6, &mut four);
                let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(four.as_flattened()), bits(&general), "{seed} {iters}");
            }
        }
    }
}
