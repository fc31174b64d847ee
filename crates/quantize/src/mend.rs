//! Repairs of artifacts that other tools made: a lost draft layer, a quantization block that loaders misread.
//!
//! Both only add or replace what they are for. A manifest, where there is one, is brought up to date.

use std::path::Path;

use glimmer_checkpoint::manifest::{MANIFEST_FILE, Manifest};
use glimmer_checkpoint::scheme::{IgnoreStyle, Scheme, quantization_config, with_quantization_config};
use glimmer_checkpoint::shards::INDEX_FILE;
use glimmer_checkpoint::writer::{ShardReceipt, TensorHeader, write_file};
use glimmer_checkpoint::{Checkpoint, Config};
use serde_json::{Map, Value, json};

use crate::copy::{CopyShard, NonFiniteTensor, copy_shard};
use crate::error::{Error, Result};
use crate::gates::{Offender, block_problems};

/// File of the added draft layer.
pub const MTP_SHARD: &str = "model-mtp-00001-of-00001.safetensors";
/// Name under which [`fix_config`] keeps the text that it replaces.
pub const CONFIG_COPY: &str = "config.json.before-fix";
/// Where a block keeps the group of the routed experts.
const GROUP: &str = "/config_groups/group_0";

/// What [`merge_mtp`] did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MtpMerge {
    /// Tensors added.
    pub added: usize,
    /// Those of them that hold NaN or infinity, as the source does.
    pub non_finite: Vec<NonFiniteTensor>,
}

/// Adds the tensors of the source's MTP layer that the artifact lacks, in a shard of their own; entries of the index that
/// were there stay as they were. With none lacking nothing is written.
///
/// # Errors
/// [`Error::Source`] when the source has no MTP layer, and what reading and writing can go wrong with.
pub fn merge_mtp(source: &Checkpoint, artifact: &Path) -> Result<MtpMerge> {
    let Some(layer) = source.config().text.mtp_layer() else {
        let problem = "`num_nextn_predict_layers` is 0: there is no MTP layer to add".to_owned();
        return Err(Error::Source { problem, count: 1 });
    };
    let part = format!(".layers.{layer}.");
    let present = Checkpoint::open(artifact)?;
    let tensors: Vec<TensorHeader> = source
        .names()
        .filter(|name| name.contains(&part) && !present.has(name))
        .filter_map(|name| {
            let (dtype, shape) = source.describe(name)?;
            Some(TensorHeader { name: name.to_owned(), dtype, shape: shape.to_vec() })
        })
        .collect();
    if tensors.is_empty() {
        return Ok(MtpMerge::default());
    }
    let count = tensors.len();
    let (receipt, non_finite) = copy_shard(source, artifact, &CopyShard { file: MTP_SHARD.to_owned(), tensors })?;
    let mut index = read_index(&present)?;
    let before = index["metadata"]["total_size"].as_u64().unwrap_or_else(|| present.shards().tensor_bytes());
    index["metadata"]["total_size"] = json!(before + receipt.tensor_bytes);
    if let Some(map) = index["weight_map"].as_object_mut() {
        map.extend(receipt.tensors.iter().map(|(name, _)| (name.clone(), json!(MTP_SHARD))));
    }
    let text = format!("{index:#}\n");
    write_file(artifact, INDEX_FILE, text.as_bytes())?;
    update_manifest(artifact, Some(&receipt), &[(INDEX_FILE, text.as_bytes())])?;
    Ok(MtpMerge { added: count, non_finite })
}

/// What [`fix_config`] did, and what it left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigFix {
    /// The fields that were replaced; without any, nothing was written.
    pub replaced: Vec<&'static str>,
    /// Fields that readers of this layout reject and that this repair does not touch.
    pub wrong: Vec<Offender>,
}

/// Replaces `targets` and `ignore` of the artifact's `quantization_config` by the recommended ones; everything else of
/// config.json keeps its value, and of the block it is said what is wrong. The old text stays beside it as [`CONFIG_COPY`].
///
/// # Errors
/// [`Error::ConfigText`] when there is no block of that kind, and what reading and writing can go wrong with.
pub fn fix_config(artifact: &Path, style: IgnoreStyle) -> Result<ConfigFix> {
    let path = artifact.join("config.json");
    let text = std::fs::read_to_string(&path).map_err(|e| Error::io(&path, "read", e))?;
    let refuse = |found: String| Error::ConfigText { expected: "a `quantization_config` with `group_0`", found };
    let config = Config::parse(&text).map_err(glimmer_checkpoint::Error::from)?;
    let Some(mut block) = config.quantization.clone() else { return Err(refuse("none".to_owned())) };
    let recommended = quantization_config(&config, Scheme { static_order: true, ignore: style });
    if block.pointer(GROUP).is_none_or(|group| !group.is_object()) {
        return Err(refuse("another block".to_owned()));
    }
    let mut replaced = Vec::new();
    for (parent, field) in [(GROUP, "targets"), ("", "ignore")] {
        let wanted = recommended.pointer(parent).map(|p| p[field].clone()).unwrap_or_default();
        if let Some(Value::Object(map)) = block.pointer_mut(parent)
            && map.get(field) != Some(&wanted)
        {
            map.insert(field.to_owned(), wanted);
            replaced.push(field);
        }
    }
    let wrong = block_problems(&block);
    if !replaced.is_empty() {
        let fixed = with_quantization_config(&text, &block)?;
        write_file(artifact, CONFIG_COPY, text.as_bytes())?;
        write_file(artifact, "config.json", fixed.as_bytes())?;
        update_manifest(artifact, None, &[(CONFIG_COPY, text.as_bytes()), ("config.json", fixed.as_bytes())])?;
    }
    Ok(ConfigFix { replaced, wrong })
}

/// The index of a checkpoint; one of a single file gets an index first.
fn read_index(checkpoint: &Checkpoint) -> Result<Value> {
    if let Some(bytes) = checkpoint.file(INDEX_FILE) {
        return serde_json::from_slice(bytes.as_slice())
            .map_err(|e| Error::ConfigText { expected: "an index that is JSON", found: e.to_string() });
    }
    let shards = checkpoint.shards();
    let map: Map<String, Value> =
        shards.names().filter_map(|name| Some((name.to_owned(), json!(shards.file_of(name)?)))).collect();
    Ok(json!({ "metadata": { "total_size": shards.tensor_bytes() }, "weight_map": map }))
}

fn update_manifest(directory: &Path, shard: Option<&ShardReceipt>, files: &[(&str, &[u8])]) -> Result<()> {
    if !directory.join(MANIFEST_FILE).exists() {
        return Ok(());
    }
    let mut manifest = Manifest::read(directory)?;
    if let Some(shard) = shard {
        manifest.add_shard(shard);
    }
    files.iter().for_each(|(name, content)| manifest.add_file(name, content));
    manifest.write(directory)?;
    Ok(())
}
