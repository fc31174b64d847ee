//! What a configuration and the flags of `serve` need of memory, and what fits.
//!
//! The arithmetic is [`glimmer_model::plan`]'s; here flags become its questions and its answers a table. Nothing is loaded
//! and no device is asked, so a plan for eight GPUs can be made on a laptop.

mod report;
mod request;

pub use report::{Fit, Report, VllmPool};
pub use request::{HELP, PlanRequest};

use glimmer_checkpoint::{Config, Inventory, TextConfig};
use glimmer_model::{
    Limits, cache_shape,
    plan::{Elements, Needs, Ranks, Wish, scratch::Largest, vllm},
    vision::Processor,
};
use glimmer_tensor::PAGE_TOKENS;

use crate::flags::config::MaxModelLen;
use crate::flags::speculative::Method;
use crate::flags::{Device, FlagError, ModelShape, ServeConfig, Settings, conflict};
use crate::sizing::{self, SizeError, Sizes, UnitBytes, cpu_budget, spend};

const GIB: f64 = (1u64 << 30) as f64;

/// Left to the driver, its libraries and captured steps on a GPU: an assumption, not a measurement.
const GPU_RESERVE_BYTES: u64 = 3 << 29;

/// Memory of a GPU where nothing is said: an H200's.
const GPU_BYTES: u64 = 140 << 30;

/// Plans a model. The cache is sized by the rules by which the server sizes it.
///
/// # Errors
/// [`FlagError`] where flags are wrong or do not fit the model; a model that does not fit the memory is no error.
pub fn plan(config: &Config, request: &PlanRequest, mut settings: Settings) -> Result<Report, FlagError> {
    let mut serve = ServeConfig::new(&settings)?;
    let text = &config.text;
    let gpu = match serve.device.as_str() {
        "cpu" => false,
        "cuda" => true,
        _ => serve.tensor_parallel > 1 || request.device_bytes.is_some(),
    };
    // On the CPU one rank computes with all threads.
    let count = if gpu { usize::try_from(serve.tensor_parallel).unwrap_or(usize::MAX).max(1) } else { 1 };
    let host = if gpu { None } else { request.device_bytes.map(|bytes| (bytes, bytes)).or(request.host_bytes) };
    let device_bytes = request.device_bytes.or(host.map(|(all, _)| all)).unwrap_or(GPU_BYTES);
    let device = if gpu {
        Device::Cuda { memory_gib: device_bytes as f64 / GIB, count: serve.tensor_parallel }
    } else {
        Device::Cpu
    };
    serve.resolve(&mut settings, &ModelShape::of_text(text), device)?;
    let w4a16 = request.as_w4a16 || is_w4a16(config);
    let inventory = if w4a16 {
        Inventory::w4a16(config).map_err(|error| FlagError::Conflict(format!("error: {error}")))?
    } else {
        Inventory::bf16(config)
    };
    let drafts = serve.speculative.as_ref();
    let own_drafter = drafts.is_some_and(|drafts| drafts.method == Method::Mtp);
    if own_drafter && text.mtp_layer().is_none() {
        return conflict("--speculative-config: method mtp needs a draft layer, and the model has none");
    }
    let depth = drafts.map_or(0, |drafts| drafts.depth as usize);
    let sequences = serve.max_num_seqs.unwrap_or(1);
    let max_rows = usize::try_from(serve.max_num_batched_tokens.unwrap_or(1)).unwrap_or(usize::MAX);
    let wish = Wish {
        config,
        inventory: &inventory,
        ranks: Ranks { count, whole_experts: serve.expert_parallel },
        draft_layer: own_drafter,
        vision: !serve.text_only && config.vision.is_some(),
        max_rows,
        max_logits: usize::try_from(sequences).unwrap_or(usize::MAX).saturating_mul(depth + 1).min(max_rows),
        max_draft: depth,
        elements: elements(text, gpu, &serve, &settings),
    };
    let needs = Needs::of(&wish);
    let reserve = if gpu { GPU_RESERVE_BYTES } else { 0 };
    let scratch = if gpu { scratch(&wish, &serve) } else { 0 };
    let usable = match host {
        _ if gpu => (device_bytes as f64 * serve.memory_share) as u64,
        Some((_, free)) => free,
        None => device_bytes,
    };
    let fixed = needs.fixed() + reserve + scratch;
    let ask = sizing::Wish {
        sequences,
        sequences_given: serve.max_num_seqs_given,
        checkpoints: serve.state_checkpoints,
        length: serve.max_model_len.unwrap_or(MaxModelLen::Tokens(text.max_position_embeddings)),
        longest: text.max_position_embeddings as u64,
        prefix_caching: serve.prefix_caching,
    };
    let unit = UnitBytes { slot: needs.slot.total(), page: needs.page, page_tokens: PAGE_TOKENS as u64 };
    let budget = if gpu {
        gpu_budget(serve.cache_bytes, usable, fixed)
    } else {
        let fits = fixed <= usable;
        let budget = cpu_budget(serve.cache_bytes, serve.memory_share_given, needs.weights_total(), host);
        let budget = budget.map_err(|error| error.to_string());
        if fits { budget } else { Err(too_large_for_host(fixed, usable)) }
    };
    let spent = budget.clone().and_then(|budget| spend(budget, unit, &ask).map_err(|error| error.to_string()));
    let asked = match ask.length {
        MaxModelLen::Tokens(tokens) => tokens as u64,
        MaxModelLen::WhatFits => ask.longest,
    };
    let tokens = spent.as_ref().map_or(asked, |sizes| sizes.length);
    let cache = budget.or(serve.cache_bytes.ok_or(())).unwrap_or(0);
    let like_vllm = request.like_vllm.then(|| {
        let setup = vllm::Setup {
            ranks: count as u64,
            drafts: depth as u64,
            own_drafter,
            prefix_caching: serve.prefix_caching,
            tokens,
            drafter_blocks: request.drafter_blocks,
            block_bytes: request.block_bytes,
        };
        let pool = vllm::Pool::of(text, &setup);
        let blocks = pool.blocks(cache);
        let reported_tokens = pool.reported_tokens(blocks, tokens);
        VllmPool { pool, blocks, reported_tokens, cache_given: serve.cache_bytes.is_some() }
    });
    Ok(Report {
        storage: if w4a16 { "w4a16" } else { "bf16" },
        device: if gpu { "gpu" } else { "cpu" },
        ranks: count,
        whole_experts: serve.expert_parallel,
        device_bytes,
        usable_bytes: usable,
        reserve_bytes: reserve,
        scratch_bytes: scratch,
        max_num_seqs: sequences,
        max_num_batched_tokens: max_rows as u64,
        max_model_len: tokens,
        draft_depth: depth,
        cache_bytes: cache,
        cache_by_default: !gpu && serve.cache_bytes.is_none() && serve.memory_share_given.is_none(),
        elements: wish.elements,
        needs,
        fit: fit(spent, &serve.warnings),
        like_vllm,
    })
}

