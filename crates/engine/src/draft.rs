//! The draft layer's schedule.
//!
//! After a trunk step the draft layer runs over the positions that have just become final, each with the token after it:
//! this fills the layer's cache with true rows and overwrites what chains left there. The last row of a decoding sequence
//! proposes its first draft; each further draft is a row of a chain, one position on, fed with the draft before and the
//! hidden state that made it. A chain selects tokens anew or shares the selection of the row that began it.
//!
//! Drafts decide about speed alone, so a row that proposes nothing usable ends its chain and nothing else.

use glimmer_model::{ChainStep, HiddenSource, Model, MtpStep};
use glimmer_tensor::{Backend, SampleRow, Samples, Segment, Step, TOKEN_PLACES};

use crate::{
    EngineError,
    random::{Purpose, uniform},
    rows::RowJudge,
    sampling::{Choice, History, Sampler},
    sequence::{Sequence, Trail},
    speculate::Draft,
};

/// How drafts are made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Drafting {
    /// Chains share selections.
    pub(crate) share: bool,
    /// Drafts of sampled requests are drawn from the drafter's distribution instead of being its largest logit.
    pub(crate) drawn: bool,
}

/// Runs the draft layer over `trails` (rows of the last trunk step) and leaves drafts in the sequences. Drafts that are largest
/// logits are found where the logits are, as far as the backend can.
pub(crate) fn propose<B: Backend>(
    model: &mut Model<B>,
    sequences: &mut [Sequence],
    trails: &[Trail],
    drafting: Drafting,
    judge: &mut RowJudge,
) -> Result<(), EngineError> {
    let (sampler, row) = judge.scratch();
    let (mut asked, mut tokens) = (Samples::default(), Vec::new());
    if trails.is_empty() {
        return Ok(());
    }
    let step = mtp_step(sequences, trails, |sequence, position| sequence.tokens[position + 1])?;

    // The chains: the last row of each trail whose sequence wants drafts.
    let mut first_row = 0;
    let mut chains: Vec<Chain> = Vec::new();
    for trail in trails {
        let last = first_row + trail.rows - 1;
        first_row += trail.rows;
        let sequence = &sequences[trail.index];
        if sequence.drafting() {
            let position = trail.position + trail.rows;
            chains.push(Chain { index: trail.index, position, row: last as u32, selected: last as u32 });
        }
    }
    let most = chains.iter().map(|chain| sequences[chain.index].wanted).max().unwrap_or(0);
    let drawn = chains.iter().any(|chain| is_drawn(&sequences[chain.index], drafting));
    if model.chains() && !drawn && (2..=TOKEN_PLACES).contains(&most) {
        return propose_unseen(model, sequences, &step, chains, drafting);
    }
    model.draft(&step, &mut ())?;
    let mut depth = 0;
    while !chains.is_empty() {
        asked.clear();
        for (logits, chain) in chains.iter().enumerate() {
            if !is_drawn(&sequences[chain.index], drafting) {
                asked.rows.push(SampleRow { row: logits as u32, changes: 0..0, mask: None, draw: None });
            }
        }
        model.sample_drafts(&asked, &mut tokens)?;
        let mut found = asked.rows.iter().zip(&tokens).peekable();
        for (logits, chain) in chains.iter().enumerate() {
            let sequence = &mut sequences[chain.index];
            let given = found.next_if(|(row, _)| row.row as usize == logits).and_then(|(_, token)| *token);
            if let Some(token) = given {
                sequence.drafts.push(Draft { token, drawn_from: None });
                continue;
            }
            model.draft_logits(logits, row)?;
            // The draft is for the position after the newest token and the drafts so far.
            let position = sequence.tokens.len() + depth;
            match choose(sequence, drafting, sampler, row, position) {
                Ok(draft) => sequence.drafts.push(draft),
                Err(_) => sequence.wanted = sequence.drafts.len(),
            }
        }
        depth += 1;
        if depth > 1 {
            // The step just judged was a chain step: one row a chain.
            for (chain, row) in chains.iter_mut().zip(0..) {
                chain.row = row;
            }
        }
        chains.retain(|chain| sequences[chain.index].wanted > depth);
        if chains.is_empty() {
            break;
        }
        let step = chain_step(sequences, &chains, depth, drafting, |sequence, _| sequence.drafts[depth - 1].token)?;
        model.draft(&step, &mut ())?;
    }
    Ok(())
}

