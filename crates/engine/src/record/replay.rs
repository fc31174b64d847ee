//! Feeding a log's inputs to an engine and comparing what it does.

use std::{collections::BTreeSet, fmt::Debug, io::BufRead};

use glimmer_tensor::Backend;

use super::{
    Out, Recorder,
    lines::{Decided, Event, Header, Line, Planned, VERSION, Yielded},
};
use crate::{EngineError, Flow, Generator, SequenceId, Settings, clock::Clock, constraint::Grammars};

/// What a log says of the engine that wrote it.
#[derive(Debug, Clone, Copy)]
pub struct Recorded<'a> {
    /// Its settings.
    pub settings: &'a Settings,
    /// Where the meaning of tokens came from, if not from the model ([`Generator::record`]).
    pub tokenizer: Option<&'a str>,
}

/// A log that an engine repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replayed {
    /// Steps.
    pub steps: u64,
    /// Tokens that they yielded.
    pub tokens: u64,
    /// The log ends within its last step: the recorded engine did not finish it, this one did.
    pub unfinished: bool,
}

/// Why a log was not repeated.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// A line that cannot be read.
    #[error("line {line}: {reason}")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// The log is of another model.
    #[error("the log was recorded with a model whose configuration has the SHA-256 {expected}, this one has {found}")]
    Model {
        /// Of the recorded model.
        expected: String,
        /// Of the one at hand.
        found: String,
    },
    /// The engine did something else.
    #[error("line {line}: {what}: recorded {expected}, but the replay has {found}")]
    Difference {
        /// Number of the line, from 1.
        line: usize,
        /// What differs.
        what: String,
        /// What was recorded.
        expected: String,
        /// What the replay has.
        found: String,
    },
    /// The engine failed.
    #[error("line {line}: {error}")]
    Engine {
        /// Number of the line, from 1.
        line: usize,
        /// The error.
        error: EngineError,
    },
}

/// Replays a log: `load` makes an engine with the recorded settings, `grammars` the constraints of structured answers.
///
/// # Errors
/// [`ReplayError::Difference`] at the first difference; the others when the log cannot be read or the engine fails.
pub fn replay<B: Backend>(
    log: impl BufRead,
    load: impl FnOnce(&Recorded<'_>) -> Result<Generator<B>, EngineError>,
    grammars: Option<&dyn Grammars>,
) -> Result<Replayed, ReplayError> {
    let mut lines = log.lines().enumerate().map(|(index, line)| {
        let number = index + 1;
        let wrong = |reason: String| ReplayError::Line { line: number, reason };
        let text = line.map_err(|error| wrong(error.to_string()))?;
        let line = serde_json::from_str::<Line>(&text).map_err(|error| wrong(error.to_string()))?;
        Ok::<_, ReplayError>((number, line))
    });
    let header = match lines.next().transpose()? {
        Some((_, Line::Header(header))) if header.version == VERSION => header,
        Some((line, Line::Header(Header { version, .. }))) => {
            return Err(ReplayError::Line {
                line,
                reason: format!("version {version} of the format, expected {VERSION}"),
            });
        }
        _ => return Err(ReplayError::Line { line: 1, reason: "expected a header".to_owned() }),
    };
    let recorded = Recorded { settings: &header.settings, tokenizer: header.tokenizer.as_deref() };
    let mut generator = load(&recorded).map_err(|error| ReplayError::Engine { line: 1, error })?;
    let own = generator.header();
    if own.model != header.model {
        return Err(ReplayError::Model { expected: header.model, found: own.model });
    }
    *generator.clock_mut() = Clock::recorded();
    generator.attach(Recorder::new(Out::Memory(Vec::new()), own));
    let mut player = Player { generator, grammars, result: Replayed { steps: 0, tokens: 0, unfinished: false } };
    let mut planned: Option<(usize, Planned)> = None;
    for line in lines {
        let (number, line) = line?;
        match (line, planned.take()) {
            (Line::Yield(yielded), Some((_, step))) => player.step(number, &step, Some(&yielded))?,
            (_, Some((line, _))) => {
                let reason = "a step is followed by what it yielded".to_owned();
                return Err(ReplayError::Line { line, reason });
            }
            (Line::Step(step), None) => planned = Some((number, step)),
            (line, None) => player.input(number, line)?,
        }
    }
    if let Some((number, step)) = planned {
        player.step(number, &step, None)?;
        player.result.unfinished = true;
    }
    Ok(player.result)
}

struct Player<'a, B: Backend> {
    generator: Generator<B>,
    grammars: Option<&'a dyn Grammars>,
    result: Replayed,
}

