//! Errors of the quantizer.

use std::path::PathBuf;

use glimmer_checkpoint::file_remedy;

use crate::hessian::NonFinite;

/// Result of an operation of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can stop a quantization.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The source could not be read or the artifact not be written.
    #[error(transparent)]
    Checkpoint(#[from] glimmer_checkpoint::Error),
    /// The forward pass failed.
    #[error(transparent)]
    Model(#[from] glimmer_model::Error),
    /// A stage or an allocation of the backend failed.
    #[error(transparent)]
    Tensor(#[from] glimmer_tensor::Error),
    /// A weight or an activation is NaN or infinite.
    #[error(
        "`{what}`, row {row}, column {col}: expected a finite value, found NaN or infinity; the source is damaged: get the shard that holds this tensor anew, compare its hash with the publisher's, and begin again in another directory"
    )]
    NonFinite {
        /// The tensor.
        what: String,
        /// Row.
        row: usize,
        /// Column.
        col: usize,
    },
    /// An activation is NaN or infinite; nothing was averaged into the statistics.
    #[error(
        "{what}, row {row}, column {col}: expected a finite value, found NaN or infinity; a weight in front of it is damaged (the warnings of the copies name tensors with such values: get those shards anew) or this calibration sample overflows (leave it out)"
    )]
    NonFiniteActivation {
        /// The activations in question.
        what: String,
        /// Row: a token of the calibration data, counted over all samples.
        row: usize,
        /// Column.
        col: usize,
    },
    /// The operating system refuses.
    #[error("`{}`: cannot {action}: {source}; {}", path.display(), file_remedy(source))]
    Io {
        /// File or directory.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The source does not hold what its configuration says.
    #[error("source: {problem} ({count} such problems); quantize a complete checkpoint with its own config.json")]
    Source {
        /// The first problem.
        problem: String,
        /// How many there are.
        count: usize,
    },
    /// The source is an artifact already.
    #[error(
        "the source is quantized already ({found}); quantize the BF16 checkpoint (or the block-FP8 release) instead"
    )]
    AlreadyQuantized {
        /// What says so.
        found: String,
    },
    /// A field of config.json that should not be there in this form.
    #[error("config.json: {expected} expected, found {found}")]
    ConfigText {
        /// What was expected.
        expected: &'static str,
        /// What was found.
        found: String,
    },
    /// The artifact's directory holds an interrupted run, and nobody asked to go on with it.
    #[error(
        "`{}` holds an interrupted run; repeat its command with --resume to go on, or give a new directory",
        path.display()
    )]
    Unfinished {
        /// The directory.
        path: PathBuf,
    },
    /// The artifact's directory is in use.
    #[error("`{}` is not empty (it holds `{found}`) and is no interrupted run; give a new or empty directory", path.display())]
    NotEmpty {
        /// The directory.
        path: PathBuf,
        /// What is in it.
        found: String,
    },
    /// Source and artifact would lie one inside the other.
    #[error(
        "the artifact `{}` and its source `{source_path}` would lie one inside the other; give a directory outside the source",
        path.display()
    )]
    Nested {
        /// The artifact's directory.
        path: PathBuf,
        /// The source's.
        source_path: String,
    },
    /// Another run is at work in the directory.
    #[error("`{}` is being written by another run; wait until it has ended, or give another directory", path.display())]
    Busy {
        /// The directory.
        path: PathBuf,
    },
    /// An interrupted run was made from something else.
    #[error(
        "`{}` holds a run with another {what}: {differences}; repeat it as it was begun, or start anew in another directory",
        path.display()
    )]
    OtherRun {
        /// The directory.
        path: PathBuf,
        /// What differs: `source`, `recipe` or `calibration`.
        what: &'static str,
        /// The fields that differ, then and now.
        differences: String,
    },
    /// Calibration is needed and there is none.
    #[error("method `gptq` needs calibration samples, and there are none; give a calibration file or use method `rtn`")]
    NoCalibration,
    /// A calibration sample cannot be used.
    #[error("calibration sample {sample}: {problem}")]
    Calibration {
        /// Index of the sample.
        sample: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// A setting is out of its range.
    #[error("`{field}`: {expected} expected, found {found}")]
    Setting {
        /// The setting.
        field: &'static str,
        /// Its range.
        expected: &'static str,
        /// What was given.
        found: String,
    },
    /// The caller asked to stop. The directory can be resumed.
    #[error("interrupted; what is finished is kept: repeat the command with --resume to go on")]
    Interrupted,
}

impl Error {
    /// A value of `what` that is not finite.
    pub(crate) fn non_finite(what: impl Into<String>, first_row: usize, place: NonFinite) -> Self {
        Self::NonFinite { what: what.into(), row: first_row + place.row, col: place.col }
    }

    pub(crate) fn io(path: impl Into<PathBuf>, action: &'static str, source: std::io::Error) -> Self {
        Self::Io { path: path.into(), action, source }
    }
}