/// Bytes that the cache of one device may take beside weights and activations, and what slots and pages take there.
///
/// # Errors
/// [`SizeError::Device`] when not even the weights fit, or less is left than was asked for.
pub(crate) fn device_budget(
    config: &Config,
    serve: &ServeConfig,
    depth: usize,
    (free, total): (u64, u64),
    elements: Elements,
) -> Result<(u64, UnitBytes), SizeError> {
    let inventory = if is_w4a16(config) { Inventory::w4a16(config).ok() } else { None };
    let inventory = inventory.unwrap_or_else(|| Inventory::bf16(config));
    let count = |number: Option<u64>| usize::try_from(number.unwrap_or(1)).unwrap_or(usize::MAX);
    let max_rows = count(serve.max_num_batched_tokens);
    let wish = Wish {
        config,
        inventory: &inventory,
        ranks: Ranks { count: 1, whole_experts: false },
        draft_layer: depth > 0,
        vision: config.vision.is_some(),
        max_rows,
        max_logits: count(serve.max_num_seqs).saturating_mul(depth + 1).min(max_rows),
        max_draft: depth,
        elements,
    };
    let needs = Needs::of(&wish);
    let usable = ((total as f64 * serve.memory_share) as u64).min(free);
    let fixed = needs.fixed() + GPU_RESERVE_BYTES + scratch(&wish, serve);
    let budget = gpu_budget(serve.cache_bytes, usable, fixed).map_err(SizeError::Device)?;
    Ok((budget, UnitBytes { slot: needs.slot.total(), page: needs.page, page_tokens: PAGE_TOKENS as u64 }))
}

