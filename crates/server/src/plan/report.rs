//! The answer, as a table for people and as JSON.

use std::fmt::Write as _;

use glimmer_model::plan::{Elements, Needs, vllm::Pool};
use serde_json::{Value, json};

/// What a plan says.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// `bf16` or `w4a16`.
    pub storage: &'static str,
    /// `gpu` or `cpu`.
    pub device: &'static str,
    /// Ranks.
    pub ranks: usize,
    /// Whether experts stay whole.
    pub whole_experts: bool,
    /// Memory of one device.
    pub device_bytes: u64,
    /// What of it may be used.
    pub usable_bytes: u64,
    /// What is left to the driver and the program.
    pub reserve_bytes: u64,
    /// What the stages of a GPU take beside the activations.
    pub scratch_bytes: u64,
    /// Sequences asked for.
    pub max_num_seqs: u64,
    /// Most tokens of a step.
    pub max_num_batched_tokens: u64,
    /// Longest sequence.
    pub max_model_len: u64,
    /// Deepest draft.
    pub draft_depth: usize,
    /// Bytes of both arenas.
    pub cache_bytes: u64,
    /// Whether they are the CPU's default, which nothing of the machine or the model decides.
    pub cache_by_default: bool,
    /// Bytes of the caches' elements.
    pub elements: Elements,
    /// What a device holds.
    pub needs: Needs,
    /// What fits.
    pub fit: Fit,
    /// vLLM's pool, when asked for.
    pub like_vllm: Option<VllmPool>,
}

/// Whether it fits.
#[derive(Clone, Debug, PartialEq)]
pub enum Fit {
    /// It does.
    Fits {
        /// Slots of running sequences.
        sequences: u64,
        /// Slots of saved states.
        checkpoints: u64,
        /// Pages of 64 tokens.
        pages: u64,
        /// Tokens of all pages.
        capacity_tokens: u64,
        /// Sequences of the longest length that the pages hold.
        concurrency: f64,
        /// What became less than asked for.
        notes: Vec<String>,
    },
    /// It does not.
    Short {
        /// Why, and what to do.
        reason: String,
    },
}

/// The pool that vLLM would make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VllmPool {
    /// Its layout.
    pub pool: Pool,
    /// Its blocks.
    pub blocks: u64,
    /// Tokens that it would report.
    pub reported_tokens: u64,
    /// Whether the bytes of the cache were given; else they are this plan's.
    pub cache_given: bool,
}

fn size(bytes: u64) -> String {
    const UNITS: [(&str, u32); 3] = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match UNITS.into_iter().find(|(_, shift)| bytes >> shift > 0) {
        Some((unit, shift)) => format!("{:.2} {unit}", bytes as f64 / (1u64 << shift) as f64),
        None => format!("{bytes} B"),
    }
}

impl Report {
    /// Whether the model fits.
    #[must_use]
    pub fn fits(&self) -> bool {
        matches!(self.fit, Fit::Fits { .. })
    }

