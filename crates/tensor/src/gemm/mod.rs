//! Dense matrix products `C += A B` and `C -= A B` in f32 and f64 for the solvers (Hessians, Cholesky, GPTQ).
//!
//! Every element of `C` is defined by one order of operations: the inner dimension is cut into blocks of [`K_BLOCK`]
//! terms, each block is summed with fused multiply-adds from zero in ascending order, and the block's sum is added to (or
//! subtracted from) `C`. The definition mentions neither tiles nor threads nor the instruction set, so results are equal
//! bit for bit on all of them.

mod kernel;

pub use kernel::Element;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use kernel::Kernel;

use crate::cpu::Pool;

/// Terms that are summed before they meet `C`.
pub const K_BLOCK: usize = 256;

/// Rows of `A` that are packed at a time (at most: whole tiles).
const M_BLOCK: usize = 128;

/// Columns of `B` that are packed at a time. A packed panel is read once for every block of rows, so they may lie in a far
/// cache.
const N_BLOCK: usize = 4096;

/// Products below this many multiply-adds are not worth a thread.
const MIN_WORK: usize = 1 << 22;

/// A matrix `[rows, cols]` read through two strides, so that transposes and parts need no copy.
#[derive(Debug, Clone, Copy)]
pub struct View<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> View<'a, T> {
    /// A row-major matrix whose rows start `stride` elements apart.
    ///
    /// # Panics
    /// When `data` is shorter than the last row needs.
    pub fn new(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(cols <= stride || rows <= 1, "rows do not overlap");
        assert!(rows == 0 || cols == 0 || data.len() >= (rows - 1) * stride + cols, "the data covers the last row");
        Self { data, rows, cols, row_stride: stride, col_stride: 1 }
    }

    /// The transpose.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// Rows `from .. from + rows`.
    fn rows_from(self, from: usize, rows: usize) -> Self {
        debug_assert!(from + rows <= self.rows);
        Self { data: &self.data[(from * self.row_stride).min(self.data.len())..], rows, ..self }
    }
}

/// Which part of `C` is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Region {
    /// All of it.
    Full,
    /// `column >= row`; what lies below the diagonal is left in an unspecified state.
    Upper,
    /// `column <= row`; what lies above the diagonal is left in an unspecified state.
    Lower,
}

/// Whether the product is added or subtracted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sign {
    /// `C += A B`.
    Plus,
    /// `C -= A B`.
    Minus,
}

/// `C += A B` or `C -= A B` with `C` row-major, `stride` elements a row, on the threads of `pool`, or on this one
/// alone.
///
/// # Panics
/// When the shapes disagree or `c` is too short: a defect of the caller.
pub fn gemm<T: Element>(
    sign: Sign,
    a: View<'_, T>,
    b: View<'_, T>,
    c: &mut [T],
    stride: usize,
    region: Region,
    pool: Option<&Pool>,
) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    assert_eq!(k, b.rows, "the inner dimensions agree");
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    assert!(n <= stride && c.len() >= (m - 1) * stride + n, "C covers the product");
    let kernel = T::kernel();
    let most = m.div_ceil(kernel.rows).min((m * n * k).div_ceil(MIN_WORK));
    let Some((pool, workers)) = pool.map(|p| (p, p.threads().min(most))).filter(|&(_, workers)| workers > 1) else {
        return block(&kernel, sign, a, b, c, stride, region, 0);
    };
    let mut parts = Vec::with_capacity(workers);
    let mut rest = c;
    let mut row = 0;
    for worker in 0..workers {
        let end = if worker + 1 == workers { m } else { share(region, m, n, worker + 1, workers, kernel.rows) };
        let (part, tail) = rest.split_at_mut(((end - row) * stride).min(rest.len()));
        rest = tail;
        parts.push(Mutex::new(Some((row, a.rows_from(row, end - row), part))));
        row = end;
    }
    pool.run(workers, |worker, _| {
        let part = parts[worker].lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((first, a, part)) = part.filter(|(_, a, _)| a.rows > 0) {
            block(&kernel, sign, a, b, part, stride, region, first);
        }
    });
}

