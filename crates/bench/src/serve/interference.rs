//! How much two replicas disturb each other: each is benched alone, then both at once, with the same load.
//!
//! What they share (a host's memory and PCIe, a balancer, a network, here and there a GPU's power budget) shows as a ratio
//! below 1. Prompts are new in each of the three runs, so that no prefix cache makes a later run faster; they have equal
//! lengths, since the seed of the lengths is the same.

use std::future::Future;

use glimmer_text::ChatFormat;
use serde::{Deserialize, Serialize};

use super::arrival::Traffic;
use super::error::ServeBenchError;
use super::load::{Load, Run, Target};
use super::summary::Summary;
use super::workload::Workload;

/// One concurrency. Places in pairs are the first and the second replica's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interference {
    /// Requests under way at each replica.
    pub concurrency: usize,
    /// Requests sent to each replica in each run.
    pub requests: usize,
    /// Output tokens a second while the other one was idle.
    pub alone: [f64; 2],
    /// Output tokens a second while both were under load.
    pub together: [f64; 2],
    /// `together / alone`: 1 is no interference. None where a run alone gave nothing.
    pub ratio: [Option<f64>; 2],
    /// The sum together over the sum alone.
    pub total_ratio: Option<f64>,
    /// Requests that failed, in all three runs.
    pub failed: usize,
}

impl Interference {
    fn new(concurrency: usize, requests: usize, alone: [&Measured; 2], together: [&Measured; 2]) -> Self {
        let rate = |runs: [&Measured; 2]| runs.map(|run| run.throughput);
        let (before, now) = (rate(alone), rate(together));
        let over = |now: f64, before: f64| (before > 0.0).then(|| now / before);
        Self {
            concurrency,
            requests,
            alone: before,
            together: now,
            ratio: [over(now[0], before[0]), over(now[1], before[1])],
            total_ratio: over(now.iter().sum(), before.iter().sum()),
            failed: alone.iter().chain(&together).map(|run| run.failed).sum(),
        }
    }
}

/// What counts of a run.
#[derive(Debug)]
struct Measured {
    throughput: f64,
    failed: usize,
}

/// Benches two replicas of one model, alone and together, at each concurrency.
///
/// # Errors
/// [`ServeBenchError`] if the workload cannot be made; failed requests are counted.
pub async fn interference(
    cells: &[(usize, usize)],
    replicas: [&Target; 2],
    workload: &Workload,
    format: &ChatFormat,
    seed: u32,
    progress: &mut dyn FnMut(usize),
    stop: impl Future<Output = ()>,
) -> Result<Vec<Interference>, ServeBenchError> {
    let count = |text: &str| format.tokenizer().encode(text).map_or(0, |ids| ids.len());
    let mut stop = std::pin::pin!(stop);
    let mut all = Vec::new();
    // Each run has prompts of its own: a number of it for the seed.
    let mut number = 0u32;
    for &(concurrency, requests) in cells {
        progress(concurrency);
        let mut load = || {
            number += 1;
            let seed = seed.wrapping_add(number.wrapping_mul(0x9E37_79B9));
            let (prompts, mut generator) = workload.prompts(format, requests, seed, "beside-")?;
            let times = Traffic::AT_ONCE.times(prompts.len(), &mut generator);
            Ok::<_, ServeBenchError>(Load { prompts, times, concurrency: Some(concurrency), probe_rate: 0.0 })
        };
        let loads = [load()?, load()?, load()?, load()?];
        let measured = |run: &Run| {
            let summary = Summary::new(&run.outcomes, None, &count);
            Measured { throughput: summary.output_throughput(), failed: summary.failed }
        };
        let ignore = |_: &super::exchange::Outcome| ();
        let work = async {
            let one = measured(&replicas[0].run(&loads[0], &mut { ignore }, std::future::pending()).await);
            let two = measured(&replicas[1].run(&loads[1], &mut { ignore }, std::future::pending()).await);
            let (mut first, mut second) = (ignore, ignore);
            let (a, b) = tokio::join!(
                replicas[0].run(&loads[2], &mut first, std::future::pending()),
                replicas[1].run(&loads[3], &mut second, std::future::pending()),
            );
            Interference::new(concurrency, requests, [&one, &two], [&measured(&a), &measured(&b)])
        };
        tokio::select! {
            biased;
            () = &mut stop => break,
            found = work => all.push(found),
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_together_over_alone() {
        let run = |throughput: f64| Measured { throughput, failed: 1 };
        let (a, b, c, d) = (run(100.0), run(200.0), run(90.0), run(150.0));
        let found = Interference::new(4, 8, [&a, &b], [&c, &d]);
        assert_eq!(found.ratio, [Some(0.9), Some(0.75)]);
        assert_eq!((found.total_ratio, found.failed), (Some(0.8), 4));
        let silent = Interference::new(4, 8, [&run(0.0), &run(0.0)], [&c, &d]);
        assert_eq!((silent.ratio, silent.total_ratio), ([None, None], None));
    }
}
