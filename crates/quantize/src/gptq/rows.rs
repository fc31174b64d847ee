//! The recursion over some rows of a matrix: strips of columns one by one, everything between them by matrix products.

use glimmer_tensor::cpu::simd::{Isa, Kernel, Simd};
use glimmer_tensor::gemm::{Region, Sign, View, gemm};
use half::bf16;

use super::{Factor, Triangle};
use crate::real::Real;
use crate::spare;

/// Columns that are rounded one by one; wider ranges are halved, the first half's errors carried over by one product.
const STRIP: usize = 32;
/// Rows that are worked on are filled up to a multiple of this.
pub(super) const LANES: usize = 64;
/// Rows that are rounded together: a vector of f32.
const LINE: usize = 16;
/// Positions that are rounded in registers before their errors meet the other targets of a strip.
const GROUP: usize = 8;
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
    /// Position of each column, `[n]`.
    pub(super) positions: &'a [u32],
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
        let (groups, stride) = (self.factor.n / self.group, work.stride);
        for place in (0..rows).step_by(LANES) {
            let count = LANES.min(rows - place);
            Isa::best().run(Load { part: self, work, first: first + place, count, place });
        }
        for (r, row) in self.scales.chunks_exact(groups).skip(first).take(rows).enumerate() {
            row.iter().enumerate().for_each(|(g, s)| work.scales[g * stride + r] = T::of(s.to_f32()));
        }
        work.losses.fill(T::ZERO);
    }

    /// Turns the lines of codes back into rows.
    fn store(&mut self, work: &Work<T>, first: usize, rows: usize) {
        /// Edge of the squares that are turned.
        const TURN: usize = 8;
        let (n, stride) = (self.factor.n, work.stride);
        for from in (0..rows).step_by(TURN) {
            let mut target = self.codes[(first + from) * n..].chunks_exact_mut(n).take(TURN.min(rows - from));
            let mut target: [&mut [i8]; TURN] = std::array::from_fn(|_| target.next().unwrap_or_default());
            for c0 in (0..n).step_by(TURN) {
                let width = TURN.min(n - c0);
                let mut square = [0u64; TURN];
                for (line, &p) in square.iter_mut().zip(&self.positions[c0..c0 + width]) {
                    let codes: &[i8; TURN] =
                        work.codes[p as usize * stride + from..].first_chunk().expect("whole lanes");
                    *line = u64::from_le_bytes(codes.map(i8::cast_unsigned));
                }
                for (row, codes) in target.iter_mut().zip(turned(square)) {
                    let codes = codes.to_le_bytes().map(u8::cast_signed);
                    if let Some(whole) = row.get_mut(c0..).and_then(|row| row.first_chunk_mut()) {
                        *whole = codes;
                    } else if let Some(rest) = row.get_mut(c0..c0 + width) {
                        rest.copy_from_slice(&codes[..width]);
                    }
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
        let width = high - low;
        for first in (first..first + rows).step_by(LINE) {
            let mut targets = [[T::ZERO; LINE]; STRIP];
            for (p, line) in targets[..width].iter_mut().enumerate() {
                *line = *chunk(&work.targets[(low + p) * work.stride + first..]);
            }
            let mut top = width;
            while top > 0 {
                // Whole groups of positions keep everything in registers.
                top = if top >= GROUP {
                    part.positions::<GROUP>(work, low, first, &mut targets[..top])
                } else {
                    part.positions::<1>(work, low, first, &mut targets[..top])
                };
            }
        }
    }
}

impl<T: Real> Part<'_, T> {
    /// Rounds the last `COUNT` of some positions from `low` on for the rows from `first` on, and carries their errors over to the
    /// targets of the others. Returns how many others there are.
    #[inline(always)]
    fn positions<const COUNT: usize>(
        &self,
        work: &mut Work<T>,
        low: usize,
        first: usize,
        targets: &mut [[T; LINE]],
    ) -> usize {
        let (n, stride) = (self.factor.n, work.stride);
        let (others, mine) = targets.split_at_mut(targets.len() - COUNT);
        let count = others.len();
        let base = low + count;
        let mine: [[T; LINE]; COUNT] = *mine.first_chunk().expect("as many as were split off");
        let mut errors = [[T::ZERO; LINE]; COUNT];
        let mut losses = *chunk(&work.losses[first..]);
        for p in (0..COUNT).rev() {
            let mut target = mine[p];
            for i in (p + 1..COUNT).rev() {
                let factor = self.triangle.unit[(base + i) * n + base + p];
                for r in 0..LINE {
                    target[r] = errors[i][r].fma(factor, target[r]);
                }
            }
            let column = self.factor.columns[base + p] as usize;
            let pivot = self.triangle.pivots[base + p];
            let scales = *chunk(&work.scales[column / self.group * stride + first..]);
            let mut codes = [0i8; LINE];
            let mut stored = [T::ZERO; LINE];
            for r in 0..LINE {
                let q = target[r].code(scales[r]);
                stored[r] = (q * scales[r]).to_bf16();
                let distance = pivot * (target[r] - stored[r]);
                losses[r] += distance * distance;
                codes[r] = q.to_code();
            }
            let place = (base + p) * stride + first;
            let weights = *chunk(&work.errors[place..]);
            for r in 0..LINE {
                errors[p][r] = weights[r] - stored[r];
            }
            work.errors[place..][..LINE].copy_from_slice(&errors[p]);
            work.codes[place..][..LINE].copy_from_slice(&codes);
        }
        work.losses[first..][..LINE].copy_from_slice(&losses);
        let unit: [&[T]; COUNT] = std::array::from_fn(|p| &self.triangle.unit[(base + p) * n + low..][..count]);
        for (j, line) in others[..count].iter_mut().enumerate() {
            let mut sum = *line;
            for p in (0..COUNT).rev() {
                let factor = unit[p][j];
                for r in 0..LINE {
                    sum[r] = errors[p][r].fma(factor, sum[r]);
                }
            }
            *line = sum;
        }
        count
    }
}

/// Turns the weights of up to [`LANES`] rows into lines: as many at a time that a line is written in long pieces, most of
/// which are in no near cache.
struct Load<'p, 'a, T> {
    part: &'p Part<'a, T>,
    work: &'p mut Work<T>,
    /// First row of the part.
    first: usize,
    count: usize,
    /// Where the rows begin in a line.
    place: usize,
}

impl<T: Real> Kernel for Load<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        /// Columns that are turned at a time.
        const TURN: usize = 8;
        let Self { part, work, first, count, place } = self;
        let Factor { n, zeroed, .. } = part.factor;
        let source = &part.w[first * n..][..count * n];
        let mut square = [[0.0f32; LANES]; TURN];
        for c0 in (0..*n).step_by(TURN) {
            let width = TURN.min(n - c0);
            for (r, row) in source.chunks_exact(*n).enumerate() {
                if let Some(values) = row[c0..].first_chunk::<TURN>() {
                    for c in 0..TURN {
                        square[c][r] = values[c];
                    }
                } else {
                    (0..width).for_each(|c| square[c][r] = row[c0 + c]);
                }
            }
            for (c, line) in (c0..c0 + width).zip(&square) {
                let line = if zeroed[c] { &[0.0; LANES] } else { line };
                let at = part.positions[c] as usize * work.stride + place;
                let targets = &mut work.targets[at..][..LANES];
                let errors = &mut work.errors[at..][..LANES];
                for r in 0..LANES {
                    let value = T::of(line[r]);
                    targets[r] = value;
                    errors[r] = value;
                }
            }
        }
    }
}

/// The first lanes of a line.
#[inline(always)]
fn chunk<T>(line: &[T]) -> &[T; LINE] {
    line.first_chunk().expect("lines are filled up to whole vectors")
}

/// The transpose of eight lines of eight bytes.
#[inline(always)]
fn turned(mut lines: [u64; 8]) -> [u64; 8] {
    // Squares of 4, 2 and 1 bytes change places across the diagonal.
    for (step, mask) in [(4, 0x0000_0000_ffff_ffffu64), (2, 0x0000_ffff_0000_ffff), (1, 0x00ff_00ff_00ff_00ff)] {
        for i in (0..8).filter(|i| i & step == 0) {
            let (upper, lower) = (lines[i], lines[i + step]);
            lines[i] = upper & mask | (lower & mask) << (8 * step);
            lines[i + step] = upper >> (8 * step) & mask | lower & !mask;
        }
    }
    lines
}
