//! Slots and pages of all layers.

use crate::{CacheShape, Error, Result};

/// KDA slots and DSA pages of all layers.
#[derive(Debug)]
pub struct CpuCache {}

impl CpuCache {
    /// Caches of all layers.
    ///
    /// # Errors
    /// [`Error::Memory`] when the room cannot be had.
    pub fn new(_shape: &CacheShape) -> Result<Self> {
        Err(Error::Capacity { what: "the cache is not built yet", needed: 1, available: 0 })
    }

    pub(super) fn copy_slot(&mut self, _from: u32, _to: u32) -> Result<()> {
        Err(Error::Capacity { what: "the cache is not built yet", needed: 1, available: 0 })
    }

    pub(super) fn read_state(&self, _layer: usize, _slot: u32) -> Result<Vec<f32>> {
        Err(Error::Capacity { what: "the cache is not built yet", needed: 1, available: 0 })
    }
}
