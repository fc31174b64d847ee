//! Text in, tokens out, and back: tokenizer, incremental detokenizer, chat template and the parser of a model's answer.
//!
//! The path of a conversation is `Message` -> [`ChatTemplate`] -> [`ChatFormat::prompt`] -> token ids, and of an answer
//! token ids -> [`OutputParser`] -> reasoning, content and tool calls. Two invariants hold along it:
//!
//! * Text supplied by a user never becomes a control token. The literals of *all* added tokens (also those which the
//!   tokenizer file does not flag as special, such as `<think>` or `<tool_call>`) are control tokens only where the
//!   template wrote them, and are spelled out as ordinary text everywhere else.
//! * Streaming equals not streaming: the pieces that come out of the detokenizer or of the parser, joined, are the bytes
//!   that the whole answer yields at once.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::needless_pass_by_value, reason = "test helpers take JSON literals by value"))]

mod added;
mod budget;
mod detokenizer;
mod error;
mod grammar;
mod media;
mod message;
mod output;
mod prompt;
mod protect;
mod python_json;
mod shims;
mod template;
mod tokenizer;

pub use added::{AddedToken, AddedTokens};
pub use budget::Budget;
pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use grammar::GrammarCompiler;
pub use media::{DataUrl, VideoFrame};
pub use message::{Content, MediaSource, Message, Part, Role, ToolCall, parse_messages};
pub use output::{
    Answer, AnswerCall, EngineFinish, Event, OutputParser, ParseOptions, Start, ToolMode, ToolSchemas, UnknownTools,
    parse_answer,
};
pub use prompt::{ChatFormat, ChatInput, Prompt};
pub use python_json::{JsonStyle, python_float, python_json};
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;
