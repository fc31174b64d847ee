//! Speed of the solver against the machine's multiply-add rate, measured in the same run.

use std::time::{Duration, Instant};

use glimmer_tensor::Cpu;
use glimmer_tensor::cpu::bench::fma_rate;

use crate::gptq::{DeadColumns, Factor, Order, Settings};
use crate::hessian::{Moments, Shrunk};
use crate::real::Precision;
use crate::scales::{ScaleRule, scales};

/// Repetitions, of which the fastest counts.
const REPEATS: usize = 4;
/// Time to measure the multiply-add rate in.
const PATIENCE: Duration = Duration::from_millis(400);

/// One size of the solver bench.
#[derive(Debug, Clone, serde::Serialize)]
pub struct SolveSpeed {
    /// Columns of the Hessian.
    pub n: usize,
    /// Rows of the matrix.
    pub rows: usize,
    /// Threads.
    pub threads: usize,
    /// Seconds to accumulate the Hessian, of `2 n` tokens.
    pub hessian_seconds: f64,
    /// Its rate in GFLOP/s (`tokens * n^2`: one triangle).
    pub hessian_gflops: f64,
    /// Seconds to search the importance-weighted scales.
    pub scales_seconds: f64,
    /// Seconds of the factorisation.
    pub factor_seconds: f64,
    /// Seconds of the solve: factorisation and rounding.
    pub solve_seconds: f64,
    /// Its rate in GFLOP/s (`n^3 / 3 + rows n^2`: what the recursion really computes).
    pub solve_gflops: f64,
    /// f32 multiply-add rate of the machine on as many threads, in registers alone, GFLOP/s.
    pub peak_gflops: f64,
    /// `solve_gflops / peak_gflops`.
    pub ratio: f64,
}

/// Accumulates a Hessian of `2 n` synthetic tokens and solves a matrix `[rows, n]` with it.
pub fn solve_speed(n: usize, rows: usize, threads: usize) -> SolveSpeed {
    let mut state = 1u32;
    let mut noise = |count: usize| -> Vec<f32> {
        (0..count)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 16) as f32 / 32_768.0 - 1.0
            })
            .collect()
    };
    let group = 128.min(n);
    let tokens = 2 * n;
    let (x, w) = (noise(tokens * n), noise(rows * n));
    let mut h = Moments::with_precision(n, Precision::Single);
    let cpu = Cpu::new(threads);
    let peak_gflops = fma_rate(&cpu, PATIENCE) * 1e-9;
    let pool = Some(cpu.pool());
    let start = Instant::now();
    h.add(&x, pool).expect("the noise is finite");
    let h = h.finish();
    let hessian_seconds = start.elapsed().as_secs_f64();
    let settings = Settings { order: Order::Static, damp: 0.01, dead: DeadColumns::Keep };
    let mut scales_seconds = f64::INFINITY;
    let mut factor_seconds = f64::INFINITY;
    let mut round_seconds = f64::INFINITY;
    for _ in 0..REPEATS {
        let start = Instant::now();
        let factor = Factor::new(&Shrunk::own(&h), &settings, pool);
        factor_seconds = factor_seconds.min(start.elapsed().as_secs_f64());
        let start = Instant::now();
        let scales = scales(ScaleRule::Imse, &w, n, group, Some(factor.importance()));
        scales_seconds = scales_seconds.min(start.elapsed().as_secs_f64());
        let start = Instant::now();
        std::hint::black_box(factor.solve(&w, &scales, group, pool));
        round_seconds = round_seconds.min(start.elapsed().as_secs_f64());
    }
    let solve_seconds = factor_seconds + round_seconds;
    let (n, rows) = (n as f64, rows as f64);
    let solve_gflops = (n * n * n / 3.0 + rows * n * n) / solve_seconds / 1e9;
    SolveSpeed {
        n: n as usize,
        rows: rows as usize,
        threads,
        hessian_seconds,
        hessian_gflops: tokens as f64 * n * n / hessian_seconds / 1e9,
        scales_seconds,
        factor_seconds,
        solve_seconds,
        solve_gflops,
        peak_gflops,
        ratio: solve_gflops / peak_gflops,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bench_measures_something() {
        let s = solve_speed(256, 64, 1);
        assert!(s.solve_gflops > 0.0 && s.peak_gflops > 0.0 && s.ratio.is_finite());
    }
}
