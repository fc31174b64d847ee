//! A checkpoint against the inventory of its configuration.

use std::fmt;

use super::{Inventory, TensorSpec};
use crate::{checkpoint::Checkpoint, data::DType};

impl Inventory {
    /// Where a checkpoint differs: missing and unexpected tensors, other element types and shapes, by name.
    pub fn compare(&self, checkpoint: &Checkpoint) -> Vec<Mismatch> {
        let mut mismatches = Vec::new();
        for spec in &self.tensors {
            let difference = match checkpoint.describe(&spec.name) {
                None => Some(Difference::Missing { dtype: spec.dtype, shape: spec.shape.clone() }),
                Some((dtype, _)) if dtype != spec.dtype => {
                    Some(Difference::DType { expected: spec.dtype, found: dtype })
                }
                Some((_, shape)) if !same_shape(spec, shape) => {
                    Some(Difference::Shape { expected: spec.shape.clone(), found: shape.to_vec() })
                }
                Some(_) => None,
            };
            mismatches.extend(difference.map(|difference| Mismatch { tensor: spec.name.clone(), difference }));
        }
        let unexpected = checkpoint.names().filter(|name| !self.by_name.contains_key(*name));
        mismatches
            .extend(unexpected.map(|name| Mismatch { tensor: name.to_owned(), difference: Difference::Unexpected }));
        mismatches.sort_by(|a, b| a.tensor.cmp(&b.tensor));
        mismatches
    }
}

/// `A_log` is also found as `[1, 1, heads, 1]`.
fn same_shape(spec: &TensorSpec, found: &[usize]) -> bool {
    spec.shape == found
        || (spec.name.ends_with(".A_log") && matches!(found, [1, 1, heads, 1] if spec.shape == [*heads]))
}

/// A tensor of a checkpoint that is not as its configuration says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// Name.
    pub tensor: String,
    /// How it differs.
    pub difference: Difference,
}

/// How a tensor differs from the inventory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    /// Not in the checkpoint.
    Missing {
        /// Its element type.
        dtype: DType,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// Not in the inventory.
    Unexpected,
    /// Another element type.
    DType {
        /// By the inventory.
        expected: DType,
        /// In the checkpoint.
        found: DType,
    },
    /// Another shape.
    Shape {
        /// By the inventory.
        expected: Vec<usize>,
        /// In the checkpoint.
        found: Vec<usize>,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tensor `{}`: ", self.tensor)?;
        match &self.difference {
            Difference::Missing { dtype, shape } => {
                write!(f, "expected {dtype} {shape:?}, found none; the checkpoint is incomplete")
            }
            Difference::Unexpected => {
                write!(f, "expected no such tensor, found one; config.json describes another model")
            }
            Difference::DType { expected, found } => {
                write!(f, "expected {expected}, found {found}; a tool has converted it: take it from the source")
            }
            Difference::Shape { expected, found } => {
                write!(f, "expected shape {expected:?}, found {found:?}; config.json describes another model")
            }
        }
    }
}
