//! Rules and equalities of the stage.

#![allow(clippy::float_cmp, reason = "exact results are meant")]

use proptest::prelude::*;

use super::kda;
use crate::{
    Backend, CacheShape, KdaForm, KdaWeights, Segment,
    cpu::{
        Cpu, CpuBuffer, CpuCache,
        testing::{Rng, bits, buffer, close, devices, matrix, norm, rows_of, segment, sigmoid64, step, vector},
    },
};

const TAPS: usize = 4;
const BOUND: f32 = -5.0;

/// A layer with random weights; rows are functions of sequence and position.
struct Layer {
    heads: usize,
    dim: usize,
    conv: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    o_norm: Vec<f32>,
}

impl Layer {
    fn new(heads: usize, dim: usize) -> Self {
        let mut rng = Rng::new(&[heads as u64, dim as u64]);
        let inner = heads * dim;
        Self {
            heads,
            dim,
            conv: rng.bf16(3 * inner * TAPS, 0.8),
            a_log: rng.values(heads, 1.0),
            dt_bias: rng.values(inner, 3.0),
            o_norm: rng.values(dim, 1.0),
        }
    }

    fn inner(&self) -> usize {
        self.heads * self.dim
    }

    fn weights(&self) -> KdaWeights<Cpu> {
        KdaWeights {
            conv: matrix(3 * self.inner(), &self.conv),
            a_log: vector(&self.a_log),
            dt_bias: vector(&self.dt_bias),
            o_norm: norm(&self.o_norm, None, 1e-5),
            heads: self.heads,
            dim: self.dim,
            gate_lower_bound: BOUND,
        }
    }

    fn cache(&self, slots: usize, max_draft: usize) -> CpuCache {
        CpuCache::new(&CacheShape {
            kda_layers: 2,
            kda_heads: self.heads,
            kda_head_dim: self.dim,
            conv_kernel: TAPS,
            dsa_layers: 0,
            latent: 0,
            index_dim: 0,
            kpool: 0,
            slots,
            pages: 64,
            max_draft,
        })
        .unwrap()
    }

    /// Projections and gates of a row.
    fn row(&self, sequence: u64, position: usize) -> (Vec<f32>, Vec<f32>) {
        let mut rng = Rng::new(&[sequence, position as u64, 77]);
        (rng.values(3 * self.inner() + self.heads + 3, 1.5), rng.values(2 * self.inner(), 3.0))
    }

    /// Runs a step; `rows` are the projections and gates of all its rows.
    fn run_rows(
        &self,
        cpu: &mut Cpu,
        form: KdaForm,
        cache: &mut CpuCache,
        slots: usize,
        segments: &[Segment],
        rows: &[(Vec<f32>, Vec<f32>)],
    ) -> Vec<Vec<f32>> {
        cpu.begin(&step(slots, segments)).unwrap();
        let (proj, gates): (Vec<_>, Vec<_>) = rows.iter().cloned().unzip();
        let mut out = CpuBuffer::new(rows.len(), self.inner()).unwrap();
        let (proj, gates) = (buffer(&proj), buffer(&gates));
        kda(cpu, &self.weights(), form, &proj, &gates, cache, 1, &mut out).unwrap();
        rows_of(&out, rows.len())
    }

    /// Runs a step whose slot `s` holds sequence `sequences[s]`.
    fn run(
        &self,
        cpu: &mut Cpu,
        form: KdaForm,
        cache: &mut CpuCache,
        sequences: &[u64],
        segments: &[Segment],
    ) -> Vec<Vec<f32>> {
        let rows: Vec<_> = segments
            .iter()
            .flat_map(|s| (0..s.rows).map(|t| self.row(sequences[s.slot as usize], (s.position + t) as usize)))
            .collect();
        self.run_rows(cpu, form, cache, sequences.len(), segments, &rows)
    }

