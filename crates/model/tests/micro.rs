//! The trained micro model against its goldens: prompts, cached greedy decoding, draft rows and a second draft.
//!
//! Bounds are relative to a tensor's largest value; sets of tokens and experts and greedy tokens are equal.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod harness;

use glimmer_model::{
    HiddenSource, Limits,
    vision::{DecodeLimits, Processors, RgbImage, VisionTower},
};
use harness::{
    Goldens, Recorder, Sequence, argmax, close, draft_hidden, draft_logits, load, logits, micro, place_features,
    repository, sets, within,
};

/// Largest difference, as a part of the golden's largest value.
const BOUND: f32 = 2e-5;

fn prompt(name: &str) {
    let checkpoint = micro();
    let text = &checkpoint.config().text;
    let mut goldens = Goldens::open(&format!("data/goldens/micro/{name}.safetensors"));
    let ids = goldens.tokens("input_ids");
    let length = ids.len();
    let limits = Limits::for_sequences(2, length + 80, length, 1);
    let mut model = load(&checkpoint, limits);
    // Not the first slot, so that nothing passes by mistaking slots.
    let mut sequence = Sequence::new(&limits, 1);

    let mut step = sequence.step(&ids, 2);
    if goldens.has("vision.tokens") {
        let features = goldens.floats("vision.tokens");
        let count = place_features(&mut step, checkpoint.config().media.unwrap().image);
        assert_eq!(count, features.rows());
        for (i, row) in features.values.chunks(text.hidden_size).enumerate() {
            model.set_feature(i, row).unwrap();
        }
        goldens.leave(|n| n == "pixel_values" || n == "image_grid_thw");
    }
    let mut seen = Recorder::new(&checkpoint);
    model.forward(&step, &mut seen).unwrap();

    let golden = goldens.floats("prefill.logits");
    let last: Vec<f32> = (2 - golden.rows()..2).flat_map(|i| logits(&model, i)).collect();
    close("logits", &last, &golden.values, BOUND);
    close(
        "final",
        seen.get(&format!("layer{}.hidden", text.num_hidden_layers)),
        &goldens.floats("prefill.final").values,
        BOUND,
    );
    for (key, ours) in [("hc_in", "collapsed"), ("hc_post", "post"), ("hc_comb", "comb")] {
        let golden = goldens.floats(&format!("prefill.layer0.{key}"));
        close(key, seen.get(&format!("layer0.attn_hc.{ours}")), &golden.values, BOUND);
    }
    for layer in 0..text.num_hidden_layers {
        let prefix = format!("prefill.layer{layer}");
        let golden = goldens.floats(&format!("{prefix}.attn_out"));
        close(&format!("{prefix}.attn_out"), seen.get(&format!("layer{layer}.attn_out")), &golden.values, BOUND);
        let golden = goldens.floats(&format!("{prefix}.streams"));
        close(&format!("{prefix}.streams"), seen.get(&format!("layer{}.streams_in", layer + 1)), &golden.values, BOUND);
        if goldens.has(&format!("{prefix}.index")) {
            let golden = sets(&goldens.integers(&format!("{prefix}.index")), text.selection_width());
            let ours = &seen.selections[&layer];
            assert_eq!(ours[ours.len() - golden.len()..], golden, "{prefix}.index");
        }
        if goldens.has(&format!("{prefix}.experts")) {
            let top = text.moe.experts_per_token;
            let experts = goldens.integers(&format!("{prefix}.experts"));
            let weights = goldens.floats(&format!("{prefix}.expert_weights")).values;
            let ours = &seen.routings[&layer];
            for (row, (experts, weights)) in
                ours[ours.len() - experts.len() / top..].iter().zip(experts.chunks(top).zip(weights.chunks(top)))
            {
                let mut golden: Vec<(u32, f32)> =
                    experts.iter().map(|&e| e as u32).zip(weights.iter().copied()).collect();
                golden.sort_unstable_by_key(|g| g.0);
                let ids = |list: &[(u32, f32)]| list.iter().map(|c| c.0).collect::<Vec<_>>();
                assert_eq!(ids(row), ids(&golden), "{prefix}.experts");
                let values = |list: &[(u32, f32)]| list.iter().map(|c| c.1).collect::<Vec<_>>();
                within(&format!("{prefix}.expert_weights"), &values(row), &values(&golden), 5e-6);
            }
        }
    }

    for (ordinal, layer) in text.kda_layers().enumerate() {
        let name = format!("prefill.layer{layer}.recurrent_state");
        if goldens.has(&name) {
            close(&name, &model.state(ordinal, 1).unwrap(), &goldens.floats(&name).values, BOUND);
        }
    }

    // Draft rows of the prompt; the last one takes the first greedy token.
    let tokens = goldens.tokens("decode.tokens");
    let drafts = goldens.tokens("mtp.drafts");
    let (golden_hidden, golden_logits) = (goldens.floats("mtp.hidden"), goldens.floats("mtp.logits"));
    let (hidden, vocab) = (text.hidden_size, text.vocab_size);
    let shifted: Vec<u32> = ids[1..].iter().copied().chain([tokens[0]]).collect();
    model.draft(&sequence.draft(0, &shifted, HiddenSource::Trunk, 0, 1), &mut ()).unwrap();
    close("mtp.hidden 0", &draft_hidden(&model, length - 1), &golden_hidden.values[..hidden], BOUND);
    let first = draft_logits(&model, 0);
    close("mtp.logits 0", &first, &golden_logits.values[..vocab], BOUND);
    assert_eq!(argmax(&first), drafts[0]);
    // The second draft writes a cache entry that the true row of its position replaces below.
    model.draft(&sequence.draft(length, &drafts[..1], HiddenSource::Draft, length - 1, 1), &mut ()).unwrap();
    let second = draft_logits(&model, 0);
    close("mtp.second_logits", &second, &goldens.floats("mtp.second_logits").values, BOUND);
    assert_eq!(argmax(&second), drafts[1]);

    // Cached greedy decoding, a draft row behind every step.
    let golden_steps = goldens.floats("decode.logits");
    let mut current = logits(&model, 1);
    for (i, &token) in tokens.iter().enumerate() {
        assert_eq!(argmax(&current), token, "greedy token {i}");
        model.forward(&sequence.step(&[token], 1), &mut ()).unwrap();
        current = logits(&model, 0);
        if i < golden_steps.rows() {
            close(&format!("decode.logits {i}"), &current, &golden_steps.values[i * vocab..(i + 1) * vocab], BOUND);
        }
        if let Some(&next) = tokens.get(i + 1) {
            let row = i + 1;
            model.draft(&sequence.draft(length + i, &[next], HiddenSource::Trunk, 0, 1), &mut ()).unwrap();
            if row < golden_hidden.rows() {
                let golden = &golden_hidden.values[row * hidden..(row + 1) * hidden];
                close(&format!("mtp.hidden {row}"), &draft_hidden(&model, 0), golden, BOUND);
                let golden = &golden_logits.values[row * vocab..(row + 1) * vocab];
                close(&format!("mtp.logits {row}"), &draft_logits(&model, 0), golden, BOUND);
            }
        }
    }
    goldens.finish();
}