/// Bytes that a GPU's stages take beside the activations of the largest step.
fn scratch(wish: &Wish<'_>, serve: &ServeConfig) -> u64 {
    let text = &wish.config.text;
    let pictures = !serve.text_only && serve.options.max_images + serve.options.max_videos > 0;
    let vision = wish.config.vision.as_ref().filter(|_| pictures);
    let side = vision.map_or(0, |vision| vision.spatial_merge_size);
    Largest {
        text,
        vision,
        patches: Processor::default().max_tokens * side * side,
        ranks: wish.ranks.count,
        rows: wish.max_rows,
        logits: wish.max_logits,
        context: match serve.max_model_len {
            Some(MaxModelLen::Tokens(tokens)) => tokens.min(text.max_position_embeddings),
            _ => text.max_position_embeddings,
        },
        draft_layer: wish.draft_layer,
        int4: is_w4a16(wish.config) || wish.inventory.tensors().iter().any(|t| t.name.ends_with(".weight_packed")),
    }
    .total()
}

fn fit(spent: Result<Sizes, String>, warnings: &[String]) -> Fit {
    match spent {
        Ok(sizes) => Fit::Fits {
            sequences: sizes.sequences,
            checkpoints: sizes.checkpoints,
            pages: sizes.pages,
            capacity_tokens: sizes.pages * PAGE_TOKENS as u64,
            concurrency: sizes.pages as f64 / sizes.length.div_ceil(PAGE_TOKENS as u64) as f64,
            notes: warnings.iter().cloned().chain(sizes.notes.into_iter().map(|(_, note)| note)).collect(),
        },
        Err(reason) => Fit::Short { reason: reason.trim_start_matches("error: ").to_owned() },
    }
}

/// Bytes for the cache of a GPU: what was asked for, if it is there, or all that is left.
fn gpu_budget(asked: Option<u64>, usable: u64, fixed: u64) -> Result<u64, String> {
    let left = usable.checked_sub(fixed).ok_or_else(|| too_large(fixed, usable))?;
    match asked {
        Some(asked) if asked > left => Err(format!(
            "--kv-cache-memory-bytes {asked} is more than what is left beside weights and activations, {left}"
        )),
        Some(asked) => Ok(asked),
        None => Ok(left),
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / GIB)
}

fn too_large_for_host(fixed: u64, free: u64) -> String {
    format!(
        "weights and activations take {} and {} of this machine are free; end other programs, or use a smaller \
         --max-num-batched-tokens",
        gib(fixed),
        gib(free)
    )
}

fn too_large(fixed: u64, usable: u64) -> String {
    format!(
        "weights, activations, scratch and reserve take {} of each device and {} are usable; use more ranks (--tensor-parallel-size), \
         a larger --gpu-memory-utilization or a smaller --max-num-batched-tokens",
        gib(fixed),
        gib(usable)
    )
}

/// Whether the configuration is that of a W4A16 artifact. Other quantizations are widened when they are loaded.
fn is_w4a16(config: &Config) -> bool {
    config.quantization.as_ref().is_some_and(|block| block["quant_method"] == "compressed-tensors")
}

/// What a GPU holds: f32, and pages of halves where they are wanted and the model has the widths for them.
pub(crate) fn gpu_elements(text: &TextConfig, halves: bool) -> Elements {
    let limits = Limits { max_rows: 1, max_logits: 1, slots: 1, pages: 1, max_draft: 0, features: 0 };
    let page = if halves && cache_shape(text, &limits).half_pages() { 2 } else { 4 };
    Elements { page, ..Elements::F32 }
}

/// The CPU holds f32, a GPU what it holds by itself; other elements only where the flags say so.
fn elements(text: &TextConfig, gpu: bool, serve: &ServeConfig, settings: &Settings) -> Elements {
    let asked = |name: &str| settings.is_given(name) && settings.value(name) != "auto";
    let mut elements = if gpu { gpu_elements(text, true) } else { Elements::F32 };
    if asked("kv-cache-dtype") {
        elements.page = match serve.cache_dtype.as_str() {
            "float32" => 4,
            // bf16, after reading.
            "auto" => 2,
            _ => 1,
        };
    }
    if asked("mamba-ssm-cache-dtype") && serve.state_dtype == "bfloat16" {
        elements.state = 2;
    }
    elements
}

#[cfg(test)]
mod tests;
