//! Second moments `H = sum over tokens of x x^T` of a matrix's inputs.
//!
//! Only the upper triangle is kept valid. Tokens are added in the caller's order in products of at most [`CHUNK`] rows,
//! so that the sum is the same for any number of threads. Narrow matrices accumulate in f64, wide ones in f32.

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

/// The second moments of `n` inputs over some tokens.
#[derive(Debug, Clone)]
pub struct Hessian {
    n: usize,
    tokens: u64,
    sums: Sums,
}

impl Hessian {
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

    /// Inputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Tokens so far.
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

    /// Bytes that one takes in memory.
    pub fn bytes(n: usize) -> usize {
        n * n
            * match Precision::for_width(n) {
                Precision::Single => 4,
                Precision::Double => 8,
            }
    }

    /// Forgets all tokens.
    pub fn clear(&mut self) {
        self.tokens = 0;
        match &mut self.sums {
            Sums::Single(h) => h.fill(0.0),
            Sums::Double(h) => h.fill(0.0),
        }
    }

    /// Adds the tokens `x` `[rows, n]`.
    ///
    /// # Errors
    /// [`NonFinite`] when a value is NaN or infinite; nothing is added then.
    pub fn add(&mut self, x: &[f32], threads: usize) -> Result<(), NonFinite> {
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
    pub fn merge(&mut self, other: &Self) {
        assert_eq!(self.n, other.n, "the widths agree");
        match (&mut self.sums, &other.sums) {
            (Sums::Single(a), Sums::Single(b)) => a.iter_mut().zip(b).for_each(|(a, b)| *a += b),
            (Sums::Double(a), Sums::Double(b)) => a.iter_mut().zip(b).for_each(|(a, b)| *a += b),
            _ => unreachable!("one width, one precision"),
        }
        self.tokens += other.tokens;
    }

    /// Mean over tokens of `x_i x_j` (0 without tokens).
    pub fn mean(&self, i: usize, j: usize) -> f64 {
        let at = i.min(j) * self.n + i.max(j);
        let sum = match &self.sums {
            Sums::Single(h) => f64::from(h[at]),
            Sums::Double(h) => h[at],
        };
        if self.tokens == 0 { 0.0 } else { sum / self.tokens as f64 }
    }

    /// `scale` times row `i` from the diagonal on: `[n - i]`, added to `out`.
    fn add_row<T: Real>(&self, i: usize, scale: f64, out: &mut [T]) {
        let range = i * self.n + i..(i + 1) * self.n;
        match &self.sums {
            Sums::Single(h) => {
                out.iter_mut().zip(&h[range]).for_each(|(o, &v)| *o += T::of_f64(f64::from(v) * scale));
            }
            Sums::Double(h) => out.iter_mut().zip(&h[range]).for_each(|(o, &v)| *o += T::of_f64(v * scale)),
        }
    }

    /// `v^T H v / tokens` summed over the rows of `m` `[rows, n]`: the mean squared output of a matrix on these tokens.
    pub fn energy(&self, m: &[f32]) -> f64 {
        if self.tokens == 0 {
            return 0.0;
        }
        let n = self.n;
        let rows = m.len() / n;
        // tr(M H M^T) = sum_i H_ii G_ii + 2 sum_{i<j} H_ij G_ij with G = M^T M, formed row by row through H.
        let mut total = 0.0;
        match &self.sums {
            Sums::Single(h) => {
                let mut y = vec![0.0f32; rows * n];
                gemm(
                    Sign::Plus,
                    View::new(m, rows, n, n),
                    View::new(&upper_half(h, n), n, n, n),
                    &mut y,
                    n,
                    Region::Full,
                    1,
                );
                for (y, m) in y.iter().zip(m) {
                    total += 2.0 * f64::from(*y) * f64::from(*m);
                }
            }
            Sums::Double(h) => {
                let wide: Vec<f64> = m.iter().map(|&v| f64::from(v)).collect();
                let mut y = vec![0.0f64; rows * n];
                gemm(
                    Sign::Plus,
                    View::new(&wide, rows, n, n),
                    View::new(&upper_half(h, n), n, n, n),
                    &mut y,
                    n,
                    Region::Full,
                    1,
                );
                for (y, m) in y.iter().zip(&wide) {
                    total += 2.0 * y * m;
                }
            }
        }
        total / self.tokens as f64
    }
}

/// The upper triangle with its diagonal halved and zeros below, so that `v^T (U + U^T) v = 2 v^T U v`.
fn upper_half<T: Real>(h: &[T], n: usize) -> Vec<T> {
    let mut out = vec![T::ZERO; n * n];
    for i in 0..n {
        out[i * n + i..(i + 1) * n].copy_from_slice(&h[i * n + i..(i + 1) * n]);
        out[i * n + i] = h[i * n + i] * T::of(0.5);
    }
    out
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

    /// Whether there is any token in it.
    pub fn is_empty(&self) -> bool {
        self.own.tokens == 0 && self.pool.is_none()
    }

    /// Precision of the own sums.
    pub fn precision(&self) -> Precision {
        self.own.precision()
    }

    /// The whole symmetric matrix, `[n, n]`.
    pub fn symmetric<T: Real>(&self) -> Vec<T> {
        /// Edge of the squares that are transposed at a time.
        const TILE: usize = 32;
        let n = self.n();
        let total = self.own.tokens as f64 + self.k;
        let mut out = vec![T::ZERO; n * n];
        if self.is_empty() {
            return out;
        }
        for i in 0..n {
            let row = &mut out[i * n + i..(i + 1) * n];
            self.own.add_row(i, 1.0 / total, row);
            if let Some(pool) = self.pool {
                pool.add_row(i, self.k / (total * pool.tokens as f64), row);
            }
        }
        for i0 in (0..n).step_by(TILE) {
            for j0 in (0..=i0).step_by(TILE) {
                for i in i0..(i0 + TILE).min(n) {
                    for j in j0..(j0 + TILE).min(i) {
                        out[i * n + j] = out[j * n + i];
                    }
                }
            }
        }
        out
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
            let mut h = Hessian::with_precision(n, precision);
            h.add(&x[..100 * n], 2).unwrap();
            h.add(&x[100 * n..], 1).unwrap();
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
            let mut h = Hessian::with_precision(n, precision);
            h.add(&x, 1).unwrap();
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
        let (mut own, mut pool) = (Hessian::new(n), Hessian::new(n));
        own.add(&tokens(5, n, 3), 1).unwrap();
        pool.add(&tokens(90, n, 4), 1).unwrap();
        let shrunk = Shrunk::towards(&own, &pool, 16.0);
        let (full, diagonal) = (shrunk.symmetric::<f64>(), shrunk.diagonal());
        for i in 0..n {
            for j in 0..n {
                let expected = (5.0 * own.mean(i, j) + 16.0 * pool.mean(i, j)) / 21.0;
                assert!((full[i * n + j] - expected).abs() < 1e-12);
            }
            assert!((diagonal[i] - full[i * n + i]).abs() < 1e-12);
        }
    }

    #[test]
    fn a_value_that_is_not_finite_is_refused_with_its_place() {
        let mut x = tokens(10, 8, 5);
        x[3 * 8 + 6] = f32::INFINITY;
        let mut h = Hessian::new(8);
        assert_eq!(h.add(&x, 1), Err(NonFinite { row: 3, col: 6 }));
        assert_eq!(h.tokens(), 0);
        x[3 * 8 + 6] = f32::NAN;
        assert_eq!(h.add(&x, 1), Err(NonFinite { row: 3, col: 6 }));
    }
}
