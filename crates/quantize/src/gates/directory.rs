//! A directory as it lies there, damaged or not: files, headers, index, and bytes read in small pieces.
//!
//! Opening never fails on content. What the container rules reject is listed as [`Damage`], the sound tensors stay
//! readable, and [`Directory::hidden`] tells which tensors are out of sight because their file was rejected. Data are
//! read with positioned reads into caller-owned buffers, so that the memory used does not grow with the model.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use glimmer_checkpoint::{Checkpoint, DType, Damage, Fault, Shards, StoredTensor, shards::INDEX_FILE};

/// An artifact's directory.
#[derive(Debug)]
pub(super) struct Directory {
    root: PathBuf,
    /// Sizes of the regular files, by name; hidden ones are left out.
    pub(super) files: BTreeMap<String, u64>,
    /// The sound tensors.
    pub(super) shards: Shards,
    /// What the container rules reject.
    pub(super) damages: Vec<Damage>,
    /// The index's `weight_map`, as far as it can be read.
    pub(super) weight_map: BTreeMap<String, String>,
    /// Shards that are referenced but cannot be read.
    pub(super) broken: BTreeSet<String>,
    handles: BTreeMap<String, File>,
}

impl Directory {
    /// Looks at a directory.
    ///
    /// # Errors
    /// When the directory cannot be listed or one of its files cannot be opened.
    pub(super) fn open(root: &Path) -> io::Result<Self> {
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(root)? {
            let path = entry?.path();
            let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
            // Links (a hub cache stores files as links) are followed.
            let meta = fs::metadata(&path);
            if let Some(meta) = meta.ok().filter(|m| m.is_file() && !name.starts_with('.')) {
                files.insert(name.to_owned(), meta.len());
            }
        }
        let mut contents = Vec::new();
        let mut handles = BTreeMap::new();
        for name in files.keys().filter(|n| n.ends_with(".safetensors")) {
            let path = root.join(name);
            contents.push((name.clone(), glimmer_checkpoint::map_file(&path).map_err(io::Error::other)?));
            handles.insert(name.clone(), File::open(&path)?);
        }
        let index = fs::read(root.join(INDEX_FILE)).ok();
        let weight_map = index.as_deref().map(weight_map).unwrap_or_default();
        let index = index.map(|bytes| (INDEX_FILE.to_owned(), glimmer_checkpoint::Bytes::new(bytes)));
        let (shards, damages) = Shards::read(contents.into_iter().chain(index));
        let broken = damages.iter().filter(|d| is_unreadable(d.fault)).map(|d| d.file.clone()).collect();
        Ok(Self { root: root.to_owned(), files, shards, damages, weight_map, broken, handles })
    }

    /// The path of a file.
    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.root.join(file)
    }

    /// Content of a small file; `None` when it does not exist.
    pub(super) fn read(&self, file: &str) -> Option<io::Result<Vec<u8>>> {
        self.files.contains_key(file).then(|| fs::read(self.path(file)))
    }

    /// Whether an absent tensor may lie in a file that could not be read.
    pub(super) fn hidden(&self, name: &str) -> bool {
        if self.broken.is_empty() || self.shards.stored(name).is_some() {
            return false;
        }
        self.weight_map.get(name).is_none_or(|file| self.broken.contains(file))
    }

    /// Reads part of a stored tensor: `buffer.len()` bytes from byte `offset` of it.
    pub(super) fn read_at(&self, stored: &StoredTensor, offset: usize, buffer: &mut [u8]) -> io::Result<()> {
        let file = &self.shards.files()[stored.shard].file;
        let handle = self.handles.get(file).ok_or_else(|| io::Error::other(format!("`{file}` is not open")))?;
        if offset + buffer.len() > stored.range.len() {
            return Err(io::Error::other("read beyond the tensor"));
        }
        handle.read_exact_at(buffer, (stored.range.start + offset) as u64)
    }

    /// All bytes of a stored tensor.
    pub(super) fn bytes(&self, stored: &StoredTensor) -> io::Result<Vec<u8>> {
        let mut buffer = vec![0; stored.range.len()];
        self.read_at(stored, 0, &mut buffer)?;
        Ok(buffer)
    }

    /// Names of all sound tensors.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.shards.names()
    }
}

/// Faults after which nothing of a file can be used.
fn is_unreadable(fault: Fault) -> bool {
    matches!(
        fault,
        Fault::Truncated
            | Fault::HeaderLength
            | Fault::HeaderJson
            | Fault::DuplicateName
            | Fault::UnknownDType
            | Fault::SizeOverflow
            | Fault::RangeLength
            | Fault::Overlap
            | Fault::Gap
            | Fault::Trailing
            | Fault::MissingShard
    )
}

fn weight_map(index: &[u8]) -> BTreeMap<String, String> {
    let value: Option<serde_json::Value> = serde_json::from_slice(index).ok();
    let map = value.as_ref().and_then(|v| v.get("weight_map")).and_then(serde_json::Value::as_object);
    let text = |v: &serde_json::Value| v.as_str().map(str::to_owned);
    map.into_iter().flatten().filter_map(|(k, v)| Some((k.clone(), text(v)?))).collect()
}

/// The source: a sound checkpoint, with FP8 weights read as the BF16 tensors that they stand for.
#[derive(Debug)]
pub(super) struct Source {
    directory: Directory,
    checkpoint: Checkpoint,
}

impl Source {
    /// Opens a source.
    ///
    /// # Errors
    /// As [`Checkpoint::open`]: a damaged source cannot be a reference.
    pub(super) fn open(root: &Path) -> Result<Self, glimmer_checkpoint::Error> {
        let checkpoint = Checkpoint::open(root)?;
        let action = "list the directory";
        let directory = Directory::open(root).map_err(|source| glimmer_checkpoint::Error::Io {
            path: root.to_owned(),
            action,
            source,
        })?;
        Ok(Self { directory, checkpoint })
    }

    /// The checkpoint.
    pub(super) fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The files.
    pub(super) fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Names of the tensors, without scales of FP8 weights.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.checkpoint.names()
    }

    /// A tensor that can be read in pieces.
    ///
    /// # Errors
    /// When the source does not have it, or an FP8 weight lacks its scale.
    pub(super) fn tensor(&self, name: &str) -> Result<SourceTensor<'_>, glimmer_checkpoint::Error> {
        match self.directory.shards.stored(name) {
            Some(stored) if stored.dtype != DType::F8E4M3 => Ok(SourceTensor::Stored(&self.directory, stored)),
            _ => self.checkpoint.tensor(name).map(SourceTensor::Widened),
        }
    }
}

/// Bytes of a source tensor.
#[derive(Debug)]
pub(super) enum SourceTensor<'a> {
    Stored(&'a Directory, &'a StoredTensor),
    Widened(glimmer_checkpoint::TensorData),
}

impl SourceTensor<'_> {
    /// Reads `buffer.len()` bytes from byte `offset`.
    pub(super) fn read_at(&self, offset: usize, buffer: &mut [u8]) -> io::Result<()> {
        match self {
            Self::Stored(directory, stored) => directory.read_at(stored, offset, buffer),
            Self::Widened(tensor) => {
                let part = tensor.bytes.slice(offset..offset + buffer.len());
                let part = part.ok_or_else(|| io::Error::other("read beyond the tensor"))?;
                buffer.copy_from_slice(part.as_slice());
                Ok(())
            }
        }
    }
}
