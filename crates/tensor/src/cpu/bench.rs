//! What the machine can do and what the kernels reach of it, measured in one run.
//!
//! Machines are shared and clocks move, so only ratios within a run mean something: a matrix-vector product against the
//! read bandwidth, a matrix-matrix product against the rate of fused multiply-adds. Each figure is the best of several
//! repetitions, because disturbances only ever add time. What is read from memory is cut into parts that go by in turn and
//! are timed singly: short enough to pass undisturbed now and then, all together too large for the caches.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use glimmer_checkpoint::Bytes;
use serde::{Deserialize, Serialize};

use super::{
    Cpu, CpuBuffer, CpuMatrix, Isa,
    simd::{Kernel, Simd},
    types::{AlignedVec, GROUP, LANES},
};
use crate::{Backend, Columns, Linear, Result};

/// Parts of what is read from memory.
const PARTS: usize = 24;

/// Independent sums of the multiply-add loop: enough to cover the latency of two units.
const SUMS: usize = 16;

/// What to measure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuBenchPlan {
    /// Size of the array that is read and of the matrices of matrix-vector products; several times the last-level cache.
    pub bytes: usize,
    /// Columns of all matrices, a multiple of 128.
    pub columns: usize,
    /// Outputs of the matrices of matrix-matrix products.
    pub outputs: usize,
    /// Rows of the matrix-matrix products.
    pub rows: Vec<usize>,
    /// Time of each figure, milliseconds; the fastest repetition counts.
    pub patience_ms: u64,
}

impl Default for CpuBenchPlan {
    fn default() -> Self {
        Self { bytes: 192 << 20, columns: 3072, outputs: 3072, rows: vec![4, 16, 64, 128, 512], patience_ms: 400 }
    }
}

impl CpuBenchPlan {
    fn patience(&self) -> Duration {
        Duration::from_millis(self.patience_ms)
    }
}

/// A matrix-matrix product.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProductRate {
    /// Rows of activations.
    pub rows: usize,
    /// BF16 weights, GFLOP/s.
    pub bf16_gflops: f64,
    /// INT4 weights, GFLOP/s.
    pub int4_gflops: f64,
}

/// Measured figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CpuBench {
    /// Threads.
    pub threads: usize,
    /// Instruction set.
    pub isa: String,
    /// Reading an array larger than the caches, GB/s (1e9 bytes).
    pub read_gbps: f64,
    /// f32 fused multiply-adds in registers, GFLOP/s.
    pub fma_gflops: f64,
    /// What a fork and join adds to tasks of two microseconds, one a thread, microseconds.
    pub join_us: f64,
    /// BF16 matrix times vector, GB/s of weights.
    pub bf16_matvec_gbps: f64,
    /// INT4 matrix times vector, GB/s of weights and scales.
    pub int4_matvec_gbps: f64,
    /// Matrix times matrix.
    pub products: Vec<ProductRate>,
}

impl CpuBench {
    /// Share of the read bandwidth that the INT4 matrix-vector product reaches.
    pub fn int4_share_of_read(&self) -> f64 {
        self.int4_matvec_gbps / self.read_gbps
    }

    /// Share of the read bandwidth that the BF16 matrix-vector product reaches.
    pub fn bf16_share_of_read(&self) -> f64 {
        self.bf16_matvec_gbps / self.read_gbps
    }
}

