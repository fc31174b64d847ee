//! Packing and arithmetic against vectors made with compressed-tensors, and properties.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

use std::collections::HashMap;

use glimmer_checkpoint::{
    DType,
    header::Header,
    int4::{self, PackedMatrix, Quotient},
};
use half::bf16;
use proptest::prelude::*;
use serde_json::Value;

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/vectors/pack_quantized");

struct Vector {
    dtype: DType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Vector {
    fn floats(&self) -> Vec<f32> {
        match self.dtype {
            DType::Bf16 => self.bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            DType::F32 => self.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            other => panic!("{other}"),
        }
    }

    fn codes(&self) -> Vec<i8> {
        assert_eq!(self.dtype, DType::I8);
        self.bytes.iter().map(|b| b.cast_signed()).collect()
    }
}

fn cases() -> (Vec<Value>, HashMap<String, Vector>) {
    let bytes = std::fs::read(format!("{VECTORS}.safetensors")).unwrap();
    let header = Header::parse("pack_quantized.safetensors", &bytes).unwrap();
    let vectors = header
        .tensors
        .into_iter()
        .map(|t| (t.name, Vector { dtype: t.dtype, shape: t.shape, bytes: bytes[t.range].to_vec() }));
    let list: Value = serde_json::from_str(&std::fs::read_to_string(format!("{VECTORS}.json")).unwrap()).unwrap();
    (list["cases"].as_array().unwrap().clone(), vectors.collect())
}

fn size(case: &Value, key: &str) -> Option<usize> {
    case[key].as_u64().map(|n| usize::try_from(n).unwrap())
}

#[test]
fn packing_equals_all_vectors() {
    let (cases, vectors) = cases();
    assert_eq!(cases.len(), 17);
    for case in &cases {
        let name = case["name"].as_str().unwrap();
        let (rows, cols, bits) = (
            size(case, "rows").unwrap(),
            size(case, "cols").unwrap(),
            u32::try_from(size(case, "bits").unwrap()).unwrap(),
        );
        let part = |part: &str| &vectors[&format!("{name}.{part}")];
        let codes = part("q").codes();
        let packed = &part("weight_packed");
        assert_eq!(packed.shape, [rows, int4::words(cols, bits)], "{name}");
        assert_eq!(int4::pack(&codes, cols, bits).unwrap(), packed.bytes, "{name}: packing");
        assert_eq!(int4::unpack(&packed.bytes, cols, bits).unwrap(), codes, "{name}: unpacking");
        assert_eq!(int4::shape_bytes(rows, cols).as_slice(), part("weight_shape").bytes, "{name}: shape");
    }
}

#[test]
fn zero_points_are_packed_along_the_rows() {
    let (_, vectors) = cases();
    let (packed, q) = (&vectors["asym_16x32_g16.weight_zero_point"], &vectors["asym_16x32_g16.q"]);
    let (groups, rows) = (packed.shape[1], q.shape[0]);
    assert_eq!(packed.shape, [int4::words(rows, 4), groups]);
    // Packing along dim 0 is packing of the transpose.
    let words = packed.bytes.as_chunks::<4>().0;
    let transposed: Vec<u8> =
        (0..groups).flat_map(|g| (0..packed.shape[0]).flat_map(move |r| words[r * groups + g])).collect();
    let zero_points = int4::unpack(&transposed, rows, 4).unwrap();
    let (scale, weights) =
        (vectors["asym_16x32_g16.weight_scale"].floats(), vectors["asym_16x32_g16.weight_dequant"].floats());
    for (i, &code) in q.codes().iter().enumerate() {
        let (row, group) = (i / 32, i % 32 / 16);
        let steps = f32::from(code) - f32::from(zero_points[group * rows + row]);
        let weight = bf16::from_f32(steps * scale[row * groups + group]).to_f32();
        assert_eq!(weight.to_bits(), weights[i].to_bits(), "element {i}");
    }
}

#[test]
fn symmetric_arithmetic_equals_the_vectors() {
    let (cases, vectors) = cases();
    let mut compared = 0;
    for case in cases.iter().filter(|case| case["symmetric"] == true) {
        let name = case["name"].as_str().unwrap();
        let (cols, bits) = (size(case, "cols").unwrap(), u32::try_from(size(case, "bits").unwrap()).unwrap());
        let group = size(case, "group_size").unwrap_or(cols);
        let part = |part: &str| &vectors[&format!("{name}.{part}")];
        let (weights, scales, codes) = (part("weight_in").floats(), part("weight_scale").floats(), part("q").codes());
        let dequantized = part("weight_dequant");
        assert_eq!(dequantized.dtype, part("weight_scale").dtype, "{name}");
        // The quotient is formed in the scale's type.
        let quotient = if dequantized.dtype == DType::F32 { Quotient::F32 } else { Quotient::Bf16 };
        let mut found = vec![0; group];
        for (g, (weights, expected)) in weights.chunks(group).zip(codes.chunks(group)).enumerate() {
            int4::quantize(weights, scales[g], quotient, bits, &mut found);
            assert_eq!(found, expected, "{name}, group {g}");
            for (&code, back) in expected.iter().zip(&dequantized.floats()[g * group..]) {
                let product = f32::from(code) * scales[g];
                let weight = if quotient == Quotient::F32 {
                    product
                } else {
                    int4::dequantize(code, bf16::from_f32(scales[g])).to_f32()
                };
                assert_eq!(weight.to_bits(), back.to_bits(), "{name}, group {g}");
                // Quantizing again with the same scale changes nothing.
                let mut again = [0];
                int4::quantize(&[weight], scales[g], quotient, bits, &mut again);
                assert_eq!(again[0], code, "{name}, group {g}: idempotence");
            }
            if quotient == Quotient::Bf16 && !["ramp_1x8_g8", "sat_1x8_g8", "half_1x16_g16"].contains(&name) {
                assert_eq!(
                    int4::minmax_scale(weights, bits).to_f32().to_bits(),
                    scales[g].to_bits(),
                    "{name}, group {g}"
                );
                compared += 1;
            }
        }
    }
    assert!(compared > 200, "only {compared} scales compared");
}

#[test]
fn quotient_precision_matters() {
    let (_, vectors) = cases();
    let weights = vectors["expert_64x128_g128.weight_in"].floats();
    let exact = PackedMatrix::round_to_nearest(&weights, 128, Quotient::F32).unwrap();
    let parity = PackedMatrix::round_to_nearest(&weights, 128, Quotient::Bf16).unwrap();
    assert_eq!(parity.packed, vectors["expert_64x128_g128.weight_packed"].bytes);
    let codes = |m: &PackedMatrix| int4::unpack(&m.packed, 128, 4).unwrap();
    let different = codes(&exact).iter().zip(codes(&parity)).filter(|(a, b)| **a != *b).count();
    assert_eq!(different, 48);
}

#[test]
fn matrix_dequantizes_to_the_vector() {
    let (_, vectors) = cases();
    for name in
        ["expert_48x384_g128", "zero_group_4x256_g128", "outlier_4x256_g128", "tiny_4x128_g128", "large_4x128_g128"]
    {
        let part = |part: &str| &vectors[&format!("{name}.{part}")];
        let cols = part("weight_in").shape[1];
        let weights = int4::dequantize_matrix(&part("weight_packed").bytes, &part("weight_scale").bytes, cols).unwrap();
        let bytes: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
        assert_eq!(bytes, part("weight_dequant").bytes, "{name}");
    }
}

#[test]
fn rounding_clamps_first_and_goes_to_even() {
    let mut codes = [0; 12];
    let weights = [-9.0, -8.5, -8.0, -7.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 7.5, f32::INFINITY];
    int4::quantize(&weights, 1.0, Quotient::F32, 4, &mut codes);
    assert_eq!(codes, [-8, -8, -8, -8, -2, -2, 0, 0, 2, 2, 7, 7]);
    int4::quantize(&[f32::NAN], 1.0, Quotient::F32, 4, &mut codes);
    assert!((-8..8).contains(&codes[0]));
    assert_eq!(int4::minmax_scale(&[0.0, -0.0], 4), bf16::from_f32(0.007_812_5));
}

#[test]
fn wrong_sizes_are_refused() {
    assert!(int4::pack(&[0; 7], 8, 4).is_err());
    assert!(int4::pack(&[8], 1, 4).is_err());
    assert!(int4::pack(&[0], 1, 9).is_err());
    assert!(int4::unpack(&[0; 5], 8, 4).is_err());
    assert!(int4::unpack(&[0; 4], 0, 4).is_err());
    assert!(int4::dequantize_matrix(&[0; 64], &[0; 2], 100).is_err());
    assert!(int4::dequantize_matrix(&[0; 64], &[0; 4], 128).is_err());
    assert!(PackedMatrix::from_codes(&[0; 128], &[], 128).is_err());
}

proptest! {
    #[test]
    fn packing_round_trips(
        (bits, cols, codes) in (2u32..=8, 1usize..40, 0usize..5).prop_flat_map(|(bits, cols, rows)| {
            let half = 1i16 << (bits - 1);
            let code = (-half..half).prop_map(|q| i8::try_from(q).unwrap());
            (Just(bits), Just(cols), prop::collection::vec(code, rows * cols))
        })
    ) {
        let packed = int4::pack(&codes, cols, bits).unwrap();
        prop_assert_eq!(packed.len(), codes.len() / cols * 4 * int4::words(cols, bits));
        prop_assert_eq!(int4::unpack(&packed, cols, bits).unwrap(), codes);
    }

    #[test]
    fn rounding_equals_the_definition(x in -20.0f32..20.0) {
        let mut code = [0];
        int4::quantize(&[x], 1.0, Quotient::F32, 4, &mut code);
        prop_assert_eq!(f32::from(code[0]).to_bits(), (x.clamp(-8.0, 7.0).round_ties_even() + 0.0).to_bits());
    }
}
