//! Every tensor of a checkpoint, derived from its configuration: name, element type, shape, group, layer.
//!
//! The rule for element types: everything is BF16 except `A_log`, `dt_bias`, `hc_*_base`, `hc_*_scale` and
//! `e_score_correction_bias`, which are F32. The W4A16 artifact differs in one point: each routed matrix of the decoder
//! (not of the MTP layer) is stored as `weight_packed`, `weight_scale` and `weight_shape` instead of `weight`.
//!
//! The order is the order of use: embedding, layers, final norm, head, MTP layer, vision tower.

mod compare;
mod list;

use std::collections::HashMap;

pub use compare::{Difference, Mismatch};

use crate::{
    config::{Config, MlpKind, TextConfig},
    data::DType,
    error::Error,
    int4,
};

/// What a tensor belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Group {
    /// Embedding, final norm, head.
    Global,
    /// The two norms of a decoder layer.
    Layer,
    /// Hyper-connection mixers.
    Mhc,
    /// Kimi delta attention.
    Kda,
    /// Sparse latent attention with its indexer.
    Dsa,
    /// Dense MLP.
    DenseMlp,
    /// Router and shared expert.
    Moe,
    /// Routed experts of the decoder: what W4A16 quantizes.
    MoeRouted,
    /// MTP layer without its routed experts.
    Mtp,
    /// Routed experts of the MTP layer; they stay BF16.
    MtpRouted,
    /// Vision tower and merger.
    Vision,
}

impl Group {
    /// All groups in the order of an inventory.
    pub const ALL: [Self; 11] = [
        Self::Global,
        Self::Layer,
        Self::Mhc,
        Self::Kda,
        Self::Dsa,
        Self::DenseMlp,
        Self::Moe,
        Self::MoeRouted,
        Self::Mtp,
        Self::MtpRouted,
        Self::Vision,
    ];

    /// Short name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Global => "global",
            Self::Layer => "layer",
            Self::Mhc => "mhc",
            Self::Kda => "kda",
            Self::Dsa => "dsa",
            Self::DenseMlp => "dense_mlp",
            Self::Moe => "moe",
            Self::MoeRouted => "moe_routed",
            Self::Mtp => "mtp",
            Self::MtpRouted => "mtp_routed",
            Self::Vision => "vision",
        }
    }

    /// Whether tensors of both groups, when in the same layer (or both in none), are loaded together.
    pub(crate) fn is_same_unit(self, other: Self) -> bool {
        (self == Self::Vision) == (other == Self::Vision)
    }

    /// What it is, in words.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Global => "embedding, final norm, head",
            Self::Layer => "layer norms",
            Self::Mhc => "hyper-connections",
            Self::Kda => "linear attention (KDA)",
            Self::Dsa => "sparse attention (DSA)",
            Self::DenseMlp => "dense MLP",
            Self::Moe => "router and shared expert",
            Self::MoeRouted => "routed experts",
            Self::Mtp => "MTP layer without experts",
            Self::MtpRouted => "MTP routed experts",
            Self::Vision => "vision tower",
        }
    }
}

/// Which of an expert's three matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Projection {
    /// `gate_proj` `[width, hidden]`.
    Gate,
    /// `up_proj` `[width, hidden]`.
    Up,
    /// `down_proj` `[hidden, width]`.
    Down,
}

impl Projection {
    /// Gate, up, down.
    pub const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];

    /// The module name in tensor names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gate => "gate_proj",
            Self::Up => "up_proj",
            Self::Down => "down_proj",
        }
    }
}

/// A matrix of a routed expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertMatrix {
    /// Layer.
    pub layer: usize,
    /// Expert of the layer.
    pub expert: usize,
    /// Which matrix.
    pub projection: Projection,
    /// Rows: the width of its output.
    pub rows: usize,
    /// Columns: the width of its input.
    pub cols: usize,
}

impl ExpertMatrix {
    /// Name without the last part: `....mlp.experts.E.gate_proj`.
    pub fn base(&self) -> String {
        let Self { layer, expert, projection, .. } = self;
        format!("model.language_model.layers.{layer}.mlp.experts.{expert}.{}", projection.name())
    }

    /// `BASE.weight`: the BF16 tensor.
    pub fn weight(&self) -> String {
        format!("{}.weight", self.base())
    }

    /// `BASE.weight_packed`: I32 `[rows, cols / 8]`.
    pub fn packed(&self) -> String {
        format!("{}.weight_packed", self.base())
    }

    /// `BASE.weight_scale`: BF16 `[rows, cols / 128]`.
    pub fn scale(&self) -> String {
        format!("{}.weight_scale", self.base())
    }

