//! Which stages a step runs: what a backend may keep as a whole and repeat.
//!
//! The stages of a step are the same whenever its program is; their sizes follow from its numbers of rows, segments and wanted
//! logits. The trunk with the chunked delta rule is no program: what it runs depends on positions.

use glimmer_tensor::{Backend, Program, Step};

use crate::{HiddenSource, MtpStep, Result, mtp::Feed};

/// The trunk's number among [`Program::stages`]; those of draft steps follow it.
pub(crate) const TRUNK: u32 = 0;

impl MtpStep {
    /// What runs depends on where hidden states, selections and tokens come from, and on where tokens are kept.
    pub(crate) fn program<'a>(&'a self, feed: Option<Feed<'a>>) -> Program<'a> {
        let stages = match (self.from, &self.shared) {
            (HiddenSource::Trunk, None) => TRUNK + 1,
            (HiddenSource::Trunk, Some(_)) => TRUNK + 2,
            (HiddenSource::Draft, None) => TRUNK + 3,
            (HiddenSource::Draft, Some(_)) => TRUNK + 4,
        };
        // Four kinds of steps, each without tokens that are kept or with those of a place, fed or not.
        let (kind, taken) = feed.map_or((0, &[][..]), |feed| {
            (1 + 2 * feed.place as u32 + u32::from(feed.taken.is_some()), feed.taken.unwrap_or(&[]))
        });
        let shared = self.shared.as_deref().unwrap_or(&[]);
        Program { stages: stages + 4 * kind, source: &self.source, shared, taken }
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
