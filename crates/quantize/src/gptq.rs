//! GPTQ in the form of a nearest-plane recursion.
//!
//! Minimises `tr((W - Q) H (W - Q)^T)` over codes, one column after the other. With `H = R R^T`, `R` upper triangular in
//! the order of the columns, the objective is `sum_j (R_jj (t_j - q_j))^2` with
//!
//! `t_j = w_j + sum over i < j of (w_i - q_i) R_ij / R_jj`,
//!
//! so each column is rounded to the code nearest to `t_j`. This is GPTQ exactly: `R^-1` is the upper factor `U` of
//! `H^-1 = U^T U`, and propagating `(t_i - q_i) / U_ii` through the rows of `U` yields the same `t_j`. But it needs neither
//! the inverse of `H` nor its second factorisation: one Cholesky of `H` with rows and columns in *reverse* order, whose
//! `L` is `R` reversed. Ranges of columns are halved recursively, so that nearly all the work is in large matrix products.
//!
//! Scales are fixed beforehand. The error of a column is formed against the stored value, `s * q` rounded to bfloat16.

mod rows;
#[cfg(test)]
mod tests;

use glimmer_tensor::cpu::{Chunks, Pool};
use half::bf16;

use self::rows::{LANES, Part};

use crate::cholesky;
use crate::hessian::Shrunk;
use crate::real::{Precision, Real};
use crate::rtn;
use crate::spare;

/// In which order columns are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// By descending diagonal of `H`; groups stay those of the original columns, so nothing of it is stored.
    Static,
    /// As stored.
    None,
}

/// What becomes of a column whose input was never different from zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeadColumns {
    /// Rounded to nearest: text beyond the calibration may use it.
    Keep,
    /// Set to zero, as llm-compressor does.
    Zero,
}

/// Parameters of a solve.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Order of the columns.
    pub order: Order,
    /// Share of the mean diagonal that is added to the diagonal.
    pub damp: f64,
    /// Dead columns.
    pub dead: DeadColumns,
}

#[derive(Debug)]
struct Triangle<T> {
    /// `[n, n]`, unit lower triangle: `L[p][q] / L[q][q]`.
    unit: Vec<T>,
    /// `[n]`: `L[q][q]`.
    pivots: Vec<T>,
}

#[derive(Debug)]
enum Kind {
    Single(Triangle<f32>),
    Double(Triangle<f64>),
    /// No usable Hessian: round to nearest.
    Rtn,
}

/// A factored Hessian, good for every matrix with these inputs.
#[derive(Debug)]
pub struct Factor {
    n: usize,
    /// Column at each position; positions are rounded from the last to the first.
    columns: Vec<u32>,
    /// `[n]`, by column: set to zero before solving.
    zeroed: Vec<bool>,
    /// Second moments of the inputs, dead ones at the mean; `[n]`.
    importance: Vec<f32>,
    dead: usize,
    damp: Option<f64>,
    failed: usize,
    kind: Kind,
}

impl Drop for Factor {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.kind, Kind::Rtn) {
            Kind::Single(t) => spare::give(t.unit),
            Kind::Double(t) => spare::give(t.unit),
            Kind::Rtn => {}
        }
    }
}

/// Codes of a matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Solution {
    /// `[rows, cols]`.
    pub codes: Vec<i8>,
    /// `tr((W - Q) H (W - Q)^T)` with the damped Hessian (0 after rounding to nearest).
    pub loss: f64,
}

impl Factor {
    /// Factors a Hessian; falls back, in this order, to ten times the dampening (up to 1), to f64, to rounding to nearest.
    pub fn new(h: &Shrunk<'_>, settings: &Settings, threads: Option<&Pool>) -> Self {
        let n = h.n();
        let diagonal = h.diagonal();
        let live: Vec<f64> = diagonal.iter().copied().filter(|&d| d != 0.0).collect();
        let dead = n - live.len();
        let live_mean = live.iter().sum::<f64>() / live.len().max(1) as f64;
        let zero = settings.dead == DeadColumns::Zero && !live.is_empty();
        let diagonal: Vec<f64> = diagonal
            .iter()
            .map(|&d| match d {
                0.0 if zero => 1.0,
                0.0 => live_mean,
                d => d,
            })
            .collect();
        let zeroed: Vec<bool> = (0..n).map(|i| zero && h.diagonal_is_zero(i)).collect();
        let mut columns: Vec<u32> = (0..n as u32).collect();
        if settings.order == Order::Static {
            columns.sort_by(|&a, &b| diagonal[b as usize].total_cmp(&diagonal[a as usize]));
        }
        columns.reverse();
        let mut out = Self {
            n,
            columns,
            zeroed,
            importance: diagonal.iter().map(|&d| d as f32).collect(),
            dead,
            damp: None,
            failed: 0,
            kind: Kind::Rtn,
        };
        if live.is_empty() {
            return out;
        }
        if h.precision() == Precision::Single
            && let Some(t) = out.attempt::<f32>(h, &diagonal, settings.damp, threads)
        {
            out.kind = Kind::Single(t);
            return out;
        }
        if let Some(t) = out.attempt::<f64>(h, &diagonal, settings.damp, threads) {
            out.kind = Kind::Double(t);
        }
        out
    }

