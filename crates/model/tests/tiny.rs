//! The tiny random model against its goldens: every block of every layer, text, image, video, cached decoding, chunks, and
//! the draft layer with both kinds of chains. It has a layer that reuses its neighbour's selection and a clamp that bites.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod harness;

use std::collections::HashMap;

use glimmer_checkpoint::{Checkpoint, config::MlpKind};
use glimmer_model::{
    HiddenSource, Layer, Limits, Model,
    streaming::{Routes, Runner, RunnerLimits, Selections, embed_streams},
};
use glimmer_tensor::cpu::Cpu;
use harness::{
    Golden, Goldens, Recorder, Sequence, argmax, draft_logits, load, logits, place_features, sets, tiny, within,
};

/// Largest difference of streams and of blocks' outputs inside the whole net.
const STREAMS: f32 = 5e-4;
/// Largest difference of logits (up to 4 in size).
const LOGITS: f32 = 2e-4;
/// Largest difference of one layer on golden inputs.
const BLOCK: f32 = 2e-5;
/// Largest difference of a router weight.
const WEIGHTS: f32 = 5e-6;

fn goldens() -> Goldens {
    Goldens::open("data/goldens/tiny/golden.safetensors")
}

/// Keys of the vision tower, which has its own tests, and inputs.
fn not_of_the_text_model(name: &str) -> bool {
    (name.contains(".vis.") && !name.ends_with(".vis.merged"))
        || name.starts_with("in.pixel")
        || name.ends_with("grid_thw")
}

fn check(checkpoint: &Checkpoint, seen: &Recorder, goldens: &mut Goldens, prefix: &str) {
    let text = &checkpoint.config().text;
    let layers = text.num_hidden_layers;
    for key in goldens.names(&format!("{prefix}.")) {
        let name = &key[prefix.len() + 1..];
        if key.ends_with("indexer.topk") {
            let layer: usize = name["layer".len()..].split('.').next().unwrap().parse().unwrap();
            assert_eq!(seen.selections[&layer], sets(&goldens.integers(&key), text.selection_width()), "{key}");
        } else if key.ends_with("router.indices") {
            let layer: usize = name["layer".len()..].split('.').next().unwrap().parse().unwrap();
            let top = text.moe.experts_per_token;
            let experts = goldens.integers(&key);
            let weights = goldens.floats(&key.replace("indices", "weights")).values;
            assert_eq!(seen.routings[&layer].len() * top, experts.len(), "{key}");
            for ((ours, experts), weights) in
                seen.routings[&layer].iter().zip(experts.chunks(top)).zip(weights.chunks(top))
            {
                let golden: HashMap<u32, f32> =
                    experts.iter().map(|&e| e as u32).zip(weights.iter().copied()).collect();
                assert_eq!(ours.len(), golden.len(), "{key}");
                for (expert, weight) in ours {
                    let golden = golden.get(expert).unwrap_or_else(|| panic!("{key}: expert {expert}"));
                    within(&key, &[*weight], &[*golden], WEIGHTS);
                }
            }
        } else if key.ends_with("router.weights") || key.ends_with("logits") || key.ends_with("kda.state") {
            continue;
        } else {
            let ours = match name {
                "embed" => first_stream(seen.get("layer0.streams_in"), text.hidden_size, text.mhc.streams),
                "final_norm" => seen.get(&format!("layer{layers}.hidden")).to_vec(),
                _ => match name.strip_suffix(".streams_out") {
                    Some(layer) => {
                        let layer: usize = layer["layer".len()..].parse().unwrap();
                        seen.get(&format!("layer{}.streams_in", layer + 1)).to_vec()
                    }
                    None => seen.get(name).to_vec(),
                },
            };
            let golden = goldens.floats(&key);
            assert_eq!(ours.len(), golden.values.len(), "{key}");
            within(&key, &ours, &golden.values, STREAMS);
        }
    }
}

fn first_stream(streams: &[f32], hidden: usize, n: usize) -> Vec<f32> {
    streams.chunks(n * hidden).flat_map(|row| row[..hidden].to_vec()).collect()
}

fn all_logits(model: &Model<Cpu>, rows: usize) -> Vec<f32> {
    (0..rows).flat_map(|row| logits(model, row)).collect()
}

/// A model whose limits give logits for every row.
fn wide(checkpoint: &Checkpoint) -> (Model<Cpu>, Limits) {
    let limits = Limits { max_logits: 64, ..Limits::for_sequences(2, 128, 64, 3) };
    (load(checkpoint, limits), limits)
}

