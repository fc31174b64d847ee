//! Which tensor of the artifact goes into which shard.
//!
//! First come the shards of everything that is copied, then one shard for each layer with routed experts. The names carry
//! the number of shards, so the plan is made before anything is written.

use glimmer_checkpoint::inventory::{Difference, Group, Inventory};
use glimmer_checkpoint::sharding::{plan_shards, shard_name};
use glimmer_checkpoint::writer::TensorHeader;
use glimmer_checkpoint::{Checkpoint, DType, ExpertMatrix, MlpKind, TensorSpec, int4};

use crate::copy::CopyShard;
use crate::error::{Error, Result};

/// The shards of an artifact, in the order of their numbers.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Shards of copied tensors.
    pub(crate) copies: Vec<CopyShard>,
    /// Shards of quantized layers.
    pub(crate) layers: Vec<LayerShard>,
    /// Tensors of the source that its configuration does not imply; they are copied all the same.
    pub(crate) unexpected: Vec<String>,
}

/// A shard of the quantized experts of one layer.
#[derive(Debug)]
pub(crate) struct LayerShard {
    /// File name.
    pub(crate) file: String,
    /// The layer.
    pub(crate) layer: usize,
}

impl Plan {
    /// Checks the source against its configuration and lays out the shards; copied ones hold at most `shard_bytes`.
    ///
    /// # Errors
    /// [`Error::AlreadyQuantized`], [`Error::Source`], or that a matrix does not come in whole groups.
    pub(crate) fn new(source: &Checkpoint, shard_bytes: u64) -> Result<Self> {
        refuse_artifact(source)?;
        let config = source.config();
        let inventory = Inventory::bf16(config);
        inventory.as_w4a16()?;
        let mismatches = inventory.compare(source);
        let serious: Vec<_> = mismatches.iter().filter(|m| !matches!(m.difference, Difference::Unexpected)).collect();
        if let Some(first) = serious.first() {
            return Err(Error::Source { problem: first.to_string(), count: serious.len() });
        }
        let mut copied: Vec<TensorSpec> =
            inventory.tensors().iter().filter(|spec| spec.group != Group::MoeRouted).cloned().collect();
        let mut unexpected = Vec::new();
        for mismatch in mismatches.iter().filter(|m| matches!(m.difference, Difference::Unexpected)) {
            if let Some((dtype, shape)) = source.describe(&mismatch.tensor) {
                let (name, shape) = (mismatch.tensor.clone(), shape.to_vec());
                unexpected.push(name.clone());
                copied.push(TensorSpec { name, dtype, shape, group: Group::Global, layer: None });
            }
        }
        let parts = plan_shards(&copied, shard_bytes);
        let sparse: Vec<usize> =
            (0..config.text.num_hidden_layers).filter(|&l| config.text.mlp[l] == MlpKind::Sparse).collect();
        let count = parts.len() + sparse.len();
        let describe = |spec: &TensorSpec| match source.describe(&spec.name) {
            Some((dtype, shape)) => TensorHeader { name: spec.name.clone(), dtype, shape: shape.to_vec() },
            None => TensorHeader::from(spec),
        };
        let copies = parts.iter().enumerate().map(|(i, part)| CopyShard {
            file: shard_name(i + 1, count),
            tensors: part.tensors.iter().map(describe).collect(),
        });
        let copies: Vec<_> = copies.collect();
        let layers = sparse
            .iter()
            .enumerate()
            .map(|(i, &layer)| LayerShard { file: shard_name(copies.len() + i + 1, count), layer });
        Ok(Self { layers: layers.collect(), copies, unexpected })
    }
}

/// The tensors of a layer's shard in the order in which they are made: gate and up of all experts, then down of all.
pub(crate) fn layer_tensors(matrices: &[ExpertMatrix]) -> Vec<TensorHeader> {
    let header = |name, dtype, shape| TensorHeader { name, dtype, shape };
    matrices
        .iter()
        .flat_map(|m| {
            [
                header(m.packed(), DType::I32, vec![m.rows, int4::words(m.cols, int4::BITS)]),
                header(m.scale(), DType::Bf16, vec![m.rows, m.cols / int4::GROUP]),
                header(m.shape(), DType::I64, vec![2]),
            ]
        })
        .collect()
}

fn refuse_artifact(source: &Checkpoint) -> Result<()> {
    if let Some(name) = source.names().find(|n| n.ends_with(".weight_packed")) {
        return Err(Error::AlreadyQuantized { found: format!("tensor `{name}`") });
    }
    let method = source.config().quantization.as_ref().and_then(|q| q.get("quant_method")).and_then(|m| m.as_str());
    match method {
        None | Some("fp8") => Ok(()),
        Some(method) => Err(Error::AlreadyQuantized { found: format!("quant_method `{method}` in config.json") }),
    }
}
