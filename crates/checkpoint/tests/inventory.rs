//! The inventory against the released model's published figures, the list of its tensors, and two real checkpoints.

#![allow(clippy::unwrap_used, reason = "a test may unwrap")]

use std::collections::BTreeMap;

use glimmer_checkpoint::{
    Checkpoint, Config, DType,
    inventory::{Difference, Group, Inventory, Sum, TensorSpec},
};
use serde_json::Value;

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data");
const MICRO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16");

fn released() -> Config {
    Config::from_file(format!("{DATA}/glm-5.3-flash/config.json")).unwrap()
}

#[test]
fn released_model_has_the_published_totals() {
    let config = released();
    let inventory = Inventory::bf16(&config);
    assert_eq!(inventory.total(), Sum { tensors: 38_770, bytes: 642_646_653_816 });
    assert_eq!(config.text.quantized_matrices().count(), 36_288);
    for (group, tensors, bytes) in [
        (Group::Global, 3, 2_537_562_112),
        (Group::Layer, 90, 737_280),
        (Group::Mhc, 270, 70_788_600),
        (Group::Kda, 510, 9_366_356_992),
        (Group::Dsa, 154, 2_748_117_504),
        (Group::DenseMlp, 9, 905_969_664),
        (Group::Moe, 210, 2_213_068_032),
        (Group::MoeRouted, 36_288, 608_811_614_208),
        (Group::Mtp, 25, 369_670_784),
        (Group::MtpRouted, 864, 14_495_514_624),
        (Group::Vision, 347, 1_127_254_016),
    ] {
        assert_eq!(inventory.sum(group), Sum { tensors, bytes }, "{}", group.name());
    }
    let mtp = inventory.tensors().iter().filter(|spec| spec.layer == config.text.mtp_layer());
    assert_eq!(mtp.count(), 889);
}

#[test]
fn released_artifact_has_the_published_totals() {
    let artifact = Inventory::w4a16(&released()).unwrap();
    assert_eq!(artifact.total(), Sum { tensors: 111_346, bytes: 190_794_864_504 });
    let base = "model.language_model.layers.44.mlp.experts.287.down_proj.weight";
    assert!(artifact.find(base).is_none());
    let part = |suffix: &str| artifact.find(&format!("{base}_{suffix}")).unwrap();
    assert_eq!((part("packed").dtype, part("packed").shape.as_slice()), (DType::I32, &[4096, 256][..]));
    assert_eq!((part("scale").dtype, part("scale").shape.as_slice()), (DType::Bf16, &[4096, 16][..]));
    assert_eq!((part("shape").dtype, part("shape").shape.as_slice()), (DType::I64, &[2][..]));
    let mtp = "model.language_model.layers.45.mlp.experts.287.down_proj.weight";
    assert_eq!(artifact.find(mtp).map(|spec| spec.dtype), Some(DType::Bf16), "the MTP layer stays BF16");
}

/// The name with running numbers replaced, in the spelling of the list.
fn pattern(spec: &TensorSpec, mtp: usize) -> String {
    let mut parts: Vec<String> = spec.name.split('.').map(str::to_owned).collect();
    for i in 1..parts.len() {
        let replacement = match parts[i - 1].as_str() {
            "layers" if parts[i] != mtp.to_string() => "{L}",
            "experts" => "{E}",
            "blocks" => "{B}",
            _ => continue,
        };
        replacement.clone_into(&mut parts[i]);
    }
    parts.join(".")
}

#[test]
fn every_pattern_of_the_tensor_list_agrees() {
    let text = std::fs::read_to_string(format!("{DATA}/glm-5.3-flash/tensor_inventory.json")).unwrap();
    let list: Value = serde_json::from_str(&text).unwrap();
    type Row = (String, Vec<usize>, String, usize, String);
    let mut listed: Vec<Row> = Vec::new();
    for entry in list["patterns"].as_array().unwrap() {
        let shape = entry["shape"].as_array().unwrap().iter().map(|n| usize::try_from(n.as_u64().unwrap()).unwrap());
        let text = |key: &str| entry[key].as_str().unwrap().to_owned();
        let count = usize::try_from(entry["count"].as_u64().unwrap()).unwrap();
        listed.push((text("pattern"), shape.collect(), text("dtype"), count, text("group")));
    }
    let mut derived: BTreeMap<(String, Vec<usize>, String, String), usize> = BTreeMap::new();
    for spec in Inventory::bf16(&released()).tensors() {
        let key = (pattern(spec, 45), spec.shape.clone(), spec.dtype.to_string(), spec.group.name().to_owned());
        *derived.entry(key).or_default() += 1;
    }
    let mut derived: Vec<Row> =
        derived.into_iter().map(|((name, shape, dtype, group), count)| (name, shape, dtype, count, group)).collect();
    listed.sort();
    derived.sort();
    assert_eq!(derived, listed);
}

