//! Synthetic checkpoints (they are what their configuration says, and reproducible), inspection, and the block of an artifact.

#![allow(clippy::unwrap_used, reason = "a test may unwrap")]

use std::{collections::BTreeMap, fs, path::Path};

use glimmer_checkpoint::{
    Checkpoint, Config, Digest, Error, IgnoreStyle, Inventory, Storage, SynthFormat, SynthOptions, inspect,
    int4::{PackedMatrix, Quotient},
    scheme::{Scheme, quantization_config, with_quantization_config},
    synth,
};
use half::bf16;
use serde_json::{Value, json};

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data");
const MICRO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16");
const MICRO_CONFIG: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16/config.json"));

fn make(directory: &Path, format: SynthFormat, seed: u64, shard_bytes: u64) {
    let mut last = (0, 1);
    let options = SynthOptions { format, seed, shard_bytes };
    let total = synth(MICRO_CONFIG, directory, options, &mut |done, all| last = (done, all)).unwrap();
    assert_eq!(last, (total.bytes, total.bytes), "progress ends at the total");
}

fn digests(directory: &Path) -> BTreeMap<String, Digest> {
    let checkpoint = Checkpoint::open(directory).unwrap();
    checkpoint.names().map(|n| (n.to_owned(), Digest::of(checkpoint.tensor(n).unwrap().bytes.as_slice()))).collect()
}

#[test]
fn synthetic_checkpoints_are_whole_and_reproducible() {
    let [a, b, c] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
    make(a.path(), SynthFormat::Bf16, 1, u64::MAX);
    make(b.path(), SynthFormat::Bf16, 1, 3_000_000);
    make(c.path(), SynthFormat::Bf16, 2, u64::MAX);
    let checkpoint = Checkpoint::open(a.path()).unwrap();
    assert_eq!(Inventory::bf16(checkpoint.config()).compare(&checkpoint), []);
    assert_eq!(checkpoint.file("config.json").unwrap().as_slice(), MICRO_CONFIG.as_bytes());
    let (first, same, other) = (digests(a.path()), digests(b.path()), digests(c.path()));
    assert_eq!(first, same, "shard size does not matter");
    assert!(first.iter().all(|(name, digest)| other[name] != *digest), "the seed does");
    let distinct: std::collections::BTreeSet<_> = first.values().collect();
    assert_eq!(distinct.len(), first.len(), "no two tensors are equal");
    // Bytes are part of the contract: files made by another version or machine must be the same. This digest was computed by a
    // second implementation of the definition.
    let embedding = first["model.language_model.embed_tokens.weight"].to_string();
    assert_eq!(embedding, "a2615e09a073d877c148f44d45a126d31e947591658bd947990c44133e385a73");
}

#[test]
fn synthetic_artifact_is_the_rounded_source() {
    let [source, artifact] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
    make(source.path(), SynthFormat::Bf16, 5, u64::MAX);
    make(artifact.path(), SynthFormat::W4a16, 5, 2_000_000);
    let (source, artifact) = (Checkpoint::open(source.path()).unwrap(), Checkpoint::open(artifact.path()).unwrap());
    let inventory = Inventory::w4a16(artifact.config()).unwrap();
    assert_eq!(inventory.compare(&artifact), []);
    let mut matrices = 0;
    for matrix in artifact.config().text.quantized_matrices() {
        let bytes = |name: String, from: &Checkpoint| from.tensor(&name).unwrap().bytes.as_slice().to_vec();
        let weights: Vec<f32> = bytes(matrix.weight(), &source)
            .as_chunks::<2>()
            .0
            .iter()
            .map(|b| bf16::from_le_bytes(*b).to_f32())
            .collect();
        let expected = PackedMatrix::round_to_nearest(&weights, matrix.cols, Quotient::F32).unwrap();
        assert_eq!(bytes(matrix.packed(), &artifact), expected.packed, "{}", matrix.base());
        assert_eq!(bytes(matrix.scale(), &artifact), expected.scale, "{}", matrix.base());
        assert_eq!(bytes(matrix.shape(), &artifact), expected.shape(), "{}", matrix.base());
        matrices += 1;
    }
    assert_eq!(matrices, 7 * 8 * 3);
    for name in source.names().filter(|name| artifact.has(name)) {
        let bytes = |from: &Checkpoint| from.tensor(name).unwrap().bytes.as_slice().to_vec();
        assert_eq!(bytes(&source), bytes(&artifact), "{name}");
    }
}

