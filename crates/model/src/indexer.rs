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

#[cfg(test)]
mod tests {
    use glimmer_checkpoint::Checkpoint;
    use glimmer_tensor::cpu::Cpu;

    use super::*;

    /// The goldens cannot tell this epsilon from the model's own, so it is pinned here.
    #[test]
    fn the_index_keys_norm_is_a_layer_norm_with_a_bias_and_its_own_epsilon() {
        let micro = Checkpoint::open(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16")).unwrap();
        let cpu = Cpu::new(1);
        let loader = Loader::new(&cpu, &micro, "model.language_model.layers.3.self_attn.indexer.");
        let (_, weights) = Indexer::load(&loader).unwrap();
        assert!(weights.k_norm.bias.is_some());
        assert_eq!(weights.k_norm.eps.to_bits(), 1e-6f32.to_bits());
        assert_ne!(weights.k_norm.eps.to_bits(), micro.config().text.rms_norm_eps.to_bits());
        assert_eq!(
            (weights.kpool, weights.topk),
            (micro.config().text.indexer.kpool, micro.config().text.indexer.topk)
        );
    }
}