    /// `BASE.weight_shape`: I64 `[2]`.
    pub fn shape(&self) -> String {
        format!("{}.weight_shape", self.base())
    }
}

impl TextConfig {
    /// The matrices of the routed experts of one layer, by expert, then gate, up, down.
    pub fn expert_matrices(&self, layer: usize) -> impl Iterator<Item = ExpertMatrix> + use<> {
        let (experts, width, hidden) = (self.moe.num_experts, self.moe.intermediate_size, self.hidden_size);
        (0..experts).flat_map(move |expert| {
            Projection::ALL.map(|projection| {
                let (rows, cols) = if projection == Projection::Down { (hidden, width) } else { (width, hidden) };
                ExpertMatrix { layer, expert, projection, rows, cols }
            })
        })
    }

    /// All matrices that W4A16 quantizes: the routed experts of the decoder's sparse layers.
    pub fn quantized_matrices(&self) -> impl Iterator<Item = ExpertMatrix> + '_ {
        let sparse = (0..self.num_hidden_layers).filter(|&l| self.mlp[l] == MlpKind::Sparse);
        sparse.flat_map(|layer| self.expert_matrices(layer))
    }
}

/// One tensor of an inventory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// What it belongs to.
    pub group: Group,
    /// Layer (the MTP layer counts on from the decoder's); none for global and vision tensors.
    pub layer: Option<usize>,
}

impl TensorSpec {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&n| n as u64).product()
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.size() as u64
    }
}

/// Number and size of the tensors of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sum {
    /// Tensors.
    pub tensors: u64,
    /// Bytes.
    pub bytes: u64,
}

/// The tensors of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    tensors: Vec<TensorSpec>,
    by_name: HashMap<String, usize>,
}

impl Inventory {
    /// The BF16 checkpoint of a configuration.
    pub fn bf16(config: &Config) -> Self {
        let mut list = list::List::default();
        list.text(&config.text);
        if let Some(vision) = &config.vision {
            list.vision(vision);
        }
        Self::from_tensors(list.tensors)
    }

    /// The W4A16 artifact of a configuration.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the input width of an expert matrix is not a multiple of the group size.
    pub fn w4a16(config: &Config) -> Result<Self, Error> {
        Self::bf16(config).as_w4a16()
    }

    /// The artifact that W4A16 makes of this (BF16) inventory.
    ///
    /// # Errors
    /// As [`Inventory::w4a16`].
    pub fn as_w4a16(&self) -> Result<Self, Error> {
        let mut tensors = Vec::with_capacity(self.tensors.len());
        for spec in &self.tensors {
            let &[rows, cols] = spec.shape.as_slice() else {
                tensors.push(spec.clone());
                continue;
            };
            if spec.group != Group::MoeRouted {
                tensors.push(spec.clone());
                continue;
            }
            if !cols.is_multiple_of(int4::GROUP) {
                return Err(Error::invalid(
                    format!("tensor `{}`", spec.name),
                    format!("a multiple of {} columns", int4::GROUP),
                    cols,
                    "group quantization needs whole groups; this model cannot be stored as W4A16",
                ));
            }
            let part = |suffix: &str, dtype, shape: &[usize]| TensorSpec {
                name: format!("{}_{suffix}", spec.name),
                dtype,
                shape: shape.to_vec(),
                ..spec.clone()
            };
            tensors.push(part("packed", DType::I32, &[rows, int4::words(cols, int4::BITS)]));
            tensors.push(part("scale", DType::Bf16, &[rows, cols / int4::GROUP]));
            tensors.push(part("shape", DType::I64, &[2]));
        }
        Ok(Self::from_tensors(tensors))
    }

    fn from_tensors(tensors: Vec<TensorSpec>) -> Self {
        let by_name = tensors.iter().enumerate().map(|(i, spec)| (spec.name.clone(), i)).collect();
        Self { tensors, by_name }
    }

    /// The tensors in order of use.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// The tensor of a name.
    pub fn find(&self, name: &str) -> Option<&TensorSpec> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// Number and size of all tensors.
    pub fn total(&self) -> Sum {
        sum(self.tensors.iter())
    }

    /// Number and size of the tensors of one group.
    pub fn sum(&self, group: Group) -> Sum {
        sum(self.tensors.iter().filter(|spec| spec.group == group))
    }
}

fn sum<'a>(specs: impl Iterator<Item = &'a TensorSpec>) -> Sum {
    specs.fold(Sum::default(), |sum, spec| Sum {
        tensors: sum.tensors + 1,
        bytes: sum.bytes.saturating_add(spec.bytes()),
    })
}
