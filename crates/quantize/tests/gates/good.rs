//! The good artifact, with and without its source, and what the verifier says about things that are no artifact.

use std::{collections::BTreeMap, fs};

use glimmer_checkpoint::{DType, Manifest, manifest::MANIFEST_FILE, shards::INDEX_FILE};
use glimmer_quantize::{
    Recipe,
    gates::{GateId, Status, VerifyError, VerifyOptions, verify},
};
use serde_json::{Value, json};

use crate::{
    artifact::{Tensor, config, good, good_files, shard, source, source_directory, write},
    harness::{judge, options},
};

#[test]
fn a_good_artifact_passes_and_every_gate_has_counted() {
    let verdict = judge(good_files(), true);
    assert!(verdict.passed, "{verdict}");
    let skipped: Vec<GateId> = verdict.gates.iter().filter(|g| g.status == Status::Skipped).map(|g| g.id).collect();
    assert_eq!(skipped, [GateId::G8b, GateId::G17], "{verdict}");
    for gate in verdict.gates.iter().filter(|g| g.status == Status::Pass) {
        assert!(gate.counted > 0 && gate.counted == gate.expected, "{verdict}");
    }
    let counted = |id| verdict.gate(id).map(|g| g.counted);
    let matrices = config().text.quantized_matrices().count() as u64;
    assert_eq!(matrices, 2 * 4 * 3);
    for gate in [GateId::G1, GateId::G6, GateId::G6b, GateId::G8, GateId::G9, GateId::G16] {
        assert_eq!(counted(gate), Some(matrices), "{gate}");
    }
    // 25 tensors and 12 expert matrices; 14 in the block and 11 around it.
    assert_eq!((counted(GateId::G4), counted(GateId::G3)), (Some(37), Some(25)));
}

#[test]
fn without_the_source_only_the_comparisons_are_missing() {
    let verdict = judge(good_files(), false);
    assert!(verdict.passed, "{verdict}");
    let skipped: Vec<GateId> = verdict.gates.iter().filter(|g| g.status == Status::Skipped).map(|g| g.id).collect();
    assert_eq!(skipped, [GateId::G8, GateId::G8b, GateId::G17], "{verdict}");
}

#[test]
fn a_sample_takes_the_round_trip_by_default() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    write(directory.path(), good_files());
    let verdict = verify(directory.path(), None, &VerifyOptions::default()).expect("a directory");
    let sample = verdict.gate(GateId::G16).expect("all gates report");
    assert!(verdict.passed && sample.counted < 24 && !sample.notes.is_empty(), "{verdict}");
}

#[test]
fn other_programs_artifacts_may_lack_the_manifest() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut files = good_files().clone();
    files.remove(MANIFEST_FILE);
    write(directory.path(), &files);
    let options = VerifyOptions { require_manifest: false, ..options() };
    let verdict = verify(directory.path(), Some(source_directory()), &options).expect("a directory");
    assert!(verdict.passed, "{verdict}");
    assert_eq!(verdict.gate(GateId::G15).map(|g| g.status), Some(Status::Skipped));
}

#[test]
fn totals_of_file_sizes_are_accepted_and_named() {
    let mut files = good_files().clone();
    let total: usize = files.iter().filter(|(n, _)| n.ends_with(".safetensors")).map(|(_, c)| c.len()).sum();
    let mut index: Value = serde_json::from_slice(&files[INDEX_FILE]).expect("JSON");
    index["metadata"]["total_size"] = json!(total);
    files.insert(INDEX_FILE.to_owned(), serde_json::to_vec(&index).expect("JSON"));
    files.remove(MANIFEST_FILE);
    let directory = tempfile::tempdir().expect("a temporary directory");
    write(directory.path(), &files);
    let options = VerifyOptions { require_manifest: false, ..options() };
    let verdict = verify(directory.path(), None, &options).expect("a directory");
    assert!(verdict.passed, "{verdict}");
    let notes = verdict.gate(GateId::G11).map(|g| g.notes.join(" ")).unwrap_or_default();
    assert!(notes.contains("file"), "{notes}");
}

#[test]
fn the_source_itself_is_no_artifact() {
    let verdict = verify(source_directory(), None, &options()).expect("a directory");
    assert!(verdict.failed().starts_with(&[GateId::G1]), "{verdict}");
    let packed = verdict.gate(GateId::G1).expect("all gates report");
    assert_eq!((packed.counted, packed.expected, packed.offenders_total), (0, 24, 24));
    assert_eq!(packed.offenders.len(), 20);
}

#[test]
fn an_empty_directory_fails_and_a_missing_one_is_an_error() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let verdict = verify(directory.path(), Some(source_directory()), &options()).expect("a directory");
    assert_eq!(verdict.failed(), [GateId::G10, GateId::G13, GateId::G14, GateId::G15], "{verdict}");
    let missing = verify(&directory.path().join("nothing"), None, &options());
    assert!(matches!(missing, Err(VerifyError::Artifact { .. })));
    let unusable = verify(source_directory(), Some(directory.path()), &options());
    assert!(matches!(unusable, Err(VerifyError::Source { .. })));
}

#[test]
fn an_artifact_is_no_source() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    write(directory.path(), good_files());
    let result = verify(directory.path(), Some(directory.path()), &options());
    assert!(matches!(result, Err(VerifyError::Reference { .. })), "{result:?}");
}

