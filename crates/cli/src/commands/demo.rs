//! `glimmer demo`: the whole chain on the embedded model.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, bail};
use glimmer_bench::{DemoInput, DemoProgress, demo, read_documents, read_task};
use indicatif::ProgressBar;

use crate::{args::DemoArgs, embedded, open, output::OutputFile, progress};

/// Items of each task and mode.
const ITEMS: usize = 40;
/// Tasks of the demo: those that the model was trained for.
const TASKS: &[&str] =
    &["arithmetic", "arithmetic_hard", "word_problem", "text", "facts", "tools", "tools_final", "vision", "recall"];

/// Runs the chain, prints its page and writes its JSON. Exit code 1 when the artifact fails a gate.
pub(crate) fn run(args: &DemoArgs, threads: usize) -> anyhow::Result<ExitCode> {
    if embedded::MODEL.is_empty() {
        bail!("the demo runs on the embedded model, which this build leaves out (feature `embedded`)");
    }
    if let Some(keep) = &args.keep
        && fs::read_dir(keep).is_ok_and(|mut entries| entries.next().is_some())
    {
        bail!("--keep {}: the directory is not empty; name a new one", keep.display());
    }
    if let Some(parent) = args.json.as_deref().and_then(Path::parent).filter(|p| !p.as_os_str().is_empty()) {
        fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    }
    let json = OutputFile::prepare_optional(args.json.as_deref())?;
    let scratch = Scratch::create_in(&std::env::temp_dir())?;
    let (source, parity) = (scratch.path.join("bf16"), scratch.path.join("w4a16-parity"));
    let artifact = args.keep.clone().unwrap_or_else(|| scratch.path.join("w4a16"));
    open::write_embedded(&source)?;
    let tasks = embedded::TASKS
        .iter()
        .filter(|(name, _)| TASKS.contains(&name.trim_end_matches(".jsonl")))
        .map(|(name, bytes)| Ok(read_task(name, std::str::from_utf8(bytes)?)?))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let calibration = read_documents("the embedded calibration set", std::str::from_utf8(embedded::CALIBRATION)?)?;
    let documents = read_documents("the embedded documents", std::str::from_utf8(embedded::DOCUMENTS)?)?;
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
    };
    let mut bar = Bar { bar: progress::bar(1000, "") };
    let report = demo(&input, &mut bar)?;
    bar.bar.finish_and_clear();
    if let Some(file) = json {
        file.finish_json(&report)?;
    }
    writeln!(anstream::stdout(), "{}", report.page())?;
    Ok(ExitCode::from(u8::from(!report.verify.passed)))
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
