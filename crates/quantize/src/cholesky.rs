//! Blocked Cholesky factorisation `A = L L^T` in place, lower triangle, row-major.
//!
//! A panel of `PANEL` columns is factored on its diagonal block in f64 (by narrower panels in turn); the rows below are multiplied by the inverse of
//! that block, and the rest of the matrix is updated with one matrix product, which is where nearly all the work lies
//! (`n^3 / 3` operations). No inverse of the whole matrix is ever formed: the GPTQ recursion needs only `L` (module
//! [`gptq`](crate::gptq)).

use glimmer_tensor::cpu::Pool;
use glimmer_tensor::gemm::{Region, Sign, View, gemm};

use crate::real::Real;

/// Columns of a panel.
const PANEL: usize = 128;

/// Columns of a panel inside the diagonal block of a panel.
const INNER_PANEL: usize = 32;

/// The matrix is not positive definite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the matrix is not positive definite: pivot {pivot} is not above zero")]
pub struct NotPositive {
    /// Index of the pivot that failed.
    pub pivot: usize,
}

/// Replaces the lower triangle of `a` `[n, n]` by `L`; the upper triangle is neither read nor kept.
///
/// # Errors
/// [`NotPositive`] when a pivot is zero, negative or not a number; `a` is then spoiled.
pub fn factor<T: Real>(a: &mut [T], n: usize, threads: Option<&Pool>) -> Result<(), NotPositive> {
    assert_eq!(a.len(), n * n, "a square matrix");
    factor_panels(a, n, PANEL, threads)
}

fn factor_panels<T: Real>(a: &mut [T], n: usize, panel: usize, threads: Option<&Pool>) -> Result<(), NotPositive> {
    let edge = panel.min(n);
    let mut diagonal = vec![0.0f64; edge * edge];
    let mut inverse = vec![0.0f64; edge * edge];
    let mut narrow = vec![T::ZERO; edge * edge];
    let mut solved = vec![T::ZERO; (n - edge) * edge];
    for k in (0..n).step_by(panel) {
        let width = panel.min(n - k);
        let diagonal = &mut diagonal[..width * width];
        for (i, row) in diagonal.chunks_exact_mut(width).enumerate() {
            let source = &a[(k + i) * n + k..];
            row[..=i].iter_mut().zip(source).for_each(|(to, from)| *to = from.to_f64());
            row[i + 1..].fill(0.0);
        }
        let at = |inner: NotPositive| NotPositive { pivot: k + inner.pivot };
        if panel > INNER_PANEL {
            factor_panels(diagonal, width, INNER_PANEL, None).map_err(at)?;
        } else {
            factor_small(diagonal, width).map_err(at)?;
        }
        for (i, row) in diagonal.chunks_exact(width).enumerate() {
            let target = &mut a[(k + i) * n + k..];
            row[..=i].iter().zip(target).for_each(|(&from, to)| *to = T::of_f64(from));
        }
        let rest = n - k - width;
        if rest == 0 {
            break;
        }
        invert(diagonal, &mut inverse[..width * width], width);
        for (to, &from) in narrow.iter_mut().zip(&inverse[..width * width]) {
            *to = T::of_f64(from);
        }
        let solved = &mut solved[..rest * width];
        solved.fill(T::ZERO);
        let inverse = View::new(&narrow[..width * width], width, width, width);
        let below = View::new(&a[(k + width) * n + k..], rest, width, n);
        gemm(Sign::Plus, below, inverse.transposed(), solved, width, Region::Full, threads);
        for (i, row) in solved.chunks_exact(width).enumerate() {
            a[(k + width + i) * n + k..][..width].copy_from_slice(row);
        }
        let panel = View::new(solved, rest, width, width);
        let start = (k + width) * n + k + width;
        gemm(Sign::Minus, panel, panel.transposed(), &mut a[start..], n, Region::Lower, threads);
    }
    Ok(())
}

/// `inverse = L^-1`; what lies above the diagonal of `l` is not read, that of the result is zero.
///
/// By halves: `[[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]]`.
fn invert(l: &[f64], inverse: &mut [f64], n: usize) {
    inverse.fill(0.0);
    let mut done = INNER_PANEL.min(n);
    for i in (0..n).step_by(INNER_PANEL) {
        let width = INNER_PANEL.min(n - i);
        let part = |m: &[f64], r: usize| -> Vec<f64> { m[(i + r) * n + i..][..width].to_vec() };
        let block: Vec<f64> = (0..width).flat_map(|r| part(l, r)).collect();
        let mut small = vec![0.0; width * width];
        invert_small(&block, &mut small, width);
        for (r, row) in small.chunks_exact(width).enumerate() {
            inverse[(i + r) * n + i..][..width].copy_from_slice(row);
        }
    }
    while done < n {
        for i in (0..n.saturating_sub(done)).step_by(2 * done) {
            let low = done.min(n - i - done);
            // B is `[low, done]`, below A at (i, i) and beside C at (i + done, i + done).
            let corner = i + done;
            let mut product = vec![0.0; low * done];
            let b = View::new(&l[corner * n + i..], low, done, n);
            let a = View::new(&inverse[i * n + i..], done, done, n);
            gemm(Sign::Plus, b, a, &mut product, done, Region::Full, None);
            let mut result = vec![0.0; low * done];
            let c = View::new(&inverse[corner * n + corner..], low, low, n);
            gemm(Sign::Minus, c, View::new(&product, low, done, done), &mut result, done, Region::Full, None);
            for (r, row) in result.chunks_exact(done).enumerate() {
                inverse[(corner + r) * n + i..][..done].copy_from_slice(row);
            }
        }
        done *= 2;
    }
}

