//! Helpers of this module's tests: random numbers, buffers, steps.

use super::{Cpu, CpuBuffer, CpuMatrix, CpuVector, Isa};
use crate::{Norm, PAGE_TOKENS, Segment, Step};

/// A small random generator (splitmix64), so that a value can be made from its coordinates.
#[derive(Debug, Clone)]
pub(super) struct Rng(u64);

impl Rng {
    /// The generator of some coordinates.
    pub(super) fn new(coordinates: &[u64]) -> Self {
        let mut rng = Self(0x9e37_79b9);
        for &c in coordinates {
            rng.0 ^= c.wrapping_mul(0xd134_2543_de82_ef95);
            rng.next();
        }
        rng
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `-scale .. scale`.
    pub(super) fn value(&mut self, scale: f32) -> f32 {
        ((self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
    }

    pub(super) fn values(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.value(scale)).collect()
    }

    /// Values that BF16 represents.
    pub(super) fn bf16(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| f32::from_bits(self.value(scale).to_bits() & 0xffff_0000)).collect()
    }
}

pub(super) fn buffer(rows: &[Vec<f32>]) -> CpuBuffer {
    let mut buffer = CpuBuffer::new(rows.len(), rows[0].len()).unwrap();
    for (i, row) in rows.iter().enumerate() {
        buffer.row_mut(i).copy_from_slice(row);
    }
    buffer
}

pub(super) fn rows_of(buffer: &CpuBuffer, rows: usize) -> Vec<Vec<f32>> {
    (0..rows).map(|i| buffer.row(i).to_vec()).collect()
}

pub(super) fn vector(values: &[f32]) -> CpuVector {
    CpuVector::new(values).unwrap()
}

pub(super) fn matrix(out: usize, values: &[f32]) -> CpuMatrix {
    CpuMatrix::from_values("test", out, values).unwrap()
}

pub(super) fn norm(weight: &[f32], bias: Option<&[f32]>, eps: f32) -> Norm<Cpu> {
    Norm { weight: vector(weight), bias: bias.map(vector), eps }
}

/// Devices whose results must be equal: every instruction set with one thread, the best with three.
pub(super) fn devices() -> Vec<Cpu> {
    let mut devices: Vec<_> = Isa::available().map(|isa| Cpu::with_isa(1, isa)).collect();
    devices.push(Cpu::new(3));
    devices
}

/// A segment that commits its rows.
pub(super) fn segment(slot: usize, position: usize, rows: usize) -> Segment {
    Segment {
        slot: slot as u32,
        position: position as u32,
        rows: rows as u32,
        fold: 0,
        commit: rows as u32,
        first_page: 0,
        pages: 0,
    }
}

/// A step of the segments. The sequence in slot `s` of `slots` has the pages `s`, `s + slots`, ...: interleaved, so that a
/// page taken for a neighbour shows.
pub(super) fn step(slots: usize, segments: &[Segment]) -> Step {
    let mut step = Step::default();
    for s in segments {
        let pages = (s.position as usize + s.rows as usize).div_ceil(PAGE_TOKENS);
        step.segments.push(Segment { first_page: step.pages.len() as u32, pages: pages as u32, ..*s });
        step.pages.extend((0..pages).map(|p| (p * slots + s.slot as usize) as u32));
        step.tokens.extend((0..s.rows).map(|_| 0));
    }
    step
}

pub(super) fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|r| r.iter().map(|v| v.to_bits()).collect()).collect()
}

#[track_caller]
pub(super) fn close(found: &[f32], expected: &[f64], bound: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (&f, &e)) in found.iter().zip(expected).enumerate() {
        assert!((f64::from(f) - e).abs() <= bound, "{what}, element {i}: {f} against {e}");
    }
}

pub(super) fn sigmoid64(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
