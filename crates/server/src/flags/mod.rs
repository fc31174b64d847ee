//! Flags of `serve`, named as `vllm serve` names them.
//!
//! [`table`] lists every flag once, with its kind, default and help; `value` reads the text of a value and `line` a command
//! line; [`parse`] turns that, the environment and a configuration file into [`Settings`], each with its origin; [`config`]
//! makes a typed [`ServeConfig`] of them and [`check`] holds the rules between flags. Invariant: everything that can be wrong
//! with the flags alone is found before a weight is read.

pub mod check;
pub mod config;
mod generation;
mod help;
mod line;
pub mod parse;
pub mod speculative;
pub mod table;
mod value;
pub mod yaml;

pub use check::{Device, ModelShape};
pub use config::ServeConfig;
pub use help::help;
pub use parse::{Origin, Setting, Settings};
pub use speculative::Speculative;

/// Why flags were refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlagError {
    /// A flag that does not exist, lacks its value or has one that it does not take.
    #[error("{0}")]
    Usage(String),
    /// Flags that do not go together, or not with the model.
    #[error("error: {0}")]
    Conflict(String),
}

impl FlagError {
    /// What the process should exit with.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Conflict(_) => 1,
        }
    }
}

/// Fails with a conflict.
pub(crate) fn conflict<T>(message: impl Into<String>) -> Result<T, FlagError> {
    Err(FlagError::Conflict(message.into()))
}