    /// Outputs of a sequence's first `n` rows and the final state `[heads, key, value]`, from the formulas in f64.
    fn definition(&self, rows: &[(Vec<f32>, Vec<f32>)]) -> (Vec<Vec<f64>>, Vec<f64>) {
        let (dim, inner) = (self.dim, self.inner());
        let mut states = vec![0.0f64; self.heads * dim * dim];
        let mut outputs = Vec::new();
        for t in 0..rows.len() {
            let mut output = vec![0.0; inner];
            let convolved = |channel: usize| {
                let sum: f64 = (0..TAPS)
                    .filter(|&j| t + j + 1 >= TAPS)
                    .map(|j| f64::from(self.conv[channel * TAPS + j]) * f64::from(rows[t + j + 1 - TAPS].0[channel]))
                    .sum();
                sum * sigmoid64(sum)
            };
            for h in 0..self.heads {
                let part = |p: usize| (0..dim).map(|d| convolved(p * inner + h * dim + d)).collect::<Vec<_>>();
                let (q, k, v) = (part(0), part(1), part(2));
                let length = |x: &[f64]| (x.iter().map(|v| v * v).sum::<f64>() + 1e-6).sqrt();
                let (lq, lk) = (length(&q) * (dim as f64).sqrt(), length(&k));
                let q: Vec<f64> = q.iter().map(|v| v / lq).collect();
                let k: Vec<f64> = k.iter().map(|v| v / lk).collect();
                let (proj, gates) = &rows[t];
                let beta = sigmoid64(f64::from(proj[3 * inner + h]));
                let s = &mut states[h * dim * dim..][..dim * dim];
                for d in 0..dim {
                    let c = h * dim + d;
                    let f = f64::from(gates[c]) + f64::from(self.dt_bias[c]);
                    let g = f64::from(BOUND) * sigmoid64(f64::from(self.a_log[h]).exp() * f);
                    for e in 0..dim {
                        s[d * dim + e] *= g.exp();
                    }
                }
                let mut o = vec![0.0; dim];
                for e in 0..dim {
                    let seen: f64 = (0..dim).map(|d| s[d * dim + e] * k[d]).sum();
                    for d in 0..dim {
                        s[d * dim + e] += k[d] * beta * (v[e] - seen);
                    }
                    o[e] = (0..dim).map(|d| s[d * dim + e] * q[d]).sum();
                }
                let rms = (o.iter().map(|v| v * v).sum::<f64>() / dim as f64 + 1e-5).sqrt();
                for e in 0..dim {
                    let gate = sigmoid64(f64::from(gates[inner + h * dim + e]));
                    output[h * dim + e] = o[e] / rms * f64::from(self.o_norm[e]) * gate;
                }
            }
            outputs.push(output);
        }
        (outputs, states)
    }
}

#[test]
fn rows_and_state_follow_the_definition() {
    for (heads, dim) in [(2, 32), (3, 20), (2, 64), (1, 128)] {
        let layer = Layer::new(heads, dim);
        let rows: Vec<_> = (0..70).map(|p| layer.row(3, p)).collect();
        let (outputs, state) = layer.definition(&rows);
        let mut cache = layer.cache(1, 0);
        let mut cpu = Cpu::new(2);
        let found = layer.run(&mut cpu, KdaForm::Recurrent, &mut cache, &[3], &[segment(0, 0, 70)]);
        for (t, (found, expected)) in found.iter().zip(&outputs).enumerate() {
            close(found, expected, 2e-5, &format!("row {t} of {heads} x {dim}"));
        }
        // Layout [heads, key, value]: the reference is indexed so, and a transposed state would be far away.
        close(&cpu.read_state(&cache, 1, 0).unwrap(), &state, 1e-5, "state");
        assert!(cpu.read_state(&cache, 0, 0).unwrap().iter().all(|&v| v == 0.0), "the other layer is untouched");
    }
}

