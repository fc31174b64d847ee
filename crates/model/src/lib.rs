//! The glm5_next forward pass over any [`glimmer_tensor::Backend`], one file a block.
//!
//! | file | block |
//! |---|---|
//! | `trunk` | [`Model`]: embedding, layers, head; steps of ragged sequences |
//! | `layer` | one decoder layer |
//! | `mhc` | hyper-connections |
//! | `kda` | Kimi delta attention |
//! | `mla`, `indexer` | sparse latent attention and its token selection |
//! | `moe` | dense MLP, router, experts |
//! | `mtp` | the draft layer and its chains |
//! | `weights` | names to weights, BF16 or INT4 |
//! | `workspace`, `limits` | what is allocated, once |
//! | `observer` | windows into a pass |
//! | `plan` | what a model needs of memory, without loading it |
//! | `vision` | pictures and clips to features |
//! | `streaming` | one layer at a time, for the quantizer |
//!
//! Each file states its formulas and calls fused stages; the stages' arithmetic is the backend's.
#![forbid(unsafe_code)]

mod error;
mod indexer;
mod kda;
mod layer;
mod limits;
mod mhc;
mod mla;
mod moe;
mod mtp;
mod observer;
pub mod plan;
mod program;
pub mod streaming;
mod trunk;
pub mod vision;
pub mod weights;
mod workspace;

pub use error::{Error, Result};
pub use indexer::Indexer;
pub use kda::Kda;
pub use layer::{Attention, Layer};
pub use limits::{Limits, Options, cache_shape};
pub use mhc::Site;
pub use mla::Dsa;
pub use moe::{Mlp, Moe, load_experts};
pub use mtp::{ChainStep, HiddenSource, Mtp, MtpStep};
pub use observer::{At, Observer, SiteKind};
pub use trunk::Model;
