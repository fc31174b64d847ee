//! Running tasks on a model.
//!
//! Each task is asked once with reasoning and, for the items that allow it, once without. All questions of one run are
//! handed over together, so that the model behind the [`Answerer`] may batch them as it likes; answers come back in any
//! order and are counted in the order of the file.

use glimmer_text::Message;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::BenchError;
use crate::tasks::{Call, Item, Task, body, grade};

/// A conversation to be answered greedily.
#[derive(Clone, Debug)]
pub struct Question<'a> {
    /// Id for messages.
    pub id: &'a str,
    /// The conversation.
    pub messages: &'a [Message],
    /// Tools offered.
    pub tools: &'a [Value],
    /// Whether the model may reason first (`enable_thinking` of the template).
    pub thinking: bool,
    /// Most new tokens.
    pub max_tokens: usize,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// By a stop token.
    Stop,
    /// By the limit: truncated.
    Length,
}

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// Raw text with its markers, up to the first stop token.
    pub text: String,
    /// Tool calls in it.
    pub calls: Vec<Call>,
    /// Why it ended.
    pub finish: Finish,
    /// New tokens.
    pub tokens: usize,
}

/// Takes the answer of the question with this index; any order, each once.
pub type ReplySink<'a> = dyn FnMut(usize, Reply) + 'a;

/// Something that answers questions: a local model, or a server.
pub trait Answerer {
    /// Answers all questions.
    ///
    /// # Errors
    /// The first failure; answers given before it may have reached `done`.
    fn answer(&mut self, questions: &[Question<'_>], done: &mut ReplySink<'_>) -> Result<(), BenchError>;
}

/// What to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvalOptions {
    /// Ask with reasoning.
    pub thinking_on: bool,
    /// Ask without reasoning, the items that can be answered at once.
    pub thinking_off: bool,
    /// Items of each task and mode, from the start of the file; `None` takes all.
    pub limit: Option<usize>,
    /// Most new tokens an item.
    pub max_tokens: usize,
}

impl Default for EvalOptions {
    fn default() -> Self {
        Self { thinking_on: true, thinking_off: true, limit: None, max_tokens: 192 }
    }
}

/// Items of one level, and how many were right.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LevelResult {
    /// Level.
    pub level: String,
    /// Items.
    pub items: usize,
    /// Right ones.
    pub correct: usize,
}

/// Result of one task in one mode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskResult {
    /// Task.
    pub task: String,
    /// Whether the model could reason.
    pub thinking: bool,
    /// Items asked.
    pub items: usize,
    /// Right answers.
    pub correct: usize,
    /// Right answers in percent.
    pub accuracy: f64,
    /// Binomial standard deviation of the accuracy, in points.
    pub sigma: f64,
    /// Answers cut off by the token limit.
    pub truncated: usize,
    /// New tokens of all answers.
    pub tokens: usize,
    /// By level, in order of first appearance.
    pub levels: Vec<LevelResult>,
    /// Ids of the wrong answers.
    pub wrong: Vec<String>,
}

/// Runs tasks; `progress` is called with the number of answers so far and of all.
///
/// # Errors
/// Errors of the answerer.
pub fn evaluate<'t>(
    answerer: &mut dyn Answerer,
    tasks: &'t [Task],
    options: &EvalOptions,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<TaskResult>, BenchError> {
    let runs: Vec<(&Task, bool, Vec<&Item>)> = tasks.iter().flat_map(|task| runs(task, options)).collect();
    let items: Vec<(bool, &Item)> =
        runs.iter().flat_map(|(_, thinking, items)| items.iter().map(|&item| (*thinking, item))).collect();
    let question = |&(thinking, item): &(bool, &'t Item)| Question {
        id: &item.id,
        messages: &item.messages,
        tools: &item.tools,
        thinking,
        max_tokens: options.max_tokens,
    };
    let questions: Vec<Question<'_>> = items.iter().map(question).collect();
    let mut outcomes: Vec<Option<Outcome>> = vec![None; questions.len()];
    let mut answered = 0;
    answerer.answer(&questions, &mut |index, reply| {
        if let (Some(slot), Some((_, item))) = (outcomes.get_mut(index), items.get(index)) {
            answered += usize::from(slot.is_none());
            *slot = Some(Outcome::of(item, &reply));
            progress(answered, questions.len());
        }
    })?;
    let mut outcomes = outcomes.into_iter();
    let mut results = Vec::new();
    for (task, thinking, items) in runs {
        let graded: Vec<_> = items.iter().copied().zip(outcomes.by_ref().take(items.len())).collect();
        results.push(summarise(&task.name, thinking, &graded)?);
    }
    Ok(results)
}

#[derive(Clone, Copy, Debug)]
struct Outcome {
    correct: bool,
    truncated: bool,
    tokens: usize,
}

impl Outcome {
    fn of(item: &Item, reply: &Reply) -> Self {
        let correct = grade(item, body(&reply.text), &reply.calls);
        Self { correct, truncated: reply.finish == Finish::Length, tokens: reply.tokens }
    }
}

/// The modes of a task that have items.
pub(crate) fn runs<'t>(task: &'t Task, options: &EvalOptions) -> Vec<(&'t Task, bool, Vec<&'t Item>)> {
    let limit = options.limit.unwrap_or(usize::MAX);
    let modes = [(options.thinking_on, true), (options.thinking_off, false)];
    let wanted = modes.into_iter().filter(|(wanted, _)| *wanted);
    let run = |(_, thinking): (bool, bool)| {
        let items = task.items.iter().filter(|item| thinking || item.direct).take(limit).collect();
        (task, thinking, items)
    };
    wanted.map(run).filter(|(_, _, items): &(_, _, Vec<_>)| !items.is_empty()).collect()
}

fn summarise(task: &str, thinking: bool, graded: &[(&Item, Option<Outcome>)]) -> Result<TaskResult, BenchError> {
    let mut result = TaskResult {
        task: task.to_owned(),
        thinking,
        items: graded.len(),
        correct: 0,
        accuracy: 0.0,
        sigma: 0.0,
        truncated: 0,
        tokens: 0,
        levels: Vec::new(),
        wrong: Vec::new(),
    };
    for (item, outcome) in graded {
        let outcome = outcome.ok_or_else(|| BenchError::model(item.id.as_str(), "it returned no answer"))?;
        result.correct += usize::from(outcome.correct);
        result.truncated += usize::from(outcome.truncated);
        result.tokens += outcome.tokens;
        if !outcome.correct {
            result.wrong.push(item.id.clone());
        }
        let known = result.levels.iter().position(|level| level.level == item.level);
        let index = known.unwrap_or_else(|| {
            result.levels.push(LevelResult { level: item.level.clone(), items: 0, correct: 0 });
            result.levels.len() - 1
        });
        result.levels[index].items += 1;
        result.levels[index].correct += usize::from(outcome.correct);
    }
    let share = result.correct as f64 / result.items as f64;
    result.accuracy = 100.0 * share;
    result.sigma = 100.0 * (share * (1.0 - share) / result.items as f64).sqrt();
    Ok(result)
}
