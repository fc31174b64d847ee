//! Rules and equalities of the stage.

#![allow(clippy::float_cmp, reason = "exact results are meant")]

use super::{mhc, mhc_head};
use crate::cpu::simd::streams::sinkhorn;
use crate::{
    MhcWeights, Norm, Streams,
    cpu::{
        Cpu, CpuBuffer,
        testing::{Rng, bits, buffer, close, devices, matrix, norm, rows_of, sigmoid64, vector},
    },
};

const N: usize = 4;
const WIDTH: usize = 40;

struct Site {
    mix: Vec<f32>,
    base: Vec<f32>,
    scale: Vec<f32>,
    weights: MhcWeights<Cpu>,
    norm: Norm<Cpu>,
    norm_weight: Vec<f32>,
}

fn site(seed: u64, rms_eps: f32, eps: f32) -> Site {
    let mut rng = Rng::new(&[seed]);
    let coefficients = 2 * N + N * N;
    let mix = rng.bf16(coefficients * N * WIDTH, 1.0);
    let base = rng.values(coefficients, 1.0);
    let scale = rng.values(3, 1.0);
    let norm_weight = rng.values(WIDTH, 1.0);
    let weights = MhcWeights {
        mix: matrix(coefficients, &mix),
        base: vector(&base),
        scale: vector(&scale),
        streams: N,
        rms_eps,
        eps,
        sinkhorn_iters: 20,
    };
    Site { norm: norm(&norm_weight, None, 1e-5), mix, base, scale, weights, norm_weight }
}

fn streams(rows: &[Vec<f32>]) -> Streams<Cpu> {
    let n = rows.len();
    Streams {
        x: buffer(rows),
        post: CpuBuffer::new(n, N).unwrap(),
        comb: CpuBuffer::new(n, N * N).unwrap(),
        collapsed: CpuBuffer::new(n, WIDTH).unwrap(),
    }
}

/// Coefficients of one row in f64, written from the formulas: pre, post, comb `[old][new]`.
fn coefficients64(site: &Site, s: &[f32], rms_eps: f64, eps: f64) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let x: Vec<f64> = s.iter().map(|&v| f64::from(v)).collect();
    let r = 1.0 / (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + rms_eps).sqrt();
    let m: Vec<f64> =
        site.mix.chunks(x.len()).map(|w| r * w.iter().zip(&x).map(|(w, x)| f64::from(*w) * x).sum::<f64>()).collect();
    let logit = |i: usize, part: usize| m[i] * f64::from(site.scale[part]) + f64::from(site.base[i]);
    let pre = (0..N).map(|i| sigmoid64(logit(i, 0)) + eps).collect();
    let post = (0..N).map(|i| 2.0 * sigmoid64(logit(N + i, 1))).collect();
    let mut c = vec![0.0; N * N];
    for i in 0..N {
        let e: Vec<f64> = (0..N).map(|j| logit(2 * N + N * i + j, 2).exp()).collect();
        for j in 0..N {
            c[i * N + j] = e[j] / e.iter().sum::<f64>() + eps;
        }
    }
    // 20 column and 19 row normalisations, columns first.
    for k in 0..39 {
        let old = c.clone();
        for i in 0..N {
            for j in 0..N {
                let sum: f64 = if k % 2 == 0 {
                    (0..N).map(|i| old[i * N + j]).sum()
                } else {
                    (0..N).map(|j| old[i * N + j]).sum()
                };
                c[i * N + j] = old[i * N + j] / (sum + eps);
            }
        }
    }
    (pre, post, c)
}

fn run(cpu: &mut Cpu, site: &Site, y: Option<&CpuBuffer>, streams: &mut Streams<Cpu>, rows: usize) -> Vec<Vec<f32>> {
    let mut x = CpuBuffer::new(rows, WIDTH).unwrap();
    mhc(cpu, rows, &site.weights, &site.norm, y, streams, &mut x).unwrap();
    rows_of(&x, rows)
}

fn inputs(rows: usize) -> Vec<Vec<f32>> {
    (0..rows).map(|i| Rng::new(&[7, i as u64]).values(N * WIDTH, 3.0)).collect()
}

