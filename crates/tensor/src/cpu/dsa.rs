//! Latent cache and indexer.

use super::{Cpu, CpuBuffer, CpuCache, CpuSelection};
use crate::{Columns, DsaColumns, DsaWeights, Error, IndexerWeights, Result};

pub(super) fn dsa_write(
    _cpu: &mut Cpu,
    _weights: &DsaWeights<Cpu>,
    _columns: DsaColumns,
    _proj: &CpuBuffer,
    _indexer: bool,
    _cache: &mut CpuCache,
    _layer: usize,
    _q_residual: &mut CpuBuffer,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `dsa_write` is not built yet", needed: 1, available: 0 })
}

pub(super) fn dsa_select(
    _cpu: &mut Cpu,
    _weights: &IndexerWeights<Cpu>,
    _columns: DsaColumns,
    _query: Columns<'_, Cpu>,
    _proj: &CpuBuffer,
    _cache: &CpuCache,
    _layer: usize,
    _selection: &mut CpuSelection,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `dsa_select` is not built yet", needed: 1, available: 0 })
}
