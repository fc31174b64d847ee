//! A block-scaled FP8 source gives the artifact that its widened weights give, byte for byte.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::Path;

use glimmer_checkpoint::writer::{ShardWriter, TensorHeader, write_index};
use glimmer_checkpoint::{Bytes, Checkpoint, DType, TensorData, fp8};
use glimmer_quantize::gates::{VerifyOptions, verify};
use glimmer_quantize::{CalibrationSample, Options, Recipe, quantize};
use glimmer_tensor::Cpu;
use serde_json::{Value, json};

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/goldens/tiny");
const BLOCK: &str = "quantization_config";

/// Whether the FP8 release stores a tensor as FP8: projections of attention, indexer and MLPs, draft layer included.
fn is_fp8(name: &str) -> bool {
    let layers = name.contains(".self_attn.") || name.contains(".mlp.");
    let parts = ["_proj.weight", ".kv_a_proj_with_mqa.weight", ".indexer.wk.weight"];
    layers && !name.contains("visual") && parts.iter().any(|part| name.ends_with(part))
}

/// A BF16 matrix as nearest codes at scales that differ from block to block.
fn narrow(tensor: &TensorData) -> [TensorData; 2] {
    let positive = &fp8::E4M3[..127];
    let cols = tensor.shape[1];
    let blocks: Vec<usize> = tensor.shape.iter().map(|n| n.div_ceil(fp8::BLOCK)).collect();
    let scales: Vec<f32> = (0..blocks[0] * blocks[1]).map(|i| (1.0 + 0.37 * i as f32) / 512.0).collect();
    let values = tensor.bytes.as_slice().as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32());
    let codes = values.enumerate().map(|(i, value)| {
        let scaled = value / scales[i / cols / fp8::BLOCK * blocks[1] + i % cols / fp8::BLOCK];
        let above = positive.partition_point(|&p| p < scaled.abs()).min(126);
        let nearest = if above > 0 && scaled.abs() - positive[above - 1] < positive[above] - scaled.abs() {
            above - 1
        } else {
            above
        };
        nearest as u8 | if scaled < 0.0 { 0x80 } else { 0 }
    });
    let codes = Bytes::new(codes.collect::<Vec<u8>>());
    let scales = Bytes::new(scales.iter().flat_map(|s| s.to_le_bytes()).collect::<Vec<u8>>());
    [
        TensorData { dtype: DType::F8E4M3, bytes: codes, ..tensor.clone() },
        TensorData { name: fp8::scale_name(&tensor.name), dtype: DType::F32, shape: blocks, bytes: scales },
    ]
}

fn write(directory: &Path, tensors: &[TensorData], config: &Value, companions: &Checkpoint) {
    std::fs::create_dir(directory).unwrap();
    let headers = tensors.iter().map(TensorHeader::from).collect();
    let mut writer = ShardWriter::create(directory, "model-00001-of-00001.safetensors", headers).unwrap();
    tensors.iter().for_each(|t| writer.write_tensor(t).unwrap());
    write_index(directory, &[writer.finish().unwrap()]).unwrap();
    std::fs::write(directory.join("config.json"), format!("{config:#}")).unwrap();
    let name = "generation_config.json";
    std::fs::write(directory.join(name), companions.file(name).unwrap().as_slice()).unwrap();
}

#[test]
fn an_fp8_source_gives_the_artifact_of_its_widened_weights() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    let tiny = Checkpoint::open(TINY).unwrap();
    let mut names: Vec<&str> = tiny.names().collect();
    names.sort_unstable();
    let mut config: Value = serde_json::from_slice(tiny.file("config.json").unwrap().as_slice()).unwrap();
    config.as_object_mut().unwrap().shift_remove(BLOCK);

    let mut stored = Vec::new();
    for name in &names {
        let tensor = tiny.tensor(name).unwrap();
        if is_fp8(name) && tensor.dtype == DType::Bf16 { stored.extend(narrow(&tensor)) } else { stored.push(tensor) }
    }
    let narrowed = stored.iter().filter(|t| t.dtype == DType::F8E4M3).count();
    let of = |part: &str| stored.iter().filter(|t| t.dtype == DType::F8E4M3 && t.name.contains(part)).count();
    let draft = tiny.config().text.mtp_layer().unwrap();
    let draft = of(&format!(".layers.{draft}.mlp.experts."));
    assert!(draft > 0 && of(".self_attn.") > 0 && of(".mlp.experts.") > draft && of(".shared_experts.") > 0);
    let mut with_block = config.clone();
    with_block[BLOCK] = json!({ "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128] });
    write(&place("fp8"), &stored, &with_block, &tiny);

    let source = Checkpoint::open(place("fp8")).unwrap();
    let widened: Vec<TensorData> = names.iter().map(|name| source.tensor(name).unwrap()).collect();
    let changed = widened.iter().filter(|t| tiny.tensor(&t.name).unwrap().bytes.as_slice() != t.bytes.as_slice());
    assert_eq!(changed.count(), narrowed, "FP8 is coarser than BF16");
    write(&place("bf16"), &widened, &config, &tiny);

    let vocabulary = tiny.config().text.vocab_size as u32;
    let media = tiny.config().media.unwrap();
    let ids = (0..150u32).map(|i| i * 7919 % vocabulary).filter(|&id| ![media.image, media.video].contains(&id));
    let samples = [CalibrationSample { ids: ids.collect(), images: Vec::new() }];
    let [ours, theirs] = ["fp8", "bf16"].map(|name| {
        let out = place(&format!("{name}-w4a16"));
        let source = Checkpoint::open(place(name)).unwrap();
        quantize(Cpu::new(2), &source, &samples, &Recipe::default(), &Options::new(&out), &mut ()).unwrap();
        out
    });
    let mut files = 0;
    for entry in std::fs::read_dir(&theirs).unwrap() {
        let name = entry.unwrap().file_name();
        // The manifest also names the source.
        if name != "manifest.json" {
            let read = |directory: &Path| std::fs::read(directory.join(&name)).unwrap();
            assert!(read(&ours) == read(&theirs), "{} differs", name.display());
            files += 1;
        }
    }
    assert_eq!(std::fs::read_dir(&ours).unwrap().count(), files + 1);
    let verdict = verify(&ours, Some(&place("fp8")), &VerifyOptions::default()).unwrap();
    assert!(verdict.passed, "{verdict}");
}
