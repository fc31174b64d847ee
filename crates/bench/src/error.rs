//! Errors of the harness.

use glimmer_text::TextError;

/// What can go wrong while evaluating.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// A line of a task or document file is not what it should be.
    #[error("{file}, line {line}: {problem}")]
    Line {
        /// Name of the file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// What is wrong, with the key.
        problem: String,
    },
    /// A task file without items.
    #[error("{file} holds no items; expected one JSON object a line")]
    Empty {
        /// Name of the file.
        file: String,
    },
    /// Templates, tokenizer or messages.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The model, or something it was given, failed.
    #[error("{what}: {source}")]
    Model {
        /// Item, document or file.
        what: String,
        /// The error itself.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Two models that cannot be compared.
    #[error(
        "{what}: the reference has {reference}, the model under test has {found}; both must be the same architecture and vocabulary"
    )]
    Mismatch {
        /// What differs.
        what: String,
        /// In the reference.
        reference: usize,
        /// In the model under test.
        found: usize,
    },
    /// A model returned something that is not a number.
    #[error("document {document}, position {position}: the model's scores are not finite")]
    NotFinite {
        /// Id of the document.
        document: String,
        /// Position in it.
        position: usize,
    },
}

impl BenchError {
    /// Wraps an error of the model.
    pub fn model(what: impl Into<String>, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Model { what: what.into(), source: source.into() }
    }
}
