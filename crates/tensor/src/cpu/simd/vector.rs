//! Elementary operations on f32 slices: sums in the sixteen-lane order, norms, updates.
//!
//! A slice that is not a multiple of sixteen is continued with zeros.

use super::{Isa, Kernel, Simd};
use crate::cpu::types::LANES;

/// Calls `f` with each block of sixteen of `x`, the last one padded with zeros.
#[inline(always)]
pub(crate) fn padded_blocks(x: &[f32], mut f: impl FnMut(&[f32; LANES])) {
    let (whole, rest) = x.as_chunks::<LANES>();
    for block in whole {
        f(block);
    }
    if !rest.is_empty() {
        let mut last = [0.0; LANES];
        last[..rest.len()].copy_from_slice(rest);
        f(&last);
    }
}

/// Replaces each block of sixteen of `x` by what `f` makes of it; what it makes of the padding is dropped.
#[inline(always)]
pub(crate) fn map_blocks<S: Simd>(simd: S, x: &mut [f32], mut f: impl FnMut(S::V) -> S::V) {
    let (whole, rest) = x.as_chunks_mut::<LANES>();
    for block in whole {
        let v = f(simd.load(block));
        simd.store(v, block);
    }
    if !rest.is_empty() {
        let mut last = [0.0; LANES];
        last[..rest.len()].copy_from_slice(rest);
        let v = f(simd.load(&last));
        simd.store(v, &mut last);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// As [`map_blocks`], with a second operand of the same length.
#[inline(always)]
pub(crate) fn zip_blocks<S: Simd>(simd: S, x: &mut [f32], y: &[f32], mut f: impl FnMut(S::V, S::V) -> S::V) {
    let len = x.len();
    let y = &y[..len];
    let (whole, rest) = x.as_chunks_mut::<LANES>();
    let (other, other_rest) = y.as_chunks::<LANES>();
    for (a, b) in whole.iter_mut().zip(other) {
        let v = f(simd.load(a), simd.load(b));
        simd.store(v, a);
    }
    if !rest.is_empty() {
        let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
        a[..rest.len()].copy_from_slice(rest);
        b[..rest.len()].copy_from_slice(other_rest);
        let v = f(simd.load(&a), simd.load(&b));
        simd.store(v, &mut a);
        rest.copy_from_slice(&a[..rest.len()]);
    }
}

/// `sum a[i] * b[i]` on a given instruction set; lane `w` takes `i = 16 b + w`.
#[inline(always)]
pub(crate) fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    let b = &b[..a.len()];
    let mut sum = simd.splat(0.0);
    let (whole, rest) = a.as_chunks::<LANES>();
    let (other, other_rest) = b.as_chunks::<LANES>();
    for (a, b) in whole.iter().zip(other) {
        sum = simd.fma(simd.load(a), simd.load(b), sum);
    }
    if !rest.is_empty() {
        let (mut x, mut y) = ([0.0; LANES], [0.0; LANES]);
        x[..rest.len()].copy_from_slice(rest);
        y[..rest.len()].copy_from_slice(other_rest);
        sum = simd.fma(simd.load(&x), simd.load(&y), sum);
    }
    simd.sum(sum)
}

/// `sum x[i]` on a given instruction set.
#[inline(always)]
pub(crate) fn total<S: Simd>(simd: S, x: &[f32]) -> f32 {
    let mut sum = simd.splat(0.0);
    padded_blocks(
        x,
        #[inline(always)]
        |block| sum = simd.add(sum, simd.load(block)),
    );
    simd.sum(sum)
}

/// `y[i] = a * x[i] + y[i]`, rounded once, on a given instruction set.
#[inline(always)]
pub(crate) fn axpy<S: Simd>(simd: S, a: f32, x: &[f32], y: &mut [f32]) {
    let a = simd.splat(a);
    zip_blocks(
        simd,
        y,
        x,
        #[inline(always)]
        |y, x| simd.fma(a, x, y),
    );
}

struct Dot<'a>(&'a [f32], &'a [f32]);
impl Kernel for Dot<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        dot(simd, self.0, self.1)
    }
}

struct Total<'a>(&'a [f32]);
impl Kernel for Total<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        total(simd, self.0)
    }
}

struct Axpy<'a>(f32, &'a [f32], &'a mut [f32]);
impl Kernel for Axpy<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        axpy(simd, self.0, self.1, self.2);
    }
}

struct Add<'a>(&'a [f32], &'a mut [f32]);
impl Kernel for Add<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        zip_blocks(
            simd,
            self.1,
            self.0,
            #[inline(always)]
            |y, x| simd.add(y, x),
        );
    }
}

struct Scale<'a>(f32, &'a mut [f32]);
impl Kernel for Scale<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let a = simd.splat(self.0);
        map_blocks(
            simd,
            self.1,
            #[inline(always)]
            |x| simd.mul(a, x),
        );
    }
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}
impl Kernel for RmsNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { x, weight, eps, out } = self;
        let factor = simd.splat(1.0 / (dot(simd, x, x) / x.len() as f32 + eps).sqrt());
        out.copy_from_slice(x);
        zip_blocks(
            simd,
            out,
            weight,
            #[inline(always)]
            |x, w| simd.mul(simd.mul(x, factor), w),
        );
    }
}

struct LayerNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    bias: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}
impl Kernel for LayerNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { x, weight, bias, eps, out } = self;
        let mean = simd.splat(total(simd, x) / x.len() as f32);
        out.copy_from_slice(x);
        map_blocks(
            simd,
            out,
            #[inline(always)]
            |x| simd.sub(x, mean),
        );
        let factor = simd.splat(1.0 / (dot(simd, out, out) / x.len() as f32 + eps).sqrt());
        zip_blocks(
            simd,
            out,
            weight,
            #[inline(always)]
            |d, w| simd.mul(simd.mul(d, factor), w),
        );
        zip_blocks(
            simd,
            out,
            bias,
            #[inline(always)]
            |y, b| simd.add(y, b),
        );
    }
}

impl Isa {
    /// `sum a[i] * b[i]`; lane `w` of the sum takes `i = 16 b + w`.
    pub fn dot(self, a: &[f32], b: &[f32]) -> f32 {
        self.run(Dot(a, b))
    }

    /// `sum x[i]`.
    pub fn sum(self, x: &[f32]) -> f32 {
        self.run(Total(x))
    }

    /// `y[i] = a * x[i] + y[i]`, rounded once.
    pub fn axpy(self, a: f32, x: &[f32], y: &mut [f32]) {
        self.run(Axpy(a, x, y));
    }

    /// `y[i] += x[i]`.
    pub fn add(self, x: &[f32], y: &mut [f32]) {
        self.run(Add(x, y));
    }

    /// `x[i] *= a`.
    pub fn scale(self, a: f32, x: &mut [f32]) {
        self.run(Scale(a, x));
    }

    /// `out = x / sqrt(mean(x^2) + eps) * weight`, multiplied in this order; all of one length.
    pub fn rms_norm(self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        self.run(RmsNorm { x, weight, eps, out });
    }

    /// `out = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias`; all of one length.
    pub fn layer_norm(self, x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
        self.run(LayerNorm { x, weight, bias, eps, out });
    }
}
