//! Second moments `H = sum over tokens of x x^T` of a matrix's inputs.
//!
//! [`Moments`] gathers them, upper triangle only; [`Hessian`] is the finished matrix. Tokens are added in the caller's order in products of at most `CHUNK` rows,
//! so that the sum is the same for any number of threads. Narrow matrices accumulate in f64, wide ones in f32.

use glimmer_tensor::cpu::Pool;
use glimmer_tensor::gemm::{Region, Sign, View, gemm};

use crate::real::{Precision, Real};

/// Most rows of one product.
const CHUNK: usize = 8192;

/// A value that is NaN or infinite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NonFinite {
    /// Its row.
    pub row: usize,
    /// Its column.
    pub col: usize,
}

/// First value that is not finite in a row-major matrix.
pub fn non_finite(values: &[f32], cols: usize) -> Option<NonFinite> {
    let clean = values.chunks(4096).all(|part| part.iter().fold(0.0f32, |sum, &x| sum + x * 0.0) == 0.0);
    if clean {
        return None;
    }
    let i = values.iter().position(|x| !x.is_finite())?;
    Some(NonFinite { row: i / cols, col: i % cols })
}

#[derive(Debug, Clone)]
enum Sums {
    Single(Vec<f32>),
    Double(Vec<f64>),
}

/// Second moments in the making: only the upper triangle is valid.
#[derive(Debug, Clone)]
pub struct Moments {
    n: usize,
    tokens: u64,
    sums: Sums,
}

impl Moments {
    /// Of no token yet.
    pub fn new(n: usize) -> Self {
        Self::with_precision(n, Precision::for_width(n))
    }

    /// Of no token yet, accumulated in the given precision.
    pub fn with_precision(n: usize, precision: Precision) -> Self {
        let sums = match precision {
            Precision::Single => Sums::Single(vec![0.0; n * n]),
            Precision::Double => Sums::Double(vec![0.0; n * n]),
        };
        Self { n, tokens: 0, sums }
    }

    /// Bytes that one takes in memory.
    pub fn bytes(n: usize) -> usize {
        n * n
            * match Precision::for_width(n) {
                Precision::Single => 4,
                Precision::Double => 8,
            }
    }

    /// Adds the tokens `x` `[rows, n]`, on `threads` or on this one alone.
    ///
    /// # Errors
    /// [`NonFinite`] when a value is NaN or infinite; nothing is added then.
    pub fn add(&mut self, x: &[f32], threads: Option<&Pool>) -> Result<(), NonFinite> {
        if let Some(place) = non_finite(x, self.n) {
            return Err(place);
        }
        let n = self.n;
        for chunk in x.chunks(CHUNK * n) {
            let rows = chunk.len() / n;
            match &mut self.sums {
                Sums::Single(h) => {
                    let v = View::new(chunk, rows, n, n);
                    gemm(Sign::Plus, v.transposed(), v, h, n, Region::Upper, threads);
                }
                Sums::Double(h) => {
                    let wide: Vec<f64> = chunk.iter().map(|&v| f64::from(v)).collect();
                    let v = View::new(&wide, rows, n, n);
                    gemm(Sign::Plus, v.transposed(), v, h, n, Region::Upper, threads);
                }
            }
            self.tokens += rows as u64;
        }
        Ok(())
    }

    /// Adds another's tokens.
    ///
    /// # Panics
    /// When the two differ in width or precision: a defect of the caller.
    pub fn merge(&mut self, other: &Hessian) {
        assert_eq!(self.n, other.n, "the widths agree");
        match (&mut self.sums, &other.sums) {
            (Sums::Single(a), Sums::Single(b)) => a.iter_mut().zip(b).for_each(|(a, b)| *a += b),
            (Sums::Double(a), Sums::Double(b)) => a.iter_mut().zip(b).for_each(|(a, b)| *a += b),
            _ => unreachable!("one width, one precision"),
        }
        self.tokens += other.tokens;
    }

    /// The whole symmetric matrix.
    pub fn finish(mut self) -> Hessian {
        match &mut self.sums {
            Sums::Single(h) => mirror(h, self.n),
            Sums::Double(h) => mirror(h, self.n),
        }
        Hessian { n: self.n, tokens: self.tokens, sums: self.sums }
    }
}

