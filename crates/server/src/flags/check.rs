//! Rules between flags, and between flags and the model.

use serde_json::{Map, Value};

use super::config::MaxModelLen;
use super::generation;
use super::parse::{Setting, Settings};
use super::speculative::Method;
use super::table::{FLAGS, FOREIGN_BACKENDS};
use super::{FlagError, ServeConfig, Speculative, conflict};
use crate::sizing::CPU_DEFAULT;
use crate::tls::WITHOUT;

/// What flags have to fit of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Attention heads, which ranks share.
    pub attention_heads: u32,
    /// Routed experts, which ranks share in expert parallelism.
    pub routed_experts: u32,
    /// Most tokens that the model was made for.
    pub max_positions: usize,
}

/// Where the model will run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Device {
    /// The CPU.
    Cpu,
    /// GPUs of this much memory, so many of them on this host.
    Cuda {
        /// GiB of one.
        memory_gib: f64,
        /// How many.
        count: u32,
    },
}

const GRAPH_MODES: [&str; 5] = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"];

/// The rules between flags alone.
pub(super) fn flags(config: &ServeConfig, settings: &Settings) -> Result<(), FlagError> {
    let world = u64::from(config.tensor_parallel);
    if config.options.auto_tool_choice && !config.options.tools {
        return conflict("--enable-auto-tool-choice requires --tool-call-parser");
    }
    if settings.value("data-parallel-size") != 1 {
        return conflict(
            "--data-parallel-size: only 1 is supported; start one server for each replica and put a balancer before them",
        );
    }
    if settings.value("distributed-executor-backend") == "ray" {
        return conflict("--distributed-executor-backend ray is not supported; mp and uni are");
    }
    if settings.value("enable-chunked-prefill") == false {
        return conflict("--no-enable-chunked-prefill is not supported: a recurrent model prefills in chunks");
    }
    if config.node_rank >= config.nodes {
        return conflict(format!("--node-rank {} must be below --nnodes {}", config.node_rank, config.nodes));
    }
    if world % u64::from(config.nodes) != 0 {
        return conflict(format!("--tensor-parallel-size {world} must be a multiple of --nnodes {}", config.nodes));
    }
    if config.headless && settings.value("api-server-count").as_u64().is_some_and(|count| count > 0) {
        return conflict("--headless serves no HTTP and excludes --api-server-count above 0");
    }
    if config.options.log_outputs && !config.options.log_requests {
        return conflict("--enable-log-outputs requires --enable-log-requests");
    }
    if let (Some(seqs), Some(tokens)) = (config.max_num_seqs, config.max_num_batched_tokens)
        && tokens < seqs
    {
        return conflict(format!("--max-num-batched-tokens {tokens} must not be below --max-num-seqs {seqs}"));
    }
    if let Some(name) = ["dummy-layers", "quantization"].into_iter().find(|name| settings.is_given(name))
        && !config.dummy_weights
    {
        return conflict(format!(
            "--{name} is for --load-format dummy; weights that are read have the layers and the form that config.json says"
        ));
    }
    tls(settings)?;
    let backend = settings.value("attention-backend").as_str().unwrap_or("auto");
    if backend != "auto" && !FOREIGN_BACKENDS.contains(&backend) {
        let known = FOREIGN_BACKENDS.join(", ");
        return conflict(format!(
            "--attention-backend {backend} is unknown; there is auto ({known} are taken as auto)"
        ));
    }
    if settings.value("response-role").as_str().is_none_or(str::is_empty) {
        return conflict("--response-role must not be empty");
    }
    not_empty(settings)?;
    generation::check(&config.generation_overrides)
}

/// Texts that an unset variable of a shell makes empty: without a key the server would look protected and answer nobody.
fn not_empty(settings: &Settings) -> Result<(), FlagError> {
    for name in ["api-key", "served-model-name"] {
        let Some(Setting { value: Value::Array(texts), origin }) = settings.get(name) else { continue };
        if texts.iter().any(|text| text.as_str().is_none_or(|text| text.trim().is_empty())) {
            return Err(FlagError::Usage(format!("--{name} must not be empty; it comes from: {origin}")));
        }
    }
    Ok(())
}

/// Certificates and images by https need the feature, and a certificate its key.
fn tls(settings: &Settings) -> Result<(), FlagError> {
    let files = ["ssl-keyfile", "ssl-certfile", "ssl-ca-certs"];
    let given = files.into_iter().find(|name| settings.is_given(name));
    let domains = settings.value("allowed-media-domains").as_array().is_some_and(|list| !list.is_empty());
    let name = given.or(domains.then_some("allowed-media-domains"));
    if let Some(name) = name.filter(|_| !cfg!(feature = "tls")) {
        return conflict(format!("--{name}: {WITHOUT}"));
    }
    let [key, certificate, authorities] = files.map(|name| settings.is_given(name));
    if key != certificate {
        return conflict("--ssl-keyfile and --ssl-certfile go together; give both, in PEM form");
    }
    if settings.value("ssl-cert-reqs") != 0 && !authorities {
        return conflict("--ssl-cert-reqs needs --ssl-ca-certs, the authorities of the clients' certificates");
    }
    if authorities && !certificate {
        return conflict("--ssl-ca-certs needs --ssl-certfile and --ssl-keyfile");
    }
    Ok(())
}

