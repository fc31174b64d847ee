//! Router and experts.

use super::{Cpu, CpuBuffer, CpuMatrix, CpuRouting, CpuVector};
use crate::{Error, Experts, Result, RouterRule};

pub(super) fn route(
    _cpu: &mut Cpu,
    _rows: usize,
    _gate: &CpuMatrix,
    _bias: &CpuVector,
    _rule: RouterRule,
    _x: &CpuBuffer,
    _routing: &mut CpuRouting,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `route` is not built yet", needed: 1, available: 0 })
}

pub(super) fn moe_up(
    _cpu: &mut Cpu,
    _rows: usize,
    _experts: &Experts<Cpu>,
    _routing: &CpuRouting,
    _x: &CpuBuffer,
    _act: &mut CpuBuffer,
    _shared_act: &mut CpuBuffer,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `moe_up` is not built yet", needed: 1, available: 0 })
}

pub(super) fn moe_down(
    _cpu: &mut Cpu,
    _rows: usize,
    _experts: &Experts<Cpu>,
    _routing: &CpuRouting,
    _act: &CpuBuffer,
    _shared_act: &CpuBuffer,
    _out: &mut CpuBuffer,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `moe_down` is not built yet", needed: 1, available: 0 })
}
