//! Kernels of the chunked delta rule.

use super::lanes::{LANES, Lanes, fma, multiversion, padded, tree};
use super::math::exp;

multiversion! {
    /// Running sums down the rows of `[rows, width]`, in place.
    pub(crate) fn running_sum(width: usize, x: &mut [f32]) {
        for row in 1..x.len() / width {
            let (above, below) = x.split_at_mut(row * width);
            for (x, above) in below[..width].iter_mut().zip(&above[(row - 1) * width..]) {
                *x += above;
            }
        }
    }
}

multiversion! {
    /// `out = x exp(from - to)`, where `from <= to`.
    pub(crate) fn decayed(x: &[f32], from: &[f32], to: &[f32], out: &mut [f32]) {
        for (((out, x), from), to) in out.iter_mut().zip(x).zip(from).zip(to) {
            *out = x * exp(from - to);
        }
    }
}

multiversion! {
    /// `out = exp(x)`.
    pub(crate) fn exps(x: &[f32], out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = exp(*x);
        }
    }
}

multiversion! {
    /// `x = factor (v - x)`.
    pub(crate) fn subtract_scaled(factor: f32, v: &[f32], x: &mut [f32]) {
        for (x, v) in x.iter_mut().zip(v) {
            *x = factor * (v - *x);
        }
    }
}

multiversion! {
    /// `[sum a c exp(from - to), sum b c exp(from - to)]`, where `from <= to`.
    pub(crate) fn decayed_products(a: &[f32], b: &[f32], c: &[f32], from: &[f32], to: &[f32]) -> [f32; 2] {
        let (mut first, mut second) = ([0.0; LANES], [0.0; LANES]);
        let whole = a.len() / LANES * LANES;
        for at in (0..whole).step_by(LANES) {
            let c = decayed_lanes(&c[at..at + LANES], &from[at..at + LANES], &to[at..at + LANES]);
            fma(&mut first, &padded(&a[at..at + LANES]), &c);
            fma(&mut second, &padded(&b[at..at + LANES]), &c);
        }
        if whole < a.len() {
            let c = decayed_lanes(&c[whole..], &from[whole..], &to[whole..]);
            fma(&mut first, &padded(&a[whole..]), &c);
            fma(&mut second, &padded(&b[whole..]), &c);
        }
        [tree(&first), tree(&second)]
    }
}

#[inline(always)]
fn decayed_lanes(c: &[f32], from: &[f32], to: &[f32]) -> Lanes {
    let (mut c, from, to) = (padded(c), padded(from), padded(to));
    for l in 0..LANES {
        c[l] *= exp(from[l] - to[l]);
    }
    c
}
