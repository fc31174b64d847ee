//! What a checkpoint is, at a glance: configuration, groups of tensors with their sizes, what is quantized, what is wrong.
//!
//! A lone `config.json` is enough: the groups are then those of its inventory. For a directory they are those of the stored
//! tensors, and every deviation from the inventory is listed as a problem.

mod page;

use std::{collections::BTreeMap, path::Path};

use serde::Serialize;
use serde_json::Value;

use crate::{
    checkpoint::Checkpoint,
    config::{AttentionKind, Config, IndexerKind, MlpKind},
    data::DType,
    error::Error,
    int4,
    inventory::{Group, Inventory},
    scheme,
};

/// How the routed experts are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Storage {
    /// BF16 matrices.
    Bf16,
    /// FP8 matrices with block scales, read as BF16.
    Fp8,
    /// INT4 codes with group scales.
    W4a16,
}

impl Storage {
    fn words(self) -> &'static str {
        match self {
            Self::Bf16 => "a BF16 checkpoint",
            Self::Fp8 => "a block-FP8 checkpoint",
            Self::W4a16 => "a W4A16 artifact",
        }
    }
}

/// The result of [`inspect`]; [`Inspection::to_text`] is its readable form.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// What was inspected.
    pub subject: String,
    /// Whether the figures below are of stored tensors, or derived from the configuration.
    pub stored: bool,
    /// How the routed experts are (or would be) stored.
    pub storage: Storage,
    /// The configuration.
    pub model: ModelSummary,
    /// Groups of tensors, in order of use; empty groups are left out.
    pub groups: Vec<GroupSummary>,
    /// Tensors in all.
    pub tensors: u64,
    /// Bytes of tensors in all.
    pub bytes: u64,
    /// Shard files (0 for a lone configuration).
    pub shards: usize,
    /// What is quantized; none in a BF16 checkpoint.
    pub quantized: Option<QuantizedSummary>,
    /// Everything that is wrong, one sentence each.
    pub problems: Vec<String>,
}

/// The figures of a configuration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelSummary {
    /// Parameters (elements of the BF16 inventory).
    pub parameters: u64,
    /// Parameters of the decoder that a token meets: without the experts that it does not choose, embedding, head, MTP layer
    /// and vision tower.
    pub active_parameters: u64,
    /// Decoder layers.
    pub layers: usize,
    /// Layers with linear attention.
    pub kda_layers: usize,
    /// Layers with sparse attention.
    pub dsa_layers: usize,
    /// Sparse layers that reuse the selection of the layer before.
    pub shared_indexer_layers: usize,
    /// Layers with a dense MLP.
    pub dense_mlp_layers: usize,
    /// MTP layers.
    pub mtp_layers: usize,
    /// Width of a residual stream.
    pub hidden_size: usize,
    /// Residual streams.
    pub streams: usize,
    /// Routed experts of a layer.
    pub experts: usize,
    /// Experts a token chooses.
    pub experts_per_token: usize,
    /// Shared experts of a layer.
    pub shared_experts: usize,
    /// Width of an expert.
    pub expert_width: usize,
    /// Tokens selected by the indexer.
    pub index_topk: usize,
    /// Tokens a pool.
    pub index_kpool: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Longest context in tokens.
    pub context_tokens: usize,
    /// Stop tokens.
    pub eos_token_ids: Vec<u32>,
    /// The vision tower, if any.
    pub vision: Option<VisionSummary>,
}

/// The figures of a vision tower.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VisionSummary {
    /// Blocks.
    pub depth: usize,
    /// Width of a block.
    pub hidden_size: usize,
    /// Epsilon of the blocks' norms.
    pub block_norm_eps: f32,
    /// Where that epsilon comes from.
    pub block_norm_eps_origin: String,
}

/// A group of tensors.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupSummary {
    /// Short name of the group; `unknown` for tensors that the configuration does not imply.
    pub group: &'static str,
    /// In words.
    pub description: &'static str,
    /// Number of tensors.
    pub tensors: u64,
    /// Bytes.
    pub bytes: u64,
    /// Element types with the number of tensors each.
    pub dtypes: BTreeMap<&'static str, u64>,
}

/// What is quantized.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct QuantizedSummary {
    /// Matrices.
    pub matrices: u64,
    /// Weights in them.
    pub weights: u64,
    /// Their bytes, scales and shapes included.
    pub bytes: u64,
    /// Bits for each weight, scales and shapes included.
    pub bits_per_weight: f64,
}

