//! Rules of the model that are easy to get wrong, each in a test named after it, against sums in f64 written here.
//! (Rules inside one fused stage are tested with that stage.)
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod harness;

use std::collections::BTreeSet;

use glimmer_checkpoint::{Bytes, Checkpoint, Config, TensorData, config::MlpKind};
use glimmer_model::{
    At, ChainStep, HiddenSource, Limits, Model, Observer, Options, SiteKind,
    weights::{Source, layer_prefix},
};
use glimmer_tensor::{Backend, FeatureRow, Streams, cpu::Cpu};
use harness::{Recorder, Sequence, argmax, close, draft_hidden, draft_logits, load, logits, micro, tiny};

const TOKENS: [u32; 24] =
    [11, 7, 250, 33, 90, 91, 12, 400, 13, 14, 2, 5, 77, 78, 300, 301, 302, 8, 9, 10, 100, 101, 44, 45];

fn limits() -> Limits {
    Limits { max_logits: 32, ..Limits::for_sequences(2, 64, 32, 3) }
}

/// A tensor widened to f64.
fn wide(checkpoint: &Checkpoint, name: &str) -> Vec<f64> {
    let tensor = checkpoint.tensor(name).unwrap();
    let bytes = tensor.bytes.as_slice();
    match tensor.dtype.size() {
        2 => bytes.as_chunks::<2>().0.iter().map(|b| f64::from(half::bf16::from_le_bytes(*b).to_f32())).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
    }
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|v| f64::from(*v)).collect()
}

fn product(matrix: &[f64], x: &[f64]) -> Vec<f64> {
    matrix.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| w * x / (mean + eps).sqrt()).collect()
}

fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|v| *v as f32).collect()
}

/// A model after one step over [`TOKENS`], with everything that was seen.
fn after(checkpoint: &Checkpoint) -> (Model<Cpu>, Sequence, Recorder) {
    let mut model = load(checkpoint, limits());
    let mut sequence = Sequence::new(&limits(), 1);
    let mut seen = Recorder::new(checkpoint);
    model.forward(&sequence.step(&TOKENS, TOKENS.len()), &mut seen).unwrap();
    (model, sequence, seen)
}

/// Layers and sites at which a mixer ran.
#[derive(Default)]
struct Sites(Vec<(usize, SiteKind)>);

impl<B: Backend> Observer<B> for Sites {
    fn site(&mut self, at: At<'_, B>, site: SiteKind, _: &Streams<B>, _: &B::Buffer) {
        self.0.push((at.layer, site));
    }
}

#[test]
fn hyper_connections_wrap_both_halves_of_every_decoder_layer_and_not_the_draft_layer() {
    let checkpoint = micro();
    let text = &checkpoint.config().text;
    assert_eq!(text.mlp[0], MlpKind::Dense, "a dense layer is among them");
    let mut model = load(&checkpoint, limits());
    let mut sequence = Sequence::new(&limits(), 0);
    let mut sites = Sites::default();
    model.forward(&sequence.step(&TOKENS, 1), &mut sites).unwrap();
    let both = |layer| [(layer, SiteKind::Attention), (layer, SiteKind::Mlp)];
    assert_eq!(sites.0, (0..text.num_hidden_layers).flat_map(both).collect::<Vec<_>>());
    sites.0.clear();
    model.draft(&sequence.draft(0, &TOKENS[1..], HiddenSource::Trunk, 0, 0), &mut sites).unwrap();
    assert!(sites.0.is_empty());
}

#[test]
fn every_stream_begins_as_the_embedding() {
    let checkpoint = micro();
    let text = &checkpoint.config().text;
    let (_, _, seen) = after(&checkpoint);
    let table = wide(&checkpoint, "model.language_model.embed_tokens.weight");
    for (row, &token) in seen.get("layer0.streams_in").chunks(text.mhc.streams * text.hidden_size).zip(&TOKENS) {
        let embedding = narrow(&table[token as usize * text.hidden_size..][..text.hidden_size]);
        assert!(row.chunks(text.hidden_size).all(|stream| stream == embedding));
    }
}