    /// A table.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut out = String::new();
        // Writing to a string does not fail.
        let mut line = |indent: usize, name: &str, value: &str| {
            let _ = writeln!(out, "{:indent$}{name:<width$}  {value:>12}", "", width = 44 - indent);
        };
        let shared = match (self.ranks, self.whole_experts) {
            (1, _) => "1 rank".to_owned(),
            (n, false) => format!("{n} ranks"),
            (n, true) => format!("{n} ranks, experts whole"),
        };
        line(0, "weights stored as", self.storage);
        line(0, &format!("each {} of", self.device), &shared);
        line(0, "memory", &size(self.device_bytes));
        let gpu = self.device == "gpu";
        line(2, if gpu { "usable" } else { "free" }, &size(self.usable_bytes));
        line(0, "weights", &size(self.needs.weights_total()));
        for (group, bytes) in &self.needs.weights {
            line(2, group.describe(), &size(*bytes));
        }
        line(0, &format!("activations of {} rows", self.max_num_batched_tokens), &size(self.needs.activations));
        if gpu {
            line(0, "scratch of the stages", &size(self.scratch_bytes));
            line(0, "reserve", &size(self.reserve_bytes));
        }
        let default = if self.cache_by_default { "cache (the CPU's default)" } else { "cache" };
        line(0, default, &size(self.cache_bytes));
        let slot = &self.needs.slot;
        line(2, "a slot", &size(slot.total()));
        for (name, bytes) in
            [("states", slot.state), ("records", slot.records), ("columns", slot.columns), ("tails", slot.tails)]
        {
            line(4, name, &size(bytes));
        }
        line(2, "a page of 64 tokens", &size(self.needs.page));
        match &self.fit {
            Fit::Fits { sequences, checkpoints, pages, capacity_tokens, concurrency, notes } => {
                line(2, "slots of sequences", &sequences.to_string());
                line(2, "slots of saved states", &checkpoints.to_string());
                line(2, "pages", &pages.to_string());
                line(2, "tokens", &capacity_tokens.to_string());
                line(2, &format!("sequences of {} tokens", self.max_model_len), &format!("{concurrency:.2}"));
                let notes: String = notes.iter().map(|note| format!("; {note}")).collect();
                let _ = writeln!(out, "fits{notes}");
                if self.cache_by_default {
                    let _ = writeln!(
                        out,
                        "on the CPU the cache takes 4 GiB, or what is free if that is less; --kv-cache-memory-bytes or \
                         --gpu-memory-utilization (a share of all memory, weights included) give it more or less"
                    );
                }
            }
            Fit::Short { reason } => {
                let _ = writeln!(out, "does not fit: {reason}");
            }
        }
        if let Some(vllm) = &self.like_vllm {
            let cache = if vllm.cache_given { "given" } else { "as above" };
            let Pool { state_bytes, page_tokens, layers, groups, block_bytes, request_blocks } = vllm.pool;
            let _ = writeln!(out, "\nvLLM's pool of this cache ({cache})");
            for (name, value) in [
                ("state of a layer, bytes", state_bytes),
                ("tokens of a page", page_tokens),
                ("latent layers", layers),
                ("groups of recurrent layers", groups),
                ("bytes of a block", block_bytes),
                ("blocks of the longest request", request_blocks),
                ("blocks", vllm.blocks),
                ("reported tokens", vllm.reported_tokens),
            ] {
                let _ = writeln!(out, "  {name:<42}  {value:>12}");
            }
        }
        out
    }

    /// The same as JSON; sizes are bytes.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let weights: serde_json::Map<String, Value> =
            self.needs.weights.iter().map(|(group, bytes)| (group.name().to_owned(), json!(bytes))).collect();
        let slot = &self.needs.slot;
        let fit = match &self.fit {
            Fit::Fits { sequences, checkpoints, pages, capacity_tokens, concurrency, notes } => json!({
                "sequences": sequences, "state_checkpoints": checkpoints, "pages": pages,
                "capacity_tokens": capacity_tokens, "concurrency": concurrency, "notes": notes,
            }),
            Fit::Short { reason } => json!({"reason": reason}),
        };
        let vllm = self.like_vllm.as_ref().map(|vllm| {
            let pool = vllm.pool;
            json!({
                "state_bytes": pool.state_bytes, "page_tokens": pool.page_tokens, "layers": pool.layers,
                "groups": pool.groups, "block_bytes": pool.block_bytes, "request_blocks": pool.request_blocks,
                "blocks": vllm.blocks, "reported_tokens": vllm.reported_tokens, "cache_given": vllm.cache_given,
            })
        });
        json!({
            "fits": self.fits(),
            "storage": self.storage,
            "device": self.device,
            "ranks": self.ranks,
            "expert_parallel": self.whole_experts,
            "memory_bytes": self.device_bytes,
            "usable_bytes": self.usable_bytes,
            "weights_bytes": self.needs.weights_total(),
            "weights": weights,
            "activations_bytes": self.needs.activations,
            "scratch_bytes": self.scratch_bytes,
            "reserve_bytes": self.reserve_bytes,
            "cache_bytes": self.cache_bytes,
            "slot_bytes": slot.total(),
            "slot": {"state": slot.state, "records": slot.records, "columns": slot.columns, "tails": slot.tails},
            "page_bytes": self.needs.page,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "draft_depth": self.draft_depth,
            "fit": fit,
            "like_vllm": vllm,
        })
    }
}
