//! Repairs: a lost MTP layer, a misread quantization block.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::Path;

use glimmer_checkpoint::manifest::Manifest;
use glimmer_checkpoint::scheme::IgnoreStyle;
use glimmer_checkpoint::writer::{ShardWriter, TensorHeader, write_index};
use glimmer_checkpoint::{Checkpoint, Inventory};
use glimmer_quantize::gates::{GateId, VerifyOptions, verify};
use glimmer_quantize::mend::{CONFIG_COPY, ConfigFix, MTP_SHARD, fix_config, merge_mtp};
use glimmer_quantize::{Options, Recipe, quantize};
use glimmer_tensor::Cpu;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/goldens/tiny");

fn artifact(out: &Path) -> Checkpoint {
    let source = Checkpoint::open(TINY).unwrap();
    quantize(Cpu::new(1), &source, &[], &Recipe::rtn(), &Options::new(out), &mut ()).unwrap();
    source
}

#[test]
fn a_lost_mtp_layer_is_added_without_touching_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, out) = (folder.path().join("whole"), folder.path().join("lost"));
    let source = artifact(&whole);
    // The same artifact without its MTP layer, as another tool would have written it: one shard, no manifest.
    let complete = Checkpoint::open(&whole).unwrap();
    std::fs::create_dir(&out).unwrap();
    std::fs::copy(whole.join("config.json"), out.join("config.json")).unwrap();
    let layer = source.config().text.mtp_layer().unwrap();
    let kept: Vec<&str> = complete.names().filter(|name| !name.contains(&format!(".layers.{layer}."))).collect();
    let tensors: Vec<_> = kept.iter().map(|name| complete.tensor(name).unwrap()).collect();
    let headers = tensors.iter().map(TensorHeader::from).collect();
    let mut writer = ShardWriter::create(&out, "model-00001-of-00001.safetensors", headers).unwrap();
    tensors.iter().for_each(|t| writer.write_tensor(t).unwrap());
    write_index(&out, &[writer.finish().unwrap()]).unwrap();
    let index = |directory: &Path| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(directory.join("model.safetensors.index.json")).unwrap()).unwrap()
    };
    let before = index(&out);

    let added = merge_mtp(&source, &out).unwrap();
    let merged = Checkpoint::open(&out).unwrap();
    assert_eq!(Inventory::w4a16(source.config()).unwrap().compare(&merged), Vec::new());
    assert_eq!(added.added, complete.names().count() - kept.len());
    let after = index(&out);
    for (name, file) in before["weight_map"].as_object().unwrap() {
        assert_eq!(&after["weight_map"][name], file);
    }
    for name in merged.names().filter(|name| !kept.contains(name)) {
        assert_eq!(after["weight_map"][name], MTP_SHARD);
        assert_eq!(merged.tensor(name).unwrap().bytes.as_slice(), source.tensor(name).unwrap().bytes.as_slice());
    }
    assert_eq!(after["metadata"]["total_size"].as_u64().unwrap(), merged.shards().tensor_bytes());
    assert_eq!(merge_mtp(&source, &out).unwrap().added, 0, "nothing is lacking any more");
    assert_eq!(merge_mtp(&source, &whole).unwrap().added, 0);
}

#[test]
fn a_misread_block_is_replaced_and_the_old_text_kept() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("artifact");
    artifact(&out);
    let nothing = ConfigFix { replaced: Vec::new(), wrong: Vec::new() };
    assert_eq!(fix_config(&out, IgnoreStyle::Regex).unwrap(), nothing, "ours needs no fixing");
    assert!(!out.join(CONFIG_COPY).exists());
    let path = out.join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    value["quantization_config"]["config_groups"]["group_0"]["targets"] = serde_json::json!(["Linear"]);
    value["quantization_config"]["ignore"] = serde_json::json!(["lm_head"]);
    let broken = format!("{value:#}");
    std::fs::write(&path, &broken).unwrap();
    let verdict =
        |full| verify(&out, Some(Path::new(TINY)), &VerifyOptions { full, ..VerifyOptions::default() }).unwrap();
    assert!(verdict(false).failed().contains(&GateId::G13));
    assert_eq!(fix_config(&out, IgnoreStyle::Regex).unwrap().replaced, ["targets", "ignore"]);
    assert_eq!(std::fs::read_to_string(out.join(CONFIG_COPY)).unwrap(), broken);
    let fixed: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(fixed, serde_json::from_str::<serde_json::Value>(&text).unwrap());
    assert_eq!(Manifest::read(&out).unwrap().check_files(&out).unwrap(), Vec::new());
    assert!(!verdict(false).failed().contains(&GateId::G13));
}

#[test]
fn what_a_fix_does_not_mend_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("artifact");
    artifact(&out);
    let path = out.join("config.json");
    let mut value: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    value["quantization_config"]["quantization_status"] = serde_json::json!("frozen");
    value["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = serde_json::json!(64);
    value["quantization_config"]["ignore"] = serde_json::json!([]);
    std::fs::write(&path, format!("{value:#}")).unwrap();
    let wrong =
        ["quantization_config.quantization_status", "quantization_config.config_groups.group_0.weights.group_size"];
    for replaced in [vec!["ignore"], vec![]] {
        let fix = fix_config(&out, IgnoreStyle::Regex).unwrap();
        assert_eq!(fix.replaced, replaced);
        assert_eq!(fix.wrong.iter().map(|o| o.subject.as_str()).collect::<Vec<_>>(), wrong);
    }
    let after: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(after["quantization_config"]["quantization_status"], "frozen");
}