#[test]
fn streams_mix_by_the_transposed_matrix_and_take_the_output_by_post() {
    let checkpoint = micro();
    let text = &checkpoint.config().text;
    let (n, hidden) = (text.mhc.streams, text.hidden_size);
    let (_, _, seen) = after(&checkpoint);
    // From the streams entering layer 0 through both of its sites to those entering layer 1.
    let mut streams = widen(seen.get("layer0.streams_in"));
    for (site, out) in [("attn_hc", "attn_out"), ("ffn_hc", "mlp_out")] {
        let post = seen.get(&format!("layer0.{site}.post"));
        let comb = seen.get(&format!("layer0.{site}.comb"));
        let y = seen.get(&format!("layer0.{out}"));
        let mut next = vec![0.0; streams.len()];
        for row in 0..TOKENS.len() {
            for new in 0..n {
                for c in 0..hidden {
                    let old = |i: usize| streams[(row * n + i) * hidden + c];
                    let mixed: f64 = (0..n).map(|i| f64::from(comb[(row * n + i) * n + new]) * old(i)).sum();
                    next[(row * n + new) * hidden + c] =
                        f64::from(post[row * n + new]) * f64::from(y[row * hidden + c]) + mixed;
                }
            }
        }
        streams = next;
    }
    close("streams", seen.get("layer1.streams_in"), &narrow(&streams), 2e-6);
}

#[test]
fn the_trunk_ends_in_the_plain_mean_of_the_streams_and_one_norm() {
    let checkpoint = micro();
    let text = &checkpoint.config().text;
    let (model, _, seen) = after(&checkpoint);
    let weight = wide(&checkpoint, "model.language_model.norm.weight");
    let head = wide(&checkpoint, "lm_head.weight");
    let last = text.num_hidden_layers;
    for (row, streams) in
        seen.get(&format!("layer{last}.streams_in")).chunks(text.mhc.streams * text.hidden_size).enumerate()
    {
        let mean: Vec<f64> = (0..text.hidden_size)
            .map(|c| streams.chunks(text.hidden_size).map(|s| f64::from(s[c])).sum::<f64>() / text.mhc.streams as f64)
            .collect();
        let hidden = rms_norm(&mean, &weight, f64::from(text.rms_norm_eps));
        let mut ours = vec![0.0; text.hidden_size];
        model.hidden(row, &mut ours).unwrap();
        close("hidden", &ours, &narrow(&hidden), 2e-6);
        close("logits", &logits(&model, row), &narrow(&product(&head, &hidden)), 2e-6);
    }
}

/// `down(silu(min(gate x, limit)) * clamp(up x, -limit, limit))`, and how many values the limit changed.
fn swiglu(checkpoint: &Checkpoint, prefix: &str, limit: f64, x: &[f64]) -> (Vec<f64>, usize) {
    let gate = product(&wide(checkpoint, &format!("{prefix}gate_proj.weight")), x);
    let up = product(&wide(checkpoint, &format!("{prefix}up_proj.weight")), x);
    let changed = gate.iter().filter(|g| **g > limit).count() + up.iter().filter(|u| u.abs() > limit).count();
    let act: Vec<f64> = gate
        .iter()
        .zip(&up)
        .map(|(g, u)| {
            let g = g.min(limit);
            g / (1.0 + (-g).exp()) * u.clamp(-limit, limit)
        })
        .collect();
    (product(&wide(checkpoint, &format!("{prefix}down_proj.weight")), &act), changed)
}

#[test]
fn the_clamp_applies_to_dense_routed_and_shared_experts_and_only_routed_weights_are_scaled() {
    let checkpoint = tiny();
    let text = &checkpoint.config().text;
    let (_, _, seen) = after(&checkpoint);
    let limit = f64::from(text.swiglu_limit);
    let (mut dense, mut routed, mut shared) = (0, 0, 0);
    for row in 0..6 {
        let at = row * text.hidden_size..(row + 1) * text.hidden_size;
        let prefix = format!("{}mlp.", layer_prefix(&checkpoint, 0));
        let x = widen(&seen.get("layer0.post_norm")[at.clone()]);
        let (y, changed) = swiglu(&checkpoint, &prefix, limit, &x);
        dense += changed;
        close("dense", &seen.get("layer0.mlp_out")[at.clone()], &narrow(&y), 2e-5);

        let prefix = format!("{}mlp.", layer_prefix(&checkpoint, 2));
        let x = widen(&seen.get("layer2.post_norm")[at.clone()]);
        let (mut y, changed) = swiglu(&checkpoint, &format!("{prefix}shared_experts."), limit, &x);
        shared += changed;
        let choices = &seen.routings[&2][row];
        let sum: f32 = choices.iter().map(|c| c.1).sum();
        assert!((sum - text.moe.routed_scaling_factor).abs() < 1e-5);
        for &(expert, weight) in choices {
            let (part, changed) = swiglu(&checkpoint, &format!("{prefix}experts.{expert}."), limit, &x);
            routed += changed;
            y.iter_mut().zip(&part).for_each(|(y, p)| *y += f64::from(weight) * p);
        }
        close("moe", &seen.get("layer2.mlp_out")[at], &narrow(&y), 2e-5);
    }
    assert!(dense > 0 && routed > 0 && shared > 0, "the limit changed {dense}, {routed}, {shared} values");
}

