//! Speed of the solver against the machine's multiply-add rate, measured in the same run.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use glimmer_tensor::Cpu;
use glimmer_tensor::cpu::Pool;
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
    /// f32 multiply-add rate of the machine on as many threads, in registers alone, GFLOP/s.
    pub peak_gflops: f64,
    /// A matrix on each thread at the same time, as the pipeline solves the experts of a layer.
    pub apart: Solves,
    /// All threads on one matrix, as the pipeline does when its budget holds no more.
    pub together: Solves,
}

/// How fast matrices were solved.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Solves {
    /// Matrices at the same time.
    pub matrices: usize,
    /// Seconds until all of them are solved, factorisation and rounding, of the fastest repetition.
    pub seconds: f64,
    /// Rate in GFLOP/s (`n^3 / 3 + rows n^2` a matrix: what the recursion really computes).
    pub gflops: f64,
    /// `gflops` over the multiply-add rate.
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
    let factor = Factor::new(&Shrunk::own(&h), &settings, pool);
    let start = Instant::now();
    let scales = scales(ScaleRule::Imse, &w, n, group, Some(factor.importance()));
    let scales_seconds = start.elapsed().as_secs_f64();
    let solve = |pool: Option<&Pool>| {
        let factor = Factor::new(&Shrunk::own(&h), &settings, pool);
        std::hint::black_box(factor.solve(&w, &scales, group, pool));
    };
    let rate = |matrices: usize, seconds: f64| {
        let (n, rows) = (n as f64, rows as f64);
        let gflops = matrices as f64 * (n * n * n / 3.0 + rows * n * n) / seconds / 1e9;
        Solves { matrices, seconds, gflops, ratio: gflops / peak_gflops }
    };
    SolveSpeed {
        n,
        rows,
        threads,
        hessian_seconds,
        hessian_gflops: (tokens * n * n) as f64 / hessian_seconds / 1e9,
        scales_seconds,
        peak_gflops,
        apart: rate(threads, apart(threads, || solve(None))),
        together: rate(1, (0..REPEATS).map(|_| seconds(|| solve(pool))).fold(f64::INFINITY, f64::min)),
    }
}

/// Seconds of `work`.
fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

/// Seconds from the start until the last of `threads` threads has done `work`, of the fastest repetition; the threads live
/// through all of them, as the pipeline's do.
fn apart(threads: usize, work: impl Fn() + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let repeat = || {
        let mut repeats = [0.0; REPEATS];
        for time in &mut repeats {
            barrier.wait();
            *time = seconds(|| {
                work();
                barrier.wait();
            });
        }
        repeats.into_iter().fold(f64::INFINITY, f64::min)
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(repeat)).collect();
        let mine = repeat();
        others.into_iter().map(|t| t.join().expect("a solve does not panic")).fold(mine, f64::max)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bench_measures_something() {
        let s = solve_speed(256, 64, 2);
        assert!(s.peak_gflops > 0.0);
        for solves in [s.apart, s.together] {
            assert!(solves.gflops > 0.0 && solves.ratio.is_finite() && solves.seconds > 0.0);
        }
    }
}
