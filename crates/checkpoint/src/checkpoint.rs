//! A checkpoint: configuration, tensors and companion files of a directory or of bytes in memory.
//!
//! FP8 sources (see [`crate::fp8`]) look like BF16 ones here: [`Checkpoint::tensor`] widens, and the scale tensors do not
//! appear among the names. What is stored is reached through [`Checkpoint::shards`].

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use crate::{
    config::Config,
    data::{Bytes, DType, TensorData},
    error::{Damage, Error},
    fp8,
    mapping::map_file,
    shards::{INDEX_FILE, Shards},
};

/// An open checkpoint. Cheap to clone; clones share the mapped files.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    location: String,
    config: Config,
    shards: Shards,
    companions: BTreeMap<String, Companion>,
}

/// A file beside the shards.
#[derive(Debug, Clone)]
enum Companion {
    OnDisk(PathBuf),
    InMemory(Bytes),
}

impl Companion {
    fn read(&self) -> Option<Bytes> {
        match self {
            Self::OnDisk(path) => fs::read(path).ok().map(Bytes::new),
            Self::InMemory(bytes) => Some(bytes.clone()),
        }
    }
}

impl Checkpoint {
    /// Opens a directory: maps the shards, checks every header and the index.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Config`], or the first [`Error::Damage`].
    pub fn open(directory: impl AsRef<Path>) -> Result<Self, Error> {
        refuse_damage(Self::survey(directory)?)
    }

    /// Opens a directory and lists all damage instead of refusing it.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Config`].
    pub fn survey(directory: impl AsRef<Path>) -> Result<(Self, Vec<Damage>), Error> {
        let directory = directory.as_ref();
        let mut shards = Vec::new();
        let mut companions = BTreeMap::new();
        for (name, path) in list_files(directory)? {
            if name.ends_with(".safetensors") {
                shards.push((name, map_file(&path)?));
            } else {
                companions.insert(name, Companion::OnDisk(path));
            }
        }
        Self::assemble(directory.display().to_string(), shards, companions)
    }

    /// Opens a checkpoint whose files (name, content) are in memory.
    ///
    /// # Errors
    /// [`Error::Config`], or the first [`Error::Damage`].
    pub fn from_files(files: Vec<(String, Bytes)>) -> Result<Self, Error> {
        let (shards, companions): (Vec<_>, Vec<_>) = files.into_iter().partition(|(n, _)| n.ends_with(".safetensors"));
        let companions = companions.into_iter().map(|(name, bytes)| (name, Companion::InMemory(bytes))).collect();
        refuse_damage(Self::assemble("in memory".to_owned(), shards, companions)?)
    }

    /// Another name for messages.
    #[must_use]
    pub fn located(self, location: impl Into<String>) -> Self {
        Self { location: location.into(), ..self }
    }

    fn assemble(
        location: String,
        shards: Vec<(String, Bytes)>,
        companions: BTreeMap<String, Companion>,
    ) -> Result<(Self, Vec<Damage>), Error> {
        let read = |name: &str| companions.get(name).and_then(Companion::read);
        let Some(config) = read("config.json") else {
            return Err(Error::invalid(
                location,
                "a file `config.json`",
                "none that can be read",
                "give the directory of a checkpoint",
            ));
        };
        let text = std::str::from_utf8(config.as_slice())
            .map_err(|e| crate::config::ConfigError::Json { found: e.to_string() })?;
        let config = Config::parse(text)?;
        let index = read(INDEX_FILE);
        let index = index.map(|bytes| (INDEX_FILE.to_owned(), bytes));
        let (shards, mut damages) = Shards::read(shards.into_iter().chain(index));
        fp8::check(&shards, &mut damages);
        Ok((Self { location, config, shards, companions }, damages))
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Directory, or a word for bytes in memory; for messages.
    pub fn location(&self) -> &str {
        &self.location
    }

    /// The tensors as stored (FP8 weights and their scales included).
    pub fn shards(&self) -> &Shards {
        &self.shards
    }

    /// Names of the tensors, ascending, without the scales of FP8 weights.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.shards.names().filter(|name| !fp8::is_scale(name))
    }

    /// Whether [`Checkpoint::tensor`] can give this tensor.
    pub fn has(&self, name: &str) -> bool {
        !fp8::is_scale(name) && self.shards.stored(name).is_some()
    }

    /// Element type and shape of a tensor as [`Checkpoint::tensor`] gives it.
    pub fn describe(&self, name: &str) -> Option<(DType, &[usize])> {
        let stored = self.shards.stored(name).filter(|_| self.has(name))?;
        let dtype = if stored.dtype == DType::F8E4M3 { DType::Bf16 } else { stored.dtype };
        Some((dtype, &stored.shape))
    }

    /// A tensor: the mapped bytes, or for an FP8 weight its BF16 widening.
    ///
    /// # Errors
    /// [`Error::NoTensor`]; [`Error::Damage`] when an FP8 weight lacks its scale (only after [`Checkpoint::survey`]).
    pub fn tensor(&self, name: &str) -> Result<TensorData, Error> {
        let missing = || Error::NoTensor { tensor: name.to_owned(), location: self.location.clone() };
        let tensor = self.shards.tensor(name).filter(|_| self.has(name)).ok_or_else(missing)?;
        if tensor.dtype != DType::F8E4M3 {
            return Ok(tensor);
        }
        fp8::widen(&self.shards, &tensor)
    }

    /// Says that no tensor will be read soon: see [`Bytes::release`]. Tensors that were handed out stay readable.
    pub fn release(&self) {
        self.shards.files().iter().for_each(|shard| shard.bytes.release());
    }

    /// Names of the files beside the shards (`tokenizer.json`, `chat_template.jinja`, ...), ascending.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        self.companions.keys().map(String::as_str)
    }

    /// The content of a file beside the shards; `None` when there is none that can be read.
    pub fn file(&self, name: &str) -> Option<Bytes> {
        self.companions.get(name).and_then(Companion::read)
    }
}

fn refuse_damage((checkpoint, damages): (Checkpoint, Vec<Damage>)) -> Result<Checkpoint, Error> {
    match damages.into_iter().find(|damage| !damage.is_tolerable()) {
        Some(damage) => Err(damage.into()),
        None => Ok(checkpoint),
    }
}

/// Regular files of a directory by name; hidden and unfinished (`*.tmp`) ones are not part of a checkpoint.
fn list_files(directory: &Path) -> Result<BTreeMap<String, PathBuf>, Error> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(directory).map_err(|e| Error::io(directory, "list the directory", e))? {
        let path = entry.map_err(|e| Error::io(directory, "list the directory", e))?.path();
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
        if !name.starts_with('.') && !name.ends_with(".tmp") && path.is_file() {
            files.insert(name.to_owned(), path);
        }
    }
    Ok(files)
}
