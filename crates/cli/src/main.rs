//! The glimmer program.
fn main() {}