/// Measures a device.
///
/// # Errors
/// When the matrices do not fit into memory.
pub fn measure(cpu: &mut Cpu, plan: &CpuBenchPlan) -> Result<CpuBench> {
    let columns = plan.columns.next_multiple_of(GROUP);
    let parts = |row_bytes: usize, part: fn(usize, usize) -> Linear<Cpu>| -> Vec<Linear<Cpu>> {
        let out = (plan.bytes / PARTS / row_bytes).next_multiple_of(8);
        (0..PARTS).map(|_| part(out, columns)).collect()
    };
    let tall_bf16 = parts(2 * columns, bf16);
    let tall_int4 = parts(columns / 2 + 2 * columns / GROUP, int4);
    let (wide_bf16, wide_int4) = ([bf16(plan.outputs, columns)], [int4(plan.outputs, columns)]);
    let mut products = Vec::new();
    for &rows in &plan.rows {
        let flops = 2.0 * (rows * plan.outputs * columns) as f64;
        products.push(ProductRate {
            rows,
            bf16_gflops: flops / product_seconds(cpu, plan, &wide_bf16, rows)? * 1e-9,
            int4_gflops: flops / product_seconds(cpu, plan, &wide_int4, rows)? * 1e-9,
        });
    }
    Ok(CpuBench {
        threads: cpu.threads(),
        isa: cpu.isa().name().to_owned(),
        read_gbps: read_rate(cpu, plan)? * 1e-9,
        fma_gflops: fma_rate(cpu, plan.patience()) * 1e-9,
        join_us: join_seconds(cpu, plan) * 1e6,
        bf16_matvec_gbps: tall_bf16[0].weight.bytes() as f64 / product_seconds(cpu, plan, &tall_bf16, 1)? * 1e-9,
        int4_matvec_gbps: tall_int4[0].weight.bytes() as f64 / product_seconds(cpu, plan, &tall_int4, 1)? * 1e-9,
        products,
    })
}

/// Seconds of the fastest of the calls that fit into `patience` (at least three).
fn best(patience: Duration, mut call: impl FnMut()) -> f64 {
    call();
    let begin = Instant::now();
    let (mut fastest, mut calls) = (f64::INFINITY, 0);
    while calls < 3 || begin.elapsed() < patience {
        let start = Instant::now();
        call();
        fastest = fastest.min(start.elapsed().as_secs_f64());
        calls += 1;
    }
    fastest
}

/// Bytes of a repeating pattern; BF16 values are small, codes and scales are of all kinds.
fn pattern(len: usize) -> Bytes {
    Bytes::new(
        (0..len)
            .map(|i| if i % 2 == 1 { 0x3d } else { (i.wrapping_mul(0x9e37_79b1) >> 13) as u8 })
            .collect::<Vec<u8>>(),
    )
}

fn bf16(out: usize, columns: usize) -> Linear<Cpu> {
    Linear { weight: CpuMatrix::Bf16 { bytes: pattern(2 * out * columns), out, columns }, bias: None }
}

fn int4(out: usize, columns: usize) -> Linear<Cpu> {
    let (packed, scale) = (pattern(out * columns / 2), pattern(2 * out * columns / GROUP));
    Linear { weight: CpuMatrix::Int4 { packed, scale, out, columns }, bias: None }
}

/// Seconds of the product of one of `parts`, which take turns.
fn product_seconds(cpu: &mut Cpu, plan: &CpuBenchPlan, parts: &[Linear<Cpu>], rows: usize) -> Result<f64> {
    let (out, width) = (parts[0].weight.out(), parts[0].weight.columns());
    let mut turn = parts.iter().cycle();
    let mut x = CpuBuffer::new(rows, width)?;
    for (i, v) in x.as_mut_slice().iter_mut().enumerate() {
        *v = (i % 17) as f32 * 0.1 - 0.8;
    }
    let mut y = CpuBuffer::new(rows, out)?;
    let mut result = Ok(());
    let seconds = best(plan.patience(), || {
        let columns = Columns { buffer: &x, start: 0, width };
        let part = turn.next().map_or(&parts[0], |part| part);
        result = cpu.linear(rows, columns, &[part], &mut y, 0);
        black_box(y.as_slice());
    });
    result.map(|()| seconds)
}

/// f32 that a task reads.
const READ_PIECE: usize = 1 << 15;

