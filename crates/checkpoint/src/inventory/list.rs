//! The list itself: which tensors a configuration implies, block by block.

use super::{Group, TensorSpec};
use crate::{
    config::{AttentionKind, IndexerKind, MlpKind, TextConfig, VisionConfig},
    data::DType,
};

/// An inventory while it is written down. Names are `prefix` + the name of a call.
#[derive(Debug, Default)]
pub(super) struct List {
    pub(super) tensors: Vec<TensorSpec>,
    prefix: String,
    layer: Option<usize>,
}

impl List {
    fn push(&mut self, group: Group, dtype: DType, name: &str, shape: &[usize]) {
        let name = format!("{}{name}", self.prefix);
        self.tensors.push(TensorSpec { name, dtype, shape: shape.to_vec(), group, layer: self.layer });
    }

    fn bf16(&mut self, group: Group, name: &str, shape: &[usize]) {
        self.push(group, DType::Bf16, name, shape);
    }

    fn f32(&mut self, group: Group, name: &str, shape: &[usize]) {
        self.push(group, DType::F32, name, shape);
    }

    pub(super) fn text(&mut self, c: &TextConfig) {
        let hidden = c.hidden_size;
        "model.language_model.".clone_into(&mut self.prefix);
        self.bf16(Group::Global, "embed_tokens.weight", &[c.vocab_size, hidden]);
        for layer in 0..c.num_hidden_layers {
            self.prefix = format!("model.language_model.layers.{layer}.");
            self.layer = Some(layer);
            self.bf16(Group::Layer, "input_layernorm.weight", &[hidden]);
            self.mixer("hc_attn", c);
            match c.attention[layer] {
                AttentionKind::Kda => self.kda(c),
                AttentionKind::Dsa => self.dsa(Group::Dsa, c, c.indexer.kinds[layer]),
            }
            self.bf16(Group::Layer, "post_attention_layernorm.weight", &[hidden]);
            self.mixer("hc_ffn", c);
            match c.mlp[layer] {
                MlpKind::Dense => self.swiglu(Group::DenseMlp, "mlp", c.intermediate_size, hidden),
                MlpKind::Sparse => self.moe(Group::Moe, Group::MoeRouted, layer, c),
            }
        }
        self.layer = None;
        "model.language_model.".clone_into(&mut self.prefix);
        self.bf16(Group::Global, "norm.weight", &[hidden]);
        self.prefix.clear();
        self.bf16(Group::Global, "lm_head.weight", &[c.vocab_size, hidden]);
        if let Some(layer) = c.mtp_layer() {
            self.mtp(layer, c);
        }
    }

    /// A mixer: the matrix makes `streams` pre, `streams` post and `streams^2` combination coefficients.
    fn mixer(&mut self, name: &str, c: &TextConfig) {
        let n = c.mhc.streams;
        let coefficients = 2 * n + n * n;
        self.bf16(Group::Mhc, &format!("{name}_fn"), &[coefficients, n * c.hidden_size]);
        self.f32(Group::Mhc, &format!("{name}_base"), &[coefficients]);
        self.f32(Group::Mhc, &format!("{name}_scale"), &[3]);
    }

    fn kda(&mut self, c: &TextConfig) {
        let (hidden, heads, dim, taps) = (c.hidden_size, c.kda.num_heads, c.kda.head_dim, c.kda.conv_kernel);
        let width = heads * dim;
        let group = Group::Kda;
        for x in ["q", "k", "v"] {
            self.bf16(group, &format!("self_attn.{x}_proj.weight"), &[width, hidden]);
        }
        for x in ["q", "k", "v"] {
            self.bf16(group, &format!("self_attn.{x}_conv1d.weight"), &[width, 1, taps]);
        }
        self.bf16(group, "self_attn.b_proj.weight", &[heads, hidden]);
        for x in ["f", "g"] {
            self.bf16(group, &format!("self_attn.{x}_a_proj.weight"), &[dim, hidden]);
            self.bf16(group, &format!("self_attn.{x}_b_proj.weight"), &[width, dim]);
        }
        self.f32(group, "self_attn.A_log", &[heads]);
        self.f32(group, "self_attn.dt_bias", &[width]);
        self.bf16(group, "self_attn.o_norm.weight", &[dim]);
        self.bf16(group, "self_attn.o_proj.weight", &[hidden, width]);
    }

