//! What an evaluation against a server came to: scores by pass, pooled scores, the ledger of answers that were cut off.

use serde::Serialize;

use super::{Asked, RemoteOptions};
use crate::report::table;
use crate::tasks::{Item, Task, body, grade};

/// One pass over the items of a task.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PassResult {
    /// Its seed.
    pub seed: u32,
    /// Items that were asked.
    pub asked: usize,
    /// Right answers.
    pub correct: usize,
    /// Right answers in percent of those asked.
    pub accuracy: f64,
    /// Answers that a limit cut off.
    pub truncated: usize,
    /// Requests without an answer; they count as wrong.
    pub failed: usize,
}

/// An answer that something is to be said about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// Item.
    pub id: String,
    /// Seed of the pass.
    pub seed: u32,
    /// New tokens.
    pub tokens: usize,
    /// Where it was cut off (`reasoning` or `answer`), why it failed, or what was found instead of the right answer.
    pub what: String,
    /// Whether it was right all the same.
    pub correct: bool,
}

/// A task in one mode.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RemoteResult {
    /// Task.
    pub task: String,
    /// Whether the model could reason.
    pub thinking: bool,
    /// Items of a pass.
    pub items: usize,
    /// Passes.
    pub passes: Vec<PassResult>,
    /// Right answers in percent, over all passes.
    pub accuracy: f64,
    /// Binomial standard deviation of that, in points.
    pub sigma: f64,
    /// The same among answers that were not cut off.
    pub accuracy_of_complete: f64,
    /// New tokens of all answers.
    pub tokens: usize,
    /// Requests that were sent again.
    pub retries: u64,
    /// Items that were not asked because the run was stopped.
    pub not_asked: usize,
    /// Answers that a limit cut off.
    pub truncated: Vec<Entry>,
    /// Requests without an answer.
    pub failed: Vec<Entry>,
    /// Wrong answers.
    pub wrong: Vec<Entry>,
}

/// Longest part of a wrong answer that is told.
const SHOWN: usize = 80;

/// `asked` holds all items of all runs, pass by pass.
pub(super) fn results(
    runs: &[(&Task, bool, Vec<&Item>)],
    asked: &[Option<Asked>],
    options: &RemoteOptions,
) -> Vec<RemoteResult> {
    let pass: usize = runs.iter().map(|(.., items)| items.len()).sum();
    let mut first = 0;
    let mut results = Vec::with_capacity(runs.len());
    for (task, thinking, items) in runs {
        let passes = (0..options.epochs).map(|epoch| {
            let from = first + epoch as usize * pass;
            let graded = items.iter().copied().zip(&asked[from..from + items.len()]);
            (options.seed.wrapping_add(epoch), graded.collect())
        });
        results.push(RemoteResult::of(&task.name, *thinking, items.len(), passes));
        first += items.len();
    }
    results
}

impl RemoteResult {
    fn of<'a>(
        task: &str,
        thinking: bool,
        items: usize,
        passes: impl Iterator<Item = (u32, Vec<(&'a Item, &'a Option<Asked>)>)>,
    ) -> Self {
        let mut result = Self {
            task: task.to_owned(),
            thinking,
            items,
            passes: Vec::new(),
            accuracy: f64::NAN,
            sigma: f64::NAN,
            accuracy_of_complete: f64::NAN,
            tokens: 0,
            retries: 0,
            not_asked: 0,
            truncated: Vec::new(),
            failed: Vec::new(),
            wrong: Vec::new(),
        };
        for (seed, graded) in passes {
            result.pass(seed, &graded);
        }
        let asked: usize = result.passes.iter().map(|pass| pass.asked).sum();
        let correct: usize = result.passes.iter().map(|pass| pass.correct).sum();
        let cut_and_right = result.truncated.iter().filter(|entry| entry.correct).count();
        result.accuracy = percent(correct, asked);
        let share = correct as f64 / asked as f64;
        result.sigma = 100.0 * (share * (1.0 - share) / asked as f64).sqrt();
        result.accuracy_of_complete = percent(correct - cut_and_right, asked - result.truncated.len());
        result
    }

    fn pass(&mut self, seed: u32, graded: &[(&Item, &Option<Asked>)]) {
        let mut pass = PassResult { seed, asked: 0, correct: 0, accuracy: f64::NAN, truncated: 0, failed: 0 };
        for (item, asked) in graded {
            let Some(asked) = asked else {
                self.not_asked += 1;
                continue;
            };
            pass.asked += 1;
            self.retries += u64::from(asked.retries);
            let entry = |tokens: usize, what: &str, correct: bool| Entry {
                id: item.id.clone(),
                seed,
                tokens,
                what: what.to_owned(),
                correct,
            };
            let reply = match &asked.reply {
                Ok(reply) => reply,
                Err(problem) => {
                    pass.failed += 1;
                    self.failed.push(entry(0, problem, false));
                    continue;
                }
            };
            self.tokens += reply.tokens;
            let correct = grade(item, body(&reply.content), &reply.calls);
            pass.correct += usize::from(correct);
            if reply.finish == "length" {
                pass.truncated += 1;
                let place = if reply.content.is_empty() { "reasoning" } else { "answer" };
                self.truncated.push(entry(reply.tokens, place, correct));
            }
            if !correct {
                let found: String = body(&reply.content).chars().rev().take(SHOWN).collect();
                let found: String = found.chars().rev().collect();
                self.wrong.push(entry(reply.tokens, &found, false));
            }
        }
        pass.accuracy = percent(pass.correct, pass.asked);
        self.passes.push(pass);
    }
}

fn percent(part: usize, all: usize) -> f64 {
    100.0 * part as f64 / all as f64
}

/// One row a task and mode, its passes behind the pooled score.
#[must_use]
pub fn remote_table(results: &[RemoteResult]) -> String {
    let header = [
        "task",
        "thinking",
        "items",
        "passes",
        "right %",
        "+-",
        "by pass",
        "complete %",
        "cut off",
        "failed",
        "tokens",
    ];
    let shown = |value: f64| if value.is_nan() { String::new() } else { format!("{value:.1}") };
    let row = |r: &RemoteResult| {
        let by_pass: Vec<String> = r.passes.iter().map(|pass| shown(pass.accuracy)).collect();
        vec![
            r.task.clone(),
            if r.thinking { "on" } else { "off" }.to_owned(),
            r.items.to_string(),
            r.passes.len().to_string(),
            shown(r.accuracy),
            shown(r.sigma),
            by_pass.join(" "),
            shown(r.accuracy_of_complete),
            r.truncated.len().to_string(),
            r.failed.len().to_string(),
            r.tokens.to_string(),
        ]
    };
    table(&header.map(str::to_owned), &results.iter().map(row).collect::<Vec<_>>(), 2)
}
