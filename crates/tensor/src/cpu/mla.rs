//! Latent attention.

use super::{Cpu, CpuBuffer, CpuCache, CpuSelection};
use crate::{Columns, DsaWeights, Error, Result};

pub(super) fn mla(
    _cpu: &mut Cpu,
    _weights: &DsaWeights<Cpu>,
    _query: Columns<'_, Cpu>,
    _selection: &CpuSelection,
    _cache: &CpuCache,
    _layer: usize,
    _out: &mut CpuBuffer,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `mla` is not built yet", needed: 1, available: 0 })
}
