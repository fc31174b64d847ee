//! Random weights, activations and steps for any backend.

use glimmer_checkpoint::{Bytes, DType, TensorData};
use glimmer_tensor::{Backend, Linear, MatrixSource, Norm, PAGE_TOKENS, Segment, Step, Swiglu};

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

/// How a matrix is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Bf16,
    F32,
    Int4,
}

fn tensor(name: &str, dtype: DType, shape: &[usize], bytes: Vec<u8>) -> TensorData {
    TensorData { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes: Bytes::new(bytes) }
}

pub(crate) fn bf16(shape: &[usize], values: &[f32]) -> TensorData {
    tensor("w", DType::Bf16, shape, values.iter().flat_map(|v| v.to_bits().to_le_bytes()[2..].to_vec()).collect())
}

pub(crate) fn f32s(shape: &[usize], values: &[f32]) -> TensorData {
    tensor("w", DType::F32, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
}

pub(crate) fn matrix<B: Backend>(b: &B, random: &mut Random, kind: Kind, out: usize, columns: usize) -> B::Matrix {
    let scale = (columns as f32).sqrt().recip();
    match kind {
        Kind::Bf16 => {
            let values: Vec<f32> = random.values(out * columns).iter().map(|v| v * scale).collect();
            b.matrix(MatrixSource::Dense(&bf16(&[out, columns], &values))).unwrap()
        }
        Kind::F32 => {
            let values: Vec<f32> = random.values(out * columns).iter().map(|v| v * scale).collect();
            b.matrix(MatrixSource::Dense(&f32s(&[out, columns], &values))).unwrap()
        }
        Kind::Int4 => {
            let words: Vec<u8> = (0..out * columns / 8).flat_map(|_| (random.bits() as u32).to_le_bytes()).collect();
            let scales: Vec<f32> = random.values(out * columns / 128).iter().map(|s| s * scale / 8.0).collect();
            let packed = tensor("w.weight_packed", DType::I32, &[out, columns / 8], words);
            let scale = bf16(&[out, columns / 128], &scales);
            b.matrix(MatrixSource::Int4 { packed: &packed, scale: &scale }).unwrap()
        }
    }
}

pub(crate) fn vector<B: Backend>(b: &B, values: &[f32]) -> B::Vector {
    b.vector(&f32s(&[values.len()], values)).unwrap()
}

pub(crate) fn linear<B: Backend>(
    b: &B,
    random: &mut Random,
    kind: Kind,
    out: usize,
    columns: usize,
    bias: bool,
) -> Linear<B> {
    let weight = matrix(b, random, kind, out, columns);
    let bias = bias.then(|| vector(b, &random.values(out)));
    Linear { weight, bias }
}

pub(crate) fn swiglu<B: Backend>(
    b: &B,
    random: &mut Random,
    kind: Kind,
    [input, width, out]: [usize; 3],
    bias: bool,
) -> Swiglu<B> {
    Swiglu {
        gate: linear(b, random, kind, width, input, bias),
        up: linear(b, random, kind, width, input, bias),
        down: linear(b, random, kind, out, width, bias),
    }
}

pub(crate) fn norm<B: Backend>(b: &B, random: &mut Random, width: usize, bias: bool, eps: f32) -> Norm<B> {
    let weight: Vec<f32> = random.values(width).iter().map(|v| 1.0 + 0.3 * v).collect();
    let bias = bias.then(|| vector(b, &random.values(width)));
    Norm { weight: vector(b, &weight), bias, eps }
}

/// A buffer with these rows.
pub(crate) fn buffer<B: Backend>(b: &B, rows: usize, width: usize, values: &[f32]) -> B::Buffer {
    let mut buffer = b.buffer(rows, width).unwrap();
    for (row, values) in values.chunks_exact(width).enumerate() {
        b.write(&mut buffer, row, values).unwrap();
    }
    buffer
}

pub(crate) fn random_buffer<B: Backend>(b: &B, random: &mut Random, rows: usize, width: usize) -> B::Buffer {
    let values = random.values(rows * width);
    buffer(b, rows, width, &values)
}

/// A buffer full of NaN: what a stage does not write shows.
pub(crate) fn poison<B: Backend>(b: &B, rows: usize, width: usize) -> B::Buffer {
    buffer(b, rows, width, &vec![f32::NAN; rows * width])
}

pub(crate) fn read<B: Backend>(b: &B, buffer: &B::Buffer, rows: usize, width: usize) -> Vec<f32> {
    let mut values = vec![0.0; rows * width];
    for (row, values) in values.chunks_exact_mut(width).enumerate() {
        b.read(buffer, row, values).unwrap();
    }
    values
}

/// A segment: slot, position, rows, fold, commit.
pub(crate) type Part = [usize; 5];

/// A step of segments. The sequence in slot `s` of `slots` has the pages `s`, `s + slots`, ...
pub(crate) fn step(slots: usize, parts: &[Part], random: &mut Random, vocab: usize) -> Step {
    let mut step = Step::default();
    for &[slot, position, rows, fold, commit] in parts {
        let pages = (position + rows).div_ceil(PAGE_TOKENS);
        step.segments.push(Segment {
            slot: slot as u32,
            position: position as u32,
            rows: rows as u32,
            fold: fold as u32,
            commit: commit as u32,
            first_page: step.pages.len() as u32,
            pages: pages as u32,
        });
        step.pages.extend((0..pages).map(|p| (p * slots + slot) as u32));
        step.tokens.extend((0..rows).map(|_| random.below(vocab) as u32));
    }
    step
}
