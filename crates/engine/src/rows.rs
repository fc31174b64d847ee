//! From the rows of one sequence to the tokens of its answer.
//!
//! A step gives an answer one row of logits for its newest token and one for each draft behind it. [`Answer`] is what
//! decides about them: it holds everything that shapes tokens (penalties, bans, reasoning, shape of the answer) and moves on
//! token by token. Two calls make a step of it:
//!
//! 1. [`Answer::prepare`] before the rows are computed: which drafts can still stand, and what each row may choose, as far
//!    as that is known without logits. It leaves the answer as it was.
//!
//!    [`Answer::ask`] tells a backend what it needs to find the tokens of the rows without handing out their logits.
//! 2. [`Answer::judge`] with the logits: drafts stand or fall in order, each row applies bias, bans, penalties and all else
//!    for its own position, and the answer takes in every token that it emits.
//!
//! Invariant: drafts change nothing but the number of steps. For drafts that were not drawn, and for greedy requests, the
//! tokens, their log-probabilities, the end and the state left behind are those of one row at a time; for drawn drafts the
//! tokens have the same distribution.

mod ask;

pub use ask::token;

use glimmer_tensor::sample::EXCLUDED;

use crate::{
    EngineError,
    constraint::{Constraint, ConstraintError, TokenMask},
    logprobs::Reader,
    request::{FinishReason, Request, RequestError, Sampling, Token},
    sampling::{History, Sampler},
    speculate::{Draft, Verdict, judge as judge_draft},
    synthetic::SyntheticAcceptance,
    thinking::{ReasoningEnd, Thinking},
};

/// What answers need to know of the model and the engine.
#[derive(Debug, Clone)]
pub struct AnswerRules {
    /// Ids that exist.
    pub vocabulary: usize,
    /// Most tokens of a sequence, prompt included.
    pub context: usize,
    /// The model's own end tokens.
    pub end_tokens: Vec<u32>,
    /// How reasoning ends, where the model reasons.
    pub reasoning_end: Option<ReasoningEnd>,
}

/// What a row may choose, as far as that does not depend on logits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RowMask {
    /// Anything.
    Any,
    /// This token, whatever the logits say.
    Forced(u32),
    /// One of these.
    Only(TokenMask),
    /// Nothing: the constraint has failed at this row, for this reason.
    Fault(String),
}

impl RowMask {
    /// Whether a token can come out of the row.
    pub fn allows(&self, token: u32) -> bool {
        match self {
            Self::Any => true,
            Self::Forced(forced) => *forced == token,
            Self::Only(mask) => mask.allows(token),
            Self::Fault(_) => false,
        }
    }
}

/// What came of a step for one answer, besides the tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judged {
    /// Drafts that stand.
    pub accepted: usize,
    /// Drafts that count for or against the drafter: all of them, unless the answer ended before.
    pub judged: usize,
    /// Why the answer ended, if it did.
    pub finish: Option<FinishReason>,
}

/// Scratch and settings for judging rows; one for an engine.
#[derive(Debug)]
pub struct RowJudge {
    /// Logits of the row at hand, `[rows of the vocabulary]`.
    row: Vec<f32>,
    /// The same before shaping, where log-probabilities are wanted.
    raw: Vec<f32>,
    banned: Vec<u32>,
    sampler: Sampler,
    reader: Reader,
    synthetic: Option<SyntheticAcceptance>,
}

impl RowJudge {
    /// A judge of rows of this many logits, padding of the vocabulary included.
    pub fn new(logits: usize) -> Self {
        Self {
            row: vec![0.0; logits],
            raw: Vec::new(),
            banned: Vec::new(),
            sampler: Sampler::default(),
            reader: Reader::default(),
            synthetic: None,
        }
    }

    /// Lets drafts stand by decree. For benches alone: the output is no longer the model's.
    #[must_use]
    pub fn with_synthetic(mut self, acceptance: SyntheticAcceptance) -> Self {
        self.synthetic = Some(acceptance);
        self
    }

    /// The sampler and a row of scratch, for a drafter.
    pub fn scratch(&mut self) -> (&mut Sampler, &mut [f32]) {
        (&mut self.sampler, &mut self.row)
    }
}

