//! Configuration, tensor inventory, safetensors reading and writing, INT4 packing.
//!
//! This crate knows what a `glm5_next` checkpoint *is* (names, shapes, dtypes, bytes) and nothing about computing with it.

pub mod config;
pub mod data;

pub use config::{
    AttentionKind, Config, IndexerConfig, IndexerKind, KdaConfig, MediaTokens, MhcConfig, MlaConfig, MlpKind, MoeConfig,
    TextConfig, VisionConfig,
};
pub use data::{Bytes, DType, TensorData};
