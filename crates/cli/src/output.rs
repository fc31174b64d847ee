//! Files that a command writes at its end: refused at its start if they cannot be written, complete or absent after it.

use std::{
    fs::{self, File, OpenOptions},
    io::Write as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use serde::Serialize;

/// A file to be written when the work is done.
///
/// A new or regular file is written beside its name and then renamed, so that a failed command leaves what was there
/// before. Anything else (`/dev/stdout`, a named pipe) is written directly.
#[derive(Debug)]
pub(crate) struct OutputFile {
    path: PathBuf,
    file: File,
    /// Where the bytes lie until the file is complete.
    unfinished: Option<PathBuf>,
}

impl OutputFile {
    /// Opens the way to `path`; its directory must exist.
    ///
    /// # Errors
    /// The path cannot be written.
    pub(crate) fn prepare(path: &Path) -> anyhow::Result<Self> {
        let failed = || format!("cannot write {}", path.display());
        if path.is_dir() {
            bail!("cannot write {}: it is a directory; name a file", path.display());
        }
        if path.exists() && !path.is_file() {
            let file = OpenOptions::new().write(true).open(path).with_context(failed)?;
            return Ok(Self { path: path.to_owned(), file, unfinished: None });
        }
        // A link stays a link: what it points at is replaced.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let Some(name) = path.file_name() else { bail!("cannot write {}: name a file", path.display()) };
        let unfinished = path.with_file_name(format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id()));
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
            bail!("cannot write {}: there is no folder {}; make it first", path.display(), folder.display());
        }
        let file = File::create(&unfinished).with_context(failed)?;
        Ok(Self { path, file, unfinished: Some(unfinished) })
    }

    /// As [`OutputFile::prepare`], if there is a path.
    ///
    /// # Errors
    /// The path cannot be written.
    pub(crate) fn prepare_optional(path: Option<&Path>) -> anyhow::Result<Option<Self>> {
        path.map(Self::prepare).transpose()
    }

    /// Writes everything and gives the file its name.
    ///
    /// # Errors
    /// What the file system says.
    pub(crate) fn finish(mut self, bytes: &[u8]) -> anyhow::Result<()> {
        let failed = || format!("cannot write {}", self.path.display());
        self.file.write_all(bytes).and_then(|()| self.file.flush()).with_context(failed)?;
        if let Some(unfinished) = &self.unfinished {
            fs::rename(unfinished, &self.path).with_context(failed)?;
        }
        self.unfinished = None;
        Ok(())
    }

    /// Writes a value as readable JSON.
    ///
    /// # Errors
    /// What the file system says.
    pub(crate) fn finish_json(self, value: &impl Serialize) -> anyhow::Result<()> {
        let mut text = serde_json::to_string_pretty(value)?;
        text.push('\n');
        self.finish(text.as_bytes())
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if let Some(unfinished) = &self.unfinished {
            drop(fs::remove_file(unfinished));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unfinished_file_leaves_what_was_there() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("r.json");
        fs::write(&path, "before").expect("written");
        drop(OutputFile::prepare(&path).expect("writable"));
        assert_eq!(fs::read_to_string(&path).expect("there"), "before");
        OutputFile::prepare(&path).expect("writable").finish_json(&[1]).expect("written");
        assert_eq!(fs::read_to_string(&path).expect("there"), "[\n  1\n]\n");
        assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 1);
    }

    #[test]
    fn a_path_that_cannot_be_written_is_refused_at_once() {
        let folder = tempfile::tempdir().expect("a directory");
        for path in [folder.path().to_owned(), folder.path().join("absent/r.json")] {
            let error = OutputFile::prepare(&path).expect_err("refused");
            assert!(error.to_string().contains(&*path.display().to_string()), "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn devices_are_written_in_place() {
        OutputFile::prepare(Path::new("/dev/null")).expect("writable").finish(b"x").expect("written");
        assert!(!Path::new("/dev/null").is_file());
    }
}
