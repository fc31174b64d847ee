//! Errors of the compute layer.

/// What can go wrong between a weight and a result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A weight is not what the backend needs.
    #[error("tensor `{name}`: expected {expected}, found {found}")]
    Weight {
        /// Tensor name.
        name: String,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// A buffer or a cache does not have the shape that the call needs (a defect of the caller).
    #[error("{what}: needs {needed}, has {available}")]
    Capacity {
        /// Which resource.
        what: &'static str,
        /// Needed amount.
        needed: usize,
        /// Available amount.
        available: usize,
    },
    /// A step breaks a rule of its own description.
    #[error("step, segment {segment}: broken rule: {rule}")]
    Step {
        /// Index of the segment (the number of segments when the rule is about the whole step).
        segment: usize,
        /// The rule.
        rule: &'static str,
    },
    /// Memory could not be had.
    #[error("cannot allocate {bytes} bytes for {what}")]
    Memory {
        /// What for.
        what: &'static str,
        /// How much.
        bytes: usize,
    },
    /// The device failed, or something it needs is missing.
    #[error(transparent)]
    Device(Box<dyn std::error::Error + Send + Sync>),
}
