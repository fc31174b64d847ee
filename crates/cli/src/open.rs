//! Opening what the command line names: a model directory or the embedded model, files, threads.

use std::path::Path;

use anyhow::{Context as _, bail};
use glimmer_checkpoint::{Bytes, Checkpoint};
use glimmer_quantize::is_unfinished;

use crate::embedded;

/// Opens a model directory, or the embedded model when none is named.
///
/// # Errors
/// What is wrong with the directory; or that this build has no embedded model.
pub(crate) fn model(directory: Option<&Path>) -> anyhow::Result<Checkpoint> {
    match directory {
        Some(directory) => {
            let opened = Checkpoint::open(directory);
            opened.or_else(|error| refuse(directory, error, "open the model in"))
        }
        None => embedded_model(),
    }
}

/// What is wrong with a directory that could not be opened: `error`, or that its quantization was interrupted.
///
/// # Errors
/// Always.
pub(crate) fn refuse<T>(directory: &Path, error: impl Into<anyhow::Error>, verb: &str) -> anyhow::Result<T> {
    let name = directory.display();
    if is_unfinished(directory) {
        bail!("{name}: its quantization was interrupted; repeat that command with --resume (--out {name})");
    }
    Err(error.into().context(format!("cannot {verb} {name}")))
}

/// The embedded model.
///
/// # Errors
/// This build has none.
pub(crate) fn embedded_model() -> anyhow::Result<Checkpoint> {
    if embedded::MODEL.is_empty() {
        bail!("this build has no embedded model (feature `embedded` is off): name a model directory");
    }
    let files = embedded::MODEL.iter().map(|(name, bytes)| ((*name).to_owned(), Bytes::new(*bytes))).collect();
    let checkpoint = Checkpoint::from_files(files).context("cannot open the embedded model")?;
    Ok(checkpoint.located("the embedded model"))
}

/// Reads a text file, naming it in the error.
///
/// # Errors
/// The file cannot be read or is not UTF-8.
pub(crate) fn text(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Worker threads: as asked, else one a core.
pub(crate) fn threads(asked: Option<u16>) -> usize {
    asked.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), usize::from)
}

/// Writes the embedded model's files into a new directory.
///
/// # Errors
/// What the file system says.
pub(crate) fn write_embedded(directory: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    for (name, bytes) in embedded::MODEL {
        let path = directory.join(name);
        std::fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
