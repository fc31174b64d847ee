//! `glimmer bench prefix-cost`: what the prefix cache costs when nothing hits.

use std::{io::Write as _, process::ExitCode, time::Instant};

use glimmer_bench::{BenchError, PrefixCostPlan, Ratios, prefix_cost};
use glimmer_engine::Settings;
use glimmer_tensor::Backend;
use serde_json::json;

use crate::{
    args::BenchPrefixCostArgs,
    device::{Place, on_device},
    open,
    output::OutputFile,
    progress,
};

/// Rows a step.
const ROWS: usize = 256;

/// Measures and prints.
pub(crate) fn run(args: &BenchPrefixCostArgs, threads: usize) -> anyhow::Result<ExitCode> {
    let place = Place::of(&args.device)?;
    let name = place.name(threads);
    let alone = place.is_cpu() && threads == 1;
    on_device!(place, open => measure(args, &name, alone, &|| open(threads)))
}

fn measure<B: Backend>(
    args: &BenchPrefixCostArgs,
    name: &str,
    alone: bool,
    open: &dyn Fn() -> anyhow::Result<B>,
) -> anyhow::Result<ExitCode> {
    let file = OutputFile::prepare_optional(args.json.as_deref())?;
    let checkpoint = open::model(args.model.as_deref())?;
    let has_draft_layer = checkpoint.config().text.mtp_layer().is_some();
    let plan = PrefixCostPlan {
        sequences: args.sequences as usize,
        prompt_tokens: args.prompt_tokens as usize,
        tokens: args.tokens,
        depth: if has_draft_layer { args.draft_depth as usize } else { 0 },
        rounds: args.rounds as usize,
    };
    let settings = Settings { rows: ROWS.max(plan.sequences * (plan.depth + 1)), ..Settings::default() };
    let began = Instant::now();
    let own_time = alone && thread_seconds().is_some();
    let mut clock = || match thread_seconds().filter(|_| own_time) {
        Some(seconds) => seconds,
        None => began.elapsed().as_secs_f64(),
    };
    let bar = progress::bar(u64::from(args.rounds), "measuring");
    let mut backend = || open().map_err(|error| BenchError::model("opening the device", error));
    let cost = prefix_cost(&mut backend, &checkpoint, &settings, &plan, &mut clock, &mut |round| {
        bar.set_position(round as u64);
    })?;
    bar.finish_and_clear();
    let time = if own_time { "the computing thread's own time" } else { "time by the clock" };
    let mut out = anstream::stdout().lock();
    writeln!(
        out,
        "{}, {name}: {} rounds of {} prompts of {} tokens, {} new tokens each, draft depth {}; {time}",
        checkpoint.location(),
        plan.rounds,
        plan.sequences,
        plan.prompt_tokens,
        plan.tokens,
        plan.depth
    )?;
    writeln!(out, "a round without the cache        {:8.1} ms", 1e3 * cost.seconds)?;
    writeln!(out, "with the cache, nothing hits     {}", percent(&cost.cache))?;
    writeln!(out, "another engine without (control) {}", percent(&cost.control))?;
    if let Some(file) = file {
        file.finish_json(
            &json!({"model": checkpoint.location(), "device": name, "clock": time, "plan": plan, "cost": cost}),
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

fn percent(ratios: &Ratios) -> String {
    let change = |ratio: f64| 100.0 * (ratio - 1.0);
    let (median, lower, upper) = (change(ratios.median), change(ratios.lower), change(ratios.upper));
    format!("{median:+8.2} % of the time; half of the rounds between {lower:+.2} and {upper:+.2} %")
}

/// Seconds for which this thread has computed, where the system tells (Linux). Other work on the machine does not count.
fn thread_seconds() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let nanoseconds: u64 = text.split_whitespace().next()?.parse().ok()?;
    Some(nanoseconds as f64 * 1e-9)
}
