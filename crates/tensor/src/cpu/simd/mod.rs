//! One definition of every sum for all instruction sets: sixteen f32 lanes, fused multiply-add, a fixed order.
//!
//! A kernel is written once, generic over [`Simd`], and compiled three times: AVX-512 holds the sixteen lanes in one
//! register, AVX2 in two, the scalar form in an array. Lane `w` sees the same operations in the same order everywhere and
//! [`Simd::sum`] adds the lanes in one fixed tree, so the three give the same bits.
//!
//! The kernels of attention, delta rule and residual streams, which are loops over whole rows, are plain Rust over
//! `[f32; 16]` instead (module `lanes`), compiled three times as well: same lanes, same tree, same promise. A matrix product
//! needs what plain Rust cannot say (unpacking INT4, prefetching, tiles of registers) and so [`Simd`]; a recurrence over rows
//! needs nothing of it and reads better without.
//!
//! # Invariant
//! Every operation of [`Simd`] is exactly rounded (IEEE) or exact, and says what it does with NaN. (Payload and sign of a NaN
//! are not defined.)

#![allow(unsafe_code, reason = "vector instructions and the switch of the instruction set")]

pub(crate) mod attend;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod chunk;
pub(crate) mod delta;
pub(crate) mod gelu;
pub(crate) mod index;
pub(crate) mod lanes;
pub(crate) mod math;
pub(crate) mod pack;
pub(crate) mod product;
mod scalar;
pub(crate) mod stored;
pub(crate) mod streams;
#[cfg(test)]
mod tests;
mod tile;
pub mod vector;
mod weights;

#[cfg(target_arch = "x86_64")]
use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use avx512::Avx512;
use scalar::Scalar;

use super::types::{LANES, widen};

/// An instruction set that the CPU backend can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust.
    Scalar,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 (F, BW, DQ, VL).
    Avx512,
}

impl Isa {
    /// Whether this machine has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && Self::Avx2.is_available()
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The instruction sets of this machine, slowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        [Self::Scalar, Self::Avx2, Self::Avx512].into_iter().filter(|isa| isa.is_available())
    }

    /// The best one of this machine.
    pub fn best() -> Self {
        Self::available().last().unwrap_or(Self::Scalar)
    }

    /// Its usual name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "AVX2",
            Self::Avx512 => "AVX-512",
        }
    }

    /// Runs a kernel compiled for this instruction set.
    ///
    /// # Panics
    /// When the machine lacks it; [`super::Cpu`] holds only one that it has.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            Self::Scalar => kernel.run(Scalar),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                assert!(self.is_available(), "the machine has AVX2 and FMA");
                // SAFETY: the features of `run_avx2` were just found.
                unsafe { run_avx2(kernel) }
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                assert!(self.is_available(), "the machine has AVX-512");
                // SAFETY: the features of `run_avx512` were just found.
                unsafe { run_avx512(kernel) }
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => kernel.run(Scalar),
        }
    }
}

/// Work that is compiled once for each instruction set.
///
/// `run` must be `#[inline(always)]`, and so must everything it calls with the token; plain loops over fixed-size chunks
/// inside it are vectorised for the instruction set as well.
pub trait Kernel {
    /// The result.
    type Output;

    /// Does the work.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2::new())
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512::new())
}

/// Sixteen f32 lanes on one instruction set. A value of an implementing type is the proof that the machine has it.
pub trait Simd: Copy {
    /// Sixteen f32.
    type V: Copy;
    /// Sixteen 32-bit words.
    type W: Copy;
    /// Whether there are registers for sixteen sums at a time (else for four).
    const WIDE: bool;

    /// The same value in every lane.
    fn splat(self, x: f32) -> Self::V;
    /// The same BF16 in every lane.
    #[inline(always)]
    fn splat_bf16(self, bytes: [u8; 2]) -> Self::V {
        self.splat(widen(bytes))
    }
    /// Sixteen values.
    fn load(self, x: &[f32; LANES]) -> Self::V;
    /// Writes the lanes.
    fn store(self, v: Self::V, to: &mut [f32; LANES]);
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b ? a : b`: `b` when either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// Square root.
    fn sqrt(self, v: Self::V) -> Self::V;
    /// The sum of the lanes: lane `i` plus lane `i + 8`, then `+ 4`, `+ 2`, `+ 1`.
    fn sum(self, v: Self::V) -> f32;
    /// [`Simd::sum`] of four.
    #[inline(always)]
    fn sums(self, v: [Self::V; 4]) -> [f32; 4] {
        [self.sum(v[0]), self.sum(v[1]), self.sum(v[2]), self.sum(v[3])]
    }
    /// Sixteen values at any address.
    ///
    /// # Safety
    /// 64 bytes at `x` must be readable.
    unsafe fn load_at(self, x: *const f32) -> Self::V;
    /// Sixteen little-endian words.
    fn words(self, block: &[u8; 64]) -> Self::W;
    /// Sixteen little-endian words at any address.
    ///
    /// # Safety
    /// 64 bytes at `block` must be readable.
    unsafe fn words_at(self, block: *const u8) -> Self::W;
    /// The words' bits as f32.
    fn as_f32(self, words: Self::W) -> Self::V;
    /// The BF16 in the low halves of the words.
    fn low_bf16(self, words: Self::W) -> Self::V;
    /// The BF16 in the high halves of the words.
    fn high_bf16(self, words: Self::W) -> Self::V;
    /// `nibble - 8` of the lowest nibble of each word.
    fn codes(self, words: Self::W) -> Self::V;
    /// The words shifted right by a nibble.
    fn next_nibble(self, words: Self::W) -> Self::W;
    /// Hints that the line at `address` (any address) will be read soon.
    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every x86-64 has the instruction, and it never faults.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(address.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = address;
    }
    /// Hints that the second-level cache should have the line at `address` (any address).
    #[inline(always)]
    fn prefetch_second(self, address: *const u8) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every x86-64 has the instruction, and it never faults.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T1>(address.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = address;
    }
}