/// The shape of an answer, followed from the end of its reasoning.
#[derive(Debug)]
struct Shape {
    constraint: Box<dyn Constraint>,
    /// An end token has come: nothing but end tokens may follow, and the constraint is left alone.
    complete: bool,
    /// A token that would end the reasoning, and that the shape cannot begin with.
    barred: Option<u32>,
}

/// Everything that decides about the tokens of one answer.
#[derive(Debug)]
pub struct Answer {
    sampling: Sampling,
    seed: u64,
    /// Tokens of the prompt.
    prompt: usize,
    /// Most tokens, prompt included.
    limit: usize,
    min_tokens: usize,
    ignore_eos: bool,
    /// The model's own.
    end_tokens: Vec<u32>,
    /// The request's own.
    stop_tokens: Vec<u32>,
    /// Both, each once.
    ending: Vec<u32>,
    /// Tokens to choose from, where the request names them.
    allowed: Option<TokenMask>,
    logprobs: Option<u32>,
    /// A token has two biases.
    repeated_bias: bool,
    vocabulary: usize,
    history: History,
    thinking: Thinking,
    shape: Option<Shape>,
    /// Masks of the rows to come; those beyond `rows` are kept for their memory.
    masks: Vec<RowMask>,
    /// 0 unless prepared.
    rows: usize,
    /// Drafts that the masks belong to.
    prepared: Vec<u32>,
}

impl Answer {
    /// The answer to a request, before its first token. `constraint` follows the shape that the request names.
    ///
    /// # Errors
    /// [`EngineError::Parameter`] when the request needs the end of reasoning and the model has none.
    pub fn new(
        request: &Request,
        rules: &AnswerRules,
        constraint: Option<Box<dyn Constraint>>,
    ) -> Result<Self, EngineError> {
        let end = rules.reasoning_end.clone().filter(|_| request.starts_in_reasoning);
        let needs_end = constraint.is_some() || request.thinking_budget.is_some();
        if request.starts_in_reasoning && needs_end && end.is_none() {
            return Err(EngineError::parameter(
                "starts_in_reasoning",
                "false where a structure or a thinking budget is asked for, as the model's end of reasoning is not known",
                true,
            ));
        }
        let (sampling, limits, prompt) = (&request.sampling, &request.limits, request.prompt.len());
        let allowed = sampling.allowed_tokens.as_ref().map(|tokens| {
            let mut mask = TokenMask::all(rules.vocabulary);
            mask.fill(false);
            tokens.iter().for_each(|&token| mask.allow(token));
            mask
        });
        let mut ending = [&rules.end_tokens[..], &limits.stop_tokens].concat();
        ending.sort_unstable();
        ending.dedup();
        Ok(Self {
            seed: sampling.key(),
            prompt,
            limit: prompt.saturating_add(limits.max_tokens as usize).min(rules.context),
            min_tokens: limits.min_tokens as usize,
            ignore_eos: limits.ignore_eos,
            end_tokens: rules.end_tokens.clone(),
            stop_tokens: limits.stop_tokens.clone(),
            ending,
            allowed,
            logprobs: request.logprobs,
            repeated_bias: {
                let mut tokens: Vec<u32> = sampling.logit_bias.iter().map(|bias| bias.0).collect();
                tokens.sort_unstable();
                tokens.windows(2).any(|pair| pair[0] == pair[1])
            },
            vocabulary: rules.vocabulary,
            history: History::new(sampling, &request.prompt),
            shape: constraint.map(|mut constraint| {
                let opener = end.as_ref().and_then(ReasoningEnd::opener);
                let barred = opener.filter(|&opener| constraint.valid_prefix(&[opener]) == 0);
                Shape { constraint, complete: false, barred }
            }),
            thinking: end.map_or_else(Thinking::over, |end| Thinking::begun(end, request.thinking_budget)),
            sampling: sampling.clone(),
            masks: Vec::new(),
            rows: 0,
            prepared: Vec::new(),
        })
    }

    /// Key of the answer's draws.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Most tokens of the sequence, prompt included.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// How many drafts the next step can use behind `known` tokens: the step yields one token of its own.
    pub fn useful_drafts(&self, known: usize) -> usize {
        self.limit.saturating_sub(known).saturating_sub(1)
    }

