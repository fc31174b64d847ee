//! Runs cases on an engine: one by one, or in a company that joins and leaves at random.

use std::collections::HashMap;

use glimmer_engine::{Flow, Generator, Request, SequenceId, request::Collector};
use glimmer_tensor::Backend;

use super::{Case, Given};
use crate::error::BenchError;

/// Random numbers by a counter (SplitMix64): the same order on every machine.
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `below` (at least 1).
    pub(crate) fn below(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % below.max(1) as u64) as usize
    }
}

fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> BenchError {
    BenchError::model("the engine", error)
}

/// A request of a case with its pictures.
fn submit<B: Backend>(generator: &mut Generator<B>, case: &Case) -> Result<SequenceId, BenchError> {
    let media = generator.media(&case.ids, case.pictures.clone()).map_err(failed)?;
    generator.submit(Request { media, ..case.request() }).map_err(failed)
}

/// Answers one case with nothing beside it.
pub(super) fn alone<B: Backend>(generator: &mut Generator<B>, case: &Case) -> Result<Given, BenchError> {
    let id = submit(generator, case)?;
    let mut open = HashMap::from([(id, (0, Collector::default()))]);
    let mut given = vec![None];
    while !open.is_empty() {
        if !step(generator, &mut open, &mut given)? && !open.is_empty() {
            return Err(failed(format!("{} got no end although nothing is left to do", case.id)));
        }
    }
    given.pop().flatten().ok_or_else(|| failed(format!("{} got no answer", case.id)))
}

/// Answers all cases, up to `most` at once. They join in random order at random steps; besides them others join that are
/// aborted after a few steps. `repeat` asks every case twice.
pub(super) fn together<B: Backend>(
    generator: &mut Generator<B>,
    cases: &[Case],
    most: usize,
    repeat: bool,
    dice: &mut Dice,
) -> Result<Vec<(usize, Given)>, BenchError> {
    let mut order: Vec<usize> = (0..cases.len() * (1 + usize::from(repeat))).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, dice.below(i + 1));
    }
    let mut given: Vec<Option<Given>> = vec![None; order.len()];
    let mut open = HashMap::new();
    // Passers-by with the steps that they stay.
    let mut passing: Vec<(SequenceId, usize)> = Vec::new();
    while !order.is_empty() || !open.is_empty() {
        let room = most.saturating_sub(open.len() + passing.len());
        for _ in 0..room {
            // On the average half of the free places stay empty for a step.
            if dice.below(2) == 0 {
                continue;
            }
            if dice.below(4) == 0 {
                let id = submit(generator, &cases[dice.below(cases.len())])?;
                passing.push((id, 1 + dice.below(20)));
            } else if let Some(next) = order.pop() {
                let id = submit(generator, &cases[next % cases.len()])?;
                open.insert(id, (next, Collector::default()));
            }
        }
        step(generator, &mut open, &mut given)?;
        for (id, steps) in &mut passing {
            *steps -= 1;
            if *steps == 0 {
                // One that has ended by itself is gone already.
                generator.abort(*id);
            }
        }
        passing.retain(|(_, steps)| *steps > 0);
    }
    for (id, _) in passing {
        generator.abort(id);
    }
    let mut answers = Vec::with_capacity(given.len());
    for (index, given) in given.into_iter().enumerate() {
        let case = &cases[index % cases.len()];
        answers.push((index % cases.len(), given.ok_or_else(|| failed(format!("{} got no answer", case.id)))?));
    }
    Ok(answers)
}

fn step<B: Backend>(
    generator: &mut Generator<B>,
    open: &mut HashMap<SequenceId, (usize, Collector)>,
    given: &mut [Option<Given>],
) -> Result<bool, BenchError> {
    let mut ended = Vec::new();
    let busy = generator.step(&mut |sequence, event| {
        if let Some((_, collector)) = open.get_mut(&sequence)
            && let Some(output) = collector.take(event)
        {
            ended.push((sequence, output));
        }
        Flow::Continue
    });
    for (sequence, output) in ended {
        if let Some((index, _)) = open.remove(&sequence) {
            given[index] = Some(Given { tokens: output.tokens, finish: format!("{:?}", output.finish) });
        }
    }
    busy.map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dice_stay_below_and_reach_everything() {
        let mut dice = Dice::new(1);
        let mut seen = [0usize; 6];
        for _ in 0..600 {
            seen[dice.below(6)] += 1;
        }
        assert!(seen.iter().all(|&n| n > 50), "{seen:?}");
        assert_eq!(Dice::new(7).below(1000), Dice::new(7).below(1000));
    }
}
