//! Random weights and activations for tests, with the f64 values that they stand for.

#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::unwrap_used, reason = "a failure is a failed test")]

use glimmer_checkpoint::{Bytes, DType, TensorData};
use glimmer_tensor::{
    Backend, Cpu, Linear, MatrixSource,
    cpu::{CpuBuffer, CpuMatrix, CpuVector},
};

/// A small generator (SplitMix64).
#[derive(Debug, Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Uniform in -1 .. 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
}

/// Rounds to BF16 by cutting.
pub(crate) fn cut(v: f32) -> f32 {
    f32::from_bits(v.to_bits() & 0xffff_0000)
}

/// A tensor whose bytes start at an odd address.
pub(crate) fn tensor(name: &str, dtype: DType, shape: &[usize], bytes: &[u8]) -> TensorData {
    let mut shifted = vec![0; 1];
    shifted.extend_from_slice(bytes);
    let bytes = Bytes::new(shifted).slice(1..bytes.len() + 1).unwrap();
    TensorData { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes }
}

pub(crate) fn bf16(name: &str, shape: &[usize], values: &[f32]) -> TensorData {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_bits().to_le_bytes()[2..].to_vec()).collect();
    tensor(name, DType::Bf16, shape, &bytes)
}

pub(crate) fn f32s(name: &str, shape: &[usize], values: &[f32]) -> TensorData {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    tensor(name, DType::F32, shape, &bytes)
}

/// How a matrix is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Bf16,
    F32,
    Int4,
}

pub(crate) const KINDS: [Kind; 3] = [Kind::Bf16, Kind::F32, Kind::Int4];

/// A random matrix and its values, `[out, columns]`.
pub(crate) fn matrix(random: &mut Random, kind: Kind, out: usize, columns: usize) -> (CpuMatrix, Vec<f64>) {
    let cpu = Cpu::new(1);
    let widen = |values: &[f32]| values.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>();
    match kind {
        Kind::Bf16 => {
            let values: Vec<f32> = random.values(out * columns).into_iter().map(cut).collect();
            let source = bf16("w", &[out, columns], &values);
            (cpu.matrix(MatrixSource::Dense(&source)).unwrap(), widen(&values))
        }
        Kind::F32 => {
            let values = random.values(out * columns);
            let source = f32s("w", &[out, columns], &values);
            (cpu.matrix(MatrixSource::Dense(&source)).unwrap(), widen(&values))
        }
        Kind::Int4 => {
            let words: Vec<u32> = (0..out * columns / 8).map(|_| random.bits() as u32).collect();
            let scales: Vec<f32> = random.values(out * columns / 128).into_iter().map(|s| cut(s / 8.0)).collect();
            let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            let packed = tensor("w.weight_packed", DType::I32, &[out, columns / 8], &bytes);
            let scale = bf16("w.weight_scale", &[out, columns / 128], &scales);
            let values = (0..out * columns)
                .map(|i| {
                    let code = (words[i / 8] >> (4 * (i % 8))) & 15;
                    f64::from(scales[i / 128]) * (f64::from(code) - 8.0)
                })
                .collect();
            (cpu.matrix(MatrixSource::Int4 { packed: &packed, scale: &scale }).unwrap(), values)
        }
    }
}

pub(crate) fn linear(random: &mut Random, kind: Kind, out: usize, columns: usize) -> (Linear<Cpu>, Vec<f64>) {
    let (weight, values) = matrix(random, kind, out, columns);
    (Linear { weight, bias: None }, values)
}

pub(crate) fn vector(values: &[f32]) -> CpuVector {
    CpuVector::new(values).unwrap()
}

pub(crate) fn buffer(rows: usize, width: usize, values: &[f32]) -> CpuBuffer {
    let mut buffer = CpuBuffer::new(rows, width).unwrap();
    buffer.as_mut_slice().copy_from_slice(values);
    buffer
}

/// Bits of values, all NaN alike.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| if v.is_nan() { u32::MAX } else { v.to_bits() }).collect()
}

/// `W x` in f64, and `|W| |x|` for error bounds.
pub(crate) fn product(values: &[f64], columns: usize, x: &[f64]) -> Vec<(f64, f64)> {
    values
        .chunks(columns)
        .map(|row| {
            let terms = row.iter().zip(x).map(|(w, x)| w * x);
            (terms.clone().sum(), terms.map(f64::abs).sum())
        })
        .collect()
}

pub(crate) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| f64::from(v)).collect()
}
