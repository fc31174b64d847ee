//! Grids, the measurements beyond the common table, and the page.

use std::time::Duration;

use glimmer_bench::serve::ServeBenchError;
use glimmer_bench::serve::arrival::Traffic;
use glimmer_bench::serve::dataset::RandomShape;
use glimmer_bench::serve::exchange::{Api, Outcome};
use glimmer_bench::serve::grid::{Grid, GridPlan, GridProgress, run_grid};
use glimmer_bench::serve::interference::interference;
use glimmer_bench::serve::page::page;
use glimmer_bench::serve::protocol::{Band, decode, prefill};
use glimmer_bench::serve::report::Settings;
use glimmer_bench::serve::summary::Metric;
use glimmer_bench::serve::workload::Workload;
use glimmer_engine::request::FinishReason;
use glimmer_server::app::Options;
use glimmer_server::engine::{Counters, Refusal};
use glimmer_server::scripted::{End, Script};

use crate::support::{format, run, scripted, target};

fn stream(start: f64, events: &[f64]) -> Outcome {
    Outcome { start, events: events.to_vec(), prompt_tokens: 100, ..Outcome::default() }
}

fn close(found: f64, wanted: f64) {
    assert!((found - wanted).abs() < 1e-9, "{found} is not {wanted}");
}

#[test]
fn decode_rates_leave_prefill_out_and_do_not_mix_cohorts() {
    let outcomes = [
        stream(0.0, &[1.0, 2.0, 3.0]),
        stream(0.0, &[1.5, 2.5]),
        stream(0.5, &[1.5, 4.0]),
        // A hundred tokens in 20 ms are a buffer's rate.
        stream(0.0, &[0.1, 0.12]),
        stream(0.0, &[0.2]),
        Outcome { error: Some("cut".to_owned()), ..stream(0.0, &[0.1, 9.0]) },
    ];
    let found = decode(&outcomes, &[5, 4, 6, 100, 1, 0], 3).unwrap();
    assert_eq!((found.streams, found.too_short), (3, 1));
    close(found.median, 2.0);
    assert_eq!(found.early, Band { streams: 2, min: 2.0, max: 3.0 });
    assert_eq!(found.late, Some(Band { streams: 1, min: 2.0, max: 2.0 }));
    // All three decode from 2.0 to 2.5; the event of the second, which stands for three tokens, is the only one.
    let overlap = found.overlap.unwrap();
    close(overlap.seconds, 0.5);
    close(overlap.throughput, 6.0);
    close(overlap.per_stream, 2.0);
    assert_eq!(decode(&outcomes, &[5, 4, 6, 100, 1, 0], 4).unwrap().overlap, None, "four never decode together");
    let few = decode(&outcomes[..2], &[5, 4], 2).unwrap_err();
    assert!(few.starts_with("2 whole answers"), "{few}");
    let short = decode(&outcomes[1..5], &[4, 6, 100, 1], 2).unwrap_err();
    assert!(short.starts_with("2 answers decode for 50 ms or longer"), "{short}");
}

#[test]
fn the_prefill_ceiling_is_all_tokens_until_the_last_first_token() {
    let outcomes = [stream(1.0, &[1.0]), stream(1.0, &[2.0]), stream(1.1, &[2.9])];
    let found = prefill(&outcomes, Some(1.0)).unwrap();
    assert_eq!((found.concurrency, found.tokens), (3, 300));
    close(found.seconds, 3.0);
    close(found.throughput, 100.0);
    close(found.serialization.unwrap(), 1.0);
    assert_eq!(prefill(&outcomes, None).unwrap().serialization, None);
    let failed = [Outcome { error: Some("busy".to_owned()), ..Outcome::default() }];
    assert_eq!(prefill(&failed, None), Err("busy".to_owned()));
}

fn settings() -> Settings {
    Settings {
        backend: "openai".to_owned(),
        label: None,
        model: "m<icro>".to_owned(),
        tokenizer: "micro".to_owned(),
        num_prompts: 0,
        traffic: Traffic::AT_ONCE,
        concurrency: None,
        metrics: vec![Metric::Ttft, Metric::Tpot, Metric::Itl, Metric::E2el],
        percentiles: vec![99.0],
        goodput: None,
        metadata: vec![("hardware".to_owned(), "two cores".to_owned())],
        environment: serde_json::Map::new(),
    }
}

fn plan(cells: &[(usize, usize)], passes: usize) -> GridPlan {
    GridPlan { cells: cells.to_vec(), passes, prefill: true, same_prompts: false, seed: 5 }
}

fn workload() -> Workload {
    Workload::Random(RandomShape { input: 12, output: 5, prefix: 0, input_ratio: 0.2, output_ratio: 0.0 })
}