#[test]
fn state_is_key_by_value() {
    // One row on a fresh slot leaves k (beta v)^T: the key chooses the line, the value lies along it.
    let mut layer = Layer::new(1, 32);
    layer.conv.fill(0.0);
    (0..96).for_each(|c| layer.conv[c * TAPS + TAPS - 1] = 1.0);
    let mut proj = vec![0.0; 3 * 32 + 1];
    proj[32 + 5] = 20.0;
    proj[64 + 9] = 3.0;
    proj[96] = 100.0;
    let mut cpu = Cpu::new(1);
    let mut cache = layer.cache(1, 0);
    let rows = [(proj, vec![0.0; 64])];
    layer.run_rows(&mut cpu, KdaForm::Recurrent, &mut cache, 1, &[segment(0, 0, 1)], &rows);
    let state = cpu.read_state(&cache, 1, 0).unwrap();
    let v = 3.0 * sigmoid64(3.0);
    for (i, &s) in state.iter().enumerate() {
        let expected = if i == 5 * 32 + 9 { v } else { 0.0 };
        assert!((f64::from(s) - expected).abs() < 1e-6, "element {i}: {s}");
    }
}

/// State after a row with `beta` = 0 divided by the state before it: the decay factors `[heads, key]`.
fn decay_of(layer: &Layer, gates: &[f32]) -> Vec<f32> {
    let (mut cpu, mut cache) = (Cpu::new(1), layer.cache(1, 0));
    layer.run(&mut cpu, KdaForm::Recurrent, &mut cache, &[4], &[segment(0, 0, 9)]);
    let before = cpu.read_state(&cache, 1, 0).unwrap();
    let mut proj = layer.row(4, 9).0;
    proj[3 * layer.inner()..].fill(-200.0);
    let rows = [(proj, gates.to_vec())];
    layer.run_rows(&mut cpu, KdaForm::Recurrent, &mut cache, 1, &[segment(0, 9, 1)], &rows);
    let after = cpu.read_state(&cache, 1, 0).unwrap();
    let dim = layer.dim;
    (0..layer.inner())
        .map(|c| {
            let line = c * dim..(c + 1) * dim;
            let best = line.max_by(|&a, &b| before[a].abs().total_cmp(&before[b].abs())).unwrap();
            after[best] / before[best]
        })
        .collect()
}

#[test]
fn decay_lies_between_e_to_the_bound_and_one() {
    let layer = Layer::new(2, 32);
    let mut gates = vec![0.0; 128];
    gates[..32].fill(1e4);
    gates[32..64].fill(-1e4);
    for (c, decay) in decay_of(&layer, &gates).into_iter().enumerate() {
        let expected = if c < 32 { (-5.0f64).exp() } else { 1.0 };
        assert!((f64::from(decay) / expected - 1.0).abs() < 1e-5, "channel {c}: {decay}");
    }
}

#[test]
fn a_log_stands_inside_the_sigmoid_by_head() {
    let mut layer = Layer::new(2, 32);
    layer.dt_bias.fill(0.0);
    layer.a_log = vec![-1.0, 0.5];
    let gates = vec![0.7; 128];
    for (c, decay) in decay_of(&layer, &gates).into_iter().enumerate() {
        let rate = f64::from(layer.a_log[c / 32]).exp();
        let expected = (-5.0 * sigmoid64(rate * f64::from(0.7f32))).exp();
        assert!((f64::from(decay) / expected - 1.0).abs() < 1e-5, "channel {c}: {decay} against {expected}");
    }
}

#[test]
fn dt_bias_is_one_value_a_channel() {
    let mut layer = Layer::new(2, 32);
    layer.a_log.fill(0.0);
    layer.dt_bias = (0..64).map(|c| (c as f32 - 32.0) / 16.0).collect();
    for (c, decay) in decay_of(&layer, &[0.0; 128]).into_iter().enumerate() {
        let expected = (-5.0 * sigmoid64((c as f64 - 32.0) / 16.0)).exp();
        assert!((f64::from(decay) / expected - 1.0).abs() < 1e-5, "channel {c}: {decay} against {expected}");
    }
    let mut weights = layer.weights();
    weights.dt_bias = vector(&[0.0; 2]);
    let (mut cpu, mut cache) = (Cpu::new(1), layer.cache(1, 0));
    cpu.begin(&step(1, &[segment(0, 0, 1)])).unwrap();
    let (proj, gates) = layer.row(0, 0);
    let (proj, gates) = (buffer(&[proj]), buffer(&[gates]));
    let mut out = CpuBuffer::new(1, 64).unwrap();
    let result = kda(&mut cpu, &weights, KdaForm::Recurrent, &proj, &gates, &mut cache, 1, &mut out);
    assert!(result.is_err(), "a value a head is refused");
}

