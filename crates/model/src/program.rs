//! Which stages a step runs: what a backend may keep as a whole and repeat.
//!
//! The stages of a step are the same whenever its program is; their sizes follow from its numbers of rows, segments and wanted
//! logits. The trunk with the chunked delta rule is no program: what it runs depends on positions.

use glimmer_tensor::{Backend, Program, Step};

use crate::{HiddenSource, MtpStep, Result};

/// The trunk's number among [`Program::stages`]; those of draft steps follow it.
pub(crate) const TRUNK: u32 = 0;

impl MtpStep {
    /// What runs depends on where hidden states and selections come from.
    pub(crate) fn program(&self) -> Program<'_> {
        let stages = match (self.from, &self.shared) {
            (HiddenSource::Trunk, None) => TRUNK + 1,
            (HiddenSource::Trunk, Some(_)) => TRUNK + 2,
            (HiddenSource::Draft, None) => TRUNK + 3,
            (HiddenSource::Draft, Some(_)) => TRUNK + 4,
        };
        Program { stages, source: &self.source, shared: self.shared.as_deref().unwrap_or(&[]) }
    }
}

/// Begins a step: whether the backend has run it as a whole, which it may when a program is given.
pub(crate) fn start<B: Backend>(backend: &mut B, step: &Step, program: Option<Program<'_>>) -> Result<bool> {
    match program {
        Some(program) => Ok(backend.replay(step, program)?),
        None => {
            backend.begin(step)?;
            Ok(false)
        }
    }
}
