//! The caches of all layers: slots (KDA state, convolution, record and tail rings) and pages (latents and pool keys).
//!
//! Everything is keyed by slot or page and by position, never by the step that wrote it. A ring entry of position `p` lives
//! at `p % ring`, so a position that is computed again (after a rejected draft) overwrites what the rejected row left. The
//! rings are just long enough for that: a sequence never goes back by more than the draft depth.
//!
//! Nothing is cleared when a slot changes its owner. A sequence at position 0 does not read what the slot holds: its state
//! is zero and its convolution history is absent by definition, and pages hold nothing before their tokens are written.
//!
//! A slot's data of one KDA layer and head is one *unit*. Units sit behind mutexes because tasks take them in any order;
//! two segments of a step never share a slot, so no lock is ever waited for.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{CacheShape, Error, PAGE_TOKENS, Result};

/// State of one KDA head in one slot and layer.
#[derive(Debug)]
pub(super) struct KdaUnit {
    /// `[key, value]`.
    pub(super) state: Box<[f32]>,
    /// `[records, 3, dim]`: normalised key, decay factor `exp(g)` (both by key channel) and `beta (v - S^T k)`.
    pub(super) records: Box<[f32]>,
    /// `[columns, 3, dim]`: q, k, v of past rows before the convolution.
    pub(super) columns: Box<[f32]>,
    dim: usize,
}

impl KdaUnit {
    /// Hands the state, to be written, and the record of `position` to `apply`.
    pub(super) fn fold(&mut self, position: usize, apply: impl FnOnce(&mut [f32], [&[f32]; 3])) {
        let n = 3 * self.dim;
        let at = position % (self.records.len() / n) * n;
        let (key, rest) = self.records[at..at + n].split_at(self.dim);
        let (decay, update) = rest.split_at(self.dim);
        apply(&mut self.state, [key, decay, update]);
    }

    /// The raw convolution column of `position`: q, k, v.
    pub(super) fn column(&self, position: usize) -> &[f32] {
        let n = 3 * self.dim;
        let at = position % (self.columns.len() / n) * n;
        &self.columns[at..at + n]
    }

    /// As [`Self::column`], to be written.
    pub(super) fn column_mut(&mut self, position: usize) -> &mut [f32] {
        let n = 3 * self.dim;
        let at = position % (self.columns.len() / n) * n;
        &mut self.columns[at..at + n]
    }

    /// Positions that the convolution ring holds.
    pub(super) fn column_ring(&self) -> usize {
        self.columns.len() / (3 * self.dim)
    }

    /// The record of `position`, to be written: key, decay, update.
    pub(super) fn record_mut(&mut self, position: usize) -> [&mut [f32]; 3] {
        let n = 3 * self.dim;
        let at = position % (self.records.len() / n) * n;
        let (key, rest) = self.records[at..at + n].split_at_mut(self.dim);
        let (decay, update) = rest.split_at_mut(self.dim);
        [key, decay, update]
    }

    fn copy_from(&mut self, other: &Self) {
        self.state.copy_from_slice(&other.state);
        self.records.copy_from_slice(&other.records);
        self.columns.copy_from_slice(&other.columns);
    }
}

/// Cache of one DSA layer.
#[derive(Debug)]
pub(super) struct DsaLayer {
    /// `[pages, PAGE_TOKENS, latent]`.
    pub(super) latents: Box<[f32]>,
    /// `[pages, PAGE_TOKENS / kpool, index_dim]`.
    pub(super) pool_keys: Box<[f32]>,
    /// `[slots, tail, 2, index_dim]`: normed index key and pool gate of the latest positions.
    pub(super) tails: Box<[f32]>,
}

/// Caches of all layers of the CPU backend, all f32.
#[derive(Debug)]
pub struct CpuCache {
    shape: CacheShape,
    /// `[layers][slots * heads]`.
    kda: Vec<Vec<Mutex<KdaUnit>>>,
    dsa: Vec<DsaLayer>,
}

/// Zeroed memory, or an error that says how much was missing.
fn zeroed(what: &'static str, len: usize) -> Result<Box<[f32]>> {
    let memory = |_| Error::Memory { what, bytes: len.saturating_mul(size_of::<f32>()) };
    // Asking first makes an impossible size an error; the zeroed allocation after it is the one the system hands out
    // lazily, so that slots and pages cost nothing before they are used.
    let mut probe: Vec<f32> = Vec::new();
    probe.try_reserve_exact(len).map_err(memory)?;
    drop(probe);
    Ok(vec![0.0; len].into_boxed_slice())
}

fn product(what: &'static str, factors: &[usize]) -> Result<usize> {
    factors.iter().try_fold(1usize, |n, &f| n.checked_mul(f)).ok_or(Error::Memory { what, bytes: usize::MAX })
}

