//! Dense matrix products `C += A B` and `C -= A B` in f32 and f64 for the solvers (Hessians, Cholesky, GPTQ).
//!
//! Every element of `C` is defined by one order of operations: the inner dimension is cut into blocks of [`K_BLOCK`]
//! terms, each block is summed with fused multiply-adds from zero in ascending order, and the block's sum is added to (or
//! subtracted from) `C`. The definition mentions neither tiles nor threads nor the instruction set, so results are equal
//! bit for bit on all of them.

mod kernel;

pub use kernel::Element;

use kernel::Kernel;

/// Terms that are summed before they meet `C`.
pub const K_BLOCK: usize = 256;

/// Rows of `A` that are packed at a time.
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

/// `C += A B` or `C -= A B` with `C` row-major, `stride` elements a row, on up to `threads` threads.
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
    threads: usize,
) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    assert_eq!(k, b.rows, "the inner dimensions agree");
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    assert!(n <= stride && c.len() >= (m - 1) * stride + n, "C covers the product");
    let kernel = T::kernel();
    let workers = threads.min(m.div_ceil(kernel.rows)).min((m * n * k).div_ceil(MIN_WORK)).max(1);
    if workers == 1 {
        return block(&kernel, sign, a, b, c, stride, region, 0);
    }
    std::thread::scope(|scope| {
        let mut rest = c;
        let mut row = 0;
        for worker in 0..workers {
            let end = if worker + 1 == workers { m } else { share(region, m, n, worker + 1, workers, kernel.rows) };
            let rows = end - row;
            if rows == 0 {
                continue;
            }
            let (part, tail) = rest.split_at_mut((rows * stride).min(rest.len()));
            rest = tail;
            let (kernel, a, first) = (&kernel, a.rows_from(row, rows), row);
            row = end;
            let mut work = move || block(kernel, sign, a, b, part, stride, region, first);
            if worker + 1 == workers {
                work();
            } else {
                scope.spawn(work);
            }
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
            for m0 in (0..m).step_by(M_BLOCK) {
                let m1 = (m0 + M_BLOCK).min(m);
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
fn pack<T: Element>(
    source: View<'_, T>,
    rows: std::ops::Range<usize>,
    depth: std::ops::Range<usize>,
    tile: usize,
    out: &mut [T],
) {
    /// Edge of the squares and length of the pieces that are copied at a time.
    const SIDE: usize = 8;
    let kb = depth.len();
    if source.row_stride == 1 {
        // The terms' lines are contiguous: read each once, from end to end.
        let panels = rows.len().div_ceil(tile);
        let out = &mut out[..panels * tile * kb];
        for k in 0..kb {
            let start = (depth.start + k) * source.col_stride + rows.start;
            let line = &source.data[start..start + rows.len()];
            for (part, panel) in line.chunks(tile).zip(out.chunks_exact_mut(tile * kb)) {
                let target = &mut panel[k * tile..(k + 1) * tile];
                if part.len() == tile && tile.is_multiple_of(SIDE) {
                    // In pieces of known size, which need no call.
                    let pieces = target.as_chunks_mut::<SIDE>().0.iter_mut().zip(part.as_chunks::<SIDE>().0);
                    pieces.for_each(|(to, from)| *to = *from);
                } else {
                    target[..part.len()].copy_from_slice(part);
                    target[part.len()..].fill(T::ZERO);
                }
            }
        }
        return;
    }
    for (panel, r0) in out.chunks_exact_mut(tile * kb).zip(rows.clone().step_by(tile)) {
        let count = tile.min(rows.end - r0);
        if count < tile {
            panel.fill(T::ZERO);
        }
        if source.col_stride == 1 {
            // By squares, so that each line of the panel is written whole.
            for r in (0..count).step_by(SIDE) {
                let side = SIDE.min(count - r);
                let mut k = 0;
                while side == SIDE && k + SIDE <= kb {
                    let mut square = [[T::ZERO; SIDE]; SIDE];
                    for i in 0..SIDE {
                        let start = (r0 + r + i) * source.row_stride + depth.start + k;
                        for (line, &value) in square.iter_mut().zip(&source.data[start..start + SIDE]) {
                            line[i] = value;
                        }
                    }
                    for (j, line) in square.iter().enumerate() {
                        panel[(k + j) * tile + r..][..SIDE].copy_from_slice(line);
                    }
                    k += SIDE;
                }
                for i in 0..side {
                    let start = (r0 + r + i) * source.row_stride + depth.start;
                    for (j, &value) in source.data[start + k..start + kb].iter().enumerate() {
                        panel[(k + j) * tile + r + i] = value;
                    }
                }
            }
        } else {
            for r in 0..count {
                for (k, line) in panel.chunks_exact_mut(tile).enumerate() {
                    line[r] = source.data[(r0 + r) * source.row_stride + (depth.start + k) * source.col_stride];
                }
            }
        }
    }
}

/// Measures the machine's f32 fused-multiply-add rate on `threads` threads: the micro kernel on operands that stay in the
/// first-level cache, best of several runs. Returns floating-point operations (two a multiply-add) per second.
pub fn peak_flops(threads: usize) -> f64 {
    let kernel = f32::kernel();
    let run = || {
        let a = vec![1.0f32; kernel.rows * K_BLOCK];
        let b = vec![1.0e-9f32; kernel.cols * K_BLOCK];
        let mut c = vec![0.0f32; kernel.rows * kernel.cols];
        for _ in 0..4000 {
            kernel.run(K_BLOCK, &a, &b, &mut c, kernel.cols, Sign::Plus);
        }
        std::hint::black_box(c);
    };
    let flops = 2.0 * (4000 * kernel.rows * kernel.cols * K_BLOCK * threads.max(1)) as f64;
    let mut best = 0.0f64;
    for _ in 0..8 {
        let start = std::time::Instant::now();
        std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(run);
            }
            run();
        });
        best = best.max(flops / start.elapsed().as_secs_f64());
    }
    best
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
                for layout in 0..4 {
                    let av =
                        if layout & 1 == 0 { View::new(&a, m, k, k) } else { View::new(&at, k, m, m).transposed() };
                    let bv =
                        if layout & 2 == 0 { View::new(&b, k, n, n) } else { View::new(&bt, n, k, k).transposed() };
                    let mut c = start.clone();
                    gemm(Sign::Minus, av, bv, &mut c, n, Region::Full, threads);
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
        gemm(Sign::Plus, View::new(&a, m, k, k), View::new(&b, k, n, n), &mut c, n, Region::Full, 1);
        assert!(c == expected);
    }

    #[test]
    fn triangles_hold_the_full_products_values() {
        let (n, k) = (150, 70);
        let x = values(k * n, 6);
        let v = View::new(&x, k, n, n);
        let mut full = vec![0.0; n * n];
        gemm(Sign::Plus, v.transposed(), v, &mut full, n, Region::Full, 1);
        for (region, threads) in [(Region::Upper, 1), (Region::Upper, 3), (Region::Lower, 1), (Region::Lower, 2)] {
            let mut part = vec![0.0; n * n];
            gemm(Sign::Plus, v.transposed(), v, &mut part, n, region, threads);
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
