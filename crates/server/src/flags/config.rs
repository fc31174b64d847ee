//! Settings as a typed configuration.

use std::time::Duration;

use glimmer_text::UnknownTools;
use serde_json::{Map, Value};

use super::parse::Settings;
use super::{FlagError, Speculative, conflict};
use crate::app::Options;
use crate::tls::TlsFiles;

/// Everything that the flags say.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// Model directory; none serves the embedded model.
    pub model: Option<String>,
    /// Names for clients.
    pub served_names: Vec<String>,
    /// Directory of the tokenizer.
    pub tokenizer: Option<String>,
    /// Invent the weights.
    pub dummy_weights: bool,
    /// Decoder layers of invented weights; `None` is all.
    pub dummy_layers: Option<usize>,
    /// Invent INT4 experts whatever the configuration says.
    pub dummy_int4: bool,
    /// Seed of the engine.
    pub seed: i64,
    /// Most tokens of prompt and answer; `None` is the model's.
    pub max_model_len: Option<MaxModelLen>,
    /// Take a longer one as the model's.
    pub allow_long: bool,
    /// Leave the vision tower out.
    pub text_only: bool,
    /// Where sampling defaults come from.
    pub generation_config: GenerationConfig,
    /// Sampling defaults over those.
    pub generation_overrides: Map<String, Value>,
    /// Epsilon of the vision tower's norms.
    pub vision_norm_eps: Option<f64>,
    /// Share the indexer's choice among draft steps; `None` leaves it to the model.
    pub mtp_index_sharing: Option<bool>,
    /// Address.
    pub host: Option<String>,
    /// Port.
    pub port: u16,
    /// Certificates.
    pub tls: Option<TlsFiles>,
    /// Serve no HTTP.
    pub headless: bool,
    /// Where to compute: `auto`, `cpu` or `cuda`.
    pub device: String,
    /// Library of the kernel compiler.
    pub nvrtc: Option<String>,
    /// Folder of compiled kernels.
    pub kernel_cache: Option<String>,
    /// Ranks.
    pub tensor_parallel: u32,
    /// Keep experts whole.
    pub expert_parallel: bool,
    /// Hosts.
    pub nodes: u32,
    /// This host.
    pub node_rank: u32,
    /// Where hosts meet.
    pub master: (String, u16),
    /// Address of this host.
    pub host_ip: Option<String>,
    /// Most running sequences.
    pub max_num_seqs: Option<u64>,
    /// Whether somebody asked for just that many.
    pub max_num_seqs_given: bool,
    /// Most tokens of a step.
    pub max_num_batched_tokens: Option<u64>,
    /// Tokens of a page, a multiple of 64.
    pub page_tokens: Option<u64>,
    /// Share of the memory.
    pub memory_share: f64,
    /// The same, if somebody asked for it.
    pub memory_share_given: Option<f64>,
    /// Bytes of the cache.
    pub cache_bytes: Option<u64>,
    /// Element type of the cache; `auto` is bf16.
    pub cache_dtype: String,
    /// Element type of the recurrent state; `auto` is f32.
    pub state_dtype: String,
    /// Reuse common prefixes.
    pub prefix_caching: bool,
    /// Saved recurrent states.
    pub state_checkpoints: u64,
    /// Most tokens of one long prompt in a step.
    pub long_prefill_tokens: Option<u64>,
    /// Limit of waiting requests.
    pub max_queued_requests: Option<u64>,
    /// Limit of waiting prompt tokens.
    pub max_queued_tokens: Option<u64>,
    /// Steps between admissions.
    pub prefill_interval: u64,
    /// Time between tokens that prefills should keep.
    pub itl_target: Option<Duration>,
    /// Long prompts at once.
    pub long_prefills: u64,
    /// Longest prompt of the short lane.
    pub short_prompt_tokens: u64,
    /// Most tokens of a captured step.
    pub graph_tokens: Option<u64>,
    /// Sizes of captured steps.
    pub graph_sizes: Option<Vec<u64>>,
    /// Which steps are captured.
    pub graph_mode: String,
    /// Drafts.
    pub speculative: Option<Speculative>,
    /// Chat template, file or text.
    pub chat_template: Option<String>,
    /// A step that takes longer is stuck.
    pub step_timeout: Duration,
    /// Time for ranks to find each other.
    pub ready_timeout: Duration,
    /// Write every step to this file.
    pub record_steps: Option<String>,
    /// Threads of the CPU; `None` is one a core.
    pub threads: Option<usize>,
    /// Least level of log lines.
    pub log_level: String,
    /// Log lines as JSON objects.
    pub log_json: bool,
    /// What [`ServeConfig::resolve`] let pass.
    pub warnings: Vec<String>,
    /// Print the settings and exit.
    pub dry_run: bool,
    /// The front end.
    pub options: Options,
}

/// Context length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxModelLen {
    /// As many tokens as fit.
    WhatFits,
    /// This many.
    Tokens(usize),
}

