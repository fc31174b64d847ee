//! Every kernel compiles at the shapes of the released model and of the micro model, without spills. Needs the compiler
//! library (a toolkit, or the wheel under `target/nvrtc`), but no device.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::print_stderr, reason = "says why nothing is checked")]

use std::path::{Path, PathBuf};

use glimmer_checkpoint::Config;
use glimmer_cuda::{
    CudaError,
    compile::{Compiler, Unit},
    device::Device,
    launch::compile_all,
    units::{needs_warpgroups, units},
};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// The library of the wheel, when it is there.
fn library() -> Option<PathBuf> {
    let wheel = Path::new(ROOT).join("target/nvrtc/nvidia/cu13/lib/libnvrtc.so.13");
    wheel.exists().then_some(wheel)
}

/// The compiler from the wheel or from the system; `None` says so.
fn compiler() -> Option<Compiler> {
    match Compiler::load(library().as_deref(), None) {
        Ok(compiler) => Some(compiler),
        Err(error) => {
            eprintln!("kernels were not compiled: {error}");
            None
        }
    }
}

fn config(path: &str) -> Config {
    Config::parse(&std::fs::read_to_string(Path::new(ROOT).join(path)).unwrap()).unwrap()
}

/// Bytes of spills and stack that the assembler reports.
fn spills(log: &str) -> Vec<String> {
    let number = |line: &str, what: &str| -> u64 {
        line.split(what).next().and_then(|l| l.split_whitespace().last()).and_then(|n| n.parse().ok()).unwrap_or(0)
    };
    log.lines()
        .filter(|l| l.contains("bytes spill stores"))
        .filter(|l| number(l, " bytes spill stores") + number(l, " bytes spill loads") > 0)
        .map(|l| l.trim().to_owned())
        .collect()
}

fn check(compiler: &Compiler, units: &[Unit], architecture: &str) {
    let mut reported = 0;
    for (unit, compiled) in units.iter().zip(compile_all(compiler, units, architecture).unwrap()) {
        assert!(compiled.code.starts_with(b"\x7fELF"), "{}", unit.describe());
        reported += compiled.log.matches("bytes spill stores").count();
        let spills = spills(&compiled.log);
        assert!(spills.is_empty(), "{} for {architecture}: {spills:?}", unit.describe());
    }
    assert!(reported >= units.len(), "the assembler reported {reported} kernels of {} files", units.len());
}

#[test]
fn kernels_of_the_released_model_compile_without_spills() {
    let Some(compiler) = compiler() else { return };
    check(&compiler, &units(&config("data/glm-5.3-flash/config.json"), false), "sm_90a");
}

#[test]
fn kernels_of_the_micro_model_compile_without_spills() {
    let Some(compiler) = compiler() else { return };
    check(&compiler, &units(&config("models/micro-bf16/config.json"), true), "sm_90a");
}

#[test]
fn kernels_compile_for_other_architectures() {
    let Some(compiler) = compiler() else { return };
    let units = units(&config("data/glm-5.3-flash/config.json"), true);
    for architecture in ["sm_80", "sm_89", "sm_100", "sm_120"] {
        let units: Vec<Unit> = units.iter().filter(|u| !needs_warpgroups(u)).cloned().collect();
        for compiled in compile_all(&compiler, &units, architecture).unwrap() {
            assert!(compiled.code.starts_with(b"\x7fELF"));
        }
    }
}

#[test]
fn without_a_driver_opening_a_device_is_a_typed_error() {
    // A machine with a device opens it; any other says what is missing.
    match Device::open(0) {
        Ok(device) => assert!(device.properties().multiprocessors > 0),
        Err(error) => assert!(
            matches!(
                error,
                CudaError::NoDriver
                    | CudaError::OldDriver { .. }
                    | CudaError::NoDevice { .. }
                    | CudaError::UnusableDriver { .. }
            ),
            "{error}"
        ),
    }
}

#[test]
fn compiled_kernels_are_kept_and_found_again() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("compiled");
    drop(std::fs::remove_dir_all(&folder));
    let load = |cache| Compiler::load(library().as_deref(), cache);
    let Ok(compiler) = load(Some(folder.clone())) else { return };
    let text = "extern \"C\" __global__ void f(int *p) { *p = N; }";
    let unit = |n| Unit { file: "f.cu", text, constants: vec![("N", n)] };
    let first = compiler.compile(&unit(1), "sm_90a").unwrap();
    assert!(!first.log.is_empty(), "the first time it is compiled");
    let again = compiler.compile(&unit(1), "sm_90a").unwrap();
    assert!(again.log.is_empty(), "the second time it is found");
    assert_eq!(first.code, again.code);
    assert_ne!(compiler.compile(&unit(2), "sm_90a").unwrap().code, first.code);
    // A file that is no machine code is compiled anew.
    for entry in std::fs::read_dir(&folder).unwrap() {
        std::fs::write(entry.unwrap().path(), b"broken").unwrap();
    }
    assert_eq!(compiler.compile(&unit(1), "sm_90a").unwrap().code, first.code);
}

#[test]
fn spills_are_recognised() {
    let log = "ptxas info : Function\n  8 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads\n\
               0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
    assert_eq!(spills(log).len(), 1);
}

#[test]
fn a_kernel_with_an_error_gives_its_place() {
    let Some(compiler) = compiler() else { return };
    let unit = Unit { file: "wrong.cu", text: "int f() { return missing; }", constants: vec![] };
    let error = compiler.compile(&unit, "sm_90a").unwrap_err().to_string();
    assert!(error.contains("wrong.cu") && error.contains("missing"), "{error}");
}

#[test]
fn a_library_that_is_not_there_is_an_error_with_its_path() {
    let path = Path::new("/nowhere/libnvrtc.so.13");
    let error = Compiler::load(Some(path), None).unwrap_err().to_string();
    assert!(error.contains("/nowhere/libnvrtc.so.13"), "{error}");
}
