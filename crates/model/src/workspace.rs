//! All activation buffers of a pass, allocated once.
//!
//! A buffer is named after what it holds and is reused by every layer; nothing in it outlives a step except what
//! [`crate::Model`] keeps beside it (hidden states, logits, selections of the draft layer).

use glimmer_checkpoint::{TextConfig, config::MlpKind};
use glimmer_tensor::{Backend, Streams};

use crate::Result;

/// Activations of one step of up to `max_rows` rows.
#[derive(Debug)]
pub(crate) struct Workspace<B: Backend> {
    /// Residual streams and mixer coefficients.
    pub(crate) streams: Streams<B>,
    /// Normed input of a sub-block, `[rows, hidden]`.
    pub(crate) x: B::Buffer,
    /// Output of a sub-block, `[rows, hidden]`.
    pub(crate) y: B::Buffer,
    /// `[q | k | v | beta | f_a | g_a]` of a KDA layer.
    pub(crate) kda_proj: B::Buffer,
    /// `[f | z]` of a KDA layer.
    pub(crate) kda_gates: B::Buffer,
    /// Gated, normed output of the delta rule, `[rows, heads * dim]`.
    pub(crate) kda_core: B::Buffer,
    /// `[q_a | kv_a | index key | head weights | pool gate]` of a DSA layer.
    pub(crate) dsa_proj: B::Buffer,
    /// Normed query residual, `[rows, q_lora]`.
    pub(crate) q_residual: B::Buffer,
    /// `[attention queries | index queries]`.
    pub(crate) query: B::Buffer,
    /// Attention output before its projection, `[rows, heads * v_dim]`.
    pub(crate) dsa_core: B::Buffer,
    /// Activation of a dense MLP, `[rows, intermediate]`.
    pub(crate) act: B::Buffer,
    /// Activations of routed experts, `[rows * top, width]`.
    pub(crate) expert_act: B::Buffer,
    /// Activation of the shared expert, `[rows, shared width]`.
    pub(crate) shared_act: B::Buffer,
    /// Chosen experts.
    pub(crate) routing: B::Routing,
}

impl<B: Backend> Workspace<B> {
    pub(crate) fn new(backend: &B, config: &TextConfig, max_rows: usize) -> Result<Self> {
        let widths = Widths::new(config);
        let buffer = |width: usize| backend.buffer(max_rows, width.max(1));
        let n = config.mhc.streams;
        Ok(Self {
            streams: Streams {
                x: buffer(n * config.hidden_size)?,
                post: buffer(n)?,
                comb: buffer(n * n)?,
                collapsed: buffer(config.hidden_size)?,
            },
            x: buffer(config.hidden_size)?,
            y: buffer(config.hidden_size)?,
            kda_proj: buffer(widths.kda_proj)?,
            kda_gates: buffer(2 * widths.kda)?,
            kda_core: buffer(widths.kda)?,
            dsa_proj: buffer(widths.dsa_proj)?,
            q_residual: buffer(config.mla.q_lora_rank)?,
            query: buffer(widths.query)?,
            dsa_core: buffer(config.mla.num_heads * config.mla.v_head_dim)?,
            act: buffer(if config.mlp.contains(&MlpKind::Dense) { config.intermediate_size } else { 1 })?,
            expert_act: backend
                .buffer(max_rows * config.moe.experts_per_token.max(1), config.moe.intermediate_size.max(1))?,
            shared_act: buffer(config.moe.num_shared * config.moe.intermediate_size)?,
            routing: backend.routing(max_rows, config.moe.experts_per_token, config.moe.num_experts)?,
        })
    }
}

/// Widths that several places derive from the configuration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Widths {
    /// `heads * dim` of a KDA layer.
    pub(crate) kda: usize,
    /// Joint projection of a KDA layer.
    pub(crate) kda_proj: usize,
    /// Joint projection of a DSA layer with an indexer.
    pub(crate) dsa_proj: usize,
    /// Attention and index queries of a DSA layer.
    pub(crate) query: usize,
}

impl Widths {
    pub(crate) fn new(config: &TextConfig) -> Self {
        let kda = config.kda.num_heads * config.kda.head_dim;
        let index = &config.indexer;
        Self {
            kda,
            kda_proj: 3 * kda + config.kda.num_heads + 2 * config.kda.head_dim,
            dsa_proj: config.mla.q_lora_rank + config.mla.kv_lora_rank + 2 * index.head_dim + index.num_heads,
            query: config.mla.num_heads * config.mla.qk_nope_head_dim + index.num_heads * index.head_dim,
        }
    }

    /// The widest input or output of any matrix except the vocabulary's.
    pub(crate) fn widest(&self, config: &TextConfig) -> usize {
        [
            self.kda_proj,
            self.dsa_proj,
            self.query,
            config.mhc.streams * config.hidden_size,
            2 * config.hidden_size,
            config.intermediate_size,
            config.moe.num_shared * config.moe.intermediate_size,
            config.moe.intermediate_size,
            config.mla.num_heads * (config.mla.qk_nope_head_dim + config.mla.v_head_dim),
        ]
        .into_iter()
        .max()
        .unwrap_or(1)
    }
}
