//! What can be wrong with a `config.json`. Every variant names the key by its path (`text_config.index_kpool`).

use std::path::PathBuf;

/// A `config.json` that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read `{}`: {source}; give a directory that holds a config.json, or a config.json", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Not JSON, or not a JSON object.
    #[error("config.json: expected one JSON object, found {found}; restore the file from its source")]
    Json {
        /// What the JSON reader says.
        found: String,
    },
    /// A required key is absent or null.
    #[error(
        "config.json: key `{key}` is missing; expected {expected}. It has no default: take it from the model's own config"
    )]
    Missing {
        /// Path of the key.
        key: String,
        /// What should be there.
        expected: &'static str,
    },
    /// A key holds a value of the wrong kind.
    #[error("config.json: key `{key}`: expected {expected}, found {found}; correct the value")]
    Type {
        /// Path of the key.
        key: String,
        /// The kind of value that belongs there.
        expected: &'static str,
        /// The value (shortened).
        found: String,
    },
    /// A value, or a combination of values, that describes no model of this family or one that is not supported.
    #[error("config.json: key `{key}`: expected {expected}, found {found}; {remedy}")]
    Value {
        /// Path of the key.
        key: String,
        /// The values that are accepted.
        expected: String,
        /// The value.
        found: String,
        /// What to do.
        remedy: &'static str,
    },
}

impl ConfigError {
    /// Path of the offending key, when the error concerns one key.
    pub fn key(&self) -> Option<&str> {
        match self {
            Self::Missing { key, .. } | Self::Type { key, .. } | Self::Value { key, .. } => Some(key),
            Self::Read { .. } | Self::Json { .. } => None,
        }
    }
}
