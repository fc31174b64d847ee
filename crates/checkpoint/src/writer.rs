//! Writing checkpoints: files appear whole or not at all.
//!
//! Every file is written under a temporary name (`NAME.tmp`), synced, renamed, and the rename is synced too. A shard's header
//! comes first in the file, so the writer is told all tensors of the shard up front and then takes their bytes in that order,
//! in pieces of any size; memory use does not depend on the shard. Digests of the file and of each tensor run along.

use std::{
    collections::{BTreeMap, HashSet},
    fs::{self, File},
    io::{BufWriter, Write as _},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    data::{DType, TensorData},
    digest::{Digest, Hasher},
    error::Error,
    header::{Header, MAX_HEADER_BYTES},
    inventory::TensorSpec,
    mapping::map_file,
    shards::INDEX_FILE,
};

/// Default limit of a shard's size in bytes.
pub const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;

/// A tensor that is to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorHeader {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Row-major shape.
    pub shape: Vec<usize>,
}

impl TensorHeader {
    /// Size in bytes; `None` when it does not fit 64 bits.
    pub fn bytes(&self) -> Option<u64> {
        self.shape.iter().try_fold(self.dtype.size() as u64, |size, &n| size.checked_mul(n as u64))
    }
}

impl From<&TensorSpec> for TensorHeader {
    fn from(spec: &TensorSpec) -> Self {
        Self { name: spec.name.clone(), dtype: spec.dtype, shape: spec.shape.clone() }
    }
}

impl From<&TensorData> for TensorHeader {
    fn from(tensor: &TensorData) -> Self {
        Self { name: tensor.name.clone(), dtype: tensor.dtype, shape: tensor.shape.clone() }
    }
}

/// What a finished shard is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardReceipt {
    /// File name.
    pub file: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Digest of the file.
    pub sha256: Digest,
    /// Size of the tensors in bytes.
    pub tensor_bytes: u64,
    /// Digest of each tensor's bytes, in file order.
    pub tensors: Vec<(String, Digest)>,
}

impl ShardReceipt {
    /// The receipt of a shard that is already there.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Damage`].
    pub fn of_existing(directory: &Path, file: &str) -> Result<Self, Error> {
        let content = map_file(&directory.join(file))?;
        let bytes = content.as_slice();
        let header = Header::parse(file, bytes)?;
        let mut hash = Hasher::default();
        hash.update(&bytes[..header.data_start]);
        let mut tensors = Vec::with_capacity(header.tensors.len());
        for tensor in header.tensors {
            hash.update(&bytes[tensor.range.clone()]);
            tensors.push((tensor.name, Digest::of(&bytes[tensor.range.clone()])));
            if let Some(part) = content.slice(tensor.range) {
                part.release();
            }
        }
        let tensor_bytes = (bytes.len() - header.data_start) as u64;
        Ok(Self { file: file.to_owned(), bytes: bytes.len() as u64, sha256: hash.finish(), tensor_bytes, tensors })
    }
}

/// A shard being written. Dropped unfinished, it removes its temporary file.
#[derive(Debug)]
pub struct ShardWriter {
    file: PartialFile,
    name: String,
    tensors: Vec<(TensorHeader, u64)>,
    /// Index of the tensor that the next byte belongs to, and how many of its bytes are written.
    current: usize,
    written: u64,
    hash: Hasher,
    digests: Vec<(String, Digest)>,
}

impl ShardWriter {
    /// Starts the shard `file` in `directory`: writes the header of `tensors`, whose bytes follow in the same order.
    ///
    /// # Errors
    /// [`Error::Invalid`] for repeated names or impossible sizes, [`Error::Io`].
    pub fn create(directory: &Path, file: &str, tensors: Vec<TensorHeader>) -> Result<Self, Error> {
        let header = header_bytes(file, &tensors)?;
        let sized = tensors.into_iter().map(|t| {
            let bytes = t.bytes().expect("header_bytes refuses sizes beyond 64 bits");
            (t, bytes)
        });
        let mut writer = Self {
            file: PartialFile::create(directory, file)?,
            name: file.to_owned(),
            tensors: sized.collect(),
            current: 0,
            written: 0,
            hash: Hasher::default(),
            digests: Vec::new(),
        };
        writer.file.write(&header)?;
        writer.close_full_tensors();
        Ok(writer)
    }

