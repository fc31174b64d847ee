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

use glimmer_tensor::cpu::simd::{Isa, Kernel, Simd};
use glimmer_tensor::cpu::{Chunks, Pool};
use glimmer_tensor::gemm::{Region, Sign, View, gemm};
use half::bf16;

use crate::cholesky;
use crate::hessian::Shrunk;
use crate::real::{Precision, Real};
use crate::rtn;
use crate::spare;

/// Columns that are rounded one by one; wider ranges are halved, the first half's errors carried over by one product.
const STRIP: usize = 32;
/// Rows that are rounded together.
const LANES: usize = 64;
/// Rows that are solved at a time: targets and errors of as many columns as an expert has then fit into a last-level cache,
/// and what a product with the factor's triangle costs beyond its arithmetic is spread over enough of them.
const ROWS: usize = 512;
/// Ranges of at most so many columns are solved for [`BLOCK_ROWS`] rows at a time: the products inside them are small, and
/// their operands then come from the near caches.
const BLOCK: usize = 256;
/// Rows of such a block: with [`BLOCK`] columns, targets and errors take half a megabyte.
const BLOCK_ROWS: usize = 256;

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
        let mut codes = vec![0i8; w.len()];
        let mut losses = vec![0.0f64; rows];
        let share = rows.div_ceil(threads.map_or(1, Pool::threads)).next_multiple_of(LANES);
        let part = |i: usize, codes, losses| {
            let (w, scales) = (&w[i * share * n..], &scales[i * share * (n / group)..]);
            Part { factor: self, triangle, group, w, scales, codes, losses }.run();
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

/// Some rows of a solve.
struct Part<'a, T> {
    factor: &'a Factor,
    triangle: &'a Triangle<T>,
    group: usize,
    /// Weights and scales from the part's first row on; there are as many rows as losses.
    w: &'a [f32],
    scales: &'a [bf16],
    codes: &'a mut [i8],
    losses: &'a mut [f64],
}

/// The working arrays of some rows: a line for each position, `[n, stride]`, whose elements are the rows. Rounding a position
/// then works on whole lines.
struct Work<T> {
    /// Elements of a line.
    stride: usize,
    /// Targets `t`; meaningful for positions that are not rounded yet.
    targets: Vec<T>,
    /// Original weights `w`, replaced by errors `w - q` once rounded.
    errors: Vec<T>,
    /// Scales, a line for each group, `[groups, stride]`.
    scales: Vec<T>,
    /// Codes of rounded positions, `[n, stride]`.
    codes: Vec<i8>,
    /// Sums of squared distances, `[stride]`.
    losses: Vec<T>,
}