/// A checkpoint in which one tensor is all zeros.
struct Zeroed<'a>(&'a Checkpoint, String);

impl Source for Zeroed<'_> {
    fn config(&self) -> &Config {
        self.0.config()
    }

    fn has(&self, name: &str) -> bool {
        Source::has(self.0, name)
    }

    fn tensor(&self, name: &str) -> glimmer_model::Result<TensorData> {
        let tensor = Source::tensor(self.0, name)?;
        let zeros = || Bytes::new(vec![0; tensor.bytes.as_slice().len()]);
        Ok(if name == self.1 { TensorData { bytes: zeros(), ..tensor } } else { tensor })
    }
}

#[test]
fn the_output_gate_is_computed_from_the_block_input_and_is_a_sigmoid() {
    let checkpoint = micro();
    let text = &checkpoint.config().text;
    let (_, _, seen) = after(&checkpoint);
    let prefix = format!("{}self_attn.", layer_prefix(&checkpoint, 0));
    let [down, up] = ["g_a_proj", "g_b_proj"].map(|name| wide(&checkpoint, &format!("{prefix}{name}.weight")));

    // The same block with all gates half open.
    let half = Zeroed(&checkpoint, format!("{prefix}g_b_proj.weight"));
    let mut model = Model::load(Cpu::new(1), &half, limits(), Options::default()).unwrap();
    let mut half = Recorder::new(&checkpoint);
    model.forward(&Sequence::new(&limits(), 1).step(&TOKENS, 1), &mut half).unwrap();

    let width = text.kda.num_heads * text.kda.head_dim;
    let inputs = seen.get("layer0.input_norm").chunks(text.hidden_size);
    let cores = seen.get("layer0.kda.o_norm").chunks(width).zip(half.get("layer0.kda.o_norm").chunks(width));
    for (x, (core, half)) in inputs.zip(cores) {
        let gate = product(&up, &product(&down, &widen(x)));
        let expected: Vec<f64> =
            half.iter().zip(&gate).map(|(o, z)| 2.0 * f64::from(*o) / (1.0 + (-z).exp())).collect();
        close("gated output", core, &narrow(&expected), 2e-6);
    }
}

#[test]
fn the_correction_bias_steers_the_choice_and_is_not_in_the_weights() {
    let checkpoint = micro();
    let text = &checkpoint.config().text;
    let (_, _, seen) = after(&checkpoint);
    let mut steered = 0;
    for layer in 1..text.num_hidden_layers {
        let prefix = format!("{}mlp.gate.", layer_prefix(&checkpoint, layer));
        let gate = wide(&checkpoint, &format!("{prefix}weight"));
        let bias = wide(&checkpoint, &format!("{prefix}e_score_correction_bias"));
        let top = text.moe.experts_per_token;
        for (x, choices) in
            seen.get(&format!("layer{layer}.post_norm")).chunks(text.hidden_size).zip(&seen.routings[&layer])
        {
            let scores: Vec<f64> = product(&gate, &widen(x)).iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect();
            let best = |key: &dyn Fn(usize) -> f64| {
                let mut order: Vec<usize> = (0..scores.len()).collect();
                order.sort_by(|&a, &b| key(b).total_cmp(&key(a)));
                order[..top].iter().map(|&e| e as u32).collect::<BTreeSet<_>>()
            };
            let chosen = best(&|e| scores[e] + bias[e]);
            steered += usize::from(chosen != best(&|e| scores[e]));
            assert_eq!(choices.iter().map(|c| c.0).collect::<BTreeSet<_>>(), chosen);
            let sum: f64 = chosen.iter().map(|&e| scores[e as usize]).sum();
            let weights: Vec<f32> = choices.iter().map(|c| c.1).collect();
            let expected: Vec<f64> = choices
                .iter()
                .map(|c| scores[c.0 as usize] / (sum + 1e-20) * f64::from(text.moe.routed_scaling_factor))
                .collect();
            close("weights", &weights, &narrow(&expected), 2e-6);
        }
    }
    assert!(steered > 0, "the bias never mattered");
}

