//! A checkpoint with the tensors of one finished shard laid over it: the model with one layer quantized.

use std::collections::HashMap;
use std::path::Path;

use glimmer_checkpoint::header::Header;
use glimmer_checkpoint::{Checkpoint, Config, TensorData, map_file};
use glimmer_model::weights::Source;

use crate::error::Result;

/// The source, and above it some tensors.
#[derive(Debug)]
pub(crate) struct Overlay<'a> {
    base: &'a Checkpoint,
    tensors: HashMap<String, TensorData>,
}

impl<'a> Overlay<'a> {
    /// With these tensors.
    pub(crate) fn new(base: &'a Checkpoint, tensors: impl IntoIterator<Item = TensorData>) -> Self {
        Self { base, tensors: tensors.into_iter().map(|t| (t.name.clone(), t)).collect() }
    }

    /// With the tensors of a shard.
    ///
    /// # Errors
    /// What reading the shard can go wrong with.
    pub(crate) fn of_shard(base: &'a Checkpoint, directory: &Path, file: &str) -> Result<Self> {
        let bytes = map_file(&directory.join(file))?;
        let header = Header::parse(file, bytes.as_slice()).map_err(glimmer_checkpoint::Error::from)?;
        let tensors = header.tensors.into_iter().filter_map(|entry| {
            let bytes = bytes.slice(entry.range)?;
            Some(TensorData { name: entry.name, dtype: entry.dtype, shape: entry.shape, bytes })
        });
        Ok(Self::new(base, tensors))
    }
}

impl Source for Overlay<'_> {
    fn config(&self) -> &Config {
        self.base.config()
    }

    fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name) || self.base.has(name)
    }

    fn tensor(&self, name: &str) -> glimmer_model::Result<TensorData> {
        match self.tensors.get(name) {
            Some(tensor) => Ok(tensor.clone()),
            None => Ok(self.base.tensor(name)?),
        }
    }
}
