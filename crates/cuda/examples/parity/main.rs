//! Runs the CUDA backend beside the CPU backend on this machine: every stage over odd shapes, the micro model end to end,
//! and kernels against the limits of the device. Prints tables; the exit code is not zero when something differs.
//!
//! `parity [--compiler LIBNVRTC] [--cache FOLDER] [stages] [halves] [dense] [router] [experts] [kda] [sampler] [micro] [graphs] [bench [tune] [ROWS]]
//! [--kernels FAMILY[,FAMILY]]`, or `... compile`, which needs no device and fills the folder with the released model's kernels.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failure ends the program")]

mod bench;
mod graphs;
mod halves;
#[path = "../../../model/tests/harness/mod.rs"]
mod harness;
mod material;
mod micro;
mod router;
mod sampler;
mod several;
mod stages;

use std::process::ExitCode;

use glimmer_checkpoint::Config;
use glimmer_cuda::{Cuda, Options, compile::Compiler, launch::compile_all, units::units};
use stages::Which;

/// Compiles the kernels of the released model for this program's device into the cache.
fn compile(options: &Options) -> ExitCode {
    let text = std::fs::read_to_string(harness::repository("data/glm-5.3-flash/config.json")).unwrap();
    let units = units(&Config::parse(&text).unwrap(), false);
    let compiler = Compiler::load(options.compiler.as_deref(), options.cache.clone()).unwrap();
    println!("{} units", compile_all(&compiler, &units, "sm_90a").unwrap().len());
    ExitCode::SUCCESS
}

fn main() -> ExitCode {
    let mut options = Options::default();
    let (mut parts, mut families) = (Vec::new(), None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--compiler" => options.compiler = arguments.next().map(Into::into),
            "--cache" => options.cache = arguments.next().map(Into::into),
            "--kernels" => {
                let names = arguments.next().unwrap_or_default();
                families = Some(names.split(',').filter(|n| !n.is_empty()).map(str::to_owned).collect::<Vec<_>>());
            }
            part => parts.push(part.to_owned()),
        }
    }
    if parts.iter().any(|p| p == "compile") {
        return compile(&options);
    }
    let wanted = |part: &str| parts.is_empty() && families.is_none() || parts.iter().any(|p| p == part);
    let open = || match Cuda::open(&options) {
        Ok(cuda) => cuda,
        Err(error) => {
            eprintln!("error: {error}");
            std::process::abort()
        }
    };
    let cuda = match Cuda::open(&options) {
        Ok(cuda) => cuda,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    println!("{:?}", cuda.device().properties());
    let mut failures = 0;
    for (part, which) in [
        ("stages", Which::All),
        ("dense", Which::Dense),
        ("router", Which::Router),
        ("experts", Which::Experts),
        ("kda", Which::Kda),
    ] {
        if part == "stages" && wanted(part) || parts.iter().any(|p| p == part) {
            failures += stages::run(open(), which);
        }
    }
    if wanted("sampler") {
        failures += sampler::check(open()) + sampler::engine(&open);
    }
    if wanted("halves") {
        let options = Options { half_cache: true, ..options.clone() };
        failures += halves::check(Cuda::open(&options).unwrap());
    }
    if wanted("micro") {
        // Equal bits for any cut of a prompt, and goldens in f32 for any length, are promises of the crate's own products.
        let options = Options { own_products: true, ..options.clone() };
        failures += micro::run(&open, &|| Cuda::open(&options).unwrap());
    }
    if wanted("graphs") {
        failures += graphs::check(&open);
    }
    if wanted("bench") {
        failures +=
            bench::run(&mut open(), wanted("tune") && !parts.is_empty(), parts.iter().find_map(|p| p.parse().ok()));
    }
    if let Some(names) = &families {
        failures += bench::families(&mut open(), names);
    }
    println!("{failures} failures");
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
