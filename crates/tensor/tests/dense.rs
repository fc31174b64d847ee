//! Dense stages: equal bits on every instruction set, in every batch and on any number of threads; right against f64.

#![allow(clippy::unwrap_used, reason = "a failure is a failed test")]

mod material;

use glimmer_tensor::{
    Backend, Columns, Cpu, Error, Linear, Norm, Segment, Step, Streams, Swiglu,
    cpu::{CpuBuffer, CpuMatrix, Isa},
};
use material::{KINDS, Kind, Random, bf16, bits, buffer, f32s, linear, matrix, product, vector, wide};
use proptest::prelude::*;

/// Every instruction set with one thread, and the best with more.
fn devices() -> Vec<Cpu> {
    Isa::available().map(|isa| Cpu::with_isa(1, isa)).chain([Cpu::new(3)]).collect()
}

fn run_linear(cpu: &mut Cpu, rows: usize, x: &CpuBuffer, weights: &[&Linear<Cpu>]) -> CpuBuffer {
    let width = weights.iter().map(|w| w.weight.out()).sum();
    let mut out = CpuBuffer::new(rows, width).unwrap();
    let columns = Columns { buffer: x, start: 0, width: x.width() };
    cpu.linear(rows, columns, weights, &mut out, 0).unwrap();
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn products_are_right_and_the_same_on_every_instruction_set(
        seed in any::<u64>(), kind in 0..3_usize, out in 1..40_usize, width in 1..300_usize, rows in 1..11_usize,
    ) {
        let (kind, mut random) = (KINDS[kind], Random(seed));
        let width = if kind == Kind::Int4 { width.div_ceil(128) * 128 } else { width };
        let (weights, values) = linear(&mut random, kind, out, width);
        let x = buffer(rows, width, &random.values(rows * width));
        let expected = run_linear(&mut Cpu::with_isa(1, Isa::Scalar), rows, &x, &[&weights]);
        for mut cpu in devices() {
            let found = run_linear(&mut cpu, rows, &x, &[&weights]);
            prop_assert_eq!(bits(found.as_slice()), bits(expected.as_slice()), "{:?}", cpu.isa());
        }
        for row in 0..rows {
            for (y, (exact, size)) in expected.row(row).iter().zip(product(&values, width, &wide(x.row(row)))) {
                // A lane adds width / 16 terms, the tree four more, a group's scale one.
                let bound = size * (width as f64 / 16.0 + 8.0) * f64::from(f32::EPSILON) / 2.0 + 1e-30;
                prop_assert!((f64::from(*y) - exact).abs() <= bound, "{y} instead of {exact}");
            }
        }
    }
}

#[test]
fn a_row_alone_equals_the_row_in_a_batch() {
    let mut random = Random(1);
    for kind in KINDS {
        for (out, width) in [(70, 256), (600, 1024)] {
            let (weights, _) = linear(&mut random, kind, out, width);
            let rows = 37;
            let x = buffer(rows, width, &random.values(rows * width));
            for mut cpu in [Cpu::new(2), Cpu::with_isa(1, Isa::Avx2)] {
                let together = run_linear(&mut cpu, rows, &x, &[&weights]);
                for row in [0, 1, 17, 31, 35, 36] {
                    let alone = run_linear(&mut cpu, 1, &buffer(1, width, x.row(row)), &[&weights]);
                    assert_eq!(bits(alone.row(0)), bits(together.row(row)), "{kind:?}, row {row}");
                }
            }
        }
    }
}

