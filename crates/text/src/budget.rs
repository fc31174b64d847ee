//! What turning text into tokens may take: so many tokens, and no longer than somebody waits for them.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::TextError;

/// Bounds of an encoding; by default there are none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Budget<'a> {
    /// Most tokens. Encoding ends as soon as it is certain that there are more.
    pub tokens: Option<usize>,
    /// True once nobody waits for the result any more.
    pub abandoned: Option<&'a AtomicBool>,
}

impl Budget<'_> {
    /// Whether to go on towards at least so many tokens.
    ///
    /// # Errors
    /// [`TextError::TooManyTokens`], [`TextError::Abandoned`].
    pub(crate) fn check(&self, at_least: usize) -> Result<(), TextError> {
        if self.abandoned.is_some_and(|gone| gone.load(Ordering::Relaxed)) {
            return Err(TextError::Abandoned);
        }
        match self.tokens {
            Some(most) if at_least > most => Err(TextError::TooManyTokens { most, at_least }),
            _ => Ok(()),
        }
    }
}
