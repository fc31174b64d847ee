//! The engine as a completer of prompts.

use std::collections::HashMap;

use glimmer_checkpoint::Checkpoint;
use glimmer_engine::{DraftCounts, Flow, Generator, Request, SequenceId, Settings, Stats, TokenEvent};
use glimmer_tensor::Backend;

use crate::error::BenchError;
use crate::evaluate::Finish;
use crate::local::{Completer, Completion, CompletionSink, PromptSource, Prompted};

/// A generator that takes its prompts one by one, always keeping the next one ready.
#[derive(Debug)]
pub struct EngineCompleter<B: Backend> {
    generator: Generator<B>,
}

impl<B: Backend> EngineCompleter<B> {
    /// Loads a model.
    ///
    /// # Errors
    /// Errors of the engine.
    pub fn load(backend: B, checkpoint: &Checkpoint, settings: &Settings) -> Result<Self, BenchError> {
        let generator =
            Generator::load(backend, checkpoint, settings).map_err(|error| BenchError::model("loading", error))?;
        Ok(Self { generator })
    }

    /// Work and time so far.
    pub fn stats(&self) -> &Stats {
        self.generator.stats()
    }

    /// Drafts so far.
    pub fn drafts(&self) -> &DraftCounts {
        &self.generator.stats().drafts
    }

    fn submit(&mut self, prompted: Prompted) -> Result<SequenceId, BenchError> {
        let failed = |error| BenchError::model("a prompt", error);
        let mut request = Request::new(prompted.ids, prompted.max_tokens);
        for patches in &prompted.pictures {
            request.features.extend(self.generator.features(patches).map_err(failed)?);
        }
        request.stop_tokens = prompted.stop_ids;
        self.generator.submit(request).map_err(failed)
    }

    fn run(
        &mut self,
        next: &mut PromptSource<'_>,
        done: &mut CompletionSink<'_>,
        open: &mut Open,
    ) -> Result<(), BenchError> {
        let (mut pulled, mut exhausted) = (0, false);
        loop {
            while !exhausted && self.generator.unfinished().0 == 0 {
                match next() {
                    Some(prompted) => {
                        let id = self.submit(prompted?)?;
                        open.insert(id, pulled);
                        pulled += 1;
                    }
                    None => exhausted = true,
                }
            }
            let mut finished = Vec::new();
            let busy = self.generator.step(&mut |event| {
                if let TokenEvent::Finished { sequence, output } = event {
                    finished.push((*sequence, output.clone()));
                }
                Flow::Continue
            });
            if !busy.map_err(|error| BenchError::model("a step", error))? && exhausted {
                return Ok(());
            }
            for (id, output) in finished {
                let Some(index) = open.remove(&id) else { continue };
                let finish = match output.finish {
                    glimmer_engine::Finish::StopToken(_) => Finish::Stop,
                    _ => Finish::Length,
                };
                done(index, Completion { ids: output.tokens, finish });
            }
        }
    }
}

/// Sequences that have not ended, with the index of their prompt.
type Open = HashMap<SequenceId, usize>;

impl<B: Backend> Completer for EngineCompleter<B> {
    fn complete(&mut self, next: &mut PromptSource<'_>, done: &mut CompletionSink<'_>) -> Result<(), BenchError> {
        let mut open = Open::new();
        let result = self.run(next, done, &mut open);
        // After an error the engine must not go on with sequences that nobody waits for.
        for id in open.into_keys() {
            self.generator.abort(id);
        }
        result
    }
}
