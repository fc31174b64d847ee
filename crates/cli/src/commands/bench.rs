//! `glimmer bench`: figures of this machine, each beside its limit from the same run.

use std::{io::Write as _, process::ExitCode};

use glimmer_engine::{Flow, Generator, Request, Settings};
use glimmer_quantize::bench::solve_speed;
use glimmer_tensor::{
    Backend, Cpu,
    cpu::bench::{CpuBenchPlan, measure},
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    args::{BenchGptqArgs, BenchKernelsArgs, BenchModelArgs},
    device::{Place, on_device},
    output::OutputFile,
};

/// Kernels of the CPU or of a GPU against what it can do.
pub(crate) fn kernels(args: &BenchKernelsArgs, threads: usize) -> anyhow::Result<ExitCode> {
    let file = OutputFile::prepare_optional(args.json.as_deref())?;
    match Place::of(&args.device)? {
        Place::Cpu if !args.family.is_empty() => {
            anyhow::bail!("--family is for --device cuda; leave it out on the CPU")
        }
        Place::Cpu => {}
        #[cfg(feature = "cuda")]
        Place::Cuda(gpu) => return gpu_kernels(&gpu, &args.family, file),
    }
    let bench = measure(&mut Cpu::new(threads), &CpuBenchPlan::default())?;
    let mut out = anstream::stdout().lock();
    writeln!(out, "{} on {} threads", bench.isa, bench.threads)?;
    writeln!(out, "read from memory        {:8.1} GB/s", bench.read_gbps)?;
    writeln!(out, "f32 multiply-add        {:8.1} GFLOP/s", bench.fma_gflops)?;
    writeln!(out, "fork and join           {:8.2} us", bench.join_us)?;
    let share = bench.bf16_share_of_read();
    writeln!(out, "BF16 matrix x vector    {:8.1} GB/s     {:3.0} % of read", bench.bf16_matvec_gbps, 100.0 * share)?;
    let share = bench.int4_share_of_read();
    writeln!(out, "INT4 matrix x vector    {:8.1} GB/s     {:3.0} % of read", bench.int4_matvec_gbps, 100.0 * share)?;
    for p in &bench.products {
        let percent = |gflops: f64| 100.0 * gflops / bench.fma_gflops;
        writeln!(
            out,
            "{:4} rows: BF16 {:6.1} GFLOP/s {:3.0} %, INT4 {:6.1} GFLOP/s {:3.0} % of multiply-add",
            p.rows,
            p.bf16_gflops,
            percent(p.bf16_gflops),
            p.int4_gflops,
            percent(p.int4_gflops)
        )?;
    }
    save(file, &bench)
}

/// Every family of a GPU's kernels, a line a kernel and size as it is measured.
#[cfg(feature = "cuda")]
fn gpu_kernels(
    gpu: &crate::device::cuda::Gpu,
    wanted: &[String],
    file: Option<OutputFile>,
) -> anyhow::Result<ExitCode> {
    use glimmer_cuda::bench::{FAMILIES, Row, ceilings, prepare};
    let known = FAMILIES.map(|(name, _)| name);
    if let Some(name) = wanted.iter().find(|name| !known.contains(&name.as_str())) {
        anyhow::bail!("--family {name}: there is no such family; there are {}", known.join(", "));
    }
    let mut cuda = gpu.open()?;
    if wanted.is_empty() && gpu.keeps_kernels() {
        let began = std::time::Instant::now();
        let units = prepare(&cuda)?;
        writeln!(
            anstream::stderr(),
            "{units} units of kernels compiled or found in {:.1} s",
            began.elapsed().as_secs_f64()
        )?;
    }
    let began = std::time::Instant::now();
    let limits = ceilings(&mut cuda)?;
    let mut out = anstream::stdout().lock();
    writeln!(
        out,
        "{}: read {:.0} GB/s, copy {:.0} GB/s, products {:.0} TFLOP/s",
        gpu.name(),
        limits.read,
        limits.copy,
        limits.tensor
    )?;
    writeln!(out, "{}", Row::HEADER)?;
    let (mut rows, mut printed) = (Vec::new(), Ok(()));
    for (name, family) in FAMILIES {
        if wanted.is_empty() || wanted.iter().any(|w| w == name) {
            family(&mut cuda, &mut |row| {
                if printed.is_ok() {
                    printed = writeln!(out, "{}", row.line(&limits));
                }
                rows.push(json!({
                    "family": name, "kernel": row.kernel, "tp": row.ranks(), "rows": row.rows, "us": row.micros,
                    "spread": row.spread(), "bytes": row.bytes, "flops": row.flops, "gbps": row.gigabytes(),
                    "tflops": row.teraflops(), "floor_us": row.floor(&limits), "achieved": row.achieved(&limits),
                }));
            })?;
        }
    }
    printed?;
    let seconds = began.elapsed().as_secs_f64();
    writeln!(anstream::stderr(), "{} rows in {seconds:.1} s", rows.len())?;
    let result = json!({
        "device": gpu.name(), "read_gbps": limits.read, "copy_gbps": limits.copy, "tensor_tflops": limits.tensor,
        "float_tflops": limits.float, "seconds": seconds, "kernels": rows,
    });
    save(file, &result)
}

