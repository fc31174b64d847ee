//! The caches of all layers: slots (KDA state, records, convolution columns, index tails) and pages (latents, pool keys).
//!
//! Layouts are those of the kernels: per KDA layer `state [slots, heads, dim, dim]`, `records [slots, heads, ring, 3, dim]`,
//! `columns [slots, heads, ring, 3, dim]`; per DSA layer `latents [pages, PAGE_TOKENS, latent]`,
//! `pool_keys [pages, PAGE_TOKENS / kpool, index_dim]`, `tails [slots, ring, 2, index_dim]`, all f32; latents and pool keys are
//! halves unless f32 is asked for, where the shapes are those of the kernels for halves, the keys of a page as `kernels/index.cu` wants them.
//! A ring's entry of position `p` is at `p % ring`. Nothing is cleared when a slot changes its owner: a sequence at position 0 reads nothing.

use glimmer_tensor::{CacheShape, Error, PAGE_TOKENS, Result};

use crate::{
    memory::{Allocator, Memory},
    types::require,
};

/// Cache of one KDA layer.
#[derive(Debug)]
pub(crate) struct KdaLayer {
    pub(crate) state: Memory,
    pub(crate) records: Memory,
    pub(crate) columns: Memory,
}

/// Cache of one DSA layer.
#[derive(Debug)]
pub(crate) struct DsaLayer {
    pub(crate) latents: Memory,
    pub(crate) pool_keys: Memory,
    pub(crate) tails: Memory,
}

/// Caches of all layers.
#[derive(Debug)]
pub struct CudaCache {
    pub(crate) shape: CacheShape,
    /// Latents and pool keys are halves.
    pub(crate) half: bool,
    kda: Vec<KdaLayer>,
    dsa: Vec<DsaLayer>,
}

impl CudaCache {
    pub(crate) fn new(memory: &Allocator, shape: &CacheShape, half: bool) -> Result<Self> {
        if shape.dsa_layers > 0 && (shape.kpool == 0 || !PAGE_TOKENS.is_multiple_of(shape.kpool)) {
            let what = "tokens of an index pool, which divide a page";
            return Err(Error::Capacity { what, needed: PAGE_TOKENS, available: shape.kpool });
        }
        if shape.kda_layers > 0 && shape.conv_kernel == 0 {
            return Err(Error::Capacity { what: "taps of the convolution", needed: 1, available: 0 });
        }
        let half = half && shape.half_pages();
        let sized = |what: &'static str, size: usize, factors: &[usize]| -> Result<Memory> {
            let bytes = factors.iter().try_fold(size, |n, &f| n.checked_mul(f));
            Ok(memory.zeroed(what, bytes.ok_or(Error::Memory { what, bytes: usize::MAX })?)?)
        };
        let piece = |what: &'static str, factors: &[usize]| sized(what, 4, factors);
        let size = if half { 2 } else { 4 };
        let (s, dim) = (shape, shape.kda_head_dim);
        let units = s.slots * s.kda_heads;
        let kda = (0..s.kda_layers)
            .map(|_| {
                Ok(KdaLayer {
                    state: piece("KDA states", &[units, dim, dim])?,
                    records: piece("KDA records", &[units, s.max_draft + 1, 3, dim])?,
                    columns: piece("KDA columns", &[units, s.conv_kernel + s.max_draft, 3, dim])?,
                })
            })
            .collect::<Result<_>>()?;
        let dsa = (0..s.dsa_layers)
            .map(|_| {
                Ok(DsaLayer {
                    latents: sized("latent pages", size, &[s.pages, PAGE_TOKENS, s.latent])?,
                    pool_keys: sized("pool key pages", size, &[s.pages, PAGE_TOKENS / s.kpool, s.index_dim])?,
                    tails: piece("index tails", &[s.slots, s.kpool + s.max_draft, 2, s.index_dim])?,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self { shape: shape.clone(), half, kda, dsa })
    }

    /// Entries of the ring of index keys.
    pub(crate) fn tail_ring(&self) -> usize {
        self.shape.kpool + self.shape.max_draft
    }

    pub(crate) fn kda(&self, layer: usize) -> Result<&KdaLayer> {
        let available = self.kda.len();
        self.kda.get(layer).ok_or(Error::Capacity { what: "KDA layers of the cache", needed: layer + 1, available })
    }

    pub(crate) fn dsa(&self, layer: usize) -> Result<&DsaLayer> {
        let available = self.dsa.len();
        self.dsa.get(layer).ok_or(Error::Capacity { what: "DSA layers of the cache", needed: layer + 1, available })
    }

    /// Copies everything that slot `from` owns to slot `to`.
    pub(crate) fn copy_slot(&self, from: u32, to: u32) -> Result<()> {
        let slots = self.shape.slots;
        require("slots of the cache", from.max(to) as usize + 1, slots)?;
        if from == to {
            return Ok(());
        }
        let of_kda = self.kda.iter().flat_map(|l| [&l.state, &l.records, &l.columns]);
        for memory in of_kda.chain(self.dsa.iter().map(|l| &l.tails)) {
            let bytes = memory.bytes() / slots;
            memory.copy_from(to as usize * bytes, memory, from as usize * bytes, bytes)?;
        }
        Ok(())
    }

    /// The KDA state of a slot, `[heads, key, value]`.
    pub(crate) fn read_state(&self, layer: usize, slot: u32) -> Result<Vec<f32>> {
        require("slots of the cache", slot as usize + 1, self.shape.slots)?;
        let len = self.shape.kda_heads * self.shape.kda_head_dim * self.shape.kda_head_dim;
        let mut values = vec![0.0f32; len];
        self.kda(layer)?.state.read(4 * len * slot as usize, &mut values)?;
        Ok(values)
    }
}

// The widths that the kernels for halves (`kernels/sparse.cu`, `kernels/index.cu`) are written for.
const _: () = {
    use crate::kernels::{index, sparse};
    assert!(
        sparse::LATENT == CacheShape::HALF_LATENT
            && index::DIM == CacheShape::HALF_INDEX
            && index::POOLS == CacheShape::HALF_POOLS
    );
};