/// Where sampling defaults come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GenerationConfig {
    /// The model's `generation_config.json`.
    Model,
    /// Nowhere: values that change nothing.
    Neutral,
    /// The file in this directory.
    Directory(String),
}

/// Cache pages hold a multiple of this many tokens.
const PAGE: u64 = 64;

impl ServeConfig {
    /// Makes settings a configuration and checks the rules between flags.
    ///
    /// # Errors
    /// [`FlagError::Conflict`].
    pub fn new(settings: &Settings) -> Result<Self, FlagError> {
        let read = Reader(settings);
        let speculative = settings.value("speculative-config").as_object().map(Speculative::read).transpose()?;
        let graph_config = read.map("compilation-config");
        let config = Self {
            model: read.text("model"),
            served_names: read.texts("served-model-name"),
            tokenizer: read.text("tokenizer"),
            dummy_weights: settings.value("load-format") == "dummy",
            dummy_layers: read.count("dummy-layers").and_then(|count| usize::try_from(count).ok()),
            dummy_int4: settings.is_given("quantization"),
            seed: settings.value("seed").as_i64().unwrap_or(0),
            max_model_len: settings.value("max-model-len").as_i64().map(|tokens| match usize::try_from(tokens) {
                Ok(tokens) => MaxModelLen::Tokens(tokens),
                Err(_) => MaxModelLen::WhatFits,
            }),
            allow_long: read.switch("allow-long-max-model-len"),
            text_only: read.switch("language-model-only"),
            generation_config: match read.word("generation-config").as_str() {
                "auto" => GenerationConfig::Model,
                "vllm" => GenerationConfig::Neutral,
                directory => GenerationConfig::Directory(directory.to_owned()),
            },
            generation_overrides: read.map("override-generation-config"),
            vision_norm_eps: settings.value("vision-norm-eps").as_f64(),
            mtp_index_sharing: match read.word("mtp-index-sharing").as_str() {
                "on" => Some(true),
                "off" => Some(false),
                _ => None,
            },
            host: read.text("host"),
            port: u16::try_from(read.count("port").unwrap_or(8000)).unwrap_or(8000),
            tls: read.text("ssl-certfile").zip(read.text("ssl-keyfile")).map(|(certificates, key)| TlsFiles {
                certificates,
                key,
                client_authorities: read.text("ssl-ca-certs").filter(|_| read.count("ssl-cert-reqs") > Some(0)),
                clients_must: read.count("ssl-cert-reqs") == Some(2),
            }),
            headless: read.switch("headless"),
            device: read.word("device"),
            nvrtc: read.text("nvrtc"),
            kernel_cache: read.text("kernel-cache"),
            tensor_parallel: read.small("tensor-parallel-size"),
            expert_parallel: read.switch("enable-expert-parallel"),
            nodes: read.small("nnodes"),
            node_rank: read.small("node-rank"),
            master: (read.word("master-addr"), u16::try_from(read.small("master-port")).unwrap_or(u16::MAX)),
            host_ip: read.text("host-ip"),
            max_num_seqs: read.count("max-num-seqs"),
            max_num_seqs_given: settings.is_given("max-num-seqs"),
            max_num_batched_tokens: read.count("max-num-batched-tokens"),
            page_tokens: read.count("block-size").map(|tokens| tokens.next_multiple_of(PAGE)),
            memory_share: settings.value("gpu-memory-utilization").as_f64().unwrap_or(1.0),
            memory_share_given: settings
                .value("gpu-memory-utilization")
                .as_f64()
                .filter(|_| settings.is_given("gpu-memory-utilization")),
            cache_bytes: read.count("kv-cache-memory-bytes"),
            cache_dtype: match read.word("kv-cache-dtype").as_str() {
                "bfloat16" => "auto".to_owned(),
                "fp8" => "fp8_e4m3".to_owned(),
                other => other.to_owned(),
            },
            state_dtype: read.word("mamba-ssm-cache-dtype"),
            prefix_caching: read.switch("enable-prefix-caching"),
            state_checkpoints: read.count("state-checkpoints").unwrap_or(0),
            long_prefill_tokens: read.count("long-prefill-token-threshold").filter(|&tokens| tokens > 0),
            max_queued_requests: read.count("max-num-queued-reqs"),
            max_queued_tokens: read.count("max-num-queued-tokens"),
            prefill_interval: read.count("prefill-schedule-interval").unwrap_or(1),
            itl_target: read.seconds("itl-target-ms").map(|milliseconds| milliseconds / 1000),
            long_prefills: read.count("max-concurrent-long-prefills").unwrap_or(1),
            short_prompt_tokens: read.count("short-prompt-tokens").unwrap_or(0),
            graph_tokens: read.count("max-cudagraph-capture-size"),
            graph_sizes: super::check::graph_sizes(settings, &graph_config)?,
            graph_mode: super::check::graph_mode(&graph_config, read.switch("enforce-eager"))?,
            speculative,
            chat_template: read.text("chat-template"),
            step_timeout: read.seconds("execute-model-timeout").unwrap_or_default(),
            ready_timeout: read.seconds("ready-timeout").unwrap_or_default(),
            record_steps: read.text("record-steps"),
            threads: read.count("threads").and_then(|count| usize::try_from(count).ok()),
            log_level: read.word("uvicorn-log-level"),
            log_json: read.word("log-format") == "json",
            warnings: Vec::new(),
            dry_run: read.switch("dry-run"),
            options: read.options()?,
        };
        super::check::flags(&config, settings)?;
        Ok(config)
    }
}

