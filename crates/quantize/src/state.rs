//! The state of an unfinished run: what is durable, and which inputs it was made from.
//!
//! A run works in a hidden folder of the artifact's directory. `state.json` there is replaced after every finished shard,
//! never changed in place, so at any moment it describes shards that are complete. Residual streams are saved from time to
//! time; from the last saved ones the finished layers are run again (with their quantized experts, which gives the same
//! bits), so a resumed run continues exactly where an undisturbed one would be. The folder disappears with the last file.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use glimmer_checkpoint::digest::{Digest, Hasher};
use glimmer_checkpoint::manifest::{MANIFEST_FILE, Manifest, SourceIdentity};
use glimmer_checkpoint::writer::{ShardReceipt, write_file};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::copy::NonFiniteTensor;
use crate::error::{Error, Result};
use crate::report::LayerReport;
use crate::rows::RowStore;
use crate::source_files::{SourceFile, changed};

/// The hidden folder.
pub(crate) const FOLDER: &str = ".quantize";
const STATE_FILE: &str = "state.json";
/// Held locked by the run at work; the lock goes with the process, however it ends.
const LOCK_FILE: &str = "lock";

/// Whether a directory holds an interrupted run: begun, and not yet an artifact.
pub fn is_unfinished(directory: &Path) -> bool {
    directory.join(FOLDER).join(STATE_FILE).is_file()
}

/// What the artifact depends on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Inputs {
    /// The source.
    pub(crate) source: SourceIdentity,
    /// The calibration data.
    pub(crate) calibration: String,
    /// The recipe, with everything else that changes bytes.
    pub(crate) recipe: Value,
}

/// A finished shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct FinishedShard {
    /// What was written.
    pub(crate) receipt: ShardReceipt,
    /// What was done, for a layer.
    pub(crate) layer: Option<LayerReport>,
    /// Copied tensors with values that are not finite.
    #[serde(default)]
    pub(crate) non_finite: Vec<NonFiniteTensor>,
}

/// Contents of `state.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    inputs: Inputs,
    /// The source's shards when the run began.
    #[serde(default)]
    source_files: Vec<SourceFile>,
    /// By file name.
    shards: BTreeMap<String, FinishedShard>,
    streams: Option<SavedStreams>,
}

/// Residual streams in a file of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct SavedStreams {
    /// The layer that they enter.
    layer: usize,
    /// Digest of the file; damaged streams are made again like damaged shards.
    sha256: Digest,
}

/// How a run begins.
#[derive(Debug)]
pub(crate) enum Start {
    /// There is work to do.
    Work(Box<Run>),
    /// The directory holds the finished artifact of exactly this run.
    Finished(Box<Manifest>),
}

/// An unfinished run in its directory.
#[derive(Debug)]
pub(crate) struct Run {
    directory: PathBuf,
    state: State,
    /// Keeps other runs out of the directory.
    _lock: fs::File,
}

impl Run {
    /// Takes possession of `directory`, or goes on with what is there if `resume` allows it.
    ///
    /// # Errors
    /// [`Error::NotEmpty`], [`Error::Busy`], [`Error::OtherRun`], or what the file system says.
    pub(crate) fn open(directory: &Path, inputs: Inputs, source_files: Vec<SourceFile>, resume: bool) -> Result<Start> {
        if directory.is_symlink() && !directory.exists() {
            let nothing = std::io::Error::new(std::io::ErrorKind::NotFound, "it leads nowhere; make its target first");
            return Err(Error::io(directory, "follow the link", nothing));
        }
        let folder = directory.join(FOLDER);
        let fresh = State { inputs, source_files, shards: BTreeMap::new(), streams: None };
        // Nothing besides a folder in which nothing has been begun.
        let unused = |found: &[String]| -> Result<bool> {
            Ok(found.iter().all(|name| name == FOLDER) && list(&folder)?.iter().all(|name| name == LOCK_FILE))
        };
        let refuse = |found: &[String]| {
            if is_unfinished(directory) {
                return Err(Error::Unfinished { path: directory.to_owned() });
            }
            let found = found.first().cloned().unwrap_or_default();
            Err(Error::NotEmpty { path: directory.to_owned(), found })
        };
        let found = list(directory)?;
        let fresh_start = unused(&found)?;
        if !fresh_start && !resume {
            // Nobody can go on with a run that is still at work.
            if is_unfinished(directory)
                && let Err(busy @ Error::Busy { .. }) = lock(directory, &folder)
            {
                return Err(busy);
            }
            return refuse(&found);
        }
        let lock = if fresh_start || folder.exists() { Some(lock(directory, &folder)?) } else { None };
        // Another run may have come and gone before the lock was ours.
        let found = list(directory)?;
        let path = folder.join(STATE_FILE);
        if let Some(lock) = lock {
            if unused(&found)? {
                let run = Self { directory: directory.to_owned(), state: fresh, _lock: lock };
                run.save()?;
                return Ok(Start::Work(Box::new(run)));
            }
            if !resume {
                return refuse(&found);
            }
            if path.exists() {
                let text = fs::read(&path).map_err(|e| Error::io(&path, "read", e))?;
                let state: State = serde_json::from_slice(&text)
                    .map_err(|e| Error::io(&path, "understand", std::io::Error::other(e)))?;
                compare(directory, &fresh.inputs, &state.inputs)?;
                if let Some(differences) = changed(&state.source_files, &fresh.source_files) {
                    return Err(Error::OtherRun { path: directory.to_owned(), what: "source", differences });
                }
                let state = State { inputs: fresh.inputs, ..state };
                let mut run = Self { directory: directory.to_owned(), state, _lock: lock };
                run.drop_damaged()?;
                return Ok(Start::Work(Box::new(run)));
            }
            // Only the beginnings of a first state file.
            if found.iter().all(|name| name == FOLDER) {
                let run = Self { directory: directory.to_owned(), state: fresh, _lock: lock };
                run.save()?;
                return Ok(Start::Work(Box::new(run)));
            }
        }
        if directory.join("config.json").exists() && directory.join(MANIFEST_FILE).exists() {
            let manifest = Manifest::read(directory)?;
            let made_from = Inputs {
                source: manifest.source.clone(),
                calibration: manifest.recipe["calibration_sha256"].as_str().unwrap_or("none").to_owned(),
                recipe: manifest.recipe["recipe"].clone(),
            };
            compare(directory, &fresh.inputs, &made_from)?;
            remove_folder(&folder)?;
            return Ok(Start::Finished(Box::new(manifest)));
        }
        refuse(&found)
    }