#[test]
fn a_merged_index_may_only_add_the_mtp_layer() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    write(directory.path(), good_files());
    let index: Value = serde_json::from_slice(&good_files()[INDEX_FILE]).expect("JSON");
    let mut before: BTreeMap<String, String> = serde_json::from_value(index["weight_map"].clone()).expect("a map");
    before.retain(|name, _| !name.contains(".layers.3."));
    let path = directory.path().join(".index-before.json");
    let failed = |before: &BTreeMap<String, String>| {
        fs::write(&path, json!({ "weight_map": before }).to_string()).expect("a writable directory");
        let options = VerifyOptions { index_before_merge: Some(path.clone()), ..options() };
        verify(directory.path(), Some(source_directory()), &options).expect("a directory").failed()
    };
    assert_eq!(failed(&before), []);
    let mut moved = before.clone();
    moved.insert("lm_head.weight".to_owned(), "model-00002-of-00004.safetensors".to_owned());
    assert_eq!(failed(&moved), [GateId::G4], "an old entry was rewritten");
    let mut fewer = before.clone();
    fewer.remove("lm_head.weight");
    assert_eq!(failed(&fewer), [GateId::G4], "more than the MTP layer was added");
}

/// Inputs along one direction only: weights that differ from the source across it cost nothing, along it everything.
fn statistics(direction: impl Fn(usize) -> f32, tokens: u64) -> Vec<u8> {
    let base = "model.language_model.layers.1.mlp.experts.2.up_proj";
    let inputs: Vec<u8> = (0..256).flat_map(|c| direction(c).to_le_bytes()).collect();
    let tensor = |suffix: &str, dtype, shape: &[usize], bytes| Tensor {
        name: format!("{base}.{suffix}"),
        dtype,
        shape: shape.to_vec(),
        bytes,
    };
    shard(&[
        tensor("inputs", DType::F32, &[1, 256], inputs),
        tensor("tokens", DType::U64, &[1], tokens.to_le_bytes().to_vec()),
    ])
}

#[test]
fn output_error_is_compared_with_rounding_where_there_are_tokens_enough() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join(".statistics");
    let mut plan = good().clone();
    // One code of column 0 is moved in every row: worse for inputs along this column, indifferent for all others.
    let words = &mut plan.tensor("model.language_model.layers.1.mlp.experts.2.up_proj.weight_packed").bytes;
    for row in words.chunks_exact_mut(128) {
        row[0] = if row[0] & 15 < 14 { row[0] + 2 } else { row[0] - 2 };
    }
    write(directory.path(), &plan.render_with_manifest());
    let judge = |content: Vec<u8>| {
        fs::write(&path, content).expect("a writable directory");
        let options = VerifyOptions { statistics: Some(path.clone()), ..options() };
        let verdict = verify(directory.path(), Some(source_directory()), &options).expect("a directory");
        let status = verdict.gate(GateId::G8b).map(|g| g.status);
        (verdict.failed(), status)
    };
    let first = |c: usize| if c == 0 { 1.0 } else { 0.0 };
    assert_eq!(judge(statistics(first, 512)), (vec![GateId::G8b], Some(Status::Fail)));
    assert_eq!(judge(statistics(first, 511)), (vec![], Some(Status::Skipped)), "too few tokens");
    assert_eq!(judge(statistics(|c| 1.0 - first(c), 512)), (vec![], Some(Status::Pass)));
}

#[test]
fn recorded_output_errors_are_compared_where_there_are_no_inputs() {
    let judge = |tokens: u64, own: f64| {
        let mut files = good_files().clone();
        let mut manifest = Manifest::parse(&files[MANIFEST_FILE]).expect("a manifest");
        let name = "model.language_model.layers.1.mlp.experts.2.up_proj";
        let recipe = serde_json::to_value(Recipe::default()).expect("JSON");
        manifest.statistics = json!({ "recipe": recipe, "samples": 1, "tokens": tokens, "layers": [{ "layer": 1, "matrices": [{
            "name": name, "tokens": tokens, "outcome": "gptq", "relative_error": 0.1, "output_error_own": own,
            "output_error_rounded": 0.01, "output_error_pooled": null, "damp": 0.01, "failed_factors": 0,
            "dead_columns": 0, "at_rails": 0.02,
        }]}]});
        files.insert(MANIFEST_FILE.to_owned(), serde_json::to_vec(&manifest).expect("JSON"));
        let verdict = judge(&files, false);
        (verdict.failed(), verdict.gate(GateId::G8b).map(|g| g.status))
    };
    assert_eq!(judge(512, 0.005), (vec![], Some(Status::Pass)));
    assert_eq!(judge(512, 0.02), (vec![GateId::G8b], Some(Status::Fail)));
    assert_eq!(judge(511, 0.02), (vec![], Some(Status::Skipped)), "too few tokens");
}

#[test]
fn the_verdict_is_readable_json() {
    let verdict = judge(good_files(), false);
    let value = serde_json::to_value(&verdict).expect("JSON");
    assert_eq!(value["passed"], json!(true));
    let ids: Vec<&str> = value["gates"].as_array().expect("a list").iter().filter_map(|g| g["id"].as_str()).collect();
    let expected = "G1 G2 G3 G4 G5 G6 G6b G7 G8 G8b G9 G10 G11 G12 G13 G14 G15 G16 G17";
    assert_eq!(ids.join(" "), expected);
    assert_eq!(value["gates"][0]["status"], json!("pass"));
    assert!(source().shards.len() == 2 && value["gates"][0]["offenders"] == json!([]));
}
