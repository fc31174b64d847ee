//! From tensor names to weights of a backend.
//!
//! A [`Source`] answers names with tensors; a [`Loader`] checks each against the shape that the configuration implies and
//! hands it to the backend. A matrix `X` is INT4 when the source holds `X.weight_packed`, otherwise `X.weight` as stored:
//! the same code loads a BF16 checkpoint and a quantized artifact, and a quantizer can overlay the tensors of one layer.

use glimmer_checkpoint::{
    Bytes, Checkpoint, Config, TensorData,
    int4::{self, GROUP},
};
use glimmer_tensor::{Backend, Linear, MatrixSource, Norm, Swiglu};

use crate::{Error, Result};

/// Where tensors come from: a checkpoint, or an overlay over one.
pub trait Source {
    /// The configuration that the names are derived from.
    fn config(&self) -> &Config;

    /// Whether the tensor exists.
    fn has(&self, name: &str) -> bool;

    /// The tensor.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] when it does not exist or cannot be read.
    fn tensor(&self, name: &str) -> Result<TensorData>;
}

impl Source for Checkpoint {
    fn config(&self) -> &Config {
        self.config()
    }

    fn has(&self, name: &str) -> bool {
        self.has(name)
    }

    fn tensor(&self, name: &str) -> Result<TensorData> {
        Ok(self.tensor(name)?)
    }
}

/// Name prefix of the text model's tensors: `model.language_model.` in multimodal checkpoints, `model.` in text-only ones.
pub fn text_prefix(source: &dyn Source) -> &'static str {
    const NESTED: &str = "model.language_model.";
    if source.has("model.embed_tokens.weight") && !source.has("model.language_model.embed_tokens.weight") {
        "model."
    } else {
        NESTED
    }
}

/// Name prefix of a layer: `model.language_model.layers.3.`.
pub fn layer_prefix(source: &dyn Source, layer: usize) -> String {
    format!("{}layers.{layer}.", text_prefix(source))
}

/// Loads tensors below a name prefix.
#[derive(Clone)]
pub struct Loader<'a, B: Backend> {
    backend: &'a B,
    source: &'a dyn Source,
    prefix: String,
}

