//! Rules and equalities of the vision stages.

#![allow(clippy::float_cmp, reason = "exact results are meant")]

use super::{group_rows, norm_gelu, place, vision_attention};
use crate::{
    PatchGrid,
    cpu::{
        Cpu, CpuBuffer,
        testing::{Rng, bits, buffer, close, devices, norm, rows_of},
    },
};

const HEADS: usize = 3;
const DIM: usize = 24;
const HIDDEN: usize = HEADS * DIM;

fn inputs(rows: usize) -> Vec<Vec<f32>> {
    (0..rows).map(|i| Rng::new(&[i as u64, 3]).values(3 * HIDDEN, 2.0)).collect()
}

fn weights() -> (Vec<f32>, Vec<f32>) {
    let mut rng = Rng::new(&[1]);
    (rng.values(DIM, 1.5), rng.values(DIM, 1.5))
}

fn run(cpu: &mut Cpu, grid: PatchGrid, rows: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let (q, k) = weights();
    let mut out = CpuBuffer::new(rows.len(), HIDDEN).unwrap();
    vision_attention(cpu, grid, HEADS, &norm(&q, None, 1e-5), &norm(&k, None, 1e-5), &buffer(rows), &mut out).unwrap();
    rows_of(&out, rows.len())
}

/// Normed and turned vector in f64: pairs `(i, i + dim / 2)` by the angle of row (first half) or column.
fn turned(x: &[f32], weight: &[f32], y_pos: usize, x_pos: usize) -> Vec<f64> {
    let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / DIM as f64;
    let v: Vec<f64> = x.iter().zip(weight).map(|(&x, &w)| f64::from(x) / (mean + 1e-5).sqrt() * f64::from(w)).collect();
    let mut out = vec![0.0; DIM];
    for i in 0..DIM / 2 {
        let j = i % (DIM / 4);
        let position = if i < DIM / 4 { y_pos } else { x_pos };
        let angle = position as f64 * 10_000f64.powf(-2.0 * j as f64 / (DIM / 2) as f64);
        let (s, c) = angle.sin_cos();
        out[i] = v[i] * c - v[i + DIM / 2] * s;
        out[i + DIM / 2] = v[i + DIM / 2] * c + v[i] * s;
    }
    out
}

#[test]
fn attention_follows_the_definition_within_each_frame() {
    let grid = PatchGrid { frames: 2, height: 4, width: 6 };
    let rows = inputs(48);
    let found = run(&mut Cpu::new(2), grid, &rows);
    let (qw, kw) = weights();
    // Merge-block order, written out.
    let mut places = Vec::new();
    for block_y in 0..2 {
        for block_x in 0..3 {
            for y in 0..2 {
                for x in 0..2 {
                    places.push((2 * block_y + y, 2 * block_x + x));
                }
            }
        }
    }
    for (i, found) in found.iter().enumerate() {
        let frame = i / 24 * 24;
        let mut expected = Vec::new();
        for h in 0..HEADS {
            let part = |row: usize, p: usize| &rows[row][p * HIDDEN + h * DIM..][..DIM];
            let (y, x) = places[i % 24];
            let q = turned(part(i, 0), &qw, y, x);
            let p: Vec<f64> = (0..24)
                .map(|j| {
                    let k = turned(part(frame + j, 1), &kw, places[j].0, places[j].1);
                    (q.iter().zip(&k).map(|(a, b)| a * b).sum::<f64>() / (DIM as f64).sqrt()).exp()
                })
                .collect();
            for d in 0..DIM {
                let sum: f64 = (0..24).map(|j| p[j] * f64::from(part(frame + j, 2)[d])).sum();
                expected.push(sum / p.iter().sum::<f64>());
            }
        }
        close(found, &expected, 1e-5, &format!("patch {i}"));
    }
}

#[test]
fn patches_stand_in_merge_block_order() {
    let order: Vec<_> = (0..8).map(|i| place(i, 4)).collect();
    assert_eq!(order, [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]);
    assert_eq!(place(8, 4), (2, 0));
}

#[test]
fn devices_agree_and_frames_do_not_see_each_other() {
    let grid = PatchGrid { frames: 2, height: 2, width: 6 };
    let rows = inputs(24);
    let mut reference = None;
    for mut cpu in devices() {
        let result = bits(&run(&mut cpu, grid, &rows));
        assert!(reference.get_or_insert_with(|| result.clone()) == &result, "{cpu:?}");
    }
    let alone = run(&mut Cpu::new(1), PatchGrid { frames: 1, ..grid }, &rows[12..]);
    assert_eq!(bits(&alone), reference.unwrap()[12..]);
}

#[test]
fn groups_stand_side_by_side() {
    let x = buffer(&[vec![1.0, 2.0], vec![3.0, 4.0], vec![5.0, 6.0], vec![7.0, 8.0]]);
    let mut out = CpuBuffer::new(2, 4).unwrap();
    group_rows(&mut Cpu::new(1), 2, 2, &x, &mut out).unwrap();
    assert_eq!(rows_of(&out, 2), [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]);
    assert!(group_rows(&mut Cpu::new(1), 1, 5, &x, &mut out).is_err());
}

#[test]
fn gelu_uses_the_error_function() {
    // Two columns normalise to -1 and 1 (eps far below the variance): bias and weight choose the argument.
    let arguments = [-1.5f32, 0.75];
    let weight = [1.0, 1.0];
    let bias = [arguments[0] + 1.0, arguments[1] - 1.0];
    let mut x = buffer(&[vec![-100.0, 100.0]]);
    norm_gelu(&mut Cpu::new(1), 1, &norm(&weight, Some(&bias), 1e-5), &mut x).unwrap();
    // x Phi(x) to 7 digits; the tanh form differs from the third on.
    close(x.row(0), &[-0.100_210_8, 0.580_029_5], 1e-6, "gelu");
    assert!(norm_gelu(&mut Cpu::new(1), 1, &norm(&weight, None, 1e-5), &mut x).is_err(), "a LayerNorm has a bias");
}

#[test]
fn grids_that_do_not_fit_are_errors() {
    let (q, k) = weights();
    let (q, k) = (norm(&q, None, 1e-5), norm(&k, None, 1e-5));
    let rows = buffer(&inputs(8));
    let mut out = CpuBuffer::new(8, HIDDEN).unwrap();
    for grid in [PatchGrid { frames: 1, height: 1, width: 8 }, PatchGrid { frames: 2, height: 2, width: 4 }] {
        assert!(vision_attention(&mut Cpu::new(1), grid, HEADS, &q, &k, &rows, &mut out).is_err());
    }
}