#[test]
fn text_image_and_video_passes_equal_the_goldens() {
    let checkpoint = tiny();
    let (mut model, limits) = wide(&checkpoint);
    let mut goldens = goldens();
    goldens.leave(not_of_the_text_model);
    let hidden = checkpoint.config().text.hidden_size;
    for (prefix, ids, features) in [
        ("prefill", "in.ids", None),
        ("image", "in.image_ids", Some("image.vis.merged")),
        ("video", "in.video_ids", Some("video.vis.merged")),
    ] {
        let ids = goldens.tokens(ids);
        let mut step = Sequence::new(&limits, 1).step(&ids, ids.len());
        if let Some(features) = features {
            let features = goldens.floats(features);
            assert_eq!(place_features(&mut step, checkpoint.config().media.unwrap().image), features.rows());
            for (i, row) in features.values.chunks(hidden).enumerate() {
                model.set_feature(i, row).unwrap();
            }
            // What the golden calls embed is the table's row, from before the features were put in.
            goldens.leave(|n| n == format!("{prefix}.embed"));
        }
        let mut seen = Recorder::new(&checkpoint);
        model.forward(&step, &mut seen).unwrap();
        let (ours, golden) = (all_logits(&model, ids.len()), goldens.floats(&format!("{prefix}.logits")).values);
        // The prompt's golden has the last rows.
        within(prefix, &ours[ours.len() - golden.len()..], &golden, LOGITS);
        check(&checkpoint, &seen, &mut goldens, prefix);
    }
    goldens.leave(|n| ["decode", "dec_prefill", "mtp.", "cache."].iter().any(|p| n.starts_with(p)));
    goldens.finish();
}

#[test]
fn cached_decoding_equals_the_goldens() {
    let checkpoint = tiny();
    let (mut model, limits) = wide(&checkpoint);
    let mut goldens = goldens();
    goldens.leave(not_of_the_text_model);
    let ids = goldens.tokens("in.ids");
    let vocab = checkpoint.config().text.vocab_size;
    let prompt = goldens.floats("dec_prefill.logits");
    let steps = goldens.floats("decode.logits").values;
    // The first of the decoded rows is the prompt's last.
    let length = ids.len() + 1 - steps.len() / vocab;
    let mut sequence = Sequence::new(&limits, 0);
    model.forward(&sequence.step(&ids[..length], length), &mut ()).unwrap();
    let ours = all_logits(&model, length);
    within("dec_prefill.logits", &ours[ours.len() - prompt.values.len()..], &prompt.values, LOGITS);
    within("decode.logits 0", &logits(&model, length - 1), &steps[..vocab], LOGITS);
    for (i, &token) in ids[length..].iter().enumerate() {
        let mut seen = Recorder::new(&checkpoint);
        model.forward(&sequence.step(&[token], 1), &mut seen).unwrap();
        within("decode.logits", &logits(&model, 0), &steps[(i + 1) * vocab..(i + 2) * vocab], LOGITS);
        let prefix = format!("decode{}", length + i);
        let own = format!("{prefix}.logits");
        if goldens.has(&own) {
            within(&own, &logits(&model, 0), &goldens.floats(&own).values, LOGITS);
        }
        for (ordinal, layer) in checkpoint.config().text.kda_layers().enumerate() {
            let key = format!("{prefix}.layer{layer}.kda.state");
            if goldens.has(&key) {
                within(&key, &model.state(ordinal, 0).unwrap(), &goldens.floats(&key).values, STREAMS);
            }
        }
        check(&checkpoint, &seen, &mut goldens, &prefix);
    }
    for (ordinal, layer) in checkpoint.config().text.kda_layers().enumerate() {
        let key = format!("cache.layer{layer}.state");
        within(&key, &model.state(ordinal, 0).unwrap(), &goldens.floats(&key).values, STREAMS);
    }
    goldens.leave(|n| ["prefill", "image", "video", "mtp.", "in."].iter().any(|p| n.starts_with(p)));
    goldens.leave(|n| n.starts_with("dec") && n.ends_with("router.weights"));
    goldens.finish();
}

