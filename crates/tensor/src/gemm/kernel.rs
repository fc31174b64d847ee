//! The register tiles of the matrix product: one tile of `C` over one block of terms, per instruction set.
//!
//! All variants compute, for each element, `sum = fma(a, b, sum)` over ascending terms and then `C + sum` or `C - sum`;
//! they differ in the size of the tile and in nothing else.
#![allow(unsafe_code, reason = "SIMD intrinsics")]

use std::cell::RefCell;

use super::Sign;

/// f32 or f64.
pub trait Element:
    Copy + Send + Sync + PartialEq + std::fmt::Debug + std::ops::Add<Output = Self> + std::ops::Sub<Output = Self> + 'static
{
    /// 0.
    const ZERO: Self;
    /// `self * b + c`, rounded once.
    #[must_use]
    fn fma(self, b: Self, c: Self) -> Self;
    /// Lends `size` elements of unspecified content that this thread keeps for the next time.
    #[doc(hidden)]
    fn with_scratch<R>(size: usize, work: impl FnOnce(&mut [Self]) -> R) -> R;
    /// The fastest kernel of this machine.
    #[doc(hidden)]
    fn kernel() -> Kernel<Self>;
    /// All kernels that this machine can run, the portable one first.
    #[doc(hidden)]
    fn kernels() -> Vec<Kernel<Self>>;
}

/// A tile function: `C[rows, cols] (+|-)= A B` over `k` terms; `a` and `b` are packed panels.
type TileFn<T> = unsafe fn(k: usize, a: &[T], b: &[T], c: &mut [T], stride: usize, sign: Sign);

/// A tile function with its size. It exists only where the machine has the instructions that it uses.
#[derive(Debug, Clone, Copy)]
pub struct Kernel<T> {
    /// Rows of a tile.
    pub(super) rows: usize,
    /// Columns of a tile.
    pub(super) cols: usize,
    tile: TileFn<T>,
}

impl<T: Element> Kernel<T> {
    /// Runs the tile over `k` terms; `a` is `[k, rows]`, `b` is `[k, cols]`, `c` is `[rows, stride >= cols]`.
    pub(super) fn run(&self, k: usize, a: &[T], b: &[T], c: &mut [T], stride: usize, sign: Sign) {
        assert!(a.len() >= k * self.rows && b.len() >= k * self.cols, "the panels cover the terms");
        assert!(c.len() >= (self.rows - 1) * stride + self.cols, "the tile lies inside C");
        // SAFETY: lengths are checked above against what the tile reads and writes, and a kernel is only constructed
        // after its instruction set was detected.
        unsafe { (self.tile)(k, a, b, c, stride, sign) }
    }
}