/// Sizes of captured steps, which must agree with the largest one if both are given.
pub(super) fn graph_sizes(settings: &Settings, config: &Map<String, Value>) -> Result<Option<Vec<u64>>, FlagError> {
    let Some(sizes) = config.get("cudagraph_capture_sizes").filter(|sizes| !sizes.is_null()) else { return Ok(None) };
    let read: Option<Vec<u64>> =
        sizes.as_array().and_then(|list| list.iter().map(|size| size.as_u64().filter(|&size| size > 0)).collect());
    let Some(read) = read.filter(|read| !read.is_empty()) else {
        return conflict(format!(
            "--compilation-config: cudagraph_capture_sizes must be positive numbers, found {sizes}"
        ));
    };
    let largest = read.iter().copied().max();
    let limit = settings.value("max-cudagraph-capture-size").as_u64();
    if limit.is_some() && limit != largest {
        return conflict(format!(
            "--max-cudagraph-capture-size {} disagrees with the largest of cudagraph_capture_sizes, {}",
            limit.unwrap_or(0),
            largest.unwrap_or(0)
        ));
    }
    Ok(Some(read))
}

/// Which steps are captured.
pub(super) fn graph_mode(config: &Map<String, Value>, eager: bool) -> Result<String, FlagError> {
    if eager {
        return Ok("NONE".to_owned());
    }
    let mode = config.get("cudagraph_mode").and_then(Value::as_str).unwrap_or("FULL_AND_PIECEWISE");
    if GRAPH_MODES.contains(&mode) {
        return Ok(mode.to_owned());
    }
    conflict(format!("--compilation-config: cudagraph_mode must be one of {}, found {mode}", GRAPH_MODES.join(", ")))
}

impl ServeConfig {
    /// Fills what depends on the device, and checks the rules between flags, device and model. The settings get the values
    /// with their origin.
    ///
    /// On the CPU a command that was written for GPUs is tried out, perhaps with a smaller model: rules about ranks do not
    /// count there, and a length above the model's is taken as the model's. Each is said with a warning,
    /// [`ServeConfig::warnings`]. Elsewhere such a length has to be allowed.
    ///
    /// # Errors
    /// [`FlagError::Conflict`].
    pub fn resolve(&mut self, settings: &mut Settings, shape: &ModelShape, device: Device) -> Result<(), FlagError> {
        if let Some(problem) = self.rank_problem(shape, device) {
            if device != Device::Cpu {
                return conflict(problem);
            }
            self.warnings.push(format!("{problem}; that is no obstacle on the CPU"));
        }
        if let Some(problem) = self.length_problem(shape) {
            if !self.allow_long && device != Device::Cpu {
                return conflict(format!("{problem}; --allow-long-max-model-len takes it as the model's"));
            }
            self.warnings.push(format!("{problem}, which count instead"));
        }
        // Ranks on the CPU share nothing that they could add to: one computes with all threads.
        let world = if device == Device::Cpu { 1 } else { u64::from(self.tensor_parallel) };
        let (seqs, tokens, reason) = defaults(device, world);
        let seqs = self.max_num_seqs.unwrap_or(seqs);
        let batched = self.max_num_batched_tokens.unwrap_or_else(|| tokens.max(seqs));
        let seqs = if self.max_num_seqs.is_none() { seqs.min(batched) } else { seqs };
        if batched < seqs {
            return conflict(format!("--max-num-batched-tokens {batched} must not be below --max-num-seqs {seqs}"));
        }
        self.max_num_seqs = Some(seqs);
        self.max_num_batched_tokens = Some(batched);
        settings.derive("max-num-seqs", seqs, reason);
        settings.derive("max-num-batched-tokens", batched, reason);
        if device == Device::Cpu && self.memory_share_given.is_none() {
            settings.derive("gpu-memory-utilization", Value::Null, "of no effect on the CPU unless given");
            if self.cache_bytes.is_none() {
                let reason = "on the CPU, or what is free if that is less";
                settings.derive("kv-cache-memory-bytes", CPU_DEFAULT, reason);
            }
        }
        match self.max_model_len {
            None => {
                self.max_model_len = Some(MaxModelLen::Tokens(shape.max_positions));
                settings.derive("max-model-len", shape.max_positions, "the model's length");
            }
            Some(MaxModelLen::Tokens(tokens)) => {
                self.max_model_len = Some(MaxModelLen::Tokens(tokens.min(shape.max_positions)));
            }
            Some(MaxModelLen::WhatFits) => {}
        }
        Ok(())
    }

