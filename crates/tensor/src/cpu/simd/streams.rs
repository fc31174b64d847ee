//! Kernels of hyper-connections: one row of residual streams.

use super::lanes::{LANES, dot_lanes, fma_scalar, multiversion, padded};

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
    for (c, y) in y.chunks(LANES).enumerate() {
        let at = c * LANES;
        let len = y.len();
        let y = padded(y);
        let mut old = [[0.0; LANES]; M];
        for i in 0..n {
            old[i] = padded(&s[i * width + at..][..len]);
        }
        for j in 0..n {
            let mut new = [0.0; LANES];
            for l in 0..LANES {
                new[l] = post[j] * y[l];
            }
            for i in 0..n {
                fma_scalar(&mut new, comb[i * n + j], &old[i]);
            }
            s[j * width + at..][..len].copy_from_slice(&new[..len]);
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
