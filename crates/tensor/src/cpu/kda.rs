//! Kimi delta attention.

use super::{Cpu, CpuBuffer, CpuCache};
use crate::{Error, KdaForm, KdaWeights, Result};

pub(super) fn kda(
    _cpu: &mut Cpu,
    _weights: &KdaWeights<Cpu>,
    _form: KdaForm,
    _proj: &CpuBuffer,
    _gates: &CpuBuffer,
    _cache: &mut CpuCache,
    _layer: usize,
    _out: &mut CpuBuffer,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `kda` is not built yet", needed: 1, available: 0 })
}
