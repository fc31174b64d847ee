//! The section about two replicas side by side.

use super::super::grid::Grid;
use super::super::plot::{Series, number};
use super::{Row, over_concurrency, section, show};

/// Rates alone and together, and their ratios.
pub(super) fn beside(grid: &Grid, out: &mut String) {
    if grid.interference.is_empty() {
        return;
    }
    let ratio = |ratio: Option<f64>| ratio.map_or("\u{2013}".to_owned(), |ratio| number(ratio, 0.001));
    let mut series = [Series::new("this server", 0), Series::new("the second one", 1)];
    let mut rows = Vec::new();
    for found in &grid.interference {
        let at = found.concurrency as f64;
        for (line, of) in series.iter_mut().zip(found.ratio) {
            line.points.extend(of.map(|of| (at, of, format!("concurrency {at}"))));
        }
        let pair = |rates: [f64; 2]| rates.map(show);
        let ([a, b], [c, d]) = (pair(found.alone), pair(found.together));
        let [first, second] = found.ratio.map(ratio);
        let counts = [found.concurrency, found.requests].map(|n| n.to_string());
        let cells = counts.into_iter().chain([a, b, c, d, first, second, ratio(found.total_ratio)]);
        rows.push(Row { cold: false, cells: cells.chain([found.failed.to_string()]).collect() });
    }
    let chart = over_concurrency("Output throughput beside the other replica", "together / alone", series.to_vec());
    let header =
        ["concurrency", "requests", "alone", "second", "together", "second", "ratio", "second", "of both", "failed"];
    let text = "Output tokens a second of two replicas: each under load by itself, then both at once with as much load each. \
                Ratio is together over alone; below 1 they take something from each other.";
    section(out, "Two replicas side by side", text, Some(&chart), &header, &rows);
}