    /// Whether the next token belongs to the reasoning.
    pub fn is_thinking(&self) -> bool {
        self.thinking.is_inside()
    }

    /// Masks of the rows that the last [`Answer::prepare`] made, until they are judged.
    pub fn masks(&self) -> &[RowMask] {
        &self.masks[..self.rows]
    }

    /// Finds what each row of the next step may choose, and gives the number of drafts whose rows are worth computing: up
    /// to the first that cannot come, because the shape of the answer or a used-up thinking budget forbids it.
    ///
    /// `drafts` are all that the step has room for, and [`Answer::judge`] wants the same ones: a draft that falls here is
    /// still rejected there, which for a drawn draft is not the same as never having been proposed.
    ///
    /// # Errors
    /// When the constraint does not take its tokens back; the answer cannot go on.
    pub fn prepare(&mut self, drafts: &[Draft]) -> Result<usize, RequestError> {
        self.rows = 0;
        let mut thinking = self.thinking.clone();
        let mut complete = self.shape.as_ref().is_some_and(|shape| shape.complete);
        let mut taken = 0;
        for i in 0..=drafts.len() {
            self.mask_row(&thinking, complete);
            let Some(draft) = drafts.get(i).filter(|draft| self.masks[i].allows(draft.token)) else { break };
            let constrained = !thinking.owns(draft.token) && !complete;
            thinking.push(draft.token);
            let Some(shape) = self.shape.as_mut().filter(|_| constrained) else { continue };
            if self.end_tokens.contains(&draft.token) {
                complete = true;
            } else if let Err(error) = shape.constraint.advance(draft.token) {
                // Only a draft that stands meets this, and then the answer meets it as well when it takes the token in.
                self.set_mask(RowMask::Fault(error.to_string()));
                break;
            } else {
                taken += 1;
            }
        }
        if let Some(shape) = self.shape.as_mut().filter(|_| taken > 0) {
            shape.constraint.rollback(taken).map_err(|error| fault(&error))?;
        }
        self.prepared.clear();
        self.prepared.extend(drafts.iter().map(|draft| draft.token));
        Ok(self.rows - 1)
    }

    /// Judges the rows of a step: emits tokens to `out` and takes them in. `known` are prompt and answer so far, `drafts`
    /// those of [`Answer::prepare`], and `row` writes the raw logits of row `i`: row 0 belongs to the newest token, row
    /// `i` to draft `i - 1`; no row is asked for beyond the drafts that `prepare` found worth computing.
    ///
    /// A row from which nothing can be chosen ends this answer alone, with [`FinishReason::Error`].
    ///
    /// # Errors
    /// Those of `row`.
    pub fn judge<E>(
        &mut self,
        judge: &mut RowJudge,
        known: &[u32],
        drafts: &[Draft],
        row: &mut dyn FnMut(usize, &mut [f32]) -> Result<(), E>,
        out: &mut Vec<Token>,
    ) -> Result<Judged, E> {
        self.judge_given(judge, known, drafts, &[], row, out)
    }

    /// As [`Answer::judge`] where the tokens of some rows are known already: `given[i]` is what [`token`] finds for row `i`
    /// as [`Answer::ask`] put it. No logits are asked for such a row.
    ///
    /// # Errors
    /// Those of `row`.
    pub fn judge_given<E>(
        &mut self,
        judge: &mut RowJudge,
        known: &[u32],
        drafts: &[Draft],
        given: &[Option<u32>],
        row: &mut dyn FnMut(usize, &mut [f32]) -> Result<(), E>,
        out: &mut Vec<Token>,
    ) -> Result<Judged, E> {
        let mut result = Judged { accepted: 0, judged: drafts.len(), finish: None };
        let prepared = self.rows > 0 && self.prepared.iter().eq(drafts.iter().map(|draft| &draft.token));
        if !prepared && let Err(error) = self.prepare(drafts) {
            self.rows = 0;
            result.finish = Some(FinishReason::Error(error));
            return Ok(result);
        }
        for i in 0..self.rows {
            let given = given.get(i).copied().flatten().filter(|_| self.logprobs.is_none());
            if given.is_none() && (self.logprobs.is_some() || !matches!(self.masks[i], RowMask::Forced(_))) {
                row(i, &mut judge.row)?;
            }
            // All drafts before this row stand.
            let output = Output { known: &known[self.prompt.min(known.len())..], new: &self.prepared[..i] };
            let position = known.len() + i;
            let emitted = self.row(judge, i, position, output, (drafts.get(i), given)).and_then(|(token, stands)| {
                self.take_in(token.id)?;
                Ok((token, stands))
            });
            let (token, stands) = match emitted {
                Ok(emitted) => emitted,
                Err(error) => {
                    result.finish = Some(FinishReason::Error(error));
                    break;
                }
            };
            result.finish = self.finish(token.id, position + 1);
            out.push(token);
            result.accepted += usize::from(stands);
            if stands && result.finish.is_some() {
                // Drafts behind the end are nobody's text: they count neither for nor against the drafter.
                result.judged = i + 1;
            }
            if !stands || result.finish.is_some() {
                break;
            }
        }
        self.rows = 0;
        Ok(result)
    }

