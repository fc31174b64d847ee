//! Published commands, and the rules between flags.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

use std::path::Path;

use glimmer_server::flags::config::MaxModelLen;
use glimmer_server::flags::speculative::Method;
use glimmer_server::flags::{Device, FlagError, ModelShape, ServeConfig, Settings};
use serde_json::Value;

fn recipe(name: &str) -> Vec<String> {
    let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/recipes"));
    let text = std::fs::read_to_string(dir.join(name)).unwrap();
    text.lines().map(str::to_owned).collect()
}

fn parse(arguments: &[String]) -> Result<(ServeConfig, Settings), FlagError> {
    let settings = Settings::parse(arguments, &|_| None, &|path| std::fs::read_to_string(path))?;
    Ok((ServeConfig::new(&settings)?, settings))
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// The released model.
fn released() -> ModelShape {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/glm-5.3-flash/config.json");
    let config: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let number = |key: &str| config["text_config"][key].as_u64().unwrap();
    ModelShape {
        attention_heads: number("num_attention_heads") as u32,
        routed_experts: number("n_routed_experts") as u32,
        max_positions: number("max_position_embeddings") as usize,
    }
}

#[test]
fn every_recipe_parses_and_resolves() {
    let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/recipes"));
    let mut count = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if !name.ends_with(".args") {
            continue;
        }
        count += 1;
        let (mut config, mut settings) = parse(&recipe(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(
            config.model.is_some()
                && config.options.reasoning
                && config.options.tools
                && config.options.auto_tool_choice
        );
        let gpu = Device::Cuda { memory_gib: 140.0, count: 8 };
        for device in [Device::Cpu, gpu] {
            config.resolve(&mut settings, &released(), device).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        let notes = config.notes(&settings, Device::Cpu);
        assert!(notes.iter().any(|note| note.contains("--trust-remote-code is accepted")), "{name}: {notes:?}");
    }
    assert_eq!(count, 9);
}

#[test]
fn recipes_mean_what_they_say() {
    let (config, settings) = parse(&recipe("h200-tp2-1m.args")).unwrap();
    assert_eq!(config.model.as_deref(), Some("/models/glm53-flash-w4a16-mtp"));
    assert_eq!(config.served_names, ["glm53-w4"]);
    assert_eq!((config.tensor_parallel, config.expert_parallel, config.prefix_caching), (2, true, false));
    assert_eq!(config.max_model_len, Some(MaxModelLen::Tokens(1_048_576)));
    assert_eq!(
        (config.max_num_seqs, config.max_num_batched_tokens, config.graph_tokens),
        (Some(16), Some(4096), Some(64))
    );
    assert!((config.memory_share - 0.95).abs() < 1e-9);
    let drafts = config.speculative.clone().unwrap();
    assert_eq!((drafts.method, drafts.depth), (Method::Mtp, 2));
    let notes = config.notes(&settings, Device::Cpu);
    assert!(notes.contains(&"--max-cudagraph-capture-size has no effect on the CPU".to_owned()), "{notes:?}");

    let (config, settings) = parse(&recipe("spark-2node-rank0.args")).unwrap();
    assert_eq!((config.nodes, config.node_rank, config.master), (2, 0, ("127.0.0.1".to_owned(), 29_521)));
    assert_eq!(
        (config.cache_bytes, config.cache_dtype.as_str(), config.page_tokens),
        (Some(9_663_676_416), "fp8_e4m3", Some(2304))
    );
    assert_eq!(config.graph_sizes, Some(vec![1, 2, 4, 8, 16, 24, 32]));
    assert_eq!(config.options.template_kwargs["enable_thinking"], true);
    let drafts = config.speculative.unwrap();
    assert_eq!(
        (drafts.method, drafts.depth, drafts.model.as_deref()),
        (Method::DFlash, 7, Some("/models/dflash2-draft"))
    );
    assert_eq!(settings.get("kv-cache-memory-bytes").unwrap().origin.to_string(), "command line");

    let (config, _) = parse(&recipe("spark-2node-rank1.args")).unwrap();
    assert_eq!((config.headless, config.graph_mode.as_str(), config.node_rank), (true, "NONE", 1));
}

#[test]
fn flags_that_do_not_go_together() {
    for (flags, needle) in [
        ("--enable-auto-tool-choice", "error: --enable-auto-tool-choice requires --tool-call-parser"),
        ("--enable-auto-tool-choice --tool-call-parser none", "requires --tool-call-parser"),
        ("--data-parallel-size 2", "start one server for each replica"),
        ("--distributed-executor-backend ray", "ray is not supported"),
        ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill is not supported"),
        ("--nnodes 2 --node-rank 2 -tp 2", "--node-rank 2 must be below --nnodes 2"),
        ("--nnodes 2 -tp 3", "must be a multiple of --nnodes 2"),
        ("--headless --api-server-count 1", "excludes --api-server-count"),
        ("--enable-log-outputs", "requires --enable-log-requests"),
        (
            "--max-num-seqs 10 --max-num-batched-tokens 9",
            "--max-num-batched-tokens 9 must not be below --max-num-seqs 10",
        ),
        ("--attention-backend TRITON", "--attention-backend TRITON is unknown"),
        (
            "--max-cudagraph-capture-size 8 --compilation-config {\"cudagraph_capture_sizes\":[1,4]}",
            "disagrees with the largest",
        ),
        ("--compilation-config {\"cudagraph_mode\":\"HALF\"}", "must be one of NONE, PIECEWISE"),
        ("--compilation-config {\"cudagraph_capture_sizes\":[]}", "must be positive numbers"),
        ("--speculative-config {\"method\":\"mtp\"}", "num_speculative_tokens is missing"),
        ("--limit-mm-per-prompt {\"audio\":1}", "unknown key \"audio\""),
        ("--limit-mm-per-prompt {\"image\":\"x\"}", "image must be a whole number"),
    ] {
        let error = parse(&words(flags)).err().unwrap_or_else(|| panic!("{flags} passes"));
        let text = error.to_string();
        assert!(text.contains(needle) && text.starts_with("error: ") && !text.contains('\n'), "{text}");
        assert_eq!(error.exit_code(), 1);
    }
}

#[cfg(not(feature = "tls"))]
#[test]
fn encryption_is_refused_where_it_is_not_built_in() {
    for flags in ["--ssl-keyfile k", "--ssl-certfile c", "--ssl-ca-certs a", "--allowed-media-domains [\"a.example\"]"]
    {
        let error = parse(&words(flags)).err().unwrap_or_else(|| panic!("{flags} passes"));
        let name = words(flags).swap_remove(0);
        assert!(
            error.to_string().contains(&format!("{name}: this program is built without the feature tls")),
            "{error}"
        );
    }
}

#[cfg(feature = "tls")]
#[test]
fn a_certificate_needs_its_key() {
    for flags in ["--ssl-keyfile k", "--ssl-certfile c", "--ssl-ca-certs a"] {
        assert!(parse(&words(flags)).is_err(), "{flags} passes");
    }
    let (config, _) = parse(&words("--ssl-keyfile k --ssl-certfile c --ssl-ca-certs a --ssl-cert-reqs 2")).unwrap();
    assert!(config.tls.unwrap().clients_must);
    let (config, _) = parse(&words("--allowed-media-domains [\"a.example\"]")).unwrap();
    assert_eq!(config.options.media_domains, ["a.example"]);
}

#[test]
fn flags_that_do_not_fit_the_model_or_the_device() {
    let gpu = Device::Cuda { memory_gib: 80.0, count: 4 };
    for (flags, device, needle) in [
        ("-tp 3", gpu, "must divide the model's 64 attention heads"),
        ("-tp 64 -ep", gpu, "must divide the model's"),
        ("-tp 8", gpu, "needs as many GPUs, and 4 are visible"),
        ("--max-model-len 2M", gpu, "is above the model's 1048576 tokens; --allow-long"),
        ("--max-num-batched-tokens 10 --max-num-seqs 10", Device::Cpu, ""),
        ("--max-num-seqs 100000", gpu, ""),
    ] {
        let (mut config, mut settings) = parse(&words(flags)).unwrap();
        match config.resolve(&mut settings, &released(), device) {
            Ok(()) => assert!(needle.is_empty(), "{flags} passes"),
            Err(error) => assert!(!needle.is_empty() && error.to_string().contains(needle), "{error}"),
        }
    }
}

#[test]
fn on_the_cpu_commands_for_gpus_and_larger_models_pass_with_a_warning() {
    for (flags, needle) in [
        ("-tp 3", "--tensor-parallel-size 3 must divide"),
        ("-tp 64 -ep", "must divide the model's"),
        ("--max-model-len 2M", "--max-model-len 2097152 is above the model's 1048576 tokens, which count instead"),
    ] {
        let (mut config, mut settings) = parse(&words(flags)).unwrap();
        config.resolve(&mut settings, &released(), Device::Cpu).unwrap();
        assert!(config.warnings.iter().any(|warning| warning.contains(needle)), "{flags}: {:?}", config.warnings);
        let notes = config.notes(&settings, Device::Cpu);
        assert!(notes.iter().any(|note| note.contains(needle)), "{notes:?}");
        assert_eq!(config.max_model_len, Some(MaxModelLen::Tokens(1_048_576)));
    }
}

#[test]
fn answers_are_taken_apart_unless_somebody_says_otherwise() {
    let parsed = |flags: &str| {
        let mut settings = Settings::parse(&words(flags), &|_| None, &|path| std::fs::read_to_string(path)).unwrap();
        settings.derive_parsers();
        let options = ServeConfig::new(&settings).unwrap().options;
        (options.reasoning, options.tools, options.auto_tool_choice)
    };
    assert_eq!(parsed(""), (true, true, true));
    assert_eq!(parsed("some/model"), (true, true, true));
    assert_eq!(parsed("--tool-call-parser none"), (true, false, false));
    assert_eq!(parsed("--reasoning-parser none --no-enable-auto-tool-choice"), (false, true, false));
}

#[test]
fn defaults_follow_the_device_and_are_shown_with_their_origin() {
    for (device, seqs, tokens, origin) in [
        (Device::Cpu, 128, 2048, "default on the CPU"),
        (Device::Cuda { memory_gib: 24.0, count: 2 }, 256, 2048, "default on this GPU"),
        (Device::Cuda { memory_gib: 80.0, count: 2 }, 1024, 8192, "default on this GPU"),
        (Device::Cuda { memory_gib: 180.0, count: 2 }, 1024, 16_384, "default on this GPU"),
    ] {
        let (mut config, mut settings) = parse(&words("-tp 2 --api-key secret")).unwrap();
        config.resolve(&mut settings, &released(), device).unwrap();
        assert_eq!((config.max_num_seqs, config.max_num_batched_tokens), (Some(seqs), Some(tokens)));
        let shown = settings.describe();
        let line = |name: &str| shown.lines().find(|line| line.starts_with(&format!("{name} "))).unwrap().to_owned();
        assert!(line("--max-num-seqs").ends_with(&format!("{seqs}  ({origin})")), "{shown}");
        assert!(line("--tensor-parallel-size").ends_with("2  (command line)"));
        let (share, cache) = if device == Device::Cpu {
            (
                "none  (of no effect on the CPU unless given)",
                "4294967296  (on the CPU, or what is free if that is less)",
            )
        } else {
            ("0.92  (default)", "none  (default)")
        };
        assert!(line("--gpu-memory-utilization").ends_with(share), "{shown}");
        assert!(line("--kv-cache-memory-bytes").ends_with(cache), "{shown}");
        assert!(line("--max-model-len").ends_with("1048576  (the model's length)"));
        assert!(!shown.contains("secret"));
    }
}

#[test]
fn values_that_would_turn_every_client_away_are_refused() {
    let refused = |flags: &[&str]| {
        let flags: Vec<String> = flags.iter().map(|&flag| flag.to_owned()).collect();
        let settings = Settings::parse(&flags, &|_| None, &|path| std::fs::read_to_string(path));
        settings.and_then(|settings| ServeConfig::new(&settings)).unwrap_err()
    };
    for (value, needle) in [
        ("{\"temperature\": -5}", "temperature must be a number from 0 to 2, found -5"),
        ("{\"temperature\": \"hot\"}", "temperature must be a number from 0 to 2, found \"hot\""),
        ("{\"top_p\": 7, \"zzz\": 1}", "top_p must be a number above 0 and up to 1, found 7"),
        ("{\"top_p\": 0}", "top_p must be"),
        ("{\"top_k\": -2}", "top_k must be a whole number, -1 or 0 (off) or at least 1, found -2"),
        ("{\"min_p\": 1.5}", "min_p must be a number from 0 to 1"),
        ("{\"repetition_penalty\": 0}", "repetition_penalty must be a number above 0"),
        ("{\"max_new_tokens\": 0}", "max_new_tokens must be a whole number, at least 1"),
    ] {
        let error = refused(&["--override-generation-config", value]).to_string();
        assert!(error.contains(needle) && error.contains("--override-generation-config: "), "{error}");
    }
    for flag in ["--api-key", "--served-model-name"] {
        for value in ["", " "] {
            let error = refused(&[flag, value]);
            assert!(
                error.exit_code() == 2 && error.to_string().contains(&format!("{flag} must not be empty")),
                "{error}"
            );
        }
    }
    let unset = Settings::parse(&[], &|name| (name == "VLLM_API_KEY").then(String::new), &|_| Ok(String::new()));
    let error = ServeConfig::new(&unset.unwrap()).unwrap_err().to_string();
    assert!(error.contains("--api-key must not be empty; it comes from: environment VLLM_API_KEY"), "{error}");
}

#[test]
fn what_is_not_read_is_said() {
    let file = "speculative-config: {method: mtp, num_speculative_tokens: 2, model: /d}\n\
                override-generation-config: {zzz: 1, top_k: -1}\n";
    let flags = words("--config f.yaml");
    let mut settings = Settings::parse(&flags, &|_| None, &|_| Ok(file.to_owned())).unwrap();
    let mut config = ServeConfig::new(&settings).unwrap();
    config.resolve(&mut settings, &released(), Device::Cpu).unwrap();
    assert_eq!(config.speculative.as_ref().unwrap().depth, 2);
    let notes = config.notes(&settings, Device::Cpu).join("\n");
    assert!(notes.contains("--override-generation-config: zzz is ignored; known are temperature, top_p"), "{notes}");
    assert!(notes.contains("--speculative-config: model \"/d\" is not read; mtp drafts without one"), "{notes}");
    assert!(!notes.contains("top_k is ignored"), "{notes}");
}
