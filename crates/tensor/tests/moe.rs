//! Router and experts: the rule of the choice, the order of the sum, and equal bits on every device and in every batch.

#![allow(clippy::unwrap_used, reason = "a failure is a failed test")]

mod material;

use glimmer_tensor::{
    Backend, Cpu, Experts, RouterRule, Swiglu,
    cpu::{CpuBuffer, CpuMatrix, CpuRouting, CpuVector, Isa},
};
use material::{Kind, Random, bits, buffer, linear, matrix, product, vector, wide};

fn devices() -> Vec<Cpu> {
    Isa::available().map(|isa| Cpu::with_isa(1, isa)).chain([Cpu::new(3)]).collect()
}

const RULE: RouterRule = RouterRule { top: 3, groups: 1, top_groups: 1, normalize: true, scale: 2.5 };

/// A gate whose logits are the columns of the input.
fn identity(experts: usize) -> CpuMatrix {
    let values: Vec<f32> = (0..experts * experts).map(|i| f32::from(i / experts == i % experts)).collect();
    Cpu::new(1).matrix_from("gate", experts, &values).unwrap()
}

fn route(cpu: &mut Cpu, rule: RouterRule, gate: &CpuMatrix, bias: &CpuVector, x: &CpuBuffer) -> CpuRouting {
    let mut routing = cpu.routing(x.rows(), rule.top, gate.out()).unwrap();
    cpu.route(x.rows(), gate, bias, rule, x, &mut routing).unwrap();
    routing
}

fn choice(cpu: &mut Cpu, rule: RouterRule, bias: &[f32], logits: &[f32]) -> Vec<(u32, f32)> {
    let experts = bias.len();
    let routing = route(cpu, rule, &identity(experts), &vector(bias), &buffer(1, experts, logits));
    cpu.read_routing(&routing, 0)
}

fn ids(choice: &[(u32, f32)]) -> Vec<u32> {
    choice.iter().map(|c| c.0).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

#[test]
fn the_bias_moves_the_choice_but_not_the_weights() {
    let mut cpu = Cpu::new(1);
    let logits = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6];
    let plain = choice(&mut cpu, RULE, &[0.0; 6], &logits);
    assert_eq!(ids(&plain), [3, 4, 5]);
    let moved = choice(&mut cpu, RULE, &[9.0, 0.0, 0.0, 0.0, 0.0, -9.0], &logits);
    assert_eq!(ids(&moved), [0, 3, 4]);
    let scores: Vec<f64> = [0.1, 0.4, 0.5].into_iter().map(sigmoid).collect();
    let sum: f64 = scores.iter().sum();
    for (found, score) in moved.iter().zip(&scores) {
        assert!((f64::from(found.1) - score / sum * 2.5).abs() < 5e-7);
    }
}

#[test]
fn without_normalisation_the_weights_are_scores_times_the_factor() {
    let rule = RouterRule { normalize: false, ..RULE };
    for (e, w) in choice(&mut Cpu::new(1), rule, &[0.0; 6], &[1.0, -3.0, 2.0, -2.0, 3.0, -1.0]) {
        let logit = [1.0, -3.0, 2.0, -2.0, 3.0, -1.0][e as usize];
        assert!((f64::from(w) - 2.5 * sigmoid(logit)).abs() < 5e-7);
    }
}

#[test]
fn ties_go_to_the_lower_expert() {
    let mut cpu = Cpu::new(1);
    assert_eq!(ids(&choice(&mut cpu, RULE, &[0.0; 7], &[0.5; 7])), [0, 1, 2]);
    assert_eq!(ids(&choice(&mut cpu, RULE, &[0.0; 5], &[0.5, 0.7, 0.5, 0.7, 0.5])), [0, 1, 3]);
    // Scores that saturate to exactly one tie as well.
    assert_eq!(ids(&choice(&mut cpu, RULE, &[0.0; 5], &[40.0, 60.0, 50.0, 80.0, 1.0])), [0, 1, 2]);
}