    /// The token of row `i`, with its log-probabilities, and whether it is the draft. A draft may stand before the row, and a
    /// token that is known to come out of it.
    fn row(
        &self,
        judge: &mut RowJudge,
        i: usize,
        position: usize,
        output: Output<'_>,
        (draft, given): (Option<&Draft>, Option<u32>),
    ) -> Result<(Token, bool), RequestError> {
        if self.logprobs.is_some() {
            judge.raw.clone_from(&judge.row);
        }
        let (id, stands) = match &self.masks[i] {
            RowMask::Fault(reason) => return Err(RequestError::Internal(reason.clone())),
            RowMask::Forced(forced) => (*forced, draft.is_some_and(|draft| draft.token == *forced)),
            mask => match given {
                Some(token) => self.compare(judge, mask, i, position, (draft, token)),
                None => self.choose(judge, mask, i, position, output, draft)?,
            },
        };
        let logprobs = match self.logprobs {
            Some(best) => {
                let read = judge.reader.read(&judge.raw, id, best as usize);
                Some(Box::new(read.map_err(|reason| bad_row(position, reason))?))
            }
            None => None,
        };
        Ok((Token { id, logprobs }, stands))
    }

    /// A row's token, which is known, and whether the draft, which was not drawn or whose row is greedy, stands.
    fn compare(
        &self,
        judge: &RowJudge,
        mask: &RowMask,
        i: usize,
        position: usize,
        (draft, token): (Option<&Draft>, u32),
    ) -> (u32, bool) {
        match (draft, &judge.synthetic) {
            (Some(draft), Some(synthetic)) => {
                let stands = mask.allows(draft.token) && synthetic.stands(self.seed, position, i);
                (if stands { draft.token } else { token }, stands)
            }
            (Some(draft), None) => (token, draft.token == token),
            (None, _) => (token, false),
        }
    }

    fn choose(
        &self,
        judge: &mut RowJudge,
        mask: &RowMask,
        i: usize,
        position: usize,
        output: Output<'_>,
        draft: Option<&Draft>,
    ) -> Result<(u32, bool), RequestError> {
        let RowJudge { row, banned, sampler, synthetic, .. } = judge;
        let only = if let RowMask::Only(only) = mask { Some(only) } else { None };
        if (only.is_some() || self.allowed.is_some()) && row.iter().any(|logit| logit.is_nan()) {
            return Err(bad_row(position, "a logit is not a number"));
        }
        for mask in [only, self.allowed.as_ref()].into_iter().flatten() {
            mask.apply(row);
        }
        self.ban(banned, only, output);
        let choice =
            sampler.choose(row, &self.sampling, &self.history, banned, position).map_err(|error| match error {
                // What the model gave was sound, and something of the request's took tokens out.
                EngineError::NoToken { reason: EXCLUDED, .. }
                    if only.is_some() || self.allowed.is_some() || !banned.is_empty() =>
                {
                    RequestError::Excluded(position)
                }
                error => RequestError::Internal(error.to_string()),
            })?;
        let verdict = match (draft, synthetic) {
            (None, _) => Verdict::Replaced(choice.draw(self.seed, position)),
            (Some(draft), None) => judge_draft(&choice, draft, self.seed, position),
            (Some(draft), Some(synthetic)) => {
                if mask.allows(draft.token) && synthetic.stands(self.seed, position, i) {
                    Verdict::Accepted
                } else {
                    Verdict::Replaced(choice.draw(self.seed, position))
                }
            }
        };
        Ok(match (verdict, draft) {
            (Verdict::Accepted, Some(draft)) => (draft.token, true),
            (Verdict::Accepted, None) => (choice.draw(self.seed, position), false),
            (Verdict::Replaced(token), _) => (token, false),
        })
    }

