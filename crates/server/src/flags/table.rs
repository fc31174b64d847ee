//! Every flag, once.

/// A flag.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    /// Name without dashes.
    pub name: &'static str,
    /// Other spellings, with their dashes.
    pub aliases: &'static [&'static str],
    /// What it takes.
    pub kind: Kind,
    /// Default as JSON text; `null` is none.
    pub default: &'static str,
    /// What it does.
    pub help: &'static str,
    /// Whether it means something on a GPU only.
    pub gpu_only: bool,
}

/// What a flag takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// `--x` or `--no-x`.
    Switch,
    /// Text.
    Text,
    /// One or more texts.
    Texts,
    /// A whole number in a range.
    Int(i64, i64),
    /// A whole number in a range that may be written as `64k` or `1G`; `auto` is -1 where -1 is in the range.
    Size(i64, i64),
    /// A number: least, most, and whether the least itself is excluded.
    Number(f64, f64, bool),
    /// A JSON object.
    Json,
    /// A JSON list of texts, or one text.
    JsonTexts,
    /// One of these words.
    Word(&'static [&'static str]),
}

const MOST: i64 = i64::MAX;

/// Names of the reference's attention backends; they are taken as `auto`.
pub const FOREIGN_BACKENDS: [&str; 4] =
    ["FLASH_ATTN_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM90", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE"];

/// Names of parsers; all mean the one parser that there is.
pub const PARSERS: [&str; 4] = ["", "glm45", "glm47", "none"];

const fn flag(name: &'static str, kind: Kind, default: &'static str, help: &'static str) -> Flag {
    Flag { name, aliases: &[], kind, default, help, gpu_only: false }
}

const fn gpu(name: &'static str, kind: Kind, default: &'static str, help: &'static str) -> Flag {
    Flag { name, aliases: &[], kind, default, help, gpu_only: true }
}

const fn alias(flag: Flag, aliases: &'static [&'static str]) -> Flag {
    Flag { aliases, ..flag }
}

use Kind::{Int, Json, JsonTexts, Number, Size, Switch, Text, Texts, Word};

