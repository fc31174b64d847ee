//! Configuration, tensor inventory, safetensors reading and writing, INT4 packing.
//!
//! This crate knows what a `glm5_next` checkpoint *is* (names, shapes, dtypes, bytes) and nothing about computing with it.

mod checkpoint;
pub mod config;
pub mod data;
mod error;
pub mod fp8;
pub mod header;
pub mod int4;
pub mod inventory;
mod mapping;
pub mod shards;

pub use checkpoint::Checkpoint;
pub use config::{
    AttentionKind, Config, ConfigError, IndexerConfig, IndexerKind, KdaConfig, MediaTokens, MhcConfig, MlaConfig,
    MlpKind, MoeConfig, NormEpsOrigin, TextConfig, VisionConfig,
};
pub use data::{Bytes, DType, TensorData};
pub use error::{Damage, Error, Fault};
pub use inventory::{ExpertMatrix, Group, Inventory, Projection, TensorSpec};
pub use mapping::map_file;
pub use shards::{Shards, StoredTensor};
