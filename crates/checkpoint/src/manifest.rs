//! `manifest.json`: what an artifact is made of and made from, with the digest of every file and tensor.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    checkpoint::Checkpoint,
    digest::{Digest, Hasher},
    error::Error,
    shards::{INDEX_FILE, Shards},
    writer::{ShardReceipt, write_file},
};

/// File name of the manifest.
pub const MANIFEST_FILE: &str = "manifest.json";

/// Version of the manifest's layout.
const LAYOUT: u32 = 1;

/// The content of `manifest.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of this layout.
    pub layout: u32,
    /// Program and version that wrote the artifact.
    pub tool: String,
    /// What it was made from.
    pub source: SourceIdentity,
    /// How it was made (free form).
    pub recipe: Value,
    /// What was measured while it was made (free form).
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub statistics: Value,
    /// Every file but the manifest itself.
    pub files: BTreeMap<String, FileRecord>,
    /// Every tensor.
    pub tensors: BTreeMap<String, TensorRecord>,
}

/// What an artifact was made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceIdentity {
    /// Digest of the source's `config.json`.
    pub config_sha256: Digest,
    /// Digest of the source's index; none for a single file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index_sha256: Option<Digest>,
    /// Number of stored tensors.
    pub tensors: u64,
    /// Size of the stored tensors in bytes.
    pub tensor_bytes: u64,
    /// Digest of a sample of the weights, the same however the tensors are spread over files: see [`SourceIdentity::of`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample_sha256: Option<Digest>,
    /// Revision, when known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
}

impl SourceIdentity {
    /// The identity of an open checkpoint. Reading all of it would take minutes, and a model trained further has the same
    /// names and shapes; so up to 1024 tensors, evenly spread over the sorted names, give 64 bytes of their middle each.
    ///
    /// # Errors
    /// [`Error::Invalid`] when its `config.json` can no longer be read.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self, Error> {
        let digest = |name: &str| checkpoint.file(name).map(|bytes| Digest::of(bytes.as_slice()));
        let config_sha256 = digest("config.json").ok_or_else(|| {
            Error::invalid(
                checkpoint.location(),
                "a readable config.json",
                "none",
                "leave the source as it is meanwhile",
            )
        })?;
        Ok(Self {
            config_sha256,
            index_sha256: digest(INDEX_FILE),
            tensors: checkpoint.shards().names().count() as u64,
            tensor_bytes: checkpoint.shards().tensor_bytes(),
            sample_sha256: Some(sample(checkpoint.shards())),
            revision: None,
        })
    }
}

/// Most tensors of a sample.
const SAMPLED_TENSORS: usize = 1024;
/// Bytes of each.
const SAMPLED_BYTES: usize = 64;

fn sample(shards: &Shards) -> Digest {
    let mut hasher = Hasher::default();
    let step = shards.names().count().div_ceil(SAMPLED_TENSORS).max(1);
    for (name, stored) in shards.tensors().step_by(step) {
        hasher.update(name.as_bytes());
        let bytes = shards.files()[stored.shard].bytes.as_slice().get(stored.range.clone()).unwrap_or_default();
        let start = bytes.len().saturating_sub(SAMPLED_BYTES) / 2;
        hasher.update(&bytes[start..bytes.len().min(start + SAMPLED_BYTES)]);
    }
    hasher.finish()
}

/// A file of an artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Size in bytes.
    pub bytes: u64,
    /// Digest of the content.
    pub sha256: Digest,
}

/// A tensor of an artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorRecord {
    /// The shard that holds it.
    pub file: String,
    /// Digest of its bytes.
    pub sha256: Digest,
}

/// A file that is not as the manifest says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{file}`: expected {expected}, found {found}; the file was changed after the artifact was written")]
pub struct Discrepancy {
    /// File name.
    pub file: String,
    /// What the manifest says.
    pub expected: String,
    /// What is there.
    pub found: String,
}

impl Manifest {
    /// A manifest without files.
    pub fn new(source: SourceIdentity, recipe: Value) -> Self {
        Self {
            layout: LAYOUT,
            tool: concat!("glimmer ", env!("CARGO_PKG_VERSION")).to_owned(),
            source,
            recipe,
            statistics: Value::Null,
            files: BTreeMap::new(),
            tensors: BTreeMap::new(),
        }
    }

    /// Adds a finished shard and its tensors.
    pub fn add_shard(&mut self, shard: &ShardReceipt) {
        self.files.insert(shard.file.clone(), FileRecord { bytes: shard.bytes, sha256: shard.sha256 });
        let record = |sha256: &Digest| TensorRecord { file: shard.file.clone(), sha256: *sha256 };
        self.tensors.extend(shard.tensors.iter().map(|(name, digest)| (name.clone(), record(digest))));
    }

    /// Adds another file by its content.
    pub fn add_file(&mut self, name: &str, content: &[u8]) {
        let record = FileRecord { bytes: content.len() as u64, sha256: Digest::of(content) };
        self.files.insert(name.to_owned(), record);
    }

    /// Writes `manifest.json`.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Invalid`] when a free-form value cannot be written as JSON.
    pub fn write(&self, directory: &Path) -> Result<(), Error> {
        let text = serde_json::to_string_pretty(self).map_err(malformed)?;
        write_file(directory, MANIFEST_FILE, format!("{text}\n").as_bytes()).map(drop)
    }

    /// Reads the text of a `manifest.json`.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn parse(text: &[u8]) -> Result<Self, Error> {
        let manifest: Self = serde_json::from_slice(text).map_err(malformed)?;
        if manifest.layout == LAYOUT {
            return Ok(manifest);
        }
        let remedy = "read it with the version of the program that wrote it";
        Err(Error::invalid(MANIFEST_FILE, format!("layout {LAYOUT}"), manifest.layout, remedy))
    }

    /// Reads the manifest of a directory.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Invalid`].
    pub fn read(directory: &Path) -> Result<Self, Error> {
        let path = directory.join(MANIFEST_FILE);
        Self::parse(&std::fs::read(&path).map_err(|e| Error::io(&path, "read", e))?)
    }

    /// Reads every file of the directory again and compares its digest.
    ///
    /// # Errors
    /// [`Error::Io`] when an existing file cannot be read.
    pub fn check_files(&self, directory: &Path) -> Result<Vec<Discrepancy>, Error> {
        let mut discrepancies = Vec::new();
        for (file, record) in &self.files {
            let path = directory.join(file);
            let (expected, found) = if !path.exists() {
                (format!("{} bytes", record.bytes), "no such file".to_owned())
            } else {
                let found = Digest::of_file(&path)?;
                if found == record.sha256 {
                    continue;
                }
                (format!("SHA-256 {}", record.sha256), found.to_string())
            };
            discrepancies.push(Discrepancy { file: file.clone(), expected, found });
        }
        Ok(discrepancies)
    }
}

fn malformed(error: serde_json::Error) -> Error {
    Error::invalid(MANIFEST_FILE, "the manifest of an artifact", error, "write the artifact again")
}