/// First row of the part that comes after `done` of `workers` equal shares of the work, on a tile boundary.
fn share(region: Region, m: usize, n: usize, done: usize, workers: usize, tile: usize) -> usize {
    let fraction = done as f64 / workers as f64;
    let row = match region {
        Region::Full => fraction * m as f64,
        Region::Lower if m == n => fraction.sqrt() * m as f64,
        Region::Upper if m == n => (1.0 - (1.0 - fraction).sqrt()) * m as f64,
        Region::Lower | Region::Upper => fraction * m as f64,
    };
    ((row / tile as f64).round() as usize * tile).min(m)
}

/// The product on one thread; `first` is the row of the whole `C` at which `c` starts.
fn block<T: Element>(
    kernel: &Kernel<T>,
    sign: Sign,
    a: View<'_, T>,
    b: View<'_, T>,
    c: &mut [T],
    stride: usize,
    region: Region,
    first: usize,
) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    let (mr, nr) = (kernel.rows, kernel.cols);
    let depth = k.min(K_BLOCK);
    let a_size = M_BLOCK.min(m).next_multiple_of(mr) * depth;
    let b_size = N_BLOCK.min(n).next_multiple_of(nr) * depth;
    T::with_scratch(a_size + b_size + mr * nr, |scratch| {
        let (a_pack, rest) = scratch.split_at_mut(a_size);
        let (b_pack, edge) = rest.split_at_mut(b_size);
        block_in(kernel, sign, a, b, c, stride, region, first, a_pack, b_pack, edge);
    });
}