#[test]
fn coefficients_collapse_and_norm_follow_the_definition() {
    let site = site(1, 1e-5, 1e-6);
    let input = inputs(5);
    let mut s = streams(&input);
    let x = run(&mut Cpu::new(1), &site, None, &mut s, 5);
    for (row, input) in input.iter().enumerate() {
        let (pre, post, comb) = coefficients64(&site, input, 1e-5, 1e-6);
        close(s.post.row(row), &post, 1e-6, "post");
        close(s.comb.row(row), &comb, 2e-6, "comb");
        let u: Vec<f64> = (0..WIDTH).map(|c| (0..N).map(|i| pre[i] * f64::from(input[i * WIDTH + c])).sum()).collect();
        close(s.collapsed.row(row), &u, 1e-5, "collapsed");
        let r = 1.0 / (u.iter().map(|v| v * v).sum::<f64>() / WIDTH as f64 + 1e-5).sqrt();
        let normed: Vec<f64> = u.iter().zip(&site.norm_weight).map(|(u, w)| u * r * f64::from(*w)).collect();
        close(&x[row], &normed, 1e-5, "normed input");
    }
}

#[test]
fn comb_is_used_transposed_and_post_scales_the_output() {
    // S'[j] = post[j] y + sum_i C[i][j] S[i], with an asymmetric C that only moves stream 0 to stream 1.
    let site = site(2, 1e-5, 1e-6);
    let input = inputs(1);
    let mut s = streams(&input);
    s.post.row_mut(0).copy_from_slice(&[0.0, 0.0, 0.0, 2.0]);
    let mut comb = [0.0; N * N];
    comb[1] = 1.0;
    s.comb.row_mut(0).copy_from_slice(&comb);
    let y = buffer(&[vec![0.5; WIDTH]]);
    run(&mut Cpu::new(1), &site, Some(&y), &mut s, 1);
    let x = s.x.row(0);
    assert_eq!(&x[..WIDTH], &[0.0; WIDTH]);
    assert_eq!(&x[WIDTH..2 * WIDTH], &input[0][..WIDTH]);
    assert_eq!(&x[2 * WIDTH..3 * WIDTH], &[0.0; WIDTH]);
    assert_eq!(&x[3 * WIDTH..], &[1.0; WIDTH]);
}

#[test]
fn post_has_the_factor_two() {
    let mut site = site(3, 1e-5, 1e-6);
    let mut base = site.base.clone();
    base[N..2 * N].copy_from_slice(&[40.0; N]);
    site.weights.base = vector(&base);
    site.weights.scale = vector(&[0.0; 3]);
    let mut s = streams(&inputs(1));
    run(&mut Cpu::new(1), &site, None, &mut s, 1);
    assert_eq!(s.post.row(0), &[2.0; N]);
}

#[test]
fn sinkhorn_starts_and_ends_with_columns() {
    // One iteration is one column normalisation and no row normalisation.
    let start = [1.0, 2.0, 3.0, 4.0];
    let mut once = start;
    sinkhorn(2, 1, 0.0, &mut once);
    assert_eq!(once, [0.25, 2.0 / 6.0, 0.75, 4.0 / 6.0]);
    // Two: column, row, column. Ending with columns, these sum to one and rows do not quite.
    let mut twice = start;
    sinkhorn(2, 2, 0.0, &mut twice);
    let rows: [f32; 2] = [0.25 + 2.0 / 6.0, 0.75 + 4.0 / 6.0];
    let row = [0.25 / rows[0], (2.0 / 6.0) / rows[0], 0.75 / rows[1], (4.0 / 6.0) / rows[1]];
    let columns = [row[0] + row[2], row[1] + row[3]];
    let expected = [row[0] / columns[0], row[1] / columns[1], row[2] / columns[0], row[3] / columns[1]];
    for (found, expected) in twice.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-6);
    }
    assert!((twice[0] + twice[2] - 1.0).abs() < 1e-6);
    assert!((twice[0] + twice[1] - 1.0).abs() > 1e-3);
}

