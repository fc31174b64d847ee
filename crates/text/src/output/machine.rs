//! The state machine behind the parser.
//!
//! It reads an alternation of text and markers. Besides the grammar it repairs what models get wrong under load: a call
//! that begins inside reasoning, a tag that is missing, doubled or of the wrong kind. Two rules bound the repairs: a name
//! is reported only when it is complete, and arguments are never closed on behalf of a model that was cut off.

use super::markers::Marker;
use super::schema::ToolSchemas;
use super::{EngineFinish, Event, ParseOptions, Start, ToolMode, UnknownTools};
use crate::python_json::{write_escaped, write_string};

#[derive(Debug)]
pub(super) struct Machine<'a> {
    schemas: &'a ToolSchemas,
    options: ParseOptions,
    state: State,
    /// Calls reported so far.
    reported: usize,
    /// Whether any call was seen, reported or not.
    saw_call: bool,
    /// White space at the start of the content, not reported while nothing else follows.
    blank_content: String,
    saw_content: bool,
    /// The reasoning of an answer that has not closed it.
    open_reasoning: Option<String>,
}

#[derive(Debug)]
enum State {
    Reasoning,
    Content,
    /// Behind `<tool_call>`; `earlier` is the name before a second `<tool_call>`.
    Name {
        text: String,
        earlier: Option<String>,
    },
    Arguments {
        call: Call,
        stage: Stage,
    },
}

#[derive(Debug)]
struct Call {
    /// Index among the reported calls; `None` for a call that is dropped.
    index: Option<usize>,
    name: String,
    /// Whether an argument was written.
    begun: bool,
}

#[derive(Debug)]
enum Stage {
    /// Between arguments; text here is a key whose `<arg_key>` is missing.
    Between(String),
    Key(String),
    /// Behind a key; text here is a value whose `<arg_value>` is missing.
    AfterKey {
        key: String,
        text: String,
    },
    Value {
        key: String,
        text: String,
        streamed: bool,
    },
}

impl<'a> Machine<'a> {
    pub(super) fn new(schemas: &'a ToolSchemas, options: ParseOptions, start: Start) -> Self {
        let reasoning = options.reasoning && start == Start::Reasoning;
        Self {
            schemas,
            options,
            state: if reasoning { State::Reasoning } else { State::Content },
            reported: 0,
            saw_call: false,
            blank_content: String::new(),
            saw_content: false,
            open_reasoning: reasoning.then(String::new),
        }
    }

    pub(super) fn text(&mut self, text: &str, events: &mut Vec<Event>) {
        if text.is_empty() {
            return;
        }
        match &mut self.state {
            State::Reasoning => {
                if let Some(open) = &mut self.open_reasoning {
                    open.push_str(text);
                }
                match events.last_mut() {
                    Some(Event::Reasoning(last)) => last.push_str(text),
                    _ => events.push(Event::Reasoning(text.to_owned())),
                }
            }
            State::Content => self.content(text, events),
            State::Name { text: name, .. } => name.push_str(text),
            State::Arguments { call, stage } => match stage {
                Stage::Between(loose) => loose.push_str(text),
                Stage::Key(key) => key.push_str(text),
                Stage::AfterKey { text: value, .. } => value.push_str(text),
                Stage::Value { streamed: true, .. } => {
                    let mut fragment = String::new();
                    write_escaped(text, false, &mut fragment);
                    call.emit(&fragment, events);
                }
                Stage::Value { text: value, .. } => value.push_str(text),
            },
        }
    }

    pub(super) fn marker(&mut self, marker: Marker, events: &mut Vec<Event>) {
        let off = if marker.is_reasoning() { !self.options.reasoning } else { self.options.tools == ToolMode::Off };
        if off {
            return self.text(marker.literal(), events);
        }
        match std::mem::replace(&mut self.state, State::Content) {
            State::Reasoning => self.in_reasoning(marker, events),
            State::Content => self.in_content(marker),
            State::Name { text, earlier } => self.in_name(marker, text, earlier, events),
            State::Arguments { call, stage } => self.in_arguments(marker, call, stage, events),
        }
    }