/// `W_eh [rmsnorm(embed(token)) | rmsnorm(h)]`.
fn draft_input(checkpoint: &Checkpoint, token: u32, hidden: &[f32]) -> Vec<f32> {
    let text = &checkpoint.config().text;
    let prefix = layer_prefix(checkpoint, text.num_hidden_layers);
    let eps = f64::from(text.rms_norm_eps);
    let table = wide(checkpoint, "model.language_model.embed_tokens.weight");
    let embedding = &table[token as usize * text.hidden_size..][..text.hidden_size];
    let mut input = rms_norm(embedding, &wide(checkpoint, &format!("{prefix}enorm.weight")), eps);
    input.extend(rms_norm(&widen(hidden), &wide(checkpoint, &format!("{prefix}hnorm.weight")), eps));
    narrow(&product(&wide(checkpoint, &format!("{prefix}eh_proj.weight")), &input))
}

#[test]
fn a_draft_row_joins_the_next_tokens_embedding_and_the_state_after_the_final_norm_also_at_position_0() {
    let checkpoint = micro();
    let text = &checkpoint.config().text;
    let (mut model, sequence, seen) = after(&checkpoint);
    let layer = text.num_hidden_layers;
    let hidden = seen.get(&format!("layer{layer}.hidden")).to_vec();
    let mut drafted = Recorder::new(&checkpoint);
    model.draft(&sequence.draft(0, &TOKENS[1..], HiddenSource::Trunk, 0, 0), &mut drafted).unwrap();
    let ours = drafted.get(&format!("layer{layer}.eh"));
    for (row, ours) in ours.chunks(text.hidden_size).enumerate() {
        let expected = draft_input(&checkpoint, TOKENS[row + 1], &hidden[row * text.hidden_size..][..text.hidden_size]);
        close(&format!("row {row}"), ours, &expected, 2e-6);
    }
}

#[test]
fn a_chain_recycles_the_state_after_the_draft_layers_norm() {
    let checkpoint = micro();
    let text = &checkpoint.config().text;
    let (mut model, sequence, _) = after(&checkpoint);
    let rows = TOKENS.len() - 1;
    model.draft(&sequence.draft(0, &TOKENS[1..], HiddenSource::Trunk, 0, 0), &mut ()).unwrap();
    let recycled = draft_hidden(&model, rows - 1);
    let mut chained = Recorder::new(&checkpoint);
    model.draft(&sequence.draft(rows, &[99], HiddenSource::Draft, rows - 1, 0), &mut chained).unwrap();
    let ours = chained.get(&format!("layer{}.eh", text.num_hidden_layers));
    close("input", ours, &draft_input(&checkpoint, 99, &recycled), 2e-6);
}

#[test]
fn a_draft_row_takes_the_placeholders_embedding_at_an_image_position() {
    let checkpoint = micro();
    let text = &checkpoint.config().text;
    let placeholder = checkpoint.config().media.unwrap().image;
    let tokens = [5, placeholder, placeholder, 6];
    let mut model = load(&checkpoint, limits());
    for row in 0..2 {
        model.set_feature(row, &vec![0.5; text.hidden_size]).unwrap();
    }
    let mut sequence = Sequence::new(&limits(), 0);
    let mut step = sequence.step(&tokens, 1);
    step.features = vec![FeatureRow { row: 1, feature: 0 }, FeatureRow { row: 2, feature: 1 }];
    model.forward(&step, &mut ()).unwrap();
    let mut hidden = vec![0.0; text.hidden_size];
    model.hidden(0, &mut hidden).unwrap();
    let mut drafted = Recorder::new(&checkpoint);
    model.draft(&sequence.draft(0, &tokens[1..], HiddenSource::Trunk, 0, 0), &mut drafted).unwrap();
    let ours = &drafted.get(&format!("layer{}.eh", text.num_hidden_layers))[..text.hidden_size];
    close("input", ours, &draft_input(&checkpoint, placeholder, &hidden), 2e-6);
}