/// Reads values whose kinds the table has checked.
struct Reader<'s>(&'s Settings);

impl Reader<'_> {
    fn text(&self, name: &str) -> Option<String> {
        self.0.value(name).as_str().map(str::to_owned)
    }

    fn word(&self, name: &str) -> String {
        self.text(name).unwrap_or_default()
    }

    fn texts(&self, name: &str) -> Vec<String> {
        let list = self.0.value(name).as_array();
        list.into_iter().flatten().filter_map(|item| item.as_str().map(str::to_owned)).collect()
    }

    fn switch(&self, name: &str) -> bool {
        self.0.value(name) == true
    }

    fn count(&self, name: &str) -> Option<u64> {
        self.0.value(name).as_u64()
    }

    fn small(&self, name: &str) -> u32 {
        self.count(name).and_then(|count| u32::try_from(count).ok()).unwrap_or(0)
    }

    fn map(&self, name: &str) -> Map<String, Value> {
        self.0.value(name).as_object().cloned().unwrap_or_default()
    }

    /// A span of time; zero is none.
    fn seconds(&self, name: &str) -> Option<Duration> {
        let seconds = self.0.value(name).as_f64().filter(|&seconds| seconds > 0.0)?;
        Duration::try_from_secs_f64(seconds).ok()
    }

    fn parser(&self, name: &str) -> bool {
        !matches!(self.word(name).as_str(), "" | "none")
    }

    fn options(&self) -> Result<Options, FlagError> {
        let limits = self.map("limit-mm-per-prompt");
        let limit = |key: &str| match limits.get(key) {
            None => Ok(Options::default().max_images),
            Some(value) => match value.as_u64().or_else(|| value["count"].as_u64()) {
                Some(count) => Ok(usize::try_from(count).unwrap_or(usize::MAX)),
                None => conflict(format!("--limit-mm-per-prompt: {key} must be a whole number, found {value}")),
            },
        };
        if let Some(key) = limits.keys().find(|key| !["image", "video"].contains(&key.as_str())) {
            return conflict(format!("--limit-mm-per-prompt: unknown key {key:?}; known are image and video"));
        }
        let budget = self.count("default-thinking-budget");
        Ok(Options {
            api_keys: self.texts("api-key"),
            allowed_origins: self.texts("allowed-origins"),
            allowed_methods: self.texts("allowed-methods"),
            allowed_headers: self.texts("allowed-headers"),
            allow_credentials: self.switch("allow-credentials"),
            response_role: self.word("response-role"),
            reasoning: self.parser("reasoning-parser"),
            tools: self.parser("tool-call-parser"),
            auto_tool_choice: self.switch("enable-auto-tool-choice"),
            unknown_tools: match self.word("unknown-tools").as_str() {
                "drop" => UnknownTools::Drop,
                _ => UnknownTools::Forward,
            },
            answer_without_think_is_content: self.word("answer-without-think") == "content",
            template_kwargs: self.map("default-chat-template-kwargs"),
            effort_map: self.map("reasoning-effort-map"),
            thinking_budget: budget.map(|budget| u32::try_from(budget).unwrap_or(u32::MAX)),
            max_logprobs: self.count("max-logprobs").map(|most| u32::try_from(most).unwrap_or(u32::MAX)),
            max_images: limit("image")?,
            max_videos: limit("video")?,
            media_domains: self.texts("allowed-media-domains"),
            max_body_bytes: self.count("max-request-body-bytes").map_or(usize::MAX, |bytes| bytes as usize),
            stream_interval: self.small("stream-interval"),
            keep_alive: self.seconds("sse-keep-alive-interval"),
            prompt_tokens_details: self.switch("enable-prompt-tokens-details"),
            force_include_usage: self.switch("enable-force-include-usage"),
            request_id_headers: self.switch("enable-request-id-headers"),
            log_requests: self.switch("enable-log-requests"),
            log_outputs: self.switch("enable-log-outputs"),
            log_stats: !self.switch("disable-log-stats"),
            priority_policy: self.word("scheduling-policy") == "priority",
            development: self.switch("enable-dev-routes"),
            shutdown_timeout: self.seconds("shutdown-timeout").unwrap_or_default(),
            ..Options::default()
        })
    }
}
