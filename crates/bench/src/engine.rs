//! The engine as a completer of prompts.

use std::collections::HashMap;

use glimmer_checkpoint::Checkpoint;
use glimmer_engine::{
    DraftCounts, FinishReason, Flow, Generator, Request, SequenceId, Settings, Stats, request::Collector,
};
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
        let media = self.generator.media(&prompted.ids, prompted.pictures).map_err(failed)?;
        let most = u32::try_from(prompted.max_tokens).unwrap_or(u32::MAX);
        let mut request = Request { media, ..Request::new(prompted.ids, most) };
        request.limits.stop_tokens = prompted.stop_ids;
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
                        open.insert(id, (pulled, Collector::default()));
                        pulled += 1;
                    }
                    None => exhausted = true,
                }
            }
            let mut finished = Vec::new();
            let busy = self.generator.step(&mut |sequence, event| {
                if let Some(output) = open.get_mut(&sequence).and_then(|(_, collector)| collector.take(event)) {
                    finished.push((sequence, output));
                }
                Flow::Continue
            });
            if !busy.map_err(|error| BenchError::model("a step", error))? && exhausted {
                return Ok(());
            }
            for (id, output) in finished {
                let Some((index, _)) = open.remove(&id) else { continue };
                let finish = match output.finish {
                    FinishReason::EndToken | FinishReason::StopToken(_) => Finish::Stop,
                    FinishReason::Length | FinishReason::Abort => Finish::Length,
                    FinishReason::Error(error) => return Err(BenchError::model("an answer", error)),
                };
                done(index, Completion { ids: output.tokens, finish });
            }
        }
    }
}

/// Sequences that have not ended, with the index of their prompt and what they yielded.
type Open = HashMap<SequenceId, (usize, Collector)>;

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