/// Inspects a checkpoint directory or a `config.json`. A lone `config.json` of a W4A16 artifact gives the figures of that
/// artifact, any other those of the BF16 checkpoint. With `as_w4a16` the figures are those of the W4A16 artifact that the
/// configuration implies.
///
/// # Errors
/// [`Error::Config`] or [`Error::Io`] when there is nothing to inspect; [`Error::Invalid`] when the model cannot be stored as
/// W4A16 and that is asked for. Damage is not an error here but a problem in the result.
pub fn inspect(path: &Path, as_w4a16: bool) -> Result<Inspection, Error> {
    let subject = path.display().to_string();
    if as_w4a16 || !path.is_dir() {
        let config = Config::from_file(path)?;
        let stated = config.quantization.as_ref().map(storage_of);
        let packed = as_w4a16 || stated == Some(Some(Storage::W4a16));
        let inventory = if packed { Inventory::w4a16(&config)? } else { Inventory::bf16(&config) };
        let mut inspection = derived(subject, &config, &inventory, packed);
        inspection.problems.extend(config.quantization.as_ref().and_then(block_problem));
        return Ok(inspection);
    }
    let (checkpoint, damages) = Checkpoint::survey(path)?;
    let mut inspection = stored(subject, &checkpoint)?;
    inspection.problems.splice(0..0, damages.iter().map(ToString::to_string));
    Ok(inspection)
}

/// As [`inspect`], for a checkpoint that is already open (the one inside the program has no path).
///
/// # Errors
/// [`Error::Invalid`] when the model cannot be stored as W4A16 and that is asked for.
pub fn inspect_open(subject: &str, checkpoint: &Checkpoint, as_w4a16: bool) -> Result<Inspection, Error> {
    if as_w4a16 {
        let config = checkpoint.config();
        return Ok(derived(subject.to_owned(), config, &Inventory::w4a16(config)?, true));
    }
    stored(subject.to_owned(), checkpoint)
}

/// What is wrong with a `quantization_config`, by itself.
fn block_problem(block: &Value) -> Option<String> {
    let at = |field: &str| format!("config.json, `quantization_config{field}`");
    match storage_of(block) {
        None => {
            let text = |key: &str| block[key].as_str().unwrap_or("none").to_owned();
            Some(format!(
                "{}: expected that of a W4A16 artifact (compressed-tensors, pack-quantized) or of a block-FP8 checkpoint \
                 (fp8, e4m3), found quant_method `{}`, format `{}`; loaders will not read these tensors",
                at(""),
                text("quant_method"),
                text("format")
            ))
        }
        Some(Storage::W4a16) => scheme::unreadable_field(block).map(|(field, expected, found)| {
            format!("{}: expected {expected}, found {found}; loaders would misread the codes", at(&field))
        }),
        Some(_) => None,
    }
}

/// What is wrong with a `quantization_config` beside tensors that are stored like this.
fn contradiction(storage: Storage, block: Option<&Value>) -> Option<String> {
    let Some(block) = block else {
        return (storage == Storage::W4a16).then(|| {
            "config.json, `quantization_config`: expected the block of a W4A16 artifact, found none; loaders will take the \
             packed tensors for unknown ones"
                .to_owned()
        });
    };
    let stated = storage_of(block).filter(|&stated| stated != storage);
    let other = stated.map(|stated| {
        format!(
            "config.json, `quantization_config`: expected the block of {}, as the tensors are stored, found that of {}; \
             take config.json from where the tensors are from",
            storage.words(),
            stated.words()
        )
    });
    other.or_else(|| block_problem(block))
}

/// What a `quantization_config` says of the routed experts; none if it is not a form that this program reads.
fn storage_of(block: &Value) -> Option<Storage> {
    let text = |key: &str| block[key].as_str();
    match (text("quant_method"), text("format"), text("fmt")) {
        (Some("compressed-tensors"), Some("pack-quantized"), _) => Some(Storage::W4a16),
        (Some("fp8"), _, None | Some("e4m3")) => Some(Storage::Fp8),
        _ => None,
    }
}

fn derived(subject: String, config: &Config, inventory: &Inventory, as_w4a16: bool) -> Inspection {
    let tensors = inventory.tensors().iter().map(|spec| (spec.group.into(), spec.dtype, spec.bytes()));
    let groups = summarize(tensors);
    Inspection {
        subject,
        stored: false,
        storage: if as_w4a16 { Storage::W4a16 } else { Storage::Bf16 },
        model: model(config),
        quantized: as_w4a16.then(|| quantized(config, &groups)),
        tensors: groups.iter().map(|g| g.tensors).sum(),
        bytes: groups.iter().map(|g| g.bytes).sum(),
        groups,
        shards: 0,
        problems: Vec::new(),
    }
}