#[test]
fn output_gate_is_a_sigmoid() {
    let layer = Layer::new(1, 32);
    let run = |z: f32| {
        let (proj, mut gates) = layer.row(5, 0);
        gates[32..].fill(z);
        let rows = [(proj, gates)];
        let mut cache = layer.cache(1, 0);
        layer.run_rows(&mut Cpu::new(1), KdaForm::Recurrent, &mut cache, 1, &[segment(0, 0, 1)], &rows).remove(0)
    };
    let (open, half, closed) = (run(200.0), run(0.0), run(-200.0));
    for i in 0..32 {
        assert!(open[i].abs() > 0.0);
        assert!((half[i] - 0.5 * open[i]).abs() < 1e-6, "SiLU would give 0 at 0");
        assert_eq!(closed[i], 0.0);
    }
}

#[test]
fn convolution_orders_its_taps_and_keeps_raw_columns() {
    // v only through tap 0, the oldest: the value written at row 3 is silu(w x_0), of the raw x_0.
    let mut layer = Layer::new(1, 32);
    layer.conv.fill(0.0);
    for c in 0..96 {
        layer.conv[c * TAPS + if c < 64 { TAPS - 1 } else { 0 }] = 0.5;
    }
    let mut rows = Vec::new();
    for t in 0..4 {
        let mut proj = vec![0.0; 97];
        proj[32 + t] = 10.0;
        proj[64 + t] = 2.0 + t as f32;
        proj[96] = 100.0;
        rows.push((proj, vec![-1e4; 64]));
    }
    let (mut cpu, mut cache) = (Cpu::new(1), layer.cache(1, 0));
    // Row by row, so that the history comes from the ring.
    for (t, row) in rows.iter().enumerate() {
        let row = std::slice::from_ref(row);
        layer.run_rows(&mut cpu, KdaForm::Recurrent, &mut cache, 1, &[segment(0, t, 1)], row);
        let state = cpu.read_state(&cache, 1, 0).unwrap();
        let written: Vec<_> = (0..1024).filter(|&i| state[i].abs() > 1e-6).collect();
        if t < 3 {
            assert!(written.is_empty(), "missing history is zero");
        } else {
            // Key of row 3, value channel 0 of row 0, through the SiLU.
            assert_eq!(written, [3 * 32]);
            assert!((f64::from(state[3 * 32]) - sigmoid64(1.0)).abs() < 1e-5);
        }
    }
}

#[test]
fn silu_follows_the_convolution_on_queries_keys_and_values() {
    // Only the current row counts and nothing decays. Two orthogonal keys write two value channels; the third row reads them.
    let mut layer = Layer::new(1, 32);
    layer.conv.fill(0.0);
    (0..96).for_each(|c| layer.conv[c * TAPS + TAPS - 1] = 1.0);
    layer.o_norm.fill(1.0);
    let silu = |x: f64| x * sigmoid64(x);
    let row = |q: &[(usize, f32)], k: &[(usize, f32)], v: &[(usize, f32)], beta: f32| {
        let mut proj = vec![0.0; 97];
        for (start, part) in [(0, q), (32, k), (64, v)] {
            part.iter().for_each(|&(c, x)| proj[start + c] = x);
        }
        proj[96] = beta;
        (proj, [vec![-1e4; 32], vec![100.0; 32]].concat())
    };
    // The key of the first row has two channels, so that its direction shows whether it went through the SiLU.
    let rows = [
        row(&[], &[(5, 2.0), (6, -1.0)], &[(9, -0.5)], 100.0),
        row(&[], &[(7, 3.0)], &[(10, 4.0)], 100.0),
        row(&[(5, 1.5), (7, -2.0)], &[], &[], -100.0),
    ];
    let (mut cpu, mut cache) = (Cpu::new(1), layer.cache(1, 0));
    let out = layer.run_rows(&mut cpu, KdaForm::Recurrent, &mut cache, 1, &[segment(0, 0, 3)], &rows);
    let state = cpu.read_state(&cache, 1, 0).unwrap();
    let length = silu(2.0).hypot(silu(-1.0));
    for (key, x) in [(5, 2.0), (6, -1.0)] {
        let expected = silu(x) / length * silu(-0.5);
        assert!((f64::from(state[key * 32 + 9]) - expected).abs() < 1e-5, "key channel {key}");
    }
    assert!((f64::from(state[7 * 32 + 10]) - silu(4.0)).abs() < 1e-5);
    // Outputs are normalised; what is left of the query is the ratio of its channels.
    let read = [silu(1.5) * f64::from(state[5 * 32 + 9]), silu(-2.0) * f64::from(state[7 * 32 + 10])];
    let found = f64::from(out[2][9]) / f64::from(out[2][10]);
    assert!((found - read[0] / read[1]).abs() < 1e-5 * found.abs(), "{found} against {}", read[0] / read[1]);
}

