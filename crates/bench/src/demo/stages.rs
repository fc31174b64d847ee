//! The stages of the demo.

use std::path::Path;
use std::sync::mpsc;

use glimmer_checkpoint::Checkpoint;
use glimmer_engine::{DraftCounts, Settings};
use glimmer_quantize::{CalibrationSample, Options as QuantizeOptions, Progress, Recipe, quantize};
use glimmer_tensor::{Backend, Cpu};
use glimmer_text::{Content, Part};
use serde_json::Value;

use super::{Clock, DemoAnswer, DemoDevice, DemoInput};
use crate::engine::EngineCompleter;
use crate::error::BenchError;
use crate::evaluate::{EvalOptions, Question, TaskResult, evaluate};
use crate::kld::{Divergence, Scorer, ScorerSet, divergences_on_threads};
use crate::local::{LocalAnswerer, ModelText};
use crate::panel_scorer::PanelScorer;
use crate::pictures::PictureReader;
use crate::tasks::{Call, Grader, Item, Task, grade};

pub(super) fn quantized(
    source: &Checkpoint,
    samples: &[CalibrationSample],
    recipe: &Recipe,
    out: &Path,
    threads: usize,
    clock: &mut Clock<'_>,
) -> Result<QuantizedCounts, BenchError> {
    let options = QuantizeOptions { threads, ..QuantizeOptions::new(out) };
    let mut units = Units { clock, total: 1, done: 0 };
    let finished = quantize(Cpu::new(threads), source, samples, recipe, &options, &mut units)
        .map_err(|error| BenchError::model("quantizing", error))?;
    Ok(QuantizedCounts { matrices: finished.report.matrices().count(), tokens: finished.report.tokens })
}

/// What was quantized.
pub(super) struct QuantizedCounts {
    pub(super) matrices: usize,
    pub(super) tokens: usize,
}

/// Progress of the quantizer as a share of the stage.
struct Units<'a, 'p> {
    clock: &'a mut Clock<'p>,
    total: u64,
    done: u64,
}

impl Progress for Units<'_, '_> {
    fn start(&mut self, total: u64, done: u64) {
        (self.total, self.done) = (total.max(1), done);
    }

    fn advance(&mut self, units: u64) {
        self.done += units;
        self.clock.done(self.done as f64 / self.total as f64);
    }
}

/// Results of the tasks on one model, and its drafts.
pub(super) struct TasksRun {
    pub(super) results: Vec<TaskResult>,
    pub(super) drafts: DraftCounts,
}

/// Runs the tasks on all models at the same time, sharing the threads out among them.
pub(super) fn tasks<B: Backend, const N: usize>(
    checkpoints: [&Checkpoint; N],
    text: &ModelText,
    input: &DemoInput<'_>,
    device: DemoDevice<'_, B>,
    clock: &mut Clock<'_>,
) -> Result<[TasksRun; N], BenchError> {
    let input = DemoInput { threads: (input.threads / N).max(1), ..*input };
    let (sender, received) = mpsc::channel();
    std::thread::scope(|scope| {
        let start = |checkpoint| {
            let sender = sender.clone();
            scope.spawn(move || tasks_of(checkpoint, text, &input, device, &mut || sender.send(()).unwrap_or_default()))
        };
        let running = checkpoints.map(start);
        drop(sender);
        for (done, ()) in received.iter().enumerate() {
            clock.done((done + 1) as f64 / (N * input.tasks.len()) as f64);
        }
        let finished = running.map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        let finished: Vec<TasksRun> = finished.into_iter().collect::<Result<_, _>>()?;
        Ok(finished.try_into().unwrap_or_else(|_| unreachable!("one result for each checkpoint")))
    })
}

fn tasks_of<B: Backend>(
    checkpoint: &Checkpoint,
    text: &ModelText,
    input: &DemoInput<'_>,
    device: DemoDevice<'_, B>,
    task_done: &mut dyn FnMut(),
) -> Result<TasksRun, BenchError> {
    let completer = completer(checkpoint, text, input, device)?;
    let mut answerer = LocalAnswerer::new(text, completer, PictureReader::load(checkpoint)?);
    let mut results = Vec::new();
    for (task, thinking_on, thinking_off) in modes(input) {
        let options = EvalOptions { thinking_on, thinking_off, limit: Some(input.items), ..EvalOptions::default() };
        results.extend(evaluate(&mut answerer, std::slice::from_ref(task), &options, &mut |_, _| {})?);
        task_done();
    }
    Ok(TasksRun { results, drafts: answerer.completer().drafts().clone() })
}

/// Each task is asked without reasoning where enough items allow it, else with; tool requests are asked both ways.
fn modes<'t>(input: &DemoInput<'t>) -> Vec<(&'t Task, bool, bool)> {
    let mode = |task: &'t Task| {
        let off = task.items.iter().filter(|item| item.direct).count() >= input.items.min(task.items.len());
        let calls = task.items.iter().any(|item| item.grader == Grader::Tool);
        (task, !off || calls, off)
    };
    input.tasks.iter().map(mode).collect()
}

