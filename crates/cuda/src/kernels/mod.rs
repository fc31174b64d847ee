//! The kernels and their launchers: `<op>.cu` stands beside `<op>.rs`. The definition of a stage is the CPU backend's.

pub(crate) mod dense;
pub(crate) mod dsa;
pub(crate) mod experts;
pub(crate) mod experts_bf16;
pub(crate) mod few;
pub(crate) mod gemm;
pub(crate) mod heads;
pub(crate) mod index;
pub(crate) mod kda;
pub(crate) mod kda_chunk;
pub(crate) mod mhc;
pub(crate) mod mla;
pub(crate) mod moe;
pub(crate) mod narrow;
pub(crate) mod router;
pub(crate) mod sampler;
pub(crate) mod several;
pub(crate) mod slots;
pub(crate) mod sparse;
pub(crate) mod vision;
pub(crate) mod wide;
