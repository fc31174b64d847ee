//! The one module that maps files into memory.
//!
//! Invariant: the files of a checkpoint do not change while it is open. Writers of this crate keep it by construction: they
//! write to a temporary name and rename, so an open mapping goes on seeing the old file.

#![allow(unsafe_code, reason = "a memory map is unsafe because another process may truncate the file")]

use std::{fs::File, ops::Range, path::Path};

use memmap2::{Mmap, UncheckedAdvice};

use crate::{
    data::{Bytes, Owner},
    error::Error,
};

/// Granularity of [`Mapping::release`]: a multiple of the page size of every supported system.
const PAGE: usize = 1 << 16;

/// A file mapped for reading.
struct Mapping(Mmap);

impl Owner for Mapping {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn release(&self, range: Range<usize>) {
        let (start, end) = (range.start.next_multiple_of(PAGE), range.end / PAGE * PAGE);
        if start < end {
            // SAFETY: the mapping is read-only and backed by a file, so dropping its pages loses nothing: the next read
            // fetches the same bytes from the file.
            let dropped = unsafe { self.0.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start) };
            // It is a hint; where the system does not take it, the pages just stay.
            drop(dropped);
        }
    }
}

/// Maps a whole file for reading. An empty file gives empty bytes.
///
/// # Errors
/// [`Error::Io`] when the file cannot be opened or mapped.
pub fn map_file(path: &Path) -> Result<Bytes, Error> {
    let file = File::open(path).map_err(|e| Error::io(path, "open", e))?;
    let length = file.metadata().map_err(|e| Error::io(path, "read the size", e))?.len();
    if length == 0 {
        return Ok(Bytes::new(Vec::new()));
    }
    // SAFETY: the mapping is private to reading and lives as long as the `Bytes` that own it. That nobody truncates the
    // file meanwhile is the module's stated invariant, which every reader of mapped files has to demand.
    let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, "map", e))?;
    Ok(Bytes::owned(Mapping(map)))
}