impl<T: Real> Part<'_, T> {
    fn run(mut self) {
        let (n, total) = (self.factor.n, self.losses.len());
        // Off the powers of two, so that the lines of a tile do not compete for the same places of the cache.
        let stride = ROWS.min(total).next_multiple_of(LANES) + 16;
        let mut work = Work {
            stride,
            targets: spare::take(n * stride),
            errors: spare::take(n * stride),
            scales: vec![T::ONE; n / self.group * stride],
            codes: vec![0; n * stride],
            losses: vec![T::ZERO; stride],
        };
        for first in (0..total).step_by(ROWS) {
            let rows = ROWS.min(total - first);
            self.load(&mut work, first, rows);
            self.range(&mut work, Block { low: 0, high: n, first: 0, rows: rows.next_multiple_of(LANES) });
            self.store(&work, first, rows);
        }
        spare::give(work.targets);
        spare::give(work.errors);
    }

    /// Turns weights and scales of `rows` rows into lines, filled up to whole vectors.
    fn load(&self, work: &mut Work<T>, first: usize, rows: usize) {
        /// Rows and positions that are turned at a time.
        const TURN: (usize, usize) = (32, 16);
        let Factor { n, columns, zeroed, .. } = self.factor;
        let (n, groups, stride) = (*n, *n / self.group, work.stride);
        // First every row in the order of the positions, which stays inside the row, then squares are turned.
        let mut sorted = vec![0.0f32; TURN.0 * n];
        for from in (0..rows.next_multiple_of(LANES)).step_by(TURN.0) {
            let count = TURN.0.min(rows.saturating_sub(from));
            let source = self.w.chunks_exact(n).skip(first + from).take(count);
            for (row, w) in sorted.chunks_exact_mut(n).zip(source) {
                for (x, &c) in row.iter_mut().zip(columns) {
                    *x = w[c as usize];
                }
            }
            sorted[count * n..].fill(0.0);
            for low in (0..n).step_by(TURN.1) {
                let width = TURN.1.min(n - low);
                let mut square = [[T::ZERO; TURN.0]; TURN.1];
                for (r, row) in sorted.chunks_exact(n).enumerate() {
                    for (line, &x) in square.iter_mut().zip(&row[low..low + width]) {
                        line[r] = T::of(x);
                    }
                }
                for (p, line) in (low..low + width).zip(&mut square) {
                    if zeroed[columns[p] as usize] {
                        line.fill(T::ZERO);
                    }
                    work.targets[p * stride + from..][..TURN.0].copy_from_slice(line);
                    work.errors[p * stride + from..][..TURN.0].copy_from_slice(line);
                }
            }
        }
        for (r, row) in self.scales.chunks_exact(groups).skip(first).take(rows).enumerate() {
            row.iter().enumerate().for_each(|(g, s)| work.scales[g * stride + r] = T::of(s.to_f32()));
        }
        work.losses.fill(T::ZERO);
    }

    /// Turns the lines of codes back into rows.
    fn store(&mut self, work: &Work<T>, first: usize, rows: usize) {
        /// Edge of the squares that are turned.
        const TURN: usize = 64;
        let Factor { n, columns, .. } = self.factor;
        let (n, stride) = (*n, work.stride);
        let mut sorted = vec![0i8; TURN * n];
        for from in (0..rows).step_by(TURN) {
            for low in (0..n).step_by(TURN) {
                let width = TURN.min(n - low);
                let mut square = [[0i8; TURN]; TURN];
                for (p, line) in work.codes[low * stride..].chunks(stride).take(width).enumerate() {
                    for (row, &code) in square.iter_mut().zip(&line[from..from + TURN]) {
                        row[p] = code;
                    }
                }
                for (row, square) in sorted.chunks_exact_mut(n).zip(&square) {
                    row[low..low + width].copy_from_slice(&square[..width]);
                }
            }
            let target = self.codes.chunks_exact_mut(n).skip(first + from).take(TURN.min(rows - from));
            for (row, sorted) in target.zip(sorted.chunks_exact(n)) {
                for (&code, &c) in sorted.iter().zip(columns) {
                    row[c as usize] = code;
                }
            }
        }
        self.losses[first..first + rows].iter_mut().zip(&work.losses).for_each(|(total, l)| *total = l.to_f64());
    }

    /// Rounds the positions `high - 1` down to `low`, whose targets include everything from `high` on.
    fn range(&mut self, work: &mut Work<T>, block: Block) {
        let Block { low, high, first, rows } = block;
        let width = high - low;
        if width <= STRIP {
            return Isa::best().run(Strip { part: self, work, block });
        }
        if width <= BLOCK && rows > BLOCK_ROWS {
            for from in (first..first + rows).step_by(BLOCK_ROWS) {
                self.range(work, Block { first: from, rows: BLOCK_ROWS.min(first + rows - from), ..block });
            }
            return;
        }
        let half = (width.next_power_of_two() / 2).max(STRIP);
        let middle = low + half;
        self.range(work, Block { low: middle, ..block });
        let (n, stride) = (self.factor.n, work.stride);
        let unit = View::new(&self.triangle.unit[middle * n + low..], high - middle, half, n);
        let errors = View::new(&work.errors[middle * stride + first..], high - middle, rows, stride);
        let targets = &mut work.targets[low * stride + first..middle * stride];
        gemm(Sign::Plus, unit.transposed(), errors, targets, stride, Region::Full, None);
        self.range(work, Block { high: middle, ..block });
    }
}

/// Positions `low..high` of the rows `first..first + rows` of a part, padding included.
#[derive(Debug, Clone, Copy)]
struct Block {
    low: usize,
    high: usize,
    first: usize,
    rows: usize,
}

/// [`Part::range`] over few positions, one after the other.
struct Strip<'p, 'a, T> {
    part: &'p mut Part<'a, T>,
    work: &'p mut Work<T>,
    block: Block,
}

