//! Which part of a tensor a rank holds.
//!
//! Heads, inner widths of MLPs and rows of the output matrix are shared by the ranks; whatever every rank needs whole (norms,
//! mixers, routers, latent projections, the indexer, the embedding, the vision tower) is on each of them. Routed experts are
//! sliced like other MLPs, or kept whole and dealt out.

use glimmer_checkpoint::{
    data::DType,
    inventory::{Group, TensorSpec},
};

/// Ranks that share a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ranks {
    /// How many.
    pub count: usize,
    /// Whether each routed expert is whole on one rank, instead of sliced over all.
    pub whole_experts: bool,
}

/// What a rank holds of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// All of it.
    Whole,
    /// One of as many parts as there are ranks; of routed experts that are dealt out, one of so many tensors.
    Part,
    /// Nothing: it is only there for loaders.
    Nothing,
}

impl Held {
    /// Bytes of a rank's part, as it lies in memory: vectors are widened to f32, matrices stay as stored.
    pub fn bytes(self, spec: &TensorSpec, ranks: Ranks) -> u64 {
        let bytes = if is_vector(spec) { 4 * spec.elements() } else { spec.bytes() };
        match self {
            Self::Whole => bytes,
            Self::Part => bytes.div_ceil(ranks.count.max(1) as u64),
            Self::Nothing => 0,
        }
    }
}

/// Parameters that are no matrices.
fn is_vector(spec: &TensorSpec) -> bool {
    spec.shape.len() <= 1 || spec.name.ends_with("_ape")
}

/// What each rank holds of a tensor.
pub fn held(spec: &TensorSpec, ranks: Ranks) -> Held {
    if spec.dtype == DType::I64 {
        // Shapes of packed matrices.
        return Held::Nothing;
    }
    if ranks.count <= 1 {
        return Held::Whole;
    }
    let module = |names: &[&str]| names.iter().any(|name| spec.name.contains(&format!(".{name}.")));
    let part = match spec.group {
        Group::MoeRouted | Group::MtpRouted | Group::DenseMlp => true,
        Group::Kda => !module(&["f_a_proj", "g_a_proj", "o_norm"]),
        Group::Dsa | Group::Mtp | Group::Moe => {
            module(&["q_b_proj", "kv_b_proj", "o_proj", "shared_experts"]) && !module(&["indexer"])
        }
        Group::Global => spec.name.ends_with("lm_head.weight"),
        Group::Layer | Group::Mhc | Group::Vision => false,
    };
    if part { Held::Part } else { Held::Whole }
}
