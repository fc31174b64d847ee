//! The sixteen lanes in one 512-bit register.

use std::arch::x86_64::*;

use super::Simd;
use crate::cpu::types::LANES;

/// Proof that the machine has AVX-512 F, BW, DQ and VL.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    /// The proof, where the features are enabled.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn new() -> Self {
        Self(())
    }
}

/// What a nibble stands for.
const CODES: [f32; LANES] = [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];

/// Calls intrinsics that need the proof.
macro_rules! proved {
    ($e:expr) => {{
        // SAFETY: a value of `Avx512` exists only where the features do; loads and stores go to arrays of their size, or the
        // caller vouches for the address.
        unsafe { $e }
    }};
}

impl Simd for Avx512 {
    type V = __m512;
    type W = __m512i;
    const WIDE: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        proved!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn splat_bf16(self, bytes: [u8; 2]) -> __m512 {
        // A broadcast of the half word comes straight from memory; one of an f32 would go through a general register.
        proved!({
            let both = _mm512_set1_epi16(i16::from_le_bytes(bytes));
            _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000_u32.cast_signed())))
        })
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> __m512 {
        proved!(_mm512_loadu_ps(x.as_ptr()))
    }
    #[inline(always)]
    fn store(self, v: __m512, to: &mut [f32; LANES]) {
        proved!(_mm512_storeu_ps(to.as_mut_ptr(), v));
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        proved!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        proved!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        proved!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        proved!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        proved!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn sqrt(self, v: __m512) -> __m512 {
        proved!(_mm512_sqrt_ps(v))
    }
    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        proved!({
            let a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let c = _mm_add_ps(b, _mm_movehl_ps(b, b));
            _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps::<1>(c, c)))
        })
    }
    #[inline(always)]
    fn sums(self, [a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        // The tree of `sum` on four at a time: halves, quarters and pairs of different sums share a register.
        proved!({
            let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
            let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
            let s = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd));
            let s = _mm512_add_ps(s, _mm512_permute_ps::<0x4e>(s));
            let s = _mm512_add_ps(s, _mm512_permute_ps::<0xb1>(s));
            // Every lane of a quarter holds its sum.
            let first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
            let mut sums = [0.0; 4];
            _mm_storeu_ps(sums.as_mut_ptr(), _mm512_castps512_ps128(_mm512_permutexvar_ps(first, s)));
            sums
        })
    }
    #[inline(always)]
    unsafe fn load_at(self, x: *const f32) -> __m512 {
        proved!(_mm512_loadu_ps(x))
    }
    #[inline(always)]
    fn words(self, block: &[u8; 64]) -> __m512i {
        proved!(_mm512_loadu_si512(block.as_ptr().cast()))
    }
    #[inline(always)]
    unsafe fn words_at(self, block: *const u8) -> __m512i {
        proved!(_mm512_loadu_si512(block.cast()))
    }
    #[inline(always)]
    fn as_f32(self, words: __m512i) -> __m512 {
        proved!(_mm512_castsi512_ps(words))
    }
    #[inline(always)]
    fn low_bf16(self, words: __m512i) -> __m512 {
        proved!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)))
    }
    #[inline(always)]
    fn high_bf16(self, words: __m512i) -> __m512 {
        proved!(_mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()))))
    }
    #[inline(always)]
    fn codes(self, words: __m512i) -> __m512 {
        // The permutation looks at the lowest four bits of an index alone.
        proved!(_mm512_permutexvar_ps(words, _mm512_loadu_ps(CODES.as_ptr())))
    }
    #[inline(always)]
    fn next_nibble(self, words: __m512i) -> __m512i {
        proved!(_mm512_srli_epi32::<4>(words))
    }
}
