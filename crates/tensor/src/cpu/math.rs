//! Exponential, sigmoid and SiLU in f32: one polynomial, the same bits on every instruction set.
//!
//! `exp(x) = 2^n e^r` with `n = round(x / ln 2)` and `r = x - n ln 2` in two parts; `e^r` is its Taylor polynomial of degree 7
//! (relative error below 6e-9 for `|r| <= ln 2 / 2`), and `2^n` is applied as two factors, so that results below the smallest
//! normal number are right as well. NaN goes through.
//!
//! `simd::lanes` has exponential, sigmoid and SiLU for single values, in kernels that are plain loops. They are another
//! polynomial and agree with these to rounding only; each value is computed by one of the two everywhere, so results still
//! do not depend on the instruction set.

use super::simd::{Isa, Kernel, Simd, vector};

/// Beyond these arguments the result is 0 or infinite.
const SMALLEST: f32 = -104.0;
const LARGEST: f32 = 89.0;

/// `ln 2` as a part with 9 trailing zero bits (its products with `n` are exact) and the rest.
const LN2_HIGH: f32 = f32::from_bits(0x3f31_7200);
const LN2_LOW: f32 = (std::f64::consts::LN_2 - LN2_HIGH as f64) as f32;

/// The polynomial of `(e^r - 1 - r) / r^2`: its highest coefficient and the others, descending.
const FIRST: f32 = 1.0 / 5040.0;
/// As [`FIRST`].
const COEFFICIENTS: [f32; 5] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5];

/// `e^x` of each lane.
#[inline(always)]
pub(crate) fn exp<S: Simd>(simd: S, x: S::V) -> S::V {
    let x = simd.min(simd.splat(LARGEST), simd.max(simd.splat(SMALLEST), x));
    let n = simd.round(simd.mul(x, simd.splat(std::f32::consts::LOG2_E)));
    let r = simd.fma(n, simd.splat(-LN2_HIGH), x);
    let r = simd.fma(n, simd.splat(-LN2_LOW), r);
    let mut q = simd.splat(FIRST);
    for c in COEFFICIENTS {
        q = simd.fma(q, r, simd.splat(c));
    }
    let tail = simd.fma(simd.mul(r, r), q, r);
    let e = simd.add(tail, simd.splat(1.0));
    let half = simd.round(simd.mul(n, simd.splat(0.5)));
    simd.mul(simd.mul(e, simd.exp2(half)), simd.exp2(simd.sub(n, half)))
}

/// `1 / (1 + e^-x)` of each lane, to a few ulp of the result on both sides.
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(simd: S, x: S::V) -> S::V {
    let one = simd.splat(1.0);
    let e = exp(simd, simd.sub(simd.splat(0.0), simd.abs(x)));
    simd.div(simd.select_negative(x, e, one), simd.add(one, e))
}

/// `x / (1 + e^-x)` of each lane.
#[inline(always)]
pub(crate) fn silu<S: Simd>(simd: S, x: S::V) -> S::V {
    simd.mul(x, sigmoid(simd, x))
}

/// A kernel that replaces every value of a slice.
macro_rules! elementwise {
    ($name:ident, $function:ident) => {
        struct $name<'a>(&'a mut [f32]);
        impl Kernel for $name<'_> {
            type Output = ();
            #[inline(always)]
            fn run<S: Simd>(self, simd: S) {
                vector::map_blocks(
                    simd,
                    self.0,
                    #[inline(always)]
                    |x| $function(simd, x),
                );
            }
        }
    };
}
elementwise!(Exp, exp);
elementwise!(Sigmoid, sigmoid);
elementwise!(Silu, silu);

struct ClampedSwiglu<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
    limit: f32,
}
impl Kernel for ClampedSwiglu<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (high, low) = (simd.splat(self.limit), simd.splat(-self.limit));
        vector::zip_blocks(
            simd,
            self.gate,
            self.up,
            #[inline(always)]
            |gate, up| simd.mul(silu(simd, simd.min(high, gate)), simd.min(high, simd.max(low, up))),
        );
    }
}

