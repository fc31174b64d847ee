//! What a matrix meets only by chance, forced: hits through each kind of saved state, and preemption.

use std::sync::Arc;

use glimmer_checkpoint::Checkpoint;
use glimmer_engine::{Sampling, Settings};
use glimmer_tensor::{Backend, PAGE_TOKENS};

use super::drive::{Dice, alone, together};
use super::matrix::{finish, load, reference};
use super::{Base, Case, CaseKind, Comparison, Opener};
use crate::error::BenchError;

/// Turns of a conversation.
const TURNS: usize = 6;
/// Tokens that a turn adds, besides the answer before it.
const TURN_TOKENS: usize = 45;
/// Draft depth of the scenes: the one that is served by default.
const DEPTH: usize = 2;

/// Runs the scenes, reporting each comparison as it is made.
///
/// # Errors
/// When an engine cannot be loaded or fails.
pub fn scenes<B: Backend>(
    backend: Opener<'_, B>,
    checkpoint: &Checkpoint,
    cases: &[Case],
    base: &Base,
    report: &mut dyn FnMut(&Comparison),
) -> Result<Vec<Comparison>, BenchError> {
    let scenes: [Scene<B>; 4] = [
        ("a conversation that goes on behind each answer", conversation),
        ("the same prompt with another ending", other_ending),
        ("the last turn said anew", other_turn),
        ("sequences that are preempted and resumed", preempted),
    ];
    let mut comparisons = Vec::new();
    for (name, scene) in scenes {
        let mut comparison = Comparison::new(name);
        scene(backend, checkpoint, cases, base, &mut comparison)?;
        report(&comparison);
        comparisons.push(comparison);
    }
    Ok(comparisons)
}

type Scene<B> =
    (&'static str, fn(Opener<'_, B>, &Checkpoint, &[Case], &Base, &mut Comparison) -> Result<(), BenchError>);

pub(super) fn served(base: &Base) -> Settings {
    Settings { sequences: 8, context: Some(base.context), rows: 256, depth: DEPTH, ..base.settings.clone() }
}

/// The same without cache and drafts.
pub(super) fn plain(base: &Base) -> Settings {
    Settings { depth: 0, prefix_caching: false, ..served(base) }
}

/// Plain cases with enough tokens for a page, whose answers go on for `tokens`.
fn material(cases: &[Case], most: usize, tokens: u32) -> Vec<Case> {
    let fits = |case: &&Case| case.kind != CaseKind::Long && case.ids.len() > PAGE_TOKENS;
    let plain = |case: &Case| Case { max_tokens: tokens, ..case.clone() };
    cases.iter().filter(fits).take(most).map(plain).collect()
}

/// Tokens of a made-up turn: those of another case, from its middle.
fn turn(cases: &[Case], index: usize) -> Vec<u32> {
    let plain: Vec<&Case> = cases.iter().filter(|case| case.pictures.is_empty()).collect();
    let Some(case) = plain.get(index.checked_rem(plain.len()).unwrap_or(0)) else { return Vec::new() };
    case.ids.iter().copied().cycle().skip(case.ids.len() / 2).take(TURN_TOKENS).collect()
}

/// Each prompt is the one before, its answer and a new turn: hits lie behind prompts and, for long answers, inside them.
fn conversation<B: Backend>(
    backend: Opener<'_, B>,
    checkpoint: &Checkpoint,
    cases: &[Case],
    base: &Base,
    comparison: &mut Comparison,
) -> Result<(), BenchError> {
    let mut generator = load(backend()?, checkpoint, &served(base))?;
    let mut cold = load(backend()?, checkpoint, &plain(base))?;
    for (index, opening) in material(cases, 12, 150).into_iter().enumerate() {
        let mut case = opening;
        // An answer of full length crosses pages, so that states saved while decoding are hit as well.
        case.sampling = Sampling { temperature: 0.7, seed: Some(index as i64), ..Sampling::default() };
        for round in 0..TURNS {
            if case.ids.len() + case.max_tokens as usize + TURN_TOKENS >= base.context {
                break;
            }
            let before = generator.snapshot().counters.prefix_hits;
            let expected = alone(&mut cold, &case)?;
            comparison.compare(&format!("{} turn {round}", case.id), &expected, &alone(&mut generator, &case)?);
            let hit = generator.snapshot().counters.prefix_hits - before;
            // Of a later turn, what it adds and at most a page.
            let most = TURN_TOKENS + PAGE_TOKENS;
            let computed = case.ids.len() - hit as usize;
            comparison
                .require(round == 0 || computed <= most, "a later turn computed more than a page of what was known");
            let start = case.ids.len() + expected.tokens.len();
            let ids: Vec<u32> =
                case.ids.iter().copied().chain(expected.tokens).chain(turn(cases, index + round)).collect();
            case = Case { ids: ids.into(), turn_start: Some(start), ..case };
        }
    }
    finish(comparison, generator);
    Ok(())
}

