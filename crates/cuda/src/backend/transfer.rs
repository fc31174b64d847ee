//! Transfers between host and device outside the stages.
//!
//! The host asks for logits row by row. The first row that it asks for brings all that the step left into pinned memory by one
//! copy; the others are there already. Rows whose tokens were found on the device are not brought along, as far as they lie
//! outside of those that were not.

use std::{ops::Range, sync::PoisonError};

use glimmer_tensor::Result;

use super::{Cuda, weights::widen};
use crate::{
    kernels::slots,
    memory::Pinned,
    types::{CudaBuffer, CudaRouting, CudaSelection, Format, require},
};

/// Bytes of logits that are brought together at most; more are read row by row.
const MOST: usize = 256 << 20;

/// Rows at the beginning of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rows {
    /// The buffer's address.
    pub(super) address: u64,
    pub(super) rows: usize,
}

/// The logits of the last step.
#[derive(Debug, Default)]
pub(super) struct Fetched {
    /// Where they are on the device.
    of: Option<Rows>,
    /// Those that are brought together.
    span: Range<usize>,
    pinned: Option<Pinned>,
    /// Whether `pinned` holds them.
    there: bool,
}

impl Fetched {
    /// A step left `rows`.
    pub(super) fn expect(&mut self, rows: Option<Rows>) {
        (self.of, self.there) = (rows, false);
        self.span = 0..rows.map_or(0, |rows| rows.rows);
    }

    /// The tokens of some rows are known.
    fn found(&mut self, found: impl Iterator<Item = usize>) {
        let mut open = vec![true; self.span.end];
        for row in found {
            if let Some(open) = open.get_mut(row) {
                *open = false;
            }
        }
        let first = (self.span.start..open.len()).find(|&row| open[row]).unwrap_or(open.len());
        let end = (first..open.len()).rev().find(|&row| open[row]).map_or(first, |last| last + 1);
        self.span = first..end;
    }
}

impl Cuda {
    /// Rows of a buffer that the host will ask for.
    pub(super) fn expect(&mut self, rows: Option<Rows>) {
        self.fetched.get_mut().unwrap_or_else(PoisonError::into_inner).expect(rows);
    }

    /// What [`Self::expect`] was told last.
    pub(super) fn expected(&mut self) -> Option<Rows> {
        self.fetched.get_mut().unwrap_or_else(PoisonError::into_inner).of
    }

    /// The tokens of some rows of logits are known: the host will hardly read them.
    pub(super) fn found(&mut self, logits: &CudaBuffer, rows: impl Iterator<Item = usize>) {
        let fetched = self.fetched.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !fetched.there && fetched.of.is_some_and(|of| of.address == logits.at(0)) {
            fetched.found(rows);
        }
    }

    fn read_floats(&self, buffer: &CudaBuffer, row: usize, values: &mut [f32]) -> Result<()> {
        let mut fetched = self.fetched.lock().unwrap_or_else(PoisonError::into_inner);
        let span = fetched.span.clone();
        let (start, bytes) = (4 * span.start * buffer.width, 4 * span.len() * buffer.width);
        if fetched.of.is_none_or(|of| of.address != buffer.at(0)) || !span.contains(&row) || bytes > MOST {
            return Ok(buffer.memory.read(4 * row * buffer.width, values)?);
        }
        let pinned = match fetched.pinned.take().filter(|pinned| pinned.bytes() >= bytes) {
            Some(pinned) => pinned,
            None => {
                fetched.there = false;
                Pinned::new(&self.device, bytes)?
            }
        };
        if !fetched.there {
            pinned.fetch(&buffer.memory, start, bytes)?;
        }
        pinned.copy_out((row - span.start) * buffer.width, values);
        (fetched.pinned, fetched.there) = (Some(pinned), true);
        Ok(())
    }

    /// [`glimmer_tensor::Backend::write`].
    pub(super) fn write_row(&self, buffer: &mut CudaBuffer, row: usize, values: &[f32]) -> Result<()> {
        buffer.require("write: the buffer", row + 1, values.len())?;
        buffer.format = Format::Float;
        let mut fetched = self.fetched.lock().unwrap_or_else(PoisonError::into_inner);
        if fetched.of.is_some_and(|of| of.address == buffer.at(0)) {
            fetched.expect(None);
        }
        Ok(buffer.memory.write(4 * row * buffer.width, values)?)
    }

    /// [`glimmer_tensor::Backend::read`].
    pub(super) fn read_row(&self, buffer: &CudaBuffer, row: usize, values: &mut [f32]) -> Result<()> {
        buffer.require("read: the buffer", row + 1, values.len())?;
        match buffer.format {
            Format::Float => self.read_floats(buffer, row, values)?,
            Format::Slots { half, slots } => {
                let planes = if half { 0 } else { self.planes };
                slots::read(&self.scratch, slots, planes, row, values)?;
            }
            Format::Planes { half, rows, pitch } => {
                require("read: rows of the planes", row + 1, rows)?;
                require("read: columns of the planes", values.len(), pitch)?;
                let mut plane = vec![0u8; 2 * values.len()];
                values.fill(0.0);
                for start in [0, rows * pitch] {
                    buffer.memory.read(2 * (start + row * pitch), &mut plane)?;
                    for (v, b) in values.iter_mut().zip(plane.as_chunks::<2>().0) {
                        *v += if half { ::half::f16::from_le_bytes(*b).to_f32() } else { widen(*b) };
                    }
                }
            }
        }
        Ok(())
    }

    /// [`glimmer_tensor::Backend::read_selection`].
    pub(super) fn selected(&self, selection: &CudaSelection, row: usize) -> Vec<u32> {
        let mut len = [0u32];
        if row >= selection.rows || selection.lens.read(4 * row, &mut len).is_err() {
            return Vec::new();
        }
        let mut tokens = vec![0u32; (len[0] as usize).min(selection.width)];
        match selection.tokens.read(4 * row * selection.width, &mut tokens) {
            Ok(()) => tokens,
            Err(_) => Vec::new(),
        }
    }

    /// [`glimmer_tensor::Backend::write_selection`].
    pub(super) fn select(&self, selection: &mut CudaSelection, row: usize, tokens: &[u32]) -> Result<()> {
        require("write_selection: rows of the selection", row + 1, selection.rows)?;
        require("write_selection: width of the selection", tokens.len(), selection.width)?;
        selection.tokens.write(4 * row * selection.width, tokens)?;
        Ok(selection.lens.write(4 * row, &[tokens.len() as u32])?)
    }

    /// [`glimmer_tensor::Backend::read_routing`].
    pub(super) fn routed(&self, routing: &CudaRouting, row: usize) -> Vec<(u32, f32)> {
        let (mut experts, mut weights) = (vec![0u32; routing.top], vec![0.0f32; routing.top]);
        let at = 4 * row * routing.top;
        if row >= routing.rows
            || routing.experts.read(at, &mut experts).is_err()
            || routing.weights.read(at, &mut weights).is_err()
        {
            return Vec::new();
        }
        experts.into_iter().zip(weights).collect()
    }
}
