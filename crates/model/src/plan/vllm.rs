//! The pool that vLLM would make of the same memory.
//!
//! There, recurrent states and latents share one pool of blocks. A block must hold a state, so a page of latents is made as
//! long as the state is large, in steps of 128 tokens; the layers of the two kinds are grouped so that every block has as many
//! layers as there are latent layers. The number of tokens that is reported follows from the blocks of a request of the
//! longest length; it is no capacity. These figures make the two comparable; nothing else uses them.

use glimmer_checkpoint::TextConfig;

/// Tokens of which a page is a multiple.
const PAGE_STEP: u64 = 128;

/// What the pool depends on besides the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    /// Ranks.
    pub ranks: u64,
    /// Deepest draft, 0 without drafts.
    pub drafts: u64,
    /// Whether the drafter is the checkpoint's own layer, which has a latent cache.
    pub own_drafter: bool,
    /// Whether prefixes are cached.
    pub prefix_caching: bool,
    /// Tokens of the longest request.
    pub tokens: u64,
    /// Blocks that a separate drafter's window takes of a request.
    pub drafter_blocks: u64,
    /// Bytes of a block, where they are known from elsewhere and do not follow from the layout.
    pub block_bytes: Option<u64>,
}

/// The pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    /// Bytes of the recurrent state of one layer on one rank.
    pub state_bytes: u64,
    /// Tokens of a page.
    pub page_tokens: u64,
    /// Latent layers, and so layers of a block.
    pub layers: u64,
    /// Groups of recurrent layers.
    pub groups: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Blocks of the longest request.
    pub request_blocks: u64,
}

impl Pool {
    /// The pool of a model.
    pub fn of(c: &TextConfig, setup: &Setup) -> Self {
        let ranks = setup.ranks.max(1);
        let (heads, dim) = (c.kda.num_heads as u64, c.kda.head_dim as u64);
        let window = (c.kda.conv_kernel as u64).saturating_sub(1) + setup.drafts;
        // State in f32, window of q, k and v in bf16.
        let state_bytes = heads / ranks * dim * dim * 4 + 3 * heads * dim / ranks * window * 2;
        let latent = 2 * c.mla.kv_lora_rank as u64;
        let page_tokens = PAGE_STEP * state_bytes.div_ceil(latent * PAGE_STEP).max(1);
        // A pool key in fp8 with an f32 scale.
        let index = page_tokens / c.indexer.kpool.max(1) as u64 * (c.indexer.head_dim as u64 + 4);
        let own = u64::from(setup.own_drafter) * c.num_nextn_predict_layers.min(1) as u64;
        let layers = c.dsa_layers().count() as u64 + own;
        let groups = (c.kda_layers().count() as u64).div_ceil(layers.max(1));
        let versions = groups * if setup.prefix_caching { 2 + setup.drafts } else { 1 + setup.drafts };
        Self {
            state_bytes,
            page_tokens,
            layers,
            groups,
            block_bytes: setup.block_bytes.unwrap_or(layers * (page_tokens * latent + index)),
            request_blocks: setup.tokens.div_ceil(page_tokens) + versions + 1 + setup.drafter_blocks,
        }
    }

    /// Blocks of so many bytes.
    pub fn blocks(&self, available: u64) -> u64 {
        available / self.block_bytes.max(1)
    }

    /// Tokens that are reported for so many blocks and a longest request of `tokens`.
    pub fn reported_tokens(&self, blocks: u64, tokens: u64) -> u64 {
        (u128::from(blocks) * u128::from(tokens) / u128::from(self.request_blocks.max(1))) as u64
    }
}
