//! Errors of reading and writing checkpoints.
//!
//! A [`Damage`] says which rule of the container is broken ([`Fault`]), where, what was expected and what was found; the
//! remedy follows from the fault. One damage is one rule, so that a verifier can tell kinds of damage apart.

use std::{fmt, io, path::PathBuf};

use crate::config::ConfigError;

/// What can go wrong with a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `config.json` cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A rule of the container is broken.
    #[error(transparent)]
    Damage(#[from] Damage),
    /// The operating system refuses.
    #[error("`{}`: cannot {action}: {source}; {}", path.display(), file_remedy(source))]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// A tensor is asked for that the checkpoint does not have.
    #[error("tensor `{tensor}`: not in the checkpoint ({location}); check that it belongs to this config.json")]
    NoTensor {
        /// The name asked for.
        tensor: String,
        /// Directory or origin of the checkpoint.
        location: String,
    },
    /// A value handed to this crate breaks a stated condition.
    #[error("{subject}: expected {expected}, found {found}; {remedy}")]
    Invalid {
        /// Tensor, file or field.
        subject: String,
        /// The condition.
        expected: String,
        /// The value.
        found: String,
        /// What to do.
        remedy: &'static str,
    },
}

impl Error {
    pub(crate) fn io(path: impl Into<PathBuf>, action: &'static str, source: io::Error) -> Self {
        Self::Io { path: path.into(), action, source }
    }

    #[allow(clippy::needless_pass_by_value, reason = "callers hand over temporaries")]
    pub(crate) fn invalid(
        subject: impl Into<String>,
        expected: impl Into<String>,
        found: impl ToString,
        remedy: &'static str,
    ) -> Self {
        Self::Invalid { subject: subject.into(), expected: expected.into(), found: found.to_string(), remedy }
    }
}

/// What to do when the operating system refuses to read or write a file.
pub fn file_remedy(error: &io::Error) -> &'static str {
    io_remedy(error.kind()).unwrap_or("check the path and the disk behind it")
}

/// What to do about an error of the operating system, where its kind tells.
pub fn io_remedy(kind: io::ErrorKind) -> Option<&'static str> {
    use io::ErrorKind as Kind;
    Some(match kind {
        Kind::NotFound => "check the path",
        Kind::PermissionDenied => "check who may read or write there",
        Kind::StorageFull | Kind::QuotaExceeded | Kind::FileTooLarge => "make room on that disk and repeat the command",
        Kind::ReadOnlyFilesystem => "name a place that can be written",
        Kind::IsADirectory => "name a file",
        Kind::NotADirectory => "name a directory",
        Kind::AlreadyExists => "name another one, or remove it",
        Kind::InvalidData => "it must be UTF-8 text",
        _ => return None,
    })
}

/// A broken rule of the container.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Damage {
    /// The rule.
    pub fault: Fault,
    /// File name.
    pub file: String,
    /// Tensor, when the rule is about one.
    pub tensor: Option<String>,
    /// What was expected.
    pub expected: String,
    /// What was found.
    pub found: String,
}

impl Damage {
    #[allow(clippy::needless_pass_by_value, reason = "callers hand over temporaries")]
    pub(crate) fn new(fault: Fault, file: &str, expected: impl Into<String>, found: impl ToString) -> Self {
        Self { fault, file: file.to_owned(), tensor: None, expected: expected.into(), found: found.to_string() }
    }

    /// Whether the checkpoint can be read in spite of it: an unreferenced `*.safetensors` whose name does not begin with
    /// `model` is kept out by the index, but other loaders may read it.
    pub fn is_tolerable(&self) -> bool {
        self.fault == Fault::StrayShard && !self.file.starts_with("model")
    }

    pub(crate) fn of(mut self, tensor: &str) -> Self {
        self.tensor = Some(tensor.to_owned());
        self
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.file)?;
        if let Some(tensor) = &self.tensor {
            write!(f, ", tensor `{tensor}`")?;
        }
        write!(f, ": expected {}, found {}; {}", self.expected, self.found, self.fault.remedy())
    }
}

/// Rules of the container that can be broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fault {
    /// The file is shorter than its first 8 bytes, its header or its tensors say.
    Truncated,
    /// The header's length is beyond the format's limit.
    HeaderLength,
    /// The header is not the JSON that the format asks for.
    HeaderJson,
    /// A name occurs twice in a header.
    DuplicateName,
    /// An element type outside the list.
    UnknownDType,
    /// A shape whose size does not fit 64 bits.
    SizeOverflow,
    /// A range that is not as long as dtype and shape say.
    RangeLength,
    /// Two tensors share bytes.
    Overlap,
    /// Bytes between tensors belong to none.
    Gap,
    /// Bytes after the last tensor.
    Trailing,
    /// The index is not the JSON that it should be.
    IndexJson,
    /// The index names a file that is not there.
    MissingShard,
    /// A `*.safetensors` file that the index does not name.
    StrayShard,
    /// The index names a tensor that its shard does not hold.
    MissingTensor,
    /// A shard holds a tensor that the index does not name.
    UnindexedTensor,
    /// A tensor lies in another shard than the index says.
    WrongShard,
    /// The same tensor lies in two shards.
    DuplicateTensor,
    /// Several shards and no index, or none at all.
    NoIndex,
    /// An FP8 weight without a proper scale, or a scale without a weight.
    Fp8Scale,
}

impl Fault {
    /// What to do about it.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Truncated => "the file is incomplete: fetch or write it again",
            Self::HeaderLength | Self::HeaderJson => {
                "the header is damaged or this is no safetensors file: fetch it again"
            }
            Self::DuplicateName => "names must be unique: write the file again with a correct tool",
            Self::UnknownDType => "convert the tensor to a supported type",
            Self::SizeOverflow | Self::RangeLength => "the header contradicts itself: fetch or write the file again",
            Self::Overlap | Self::Gap | Self::Trailing => {
                "tensors must cover the data exactly once: fetch or write the file again"
            }
            Self::IndexJson => "fetch model.safetensors.index.json again or write a new one",
            Self::MissingShard => "the checkpoint is incomplete: fetch the missing file",
            Self::StrayShard => {
                "loaders that read every *.safetensors would mix it in: remove it or add it to the index"
            }
            Self::MissingTensor | Self::UnindexedTensor | Self::WrongShard => {
                "index and shards belong to different versions: fetch both from one revision"
            }
            Self::DuplicateTensor => "remove one of the two, or the file that does not belong here",
            Self::NoIndex => "a checkpoint is one *.safetensors file, or several with a model.safetensors.index.json",
            Self::Fp8Scale => {
                "an F8_E4M3 weight needs an F32 weight_scale_inv with one value for each block of 128 x 128"
            }
        }
    }
}
