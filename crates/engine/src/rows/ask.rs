//! What a backend needs to find the tokens of an answer's rows where their logits are.
//!
//! The tokens before row `i` of a step are known before any logit is: were they other than the drafts, nobody would look at the
//! row. So bans and penalties of all rows can be told at once.

use std::collections::BTreeSet;

use glimmer_tensor::{Draw, Finds, LogitChange, SampleRow, Samples};

use super::{Answer, Output, RowMask};
use crate::{
    constraint::TokenMask,
    random::{Purpose, uniform},
    request::Sampling,
    sampling::{Choice, History, MAX_BIAS, Sampler},
    speculate::Draft,
};

impl Answer {
    /// Adds the rows of the next step whose tokens can be found without handing out their logits; row `i` has the logits of row
    /// `first + i`. `known` and `drafts` are those of [`Answer::judge`]. Left out, because their logits have to be read, are rows
    ///
    /// - before a draft that was drawn, unless they are greedy: whether it stands depends on two distributions,
    /// - with log-probabilities,
    /// - with two biases for one token, whose sum would be rounded once instead of twice,
    /// - of an answer with a constraint for which [`Answer::prepare`] has not been called,
    /// - that are none of those that the backend `finds`;
    ///
    /// and those that need none, because their token is forced or their constraint has failed.
    pub fn ask(&mut self, known: &[u32], drafts: &[Draft], first: usize, finds: Finds, asked: &mut Samples) {
        let wanted = if self.sampling.is_greedy() { Finds::Largest } else { Finds::Drawn };
        if finds < wanted {
            return;
        }
        let readable = self.logprobs.is_some() || self.repeated_bias;
        if readable || self.rows == 0 && (self.shape.is_some() || self.prepare(drafts).is_err()) {
            return;
        }
        let mut banned = Vec::new();
        for i in 0..self.rows {
            let only = match &self.masks[i] {
                RowMask::Any => None,
                RowMask::Only(only) => Some(only),
                RowMask::Forced(_) | RowMask::Fault(_) => continue,
            };
            let drawn = drafts.get(i).is_some_and(|draft| draft.drawn_from.is_some());
            if drawn && !self.sampling.is_greedy() {
                continue;
            }
            let output = Output { known: &known[self.prompt.min(known.len())..], new: &self.prepared[..i] };
            self.ban(&mut banned, only, output);
            let start = asked.changes.len();
            self.changes(&banned, &self.prepared[..i], &mut asked.changes);
            let changes = start..asked.changes.len();
            let mask = add_mask(only, self.allowed.as_ref(), self.vocabulary, &mut asked.masks);
            let draw = (!self.sampling.is_greedy()).then(|| Draw {
                temperature: self.sampling.temperature,
                min_p: self.sampling.min_p,
                top_k: self.sampling.top_k.unwrap_or(0),
                top_p: self.sampling.top_p,
                uniform: uniform(self.seed, known.len() + i, Purpose::Token),
            });
            asked.rows.push(SampleRow { row: (first + i) as u32, changes, mask, draw });
        }
    }

    /// Adds what bias, penalties and bans change behind `new` tokens of the step, ascending by token.
    fn changes(&self, banned: &[u32], new: &[u32], changes: &mut Vec<LogitChange>) {
        let bias = &self.sampling.logit_bias;
        let pushed = if self.history.is_active() { new } else { &[] };
        // Tokens that more than the penalties of the history speak of.
        let special: BTreeSet<u32> =
            bias.iter().map(|b| b.0).chain(banned.iter().copied()).chain(pushed.iter().copied()).collect();
        let start = changes.len();
        changes.extend(special.iter().map(|&token| {
            let mut change = self.history.change(&self.sampling, token, pushed);
            if let Some((_, bias)) = bias.iter().find(|b| b.0 == token) {
                change.bias = bias.clamp(-MAX_BIAS, MAX_BIAS);
            }
            if banned.contains(&token) {
                change.minus = f32::INFINITY;
            }
            change
        }));
        let plain = self.history.tokens().filter(|token| !special.contains(token));
        changes.extend(plain.map(|token| self.history.change(&self.sampling, token, &[])));
        // Ids that do not exist have no logit to change: two runs, each ascending.
        changes[start..].sort_by_key(|change| change.token);
        let existing = changes[start..].partition_point(|change| (change.token as usize) < self.vocabulary);
        changes.truncate(start + existing);
    }
}

/// The token of a row of raw logits, of which all exist, by the engine's own sampler: what a backend has to give, if it gives one.
/// `None` where something is not a number or infinite, or nothing may come. `scratch` holds the changed logits.
pub fn token(
    asked: &Samples,
    row: &SampleRow,
    logits: &[f32],
    sampler: &mut Sampler,
    scratch: &mut Vec<f32>,
) -> Option<u32> {
    let Some(draw) = row.draw else { return asked.token(row, logits, scratch) };
    if logits.iter().any(|logit| logit.is_nan()) {
        return None;
    }
    asked.change(row, logits, scratch);
    let params = Sampling {
        temperature: draw.temperature,
        min_p: draw.min_p,
        top_k: Some(draw.top_k),
        top_p: draw.top_p,
        ..Sampling::greedy()
    };
    match sampler.choose(scratch, &params, &History::default(), &[], 0).ok()? {
        Choice::Token(token) => Some(token),
        Choice::Among(distribution) => Some(distribution.draw(draw.uniform)),
    }
}

/// Adds the tokens that both masks allow; no mask where there is none.
fn add_mask(
    only: Option<&TokenMask>,
    allowed: Option<&TokenMask>,
    vocabulary: usize,
    masks: &mut Vec<u64>,
) -> Option<usize> {
    let (first, second) = match (only, allowed) {
        (None, None) => return None,
        (Some(mask), None) | (None, Some(mask)) => (mask, mask),
        (Some(only), Some(allowed)) => (only, allowed),
    };
    let start = masks.len();
    masks.extend(first.words().iter().zip(second.words()).map(|(a, b)| a & b));
    masks.resize(start + vocabulary.div_ceil(64), 0);
    Some(start)
}

impl History {
    /// What the penalties change of a token behind `more` further tokens.
    fn change(&self, params: &Sampling, token: u32, more: &[u32]) -> LogitChange {
        let further = more.iter().filter(|&&other| other == token).count() as u32;
        let mut change = LogitChange::none(token);
        let seen = self.output(token);
        if seen.is_some() || further > 0 {
            change.repetition = params.repetition_penalty;
            change.minus = Self::minus(params, seen.unwrap_or(0) + further);
        }
        change
    }
}