/// All steps of chains whose drafts are largest logits, which the backend hands from step to step: nobody waits for a draft
/// before the last one is made.
fn propose_unseen<B: Backend>(
    model: &mut Model<B>,
    sequences: &mut [Sequence],
    first: &MtpStep,
    mut chains: Vec<Chain>,
    drafting: Drafting,
) -> Result<(), EngineError> {
    // By step, the sequences whose drafts it gives.
    let mut given: Vec<Vec<usize>> = vec![chains.iter().map(|chain| chain.index).collect()];
    let mut links = Vec::new();
    for depth in 1.. {
        if depth > 1 {
            for (chain, row) in chains.iter_mut().zip(0..) {
                chain.row = row;
            }
        }
        let going_on = (0..).zip(&chains).filter(|(_, chain)| sequences[chain.index].wanted > depth);
        let taken = going_on.map(|(logits, _)| logits).collect();
        chains.retain(|chain| sequences[chain.index].wanted > depth);
        if chains.is_empty() {
            break;
        }
        let step = chain_step(sequences, &chains, depth, drafting, |_, _| 0)?;
        links.push(ChainStep { step, taken });
        given.push(chains.iter().map(|chain| chain.index).collect());
    }
    let mut tokens = Vec::new();
    model.draft_chain(first, &links, &mut tokens)?;
    let mut tokens = tokens.into_iter();
    for (depth, given) in given.into_iter().enumerate() {
        for (index, token) in given.into_iter().zip(&mut tokens) {
            let sequence = &mut sequences[index];
            match token.filter(|_| sequence.wanted > depth) {
                Some(token) => sequence.drafts.push(Draft { token, drawn_from: None }),
                None => sequence.wanted = sequence.drafts.len(),
            }
        }
    }
    Ok(())
}

/// The chains' step that makes draft `depth`.
fn chain_step(
    sequences: &[Sequence],
    chains: &[Chain],
    depth: usize,
    drafting: Drafting,
    token: impl Fn(&Sequence, usize) -> u32,
) -> Result<MtpStep, EngineError> {
    let trails: Vec<Trail> = chains
        .iter()
        .map(|chain| Trail {
            index: chain.index,
            position: chain.position + depth - 1,
            rows: 1,
            source: chain.row,
            from: HiddenSource::Draft,
        })
        .collect();
    let mut step = mtp_step(sequences, &trails, token)?;
    if drafting.share {
        step.shared = Some(chains.iter().map(|chain| chain.selected).collect());
    }
    Ok(step)
}

/// A sequence that is being drafted for.
#[derive(Debug, Clone, Copy)]
struct Chain {
    index: usize,
    /// Position of the first chain row.
    position: usize,
    /// Row of its hidden state in the last draft step.
    row: u32,
    /// Row whose selection it shares.
    selected: u32,
}

/// Whether drafts of a sequence are drawn instead of being the largest logits.
fn is_drawn(sequence: &Sequence, drafting: Drafting) -> bool {
    drafting.drawn && !sequence.request.sampling.is_greedy()
}

fn choose(
    sequence: &Sequence,
    drafting: Drafting,
    sampler: &mut Sampler,
    row: &mut [f32],
    position: usize,
) -> Result<Draft, EngineError> {
    let (params, seed) = (&sequence.request.sampling, sequence.answer.seed());
    if !is_drawn(sequence, drafting) {
        let (token, _) = crate::sampling::largest(row).map_err(|reason| EngineError::NoToken { position, reason })?;
        return Ok(Draft { token, drawn_from: None });
    }
    Ok(match sampler.choose(row, params, &History::default(), &[], position)? {
        Choice::Token(token) => Draft { token, drawn_from: None },
        Choice::Among(q) => {
            let token = q.draw(uniform(seed, position, Purpose::Draft));
            Draft { token, drawn_from: Some(q.clone()) }
        }
    })
}

/// A step of the draft layer over trails of one kind; logits are wanted of the last row of every trail that drafts.
fn mtp_step(
    sequences: &[Sequence],
    trails: &[Trail],
    next: impl Fn(&Sequence, usize) -> u32,
) -> Result<MtpStep, EngineError> {
    let mut step = Step::default();
    let mut source = Vec::new();
    for trail in trails {
        let sequence = &sequences[trail.index];
        let Some((slot, pages)) = sequence.place() else {
            return Err(EngineError::Broken("only running sequences are drafted for"));
        };
        step.tokens.extend((trail.position..trail.position + trail.rows).map(|p| next(sequence, p)));
        source.extend((0..trail.rows as u32).map(|i| trail.source + i));
        step.segments.push(Segment {
            slot,
            position: trail.position as u32,
            rows: trail.rows as u32,
            fold: 0,
            commit: trail.rows as u32,
            first_page: step.pages.len() as u32,
            pages: pages.len() as u32,
        });
        step.pages.extend(pages);
        if sequence.drafting() {
            step.logits.push(step.tokens.len() as u32 - 1);
        }
    }
    let from = trails.first().map_or(HiddenSource::Trunk, |t| t.from);
    Ok(MtpStep { step, from, source, shared: None })
}
