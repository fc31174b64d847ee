//! The parser of a model's answer: token ids in, reasoning, content and tool calls out.
//!
//! One incremental state machine does reasoning and tool calls together, because their markers interact (a tool call ends
//! reasoning, a stray `</think>` may follow content). Markers are recognised by token id, so the same characters written
//! as ordinary text stay text; a front end that finds them in text exists for answers whose ids are gone.
//!
//! Invariant: the events of any way of feeding an answer, joined, are equal. [`parse_answer`] is that join.
//!
//! ```text
//! output    := reasoning? content_or_calls*
//! reasoning := TEXT ( "</think>" | before "<tool_call>" | end )
//! call      := "<tool_call>" name arg* "</tool_call>"
//! arg       := "<arg_key>" key "</arg_key>" "<arg_value>" value "</arg_value>"
//! ```

mod machine;
mod markers;
mod schema;

pub use schema::ToolSchemas;

use crate::detokenizer::Detokenizer;
use crate::tokenizer::Tokenizer;
use machine::Machine;
use markers::{Marker, MarkerIds, TextScanner};

/// A piece of the answer, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// More reasoning.
    Reasoning(String),
    /// More content.
    Content(String),
    /// A tool call begins; its name comes once and whole.
    CallStart {
        /// Index of the call in the answer, from 0.
        index: usize,
        /// Name of the function.
        name: String,
    },
    /// More of the call's arguments; all fragments of a complete call, joined, are a JSON object.
    CallArguments {
        /// Index of the call.
        index: usize,
        /// Next piece of JSON text.
        fragment: String,
    },
    /// The call is complete.
    CallEnd {
        /// Index of the call.
        index: usize,
    },
}

/// What the prompt left open for the answer to continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The last turn of the prompt has an open `<think>`.
    Reasoning,
    /// It has none, or a closed one.
    Content,
}

impl Start {
    /// Reads it off the prompt's current turn: the tokens behind the last role token. Template variables such as
    /// `enable_thinking` say nothing reliable about it.
    #[must_use]
    pub fn of_prompt(tokenizer: &Tokenizer, prompt: &[u32]) -> Self {
        let ids = MarkerIds::new(tokenizer);
        let roles = ["<|assistant|>", "<|user|>", "<|system|>", "<|observation|>"];
        let roles: Vec<u32> = roles.iter().filter_map(|literal| tokenizer.added_id(literal).ok()).collect();
        let turn = prompt.iter().rev().take_while(|id| !roles.contains(id));
        let last = turn.filter_map(|&id| ids.marker(id)).find(|m| matches!(m, Marker::Think | Marker::EndThink));
        if last == Some(Marker::Think) { Self::Reasoning } else { Self::Content }
    }
}

/// What to do with tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ToolMode {
    /// The request has no tools: their markup is ordinary text.
    Off,
    /// Parse and report calls.
    #[default]
    Parse,
    /// Parse calls and drop them (`tool_choice: "none"`): nothing of the markup reaches the content.
    Suppress,
}

/// What to do with a call of a function that the request did not declare.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum UnknownTools {
    /// Report it if its name is well formed, so that the client can answer that there is no such tool.
    #[default]
    Forward,
    /// Drop it.
    Drop,
}

/// Switches of the parser.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParseOptions {
    /// Separate reasoning from content.
    pub reasoning: bool,
    /// Tool calls.
    pub tools: ToolMode,
    /// Calls of undeclared functions.
    pub unknown_tools: UnknownTools,
    /// Report at most one call.
    pub single_call: bool,
    /// If an answer ends by itself without ever closing its reasoning and without a call, report its text as content, too.
    pub answer_without_think_is_content: bool,
}

impl Default for ParseOptions {
    fn default() -> Self {
        Self {
            reasoning: true,
            tools: ToolMode::Parse,
            unknown_tools: UnknownTools::Forward,
            single_call: false,
            answer_without_think_is_content: true,
        }
    }
}

/// Why the engine ended the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineFinish {
    /// The model's own end token.
    Stop,
    /// A stop string or token that the client asked for, wherever the answer stood.
    ClientStop,
    /// The token limit.
    Length,
    /// The request was cancelled.
    Abort,
}

/// A tool call of a finished answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerCall {
    /// Name of the function.
    pub name: String,
    /// JSON text of the arguments; cut short if the call is not complete. A repeated key appears twice, the last one wins.
    pub arguments: String,
    /// Whether the call was closed.
    pub complete: bool,
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Answer {
    /// Reasoning; `None` if there is none.
    pub reasoning: Option<String>,
    /// Content; `None` if there is none.
    pub content: Option<String>,
    /// Tool calls in order.
    pub calls: Vec<AnswerCall>,
}

