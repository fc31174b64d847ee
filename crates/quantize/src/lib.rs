//! Calibration, Hessians, GPTQ, the streaming pipeline and the gates.
//!
//! The solver works on plain slices: [`hessian`] gathers the second moments of a matrix's inputs, [`scales`] chooses the
//! 4-bit grid, [`gptq`] rounds a matrix against both (over [`cholesky`]), [`rtn`] rounds without calibration.

#![forbid(unsafe_code)]

pub mod bench;
pub mod cholesky;
pub mod gates;
pub mod gptq;
pub mod hessian;
pub mod real;
pub mod rtn;
pub mod scales;
