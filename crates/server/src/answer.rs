//! One answer on its way out: tokens to reasoning, content and tool calls.
//!
//! [`AnswerState`] puts the stop strings in front of the parser and keeps the counts. It is fed with the engine's events
//! and yields the parser's; how those look on the wire is the business of each API. Invariant: the joined events do not
//! depend on how the engine cut its tokens into events.

use glimmer_engine::request::{FinishReason, TokenEvent};
use glimmer_text::{
    Detokenizer, EngineFinish, Event, OutputParser, ParseOptions, Start, Tokenizer, ToolMode, ToolSchemas,
};

use crate::error::ApiError;
use crate::stops::{Piece, StopFilter};

/// What shapes the text of all answers to a request.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Switches of the parser.
    pub parse: ParseOptions,
    /// Declared tools.
    pub schemas: ToolSchemas,
    /// What the prompt left open.
    pub start: Start,
    /// Stop strings.
    pub stop: Vec<String>,
    /// Keep the stop string, or the stop token's text.
    pub include_stop: bool,
    /// Tokens before stop strings are looked for.
    pub min_tokens: u32,
    /// Leave special tokens out of the text.
    pub skip_special: bool,
    /// Report reasoning.
    pub include_reasoning: bool,
    /// The client named the function to call.
    pub named_tool: bool,
}

impl Rules {
    /// Rules of plain text: no reasoning, no calls.
    #[must_use]
    pub fn plain(stop: Vec<String>, include_stop: bool, min_tokens: u32, skip_special: bool) -> Self {
        Self {
            parse: ParseOptions { reasoning: false, tools: ToolMode::Off, ..ParseOptions::default() },
            schemas: ToolSchemas::default(),
            start: Start::Content,
            stop,
            include_stop,
            min_tokens,
            skip_special,
            include_reasoning: true,
            named_tool: false,
        }
    }

    fn is_plain(&self) -> bool {
        !self.parse.reasoning && self.parse.tools == ToolMode::Off
    }
}

/// How an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// OpenAI's `finish_reason`.
    pub reason: &'static str,
    /// What stopped it, other than the model's own end tokens.
    pub stop: Option<StopCause>,
}

/// What the client asked to stop at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// One of the stop strings.
    Text(String),
    /// One of the stop tokens.
    Token(u32),
}

/// The state of one answer.
#[derive(Debug)]
pub struct AnswerState<'a> {
    rules: &'a Rules,
    text: Text<'a>,
    filter: Option<StopFilter<'a>>,
    pieces: Vec<Piece>,
    think_end: [Option<u32>; 2],
    in_reasoning: bool,
    calls: usize,
    /// Those that are complete.
    ended_calls: usize,
    /// Tokens of the answer that count.
    pub tokens: u64,
    /// Those of them that are reasoning.
    pub reasoning_tokens: u64,
    /// Set by the event that ended the answer.
    pub ending: Option<Ending>,
}