/// Decode and prefill rates of a model.
pub(crate) fn model(args: &BenchModelArgs, threads: usize) -> anyhow::Result<ExitCode> {
    let place = Place::of(&args.device)?;
    let name = place.name(threads);
    on_device!(place, open => rates(args, &name, &|| open(threads)))
}

fn rates<B: Backend>(
    args: &BenchModelArgs,
    name: &str,
    open: &dyn Fn() -> anyhow::Result<B>,
) -> anyhow::Result<ExitCode> {
    let file = OutputFile::prepare_optional(args.json.as_deref())?;
    let checkpoint = crate::open::model(args.model.as_deref())?;
    let depth = if checkpoint.config().text.mtp_layer().is_some() { args.draft_depth as usize } else { 0 };
    let (prompt, new) = (args.prompt_tokens as usize, args.tokens as usize);
    let mut rows: Vec<Value> = Vec::new();
    let mut out = anstream::stdout().lock();
    writeln!(
        out,
        "{}, {name}, prompts of {prompt} tokens, {new} new tokens, draft depth {depth}",
        checkpoint.location()
    )?;
    writeln!(out, "{:>9}  {:>13}  {:>12}  {:>13}", "sequences", "prefill tok/s", "decode tok/s", "tokens a step")?;
    for sequences in [1, 4, 16] {
        let settings = Settings {
            sequences,
            depth,
            context: Some(prompt + new + 1),
            rows: 256,
            state_checkpoints: 8,
            ..Settings::default()
        };
        let mut generator = Generator::load(open()?, &checkpoint, &settings)?;
        let vocabulary = generator.vocabulary();
        // The second round is measured; the first one touches every page.
        for round in 0..2 {
            generator.reset_stats();
            for s in 0..sequences {
                let token = |t: usize| u32::try_from((t * 7919 + s * 104_729 + round) % (vocabulary / 2)).unwrap_or(0);
                let ids: Vec<u32> = (0..prompt).map(token).collect();
                generator.submit(Request::new(ids, args.tokens).ignoring_eos())?;
            }
            generator.run(&mut |_, _| Flow::Continue)?;
        }
        let stats = generator.stats();
        writeln!(
            out,
            "{sequences:>9}  {:>13.0}  {:>12.0}  {:>13.2}",
            stats.prefill_rate(),
            stats.decode_rate(),
            stats.drafts.mean_length()
        )?;
        rows.push(json!({"sequences": sequences, "prefill_tokens_per_second": stats.prefill_rate(),
            "decode_tokens_per_second": stats.decode_rate(), "mean_acceptance_length": stats.drafts.mean_length()}));
    }
    save(file, &json!({"model": checkpoint.location(), "device": name, "depth": depth, "rows": rows}))
}

/// The GPTQ solve against the machine's multiply-add rate.
pub(crate) fn gptq(args: &BenchGptqArgs, threads: usize) -> anyhow::Result<ExitCode> {
    let file = OutputFile::prepare_optional(args.json.as_deref())?;
    let speed = solve_speed(args.columns as usize, args.rows as usize, threads);
    let mut out = anstream::stdout().lock();
    writeln!(out, "{} columns, {} rows, {} threads", speed.n, speed.rows, speed.threads)?;
    writeln!(out, "f32 multiply-add  {:8.1} GFLOP/s", speed.peak_gflops)?;
    writeln!(out, "Hessian           {:8.1} GFLOP/s  {:.2} s", speed.hessian_gflops, speed.hessian_seconds)?;
    writeln!(out, "scale search                         {:.2} s", speed.scales_seconds)?;
    for (solves, form) in [(&speed.apart, "a matrix a thread"), (&speed.together, "all threads on one matrix")] {
        writeln!(
            out,
            "solve             {:8.1} GFLOP/s  {:.3} s  {:.0} % of multiply-add, {form}",
            solves.gflops,
            solves.seconds,
            100.0 * solves.ratio
        )?;
    }
    save(file, &speed)
}

fn save(file: Option<OutputFile>, result: &impl Serialize) -> anyhow::Result<ExitCode> {
    if let Some(file) = file {
        file.finish_json(result)?;
    }
    Ok(ExitCode::SUCCESS)
}
