//! One table of logits for every context, a constraint that is a function of its tokens, and answers with and without
//! drafts.

use glimmer_tensor::{Finds, Samples};
use proptest::prelude::*;

use super::*;
use crate::{
    random::{Purpose, uniform},
    request::Logprobs,
    sampling::Distribution,
    speculate::tests::assert_drawn,
};

mod equal;
mod features;

/// Ids that exist; rows have some more, as vocabularies are padded.
const VOCABULARY: usize = 24;
const PADDED: usize = 27;
const END: u32 = 0;
const OTHER_END: u32 = 1;
const THINK_END: u32 = 2;

/// A number that looks random, of the seed and the numbers.
fn mix(seed: u64, numbers: &[u32]) -> u64 {
    numbers.iter().fold(seed ^ 0x9e37_79b9_7f4a_7c15, |hash, &n| {
        let hash = (hash ^ u64::from(n)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        (hash ^ hash >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53) ^ hash >> 29
    })
}

/// Raw logits behind a context: a function of its length and its last two tokens, with ties.
fn table(seed: u64, context: &[u32], row: &mut [f32]) {
    let last = &context[context.len().saturating_sub(2)..];
    let hash = mix(mix(seed, last), &[context.len() as u32]);
    row.fill(f32::NEG_INFINITY);
    for (logit, token) in row[..VOCABULARY].iter_mut().zip(0u32..) {
        *logit = (mix(hash, &[token]) % 64) as f32 / 8.0 - 4.0;
    }
}

/// Allows a third of the tokens or so, depending on those it has taken in; complete after some.
#[derive(Debug, Clone)]
struct Mock {
    seed: u64,
    taken: Vec<u32>,
    length: usize,
}

impl Mock {
    fn allows(&self, token: u32) -> bool {
        let end = token == END || token == OTHER_END;
        if self.taken.len() >= self.length {
            return end;
        }
        let hash = mix(self.seed, &self.taken);
        // Optional ends now and then, and at least one token that goes on.
        if end {
            hash.is_multiple_of(7)
        } else {
            token == 3 + (hash % 20) as u32 || mix(hash, &[token]).is_multiple_of(3)
        }
    }
}

impl Constraint for Mock {
    fn mask(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        mask.fill(false);
        (0..VOCABULARY as u32).filter(|&token| self.allows(token)).for_each(|token| mask.allow(token));
        Ok(())
    }

    fn advance(&mut self, token: u32) -> Result<(), ConstraintError> {
        if !self.allows(token) {
            return Err(ConstraintError(format!("{token} may not come after {:?}", self.taken)));
        }
        self.taken.push(token);
        Ok(())
    }

    fn rollback(&mut self, tokens: usize) -> Result<(), ConstraintError> {
        let left = self.taken.len().checked_sub(tokens).ok_or(ConstraintError("too many".to_owned()))?;
        self.taken.truncate(left);
        Ok(())
    }

    fn valid_prefix(&mut self, tokens: &[u32]) -> usize {
        let mut copy = self.clone();
        tokens.iter().take_while(|&&token| copy.advance(token).is_ok()).count()
    }
}

/// A request with its table and constraint.
#[derive(Debug, Clone)]
struct Case {
    request: Request,
    rules: AnswerRules,
    table: u64,
    constraint: Option<(u64, usize)>,
}

impl Case {
    /// A greedy request with nothing switched on.
    fn new(max_tokens: u32) -> Self {
        Self {
            request: Request::new(vec![5, 6, 7], max_tokens),
            rules: AnswerRules {
                vocabulary: VOCABULARY,
                context: 1000,
                end_tokens: vec![END, OTHER_END],
                reasoning_end: Some(ReasoningEnd::new(THINK_END)),
            },
            table: 1,
            constraint: None,
        }
    }

    fn answer(&self) -> Answer {
        let constraint = self
            .constraint
            .map(|(seed, length)| Box::new(Mock { seed, taken: Vec::new(), length }) as Box<dyn Constraint>);
        Answer::new(&self.request, &self.rules, constraint).unwrap()
    }
}

/// What became of an answer.
#[derive(Debug, PartialEq)]
struct Told {
    tokens: Vec<Token>,
    finish: FinishReason,
    /// History, reasoning and shape at the end.
    state: String,
    accepted: usize,
}

impl Told {
    fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }
}