impl Isa {
    /// `x[i] = e^x[i]`.
    pub fn exp(self, x: &mut [f32]) {
        self.run(Exp(x));
    }

    /// `x[i] = 1 / (1 + e^-x[i])`.
    pub fn sigmoid(self, x: &mut [f32]) {
        self.run(Sigmoid(x));
    }

    /// `x[i] = x[i] / (1 + e^-x[i])`.
    pub fn silu(self, x: &mut [f32]) {
        self.run(Silu(x));
    }

    /// `gate[i] = silu(min(gate[i], limit)) * clamp(up[i], -limit, limit)`.
    pub fn clamped_swiglu(self, gate: &mut [f32], up: &[f32], limit: f32) {
        self.run(ClampedSwiglu { gate, up, limit });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The smallest f32.
    const DENORMAL: f64 = f32::from_bits(1) as f64;

    /// Arguments over the whole range, and special ones.
    fn arguments() -> Vec<f32> {
        let mut x: Vec<f32> = (-120_000..120_000).map(|i| i as f32 * 1.003e-3).collect();
        x.extend((0..2000).map(|i| -f32::from_bits(i * 500_009)));
        x.extend([0.0, -0.0, 1e-40, -1e-40, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
        x
    }

    /// Distance in units of the last place of `exact`, or of `smallest` where that is more.
    fn ulps(found: f32, exact: f64, smallest: f64) -> f64 {
        let unit = (exact.abs() * f64::from(f32::EPSILON) / 2.0).max(smallest);
        (f64::from(found) - exact).abs() / unit
    }

    fn check(apply: impl Fn(Isa, &mut [f32]), exact: impl Fn(f64) -> f64, bound: f64, smallest: f64) {
        let x = arguments();
        let mut scalar = x.clone();
        apply(Isa::Scalar, &mut scalar);
        for (x, y) in x.iter().zip(&scalar) {
            let e = exact(f64::from(*x));
            if e.is_nan() {
                assert!(y.is_nan(), "f({x}) = {y}");
            } else if e > f64::from(f32::MAX) {
                assert!(y.is_infinite(), "f({x}) = {y}");
            } else {
                assert!(
                    ulps(*y, e, smallest) <= bound,
                    "f({x:e}) = {y:e} instead of {e:e}: {} ulp",
                    ulps(*y, e, smallest)
                );
            }
        }
        for isa in Isa::available() {
            let mut y = x.clone();
            apply(isa, &mut y);
            for i in 0..x.len() {
                assert!(
                    y[i].to_bits() == scalar[i].to_bits() || (y[i].is_nan() && scalar[i].is_nan()),
                    "{isa:?} {}",
                    x[i]
                );
            }
        }
    }

    #[test]
    fn exp_is_right_to_two_ulp_from_zero_to_infinity() {
        check(Isa::exp, f64::exp, 2.0, DENORMAL);
    }

    #[test]
    fn sigmoid_is_right_to_four_ulp_on_both_sides() {
        check(Isa::sigmoid, |x| 1.0 / (1.0 + (-x).exp()), 4.0, DENORMAL);
    }

    #[test]
    fn silu_is_right_to_five_ulp() {
        // The sigmoid of arguments near -100 is a few units of the smallest number, which the product makes coarser.
        check(Isa::silu, |x| x / (1.0 + (-x).exp()), 5.0, 100.0 * DENORMAL);
    }

    #[test]
    fn a_value_does_not_depend_on_its_place_in_the_slice() {
        let x: Vec<f32> = (0..37).map(|i| i as f32 / 3.0 - 6.0).collect();
        for isa in Isa::available() {
            let mut together = x.clone();
            isa.silu(&mut together);
            for (x, y) in x.iter().zip(together) {
                let mut alone = [*x];
                isa.silu(&mut alone);
                assert_eq!(alone[0].to_bits(), y.to_bits());
            }
        }
    }
}