#[test]
fn only_an_empty_directory_is_filled() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("note"), "x").unwrap();
    let error = synth(MICRO_CONFIG, directory.path(), SynthOptions::default(), &mut |_, _| {}).unwrap_err();
    assert!(matches!(&error, Error::Invalid { .. }) && error.to_string().contains("empty directory"), "{error}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn inspection_of_the_released_configuration() {
    let path = format!("{DATA}/glm-5.3-flash/config.json");
    let bf16 = inspect(Path::new(&path), false).unwrap();
    assert_eq!((bf16.tensors, bf16.bytes, bf16.stored), (38_770, 642_646_653_816, false));
    assert_eq!((bf16.model.parameters, bf16.storage), (321_323_031_390, Storage::Bf16));
    assert_eq!((bf16.model.active_parameters + 5_000_000) / 10_000_000, 1_611, "16.11 billion");
    assert_eq!(bf16.quantized, None);
    let artifact = inspect(Path::new(&path), true).unwrap();
    assert_eq!((artifact.tensors, artifact.bytes), (111_346, 190_794_864_504));
    let quantized = artifact.quantized.as_ref().unwrap();
    assert_eq!((quantized.matrices, quantized.bytes), (36_288, 152_202_903_552 + 4_756_340_736 + 580_608));
    let page = artifact.to_text();
    for expected in
        ["190,794,864,504", "36,288 matrices", "4.125 bits", "1e-6 (the released tower was trained with it)"]
    {
        assert!(page.contains(expected), "{expected} in:\n{page}");
    }
    let json: Value = serde_json::to_value(&artifact).unwrap();
    assert_eq!(json["groups"][7]["group"], "moe_routed");
    assert_eq!(json["groups"][7]["dtypes"]["I32"], 36_288);
}

#[test]
fn a_lone_configuration_is_taken_by_its_quantization_config() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.json");
    let micro = Config::parse(MICRO_CONFIG).unwrap();
    let packed = quantization_config(&micro, Scheme::default());
    let with = |field: &str, value: Value| {
        let mut block = packed.clone();
        block["config_groups"]["group_0"]["weights"][field] = value;
        block
    };
    let mut sparse = packed.clone();
    sparse["format"] = json!("marlin-24");
    for (block, storage, problems) in [
        (sparse, Storage::Bf16, 1),
        (with("num_bits", json!(8)), Storage::W4a16, 1),
        (with("group_size", json!(32)), Storage::W4a16, 1),
        (with("symmetric", json!(false)), Storage::W4a16, 1),
        (with("strategy", Value::Null), Storage::W4a16, 0),
        (packed.clone(), Storage::W4a16, 0),
        // The released block-FP8 checkpoint is read as BF16.
        (json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}), Storage::Bf16, 0),
        (json!({"quant_method": "awq"}), Storage::Bf16, 1),
    ] {
        let mut config: Value = serde_json::from_str(MICRO_CONFIG).unwrap();
        config["quantization_config"] = block.clone();
        fs::write(&path, config.to_string()).unwrap();
        let inspection = inspect(&path, false).unwrap();
        assert_eq!((inspection.storage, inspection.problems.len()), (storage, problems), "{block}");
        assert_eq!(inspection.quantized.is_some(), storage == Storage::W4a16);
    }
    for block in [json!([]), json!("int4")] {
        let mut config: Value = serde_json::from_str(MICRO_CONFIG).unwrap();
        config["quantization_config"] = block;
        fs::write(&path, config.to_string()).unwrap();
        let error = inspect(&path, false).unwrap_err().to_string();
        assert!(error.contains("quantization_config") && error.contains("an object"), "{error}");
    }
}

