//! Errors of the engine.

/// What can go wrong with a request or a step.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The forward pass failed.
    #[error(transparent)]
    Model(#[from] glimmer_model::Error),
    /// A prompt without tokens.
    #[error("prompt: expected at least one token, found none; render the chat template or give a text")]
    EmptyPrompt,
    /// The prompt leaves no room for an answer.
    #[error(
        "prompt: {prompt} tokens, but the context holds {context} and at least one must be left for the answer; shorten the prompt or serve with a longer context"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens of the context.
        context: usize,
    },
    /// A token id that does not exist.
    #[error("prompt: token {index} is {token}, but ids end at {last}; encode with the tokenizer of this model")]
    UnknownToken {
        /// Index in the prompt.
        index: usize,
        /// The token.
        token: u32,
        /// Largest id.
        last: u32,
    },
    /// Image features and placeholders do not match.
    #[error(
        "prompt: {placeholders} image placeholders, but features for {features} tokens; expand each placeholder to the tokens of its picture"
    )]
    ImageTokens {
        /// Placeholder tokens in the prompt.
        placeholders: usize,
        /// Rows of features.
        features: usize,
    },
    /// Features came to a model without a vision tower.
    #[error("the model has no vision tower (`vision_config` is absent); send text only")]
    NoVision,
    /// A request field is out of its range.
    #[error("`{field}`: expected {expected}, found {found}")]
    Parameter {
        /// Name of the field.
        field: &'static str,
        /// The range.
        expected: String,
        /// The value.
        found: String,
    },
    /// The request needs more than all pools hold, so waiting would be in vain.
    #[error(
        "the sequence needs {need} pages of the cache, and there are {available} in all; ask for fewer tokens or serve with more pages"
    )]
    NeverFits {
        /// Pages needed.
        need: usize,
        /// Pages in all.
        available: usize,
    },
    /// Logits that are all minus infinity or not numbers.
    #[error("no token can be chosen at position {position}: {reason}")]
    NoToken {
        /// Position of the token to choose.
        position: usize,
        /// Why.
        reason: &'static str,
    },
    /// Steps cannot be recorded.
    #[error("recording steps in {file}: {reason}")]
    Record {
        /// The file.
        file: std::path::PathBuf,
        /// Why.
        reason: String,
    },
    /// The engine's thread failed.
    #[error("the engine's thread: {0}")]
    Thread(String),
    /// The request failed, and nothing else.
    #[error(transparent)]
    Failed(crate::request::RequestError),
    /// An invariant of the engine does not hold; a defect of the program.
    #[error("the engine contradicts itself: expected that {0}; report this with the recorded steps")]
    Broken(&'static str),
    /// Settings that cannot work.
    #[error("setting `{setting}`: expected {expected}, found {found}")]
    Setting {
        /// Name of the setting.
        setting: &'static str,
        /// What was expected.
        expected: String,
        /// The value.
        found: String,
    },
}

impl EngineError {
    /// The field of a request that the error is about; `prompt` where it is about no other.
    pub fn field(&self) -> &'static str {
        match self {
            Self::Parameter { field, .. } => field,
            _ => "prompt",
        }
    }

    #[allow(clippy::needless_pass_by_value, reason = "callers hand over numbers")]
    pub(crate) fn parameter(field: &'static str, expected: impl Into<String>, found: impl ToString) -> Self {
        Self::Parameter { field, expected: expected.into(), found: found.to_string() }
    }
}
