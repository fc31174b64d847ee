//! One answer on its way through a grammar.
//!
//! The library's parser is asked and fed here; its quirks end here. It turns into an error for good when it is fed a token
//! that may not come, so every token is checked first. It never sees an end token: those are counted beside it, and may
//! come wherever the text so far is complete. Invariant: the parser has consumed `taken` tokens and `ended` end tokens
//! followed.

use std::sync::Arc;

use glimmer_engine::constraint::{Constraint, ConstraintError, TokenMask};
use llguidance::Matcher;

use super::vocabulary::Vocabulary;

pub(super) struct Follower {
    parser: Matcher,
    vocabulary: Arc<Vocabulary>,
    taken: usize,
    ended: usize,
}

impl std::fmt::Debug for Follower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follower").field("taken", &self.taken).field("ended", &self.ended).finish_non_exhaustive()
    }
}

fn refusal(error: impl std::fmt::Display) -> ConstraintError {
    ConstraintError(super::brief(&error))
}

impl Follower {
    pub(super) fn new(parser: Matcher, vocabulary: Arc<Vocabulary>) -> Self {
        Self { parser, vocabulary, taken: 0, ended: 0 }
    }

    /// Whether nothing but an end token can follow.
    fn is_over(&self) -> Result<bool, ConstraintError> {
        match self.parser.get_error() {
            Some(problem) => Err(refusal(problem)),
            None => Ok(self.ended > 0 || self.parser.is_stopped()),
        }
    }

    fn may_end(&mut self) -> Result<bool, ConstraintError> {
        Ok(self.is_over()? || self.parser.is_accepting().map_err(refusal)?)
    }

    /// How many of these tokens, none of them an end token, the parser would take.
    fn would_take(&mut self, tokens: &[u32]) -> Result<usize, ConstraintError> {
        if tokens.is_empty() || self.is_over()? {
            return Ok(0);
        }
        // The library gives up for good when it meets an id that it does not know.
        let known = tokens.iter().take_while(|&&token| self.is_defined(token)).count();
        self.parser.validate_tokens(&tokens[..known]).map_err(refusal)
    }

    fn is_defined(&self, token: u32) -> bool {
        let word = self.vocabulary.defined().get(token as usize / 64);
        word.is_some_and(|word| word >> (token % 64) & 1 == 1)
    }
}

impl Constraint for Follower {
    fn mask(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        mask.fill(false);
        if self.is_over()? {
            for &end in self.vocabulary.ends() {
                mask.allow(end);
            }
            return Ok(());
        }
        let allowed = self.parser.compute_mask().map_err(refusal)?;
        let halves = allowed.as_slice();
        let covered = mask.tokens().min(self.vocabulary.tokens());
        let words = mask.words_mut();
        for (index, (word, defined)) in words.iter_mut().zip(self.vocabulary.defined()).enumerate() {
            let half = |at: usize| u64::from(halves.get(at).copied().unwrap_or(0));
            *word = (half(2 * index) | half(2 * index + 1) << 32) & defined;
            let beyond = (index * 64 + 64).saturating_sub(covered);
            if beyond > 0 {
                *word &= u64::MAX.checked_shr(beyond as u32).unwrap_or(0);
            }
        }
        Ok(())
    }

    fn advance(&mut self, token: u32) -> Result<(), ConstraintError> {
        if self.vocabulary.is_end(token) {
            if !self.may_end()? {
                return Err(ConstraintError(format!("end token {token} before the shape is complete")));
            }
            self.ended += 1;
            return Ok(());
        }
        if self.would_take(&[token])? == 0 {
            return Err(ConstraintError(format!("token {token} may not come here")));
        }
        self.parser.consume_token(token).map_err(refusal)?;
        self.taken += 1;
        Ok(())
    }

    fn rollback(&mut self, tokens: usize) -> Result<(), ConstraintError> {
        if tokens > self.taken + self.ended {
            let had = self.taken + self.ended;
            return Err(ConstraintError(format!("{tokens} tokens to take back, but only {had} were taken in")));
        }
        let ends = tokens.min(self.ended);
        self.parser.rollback(tokens - ends).map_err(refusal)?;
        self.ended -= ends;
        self.taken -= tokens - ends;
        Ok(())
    }

    fn valid_prefix(&mut self, tokens: &[u32]) -> usize {
        let text = tokens.iter().take_while(|&&token| !self.vocabulary.is_end(token)).count();
        let ends = tokens[text..].iter().take_while(|&&token| self.vocabulary.is_end(token)).count();
        let Ok(taken) = self.would_take(&tokens[..text]) else { return 0 };
        if taken < text || ends == 0 {
            return taken;
        }
        // The parser answers for an end token behind text that it has not consumed, but not once it has stopped.
        let complete = match text {
            0 => self.may_end(),
            _ => self.parser.validate_tokens(&tokens[..=text]).map(|n| n > text).map_err(refusal),
        };
        if complete == Ok(true) { text + ends } else { taken }
    }
}
