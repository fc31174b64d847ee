//! The tensors of a set of safetensors files and their index.
//!
//! Invariant of a [`Shards`] without damage: every tensor lies in exactly one file, the index (if there is one) says which,
//! and every file that looks like a shard is in the index. [`Shards::read`] reports all damage that it finds and keeps what
//! is sound, so that a verifier can list everything at once; [`crate::Checkpoint::open`] refuses damage.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use serde_json::Value;

use crate::{
    data::{Bytes, DType, TensorData},
    error::{Damage, Fault},
    header::{Header, HeaderEntry, Pairs},
};

/// File name of the index.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Where a stored tensor is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    /// Element type as stored.
    pub dtype: DType,
    /// Shape as stored.
    pub shape: Vec<usize>,
    /// Which of [`Shards::files`].
    pub shard: usize,
    /// Bytes in that file.
    pub range: Range<usize>,
}

/// A shard file.
#[derive(Debug, Clone)]
pub struct Shard {
    /// File name.
    pub file: String,
    /// Its content.
    pub bytes: Bytes,
    /// Where the tensors' bytes begin.
    pub data_start: usize,
}

/// The tensors of a checkpoint, as stored.
#[derive(Debug, Clone, Default)]
pub struct Shards {
    files: Vec<Shard>,
    tensors: BTreeMap<String, StoredTensor>,
    total_size: Option<u64>,
    indexed: bool,
}

/// The index, as far as it could be read.
#[derive(Debug, Default)]
struct Index {
    weight_map: BTreeMap<String, String>,
    total_size: Option<u64>,
}

impl Shards {
    /// Reads a set of files (name, content) and lists everything that is wrong with them. Files that are neither
    /// `*.safetensors` nor the index are ignored.
    pub fn read(files: impl IntoIterator<Item = (String, Bytes)>) -> (Self, Vec<Damage>) {
        let mut damages = Vec::new();
        let mut index = None;
        let mut candidates = Vec::new();
        for (name, bytes) in files {
            if name == INDEX_FILE {
                index = Some(parse_index(bytes.as_slice()).unwrap_or_else(|damage| {
                    damages.push(damage);
                    Index::default()
                }));
            } else if name.ends_with(".safetensors") {
                candidates.push((name, bytes));
            }
        }
        candidates.sort_by(|a, b| a.0.cmp(&b.0));
        // A broken index has been reported; the shards are then read as if there were none.
        let index = index.filter(|index| !index.weight_map.is_empty());
        match &index {
            Some(index) => check_files(index, &mut candidates, &mut damages),
            None if damages.is_empty() && candidates.len() != 1 => {
                damages.push(Damage::new(Fault::NoIndex, INDEX_FILE, "an index", no_index(&candidates)));
            }
            None => {}
        }

        let mut shards =
            Self { total_size: index.as_ref().and_then(|i| i.total_size), indexed: index.is_some(), ..Self::default() };
        for (name, bytes) in candidates {
            match Header::parse(&name, bytes.as_slice()) {
                Ok(header) => shards.add(&name, bytes, header, index.as_ref(), &mut damages),
                Err(damage) => damages.push(damage),
            }
        }
        if let Some(index) = &index {
            shards.check_index(index, &mut damages);
        }
        (shards, damages)
    }

    fn add(&mut self, name: &str, bytes: Bytes, header: Header, index: Option<&Index>, damages: &mut Vec<Damage>) {
        let shard = self.files.len();
        for HeaderEntry { name: tensor, dtype, shape, range } in header.tensors {
            if let Some(other) = self.tensors.get(&tensor) {
                let found = format!("it also in `{}`", self.files[other.shard].file);
                damages.push(Damage::new(Fault::DuplicateTensor, name, "a tensor of one shard", found).of(&tensor));
                // The index decides which of the two is meant.
                if index.and_then(|i| i.weight_map.get(&tensor)).is_some_and(|file| file != name) {
                    continue;
                }
            }
            self.tensors.insert(tensor, StoredTensor { dtype, shape, shard, range });
        }
        self.files.push(Shard { file: name.to_owned(), bytes, data_start: header.data_start });
    }

    /// Compares the tensors found with the index. Tensors of files that could not be read are not reported again.
    fn check_index(&self, index: &Index, damages: &mut Vec<Damage>) {
        for (tensor, stored) in &self.tensors {
            let file = &self.files[stored.shard].file;
            match index.weight_map.get(tensor) {
                None => damages.push(
                    Damage::new(Fault::UnindexedTensor, file, "a tensor that the index names", "no entry").of(tensor),
                ),
                Some(named) if named != file => {
                    let expected = format!("the tensor in `{named}`, as the index says");
                    damages.push(Damage::new(Fault::WrongShard, file, expected, format!("it in `{file}`")).of(tensor));
                }
                Some(_) => {}
            }
        }
        for (tensor, file) in &index.weight_map {
            if !self.tensors.contains_key(tensor) && self.files.iter().any(|f| f.file == *file) {
                let expected = "the tensor, as the index says";
                damages
                    .push(Damage::new(Fault::MissingTensor, file, expected, "no such tensor in any shard").of(tensor));
            }
        }
    }