    pub(super) fn finish(&mut self, finish: EngineFinish, events: &mut Vec<Event>) {
        let by_itself = finish == EngineFinish::Stop;
        if let State::Name { text, earlier } = std::mem::replace(&mut self.state, State::Content) {
            // Cut off by the limit, the name may be half a name.
            let name = if text.trim().is_empty() { earlier.unwrap_or_default() } else { text };
            if by_itself && !name.trim().is_empty() {
                let call = self.start_call(name.trim(), events);
                self.end_call(&call, events);
            }
        }
        if !self.saw_content && !self.saw_call && !self.blank_content.is_empty() {
            events.push(Event::Content(std::mem::take(&mut self.blank_content)));
        }
        if let Some(text) = self.open_reasoning.take()
            && by_itself
            && !self.saw_call
            && self.options.answer_without_think_is_content
            && !text.trim().is_empty()
        {
            events.push(Event::Content(text));
        }
    }

    fn content(&mut self, text: &str, events: &mut Vec<Event>) {
        if !self.saw_content && text.trim().is_empty() {
            self.blank_content.push_str(text);
            return;
        }
        self.saw_content = true;
        let text = std::mem::take(&mut self.blank_content) + text;
        match events.last_mut() {
            Some(Event::Content(last)) => last.push_str(&text),
            _ => events.push(Event::Content(text)),
        }
    }

    fn in_reasoning(&mut self, marker: Marker, events: &mut Vec<Event>) {
        match marker {
            Marker::EndThink => self.open_reasoning = None,
            Marker::CallOpen => self.open_call(),
            Marker::Think => self.state = State::Reasoning,
            stray => {
                self.state = State::Reasoning;
                self.text(stray.literal(), events);
            }
        }
    }

    /// Stray closing tags and tags of arguments are markup without a meaning here; they are dropped.
    fn in_content(&mut self, marker: Marker) {
        match marker {
            Marker::Think => self.state = State::Reasoning,
            Marker::CallOpen => self.open_call(),
            _ => {}
        }
    }

    fn open_call(&mut self) {
        self.open_reasoning = None;
        self.saw_call = true;
        if !self.saw_content {
            self.blank_content.clear();
        }
        self.state = State::Name { text: String::new(), earlier: None };
    }

    fn in_name(&mut self, marker: Marker, text: String, earlier: Option<String>, events: &mut Vec<Event>) {
        match marker {
            Marker::KeyOpen | Marker::CallClose | Marker::ValueOpen => {
                if let Some(name) = earlier {
                    let call = self.start_call(name.trim(), events);
                    self.end_call(&call, events);
                }
                let name = text.trim();
                if name.is_empty() {
                    // Nothing was called; arguments without a name are swallowed.
                    if marker != Marker::CallClose {
                        let call = Call { index: None, name: String::new(), begun: false };
                        self.state = State::Arguments { call, stage: Stage::Key(String::new()) };
                    }
                    return;
                }
                let call = self.start_call(name, events);
                match marker {
                    Marker::CallClose => self.end_call(&call, events),
                    Marker::KeyOpen => self.state = State::Arguments { call, stage: Stage::Key(String::new()) },
                    _ => self.state = State::Arguments { call, stage: Stage::Between(String::new()) },
                }
            }
            // The opening tag of the key is missing, or is a second <tool_call>.
            Marker::KeyClose => {
                let (name, key) = match earlier {
                    Some(name) => (name, text),
                    None => self.split_name(&text),
                };
                let call = self.start_call(name.trim(), events);
                let key = key.trim().to_owned();
                let stage = if key.is_empty() {
                    Stage::Between(String::new())
                } else {
                    Stage::AfterKey { key, text: String::new() }
                };
                self.state = State::Arguments { call, stage };
            }
            Marker::CallOpen if !text.trim().is_empty() => {
                if let Some(name) = earlier {
                    let call = self.start_call(name.trim(), events);
                    self.end_call(&call, events);
                }
                self.state = State::Name { text: String::new(), earlier: Some(text) };
            }
            Marker::CallOpen | Marker::ValueClose | Marker::Think | Marker::EndThink => {
                self.state = State::Name { text, earlier };
            }
        }
    }

    /// Splits text in which name and key run together: at the end of the longest declared name, else at white space.
    fn split_name(&self, text: &str) -> (String, String) {
        let text = text.trim();
        let cut = match self.schemas.longest_prefix(text) {
            Some(name) => name.len(),
            None => text.find(char::is_whitespace).unwrap_or(text.len()),
        };
        (text[..cut].to_owned(), text[cut..].to_owned())
    }