#[test]
fn a_fresh_sequence_does_not_see_the_slots_past() {
    let layer = Layer::new(2, 32);
    let mut cpu = Cpu::new(1);
    let mut cache = layer.cache(1, 2);
    layer.run(&mut cpu, KdaForm::Recurrent, &mut cache, &[8], &[segment(0, 0, 30)]);
    for rows in [1, 7] {
        let used = layer.run(&mut cpu, KdaForm::Recurrent, &mut cache, &[9], &[segment(0, 0, rows)]);
        let mut clean = layer.cache(1, 2);
        let fresh = layer.run(&mut cpu, KdaForm::Recurrent, &mut clean, &[9], &[segment(0, 0, rows)]);
        assert_eq!(bits(&used), bits(&fresh));
        assert_eq!(cpu.read_state(&cache, 1, 0).unwrap(), cpu.read_state(&clean, 1, 0).unwrap());
    }
    // Nothing but drafts so far: the first fold reaches back to position 0 and starts from a zero state too.
    let drafts = Segment { commit: 0, ..segment(0, 0, 2) };
    let mut clean = layer.cache(1, 2);
    for cache in [&mut cache, &mut clean] {
        layer.run(&mut cpu, KdaForm::Recurrent, cache, &[9], &[drafts]);
        layer.run(&mut cpu, KdaForm::Recurrent, cache, &[9], &[Segment { fold: 2, ..segment(0, 2, 3) }]);
    }
    assert_eq!(cpu.read_state(&cache, 1, 0).unwrap(), cpu.read_state(&clean, 1, 0).unwrap());
}

#[test]
fn all_devices_give_the_same_bits() {
    for (heads, dim) in [(3, 20), (2, 64)] {
        let layer = Layer::new(heads, dim);
        for form in [KdaForm::Recurrent, KdaForm::Chunked] {
            let mut reference = None;
            for mut cpu in devices() {
                let mut cache = layer.cache(1, 2);
                let mut out = layer.run(&mut cpu, form, &mut cache, &[1], &[segment(0, 0, 67)]);
                let verify = Segment { commit: 1, ..segment(0, 67, 3) };
                out.extend(layer.run(&mut cpu, form, &mut cache, &[1], &[verify]));
                out.push(cpu.read_state(&cache, 1, 0).unwrap());
                let result = bits(&out);
                assert!(reference.get_or_insert_with(|| result.clone()) == &result, "{cpu:?}");
            }
        }
    }
}

#[test]
fn chunked_form_agrees_with_the_recurrent_one() {
    chunked_against_definition(&[(20, 0.0), (64, 0.0), (64, -200.0), (128, 0.0)]);
}

#[test]
fn chunks_of_the_strongest_decay_do_not_overflow() {
    // With dt_bias far up every decay is e^-5 and a chunk's running sum G falls to -320, where exp(-G) is beyond f32.
    chunked_against_definition(&[(20, 200.0), (64, 200.0), (128, 200.0)]);
}

