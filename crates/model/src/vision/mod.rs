//! From picture bytes to the features that replace placeholder embeddings.
//!
//! ```text
//! bytes -> image (RGB) -> resize + pad + normalise -> patches -> tower -> features [tokens, hidden]
//! ```
//! [`image`] decodes, [`settings`] reads the processor's files, [`resize`] is the bicubic filter, [`preprocess`] lays a picture out on its canvas and cuts patches,
//! [`video`] chooses frames and writes the prompt text of a clip, [`tower`] is the transformer over
//! `glimmer_tensor::Backend`.
//!
//! Invariant: everything before the tower is integer or plain f32 arithmetic in a fixed order, so the same PNG gives the
//! same patches, bit for bit, as the reference processor.

mod error;
pub mod image;
mod jpeg;
pub mod preprocess;
pub mod resize;
pub mod settings;
pub mod tower;
pub mod video;

pub use error::VisionError;
pub use image::{DecodeLimits, RgbImage};
pub use preprocess::{Canvas, Patches};
pub use settings::{Processor, Processors};
pub use tower::{TowerStage, VisionTower};
pub use video::{Clip, SampledFrames, Sampler};
