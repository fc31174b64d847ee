//! What the pipeline writes passes, whatever the recipe; and damage to it is found like damage to the hand-made artifact.

use std::path::{Path, PathBuf};

use glimmer_checkpoint::{Checkpoint, IgnoreStyle};
use glimmer_quantize::{
    CalibrationSample, Method, Options, Recipe,
    gates::{GateId, Status, Verdict, VerifyOptions, verify},
    quantize,
};
use glimmer_tensor::Cpu;
use serde_json::Value;

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// The first text-only samples of the calibration set.
fn calibration(count: usize) -> Vec<CalibrationSample> {
    let text = std::fs::read_to_string(repository("data/calib/calib.jsonl")).expect("a file of the repository");
    let samples = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let texts = samples.filter(|s| s["images"].as_array().is_none_or(Vec::is_empty));
    let ids = |s: Value| serde_json::from_value(s["input_ids"].clone()).expect("a list of ids");
    texts.take(count).map(|s| CalibrationSample { ids: ids(s), images: Vec::new() }).collect()
}

/// Sequences for the tiny model, whose vocabulary is not the calibration set's.
fn noise() -> Vec<CalibrationSample> {
    let ids = |n: u32| (0..200).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 8).wrapping_add(n) % 499).collect();
    (0..4).map(|n| CalibrationSample { ids: ids(n), images: Vec::new() }).collect()
}

fn made(source: &Path, samples: &[CalibrationSample], recipe: &Recipe, damage: impl FnOnce(&Path)) -> Verdict {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let out = directory.path().join("artifact");
    let checkpoint = Checkpoint::open(source).expect("a sound source");
    quantize(Cpu::new(2), &checkpoint, samples, recipe, &Options::new(&out), &mut ()).expect("a finished run");
    damage(&out);
    verify(&out, Some(source), &VerifyOptions { full: true, ..VerifyOptions::default() }).expect("directories")
}

#[test]
fn every_recipe_makes_a_passing_artifact_of_the_tiny_model() {
    let source = repository("data/goldens/tiny");
    let recipes = [
        Recipe::default(),
        Recipe::rtn(),
        Recipe::parity(),
        Recipe { ignore_style: IgnoreStyle::Dual, shrink: Some(0.0), ..Recipe::default() },
    ];
    for recipe in recipes {
        let verdict = made(&source, &noise(), &recipe, |_| ());
        assert!(verdict.passed, "{recipe:?}\n{verdict}");
        let skipped: Vec<GateId> = verdict.gates.iter().filter(|g| g.status == Status::Skipped).map(|g| g.id).collect();
        let calibrated = recipe.method == Method::Gptq;
        assert_eq!(skipped.contains(&GateId::G8b), !calibrated, "{recipe:?}\n{verdict}");
        assert_eq!(skipped.len(), if calibrated { 1 } else { 2 }, "{verdict}");
    }
}

#[test]
fn the_micro_model_passes_and_a_flipped_bit_does_not() {
    let source = repository("models/micro-bf16");
    let verdict = made(&source, &calibration(6), &Recipe::default(), |_| ());
    assert!(verdict.passed, "{verdict}");
    let verdict = made(&source, &[], &Recipe::rtn(), |out| {
        let shard = std::fs::read_dir(out).expect("a directory").map(|e| e.expect("an entry").path());
        let shard = shard.filter(|p| p.extension().is_some_and(|e| e == "safetensors")).max().expect("a shard");
        let mut bytes = std::fs::read(&shard).expect("a readable file");
        *bytes.last_mut().expect("bytes") ^= 1;
        std::fs::write(&shard, bytes).expect("a writable file");
    });
    assert_eq!(verdict.failed().len(), 1, "{verdict}");
}
