//! Refusals: tensors that are missing or of another model, steps beyond the limits.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod harness;

use glimmer_checkpoint::{Checkpoint, Config, TensorData};
use glimmer_model::{Error, HiddenSource, Limits, Model, MtpStep, Options, Result, weights::Source};
use glimmer_tensor::{FeatureRow, Step, cpu::Cpu};
use harness::{Sequence, load, logits, micro};

/// A checkpoint without one tensor, or with another one in its place.
struct Damaged<'a> {
    under: &'a Checkpoint,
    name: &'a str,
    instead: Option<&'a str>,
}

impl Source for Damaged<'_> {
    fn config(&self) -> &Config {
        self.under.config()
    }

    fn has(&self, name: &str) -> bool {
        (name != self.name || self.instead.is_some()) && Source::has(self.under, name)
    }

    fn tensor(&self, name: &str) -> Result<TensorData> {
        match self.instead {
            Some(instead) if name == self.name => {
                Ok(TensorData { name: name.to_owned(), ..Source::tensor(self.under, instead)? })
            }
            _ => Source::tensor(self.under, name),
        }
    }
}

fn limits() -> Limits {
    Limits { max_logits: 2, features: 3, ..Limits::for_sequences(2, 64, 8, 1) }
}

fn refusal(name: &str, instead: Option<&str>) -> Error {
    let checkpoint = micro();
    let damaged = Damaged { under: &checkpoint, name, instead };
    Model::load(Cpu::new(1), &damaged, limits(), Options::default()).expect_err("loading must fail")
}

#[test]
fn a_missing_tensor_is_named() {
    for name in [
        "lm_head.weight",
        "model.language_model.embed_tokens.weight",
        "model.language_model.norm.weight",
        "model.language_model.layers.0.hc_attn_fn",
        "model.language_model.layers.1.self_attn.k_conv1d.weight",
        "model.language_model.layers.2.self_attn.A_log",
        "model.language_model.layers.3.self_attn.indexer.k_norm.bias",
        "model.language_model.layers.3.self_attn.indexer.index_kpool_compress_ape",
        "model.language_model.layers.4.mlp.gate.e_score_correction_bias",
        "model.language_model.layers.5.mlp.experts.7.down_proj.weight",
        "model.language_model.layers.5.mlp.shared_experts.up_proj.weight",
        "model.language_model.layers.8.eh_proj.weight",
        "model.language_model.layers.8.shared_head.norm.weight",
    ] {
        let error = refusal(name, None);
        assert!(matches!(&error, Error::Missing { name: found, .. } if found == name), "{error}");
        assert!(error.to_string().contains(name));
    }
}

#[test]
fn a_tensor_of_another_shape_is_named() {
    for (name, instead) in [
        ("model.language_model.layers.0.hc_attn_base", "model.language_model.layers.0.hc_attn_scale"),
        ("model.language_model.layers.1.self_attn.dt_bias", "model.language_model.layers.1.self_attn.A_log"),
        (
            "model.language_model.layers.1.self_attn.q_conv1d.weight",
            "model.language_model.layers.1.self_attn.q_proj.weight",
        ),
        (
            "model.language_model.layers.3.self_attn.kv_b_proj.weight",
            "model.language_model.layers.3.self_attn.q_b_proj.weight",
        ),
        (
            "model.language_model.layers.5.mlp.experts.7.down_proj.weight",
            "model.language_model.layers.5.mlp.experts.7.up_proj.weight",
        ),
    ] {
        let error = refusal(name, Some(instead));
        assert!(matches!(&error, Error::Shape { name: found, .. } if found == name), "{error}");
    }
}

/// A text-only checkpoint: the same tensors without the `language_model` part of their names.
struct TextOnly(Checkpoint);

impl TextOnly {
    fn full(name: &str) -> String {
        name.replacen("model.", "model.language_model.", 1)
    }
}

impl Source for TextOnly {
    fn config(&self) -> &Config {
        self.0.config()
    }

    fn has(&self, name: &str) -> bool {
        !name.contains("language_model") && (Source::has(&self.0, &Self::full(name)) || name == "lm_head.weight")
    }

    fn tensor(&self, name: &str) -> Result<TensorData> {
        let full = if name == "lm_head.weight" { name.to_owned() } else { Self::full(name) };
        Source::tensor(&self.0, &full)
    }
}

#[test]
fn names_without_the_multimodal_prefix_load_as_well() {
    let mut model = Model::load(Cpu::new(1), &TextOnly(micro()), limits(), Options::default()).unwrap();
    let mut nested = load(&micro(), limits());
    let step = Sequence::new(&limits(), 0).step(&[3, 4, 5], 1);
    model.forward(&step, &mut ()).unwrap();
    nested.forward(&step, &mut ()).unwrap();
    assert!(logits(&model, 0) == logits(&nested, 0));
}