#[test]
fn the_two_epsilons_are_not_mixed_up() {
    // Streams so small that the epsilon under the root decides, and an eps so large that it shows in pre and comb.
    let site = site(4, 0.25, 0.125);
    let input: Vec<Vec<f32>> = vec![Rng::new(&[9]).values(N * WIDTH, 0.3)];
    let mut s = streams(&input);
    run(&mut Cpu::new(1), &site, None, &mut s, 1);
    let (pre, post, comb) = coefficients64(&site, &input[0], 0.25, 0.125);
    close(s.post.row(0), &post, 1e-6, "post");
    close(s.comb.row(0), &comb, 1e-6, "comb");
    let u: Vec<f64> = (0..WIDTH).map(|c| (0..N).map(|i| pre[i] * f64::from(input[0][i * WIDTH + c])).sum()).collect();
    close(s.collapsed.row(0), &u, 1e-6, "collapsed");
    let (_, swapped, _) = coefficients64(&site, &input[0], 0.125, 0.25);
    assert!(post.iter().zip(&swapped).any(|(a, b)| (a - b).abs() > 1e-3));
}

#[test]
fn the_head_takes_the_mean_of_the_streams() {
    let site = site(5, 1e-5, 1e-6);
    let input = inputs(3);
    let mut s = streams(&input);
    for row in 0..3 {
        let mut identity = [0.0; N * N];
        (0..N).for_each(|i| identity[i * N + i] = 1.0);
        s.comb.row_mut(row).copy_from_slice(&identity);
    }
    let y = buffer(&vec![vec![0.0; WIDTH]; 3]);
    let mut hidden = CpuBuffer::new(3, WIDTH).unwrap();
    mhc_head(&mut Cpu::new(1), 3, &site.norm, &y, &mut s, &mut hidden).unwrap();
    for (row, input) in input.iter().enumerate() {
        let mean: Vec<f64> =
            (0..WIDTH).map(|c| (0..N).map(|i| f64::from(input[i * WIDTH + c])).sum::<f64>() / N as f64).collect();
        let r = 1.0 / (mean.iter().map(|v| v * v).sum::<f64>() / WIDTH as f64 + 1e-5).sqrt();
        let normed: Vec<f64> = mean.iter().zip(&site.norm_weight).map(|(u, w)| u * r * f64::from(*w)).collect();
        close(hidden.row(row), &normed, 1e-5, "hidden");
    }
}

#[test]
fn a_row_does_not_depend_on_the_others_nor_on_the_device() {
    let site = site(6, 1e-5, 1e-6);
    let input = inputs(37);
    let y: Vec<Vec<f32>> = (0..37).map(|i| Rng::new(&[8, i]).values(WIDTH, 1.0)).collect();
    let mut reference: Option<(Vec<Vec<u32>>, Vec<Vec<u32>>)> = None;
    for mut cpu in devices() {
        let mut s = streams(&input);
        run(&mut cpu, &site, None, &mut s, 37);
        let x = run(&mut cpu, &site, Some(&buffer(&y)), &mut s, 37);
        let result = (bits(&x), bits(&rows_of(&s.x, 37)));
        assert!(reference.get_or_insert_with(|| result.clone()) == &result, "{cpu:?}");
    }
    let (x, after) = reference.unwrap();
    for row in [0, 17, 36] {
        let mut cpu = Cpu::new(1);
        let mut s = streams(&input[row..=row]);
        run(&mut cpu, &site, None, &mut s, 1);
        let alone = run(&mut cpu, &site, Some(&buffer(&y[row..=row])), &mut s, 1);
        assert_eq!(bits(&alone)[0], x[row]);
        assert_eq!(bits(&rows_of(&s.x, 1))[0], after[row]);
    }
}

#[test]
fn wrong_shapes_are_errors() {
    let site = site(1, 1e-5, 1e-6);
    let mut s = streams(&inputs(2));
    let mut narrow = CpuBuffer::new(2, WIDTH - 1).unwrap();
    assert!(mhc(&mut Cpu::new(1), 2, &site.weights, &site.norm, None, &mut s, &mut narrow).is_err());
    let mut x = CpuBuffer::new(2, WIDTH).unwrap();
    assert!(mhc(&mut Cpu::new(1), 3, &site.weights, &site.norm, None, &mut s, &mut x).is_err());
}
