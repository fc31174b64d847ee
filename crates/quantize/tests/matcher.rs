//! What loaders make of `targets` and `ignore`, on the names of the released model.

use glimmer_checkpoint::{Config, Group, Inventory};
use glimmer_quantize::gates::matcher::{Modules, PackedMapping, Reading, Rules, wrong_layers};
use serde_json::Value;

const TARGET: &str = r"re:.*\.layers\.(?:[3-9]|[1-3]\d|4[0-4])\.mlp\.experts\.\d+\.(?:gate|up|down)_proj$";

fn data(file: &str) -> String {
    let path = format!("{}/../../data/{file}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).expect("a file of the repository")
}

fn inventory() -> Inventory {
    Inventory::bf16(&Config::parse(&data("glm-5.3-flash/config.json")).expect("the released configuration"))
}

fn is_linear(name: &str, shape: &[usize]) -> bool {
    shape.len() == 2 && name.ends_with(".weight") && !name.contains("embed_tokens")
}

fn base(name: &str) -> String {
    name.strip_suffix(".weight").unwrap_or(name).to_owned()
}

/// The released model, with two experts a layer to keep the test short; expert 0 decides for vLLM.
fn modules() -> Modules {
    let inventory = inventory();
    let linear = inventory.tensors().iter().filter(|t| is_linear(&t.name, &t.shape));
    let linear = linear.filter(|t| {
        let expert = t.name.split_once(".experts.").and_then(|(_, rest)| rest.split_once('.'));
        expert.is_none_or(|(e, _)| e == "0" || e == "287")
    });
    let linear: Vec<_> = linear.collect();
    Modules {
        quantized: linear.iter().filter(|t| t.group == Group::MoeRouted).map(|t| base(&t.name)).collect(),
        linear: linear.iter().map(|t| base(&t.name)).collect(),
        mtp_layer: Some(45),
    }
}

/// The list that llm-compressor writes: linear layers, routers and forget gates under the checkpoint's names.
fn leaf_names() -> Vec<String> {
    let inventory = inventory();
    let plain = inventory.tensors().iter().filter(|t| is_linear(&t.name, &t.shape));
    let plain = plain.filter(|t| !matches!(t.group, Group::MoeRouted | Group::Mtp | Group::MtpRouted));
    let mut names: Vec<String> = plain.map(|t| base(&t.name)).collect();
    let gates = inventory.tensors().iter().filter_map(|t| t.name.strip_suffix(".A_log"));
    names.extend(gates.map(|module| format!("{module}.forget_gate")));
    names
}

/// Checkpoint names, vLLM's names, fused names, and the MTP layer as a pattern.
fn dual_names() -> Vec<String> {
    let leaf = leaf_names();
    let module = |name: &String| match name.as_str() {
        "lm_head" => "language_model.lm_head".to_owned(),
        name => name.replace("model.language_model.", "language_model.model.").replace("model.visual.", "visual."),
    };
    let mut names: Vec<String> = leaf.iter().cloned().chain(leaf.iter().map(module)).collect();
    let fused = leaf.iter().map(module).filter(|n| n.starts_with("language_model.model.") && n.ends_with(".gate_proj"));
    let fused: Vec<String> = fused.map(|n| n.replace(".gate_proj", ".gate_up_proj")).collect();
    names.extend(fused);
    names.push(r"re:.*\.layers\.45\..*".to_owned());
    names
}

fn patterns() -> Vec<String> {
    let block: Value = serde_json::from_str(&data("vectors/quantization_config.json")).expect("JSON");
    let list = block["ignore"].as_array().expect("a list");
    list.iter().map(|e| e.as_str().expect("a string").to_owned()).collect()
}

fn rules(targets: &[&str], ignore: &[String]) -> Rules {
    Rules::new(targets.iter().copied(), ignore.iter().map(String::as_str)).expect("sound patterns")
}

/// Modules that a reader builds wrongly with the entries as written, without repetitions.
fn wrong(rules: &Rules, reader: &str) -> Vec<String> {
    let wrong = wrong_layers(rules, &modules()).into_iter();
    wrong.filter(|w| w.reader == format!("{reader}, as written")).map(|w| w.module).collect()
}

fn vllm(mapping: PackedMapping) -> String {
    format!("vLLM ({mapping:?} packed mapping)")
}

const DRAFTER: &str = "vLLM's MTP drafter";

#[test]
fn leaf_names_are_the_730_of_the_published_procedure() {
    assert_eq!(leaf_names().len(), 654 + 42 + 34);
    assert_eq!(dual_names().len(), 1506);
}

#[test]
fn leaf_names_leave_fused_layers_quantized_under_old_mappings() {
    let rules = rules(&["Linear"], &leaf_names());
    for mapping in [PackedMapping::Empty, PackedMapping::Identity] {
        let wrong = wrong(&rules, &vllm(mapping));
        assert_eq!(wrong.len(), 3 + 42, "{mapping:?}: {wrong:?}");
        assert!(wrong.iter().all(|name| name.ends_with("gate_up_proj")));
    }
    // The head's entry has no dot and is not renamed; it is harmless because its class is no linear layer.
    assert_eq!(wrong(&rules, &vllm(PackedMapping::Shards)), Vec::<String>::new());
    assert!(!wrong(&rules, DRAFTER).is_empty(), "the MTP layer is not excluded");
    assert!(!wrong(&rules, "compressed-tensors").is_empty(), "the MTP layer is not excluded");
}

#[test]
fn dual_spelling_is_read_alike_by_all() {
    assert_eq!(wrong_layers(&rules(&["Linear"], &dual_names()), &modules()), []);
    assert_eq!(wrong_layers(&rules(&[TARGET], &dual_names()), &modules()), []);
}

#[test]
fn seven_patterns_are_read_alike_by_all() {
    assert_eq!(patterns().len(), 7);
    assert_eq!(wrong_layers(&rules(&["Linear"], &patterns()), &modules()), []);
    assert_eq!(wrong_layers(&rules(&[TARGET], &patterns()), &modules()), []);
}

#[test]
fn a_narrow_target_needs_no_ignore_list_but_is_one_guard_only() {
    let rules = rules(&[TARGET], &[]);
    let wrong = wrong_layers(&rules, &modules());
    assert!(wrong.iter().all(|w| w.reader.ends_with("looking at `ignore` alone")), "{:?}", wrong.first());
    assert!(!wrong.is_empty());
}

#[test]
fn each_of_the_seven_patterns_is_needed() {
    let all = patterns();
    for i in 0..all.len() {
        let mut fewer = all.clone();
        let dropped = fewer.remove(i);
        assert!(!wrong_layers(&rules(&[TARGET], &fewer), &modules()).is_empty(), "{dropped}");
    }
}

#[test]
fn half_ignored_fused_layers_stop_vllm() {
    let mut names = dual_names();
    names.retain(|n| !n.contains("layers.0.mlp.up_proj") && !n.contains("layers.0.mlp.gate_up_proj"));
    let rules = rules(&["Linear"], &names);
    let wrong = wrong_layers(&rules, &modules());
    let torn = wrong.iter().find(|w| w.reader == format!("{}, as written", vllm(PackedMapping::Shards)));
    assert!(torn.is_some_and(|w| w.problem.contains("refused")), "{wrong:?}");
}

#[test]
fn patterns_are_anchored_at_the_start_only() {
    let read = |target: &str, name: &str| rules(&[target], &[]).plain(name);
    assert_eq!(read(r"re:model\.a", "model.a.b"), Reading::Quantized, "not anchored at the end");
    assert_eq!(read(r"re:a\.b", "model.a.b"), Reading::Unmatched, "anchored at the start");
    assert_eq!(read("re:x|model", "model.a"), Reading::Quantized, "every alternative is anchored");
    assert_eq!(read("re:x|a", "model.a"), Reading::Unmatched, "every alternative is anchored");
    assert_eq!(read("model.a", "model.a"), Reading::Quantized);
    assert_eq!(read("model.a", "model.a.b"), Reading::Unmatched, "literals are whole names");
    assert_eq!(read("Linear", "model.a"), Reading::Quantized, "a class name");
    let both = rules(&["Linear"], &["model.a".to_owned()]);
    assert_eq!(both.plain("model.a"), Reading::Ignored, "ignore wins");
}

#[test]
fn a_broken_pattern_is_an_error_that_names_it() {
    let error = Rules::new(["re:a(b"], []).expect_err("an unclosed group");
    assert!(error.to_string().contains("re:a(b"), "{error}");
}