#[test]
fn joint_matrices_equal_single_ones_with_input_columns_bias_and_output_offset() {
    let mut random = Random(2);
    let (rows, width) = (5, 128);
    let (mut a, _) = linear(&mut random, Kind::Bf16, 33, width);
    let (b, _) = linear(&mut random, Kind::Int4, 7, width);
    let (mut c, _) = linear(&mut random, Kind::F32, 260, width);
    let (bias_a, bias_c) = (random.values(33), random.values(260));
    let x = buffer(rows, width + 20, &random.values(rows * (width + 20)));
    let inner: Vec<f32> = (0..rows).flat_map(|r| x.row(r)[9..9 + width].to_vec()).collect();
    let inner = buffer(rows, width, &inner);
    for mut cpu in devices() {
        a.bias = None;
        c.bias = None;
        let plain: Vec<CpuBuffer> =
            [&a, &b, &c].into_iter().map(|w| run_linear(&mut cpu, rows, &inner, &[w])).collect();
        a.bias = Some(vector(&bias_a));
        c.bias = Some(vector(&bias_c));
        let mut out = buffer(rows, 320, &vec![9.0; rows * 320]);
        let columns = Columns { buffer: &x, start: 9, width };
        cpu.linear(rows, columns, &[&a, &b, &c], &mut out, 11).unwrap();
        for row in 0..rows {
            let y = out.row(row);
            for (i, y) in y[11..44].iter().enumerate() {
                assert_eq!(y.to_bits(), (plain[0].row(row)[i] + bias_a[i]).to_bits());
            }
            assert_eq!(bits(&y[44..51]), bits(plain[1].row(row)));
            for (i, y) in y[51..311].iter().enumerate() {
                assert_eq!(y.to_bits(), (plain[2].row(row)[i] + bias_c[i]).to_bits());
            }
            assert!(y[..11].iter().chain(&y[311..]).all(|&v| v.to_bits() == 9.0_f32.to_bits()), "other columns stay");
        }
    }
}

#[test]
fn infinities_and_nan_pass_through_a_product() {
    let mut random = Random(3);
    for kind in KINDS {
        let (weights, _) = linear(&mut random, kind, 9, 128);
        let mut values = random.values(3 * 128);
        values[5] = f32::NAN;
        values[128 + 77] = f32::INFINITY;
        let x = buffer(3, 128, &values);
        let scalar = run_linear(&mut Cpu::with_isa(1, Isa::Scalar), 3, &x, &[&weights]);
        assert!(scalar.row(0).iter().all(|v| v.is_nan()));
        assert!(scalar.row(1).iter().all(|v| !v.is_finite()));
        assert!(scalar.row(2).iter().all(|v| v.is_finite()));
        for mut cpu in devices() {
            assert_eq!(bits(run_linear(&mut cpu, 3, &x, &[&weights]).as_slice()), bits(scalar.as_slice()));
        }
    }
}

fn swiglu(random: &mut Random, kind: Kind, input: usize, width: usize, out: usize) -> (Swiglu<Cpu>, [Vec<f64>; 3]) {
    let (gate, g) = linear(random, kind, width, input);
    let (up, u) = linear(random, kind, width, input);
    let (down, d) = linear(random, kind, out, width);
    (Swiglu { gate, up, down }, [g, u, d])
}

fn clamped(gate: f64, up: f64, limit: f64) -> f64 {
    let gate = gate.min(limit);
    gate / (1.0 + (-gate).exp()) * up.clamp(-limit, limit)
}

#[test]
fn swiglu_clamps_the_gate_above_and_up_on_both_sides() {
    let mut random = Random(4);
    for kind in KINDS {
        let (rows, input, width, out) = (6, 128, 256, 40);
        let (weights, [g, u, d]) = swiglu(&mut random, kind, input, width, out);
        let limit = 1.0;
        let x = buffer(rows, input, &random.values(rows * input));
        let mut results = Vec::new();
        for mut cpu in devices() {
            let mut act = CpuBuffer::new(rows, width).unwrap();
            let mut y = CpuBuffer::new(rows, out).unwrap();
            cpu.swiglu(rows, &weights, limit, &x, &mut act, &mut y).unwrap();
            results.push((bits(act.as_slice()), bits(y.as_slice())));
            let (mut above, mut outside) = (0, 0);
            for row in 0..rows {
                let xs = wide(x.row(row));
                let (gate, up) = (product(&g, input, &xs), product(&u, input, &xs));
                above += gate.iter().filter(|v| v.0 > 1.0).count();
                outside += up.iter().filter(|v| v.0.abs() > 1.0).count();
                let exact: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| clamped(g.0, u.0, f64::from(limit))).collect();
                for (a, e) in act.row(row).iter().zip(&exact) {
                    assert!((f64::from(*a) - e).abs() < 2e-5, "{a} instead of {e}");
                }
                for (a, (e, size)) in y.row(row).iter().zip(product(&d, width, &exact)) {
                    assert!((f64::from(*a) - e).abs() < 2e-6 * size + 2e-5, "{a} instead of {e}");
                }
            }
            assert!(above > 0 && outside > 0, "the case clamps");
        }
        assert!(results.windows(2).all(|w| w[0] == w[1]), "{kind:?}: equal on every device");
    }
}