/// The table.
pub const FLAGS: &[Flag] = &[
    // The model.
    flag("model", Text, "null", "model directory; also the first argument without dashes"),
    flag("served-model-name", Texts, "null", "names under which clients may ask for the model; the first is echoed"),
    flag("tokenizer", Text, "null", "directory of the tokenizer, if it is not the model's"),
    flag("trust-remote-code", Switch, "false", "accepted; no code of a model is ever run"),
    flag("dtype", Word(&["auto", "bfloat16"]), "\"auto\"", "type of the activations' checkpoint"),
    flag("load-format", Word(&["auto", "dummy", "safetensors"]), "\"auto\"", "read the weights, or invent them"),
    flag("dummy-layers", Int(1, 1024), "null", "decoder layers of invented weights: the first ones; all if absent"),
    alias(
        flag("quantization", Word(&["compressed-tensors"]), "null", "invent INT4 experts; else what config.json says"),
        &["-q"],
    ),
    flag("seed", Int(0, MOST), "0", "seed of requests that bring none"),
    flag("max-model-len", Size(-1, MOST), "null", "most tokens of prompt and answer; auto is what fits"),
    flag("allow-long-max-model-len", Switch, "false", "take a length above the model's as the model's"),
    flag("language-model-only", Switch, "false", "leave the vision tower out"),
    flag("limit-mm-per-prompt", Json, "null", "most images and videos in a request, as {\"image\": 4, \"video\": 1}"),
    flag("generation-config", Text, "\"auto\"", "sampling defaults: auto (the model's), vllm (neutral) or a directory"),
    flag("override-generation-config", Json, "{}", "sampling defaults over those"),
    flag("vision-norm-eps", Number(0.0, 1.0, true), "null", "epsilon of the vision tower's norms"),
    flag("mtp-index-sharing", Word(&["auto", "on", "off"]), "\"auto\"", "share the indexer's choice among draft steps"),
    // Addresses.
    flag("host", Text, "null", "address to listen on; all interfaces if absent"),
    flag("port", Int(1, 65_535), "8000", "port to listen on"),
    flag("root-path", Text, "null", "path that a proxy puts before every route"),
    flag("api-key", Texts, "null", "keys that clients must show"),
    flag("allowed-origins", JsonTexts, "[\"*\"]", "origins whose browsers may call"),
    flag("allowed-methods", JsonTexts, "[\"*\"]", "methods that they may use"),
    flag("allowed-headers", JsonTexts, "[\"*\"]", "headers that they may send"),
    flag("allow-credentials", Switch, "false", "let browsers send credentials"),
    flag("ssl-keyfile", Text, "null", "key of the server's certificate"),
    flag("ssl-certfile", Text, "null", "the server's certificate"),
    flag("ssl-ca-certs", Text, "null", "authorities whose clients may connect"),
    flag("ssl-cert-reqs", Int(0, 2), "0", "certificates of clients: 0 not asked for, 1 checked if shown, 2 required"),
    flag(
        "allowed-media-domains",
        JsonTexts,
        "[]",
        "hosts from which images may be fetched by https; * is every public one",
    ),
    flag("max-request-body-bytes", Size(1, MOST), "67108864", "longest body of a request"),
    flag("headless", Switch, "false", "serve no HTTP: a rank of another host's server"),
    flag("api-server-count", Int(0, 1), "null", "front ends; there is one"),
    flag(
        "shutdown-timeout",
        Number(0.0, 86_400.0, false),
        "30",
        "seconds that running requests get when the server stops",
    ),
    flag("ready-timeout", Number(0.0, 86_400.0, true), "600", "seconds that ranks wait for each other at the start"),
    flag("execute-model-timeout", Number(0.0, 86_400.0, true), "300", "seconds after which a step counts as stuck"),
    // Devices and ranks.
    flag("device", Word(&["auto", "cpu", "cuda"]), "\"auto\"", "where to compute"),
    gpu("nvrtc", Text, "null", "library of the kernel compiler, libnvrtc.so.13; where the loader has it if absent"),
    gpu("kernel-cache", Text, "null", "folder of compiled kernels; in the user's cache folder if absent"),
    flag("threads", Int(1, 1024), "null", "threads of the CPU; one a core if absent"),
    alias(flag("tensor-parallel-size", Int(1, 1024), "1", "ranks that share the model"), &["-tp"]),
    alias(flag("enable-expert-parallel", Switch, "false", "keep experts whole, spread over the ranks"), &["-ep"]),
    flag("data-parallel-size", Int(1, 1024), "1", "replicas in one server; only 1"),
    flag(
        "distributed-executor-backend",
        Word(&["mp", "uni", "ray"]),
        "null",
        "how ranks are started; mp and uni are the same",
    ),
    alias(flag("nnodes", Int(1, 1024), "1", "hosts"), &["-n"]),
    alias(flag("node-rank", Int(0, 1023), "0", "number of this host"), &["-r"]),
    flag("master-addr", Text, "\"127.0.0.1\"", "address where hosts meet"),
    flag("master-port", Int(1, 65_535), "29501", "port where hosts meet"),
    flag("host-ip", Text, "null", "address of this host towards the others"),
    // Memory and scheduling.
    flag("max-num-seqs", Size(1, MOST), "null", "most running sequences"),
    flag("max-num-batched-tokens", Size(1, MOST), "null", "most tokens of a step"),
    flag("block-size", Int(1, 1 << 20), "null", "tokens of a cache page; rounded up to a multiple of 64"),
    flag(
        "gpu-memory-utilization",
        Number(0.0, 1.0, true),
        "0.92",
        "share of the memory to use; on the CPU only when given, where the cache else takes 4 GiB",
    ),
    alias(
        flag(
            "kv-cache-memory-bytes",
            Size(1, MOST),
            "null",
            "bytes of the cache on each device, instead of that share",
        ),
        &["--kv-cache-memory"],
    ),
    flag(
        "kv-cache-dtype",
        Word(&["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "float32"]),
        "\"auto\"",
        "element type of latents and index keys: auto and bfloat16 are 16 bits on a GPU, float32 is exact",
    ),
    flag(
        "mamba-ssm-cache-dtype",
        Word(&["auto", "float32", "bfloat16"]),
        "\"auto\"",
        "element type of the recurrent state",
    ),
    flag("enable-prefix-caching", Switch, "true", "reuse what prompts have in common"),
    flag("state-checkpoints", Int(0, 1 << 20), "64", "saved recurrent states for that"),
    flag("enable-chunked-prefill", Switch, "true", "spread long prompts over steps"),
    flag("long-prefill-token-threshold", Size(0, MOST), "0", "most tokens of one long prompt in a step; 0 is no limit"),
    flag("scheduling-policy", Word(&["fcfs", "priority"]), "\"fcfs\"", "order of waiting requests"),
    flag("max-num-queued-reqs", Size(1, MOST), "null", "waiting requests above which new ones are refused"),
    flag("max-num-queued-tokens", Size(1, MOST), "null", "waiting prompt tokens above which requests are refused"),
    flag("prefill-schedule-interval", Int(1, 1 << 20), "1", "steps between admissions while sequences decode"),
    flag("itl-target-ms", Number(0.0, 1e6, false), "100", "time between tokens that prefills should keep; 0 is off"),
    flag("max-concurrent-long-prefills", Int(1, 1 << 20), "1", "long prompts computed at once"),
    flag("short-prompt-tokens", Size(1, MOST), "8192", "longest prompt of the short lane"),
    gpu("max-cudagraph-capture-size", Int(1, 1 << 20), "null", "most tokens of a captured step"),
    gpu("cuda-graph-sizes", Texts, "null", "sizes of captured steps"),
    alias(gpu("compilation-config", Json, "{}", "cudagraph_mode and cudagraph_capture_sizes are read"), &["-cc"]),
    gpu("optimization-level", Int(0, 3), "2", "accepted as -O0 to -O3"),
    gpu("enforce-eager", Switch, "false", "capture no graphs"),
    gpu("attention-backend", Text, "\"auto\"", "attention kernel"),
    flag("swap-space", Number(0.0, 1e9, false), "null", "accepted and ignored"),
    flag("record-steps", Text, "null", "write every step to this file"),
    // Drafts.
    alias(
        flag("speculative-config", Json, "null", "drafter, as {\"method\": \"mtp\", \"num_speculative_tokens\": 2}"),
        &["-sc"],
    ),
    // Chat.
    flag("chat-template", Text, "null", "file of the chat template, or the template in one line"),
    flag(
        "chat-template-content-format",
        Word(&["auto", "string", "openai"]),
        "\"auto\"",
        "how the template takes content",
    ),
    flag("default-chat-template-kwargs", Json, "{}", "variables of the template below those of requests"),
    flag("trust-request-chat-template", Switch, "false", "accepted; requests bring no templates"),
    flag("response-role", Text, "\"assistant\"", "role of answers"),
    flag("reasoning-parser", Word(&PARSERS), "\"\"", "separate reasoning from content"),
    flag("tool-call-parser", Word(&PARSERS), "\"\"", "recognise tool calls"),
    flag("enable-auto-tool-choice", Switch, "false", "let the model decide whether to call a tool"),
    flag("tool-strict-level", Text, "null", "accepted: calls are constrained to the declared names and keys"),
    flag(
        "unknown-tools",
        Word(&["forward", "drop"]),
        "\"forward\"",
        "calls of tools that the request does not declare",
    ),
    flag(
        "answer-without-think",
        Word(&["content", "reasoning"]),
        "\"content\"",
        "what an answer is that never closed its reasoning",
    ),
    flag("reasoning-effort-map", Json, "{}", "renames values of reasoning_effort"),
    flag("default-thinking-budget", Size(0, MOST), "null", "tokens of reasoning of requests without a budget"),
    flag("max-logprobs", Int(-1, MOST), "20", "most log-probabilities of a token; -1 is all"),
    // Streams and logs.
    flag("stream-interval", Int(1, 1 << 20), "1", "tokens of a stream's event"),
    flag(
        "sse-keep-alive-interval",
        Number(0.0, 86_400.0, false),
        "15",
        "seconds of silence before a comment; 0 is off",
    ),
    flag("enable-prompt-tokens-details", Switch, "false", "report cached tokens"),
    flag("enable-force-include-usage", Switch, "false", "end every stream with the usage"),
    flag("enable-server-load-tracking", Switch, "false", "accepted: /load always counts"),
    flag("enable-request-id-headers", Switch, "false", "give every response an x-request-id"),
    flag("enable-log-requests", Switch, "false", "log every request"),
    flag("enable-log-outputs", Switch, "false", "log every answer"),
    flag("disable-log-stats", Switch, "false", "do not log throughput"),
    flag(
        "uvicorn-log-level",
        Word(&["critical", "error", "warning", "info", "debug", "trace"]),
        "\"info\"",
        "least level of log lines",
    ),
    flag("log-format", Word(&["text", "json"]), "\"text\"", "log lines for people, or one JSON object a line"),
    flag("enable-dev-routes", Switch, "false", "offer /reset_prefix_cache"),
    flag("config", Text, "null", "YAML file of flags; the command line wins"),
    flag("dry-run", Switch, "false", "print every setting with its origin and exit"),
];

/// Environment variables that set a flag, read below the command line and the configuration file.
pub const ENVIRONMENT: &[(&str, &str)] = &[
    ("GLIMMER_API_KEY", "api-key"),
    ("VLLM_API_KEY", "api-key"),
    ("GLIMMER_READY_TIMEOUT", "ready-timeout"),
    ("VLLM_ENGINE_READY_TIMEOUT_S", "ready-timeout"),
    ("GLIMMER_EXECUTE_MODEL_TIMEOUT", "execute-model-timeout"),
    ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "execute-model-timeout"),
    ("GLIMMER_ALLOW_LONG_MAX_MODEL_LEN", "allow-long-max-model-len"),
    ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "allow-long-max-model-len"),
    ("GLIMMER_HOST_IP", "host-ip"),
    ("VLLM_HOST_IP", "host-ip"),
];

/// Finds a flag by its name without dashes.
#[must_use]
pub fn find(name: &str) -> Option<&'static Flag> {
    FLAGS.iter().find(|flag| flag.name == name)
}