    /// The next tensor to be written, `None` when all are complete.
    pub fn next_tensor(&self) -> Option<&TensorHeader> {
        self.tensors.get(self.current).map(|(header, _)| header)
    }

    /// Writes the next bytes; they may end inside a tensor or go on into the following ones.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there are more bytes than the header promises, [`Error::Io`].
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let Some((_, size)) = self.tensors.get(self.current) else {
                let found = format!("{} bytes more", bytes.len());
                return Err(self.misuse("no more bytes than its header says", found));
            };
            let room = usize::try_from(size - self.written).unwrap_or(usize::MAX);
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.file.write(now)?;
            self.hash.update(now);
            self.written += now.len() as u64;
            bytes = later;
            self.close_full_tensors();
        }
        Ok(())
    }

    /// Writes a whole tensor, which must be the next one.
    ///
    /// # Errors
    /// [`Error::Invalid`] when name, type, shape or length are not those of the next tensor, [`Error::Io`].
    pub fn write_tensor(&mut self, tensor: &TensorData) -> Result<(), Error> {
        match self.next_tensor() {
            Some(next) if *next == TensorHeader::from(tensor) => {}
            next => {
                let expected = next.map_or_else(|| "no further tensor".to_owned(), |next| format!("{next:?}"));
                return Err(self.misuse(expected, format!("{:?}", TensorHeader::from(tensor))));
            }
        }
        self.write_named(&tensor.name, tensor.bytes.as_slice())
    }

    /// Writes all bytes of the tensor `name`, which must be the next one.
    ///
    /// # Errors
    /// As [`ShardWriter::write_tensor`].
    pub fn write_named(&mut self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        // Tensors without bytes are complete as soon as their turn comes.
        if bytes.is_empty() && self.digests.iter().any(|(done, _)| done == name) {
            return Ok(());
        }
        match self.tensors.get(self.current) {
            Some((next, size)) if self.written == 0 && next.name == name && *size == bytes.len() as u64 => {
                self.write(bytes)
            }
            Some((next, size)) => {
                let expected = format!("{} bytes of `{}`", size - self.written, next.name);
                Err(self.misuse(expected, format!("{} bytes of `{name}`", bytes.len())))
            }
            None => Err(self.misuse("no further tensor", format!("`{name}`"))),
        }
    }

    /// Syncs and renames the file.
    ///
    /// # Errors
    /// [`Error::Invalid`] when bytes are missing, [`Error::Io`].
    pub fn finish(mut self) -> Result<ShardReceipt, Error> {
        if let Some((next, size)) = self.tensors.get(self.current) {
            let (expected, found) = (format!("{size} bytes of `{}`", next.name), format!("{}", self.written));
            return Err(self.misuse(expected, found));
        }
        let tensor_bytes = self.tensors.iter().map(|(_, size)| size).sum();
        let (bytes, sha256) = self.file.finish()?;
        let tensors = std::mem::take(&mut self.digests);
        Ok(ShardReceipt { file: self.name, bytes, sha256, tensor_bytes, tensors })
    }

    fn close_full_tensors(&mut self) {
        while let Some((header, size)) = self.tensors.get(self.current)
            && self.written == *size
        {
            let digest = std::mem::take(&mut self.hash).finish();
            self.digests.push((header.name.clone(), digest));
            self.current += 1;
            self.written = 0;
        }
    }

    fn misuse(&self, expected: impl Into<String>, found: impl ToString) -> Error {
        let remedy = "hand over the tensors in the order and with the sizes that the shard was created with";
        Error::invalid(format!("shard `{}`", self.name), expected, found, remedy)
    }
}

