//! `glimmer demo`: the whole chain on the embedded model.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, bail};
use glimmer_bench::{BenchError, DemoInput, DemoProgress, Document, Task, demo, read_documents, read_task};
use indicatif::ProgressBar;

use crate::{
    args::DemoArgs,
    device::{Place, on_device},
    embedded, open,
    output::OutputFile,
    progress,
};

/// Items of each task and mode.
const ITEMS: usize = 40;
/// Tasks of the demo: those that the model was trained for.
const TASKS: &[&str] =
    &["arithmetic", "arithmetic_hard", "word_problem", "text", "facts", "tools", "tools_final", "vision", "recall"];

/// Scorers of the token panel at the same time on a GPU, whose work is one stream a scorer.
const SCORERS_GPU: usize = 2;

/// Runs the chain, prints its page and writes its JSON. Exit code 1 when the artifact fails a gate.
pub(crate) fn run(args: &DemoArgs, threads: usize) -> anyhow::Result<ExitCode> {
    if embedded::MODEL.is_empty() && args.from.is_none() {
        bail!(
            "the demo runs on the embedded model, which this build leaves out (feature `embedded`); name the folder of the \
             sources with --from"
        );
    }
    let place = Place::of(&args.device)?;
    if let Some(keep) = &args.keep
        && fs::read_dir(keep).is_ok_and(|mut entries| entries.next().is_some())
    {
        bail!("--keep {}: the directory is not empty; name a new one", keep.display());
    }
    let json = OutputFile::prepare_optional(args.json.as_deref())?;
    let scratch = Scratch::create_in(&std::env::temp_dir())?;
    let (source, parity) = (scratch.path.join("bf16"), scratch.path.join("w4a16-parity"));
    let artifact = args.keep.clone().unwrap_or_else(|| scratch.path.join("w4a16"));
    let source = match &args.from {
        Some(from) => from.join("models/micro-bf16"),
        None => {
            open::write_embedded(&source)?;
            source
        }
    };
    let (tasks, calibration, documents) = data(args.from.as_deref())?;
    let input = DemoInput {
        source: &source,
        artifact: &artifact,
        parity: &parity,
        tasks: &tasks,
        calibration: &calibration,
        documents: &documents,
        items: ITEMS,
        draft_depth: 2,
        batch: 16,
        threads,
        scorers: if place.is_cpu() { threads } else { SCORERS_GPU },
    };
    let mut bar = Bar { bar: progress::share(1000, "") };
    let report = on_device!(place, open => {
        let open = |threads| open(threads).map_err(|error| BenchError::model("opening the device", error));
        demo(&input, &open, &mut bar)?
    });
    bar.bar.finish_and_clear();
    if let Some(file) = json {
        file.finish_json(&report)?;
    }
    writeln!(anstream::stdout(), "{}", report.page())?;
    Ok(ExitCode::from(u8::from(!report.verify.passed)))
}

/// Tasks, calibration set and token panel: the embedded ones, or those of the sources in `from`.
fn data(from: Option<&Path>) -> anyhow::Result<(Vec<Task>, Vec<Document>, Vec<Document>)> {
    let text = |file: String, embedded: &'static [u8]| -> anyhow::Result<(String, String)> {
        let Some(from) = from else { return Ok((file, std::str::from_utf8(embedded)?.to_owned())) };
        let path = from.join(&file);
        Ok((path.display().to_string(), open::text(&path)?))
    };
    let embedded = |name: &str| embedded::TASKS.iter().find(|(n, _)| *n == name).map_or(&[][..], |(_, bytes)| bytes);
    let task = |name: &&str| {
        let file = format!("{name}.jsonl");
        let (name, lines) = text(format!("data/eval/{file}"), embedded(&file))?;
        Ok(read_task(&name, &lines)?)
    };
    let tasks = TASKS.iter().map(task).collect::<anyhow::Result<Vec<_>>>()?;
    let documents = |file: &str, embedded| {
        let (name, lines) = text(file.to_owned(), embedded)?;
        Ok::<_, anyhow::Error>(read_documents(&name, &lines)?)
    };
    let calibration = documents("data/calib/calib.jsonl", embedded::CALIBRATION)?;
    Ok((tasks, calibration, documents("data/eval/documents.jsonl", embedded::DOCUMENTS)?))
}

struct Bar {
    bar: ProgressBar,
}

impl DemoProgress for Bar {
    fn stage(&mut self, name: &str) {
        self.bar.set_prefix(name.to_owned());
        self.bar.set_position(0);
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of 0 to 1")]
    fn done(&mut self, share: f64) {
        self.bar.set_position((share.clamp(0.0, 1.0) * 1000.0) as u64);
    }
}

/// A directory that goes away with the value. One that a killed demo left behind goes away with the next demo.
struct Scratch {
    path: PathBuf,
    /// Locked as long as the demo runs; the lock goes with the process, however it ends.
    _lock: File,
}

impl Scratch {
    /// How the directories' names begin.
    const PREFIX: &str = "glimmer-demo-";
    /// File in the directory whose lock says that its demo is running.
    const LOCK: &str = "lock";

    fn create_in(parent: &Path) -> anyhow::Result<Self> {
        Self::clear(parent);
        let unique = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos());
        let name = format!("{}{}-{unique}", Self::PREFIX, std::process::id());
        let (early, path) = (parent.join(format!("new-{name}")), parent.join(name));
        // It gets its name once it is locked: another demo that starts now must not take it for a leftover.
        let create = || -> io::Result<File> {
            fs::create_dir(&early)?;
            let lock = File::create(early.join(Self::LOCK))?;
            lock.lock()?;
            fs::rename(&early, &path)?;
            Ok(lock)
        };
        let lock = create().with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self { path, _lock: lock })
    }

    /// Removes what demos left behind that were killed. Best effort: a leftover in the temporary directory harms nobody,
    /// and other people's cannot be removed.
    fn clear(parent: &Path) {
        for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
            let ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(Self::PREFIX));
            let lock = ours.then(|| File::open(entry.path().join(Self::LOCK)));
            if let Some(Ok(lock)) = lock
                && lock.try_lock().is_ok()
            {
                drop(fs::remove_dir_all(entry.path()));
            }
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Best effort, as above.
        drop(fs::remove_dir_all(&self.path));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_of_killed_demos_are_removed_and_running_ones_kept() {
        let parent = tempfile::tempdir().unwrap();
        let running = Scratch::create_in(parent.path()).unwrap();
        let (killed, other) = (parent.path().join("glimmer-demo-1-2"), parent.path().join("glimmer-demo"));
        for path in [&killed, &other] {
            fs::create_dir(path).unwrap();
            fs::write(path.join("lock"), "").unwrap();
        }
        let next = Scratch::create_in(parent.path()).unwrap();
        assert!(running.path.exists() && next.path.exists() && other.exists());
        assert!(!killed.exists());
        let path = next.path.clone();
        drop(next);
        assert!(!path.exists());
    }
}
