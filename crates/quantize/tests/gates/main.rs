//! The gates: a good artifact passes, and each kind of damage fails exactly its own gate.

#![allow(clippy::panic, reason = "a helper of a test that panics is a failing test")]

mod artifact;
mod harness;

mod companions_and_manifest;
mod config_file;
mod container;
mod good;
mod models;
mod pipeline;
mod property;
mod structure;
mod values;