#[test]
fn a_sharing_chain_keeps_the_first_selection_and_a_selecting_one_chooses_anew() {
    let checkpoint = tiny();
    let layer = checkpoint.config().text.num_hidden_layers;
    let (mut model, sequence, _) = after(&checkpoint);
    let rows = TOKENS.len() - 1;
    model.draft(&sequence.draft(0, &TOKENS[1..], HiddenSource::Trunk, 0, 0), &mut ()).unwrap();
    let first = model.draft_selection(rows - 1);
    let mut shared = sequence.draft(rows, &[9], HiddenSource::Draft, rows - 1, 0);
    shared.shared = Some(vec![rows as u32 - 1]);
    let mut seen = Recorder::new(&checkpoint);
    model.draft(&shared, &mut seen).unwrap();
    assert_eq!(seen.selections[&layer][0], first);
    assert!(!first.contains(&(rows as u32)));
    // The same row again, choosing for itself.
    let source = draft_hidden(&model, 0);
    model.set_hidden(0, &source).unwrap();
    model.draft(&sequence.draft(rows, &[9], HiddenSource::Trunk, 0, 0), &mut seen).unwrap();
    let selected = model.draft_selection(0);
    assert_ne!(selected, first);
    assert!(selected.iter().all(|&s| s as usize <= rows));
}

#[test]
fn a_chain_that_nobody_looks_at_makes_the_drafts_of_one_that_is_read() {
    let checkpoint = tiny();
    let rows = TOKENS.len() - 1;
    for sharing in [false, true] {
        let (mut model, sequence, _) = after(&checkpoint);
        assert!(model.chains());
        let first = sequence.draft(0, &TOKENS[1..], HiddenSource::Trunk, 0, 2);
        let link = |depth: usize, token: u32| {
            let source = if depth == 0 { rows - 1 } else { 0 };
            let mut step = sequence.draft(rows + depth, &[token], HiddenSource::Draft, source, 1);
            step.shared = sharing.then(|| vec![rows as u32 - 1]);
            step
        };
        model.draft(&first, &mut ()).unwrap();
        let mut read = vec![argmax(&draft_logits(&model, 0)), argmax(&draft_logits(&model, 1))];
        for depth in 0..3 {
            model.draft(&link(depth, *read.last().unwrap()), &mut ()).unwrap();
            read.push(argmax(&draft_logits(&model, 0)));
        }
        // Of the first step's two rows with logits the second goes on.
        let chain: Vec<ChainStep> =
            (0..3).map(|depth| ChainStep { step: link(depth, 0), taken: vec![u32::from(depth == 0)] }).collect();
        let mut tokens = vec![Some(7)];
        model.draft_chain(&first, &chain, &mut tokens).unwrap();
        assert_eq!(tokens, read.into_iter().map(Some).collect::<Vec<_>>());
        assert!(model.draft_chain(&first, &vec![chain[0].clone(); 16], &mut tokens).is_err());
        let astray = ChainStep { taken: vec![2], ..chain[0].clone() };
        assert!(model.draft_chain(&first, &[astray], &mut tokens).is_err());
    }
}

#[test]
fn drafting_leaves_the_trunk_as_it_is() {
    let checkpoint = micro();
    let mut with = load(&checkpoint, limits());
    let mut without = load(&checkpoint, limits());
    let (mut a, mut b) = (Sequence::new(&limits(), 0), Sequence::new(&limits(), 0));
    for (i, chunk) in TOKENS.chunks(5).enumerate() {
        with.forward(&a.step(chunk, chunk.len()), &mut ()).unwrap();
        without.forward(&b.step(chunk, chunk.len()), &mut ()).unwrap();
        let shifted = vec![i as u32 + 20; chunk.len()];
        with.draft(&a.draft(5 * i, &shifted, HiddenSource::Trunk, 0, 1), &mut ()).unwrap();
        with.draft(&a.draft(a.position, &[4], HiddenSource::Draft, chunk.len() - 1, 1), &mut ()).unwrap();
        for row in 0..chunk.len() {
            assert!(logits(&with, row) == logits(&without, row));
        }
    }
}

#[test]
fn an_empty_step_does_nothing() {
    let checkpoint = micro();
    let (mut model, _, _) = after(&checkpoint);
    model.forward(&glimmer_tensor::Step::default(), &mut ()).unwrap();
    assert!(model.hidden(0, &mut vec![0.0; model.config().hidden_size]).is_err());
}
