//! Runs cases on an engine: one by one, or in a company that joins and leaves at random.

use glimmer_engine::{Generator, Output, SequenceId};
use glimmer_tensor::Backend;

use super::{Case, Given};
use crate::error::BenchError;
use crate::under_way::{UnderWay, submit};

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

impl From<Output> for Given {
    fn from(output: Output) -> Self {
        Self { tokens: output.tokens, finish: format!("{:?}", output.finish) }
    }
}

fn no_answer(case: &Case) -> BenchError {
    BenchError::model("the engine", format!("{} got no answer", case.id))
}

/// Answers one case with nothing beside it.
pub(super) fn alone<B: Backend>(generator: &mut Generator<B>, case: &Case) -> Result<Given, BenchError> {
    let (mut open, mut given) = (UnderWay::default(), None);
    open.submit(generator, 0, case.request(), case.pictures.clone())?;
    while !open.is_empty() {
        open.step(generator, |_, output| {
            given = Some(output.into());
            Ok(())
        })?;
    }
    given.ok_or_else(|| no_answer(case))
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
    let mut open = UnderWay::default();
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
                let case = &cases[dice.below(cases.len())];
                let id = submit(generator, case.request(), case.pictures.clone())?;
                passing.push((id, 1 + dice.below(20)));
            } else if let Some(next) = order.pop() {
                let case = &cases[next % cases.len()];
                open.submit(generator, next, case.request(), case.pictures.clone())?;
            }
        }
        open.step(generator, |index, output| {
            given[index] = Some(output.into());
            Ok(())
        })?;
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
        answers.push((index % cases.len(), given.ok_or_else(|| no_answer(case))?));
    }
    Ok(answers)
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
