//! Prints what the CPU kernels reach of the machine: `cargo run --release -p glimmer-tensor --example cpu_bench [threads]`.

#![allow(clippy::print_stdout, reason = "it is a command")]

use glimmer_tensor::{
    Cpu,
    cpu::{
        Isa,
        bench::{CpuBenchPlan, measure},
    },
};

fn main() -> Result<(), glimmer_tensor::Error> {
    let threads = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(2);
    for isa in Isa::available().filter(|isa| *isa != Isa::Scalar) {
        let bench = measure(&mut Cpu::with_isa(threads, isa), &CpuBenchPlan::default())?;
        println!("{} on {} threads", bench.isa, bench.threads);
        println!("  read          {:8.1} GB/s", bench.read_gbps);
        println!("  multiply-add  {:8.1} GFLOP/s", bench.fma_gflops);
        println!("  join          {:8.2} us", bench.join_us);
        println!("  BF16 matvec   {:8.1} GB/s, {:.0} %", bench.bf16_matvec_gbps, 100.0 * bench.bf16_share_of_read());
        println!("  INT4 matvec   {:8.1} GB/s, {:.0} %", bench.int4_matvec_gbps, 100.0 * bench.int4_share_of_read());
        for p in &bench.products {
            let share = |gflops: f64| 100.0 * gflops / bench.fma_gflops;
            println!(
                "  {:4} rows     BF16 {:6.1} GFLOP/s ({:.0} %), INT4 {:6.1} GFLOP/s ({:.0} %)",
                p.rows,
                p.bf16_gflops,
                share(p.bf16_gflops),
                p.int4_gflops,
                share(p.int4_gflops)
            );
        }
    }
    Ok(())
}