impl<B: Backend> Player<'_, B> {
    /// What came in between two steps.
    fn input(&mut self, line: usize, input: Line) -> Result<(), ReplayError> {
        let wrong = |reason: String| ReplayError::Line { line, reason };
        match input {
            Line::Submit(submission) => {
                let request = submission.request().map_err(wrong)?;
                let constraint = match (&submission.structure, self.grammars) {
                    (None, _) => None,
                    (Some(structure), Some(grammars)) => {
                        Some(grammars.compile(structure).map_err(|error| wrong(error.to_string()))?)
                    }
                    (Some(_), None) => {
                        return Err(wrong("a structured answer, but no grammars to replay with".to_owned()));
                    }
                };
                self.feed(&submission.clock);
                let id = self.generator.submit_constrained(request, constraint);
                let id = id.map_err(|error| ReplayError::Engine { line, error })?;
                same(line, || "number of the sequence".to_owned(), &submission.id, &id)?;
            }
            Line::Abort { id, clock } => {
                self.feed(&clock);
                if self.generator.abort(id).is_none() {
                    let found = "one that has ended".to_owned();
                    return Err(ReplayError::Difference {
                        line,
                        what: format!("abort of sequence {}", id.0),
                        expected: "a sequence that has not ended".to_owned(),
                        found,
                    });
                }
            }
            Line::Reset => self.generator.reset_prefix_cache(),
            Line::Header(_) | Line::Step(_) | Line::Yield(_) => {
                return Err(wrong("expected a submission, an abort, a reset or a step".to_owned()));
            }
        }
        self.written();
        Ok(())
    }

    fn step(&mut self, line: usize, planned: &Planned, yielded: Option<&Yielded>) -> Result<(), ReplayError> {
        self.feed(&planned.clock);
        let events: &[Event] = yielded.map_or(&[], |yielded| &yielded.events);
        if let Some(yielded) = yielded {
            self.feed(&yielded.clock);
        }
        let stopped: BTreeSet<SequenceId> = events.iter().filter(|e| e.stopped).map(|e| e.id).collect();
        let mut tokens = 0;
        let step = self.generator.step(&mut |id, event| {
            tokens += event.tokens.len() as u64;
            if stopped.contains(&id) { Flow::Stop } else { Flow::Continue }
        });
        let mut written = self.written().into_iter();
        let at = if yielded.is_some() { line - 1 } else { line };
        match written.next() {
            Some(Line::Step(found)) => compare_step(at, planned, &found)?,
            _ => same(at, || "the engine's work".to_owned(), "a step", "nothing to do")?,
        }
        step.map_err(|error| ReplayError::Engine { line, error })?;
        if let (Some(yielded), Some(Line::Yield(found))) = (yielded, written.next()) {
            compare_events(line, yielded, &found)?;
        }
        self.result.steps += 1;
        self.result.tokens += tokens;
        Ok(())
    }

    fn feed(&mut self, clock: &[u64]) {
        self.generator.clock_mut().feed(clock.iter().map(|&bits| f64::from_bits(bits)));
    }

    /// What the engine has written since the last call.
    fn written(&mut self) -> Vec<Line> {
        let Some(mut recorder) = self.generator.detach() else { return Vec::new() };
        let lines = recorder.take();
        self.generator.attach(recorder);
        lines.into_iter().filter(|line| matches!(line, Line::Step(_) | Line::Yield(_))).collect()
    }
}

fn compare_step(line: usize, expected: &Planned, found: &Planned) -> Result<(), ReplayError> {
    let step = |part: &str| format!("step {}, {part}", expected.number);
    same(line, || step("its number"), &expected.number, &found.number)?;
    let Decided { preempt, refuse, admit } = &expected.decided;
    same(line, || step("preempted sequences"), preempt, &found.decided.preempt)?;
    same(line, || step("refused sequences"), refuse, &found.decided.refuse)?;
    same(line, || step("admitted sequences"), admit, &found.decided.admit)?;
    let (a, b) = (&expected.step, &found.step);
    same(line, || step("number of segments"), &a.segments.len(), &b.segments.len())?;
    for (i, (a, b)) in a.segments.iter().zip(&b.segments).enumerate() {
        same(line, || step(&format!("segment {i}")), a, b)?;
    }
    for (i, (a, b)) in a.tokens.iter().zip(&b.tokens).enumerate() {
        same(line, || step(&format!("token of row {i}")), a, b)?;
    }
    same(line, || step("pages"), &a.pages, &b.pages)?;
    same(line, || step("rows with logits"), &a.logits, &b.logits)?;
    same(line, || step("rows of the step"), a, b)
}

fn compare_events(line: usize, expected: &Yielded, found: &Yielded) -> Result<(), ReplayError> {
    let step = |part: &str| format!("step {}, {part}", expected.number);
    for (i, (a, b)) in expected.events.iter().zip(&found.events).enumerate() {
        same(line, || step(&format!("sequence of event {i}")), &a.id, &b.id)?;
        let of = |part: &str| step(&format!("{part} of sequence {}", a.id.0));
        same(line, || of("tokens"), &a.tokens, &b.tokens)?;
        same(line, || of("log-probabilities"), &a.logprobs, &b.logprobs)?;
        same(line, || of("end"), &a.finish, &b.finish)?;
    }
    same(line, || step("number of events"), &expected.events.len(), &found.events.len())
}

fn same<T: PartialEq + Debug + ?Sized>(
    line: usize,
    what: impl FnOnce() -> String,
    expected: &T,
    found: &T,
) -> Result<(), ReplayError> {
    if expected == found {
        return Ok(());
    }
    let (expected, found) = (format!("{expected:?}"), format!("{found:?}"));
    Err(ReplayError::Difference { line, what: what(), expected, found })
}