/// Width of a head, and what is added to `dt_bias`: far down there is no decay.
fn chunked_against_definition(cases: &[(usize, f32)]) {
    for &(dim, shift) in cases {
        let mut layer = Layer::new(2, dim);
        layer.dt_bias.iter_mut().for_each(|b| *b += shift);
        let rows: Vec<_> = (0..150).map(|p| layer.row(3, p)).collect();
        let (outputs, state) = layer.definition(&rows);
        let mut cache = layer.cache(1, 0);
        let mut cpu = Cpu::new(1);
        let found = layer.run(&mut cpu, KdaForm::Chunked, &mut cache, &[3], &[segment(0, 0, 150)]);
        for (t, (found, expected)) in found.iter().zip(&outputs).enumerate() {
            close(found, expected, 2e-5, &format!("row {t} of dim {dim}, shift {shift}"));
        }
        let top = state.iter().fold(0.0f64, |m, v| m.max(v.abs()));
        close(&cpu.read_state(&cache, 1, 0).unwrap(), &state, 1e-5 * top.max(1.0), "state");
    }
}

#[test]
fn chunks_are_anchored_at_multiples_of_their_length() {
    let layer = Layer::new(1, 32);
    let run = |form, cuts: &[usize]| {
        let (mut cpu, mut cache) = (Cpu::new(1), layer.cache(1, 0));
        let mut found = Vec::new();
        for &cut in cuts {
            found.extend(layer.run(&mut cpu, form, &mut cache, &[2], &[segment(0, found.len(), cut)]));
        }
        bits(&found)
    };
    let whole = run(KdaForm::Chunked, &[200]);
    assert_eq!(run(KdaForm::Chunked, &[64, 128, 8]), whole);
    assert_eq!(run(KdaForm::Chunked, &[192, 5, 3]), whole);
    // Cut elsewhere, no chunk is whole: the recurrent form.
    assert_eq!(run(KdaForm::Chunked, &[50, 50, 28]), run(KdaForm::Recurrent, &[128]));
    assert_ne!(run(KdaForm::Recurrent, &[200]), whole);
}

#[test]
fn a_row_in_a_ragged_batch_equals_the_row_alone() {
    let layer = Layer::new(2, 32);
    let sequences = [10, 11, 12, 13];
    let lens = [0, 5, 64, 70];
    let mut cpu = Cpu::new(2);
    let mut batch = layer.cache(4, 3);
    let mut alone: Vec<_> = (0..4).map(|_| layer.cache(4, 3)).collect();
    for slot in 1..4 {
        for cache in [&mut batch, &mut alone[slot]] {
            layer.run(&mut cpu, KdaForm::Recurrent, cache, &sequences, &[segment(slot, 0, lens[slot])]);
        }
    }
    // A prefill, a verification, a decode row and a prefill chunk.
    let segments = [segment(2, 64, 9), Segment { commit: 1, ..segment(3, 70, 4) }, segment(1, 5, 1), segment(0, 0, 17)];
    let together = layer.run(&mut cpu, KdaForm::Recurrent, &mut batch, &sequences, &segments);
    let mut row = 0;
    for s in &segments {
        let slot = s.slot as usize;
        let single = layer.run(&mut cpu, KdaForm::Recurrent, &mut alone[slot], &sequences, &[*s]);
        assert_eq!(bits(&single), bits(&together[row..row + s.rows as usize]));
        assert_eq!(cpu.read_state(&batch, 1, s.slot).unwrap(), cpu.read_state(&alone[slot], 1, s.slot).unwrap());
        row += s.rows as usize;
    }
}

