//! One module a command: arguments in, library call, printed result out.

pub(crate) mod bench;
pub(crate) mod bench_grid;
pub(crate) mod bench_serve;
pub(crate) mod chat;
pub(crate) mod demo;
pub(crate) mod dequantize;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod eval_url;
pub(crate) mod exactness;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod local_server;
pub(crate) mod mend;
pub(crate) mod parity;
pub(crate) mod plan;
pub(crate) mod prefix_cost;
pub(crate) mod quantize;
pub(crate) mod replay;
pub(crate) mod serve;
pub(crate) mod soak;
pub(crate) mod steps;
pub(crate) mod synth;
pub(crate) mod verify;
