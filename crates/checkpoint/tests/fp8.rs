//! FP8 sources: all 256 codes, block scales with partial edges, and the view of a checkpoint as BF16.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

use glimmer_checkpoint::{
    Bytes, Checkpoint, DType, Error, Fault, TensorData, TensorHeader,
    fp8::{self, E4M3},
};
use half::bf16;

mod files;

#[test]
fn every_code_has_its_value() {
    for code in 0..=255u8 {
        let (sign, exponent, mantissa) = (code >> 7, i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = match exponent {
            15 if code & 7 == 7 => f64::NAN,
            0 => mantissa / 8.0 * 2f64.powi(-6),
            e => (1.0 + mantissa / 8.0) * 2f64.powi(e - 7),
        };
        let expected = if sign == 1 { -magnitude } else { magnitude };
        let found = f64::from(E4M3[usize::from(code)]);
        assert!(found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(), "code {code:#04x}");
        assert!(found.is_nan() || E4M3[usize::from(code)].is_sign_negative() == (sign == 1));
    }
    assert_eq!(E4M3[0x7e].to_bits(), 448.0f32.to_bits());
    assert_eq!(E4M3[0x01].to_bits(), (2.0f32).powi(-9).to_bits());
    assert!(E4M3[0x7f].is_nan() && E4M3[0xff].is_nan());
    assert_eq!(E4M3.iter().filter(|x| x.is_nan()).count(), 2);
}

/// A checkpoint with an FP8 weight of `rows x cols` and its scale.
fn files(rows: usize, cols: usize, scale_shape: [usize; 2]) -> Vec<(String, Bytes)> {
    let codes: Vec<u8> = (0..rows * cols).map(|i| u8::try_from(i * 37 % 127).unwrap()).collect();
    let scales: Vec<u8> =
        (0..scale_shape[0] * scale_shape[1]).flat_map(|i| (0.1f32 + i as f32 * 0.37).to_le_bytes()).collect();
    files::single(&[
        ("model.x.weight", DType::F8E4M3, &[rows, cols], &codes),
        ("model.x.weight_scale_inv", DType::F32, &scale_shape, &scales),
        ("model.y.weight", DType::Bf16, &[1], &[1, 2]),
    ])
}

#[test]
fn weights_widen_by_blocks_with_partial_edges() {
    for (rows, cols) in [(128usize, 128usize), (130, 300), (1, 1), (256, 129), (127, 256)] {
        let blocks = [rows.div_ceil(128), cols.div_ceil(128)];
        let checkpoint = Checkpoint::from_files(files(rows, cols, blocks)).unwrap();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["model.x.weight", "model.y.weight"]);
        assert_eq!(checkpoint.describe("model.x.weight"), Some((DType::Bf16, &[rows, cols][..])));
        let tensor: TensorData = checkpoint.tensor("model.x.weight").unwrap();
        assert_eq!((tensor.dtype, tensor.shape.as_slice()), (DType::Bf16, &[rows, cols][..]));
        for (i, bytes) in tensor.bytes.as_slice().as_chunks::<2>().0.iter().enumerate() {
            let scale = 0.1f32 + (i / cols / 128 * blocks[1] + i % cols / 128) as f32 * 0.37;
            let expected = bf16::from_f32(E4M3[i * 37 % 127] * scale);
            assert_eq!(*bytes, expected.to_le_bytes(), "{rows} x {cols}, element {i}");
        }
        assert!(!checkpoint.has("model.x.weight_scale_inv"));
        assert!(matches!(checkpoint.tensor("model.x.weight_scale_inv"), Err(Error::NoTensor { .. })));
        assert!(checkpoint.shards().stored(&fp8::scale_name("model.x.weight")).is_some());
    }
}

#[test]
fn attention_and_indexer_projections_widen_like_experts() {
    let names = ["kv_a_proj_with_mqa", "q_a_proj", "q_b_proj", "o_proj", "indexer.wk"]
        .map(|part| format!("model.language_model.layers.3.self_attn.{part}.weight"));
    let expert = "model.language_model.layers.3.mlp.experts.0.up_proj.weight".to_owned();
    let names: Vec<String> = names.into_iter().chain([expert]).collect();
    let scales: Vec<String> = names.iter().map(|name| fp8::scale_name(name)).collect();
    let (codes, scale) = ([0x38, 0x40, 0xb8, 0x00], 3.0f32.to_le_bytes());
    let mut tensors: Vec<(&str, DType, &[usize], &[u8])> = Vec::new();
    for (name, of) in names.iter().zip(&scales) {
        tensors.push((name, DType::F8E4M3, &[2, 2], &codes));
        tensors.push((of, DType::F32, &[1, 1], &scale));
    }
    let checkpoint = Checkpoint::from_files(files::single(&tensors)).unwrap();
    let expected: Vec<u8> = [3.0, 6.0, -3.0, 0.0].iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect();
    for name in &names {
        let tensor = checkpoint.tensor(name).unwrap();
        assert_eq!((tensor.dtype, tensor.bytes.as_slice()), (DType::Bf16, expected.as_slice()), "{name}");
    }
}

#[test]
fn scales_must_fit_their_weights() {
    let fault = |files| match Checkpoint::from_files(files).unwrap_err() {
        Error::Damage(damage) => (damage.fault, damage.tensor.unwrap()),
        other => panic!("{other}"),
    };
    let weight = (Fault::Fp8Scale, "model.x.weight".to_owned());
    assert_eq!(fault(files(130, 128, [1, 1])), weight);
    assert_eq!(fault(files::single(&[("model.x.weight", DType::F8E4M3, &[1, 1], &[0])])), weight);
    assert_eq!(fault(files::single(&[("model.x.weight", DType::F8E4M3, &[1], &[0])])), weight);
    let scale = (Fault::Fp8Scale, "model.x.weight_scale_inv".to_owned());
    assert_eq!(fault(files::single(&[("model.x.weight_scale_inv", DType::F32, &[1, 1], &[0; 4])])), scale);
}

#[test]
fn headers_of_widened_tensors_can_be_written() {
    let checkpoint = Checkpoint::from_files(files(2, 2, [1, 1])).unwrap();
    let header = TensorHeader::from(&checkpoint.tensor("model.x.weight").unwrap());
    assert_eq!((header.dtype, header.bytes()), (DType::Bf16, Some(8)));
}
