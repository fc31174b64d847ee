//! Sparse latent attention (the DSA block): multi-head attention over a cached latent, at the tokens that the indexer
//! selects.
//!
//! ```text
//! r = rmsnorm(W_qa x)        query residual, also read by the indexer
//! c = rmsnorm(W_kva x)       latent, the only thing cached a token; shared by all heads
//! q = W_qb r,   k_h(s) = W_K,h c_s,   v_h(s) = W_V,h c_s
//! out = W_o concat_h sum_s softmax_s(q_h . k_h(s) qk_dim^-0.5) v_h(s)        s over the selection
//! ```
//! There is no positional encoding. The backend computes the absorbed form (`W_K,h^T q_h` against latents, `W_V,h` after the
//! sum), so keys and values are never formed.

use glimmer_tensor::{Backend, Columns, DsaColumns, DsaWeights, Linear};

use crate::{
    Result,
    indexer::Indexer,
    layer::Pass,
    observer::{At, Observer},
    weights::Loader,
};

/// Where a row's selection comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Select {
    /// This block's indexer chooses, into the pass's selection.
    Own,
    /// The pass's selection is used as it is; the indexer neither runs nor writes its caches.
    Given,
}

/// Weights of a DSA block.
#[derive(Debug)]
pub struct Dsa<B: Backend> {
    q_a: Linear<B>,
    kv_a: Linear<B>,
    q_b: Linear<B>,
    indexer: Option<Indexer<B>>,
    core: DsaWeights<B>,
    columns: DsaColumns,
    o: Linear<B>,
}

impl<B: Backend> Dsa<B> {
    /// Loads a block from below `self_attn.`, with or without an own indexer.
    ///
    /// # Errors
    /// As [`Loader::matrix`].
    pub(crate) fn load(loader: &Loader<'_, B>, with_indexer: bool) -> Result<Self> {
        let text = &loader.config().text;
        let (mla, hidden) = (&text.mla, text.hidden_size);
        let (heads, qk, v) = (mla.num_heads, mla.qk_nope_head_dim, mla.v_head_dim);
        let (indexer, index_weights) = if with_indexer {
            let (projections, weights) = Indexer::load(&loader.at("indexer."))?;
            (Some(projections), Some(weights))
        } else {
            (None, None)
        };
        Ok(Self {
            q_a: loader.linear("q_a_proj", mla.q_lora_rank, hidden)?,
            kv_a: loader.linear("kv_a_proj_with_mqa", mla.kv_lora_rank, hidden)?,
            q_b: loader.linear("q_b_proj", heads * qk, mla.q_lora_rank)?,
            indexer,
            core: DsaWeights {
                q_norm: loader.norm("q_a_layernorm", mla.q_lora_rank, text.rms_norm_eps)?,
                kv_norm: loader.norm("kv_a_layernorm", mla.kv_lora_rank, text.rms_norm_eps)?,
                kv_b: loader.matrix("kv_b_proj", heads * (qk + v), mla.kv_lora_rank)?,
                indexer: index_weights,
                heads,
                qk_dim: qk,
                v_dim: v,
            },
            columns: DsaColumns { q_lora: mla.q_lora_rank, latent: mla.kv_lora_rank },
            o: loader.linear("o_proj", hidden, heads * v)?,
        })
    }

    /// `work.x` to `work.y` `[rows, hidden]`; `ordinal` counts DSA layers of the cache.
    pub(crate) fn forward<O: Observer<B>>(
        &self,
        pass: &mut Pass<'_, B, O>,
        layer: usize,
        ordinal: usize,
        select: Select,
    ) -> Result<()> {
        let rows = pass.rows;
        let (backend, cache, work) = (&mut *pass.backend, &mut *pass.cache, &mut *pass.work);
        let selection = &mut *pass.selection;
        let x = Columns { buffer: &work.x, start: 0, width: pass.hidden };
        let residual = self.columns.q_lora;
        let queries = self.core.heads * self.core.qk_dim;

        let indexer = match (select, &self.indexer, &self.core.indexer) {
            (Select::Own, Some(projections), Some(weights)) => Some((projections, weights)),
            _ => None,
        };
        if let Some((i, weights)) = indexer {
            let inputs = [&self.q_a, &self.kv_a, &i.key, &i.head_weights, &i.gate];
            backend.linear(rows, x, &inputs, &mut work.dsa_proj, 0)?;
            backend.dsa_write(&self.core, self.columns, &work.dsa_proj, true, cache, ordinal, &mut work.q_residual)?;
            let r = Columns { buffer: &work.q_residual, start: 0, width: residual };
            backend.linear(rows, r, &[&self.q_b, &i.query], &mut work.query, 0)?;
            let index_query = Columns { buffer: &work.query, start: queries, width: weights.heads * weights.dim };
            backend.dsa_select(weights, self.columns, index_query, &work.dsa_proj, cache, ordinal, selection)?;
        } else {
            backend.linear(rows, x, &[&self.q_a, &self.kv_a], &mut work.dsa_proj, 0)?;
            backend.dsa_write(&self.core, self.columns, &work.dsa_proj, false, cache, ordinal, &mut work.q_residual)?;
            let r = Columns { buffer: &work.q_residual, start: 0, width: residual };
            backend.linear(rows, r, &[&self.q_b], &mut work.query, 0)?;
        }
        let query = Columns { buffer: &work.query, start: 0, width: queries };
        backend.mla(&self.core, query, selection, cache, ordinal, &mut work.dsa_core)?;
        pass.observer.dsa(At { backend, layer, rows }, &work.q_residual, selection, &work.dsa_core);
        let core = Columns { buffer: &work.dsa_core, start: 0, width: self.core.heads * self.core.v_dim };
        backend.linear(rows, core, &[&self.o], &mut work.y, 0)?;
        Ok(())
    }
}
