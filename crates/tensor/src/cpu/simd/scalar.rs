//! The sixteen lanes in plain Rust: the definition that the vector forms are tested against.

use super::Simd;
use crate::cpu::types::LANES;

/// Plain Rust.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scalar;

#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Scalar {
    type V = [f32; LANES];
    type W = [u32; LANES];
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        *x
    }
    #[inline(always)]
    fn store(self, v: Self::V, to: &mut [f32; LANES]) {
        *to = v;
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn sqrt(self, v: Self::V) -> Self::V {
        v.map(f32::sqrt)
    }
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let a: [f32; 8] = std::array::from_fn(|i| v[i] + v[i + 8]);
        let b: [f32; 4] = std::array::from_fn(|i| a[i] + a[i + 4]);
        (b[0] + b[2]) + (b[1] + b[3])
    }
    #[inline(always)]
    unsafe fn load_at(self, x: *const f32) -> Self::V {
        // SAFETY: passed on to the caller; the read needs no alignment.
        unsafe { x.cast::<[f32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    fn words(self, block: &[u8; 64]) -> Self::W {
        let words = block.as_chunks::<4>().0;
        std::array::from_fn(|i| u32::from_le_bytes(words[i]))
    }
    #[inline(always)]
    unsafe fn words_at(self, block: *const u8) -> Self::W {
        // SAFETY: passed on to the caller; bytes need no alignment.
        self.words(unsafe { &*block.cast::<[u8; 64]>() })
    }
    #[inline(always)]
    fn as_f32(self, words: Self::W) -> Self::V {
        words.map(f32::from_bits)
    }
    #[inline(always)]
    fn low_bf16(self, words: Self::W) -> Self::V {
        words.map(|w| f32::from_bits(w << 16))
    }
    #[inline(always)]
    fn high_bf16(self, words: Self::W) -> Self::V {
        words.map(|w| f32::from_bits(w & 0xffff_0000))
    }
    #[inline(always)]
    fn codes(self, words: Self::W) -> Self::V {
        words.map(|w| (w & 15) as f32 - 8.0)
    }
    #[inline(always)]
    fn next_nibble(self, words: Self::W) -> Self::W {
        words.map(|w| w >> 4)
    }
}
