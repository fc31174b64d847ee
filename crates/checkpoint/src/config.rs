//! The model description that everything else reads.
//!
//! [`Config`] is the *resolved* form of a `config.json`: aliases are gone, optional keys have their documented values and
//! the layer lists are explicit. Constants of the model exist nowhere else. [`Config::parse`] is the only way in, so every
//! value that it guarantees (see [`ConfigError`]) may be relied on downstream.

mod error;
mod object;
mod parse;

use std::fmt;

pub use error::ConfigError;

/// A resolved `config.json` (nested or flat form).
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The text model.
    pub text: TextConfig,
    /// The vision tower; absent in text-only (flat) configurations.
    pub vision: Option<VisionConfig>,
    /// Ids of the multimodal placeholder tokens; absent in text-only configurations.
    pub media: Option<MediaTokens>,
    /// The `quantization_config` block exactly as found, if any.
    pub quantization: Option<serde_json::Value>,
}

/// What a decoder layer's attention is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionKind {
    /// Kimi delta attention (`linear_attention`).
    Kda,
    /// Sparse latent attention (`deepseek_sparse_attention`, `indexed_attention`, `full_attention`).
    Dsa,
}

/// What a decoder layer's MLP is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpKind {
    /// One SwiGLU of `intermediate_size`.
    Dense,
    /// Routed experts plus the shared expert.
    Sparse,
}

/// Whether a DSA layer selects tokens itself or reuses the selection of the layer right before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexerKind {
    /// The layer has its own indexer.
    Full,
    /// The layer has no indexer tensors and reuses the preceding layer's selection.
    Shared,
}

/// The text model.
#[derive(Debug, Clone, PartialEq)]
pub struct TextConfig {
    /// Width of a residual stream.
    pub hidden_size: usize,
    /// Width of the dense MLP.
    pub intermediate_size: usize,
    /// Decoder layers, without the MTP layer.
    pub num_hidden_layers: usize,
    /// MTP layers stored after the decoder layers (0 or 1).
    pub num_nextn_predict_layers: usize,
    /// Attention of each decoder layer, `[num_hidden_layers]`.
    pub attention: Vec<AttentionKind>,
    /// MLP of each decoder layer, `[num_hidden_layers]`.
    pub mlp: Vec<MlpKind>,
    /// Kimi delta attention.
    pub kda: KdaConfig,
    /// Latent attention of the DSA layers.
    pub mla: MlaConfig,
    /// The indexer of the DSA layers.
    pub indexer: IndexerConfig,
    /// The mixture of experts.
    pub moe: MoeConfig,
    /// Hyper-connections.
    pub mhc: MhcConfig,
    /// SwiGLU clamp.
    pub swiglu_limit: f32,
    /// Epsilon of every RMSNorm of the text model.
    pub rms_norm_eps: f32,
    /// Embedding rows (ids beyond the tokenizer are padding).
    pub vocab_size: usize,
    /// Longest context.
    pub max_position_embeddings: usize,
    /// Stop tokens.
    pub eos_token_ids: Vec<u32>,
    /// Padding token.
    pub pad_token_id: Option<u32>,
}

/// Kimi delta attention.
#[derive(Debug, Clone, PartialEq)]
pub struct KdaConfig {
    /// Heads.
    pub num_heads: usize,
    /// Width of a head's keys and values.
    pub head_dim: usize,
    /// Taps of the short convolution.
    pub conv_kernel: usize,
    /// Lower bound of the log-decay (negative).
    pub gate_lower_bound: f32,
}

/// Latent attention (NoPE: no rotary part).
#[derive(Debug, Clone, PartialEq)]
pub struct MlaConfig {
    /// Heads.
    pub num_heads: usize,
    /// Rank of the query projection.
    pub q_lora_rank: usize,
    /// Width of the cached latent.
    pub kv_lora_rank: usize,
    /// Width of a head's query and key.
    pub qk_nope_head_dim: usize,
    /// Width of a head's value.
    pub v_head_dim: usize,
}

