//! The kpool indexer: which tokens a row of sparse attention looks at.
//!
//! Tokens are grouped into pools of `kpool`. A pool has one key, a softmax-weighted mean of its tokens' index keys
//! (`softmax_j(gate_j + ape_j)` per channel, `j` the place in the pool). A row scores every complete pool up to its own
//! position, keeps the best `topk / kpool` (equal scores: the lower pool), and always adds the tail, the tokens after the
//! last complete pool:
//! ```text
//! score[p] = sum_h w[h] heads^-0.5 relu(q[h] . K[p] dim^-0.5)
//! ```
//! The key side (`wk`, `weights_proj`, the pool gate) is part of the joint projection of the attention block, because it
//! shares that projection's input; the query side shares the query residual with the attention queries. Scores are true
//! f32: neighbouring scores differ by less than a bf16 product resolves.

use glimmer_tensor::{Backend, IndexerWeights, Linear};

use crate::{Result, weights::Loader};

/// Epsilon of the index key's LayerNorm; no configuration key carries it.
const KEY_NORM_EPS: f32 = 1e-6;

/// Projections of an indexer; the rest of its weights is in [`IndexerWeights`].
#[derive(Debug)]
pub struct Indexer<B: Backend> {
    /// Index queries from the query residual, `[heads * dim, q_lora]`.
    pub(crate) query: Linear<B>,
    /// Index key, `[dim, hidden]`.
    pub(crate) key: Linear<B>,
    /// Head weights, `[heads, hidden]`.
    pub(crate) head_weights: Linear<B>,
    /// Pool gate, `[dim, hidden]`.
    pub(crate) gate: Linear<B>,
}

impl<B: Backend> Indexer<B> {
    /// Loads an indexer from below `self_attn.indexer.`.
    ///
    /// # Errors
    /// As [`Loader::matrix`].
    pub(crate) fn load(loader: &Loader<'_, B>) -> Result<(Self, IndexerWeights<B>)> {
        let text = &loader.config().text;
        let (index, hidden) = (&text.indexer, text.hidden_size);
        let gate = loader.plain_matrix("index_kpool_compress_gate", index.head_dim, hidden)?;
        let projections = Self {
            query: loader.linear("wq_b", index.num_heads * index.head_dim, text.mla.q_lora_rank)?,
            key: loader.linear("wk", index.head_dim, hidden)?,
            head_weights: loader.linear("weights_proj", index.num_heads, hidden)?,
            gate: Linear { weight: gate, bias: None },
        };
        let weights = IndexerWeights {
            k_norm: loader.layer_norm("k_norm", index.head_dim, KEY_NORM_EPS)?,
            ape: loader.vector("index_kpool_compress_ape", index.kpool * index.head_dim)?,
            heads: index.num_heads,
            dim: index.head_dim,
            kpool: index.kpool,
            topk: index.topk,
        };
        Ok((projections, weights))
    }
}