/// The definition, for machines without FMA units. Needs no instruction set; unsafe only to share the signature.
unsafe fn portable<T: Element, const R: usize, const C: usize>(
    k: usize,
    a: &[T],
    b: &[T],
    c: &mut [T],
    stride: usize,
    sign: Sign,
) {
    let mut sums = [[T::ZERO; C]; R];
    for (a, b) in a.chunks_exact(R).zip(b.chunks_exact(C)).take(k) {
        for (sums, &a) in sums.iter_mut().zip(a) {
            for (sum, &b) in sums.iter_mut().zip(b) {
                *sum = a.fma(b, *sum);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (t, &s) in c[r * stride..][..C].iter_mut().zip(sums) {
            *t = if sign == Sign::Plus { *t + s } else { *t - s };
        }
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! tile {
    ($name:ident, $features:literal, $t:ty, $rows:literal, $vectors:literal, $lanes:literal,
     $zero:ident, $load:ident, $set1:ident, $fma:ident, $add:ident, $sub:ident, $store:ident) => {
        /// Tile of `rows` x `vectors * lanes`.
        ///
        /// # Safety
        /// The machine has the instruction set, `a` holds `k * rows` and `b` `k * vectors * lanes` elements, and `c`
        /// holds `(rows - 1) * stride + vectors * lanes`.
        #[target_feature(enable = $features)]
        unsafe fn $name(k: usize, a: &[$t], b: &[$t], c: &mut [$t], stride: usize, sign: Sign) {
            use std::arch::x86_64::*;
            let mut sums = [[$zero(); $vectors]; $rows];
            let (mut pa, mut pb) = (a.as_ptr(), b.as_ptr());
            for r in 0..$rows {
                // SAFETY: row `r` of the tile lies inside `c`; a prefetch reads nothing.
                unsafe {
                    let line = c.as_ptr().add(r * stride).cast::<i8>();
                    _mm_prefetch::<_MM_HINT_T0>(line);
                    _mm_prefetch::<_MM_HINT_T0>(line.add(64));
                }
            }
            macro_rules! term {
                ($at:expr) => {{
                    let mut columns = [$zero(); $vectors];
                    for v in 0..$vectors {
                        // SAFETY: `b` has `vectors * lanes` elements for each of the `k` terms.
                        columns[v] = unsafe { $load(pb.add(($at * $vectors + v) * $lanes)) };
                    }
                    for r in 0..$rows {
                        // SAFETY: `a` has `rows` elements for each of the `k` terms.
                        let value = $set1(unsafe { *pa.add($at * $rows + r) });
                        for v in 0..$vectors {
                            sums[r][v] = $fma(value, columns[v], sums[r][v]);
                        }
                    }
                }};
            }
            // Two terms a round, so that the loop itself is hidden behind the multiply-adds.
            for _ in 0..k / 2 {
                term!(0);
                term!(1);
                // SAFETY: at most one past the end after the last term.
                (pa, pb) = unsafe { (pa.add(2 * $rows), pb.add(2 * $vectors * $lanes)) };
            }
            if !k.is_multiple_of(2) {
                term!(0);
            }
            for r in 0..$rows {
                for v in 0..$vectors {
                    // SAFETY: row `r` of `c` reaches `vectors * lanes` elements from `r * stride`.
                    unsafe {
                        let target = c.as_mut_ptr().add(r * stride + v * $lanes);
                        let old = $load(target);
                        let new = if sign == Sign::Plus { $add(old, sums[r][v]) } else { $sub(old, sums[r][v]) };
                        $store(target, new);
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    #![allow(clippy::needless_range_loop, clippy::wildcard_imports, reason = "unrolled register tiles")]
    use super::Sign;
    tile!(
        f32_avx512,
        "avx512f",
        f32,
        8,
        2,
        16,
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_set1_ps,
        _mm512_fmadd_ps,
        _mm512_add_ps,
        _mm512_sub_ps,
        _mm512_storeu_ps
    );
    tile!(
        f64_avx512,
        "avx512f",
        f64,
        8,
        2,
        8,
        _mm512_setzero_pd,
        _mm512_loadu_pd,
        _mm512_set1_pd,
        _mm512_fmadd_pd,
        _mm512_add_pd,
        _mm512_sub_pd,
        _mm512_storeu_pd
    );
    tile!(
        f32_avx2,
        "avx2,fma",
        f32,
        6,
        2,
        8,
        _mm256_setzero_ps,
        _mm256_loadu_ps,
        _mm256_set1_ps,
        _mm256_fmadd_ps,
        _mm256_add_ps,
        _mm256_sub_ps,
        _mm256_storeu_ps
    );
    tile!(
        f64_avx2,
        "avx2,fma",
        f64,
        6,
        2,
        4,
        _mm256_setzero_pd,
        _mm256_loadu_pd,
        _mm256_set1_pd,
        _mm256_fmadd_pd,
        _mm256_add_pd,
        _mm256_sub_pd,
        _mm256_storeu_pd
    );

    use super::Kernel;
    pub(super) fn kernels_f32(out: &mut Vec<Kernel<f32>>) {
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            out.push(Kernel { rows: 6, cols: 16, tile: f32_avx2 });
        }
        if is_x86_feature_detected!("avx512f") {
            out.push(Kernel { rows: 8, cols: 32, tile: f32_avx512 });
        }
    }
    pub(super) fn kernels_f64(out: &mut Vec<Kernel<f64>>) {
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            out.push(Kernel { rows: 6, cols: 8, tile: f64_avx2 });
        }
        if is_x86_feature_detected!("avx512f") {
            out.push(Kernel { rows: 8, cols: 16, tile: f64_avx512 });
        }
    }
}

macro_rules! element {
    ($t:ty, $kernels:ident) => {
        impl Element for $t {
            const ZERO: Self = 0.0;
            #[inline(always)]
            fn fma(self, b: Self, c: Self) -> Self {
                self.mul_add(b, c)
            }
            fn with_scratch<R>(size: usize, work: impl FnOnce(&mut [Self]) -> R) -> R {
                thread_local! {
                    static SCRATCH: RefCell<Vec<$t>> = const { RefCell::new(Vec::new()) };
                }
                SCRATCH.with_borrow_mut(|scratch| {
                    if scratch.len() < size {
                        scratch.resize(size, 0.0);
                    }
                    work(&mut scratch[..size])
                })
            }
            fn kernel() -> Kernel<Self> {
                *Self::kernels().last().expect("the portable kernel is always there")
            }
            fn kernels() -> Vec<Kernel<Self>> {
                let mut out = vec![Kernel { rows: 4, cols: 8, tile: portable::<Self, 4, 8> as TileFn<Self> }];
                #[cfg(target_arch = "x86_64")]
                x86::$kernels(&mut out);
                out
            }
        }
    };
}
element!(f32, kernels_f32);
element!(f64, kernels_f64);