#[test]
fn short_think() {
    prompt("short_think");
}

#[test]
fn short_direct() {
    prompt("short_direct");
}

#[test]
fn tool_think() {
    prompt("tool_think");
}

#[test]
fn image_direct() {
    prompt("image_direct");
}

#[test]
fn recall_400() {
    prompt("recall_400");
}

#[test]
fn recall_1000() {
    prompt("recall_1000");
}

#[test]
fn a_picture_file_leads_to_the_golden_answer() {
    let checkpoint = micro();
    let mut goldens = Goldens::open("data/goldens/micro/image_direct.safetensors");
    let (ids, answer) = (goldens.tokens("input_ids"), goldens.tokens("decode.tokens"));
    let limits = Limits { max_logits: 2, ..Limits::for_sequences(1, 128, ids.len(), 0) };
    let mut model = load(&checkpoint, limits);

    let file = |name: &str| checkpoint.file(name).map(|bytes| bytes.as_slice().to_vec());
    let vision = checkpoint.config().vision.clone().unwrap();
    let (nested, flat) = (file("processor_config.json"), file("preprocessor_config.json"));
    let settings = Processors::from_files(&vision, nested.as_deref(), flat.as_deref()).unwrap();
    let png = std::fs::read(repository("data/goldens/micro/image_direct.png")).unwrap();
    let picture = RgbImage::decode(&png, DecodeLimits::default()).unwrap();
    let mut tower = VisionTower::load(model.backend(), &checkpoint).unwrap().unwrap();
    let features = tower.forward(model.backend_mut(), &settings.image.image(&picture)).unwrap();
    for (i, row) in features.chunks(checkpoint.config().text.hidden_size).enumerate() {
        model.set_feature(i, row).unwrap();
    }

    let mut sequence = Sequence::new(&limits, 0);
    let mut step = sequence.step(&ids, 2);
    let placed = place_features(&mut step, checkpoint.config().media.unwrap().image);
    assert_eq!(placed * checkpoint.config().text.hidden_size, features.len());
    model.forward(&step, &mut ()).unwrap();
    let golden = goldens.floats("prefill.logits");
    let last: Vec<f32> = (2 - golden.rows()..2).flat_map(|i| logits(&model, i)).collect();
    close("logits", &last, &golden.values, BOUND);
    let mut current = logits(&model, 1);
    for (i, &token) in answer.iter().enumerate() {
        assert_eq!(argmax(&current), token, "greedy token {i}");
        model.forward(&sequence.step(&[token], 1), &mut ()).unwrap();
        current = logits(&model, 0);
    }
}