#[test]
fn the_draft_layer_can_be_left_out() {
    let checkpoint = micro();
    let damaged = Damaged { under: &checkpoint, name: "model.language_model.layers.8.eh_proj.weight", instead: None };
    let options = Options { draft_layer: false, ..Options::default() };
    let mut model = Model::load(Cpu::new(1), &damaged, limits(), options).unwrap();
    assert!(!model.has_draft_layer());
    let step = MtpStep::after_trunk(Step::default(), 0);
    assert!(matches!(model.draft(&step, &mut ()), Err(Error::NoDraftLayer)));
}

#[test]
fn steps_beyond_the_limits_are_refused() {
    let checkpoint = micro();
    let mut model = load(&checkpoint, limits());
    let place = Sequence::new(&limits(), 0);
    let step = |tokens: &[u32], wanted| place.clone().step(tokens, wanted);
    assert!(matches!(model.forward(&step(&[1; 9], 1), &mut ()), Err(Error::Limit { limit: "max_rows", .. })));
    assert!(matches!(model.forward(&step(&[1; 5], 3), &mut ()), Err(Error::Limit { limit: "max_logits", .. })));
    let vocab = model.config().vocab_size as u32;
    assert!(matches!(model.forward(&step(&[1, vocab], 1), &mut ()), Err(Error::Token { row: 1, .. })));
    let mut featured = step(&[1, 2], 1);
    featured.features.push(FeatureRow { row: 0, feature: 3 });
    assert!(matches!(model.forward(&featured, &mut ()), Err(Error::Limit { limit: "features", .. })));
    let mut elsewhere = step(&[1, 2], 1);
    elsewhere.segments[0].slot = 2;
    assert!(matches!(model.forward(&elsewhere, &mut ()), Err(Error::Tensor(glimmer_tensor::Error::Step { .. }))));
    let hidden = model.config().hidden_size;
    assert!(matches!(model.set_feature(3, &vec![0.0; hidden]), Err(Error::Limit { .. })));
    assert!(matches!(model.set_feature(0, &[0.0]), Err(Error::Length { .. })));
    assert!(matches!(model.copy_slot(0, 2), Err(Error::Limit { limit: "slots", .. })));

    model.forward(&step(&[1, 2], 1), &mut ()).unwrap();
    assert!(model.logits(1, &mut vec![0.0; vocab as usize]).is_err());
    assert!(model.logits(0, &mut [0.0]).is_err());
    assert!(model.hidden(2, &mut vec![0.0; hidden]).is_err());
}

#[test]
fn draft_steps_that_make_no_sense_are_refused() {
    let checkpoint = micro();
    let mut model = load(&checkpoint, limits());
    let mut place = Sequence::new(&limits(), 0);
    model.forward(&place.step(&[1, 2, 3], 1), &mut ()).unwrap();
    let broken =
        |model: &mut Model<Cpu>, step: &MtpStep| matches!(model.draft(step, &mut ()), Err(Error::DraftStep { .. }));
    // No draft step yet: nothing to chain to and nothing to share.
    assert!(broken(&mut model, &place.draft(3, &[4], HiddenSource::Draft, 0, 1)));
    assert!(broken(&mut model, &place.draft(0, &[4], HiddenSource::Trunk, 3, 1)));
    let mut sharing = place.draft(0, &[4], HiddenSource::Trunk, 0, 1);
    sharing.shared = Some(vec![0]);
    assert!(broken(&mut model, &sharing));
    let mut short = place.draft(0, &[2, 3], HiddenSource::Trunk, 0, 1);
    short.source.pop();
    assert!(broken(&mut model, &short));
    let mut featured = place.draft(0, &[2, 3], HiddenSource::Trunk, 0, 1);
    featured.step.features.push(FeatureRow { row: 0, feature: 0 });
    assert!(broken(&mut model, &featured));
    model.draft(&place.draft(0, &[2, 3], HiddenSource::Trunk, 0, 1), &mut ()).unwrap();
}

#[test]
fn padding_rows_of_the_vocabulary_read_as_minus_infinity_when_asked() {
    let checkpoint = micro();
    let mut model = load(&checkpoint, limits());
    model.forward(&Sequence::new(&limits(), 0).step(&[1, 2], 1), &mut ()).unwrap();
    let plain = logits(&model, 0);
    assert!(plain.iter().all(|l| l.is_finite()));
    model.set_real_vocab(Some(3235));
    let masked = logits(&model, 0);
    assert_eq!(masked[..3235], plain[..3235]);
    assert!(masked.len() > 3235 && masked[3235..].iter().all(|&l| l == f32::NEG_INFINITY));
}