/// Copies the upper triangle to the lower one.
fn mirror<T: Real>(h: &mut [T], n: usize) {
    /// Edge of the squares that are transposed at a time.
    const TILE: usize = 32;
    for i0 in (0..n).step_by(TILE) {
        for j0 in (0..=i0).step_by(TILE) {
            for i in i0..(i0 + TILE).min(n) {
                for j in j0..(j0 + TILE).min(i) {
                    h[i * n + j] = h[j * n + i];
                }
            }
        }
    }
}

/// The second moments `sum over tokens of x x^T` of `n` inputs.
#[derive(Debug, Clone)]
pub struct Hessian {
    n: usize,
    tokens: u64,
    sums: Sums,
}

impl Hessian {
    /// Inputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Tokens.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Precision of the sums.
    pub fn precision(&self) -> Precision {
        match self.sums {
            Sums::Single(_) => Precision::Single,
            Sums::Double(_) => Precision::Double,
        }
    }

    /// Mean over tokens of `x_i x_j` (0 without tokens).
    pub fn mean(&self, i: usize, j: usize) -> f64 {
        let at = i * self.n + j;
        let sum = match &self.sums {
            Sums::Single(h) => f64::from(h[at]),
            Sums::Double(h) => h[at],
        };
        if self.tokens == 0 { 0.0 } else { sum / self.tokens as f64 }
    }

    /// `factor` times the given columns of row `i`, added to `out`.
    fn gather<T: Real>(&self, i: usize, columns: &[u32], factor: f64, out: &mut [T]) {
        let row = i * self.n..(i + 1) * self.n;
        match &self.sums {
            Sums::Single(h) => {
                let (row, factor) = (&h[row], T::of_f64(factor));
                out.iter_mut().zip(columns).for_each(|(o, &j)| *o += T::of(row[j as usize]) * factor);
            }
            Sums::Double(h) => {
                let row = &h[row];
                out.iter_mut().zip(columns).for_each(|(o, &j)| *o += T::of_f64(row[j as usize] * factor));
            }
        }
    }

    /// `v^T H v / tokens` summed over the rows of `m` `[rows, n]`: the mean squared output of a matrix on these tokens.
    pub fn energy(&self, m: &[f32]) -> f64 {
        if self.tokens == 0 {
            return 0.0;
        }
        let n = self.n;
        let total = match &self.sums {
            Sums::Single(h) => quadratic(h, m, n),
            Sums::Double(h) => {
                let wide: Vec<f64> = m.iter().map(|&v| f64::from(v)).collect();
                quadratic(h, &wide, n)
            }
        };
        total / self.tokens as f64
    }
}

/// `tr(M H M^T)`.
fn quadratic<T: Real>(h: &[T], m: &[T], n: usize) -> f64 {
    let rows = m.len() / n;
    let mut y = vec![T::ZERO; rows * n];
    gemm(Sign::Plus, View::new(m, rows, n, n), View::new(h, n, n, n), &mut y, n, Region::Full, None);
    y.iter().zip(m).map(|(y, m)| y.to_f64() * m.to_f64()).sum()
}

/// The Hessian that a matrix is solved with: its own tokens, shrunk towards those of its layer.
///
/// `H' = (sum over own tokens of x x^T + k * mean over the pool of x x^T) / (T + k)`. With few own tokens the pool decides,
/// with many they do; below about twice as many tokens as columns an expert's own Hessian alone overfits.
#[derive(Debug, Clone, Copy)]
pub struct Shrunk<'a> {
    own: &'a Hessian,
    pool: Option<&'a Hessian>,
    k: f64,
}

impl<'a> Shrunk<'a> {
    /// The own tokens alone.
    pub fn own(own: &'a Hessian) -> Self {
        Self { own, pool: None, k: 0.0 }
    }

    /// Shrunk towards `pool` as by `k` of its tokens.
    pub fn towards(own: &'a Hessian, pool: &'a Hessian, k: f64) -> Self {
        let used = k > 0.0 && pool.tokens > 0;
        Self { own, pool: used.then_some(pool), k: if used { k } else { 0.0 } }
    }

    /// Inputs.
    pub fn n(&self) -> usize {
        self.own.n
    }

    /// Precision of the own sums.
    pub fn precision(&self) -> Precision {
        self.own.precision()
    }

