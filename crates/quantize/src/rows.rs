//! Rows of f32 that may be too many for memory: residual streams and expert inputs of all calibration tokens.
//!
//! A store keeps its rows in memory, or in a working file where the budget has no room for them. The values are the same
//! either way.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};

/// `[rows, width]`.
#[derive(Debug)]
pub(crate) struct RowStore {
    width: usize,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Memory(Vec<f32>),
    File { path: PathBuf, file: Mutex<File> },
}

impl RowStore {
    /// A store of zeros, in memory or in the file `path`.
    pub(crate) fn new(path: &Path, rows: usize, width: usize, in_memory: bool) -> Result<Self> {
        let bytes = rows * width * size_of::<f32>();
        let place = if in_memory {
            Place::Memory(vec![0.0; rows * width])
        } else {
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path);
            let file = file.map_err(|e| Error::io(path, "create", e))?;
            file.set_len(bytes as u64).map_err(|e| Error::io(path, "reserve space in", e))?;
            Place::File { path: path.to_owned(), file: Mutex::new(file) }
        };
        Ok(Self { width, place })
    }

    /// Values a row.
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// Whether the rows are in memory.
    #[cfg(test)]
    pub(crate) fn in_memory(&self) -> bool {
        matches!(self.place, Place::Memory(_))
    }

    /// Lets `work` change the rows from `first` on, `rows` of them, in place.
    pub(crate) fn update<T>(
        &mut self,
        first: usize,
        rows: usize,
        work: impl FnOnce(&mut [f32]) -> Result<T>,
    ) -> Result<T> {
        if let Place::Memory(values) = &mut self.place {
            return work(&mut values[first * self.width..(first + rows) * self.width]);
        }
        let mut part = vec![0.0; rows * self.width];
        self.read(first, &mut part)?;
        let result = work(&mut part)?;
        self.write(first, &part)?;
        Ok(result)
    }

    /// Reads whole rows from `first` on.
    pub(crate) fn read(&self, first: usize, out: &mut [f32]) -> Result<()> {
        match &self.place {
            Place::Memory(values) => out.copy_from_slice(&values[first * self.width..][..out.len()]),
            Place::File { path, file } => {
                let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
                let at = (first * self.width * size_of::<f32>()) as u64;
                file.seek(SeekFrom::Start(at))
                    .and_then(|_| file.read_exact(bytemuck::cast_slice_mut(out)))
                    .map_err(|e| Error::io(path, "read", e))?;
            }
        }
        Ok(())
    }

    /// Writes whole rows from `first` on.
    pub(crate) fn write(&mut self, first: usize, rows: &[f32]) -> Result<()> {
        match &mut self.place {
            Place::Memory(values) => values[first * self.width..][..rows.len()].copy_from_slice(rows),
            Place::File { path, file } => {
                let file = file.get_mut().unwrap_or_else(PoisonError::into_inner);
                let at = (first * self.width * size_of::<f32>()) as u64;
                file.seek(SeekFrom::Start(at))
                    .and_then(|_| file.write_all(bytemuck::cast_slice(rows)))
                    .map_err(|e| Error::io(path.as_path(), "write", e))?;
            }
        }
        Ok(())
    }

    /// Copies the given rows (ascending) to `out`, `[rows, width]`. Runs of neighbours are read at once.
    pub(crate) fn gather(&self, rows: &[u32], out: &mut [f32]) -> Result<()> {
        let mut out = out;
        for run in rows.chunk_by(|a, b| a + 1 == *b) {
            let (part, rest) = out.split_at_mut(run.len() * self.width);
            self.read(run[0] as usize, part)?;
            out = rest;
        }
        Ok(())
    }

    /// Hands over all values in order, in pieces.
    pub(crate) fn for_each_piece(&self, mut each: impl FnMut(&[f32]) -> Result<()>) -> Result<()> {
        /// Values a piece.
        const PIECE: usize = 1 << 20;
        match &self.place {
            Place::Memory(values) => values.chunks(PIECE).try_for_each(each),
            Place::File { path, file } => {
                let length = {
                    let file = file.lock().unwrap_or_else(PoisonError::into_inner);
                    file.metadata().map_err(|e| Error::io(path, "read the size of", e))?.len() as usize
                        / size_of::<f32>()
                };
                let rows = (PIECE / self.width).max(1);
                let mut part = vec![0.0; rows * self.width];
                for first in (0..length / self.width).step_by(rows) {
                    let count = rows.min(length / self.width - first);
                    let part = &mut part[..count * self.width];
                    self.read(first, part)?;
                    each(part)?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_file_hold_the_same_rows() {
        let folder = tempfile::tempdir().unwrap();
        let mut stores = [
            RowStore::new(&folder.path().join("a"), 10, 3, true).unwrap(),
            RowStore::new(&folder.path().join("b"), 10, 3, false).unwrap(),
        ];
        assert!(stores[0].in_memory() && !stores[1].in_memory());
        let values: Vec<f32> = (0..30).map(|i| i as f32).collect();
        for store in &mut stores {
            store.write(0, &values[..15]).unwrap();
            store.write(5, &values[15..]).unwrap();
            store
                .update(2, 2, |part| {
                    part[0] = -1.0;
                    Ok(())
                })
                .unwrap();
            let mut out = vec![0.0; 12];
            store.gather(&[0, 2, 3, 9], &mut out).unwrap();
            assert_eq!(out, [0.0, 1.0, 2.0, -1.0, 7.0, 8.0, 9.0, 10.0, 11.0, 27.0, 28.0, 29.0]);
            let mut all = Vec::new();
            store
                .for_each_piece(|p| {
                    all.extend_from_slice(p);
                    Ok(())
                })
                .unwrap();
            assert_eq!(all.len(), 30);
            assert_eq!(all[6].to_bits(), (-1.0f32).to_bits());
        }
    }
}
