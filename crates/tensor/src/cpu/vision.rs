//! Stages of the vision tower.

use super::{Cpu, CpuBuffer};
use crate::{Error, Norm, PatchGrid, Result};

pub(super) fn vision_attention(
    _cpu: &mut Cpu,
    _grid: PatchGrid,
    _heads: usize,
    _q_norm: &Norm<Cpu>,
    _k_norm: &Norm<Cpu>,
    _qkv: &CpuBuffer,
    _out: &mut CpuBuffer,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `vision_attention` is not built yet", needed: 1, available: 0 })
}

pub(super) fn group_rows(
    _cpu: &mut Cpu,
    _rows: usize,
    _group: usize,
    _x: &CpuBuffer,
    _out: &mut CpuBuffer,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `group_rows` is not built yet", needed: 1, available: 0 })
}

pub(super) fn norm_gelu(_cpu: &mut Cpu, _rows: usize, _norm: &Norm<Cpu>, _x: &mut CpuBuffer) -> Result<()> {
    Err(Error::Capacity { what: "stage `norm_gelu` is not built yet", needed: 1, available: 0 })
}