fn state(answer: &Answer) -> String {
    format!("{:?} {:?} {:?}", answer.history, answer.thinking, answer.shape)
}

fn undrawn(tokens: &[u32]) -> Vec<Draft> {
    tokens.iter().map(|&token| Draft { token, drawn_from: None }).collect()
}

/// Tells an answer to its end; `propose` gives the drafts behind the answer so far.
fn tell(case: &Case, mut propose: impl FnMut(&[u32]) -> Vec<Draft>) -> Told {
    tell_by(case, &mut |context, row| table(case.table, context, row), &mut propose)
}

fn tell_by(
    case: &Case,
    logits: &mut dyn FnMut(&[u32], &mut [f32]),
    propose: &mut dyn FnMut(&[u32]) -> Vec<Draft>,
) -> Told {
    tell_asking(case, logits, propose, None)
}

/// As `tell_by`; `given` counts the tokens that a backend finds which finds such rows, where one is asked.
fn tell_asking(
    case: &Case,
    logits: &mut dyn FnMut(&[u32], &mut [f32]),
    propose: &mut dyn FnMut(&[u32]) -> Vec<Draft>,
    mut given: Option<(Finds, &mut usize)>,
) -> Told {
    let (mut answer, mut judge) = (case.answer(), RowJudge::new(PADDED));
    let mut known = case.request.prompt.to_vec();
    let (mut tokens, mut accepted) = (Vec::new(), 0);
    loop {
        let mut drafts = propose(&known[case.request.prompt.len()..]);
        drafts.truncate(answer.useful_drafts(known.len()));
        let before = state(&answer);
        let fed = answer.prepare(&drafts).unwrap();
        assert_eq!(state(&answer), before, "preparing changes nothing");
        assert!(fed <= drafts.len());
        assert_eq!(answer.masks().len(), fed + 1);
        let first = tokens.len();
        let mut context = known.clone();
        context.extend(drafts[..fed].iter().map(|draft| draft.token));
        let mut tokens_given = vec![None; fed + 1];
        if let Some((finds, given)) = &mut given {
            let (mut asked, mut changed, mut sampler) = (Samples::default(), Vec::new(), Sampler::default());
            answer.ask(&known, &drafts, 0, *finds, &mut asked);
            assert_eq!(state(&answer), before, "asking changes nothing");
            asked.check(fed + 1, PADDED, VOCABULARY).unwrap();
            for row in &asked.rows {
                assert!(*finds >= if row.draw.is_some() { Finds::Drawn } else { Finds::Largest });
                let mut values = vec![0.0; PADDED];
                logits(&context[..known.len() + row.row as usize], &mut values);
                let token = token(&asked, row, &values[..VOCABULARY], &mut sampler, &mut changed);
                tokens_given[row.row as usize] = token;
                **given += usize::from(token.is_some());
            }
        }
        let mut row = |i: usize, row: &mut [f32]| {
            assert!(i <= fed, "row {i} is not computed");
            assert_eq!(tokens_given[i], None, "row {i} is known");
            logits(&context[..known.len() + i], row);
            Ok::<(), EngineError>(())
        };
        let judged = answer.judge_given(&mut judge, &known, &drafts, &tokens_given, &mut row, &mut tokens).unwrap();
        let new: Vec<u32> = tokens[first..].iter().map(|token| token.id).collect();
        assert!(judged.accepted <= fed && judged.accepted <= judged.judged && judged.judged <= drafts.len());
        let stood = judged.accepted.min(new.len());
        assert!(new.iter().zip(&drafts).take(stood).all(|(token, draft)| *token == draft.token));
        accepted += judged.accepted;
        known.extend(&new);
        match judged.finish {
            Some(finish) => return Told { tokens, finish, state: state(&answer), accepted },
            None => assert_eq!(new.len(), judged.accepted + 1, "a step yields its drafts and one more"),
        }
    }
}

/// Drafts that are mostly what comes anyway: `depth` tokens of `plain`, each wrong with a probability of `wrong` percent.
fn nearly(plain: &[u32], at: usize, depth: usize, wrong: u64, seed: u64) -> Vec<u32> {
    (at..at + depth)
        .map(|i| {
            let hash = mix(seed, &[at as u32, i as u32]);
            let right = plain.get(i).copied().unwrap_or((hash % 23) as u32);
            if hash % 100 < wrong { (hash / 100 % VOCABULARY as u64) as u32 } else { right }
        })
        .collect()
}