#[test]
fn a_copied_slot_goes_on_like_the_original() {
    let layer = Layer::new(2, 32);
    let mut cpu = Cpu::new(1);
    let mut cache = layer.cache(3, 2);
    layer.run(&mut cpu, KdaForm::Recurrent, &mut cache, &[5, 6, 5], &[segment(0, 0, 20)]);
    layer.run(&mut cpu, KdaForm::Recurrent, &mut cache, &[5, 6, 5], &[Segment { commit: 1, ..segment(0, 20, 3) }]);
    cpu.copy_slot(&mut cache, 0, 2).unwrap();
    let next = |slot| Segment { fold: 2, commit: 1, ..segment(slot, 23, 3) };
    let a = layer.run(&mut cpu, KdaForm::Recurrent, &mut cache, &[5, 6, 5], &[next(0)]);
    let b = layer.run(&mut cpu, KdaForm::Recurrent, &mut cache, &[5, 6, 5], &[next(2)]);
    assert_eq!(bits(&a), bits(&b));
    assert!(cpu.copy_slot(&mut cache, 0, 3).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Any cut of a prompt gives the bits of the whole.
    #[test]
    fn any_chunking_equals_one_shot(cuts in proptest::collection::vec(1usize..40, 1..8)) {
        let layer = Layer::new(1, 32);
        let total = cuts.iter().sum();
        let mut cpu = Cpu::new(1);
        let mut whole = layer.cache(1, 0);
        let expected = layer.run(&mut cpu, KdaForm::Recurrent, &mut whole, &[2], &[segment(0, 0, total)]);
        let mut cache = layer.cache(1, 0);
        let mut found = Vec::new();
        for cut in cuts {
            let next = segment(0, found.len(), cut);
            found.extend(layer.run(&mut cpu, KdaForm::Recurrent, &mut cache, &[2], &[next]));
        }
        prop_assert_eq!(bits(&found), bits(&expected));
        prop_assert_eq!(cpu.read_state(&cache, 1, 0).unwrap(), cpu.read_state(&whole, 1, 0).unwrap());
    }

    /// Verification with any pattern of accepted drafts equals plain decoding: every accepted row and the state.
    #[test]
    fn verification_with_folding_equals_plain_decoding(
        prompt in 1usize..70,
        steps in proptest::collection::vec((0usize..=3, 0usize..=3), 1..10),
    ) {
        const DRAFT: usize = 3;
        let layer = Layer::new(1, 32);
        let mut cpu = Cpu::new(1);
        let mut plain = layer.cache(1, DRAFT);
        layer.run(&mut cpu, KdaForm::Recurrent, &mut plain, &[6], &[segment(0, 0, prompt)]);
        let mut cache = layer.cache(1, DRAFT);
        layer.run(&mut cpu, KdaForm::Recurrent, &mut cache, &[6], &[segment(0, 0, prompt)]);
        let (mut position, mut fold) = (prompt, 0);
        for (i, (drafts, accepted)) in steps.into_iter().enumerate() {
            let accepted = accepted.min(drafts);
            let next = Segment { fold: fold as u32, commit: 1, ..segment(0, position, 1 + drafts) };
            // Rejected rows have other contents than the ones that come in their place.
            let rows: Vec<_> = (0..1 + drafts)
                .map(|t| layer.row(if t <= accepted { 6 } else { 100 + i as u64 }, position + t))
                .collect();
            let found = layer.run_rows(&mut cpu, KdaForm::Recurrent, &mut cache, 1, &[next], &rows);
            for (t, found) in found.iter().take(1 + accepted).enumerate() {
                let expected = layer.run(&mut cpu, KdaForm::Recurrent, &mut plain, &[6], &[segment(0, position + t, 1)]);
                prop_assert_eq!(bits(std::slice::from_ref(found)), bits(&expected));
            }
            position += 1 + accepted;
            fold = accepted;
        }
        let last = Segment { fold: fold as u32, ..segment(0, position, 1) };
        let found = layer.run(&mut cpu, KdaForm::Recurrent, &mut cache, &[6], &[last]);
        let expected = layer.run(&mut cpu, KdaForm::Recurrent, &mut plain, &[6], &[segment(0, position, 1)]);
        prop_assert_eq!(bits(&found), bits(&expected));
        prop_assert_eq!(cpu.read_state(&cache, 1, 0).unwrap(), cpu.read_state(&plain, 1, 0).unwrap());
    }
}