    /// Tokens that cannot be chosen behind `output`.
    fn ban(&self, banned: &mut Vec<u32>, only: Option<&TokenMask>, output: Output<'_>) {
        banned.clear();
        // A shape that is complete ends, however short it is.
        let must_end =
            || only.is_some_and(|only| only.count() == self.ending.iter().filter(|t| only.allows(**t)).count());
        if output.len() < self.min_tokens && !must_end() {
            banned.extend(&self.ending);
        }
        for word in &self.sampling.bad_words {
            if let Some((last, _)) = word.split_last().filter(|(_, before)| output.ends_with(before)) {
                banned.push(*last);
            }
        }
    }

    /// Takes a token in.
    fn take_in(&mut self, token: u32) -> Result<(), RequestError> {
        let constrained = !self.thinking.owns(token);
        self.thinking.push(token);
        self.history.push(token);
        if let Some(shape) = self.shape.as_mut().filter(|shape| constrained && !shape.complete) {
            if self.end_tokens.contains(&token) {
                shape.complete = true;
            } else {
                shape.constraint.advance(token).map_err(|error| fault(&error))?;
            }
        }
        Ok(())
    }

    /// Why the answer ends with `token`, which makes it `known` tokens long, prompt included.
    fn finish(&self, token: u32, known: usize) -> Option<FinishReason> {
        if !self.ignore_eos && self.end_tokens.contains(&token) {
            Some(FinishReason::EndToken)
        } else if self.stop_tokens.contains(&token) {
            Some(FinishReason::StopToken(token))
        } else {
            (known >= self.limit).then_some(FinishReason::Length)
        }
    }

    /// Adds the mask of the next row, which `thinking` and `complete` lead to.
    fn mask_row(&mut self, thinking: &Thinking, complete: bool) {
        if let Some(forced) = thinking.forced() {
            return self.set_mask(RowMask::Forced(forced));
        }
        let inside = thinking.is_inside();
        let Some(shape) = self.shape.as_mut().filter(|shape| !inside || shape.barred.is_some()) else {
            return self.set_mask(RowMask::Any);
        };
        let mut mask = match self.masks.get_mut(self.rows).map(|mask| std::mem::replace(mask, RowMask::Any)) {
            Some(RowMask::Only(mask)) => mask,
            _ => TokenMask::all(self.vocabulary),
        };
        if let Some(barred) = shape.barred.filter(|_| inside) {
            mask.fill(true);
            mask.forbid(barred);
        } else if complete {
            mask.fill(false);
            self.end_tokens.iter().for_each(|&token| mask.allow(token));
        } else if let Err(error) = shape.constraint.mask(&mut mask) {
            return self.set_mask(RowMask::Fault(error.to_string()));
        }
        self.set_mask(RowMask::Only(mask));
    }

    fn set_mask(&mut self, mask: RowMask) {
        match self.masks.get_mut(self.rows) {
            Some(place) => *place = mask,
            None => self.masks.push(mask),
        }
        self.rows += 1;
    }
}

/// The output before a row: what was known before the step, and what the step has added.
#[derive(Debug, Clone, Copy)]
struct Output<'a> {
    known: &'a [u32],
    new: &'a [u32],
}

impl Output<'_> {
    fn len(&self) -> usize {
        self.known.len() + self.new.len()
    }

    fn ends_with(&self, tokens: &[u32]) -> bool {
        let back = self.new.iter().rev().chain(self.known.iter().rev());
        tokens.len() <= self.len() && tokens.iter().rev().zip(back).all(|(a, b)| a == b)
    }
}

fn fault(error: &ConstraintError) -> RequestError {
    RequestError::Internal(format!("the shape of the answer cannot be followed: {error}"))
}

fn bad_row(position: usize, reason: &'static str) -> RequestError {
    RequestError::Internal(EngineError::NoToken { position, reason }.to_string())
}

#[cfg(test)]
mod tests;