impl CpuCache {
    /// Caches of the given shape.
    ///
    /// # Errors
    /// [`Error::Memory`] when they do not fit, [`Error::Capacity`] when `kpool` does not divide a page or there are no taps.
    pub fn new(shape: &CacheShape) -> Result<Self> {
        if shape.dsa_layers > 0 && (shape.kpool == 0 || !PAGE_TOKENS.is_multiple_of(shape.kpool)) {
            let what = "tokens of an index pool, which divide a page";
            return Err(Error::Capacity { what, needed: PAGE_TOKENS, available: shape.kpool });
        }
        if shape.kda_layers > 0 && shape.conv_kernel == 0 {
            return Err(Error::Capacity { what: "taps of the convolution", needed: 1, available: 0 });
        }
        let dim = shape.kda_head_dim;
        let triple = product("KDA slots", &[3, dim])?;
        let unit = || -> Result<Mutex<KdaUnit>> {
            Ok(Mutex::new(KdaUnit {
                state: zeroed("KDA state", product("KDA state", &[dim, dim])?)?,
                records: zeroed("KDA records", product("KDA records", &[shape.max_draft + 1, triple])?)?,
                columns: zeroed(
                    "KDA columns",
                    product("KDA columns", &[shape.conv_kernel + shape.max_draft, triple])?,
                )?,
                dim,
            }))
        };
        let units = product("KDA slots", &[shape.slots, shape.kda_heads])?;
        let kda = (0..shape.kda_layers)
            .map(|_| (0..units).map(|_| unit()).collect::<Result<Vec<_>>>())
            .collect::<Result<Vec<_>>>()?;
        let dsa = (0..shape.dsa_layers)
            .map(|_| {
                let pools = PAGE_TOKENS / shape.kpool;
                let tail = shape.kpool + shape.max_draft;
                Ok(DsaLayer {
                    latents: zeroed(
                        "latent pages",
                        product("latent pages", &[shape.pages, PAGE_TOKENS, shape.latent])?,
                    )?,
                    pool_keys: zeroed(
                        "pool key pages",
                        product("pool key pages", &[shape.pages, pools, shape.index_dim])?,
                    )?,
                    tails: zeroed("index tails", product("index tails", &[shape.slots, tail, 2, shape.index_dim])?)?,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Self { shape: shape.clone(), kda, dsa })
    }

    /// Bytes of one slot over all layers.
    pub fn slot_bytes(shape: &CacheShape) -> usize {
        let triple = 3 * shape.kda_head_dim;
        let unit = shape.kda_head_dim * shape.kda_head_dim
            + (shape.max_draft + 1) * triple
            + (shape.conv_kernel + shape.max_draft) * triple;
        let tail = (shape.kpool + shape.max_draft) * 2 * shape.index_dim;
        size_of::<f32>() * (shape.kda_layers * shape.kda_heads * unit + shape.dsa_layers * tail)
    }

    /// Bytes of one page over all layers.
    pub fn page_bytes(shape: &CacheShape) -> usize {
        let pools = PAGE_TOKENS / shape.kpool.max(1);
        size_of::<f32>() * shape.dsa_layers * (PAGE_TOKENS * shape.latent + pools * shape.index_dim)
    }

    /// The shape that the caches were made for.
    pub fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// The unit of a KDA layer, slot and head.
    pub(super) fn unit(&self, layer: usize, slot: usize, head: usize) -> MutexGuard<'_, KdaUnit> {
        // A poisoned unit only means that an earlier step panicked half way; its content is as good as that step's.
        self.kda[layer][slot * self.shape.kda_heads + head].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of the KDA layer, checked.
    pub(super) fn check_kda(&self, layer: usize) -> Result<()> {
        if layer < self.kda.len() { Ok(()) } else { Err(missing("KDA layers of the cache", layer, self.kda.len())) }
    }

    /// A DSA layer.
    pub(super) fn dsa(&self, layer: usize) -> Result<&DsaLayer> {
        self.dsa.get(layer).ok_or_else(|| missing("DSA layers of the cache", layer, self.dsa.len()))
    }

    /// A DSA layer, to be written.
    pub(super) fn dsa_mut(&mut self, layer: usize) -> Result<&mut DsaLayer> {
        let layers = self.dsa.len();
        self.dsa.get_mut(layer).ok_or_else(|| missing("DSA layers of the cache", layer, layers))
    }

    /// Copies everything that slot `from` owns to slot `to`: state and rings of every KDA layer, tails of every DSA layer.
    ///
    /// # Errors
    /// [`Error::Capacity`] when a slot does not exist.
    pub(super) fn copy_slot(&mut self, from: u32, to: u32) -> Result<()> {
        let (from, to) = (self.check_slot(from)?, self.check_slot(to)?);
        if from == to {
            return Ok(());
        }
        let heads = self.shape.kda_heads;
        for layer in &mut self.kda {
            for head in 0..heads {
                let [a, b] = layer
                    .get_disjoint_mut([from * heads + head, to * heads + head])
                    .expect("both slots exist and differ");
                let a = a.get_mut().unwrap_or_else(PoisonError::into_inner);
                b.get_mut().unwrap_or_else(PoisonError::into_inner).copy_from(a);
            }
        }
        let tail = (self.shape.kpool + self.shape.max_draft) * 2 * self.shape.index_dim;
        for layer in &mut self.dsa {
            layer.tails.copy_within(from * tail..(from + 1) * tail, to * tail);
        }
        Ok(())
    }

    /// The KDA state of a slot as `[heads, key, value]`.
    ///
    /// # Errors
    /// [`Error::Capacity`] when layer or slot does not exist.
    pub(super) fn read_state(&self, layer: usize, slot: u32) -> Result<Vec<f32>> {
        self.check_kda(layer)?;
        let slot = self.check_slot(slot)?;
        Ok((0..self.shape.kda_heads).flat_map(|head| self.unit(layer, slot, head).state.to_vec()).collect())
    }

    fn check_slot(&self, slot: u32) -> Result<usize> {
        let slot = slot as usize;
        if slot < self.shape.slots { Ok(slot) } else { Err(missing("slots of the cache", slot, self.shape.slots)) }
    }
}

fn missing(what: &'static str, index: usize, available: usize) -> Error {
    Error::Capacity { what, needed: index + 1, available }
}

#[cfg(test)]
mod tests;
