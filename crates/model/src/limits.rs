//! How much is allocated at load time, and what the caches look like.
//!
//! Everything a step touches is allocated once from [`Limits`]; a step that needs more is refused with an error that names
//! the limit. [`cache_shape`] is the one place where layers of the configuration become layers of the caches.

use glimmer_checkpoint::TextConfig;
use glimmer_tensor::{CacheShape, KdaForm, PAGE_TOKENS};

/// Sizes of buffers and caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most rows of a step.
    pub max_rows: usize,
    /// Most rows of a step whose logits are wanted.
    pub max_logits: usize,
    /// KDA slots.
    pub slots: usize,
    /// Pages of the DSA caches.
    pub pages: usize,
    /// Most rows of a segment beyond its committed ones (the draft depth).
    pub max_draft: usize,
    /// Rows of the image feature buffer.
    pub features: usize,
}

impl Limits {
    /// Limits for `sequences` concurrent sequences of up to `tokens` tokens each.
    pub fn for_sequences(sequences: usize, tokens: usize, max_rows: usize, max_draft: usize) -> Self {
        Self {
            max_rows,
            max_logits: (sequences * (max_draft + 1)).min(max_rows),
            slots: sequences,
            pages: sequences * tokens.div_ceil(PAGE_TOKENS),
            max_draft,
            features: max_rows,
        }
    }
}

/// Choices about the computation that are not sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Form of the delta rule; the backend's own choice where nothing is said.
    pub kda_form: Option<KdaForm>,
    /// Whether the draft layer is loaded when the configuration has one.
    pub draft_layer: bool,
    /// Number of ids that the tokenizer knows. Logits of the padding rows beyond it read as minus infinity; `None` leaves
    /// all rows as computed.
    pub real_vocab: Option<usize>,
}

impl Default for Options {
    fn default() -> Self {
        Self { kda_form: None, draft_layer: true, real_vocab: None }
    }
}

/// The caches of a model: KDA layers and DSA layers are numbered separately in layer order, the draft layer is the last DSA
/// layer.
pub fn cache_shape(config: &TextConfig, limits: &Limits) -> CacheShape {
    CacheShape {
        kda_layers: config.kda_layers().count(),
        kda_heads: config.kda.num_heads,
        kda_head_dim: config.kda.head_dim,
        conv_kernel: config.kda.conv_kernel,
        dsa_layers: config.dsa_layers().count() + config.num_nextn_predict_layers.min(1),
        latent: config.mla.kv_lora_rank,
        index_dim: config.indexer.head_dim,
        kpool: config.indexer.kpool,
        slots: limits.slots,
        pages: limits.pages,
        max_draft: limits.max_draft,
    }
}
