//! Conversations of agents with tools, through the chat template: what the prefix cache leaves to compute in each turn.

use glimmer_checkpoint::Checkpoint;
use glimmer_engine::Sampling;
use glimmer_tensor::{Backend, PAGE_TOKENS};
use glimmer_text::{Answer, Message, Role, Start, ToolCall};
use serde_json::{Value, json};

use super::drive::alone;
use super::matrix::{finish, load};
use super::scenes::{plain, served};
use super::{Base, Case, CaseKind, Comparison, Given, Opener, turn_start};
use crate::error::BenchError;
use crate::evaluate::{Finish, Question};
use crate::local::{Completion, ModelText, parse, prompt};
use crate::tasks::{Item, Task};

/// Conversations.
const AGENTS: usize = 4;
/// Turns of the user in each; every tool call adds a turn of the tool.
const TURNS: usize = 10;
/// Most tool turns behind one of the user.
const MOST_CALLS: usize = 3;
/// Most new tokens a turn.
const NEW_TOKENS: u32 = 128;

/// Lets agents converse and compares every answer with that of an engine without a cache. A turn may compute the tokens that
/// no prompt or answer before it had, and one page besides.
///
/// # Errors
/// When an engine cannot be loaded or fails, and errors of the text layer.
pub fn agents<B: Backend>(
    backend: Opener<'_, B>,
    checkpoint: &Checkpoint,
    text: &ModelText,
    tasks: &[Task],
    base: &Base,
) -> Result<Comparison, BenchError> {
    let mut comparison =
        Comparison::new("agents with tools, ten turns each: new tokens and at most a page are computed");
    let (mut cached, mut cold) =
        (load(backend()?, checkpoint, &served(base))?, load(backend()?, checkpoint, &plain(base))?);
    let asking: Vec<&Item> = tasks.iter().flat_map(|task| &task.items).filter(|item| asks_for_tools(item)).collect();
    let mut calls = 0;
    for items in asking.chunks(TURNS).take(AGENTS) {
        let tools = tools_of(items);
        let (mut messages, mut before) = (Vec::new(), Vec::new());
        for (turn, item) in items.iter().enumerate() {
            messages.extend(item.messages.last().cloned());
            for call in 0..=MOST_CALLS {
                let id = format!("{} turn {turn}.{call}", item.id);
                let question = Question {
                    id: &id,
                    messages: &messages,
                    tools: &tools,
                    thinking: true,
                    max_tokens: NEW_TOKENS as usize,
                };
                let case = case(text, &question)?;
                if case.ids.len() + NEW_TOKENS as usize >= base.context {
                    break;
                }
                let hits = cached.snapshot().counters.prefix_hits;
                let expected = alone(&mut cold, &case)?;
                comparison.compare(&id, &expected, &alone(&mut cached, &case)?);
                let computed = case.ids.len() - (cached.snapshot().counters.prefix_hits - hits) as usize;
                let known = common(&before, &case.ids);
                let most = case.ids.len() - known + PAGE_TOKENS;
                let fits = before.is_empty() || computed <= most;
                comparison.require(fits, &format!("{id} computed {computed} tokens of its prompt, not up to {most}"));
                before = [&case.ids[..], &expected.tokens].concat();
                let answer = parsed(text, &question, &case, &expected);
                let results = results(&answer);
                calls += results.len();
                messages.push(said(answer));
                if results.is_empty() {
                    break;
                }
                messages.extend(results);
            }
        }
    }
    comparison.require(calls > 0 || asking.is_empty(), "no agent called a tool");
    finish(&mut comparison, cached);
    Ok(comparison)
}

/// Items whose answer is a call and whose conversation is one turn.
fn asks_for_tools(item: &Item) -> bool {
    !item.tools.is_empty() && item.messages.len() == 1
}

/// All tools of some items, each name once.
fn tools_of(items: &[&Item]) -> Vec<Value> {
    let mut tools: Vec<Value> = Vec::new();
    for tool in items.iter().flat_map(|item| &item.tools) {
        if !tools.iter().any(|known| known["function"]["name"] == tool["function"]["name"]) {
            tools.push(tool.clone());
        }
    }
    tools
}

fn case(text: &ModelText, question: &Question<'_>) -> Result<Case, BenchError> {
    let prompted = prompt(text, None, question)?;
    Ok(Case {
        id: question.id.to_owned(),
        kind: CaseKind::Tools,
        turn_start: turn_start(text, &prompted.ids),
        ids: prompted.ids.into(),
        pictures: Vec::new(),
        sampling: Sampling::greedy(),
        max_tokens: NEW_TOKENS,
        stop_ids: prompted.stop_ids,
        ignore_eos: false,
    })
}

fn parsed(text: &ModelText, question: &Question<'_>, case: &Case, given: &Given) -> Answer {
    let completion = Completion { ids: given.tokens.clone(), finish: Finish::Stop };
    let start = Start::of_prompt(text.format.tokenizer(), &case.ids);
    parse(text, question, &completion, start)
}

/// The answer as a client sends it back.
fn said(answer: Answer) -> Message {
    let call = |call: glimmer_text::AnswerCall| ToolCall {
        id: None,
        name: call.name,
        arguments: serde_json::from_str(&call.arguments).unwrap_or_default(),
    };
    Message {
        reasoning: answer.reasoning,
        tool_calls: answer.calls.into_iter().map(call).collect(),
        ..Message::text(Role::Assistant, answer.content.unwrap_or_default())
    }
}

/// What the tools return.
fn results(answer: &Answer) -> Vec<Message> {
    let result = |call: &glimmer_text::AnswerCall| {
        let heard: Value = serde_json::from_str(&call.arguments).unwrap_or_default();
        let text = json!({"temperature": call.arguments.len(), "condition": "sunny", "of": heard}).to_string();
        Message::text(Role::Tool, text)
    };
    answer.calls.iter().map(result).collect()
}

/// Leading tokens that are equal.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
