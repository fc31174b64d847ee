//! Hyper-connections.

use super::{Cpu, CpuBuffer};
use crate::{Error, MhcWeights, Norm, Result, Streams};

pub(super) fn mhc(
    _cpu: &mut Cpu,
    _rows: usize,
    _mixer: &MhcWeights<Cpu>,
    _norm: &Norm<Cpu>,
    _y: Option<&CpuBuffer>,
    _streams: &mut Streams<Cpu>,
    _x: &mut CpuBuffer,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `mhc` is not built yet", needed: 1, available: 0 })
}

pub(super) fn mhc_head(
    _cpu: &mut Cpu,
    _rows: usize,
    _norm: &Norm<Cpu>,
    _y: &CpuBuffer,
    _streams: &mut Streams<Cpu>,
    _hidden: &mut CpuBuffer,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `mhc_head` is not built yet", needed: 1, available: 0 })
}
