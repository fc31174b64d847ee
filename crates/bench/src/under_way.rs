//! Answers under way on an engine: who is asked what, and what has come of it.
//!
//! Invariant: every request that was submitted here yields exactly one output, or an error says that it will not.

use std::collections::HashMap;

use glimmer_engine::{
    Flow, Generator, Output, Request, SequenceId,
    request::{Collector, Media},
};
use glimmer_model::vision::Patches;
use glimmer_tensor::Backend;

use crate::error::BenchError;

/// Sequences that have not ended, each with the index by which its asker knows it.
#[derive(Debug, Default)]
pub(crate) struct UnderWay(HashMap<SequenceId, (usize, Collector)>);

impl UnderWay {
    /// Submits a request with its pictures, whose placeholders stand in the prompt.
    ///
    /// # Errors
    /// When the engine refuses it.
    pub(crate) fn submit<B: Backend>(
        &mut self,
        generator: &mut Generator<B>,
        index: usize,
        request: Request,
        pictures: Vec<Patches>,
    ) -> Result<(), BenchError> {
        let id = submit(generator, request, pictures)?;
        self.0.insert(id, (index, Collector::default()));
        Ok(())
    }

    /// Sequences that have not ended.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether none is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// One step of the engine; `ended` takes what ended in it.
    ///
    /// # Errors
    /// When the step fails, or when the engine has nothing to do although sequences wait for their end.
    pub(crate) fn step<B: Backend>(
        &mut self,
        generator: &mut Generator<B>,
        mut ended: impl FnMut(usize, Output) -> Result<(), BenchError>,
    ) -> Result<(), BenchError> {
        let mut outputs = Vec::new();
        let busy = generator.step(&mut |sequence, event| {
            if let Some(output) = self.0.get_mut(&sequence).and_then(|(_, collector)| collector.take(event)) {
                outputs.push((sequence, output));
            }
            Flow::Continue
        });
        let busy = busy.map_err(|error| BenchError::model("a step", error))?;
        for (sequence, output) in outputs {
            if let Some((index, _)) = self.0.remove(&sequence) {
                ended(index, output)?;
            }
        }
        if !busy && !self.is_empty() {
            return Err(BenchError::model("a step", "a sequence got no end although nothing is left to do"));
        }
        Ok(())
    }

    /// Ends what has not ended, unheard.
    pub(crate) fn abort<B: Backend>(self, generator: &mut Generator<B>) {
        for id in self.0.into_keys() {
            generator.abort(id);
        }
    }
}

/// Submits a request with its pictures.
///
/// # Errors
/// When the engine refuses it.
pub(crate) fn submit<B: Backend>(
    generator: &mut Generator<B>,
    request: Request,
    pictures: Vec<Patches>,
) -> Result<SequenceId, BenchError> {
    let failed = |error| BenchError::model("a prompt", error);
    let media: std::sync::Arc<[Media]> = generator.media(&request.prompt, pictures).map_err(failed)?;
    generator.submit(Request { media, ..request }).map_err(failed)
}
