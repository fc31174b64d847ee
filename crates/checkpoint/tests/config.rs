//! Reading of `config.json`: the three models at hand, both forms, aliases, defaults and one test a rule.

#![allow(clippy::unwrap_used, reason = "a test may unwrap")]

use glimmer_checkpoint::{AttentionKind, Config, ConfigError, IndexerKind, MlpKind, NormEpsOrigin};
use serde_json::{Value, json};

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data");
const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models");

fn read(path: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn released() -> Value {
    read(&format!("{DATA}/glm-5.3-flash/config.json"))
}

fn micro() -> Value {
    read(&format!("{MODELS}/micro-bf16/config.json"))
}

/// The released configuration with one key of `text_config` replaced (`null` removes it, as in the file).
fn with_text(key: &str, value: Value) -> Value {
    let mut config = released();
    config["text_config"][key] = value;
    config
}

fn error_of(config: &Value) -> ConfigError {
    Config::from_value(config).unwrap_err()
}

/// The error of the released configuration with one key of `text_config` replaced; it must name that key.
fn refused(key: &str, value: Value) -> String {
    let error = error_of(&with_text(key, value));
    assert_eq!(error.key(), Some(format!("text_config.{key}").as_str()), "{error}");
    error.to_string()
}

#[test]
fn released_model() {
    let config = Config::from_value(&released()).unwrap();
    let text = &config.text;
    assert_eq!((text.hidden_size, text.num_hidden_layers, text.vocab_size), (4096, 45, 154_880));
    assert_eq!(text.dsa_layers().collect::<Vec<_>>(), (0..11).map(|i| 4 * i + 3).collect::<Vec<_>>());
    assert_eq!(text.kda_layers().count(), 34);
    assert_eq!(text.mlp.iter().filter(|&&m| m == MlpKind::Dense).count(), 3);
    assert_eq!((text.kda.num_heads, text.kda.head_dim, text.kda.conv_kernel), (64, 128, 4));
    assert_eq!(text.kda.gate_lower_bound.to_bits(), (-5.0f32).to_bits());
    assert_eq!((text.indexer.topk, text.indexer.kpool, text.selection_width()), (2048, 4, 2051));
    assert!(text.indexer.share_for_mtp && text.moe.normalize);
    assert_eq!((text.moe.num_experts, text.moe.experts_per_token, text.moe.num_shared), (288, 8, 1));
    assert_eq!(text.eos_token_ids, [154_820, 154_827, 154_829]);
    assert_eq!((text.pad_token_id, text.mtp_layer()), (Some(154_820), Some(45)));
    assert_eq!(config.media.unwrap().video_end, 154_833);
    assert_eq!(config.quantization, None);
}

#[test]
fn epsilon_of_the_released_tower_is_the_trained_one() {
    let vision = Config::from_value(&released()).unwrap().vision.unwrap();
    assert_eq!(vision.rms_norm_eps.to_bits(), 1e-5f32.to_bits());
    assert_eq!(vision.block_norm_eps.to_bits(), 1e-6f32.to_bits());
    assert_eq!(vision.block_norm_eps_origin, NormEpsOrigin::ReleasedTower);

    let mut other = released();
    other["vision_config"]["depth"] = json!(23);
    let vision = Config::from_value(&other).unwrap().vision.unwrap();
    assert_eq!(vision.block_norm_eps.to_bits(), 1e-5f32.to_bits());
    assert_eq!(vision.block_norm_eps_origin, NormEpsOrigin::Config);
}

#[test]
fn micro_model_with_flattened_keys_and_absent_defaults() {
    let config = Config::from_value(&micro()).unwrap();
    assert_eq!((config.text.kda.num_heads, config.text.kda.head_dim, config.text.kda.conv_kernel), (4, 64, 4));
    assert_eq!(config.text.attention[3], AttentionKind::Dsa);
    assert!(!config.text.indexer.share_for_mtp, "absent means false");
    assert_eq!(config.text.indexer.kpool, 8);
    let vision = config.vision.unwrap();
    assert_eq!(vision.block_norm_eps.to_bits(), 1e-6f32.to_bits());
    assert_eq!(vision.block_norm_eps_origin, NormEpsOrigin::Config);
}

#[test]
fn tiny_model_with_a_shared_indexer() {
    let config = Config::from_file(format!("{DATA}/goldens/tiny")).unwrap();
    assert_eq!(config.text.indexer.kinds[6], IndexerKind::Shared);
    assert_eq!(config.text.dsa_layers().collect::<Vec<_>>(), [3, 5, 6]);
}

#[test]
fn flat_form_is_the_text_model_alone() {
    let mut flat = released()["text_config"].clone();
    flat["model_type"] = json!("glm5_next");
    let config = Config::from_value(&flat).unwrap();
    assert_eq!(config.text, Config::from_value(&released()).unwrap().text);
    assert_eq!((config.vision, config.media), (None, None));

    flat["index_kpool"] = Value::Null;
    assert_eq!(error_of(&flat).key(), Some("index_kpool"), "the path of a flat key has no prefix");
}

#[test]
fn all_spellings_of_sparse_attention() {
    for name in ["deepseek_sparse_attention", "indexed_attention", "full_attention"] {
        let mut config = micro();
        config["text_config"]["layer_types"][3] = json!(name);
        assert_eq!(Config::from_value(&config).unwrap().text.attention[3], AttentionKind::Dsa, "{name}");
    }
    let message = refused("layer_types", json!(vec!["sliding_attention"; 45]));
    assert!(message.contains("sliding_attention"), "{message}");
}

#[test]
fn layer_kinds_follow_from_any_one_source() {
    let full = Config::from_value(&released()).unwrap().text;
    for key in ["layer_types", "mlp_layer_types", "first_k_dense_replace", "indexer_types", "qk_head_dim"] {
        assert_eq!(Config::from_value(&with_text(key, Value::Null)).unwrap().text, full, "without {key}");
    }
    let mut neither = with_text("mlp_layer_types", Value::Null);
    neither["text_config"]["first_k_dense_replace"] = Value::Null;
    assert_eq!(error_of(&neither).key(), Some("text_config.mlp_layer_types"));
}

#[test]
fn contradicting_sources_are_refused() {
    refused("first_k_dense_replace", json!(4));
    let mut layers: Vec<&str> = vec!["linear_attention"; 45];
    layers[2] = "full_attention";
    refused("layer_types", json!(layers));
    let mut config = released();
    config["text_config"]["linear_attn_config"]["kda_layers"] = json!([0, 1]);
    assert_eq!(error_of(&config).key(), Some("text_config.linear_attn_config.kda_layers"));
}

#[test]
fn indexer_pattern_and_frequency() {
    let mut pattern = "F".repeat(45);
    pattern.replace_range(7..8, "S");
    for value in [json!(pattern), json!(pattern.chars().map(String::from).collect::<Vec<_>>())] {
        let mut config = with_text("indexer_types", Value::Null);
        config["text_config"]["index_topk_pattern"] = value;
        let kinds = Config::from_value(&config).unwrap().text.indexer.kinds;
        assert_eq!(kinds.iter().filter(|&&k| k == IndexerKind::Shared).count(), 1);
        assert_eq!(kinds[7], IndexerKind::Shared);
    }
    let mut config = with_text("indexer_types", Value::Null);
    config["text_config"]["index_topk_freq"] = json!(4);
    config["text_config"]["index_skip_topk_offset"] = json!(4);
    // max(i - 3, 0) % 4 == 0: layers 0..=3, 7, 11, ...
    let kinds = Config::from_value(&config).unwrap().text.indexer.kinds;
    let full: Vec<_> = (0..45).filter(|&i| kinds[i] == IndexerKind::Full).collect();
    assert_eq!(full, [0, 1, 2, 3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43]);
}

#[test]
fn first_sparse_layer_cannot_share_a_selection() {
    let mut kinds = vec!["full"; 45];
    kinds[3] = "shared";
    refused("indexer_types", json!(kinds));
}

#[test]
fn pool_size_has_no_default() {
    let error = error_of(&with_text("index_kpool", Value::Null));
    assert!(matches!(error, ConfigError::Missing { .. }), "{error}");
    assert_eq!(error.key(), Some("text_config.index_kpool"));
}

#[test]
fn unsupported_values_are_named() {
    for (key, value) in [
        ("index_kpool", json!(0)),
        ("index_kpool_compress", json!(false)),
        ("index_kpool_always_select_tail", json!(false)),
        ("qk_rope_head_dim", json!(64)),
        ("q_lora_rank", Value::Null),
        ("num_key_value_heads", json!(8)),
        ("qk_head_dim", json!(320)),
        ("scoring_func", json!("softmax")),
        ("topk_method", json!("greedy")),
        ("moe_router_dtype", json!("bfloat16")),
        ("hidden_act", json!("gelu")),
        ("attention_bias", json!(true)),
        ("mla_use_nope", json!(false)),
        ("mhc", json!(false)),
        ("tie_word_embeddings", json!(true)),
        ("dtype", json!("float16")),
        ("num_nextn_predict_layers", json!(2)),
        ("n_group", json!(7)),
        ("topk_group", json!(2)),
        ("num_experts_per_tok", json!(289)),
        ("layer_types", json!(vec!["linear_attention"; 44])),
        ("mlp_layer_types", json!(vec!["dense"; 46])),
        ("indexer_types", json!(vec!["full"; 44])),
        ("eos_token_id", json!([154_880])),
        ("rms_norm_eps", json!(0.0)),
        ("swiglu_limit", json!(-1.0)),
        ("hidden_size", json!(1u64 << 40)),
        ("hidden_size", json!(-4096)),
        ("hidden_size", json!("4096")),
        ("hidden_size", json!(4096.5)),
        ("hc_eps", json!("1e-6")),
        ("layer_types", json!(45)),
    ] {
        let shown = value.to_string();
        let message = refused(key, value);
        assert!(message.contains("expected"), "{key} = {shown}: {message}");
    }
    refused("index_topk", json!(2047));
}

#[test]
fn other_parts_of_the_file_are_checked() {
    for (pointer, value, key) in [
        ("/model_type", json!("glm4_moe"), "model_type"),
        ("/image_token_id", Value::Null, "image_token_id"),
        ("/video_end_token_id", json!(1u64 << 33), "video_end_token_id"),
        ("/vision_config/out_hidden_size", json!(1024), "vision_config.out_hidden_size"),
        ("/vision_config/num_heads", json!(7), "vision_config.num_heads"),
        ("/vision_config/depth", Value::Null, "vision_config.depth"),
        ("/vision_config/spatial_merge_size", json!(4), "vision_config.spatial_merge_size"),
        ("/vision_config", json!([]), "vision_config"),
        ("/text_config", json!("x"), "text_config"),
        ("/text_config/linear_attn_config/num_heads", Value::Null, "text_config.linear_attn_config.num_heads"),
        (
            "/text_config/linear_attn_config/gate_lower_bound",
            json!(5.0),
            "text_config.linear_attn_config.gate_lower_bound",
        ),
    ] {
        let mut config = released();
        *config.pointer_mut(pointer).unwrap() = value;
        let error = error_of(&config);
        assert_eq!(error.key(), Some(key), "{error}");
    }
    let mut text_only = released();
    text_only["vision_config"] = Value::Null;
    assert_eq!(Config::from_value(&text_only).unwrap().media, None);
}

#[test]
fn stop_tokens_are_kept_all_and_once() {
    let config = with_text("eos_token_id", json!([5, 7, 5, 9, 7]));
    assert_eq!(Config::from_value(&config).unwrap().text.eos_token_ids, [5, 7, 9]);
    let config = with_text("eos_token_id", json!(5));
    assert_eq!(Config::from_value(&config).unwrap().text.eos_token_ids, [5]);
    let mut above = micro();
    above["text_config"]["eos_token_id"] = Value::Null;
    assert_eq!(Config::from_value(&above).unwrap().text.eos_token_ids, [3206, 3213, 3215]);
}

#[test]
fn quantization_block_is_kept_as_found() {
    let mut config = released();
    config["quantization_config"] = json!({"quant_method": "compressed-tensors"});
    assert_eq!(Config::from_value(&config).unwrap().quantization, Some(json!({"quant_method": "compressed-tensors"})));
}

#[test]
fn text_that_is_no_configuration() {
    for text in ["", "{", "[]", "null", "{\"model_type\": 3}", "{}"] {
        let message = Config::parse(text).unwrap_err().to_string();
        assert!(message.contains("config.json"), "{text}: {message}");
    }
    let error = Config::from_file("/nonexistent/config.json").unwrap_err();
    assert!(error.to_string().contains("/nonexistent/config.json"), "{error}");
}
