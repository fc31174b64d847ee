//! After one small step, the stages of a sequence allocate nothing, whatever the size of later steps.

#![allow(clippy::unwrap_used, reason = "a failure is a failed test")]

mod counting;

use counting::{allocations, count_threads};
use glimmer_tensor::{
    Backend, CacheShape, Columns, Cpu, DsaColumns, DsaWeights, IndexerWeights, KdaForm, KdaWeights, MhcWeights, Norm,
    Segment, Step, Streams,
    cpu::{CpuBuffer, CpuCache, CpuMatrix, CpuSelection, CpuVector},
};

const HIDDEN: usize = 48;
const STREAMS: usize = 4;
const HEADS: usize = 3;
const DIM: usize = 32;
const LATENT: usize = 40;
const Q_LORA: usize = 24;
const INDEX_HEADS: usize = 2;
const KPOOL: usize = 4;
const TOPK: usize = 16;
const ROWS: usize = 150;
const COLUMNS: DsaColumns = DsaColumns { q_lora: Q_LORA, latent: LATENT };

fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 37 + 11) % 64) as f32 / 64.0 - 0.5).collect()
}

fn vector(n: usize) -> CpuVector {
    CpuVector::new(&values(n)).unwrap()
}

fn matrix(out: usize, columns: usize) -> CpuMatrix {
    CpuMatrix::from_values("test", out, &values(out * columns)).unwrap()
}

fn norm(n: usize, bias: bool) -> Norm<Cpu> {
    Norm { weight: vector(n), bias: bias.then(|| vector(n)), eps: 1e-5 }
}

fn buffer(width: usize) -> CpuBuffer {
    let mut buffer = CpuBuffer::new(ROWS, width).unwrap();
    buffer.as_mut_slice().copy_from_slice(&values(ROWS * width));
    buffer
}

struct Model {
    mixer: MhcWeights<Cpu>,
    norm: Norm<Cpu>,
    kda: KdaWeights<Cpu>,
    dsa: DsaWeights<Cpu>,
}

struct Workspace {
    streams: Streams<Cpu>,
    x: CpuBuffer,
    kda_proj: CpuBuffer,
    gates: CpuBuffer,
    dsa_proj: CpuBuffer,
    query: CpuBuffer,
    residual: CpuBuffer,
    out: CpuBuffer,
    selection: CpuSelection,
    cache: CpuCache,
}

fn model() -> Model {
    let inner = HEADS * DIM;
    let count = 2 * STREAMS + STREAMS * STREAMS;
    Model {
        mixer: MhcWeights {
            mix: matrix(count, STREAMS * HIDDEN),
            base: vector(count),
            scale: vector(3),
            streams: STREAMS,
            rms_eps: 1e-5,
            eps: 1e-6,
            sinkhorn_iters: 20,
        },
        norm: norm(HIDDEN, false),
        kda: KdaWeights {
            conv: matrix(3 * inner, 4),
            a_log: vector(HEADS),
            dt_bias: vector(inner),
            o_norm: norm(DIM, false),
            heads: HEADS,
            dim: DIM,
            gate_lower_bound: -5.0,
        },
        dsa: DsaWeights {
            q_norm: norm(Q_LORA, false),
            kv_norm: norm(LATENT, false),
            kv_b: matrix(2 * inner, LATENT),
            indexer: Some(IndexerWeights {
                k_norm: norm(DIM, true),
                ape: vector(KPOOL * DIM),
                heads: INDEX_HEADS,
                dim: DIM,
                kpool: KPOOL,
                topk: TOPK,
            }),
            heads: HEADS,
            qk_dim: DIM,
            v_dim: DIM,
        },
    }
}

fn workspace(cpu: &Cpu) -> Workspace {
    let inner = HEADS * DIM;
    let shape = CacheShape {
        kda_layers: 1,
        kda_heads: HEADS,
        kda_head_dim: DIM,
        conv_kernel: 4,
        dsa_layers: 1,
        latent: LATENT,
        index_dim: DIM,
        kpool: KPOOL,
        slots: 2,
        pages: 8,
        max_draft: 2,
    };
    Workspace {
        streams: Streams {
            x: buffer(STREAMS * HIDDEN),
            post: buffer(STREAMS),
            comb: buffer(STREAMS * STREAMS),
            collapsed: buffer(HIDDEN),
        },
        x: buffer(HIDDEN),
        kda_proj: buffer(3 * inner + HEADS),
        gates: buffer(2 * inner),
        dsa_proj: buffer(Q_LORA + LATENT + 2 * DIM + INDEX_HEADS),
        query: buffer(inner),
        residual: buffer(Q_LORA),
        out: buffer(inner),
        selection: CpuSelection::new(ROWS, TOPK + KPOOL),
        cache: cpu.cache(&shape).unwrap(),
    }
}

fn step(segments: &[(u32, u32)]) -> Step {
    let mut step = Step::default();
    for (slot, &(position, rows)) in segments.iter().enumerate() {
        let first_page = step.pages.len() as u32;
        step.pages.extend((0..3).map(|p| 3 * slot as u32 + p));
        let slot = slot as u32;
        step.segments.push(Segment { slot, position, rows, fold: 0, commit: rows, first_page, pages: 3 });
        step.tokens.extend((0..rows).map(|_| 0));
    }
    step
}

fn run(cpu: &mut Cpu, model: &Model, w: &mut Workspace, y: &CpuBuffer, step: &Step) {
    let rows = step.rows();
    cpu.begin(step).unwrap();
    for form in [KdaForm::Recurrent, KdaForm::Chunked] {
        cpu.kda(&model.kda, form, &w.kda_proj, &w.gates, &mut w.cache, 0, &mut w.out).unwrap();
    }
    cpu.mhc(rows, &model.mixer, &model.norm, Some(y), &mut w.streams, &mut w.x).unwrap();
    cpu.mhc_head(rows, &model.norm, y, &mut w.streams, &mut w.x).unwrap();
    cpu.dsa_write(&model.dsa, COLUMNS, &w.dsa_proj, true, &mut w.cache, 0, &mut w.residual).unwrap();
    let indexer = model.dsa.indexer.as_ref().unwrap();
    let query = Columns { buffer: &w.query, start: 0, width: INDEX_HEADS * DIM };
    cpu.dsa_select(indexer, COLUMNS, query, &w.dsa_proj, &w.cache, 0, &mut w.selection).unwrap();
    let query = Columns { buffer: &w.query, start: 0, width: HEADS * DIM };
    cpu.mla(&model.dsa, query, &w.selection, &w.cache, 0, &mut w.out).unwrap();
}

#[test]
fn later_and_larger_steps_allocate_nothing() {
    let mut cpu = Cpu::new(2);
    count_threads(&cpu);
    let model = model();
    let mut w = workspace(&cpu);
    let y = buffer(HIDDEN);
    cpu.reserve(ROWS, STREAMS * HIDDEN, 192).unwrap();
    let steps = [step(&[(0, 1)]), step(&[(0, 130), (0, 20)]), step(&[(130, 3), (20, 1)]), step(&[(133, 1)])];
    run(&mut cpu, &model, &mut w, &y, &steps[0]);
    let before = allocations();
    for step in &steps {
        run(&mut cpu, &model, &mut w, &y, step);
    }
    assert_eq!(allocations(), before);
    // The counter counts.
    drop(values(1));
    assert!(allocations() > before);
}
