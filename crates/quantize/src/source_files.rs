//! Whether the source is still the one that a run began with.
//!
//! The identity in the manifest samples the weights, because a hash of all of them would take longer than the copy. A byte
//! changed outside the sample between an interruption and `--resume` would go unnoticed there and leave an artifact of two
//! sources. So an unfinished run also remembers of every shard its size, a digest of its header, the time when it was last
//! written, which whoever writes may set as they like, and the time when the system last saw it change, which nobody can set.
//! A source that was only touched, moved or copied is refused as well: it cannot be told from a changed one without reading all of
//! it, and a run begun anew costs time alone. None of this enters the artifact.

use std::path::Path;
use std::time::UNIX_EPOCH;

use glimmer_checkpoint::{Checkpoint, Digest};
use serde::{Deserialize, Serialize};

/// A shard as a run found it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SourceFile {
    /// Its name.
    file: String,
    bytes: u64,
    /// Nanoseconds since 1970; none where the source is no directory or the system does not tell.
    modified_ns: Option<u64>,
    /// When content, times, name or owner last changed; none as above, and in runs of earlier versions.
    #[serde(default)]
    changed_ns: Option<i64>,
    header_sha256: Digest,
}

/// The shards of a source, in the order of their names.
pub(crate) fn source_files(source: &Checkpoint) -> Vec<SourceFile> {
    let shards = source.shards().files().iter();
    let mut files: Vec<SourceFile> = shards
        .map(|shard| {
            let bytes = shard.bytes.as_slice();
            SourceFile {
                file: shard.file.clone(),
                bytes: bytes.len() as u64,
                modified_ns: modified(&Path::new(source.location()).join(&shard.file)),
                changed_ns: status_changed(&Path::new(source.location()).join(&shard.file)),
                header_sha256: Digest::of(bytes.get(..shard.data_start).unwrap_or(bytes)),
            }
        })
        .collect();
    files.sort_by(|a, b| a.file.cmp(&b.file));
    files
}

fn modified(path: &Path) -> Option<u64> {
    let since = path.metadata().ok()?.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    u64::try_from(since.as_nanos()).ok()
}

#[cfg(unix)]
fn status_changed(path: &Path) -> Option<i64> {
    use std::os::unix::fs::MetadataExt as _;
    let data = path.metadata().ok()?;
    data.ctime().checked_mul(1_000_000_000)?.checked_add(data.ctime_nsec())
}

#[cfg(not(unix))]
fn status_changed(_path: &Path) -> Option<i64> {
    None
}

/// What is different now, in words; none where nothing is.
pub(crate) fn changed(then: &[SourceFile], now: &[SourceFile]) -> Option<String> {
    then.iter().find_map(|then| {
        let file = &then.file;
        let Some(now) = now.iter().find(|now| now.file == *file) else { return Some(format!("`{file}` is gone")) };
        if then.bytes != now.bytes {
            return Some(format!("`{file}` had {} bytes and has {} now", then.bytes, now.bytes));
        }
        if then.header_sha256 != now.header_sha256 {
            return Some(format!("the header of `{file}` is another"));
        }
        // A copy that lost its times cannot be told from a changed file, and a mixed artifact would be worse than a restart.
        let (Some(old), Some(new)) = (then.modified_ns, now.modified_ns) else { return None };
        if old != new {
            return Some(format!("`{file}` was written to after the run began"));
        }
        let (Some(old), Some(new)) = (then.changed_ns, now.changed_ns) else { return None };
        (old != new).then(|| {
            format!(
                "`{file}` was changed, replaced or moved after the run began, though its time of writing says otherwise"
            )
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_header_time_and_absence_are_told_apart() {
        let file = |bytes, modified_ns, header: &[u8]| SourceFile {
            file: "model.safetensors".to_owned(),
            bytes,
            modified_ns,
            changed_ns: Some(7),
            header_sha256: Digest::of(header),
        };
        let then = [file(10, Some(5), b"a")];
        let told = |now: &[SourceFile]| changed(&then, now).unwrap_or_default();
        assert_eq!(changed(&then, &then), None);
        assert_eq!(changed(&then, &[file(10, None, b"a")]), None);
        assert!(told(&[]).contains("is gone"));
        assert!(told(&[file(11, Some(5), b"a")]).contains("had 10 bytes and has 11 now"));
        assert!(told(&[file(10, Some(5), b"b")]).contains("the header"));
        assert!(told(&[file(10, Some(6), b"a")]).contains("was written to"));
        let replaced = SourceFile { changed_ns: Some(8), ..file(10, Some(5), b"a") };
        assert!(told(std::slice::from_ref(&replaced)).contains("was changed, replaced or moved"));
        assert_eq!(changed(&then, &[SourceFile { changed_ns: None, ..replaced }]), None);
    }
}
