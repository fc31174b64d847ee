//! Sixteen f32 lanes in plain Rust, compiled once for each instruction set.
//!
//! A kernel is written once over `[f32; 16]` with [`f32::mul_add`] and put through [`multiversion!`], which compiles the
//! same body with AVX-512, with AVX2 and without either. Every operation is an IEEE operation in a written order and the
//! compiler may not reassociate them, so all versions give the same bits; only the registers differ.
//!
//! What makes the compiler keep lanes in registers: sums are local arrays handed on by value; loops over tiles have
//! constant bounds; slices are cut to one length before the loop; no closures (`array::from_fn`, `map`), which are compiled
//! apart, without the instruction set of their surroundings, when they are not inlined.

/// One register of the widest instruction set.
pub(crate) type Lanes = [f32; LANES];

pub(crate) use crate::cpu::types::LANES;

/// Defines a function that takes an [`Isa`](super::Isa) first and runs its body compiled for that instruction set.
macro_rules! multiversion {
    ($(#[$meta:meta])* pub(crate) fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        pub(crate) fn $name(isa: $crate::cpu::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                match isa {
                    // SAFETY: the features were just found.
                    $crate::cpu::Isa::Avx512 if isa.is_available() => return unsafe { avx512($($arg),*) },
                    // SAFETY: the features were just found.
                    $crate::cpu::Isa::Avx2 if isa.is_available() => return unsafe { avx2($($arg),*) },
                    _ => {}
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = isa;
            body($($arg),*)
        }
    };
}
pub(crate) use multiversion;

/// `acc += a * b` in each lane.
#[inline(always)]
pub(crate) fn fma(acc: &mut Lanes, a: &Lanes, b: &Lanes) {
    for l in 0..LANES {
        acc[l] = a[l].mul_add(b[l], acc[l]);
    }
}

/// `acc += a * b` in each lane, with one factor for all lanes.
#[inline(always)]
pub(crate) fn fma_scalar(acc: &mut Lanes, a: f32, b: &Lanes) {
    for l in 0..LANES {
        acc[l] = a.mul_add(b[l], acc[l]);
    }
}

/// The sum of all lanes: lane `i` + lane `i + 8`, then `+ 4`, `+ 2`, `+ 1`.
#[inline(always)]
pub(crate) fn tree(v: &Lanes) -> f32 {
    let (mut eight, mut four) = ([0.0; 8], [0.0; 4]);
    for l in 0..8 {
        eight[l] = v[l] + v[l + 8];
    }
    for l in 0..4 {
        four[l] = eight[l] + eight[l + 4];
    }
    (four[0] + four[2]) + (four[1] + four[3])
}

/// Up to sixteen values, the missing ones zero.
#[inline(always)]
pub(crate) fn padded(values: &[f32]) -> Lanes {
    let mut lanes = [0.0; LANES];
    for (lane, v) in lanes.iter_mut().zip(values) {
        *lane = *v;
    }
    lanes
}

/// The sum of products: lane `l` takes the elements `16 i + l` in order, then the tree.
#[inline(always)]
pub(crate) fn dot_lanes(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [0.0; LANES];
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        fma(&mut acc, a, b);
    }
    if !a_rest.is_empty() {
        fma(&mut acc, &padded(a_rest), &padded(b_rest));
    }
    tree(&acc)
}

/// The sum, in the order of [`dot_lanes`].
#[inline(always)]
pub(crate) fn sum_lanes(a: &[f32]) -> f32 {
    let mut acc = [0.0; LANES];
    let (a, rest) = a.as_chunks::<LANES>();
    for a in a {
        for l in 0..LANES {
            acc[l] += a[l];
        }
    }
    if !rest.is_empty() {
        let rest = padded(rest);
        for l in 0..LANES {
            acc[l] += rest[l];
        }
    }
    tree(&acc)
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
pub(crate) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot_lanes(x, x) / x.len() as f32 + eps).sqrt()
}

/// Sixteen weights as f32.
pub(crate) trait Stored {
    /// Bytes of an element.
    const BYTES: usize;

    /// Sixteen elements from exactly their bytes.
    fn lanes(bytes: &[u8]) -> Lanes;

    /// Fewer than sixteen elements, the missing ones zero.
    #[inline(always)]
    fn partial(bytes: &[u8]) -> Lanes {
        let mut all = [0; 4 * LANES];
        all[..bytes.len()].copy_from_slice(bytes);
        Self::lanes(&all[..LANES * Self::BYTES])
    }
}

/// Little-endian BF16.
#[derive(Debug)]
pub(crate) enum Bf16 {}

/// Little-endian F32.
#[derive(Debug)]
pub(crate) enum F32 {}

impl Stored for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    fn lanes(bytes: &[u8]) -> Lanes {
        let words: [u16; LANES] = bytemuck::pod_read_unaligned(bytes);
        let mut lanes = [0.0; LANES];
        for l in 0..LANES {
            lanes[l] = f32::from_bits(u32::from(u16::from_le(words[l])) << 16);
        }
        lanes
    }
}

impl Stored for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    fn lanes(bytes: &[u8]) -> Lanes {
        let words: [u32; LANES] = bytemuck::pod_read_unaligned(bytes);
        let mut lanes = [0.0; LANES];
        for l in 0..LANES {
            lanes[l] = f32::from_bits(u32::from_le(words[l]));
        }
        lanes
    }
}

#[cfg(test)]
mod tests {
    use super::{Bf16, F32, LANES, Stored, dot_lanes, tree};

    #[test]
    #[allow(clippy::float_cmp, reason = "the order of the sum decides its bits")]
    fn sums_follow_the_tree() {
        let mut v = [0.0; LANES];
        // Only the order (0 + 8) + (4 + 12) loses nothing here.
        (v[0], v[8], v[4], v[12]) = (1e30, -1e30, 1.0, 2.0);
        assert_eq!(tree(&v), 3.0);
        (v[0], v[8], v[4], v[12]) = (1e30, 1.0, -1e30, 2.0);
        assert_eq!(tree(&v), 0.0);
        // Lane 1 takes elements 1 and 17; a short tail is continued with zeros.
        let mut a = vec![0.0; 19];
        (a[1], a[17], a[18]) = (3.0, 5.0, 7.0);
        assert_eq!(dot_lanes(&a, &a), 83.0);
    }

    #[test]
    #[allow(clippy::float_cmp, reason = "widening is exact")]
    fn stored_weights_widen_exactly_at_any_address() {
        let values: Vec<f32> = (0..LANES).map(|i| (i as f32 - 7.0) * 0.375).collect();
        let f32s: Vec<u8> = [0u8].into_iter().chain(values.iter().flat_map(|v| v.to_le_bytes())).collect();
        let bf16s: Vec<u8> =
            [0u8].into_iter().chain(values.iter().flat_map(|v| [v.to_le_bytes()[2], v.to_le_bytes()[3]])).collect();
        assert_eq!(F32::lanes(&f32s[1..])[..], values);
        assert_eq!(Bf16::lanes(&bf16s[1..])[..], values);
        assert_eq!(Bf16::partial(&bf16s[1..7])[..4], [values[0], values[1], values[2], 0.0]);
    }
}