#[test]
fn micro_and_tiny_equal_their_shards() {
    for (directory, tensors, vision, mtp) in
        [(MICRO.to_owned(), 479, None, None), (format!("{DATA}/goldens/tiny"), 375, Some(39), Some(25))]
    {
        let checkpoint = Checkpoint::open(&directory).unwrap();
        let inventory = Inventory::bf16(checkpoint.config());
        assert_eq!(inventory.compare(&checkpoint), [], "{directory}");
        assert_eq!(inventory.total(), Sum { tensors, bytes: checkpoint.shards().tensor_bytes() });
        for (group, count) in [(Group::Vision, vision), (Group::Mtp, mtp)] {
            assert!(count.is_none_or(|count| inventory.sum(group).tensors == count), "{}", group.name());
        }
    }
}

#[test]
fn layers_that_share_a_selection_have_no_indexer() {
    let config = Config::from_file(format!("{DATA}/goldens/tiny/config.json")).unwrap();
    let inventory = Inventory::bf16(&config);
    let indexer = |layer: usize| {
        let prefix = format!("model.language_model.layers.{layer}.self_attn.indexer.");
        inventory.tensors().iter().filter(|spec| spec.name.starts_with(&prefix)).count()
    };
    assert_eq!([3, 5, 6, 8].map(indexer), [7, 7, 0, 7]);
}

#[test]
fn the_draft_layer_has_an_indexer_and_all_experts_of_its_own_and_no_mixers() {
    let config = released();
    let inventory = Inventory::bf16(&config);
    let below = |layer: usize, part: &str| {
        let prefix = format!("model.language_model.layers.{layer}.");
        let tensors = inventory.tensors().iter().filter_map(|spec| spec.name.strip_prefix(&prefix));
        tensors.filter(|name| name.starts_with(part)).count()
    };
    let (draft, last) = (config.text.mtp_layer().unwrap(), config.text.num_hidden_layers - 1);
    assert_eq!(below(draft, "mlp.experts."), 3 * config.text.moe.num_experts);
    assert_eq!(below(draft, "self_attn.indexer."), 7);
    assert_eq!((below(last, "hc_"), below(draft, "hc_")), (6, 0));
    assert!(
        ["eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"].map(|n| below(draft, n))
            == [1; 4]
    );
    assert_eq!(["embed_tokens", "shared_head.head"].map(|n| below(draft, n)), [0; 2], "these are the trunk's");
}

#[test]
fn what_must_not_be_rounded_is_stored_in_f32() {
    let inventory = Inventory::bf16(&released());
    let text = inventory.tensors().iter().filter(|spec| spec.group != Group::Vision);
    let mut f32s: Vec<&str> =
        text.filter(|s| s.dtype == DType::F32).map(|s| s.name.rsplit('.').next().unwrap()).collect();
    f32s.sort_unstable();
    f32s.dedup();
    let expected = ["A_log", "dt_bias", "e_score_correction_bias"];
    let mixers = ["hc_attn_base", "hc_attn_scale", "hc_ffn_base", "hc_ffn_scale"];
    let expected: Vec<&str> = expected.into_iter().chain(mixers).collect();
    assert_eq!(f32s, expected);
}

#[test]
fn differences_are_named() {
    let checkpoint = Checkpoint::open(MICRO).unwrap();
    let mut config = checkpoint.config().clone();
    config.text.kda.head_dim = 32;
    config.text.moe.num_experts = 9;
    config.text.num_nextn_predict_layers = 0;
    let mismatches = Inventory::bf16(&config).compare(&checkpoint);
    let of = |name: &str| {
        let full = format!("model.language_model.layers.{name}");
        mismatches.iter().find(|m| m.tensor == full).map(|m| &m.difference)
    };
    assert!(matches!(of("0.self_attn.q_proj.weight"), Some(Difference::Shape { expected, found })
        if expected == &[128, 256] && found == &[256, 256]));
    assert!(matches!(of("1.mlp.experts.8.up_proj.weight"), Some(Difference::Missing { .. })));
    assert!(matches!(of("8.enorm.weight"), Some(Difference::Unexpected)));
    assert!(of("0.input_layernorm.weight").is_none());
    assert!(mismatches.iter().all(|m| m.to_string().contains(&m.tensor)));
}

#[test]
fn artifact_needs_whole_groups() {
    let mut config = released();
    config.text.moe.intermediate_size = 2000;
    let message = Inventory::w4a16(&config).unwrap_err().to_string();
    assert!(message.contains("down_proj") && message.contains("2000"), "{message}");
}
