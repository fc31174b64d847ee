//! Exponential, sigmoid and SiLU in f32: one polynomial, the same bits on every instruction set.
//!
//! They are functions of one value in plain Rust that the compiler turns into vector code inside the loops of
//! [`multiversion!`]. Every operation is an IEEE operation in a written order, so all versions give the same bits.

use super::{Isa, lanes::multiversion};

/// `e^x` to about one unit in the last place: `2^n e^r` with `n` the nearest integer to `x / ln 2` and a polynomial of
/// degree 7 in `r`. NaN stays NaN, large values give infinity, very negative ones zero.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Written as comparisons that are false for NaN, so that NaN passes.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
    const SHIFT: f32 = 12_582_912.0;
    let shifted = x.mul_add(std::f32::consts::LOG2_E, SHIFT);
    let n = shifted - SHIFT;
    let k = (shifted.to_bits() as i32).wrapping_sub(SHIFT.to_bits() as i32);
    // ln 2 in two parts, the first with few bits.
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4_f32;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p.mul_add(r, c);
    }
    let e = p.mul_add(r * r, r) + 1.0;
    // 2^k in two factors: k reaches 128 and -150, beyond the exponents of normal numbers.
    let half = k >> 1;
    let power = |k: i32| f32::from_bits((k.wrapping_add(127) as u32) << 23);
    e * power(half) * power(k.wrapping_sub(half))
}

/// `1 / (1 + e^-x)`, to a few units in the last place on both sides.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x sigmoid(x)`.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

multiversion! {
    /// `x = sigmoid(x)`.
    pub(crate) fn sigmoids(x: &mut [f32]) {
        for x in x {
            *x = sigmoid(*x);
        }
    }
}

multiversion! {
    /// `gate = silu(min(gate, limit)) * clamp(up, -limit, limit)`. NaN stays NaN.
    pub(crate) fn clamped_swiglu(gate: &mut [f32], up: &[f32], limit: f32) {
        let up = &up[..gate.len()];
        for (g, &u) in gate.iter_mut().zip(up) {
            // Written as comparisons that are false for NaN, so that NaN passes.
            let x = if *g > limit { limit } else { *g };
            let u = if u < -limit { -limit } else { u };
            let u = if u > limit { limit } else { u };
            *g = silu(x) * u;
        }
    }
}

impl Isa {
    /// `x[i] = 1 / (1 + e^-x[i])`.
    pub fn sigmoid(self, x: &mut [f32]) {
        sigmoids(self, x);
    }

    /// `gate[i] = silu(min(gate[i], limit)) * clamp(up[i], -limit, limit)`.
    pub fn clamped_swiglu(self, gate: &mut [f32], up: &[f32], limit: f32) {
        clamped_swiglu(self, gate, up, limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    multiversion! {
        pub(crate) fn exps(x: &mut [f32]) {
            for x in x {
                *x = exp(*x);
            }
        }
    }

    multiversion! {
        pub(crate) fn silus(x: &mut [f32]) {
            for x in x {
                *x = silu(*x);
            }
        }
    }

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
        check(exps, f64::exp, 2.0, DENORMAL);
    }

    #[test]
    fn sigmoid_is_right_to_four_ulp_on_both_sides() {
        // Below the normal numbers the result may be zero.
        check(sigmoids, |x| 1.0 / (1.0 + (-x).exp()), 4.0, f64::from(f32::MIN_POSITIVE));
    }

    #[test]
    fn silu_is_right_to_five_ulp() {
        // As the sigmoid's, times arguments of up to 100.
        check(silus, |x| x / (1.0 + (-x).exp()), 5.0, 100.0 * f64::from(f32::MIN_POSITIVE));
    }

    #[test]
    fn a_value_does_not_depend_on_its_place_in_the_slice() {
        let x: Vec<f32> = (0..37).map(|i| i as f32 / 3.0 - 6.0).collect();
        for isa in Isa::available() {
            let mut together = x.clone();
            silus(isa, &mut together);
            for (x, y) in x.iter().zip(together) {
                let mut alone = [*x];
                silus(isa, &mut alone);
                assert_eq!(alone[0].to_bits(), y.to_bits());
            }
        }
    }

    #[test]
    #[allow(clippy::float_cmp, reason = "the limits are exact")]
    fn limits_are_exact_and_nan_passes() {
        assert_eq!([exp(0.0), exp(-0.0), exp(-200.0), exp(f32::NEG_INFINITY)], [1.0, 1.0, 0.0, 0.0]);
        assert_eq!([exp(89.0), exp(1e30), exp(f32::INFINITY)], [f32::INFINITY; 3]);
        assert_eq!([sigmoid(0.0), sigmoid(40.0), sigmoid(-200.0)], [0.5, 1.0, 0.0]);
        assert!(exp(f32::NAN).is_nan() && sigmoid(f32::NAN).is_nan() && silu(f32::NAN).is_nan());
        for isa in Isa::available() {
            for (gate, up) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
                let mut gate = [gate; 19];
                isa.clamped_swiglu(&mut gate, &[up; 19], 10.0);
                assert!(gate.iter().all(|x| x.is_nan()), "{isa:?}");
            }
        }
    }
}