#[test]
fn groups_are_kept_by_the_sum_of_their_two_best() {
    let mut cpu = Cpu::new(1);
    let rule = RouterRule { top: 2, groups: 3, top_groups: 1, ..RULE };
    // The best single expert is in group 0, the best pair in group 1.
    assert_eq!(ids(&choice(&mut cpu, rule, &[0.0; 9], &[3.0, -5.0, -5.0, 1.5, 1.0, -1.0, 1.0, 1.0, 1.0])), [3, 4]);
    let two = RouterRule { top_groups: 2, ..rule };
    assert_eq!(ids(&choice(&mut cpu, two, &[0.0; 9], &[3.0, -5.0, -5.0, 1.5, 1.0, -1.0, 1.0, 1.0, 1.0])), [3, 4]);
    // Of equal groups the lower ones are kept.
    assert_eq!(ids(&choice(&mut cpu, rule, &[0.0; 6], &[0.5; 6])), [0, 1]);
    // The bias counts in the groups' scores.
    assert_eq!(ids(&choice(&mut cpu, rule, &[0.0, 0.0, 0.0, 0.0, 0.1, 0.1], &[0.5; 6])), [4, 5]);
}

#[test]
fn nan_scores_come_last_and_do_not_panic() {
    let mut cpu = Cpu::new(1);
    let mut logits = [0.0, 1.0, 2.0, 3.0, 4.0];
    let gate = identity(5);
    logits[4] = f32::NAN;
    // A NaN among the inputs reaches every logit.
    let routing = route(&mut cpu, RULE, &gate, &vector(&[0.0; 5]), &buffer(1, 5, &logits));
    let found = cpu.read_routing(&routing, 0);
    assert_eq!(ids(&found), [0, 1, 2]);
    assert!(found.iter().all(|c| c.1.is_nan()));
    // A NaN bias makes one score NaN.
    let found = choice(&mut cpu, RULE, &[0.0, f32::NAN, 0.0, 0.0, 0.0], &[5.0, 9.0, 4.0, 3.0, 2.0]);
    assert_eq!(ids(&found), [0, 2, 3]);
    assert!(found.iter().all(|c| c.1.is_nan()), "a damaged expert does not pass unseen");
}

#[test]
fn rules_that_cannot_be_met_are_refused() {
    let mut cpu = Cpu::new(1);
    let gate = identity(6);
    let x = buffer(1, 6, &[0.0; 6]);
    let rules = [
        RouterRule { groups: 4, ..RULE },
        RouterRule { groups: 0, ..RULE },
        RouterRule { groups: 3, top_groups: 1, ..RULE },
        RouterRule { top: 7, ..RULE },
        RouterRule { top_groups: 2, ..RULE },
        RouterRule { top: 0, ..RULE },
    ];
    for rule in rules {
        let mut routing = cpu.routing(1, rule.top, 6).unwrap();
        assert!(cpu.route(1, &gate, &vector(&[0.0; 6]), rule, &x, &mut routing).is_err(), "{rule:?}");
    }
}

#[test]
fn the_router_is_the_same_on_every_device_and_in_every_batch() {
    let mut random = Random(20);
    for (experts, width, top) in [(8, 128, 2), (300, 96, 8)] {
        let rule = RouterRule { top, ..RULE };
        let gate = matrix(&mut random, Kind::Bf16, experts, width).0;
        let bias = vector(&random.values(experts));
        let rows = 41;
        let x = buffer(rows, width, &random.values(rows * width));
        let expected = route(&mut Cpu::with_isa(1, Isa::Scalar), rule, &gate, &bias, &x);
        for mut cpu in devices() {
            let found = route(&mut cpu, rule, &gate, &bias, &x);
            for row in 0..rows {
                assert_eq!(found.experts(row), expected.experts(row));
                assert_eq!(bits(found.weights(row)), bits(expected.weights(row)));
            }
            for row in [0, 7, 40] {
                let alone = route(&mut cpu, rule, &gate, &bias, &buffer(1, width, x.row(row)));
                assert_eq!(alone.experts(0), expected.experts(row));
                assert_eq!(bits(alone.weights(0)), bits(expected.weights(row)));
            }
        }
        let mut all: Vec<u32> = Vec::new();
        for e in 0..experts {
            assert!(expected.choices(e).is_sorted());
            for &c in expected.choices(e) {
                assert_eq!(expected.experts(c as usize / top)[c as usize % top] as usize, e);
            }
            all.extend(expected.choices(e));
        }
        all.sort_unstable();
        assert_eq!(all, (0..(rows * top) as u32).collect::<Vec<_>>(), "every choice is in one group");
    }
}

