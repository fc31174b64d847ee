//! The sixteen lanes in two 256-bit registers: lanes 0-7 and 8-15.

use std::arch::x86_64::*;

use super::Simd;
use crate::cpu::types::LANES;

/// Proof that the machine has AVX2 and FMA.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    /// The proof, where the features are enabled.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn new() -> Self {
        Self(())
    }
}

/// Applies an intrinsic to both halves.
macro_rules! halves {
    ($f:ident($($x:expr),*)) => {{
        // SAFETY: a value of `Avx2` exists only where AVX2 and FMA do.
        unsafe { ($f($($x.0),*), $f($($x.1),*)) }
    }};
}

impl Simd for Avx2 {
    type V = (__m256, __m256);
    type W = (__m256i, __m256i);
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        // SAFETY: as in `halves`.
        let v = unsafe { _mm256_set1_ps(x) };
        (v, v)
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        // SAFETY: as in `halves`; both halves lie in the array.
        unsafe { (_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))) }
    }
    #[inline(always)]
    fn store(self, v: Self::V, to: &mut [f32; LANES]) {
        // SAFETY: as in `halves`; both halves lie in the array.
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), v.0);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), v.1);
        }
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        halves!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        halves!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        halves!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        halves!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        halves!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn sqrt(self, v: Self::V) -> Self::V {
        halves!(_mm256_sqrt_ps(v))
    }
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        // SAFETY: as in `halves`.
        unsafe {
            let a = _mm256_add_ps(v.0, v.1);
            let b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let c = _mm_add_ps(b, _mm_movehl_ps(b, b));
            _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps::<1>(c, c)))
        }
    }
    #[inline(always)]
    unsafe fn load_at(self, x: *const f32) -> Self::V {
        // SAFETY: as in `halves`; the caller vouches for the address.
        unsafe { (_mm256_loadu_ps(x), _mm256_loadu_ps(x.add(8))) }
    }
    #[inline(always)]
    fn words(self, block: &[u8; 64]) -> Self::W {
        // SAFETY: the block has 64 bytes.
        unsafe { self.words_at(block.as_ptr()) }
    }
    #[allow(clippy::cast_ptr_alignment, reason = "the loads take any address")]
    #[inline(always)]
    unsafe fn words_at(self, block: *const u8) -> Self::W {
        // SAFETY: as in `halves`; the caller vouches for the address.
        unsafe { (_mm256_loadu_si256(block.cast()), _mm256_loadu_si256(block.add(32).cast())) }
    }
    #[inline(always)]
    fn as_f32(self, words: Self::W) -> Self::V {
        halves!(_mm256_castsi256_ps(words))
    }
    #[inline(always)]
    fn low_bf16(self, words: Self::W) -> Self::V {
        // SAFETY: as in `halves`.
        self.as_f32(unsafe { (_mm256_slli_epi32::<16>(words.0), _mm256_slli_epi32::<16>(words.1)) })
    }
    #[inline(always)]
    fn high_bf16(self, words: Self::W) -> Self::V {
        // SAFETY: as in `halves`.
        let high = unsafe { _mm256_set1_epi32(0xffff_0000_u32.cast_signed()) };
        let high = (high, high);
        self.as_f32(halves!(_mm256_and_si256(words, high)))
    }
    #[inline(always)]
    fn codes(self, words: Self::W) -> Self::V {
        #[inline(always)]
        unsafe fn half(words: __m256i) -> __m256 {
            // SAFETY: passed on to the caller.
            unsafe {
                let nibble = _mm256_and_si256(words, _mm256_set1_epi32(15));
                _mm256_sub_ps(_mm256_cvtepi32_ps(nibble), _mm256_set1_ps(8.0))
            }
        }
        halves!(half(words))
    }
    #[inline(always)]
    fn next_nibble(self, words: Self::W) -> Self::W {
        // SAFETY: as in `halves`.
        unsafe { (_mm256_srli_epi32::<4>(words.0), _mm256_srli_epi32::<4>(words.1)) }
    }
}