fn step(tokens: &[u32]) -> Step {
    let rows = tokens.len() as u32;
    let segment = Segment { slot: 0, position: 0, rows, fold: 0, commit: rows, first_page: 0, pages: 0 };
    Step { tokens: tokens.to_vec(), segments: vec![segment], ..Step::default() }
}

#[test]
fn embedding_rows_are_copied_to_every_stream_and_image_features_replace_them() {
    let mut random = Random(5);
    let (table, values) = matrix(&mut random, Kind::Bf16, 11, 48);
    let features = buffer(3, 48, &random.values(3 * 48));
    let mut cpu = Cpu::new(1);
    let mut plan = step(&[4, 10, 0]);
    plan.features = vec![glimmer_tensor::FeatureRow { row: 1, feature: 2 }];
    cpu.begin(&plan).unwrap();
    let mut streams: Streams<Cpu> = Streams {
        x: CpuBuffer::new(4, 96).unwrap(),
        post: CpuBuffer::new(4, 2).unwrap(),
        comb: CpuBuffer::new(4, 4).unwrap(),
        collapsed: CpuBuffer::new(4, 48).unwrap(),
    };
    cpu.embed(&table, &features, &mut streams, 2).unwrap();
    for (row, token) in [(0, 4_usize), (2, 0)] {
        let expected = &values[token * 48..(token + 1) * 48];
        assert_eq!(wide(&streams.x.row(row)[..48]), expected);
        assert_eq!(wide(&streams.x.row(row)[48..]), expected);
    }
    assert_eq!(bits(&streams.x.row(1)[..48]), bits(features.row(2)));
    assert_eq!(bits(&streams.x.row(1)[48..]), bits(features.row(2)));

    cpu.begin(&step(&[11])).unwrap();
    assert!(matches!(cpu.embed(&table, &features, &mut streams, 2), Err(Error::Capacity { needed: 12, .. })));
}

fn norm(random: &mut Random, width: usize, bias: bool, eps: f32) -> Norm<Cpu> {
    Norm { weight: vector(&random.values(width)), bias: bias.then(|| vector(&random.values(width))), eps }
}

/// RMSNorm, or LayerNorm with a bias, in f64.
fn normalized(norm: &Norm<Cpu>, x: &[f64]) -> Vec<f64> {
    let n = x.len() as f64;
    let mean = if norm.bias.is_some() { x.iter().sum::<f64>() / n } else { 0.0 };
    let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
    let factor = 1.0 / (variance + f64::from(norm.eps)).sqrt();
    let (weight, bias) = (norm.weight.as_slice(), norm.bias.as_ref().map(|b| b.as_slice()));
    (0..x.len())
        .map(|i| (x[i] - mean) * factor * f64::from(weight[i]) + bias.map_or(0.0, |b| f64::from(b[i])))
        .collect()
}

