//! Damage to `config.json`: G13, and G14 where a block of an FP8 source is left over.

use glimmer_quantize::gates::GateId::{G13, G14};
use serde_json::{Value, json};

use crate::{
    artifact::{Plan, cut},
    harness::{later, made, made_alone, run},
};

fn block(plan: &mut Plan, change: impl FnOnce(&mut Value)) {
    plan.config(|config| change(&mut config["quantization_config"]));
}

fn weights(plan: &mut Plan, key: &str, value: Value) {
    block(plan, |b| b["config_groups"]["group_0"]["weights"][key] = value);
}

fn targets(plan: &mut Plan, target: &str) {
    block(plan, |b| b["config_groups"]["group_0"]["targets"] = json!([target]));
}

#[test]
fn a_config_that_is_not_the_sources_is_g13s() {
    run(&[
        made_alone("a value changed", &[G13], &[], |p| p.config(|c| c["text_config"]["rms_norm_eps"] = json!(1e-6))),
        made_alone("the dtype changed", &[G13], &[], |p| p.config(|c| c["dtype"] = json!("float16"))),
        made_alone("a key added", &[G13], &[], |p| p.config(|c| c["transformers_version"] = json!("5.24.0"))),
        made_alone("a key dropped", &[G13], &[], |p| {
            p.config(|c| drop(c.as_object_mut().expect("an object").remove("architectures")));
        }),
        made_alone("a layer type spelled anew", &[G13], &[], |p| {
            p.config(|c| c["text_config"]["layer_types"][1] = json!("deepseek_sparse_attention"));
        }),
        later("no config", &[G13], |f| drop(f.remove("config.json"))),
        later("a config that is no JSON", &[G13], |f| {
            cut(f.get_mut("config.json").expect("a config"));
        }),
        later("a config that is no object", &[G13], |f| {
            f.insert("config.json".to_owned(), b"[]".to_vec());
        }),
    ]);
}

#[test]
fn a_block_with_a_wrong_field_is_g13s() {
    run(&[
        made("no block", &[G13], |p| {
            p.config(|c| drop(c.as_object_mut().expect("an object").remove("quantization_config")));
        }),
        made("another method", &[G13], |p| block(p, |b| b["quant_method"] = json!("gptq"))),
        made("another format", &[G13], |p| block(p, |b| b["format"] = json!("int-quantized"))),
        made("another format of the group", &[G13], |p| {
            block(p, |b| b["config_groups"]["group_0"]["format"] = json!("marlin-24"));
        }),
        made("status frozen", &[G13], |p| block(p, |b| b["quantization_status"] = json!("frozen"))),
        made("a cache scheme", &[G13], |p| block(p, |b| b["kv_cache_scheme"] = json!({ "num_bits": 8 }))),
        made("sparsity", &[G13], |p| block(p, |b| b["sparsity_config"] = json!({ "format": "dense" }))),
        made("quantized activations", &[G13], |p| {
            block(p, |b| b["config_groups"]["group_0"]["input_activations"] = json!({ "num_bits": 8 }));
        }),
        made("groups of 64", &[G13], |p| weights(p, "group_size", json!(64))),
        made("8 bits", &[G13], |p| weights(p, "num_bits", json!(8))),
        made("asymmetric", &[G13], |p| weights(p, "symmetric", json!(false))),
        made("one scale a channel", &[G13], |p| weights(p, "strategy", json!("channel"))),
        made("dynamic", &[G13], |p| weights(p, "dynamic", json!(true))),
        made("group act-order", &[G13], |p| weights(p, "actorder", json!("group"))),
        made("floating point codes", &[G13], |p| weights(p, "type", json!("float"))),
        made("no groups", &[G13], |p| block(p, |b| b["config_groups"] = json!({}))),
        made("two groups", &[G13], |p| {
            block(p, |b| b["config_groups"]["group_1"] = b["config_groups"]["group_0"].clone());
        }),
        made("no targets", &[G13], |p| block(p, |b| b["config_groups"]["group_0"]["targets"] = json!([]))),
        made("ignore no list", &[G13], |p| block(p, |b| b["ignore"] = json!("lm_head"))),
    ]);
}

#[test]
fn lists_that_a_loader_would_misread_are_g13s() {
    run(&[
        made("target of all experts", &[G13], |p| targets(p, r"re:.*\.mlp\.experts\..*")),
        made("target of one layer too few", &[G13], |p| {
            targets(p, r"re:.*\.layers\.1\.mlp\.experts\.\d+\.(?:gate|up|down)_proj$");
        }),
        made("target without down projections", &[G13], |p| {
            targets(p, r"re:.*\.layers\.[12]\.mlp\.experts\.\d+\.(?:gate|up)_proj$");
        }),
        made("target with the checkpoint's prefix", &[G13], |p| {
            targets(p, r"re:model\.language_model\.layers\.[12]\.mlp\.experts\.\d+\.(?:gate|up|down)_proj$");
        }),
        made("target that is no pattern", &[G13], |p| targets(p, r"re:.*\.layers\.[12\.mlp")),
        made("no ignore list", &[G13], |p| block(p, |b| b["ignore"] = json!([]))),
        made("head not ignored", &[G13], |p| drop_ignore(p, "lm_head")),
        made("attention not ignored", &[G13], |p| drop_ignore(p, "self_attn")),
        made("shared experts not ignored", &[G13], |p| drop_ignore(p, "shared_experts")),
        made("dense layers not ignored", &[G13], |p| drop_ignore(p, "gate_up")),
        made("routers not ignored", &[G13], |p| drop_ignore(p, r"\.mlp\.gate$")),
        made("vision tower not ignored", &[G13], |p| drop_ignore(p, "visual")),
        made("MTP layer not ignored", &[G13], |p| drop_ignore(p, r"layers\.3")),
        made("an expert ignored", &[G13], |p| {
            block(p, |b| {
                let ignore = b["ignore"].as_array_mut().expect("a list");
                ignore.push(json!("model.language_model.layers.1.mlp.experts.0.up_proj"));
            });
        }),
        made("every linear layer, nothing ignored", &[G13], |p| {
            targets(p, "Linear");
            block(p, |b| b["ignore"] = json!([]));
        }),
        made("every linear layer, fused names not ignored", &[G13], |p| {
            targets(p, "Linear");
            block(p, |b| {
                let ignore = b["ignore"].as_array_mut().expect("a list");
                ignore.retain(|e| !e.as_str().unwrap_or_default().contains("gate_up"));
                for projection in ["gate_proj", "up_proj", "down_proj"] {
                    ignore.push(json!(format!("model.language_model.layers.0.mlp.{projection}")));
                }
            });
        }),
    ]);
}

fn drop_ignore(plan: &mut Plan, part: &str) {
    block(plan, |b| {
        let ignore = b["ignore"].as_array_mut().expect("a list");
        let before = ignore.len();
        ignore.retain(|e| !e.as_str().unwrap_or_default().contains(part));
        assert_eq!(ignore.len() + 1, before, "one entry contains {part}");
    });
}

#[test]
fn a_block_of_an_fp8_source_is_g14s() {
    run(&[
        made("the source's FP8 block", &[G14], |p| {
            block(p, |b| *b = json!({ "quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3" }));
        }),
        made("a second block in the text model", &[G14], |p| {
            p.config(|c| c["text_config"]["quantization_config"] = json!({ "quant_method": "fp8" }));
        }),
    ]);
}
