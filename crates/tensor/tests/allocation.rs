//! After one step, the dense stages and the experts allocate nothing, whatever the size of later steps.

#![allow(clippy::unwrap_used, reason = "a failure is a failed test")]

mod counting;
mod material;

use counting::{allocations, count_threads};
use glimmer_tensor::{
    Backend, Columns, Cpu, Experts, Linear, Norm, RouterRule, Segment, Step, Streams, Swiglu,
    cpu::{CpuBuffer, CpuMatrix, CpuRouting, CpuVector},
};
use material::{Kind, Random, buffer, linear, matrix, vector};

const HIDDEN: usize = 256;
const WIDTH: usize = 128;
const EXPERTS: usize = 6;
const ROWS: usize = 70;

struct Model {
    table: CpuMatrix,
    projection: [Linear<Cpu>; 2],
    norm: Norm<Cpu>,
    mlp: Swiglu<Cpu>,
    gate: CpuMatrix,
    bias: CpuVector,
    experts: Experts<Cpu>,
}

struct Workspace {
    streams: Streams<Cpu>,
    x: CpuBuffer,
    y: CpuBuffer,
    pair: CpuBuffer,
    act: CpuBuffer,
    shared: CpuBuffer,
    logits: CpuBuffer,
    features: CpuBuffer,
    routing: CpuRouting,
}

fn swiglu(random: &mut Random, kind: Kind) -> Swiglu<Cpu> {
    Swiglu {
        gate: linear(random, kind, WIDTH, HIDDEN).0,
        up: linear(random, kind, WIDTH, HIDDEN).0,
        down: linear(random, kind, HIDDEN, WIDTH).0,
    }
}

fn step(rows: usize) -> Step {
    let segment =
        Segment { slot: 0, position: 0, rows: rows as u32, fold: 0, commit: rows as u32, first_page: 0, pages: 2 };
    Step {
        tokens: (0..rows as u32).map(|t| t % 40).collect(),
        segments: vec![segment],
        pages: vec![0, 1],
        logits: vec![rows as u32 - 1],
        features: vec![],
    }
}

fn forward(cpu: &mut Cpu, model: &Model, work: &mut Workspace, step: &Step, source: &[u32]) {
    let rows = step.rows();
    cpu.begin(step).unwrap();
    cpu.embed(&model.table, &work.features, &mut work.streams, 2).unwrap();
    let x = Columns { buffer: &work.streams.x, start: 0, width: HIDDEN };
    let [first, second] = &model.projection;
    cpu.linear(rows, x, &[first, second], &mut work.x, 0).unwrap();
    cpu.add_norm(rows, None, &model.norm, &mut work.x, &mut work.y).unwrap();
    cpu.swiglu(rows, &model.mlp, 2.0, &work.y, &mut work.act, &mut work.x).unwrap();
    let rule = RouterRule { top: 2, groups: 1, top_groups: 1, normalize: true, scale: 2.5 };
    cpu.route(rows, &model.gate, &model.bias, rule, &work.x, &mut work.routing).unwrap();
    cpu.moe_up(rows, &model.experts, &work.routing, &work.x, &mut work.act, &mut work.shared).unwrap();
    cpu.moe_down(rows, &model.experts, &work.routing, &work.act, &work.shared, &mut work.y).unwrap();
    cpu.mtp_input(&model.table, &model.norm, &model.norm, &work.y, source, &mut work.pair).unwrap();
    cpu.head(&model.table, &step.logits, &work.y, &mut work.logits).unwrap();
}

#[test]
fn no_stage_allocates_after_the_first_step() {
    let mut random = Random(30);
    let mut cpu = Cpu::new(2);
    count_threads(&cpu);
    cpu.reserve(ROWS, HIDDEN, 128).unwrap();
    let model = Model {
        table: matrix(&mut random, Kind::Bf16, 40, HIDDEN).0,
        projection: [linear(&mut random, Kind::Bf16, 200, HIDDEN).0, linear(&mut random, Kind::F32, 56, HIDDEN).0],
        norm: Norm { weight: vector(&random.values(HIDDEN)), bias: None, eps: 1e-5 },
        mlp: swiglu(&mut random, Kind::Bf16),
        gate: matrix(&mut random, Kind::Bf16, EXPERTS, HIDDEN).0,
        bias: vector(&random.values(EXPERTS)),
        experts: Experts {
            routed: (0..EXPERTS)
                .map(|_| {
                    let mut expert = swiglu(&mut random, Kind::Int4);
                    expert.gate.bias = Some(vector(&random.values(WIDTH)));
                    expert
                })
                .collect(),
            shared: Some(swiglu(&mut random, Kind::Bf16)),
            limit: 2.0,
        },
    };
    let new = |rows, width| CpuBuffer::new(rows, width).unwrap();
    let mut work = Workspace {
        streams: Streams {
            x: new(ROWS, 2 * HIDDEN),
            post: new(ROWS, 2),
            comb: new(ROWS, 4),
            collapsed: new(ROWS, HIDDEN),
        },
        x: new(ROWS, HIDDEN),
        y: new(ROWS, HIDDEN),
        pair: new(ROWS, 2 * HIDDEN),
        act: new(2 * ROWS, WIDTH),
        shared: new(ROWS, WIDTH),
        logits: new(ROWS, 40),
        features: buffer(1, HIDDEN, &vec![0.0; HIDDEN]),
        routing: cpu.routing(ROWS, 2, EXPERTS).unwrap(),
    };
    let source: Vec<u32> = (0..ROWS as u32).collect();
    let steps: Vec<Step> = [3, 1, ROWS, 2, 17, ROWS].into_iter().map(step).collect();
    forward(&mut cpu, &model, &mut work, &steps[0], &source[..3]);
    for step in &steps {
        let before = allocations();
        forward(&mut cpu, &model, &mut work, step, &source[..step.rows()]);
        assert_eq!(allocations(), before, "a step of {} rows", step.rows());
    }
    // The counter counts.
    let before = allocations();
    drop(random.values(1));
    assert!(allocations() > before);
}
