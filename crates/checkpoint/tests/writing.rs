//! Shards, index and manifest: what is written can be read, by this crate and by the safetensors crate; what is not finished
//! does not exist.

#![allow(clippy::unwrap_used, reason = "a test may unwrap")]

use std::{fs, path::Path};

use glimmer_checkpoint::{
    Checkpoint, Config, DType, Digest, Inventory, Manifest, ShardReceipt, ShardWriter, TensorHeader,
    manifest::{MANIFEST_FILE, SourceIdentity},
    sharding::plan_shards,
    writer::{write_file, write_index},
};
use proptest::prelude::*;
use serde_json::json;

const MICRO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16");
const RELEASED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/glm-5.3-flash/config.json");

fn header(name: &str, dtype: DType, shape: &[usize]) -> TensorHeader {
    TensorHeader { name: name.to_owned(), dtype, shape: shape.to_vec() }
}

fn names_in(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Writes the micro model again, in shards of at most `limit` bytes.
fn copy_micro(directory: &Path, limit: u64) -> Manifest {
    let source = Checkpoint::open(MICRO).unwrap();
    let mut manifest = Manifest::new(SourceIdentity::of(&source).unwrap(), json!({"method": "copy"}));
    let mut receipts = Vec::new();
    for shard in plan_shards(Inventory::bf16(source.config()).tensors(), limit) {
        let headers = shard.tensors.iter().map(TensorHeader::from).collect();
        let mut writer = ShardWriter::create(directory, &shard.file, headers).unwrap();
        for spec in &shard.tensors {
            writer.write_tensor(&source.tensor(&spec.name).unwrap()).unwrap();
        }
        receipts.push(writer.finish().unwrap());
    }
    receipts.iter().for_each(|receipt| manifest.add_shard(receipt));
    write_index(directory, &receipts).unwrap();
    let config = source.file("config.json").unwrap();
    write_file(directory, "config.json", config.as_slice()).unwrap();
    manifest.add_file("config.json", config.as_slice());
    manifest.write(directory).unwrap();
    manifest
}

#[test]
fn copied_model_reads_back_equal() {
    let directory = tempfile::tempdir().unwrap();
    let manifest = copy_micro(directory.path(), 4_000_000);
    assert!(names_in(directory.path()).iter().all(|name| !name.ends_with(".tmp")));
    let (source, copy) = (Checkpoint::open(MICRO).unwrap(), Checkpoint::open(directory.path()).unwrap());
    assert!(copy.shards().files().len() > 5);
    assert!(source.names().eq(copy.names()));
    assert_eq!(copy.shards().index_total_size(), Some(source.shards().tensor_bytes()));
    for name in source.names() {
        let (a, b) = (source.tensor(name).unwrap(), copy.tensor(name).unwrap());
        assert_eq!((a.dtype, &a.shape, a.bytes.as_slice()), (b.dtype, &b.shape, b.bytes.as_slice()), "{name}");
        assert_eq!(manifest.tensors[name].sha256, Digest::of(b.bytes.as_slice()), "{name}");
        assert_eq!(Some(manifest.tensors[name].file.as_str()), copy.shards().file_of(name));
        b.bytes.release();
        assert_eq!(a.bytes.as_slice(), b.bytes.as_slice(), "{name} after its pages were released");
    }
    for shard in copy.shards().files() {
        assert!(shard.data_start.is_multiple_of(8), "{}", shard.file);
        assert!(shard.bytes.as_slice().len() <= 4_000_000, "{}", shard.file);
        let reference = safetensors::SafeTensors::deserialize(shard.bytes.as_slice()).unwrap();
        for (name, view) in reference.tensors() {
            let tensor = copy.shards().tensor(&name).unwrap();
            assert_eq!((view.shape(), view.data()), (tensor.shape.as_slice(), tensor.bytes.as_slice()), "{name}");
        }
        let receipt = ShardReceipt::of_existing(directory.path(), &shard.file).unwrap();
        let record = &manifest.files[&shard.file];
        assert_eq!((receipt.sha256, receipt.bytes), (record.sha256, record.bytes));
        assert_eq!(receipt.sha256, Digest::of(shard.bytes.as_slice()));
        assert!(receipt.tensors.iter().all(|(name, digest)| manifest.tensors[name].sha256 == *digest));
    }
}

#[test]
fn manifest_finds_changed_and_missing_files() {
    let directory = tempfile::tempdir().unwrap();
    let written = copy_micro(directory.path(), u64::MAX);
    let manifest = Manifest::read(directory.path()).unwrap();
    assert_eq!(manifest, written);
    assert_eq!(manifest.check_files(directory.path()).unwrap(), []);

    let shard = directory.path().join("model-00001-of-00001.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&shard, bytes).unwrap();
    fs::remove_file(directory.path().join("config.json")).unwrap();
    let found: Vec<_> = manifest.check_files(directory.path()).unwrap().into_iter().map(|d| d.file).collect();
    assert_eq!(found, ["config.json", "model-00001-of-00001.safetensors"]);
}

#[test]
fn damaged_manifests_are_refused() {
    for text in ["", "{}", "{\"layout\": 1}"] {
        let message = Manifest::parse(text.as_bytes()).unwrap_err().to_string();
        assert!(message.contains(MANIFEST_FILE), "{message}");
    }
    let directory = tempfile::tempdir().unwrap();
    let mut manifest = serde_json::to_value(copy_micro(directory.path(), u64::MAX)).unwrap();
    manifest["layout"] = json!(2);
    assert!(Manifest::parse(manifest.to_string().as_bytes()).unwrap_err().to_string().contains("layout 1"));
    manifest["layout"] = json!(1);
    manifest["files"]["config.json"]["sha256"] = json!("abc");
    assert!(Manifest::parse(manifest.to_string().as_bytes()).unwrap_err().to_string().contains("64 hexadecimal"));
}

#[test]
fn unfinished_shards_leave_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let create = || ShardWriter::create(directory.path(), "s.safetensors", vec![header("a", DType::U8, &[4])]).unwrap();
    let mut writer = create();
    writer.write(&[1, 2]).unwrap();
    assert_eq!(names_in(directory.path()), ["s.safetensors.tmp"]);
    drop(writer);
    assert_eq!(names_in(directory.path()), Vec::<String>::new());

    let mut writer = create();
    writer.write(&[1, 2]).unwrap();
    let message = writer.finish().unwrap_err().to_string();
    assert!(message.contains("4 bytes of `a`"), "{message}");
    assert_eq!(names_in(directory.path()), Vec::<String>::new());
}

#[test]
fn wrong_use_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let create = |headers: &[TensorHeader]| ShardWriter::create(directory.path(), "s.safetensors", headers.to_vec());
    let a = header("a", DType::U8, &[4]);
    assert!(create(&[a.clone(), a.clone()]).is_err(), "a repeated name");
    assert!(create(&[header("__metadata__", DType::U8, &[4])]).is_err());
    assert!(create(&[header("a", DType::F32, &[1 << 40, 1 << 40])]).is_err());
    let mut writer = create(&[a.clone(), header("b", DType::U8, &[2])]).unwrap();
    assert!(writer.write_named("b", &[1, 2]).is_err(), "out of order");
    assert!(writer.write_named("a", &[1, 2]).is_err(), "too short");
    writer.write_named("a", &[1, 2, 3, 4]).unwrap();
    assert_eq!(writer.next_tensor().unwrap().name, "b");
    assert!(writer.write(&[1, 2, 3]).is_err(), "too long");
    assert!(ShardWriter::create(Path::new("/nonexistent"), "s.safetensors", vec![a]).is_err());
}