#[test]
fn add_norm_adds_in_place_and_normalises_with_rms_or_layer_norm() {
    let mut random = Random(6);
    for (width, bias, eps) in [(1, false, 1e-5), (48, false, 1e-5), (100, true, 1e-6), (1025, true, 0.5)] {
        let norm = norm(&mut random, width, bias, eps);
        let rows = 70;
        let (x, y) = (random.values(rows * width), random.values(rows * width));
        let mut results = Vec::new();
        for mut cpu in devices() {
            let mut sum = buffer(rows, width, &x);
            let y = buffer(rows, width, &y);
            let mut out = CpuBuffer::new(rows, width + 3).unwrap();
            cpu.add_norm(rows, Some(&y), &norm, &mut sum, &mut out).unwrap();
            for row in 0..rows {
                let exact: Vec<f32> = (0..width).map(|i| x[row * width + i] + y.row(row)[i]).collect();
                assert_eq!(bits(sum.row(row)), bits(&exact));
                for (a, e) in out.row(row).iter().zip(normalized(&norm, &wide(&exact))) {
                    assert!((f64::from(*a) - e).abs() <= 3e-6 * (1.0 + e.abs()), "{a} instead of {e}");
                }
            }
            let mut again = CpuBuffer::new(rows, width).unwrap();
            cpu.add_norm(rows, None, &norm, &mut sum, &mut again).unwrap();
            for row in 0..rows {
                assert_eq!(bits(again.row(row)), bits(&out.row(row)[..width]));
            }
            results.push(bits(again.as_slice()));
        }
        assert!(results.windows(2).all(|w| w[0] == w[1]), "equal on every device");
    }
}

#[test]
fn mtp_input_has_the_embedding_first_and_reads_the_given_hidden_rows() {
    let mut random = Random(7);
    let (table, values) = matrix(&mut random, Kind::Bf16, 9, 64);
    let (enorm, hnorm) = (norm(&mut random, 64, false, 1e-5), norm(&mut random, 64, false, 1e-5));
    let hidden = buffer(4, 64, &random.values(4 * 64));
    let mut cpu = Cpu::new(1);
    cpu.begin(&step(&[8, 3])).unwrap();
    let mut out = CpuBuffer::new(2, 128).unwrap();
    cpu.mtp_input(&table, &enorm, &hnorm, &hidden, &[3, 1], &mut out).unwrap();
    for (row, token, source) in [(0, 8, 3), (1, 3, 1)] {
        let embedding = normalized(&enorm, &values[token * 64..(token + 1) * 64]);
        let state = normalized(&hnorm, &wide(hidden.row(source)));
        for (a, e) in out.row(row).iter().zip(embedding.iter().chain(&state)) {
            assert!((f64::from(*a) - e).abs() <= 3e-6 * (1.0 + e.abs()), "{a} instead of {e}");
        }
    }
    assert!(cpu.mtp_input(&table, &enorm, &hnorm, &hidden, &[3, 4], &mut out).is_err());
    assert!(cpu.mtp_input(&table, &enorm, &hnorm, &hidden, &[3], &mut out).is_err());
}

#[test]
fn the_head_takes_the_wanted_rows() {
    let mut random = Random(8);
    let (head, _) = matrix(&mut random, Kind::Bf16, 90, 64);
    let hidden = buffer(6, 64, &random.values(6 * 64));
    for mut cpu in devices() {
        let mut logits = CpuBuffer::new(6, 90).unwrap();
        cpu.head(&head, &[1, 2, 5], &hidden, &mut logits).unwrap();
        let linear = Linear { weight: head.clone(), bias: None };
        let all = run_linear(&mut cpu, 6, &hidden, &[&linear]);
        for (i, row) in [1, 2, 5].into_iter().enumerate() {
            assert_eq!(bits(logits.row(i)), bits(all.row(row)));
        }
        assert!(cpu.head(&head, &[6], &hidden, &mut logits).is_err());
    }
}

#[test]
fn copies_rows_and_selections() {
    let mut random = Random(9);
    let mut cpu = Cpu::new(1);
    let from = buffer(2, 5, &random.values(10));
    let mut to = CpuBuffer::new(3, 5).unwrap();
    cpu.copy_row(&from, 1, &mut to, 2).unwrap();
    assert_eq!(bits(to.row(2)), bits(from.row(1)));
    assert!(cpu.copy_row(&from, 2, &mut to, 0).is_err());
    assert!(cpu.copy_row(&from, 0, &mut to, 3).is_err());

    let empty = cpu.selection(2, 4).unwrap();
    let mut target = cpu.selection(3, 4).unwrap();
    cpu.copy_selection(&empty, &[1, 0, 1], &mut target).unwrap();
    assert_eq!(cpu.read_selection(&target, 2), Vec::<u32>::new());
    assert!(cpu.copy_selection(&empty, &[2], &mut target).is_err());
}

