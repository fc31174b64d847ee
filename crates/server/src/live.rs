//! The real engine behind the seam: a [`Worker`] on its own thread, and how flags become its settings.

use std::path::Path;
use std::sync::Arc;

use glimmer_checkpoint::Checkpoint;
use glimmer_engine::constraint::Grammars;
use glimmer_engine::depth::{DepthPolicy, DepthTable};
use glimmer_engine::policy::{Order, Policy};
use glimmer_engine::request::TokenEvent;
use glimmer_engine::settings::{DraftSampling, IndexSharing, Settings};
use glimmer_engine::synthetic::SyntheticAcceptance;
use glimmer_engine::worker::{EventSink, Facts, Refused, Worker, WorkerSettings};
use glimmer_engine::{EngineError, Generator};
use glimmer_model::weights::Source;
use glimmer_model::{Limits, cache_shape};
use glimmer_tensor::cpu::CpuCache;
use glimmer_tensor::{Backend, PAGE_TOKENS};
use glimmer_text::{GrammarCompiler, Tokenizer};

use crate::engine::{Asked, Counters, Engine, EventSender, Model, Refusal, Status, Ticket};
use crate::flags::config::MaxModelLen;
use crate::flags::{ServeConfig, Speculative};
use crate::open::OpenError;
use crate::serve::capacity_lines;
use crate::sizing::{SizeError, Sizes, UnitBytes, Wish, cpu_budget, host_memory, spend};
use crate::start::Loaded;

/// A worker as the front end sees it.
#[derive(Debug)]
pub struct Live(Worker);

impl Live {
    /// Puts a worker behind the seam.
    #[must_use]
    pub fn new(worker: Worker) -> Self {
        Self(worker)
    }
}

impl EventSink for EventSender {
    fn send(&self, event: TokenEvent) -> bool {
        EventSender::send(self, event)
    }
}

impl Engine for Live {
    fn submit(&self, asked: Asked, events: EventSender) -> Result<Ticket, Refusal> {
        let id = self.0.submit(asked.request, asked.constraint, Box::new(events)).map_err(|refused| match refused {
            Refused::Overloaded { limit, retry_seconds } => {
                Refusal::Overloaded { reason: limit, retry_after_s: retry_seconds }
            }
            Refused::Dead(_) => Refusal::Dead,
            Refused::Invalid { field, message } => Refusal::Invalid { param: field.to_owned(), message },
        })?;
        let worker = self.0.clone();
        Ok(Ticket::new(move || worker.abort(id)))
    }

    fn status(&self) -> Status {
        let snapshot = self.0.snapshot();
        Status {
            running: snapshot.running,
            waiting_capacity: snapshot.waiting_capacity,
            waiting_deferred: snapshot.waiting_deferred,
            kv_usage: snapshot.page_use,
            backlog_tokens: snapshot.backlog_tokens,
            prefill_rate: snapshot.prefill_rate,
            record_error: snapshot.record_error,
            dead: snapshot.dead,
            stuck: snapshot.stuck,
        }
    }

    fn counters(&self) -> Counters {
        let counters = self.0.snapshot().counters;
        Counters {
            prefix_queries: counters.prefix_queries,
            prefix_hits: counters.prefix_hits,
            state_hits: counters.prefix_state_hits,
            state_misses: counters.prefix_misses,
            media_queries: counters.media_queries,
            media_hits: counters.media_hits,
            preemptions: counters.preemptions,
            steps: counters.steps,
            step_tokens: counters.step_rows,
            drafts: counters.drafts.steps(),
            draft_tokens: counters.drafts.drafted.iter().sum(),
            accepted_by_position: counters.drafts.accepted,
            page_tokens: counters.page_tokens,
            pages: counters.pages,
        }
    }

    fn shutdown(&self) {
        self.0.shutdown();
    }

    fn reset_prefix_cache(&self) -> bool {
        self.0.reset_prefix_cache();
        true
    }
}

