//! The seam to grammars: which tokens may come next.
//!
//! The engine knows nothing of schemas. A [`Constraint`] follows one answer from its first constrained token on; the engine
//! asks it for a mask at every row of a step, drafts included, feeds it each token that becomes part of the answer, and takes
//! back what it fed for drafts that fell. Invariant: between steps a constraint has seen exactly the constrained tokens of
//! its answer.

use crate::request::Structure;

/// One bit for each token id: set when the token may be chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u64>,
    tokens: usize,
}

impl TokenMask {
    /// A mask for ids below `tokens` that allows all of them.
    pub fn all(tokens: usize) -> Self {
        let mut mask = Self { words: vec![0; tokens.div_ceil(64)], tokens };
        mask.fill(true);
        mask
    }

    /// Ids that the mask speaks of: those below this number.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Allows every token, or none.
    pub fn fill(&mut self, allowed: bool) {
        self.words.fill(if allowed { u64::MAX } else { 0 });
        let beyond = self.words.len() * 64 - self.tokens;
        if let Some(last) = self.words.last_mut().filter(|_| beyond > 0) {
            *last &= u64::MAX >> beyond;
        }
    }

    /// Whether a token may be chosen; ids that the mask does not cover may not.
    pub fn allows(&self, token: u32) -> bool {
        (token as usize) < self.tokens && self.words[token as usize / 64] >> (token % 64) & 1 == 1
    }

    /// Allows a token. Ids beyond the mask are ignored.
    pub fn allow(&mut self, token: u32) {
        if (token as usize) < self.tokens {
            self.words[token as usize / 64] |= 1 << (token % 64);
        }
    }

    /// Forbids a token. Ids beyond the mask are ignored.
    pub fn forbid(&mut self, token: u32) {
        if (token as usize) < self.tokens {
            self.words[token as usize / 64] &= !(1 << (token % 64));
        }
    }

    /// How many tokens may be chosen.
    pub fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Makes the logits of all other tokens minus infinity, those beyond the mask included.
    pub fn apply(&self, logits: &mut [f32]) {
        let (covered, beyond) = logits.split_at_mut(self.tokens.min(logits.len()));
        beyond.fill(f32::NEG_INFINITY);
        for (logits, &word) in covered.chunks_mut(64).zip(&self.words) {
            match word {
                u64::MAX => {}
                0 => logits.fill(f32::NEG_INFINITY),
                _ => logits.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0).for_each(|(_, logit)| {
                    *logit = f32::NEG_INFINITY;
                }),
            }
        }
    }

    /// The bits, 64 ids a word, the lowest id in the lowest bit.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// The bits, to be written. Bits at and beyond [`TokenMask::tokens`] must stay clear.
    pub fn words_mut(&mut self) -> &mut [u64] {
        &mut self.words
    }
}

/// Why a constraint cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConstraintError(pub String);

/// Which tokens may come next in one answer.
pub trait Constraint: Send + std::fmt::Debug {
    /// Writes the tokens that may come next. Once the shape is complete these are the model's own end tokens alone.
    ///
    /// # Errors
    /// When nothing may come or the grammar exceeds its own limits.
    fn mask(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError>;

    /// Takes a token in.
    ///
    /// # Errors
    /// When it may not come here.
    fn advance(&mut self, token: u32) -> Result<(), ConstraintError>;

    /// Takes back the last `tokens` tokens taken in.
    ///
    /// # Errors
    /// When fewer were taken in.
    fn rollback(&mut self, tokens: usize) -> Result<(), ConstraintError>;

    /// How many of these tokens, from the first, may come next one after the other. Changes nothing.
    fn valid_prefix(&mut self, tokens: &[u32]) -> usize;
}

/// Makes constraints; one for a process.
pub trait Grammars: Send + Sync + std::fmt::Debug {
    /// The constraint of one answer.
    ///
    /// # Errors
    /// Says what is wrong with the schema or grammar, for the client that sent it.
    fn compile(&self, structure: &Structure) -> Result<Box<dyn Constraint>, ConstraintError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_covers_its_ids_and_no_more() {
        for tokens in [1, 63, 64, 65, 130] {
            let mut mask = TokenMask::all(tokens);
            let set = |mask: &TokenMask| (0..200).filter(|&t| mask.allows(t)).count();
            assert_eq!(set(&mask), tokens);
            assert_eq!(mask.words().iter().map(|w| w.count_ones() as usize).sum::<usize>(), tokens);
            mask.forbid(0);
            mask.forbid(500);
            assert_eq!((set(&mask), mask.allows(0)), (tokens - 1, false));
            mask.fill(false);
            mask.allow(tokens as u32 - 1);
            mask.allow(tokens as u32);
            assert_eq!((set(&mask), mask.allows(tokens as u32 - 1)), (1, true));
            assert_eq!(mask.count(), 1);
        }
    }

    #[test]
    fn a_mask_leaves_the_logits_of_its_tokens() {
        for logits in [100, 130, 200] {
            let mut mask = TokenMask::all(130);
            mask.fill(false);
            [3, 63, 64, 129].into_iter().chain(66..128).for_each(|token| mask.allow(token));
            let mut row = vec![1.0f32; logits];
            mask.apply(&mut row);
            for (logit, token) in row.iter().zip(0u32..) {
                assert_eq!(logit.is_finite(), mask.allows(token), "token {token} of {logits}");
            }
            let mut row = vec![1.0f32; logits];
            TokenMask::all(130).apply(&mut row);
            assert_eq!(row.iter().filter(|l| l.is_finite()).count(), logits.min(130));
        }
    }
}
