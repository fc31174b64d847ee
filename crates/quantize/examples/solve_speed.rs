//! Prints the solver's speed: `cargo run --release -p glimmer-quantize --example solve_speed [threads]`.
#![allow(clippy::print_stdout, reason = "its purpose")]

fn main() {
    let threads = std::env::args().nth(1).and_then(|t| t.parse().ok()).unwrap_or(2);
    for (n, rows) in [(2048, 4096), (2048, 2048), (4096, 2048), (4096, 4096)] {
        println!("{:#?}", glimmer_quantize::bench::solve_speed(n, rows, threads));
    }
}
