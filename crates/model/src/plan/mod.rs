//! What a model needs of memory, from its configuration alone.
//!
//! Nothing is loaded: weights come from the derived inventory, activations and caches from the same widths and
//! [`cache_shape`] that a load allocates from. A device holds, in this order of claim: its share of the weights, the
//! activations of one step, a reserve for the driver, and two arenas, slots and pages, made of what is left.
//! Invariant: what a plan says fits is what a load with its [`Limits`] allocates, up to the allocator's own overhead.

pub mod scratch;
mod share;
pub mod vllm;

use glimmer_checkpoint::{Config, Inventory, TextConfig, config::MlpKind, inventory::Group};
use glimmer_tensor::PAGE_TOKENS;

use crate::{
    limits::{Limits, cache_shape},
    workspace::Widths,
};
pub use share::{Held, Ranks, held};

/// Bytes of the elements of the caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Elements {
    /// Of recurrent states.
    pub state: u64,
    /// Of records, convolution columns and index tails.
    pub ring: u64,
    /// Of latents and pool keys.
    pub page: u64,
}

impl Elements {
    /// What both backends allocate: f32 everywhere.
    pub const F32: Self = Self { state: 4, ring: 4, page: 4 };
}

/// What is to be held.
#[derive(Debug, Clone, Copy)]
pub struct Wish<'a> {
    /// The model.
    pub config: &'a Config,
    /// Its tensors as stored.
    pub inventory: &'a Inventory,
    /// How ranks share it.
    pub ranks: Ranks,
    /// Whether the draft layer is loaded.
    pub draft_layer: bool,
    /// Whether the vision tower is loaded.
    pub vision: bool,
    /// Most rows of a step.
    pub max_rows: usize,
    /// Most rows of a step whose logits are wanted.
    pub max_logits: usize,
    /// Deepest draft.
    pub max_draft: usize,
    /// Bytes of the caches' elements.
    pub elements: Elements,
}

/// What one device holds besides the arenas, and what a piece of each arena takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    /// Bytes of weights by group, groups without tensors left out.
    pub weights: Vec<(Group, u64)>,
    /// Bytes of activations of one step: buffers that every layer reuses, logits, features.
    pub activations: u64,
    /// Bytes of a slot.
    pub slot: SlotBytes,
    /// Bytes of a page of 64 tokens.
    pub page: u64,
}

/// What a slot takes, over all layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotBytes {
    /// Recurrent states.
    pub state: u64,
    /// Records of rows that are not folded in yet.
    pub records: u64,
    /// Columns of the convolution.
    pub columns: u64,
    /// Tails of the index pools.
    pub tails: u64,
}

impl SlotBytes {
    /// The whole slot.
    pub fn total(&self) -> u64 {
        self.state + self.records + self.columns + self.tails
    }
}

impl Needs {
    /// What each device needs.
    pub fn of(wish: &Wish<'_>) -> Self {
        let text = &wish.config.text;
        let limits = Limits {
            max_rows: wish.max_rows,
            max_logits: wish.max_logits,
            slots: 1,
            pages: 1,
            max_draft: wish.max_draft,
            features: wish.max_rows,
        };
        let shape = cache_shape(text, &limits);
        let e = wish.elements;
        let product = |factors: &[usize]| factors.iter().map(|&n| n as u64).product::<u64>();
        let (kda, dsa, dim) = (shape.kda_layers, shape.dsa_layers, shape.kda_head_dim);
        let heads = shape.kda_heads.div_ceil(wish.ranks.count.max(1));
        let pool_keys = PAGE_TOKENS / shape.kpool.max(1) * shape.index_dim;
        Self {
            weights: weights(wish),
            activations: activations(text, &limits, wish),
            slot: SlotBytes {
                state: e.state * product(&[kda, heads, dim, dim]),
                records: e.ring * product(&[kda, heads, shape.max_draft + 1, 3, dim]),
                columns: e.ring * product(&[kda, heads, shape.conv_kernel + shape.max_draft, 3, dim]),
                tails: e.ring * product(&[dsa, shape.kpool + shape.max_draft, 2, shape.index_dim]),
            },
            page: e.page * product(&[dsa, PAGE_TOKENS * shape.latent + pool_keys]),
        }
    }

    /// Bytes of all weights.
    pub fn weights_total(&self) -> u64 {
        self.weights.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes of weights and activations.
    pub fn fixed(&self) -> u64 {
        self.weights_total() + self.activations
    }
}

/// Bytes of a rank's weights by group.
fn weights(wish: &Wish<'_>) -> Vec<(Group, u64)> {
    let loaded = |group: Group| match group {
        Group::Mtp | Group::MtpRouted => wish.draft_layer,
        Group::Vision => wish.vision,
        _ => true,
    };
    let groups = Group::ALL.into_iter().filter(|&group| loaded(group));
    let bytes = |group: Group| {
        let specs = wish.inventory.tensors().iter().filter(|spec| spec.group == group);
        specs.map(|spec| held(spec, wish.ranks).bytes(spec, wish.ranks)).sum::<u64>()
    };
    groups.map(|group| (group, bytes(group))).filter(|&(_, bytes)| bytes > 0).collect()
}

/// Bytes of a rank's activations: the buffers of the workspace, of the trunk and of the draft layer, all f32. Widths that
/// belong to heads or to inner widths of an MLP are shared by the ranks, the residual stream is not.
fn activations(c: &TextConfig, limits: &Limits, wish: &Wish<'_>) -> u64 {
    let ranks = wish.ranks.count.max(1);
    let shared = |width: usize| width.div_ceil(ranks);
    let w = Widths::new(c);
    let (hidden, streams, top) = (c.hidden_size, c.mhc.streams, c.moe.experts_per_token.max(1));
    let index = c.indexer.num_heads * c.indexer.head_dim;
    let mla = &c.mla;
    let dense = if c.mlp.contains(&MlpKind::Dense) { shared(c.intermediate_size) } else { 1 };
    let experts = if wish.ranks.whole_experts { c.moe.intermediate_size } else { shared(c.moe.intermediate_size) };
    let joint = 2 * c.kda.head_dim;
    let row = [
        // Residual streams and mixer coefficients, and the collapsed row.
        streams * hidden + streams + streams * streams + hidden,
        // Input and output of a sub-block.
        2 * hidden,
        // KDA: joint projection, gates, core.
        shared(w.kda_proj - joint) + joint + 2 * shared(w.kda) + shared(w.kda),
        // DSA: joint projection, query residual, queries, core.
        w.dsa_proj + mla.q_lora_rank + shared(w.query - index) + index + shared(mla.num_heads * mla.v_head_dim),
        // MLPs, and the chosen experts with their weights.
        dense + top * experts + shared(c.moe.num_shared * c.moe.intermediate_size) + 2 * top,
        // Selected tokens, final state, image features.
        c.selection_width() + 2 * hidden,
    ];
    // Input, residual and state of the draft layer, and two selections.
    let draft = if wish.draft_layer { 4 * hidden + 2 * c.selection_width() } else { 0 };
    let heads = if wish.draft_layer { 2 } else { 1 };
    let logits = limits.max_logits * shared(c.vocab_size) * heads;
    4 * (limits.max_rows * (row.iter().sum::<usize>() + draft) + logits) as u64
}

#[cfg(test)]
mod tests;
