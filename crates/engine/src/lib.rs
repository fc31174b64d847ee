//! Sequences, cache pools, sampling and speculation
