//! A run as the table that people compare: the established tool's titles, labels and widths.

use std::fmt::Write as _;

use super::report::Report;
use super::summary::Metric;

const WIDTH: usize = 50;

/// A line with a label and a value.
fn line(out: &mut String, label: &str, value: impl std::fmt::Display) {
    // Writing to a string does not fail.
    let _infallible = writeln!(out, "{label:<40} {:<10}", value.to_string());
}

fn decimals(value: f64) -> String {
    format!("{value:.2}")
}

fn title(out: &mut String, text: &str, fill: char) {
    let space = WIDTH.saturating_sub(text.chars().count());
    let (left, right) = (space / 2, space - space / 2);
    let side = |count: usize| std::iter::repeat_n(fill, count);
    out.extend(side(left));
    out.push_str(text);
    out.extend(side(right));
    out.push('\n');
}

/// The table of a run.
#[must_use]
pub fn table(report: &Report) -> String {
    let (mut out, s) = (String::new(), &report.summary);
    let out = &mut out;
    title(out, " Serving Benchmark Result ", '=');
    line(out, "Successful requests:", s.completed);
    line(out, "Failed requests:", s.failed);
    if let Some(most) = report.settings.concurrency {
        line(out, "Maximum request concurrency:", most);
    }
    if report.settings.traffic.rate.is_finite() {
        line(out, "Request rate configured (RPS):", decimals(report.settings.traffic.rate));
    }
    line(out, "Benchmark duration (s):", decimals(s.duration));
    line(out, "Total input tokens:", s.input_tokens);
    line(out, "Total generated tokens:", s.output_tokens);
    line(out, "Request throughput (req/s):", decimals(s.request_throughput()));
    if let Some(goodput) = s.goodput() {
        line(out, "Request goodput (req/s):", decimals(goodput));
    }
    line(out, "Output token throughput (tok/s):", decimals(s.output_throughput()));
    line(out, "Peak output token throughput (tok/s):", decimals(s.peak_events as f64));
    line(out, "Peak concurrent requests:", decimals(s.peak_requests as f64));
    line(out, "Total token throughput (tok/s):", decimals(s.total_throughput()));
    probes(out, report);
    for metric in Metric::ALL.into_iter().filter(|&metric| report.shows(metric)) {
        let sample = s.sample(metric);
        let label = metric.label();
        title(out, metric.title(), '-');
        line(out, &format!("Mean {label} (ms):"), decimals(1e3 * sample.mean()));
        line(out, &format!("Median {label} (ms):"), decimals(1e3 * sample.median()));
        for &percent in &report.settings.percentiles {
            line(out, &format!("P{percent} {label} (ms):"), decimals(1e3 * sample.percentile(percent)));
        }
    }
    if let Some(run) = &report.speculation {
        title(out, "Speculative Decoding", '-');
        line(out, "Acceptance rate (%):", decimals(run.acceptance_rate));
        line(out, "Acceptance length:", decimals(run.acceptance_length));
        line(out, "Drafts:", run.drafts);
        line(out, "Draft tokens:", run.draft_tokens);
        line(out, "Accepted tokens:", run.accepted_tokens);
        if !run.by_position.is_empty() {
            out.push_str("Per-position acceptance (%):\n");
        }
        for (position, rate) in run.by_position.iter().enumerate() {
            line(out, &format!("  Position {position}:"), decimals(100.0 * rate));
        }
    }
    if let Some(quality) = &report.quality {
        title(out, "Right Answers", '-');
        for epoch in &quality.epochs {
            line(out, &format!("Epoch {} (%):", epoch.epoch), decimals(epoch.score));
        }
        line(out, "All epochs (%):", decimals(quality.score));
        line(out, "Standard deviation (%):", decimals(quality.sigma));
        line(out, "Answers cut off:", quality.truncated);
    }
    title(out, "", '=');
    std::mem::take(out)
}

fn probes(out: &mut String, report: &Report) {
    let Some(probes) = report.probes().filter(|probes| !probes.latencies.is_empty()) else { return };
    title(out, "Probe Requests", '-');
    line(out, "Probe requests completed:", probes.latencies.len());
    line(out, "Probe requests failed:", probes.failed);
    line(out, "Median probe E2EL (ms):", decimals(1e3 * probes.latencies.median()));
    line(out, "P99 probe E2EL (ms):", decimals(1e3 * probes.latencies.percentile(99.0)));
    line(out, "Max probe E2EL (ms):", decimals(1e3 * probes.latencies.max()));
}
