//! A grid as one page of HTML that needs nothing else: plots as inline SVG, the numbers below each, the data as JSON inside.

mod beside;

use serde_json::Value;

use super::grid::{Cell, Grid};
use super::plot::{Chart, Series, escape, number, put};

/// The page.
#[must_use]
pub fn page(grid: &Grid) -> String {
    let mut out = String::from("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    out.push_str("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n");
    put(&mut out, format_args!("<title>{}</title>\n<style>\n", escape(&grid.title)));
    out.push_str(include_str!("page.css"));
    put(&mut out, format_args!("</style>\n</head>\n<body>\n<main>\n<h1>{}</h1>\n", escape(&grid.title)));
    facts(grid, &mut out);
    tiles(grid, &mut out);
    notes(grid, &mut out);
    throughput(grid, &mut out);
    first_token(grid, &mut out);
    next_tokens(grid, &mut out);
    frontier(grid, &mut out);
    decoding(grid, &mut out);
    prefilling(grid, &mut out);
    beside::beside(grid, &mut out);
    drafts(grid, &mut out);
    requests(grid, &mut out);
    method(grid, &mut out);
    // Nothing in JSON text can end the element then.
    let data = serde_json::to_string(grid).unwrap_or_default().replace('<', "\\u003c");
    put(&mut out, format_args!("<script type=\"application/json\" id=\"data\">{data}</script>\n"));
    out.push_str("</main>\n</body>\n</html>\n");
    out
}

fn text_of(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn facts(grid: &Grid, out: &mut String) {
    let workload: Vec<String> =
        grid.workload.iter().map(|(key, value)| format!("{} {}", key.replace('_', " "), text_of(value))).collect();
    let hardware = grid.metadata.iter().find(|(key, _)| key == "hardware").map(|(_, value)| value.clone());
    let hardware = hardware.or_else(|| grid.environment.get("client_hardware").map(text_of)).unwrap_or_default();
    put(
        out,
        format_args!(
            "<p class=\"facts\">Model {} \u{b7} {} \u{b7} {} UTC<br>{}</p>\n",
            escape(&grid.model),
            escape(&hardware),
            escape(&date(&grid.date)),
            escape(&workload.join(", "))
        ),
    );
}

/// `20261130-055811` as `2026-11-30 05:58`.
fn date(stamp: &str) -> String {
    let part = |from: usize, to: usize| stamp.get(from..to).unwrap_or_default();
    format!("{}-{}-{} {}:{}", part(0, 4), part(4, 6), part(6, 8), part(9, 11), part(11, 13))
}

fn tiles(grid: &Grid, out: &mut String) {
    let cells: Vec<&Cell> = grid.quoted().filter(|cell| cell.completed > 0).collect();
    let Some(best) = cells.iter().max_by(|a, b| a.output_throughput.total_cmp(&b.output_throughput)) else { return };
    let mut tiles =
        vec![(show(best.output_throughput), format!("output tokens a second, concurrency {}", best.concurrency))];
    if let Some(single) = cells.iter().find(|cell| cell.concurrency == 1) {
        if let Some(decode) = &single.decode {
            tiles.push((show(decode.median), "tokens a second, a single stream".to_owned()));
        }
        tiles.push((format!("{} ms", show(single.ttft.median)), "to the first token, alone, median".to_owned()));
    }
    if let Some(prefill) = grid.prefill.iter().max_by(|a, b| a.throughput.total_cmp(&b.throughput)) {
        tiles.push((show(prefill.throughput), "prompt tokens a second, at most".to_owned()));
    }
    if let Some(drafts) = &best.speculation {
        tiles.push((number(drafts.acceptance_length, 0.01), "tokens a step with drafts".to_owned()));
    }
    out.push_str("<div class=\"tiles\">\n");
    for (value, what) in tiles {
        put(out, format_args!("<div class=\"tile\"><b>{value}</b><span>{}</span></div>\n", escape(&what)));
    }
    out.push_str("</div>\n");
}

/// A step that shows about three digits.
fn scale(value: f64) -> f64 {
    match value {
        value if value >= 100.0 => 1.0,
        value if value >= 10.0 => 0.1,
        _ => 0.01,
    }
}

fn show(value: f64) -> String {
    number(value, scale(value))
}

fn notes(grid: &Grid, out: &mut String) {
    let cold = grid.quoted().any(|cell| cell.cold);
    let mut notes = grid.notes.clone();
    if cold {
        let first = "The figures are cold: no whole pass went before them on the same server. Run at least two passes to quote them.";
        notes.insert(0, first.to_owned());
    }
    if grid.stopped {
        notes.insert(0, "The run was stopped before its end.".to_owned());
    }
    if notes.is_empty() {
        return;
    }
    out.push_str("<section><h2>To be known</h2><ul>\n");
    for note in notes {
        put(out, format_args!("<li class=\"bad\">{}</li>\n", escape(&note)));
    }
    out.push_str("</ul></section>\n");
}

/// A section with heading, explanation, plot and table.
fn section(out: &mut String, heading: &str, text: &str, plot: Option<&Chart>, header: &[&str], rows: &[Row]) {
    put(out, format_args!("<section>\n<h2>{}</h2>\n<p>{}</p>\n", escape(heading), escape(text)));
    if let Some(plot) = plot {
        out.push_str(&plot.html());
    }
    out.push_str("<div class=\"wide\"><table>\n<tr>");
    for name in header {
        put(out, format_args!("<th>{}</th>", escape(name)));
    }
    out.push_str("</tr>\n");
    for row in rows {
        out.push_str(if row.cold { "<tr class=\"cold\">" } else { "<tr>" });
        for cell in &row.cells {
            put(out, format_args!("<td>{}</td>", escape(cell)));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</table></div>\n</section>\n");
}

struct Row {
    cold: bool,
    cells: Vec<String>,
}

/// Rows of the quoted pass, then those of the first one.
fn rows(grid: &Grid, of: impl Fn(&Cell) -> Option<Vec<String>>) -> Vec<Row> {
    let row = |cell: &Cell, cold: bool| {
        let name = if cold { format!("{} (first pass)", cell.concurrency) } else { cell.concurrency.to_string() };
        of(cell).map(|cells| Row { cold, cells: std::iter::once(name).chain(cells).collect() })
    };
    let quoted = grid.quoted().filter_map(|cell| row(cell, false));
    quoted.chain(grid.first_pass().filter_map(|cell| row(cell, true))).collect()
}

/// A line over the concurrencies.
fn line<'a>(
    name: &str,
    colour: usize,
    cells: impl Iterator<Item = &'a Cell>,
    of: impl Fn(&Cell) -> Option<f64>,
) -> Series {
    let point = |cell: &Cell| {
        let value = of(cell).filter(|value| value.is_finite())?;
        Some((cell.concurrency as f64, value, format!("concurrency {}", cell.concurrency)))
    };
    Series { points: cells.filter(|cell| cell.completed > 0).filter_map(point).collect(), ..Series::new(name, colour) }
}

fn faint(series: Series) -> Series {
    Series { faint: true, ..series }
}

fn over_concurrency(title: &str, y: &str, series: Vec<Series>) -> Chart {
    let series = series.into_iter().filter(|series| !series.points.is_empty() || !series.bars.is_empty()).collect();
    Chart {
        title: format!("{title} over concurrency"),
        x: "concurrency".to_owned(),
        y: y.to_owned(),
        steps: true,
        labelled: false,
        series,
    }
}

fn throughput(grid: &Grid, out: &mut String) {
    let chart = over_concurrency(
        "Output throughput",
        "output tokens / s",
        vec![
            line("output", 0, grid.quoted(), |cell| Some(cell.output_throughput)),
            faint(line("output, first pass", 0, grid.first_pass(), |cell| Some(cell.output_throughput))),
        ],
    );
    let rows = rows(grid, |cell| {
        let peak = cell.result.get("max_output_tokens_per_s").and_then(Value::as_f64).unwrap_or(0.0);
        Some(vec![
            show(cell.output_throughput),
            show(cell.total_throughput),
            number(cell.request_throughput, 0.001),
            show(peak),
            show(cell.output_throughput / cell.concurrency as f64),
        ])
    });
    let header = ["concurrency", "output tok/s", "in + out tok/s", "requests/s", "peak events/s", "tok/s a place"];
    let text = "Tokens of whole answers divided by the time from the first send to the last end.";
    section(out, "Throughput", text, Some(&chart), &header, &rows);
}

fn first_token(grid: &Grid, out: &mut String) {
    let chart = over_concurrency(
        "Time to first token",
        "ms",
        vec![
            line("median", 1, grid.quoted(), |cell| Some(cell.ttft.median)),
            line("99th percentile", 3, grid.quoted(), |cell| Some(cell.ttft.p99)),
            faint(line("median, first pass", 1, grid.first_pass(), |cell| Some(cell.ttft.median))),
        ],
    );
    let rows = rows(grid, |cell| {
        let (t, e) = (cell.ttft, cell.e2el);
        Some([t.mean, t.median, t.p99, e.median, e.p99].map(show).to_vec())
    });
    let header = ["concurrency", "TTFT mean", "TTFT median", "TTFT P99", "E2EL median", "E2EL P99"];
    let text = "From just before a request is sent, when it has a place, until its first token arrives; E2EL is the whole answer. In milliseconds.";
    section(out, "Time to first token", text, Some(&chart), &header, &rows);
}

fn next_tokens(grid: &Grid, out: &mut String) {
    let chart = over_concurrency(
        "Time per output token",
        "ms",
        vec![
            line("per token, median", 0, grid.quoted(), |cell| Some(cell.tpot.median)),
            line("per token, 99th percentile", 2, grid.quoted(), |cell| Some(cell.tpot.p99)),
            line("between events, 99th percentile", 3, grid.quoted(), |cell| Some(cell.itl.p99)),
            faint(line("per token, median, first pass", 0, grid.first_pass(), |cell| Some(cell.tpot.median))),
        ],
    );
    let rows = rows(grid, |cell| {
        let (t, i) = (cell.tpot, cell.itl);
        Some([t.mean, t.median, t.p99, i.mean, i.median, i.p99].map(show).to_vec())
    });
    let header = ["concurrency", "TPOT mean", "TPOT median", "TPOT P99", "ITL mean", "ITL median", "ITL P99"];
    let text = "In milliseconds. Time per output token is that of an answer behind its first token, divided by its other \
                tokens; inter-token latency is the time between two events, each of which may hold several tokens where \
                drafts are accepted.";
    section(out, "Time per output token", text, Some(&chart), &header, &rows);
}

fn frontier(grid: &Grid, out: &mut String) {
    let points = |cells: &mut dyn Iterator<Item = &Cell>| {
        let fast = cells.filter(|cell| cell.tpot.median > 0.0);
        let point = |cell: &Cell| (1e3 / cell.tpot.median, cell.output_throughput, cell.concurrency.to_string());
        fast.map(point).collect::<Vec<_>>()
    };
    let quoted = Series { points: points(&mut grid.quoted()), ..Series::new("by concurrency", 0) };
    let first = Series { points: points(&mut grid.first_pass()), ..Series::new("first pass", 0) };
    if quoted.points.len() < 2 {
        return;
    }
    let chart = Chart {
        title: "Output throughput over the speed of one answer".to_owned(),
        x: "tokens / s of one answer (1000 / median TPOT)".to_owned(),
        y: "output tokens / s".to_owned(),
        steps: false,
        labelled: true,
        series: [quoted, faint(first)].into_iter().filter(|series| !series.points.is_empty()).collect(),
    };
    let rows = rows(grid, |cell| {
        (cell.tpot.median > 0.0).then(|| vec![show(1e3 / cell.tpot.median), show(cell.output_throughput)])
    });
    let text = "What everybody gets together against what one user sees; up and right is better.";
    section(
        out,
        "Speed against throughput",
        text,
        Some(&chart),
        &["concurrency", "tok/s of one", "tok/s of all"],
        &rows,
    );
}

fn decoding(grid: &Grid, out: &mut String) {
    if grid.quoted().all(|cell| cell.decode.is_none()) {
        return;
    }
    let mut early = Series::new("first half to begin, slowest to fastest", 1);
    let mut late = Series::new("second half", 2);
    for cell in grid.quoted() {
        let Some(decode) = &cell.decode else { continue };
        let at = cell.concurrency as f64;
        early.bars.push((at, decode.early.min, decode.early.max));
        late.bars.extend(decode.late.map(|band| (at, band.min, band.max)));
    }
    let median = line("median of all streams", 0, grid.quoted(), |cell| cell.decode.as_ref().map(|found| found.median));
    let overlap = line("while all decode", 3, grid.quoted(), |cell| {
        cell.decode.as_ref().and_then(|found| found.overlap).map(|overlap| overlap.per_stream)
    });
    let chart =
        over_concurrency("Decode rate of a stream", "tokens / s of a stream", vec![median, overlap, early, late]);
    let rows = rows(grid, |cell| {
        let decode = cell.decode.as_ref()?;
        let band = |band: super::protocol::Band| format!("{} \u{2013} {}", show(band.min), show(band.max));
        let overlap = decode.overlap;
        let either =
            |of: &dyn Fn(super::protocol::Overlap) -> f64| overlap.map_or("\u{2013}".to_owned(), |o| show(of(o)));
        Some(vec![
            decode.streams.to_string(),
            decode.too_short.to_string(),
            show(decode.median),
            band(decode.early),
            decode.late.map_or("\u{2013}".to_owned(), band),
            either(&|o| o.seconds),
            either(&|o| o.per_stream),
            either(&|o| o.throughput),
        ])
    });
    let header = ["concurrency", "streams", "short", "median", "early", "late", "overlap s", "each", "all"];
    let text = "Tokens a second behind the first token, prefill left out. Streams are halved by when their first token came: \
                the early ones decode beside the prefills of the late ones. Overlap is the time in which \
                every place was decoding and none reading a prompt. Streams of less than 50 ms are dropped.";
    section(out, "Decoding alone", text, Some(&chart), &header, &rows);
}

fn prefilling(grid: &Grid, out: &mut String) {
    if grid.prefill.is_empty() {
        return;
    }
    let mut series = Series::new("prompt tokens / s", 2);
    let mut rows = Vec::new();
    for prefill in &grid.prefill {
        let c = prefill.concurrency;
        series.points.push((c as f64, prefill.throughput, format!("concurrency {c}")));
        let ratio = prefill.serialization.map_or("\u{2013}".to_owned(), |ratio| number(ratio, 0.01));
        let cells = vec![
            c.to_string(),
            prefill.tokens.to_string(),
            number(prefill.seconds, 0.001),
            show(prefill.throughput),
            ratio,
        ];
        rows.push(Row { cold: false, cells });
    }
    let chart = over_concurrency("Prefill throughput", "prompt tokens / s", vec![series]);
    let header = ["prompts at once", "tokens", "seconds", "tok/s", "serialization"];
    let text = "As many prompts of one length at once as the concurrency says, one token asked for: their tokens divided by \
                the time until the last one has its first token. Serialization is that time over the time of one prompt \
                alone (the median of three) times the number of prompts: 1 reads them one after the other.";
    section(out, "Prefill ceiling", text, Some(&chart), &header, &rows);
}

fn drafts(grid: &Grid, out: &mut String) {
    let depth = grid.quoted().filter_map(|cell| cell.speculation.as_ref()).map(|run| run.by_position.len()).max();
    let Some(depth) = depth else { return };
    let chart = over_concurrency(
        "Tokens a verified draft",
        "tokens a step",
        vec![line("acceptance length", 3, grid.quoted(), |cell| {
            cell.speculation.as_ref().map(|run| run.acceptance_length)
        })],
    );
    let positions: Vec<String> = (1..=depth).map(|position| format!("draft {position} %")).collect();
    let mut header = vec!["concurrency", "drafts", "accepted %", "length"];
    header.extend(positions.iter().map(String::as_str));
    let rows = rows(grid, |cell| {
        let run = cell.speculation.as_ref()?;
        let mut cells =
            vec![run.drafts.to_string(), number(run.acceptance_rate, 0.1), number(run.acceptance_length, 0.01)];
        cells.extend(run.by_position.iter().map(|rate| number(100.0 * rate, 0.1)));
        cells.resize(3 + depth, String::new());
        Some(cells)
    });
    let text = "From the server's own counters: how many tokens a verification yields, its own included, and how often a draft \
                is accepted up to a place.";
    section(out, "Drafts", text, Some(&chart), &header, &rows);
}

fn requests(grid: &Grid, out: &mut String) {
    let rows = rows(grid, |cell| {
        let count = |key: &str| cell.result.get(key).and_then(Value::as_u64).unwrap_or(0).to_string();
        let hits = cell.prefix_hits.map_or("\u{2013}".to_owned(), |hits| number(100.0 * hits, 0.1));
        let errors = if cell.errors.is_empty() { "\u{2013}".to_owned() } else { cell.errors.join("; ") };
        Some(vec![
            cell.requests.to_string(),
            cell.completed.to_string(),
            cell.failed.to_string(),
            cell.timed_out.to_string(),
            count("total_input_tokens"),
            count("total_output_tokens"),
            hits,
            errors,
        ])
    });
    let header = [
        "concurrency",
        "requests",
        "whole",
        "failed",
        "timed out",
        "tokens in",
        "tokens out",
        "prefix hits %",
        "reasons",
    ];
    let text = "Failed requests count here and in no other figure.";
    section(out, "Requests", text, None, &header, &rows);
}

fn method(grid: &Grid, out: &mut String) {
    out.push_str("<section>\n<h2>How it was measured</h2>\n<p>The grid ran as often as passes are shown; each cell sends its \
                  requests at once and lets as many through as the concurrency says. Every cell and pass has prompts of its \
                  own unless equal ones were asked for. All numbers, with the hash of each cell's prompts, are in this page \
                  as JSON (element <code>#data</code>).</p>\n<dl>\n");
    let metadata = grid.metadata.iter().map(|(key, value)| (key.clone(), value.clone()));
    let environment = grid.environment.iter().map(|(key, value)| {
        let text = match value {
            Value::Array(list) => list.iter().map(text_of).collect::<Vec<_>>().join(" "),
            Value::Null => "\u{2013}".to_owned(),
            other => text_of(other),
        };
        (key.clone(), text)
    });
    for (key, value) in metadata.chain(environment) {
        put(out, format_args!("<dt>{}</dt><dd>{}</dd>\n", escape(&key.replace('_', " ")), escape(&value)));
    }
    out.push_str("</dl>\n</section>\n");
}
