//! Dense stages.

use super::{Cpu, CpuBuffer, CpuMatrix};
use crate::{Columns, Error, Linear, Norm, Result, Streams, Swiglu};

pub(super) fn embed(
    _cpu: &mut Cpu,
    _table: &CpuMatrix,
    _features: &CpuBuffer,
    _streams: &mut Streams<Cpu>,
    _n: usize,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `embed` is not built yet", needed: 1, available: 0 })
}

pub(super) fn linear(
    _cpu: &mut Cpu,
    _rows: usize,
    _x: Columns<'_, Cpu>,
    _weights: &[&Linear<Cpu>],
    _out: &mut CpuBuffer,
    _start: usize,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `linear` is not built yet", needed: 1, available: 0 })
}

pub(super) fn swiglu(
    _cpu: &mut Cpu,
    _rows: usize,
    _weights: &Swiglu<Cpu>,
    _limit: f32,
    _x: &CpuBuffer,
    _act: &mut CpuBuffer,
    _out: &mut CpuBuffer,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `swiglu` is not built yet", needed: 1, available: 0 })
}

pub(super) fn mtp_input(
    _cpu: &mut Cpu,
    _table: &CpuMatrix,
    _enorm: &Norm<Cpu>,
    _hnorm: &Norm<Cpu>,
    _hidden: &CpuBuffer,
    _source: &[u32],
    _out: &mut CpuBuffer,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `mtp_input` is not built yet", needed: 1, available: 0 })
}

pub(super) fn add_norm(
    _cpu: &mut Cpu,
    _rows: usize,
    _y: Option<&CpuBuffer>,
    _norm: &Norm<Cpu>,
    _x: &mut CpuBuffer,
    _out: &mut CpuBuffer,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `add_norm` is not built yet", needed: 1, available: 0 })
}

pub(super) fn head(
    _cpu: &mut Cpu,
    _matrix: &CpuMatrix,
    _rows: &[u32],
    _hidden: &CpuBuffer,
    _logits: &mut CpuBuffer,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `head` is not built yet", needed: 1, available: 0 })
}

pub(super) fn copy_row(
    _cpu: &mut Cpu,
    _from: &CpuBuffer,
    _row: usize,
    _to: &mut CpuBuffer,
    _target: usize,
) -> Result<()> {
    Err(Error::Capacity { what: "stage `copy_row` is not built yet", needed: 1, available: 0 })
}

/// Scratch of the dense stages.
#[derive(Debug, Default)]
pub(super) struct Workspace {}

impl Workspace {
    pub(super) fn reserve(&mut self, _rows: usize, _width: usize) -> Result<()> {
        Ok(())
    }
}
