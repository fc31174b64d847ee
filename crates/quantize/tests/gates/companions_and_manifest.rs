//! Damage to the files beside the weights (G14) and to the manifest, or to what only the manifest covers (G15).

use glimmer_checkpoint::manifest::MANIFEST_FILE;
use glimmer_quantize::gates::GateId::{G14, G15};
use serde_json::{Value, json};

use crate::{
    artifact::{Files, Plan, cut},
    harness::{Case, Damage, later, made, made_alone, run},
};

fn file<'a>(plan: &'a mut Plan, name: &str) -> &'a mut Vec<u8> {
    plan.files.get_mut(name).expect("a file of the good artifact")
}

fn manifest(files: &mut Files, change: impl FnOnce(&mut Value)) {
    let text = files.get_mut(MANIFEST_FILE).expect("a manifest");
    let mut value = serde_json::from_slice(text).expect("JSON");
    change(&mut value);
    *text = serde_json::to_vec(&value).expect("JSON");
}

fn remove(value: &mut Value, key: &str) {
    value.as_object_mut().expect("an object").remove(key).expect("the key is there");
}

const TENSOR: &str = "model.language_model.layers.1.mlp.experts.0.up_proj.weight_packed";

#[test]
fn companions_that_are_not_the_sources_are_g14s() {
    run(&[
        made_alone("a token altered", &[G14], &[], |p| *file(p, "tokenizer.json") = br#"{"version": "1.1"}"#.to_vec()),
        made_alone("no tokenizer", &[G14], &[], |p| drop(p.files.remove("tokenizer.json"))),
        made_alone("no template", &[G14], &[], |p| drop(p.files.remove("chat_template.jinja"))),
        made_alone("template with a line end added", &[G14], &[], |p| file(p, "chat_template.jinja").push(b'\n')),
        made_alone("one stop token dropped", &[G14], &[], |p| {
            *file(p, "generation_config.json") = br#"{"temperature": 1.0, "top_p": 0.95, "eos_token_id": 0}"#.to_vec();
        }),
        made_alone("no processor configuration", &[G14], &[], |p| drop(p.files.remove("preprocessor_config.json"))),
        made_alone("no licence", &[G14], &[], |p| drop(p.files.remove("LICENSE"))),
        made_alone("a second template", &[G14], &[], |p| {
            drop(p.files.insert("chat_template.json".to_owned(), b"{}".to_vec()));
        }),
        made("a companion cut off", &[G14], |p| cut(file(p, "tokenizer_config.json"))),
        made("another tool's quantization file", &[G14], |p| {
            drop(p.files.insert("hf_quant_config.json".to_owned(), b"{}".to_vec()));
        }),
    ]);
}

#[test]
fn the_manifest_and_what_it_alone_covers_are_g15s() {
    run(&[
        later("no manifest", &[G15], |f| drop(f.remove(MANIFEST_FILE))),
        later("a manifest cut off", &[G15], |f| cut(f.get_mut(MANIFEST_FILE).expect("a manifest"))),
        later("a manifest of another layout", &[G15], |f| manifest(f, |m| m["layout"] = json!(2))),
        later("a file's hash wrong", &[G15], |f| {
            manifest(f, |m| m["files"]["LICENSE"]["sha256"] = json!("00".repeat(32)));
        }),
        later("a hash that is none", &[G15], |f| manifest(f, |m| m["files"]["LICENSE"]["sha256"] = json!("zz"))),
        later("a tensor's hash wrong", &[G15], |f| {
            manifest(f, |m| m["tensors"][TENSOR]["sha256"] = json!("00".repeat(32)));
        }),
        later("a tensor not recorded", &[G15], |f| manifest(f, |m| remove(&mut m["tensors"], TENSOR))),
        later("a file not recorded", &[G15], |f| manifest(f, |m| remove(&mut m["files"], "README.md"))),
        later("a shard not recorded", &[G15], |f| {
            manifest(f, |m| remove(&mut m["files"], "model-00002-of-00004.safetensors"));
        }),
        later("a tensor recorded in another shard", &[G15], |f| {
            manifest(f, |m| m["tensors"][TENSOR]["file"] = json!("model-00001-of-00004.safetensors"));
        }),
        later("a tensor recorded that is not there", &[G15], |f| {
            manifest(f, |m| m["tensors"]["ghost"] = m["tensors"][TENSOR].clone());
        }),
        later("a file recorded that is not there", &[G15], |f| {
            manifest(f, |m| m["files"]["ghost"] = m["files"]["LICENSE"].clone());
        }),
        later("no recipe", &[G15], |f| manifest(f, |m| m["recipe"] = Value::Null)),
        later("a file added", &[G15], |f| drop(f.insert("notes.txt".to_owned(), b"?".to_vec()))),
        later("a file left by an unfinished run", &[G15], |f| {
            drop(f.insert("model-00002-of-00004.safetensors.tmp".to_owned(), vec![0; 10]));
        }),
        later("the readme altered", &[G15], |f| drop(f.insert("README.md".to_owned(), b"!".to_vec()))),
        later("a shard written with another order of keys", &[G15], |f| {
            let shard = f.get_mut("model-00002-of-00004.safetensors").expect("a shard");
            let at = shard.iter().position(|b| *b == b'{').expect("a header");
            // A space after the brace, paid for by the length field: the tensors are the same, the file is not.
            shard.insert(at + 1, b' ');
            let length = u64::from_le_bytes(*shard.first_chunk::<8>().expect("8 bytes")) + 1;
            shard[..8].copy_from_slice(&length.to_le_bytes());
        }),
        Case {
            name: "made from a source with other weights",
            damage: Damage::Later(|f| {
                manifest(f, |m| m["source"]["sample_sha256"] = json!("00".repeat(32)));
            }),
            with_source: &[G15],
            alone: &[],
        },
        Case {
            name: "made from another source",
            damage: Damage::Later(|f| {
                manifest(f, |m| m["source"]["config_sha256"] = json!("00".repeat(32)));
            }),
            with_source: &[G15],
            alone: &[],
        },
    ]);
}