    /// The artifact's directory.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// A path for a working file.
    pub(crate) fn working_file(&self, name: &str) -> PathBuf {
        self.directory.join(FOLDER).join(name)
    }

    /// What was made from what.
    pub(crate) fn inputs(&self) -> &Inputs {
        &self.state.inputs
    }

    /// A finished shard.
    pub(crate) fn finished(&self, file: &str) -> Option<&FinishedShard> {
        self.state.shards.get(file)
    }

    /// Records a durable shard.
    ///
    /// # Errors
    /// What the file system says.
    pub(crate) fn record(&mut self, shard: FinishedShard) -> Result<()> {
        self.state.shards.insert(shard.receipt.file.clone(), shard);
        self.save()
    }

    /// The layer that the saved streams enter.
    pub(crate) fn streams_at(&self) -> Option<usize> {
        self.state.streams.map(|saved| saved.layer)
    }

    /// Saves the streams that enter `layer`.
    ///
    /// # Errors
    /// What the file system says.
    pub(crate) fn save_streams(&mut self, layer: usize, streams: &RowStore) -> Result<()> {
        let old = self.state.streams.map(|saved| self.streams_file(saved.layer));
        let path = self.streams_file(layer);
        let temporary = path.with_extension("tmp");
        let file = fs::File::create(&temporary).map_err(|e| Error::io(&temporary, "create", e))?;
        let mut out = std::io::BufWriter::new(file);
        let mut hash = Hasher::default();
        streams.for_each_piece(|piece| {
            let bytes = bytemuck::cast_slice(piece);
            hash.update(bytes);
            out.write_all(bytes).map_err(|e| Error::io(&temporary, "write", e))
        })?;
        let file = out.into_inner().map_err(|e| Error::io(&temporary, "write", e.into_error()))?;
        file.sync_all().map_err(|e| Error::io(&temporary, "sync", e))?;
        fs::rename(&temporary, &path).map_err(|e| Error::io(&path, "rename", e))?;
        self.state.streams = Some(SavedStreams { layer, sha256: hash.finish() });
        self.save()?;
        if let Some(old) = old.filter(|old| *old != path) {
            fs::remove_file(&old).map_err(|e| Error::io(&old, "remove", e))?;
        }
        Ok(())
    }

    /// Reads the saved streams back.
    ///
    /// # Errors
    /// What the file system says.
    pub(crate) fn load_streams(&self, layer: usize, streams: &mut RowStore) -> Result<()> {
        let path = self.streams_file(layer);
        let mut file = fs::File::open(&path).map_err(|e| Error::io(&path, "open", e))?;
        let bytes = file.metadata().map_err(|e| Error::io(&path, "read the size of", e))?.len() as usize;
        let width = streams.width();
        let rows = ((1 << 20) / width).max(1);
        let mut part = vec![0.0f32; rows * width];
        let total = bytes / (width * size_of::<f32>());
        for first in (0..total).step_by(rows) {
            let part = &mut part[..rows.min(total - first) * width];
            file.read_exact(bytemuck::cast_slice_mut(part)).map_err(|e| Error::io(&path, "read", e))?;
            streams.write(first, part)?;
        }
        Ok(())
    }

