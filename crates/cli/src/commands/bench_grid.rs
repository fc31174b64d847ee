//! `glimmer bench grid`: load tests over concurrencies, and their page.

use std::{io::Write as _, process::ExitCode};

use anyhow::bail;
use glimmer_bench::serve::{
    arrival::Traffic,
    client::Address,
    grid::{Cell, Grid, GridPlan, GridProgress, run_grid},
    interference::{Interference, interference},
    page::page,
    report::Settings,
    summary::Metric,
};

use super::bench_serve::{Session, backend, interrupted, runtime, workload};
use super::local_server::LocalServer;
use crate::{load_args::BenchGridArgs, output::OutputFile, progress};

/// Exit codes: 0 when every cell has an answer, 1 when one has none.
pub(crate) fn run(args: &BenchGridArgs, threads: Option<u16>) -> anyhow::Result<ExitCode> {
    let plan = plan(args)?;
    plan.check()?;
    if args.server.base_url.is_some() && !args.serve_flags.is_empty() {
        bail!("flags behind -- are for the server that this command starts itself; with --base-url there is none");
    }
    let html = OutputFile::prepare(&args.html)?;
    let json = OutputFile::prepare_optional(args.json.as_deref())?;
    let workload = workload(&args.dataset, args.server.backend)?;
    let second = args.beside.as_deref().map(|url| Address::parse("--beside", url)).transpose()?;
    let mut err = anstream::stderr();
    let mut local = None;
    let address = match &args.server.base_url {
        Some(url) => Address::parse("--base-url", url)?,
        None => {
            writeln!(err, "starting a server in this process; --base-url measures another one")?;
            let server = local.insert(LocalServer::start(&args.serve_flags, threads)?);
            writeln!(err, "serving on {} ({})", server.url, server.place)?;
            Address::parse("--base-url", &server.url)?
        }
    };
    let grid = runtime()?.block_on(async {
        let session = Session::open(&args.server, address).await?;
        let mut environment = session.environment("").await;
        // Every cell has prompts of its own, and its own hash.
        environment.remove("prompts_sha256");
        if let Some(server) = &local {
            environment.insert("server".to_owned(), format!("in this process, {}", server.place).into());
        }
        let settings = Settings {
            backend: backend(args.server.backend).to_owned(),
            label: None,
            model: session.model_id.clone(),
            tokenizer: session.tokenizer_id.clone(),
            num_prompts: 0,
            traffic: Traffic::AT_ONCE,
            concurrency: None,
            metrics: vec![Metric::Ttft, Metric::Tpot, Metric::Itl, Metric::E2el],
            percentiles: vec![50.0, 90.0, 99.0],
            goodput: None,
            metadata: args.metadata.clone(),
            environment,
        };
        let target = session.target(&args.server, &args.request, &workload);
        let bar = (!args.disable_tqdm).then(|| progress::bar(plan.requests() as u64, "requests"));
        let mut report = |event: GridProgress| {
            if let Some(bar) = &bar {
                match event {
                    GridProgress::Request => bar.inc(1),
                    GridProgress::Cell(pass, concurrency, _) => {
                        bar.set_message(format!("pass {}, concurrency {concurrency}", pass + 1));
                    }
                }
            }
        };
        let title = args.title.clone().unwrap_or_else(|| format!("Serving {}", session.model_id));
        let format = &session.format;
        let grid = run_grid(&plan, &target, &workload, format, &settings, &title, &mut report, interrupted()).await;
        let mut grid = grid?;
        if let Some(second) = second.filter(|_| !grid.stopped) {
            let second = Session::open(&args.server, second).await?.target(&args.server, &args.request, &workload);
            let mut report = |concurrency: usize| {
                if let Some(bar) = &bar {
                    bar.set_message(format!("side by side, concurrency {concurrency}"));
                }
            };
            let replicas = [&target, &second];
            let seed = args.dataset.seed.wrapping_add(1);
            grid.interference =
                interference(&plan.cells, replicas, &workload, format, seed, &mut report, interrupted()).await?;
        }
        if let Some(bar) = &bar {
            bar.finish_and_clear();
        }
        anyhow::Ok(grid)
    })?;
    drop(local);
    write!(anstream::stdout().lock(), "{}", table(&grid))?;
    for note in &grid.notes {
        writeln!(err, "note: {note}")?;
    }
    html.finish(page(&grid).as_bytes())?;
    writeln!(err, "page: {}", args.html.display())?;
    if let Some(json) = json {
        json.finish_json(&grid)?;
    }
    let empty = grid.cells.iter().any(|cell| cell.completed == 0) || grid.cells.is_empty();
    Ok(if empty { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn plan(args: &BenchGridArgs) -> anyhow::Result<GridPlan> {
    let requests = |index: usize, concurrency: usize| match args.num_prompts.as_slice() {
        [] => Ok(GridPlan::usual_requests(concurrency)),
        [all] => Ok(*all),
        each if each.len() == args.concurrency.len() => Ok(each[index]),
        each => bail!(
            "--num-prompts: {} numbers for {} concurrencies; give one for all or one for each",
            each.len(),
            args.concurrency.len()
        ),
    };
    let cell = |(index, &concurrency): (usize, &usize)| anyhow::Ok((concurrency, requests(index, concurrency)?));
    Ok(GridPlan {
        cells: args.concurrency.iter().enumerate().map(cell).collect::<Result<_, _>>()?,
        passes: args.passes,
        prefill: !args.skip_prefill,
        same_prompts: args.same_prompts,
        seed: args.dataset.seed,
    })
}

/// The quoted pass as a table for the terminal.
fn table(grid: &Grid) -> String {
    let header =
        ["conc", "requests", "failed", "out tok/s", "TTFT med", "TTFT P99", "TPOT med", "ITL P99", "tok/s one"];
    let row = |cell: &Cell| {
        let decode = cell.decode.as_ref().map_or("-".to_owned(), |decode| format!("{:.1}", decode.median));
        let ms = |value: f64| format!("{value:.1}");
        vec![
            cell.concurrency.to_string(),
            cell.requests.to_string(),
            cell.failed.to_string(),
            format!("{:.1}", cell.output_throughput),
            ms(cell.ttft.median),
            ms(cell.ttft.p99),
            ms(cell.tpot.median),
            ms(cell.itl.p99),
            decode,
        ]
    };
    let rows: Vec<Vec<String>> = grid.quoted().map(row).collect();
    let heat = if grid.quoted().any(|cell| cell.cold) { "cold" } else { "warm" };
    let table = glimmer_bench::plain_table(&header.map(str::to_owned), &rows, 0);
    let beside = if grid.interference.is_empty() { String::new() } else { beside(&grid.interference) };
    format!("{heat} pass; times in ms; tok/s one: a stream's median behind its first token\n{table}\n{beside}")
}

/// Two replicas side by side as a table for the terminal.
fn beside(all: &[Interference]) -> String {
    let header = ["conc", "alone", "second", "together", "second", "ratio", "second", "of both", "failed"];
    let ratio = |ratio: Option<f64>| ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}"));
    let row = |found: &Interference| {
        let rates = found.alone.iter().chain(&found.together).map(|rate| format!("{rate:.1}"));
        let ratios = found.ratio.into_iter().chain([found.total_ratio]).map(ratio);
        let cells = std::iter::once(found.concurrency.to_string()).chain(rates).chain(ratios);
        cells.chain([found.failed.to_string()]).collect()
    };
    let rows: Vec<Vec<String>> = all.iter().map(row).collect();
    let table = glimmer_bench::plain_table(&header.map(str::to_owned), &rows, 0);
    format!("two replicas side by side: output tokens a second, each alone and both at once\n{table}\n")
}
