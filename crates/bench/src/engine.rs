//! The engine as a completer of prompts.

use glimmer_checkpoint::Checkpoint;
use glimmer_engine::{DraftCounts, FinishReason, Generator, Request, Settings, Stats};
use glimmer_tensor::Backend;

use crate::error::BenchError;
use crate::evaluate::Finish;
use crate::local::{Completer, Completion, CompletionSink, PromptSource, Prompted};
use crate::under_way::UnderWay;

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

    fn submit(&mut self, index: usize, prompted: Prompted, open: &mut UnderWay) -> Result<(), BenchError> {
        let most = u32::try_from(prompted.max_tokens).unwrap_or(u32::MAX);
        let mut request = Request::new(prompted.ids, most);
        request.limits.stop_tokens = prompted.stop_ids;
        open.submit(&mut self.generator, index, request, prompted.pictures)
    }

    fn run(
        &mut self,
        next: &mut PromptSource<'_>,
        done: &mut CompletionSink<'_>,
        open: &mut UnderWay,
    ) -> Result<(), BenchError> {
        let (mut pulled, mut exhausted) = (0, false);
        loop {
            while !exhausted && self.generator.unfinished().0 == 0 {
                match next() {
                    Some(prompted) => {
                        self.submit(pulled, prompted?, open)?;
                        pulled += 1;
                    }
                    None => exhausted = true,
                }
            }
            if exhausted && open.is_empty() {
                return Ok(());
            }
            open.step(&mut self.generator, |index, output| {
                let finish = match output.finish {
                    FinishReason::EndToken | FinishReason::StopToken(_) => Finish::Stop,
                    FinishReason::Length | FinishReason::Abort => Finish::Length,
                    FinishReason::Error(error) => return Err(BenchError::model("an answer", error)),
                };
                done(index, Completion { ids: output.tokens, finish });
                Ok(())
            })?;
        }
    }
}

impl<B: Backend> Completer for EngineCompleter<B> {
    fn complete(&mut self, next: &mut PromptSource<'_>, done: &mut CompletionSink<'_>) -> Result<(), BenchError> {
        let mut open = UnderWay::default();
        let result = self.run(next, done, &mut open);
        // After an error the engine must not go on with sequences that nobody waits for.
        open.abort(&mut self.generator);
        result
    }
}
