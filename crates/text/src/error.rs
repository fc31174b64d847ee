//! Everything that can go wrong between messages and tokens.

use std::path::PathBuf;

/// An error of the text layer; each variant names the place, what was expected and what was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file of the model directory could not be read.
    #[error("cannot read {path}: {source}; the model directory must hold this file")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// `tokenizer.json` is not a tokenizer this program can run.
    #[error("tokenizer.json: {problem}; expected {expected}")]
    TokenizerFile {
        /// What is wrong, with the key or token.
        problem: String,
        /// What the program needs.
        expected: &'static str,
    },
    /// The tokenizer failed on a text.
    #[error("the tokenizer refused a text of {bytes} bytes: {problem}")]
    Encode {
        /// Length of the text in bytes.
        bytes: usize,
        /// The library's message.
        problem: String,
    },
    /// A text has more tokens than its [`crate::Budget`].
    #[error("the text has at least {at_least} tokens, and {most} are the most")]
    TooManyTokens {
        /// The budget.
        most: usize,
        /// What is certain so far.
        at_least: usize,
    },
    /// Nobody waits for the tokens any more.
    #[error("nobody waits for the tokens any more")]
    Abandoned,
    /// A token that the caller needs is not in the vocabulary.
    #[error("tokenizer.json has no token {token:?}; is it the tokenizer of this model?")]
    MissingToken {
        /// Literal of the token.
        token: String,
    },
    /// The chat template does not parse.
    #[error("chat template, line {line}: {problem}")]
    TemplateSyntax {
        /// Line in the template, from 1; 0 when unknown.
        line: usize,
        /// What the parser said.
        problem: String,
    },
    /// The chat template failed while rendering.
    #[error("chat template, line {line}: {problem}")]
    TemplateRender {
        /// Line in the template, from 1; 0 when unknown.
        line: usize,
        /// What happened.
        problem: String,
    },
    /// The chat template itself refused the conversation by `raise_exception`.
    #[error("the chat template refuses this conversation: {message}")]
    TemplateRefused {
        /// The template's own words.
        message: String,
    },
    /// The chat template used up its budget of instructions.
    #[error("the chat template ran longer than {fuel} instructions; shorten the conversation or raise the limit")]
    TemplateFuel {
        /// The budget.
        fuel: u64,
    },
    /// A chat message does not have the expected form.
    #[error("{path}: expected {expected}, found {found}")]
    Message {
        /// Where, for example `messages[2].tool_calls[0].function.arguments`.
        path: String,
        /// What belongs there.
        expected: String,
        /// What is there.
        found: String,
    },
    /// The template tore the marks around user text apart, so its provenance is unknown.
    #[error(
        "the chat template cuts through user text near byte {position} of the rendered prompt; such a template is not supported"
    )]
    TornUserText {
        /// Byte offset in the rendered text.
        position: usize,
    },
    /// No private-use character is left to mark user text with.
    #[error("the conversation uses every private-use character of Unicode; none is left to mark its text with")]
    NoFreeMarker,
    /// The prompt shows another number of images or videos than the caller supplied.
    #[error(
        "the prompt has {placeholders} {kind} placeholder(s) but {supplied} {kind}(s) were supplied; does the template render {kind} parts?"
    )]
    MediaCount {
        /// `image` or `video`.
        kind: &'static str,
        /// Placeholders in the rendered prompt.
        placeholders: usize,
        /// Items given by the caller.
        supplied: usize,
    },
    /// An image or a video frame that would occupy no token.
    #[error("{kind} {index} occupies 0 tokens; expected at least 1")]
    EmptyMedia {
        /// `image` or `video`.
        kind: &'static str,
        /// Index in the order of the conversation, from 0.
        index: usize,
    },
    /// A `data:` URL that cannot be decoded.
    #[error("data URL: {problem}; expected data:<type>/<subtype>;base64,<data>")]
    DataUrl {
        /// What is wrong.
        problem: String,
    },
    /// Grammars cannot be made for this tokenizer.
    #[error("grammars: {problem}")]
    Grammar {
        /// What is wrong.
        problem: String,
    },
}
