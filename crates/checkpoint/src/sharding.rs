//! Which tensor goes into which shard.

use crate::inventory::TensorSpec;

/// A shard that is to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedShard {
    /// File name, `model-00001-of-00042.safetensors`.
    pub file: String,
    /// Its tensors, in file order.
    pub tensors: Vec<TensorSpec>,
}

/// Name of shard `number` (from 1) of `count`.
pub fn shard_name(number: usize, count: usize) -> String {
    format!("model-{number:05}-of-{count:05}.safetensors")
}

/// Room for a tensor's entry in the header besides its name, and for the header's frame, in bytes: never too little.
const ENTRY_BYTES: u64 = 192;

/// Cuts tensors, in their order, into shards whose files have at most `limit` bytes. The tensors of a layer stay in one shard if
/// they fit into one; a tensor above the limit gets a shard of its own.
pub fn plan_shards(tensors: &[TensorSpec], limit: u64) -> Vec<PlannedShard> {
    let entry = |spec: &TensorSpec| spec.bytes() + spec.name.len() as u64 + ENTRY_BYTES;
    let size = |tensors: &[TensorSpec]| tensors.iter().map(entry).fold(ENTRY_BYTES, u64::saturating_add);
    let mut shards: Vec<Vec<TensorSpec>> = vec![Vec::new()];
    let mut filled = 0;
    let mut place = |tensors: &[TensorSpec]| {
        let bytes = size(tensors);
        if filled > 0 && bytes > limit.saturating_sub(filled) {
            shards.push(Vec::new());
            filled = 0;
        }
        filled = filled.saturating_add(bytes);
        if let Some(shard) = shards.last_mut() {
            shard.extend_from_slice(tensors);
        }
    };
    for unit in tensors.chunk_by(|a, b| a.layer == b.layer && a.group.is_same_unit(b.group)) {
        if size(unit) <= limit {
            place(unit);
        } else {
            unit.iter().for_each(|tensor| place(std::slice::from_ref(tensor)));
        }
    }
    let count = shards.len();
    let name = |(i, tensors)| PlannedShard { file: shard_name(i + 1, count), tensors };
    shards.into_iter().enumerate().map(name).collect()
}
