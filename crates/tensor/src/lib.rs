//! The [`Backend`] trait of fused stages and the CPU backend.

pub mod backend;
pub mod cpu;
mod error;
pub mod gemm;
pub mod sample;
pub mod step;

pub use backend::{
    Backend, Columns, DsaColumns, DsaWeights, Experts, IndexerWeights, KdaForm, KdaWeights, Linear, MatrixSource,
    MhcWeights, Norm, PatchGrid, Program, Result, RouterRule, Streams, Swiglu, TOKEN_PLACES,
};
pub use cpu::Cpu;
pub use error::Error;
pub use sample::{Draw, Finds, LogitChange, SampleRow, Samples};
pub use step::{CacheShape, FeatureRow, PAGE_TOKENS, Placed, Segment, Step};
