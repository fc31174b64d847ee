//! `glimmer bench step`: how long a step takes, against what it must read and compute.

use std::{io::Write as _, process::ExitCode};

use glimmer_bench::{
    dummy::DummySource,
    steps::{Insight, StepBench, StepPlan, StepRow},
};
use glimmer_tensor::{Backend, Cpu};
use serde_json::json;

use crate::{
    args::BenchStepArgs,
    device::{Place, on_device},
    open,
    output::OutputFile,
};

/// What is asked of a backend beside its steps.
trait Measured: Backend {
    fn insight() -> Insight<Self> {
        Insight::none()
    }

    /// Bytes that its stages have taken beside the buffers, where it takes any.
    fn scratch(&self) -> Option<usize> {
        None
    }

    /// Bytes a second that it reads from memory, and operations a second, measured now.
    fn ceilings(&mut self) -> anyhow::Result<Option<(f64, f64)>> {
        Ok(None)
    }
}

impl Measured for Cpu {}

#[cfg(feature = "cuda")]
impl Measured for glimmer_cuda::Cuda {
    fn insight() -> Insight<Self> {
        use glimmer_bench::steps::Parts;
        Insight {
            launches: |cuda| cuda.kernels().launches() as u64,
            set_eager: Self::set_eager,
            set_noting: Self::set_noting,
            parts: |cuda| {
                let parts = glimmer_cuda::bench::step_parts(cuda)?;
                Ok(parts.map(|p| Parts { whole: p.whole, apart: p.apart, nothing: p.nothing, kernels: p.kernels }))
            },
        }
    }

    fn scratch(&self) -> Option<usize> {
        Some(self.scratch_bytes())
    }

    fn ceilings(&mut self) -> anyhow::Result<Option<(f64, f64)>> {
        let read = glimmer_cuda::bench::read_rate(self)?;
        let compute = glimmer_cuda::bench::tensor_rate(self)?;
        Ok(Some((read.gigabytes() * 1e9, compute.teraflops() * 1e12)))
    }
}

/// Measures steps of a model with random weights.
pub(crate) fn run(args: &BenchStepArgs, threads: usize) -> anyhow::Result<ExitCode> {
    let file = OutputFile::prepare_optional(args.json.as_deref())?;
    let place = Place::of(&args.device)?;
    let name = place.name(threads);
    let mut source = DummySource::new(&open::text(&args.config)?, args.layers.map(usize::from), !args.bf16)?;
    if let Some(path) = &args.codes {
        source = source.with_codes(glimmer_checkpoint::map_file(path)?);
    }
    let rows = on_device!(place, open => measure(args, &name, &source, &|| open(threads))?);
    if let Some(file) = file {
        file.finish_json(&json!({"device": name, "rows": rows}))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn measure<B: Measured>(
    args: &BenchStepArgs,
    name: &str,
    source: &DummySource,
    open: &dyn Fn() -> anyhow::Result<B>,
) -> anyhow::Result<Vec<StepRow>> {
    let ceilings = open()?.ceilings()?;
    let plan = StepPlan {
        sequences: args.sequences.iter().map(|&n| usize::from(n)).collect(),
        rows: usize::from(args.rows),
        context: args.context as usize,
        prefill: args.prefill as usize,
        repeats: usize::from(args.repeats),
    };
    let mut out = anstream::stdout().lock();
    let mut bench = StepBench::load(open()?, source, plan)?;
    let (bytes, [seconds, first]) = bench.loaded;
    let layers = source.layers();
    writeln!(
        out,
        "{name}, {layers} layers of {}, {:.1} GB loaded in {seconds:.2} s ({:.1} GB/s), first step after {first:.2} s, context {}",
        args.config.display(),
        bytes as f64 / 1e9,
        bytes as f64 / 1e9 / seconds,
        args.context
    )?;
    if let Some((read, compute)) = ceilings {
        writeln!(out, "ceilings: read {:.0} GB/s, products {:.0} TFLOP/s", read / 1e9, compute / 1e12)?;
    }
    writeln!(
        out,
        "sequences   rows  launches  us a step (10th .. 90th)       chained us   eager us  experts (independent)  of the limit"
    )?;
    let rows = bench.run(B::insight(), args.parts, &mut |row| {
        let share = ceilings.map_or_else(
            || "-".to_owned(),
            |(read, compute)| {
                let limit = (row.bytes / read).max(row.flops / compute) * 1e6;
                format!("{:.1} %", 100.0 * limit / row.chained)
            },
        );
        let line = format!(
            "{:>9} {:>6} {:>9}  {:>9.0} ({:.0} .. {:.0}) {:>16.0} {:>10.0} {:>8.1} {:>13}  {share:>8}",
            row.sequences,
            row.rows,
            row.launches,
            row.alone[0],
            row.alone[1],
            row.alone[2],
            row.chained,
            row.eager,
            row.experts,
            format!("({:.1})", row.independent)
        );
        // A line that cannot be written is reported by the next one.
        let mut printed = writeln!(out, "{line}");
        if let Some(parts) = &row.parts {
            let of = |us: f64| format!("{us:>9.0} us  {:>5.1} %", 100.0 * us / parts.whole);
            for (name, launches, us) in &parts.kernels {
                printed = printed.and_then(|()| writeln!(out, "    {name:<22} {launches:>4} launches {}", of(*us)));
            }
            for (name, us) in [("(as many that do nothing)", parts.nothing), ("(one behind the other)", parts.apart)] {
                printed = printed.and_then(|()| writeln!(out, "    {name:<36} {}", of(us)));
            }
        }
        let _later = printed.and_then(|()| out.flush());
    })?;
    if let Some(taken) = bench.backend().scratch() {
        let (taken, planned) = (taken as f64 / 1e9, bench.planned_scratch() as f64 / 1e9);
        writeln!(out, "scratch of the stages: {taken:.2} GB taken, {planned:.2} GB planned")?;
    }
    Ok(rows)
}
