//! Errors of the forward pass.

/// What can go wrong when a model is loaded or a step is run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The checkpoint could not be read.
    #[error(transparent)]
    Checkpoint(#[from] glimmer_checkpoint::Error),
    /// A stage or an allocation failed.
    #[error(transparent)]
    Tensor(#[from] glimmer_tensor::Error),
    /// The configuration asks for a tensor that the checkpoint does not hold.
    #[error(
        "tensor `{name}` is missing; the configuration asks for {expected}: the checkpoint is incomplete or its config.json belongs to another model"
    )]
    Missing {
        /// Name of the tensor.
        name: String,
        /// Shape that the configuration implies.
        expected: String,
    },
    /// A tensor does not have the shape that the configuration implies.
    #[error(
        "tensor `{name}`: the configuration implies shape {expected}, the file has {found}: config.json and weights do not belong together"
    )]
    Shape {
        /// Name of the tensor.
        name: String,
        /// Shape that the configuration implies.
        expected: String,
        /// Shape that the file has.
        found: String,
    },
    /// A layer without an indexer has no selection to reuse.
    #[error(
        "layer {layer} reuses the token selection of the layer before it (`indexer_types`), but that layer is not sparse attention"
    )]
    NoSelection {
        /// The layer.
        layer: usize,
    },
    /// A layer was loaded for its router alone, and no experts were given to it.
    #[error("layer {layer} was loaded without its experts; give it experts to run with, or load the whole layer")]
    NoExperts {
        /// The layer.
        layer: usize,
    },
    /// A token id is outside the embedding table.
    #[error("row {row}: token {token} does not exist; the vocabulary has {vocab} rows")]
    Token {
        /// Row of the step.
        row: usize,
        /// The token.
        token: u32,
        /// Rows of the embedding table.
        vocab: usize,
    },
    /// A request is larger than what was allocated at load time.
    #[error("{what}: {needed} needed, {available} allocated; raise the limit `{limit}`")]
    Limit {
        /// What was asked for.
        what: &'static str,
        /// Needed amount.
        needed: usize,
        /// Allocated amount.
        available: usize,
        /// Field of the limits that governs it.
        limit: &'static str,
    },
    /// The model has no MTP layer, or it was not loaded.
    #[error("the model has no draft layer loaded (`num_nextn_predict_layers` is 0, or loading it was switched off)")]
    NoDraftLayer,
    /// A draft step breaks a rule of its own description.
    #[error("draft step: broken rule: {rule}")]
    DraftStep {
        /// The rule.
        rule: &'static str,
    },
    /// A slice does not have the length that its description implies.
    #[error("{what}: {expected} values expected, {found} found")]
    Length {
        /// Which slice.
        what: &'static str,
        /// Expected number of values.
        expected: usize,
        /// Found number of values.
        found: usize,
    },
}

/// Result of an operation of this crate.
pub type Result<T> = std::result::Result<T, Error>;
