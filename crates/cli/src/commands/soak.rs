//! `glimmer bench soak`: whether a server stays as it was under many clients, some of them badly behaved.

use std::{io::Write as _, process::ExitCode, time::Duration};

use anyhow::{Context as _, bail};
use glimmer_bench::soak::{SoakOptions, SoakReport, soak};

use crate::{args::BenchSoakArgs, output::OutputFile};

/// The default server: so few pages behind 64 slots that answers outgrow them, and prompts first, so that all slots are taken
/// on a slow machine as well.
const TIGHT: [&str; 8] =
    ["--kv-cache-memory-bytes", "50M", "--state-checkpoints", "8", "--max-model-len", "4096", "--itl-target-ms", "0"];
/// Longest run.
const MOST_MINUTES: f64 = 1e5;

/// Runs it against a server of this program. Exit code 1 when something was not as it should be.
pub(crate) fn run(args: &BenchSoakArgs, threads: Option<u16>) -> anyhow::Result<ExitCode> {
    let file = OutputFile::prepare_optional(args.json.as_deref())?;
    if !(args.minutes > 0.0 && args.minutes <= MOST_MINUTES) {
        bail!("--minutes {}: expected more than 0 and at most {MOST_MINUTES}", args.minutes);
    }
    let mut flags = args.flags.clone();
    let own = flags.is_empty();
    if own {
        flags.extend(TIGHT.map(Into::into));
    }
    if let Some(threads) = threads {
        flags.extend(["--threads".into(), threads.to_string().into()]);
    }
    let options = SoakOptions {
        program: std::env::current_exe().context("cannot find this program's own file")?,
        flags,
        clients: args.clients as usize,
        sequences: args.sequences as usize,
        time: Duration::from_secs_f64(60.0 * args.minutes),
        requests: args.requests,
        preempting: own && args.requests.is_none(),
        compare: args.compare,
        seed: args.seed,
    };
    let mut out = anstream::stdout().lock();
    // A line that cannot be written must not end the run; the last write reports it.
    let report = soak(&options, &mut |line| {
        let _reported_at_the_end = writeln!(out, "{line}").and_then(|()| out.flush());
    })?;
    print(&report, &mut out)?;
    if let Some(file) = file {
        file.finish_json(&report)?;
    }
    Ok(if report.holds() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn print(report: &SoakReport, out: &mut impl std::io::Write) -> std::io::Result<()> {
    let answers: u64 = report.answers.values().sum();
    writeln!(out, "{} clients, {:.0} s, seed {}", report.clients, report.seconds, report.seed)?;
    writeln!(out, "answers          {answers}: {}", counts(&report.answers))?;
    writeln!(out, "asked-for errors {}", counts(&report.refusals))?;
    writeln!(out, "left             {}, answered before that {}", report.left, report.too_late)?;
    writeln!(
        out,
        "server           {} tokens, {} aborts, {} preemptions, {:.0} % of prompt tokens cached, {} pictures known, {} drafts \
         stood",
        report.generated_tokens,
        report.aborts,
        report.preemptions,
        100.0 * report.prefix_hit_rate,
        report.image_hits,
        report.accepted_drafts
    )?;
    let [running, waiting, pages] = report.peaks;
    writeln!(out, "at most          {running} running, {waiting} waiting, {:.0} % of the pages held", 100.0 * pages)?;
    let quarters: Vec<String> = report.memory.quarters().iter().map(|mib| format!("{mib:.1}")).collect();
    let flat = report.memory.flat().map_or("too short to tell", |flat| if flat { "flat" } else { "it grows" });
    writeln!(out, "memory           {} MiB at most in each quarter: {flat}", quarters.join(", "))?;
    let yes = |yes: bool| if yes { "yes" } else { "no" };
    writeln!(out, "idle at the end  {}, all slots free {}", yes(report.idle), yes(report.refilled))?;
    writeln!(out, "alone again      {} compared, {} differ", report.compared, report.different)?;
    writeln!(out, "problems         {}", report.problem_count)?;
    for problem in &report.problems {
        writeln!(out, "  {problem}")?;
    }
    Ok(())
}

/// As `name count, name count`.
fn counts<K: std::fmt::Display>(counts: &std::collections::BTreeMap<K, u64>) -> String {
    let each: Vec<String> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    each.join(", ")
}