/// Where tokens become text.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a box would be one more place to fetch for every token")]
enum Text<'a> {
    Parsed(Option<OutputParser<'a>>),
    Plain(Detokenizer<'a>),
}

impl<'a> AnswerState<'a> {
    /// The state before the first token.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer, rules: &'a Rules) -> Self {
        let text = if rules.is_plain() {
            Text::Plain(tokenizer.detokenizer(rules.skip_special))
        } else {
            Text::Parsed(Some(OutputParser::new(tokenizer, &rules.schemas, rules.parse, rules.start)))
        };
        let filter = (!rules.stop.is_empty())
            .then(|| StopFilter::new(tokenizer, &rules.stop, rules.include_stop, rules.skip_special));
        let end = |literal| tokenizer.added_id(literal).ok();
        Self {
            rules,
            text,
            filter,
            pieces: Vec::new(),
            think_end: [end("</think>"), end("<tool_call>")],
            in_reasoning: rules.parse.reasoning && rules.start == Start::Reasoning,
            calls: 0,
            ended_calls: 0,
            tokens: 0,
            reasoning_tokens: 0,
            ending: None,
        }
    }

    /// Feeds what a step produced and appends what it makes visible. Returns how many of the step's tokens count: all
    /// but those behind a stop string. Once [`AnswerState::ending`] is set, nothing more may be fed.
    ///
    /// # Errors
    /// When the engine failed the request.
    pub fn feed(&mut self, step: &TokenEvent, events: &mut Vec<Event>) -> Result<usize, ApiError> {
        let first = events.len();
        let ends_by_token = matches!(
            step.finish.as_ref().map(|finish| &finish.reason),
            Some(FinishReason::EndToken | FinishReason::StopToken(_))
        );
        for (index, token) in step.tokens.iter().enumerate() {
            self.count(token.id);
            if ends_by_token && index + 1 == step.tokens.len() && !self.rules.include_stop {
                break;
            }
            let match_now = self.tokens > u64::from(self.rules.min_tokens);
            if let Some(stop) = self.push(token.id, match_now, events) {
                let cause = StopCause::Text(self.rules.stop[stop].clone());
                self.end(EngineFinish::ClientStop, Some(cause), events);
                self.visible(first, events);
                return Ok(index + 1);
            }
        }
        if let Some(finish) = &step.finish {
            if let Some(filter) = &mut self.filter {
                filter.finish(&mut self.pieces);
                self.drain_pieces(events);
            }
            match &finish.reason {
                FinishReason::EndToken => self.end(EngineFinish::Stop, None, events),
                FinishReason::StopToken(id) => self.end(EngineFinish::ClientStop, Some(StopCause::Token(*id)), events),
                FinishReason::Length => self.end(EngineFinish::Length, None, events),
                FinishReason::Abort => self.end(EngineFinish::Abort, None, events),
                FinishReason::Error(error) => return Err(error.into()),
            }
        }
        self.visible(first, events);
        Ok(step.tokens.len())
    }

    /// Whether the next token is reasoning.
    #[must_use]
    pub fn in_reasoning(&self) -> bool {
        self.in_reasoning
    }

    fn count(&mut self, id: u32) {
        self.tokens += 1;
        if self.in_reasoning {
            self.reasoning_tokens += 1;
            self.in_reasoning = !self.think_end.contains(&Some(id));
        }
    }

    fn push(&mut self, id: u32, match_now: bool, events: &mut Vec<Event>) -> Option<usize> {
        let Some(filter) = &mut self.filter else {
            self.text.token(id, events);
            return None;
        };
        let stop = filter.push(id, match_now, &mut self.pieces);
        self.drain_pieces(events);
        stop
    }

    fn drain_pieces(&mut self, events: &mut Vec<Event>) {
        for piece in self.pieces.drain(..) {
            match piece {
                Piece::Token(id) => self.text.token(id, events),
                Piece::Text(text) => self.text.plain(&text, events),
            }
        }
    }

    fn end(&mut self, finish: EngineFinish, stop: Option<StopCause>, events: &mut Vec<Event>) {
        self.text.finish(finish, events);
        let (started, ended) = calls_of(events);
        let called = self.calls + started > 0;
        let cut = finish == EngineFinish::ClientStop && self.calls + started > self.ended_calls + ended;
        let reason = match finish {
            EngineFinish::Stop | EngineFinish::ClientStop if called && !cut && !self.rules.named_tool => "tool_calls",
            EngineFinish::Stop | EngineFinish::ClientStop => "stop",
            EngineFinish::Length => "length",
            EngineFinish::Abort => "abort",
        };
        self.ending = Some(Ending { reason, stop });
    }

    /// Counts calls and drops reasoning that the client does not want.
    fn visible(&mut self, first: usize, events: &mut Vec<Event>) {
        let (started, ended) = calls_of(&events[first..]);
        self.calls += started;
        self.ended_calls += ended;
        if !self.rules.include_reasoning {
            let mut index = 0;
            events.retain(|event| {
                index += 1;
                index <= first || !matches!(event, Event::Reasoning(_))
            });
        }
    }
}

/// Calls that begin and that end among `events`.
fn calls_of(events: &[Event]) -> (usize, usize) {
    events.iter().fold((0, 0), |(started, ended), event| match event {
        Event::CallStart { .. } => (started + 1, ended),
        Event::CallEnd { .. } => (started, ended + 1),
        _ => (started, ended),
    })
}

impl Text<'_> {
    fn token(&mut self, id: u32, events: &mut Vec<Event>) {
        match self {
            Self::Parsed(Some(parser)) => parser.push(id, events),
            Self::Parsed(None) => {}
            Self::Plain(detokenizer) => {
                let mut text = String::new();
                detokenizer.push(id, &mut text);
                append_content(text, events);
            }
        }
    }

    fn plain(&mut self, text: &str, events: &mut Vec<Event>) {
        match self {
            Self::Parsed(Some(parser)) => parser.push_plain(text, events),
            Self::Parsed(None) => {}
            Self::Plain(detokenizer) => {
                let mut pending = String::new();
                detokenizer.flush(&mut pending);
                pending.push_str(text);
                append_content(pending, events);
            }
        }
    }

    fn finish(&mut self, finish: EngineFinish, events: &mut Vec<Event>) {
        match self {
            Self::Parsed(parser) => {
                if let Some(parser) = parser.take() {
                    parser.finish(finish, events);
                }
            }
            Self::Plain(detokenizer) => {
                let mut rest = String::new();
                detokenizer.flush(&mut rest);
                append_content(rest, events);
            }
        }
    }
}

fn append_content(text: String, events: &mut Vec<Event>) {
    if text.is_empty() {
        return;
    }
    match events.last_mut() {
        Some(Event::Content(last)) => last.push_str(&text),
        _ => events.push(Event::Content(text)),
    }
}