#[test]
fn names_are_escaped_and_empty_tensors_kept() {
    let directory = tempfile::tempdir().unwrap();
    let headers = vec![
        header("empty", DType::F32, &[0, 3]),
        header("quote \" backslash \\ \u{1f600}", DType::Bf16, &[1]),
        header("last", DType::I64, &[0]),
    ];
    let mut writer = ShardWriter::create(directory.path(), "s.safetensors", headers).unwrap();
    writer.write_named("empty", &[]).unwrap();
    writer.write(&[5, 6]).unwrap();
    writer.write_named("last", &[]).unwrap();
    let receipt = writer.finish().unwrap();
    assert_eq!(receipt.tensors.len(), 3);
    let bytes = fs::read(directory.path().join("s.safetensors")).unwrap();
    let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(reference.tensor("quote \" backslash \\ \u{1f600}").unwrap().data(), [5, 6]);
    assert_eq!(reference.tensor("empty").unwrap().shape(), [0, 3]);
}

#[test]
fn layers_stay_together_and_shards_below_the_limit() {
    let config = Config::from_file(RELEASED).unwrap();
    let artifact = Inventory::w4a16(&config).unwrap();
    let limit = 5_000_000_000;
    let shards = plan_shards(artifact.tensors(), limit);
    let planned: Vec<_> = shards.iter().flat_map(|s| s.tensors.iter().cloned()).collect();
    assert_eq!(planned, artifact.tensors(), "every tensor once, in order");
    assert!(shards.iter().all(|s| s.tensors.iter().map(|t| t.bytes()).sum::<u64>() <= limit));
    for layer in 3..45 {
        let holding = shards.iter().filter(|s| s.tensors.iter().any(|t| t.layer == Some(layer)));
        assert_eq!(holding.count(), 1, "layer {layer}");
    }
    assert_eq!(shards[0].file, format!("model-00001-of-{:05}.safetensors", shards.len()));
    // A tensor above the limit gets a shard of its own.
    let tiny = plan_shards(artifact.tensors(), 1);
    assert_eq!(tiny.len(), artifact.tensors().len());
}

proptest! {
    // Each case syncs two files.
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Pieces of any size give the same file.
    #[test]
    fn pieces_do_not_matter(sizes in prop::collection::vec(0usize..50, 1..8), cuts in prop::collection::vec(1usize..40, 1..60)) {
        let total: usize = sizes.iter().sum();
        let data: Vec<u8> = (0..total).map(|i| u8::try_from(i % 251).unwrap()).collect();
        let headers: Vec<_> = sizes.iter().enumerate().map(|(i, n)| header(&i.to_string(), DType::U8, &[*n])).collect();
        let directory = tempfile::tempdir().unwrap();
        let mut whole = ShardWriter::create(directory.path(), "a.safetensors", headers.clone()).unwrap();
        whole.write(&data).unwrap();
        let mut pieces = ShardWriter::create(directory.path(), "b.safetensors", headers).unwrap();
        let mut rest = data.as_slice();
        for cut in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at((*cut).min(rest.len()));
            pieces.write(now).unwrap();
            rest = later;
        }
        let (a, b) = (whole.finish().unwrap(), pieces.finish().unwrap());
        prop_assert_eq!((a.sha256, a.tensors), (b.sha256, b.tensors));
        let bytes = fs::read(directory.path().join("b.safetensors")).unwrap();
        prop_assert_eq!(&bytes[bytes.len() - total..], data.as_slice());
        prop_assert_eq!(Digest::of(&bytes), b.sha256);
    }
}