impl<B: Backend> std::fmt::Debug for Loader<'_, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl<'a, B: Backend> Loader<'a, B> {
    /// A loader for names that begin with `prefix`.
    pub fn new(backend: &'a B, source: &'a dyn Source, prefix: impl Into<String>) -> Self {
        Self { backend, source, prefix: prefix.into() }
    }

    /// A loader for names below `part` of this one's.
    pub fn at(&self, part: &str) -> Self {
        Self { backend: self.backend, source: self.source, prefix: format!("{}{part}", self.prefix) }
    }

    /// The backend that the weights go to.
    pub fn backend(&self) -> &'a B {
        self.backend
    }

    /// The configuration of the source.
    pub fn config(&self) -> &'a Config {
        self.source.config()
    }

    /// The tensor `name`, checked against `shape`.
    ///
    /// # Errors
    /// [`Error::Missing`] or [`Error::Shape`].
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<TensorData> {
        let tensor = self.unchecked(name, shape)?;
        if tensor.shape != shape {
            return Err(shape_error(&tensor, shape));
        }
        Ok(tensor)
    }

    /// The matrix `name.weight` (or the INT4 pair below `name`), `[out, input]`.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Shape`], or what the backend says about the dtype.
    pub fn matrix(&self, name: &str, out: usize, input: usize) -> Result<B::Matrix> {
        if self.source.has(&format!("{}{name}.weight_packed", self.prefix)) {
            let packed = self.tensor(&format!("{name}.weight_packed"), &[out, int4::words(input, int4::BITS)])?;
            let scale = self.tensor(&format!("{name}.weight_scale"), &[out, input / GROUP])?;
            return Ok(self.backend.matrix(MatrixSource::Int4 { packed: &packed, scale: &scale })?);
        }
        self.plain_matrix(&format!("{name}.weight"), out, input)
    }

    /// The matrix whose full name is `name`, `[out, input]`, as stored.
    ///
    /// # Errors
    /// As [`Loader::matrix`].
    pub fn plain_matrix(&self, name: &str, out: usize, input: usize) -> Result<B::Matrix> {
        let tensor = self.tensor(name, &[out, input])?;
        Ok(self.backend.matrix(MatrixSource::Dense(&tensor))?)
    }

    /// [`Loader::matrix`] without a bias.
    ///
    /// # Errors
    /// As [`Loader::matrix`].
    pub fn linear(&self, name: &str, out: usize, input: usize) -> Result<Linear<B>> {
        Ok(Linear { weight: self.matrix(name, out, input)?, bias: None })
    }

    /// [`Loader::matrix`] with the bias `name.bias`.
    ///
    /// # Errors
    /// As [`Loader::matrix`].
    pub fn biased_linear(&self, name: &str, out: usize, input: usize) -> Result<Linear<B>> {
        let weight = self.matrix(name, out, input)?;
        Ok(Linear { weight, bias: Some(self.vector(&format!("{name}.bias"), out)?) })
    }

    /// Several matrices with the same trailing size stacked by rows into one `[sum of rows, columns]`, bytes unchanged.
    /// Middle dimensions of size one (convolution taps `[channels, 1, taps]`) are dropped.
    ///
    /// # Errors
    /// As [`Loader::matrix`]; [`Error::Shape`] also when the parts differ in dtype.
    pub fn stacked(&self, names: &[&str], rows: usize, columns: usize) -> Result<B::Matrix> {
        let mut bytes = Vec::new();
        let mut first: Option<TensorData> = None;
        for name in names {
            let part = self.unchecked(name, &[rows, 1, columns])?;
            if part.elements() != rows * columns || first.as_ref().is_some_and(|f| f.dtype != part.dtype) {
                return Err(shape_error(&part, &[rows, 1, columns]));
            }
            bytes.extend_from_slice(part.bytes.as_slice());
            first.get_or_insert(part);
        }
        let Some(first) = first else {
            return Err(Error::Missing { name: self.prefix.clone(), expected: "at least one part".into() });
        };
        let whole = TensorData {
            name: first.name,
            dtype: first.dtype,
            shape: vec![rows * names.len(), columns],
            bytes: Bytes::new(bytes),
        };
        Ok(self.backend.matrix(MatrixSource::Dense(&whole))?)
    }

    /// The parameter vector whose full name is `name`, of any shape with `elements` elements, widened to f32.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Shape`], or what the backend says about the dtype.
    pub fn vector(&self, name: &str, elements: usize) -> Result<B::Vector> {
        let tensor = self.unchecked(name, &[elements])?;
        if tensor.elements() != elements {
            return Err(shape_error(&tensor, &[elements]));
        }
        Ok(self.backend.vector(&tensor)?)
    }

    /// The RMSNorm `name.weight`.
    ///
    /// # Errors
    /// As [`Loader::vector`].
    pub fn norm(&self, name: &str, width: usize, eps: f32) -> Result<Norm<B>> {
        Ok(Norm { weight: self.vector(&format!("{name}.weight"), width)?, bias: None, eps })
    }

    /// The LayerNorm `name.weight`, `name.bias`.
    ///
    /// # Errors
    /// As [`Loader::vector`].
    pub fn layer_norm(&self, name: &str, width: usize, eps: f32) -> Result<Norm<B>> {
        let weight = self.vector(&format!("{name}.weight"), width)?;
        Ok(Norm { weight, bias: Some(self.vector(&format!("{name}.bias"), width)?), eps })
    }

    /// The clamped SwiGLU `gate_proj`, `up_proj` `[width, input]`, `down_proj` `[out, width]` without biases.
    ///
    /// # Errors
    /// As [`Loader::matrix`].
    pub fn swiglu(&self, input: usize, width: usize, out: usize) -> Result<Swiglu<B>> {
        Ok(Swiglu {
            gate: self.linear("gate_proj", width, input)?,
            up: self.linear("up_proj", width, input)?,
            down: self.linear("down_proj", out, width)?,
        })
    }

    fn unchecked(&self, name: &str, shape: &[usize]) -> Result<TensorData> {
        let full = format!("{}{name}", self.prefix);
        if !self.source.has(&full) {
            return Err(Error::Missing { name: full, expected: format!("{shape:?}") });
        }
        self.source.tensor(&full)
    }
}

fn shape_error(tensor: &TensorData, expected: &[usize]) -> Error {
    Error::Shape {
        name: tensor.name.clone(),
        expected: format!("{expected:?}"),
        found: format!("{} {:?}", tensor.dtype, tensor.shape),
    }
}
