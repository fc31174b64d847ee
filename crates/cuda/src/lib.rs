//! The CUDA backend: device layer, kernels with their launchers, [`Cuda`] as a [`glimmer_tensor::Backend`].
//!
//! The crate builds without CUDA at hand. Driver and kernel compiler are looked for at run time; what is missing is a
//! [`CudaError`]. Kernels are CUDA C++ inside the program, compiled for the device and the model's shapes when first used and
//! kept in a folder.

mod backend;
pub mod bench;
mod cache;
pub mod compile;
pub mod device;
mod error;
pub mod graph;
mod kernels;
pub mod launch;
mod library;
pub mod memory;
mod plan;
mod shelf;
mod types;
pub mod units;
mod upload;

pub use backend::{Cuda, Options};
pub use cache::CudaCache;
pub use error::{CudaError, Result};
pub use library::library_found;
pub use types::{CudaBuffer, CudaMatrix, CudaRouting, CudaSelection, CudaVector};