/// Why a model cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Its files.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its size.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// Its weights.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The room for a step's activations.
    #[error("error: --max-num-batched-tokens {rows}: {source}; give fewer tokens to a step")]
    Activations {
        /// Tokens of a step.
        rows: usize,
        /// What could not be had.
        source: EngineError,
    },
    /// The device.
    #[error("{0}")]
    Device(BoxedError),
    /// Drafts without a layer that drafts.
    #[error(
        "error: --speculative-config: {0} has no draft (MTP) layer; leave the flag out, or add the layer with glimmer \
         merge-mtp"
    )]
    NoDrafter(String),
}

/// Memory that weights and caches are held in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// The machine's, of which the cache takes a part.
    Host,
    /// A device's own.
    Device {
        /// Free bytes.
        free: u64,
        /// All bytes.
        total: u64,
        /// Whether its pages can be of halves.
        halves: bool,
    },
}

/// Weights that are not the checkpoint's.
pub struct Weights {
    /// Where they come from.
    pub source: Box<dyn Source + Send>,
    /// Their size.
    pub bytes: u64,
}

impl std::fmt::Debug for Weights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Weights").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// Loads a checkpoint onto the device that `open` opens, with other weights where there are `weights`.
///
/// # Errors
/// [`LoadError`].
pub fn load<B: Backend + 'static>(
    memory: Memory,
    open: impl FnOnce() -> Result<B, BoxedError>,
    checkpoint: Checkpoint,
    weights: Option<Weights>,
    config: &ServeConfig,
) -> Result<Loaded, LoadError> {
    let depth = depth(&checkpoint, config)?;
    let bytes = weights.as_ref().map_or_else(|| stored_bytes(&checkpoint), |weights| weights.bytes);
    let sizes = sizes(&checkpoint, bytes, config, depth, memory)?;
    // Files are read before weights: what is wrong with them shows at once.
    let mut model = Model::open(&checkpoint, config, length(sizes.length), None)?;
    let settings = settings(&checkpoint, config, &sizes, depth, model.format.tokenizer())?;
    let ends = settings.end_tokens.as_deref().unwrap_or(&checkpoint.config().text.eos_token_ids);
    model.grammars = grammars(&model, ends);
    let rows = settings.rows;
    let (record, tokenizer) = (config.record_steps.clone(), config.tokenizer.clone());
    let backend = open().map_err(LoadError::Device)?;
    let load = move || {
        let began = std::time::Instant::now();
        let source: &dyn Source = match &weights {
            Some(weights) => &*weights.source,
            None => &checkpoint,
        };
        let mut generator = Generator::load_from(backend, &checkpoint, source, &settings)?;
        let seconds = began.elapsed().as_secs_f64();
        tracing::info!("{}", loaded_line(bytes, seconds));
        if let Some(file) = record {
            generator.record(Path::new(&file), tokenizer.as_deref())?;
        }
        Ok(generator)
    };
    let spawned = Worker::spawn(load, worker_settings(config));
    let (worker, facts) = spawned.map_err(|source| match is_of_activations(&source) {
        true => LoadError::Activations { rows, source },
        false => source.into(),
    })?;
    model.max_model_len = facts.rules.context;
    announce(&facts);
    Ok(Loaded { engine: Arc::new(Live::new(worker)), model })
}

/// An error of a device, whatever its type.
pub type BoxedError = Box<dyn std::error::Error + Send + Sync>;

/// Grammars over the model's tokens. A model whose answers never end by themselves is served without.
fn grammars(model: &Model, ends: &[u32]) -> Option<Arc<dyn Grammars>> {
    match GrammarCompiler::new(model.format.tokenizer(), ends) {
        Ok(compiler) => Some(Arc::new(compiler)),
        Err(error) => {
            tracing::warn!("answers cannot be given a shape: {error}");
            None
        }
    }
}

