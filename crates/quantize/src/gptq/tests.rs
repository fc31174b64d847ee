//! The recursion against the textbook form, and what happens at its edges.

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
    let mut a: Vec<Vec<f64>> =
        (0..n).map(|i| (0..2 * n).map(|j| if j < n { at(i, j) } else { f64::from(j - n == i) }).collect()).collect();
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
