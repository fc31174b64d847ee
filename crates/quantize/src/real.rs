//! The two precisions of the solver and the 4-bit grid in each of them.

use std::ops::{AddAssign, Div, Mul, Neg, SubAssign};

use glimmer_tensor::gemm::Element;

use crate::spare::Shelf;

/// Smallest code.
pub const MIN_CODE: i8 = -8;
/// Largest code.
pub const MAX_CODE: i8 = 7;

/// Which floating-point type a computation uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// f32.
    Single,
    /// f64.
    Double,
}

impl Precision {
    /// Widest matrix that is solved in f64: up to here the cost is negligible, beyond it memory and time double.
    const DOUBLE_UP_TO: usize = 512;

    /// The precision for a matrix of `cols` columns.
    pub fn for_width(cols: usize) -> Self {
        if cols <= Self::DOUBLE_UP_TO { Self::Double } else { Self::Single }
    }
}

/// f32 or f64 with what the solver needs.
pub trait Real:
    Element + Div<Output = Self> + Mul<Output = Self> + Neg<Output = Self> + AddAssign + SubAssign + PartialOrd + Default
{
    /// 1.
    const ONE: Self;
    /// Adding and subtracting this rounds a value of small magnitude to an integer, half to even.
    const ROUNDER: Self;

    /// From f32, exactly.
    fn of(value: f32) -> Self;
    /// From f64, rounded.
    fn of_f64(value: f64) -> Self;
    /// To f64, exactly.
    fn to_f64(self) -> f64;
    /// Rounded to bfloat16 (half to even). The value must be exactly an f32, as a code times a scale is.
    #[must_use]
    fn to_bf16(self) -> Self;

    /// The code that this float is: the low bits of the sum with [`Real::ROUNDER`], whose unit is 1.
    fn to_code(self) -> i8;
    /// The arrays that this thread keeps.
    #[doc(hidden)]
    fn with_shelf<R>(work: impl FnOnce(&Shelf<Self>) -> R) -> R;

    /// The code of weight `self` at `scale`, as a float: clamp first, then round half to even.
    #[must_use]
    #[inline(always)]
    fn code(self, scale: Self) -> Self {
        let (low, high) = (Self::of(f32::from(MIN_CODE)), Self::of(f32::from(MAX_CODE)));
        let x = self / scale;
        let x = if x < low { low } else { x };
        let x = if x > high { high } else { x };
        (x + Self::ROUNDER) - Self::ROUNDER
    }
}

/// Rounds to the nearest bfloat16, half to even; the value must be finite.
#[inline(always)]
pub fn round_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits(bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000)
}

impl Real for f32 {
    #[inline(always)]
    fn to_code(self) -> i8 {
        (self + Self::ROUNDER).to_bits() as i8
    }

    fn with_shelf<R>(work: impl FnOnce(&Shelf<Self>) -> R) -> R {
        thread_local! {
            static SHELF: Shelf<f32> = const { Shelf::new(Vec::new()) };
        }
        SHELF.with(work)
    }

    const ONE: Self = 1.0;
    const ROUNDER: Self = 12_582_912.0;

    #[inline(always)]
    fn of(value: f32) -> Self {
        value
    }
    fn of_f64(value: f64) -> Self {
        value as Self
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    #[inline(always)]
    fn to_bf16(self) -> Self {
        round_bf16(self)
    }
}

impl Real for f64 {
    #[inline(always)]
    fn to_code(self) -> i8 {
        (self + Self::ROUNDER).to_bits() as i8
    }

    fn with_shelf<R>(work: impl FnOnce(&Shelf<Self>) -> R) -> R {
        thread_local! {
            static SHELF: Shelf<f64> = const { Shelf::new(Vec::new()) };
        }
        SHELF.with(work)
    }

    const ONE: Self = 1.0;
    const ROUNDER: Self = 6_755_399_441_055_744.0;

    #[inline(always)]
    fn of(value: f32) -> Self {
        Self::from(value)
    }
    fn of_f64(value: f64) -> Self {
        value
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }
    #[inline(always)]
    fn to_bf16(self) -> Self {
        Self::from(round_bf16(self as f32))
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn bf16_rounding_equals_half() {
        for i in 0..200_000u32 {
            let x = f32::from_bits(i.wrapping_mul(2_654_435_761));
            if x.is_finite() && x.abs() < 3.0e38 {
                assert_eq!(round_bf16(x).to_bits(), bf16::from_f32(x).to_f32().to_bits());
            }
        }
    }

    #[test]
    fn codes_clamp_first_and_round_half_to_even() {
        let inputs = [-9.0, -8.5, -8.0, -7.5, -3.5, -2.5, 0.5, 1.5, 2.5, 6.5, 7.0, 7.5, 8.0, 9.0f32];
        let expected = [-8.0, -8.0, -8.0, -8.0, -4.0, -2.0, 0.0, 2.0, 2.0, 6.0, 7.0, 7.0, 7.0, 7.0f32];
        for (x, e) in inputs.into_iter().zip(expected) {
            assert_eq!((x * 0.5).code(0.5).to_bits(), e.to_bits(), "{x}");
            assert_eq!(f64::from(x * 0.5).code(0.5).to_bits(), f64::from(e).to_bits(), "{x}");
        }
    }
}