fn stored(subject: String, checkpoint: &Checkpoint) -> Result<Inspection, Error> {
    let (config, shards) = (checkpoint.config(), checkpoint.shards());
    let storage = if shards.names().any(|name| name.ends_with(".weight_packed")) {
        Storage::W4a16
    } else if shards.tensors().any(|(_, tensor)| tensor.dtype == DType::F8E4M3) {
        Storage::Fp8
    } else {
        Storage::Bf16
    };
    let inventory = match storage {
        Storage::W4a16 => Inventory::w4a16(config)?,
        Storage::Bf16 | Storage::Fp8 => Inventory::bf16(config),
    };
    let group = |name: &str| {
        // The scale of an FP8 weight belongs where the weight does.
        let weight = name.strip_suffix("_scale_inv").unwrap_or(name);
        inventory.find(weight).map_or(Heading::Unknown, |spec| spec.group.into())
    };
    let tensors = shards.tensors().map(|(name, tensor)| (group(name), tensor.dtype, tensor.range.len() as u64));
    let groups = summarize(tensors);
    let mut problems: Vec<String> = inventory.compare(checkpoint).iter().map(ToString::to_string).collect();
    let total: u64 = groups.iter().map(|g| g.bytes).sum();
    if let Some(stated) = shards.index_total_size().filter(|&stated| stated != total) {
        problems.push(format!(
            "index, `total_size`: expected the {total} bytes of all tensors, found {stated}; some tools write the size of the \
             files instead"
        ));
    }
    problems.extend(contradiction(storage, config.quantization.as_ref()));
    Ok(Inspection {
        subject,
        stored: true,
        storage,
        model: model(config),
        quantized: (storage == Storage::W4a16).then(|| quantized(config, &groups)),
        tensors: groups.iter().map(|g| g.tensors).sum(),
        bytes: total,
        groups,
        shards: shards.files().len(),
        problems,
    })
}

/// A group, or what fits none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Heading {
    Known(Group),
    Unknown,
}

impl From<Group> for Heading {
    fn from(group: Group) -> Self {
        Self::Known(group)
    }
}

fn summarize(tensors: impl Iterator<Item = (Heading, DType, u64)>) -> Vec<GroupSummary> {
    let mut groups: BTreeMap<Heading, GroupSummary> = BTreeMap::new();
    for (heading, dtype, bytes) in tensors {
        let summary = groups.entry(heading).or_insert_with(|| {
            let (group, description) = match heading {
                Heading::Known(group) => (group.name(), group.describe()),
                Heading::Unknown => ("unknown", "not implied by config.json"),
            };
            GroupSummary { group, description, tensors: 0, bytes: 0, dtypes: BTreeMap::new() }
        });
        summary.tensors += 1;
        summary.bytes = summary.bytes.saturating_add(bytes);
        *summary.dtypes.entry(dtype.name()).or_default() += 1;
    }
    groups.into_values().collect()
}

fn quantized(config: &Config, groups: &[GroupSummary]) -> QuantizedSummary {
    let routed = groups.iter().find(|g| g.group == Group::MoeRouted.name());
    let bytes = routed.map_or(0, |g| g.bytes);
    let weights: u64 = config.text.quantized_matrices().map(|m| (m.rows * m.cols) as u64).sum();
    QuantizedSummary {
        matrices: routed.and_then(|g| g.dtypes.get(DType::I32.name()).copied()).unwrap_or(0),
        weights,
        bytes,
        bits_per_weight: if weights == 0 { f64::from(int4::BITS) } else { bytes as f64 * 8.0 / weights as f64 },
    }
}

fn model(config: &Config) -> ModelSummary {
    let text = &config.text;
    let inventory = Inventory::bf16(config);
    let elements = |group: Group| {
        inventory.tensors().iter().filter(|s| s.group == group).map(|s| s.elements()).fold(0, u64::saturating_add)
    };
    let trunk = [Group::Layer, Group::Mhc, Group::Kda, Group::Dsa, Group::DenseMlp, Group::Moe];
    let routed = elements(Group::MoeRouted) / text.moe.num_experts as u64 * text.moe.experts_per_token as u64;
    let dsa = |l: &usize| text.attention[*l] == AttentionKind::Dsa;
    ModelSummary {
        parameters: inventory.tensors().iter().map(|s| s.elements()).fold(0, u64::saturating_add),
        active_parameters: trunk.into_iter().map(elements).fold(routed, u64::saturating_add),
        layers: text.num_hidden_layers,
        kda_layers: text.kda_layers().count(),
        dsa_layers: text.dsa_layers().count(),
        shared_indexer_layers: (0..text.num_hidden_layers)
            .filter(dsa)
            .filter(|&l| text.indexer.kinds[l] == IndexerKind::Shared)
            .count(),
        dense_mlp_layers: text.mlp.iter().filter(|&&m| m == MlpKind::Dense).count(),
        mtp_layers: text.num_nextn_predict_layers,
        hidden_size: text.hidden_size,
        streams: text.mhc.streams,
        experts: text.moe.num_experts,
        experts_per_token: text.moe.experts_per_token,
        shared_experts: text.moe.num_shared,
        expert_width: text.moe.intermediate_size,
        index_topk: text.indexer.topk,
        index_kpool: text.indexer.kpool,
        vocab_size: text.vocab_size,
        context_tokens: text.max_position_embeddings,
        eos_token_ids: text.eos_token_ids.clone(),
        vision: config.vision.as_ref().map(|v| VisionSummary {
            depth: v.depth,
            hidden_size: v.hidden_size,
            block_norm_eps: v.block_norm_eps,
            block_norm_eps_origin: v.block_norm_eps_origin.to_string(),
        }),
    }
}