impl Answer {
    /// Joins events into an answer.
    #[must_use]
    pub fn from_events(events: &[Event]) -> Self {
        let mut answer = Self::default();
        for event in events {
            match event {
                Event::Reasoning(text) => answer.reasoning.get_or_insert_default().push_str(text),
                Event::Content(text) => answer.content.get_or_insert_default().push_str(text),
                Event::CallStart { name, .. } => {
                    answer.calls.push(AnswerCall { name: name.clone(), arguments: String::new(), complete: false });
                }
                Event::CallArguments { index, fragment } => {
                    if let Some(call) = answer.calls.get_mut(*index) {
                        call.arguments.push_str(fragment);
                    }
                }
                Event::CallEnd { index } => {
                    if let Some(call) = answer.calls.get_mut(*index) {
                        call.complete = true;
                    }
                }
            }
        }
        answer
    }

    /// OpenAI's `finish_reason`: `tool_calls` only if the answer made a call, and ended by itself or with no call cut in two.
    #[must_use]
    pub fn finish_reason(&self, finish: EngineFinish) -> &'static str {
        let cut = finish == EngineFinish::ClientStop && self.calls.last().is_some_and(|call| !call.complete);
        match finish {
            EngineFinish::Stop | EngineFinish::ClientStop if !self.calls.is_empty() && !cut => "tool_calls",
            EngineFinish::Stop | EngineFinish::ClientStop => "stop",
            EngineFinish::Length => "length",
            EngineFinish::Abort => "abort",
        }
    }
}

/// Incremental parser of one answer.
#[derive(Debug)]
pub struct OutputParser<'a> {
    detokenizer: Detokenizer<'a>,
    ids: MarkerIds,
    scanner: TextScanner,
    machine: Machine<'a>,
}

impl<'a> OutputParser<'a> {
    /// A parser at the start of an answer.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer, schemas: &'a ToolSchemas, options: ParseOptions, start: Start) -> Self {
        Self {
            detokenizer: tokenizer.detokenizer(true),
            ids: MarkerIds::new(tokenizer),
            scanner: TextScanner::default(),
            machine: Machine::new(schemas, options, start),
        }
    }

    /// Feeds one token; appends what it completes to `events`. Special tokens (stop tokens) add nothing.
    pub fn push(&mut self, id: u32, events: &mut Vec<Event>) {
        let mut text = String::new();
        if let Some(marker) = self.ids.marker(id) {
            self.detokenizer.flush(&mut text);
            self.machine.text(&text, events);
            self.machine.marker(marker, events);
        } else {
            self.detokenizer.push(id, &mut text);
            self.machine.text(&text, events);
        }
    }

    /// Feeds text whose token ids are not known: markers are found by their characters, across pieces. Do not mix with
    /// [`OutputParser::push`].
    pub fn push_text(&mut self, text: &str, events: &mut Vec<Event>) {
        let machine = &mut self.machine;
        self.scanner.push(text, |piece| match piece {
            Ok(text) => machine.text(text, events),
            Err(marker) => machine.marker(marker, events),
        });
    }

    /// Feeds text that is known to hold no marker, for instance the part of a token before a stop string.
    pub fn push_plain(&mut self, text: &str, events: &mut Vec<Event>) {
        let mut pending = String::new();
        self.detokenizer.flush(&mut pending);
        self.machine.text(&pending, events);
        self.machine.text(text, events);
    }

    /// Ends the answer: flushes what was held back.
    pub fn finish(mut self, finish: EngineFinish, events: &mut Vec<Event>) {
        let mut text = self.scanner.take_rest();
        self.detokenizer.flush(&mut text);
        self.machine.text(&text, events);
        self.machine.finish(finish, events);
    }
}

/// Parses a whole answer from its token ids (without the prompt).
#[must_use]
pub fn parse_answer(
    tokenizer: &Tokenizer,
    ids: &[u32],
    schemas: &ToolSchemas,
    options: ParseOptions,
    start: Start,
    finish: EngineFinish,
) -> Answer {
    let mut parser = OutputParser::new(tokenizer, schemas, options, start);
    let mut events = Vec::new();
    for &id in ids {
        parser.push(id, &mut events);
    }
    parser.finish(finish, &mut events);
    Answer::from_events(&events)
}
