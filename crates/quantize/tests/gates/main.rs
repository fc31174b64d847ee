//! The gates: a good artifact passes, and each kind of damage fails exactly its own gate.

mod artifact;
mod harness;

mod companions_and_manifest;
mod config_file;
mod container;
mod good;
mod structure;
mod values;