#[test]
fn scores_choices_and_weights_are_those_of_f64() {
    let mut random = Random(21);
    for (experts, width, top) in [(8, 128, 2), (300, 96, 8), (288, 4096, 8)] {
        let rule = RouterRule { top, ..RULE };
        let (gate, values) = matrix(&mut random, Kind::Bf16, experts, width);
        let bias = vector(&random.values(experts));
        let rows = 41;
        // Logits of a few units, as of a trained router: the sigmoid is neither flat nor saturated.
        let scale = 4.0 / (width as f32).sqrt();
        let x = buffer(rows, width, &random.values(rows * width).iter().map(|v| v * scale).collect::<Vec<_>>());
        let found = route(&mut Cpu::new(1), rule, &gate, &bias, &x);
        let mut far = 0.0f64;
        for row in 0..rows {
            let scores: Vec<f64> =
                product(&values, width, &wide(x.row(row))).into_iter().map(|l| sigmoid(l.0)).collect();
            let mut order: Vec<usize> = (0..experts).collect();
            let biased = |e: usize| scores[e] + f64::from(bias.as_slice()[e]);
            order.sort_by(|&a, &b| biased(b).total_cmp(&biased(a)));
            order.truncate(top);
            order.sort_unstable();
            let sum: f64 = order.iter().map(|&e| scores[e]).sum();
            for (i, e) in order.into_iter().enumerate() {
                assert_eq!(found.experts(row)[i] as usize, e, "row {row} of {experts} experts");
                far = far.max((f64::from(found.weights(row)[i]) - scores[e] / sum * 2.5).abs());
            }
        }
        assert!(far < 1e-6, "{experts} experts: {far:e}");
    }
}

struct Layer {
    experts: Experts<Cpu>,
    /// Gate, up and down of the routed experts, then of the shared one.
    values: Vec<[Vec<f64>; 3]>,
    widths: Vec<usize>,
}

fn expert(random: &mut Random, kind: Kind, hidden: usize, width: usize) -> (Swiglu<Cpu>, [Vec<f64>; 3]) {
    let (gate, g) = linear(random, kind, width, hidden);
    let (up, u) = linear(random, kind, width, hidden);
    let (down, d) = linear(random, kind, hidden, width);
    (Swiglu { gate, up, down }, [g, u, d])
}

fn layer(random: &mut Random, kind: Kind, hidden: usize, width: usize, experts: usize, shared: Option<usize>) -> Layer {
    let mut values = Vec::new();
    let mut widths = vec![width; experts];
    let mut routed = Vec::new();
    for _ in 0..experts {
        let (expert, v) = expert(random, kind, hidden, width);
        routed.push(expert);
        values.push(v);
    }
    let shared = shared.map(|width| {
        let (expert, v) = expert(random, Kind::Bf16, hidden, width);
        values.push(v);
        widths.push(width);
        expert
    });
    Layer { experts: Experts { routed, shared, limit: 1.5 }, values, widths }
}

fn run(cpu: &mut Cpu, layer: &Layer, routing: &CpuRouting, x: &CpuBuffer) -> (CpuBuffer, CpuBuffer) {
    let (rows, hidden) = (x.rows(), x.width());
    let mut act = CpuBuffer::new(rows * routing.top(), layer.widths[0]).unwrap();
    let mut shared = CpuBuffer::new(rows, *layer.widths.last().unwrap()).unwrap();
    let mut out = CpuBuffer::new(rows, hidden).unwrap();
    cpu.moe_up(rows, &layer.experts, routing, x, &mut act, &mut shared).unwrap();
    cpu.moe_down(rows, &layer.experts, routing, &act, &shared, &mut out).unwrap();
    (act, out)
}