    /// The shard files, by name.
    pub fn files(&self) -> &[Shard] {
        &self.files
    }

    /// Names of all stored tensors, ascending.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// All stored tensors, ascending by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &StoredTensor)> {
        self.tensors.iter().map(|(name, stored)| (name.as_str(), stored))
    }

    /// Where a tensor is.
    pub fn stored(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.get(name)
    }

    /// Name of the file that holds a tensor.
    pub fn file_of(&self, name: &str) -> Option<&str> {
        self.tensors.get(name).map(|stored| self.files[stored.shard].file.as_str())
    }

    /// A tensor as stored.
    pub fn tensor(&self, name: &str) -> Option<TensorData> {
        let stored = self.tensors.get(name)?;
        let bytes = self.files[stored.shard].bytes.slice(stored.range.clone())?;
        Some(TensorData { name: name.to_owned(), dtype: stored.dtype, shape: stored.shape.clone(), bytes })
    }

    /// Sum of the tensors' sizes in bytes.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.values().map(|stored| stored.range.len() as u64).sum()
    }

    /// `metadata.total_size` of the index.
    pub fn index_total_size(&self) -> Option<u64> {
        self.total_size
    }

    /// Whether the set has an index.
    pub fn is_indexed(&self) -> bool {
        self.indexed
    }
}

fn no_index(candidates: &[(String, Bytes)]) -> String {
    match candidates {
        [] => "no *.safetensors file".to_owned(),
        several => format!("{} *.safetensors files", several.len()),
    }
}

/// Reports files that are missing or not referenced, and drops the latter from `candidates`.
fn check_files(index: &Index, candidates: &mut Vec<(String, Bytes)>, damages: &mut Vec<Damage>) {
    let referenced: BTreeSet<&str> = index.weight_map.values().map(String::as_str).collect();
    for file in &referenced {
        if !candidates.iter().any(|(name, _)| name == file) {
            let count = index.weight_map.values().filter(|f| f == file).count();
            let expected = format!("the file, which the index names for {count} tensors");
            damages.push(Damage::new(
                Fault::MissingShard,
                file,
                expected,
                "no such file, or a link that leads nowhere",
            ));
        }
    }
    candidates.retain(|(name, _)| {
        let known = referenced.contains(name.as_str());
        if !known {
            damages.push(Damage::new(Fault::StrayShard, name, "a file that the index names", "no entry"));
        }
        known
    });
}

fn parse_index(bytes: &[u8]) -> Result<Index, Damage> {
    let damage = |expected: &str, found: String| Damage::new(Fault::IndexJson, INDEX_FILE, expected, found);
    let object = "an object with `metadata` and `weight_map`";
    let Pairs(fields) = serde_json::from_slice::<Pairs<&serde_json::value::RawValue>>(bytes)
        .map_err(|e| damage(object, e.to_string()))?;
    let field = |key: &str| fields.iter().find(|(name, _)| name == key).map(|(_, value)| value.get());
    let map = field("weight_map").ok_or_else(|| damage(object, "no `weight_map`".to_owned()))?;
    let Pairs(entries) = serde_json::from_str::<Pairs<String>>(map)
        .map_err(|e| damage("a `weight_map` from tensor to file name", e.to_string()))?;
    if entries.is_empty() {
        return Err(damage("a `weight_map` with at least one tensor", "an empty one".to_owned()));
    }
    let mut weight_map = BTreeMap::new();
    for (tensor, file) in entries {
        if file.contains(['/', '\\']) || !file.ends_with(".safetensors") {
            return Err(damage("names of *.safetensors files beside the index", format!("`{file}`")).of(&tensor));
        }
        if weight_map.insert(tensor.clone(), file).is_some() {
            return Err(damage("each tensor once", "two entries".to_owned()).of(&tensor));
        }
    }
    let metadata: Option<Value> = field("metadata").and_then(|text| serde_json::from_str(text).ok());
    // Some writers store the total as a float.
    let total = metadata.as_ref().and_then(|m| m.get("total_size"));
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to be a whole number in range")]
    let whole = |f: f64| (f >= 0.0 && f.fract() == 0.0 && f < 9e15).then_some(f as u64);
    let total_size = total.and_then(|t| t.as_u64().or_else(|| t.as_f64().and_then(whole)));
    Ok(Index { weight_map, total_size })
}
