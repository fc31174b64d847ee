//! Prefix cache on and off, draft depths, chunk sizes, alone and in company: every combination against one reference.

use glimmer_checkpoint::Checkpoint;
use glimmer_engine::{Generator, Settings};
use glimmer_tensor::Backend;

use super::drive::{Dice, alone, together};
use super::{Base, Case, Comparison, Given, Opener};
use crate::error::BenchError;

/// Who runs beside a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Company {
    /// Nobody.
    Alone,
    /// Up to seven others, joining and leaving at random, some of them aborted.
    Eight,
}

/// A condition of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// Prefix cache; every case is asked twice then, so that the second one hits.
    pub prefix: bool,
    /// Draft depth.
    pub depth: usize,
    /// Most prompt rows of a step; `None` takes the whole prompt at once.
    pub chunk: Option<usize>,
    /// Company.
    pub company: Company,
}

/// All values along each axis: prefix cache, depth, chunk, company.
pub const MATRIX: ([bool; 2], [usize; 4], [Option<usize>; 3], [Company; 2]) =
    ([false, true], [0, 1, 2, 3], [Some(64), Some(256), None], [Company::Alone, Company::Eight]);

impl Cell {
    /// Every combination; cells that share an engine are neighbours.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let (prefixes, depths, chunks, companies) = MATRIX;
        let mut cells = Vec::new();
        for prefix in prefixes {
            for depth in depths {
                for chunk in chunks {
                    cells.extend(companies.map(|company| Self { prefix, depth, chunk, company }));
                }
            }
        }
        cells
    }

    /// The condition in words.
    #[must_use]
    pub fn name(&self) -> String {
        let chunk = self.chunk.map_or_else(|| "whole".to_owned(), |rows| rows.to_string());
        let prefix = if self.prefix { "on" } else { "off" };
        let company = match self.company {
            Company::Alone => "alone",
            Company::Eight => "among 8",
        };
        format!("prefix cache {prefix}, depth {}, chunk {chunk}, {company}", self.depth)
    }

    fn settings(&self, base: &Base) -> Settings {
        Settings {
            sequences: COMPANY,
            context: Some(base.context),
            rows: self.chunk.unwrap_or(base.context),
            depth: self.depth,
            prefix_caching: self.prefix,
            ..base.settings.clone()
        }
    }
}

/// Sequences at once in company.
const COMPANY: usize = 8;

/// Runs all cases in all `cells`, reporting each comparison as it is made. `backend` makes a fresh backend.
///
/// # Errors
/// When an engine cannot be loaded or fails; differences are no errors but part of the comparison.
pub fn matrix<B: Backend>(
    backend: Opener<'_, B>,
    checkpoint: &Checkpoint,
    cases: &[Case],
    cells: &[Cell],
    base: &Base,
    report: &mut dyn FnMut(&Comparison),
) -> Result<Vec<Comparison>, BenchError> {
    let reference = reference(backend()?, checkpoint, cases, base)?;
    let mut comparisons = Vec::with_capacity(cells.len());
    for cell in cells {
        let comparison = compare(backend()?, checkpoint, cases, cell, base, &reference)?;
        report(&comparison);
        comparisons.push(comparison);
    }
    Ok(comparisons)
}

/// The answers of the plainest engine.
pub(super) fn reference<B: Backend>(
    backend: B,
    checkpoint: &Checkpoint,
    cases: &[Case],
    base: &Base,
) -> Result<Vec<Given>, BenchError> {
    let plain = Settings {
        sequences: 1,
        context: Some(base.context),
        rows: base.context,
        depth: 0,
        prefix_caching: false,
        ..base.settings.clone()
    };
    let mut generator = load(backend, checkpoint, &plain)?;
    cases.iter().map(|case| alone(&mut generator, case)).collect()
}

pub(super) fn load<B: Backend>(
    backend: B,
    checkpoint: &Checkpoint,
    settings: &Settings,
) -> Result<Generator<B>, BenchError> {
    Generator::load(backend, checkpoint, settings).map_err(|error| BenchError::model("loading", error))
}

fn compare<B: Backend>(
    backend: B,
    checkpoint: &Checkpoint,
    cases: &[Case],
    cell: &Cell,
    base: &Base,
    reference: &[Given],
) -> Result<Comparison, BenchError> {
    let mut generator = load(backend, checkpoint, &cell.settings(base))?;
    let mut comparison = Comparison::new(cell.name());
    match cell.company {
        Company::Alone => {
            for (case, expected) in cases.iter().zip(reference) {
                for _ in 0..=usize::from(cell.prefix) {
                    comparison.compare(&case.id, expected, &alone(&mut generator, case)?);
                }
            }
        }
        Company::Eight => {
            let mut dice = Dice::new(base.seed);
            for (index, found) in together(&mut generator, cases, COMPANY, cell.prefix, &mut dice)? {
                comparison.compare(&cases[index].id, &reference[index], &found);
            }
        }
    }
    if cell.prefix && cases.iter().any(|case| case.ids.len() > 2 * glimmer_tensor::PAGE_TOKENS) {
        let hits = generator.snapshot().counters.prefix_hits;
        comparison.require(hits > 0, "no prompt token came from the prefix cache");
    }
    finish(&mut comparison, generator);
    Ok(comparison)
}

/// Counters, and the check that everything came back.
pub(super) fn finish<B: Backend>(comparison: &mut Comparison, mut generator: Generator<B>) {
    let counters = generator.snapshot().counters;
    comparison.cached_tokens += counters.prefix_hits;
    comparison.accepted_drafts += counters.drafts.accepted.iter().sum::<u64>();
    comparison.preemptions += counters.preemptions;
    generator.reset_prefix_cache();
    let (free, all) = (generator.pools().free(), generator.pools().all());
    if free != all {
        comparison.differ(format!("of the pools {free:?} came back, not {all:?}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_matrix_has_every_combination_once() {
        let cells = Cell::all();
        assert_eq!(cells.len(), 48);
        let names: std::collections::BTreeSet<String> = cells.iter().map(Cell::name).collect();
        assert_eq!(names.len(), 48);
    }
}