struct Read<'a>(&'a [f32]);
impl Kernel for Read<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let mut sums = [simd.splat(0.0); 8];
        for blocks in self.0.as_chunks::<LANES>().0.as_chunks::<8>().0 {
            for i in 0..8 {
                sums[i] = simd.max(sums[i], simd.load(&blocks[i]));
            }
        }
        sums.into_iter()
            .map(
                #[inline(always)]
                |v| simd.sum(v),
            )
            .sum()
    }
}

/// Bytes a second.
fn read_rate(cpu: &Cpu, plan: &CpuBenchPlan) -> Result<f64> {
    let array = AlignedVec::zeroed("an array to read", plan.bytes / 4)?;
    let part = array.as_slice().len() / PARTS;
    let mut turn = (0..PARTS).cycle();
    let seconds = best(plan.patience(), || {
        let first = turn.next().unwrap_or(0) * part;
        let pieces = &array.as_slice()[first..first + part];
        cpu.pool.run(part.div_ceil(READ_PIECE), |task, _| {
            let piece = &pieces[task * READ_PIECE..part.min((task + 1) * READ_PIECE)];
            black_box(cpu.isa.run(Read(piece)));
        });
    });
    Ok((4 * part) as f64 / seconds)
}

struct MultiplyAdd {
    steps: usize,
    factor: f32,
}
impl Kernel for MultiplyAdd {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let (a, b) = (simd.splat(self.factor), simd.splat(1.0));
        if S::WIDE {
            chain::<S, SUMS>(simd, self.steps, a, b)
        } else {
            chain::<S, 5>(simd, self.steps * SUMS / 5, a, b)
        }
    }
}

/// As many independent chains as registers hold.
#[inline(always)]
fn chain<S: Simd, const N: usize>(simd: S, steps: usize, a: S::V, b: S::V) -> f32 {
    let mut sums = [b; N];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = simd.fma(*sum, a, b);
        }
    }
    let mut total = sums[0];
    for sum in &sums[1..] {
        total = simd.add(total, *sum);
    }
    simd.sum(total)
}

/// f32 fused multiply-adds in registers: operations a second, two a multiply-add, of all threads of the device; the best of
/// what fits into `patience`.
pub fn fma_rate(cpu: &Cpu, patience: Duration) -> f64 {
    let steps = if cpu.isa == Isa::Scalar { 2_000 } else { 400_000 };
    let seconds = best(patience, || {
        cpu.pool.run(cpu.threads(), |_, _| {
            black_box(cpu.isa.run(MultiplyAdd { steps, factor: black_box(0.5) }));
        });
    });
    (2 * SUMS * LANES * steps * cpu.threads()) as f64 / seconds
}

/// What a call costs beyond its work: tasks of two microseconds, one a thread, against one of them alone.
fn join_seconds(cpu: &Cpu, plan: &CpuBenchPlan) -> f64 {
    let task = || {
        let start = Instant::now();
        while start.elapsed() < Duration::from_micros(2) {
            std::hint::spin_loop();
        }
    };
    let alone = best(plan.patience() / 10, task);
    let together = best(plan.patience() / 10, || cpu.pool.run(cpu.threads(), |_, _| task()));
    (together - alone).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_is_positive_on_every_instruction_set() {
        let plan = CpuBenchPlan { bytes: 1 << 16, columns: 128, outputs: 8, rows: vec![1, 5], patience_ms: 0 };
        for isa in Isa::available() {
            let bench = measure(&mut Cpu::with_isa(2, isa), &plan).unwrap();
            assert!(bench.join_us >= 0.0);
            let mut figures = vec![bench.read_gbps, bench.fma_gflops];
            figures.extend([bench.bf16_matvec_gbps, bench.int4_matvec_gbps, bench.int4_share_of_read()]);
            figures.extend(bench.products.iter().flat_map(|p| [p.bf16_gflops, p.int4_gflops]));
            assert!(figures.iter().all(|f| f.is_finite() && *f > 0.0), "{bench:?}");
            assert_eq!(bench.products.len(), 2);
        }
    }
}
