//! Configuration, tensor inventory, safetensors reading and writing, INT4 packing.
//!
//! This crate knows what a `glm5_next` checkpoint *is* (names, shapes, dtypes, bytes) and nothing about computing with it.

mod checkpoint;
pub mod config;
pub mod data;
pub mod digest;
mod error;
pub mod fp8;
pub mod header;
mod inspect;
pub mod int4;
pub mod inventory;
pub mod manifest;
mod mapping;
pub mod scheme;
pub mod sharding;
pub mod shards;
mod synth;
pub mod writer;

pub use checkpoint::Checkpoint;
pub use config::{
    AttentionKind, Config, ConfigError, IndexerConfig, IndexerKind, KdaConfig, MediaTokens, MhcConfig, MlaConfig,
    MlpKind, MoeConfig, NormEpsOrigin, TextConfig, VisionConfig,
};
pub use data::{Bytes, DType, TensorData};
pub use digest::Digest;
pub use error::{Damage, Error, Fault, file_remedy, io_remedy};
pub use inspect::{Inspection, Storage, inspect, inspect_open};
pub use inventory::{ExpertMatrix, Group, Inventory, Projection, TensorSpec};
pub use manifest::Manifest;
pub use mapping::map_file;
pub use scheme::{IgnoreStyle, Scheme};
pub use shards::{Shards, StoredTensor};
pub use synth::{SynthFormat, SynthOptions, dummy, synth};
pub use writer::{ShardReceipt, ShardWriter, TensorHeader};