    fn in_arguments(&mut self, marker: Marker, mut call: Call, stage: Stage, events: &mut Vec<Event>) {
        let stage = match (stage, marker) {
            // Inside a value only its end and the tags that can follow a value are markup.
            (Stage::Value { key, text, streamed }, Marker::ValueClose | Marker::KeyOpen | Marker::CallClose) => {
                if streamed {
                    call.emit("\"", events);
                } else {
                    self.argument(&mut call, &key, &text, events);
                }
                return self.after_argument(marker, call, events);
            }
            (Stage::Value { key, text, streamed }, other) => {
                self.state = State::Arguments { call, stage: Stage::Value { key, text, streamed } };
                return self.text(other.literal(), events);
            }
            (Stage::AfterKey { key, text }, Marker::ValueClose | Marker::KeyOpen | Marker::CallClose) => {
                if marker == Marker::ValueClose || !text.trim().is_empty() {
                    self.argument(&mut call, &key, &text, events);
                }
                return self.after_argument(marker, call, events);
            }
            (Stage::Between(_) | Stage::Key(_), Marker::CallClose) => return self.end_call(&call, events),
            (_, Marker::CallOpen) => {
                self.end_call(&call, events);
                return self.open_call();
            }
            (Stage::AfterKey { key, .. } | Stage::Key(key), Marker::ValueOpen) => {
                self.begin_value(&mut call, key.trim(), events)
            }
            (Stage::Between(key) | Stage::Key(key), Marker::KeyClose) if !key.trim().is_empty() => {
                Stage::AfterKey { key: key.trim().to_owned(), text: String::new() }
            }
            (Stage::Between(_), Marker::KeyOpen) => Stage::Key(String::new()),
            (stage, _) => stage,
        };
        self.state = State::Arguments { call, stage };
    }

    fn after_argument(&mut self, marker: Marker, call: Call, events: &mut Vec<Event>) {
        match marker {
            Marker::CallClose => self.end_call(&call, events),
            Marker::KeyOpen => self.state = State::Arguments { call, stage: Stage::Key(String::new()) },
            _ => self.state = State::Arguments { call, stage: Stage::Between(String::new()) },
        }
    }

    fn begin_value(&self, call: &mut Call, key: &str, events: &mut Vec<Event>) -> Stage {
        let streamed = self.schemas.is_string(&call.name, key);
        if streamed {
            call.begin_argument(key, events);
            call.emit("\"", events);
        }
        Stage::Value { key: key.to_owned(), text: String::new(), streamed }
    }

    fn argument(&self, call: &mut Call, key: &str, text: &str, events: &mut Vec<Event>) {
        call.begin_argument(key, events);
        call.emit(&self.schemas.typed(&call.name, key, text), events);
    }

    /// Reports a call, unless the options or its name forbid it.
    fn start_call(&mut self, name: &str, events: &mut Vec<Event>) -> Call {
        let known = self.schemas.contains(name);
        let forwarded = self.options.unknown_tools == UnknownTools::Forward && is_well_formed(name);
        let allowed = self.options.tools == ToolMode::Parse && !(self.options.single_call && self.reported > 0);
        let index = (allowed && (known || forwarded)).then_some(self.reported);
        if let Some(index) = index {
            self.reported += 1;
            events.push(Event::CallStart { index, name: name.to_owned() });
        }
        Call { index, name: name.to_owned(), begun: false }
    }

    fn end_call(&mut self, call: &Call, events: &mut Vec<Event>) {
        call.emit(if call.begun { "}" } else { "{}" }, events);
        if let Some(index) = call.index {
            events.push(Event::CallEnd { index });
        }
        self.state = State::Content;
    }
}

impl Call {
    fn begin_argument(&mut self, key: &str, events: &mut Vec<Event>) {
        let mut fragment = if self.begun { ", " } else { "{" }.to_owned();
        self.begun = true;
        write_string(key, false, &mut fragment);
        fragment.push_str(": ");
        self.emit(&fragment, events);
    }

    fn emit(&self, fragment: &str, events: &mut Vec<Event>) {
        let Some(index) = self.index else { return };
        match events.last_mut() {
            Some(Event::CallArguments { index: last, fragment: text }) if *last == index => text.push_str(fragment),
            _ => events.push(Event::CallArguments { index, fragment: fragment.to_owned() }),
        }
    }
}

/// Names that may be forwarded although no tool has them.
fn is_well_formed(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.:/-".contains(&byte);
    (1..=128).contains(&name.len()) && name.bytes().all(allowed)
}
