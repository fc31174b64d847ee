//! The load generator: its prompts, its definitions, its table, and what it makes of good and bad servers.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod dataset;
mod encrypted;
mod faults;
mod grid;
mod numbers;
mod scripted;
mod support;
