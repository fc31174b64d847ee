//! The prompts of the exactness matrix: text, tools, pictures, long contexts; greedy ones and seeded draws.

use std::sync::Arc;

use glimmer_engine::{Request, Sampling};
use glimmer_model::vision::Patches;
use serde::Serialize;

use crate::error::BenchError;
use crate::evaluate::Question;
use crate::local::{ModelText, prompt};
use crate::panel::Document;
use crate::pictures::PictureReader;
use crate::tasks::{Item, Task};

/// What a prompt exercises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CaseKind {
    /// A question in words.
    Text,
    /// A conversation with tools.
    Tools,
    /// A question about a picture.
    Picture,
    /// Several thousand tokens.
    Long,
}

/// A prompt and how it is answered.
#[derive(Clone, Debug)]
pub struct Case {
    /// Id for messages.
    pub id: String,
    /// What it exercises.
    pub kind: CaseKind,
    /// Token ids, placeholders expanded.
    pub ids: Arc<[u32]>,
    /// Pictures in the order of their placeholders.
    pub pictures: Vec<Patches>,
    /// Greedy, or a draw with a seed.
    pub sampling: Sampling,
    /// Most new tokens.
    pub max_tokens: u32,
    /// Ids that end the answer besides the model's own.
    pub stop_ids: Vec<u32>,
    /// Goes on behind the model's own end tokens.
    pub ignore_eos: bool,
    /// Where the last turn starts, as a front end would say.
    pub turn_start: Option<usize>,
}

/// New tokens a case; enough to cross a page or two behind most prompts.
const NEW_TOKENS: u32 = 96;
/// New tokens of a long case.
const NEW_TOKENS_LONG: u32 = 24;
/// Every so many cases is a draw instead of greedy.
const DRAWN_EVERY: usize = 5;
/// Every so many cases is a long one.
const LONG_EVERY: usize = 12;

impl Case {
    /// The request, without its pictures.
    pub(super) fn request(&self) -> Request {
        let mut request = Request::new(Arc::clone(&self.ids), self.max_tokens);
        request.id.clone_from(&self.id);
        request.sampling = self.sampling.clone();
        request.limits.stop_tokens.clone_from(&self.stop_ids);
        request.limits.ignore_eos = self.ignore_eos;
        request.turn_start = self.turn_start;
        request
    }
}

/// `count` cases: the tasks' items in turn, each twelfth one a long context made of `documents`, each fifth one drawn with a
/// seed instead of greedy. Prompts that leave no room for an answer within `context` are left out.
///
/// # Errors
/// Errors of the text layer, and pictures that cannot be read.
pub fn cases(
    text: &ModelText,
    pictures: Option<&PictureReader>,
    tasks: &[Task],
    documents: &[Document],
    count: usize,
    context: usize,
) -> Result<Vec<Case>, BenchError> {
    let mut cases = Vec::with_capacity(count);
    let mut items = interleaved(tasks);
    for index in 0.. {
        if cases.len() == count {
            break;
        }
        let mut case = if index % LONG_EVERY == LONG_EVERY - 1 && !documents.is_empty() {
            long(text, documents, index, context)
        } else {
            match items.next() {
                Some(item) if pictures.is_none() && item.messages.iter().any(|m| m.images().next().is_some()) => {
                    continue;
                }
                Some(item) => short(text, pictures, item, index % 2 == 0 || !item.direct)?,
                None => break,
            }
        };
        if index % DRAWN_EVERY == DRAWN_EVERY - 1 {
            let seed = i64::try_from(index).unwrap_or(i64::MAX);
            case.sampling = Sampling { temperature: 0.9, top_p: 0.95, seed: Some(seed), ..Sampling::default() };
        }
        if case.ids.len() + (case.max_tokens as usize) < context {
            cases.push(case);
        }
    }
    Ok(cases)
}

/// The first item of every task, then the second ones, and so on.
fn interleaved(tasks: &[Task]) -> impl Iterator<Item = &Item> {
    let longest = tasks.iter().map(|task| task.items.len()).max().unwrap_or(0);
    (0..longest).flat_map(move |index| tasks.iter().filter_map(move |task| task.items.get(index)))
}

fn short(text: &ModelText, pictures: Option<&PictureReader>, item: &Item, thinking: bool) -> Result<Case, BenchError> {
    let question = Question {
        id: &item.id,
        messages: &item.messages,
        tools: &item.tools,
        thinking,
        max_tokens: NEW_TOKENS as usize,
    };
    let prompted = prompt(text, pictures, &question)?;
    let kind = match (prompted.pictures.is_empty(), item.tools.is_empty()) {
        (false, _) => CaseKind::Picture,
        (true, false) => CaseKind::Tools,
        (true, true) => CaseKind::Text,
    };
    let turn_start = turn_start(text, &prompted.ids);
    Ok(Case {
        id: item.id.clone(),
        kind,
        ids: prompted.ids.into(),
        pictures: prompted.pictures,
        sampling: Sampling::greedy(),
        max_tokens: NEW_TOKENS,
        stop_ids: prompted.stop_ids,
        ignore_eos: false,
        turn_start,
    })
}

/// Documents without pictures, one behind the other, to between two thousand tokens and a little below the context.
fn long(text: &ModelText, documents: &[Document], index: usize, context: usize) -> Case {
    let most = context.saturating_sub(NEW_TOKENS_LONG as usize + 1).max(1);
    let length = (2000 + index * 37 % 2500).min(most);
    let plain: Vec<&Document> = documents.iter().filter(|document| document.images.is_empty()).collect();
    let start = index.checked_rem(plain.len()).unwrap_or(0);
    let ids: Vec<u32> =
        plain.iter().cycle().skip(start).flat_map(|document| document.ids.iter().copied()).take(length).collect();
    Case {
        id: format!("long-{index}"),
        kind: CaseKind::Long,
        ids: ids.into(),
        pictures: Vec::new(),
        sampling: Sampling::greedy(),
        max_tokens: NEW_TOKENS_LONG,
        stop_ids: text.stop_ids.clone(),
        ignore_eos: false,
        turn_start: None,
    }
}

/// Position of the last turn's first token.
pub(super) fn turn_start(text: &ModelText, ids: &[u32]) -> Option<usize> {
    let tokenizer = text.format.tokenizer();
    let starts: Vec<u32> =
        ["<|user|>", "<|observation|>"].iter().filter_map(|name| tokenizer.added_id(name).ok()).collect();
    ids.iter().rposition(|id| starts.contains(id))
}
