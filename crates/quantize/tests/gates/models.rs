//! The gates on the models of the repository and on an FP8 source.

use std::path::{Path, PathBuf};

use glimmer_checkpoint::{
    Checkpoint, DType, SynthFormat, SynthOptions, fp8, manifest::SourceIdentity, scheme::IgnoreStyle, synth,
};
use glimmer_quantize::gates::{GateId, Status, Verdict, VerifyOptions, verify};
use serde_json::json;

use crate::{
    artifact::{Plan, Tensor, config_text, read, rounded, source, write},
    harness::options,
};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Writes the artifact of a source and judges it.
fn judge(source: &Path, artifact: &Plan) -> Verdict {
    let origin = SourceIdentity::of(&Checkpoint::open(source).expect("a sound source")).expect("its config.json");
    let directory = tempfile::tempdir().expect("a temporary directory");
    write(directory.path(), &artifact.render_with_origin(&origin));
    let options = VerifyOptions { max_shard_bytes: 1 << 30, ..options() };
    verify(directory.path(), Some(source), &options).expect("a directory and a sound source")
}

#[test]
fn the_tiny_and_the_micro_model_pass() {
    for (path, matrices, ignore) in
        [("data/goldens/tiny", 7 * 4 * 3, IgnoreStyle::Regex), ("models/micro-bf16", 7 * 8 * 3, IgnoreStyle::Dual)]
    {
        let path = repository(path);
        let verdict = judge(&path, &rounded(read(&path), ignore));
        assert!(verdict.passed, "{verdict}");
        for gate in [GateId::G1, GateId::G8, GateId::G9, GateId::G16] {
            assert_eq!(verdict.gate(gate).map(|g| g.counted), Some(matrices), "{gate}");
        }
        let skipped: Vec<GateId> = verdict.gates.iter().filter(|g| g.status == Status::Skipped).map(|g| g.id).collect();
        assert_eq!(skipped, [GateId::G8b, GateId::G17]);
    }
}

#[test]
fn a_synthetic_artifact_passes_against_the_source_of_its_seed() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let make = |name: &str, format, seed| {
        let path = directory.path().join(name);
        let options = SynthOptions { format, seed, ..SynthOptions::default() };
        synth(&config_text(), &path, options, &mut |_, _| ()).expect("a writable directory");
        path
    };
    let source = make("source", SynthFormat::Bf16, 1);
    let options = VerifyOptions { max_shard_bytes: 1 << 30, ..options() };
    let artifact = make("artifact", SynthFormat::W4a16, 1);
    for source in [Some(source.as_path()), None] {
        let verdict = verify(&artifact, source, &options).expect("directories");
        assert!(verdict.passed, "{verdict}");
        assert_eq!(verdict.gate(GateId::G15).map(|g| g.status), Some(Status::Pass), "{verdict}");
    }
    let other = verify(&make("other", SynthFormat::W4a16, 2), Some(&source), &options).expect("directories");
    assert_eq!(other.failed(), [GateId::G5, GateId::G8], "{other}");
}

/// The source with some matrices in FP8: codes from the upper byte of their BF16 values, scales that differ by block.
fn fp8_source() -> Plan {
    let mut plan = source();
    let wanted = |name: &str| name.ends_with("_proj.weight") && (name.contains(".experts.") || name.contains("o_proj"));
    for (_, tensors) in &mut plan.shards {
        let mut scales = Vec::new();
        for tensor in tensors.iter_mut().filter(|t| wanted(&t.name)) {
            let codes = tensor.bytes.as_chunks::<2>().0.iter().map(|b| {
                let value = half::bf16::from_le_bytes(*b).to_f32() * 64.0;
                let distance = |code: &u8| (fp8::E4M3[usize::from(*code)] - value).abs();
                (0..=255_u8).filter(|c| c & 0x7f != 0x7f).min_by(|a, b| distance(a).total_cmp(&distance(b)))
            });
            tensor.bytes = codes.map(|c| c.expect("254 codes")).collect();
            tensor.dtype = DType::F8E4M3;
            let blocks: Vec<usize> = tensor.shape.iter().map(|n| n.div_ceil(fp8::BLOCK)).collect();
            let n = blocks.iter().product();
            let bytes = (0..n).flat_map(|i| ((1.0 + 0.1 * i as f32) / 64.0).to_le_bytes()).collect();
            scales.push(Tensor { name: fp8::scale_name(&tensor.name), dtype: DType::F32, shape: blocks, bytes });
        }
        tensors.extend(scales);
    }
    plan.config(|c| c["quantization_config"] = json!({ "quant_method": "fp8", "weight_block_size": [128, 128] }));
    plan
}

#[test]
fn an_fp8_source_is_compared_as_what_it_stands_for() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    write(directory.path(), &fp8_source().render());
    // Reading widens; the artifact has neither FP8 tensors nor the source's block.
    let good = rounded(read(directory.path()), IgnoreStyle::Regex);
    let verdict = judge(directory.path(), &good);
    assert!(verdict.passed, "{verdict}");

    let mut altered = good.clone();
    altered.tensor("model.language_model.layers.1.self_attn.o_proj.weight").bytes[0] ^= 1;
    assert_eq!(judge(directory.path(), &altered).failed(), [GateId::G5]);
    let mut kept = good;
    let block = json!({ "quant_method": "fp8", "weight_block_size": [128, 128] });
    kept.config(|c| c["quantization_config"] = block);
    assert_eq!(judge(directory.path(), &kept).failed(), [GateId::G14]);
}
