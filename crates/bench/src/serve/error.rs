//! What can go wrong in a load test as a whole. What goes wrong with one request is part of its outcome.

/// Why a load test cannot be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeBenchError {
    /// A flag or a combination of flags.
    #[error("{flag}: {problem}")]
    Flag {
        /// The flag with its dashes.
        flag: &'static str,
        /// What is wrong and what to do.
        problem: String,
    },
    /// A file of prompts.
    #[error("{file}, line {line}: {problem}")]
    Line {
        /// The file as given.
        file: String,
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
    /// A file that cannot be read.
    #[error("cannot read {file}: {source}")]
    Read {
        /// The file as given.
        file: String,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The server cannot be reached or does not speak the protocol.
    #[error("{url}: {problem}")]
    Server {
        /// What was asked.
        url: String,
        /// What came back, and what to do.
        problem: String,
    },
    /// Tokenizer or template.
    #[error(transparent)]
    Text(#[from] glimmer_text::TextError),
}

impl ServeBenchError {
    pub(crate) fn flag(flag: &'static str, problem: impl Into<String>) -> Self {
        Self::Flag { flag, problem: problem.into() }
    }
}
