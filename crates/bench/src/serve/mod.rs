//! A load generator for servers with OpenAI's APIs, and what it measures.
//!
//! [`dataset`] makes the prompts, [`arrival`] says when they are sent, [`load`] sends them through [`exchange`] over
//! [`client`] and [`sse`], [`summary`] defines every reported quantity, [`report`] and [`table`] write it down;
//! [`grid`] repeats that over concurrencies with the further measurements of [`protocol`] and [`interference`], [`page`] shows
//! them. Flags, keys and
//! labels are those of `vllm bench serve`, and so are prompts and arrival times for equal seeds.

pub mod arrival;
pub mod client;
pub mod counters;
pub mod dataset;
#[cfg(feature = "tls")]
mod encrypted;
pub mod epochs;
pub mod error;
pub(crate) mod event;
pub mod exchange;
pub mod grid;
pub mod interference;
pub mod load;
pub mod page;
mod plot;
pub mod protocol;
pub mod random;
pub mod report;
pub mod server;
pub mod sse;
pub mod statistics;
pub mod summary;
pub mod table;
pub mod workload;

pub use error::ServeBenchError;
