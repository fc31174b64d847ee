//! Which rows the next step computes. Pure: sequences in, plan out.
//!
//! Every decoding sequence gets its newest token and its drafts; what is left of the row budget goes to prompts in order of
//! arrival, in chunks that end at multiples of [`PAGE_TOKENS`] where they do not end the prompt. A budget of at least
//! `sequences * (depth + 1)` rows therefore always lets the oldest prompt advance.

use glimmer_tensor::{FeatureRow, PAGE_TOKENS, Segment, Step};

use crate::sequence::{Phase, Sequence};

/// Rows of one sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Index among the running sequences.
    pub index: usize,
    /// First row in the step.
    pub row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Drafts among the rows (all but the first row of a decoding sequence).
    pub drafts: usize,
    /// Index of the first wanted logits, if any are wanted.
    pub logits: Option<usize>,
}

/// A step and what its rows are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// The step.
    pub step: Step,
    /// Its sequences, in row order.
    pub entries: Vec<Entry>,
    /// For each row of the feature buffer: running sequence and row of its features.
    pub features: Vec<(usize, usize)>,
}

impl Plan {
    /// Rows of prompts and rows of decoding sequences.
    pub fn rows_by_kind(&self, sequences: &[Sequence]) -> (usize, usize) {
        let mut kinds = (0, 0);
        for entry in &self.entries {
            match sequences[entry.index].phase {
                Phase::Prefill => kinds.0 += entry.rows,
                _ => kinds.1 += entry.rows,
            }
        }
        kinds
    }
}

/// Plans the next step of up to `max_rows` rows.
pub fn schedule(sequences: &[Sequence], max_rows: usize) -> Plan {
    let mut plan = Plan::default();
    let in_phase = |phase| sequences.iter().enumerate().filter(move |(_, s)| s.phase == phase);
    for (index, sequence) in in_phase(Phase::Decode) {
        let drafts = sequence.drafts.len();
        if plan.step.rows() + 1 + drafts <= max_rows {
            plan.add(index, sequence, 1 + drafts, drafts);
        }
    }
    for (index, sequence) in in_phase(Phase::Prefill) {
        let rows = chunk(sequence, max_rows - plan.step.rows());
        if rows > 0 {
            plan.add(index, sequence, rows, 0);
        }
    }
    plan
}

/// Prompt rows that fit the budget.
fn chunk(sequence: &Sequence, budget: usize) -> usize {
    let (done, all) = (sequence.computed, sequence.request.prompt.len());
    let end = all.min(done + budget);
    if end == all {
        return all - done;
    }
    let aligned = end / PAGE_TOKENS * PAGE_TOKENS;
    (if aligned > done { aligned } else { end }) - done
}

impl Plan {
    fn add(&mut self, index: usize, sequence: &Sequence, rows: usize, drafts: usize) {
        let step = &mut self.step;
        let (row, position) = (step.rows(), sequence.computed);
        let known = (rows - drafts).min(sequence.tokens.len() - position);
        step.tokens.extend(&sequence.tokens[position..position + known]);
        step.tokens.extend(sequence.drafts[..drafts].iter().map(|d| d.token));
        step.segments.push(Segment {
            slot: sequence.reservation.slot(),
            position: position as u32,
            rows: rows as u32,
            fold: sequence.fold as u32,
            commit: (rows - drafts) as u32,
            first_page: step.pages.len() as u32,
            pages: sequence.reservation.pages().len() as u32,
        });
        step.pages.extend(sequence.reservation.pages());

        let first = sequence.placeholders.partition_point(|&p| p < position);
        let last = sequence.placeholders.partition_point(|&p| p < position + known);
        for (feature, place) in (first..last).zip(&sequence.placeholders[first..last]) {
            step.features
                .push(FeatureRow { row: (row + place - position) as u32, feature: self.features.len() as u32 });
            self.features.push((index, feature));
        }

        let wanted = match sequence.phase {
            Phase::Decode => Some(row),
            _ if position + rows == sequence.request.prompt.len() => Some(row + rows - 1),
            _ => None,
        };
        let logits = wanted.map(|first| {
            let start = step.logits.len();
            step.logits.extend((first..row + rows).map(|r| r as u32));
            start
        });
        self.entries.push(Entry { index, row, rows, drafts, logits });
    }
}