impl<T: Real> Kernel for Strip<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { part, work, block: Block { low, high, first, rows } } = self;
        let (n, stride, width) = (part.factor.n, work.stride, high - low);
        let mut target = [[T::ZERO; LANES]; STRIP];
        for first in (first..first + rows).step_by(LANES) {
            for (p, line) in target[..width].iter_mut().enumerate() {
                line.copy_from_slice(&work.targets[(low + p) * stride + first..][..LANES]);
            }
            for p in (0..width).rev() {
                let column = part.factor.columns[low + p] as usize;
                let pivot = part.triangle.pivots[low + p];
                let scales = &work.scales[column / part.group * stride + first..][..LANES];
                let errors = &mut work.errors[(low + p) * stride + first..][..LANES];
                let losses = &mut work.losses[first..][..LANES];
                let mut codes = [0i8; LANES];
                for r in 0..LANES {
                    let t = target[p][r];
                    let q = t.code(scales[r]);
                    let stored = (q * scales[r]).to_bf16();
                    let distance = pivot * (t - stored);
                    losses[r] += distance * distance;
                    codes[r] = q.to_code();
                    errors[r] -= stored;
                }
                work.codes[(low + p) * stride + first..][..LANES].copy_from_slice(&codes);
                let unit = &part.triangle.unit[(low + p) * n + low..][..p];
                for (line, &factor) in target[..p].iter_mut().zip(unit) {
                    for (x, &e) in line.iter_mut().zip(&*errors) {
                        *x = e.fma(factor, *x);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hessian::{Hessian, Moments};
    use crate::scales::{ScaleRule, scales};

    const OURS: Settings = Settings { order: Order::Static, damp: 0.01, dead: DeadColumns::Keep };

    fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut s = seed;
        (0..n)
            .map(|_| {
                s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                ((s >> 16) as f32 / 32_768.0 - 1.0).to_bf16()
            })
            .collect()
    }

    fn hessian(x: &[f32], n: usize, precision: Precision) -> Hessian {
        let mut moments = Moments::with_precision(n, precision);
        moments.add(x, None).unwrap();
        moments.finish()
    }

    fn correlated(rows: usize, n: usize, seed: u32) -> Vec<f32> {
        let mut x = noise(rows * n, seed);
        for row in x.chunks_mut(n) {
            for i in 1..n {
                row[i] = row[i] * (1.0 + (i % 5) as f32) + 0.8 * row[i - 1];
            }
        }
        x
    }

    /// The textbook form: inverse of `H`, upper factor of the inverse, errors propagated through its rows; all f64.
    fn textbook(h: &Shrunk<'_>, w: &[f32], scales: &[bf16], group: usize, settings: &Settings) -> Vec<i8> {
        let n = h.n();
        let all: Vec<u32> = (0..n as u32).collect();
        let mut full = vec![0.0f64; n * n];
        full.chunks_mut(n).enumerate().for_each(|(i, row)| h.gather(i, &all, row));
        let diagonal = h.diagonal();
        let mut perm: Vec<usize> = (0..n).collect();
        if settings.order == Order::Static {
            perm.sort_by(|&a, &b| diagonal[b].total_cmp(&diagonal[a]));
        }
        let mean = diagonal.iter().sum::<f64>() / n as f64;
        (0..n).for_each(|i| full[i * n + i] += settings.damp * mean);
        let at = |i: usize, j: usize| full[perm[i] * n + perm[j]];
        // Inverse by Gauss-Jordan, then Cholesky of the inverse: inverse = U^T U.
        let mut a: Vec<Vec<f64>> = (0..n)
            .map(|i| (0..2 * n).map(|j| if j < n { at(i, j) } else { f64::from(j - n == i) }).collect())
            .collect();
        for k in 0..n {
            let pivot = a[k][k];
            a[k].iter_mut().for_each(|x| *x /= pivot);
            for i in 0..n {
                if i != k {
                    let f = a[i][k];
                    let (source, target) = if i < k {
                        let (x, y) = a.split_at_mut(k);
                        (y[0].clone(), &mut x[i])
                    } else {
                        let (x, y) = a.split_at_mut(i);
                        (x[k].clone(), &mut y[0])
                    };
                    target.iter_mut().zip(source).for_each(|(t, s)| *t -= f * s);
                }
            }
        }
        let mut u = vec![0.0; n * n];
        for i in 0..n {
            for j in i..n {
                let s: f64 = a[i][n + j] - (0..i).map(|k| u[k * n + i] * u[k * n + j]).sum::<f64>();
                u[i * n + j] = if i == j { s.sqrt() } else { s / u[i * n + i] };
            }
        }
        let rows = w.len() / n;
        let mut codes = vec![0; w.len()];
        for r in 0..rows {
            let mut row: Vec<f64> = perm.iter().map(|&c| f64::from(w[r * n + c])).collect();
            for j in 0..n {
                let s = f64::from(scales[r * (n / group) + perm[j] / group].to_f32());
                let q = row[j].code(s);
                codes[r * n + perm[j]] = q as i8;
                let e = (row[j] - (q * s).to_bf16()) / u[j * n + j];
                for k in j..n {
                    row[k] -= e * u[j * n + k];
                }
            }
        }
        codes
    }

    #[test]
    fn the_recursion_equals_the_textbook_form() {
        let (n, rows) = (256, 9);
        let h = hessian(&correlated(400, n, 5), n, Precision::Double);
        let w = noise(rows * n, 6);
        for order in [Order::Static, Order::None] {
            let settings = Settings { order, ..OURS };
            let s = scales(ScaleRule::Minmax, &w, n, 128, None);
            let shrunk = Shrunk::own(&h);
            let solution = Factor::new(&shrunk, &settings, None).solve(&w, &s, 128, Some(&Pool::new(2)));
            assert!(solution.codes == textbook(&shrunk, &w, &s, 128, &settings));
        }
    }

    #[test]
    fn loss_is_the_objective() {
        let (n, rows) = (256, 5);
        let h = hessian(&correlated(300, n, 1), n, Precision::Double);
        let w = noise(rows * n, 2);
        let s = scales(ScaleRule::Minmax, &w, n, 128, None);
        let shrunk = Shrunk::own(&h);
        let solution = Factor::new(&shrunk, &OURS, None).solve(&w, &s, 128, None);
        let e: Vec<f32> = rtn::dequantize(&solution.codes, &s, 128).iter().zip(&w).map(|(q, w)| w - q).collect();
        let mean = shrunk.diagonal().iter().sum::<f64>() / n as f64;
        let ridge = OURS.damp * mean * e.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
        let objective = h.energy(&e) + ridge;
        assert!((solution.loss - objective).abs() < 1e-5 * objective, "{} {objective}", solution.loss);
        let rounded = rtn::dequantize(&rtn::round(&w, &s, 128), &s, 128);
        let e: Vec<f32> = rounded.iter().zip(&w).map(|(q, w)| w - q).collect();
        assert!(h.energy(&e) > 1.2 * objective, "GPTQ beats rounding to nearest");
    }

    #[test]
    fn single_precision_agrees_and_threads_do_not_matter() {
        let (n, rows) = (384, 130);
        let x = correlated(900, n, 3);
        let (single, double) = (hessian(&x, n, Precision::Single), hessian(&x, n, Precision::Double));
        let w = noise(rows * n, 4);
        let s = scales(ScaleRule::Minmax, &w, n, 128, None);
        let exact = Factor::new(&Shrunk::own(&double), &OURS, None).solve(&w, &s, 128, None);
        let factor = Factor::new(&Shrunk::own(&single), &OURS, None);
        assert_eq!(factor.precision(), Some(Precision::Single));
        let one = factor.solve(&w, &s, 128, None);
        let pool = Pool::new(3);
        let three = Factor::new(&Shrunk::own(&single), &OURS, Some(&pool)).solve(&w, &s, 128, Some(&pool));
        assert_eq!(one, three);
        let equal = one.codes.iter().zip(&exact.codes).filter(|(a, b)| a == b).count();
        assert!(equal as f64 > 0.999 * exact.codes.len() as f64, "{equal} of {}", exact.codes.len());
    }

    #[test]
    fn dead_columns_are_kept_or_zeroed_as_asked() {
        let n = 128;
        let mut x = correlated(300, n, 7);
        x.chunks_mut(n).for_each(|row| row[40] = 0.0);
        let h = hessian(&x, n, Precision::Double);
        let w: Vec<f32> = noise(4 * n, 8).iter().map(|x| x + 0.01).collect();
        let s = scales(ScaleRule::Minmax, &w, n, 128, None);
        let nearest = rtn::round(&w, &s, 128);
        for (dead, zero) in [(DeadColumns::Keep, false), (DeadColumns::Zero, true)] {
            let factor = Factor::new(&Shrunk::own(&h), &Settings { dead, ..OURS }, None);
            assert_eq!(factor.dead(), 1);
            let codes = factor.solve(&w, &s, 128, None).codes;
            for r in 0..4 {
                assert_eq!(codes[r * n + 40], if zero { 0 } else { nearest[r * n + 40] });
            }
        }
    }

    #[test]
    fn dampening_escalates_before_anything_else_gives_way() {
        let n = 128;
        // One direction only and no dampening: the second pivot vanishes until dampening is raised.
        let h = hessian(&vec![1.0; n], n, Precision::Double);
        let factor = Factor::new(&Shrunk::own(&h), &Settings { damp: 0.0, ..OURS }, None);
        assert!(factor.failed() >= 1);
        assert_eq!(factor.damp(), Some(0.01));
    }

    #[test]
    fn without_tokens_weights_are_rounded_to_nearest() {
        let n = 128;
        let w = noise(3 * n, 9);
        let s = scales(ScaleRule::Minmax, &w, n, 128, None);
        for dead in [DeadColumns::Keep, DeadColumns::Zero] {
            let h = Moments::new(n).finish();
            let factor = Factor::new(&Shrunk::own(&h), &Settings { dead, ..OURS }, None);
            assert_eq!((factor.damp(), factor.precision()), (None, None));
            assert_eq!(factor.solve(&w, &s, 128, None).codes, rtn::round(&w, &s, 128));
        }
    }
}
