//! Evaluation of whatever answers OpenAI's chat completions: tasks and public question sets against a URL.
//!
//! Every item is asked in each of several passes with a seed of its own pass. An answer counts once: what has begun to be
//! answered is never asked again. Only a server that says that it did not take the request (status 503 or 429) is asked
//! again, after the time that it names. An answer that was cut off by a limit is graded like any other and entered in a
//! ledger; a request that failed counts as wrong and is told apart.

mod ask;
mod report;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use tokio::task::JoinSet;

pub use ask::RemoteReply;
use ask::ask;
pub use report::{Entry, PassResult, RemoteResult, remote_table};

use crate::evaluate::{EvalOptions, runs};
use crate::serve::client::Client;
use crate::tasks::{Item, Task};

/// How items are asked.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// The model's name in requests.
    pub model: String,
    /// Independent passes over all items.
    pub epochs: u32,
    /// Seed of the first pass; each further one has the next.
    pub seed: u32,
    /// Items asked at the same time.
    pub concurrency: usize,
    /// Most new tokens of an answer; `None` leaves that to the server.
    pub max_tokens: Option<u32>,
    /// Most tokens of reasoning, for servers that can end it (`thinking_token_budget`).
    pub thinking_budget: Option<u32>,
    /// Sampling temperature; `None` leaves that to the server.
    pub temperature: Option<f64>,
    /// Nucleus; `None` leaves that to the server.
    pub top_p: Option<f64>,
    /// Longest time for one answer.
    pub timeout: Duration,
    /// How often a request is sent again that the server did not take.
    pub retries: u32,
}

/// What came of one item in one pass.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) reply: Result<RemoteReply, String>,
    /// How often it was sent again.
    pub(crate) retries: u32,
}

/// Asks all items of all tasks in all passes. `progress` hears of every answer; when `stop` is ready, what has not been
/// answered is left out of the results.
pub async fn evaluate_remote(
    client: &Arc<Client>,
    tasks: &[Task],
    which: &EvalOptions,
    options: &RemoteOptions,
    progress: &mut dyn FnMut(usize, usize),
    stop: impl Future<Output = ()>,
) -> Vec<RemoteResult> {
    let runs: Vec<(&Task, bool, Vec<&Item>)> = tasks.iter().flat_map(|task| runs(task, which)).collect();
    // Pass by pass, so that a run that is stopped has whole passes.
    let mut jobs = Vec::new();
    for pass in 0..options.epochs {
        for (_, thinking, items) in &runs {
            jobs.extend(items.iter().map(|&item| body(item, *thinking, options.seed.wrapping_add(pass), options)));
        }
    }
    let asked = ask_all(client, jobs, options, progress, stop).await;
    report::results(&runs, &asked, options)
}

/// SHA-256 over all questions and expected answers, in hexadecimal: equal digests, equal questions.
#[must_use]
pub fn questions_digest(tasks: &[Task]) -> String {
    let mut hash = Sha256::new();
    for item in tasks.iter().flat_map(|task| &task.items) {
        let messages: Vec<Value> = item.messages.iter().map(|message| message.clone().into()).collect();
        let line = json!([item.id, messages, item.tools, item.grader, item.answer]).to_string();
        hash.update((line.len() as u64).to_le_bytes());
        hash.update(line);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn ask_all(
    client: &Arc<Client>,
    jobs: Vec<Value>,
    options: &RemoteOptions,
    progress: &mut dyn FnMut(usize, usize),
    stop: impl Future<Output = ()>,
) -> Vec<Option<Asked>> {
    let all = jobs.len();
    let mut asked: Vec<Option<Asked>> = vec![None; all];
    let mut waiting = jobs.into_iter().enumerate();
    let mut running = JoinSet::new();
    let mut stop = std::pin::pin!(stop);
    let mut done = 0;
    loop {
        while running.len() < options.concurrency.max(1)
            && let Some((index, body)) = waiting.next()
        {
            let (client, timeout, retries) = (Arc::clone(client), options.timeout, options.retries);
            running.spawn(async move { (index, ask(&client, &body, timeout, retries).await) });
        }
        let ended = tokio::select! {
            ended = running.join_next() => ended,
            () = &mut stop => None,
        };
        let Some(ended) = ended else { break };
        // A task neither panics nor is cancelled before the end.
        let Ok((index, answer)) = ended else { continue };
        asked[index] = Some(answer);
        done += 1;
        progress(done, all);
    }
    running.shutdown().await;
    asked
}

/// The body of a request.
fn body(item: &Item, thinking: bool, seed: u32, options: &RemoteOptions) -> Value {
    let messages: Vec<Value> = item.messages.iter().map(|message| spoken(message.clone().into())).collect();
    let mut body = Map::new();
    body.insert("model".to_owned(), options.model.as_str().into());
    body.insert("messages".to_owned(), messages.into());
    body.insert("stream".to_owned(), true.into());
    body.insert("stream_options".to_owned(), json!({"include_usage": true}));
    body.insert("seed".to_owned(), seed.into());
    let mut set = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            body.insert(key.to_owned(), value);
        }
    };
    set("max_completion_tokens", options.max_tokens.map(Value::from));
    set("thinking_token_budget", options.thinking_budget.map(Value::from));
    set("temperature", options.temperature.map(Value::from));
    set("top_p", options.top_p.map(Value::from));
    set("tools", (!item.tools.is_empty()).then(|| item.tools.clone().into()));
    // Reasoning is what such models do unless they are told otherwise; servers of other models know no such field.
    set("chat_template_kwargs", (!thinking).then(|| json!({"enable_thinking": false})));
    Value::Object(body)
}

/// A message as the API wants it: arguments of calls as text, and every call with an id.
fn spoken(mut message: Value) -> Value {
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for (index, call) in calls.into_iter().flatten().enumerate() {
        let arguments = call["function"]["arguments"].take();
        call["function"]["arguments"] = match arguments {
            Value::String(text) => text.into(),
            value => value.to_string().into(),
        };
        if !call["id"].is_string() {
            call["id"] = format!("call_{index}").into();
        }
        if !call["type"].is_string() {
            call["type"] = "function".into();
        }
    }
    message
}