#[test]
fn inspection_of_directories() {
    let micro = inspect(Path::new(MICRO), false).unwrap();
    assert_eq!((micro.tensors, micro.shards, micro.storage), (479, 3, Storage::Bf16));
    assert_eq!(micro.problems, Vec::<String>::new());
    assert!(micro.to_text().contains("no problems"));

    let directory = tempfile::tempdir().unwrap();
    make(directory.path(), SynthFormat::W4a16, 0, 2_000_000);
    let artifact = inspect(directory.path(), false).unwrap();
    assert_eq!((artifact.storage, artifact.problems.len()), (Storage::W4a16, 0));
    assert_eq!(artifact.quantized.unwrap().matrices, 168);

    // Blocks that say otherwise than the tensors, on either side.
    let text = fs::read_to_string(directory.path().join("config.json")).unwrap();
    for (from, to) in
        [("pack-quantized", "marlin-24"), ("\"num_bits\": 4", "\"num_bits\": 8"), ("compressed-tensors", "awq")]
    {
        assert!(text.contains(from), "{from}");
        fs::write(directory.path().join("config.json"), text.replace(from, to)).unwrap();
        let inspection = inspect(directory.path(), false).unwrap();
        assert!(inspection.to_text().contains("\n1 problem:\n"), "{to}");
        let problems = inspection.problems;
        assert!(matches!(&problems[..], [one] if one.contains("quantization_config")), "{to}: {problems:?}");
    }
    let plain = tempfile::tempdir().unwrap();
    make(plain.path(), SynthFormat::Bf16, 0, 20_000_000);
    fs::write(plain.path().join("config.json"), &text).unwrap();
    let problems = inspect(plain.path(), false).unwrap().problems;
    assert!(matches!(&problems[..], [one] if one.contains("found that of a W4A16 artifact")), "{problems:?}");

    // The configuration of another model beside these shards.
    let mut config: Value = serde_json::from_str(MICRO_CONFIG).unwrap();
    config["text_config"]["n_routed_experts"] = json!(7);
    fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    fs::write(directory.path().join("model-extra.safetensors"), "").unwrap();
    let broken = inspect(directory.path(), false).unwrap();
    let has = |text: &str| broken.problems.iter().any(|problem| problem.contains(text));
    assert!(has("model-extra.safetensors") && has("experts.7.") && has("quantization_config") && has("[7, 256]"));
    assert!(broken.groups.iter().any(|g| g.group == "unknown"));
    assert!(broken.to_text().contains("more"));
    assert!(inspect(Path::new("/nonexistent"), false).is_err());
}

#[test]
fn block_of_the_released_artifact() {
    let config = Config::from_file(format!("{DATA}/glm-5.3-flash/config.json")).unwrap();
    let text = fs::read_to_string(format!("{DATA}/vectors/quantization_config.json")).unwrap();
    let mut reference: Value = serde_json::from_str(&text).unwrap();
    let ordered = Scheme { static_order: true, ignore: IgnoreStyle::Regex };
    assert_eq!(quantization_config(&config, ordered), reference);
    reference["config_groups"]["group_0"]["weights"]["actorder"] = Value::Null;
    assert_eq!(quantization_config(&config, Scheme::default()), reference);

    let dual = quantization_config(&config, Scheme { ignore: IgnoreStyle::Dual, ..Scheme::default() });
    let names: Vec<&str> = dual["ignore"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    for name in [
        "lm_head",
        "language_model.lm_head",
        "model.language_model.layers.0.mlp.gate_proj",
        "model.language_model.layers.0.mlp.gate_up_proj",
        "language_model.model.layers.0.mlp.gate_up_proj",
        "model.language_model.layers.0.self_attn.forget_gate.f_a_proj",
        "language_model.model.layers.44.mlp.shared_experts.down_proj",
        "visual.blocks.23.attn.qkv",
        "model.visual.merger.proj",
    ] {
        assert!(names.contains(&name), "{name}");
    }
    assert!(names.iter().all(|name| !name.contains(".experts.") && !name.contains("layers.45.mlp")));
}

#[test]
fn block_goes_into_the_text_and_nothing_else_changes() {
    let config = Config::parse(MICRO_CONFIG).unwrap();
    let block = quantization_config(&config, Scheme::default());
    let text = with_quantization_config(MICRO_CONFIG, &block).unwrap();
    let kept = MICRO_CONFIG.trim_end().strip_suffix('}').unwrap().trim_end();
    assert!(text.starts_with(kept));
    assert_eq!(Config::parse(&text).unwrap(), Config { quantization: Some(block.clone()), ..config });

    // A block of the source is replaced, wherever it is.
    let mut source: Value = serde_json::from_str(MICRO_CONFIG).unwrap();
    source["quantization_config"] = json!({"quant_method": "fp8"});
    source["text_config"]["quantization_config"] = json!({"quant_method": "fp8"});
    let text = with_quantization_config(&source.to_string(), &block).unwrap();
    assert!(!text.contains("fp8"));
    let mut expected: Value = serde_json::from_str(MICRO_CONFIG).unwrap();
    expected["quantization_config"] = block;
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), expected);
    assert!(with_quantization_config("[]", &json!({})).is_err());
    assert!(with_quantization_config("{", &json!({})).is_err());
}