    /// The given columns of row `i` (zeros without any token); `out` may be longer.
    pub fn gather<T: Real>(&self, i: usize, columns: &[u32], out: &mut [T]) {
        let out = &mut out[..columns.len()];
        out.fill(T::ZERO);
        let total = self.own.tokens as f64 + self.k;
        if self.own.tokens > 0 {
            self.own.gather(i, columns, 1.0 / total, out);
        }
        if let Some(pool) = self.pool {
            pool.gather(i, columns, self.k / (total * pool.tokens as f64), out);
        }
    }

    /// Whether input `i` was zero for every token.
    pub fn diagonal_is_zero(&self, i: usize) -> bool {
        self.own.mean(i, i) == 0.0 && self.pool.is_none_or(|p| p.mean(i, i) == 0.0)
    }

    /// The diagonal, `[n]`.
    pub fn diagonal(&self) -> Vec<f64> {
        let total = self.own.tokens as f64 + self.k;
        (0..self.n())
            .map(|i| {
                let own = self.own.mean(i, i) * self.own.tokens as f64;
                let pool = self.pool.map_or(0.0, |p| p.mean(i, i) * self.k);
                if total > 0.0 { (own + pool) / total } else { 0.0 }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(rows: usize, n: usize, seed: usize) -> Vec<f32> {
        (0..rows * n).map(|i| f32::sin((i * 37 + seed * 101) as f32 * 0.13) + 0.1).collect()
    }

    #[test]
    fn equals_the_sum_of_outer_products_in_both_precisions() {
        let (rows, n) = (300, 40);
        let x = tokens(rows, n, 1);
        for precision in [Precision::Single, Precision::Double] {
            let mut h = Moments::with_precision(n, precision);
            h.add(&x[..100 * n], Some(&Pool::new(2))).unwrap();
            h.add(&x[100 * n..], None).unwrap();
            let h = h.finish();
            assert_eq!(h.tokens(), 300);
            for i in 0..n {
                for j in 0..n {
                    let exact: f64 = (0..rows).map(|r| f64::from(x[r * n + i]) * f64::from(x[r * n + j])).sum();
                    let bound = if precision == Precision::Double { 1e-12 } else { 1e-6 };
                    assert!((h.mean(i, j) * 300.0 - exact).abs() < bound * 300.0);
                }
            }
        }
    }

    #[test]
    fn energy_is_the_mean_squared_output() {
        let (rows, n) = (50, 24);
        let (x, m) = (tokens(rows, n, 2), tokens(3, n, 9));
        for precision in [Precision::Single, Precision::Double] {
            let mut h = Moments::with_precision(n, precision);
            h.add(&x, None).unwrap();
            let h = h.finish();
            let mut exact = 0.0;
            for t in x.chunks(n) {
                for w in m.chunks(n) {
                    exact += t.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>().powi(2);
                }
            }
            exact /= rows as f64;
            assert!((h.energy(&m) - exact).abs() < 1e-5 * exact, "{} {exact}", h.energy(&m));
        }
    }

    #[test]
    fn shrinkage_follows_its_formula() {
        let n = 16;
        let moments = |rows, seed| {
            let mut h = Moments::new(n);
            h.add(&tokens(rows, n, seed), None).unwrap();
            h.finish()
        };
        let (own, pool) = (moments(5, 3), moments(90, 4));
        let shrunk = Shrunk::towards(&own, &pool, 16.0);
        let diagonal = shrunk.diagonal();
        let columns: Vec<u32> = (0..n as u32).rev().collect();
        for i in 0..n {
            let mut row = vec![7.0f64; n];
            shrunk.gather(i, &columns, &mut row);
            for j in 0..n {
                let expected = (5.0 * own.mean(i, j) + 16.0 * pool.mean(i, j)) / 21.0;
                assert!((row[n - 1 - j] - expected).abs() < 1e-12);
            }
            assert!((diagonal[i] - row[n - 1 - i]).abs() < 1e-12);
        }
    }

    #[test]
    fn a_value_that_is_not_finite_is_refused_with_its_place() {
        let mut x = tokens(10, 8, 5);
        x[3 * 8 + 6] = f32::INFINITY;
        let mut h = Moments::new(8);
        assert_eq!(h.add(&x, None), Err(NonFinite { row: 3, col: 6 }));
        assert_eq!(h.clone().finish().tokens(), 0);
        x[3 * 8 + 6] = f32::NAN;
        assert_eq!(h.add(&x, None), Err(NonFinite { row: 3, col: 6 }));
    }
}
