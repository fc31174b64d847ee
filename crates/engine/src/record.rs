//! A run as a log that replays: what came in, every step, and what each yielded.
//!
//! A log is JSON, a value a line: a header with the settings, then submissions and aborts in the order in which the engine
//! took them, every step before it is computed, and what it yielded after. Lines hold the readings of the engine's clock that
//! were made since the line before (as bits), so that a replay decides as the recorded run did. Invariant: an engine with the
//! same model and settings that is fed a log's inputs writes the same log; [`replay`] does that and names the first difference.
//!
//! A log holds prompts, pixels and answers in plain form.

mod lines;
mod replay;

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::Path,
};

use glimmer_tensor::{Backend, Step};

pub(crate) use self::lines::Header;
use self::lines::{Decided, Event, Line, Planned, Submission, VERSION, Yielded, bits};
pub use self::replay::{Recorded, ReplayError, Replayed, replay};
use crate::{
    EngineError, Generator, SequenceId,
    request::{Request, TokenEvent},
    schedule::Decision,
};

impl<B: Backend> Generator<B> {
    /// Records everything from here on in a file. Only an engine that has not taken a request yet can be recorded. `tokenizer`
    /// names where the meaning of tokens comes from, if that is not the model's own: whoever replays shapes of answers needs it.
    ///
    /// A file that cannot be written any more ends the recording, not the engine: see
    /// [`crate::Snapshot::record_error`].
    ///
    /// # Errors
    /// [`EngineError::Record`] when the file cannot be created, or when the engine has worked already.
    pub fn record(&mut self, file: &Path, tokenizer: Option<&str>) -> Result<(), EngineError> {
        let failed = |reason: String| EngineError::Record { file: file.to_owned(), reason };
        if !self.is_fresh() {
            return Err(failed(
                "the engine has taken requests already, and a record begins before the first".to_owned(),
            ));
        }
        let out = File::create(file).map_err(|error| failed(error.to_string()))?;
        let header = Header { tokenizer: tokenizer.map(str::to_owned), ..self.header() };
        let recorder = Recorder::new(Out::File(BufWriter::new(out)), header);
        if let Some(error) = recorder.error() {
            return Err(failed(error.to_owned()));
        }
        self.attach(recorder);
        Ok(())
    }
}

/// Writes a log.
#[derive(Debug)]
pub(crate) struct Recorder {
    out: Out,
    events: Vec<Event>,
    error: Option<String>,
}

#[derive(Debug)]
pub(crate) enum Out {
    File(BufWriter<File>),
    /// For comparing with another log.
    Memory(Vec<Line>),
}

impl Recorder {
    pub(crate) fn new(out: Out, header: Header) -> Self {
        let mut recorder = Self { out, events: Vec::new(), error: None };
        recorder.line(Line::Header(header));
        recorder
    }

    /// Why nothing is recorded any more, if so.
    pub(crate) fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    pub(crate) fn submit(&mut self, id: SequenceId, request: &Request, clock: Vec<f64>) {
        self.line(Line::Submit(Box::new(Submission::new(id, request, clock))));
    }

    pub(crate) fn abort(&mut self, id: SequenceId, clock: Vec<f64>) {
        self.line(Line::Abort { id, clock: bits(clock) });
    }

    pub(crate) fn reset(&mut self) {
        self.line(Line::Reset);
    }

    /// A step that is about to be computed.
    pub(crate) fn step(&mut self, number: u64, decision: &Decision, step: &Step, clock: Vec<f64>) {
        let decided = Decided {
            preempt: decision.preempt.clone(),
            refuse: decision.refuse.iter().map(|(id, _)| *id).collect(),
            admit: decision.admit.clone(),
        };
        self.line(Line::Step(Planned { number, decided, step: step.clone(), clock: bits(clock) }));
    }

    /// An event of the present step, and whether its consumer wants no more.
    pub(crate) fn event(&mut self, id: SequenceId, event: &TokenEvent) {
        self.events.push(Event::new(id, event));
    }

    /// The consumer of the last event wants no more.
    pub(crate) fn stop(&mut self) {
        if let Some(event) = self.events.last_mut() {
            event.stopped = true;
        }
    }

    /// The end of a step.
    pub(crate) fn yielded(&mut self, number: u64, clock: Vec<f64>) {
        let events = std::mem::take(&mut self.events);
        self.line(Line::Yield(Yielded { number, events, clock: bits(clock) }));
        if let Out::File(out) = &mut self.out
            && let Err(error) = out.flush()
        {
            self.error = Some(error.to_string());
        }
    }

    fn line(&mut self, line: Line) {
        if self.error.is_some() {
            return;
        }
        match &mut self.out {
            Out::Memory(lines) => lines.push(line),
            Out::File(out) => {
                let written = serde_json::to_writer(&mut *out, &line).map_err(std::io::Error::from);
                if let Err(error) = written.and_then(|()| out.write_all(b"\n")) {
                    self.error = Some(error.to_string());
                }
            }
        }
    }

    /// Takes the lines kept in memory.
    fn take(&mut self) -> Vec<Line> {
        match &mut self.out {
            Out::Memory(lines) => std::mem::take(lines),
            Out::File(_) => Vec::new(),
        }
    }
}

impl Header {
    pub(crate) fn new(model: String, settings: crate::Settings) -> Self {
        Self { version: VERSION, model, settings, tokenizer: None }
    }
}
