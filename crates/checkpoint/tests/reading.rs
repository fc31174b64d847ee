//! Opening the checkpoints at hand.

#![allow(clippy::unwrap_used, reason = "a test may unwrap")]

use glimmer_checkpoint::{Bytes, Checkpoint, DType, Error};

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/goldens/tiny");
const MICRO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16");

fn files_of(directory: &str) -> Vec<(String, Bytes)> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let bytes = std::fs::read(entry.path()).unwrap();
        files.push((entry.file_name().into_string().unwrap(), Bytes::new(bytes)));
    }
    files
}

#[test]
fn micro_from_directory_and_from_memory() {
    let mapped = Checkpoint::open(MICRO).unwrap();
    let embedded = Checkpoint::from_files(files_of(MICRO)).unwrap();
    assert_eq!(mapped.names().count(), 479);
    assert!(mapped.names().eq(embedded.names()));
    assert_eq!(mapped.shards().tensor_bytes(), 27_357_088);
    assert_eq!(mapped.shards().index_total_size(), Some(27_357_088));
    for name in mapped.names() {
        let (a, b) = (mapped.tensor(name).unwrap(), embedded.tensor(name).unwrap());
        assert_eq!((a.dtype, &a.shape, a.bytes.as_slice()), (b.dtype, &b.shape, b.bytes.as_slice()), "{name}");
        assert_eq!(a.bytes.as_slice().len(), a.elements() * a.dtype.size());
    }
    assert!(mapped.file("tokenizer.json").is_some() && embedded.file("chat_template.jinja").is_some());
    assert!(mapped.file("nothing.json").is_none());
}

#[test]
fn tiny_beside_other_safetensors_files() {
    let tiny = Checkpoint::open(TINY).unwrap();
    assert_eq!(tiny.names().count(), 375);
    assert_eq!(tiny.describe("model.language_model.layers.0.self_attn.dt_bias"), Some((DType::F32, &[64][..])));
}

#[test]
fn absent_tensor_is_named() {
    let micro = Checkpoint::open(MICRO).unwrap();
    let error = micro.tensor("model.nothing").unwrap_err();
    assert!(matches!(&error, Error::NoTensor { tensor, .. } if tensor == "model.nothing"), "{error}");
}
