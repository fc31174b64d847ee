//! What the prefix cache costs when nothing hits.
//!
//! Three engines with the same settings answer the same prompts in turn: one without the cache, one with it, and another one
//! without it. No prompt comes twice, so the cache only works: it names pages, publishes them, saves states and, once it is
//! full, evicts. Each round gives the ratio of the time with the cache to the time without, and the ratio of the two engines
//! without, which shows what the measurement itself is worth. The order of the three changes from round to round; the
//! medians of the ratios are the result, so that what disturbs single rounds does not move it.

use glimmer_checkpoint::Checkpoint;
use glimmer_engine::{Flow, Generator, Request, Settings};
use glimmer_tensor::Backend;
use serde::Serialize;

use crate::error::BenchError;
use crate::exactness::Opener;

/// The work of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PrefixCostPlan {
    /// Prompts at once.
    pub sequences: usize,
    /// Tokens of each prompt.
    pub prompt_tokens: usize,
    /// New tokens of each answer.
    pub tokens: u32,
    /// Drafts a step.
    pub depth: usize,
    /// Rounds that count.
    pub rounds: usize,
}

/// Rounds before, in which every page is touched and the cache fills.
const WARM_UP: usize = 3;

/// Ratios of times, over rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ratios {
    /// Median.
    pub median: f64,
    /// A quarter of the rounds lies below.
    pub lower: f64,
    /// A quarter of the rounds lies above.
    pub upper: f64,
}

/// The result.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PrefixCost {
    /// Time with the cache over time without.
    pub cache: Ratios,
    /// The same for another engine without: 1 but for noise.
    pub control: Ratios,
    /// Median seconds of a round without the cache.
    pub seconds: f64,
    /// Prompt tokens that were looked up.
    pub looked_up: u64,
    /// States and pages that the cache holds at the end, idle ones included.
    pub pages: usize,
}

/// Measures; `clock` reads seconds, `progress` hears of every round.
///
/// # Errors
/// When an engine cannot be loaded or fails, or when a prompt hits: then this is no measurement of misses.
pub fn prefix_cost<B: Backend>(
    backend: Opener<'_, B>,
    checkpoint: &Checkpoint,
    settings: &Settings,
    plan: &PrefixCostPlan,
    clock: &mut dyn FnMut() -> f64,
    progress: &mut dyn FnMut(usize),
) -> Result<PrefixCost, BenchError> {
    let mut engines = Vec::with_capacity(ENGINES.len());
    for prefix_caching in ENGINES {
        let settings = Settings {
            sequences: plan.sequences,
            depth: plan.depth,
            context: Some(plan.prompt_tokens + plan.tokens as usize + 1),
            prefix_caching,
            ..settings.clone()
        };
        engines.push(Generator::load(backend()?, checkpoint, &settings).map_err(failed)?);
    }
    let (mut cache, mut control, mut seconds) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..WARM_UP + plan.rounds {
        let mut times = [0.0; ENGINES.len()];
        for place in 0..ENGINES.len() {
            let engine = (place + round) % ENGINES.len();
            times[engine] = answer(&mut engines[engine], plan, round, clock)?;
        }
        if round >= WARM_UP {
            cache.push(times[CACHED] / times[0]);
            control.push(times[ENGINES.len() - 1] / times[0]);
            seconds.push(times[0]);
        }
        progress(round + 1);
    }
    let counters = engines[CACHED].snapshot().counters;
    if counters.prefix_hits > 0 {
        return Err(failed(format!(
            "{} prompt tokens came from the cache, though no prompt came twice",
            counters.prefix_hits
        )));
    }
    Ok(PrefixCost {
        cache: Ratios::of(&mut cache),
        control: Ratios::of(&mut control),
        seconds: Ratios::of(&mut seconds).median,
        looked_up: counters.prefix_queries,
        pages: engines[CACHED].pools().idle(),
    })
}

/// With or without the cache.
const ENGINES: [bool; 3] = [false, true, false];
/// Place of the engine with the cache.
const CACHED: usize = 1;

fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> BenchError {
    BenchError::model("the cost of the prefix cache", error)
}

/// Seconds for the prompts of a round.
fn answer<B: Backend>(
    generator: &mut Generator<B>,
    plan: &PrefixCostPlan,
    round: usize,
    clock: &mut dyn FnMut() -> f64,
) -> Result<f64, BenchError> {
    let vocabulary = generator.vocabulary();
    let start = clock();
    for sequence in 0..plan.sequences {
        // The first tokens tell rounds and sequences apart, so that no page is like another.
        let token = |t: usize| match t {
            0 => round % (vocabulary / 2),
            1 => sequence % (vocabulary / 2),
            t => (t * 7919 + sequence * 104_729 + round * 31) % (vocabulary / 2),
        };
        let ids: Vec<u32> = (0..plan.prompt_tokens).map(|t| token(t) as u32).collect();
        generator.submit(Request::new(ids, plan.tokens).ignoring_eos()).map_err(failed)?;
    }
    generator.run(&mut |_, _| Flow::Continue).map_err(failed)?;
    Ok(clock() - start)
}

impl Ratios {
    fn of(values: &mut [f64]) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let place = share * values.len().saturating_sub(1) as f64;
            let (low, high) = (values[place.floor() as usize], values[place.ceil() as usize]);
            low + (high - low) * place.fract()
        };
        if values.is_empty() {
            return Self { median: f64::NAN, lower: f64::NAN, upper: f64::NAN };
        }
        Self { median: at(0.5), lower: at(0.25), upper: at(0.75) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_lie_between_values() {
        let ratios = Ratios::of(&mut [4.0, 1.0, 2.0, 3.0]);
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        near(ratios.lower, 1.75);
        near(ratios.median, 2.5);
        near(ratios.upper, 3.25);
        near(Ratios::of(&mut [7.0]).median, 7.0);
        assert!(Ratios::of(&mut []).median.is_nan());
    }
}