#[test]
fn each_layer_on_golden_inputs_equals_the_goldens() {
    let checkpoint = tiny();
    let text = &checkpoint.config().text;
    let mut goldens = goldens();
    let ids = goldens.tokens("in.ids");
    let limits = RunnerLimits { max_rows: 16, max_tokens: 64, slots: 1 };
    let mut runner = Runner::new(Cpu::new(1), text, limits).unwrap();
    let outputs: Vec<Golden> =
        (0..text.num_hidden_layers).map(|l| goldens.floats(&format!("prefill.layer{l}.streams_out"))).collect();
    let mut streams = embed_streams(&checkpoint, &ids, &[]).unwrap();
    let mut selections = Selections::default();
    let mut x = vec![0.0; ids.len() * text.hidden_size];
    let mut routes = Routes::default();
    for (index, golden) in outputs.iter().enumerate() {
        let layer = Layer::load(runner.backend(), &checkpoint, index).unwrap();
        runner.attend(&layer, &[ids.len()], &mut streams, &mut selections).unwrap();
        runner.mlp_input(&layer, &streams, &mut x, &mut routes).unwrap();
        let post_norm = format!("prefill.layer{index}.post_norm");
        if goldens.has(&post_norm) {
            within(&post_norm, &x, &goldens.floats(&post_norm).values, BLOCK);
        }
        let sparse = text.mlp[index] == MlpKind::Sparse;
        assert_eq!(routes.experts.len(), if sparse { ids.len() * text.moe.experts_per_token } else { 0 });
        runner.finish(&layer, None, &mut streams).unwrap();
        within(&format!("streams after layer {index}"), &streams, &golden.values, BLOCK);
        streams.copy_from_slice(&golden.values);
    }
}

#[test]
fn draft_rows_and_both_chains_equal_the_goldens() {
    let checkpoint = tiny();
    let text = checkpoint.config().text.clone();
    let mut goldens = goldens();
    let ids = goldens.tokens("in.ids");
    let length = ids.len();
    let next = goldens.tokens("mtp.next_token")[0];
    let shifted: Vec<u32> = ids[1..].iter().copied().chain([next]).collect();
    let layer = text.num_hidden_layers;
    for (chain, sharing) in [("mtp.chain", false), ("mtp.chain_shared", true)] {
        let (mut model, limits) = wide(&checkpoint);
        let mut sequence = Sequence::new(&limits, 1);
        model.forward(&sequence.step(&ids, 1), &mut ()).unwrap();
        assert_eq!(argmax(&logits(&model, 0)), next);
        let mut seen = Recorder::new(&checkpoint);
        model.draft(&sequence.draft(0, &shifted, HiddenSource::Trunk, 0, length), &mut seen).unwrap();
        if !sharing {
            for key in ["eh", "attn_out", "mlp_out", "hidden"] {
                let golden = goldens.floats(&format!("mtp.prefill.{key}"));
                within(key, seen.get(&format!("layer{layer}.{key}")), &golden.values, STREAMS);
            }
            let ours: Vec<f32> = (0..length).flat_map(|row| draft_logits(&model, row)).collect();
            let golden = goldens.floats("mtp.prefill.logits").values;
            within("mtp.prefill.logits", &ours[ours.len() - golden.len()..], &golden, LOGITS);
            let golden = sets(&goldens.integers("mtp.prefill.topk"), text.selection_width());
            assert_eq!(seen.selections[&layer], golden, "mtp.prefill.topk");
            assert_eq!(model.draft_selection(length - 1), golden[length - 1]);
        }
        let drafts = goldens.tokens(&format!("{chain}.drafts"));
        let golden = goldens.floats(&format!("{chain}.logits")).values;
        let mut current = draft_logits(&model, length - 1);
        for (k, &draft) in drafts.iter().enumerate() {
            let golden = &golden[k * text.vocab_size..(k + 1) * text.vocab_size];
            within(&format!("{chain} {k}"), &current, golden, LOGITS);
            assert_eq!(argmax(&current), draft, "{chain} {k}");
            let source = if k == 0 { length - 1 } else { 0 };
            let mut step = sequence.draft(length + k, &[draft], HiddenSource::Draft, source, 1);
            step.shared = sharing.then(|| vec![length as u32 - 1]);
            // With re-selection the last selecting step is the previous chain step; sharing keeps the prompt's.
            model.draft(&step, &mut ()).unwrap();
            current = draft_logits(&model, 0);
        }
    }
    goldens.leave(|n| !n.starts_with("mtp."));
    goldens.finish();
}

#[test]
fn a_sharing_layer_uses_the_selection_of_the_layer_before_it() {
    let checkpoint = tiny();
    let (mut model, limits) = wide(&checkpoint);
    let ids = goldens().tokens("in.ids");
    let mut seen = Recorder::new(&checkpoint);
    model.forward(&Sequence::new(&limits, 0).step(&ids, 0), &mut seen).unwrap();
    assert!(model.layers()[6].reuses_selection());
    assert_eq!(seen.selections[&6], seen.selections[&5]);
    assert_ne!(seen.selections[&5], seen.selections[&3]);
}