async fn grid(port: u16, plan: &GridPlan, progress: &mut dyn FnMut(GridProgress)) -> Result<Grid, ServeBenchError> {
    let (target, format) = (target(port, Api::Completions), format());
    run_grid(plan, &target, &workload(), &format, &settings(), "A </title> grid", progress, std::future::pending())
        .await
}

fn script() -> Script {
    Script {
        steps: vec![vec![65]; 5],
        end: End::Finish(FinishReason::Length),
        first: Duration::from_millis(5),
        pace: Duration::from_millis(40),
    }
}

/// What must hold of every page.
fn check_page(grid: &Grid) -> String {
    let html = page(grid);
    for outside in ["src=", "href=", "@import", "url(", "<link"] {
        assert!(!html.contains(outside), "{outside} on the page");
    }
    for tag in ["section", "svg", "table", "tr", "td", "g", "div", "dl", "ul", "main", "script"] {
        let opened = html.matches(&format!("<{tag}>")).count() + html.matches(&format!("<{tag} ")).count();
        assert_eq!(opened, html.matches(&format!("</{tag}>")).count(), "{tag}");
    }
    let (drawn, data) = html.split_once("<script type=\"application/json\" id=\"data\">").unwrap();
    assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "every place is a number");
    let data = data.split("</script>").next().unwrap();
    let data: Grid = serde_json::from_str(data).unwrap();
    assert_eq!(data.cells.len(), grid.cells.len());
    for (found, cell) in data.cells.iter().zip(&grid.cells) {
        assert_eq!((&found.prompts_sha256, &found.errors), (&cell.prompts_sha256, &cell.errors));
        close(found.output_throughput, cell.output_throughput);
    }
    html
}

#[test]
fn the_second_pass_is_warm_and_has_prompts_of_its_own() {
    let (port, engine) = scripted(Options::default(), |_| Ok(script()));
    let drafts = |steps: u64| Counters {
        drafts: steps,
        draft_tokens: 2 * steps,
        accepted_by_position: vec![steps / 2, steps / 4],
        prefix_queries: 100 * steps,
        prefix_hits: steps,
        ..Counters::default()
    };
    let mut seen = (0, Vec::new());
    let mut progress = |event: GridProgress| match event {
        GridProgress::Request => {
            seen.0 += 1;
            engine.set_counters(drafts(100 * seen.0));
        }
        GridProgress::Cell(pass, concurrency, requests) => seen.1.push((pass, concurrency, requests)),
    };
    let plan = plan(&[(1, 3), (2, 4)], 2);
    let grid = run(grid(port, &plan, &mut progress)).unwrap();
    assert_eq!(seen, (14, vec![(0, 1, 3), (0, 2, 4), (1, 1, 3), (1, 2, 4)]));
    assert_eq!(plan.requests(), 14);
    assert_eq!(grid.cells.iter().map(|cell| cell.cold).collect::<Vec<_>>(), [true, true, false, false]);
    assert_eq!(grid.notes, Vec::<String>::new());
    let hashes: Vec<&String> = grid.cells.iter().map(|cell| &cell.prompts_sha256).collect();
    assert!(hashes.iter().enumerate().all(|(index, hash)| !hashes[..index].contains(hash)), "no prompt comes twice");
    let last = grid.quoted().last().unwrap();
    assert_eq!((last.completed, last.failed, last.concurrency), (4, 0, 2));
    assert!(last.output_throughput > 0.0 && last.e2el.median >= 5.0 + 4.0 * 40.0);
    assert!(last.decode.as_ref().unwrap().median > 0.0);
    let speculation = last.speculation.as_ref().unwrap();
    assert_eq!(speculation.by_position, [0.5, 0.25]);
    close(last.prefix_hits.unwrap(), 0.01);
    assert_eq!((&last.result["cold"], &last.result["num_prompts"]), (&false.into(), &4.into()));
    assert_eq!(grid.prefill.iter().map(|found| found.concurrency).collect::<Vec<_>>(), [1, 2]);
    assert!(
        engine.seen().iter().rev().take(5).all(|request| request.limits.max_tokens == 1),
        "prefills ask for one token"
    );
    let html = check_page(&grid);
    for heading in ["Throughput", "Time to first token", "Decoding alone", "Prefill ceiling", "Drafts", "Requests"] {
        assert!(html.contains(&format!("<h2>{heading}</h2>")), "{heading}");
    }
    assert!(html.contains("A &lt;/title&gt; grid") && html.contains("m&lt;icro&gt;") && !html.contains("To be known"));
    // The same prompts again only where that was asked for.
    let again = GridPlan { same_prompts: true, prefill: false, ..plan };
    let again = run(self::grid(port, &again, &mut |_| ())).unwrap();
    assert_eq!(again.cells[0].prompts_sha256, again.cells[2].prompts_sha256);
    assert!(again.prefill.is_empty());
}