/// An expert's output in f64.
fn exact(values: &[Vec<f64>; 3], hidden: usize, width: usize, x: &[f64], limit: f64) -> Vec<f64> {
    let (gate, up) = (product(&values[0], hidden, x), product(&values[1], hidden, x));
    let act: Vec<f64> = gate
        .iter()
        .zip(&up)
        .map(|(g, u)| g.0.min(limit) * sigmoid(g.0.min(limit)) * u.0.clamp(-limit, limit))
        .collect();
    product(&values[2], width, &act).into_iter().map(|y| y.0).collect()
}

#[test]
fn experts_are_weighted_and_the_shared_one_is_added_unscaled() {
    let mut random = Random(21);
    for (kind, shared) in [(Kind::Bf16, Some(64)), (Kind::Int4, Some(256)), (Kind::Int4, None)] {
        let (hidden, width, experts, rows) = (128, 128, 7, 19);
        let layer = layer(&mut random, kind, hidden, width, experts, shared);
        let (gate, _) = matrix(&mut random, Kind::Bf16, experts, hidden);
        let bias = vector(&vec![0.0; experts]);
        let x = buffer(rows, hidden, &random.values(rows * hidden));
        let routing = route(&mut Cpu::new(1), RULE, &gate, &bias, &x);
        let (act, out) = run(&mut Cpu::with_isa(1, Isa::Scalar), &layer, &routing, &x);
        for mut cpu in devices() {
            let found = run(&mut cpu, &layer, &routing, &x);
            assert_eq!(bits(found.0.as_slice()), bits(act.as_slice()), "{kind:?} {:?}", cpu.isa());
            assert_eq!(bits(found.1.as_slice()), bits(out.as_slice()), "{kind:?} {:?}", cpu.isa());
            for row in [0, 3, 18] {
                let one = buffer(1, hidden, x.row(row));
                let alone = route(&mut cpu, RULE, &gate, &bias, &one);
                assert_eq!(bits(run(&mut cpu, &layer, &alone, &one).1.row(0)), bits(out.row(row)));
            }
        }
        for row in 0..rows {
            let input = wide(x.row(row));
            let mut expected = vec![0.0; hidden];
            let chosen = routing.experts(row).iter().zip(routing.weights(row));
            let chosen = chosen.map(|(&e, &w)| (e as usize, f64::from(w)));
            for (e, weight) in chosen.chain(shared.map(|_| (experts, 1.0))) {
                let y = exact(&layer.values[e], hidden, layer.widths[e], &input, 1.5);
                expected.iter_mut().zip(y).for_each(|(sum, y)| *sum += weight * y);
            }
            let size = expected.iter().fold(0.0_f64, |m, v| m.max(v.abs()));
            for (y, e) in out.row(row).iter().zip(expected) {
                assert!((f64::from(*y) - e).abs() <= 2e-6 * size, "{y} instead of {e}, largest {size}");
            }
        }
    }
}

#[test]
fn the_sum_runs_ascending_by_expert_with_the_shared_one_last() {
    let mut random = Random(22);
    let (hidden, width) = (128, 128);
    let layer = layer(&mut random, Kind::Bf16, hidden, width, 4, Some(32));
    let x = buffer(1, hidden, &random.values(hidden));
    let mut cpu = Cpu::new(1);
    let routing = route(&mut cpu, RULE, &matrix(&mut random, Kind::Bf16, 4, hidden).0, &vector(&[0.0; 4]), &x);
    let (_, out) = run(&mut cpu, &layer, &routing, &x);
    let mut expected = vec![0.0_f32; hidden];
    let mut one = |expert: &Swiglu<Cpu>| {
        let mut act = CpuBuffer::new(1, expert.gate.weight.out()).unwrap();
        let mut y = CpuBuffer::new(1, hidden).unwrap();
        cpu.swiglu(1, expert, 1.5, &x, &mut act, &mut y).unwrap();
        y
    };
    for (&e, &w) in routing.experts(0).iter().zip(routing.weights(0)) {
        let y = one(&layer.experts.routed[e as usize]);
        expected.iter_mut().zip(y.row(0)).for_each(|(sum, y)| *sum = w.mul_add(*y, *sum));
    }
    let y = one(layer.experts.shared.as_ref().unwrap());
    expected.iter_mut().zip(y.row(0)).for_each(|(sum, y)| *sum += y);
    assert_eq!(bits(out.row(0)), bits(&expected));
}