#[test]
fn weights_of_wrong_dtype_or_shape_are_refused_by_name() {
    use glimmer_checkpoint::DType;
    use glimmer_tensor::MatrixSource;
    let cpu = Cpu::new(1);
    let message = |e: Error| e.to_string();
    let half = material::tensor("layers.0.w", DType::F16, &[2, 3], &[0; 12]);
    let found = message(cpu.matrix(MatrixSource::Dense(&half)).unwrap_err());
    assert!(found.contains("layers.0.w") && found.contains("F16 [2, 3]"), "{found}");
    assert!(cpu.vector(&half).is_err());
    let short = material::tensor("short", DType::F32, &[2, 3], &[0; 20]);
    assert!(message(cpu.matrix(MatrixSource::Dense(&short)).unwrap_err()).contains("20"));
    assert!(cpu.vector(&short).is_err());
    let flat = f32s("flat", &[6], &[0.0; 6]);
    assert!(cpu.matrix(MatrixSource::Dense(&flat)).is_err());
    assert_eq!(cpu.vector(&flat).unwrap().len(), 6);

    let packed = material::tensor("p", DType::I32, &[2, 16], &[0; 128]);
    let scale = bf16("s", &[2, 1], &[1.0; 2]);
    assert!(cpu.matrix(MatrixSource::Int4 { packed: &packed, scale: &scale }).is_ok());
    let many = bf16("s", &[2, 2], &[1.0; 4]);
    assert!(message(cpu.matrix(MatrixSource::Int4 { packed: &packed, scale: &many }).unwrap_err()).contains("`s`"));
    let narrow = material::tensor("p", DType::I32, &[2, 8], &[0; 64]);
    assert!(cpu.matrix(MatrixSource::Int4 { packed: &narrow, scale: &scale }).is_err());

    assert!(cpu.matrix_from("m", 2, &[1.0, -0.5, 3.0, 0.0]).is_ok());
    assert!(message(cpu.matrix_from("m", 2, &[1.0, 0.1, 3.0, 0.0]).unwrap_err()).contains("element 1"));
    assert!(cpu.matrix_from("m", 3, &[1.0; 4]).is_err());
}

#[test]
fn a_widened_row_is_the_stored_row() {
    let mut random = Random(10);
    for kind in KINDS {
        let (matrix, values): (CpuMatrix, _) = matrix(&mut random, kind, 5, 256);
        let mut row = vec![0.0; 256];
        for i in 0..5 {
            matrix.widen_row(i, &mut row);
            assert_eq!(wide(&row), values[i * 256..(i + 1) * 256]);
        }
    }
}

#[test]
fn rows_go_in_and_come_out_together_as_they_do_singly() {
    let values = Random(11).values(37 * 5);
    for cpu in [Cpu::new(1), Cpu::new(3)] {
        let (mut together, mut singly) = (CpuBuffer::new(40, 8).unwrap(), CpuBuffer::new(40, 8).unwrap());
        cpu.write_rows(&mut together, 5, &values).unwrap();
        for (row, values) in values.chunks(5).enumerate() {
            cpu.write(&mut singly, row, values).unwrap();
        }
        assert_eq!(bits(together.as_slice()), bits(singly.as_slice()));
        let mut back = vec![0.0; values.len()];
        cpu.read_rows(&together, 5, &mut back).unwrap();
        assert_eq!(bits(&back), bits(&values));
        assert!(matches!(cpu.write_rows(&mut together, 9, &values), Err(Error::Capacity { .. })));
        assert!(matches!(cpu.read_rows(&together, 4, &mut back), Err(Error::Capacity { .. })));
    }
}

#[test]
fn a_step_beyond_the_reserved_rows_is_refused() {
    let mut cpu = Cpu::new(1);
    cpu.reserve(2, 64, 64).unwrap();
    cpu.begin(&step(&[1, 2])).unwrap();
    assert!(matches!(cpu.begin(&step(&[1, 2, 3])), Err(Error::Capacity { needed: 3, available: 2, .. })));
}