fn announce(facts: &Facts) {
    let (tokens, length) = (facts.rules.cache_tokens() as u64, facts.rules.context as u64);
    for line in capacity_lines(tokens, length) {
        tracing::info!("{line}");
    }
    tracing::info!(
        "Most running sequences: {}, saved states: {}, rows of a step: {}, tokens of a page: {}",
        facts.sequences,
        facts.state_checkpoints,
        facts.rows,
        facts.page_tokens
    );
}

/// Tokens of a draft.
fn depth(checkpoint: &Checkpoint, config: &ServeConfig) -> Result<usize, LoadError> {
    let Some(drafts) = &config.speculative else { return Ok(0) };
    match checkpoint.config().text.mtp_layer() {
        Some(_) => Ok(drafts.depth as usize),
        None => Err(LoadError::NoDrafter(checkpoint.location().to_owned())),
    }
}

/// What the memory holds.
fn sizes(
    checkpoint: &Checkpoint,
    weights: u64,
    config: &ServeConfig,
    depth: usize,
    memory: Memory,
) -> Result<Sizes, SizeError> {
    let text = &checkpoint.config().text;
    let wish = Wish {
        sequences: config.max_num_seqs.unwrap_or(1),
        sequences_given: config.max_num_seqs_given,
        checkpoints: config.state_checkpoints,
        length: config.max_model_len.unwrap_or(MaxModelLen::Tokens(text.max_position_embeddings)),
        longest: text.max_position_embeddings as u64,
        prefix_caching: config.prefix_caching,
    };
    let sizes = match memory {
        Memory::Host => {
            let limits = Limits { max_rows: 1, max_logits: 1, slots: 1, pages: 1, max_draft: depth, features: 0 };
            let shape = cache_shape(text, &limits);
            let unit = UnitBytes {
                slot: CpuCache::slot_bytes(&shape) as u64,
                page: CpuCache::page_bytes(&shape) as u64,
                page_tokens: PAGE_TOKENS as u64,
            };
            spend(cpu_budget(config.cache_bytes, config.memory_share_given, weights, host_memory())?, unit, &wish)?
        }
        Memory::Device { free, total, halves } => {
            let elements = crate::plan::gpu_elements(text, halves && config.cache_dtype != "float32");
            let (budget, unit) =
                crate::plan::device_budget(checkpoint.config(), config, depth, (free, total), elements)?;
            let most = enough(unit, &wish);
            spend(if config.cache_bytes.is_some() { budget } else { budget.min(most) }, unit, &wish)?
        }
    };
    for (given, note) in &sizes.notes {
        if *given {
            tracing::warn!("{note}");
        } else {
            tracing::info!("{note}");
        }
    }
    Ok(sizes)
}

/// Bytes of the checkpoint's weights.
fn stored_bytes(checkpoint: &Checkpoint) -> u64 {
    checkpoint.shards().files().iter().map(|shard| shard.bytes.as_slice().len() as u64).sum()
}

/// How much was read, and how fast.
fn loaded_line(bytes: u64, seconds: f64) -> String {
    let gigabytes = bytes as f64 / 1e9;
    let size = if gigabytes < 1.0 { format!("{:.1} MB", gigabytes * 1e3) } else { format!("{gigabytes:.3} GB") };
    format!("Loaded {size} in {seconds:.2} s ({:.1} GB/s)", gigabytes / seconds)
}

/// Whether the memory that could not be had grows with the tokens of a step.
fn is_of_activations(error: &EngineError) -> bool {
    let EngineError::Model(glimmer_model::Error::Tensor(error)) = error else { return false };
    let what = ["packed activations", "an activation buffer", "mixing products", "router scores"];
    matches!(error, glimmer_tensor::Error::Memory { what: found, .. } if what.contains(found))
}