    /// The artifact is complete: nothing is left to resume.
    ///
    /// # Errors
    /// What the file system says.
    pub(crate) fn close(self) -> Result<()> {
        remove_folder(&self.directory.join(FOLDER))
    }

    fn streams_file(&self, layer: usize) -> PathBuf {
        self.working_file(&format!("streams-{layer:05}.f32"))
    }

    fn save(&self) -> Result<()> {
        let text = serde_json::to_vec(&self.state)
            .map_err(|e| Error::io(self.working_file(STATE_FILE), "write", std::io::Error::other(e)))?;
        write_file(&self.directory.join(FOLDER), STATE_FILE, &text)?;
        Ok(())
    }

    /// Forgets shards and streams whose files are not what was recorded, and removes unfinished files.
    fn drop_damaged(&mut self) -> Result<()> {
        for name in list(&self.directory)? {
            if name.ends_with(".tmp") {
                let path = self.directory.join(name);
                fs::remove_file(&path).map_err(|e| Error::io(&path, "remove", e))?;
            }
        }
        let mut damaged = Vec::new();
        for (file, shard) in &self.state.shards {
            let path = self.directory.join(file);
            if !path.exists() || Digest::of_file(&path)? != shard.receipt.sha256 {
                damaged.push(file.clone());
            }
        }
        for file in damaged {
            self.state.shards.remove(&file);
        }
        if let Some(saved) = self.state.streams {
            let path = self.streams_file(saved.layer);
            if !path.exists() || Digest::of_file(&path)? != saved.sha256 {
                self.state.streams = None;
            }
        }
        Ok(())
    }
}

/// Makes the folder and locks it against other runs.
fn lock(directory: &Path, folder: &Path) -> Result<fs::File> {
    fs::create_dir_all(folder).map_err(|e| Error::io(folder, "create", e))?;
    let path = folder.join(LOCK_FILE);
    let file = fs::File::create(&path).map_err(|e| Error::io(&path, "create", e))?;
    match file.try_lock() {
        Err(fs::TryLockError::WouldBlock) => Err(Error::Busy { path: directory.to_owned() }),
        // Where the file system has no locks, runs are as safe as the user is careful.
        Ok(()) | Err(fs::TryLockError::Error(_)) => Ok(file),
    }
}

/// Refuses to go on with other inputs.
fn compare(directory: &Path, now: &Inputs, then: &Inputs) -> Result<()> {
    let refuse = |what, differences: Vec<String>| {
        Err(Error::OtherRun { path: directory.to_owned(), what, differences: differences.join(", ") })
    };
    if now.source != then.source {
        let value = |source: &SourceIdentity| serde_json::to_value(source).unwrap_or(Value::Null);
        return refuse("source", differences(&value(&then.source), &value(&now.source)));
    }
    // Through text, as the other one has come: a reader may round the last digit of a long number.
    let stored = serde_json::from_str(&now.recipe.to_string()).unwrap_or(Value::Null);
    if then.recipe != stored {
        return refuse("recipe", differences(&then.recipe, &stored));
    }
    if now.calibration != then.calibration {
        let of = |inputs: &Inputs| Value::String(inputs.calibration.clone());
        return refuse("calibration", vec![difference("samples (SHA-256)", &of(then), &of(now))]);
    }
    Ok(())
}

/// The fields in which two objects differ, then and now.
fn differences(then: &Value, now: &Value) -> Vec<String> {
    let (Value::Object(old), Value::Object(new)) = (then, now) else { return vec![difference("value", then, now)] };
    let absent = Value::Null;
    let all = old.keys().chain(new.keys().filter(|key| !old.contains_key(*key)));
    all.map(|key| (key, old.get(key).unwrap_or(&absent), new.get(key).unwrap_or(&absent)))
        .filter(|(_, old, new)| old != new)
        .map(|(key, old, new)| difference(key, old, new))
        .collect()
}

fn difference(field: &str, then: &Value, now: &Value) -> String {
    let plain = |value: &Value| match value {
        Value::Null => "none".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    format!("{field} was {} and is {} now", plain(then), plain(now))
}

/// Names in a directory, sorted; none if it does not exist.
fn list(directory: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io(directory, "list", e)),
    };
    let mut names = entries
        .map(|entry| entry.map(|e| e.file_name().to_string_lossy().into_owned()))
        .collect::<std::io::Result<Vec<_>>>()
        .map_err(|e| Error::io(directory, "list", e))?;
    names.sort();
    Ok(names)
}

/// Removes the folder, the state file first: without it the rest is only left-overs.
fn remove_folder(folder: &Path) -> Result<()> {
    if !folder.exists() {
        return Ok(());
    }
    let state = folder.join(STATE_FILE);
    if state.exists() {
        fs::remove_file(&state).map_err(|e| Error::io(&state, "remove", e))?;
    }
    fs::remove_dir_all(folder).map_err(|e| Error::io(folder, "remove", e))
}