/// A second prompt shares all but its last tokens: the state at the last page of the first prompt is hit.
fn other_ending<B: Backend>(
    backend: Opener<'_, B>,
    checkpoint: &Checkpoint,
    cases: &[Case],
    base: &Base,
    comparison: &mut Comparison,
) -> Result<(), BenchError> {
    let variants = |case: Case| {
        let kept = (case.ids.len() - 1) / PAGE_TOKENS * PAGE_TOKENS + 1;
        // A picture stays whole: its placeholders may lie behind the last page.
        let variant = |ending: usize| {
            let mut ids: Vec<u32> = case.ids.to_vec();
            if case.pictures.is_empty() {
                ids.truncate(kept);
            }
            ids.extend(turn(cases, ending));
            Case { id: format!("{} ending {ending}", case.id), ids: ids.into(), ..case.clone() }
        };
        [case.clone(), variant(1), variant(2)]
    };
    let all: Vec<Case> = material(cases, 24, 48).into_iter().flat_map(variants).collect();
    against_plain(backend, checkpoint, &all, base, comparison)
}

/// A second prompt shares everything up to the last turn: the state before that turn is hit.
fn other_turn<B: Backend>(
    backend: Opener<'_, B>,
    checkpoint: &Checkpoint,
    cases: &[Case],
    base: &Base,
    comparison: &mut Comparison,
) -> Result<(), BenchError> {
    let opened = |(index, case): (usize, Case)| {
        // A history of two pages and a bit, then a long turn, then the same history with another turn.
        let history: Vec<u32> = case.ids.iter().copied().cycle().take(2 * PAGE_TOKENS + 7).collect();
        let with = |turns: usize| {
            let said: Vec<u32> = (0..4).flat_map(|part| turn(cases, index + turns * 5 + part)).collect();
            let ids: Arc<[u32]> = history.iter().copied().chain(said).collect();
            let id = format!("{} turn {turns}", case.id);
            Case { id, ids, turn_start: Some(history.len()), ..case.clone() }
        };
        [with(0), with(1), with(2)]
    };
    let plain = material(cases, 60, 40).into_iter().filter(|case| case.pictures.is_empty()).take(16);
    let all: Vec<Case> = plain.enumerate().flat_map(opened).collect();
    against_plain(backend, checkpoint, &all, base, comparison)
}

/// One case after the other, with the cache, against the plain engine.
fn against_plain<B: Backend>(
    backend: Opener<'_, B>,
    checkpoint: &Checkpoint,
    cases: &[Case],
    base: &Base,
    comparison: &mut Comparison,
) -> Result<(), BenchError> {
    let expected = reference(backend()?, checkpoint, cases, base)?;
    let mut generator = load(backend()?, checkpoint, &served(base))?;
    for (case, expected) in cases.iter().zip(&expected) {
        comparison.compare(&case.id, expected, &alone(&mut generator, case)?);
    }
    let hits = generator.snapshot().counters.prefix_hits;
    comparison.require(hits > 0, "no prompt token came from the prefix cache");
    finish(comparison, generator);
    Ok(())
}

/// Eight at once in a cache that holds little more than one: somebody has to go again and again.
fn preempted<B: Backend>(
    backend: Opener<'_, B>,
    checkpoint: &Checkpoint,
    cases: &[Case],
    base: &Base,
    comparison: &mut Comparison,
) -> Result<(), BenchError> {
    let mut cases = material(cases, 32, 160);
    for case in &mut cases {
        // Nobody may stop early, or the cache would hold them all.
        case.stop_ids.clear();
        case.ignore_eos = true;
        case.sampling = Sampling { temperature: 0.9, seed: Some(case.ids.len() as i64), ..Sampling::default() };
    }
    let longest = cases.iter().map(|case| case.ids.len() + case.max_tokens as usize).max().unwrap_or(1);
    let small = Base { context: (longest + 1).min(base.context), ..base.clone() };
    let expected = reference(backend()?, checkpoint, &cases, &small)?;
    for prefix_caching in [false, true] {
        let pages = small.context.div_ceil(PAGE_TOKENS) + 3;
        let settings = Settings { pages: Some(pages), prefix_caching, ..served(&small) };
        let mut generator = load(backend()?, checkpoint, &settings)?;
        let mut dice = Dice::new(base.seed);
        for (index, found) in together(&mut generator, &cases, 8, false, &mut dice)? {
            comparison.compare(&cases[index].id, &expected[index], &found);
        }
        comparison.require(generator.snapshot().counters.preemptions > 0, "nobody was preempted");
        finish(comparison, generator);
    }
    Ok(())
}
