//! Checkpoints in memory for tests.

#![allow(clippy::unwrap_used, reason = "a test may unwrap")]

use glimmer_checkpoint::{Bytes, DType, ShardWriter, TensorHeader};

const CONFIG: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16/config.json"));

/// The micro model's configuration and one shard of the given tensors (name, type, shape, bytes).
pub(crate) fn single(tensors: &[(&str, DType, &[usize], &[u8])]) -> Vec<(String, Bytes)> {
    let directory = tempfile::tempdir().unwrap();
    let headers = tensors.iter().map(|(name, dtype, shape, _)| TensorHeader {
        name: (*name).to_owned(),
        dtype: *dtype,
        shape: shape.to_vec(),
    });
    let mut writer = ShardWriter::create(directory.path(), "model.safetensors", headers.collect()).unwrap();
    for (name, _, _, bytes) in tensors {
        writer.write_named(name, bytes).unwrap();
    }
    writer.finish().unwrap();
    let shard = std::fs::read(directory.path().join("model.safetensors")).unwrap();
    vec![("config.json".to_owned(), Bytes::new(CONFIG.as_bytes())), ("model.safetensors".to_owned(), Bytes::new(shard))]
}