    /// What stands against the ranks asked for.
    fn rank_problem(&self, shape: &ModelShape, device: Device) -> Option<String> {
        let world = self.tensor_parallel;
        if !shape.attention_heads.is_multiple_of(world) {
            let heads = shape.attention_heads;
            return Some(format!("--tensor-parallel-size {world} must divide the model's {heads} attention heads"));
        }
        if self.expert_parallel && !shape.routed_experts.is_multiple_of(world) {
            return Some(format!(
                "--enable-expert-parallel: --tensor-parallel-size {world} must divide the model's {} experts",
                shape.routed_experts
            ));
        }
        match device {
            Device::Cuda { count, .. } if self.nodes == 1 && world > count => {
                Some(format!("--tensor-parallel-size {world} needs as many GPUs, and {count} are visible"))
            }
            _ => None,
        }
    }

    fn length_problem(&self, shape: &ModelShape) -> Option<String> {
        match self.max_model_len {
            Some(MaxModelLen::Tokens(tokens)) if tokens > shape.max_positions => {
                Some(format!("--max-model-len {tokens} is above the model's {} tokens", shape.max_positions))
            }
            _ => None,
        }
    }

    /// What the user should know about flags that do less than they might expect: one log line each.
    #[must_use]
    pub fn notes(&self, settings: &Settings, device: Device) -> Vec<String> {
        let mut notes = self.warnings.clone();
        if device == Device::Cpu {
            let idle = FLAGS.iter().filter(|flag| flag.gpu_only && settings.is_given(flag.name));
            notes.extend(idle.map(|flag| format!("--{} has no effect on the CPU", flag.name)));
            if self.tensor_parallel > 1 {
                let world = self.tensor_parallel;
                notes.push(format!("--tensor-parallel-size {world}: on the CPU one rank computes with all threads"));
            }
            if self.nodes > 1 {
                notes.push(format!("--nnodes {}: on the CPU this host computes alone", self.nodes));
            }
            if !["auto", "float32"].contains(&self.cache_dtype.as_str()) || self.state_dtype != "auto" {
                notes.push("--kv-cache-dtype, --mamba-ssm-cache-dtype: the CPU keeps its caches in float32".to_owned());
            }
            if let Some(Speculative { method, .. }) = self.speculative.as_ref().filter(|s| s.method != Method::Mtp) {
                notes.push(format!(
                    "--speculative-config: this program has no {} drafter; the model's own MTP layer drafts instead, which \
                     changes the speed and not the answers",
                    method.name()
                ));
            }
        }
        for (name, text) in [
            ("trust-remote-code", "no code of a model is run"),
            ("swap-space", "deprecated and ignored"),
            ("trust-request-chat-template", "requests cannot bring templates"),
            ("tool-strict-level", "calls are constrained to the declared names and keys"),
            ("enable-server-load-tracking", "/load always counts"),
            ("root-path", "routes are served without it; let the proxy strip it"),
        ] {
            if settings.is_given(name) {
                notes.push(format!("--{name} is accepted: {text}"));
            }
        }
        notes.extend(generation::notes(&self.generation_overrides));
        if let Some(Speculative { method, model: Some(model), .. }) =
            self.speculative.as_ref().filter(|s| s.method != Method::DFlash)
        {
            let method = method.name();
            notes.push(format!("--speculative-config: model {model:?} is not read; {method} drafts without one"));
        }
        if let (Some(asked), Some(used)) = (settings.value("block-size").as_u64(), self.page_tokens) {
            notes.push(format!("--block-size {asked}: pages hold {used} tokens"));
        }
        let backend = settings.value("attention-backend").as_str().unwrap_or("auto");
        if FOREIGN_BACKENDS.contains(&backend) {
            notes.push(format!("--attention-backend {backend} is not here; using auto"));
        }
        let honoured = ["cudagraph_mode", "cudagraph_capture_sizes"];
        let ignored = settings.value("compilation-config").as_object().into_iter().flat_map(Map::keys);
        for key in ignored.filter(|key| !honoured.contains(&key.as_str())) {
            notes.push(format!("--compilation-config: {key} is ignored"));
        }
        notes
    }
}

/// Sequences and tokens of a step where the flags do not say.
fn defaults(device: Device, world: u64) -> (u64, u64, &'static str) {
    match device {
        Device::Cpu => (128 * world, (1 << 11) * world, "default on the CPU"),
        Device::Cuda { memory_gib, .. } if memory_gib >= 160.0 => (1024, 16_384, "default on this GPU"),
        Device::Cuda { memory_gib, .. } if memory_gib >= 70.0 => (1024, 8192, "default on this GPU"),
        Device::Cuda { .. } => (256, 1 << 11, "default on this GPU"),
    }
}