/// The kpool indexer.
#[derive(Debug, Clone, PartialEq)]
pub struct IndexerConfig {
    /// Heads.
    pub num_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Tokens selected from pools; a multiple of `kpool`.
    pub topk: usize,
    /// Tokens a pool.
    pub kpool: usize,
    /// Indexer of each decoder layer, `[num_hidden_layers]` (meaningful at DSA layers).
    pub kinds: Vec<IndexerKind>,
    /// Whether chained MTP steps reuse the first step's selection.
    pub share_for_mtp: bool,
}

/// The mixture of experts.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    /// Routed experts of a layer.
    pub num_experts: usize,
    /// Experts a token.
    pub experts_per_token: usize,
    /// Shared experts (fused into one of `num_shared * intermediate_size`).
    pub num_shared: usize,
    /// Width of a routed expert.
    pub intermediate_size: usize,
    /// Expert groups of the router.
    pub num_groups: usize,
    /// Groups kept by the router.
    pub topk_groups: usize,
    /// Whether the chosen scores are normalised to sum 1.
    pub normalize: bool,
    /// Factor on the routed weights.
    pub routed_scaling_factor: f32,
}

/// Manifold-constrained hyper-connections.
#[derive(Debug, Clone, PartialEq)]
pub struct MhcConfig {
    /// Residual streams.
    pub streams: usize,
    /// Epsilon of the Sinkhorn normalisation.
    pub eps: f32,
    /// Column normalisations.
    pub sinkhorn_iters: usize,
}

/// The vision tower.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionConfig {
    /// Blocks.
    pub depth: usize,
    /// Width of a block.
    pub hidden_size: usize,
    /// Attention heads.
    pub num_heads: usize,
    /// Width of a block's MLP.
    pub intermediate_size: usize,
    /// Width of the merger's output (the text model's hidden size).
    pub out_hidden_size: usize,
    /// Width of the merger's MLP.
    pub projection_intermediate_size: usize,
    /// Pixels a patch, each way.
    pub patch_size: usize,
    /// Frames a patch.
    pub temporal_patch_size: usize,
    /// Patches a token, each way.
    pub spatial_merge_size: usize,
    /// Colour channels.
    pub in_channels: usize,
    /// SwiGLU clamp.
    pub swiglu_limit: f32,
    /// Epsilon of q/k norm and the post norm.
    pub rms_norm_eps: f32,
    /// Epsilon of norm1 and norm2 (1e-6 for the released tower, else `rms_norm_eps`).
    pub block_norm_eps: f32,
    /// Where `block_norm_eps` comes from.
    pub block_norm_eps_origin: NormEpsOrigin,
}

/// Where the epsilon of the vision blocks' norms comes from; printed wherever the configuration is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormEpsOrigin {
    /// `vision_config.rms_norm_eps`.
    Config,
    /// The tower is the released one (24 blocks of width 1024): it was trained with 1e-6 although its file says 1e-5.
    ReleasedTower,
}

impl fmt::Display for NormEpsOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Config => "vision_config.rms_norm_eps",
            Self::ReleasedTower => "the released tower was trained with it",
        })
    }
}

/// Ids of the multimodal tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MediaTokens {
    /// `<|image|>`.
    pub image: u32,
    /// `<|video|>`.
    pub video: u32,
    /// `<|begin_of_image|>`.
    pub image_start: u32,
    /// `<|end_of_image|>`.
    pub image_end: u32,
    /// `<|begin_of_video|>`.
    pub video_start: u32,
    /// `<|end_of_video|>`.
    pub video_end: u32,
}

impl TextConfig {
    /// Layer index of the MTP layer, if the model has one.
    pub fn mtp_layer(&self) -> Option<usize> {
        (self.num_nextn_predict_layers > 0).then_some(self.num_hidden_layers)
    }

    /// Decoder layers with KDA, in order.
    pub fn kda_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.num_hidden_layers).filter(|&l| self.attention[l] == AttentionKind::Kda)
    }

    /// Decoder layers with DSA, in order (without the MTP layer).
    pub fn dsa_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.num_hidden_layers).filter(|&l| self.attention[l] == AttentionKind::Dsa)
    }

    /// Tokens a query of a DSA layer can attend to at most: `topk + kpool - 1`.
    pub fn selection_width(&self) -> usize {
        self.indexer.topk + self.indexer.kpool - 1
    }
}