    /// Factors in one precision with growing dampening.
    fn attempt<T: Real>(
        &mut self,
        h: &Shrunk<'_>,
        diagonal: &[f64],
        damp: f64,
        threads: Option<&Pool>,
    ) -> Option<Triangle<T>> {
        let n = self.n;
        let mean = diagonal.iter().sum::<f64>() / n as f64;
        let mut a = spare::take::<T>(n * n);
        let mut damp = damp;
        loop {
            let columns = &self.columns;
            for_rows(&mut a, n, threads, |p, row| {
                let i = columns[p] as usize;
                h.gather(i, &columns[..p], row);
                row[p] = T::of_f64(diagonal[i] + damp * mean);
            });
            if cholesky::factor(&mut a, n, threads).is_ok() {
                break;
            }
            self.failed += 1;
            let next = if damp > 0.0 { damp * 10.0 } else { 0.01 };
            if next > 1.0 {
                spare::give(a);
                return None;
            }
            damp = next;
        }
        self.damp = Some(damp);
        let pivots: Vec<T> = (0..n).map(|i| a[i * n + i]).collect();
        for_rows(&mut a, n, threads, |i, row| {
            row[..=i].iter_mut().zip(&pivots).for_each(|(x, &p)| *x = *x / p);
        });
        Some(Triangle { unit: a, pivots })
    }

    /// Second moments of the inputs for weighing scales, `[n]`; dead inputs count as the mean one.
    pub fn importance(&self) -> &[f32] {
        &self.importance
    }

    /// Inputs that were zero for every token.
    pub fn dead(&self) -> usize {
        self.dead
    }

    /// The dampening that worked; `None` when there was no usable Hessian and weights are rounded to nearest.
    pub fn damp(&self) -> Option<f64> {
        self.damp
    }

    /// Factorisations that failed before.
    pub fn failed(&self) -> usize {
        self.failed
    }

    /// Whether the factor is in f64.
    pub fn precision(&self) -> Option<Precision> {
        match self.kind {
            Kind::Single(_) => Some(Precision::Single),
            Kind::Double(_) => Some(Precision::Double),
            Kind::Rtn => None,
        }
    }

    /// Codes of `w` `[rows, n]` at `scales` `[rows, n / group]`. Rows are independent and are split over `threads`, if there are any
    /// besides this one.
    pub fn solve(&self, w: &[f32], scales: &[bf16], group: usize, threads: Option<&Pool>) -> Solution {
        match &self.kind {
            Kind::Single(t) => self.solve_in(t, w, scales, group, threads),
            Kind::Double(t) => self.solve_in(t, w, scales, group, threads),
            Kind::Rtn => Solution { codes: rtn::round(w, scales, group), loss: 0.0 },
        }
    }

    fn solve_in<T: Real>(
        &self,
        triangle: &Triangle<T>,
        w: &[f32],
        scales: &[bf16],
        group: usize,
        threads: Option<&Pool>,
    ) -> Solution {
        let n = self.n;
        let rows = w.len() / n;
        let mut positions = vec![0; n];
        self.columns.iter().zip(0..).for_each(|(&c, p)| positions[c as usize] = p);
        let mut codes = vec![0i8; w.len()];
        let mut losses = vec![0.0f64; rows];
        let share = rows.div_ceil(threads.map_or(1, Pool::threads)).next_multiple_of(LANES);
        let part = |i: usize, codes, losses| {
            let (w, scales) = (&w[i * share * n..], &scales[i * share * (n / group)..]);
            Part { factor: self, triangle, positions: &positions, group, w, scales, codes, losses }.run();
        };
        match threads {
            Some(pool) => {
                let outputs = (Chunks::new(&mut codes, share * n), Chunks::new(&mut losses, share));
                pool.split(outputs, |i, (codes, losses), _| part(i, codes, losses));
            }
            None => part(0, &mut codes, &mut losses),
        }
        Solution { codes, loss: losses.iter().sum() }
    }
}

/// Calls `work` with the index of every row of `a` `[rows, n]` and the row, on `threads` or on this one alone.
fn for_rows<T: Real>(a: &mut [T], n: usize, threads: Option<&Pool>, work: impl Fn(usize, &mut [T]) + Sync) {
    /// Rows of a task.
    const ROWS: usize = 32;
    match threads {
        Some(pool) => pool.split(Chunks::new(a, ROWS * n), |task, rows: &mut [T], _| {
            rows.chunks_exact_mut(n).enumerate().for_each(|(i, row)| work(task * ROWS + i, row));
        }),
        None => a.chunks_exact_mut(n).enumerate().for_each(|(i, row)| work(i, row)),
    }
}
