//! Every operation on every instruction set against the scalar form, over special values and random bit patterns.

use super::{Isa, Kernel, Simd};
use crate::cpu::types::LANES;

/// What one call of every operation gives, as bits with all NaN alike.
struct Everything<'a> {
    a: &'a [f32; LANES],
    b: &'a [f32; LANES],
    c: &'a [f32; LANES],
}

impl Kernel for Everything<'_> {
    type Output = Vec<(&'static str, Vec<u32>)>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Self::Output {
        let (a, b, c) = (simd.load(self.a), simd.load(self.b), simd.load(self.c));
        let block: [u8; 64] = bytemuck::cast(*self.a);
        let words = simd.words(&block);
        // SAFETY: both point to 64 bytes.
        let (at, words_at) = unsafe { (simd.load_at(self.a.as_ptr()), simd.words_at(block.as_ptr())) };
        let results = [
            ("splat", simd.splat(self.a[3])),
            ("splat_bf16", simd.splat_bf16([block[6], block[7]])),
            ("load", a),
            ("add", simd.add(a, b)),
            ("sub", simd.sub(a, b)),
            ("mul", simd.mul(a, b)),
            ("fma", simd.fma(a, b, c)),
            ("max", simd.max(a, b)),
            ("sqrt", simd.sqrt(a)),
            ("load_at", at),
            ("as_f32", simd.as_f32(words)),
            ("as_f32 of words_at", simd.as_f32(words_at)),
            ("low_bf16", simd.low_bf16(words)),
            ("high_bf16", simd.high_bf16(words)),
            ("codes", simd.codes(words)),
            ("codes of the next nibble", simd.codes(simd.next_nibble(words))),
        ];
        let sums = [a, b, c, simd.add(a, c)];
        let mut found = vec![("sum", sums.map(|v| canonical(simd.sum(v))).to_vec())];
        assert_eq!(simd.sums(sums).map(canonical)[..], found[0].1, "four sums are four times one");
        for (name, v) in results {
            let mut lanes = [0.0; LANES];
            simd.store(v, &mut lanes);
            found.push((name, lanes.map(canonical).to_vec()));
        }
        found
    }
}

fn canonical(v: f32) -> u32 {
    if v.is_nan() { u32::MAX } else { v.to_bits() }
}

fn next(state: &mut u64) -> u32 {
    *state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
    (*state >> 32) as u32
}

const SPECIAL: [f32; 12] = [
    0.0,
    -0.0,
    1.0,
    -2.5,
    0.5,
    f32::MAX,
    f32::MIN_POSITIVE,
    f32::from_bits(1),
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    1.0 + f32::EPSILON,
];

#[test]
fn every_operation_equals_its_scalar_form() {
    let mut state = 1;
    for round in 0..4000 {
        let mut value = || {
            let bits = next(&mut state);
            match round % 3 {
                0 => SPECIAL[bits as usize % SPECIAL.len()],
                1 => f32::from_bits(bits),
                _ => bits as f32 / 1e9 - 2.0,
            }
        };
        let [a, b, c]: [[f32; LANES]; 3] = std::array::from_fn(|_| std::array::from_fn(|_| value()));
        let expected = Isa::Scalar.run(Everything { a: &a, b: &b, c: &c });
        for isa in Isa::available() {
            assert_eq!(isa.run(Everything { a: &a, b: &b, c: &c }), expected, "{isa:?} {a:?} {b:?} {c:?}");
        }
    }
}

#[test]
fn the_sum_adds_distant_lanes_first() {
    // With the order (i, i + 8), (i, i + 4), ... the large values cancel before the small ones come in.
    let mut lanes = [0.0; LANES];
    (lanes[3], lanes[11]) = (1e8, -1e8);
    (lanes[0], lanes[8], lanes[7]) = (1.0, 2.0, 0.25);
    for isa in Isa::available() {
        assert_eq!(isa.sum(&lanes).to_bits(), 3.25_f32.to_bits(), "{isa:?}");
    }
}

#[test]
fn a_sum_goes_over_blocks_of_sixteen_with_zeros_after_the_end() {
    let x: Vec<f32> = (0..37).map(|i| 1.0 / (i as f32 + 1.5)).collect();
    let y: Vec<f32> = (0..37).map(|i| (i as f32 * 0.7).sin()).collect();
    let mut lanes = [0.0_f32; LANES];
    for (i, (x, y)) in x.iter().zip(&y).enumerate() {
        lanes[i % LANES] = x.mul_add(*y, lanes[i % LANES]);
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    for isa in Isa::available() {
        assert_eq!(isa.dot(&x, &y).to_bits(), lanes[0].to_bits(), "{isa:?}");
        let mut z = y.clone();
        isa.axpy(0.3, &x, &mut z);
        isa.add(&x, &mut z);
        isa.scale(0.7, &mut z);
        for i in 0..37 {
            assert_eq!(z[i].to_bits(), ((0.3_f32.mul_add(x[i], y[i]) + x[i]) * 0.7).to_bits(), "{isa:?}");
        }
    }
}
