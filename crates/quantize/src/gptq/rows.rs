//! The recursion over some rows of a matrix: strips of columns one by one, everything between them by matrix products.

use glimmer_tensor::cpu::simd::{Isa, Kernel, Simd};
use glimmer_tensor::gemm::{Region, Sign, View, gemm};
use half::bf16;

use super::{Factor, Triangle};
use crate::real::Real;
use crate::spare;

/// Columns that are rounded one by one; wider ranges are halved, the first half's errors carried over by one product.
const STRIP: usize = 32;
/// Rows that are rounded together.
pub(super) const LANES: usize = 64;
/// Rows that are solved at a time: targets and errors of as many columns as an expert has then fit into a last-level cache,
/// and what a product with the factor's triangle costs beyond its arithmetic is spread over enough of them.
const ROWS: usize = 512;
/// Ranges of at most so many columns are solved for [`BLOCK_ROWS`] rows at a time: the products inside them are small, and
/// their operands then come from the near caches.
const BLOCK: usize = 256;
/// Rows of such a block: with [`BLOCK`] columns, targets and errors take half a megabyte.
const BLOCK_ROWS: usize = 256;

/// Some rows of a solve.
pub(super) struct Part<'a, T> {
    pub(super) factor: &'a Factor,
    pub(super) triangle: &'a Triangle<T>,
    pub(super) group: usize,
    /// Weights and scales from the part's first row on; there are as many rows as losses.
    pub(super) w: &'a [f32],
    pub(super) scales: &'a [bf16],
    pub(super) codes: &'a mut [i8],
    pub(super) losses: &'a mut [f64],
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
    /// Rounds the rows.
    pub(super) fn run(mut self) {
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
