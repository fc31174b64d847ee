//! `glimmer doctor`: what there is to compute with, and what is missing.

use std::{io::Write as _, process::ExitCode};

use glimmer_tensor::Cpu;
use serde::Serialize;

use crate::args::DoctorArgs;

/// One thing that was looked for.
#[derive(Debug, Serialize)]
pub(crate) struct Finding {
    /// What.
    what: &'static str,
    /// What was found, or what to do about what was not.
    found: String,
    /// Whether it is as it has to be.
    fine: bool,
}

impl Finding {
    pub(crate) fn fine(what: &'static str, found: impl Into<String>) -> Self {
        Self { what, found: found.into(), fine: true }
    }

    pub(crate) fn missing(what: &'static str, found: impl Into<String>) -> Self {
        Self { what, found: found.into(), fine: false }
    }
}

/// Looks at CPU, driver, devices, compiler and folder. Exit code 0 when a model could run on a GPU; the CPU always can.
pub(crate) fn run(args: &DoctorArgs, threads: usize) -> anyhow::Result<ExitCode> {
    let mut findings = vec![Finding::fine("program", format!("glimmer {}", env!("CARGO_PKG_VERSION"))), cpu(threads)];
    findings.extend(gpu(args));
    let usable = findings.iter().all(|f| f.fine);
    let mut out = anstream::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &findings)?;
        writeln!(out)?;
    } else {
        for f in &findings {
            let mark = if f.fine { "ok" } else { "MISSING" };
            writeln!(out, "{:8} {:16} {}", mark, f.what, f.found)?;
        }
        let verdict =
            if usable { "--device cuda can be used" } else { "--device cuda cannot be used; --device cpu can" };
        writeln!(out, "{verdict}")?;
    }
    Ok(ExitCode::from(u8::from(!usable)))
}

/// The instruction set that products use, out of those that this processor has.
fn cpu(threads: usize) -> Finding {
    let memory = glimmer_server::sizing::host_memory()
        .map_or_else(String::new, |(all, free)| format!(", {} of memory, {} free", gib(all), gib(free)));
    Finding::fine("CPU", format!("{}, {threads} threads{memory}", Cpu::new(1).isa().name()))
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(not(feature = "cuda"))]
fn gpu(_args: &DoctorArgs) -> Vec<Finding> {
    vec![Finding::missing("feature `cuda`", crate::device::WITHOUT)]
}

#[cfg(feature = "cuda")]
fn gpu(args: &DoctorArgs) -> Vec<Finding> {
    use glimmer_cuda::{
        compile::Compiler,
        device::{Device, visible},
    };

    use crate::device::cuda::{default_folder, options};

    let mut findings = Vec::new();
    match visible() {
        Err(error) => findings.push(Finding::missing("driver", error.to_string())),
        Ok((version, devices)) => {
            let version = format!("CUDA {}.{} interface", version / 1000, version % 1000 / 10);
            findings.push(Finding::fine("driver", version));
            if devices == 0 {
                findings.push(Finding::missing("device", "the driver sees none; check CUDA_VISIBLE_DEVICES"));
            }
            for ordinal in 0..devices {
                findings.push(match Device::open(ordinal) {
                    Err(error) => Finding::missing("device", error.to_string()),
                    Ok(device) => {
                        let p = device.properties();
                        let free = device.free_memory().map_or(0, |(free, _)| free as u64);
                        let text = format!(
                            "{ordinal}: {}, compute capability {}.{} ({}), {} multiprocessors, {} of memory, {} free",
                            p.name,
                            p.capability.0,
                            p.capability.1,
                            p.architecture(),
                            p.multiprocessors,
                            gib(p.memory as u64),
                            gib(free)
                        );
                        Finding::fine("device", text)
                    }
                });
            }
        }
    }
    let options = options(&args.cuda);
    findings.push(match Compiler::load(options.compiler.as_deref(), options.cache.clone()) {
        Err(error) => Finding::missing("compiler (NVRTC)", format!("{error}; or name the file with --nvrtc")),
        Ok(compiler) => {
            let (major, minor) = compiler.version();
            let place = compiler.place().map_or_else(|| "loaded".to_owned(), |path| path.display().to_string());
            Finding::fine("compiler (NVRTC)", format!("{major}.{minor}, {place}"))
        }
    });
    let place = "products of many rows (cuBLASLt)";
    findings.push(if glimmer_cuda::library_found(options.compiler.as_deref()) {
        Finding::fine(place, "found")
    } else {
        Finding::fine(
            place,
            "not there, which is no obstacle: without libcublasLt.so.13 prompts take several times as long",
        )
    });
    findings.push(match &options.cache {
        Some(folder) => {
            let files = std::fs::read_dir(folder).map_or(0, |entries| entries.flatten().count());
            Finding::fine("compiled kernels", format!("{} ({files} files)", folder.display()))
        }
        None => {
            let folder = default_folder().map_or_else(|| "no HOME".to_owned(), |folder| folder.display().to_string());
            Finding::missing(
                "compiled kernels",
                format!("{folder} cannot be written; name a folder with --kernel-cache"),
            )
        }
    });
    findings
}