#[test]
fn a_restart_between_passes_and_a_single_pass_are_cold() {
    let (port, engine) = scripted(Options::default(), |_| Ok(script()));
    engine.set_counters(Counters { prefix_queries: 1000, ..Counters::default() });
    let mut progress = |event: GridProgress| {
        if let GridProgress::Cell(1, 1, _) = event {
            engine.set_counters(Counters::default());
        }
    };
    let grid = run(grid(port, &plan(&[(1, 3)], 2), &mut progress)).unwrap();
    assert!(grid.cells.iter().all(|cell| cell.cold));
    assert_eq!(grid.notes, ["the server was restarted before pass 2, concurrency 1"]);
    assert!(check_page(&grid).contains("The figures are cold"));
    let (port, _engine) = scripted(Options::default(), |_| Ok(script()));
    let single = run(self::grid(port, &plan(&[(1, 3)], 1), &mut |_| ())).unwrap();
    assert!(single.cells[0].cold && check_page(&single).contains("The figures are cold"));
}

#[test]
fn two_replicas_are_measured_alone_and_side_by_side() {
    let (port, first) = scripted(Options::default(), |_| Ok(script()));
    let (other, second) = scripted(Options::default(), |_| Ok(script()));
    let (a, b, format) = (target(port, Api::Completions), target(other, Api::Completions), format());
    let mut told = Vec::new();
    let mut progress = |concurrency: usize| told.push(concurrency);
    let cells = [(1, 2), (2, 4)];
    let found = run(interference(&cells, [&a, &b], &workload(), &format, 3, &mut progress, std::future::pending()));
    let found = found.unwrap();
    assert_eq!(told, [1, 2]);
    for (row, (concurrency, requests)) in found.iter().zip(cells) {
        assert_eq!((row.concurrency, row.requests, row.failed), (concurrency, requests, 0));
        // Scripts take their time whatever stands beside them.
        assert!(row.ratio.iter().chain([&row.total_ratio]).all(|ratio| ratio.unwrap() > 0.5), "{row:?}");
    }
    // Each replica saw each cell twice, and no prompt more than once.
    let seen: Vec<_> = [&first, &second].into_iter().flat_map(|engine| engine.seen()).collect();
    assert_eq!([first.seen().len(), second.seen().len()], [12, 12]);
    let different: std::collections::BTreeSet<_> = seen.iter().map(|request| request.prompt.clone()).collect();
    assert_eq!(different.len(), 24);
    let mut grid = run(grid(port, &plan(&[(1, 3)], 1), &mut |_| ())).unwrap();
    grid.interference = found;
    assert!(check_page(&grid).contains("<h2>Two replicas side by side</h2>"));
}

#[test]
fn failures_are_rows_and_cells_without_answers_break_nothing() {
    let (port, _engine) = scripted(Options::default(), |request| match request.prompt.len() % 2 {
        0 => Ok(script()),
        _ => Err(Refusal::Overloaded { reason: "the queue is full".to_owned(), retry_after_s: 1 }),
    });
    let some = run(grid(port, &plan(&[(2, 6)], 2), &mut |_| ())).unwrap();
    let cell = some.quoted().next().unwrap();
    assert_eq!(cell.completed + cell.failed, 6);
    assert!(cell.failed > 0 && cell.errors.len() == 1 && cell.errors[0].starts_with("HTTP 503"), "{:?}", cell.errors);
    assert!(check_page(&some).contains("HTTP 503"));
    let (port, _engine) = scripted(Options { api_keys: vec!["k".to_owned()], ..Options::default() }, |_| Ok(script()));
    let none = run(grid(port, &plan(&[(1, 2)], 2), &mut |_| ())).unwrap();
    assert_eq!(none.quoted().next().unwrap().completed, 0);
    assert!(none.cells.iter().all(|cell| cell.cold), "a pass without answers warms nothing");
    assert!(none.notes.iter().any(|note| note.contains("no decode rates")));
    assert!(none.notes.iter().any(|note| note.contains("no prefill ceiling at concurrency 1: HTTP 401")));
    check_page(&none);
}

#[test]
fn plans_that_measure_nothing_are_refused_by_name() {
    for (plan, flag) in [
        (plan(&[], 2), "--concurrency"),
        (plan(&[(0, 8)], 2), "--concurrency"),
        (plan(&[(4, 3)], 2), "--num-prompts: 3 requests never reach a concurrency of 4"),
        (plan(&[(4, 4)], 0), "--passes"),
    ] {
        let error = plan.check().unwrap_err().to_string();
        assert!(error.starts_with(flag), "{error}");
    }
    assert_eq!([1, 2, 8].map(GridPlan::usual_requests), [8, 8, 32]);
}