fn completer<B: Backend>(
    checkpoint: &Checkpoint,
    text: &ModelText,
    input: &DemoInput<'_>,
    device: DemoDevice<'_, B>,
) -> Result<EngineCompleter<B>, BenchError> {
    let settings = Settings {
        sequences: input.batch,
        context: Some(CONTEXT.min(checkpoint.config().text.max_position_embeddings)),
        rows: ROWS.max(input.batch * (input.draft_depth + 1)),
        depth: input.draft_depth,
        real_vocab: Some(text.format.tokenizer().vocab_size()),
        // What questions share is their beginning; few states hold that.
        state_checkpoints: 8,
        ..Settings::default()
    };
    EngineCompleter::load(device(input.threads)?, checkpoint, &settings)
}

/// Longest conversation of the demo, with its answer.
const CONTEXT: usize = 4096;
/// Rows a step.
const ROWS: usize = 256;

pub(super) fn panel<B: Backend>(
    [source, artifact, parity]: [&Checkpoint; 3],
    text: &ModelText,
    input: &DemoInput<'_>,
    device: DemoDevice<'_, B>,
    clock: &mut Clock<'_>,
) -> Result<[Divergence; 2], BenchError> {
    let longest = input.documents.iter().map(|document| document.ids.len()).max().unwrap_or(1);
    let vocabulary = text.format.tokenizer().vocab_size();
    let load = |checkpoint| PanelScorer::load(device(1)?, checkpoint, vocabulary, longest);
    let load = |checkpoint| Ok::<Box<dyn Scorer + Send + '_>, BenchError>(Box::new(load(checkpoint)?));
    let set = || Ok(ScorerSet { reference: load(source)?, models: vec![load(artifact)?, load(parity)?] });
    let sets = (0..input.scorers.max(1)).map(|_| set()).collect::<Result<Vec<_>, BenchError>>()?;
    let mut progress = |done: usize, all: usize| clock.done(done as f64 / all.max(1) as f64);
    let results = divergences_on_threads(sets, input.documents, &mut progress)?;
    results.try_into().map_err(|_| BenchError::model("measuring", "two models, but not two results"))
}

/// Asks one question with reasoning, one that needs a tool and one about a picture, as far as the tasks have them.
pub(super) fn answers<B: Backend>(
    checkpoint: &Checkpoint,
    text: &ModelText,
    input: &DemoInput<'_>,
    device: DemoDevice<'_, B>,
) -> Result<Vec<DemoAnswer>, BenchError> {
    let single = DemoInput { batch: 1, ..*input };
    let mut answerer =
        LocalAnswerer::new(text, completer(checkpoint, text, &single, device)?, PictureReader::load(checkpoint)?);
    let items = || input.tasks.iter().flat_map(|task| &task.items);
    let has_picture = |item: &Item| item.messages.iter().any(|message| message.images().next().is_some());
    let reasoned = items().find(|item| item.grader == Grader::Number && !item.direct && !has_picture(item));
    let called = items().find(|item| item.grader == Grader::Tool);
    let seen = items().find(|item| has_picture(item));
    let wanted = [(reasoned, true), (called, true), (seen, false)];
    let mut answers = Vec::new();
    for (item, thinking) in wanted.into_iter().filter_map(|(item, thinking)| Some((item?, thinking))) {
        answers.push(answer(&mut answerer, item, thinking, has_picture(item))?);
    }
    Ok(answers)
}

fn answer<B: Backend>(
    answerer: &mut LocalAnswerer<'_, EngineCompleter<B>>,
    item: &Item,
    thinking: bool,
    picture: bool,
) -> Result<DemoAnswer, BenchError> {
    let max_tokens = EvalOptions::default().max_tokens;
    let question = Question { id: &item.id, messages: &item.messages, tools: &item.tools, thinking, max_tokens };
    let (answer, _) = answerer.ask(&question)?;
    let calls: Vec<Call> = answer
        .calls
        .iter()
        .map(|call| Call {
            name: call.name.clone(),
            arguments: serde_json::from_str(&call.arguments).unwrap_or_default(),
        })
        .collect();
    let name = |tool: &Value| tool["function"]["name"].as_str().map(str::to_owned);
    Ok(DemoAnswer {
        id: item.id.clone(),
        question: last_text(item),
        picture,
        tools: item.tools.iter().filter_map(name).collect(),
        right: grade(item, answer.content.as_deref().unwrap_or("").trim(), &calls),
        reasoning: answer.reasoning,
        content: answer.content,
        calls,
        expected: item.answer.clone(),
    })
}

/// The text of the last message.
fn last_text(item: &Item) -> String {
    let Some(message) = item.messages.last() else { return String::new() };
    match &message.content {
        Content::Text(text) => text.clone(),
        Content::Parts(parts) => parts
            .iter()
            .filter_map(|part| if let Part::Text(text) = part { Some(text.as_str()) } else { None })
            .collect(),
    }
}