/// Bytes beyond which a cache gains nothing: every sequence at its full length, and as much again that is kept for later.
fn enough(unit: UnitBytes, wish: &Wish) -> u64 {
    let tokens = match wish.length {
        MaxModelLen::Tokens(tokens) => tokens as u64,
        MaxModelLen::WhatFits => wish.longest,
    };
    let pages = wish.sequences.saturating_mul(tokens.div_ceil(unit.page_tokens)).saturating_mul(2);
    let slots = wish.sequences.saturating_add(wish.checkpoints.saturating_mul(4));
    slots.saturating_mul(unit.slot).saturating_add(pages.saturating_mul(unit.page))
}

fn length(tokens: u64) -> usize {
    usize::try_from(tokens).unwrap_or(usize::MAX)
}

fn settings(
    checkpoint: &Checkpoint,
    config: &ServeConfig,
    sizes: &Sizes,
    depth: usize,
    tokenizer: &Tokenizer,
) -> Result<Settings, LoadError> {
    let sequences = length(sizes.sequences);
    let drafts = config.speculative.as_ref();
    let synthetic = drafts.and_then(|drafts| drafts.synthetic_rates.clone()).map(SyntheticAcceptance::from_rates);
    Ok(Settings {
        sequences,
        context: Some(length(sizes.length)),
        pages: Some(length(sizes.pages)),
        rows: length(config.max_num_batched_tokens.unwrap_or(0)).max(sequences),
        depth,
        depth_policy: drafts.map_or(Ok(DepthPolicy::Fixed), depth_policy)?,
        index_sharing: match config.mtp_index_sharing {
            None => IndexSharing::Auto,
            Some(true) => IndexSharing::On,
            Some(false) => IndexSharing::Off,
        },
        draft_sampling: match drafts {
            Some(drafts) if drafts.probabilistic => DraftSampling::Probabilistic,
            _ => DraftSampling::Greedy,
        },
        synthetic_acceptance: synthetic.transpose()?,
        real_vocab: Some(tokenizer.vocab_size()),
        seed: config.seed.unsigned_abs(),
        end_tokens: crate::open::end_tokens(checkpoint, config)?,
        think_end: tokenizer.added_id("</think>").ok(),
        tool_call: tokenizer.added_id("<tool_call>").ok(),
        policy: policy(config),
        prefix_caching: config.prefix_caching,
        state_checkpoints: length(sizes.checkpoints),
        ..Settings::default()
    })
}

fn depth_policy(drafts: &Speculative) -> Result<DepthPolicy, EngineError> {
    let rows = drafts.depth_by_batch.iter().map(|&(first, last, depth)| [first, last, depth].map(|n| n as usize));
    match drafts.adaptive {
        true => Ok(DepthPolicy::Adaptive),
        false if drafts.depth_by_batch.is_empty() => Ok(DepthPolicy::Fixed),
        false => DepthTable::new(rows.collect()).map(DepthPolicy::Table),
    }
}

fn policy(config: &ServeConfig) -> Policy {
    Policy {
        order: if config.options.priority_policy { Order::Priority } else { Order::Fcfs },
        itl_target: config.itl_target.map(|target| target.as_secs_f64()),
        long_prompt: length(config.short_prompt_tokens),
        long_prefills: length(config.long_prefills),
        long_prefill_tokens: config.long_prefill_tokens.map(length),
        interval: config.prefill_interval,
        ..Policy::default()
    }
}

fn worker_settings(config: &ServeConfig) -> WorkerSettings {
    WorkerSettings {
        queued_requests: config.max_queued_requests.map(length),
        queued_tokens: config.max_queued_tokens,
        step_timeout: config.step_timeout,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_loaded_is_said_in_a_unit_that_shows_it() {
        let checkpoint = Checkpoint::open(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16")).unwrap();
        let line = loaded_line(stored_bytes(&checkpoint), 0.5);
        assert!(line.starts_with("Loaded 2") && line.contains(" MB in 0.50 s (0.1 GB/s)"), "{line}");
        assert_eq!(loaded_line(82_177_708_032, 10.0), "Loaded 82.178 GB in 10.00 s (8.2 GB/s)");
    }
}
