//! Calibration, Hessians, GPTQ, the streaming pipeline and the gates.
//!
//! | module | what |
//! |---|---|
//! | [`pipeline`] | a checkpoint in, an artifact out, one layer in memory at a time |
//! | [`recipe`] | everything that the artifact's bytes depend on besides source and calibration |
//! | [`calibration`] | token sequences with image features |
//! | [`gates`] | static checks of an artifact |
//! | [`mend`] | repairs of artifacts that other tools made |
//! | [`report`] | what was done, matrix by matrix |
//! | [`hessian`], [`cholesky`], [`gptq`], [`scales`], [`rtn`], [`real`] | the solver, on plain slices |
//! | [`mod@bench`] | the solver's speed |

#![forbid(unsafe_code)]

pub mod bench;
pub mod calibration;
pub mod cholesky;
mod copy;
pub mod error;
mod experts;
pub mod gates;
pub mod gptq;
pub mod hessian;
mod matrix;
mod memory;
pub mod mend;
mod overlay;
pub mod pipeline;
mod plan;
pub mod progress;
pub mod real;
pub mod recipe;
pub mod report;
mod rows;
pub mod rtn;
pub mod scales;
mod source_files;
mod spare;
mod state;
mod workers;

pub use calibration::{CalibrationSample, ImageFeatures};
pub use copy::NonFiniteTensor;
pub use error::{Error, Result};
pub use memory::Budget;
pub use pipeline::{Finished, Options, SaveStreams, quantize};
pub use progress::Progress;
pub use recipe::{CalibratedExperts, DownInputs, Method, Recipe, TokenWeights};
pub use state::is_unfinished;