/// Length field and JSON, padded with spaces so that the data begins at a multiple of 8.
fn header_bytes(file: &str, tensors: &[TensorHeader]) -> Result<Vec<u8>, Error> {
    let mut json = b"{\"__metadata__\":{\"format\":\"pt\"}".to_vec();
    let (mut start, mut names) = (0u64, HashSet::with_capacity(tensors.len()));
    for tensor in tensors {
        let refuse = |expected: &str, found: String| {
            let subject = format!("shard `{file}`, tensor `{}`", tensor.name);
            Err(Error::invalid(subject, expected, found, "correct the list of tensors"))
        };
        if tensor.name == "__metadata__" || !names.insert(tensor.name.as_str()) {
            return refuse("a name of its own", "a second use".to_owned());
        }
        let Some(end) = tensor.bytes().and_then(|bytes| start.checked_add(bytes)) else {
            return refuse("a size within 64 bits", format!("{} {:?}", tensor.dtype, tensor.shape));
        };
        let entry = json!({"dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [start, end]});
        json.extend(format!(",{}:{entry}", json!(tensor.name)).bytes());
        start = end;
    }
    json.push(b'}');
    json.resize(json.len().next_multiple_of(8), b' ');
    if json.len() as u64 > MAX_HEADER_BYTES {
        let expected = format!("a header of at most {MAX_HEADER_BYTES} bytes");
        return Err(Error::invalid(format!("shard `{file}`"), expected, json.len(), "write more, smaller shards"));
    }
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    Ok(bytes)
}

/// Writes a small file whole: temporary name, sync, rename, sync of the directory.
///
/// # Errors
/// [`Error::Io`].
pub fn write_file(directory: &Path, name: &str, bytes: &[u8]) -> Result<Digest, Error> {
    let mut file = PartialFile::create(directory, name)?;
    file.write(bytes)?;
    Ok(file.finish()?.1)
}

/// Writes `model.safetensors.index.json` for finished shards.
///
/// # Errors
/// [`Error::Io`].
pub fn write_index(directory: &Path, shards: &[ShardReceipt]) -> Result<Digest, Error> {
    let weight_map: BTreeMap<&str, &str> =
        shards.iter().flat_map(|s| s.tensors.iter().map(|(name, _)| (name.as_str(), s.file.as_str()))).collect();
    let total_size: u64 = shards.iter().map(|s| s.tensor_bytes).sum();
    let index = json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
    write_file(directory, INDEX_FILE, format!("{index:#}\n").as_bytes())
}

/// A file under its temporary name.
#[derive(Debug)]
struct PartialFile {
    /// `None` once finished.
    out: Option<BufWriter<File>>,
    temporary: PathBuf,
    path: PathBuf,
    directory: PathBuf,
    hash: Hasher,
    bytes: u64,
}

impl PartialFile {
    fn create(directory: &Path, name: &str) -> Result<Self, Error> {
        let temporary = directory.join(format!("{name}.tmp"));
        let out = File::create(&temporary).map_err(|e| Error::io(&temporary, "create", e))?;
        Ok(Self {
            out: Some(BufWriter::with_capacity(1 << 20, out)),
            temporary,
            path: directory.join(name),
            directory: directory.to_owned(),
            hash: Hasher::default(),
            bytes: 0,
        })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let out = self.out.as_mut().expect("only finish takes the file");
        out.write_all(bytes).map_err(|e| Error::io(&self.temporary, "write", e))?;
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn finish(&mut self) -> Result<(u64, Digest), Error> {
        let out = self.out.take().expect("only finish takes the file");
        let done = out.into_inner().map_err(std::io::IntoInnerError::into_error).and_then(|file| file.sync_all());
        let renamed = done.and_then(|()| fs::rename(&self.temporary, &self.path));
        let synced = renamed.and_then(|()| sync_directory(&self.directory));
        synced.map_err(|e| {
            // The temporary file is of no use to anyone; its removal is best effort.
            drop(fs::remove_file(&self.temporary));
            Error::io(&self.path, "finish writing", e)
        })?;
        Ok((self.bytes, std::mem::take(&mut self.hash).finish()))
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if self.out.take().is_some() {
            drop(fs::remove_file(&self.temporary));
        }
    }
}

/// Makes a rename in a directory durable.
fn sync_directory(directory: &Path) -> std::io::Result<()> {
    if cfg!(unix) { File::open(directory)?.sync_all() } else { Ok(()) }
}