/// Unblocked factorisation of a small block; the strict upper triangle of the result is zero.
fn factor_small(a: &mut [f64], n: usize) -> Result<(), NotPositive> {
    // Works on U = L^T, whose rows are contiguous, and transposes at the end.
    let mut u = vec![0.0; n * n];
    for i in 0..n {
        for j in 0..=i {
            u[j * n + i] = a[i * n + j];
        }
    }
    for k in 0..n {
        let pivot = u[k * n + k];
        if !(pivot > 0.0 && pivot.is_finite()) {
            return Err(NotPositive { pivot: k });
        }
        let root = pivot.sqrt();
        u[k * n + k..(k + 1) * n].iter_mut().for_each(|x| *x /= root);
        let (done, open) = u.split_at_mut((k + 1) * n);
        let row = &done[k * n..];
        for (i, target) in open.chunks_exact_mut(n).enumerate() {
            let i = k + 1 + i;
            let factor = row[i];
            for (t, &r) in target[i..].iter_mut().zip(&row[i..]) {
                *t -= factor * r;
            }
        }
    }
    for i in 0..n {
        for j in 0..n {
            a[i * n + j] = if j <= i { u[j * n + i] } else { 0.0 };
        }
    }
    Ok(())
}

/// `inverse = L^-1` for a small lower triangle with a positive diagonal.
fn invert_small(l: &[f64], inverse: &mut [f64], n: usize) {
    inverse.fill(0.0);
    for i in 0..n {
        let (done, open) = inverse.split_at_mut(i * n);
        let row = &mut open[..n];
        for j in 0..i {
            let factor = l[i * n + j];
            for (t, &d) in row[..=j].iter_mut().zip(&done[j * n..=j * n + j]) {
                *t -= factor * d;
            }
        }
        let pivot = l[i * n + i];
        row[..i].iter_mut().for_each(|x| *x /= pivot);
        row[i] = 1.0 / pivot;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn positive(n: usize) -> Vec<f64> {
        let x: Vec<f64> = (0..n * n).map(|i| f64::sin(i as f64 * 0.7 + (i * i % 97) as f64)).collect();
        let mut a = vec![0.0; n * n];
        for i in 0..n {
            for j in 0..n {
                a[i * n + j] = (0..n).map(|k| x[i * n + k] * x[j * n + k]).sum::<f64>() / n as f64;
            }
            a[i * n + i] += 0.1;
        }
        a
    }

    fn residual<T: Real>(n: usize, threads: usize) -> f64 {
        let pool = Pool::new(threads);
        let a = positive(n);
        let mut l: Vec<T> = a.iter().map(|&v| T::of_f64(v)).collect();
        factor(&mut l, n, Some(&pool)).unwrap();
        let mut worst = 0.0f64;
        for i in 0..n {
            for j in 0..=i {
                let product: f64 = (0..=j).map(|k| l[i * n + k].to_f64() * l[j * n + k].to_f64()).sum();
                worst = worst.max((product - a[i * n + j]).abs());
            }
        }
        worst
    }

    #[test]
    fn the_factor_reproduces_the_matrix() {
        for n in [1, 2, 17, 33, 128, 129, 256, 300, 600] {
            assert!(residual::<f64>(n, 1) < 1e-13 * n as f64, "{n}");
            assert!(residual::<f32>(n, 2) < 2e-6, "{n}");
        }
    }

    #[test]
    fn the_inverse_of_a_triangle_undoes_it() {
        for n in [1, 20, 32, 33, 64, 100, 256] {
            let mut l = positive(n);
            factor(&mut l, n, None).unwrap();
            let mut inverse = vec![0.0; n * n];
            invert(&l, &mut inverse, n);
            for i in 0..n {
                for j in 0..n {
                    let product: f64 =
                        (j..=i.max(j)).map(|k| if k <= i { l[i * n + k] * inverse[k * n + j] } else { 0.0 }).sum();
                    assert!((product - f64::from(u8::from(i == j))).abs() < 1e-11, "{n}: {i} {j} {product}");
                }
            }
        }
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let a: Vec<f32> = positive(700).into_iter().map(|v| v as f32).collect();
        let (mut one, mut three) = (a.clone(), a);
        factor(&mut one, 700, None).unwrap();
        factor(&mut three, 700, Some(&Pool::new(3))).unwrap();
        for i in 0..700 {
            assert!(one[i * 700..=i * 700 + i] == three[i * 700..=i * 700 + i]);
        }
    }

    #[test]
    fn an_indefinite_matrix_names_its_pivot() {
        let n = 200;
        let mut a = vec![0.0f64; n * n];
        for i in 0..n {
            a[i * n + i] = if i == 150 { -1.0 } else { 1.0 };
        }
        assert_eq!(factor(&mut a, n, None), Err(NotPositive { pivot: 150 }));
        let mut nan = vec![f32::NAN; 4];
        assert_eq!(factor(&mut nan, 2, None), Err(NotPositive { pivot: 0 }));
    }
}