    fn dsa(&mut self, group: Group, c: &TextConfig, indexer: IndexerKind) {
        let (hidden, m, i) = (c.hidden_size, &c.mla, &c.indexer);
        self.bf16(group, "self_attn.q_a_proj.weight", &[m.q_lora_rank, hidden]);
        self.bf16(group, "self_attn.q_a_layernorm.weight", &[m.q_lora_rank]);
        self.bf16(group, "self_attn.q_b_proj.weight", &[m.num_heads * m.qk_nope_head_dim, m.q_lora_rank]);
        self.bf16(group, "self_attn.kv_a_proj_with_mqa.weight", &[m.kv_lora_rank, hidden]);
        self.bf16(group, "self_attn.kv_a_layernorm.weight", &[m.kv_lora_rank]);
        let kv = m.num_heads * (m.qk_nope_head_dim + m.v_head_dim);
        self.bf16(group, "self_attn.kv_b_proj.weight", &[kv, m.kv_lora_rank]);
        self.bf16(group, "self_attn.o_proj.weight", &[hidden, m.num_heads * m.v_head_dim]);
        if indexer == IndexerKind::Shared {
            return;
        }
        self.bf16(group, "self_attn.indexer.wq_b.weight", &[i.num_heads * i.head_dim, m.q_lora_rank]);
        self.bf16(group, "self_attn.indexer.wk.weight", &[i.head_dim, hidden]);
        self.bf16(group, "self_attn.indexer.k_norm.weight", &[i.head_dim]);
        self.bf16(group, "self_attn.indexer.k_norm.bias", &[i.head_dim]);
        self.bf16(group, "self_attn.indexer.weights_proj.weight", &[i.num_heads, hidden]);
        // These two are stored without the suffix `.weight`.
        self.bf16(group, "self_attn.indexer.index_kpool_compress_ape", &[i.kpool, i.head_dim]);
        self.bf16(group, "self_attn.indexer.index_kpool_compress_gate", &[i.head_dim, hidden]);
    }

    fn swiglu(&mut self, group: Group, module: &str, width: usize, hidden: usize) {
        self.bf16(group, &format!("{module}.gate_proj.weight"), &[width, hidden]);
        self.bf16(group, &format!("{module}.up_proj.weight"), &[width, hidden]);
        self.bf16(group, &format!("{module}.down_proj.weight"), &[hidden, width]);
    }

    fn moe(&mut self, group: Group, routed: Group, layer: usize, c: &TextConfig) {
        let (hidden, moe) = (c.hidden_size, &c.moe);
        self.bf16(group, "mlp.gate.weight", &[moe.num_experts, hidden]);
        self.f32(group, "mlp.gate.e_score_correction_bias", &[moe.num_experts]);
        self.swiglu(group, "mlp.shared_experts", moe.num_shared * moe.intermediate_size, hidden);
        self.tensors.extend(c.expert_matrices(layer).map(|matrix| TensorSpec {
            name: matrix.weight(),
            dtype: DType::Bf16,
            shape: vec![matrix.rows, matrix.cols],
            group: routed,
            layer: Some(layer),
        }));
    }

    /// The MTP layer: sparse attention with its own indexer, experts, plain residual; embedding and head are the trunk's.
    fn mtp(&mut self, layer: usize, c: &TextConfig) {
        self.prefix = format!("model.language_model.layers.{layer}.");
        self.layer = Some(layer);
        let (group, hidden) = (Group::Mtp, c.hidden_size);
        for norm in ["enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm"] {
            self.bf16(group, &format!("{norm}.weight"), &[hidden]);
        }
        self.bf16(group, "eh_proj.weight", &[hidden, 2 * hidden]);
        self.dsa(group, c, IndexerKind::Full);
        self.moe(group, Group::MtpRouted, layer, c);
        self.layer = None;
    }

    pub(super) fn vision(&mut self, v: &VisionConfig) {
        let (group, hidden, out) = (Group::Vision, v.hidden_size, v.out_hidden_size);
        "model.visual.".clone_into(&mut self.prefix);
        let patch = [hidden, v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size];
        self.biased("patch_embed.proj", &patch);
        for block in 0..v.depth {
            self.prefix = format!("model.visual.blocks.{block}.");
            self.bf16(group, "norm1.weight", &[hidden]);
            self.biased("attn.qkv", &[3 * hidden, hidden]);
            self.bf16(group, "attn.q_norm.weight", &[hidden / v.num_heads]);
            self.bf16(group, "attn.k_norm.weight", &[hidden / v.num_heads]);
            self.biased("attn.proj", &[hidden, hidden]);
            self.bf16(group, "norm2.weight", &[hidden]);
            self.biased("mlp.gate_proj", &[v.intermediate_size, hidden]);
            self.biased("mlp.up_proj", &[v.intermediate_size, hidden]);
            self.biased("mlp.down_proj", &[hidden, v.intermediate_size]);
        }
        "model.visual.".clone_into(&mut self.prefix);
        self.bf16(group, "post_layernorm.weight", &[hidden]);
        self.biased("downsample", &[out, hidden, v.spatial_merge_size, v.spatial_merge_size]);
        self.bf16(group, "merger.proj.weight", &[out, out]);
        self.bf16(group, "merger.post_projection_norm.weight", &[out]);
        self.bf16(group, "merger.post_projection_norm.bias", &[out]);
        self.swiglu(group, "merger", v.projection_intermediate_size, out);
    }

    /// A vision weight with a bias over its first axis.
    fn biased(&mut self, name: &str, shape: &[usize]) {
        self.bf16(Group::Vision, &format!("{name}.weight"), shape);
        self.bf16(Group::Vision, &format!("{name}.bias"), &shape[..1]);
    }
}