/// [`block`] with room for packed panels and one tile.
fn block_in<T: Element>(
    kernel: &Kernel<T>,
    sign: Sign,
    a: View<'_, T>,
    b: View<'_, T>,
    c: &mut [T],
    stride: usize,
    region: Region,
    first: usize,
    a_pack: &mut [T],
    b_pack: &mut [T],
    edge: &mut [T],
) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    let (mr, nr) = (kernel.rows, kernel.cols);
    for n0 in (0..n).step_by(N_BLOCK) {
        let n1 = (n0 + N_BLOCK).min(n);
        if outside(region, first, first + m, n0, n1) {
            continue;
        }
        for k0 in (0..k).step_by(K_BLOCK) {
            let kb = K_BLOCK.min(k - k0);
            pack(b.transposed(), n0..n1, k0..k0 + kb, nr, b_pack);
            let m_block = M_BLOCK / mr * mr;
            for m0 in (0..m).step_by(m_block) {
                let m1 = (m0 + m_block).min(m);
                if outside(region, first + m0, first + m1, n0, n1) {
                    continue;
                }
                pack(a, m0..m1, k0..k0 + kb, mr, a_pack);
                for j in (n0..n1).step_by(nr) {
                    let b_panel = &b_pack[(j - n0) * kb..][..nr * kb];
                    for i in (m0..m1).step_by(mr) {
                        if outside(region, first + i, first + i + mr, j, j + nr) {
                            continue;
                        }
                        let a_panel = &a_pack[(i - m0) * kb..][..mr * kb];
                        let (rows, cols) = (mr.min(m1 - i), nr.min(n1 - j));
                        if rows == mr && cols == nr {
                            kernel.run(kb, a_panel, b_panel, &mut c[i * stride + j..], stride, sign);
                        } else {
                            edge.fill(T::ZERO);
                            kernel.run(kb, a_panel, b_panel, edge, nr, Sign::Plus);
                            for (r, sums) in edge.chunks_exact(nr).enumerate().take(rows) {
                                let target = &mut c[(i + r) * stride + j..][..cols];
                                for (t, &s) in target.iter_mut().zip(sums) {
                                    *t = if sign == Sign::Plus { *t + s } else { *t - s };
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Whether rows `r0..r1` and columns `c0..c1` have nothing in common with the region.
fn outside(region: Region, r0: usize, r1: usize, c0: usize, c1: usize) -> bool {
    match region {
        Region::Full => false,
        Region::Upper => c1 <= r0,
        Region::Lower => c0 >= r1,
    }
}

/// Copies `source[rows, depth]` into panels of `tile` rows, term-major inside a panel, zero-padded to whole panels.
fn pack<T: Element>(source: View<'_, T>, rows: Range<usize>, depth: Range<usize>, tile: usize, out: &mut [T]) {
    // Copies of known size need no call: the tiles that exist are known ones.
    match tile {
        4 => pack_tiles::<T, 4, 4>(source, rows, depth, out),
        6 => pack_tiles::<T, 6, 6>(source, rows, depth, out),
        8 => pack_tiles::<T, 8, 8>(source, rows, depth, out),
        16 => pack_tiles::<T, 16, 8>(source, rows, depth, out),
        32 => pack_tiles::<T, 32, 8>(source, rows, depth, out),
        _ => unreachable!("a kernel has a tile of one of these sizes"),
    }
}

/// [`pack`] into panels of `TILE` rows, of which `SIDE`, a divisor, are turned at a time.
fn pack_tiles<T: Element, const TILE: usize, const SIDE: usize>(
    source: View<'_, T>,
    rows: Range<usize>,
    depth: Range<usize>,
    out: &mut [T],
) {
    /// Terms that are packed for all panels before the next ones: few lines are read from and few places written to at a
    /// time.
    const TERMS: usize = 16;
    let kb = depth.len();
    let panels = rows.len().div_ceil(TILE);
    let out = out[..panels * TILE * kb].as_chunks_mut::<TILE>().0;
    let whole = rows.len() / TILE;
    if whole < panels {
        out[whole * kb..].as_flattened_mut().fill(T::ZERO);
    }
    if source.row_stride == 1 {
        // The terms' lines are contiguous.
        for k0 in (0..kb).step_by(TERMS) {
            for (i, panel) in out.chunks_exact_mut(kb).enumerate() {
                for (k, target) in panel.iter_mut().enumerate().take(k0 + TERMS).skip(k0) {
                    let start = (depth.start + k) * source.col_stride + rows.start + i * TILE;
                    match source.data[start..].first_chunk::<TILE>() {
                        Some(part) if i < whole => *target = *part,
                        _ => {
                            let count = rows.len() - i * TILE;
                            target[..count.min(TILE)].copy_from_slice(&source.data[start..start + count.min(TILE)]);
                        }
                    }
                }
            }
        }
        return;
    }
    for (panel, r0) in out.chunks_exact_mut(kb).zip(rows.clone().step_by(TILE)) {
        let count = TILE.min(rows.end - r0);
        let at = |r: usize, k: usize| (r0 + r) * source.row_stride + (depth.start + k) * source.col_stride;
        for r in (0..count).step_by(SIDE) {
            let mut k = 0;
            // By squares, so that each line of the panel is written whole.
            while source.col_stride == 1 && r + SIDE <= count && k + SIDE <= kb {
                let mut square = [[T::ZERO; SIDE]; SIDE];
                for i in 0..SIDE {
                    for (line, &value) in square.iter_mut().zip(&source.data[at(r + i, k)..][..SIDE]) {
                        line[i] = value;
                    }
                }
                for (target, line) in panel[k..k + SIDE].iter_mut().zip(&square) {
                    target[r..r + SIDE].copy_from_slice(line);
                }
                k += SIDE;
            }
            for i in r..(r + SIDE).min(count) {
                for (j, target) in panel.iter_mut().enumerate().skip(k) {
                    target[i] = source.data[at(i, j)];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize, seed: u32) -> Vec<f32> {
        let mut s = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        (0..n)
            .map(|_| {
                s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (s >> 8) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    /// The definition in the module documentation, element by element.
    fn reference<T: Element>(sign: Sign, a: &[T], b: &[T], c: &mut [T], m: usize, n: usize, k: usize) {
        for i in 0..m {
            for j in 0..n {
                for k0 in (0..k).step_by(K_BLOCK) {
                    let mut sum = T::ZERO;
                    for p in k0..(k0 + K_BLOCK).min(k) {
                        sum = a[i * k + p].fma(b[p * n + j], sum);
                    }
                    let t = &mut c[i * n + j];
                    *t = if sign == Sign::Plus { *t + sum } else { *t - sum };
                }
            }
        }
    }

    #[test]
    fn equals_its_definition_bit_for_bit_over_odd_shapes_layouts_and_threads() {
        for (m, n, k) in
            [(1, 1, 1), (3, 5, 7), (8, 32, 16), (9, 33, 257), (65, 40, 300), (130, 1030, 5), (257, 65, 513)]
        {
            let (a, b) = (values(m * k, 1), values(k * n, 2));
            let mut expected = values(m * n, 3);
            let start = expected.clone();
            reference(Sign::Minus, &a, &b, &mut expected, m, n, k);
            let transpose =
                |x: &[f32], r: usize, c: usize| -> Vec<f32> { (0..r * c).map(|i| x[(i % r) * c + i / r]).collect() };
            let (at, bt) = (transpose(&a, m, k), transpose(&b, k, n));
            for threads in [1, 3] {
                let pool = Pool::new(threads);
                for layout in 0..4 {
                    let av =
                        if layout & 1 == 0 { View::new(&a, m, k, k) } else { View::new(&at, k, m, m).transposed() };
                    let bv =
                        if layout & 2 == 0 { View::new(&b, k, n, n) } else { View::new(&bt, n, k, k).transposed() };
                    let mut c = start.clone();
                    gemm(Sign::Minus, av, bv, &mut c, n, Region::Full, Some(&pool));
                    assert!(c == expected, "{m}x{n}x{k} threads {threads} layout {layout}");
                }
            }
        }
    }

    #[test]
    fn double_precision_equals_its_definition() {
        let (m, n, k) = (37, 50, 300);
        let wide = |x: Vec<f32>| -> Vec<f64> { x.into_iter().map(f64::from).collect() };
        let (a, b) = (wide(values(m * k, 4)), wide(values(k * n, 5)));
        let mut expected = vec![0.0; m * n];
        reference(Sign::Plus, &a, &b, &mut expected, m, n, k);
        let mut c = vec![0.0; m * n];
        gemm(Sign::Plus, View::new(&a, m, k, k), View::new(&b, k, n, n), &mut c, n, Region::Full, None);
        assert!(c == expected);
    }

    #[test]
    fn triangles_hold_the_full_products_values() {
        let (n, k) = (150, 70);
        let x = values(k * n, 6);
        let v = View::new(&x, k, n, n);
        let mut full = vec![0.0; n * n];
        gemm(Sign::Plus, v.transposed(), v, &mut full, n, Region::Full, None);
        for (region, threads) in [(Region::Upper, 1), (Region::Upper, 3), (Region::Lower, 1), (Region::Lower, 2)] {
            let mut part = vec![0.0; n * n];
            gemm(Sign::Plus, v.transposed(), v, &mut part, n, region, Some(&Pool::new(threads)));
            for i in 0..n {
                for j in 0..n {
                    if (region == Region::Upper && j >= i) || (region == Region::Lower && j <= i) {
                        assert_eq!(part[i * n + j].to_bits(), full[i * n + j].to_bits());
                    }
                }
            }
        }
    }

    #[test]
    fn instruction_sets_agree_bit_for_bit() {
        let (mr, nr, k) = (24, 96, 200);
        let (a, b) = (values(mr * k, 7), values(nr * k, 8));
        let mut expected: Option<Vec<f32>> = None;
        for kernel in f32::kernels() {
            // Panels of a few different tiles laid out for this kernel, from the same matrices.
            let mut c = vec![0.5f32; mr * nr];
            block(&kernel, Sign::Plus, View::new(&a, mr, k, k), View::new(&b, k, nr, nr), &mut c, nr, Region::Full, 0);
            assert!(expected.get_or_insert_with(|| c.clone()) == &c);
        }
    }
}
