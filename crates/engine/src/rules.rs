//! Which requests can be served at all.
//!
//! The answer depends on settings and model alone, never on what runs, so that any thread can give it before a request enters
//! the queue. Whatever passes is admitted as soon as what runs before it ends.

use glimmer_tensor::PAGE_TOKENS;

use crate::{EngineError, pools::need, request::Request};

/// What a request is held against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Most tokens of a sequence.
    pub context: usize,
    /// Ids that exist: those below.
    pub vocabulary: usize,
    /// Placeholder of media.
    pub placeholder: Option<u32>,
    /// Whether the model has a vision tower.
    pub vision: bool,
    /// Whether the token that ends reasoning is known.
    pub reasoning: bool,
    /// Most drafts a step.
    pub depth: usize,
    /// Pages in all.
    pub pages: usize,
}

impl Rules {
    /// Checks a request.
    ///
    /// # Errors
    /// Says which part cannot be served: [`EngineError::EmptyPrompt`], [`EngineError::PromptTooLong`],
    /// [`EngineError::UnknownToken`], [`EngineError::ImageTokens`], [`EngineError::NoVision`],
    /// [`EngineError::Parameter`], [`EngineError::NeverFits`].
    pub fn check(&self, request: &Request) -> Result<(), EngineError> {
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Err(EngineError::EmptyPrompt);
        }
        if prompt >= self.context {
            return Err(EngineError::PromptTooLong { prompt, context: self.context });
        }
        self.check_tokens(&request.prompt)?;
        self.check_media(request)?;
        request.sampling.validate(self.vocabulary)?;
        let limits = &request.limits;
        if limits.max_tokens == 0 {
            return Err(EngineError::parameter("max_tokens", "at least 1", 0));
        }
        if limits.min_tokens > limits.max_tokens {
            let expected = format!("at most max_tokens ({})", limits.max_tokens);
            return Err(EngineError::parameter("min_tokens", expected, limits.min_tokens));
        }
        if let Some(depth) = request.depth.filter(|&depth| depth as usize > self.depth) {
            return Err(EngineError::parameter("depth", format!("at most {}", self.depth), depth));
        }
        let needs_end = request.structure.is_some() || request.thinking_budget.is_some();
        if request.starts_in_reasoning && needs_end && !self.reasoning {
            let expected =
                "false where a structure or a thinking budget is asked for, as the end of reasoning is not known";
            return Err(EngineError::parameter("starts_in_reasoning", expected, true));
        }
        if let Some(start) = request.turn_start.filter(|&start| start >= prompt) {
            return Err(EngineError::parameter("turn_start", format!("an index below {prompt}"), start));
        }
        let (need, available) = (need(self.extent(request)).pages, self.pages);
        if need > available {
            return Err(EngineError::NeverFits { need, available });
        }
        Ok(())
    }

    /// Most tokens of the request's sequence.
    pub fn extent(&self, request: &Request) -> usize {
        request.prompt.len().saturating_add(request.limits.max_tokens as usize).min(self.context)
    }

    /// Tokens that all pages hold.
    pub fn cache_tokens(&self) -> usize {
        self.pages * PAGE_TOKENS
    }

    /// Positions of media placeholders.
    pub(crate) fn placeholders<'a>(&self, tokens: &'a [u32]) -> impl Iterator<Item = usize> + use<'a> {
        let placeholder = self.placeholder;
        tokens.iter().enumerate().filter(move |&(_, &t)| Some(t) == placeholder).map(|(i, _)| i)
    }

    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<(), EngineError> {
        match tokens.iter().enumerate().find(|&(_, &t)| t as usize >= self.vocabulary) {
            Some((index, &token)) => {
                Err(EngineError::UnknownToken { index, token, last: self.vocabulary.saturating_sub(1) as u32 })
            }
            None => Ok(()),
        }
    }

    /// Checks that so many rows of features are exactly those that the placeholders of `tokens` take.
    pub(crate) fn check_features(&self, tokens: &[u32], features: usize) -> Result<(), EngineError> {
        let placeholders = self.placeholders(tokens).count();
        if features > 0 && !self.vision {
            return Err(EngineError::NoVision);
        }
        if placeholders != features {
            return Err(EngineError::ImageTokens { placeholders, features });
        }
        Ok(())
    }

    fn check_media(&self, request: &Request) -> Result<(), EngineError> {
        let media = &request.media;
        if let Some(wrong) = media.iter().find(|m| m.tokens != m.patches.tokens()) {
            return Err(EngineError::parameter("media.tokens", wrong.patches.tokens().to_string(), wrong.tokens));
        }
        self.check_features(&request.prompt, media.iter().map(|m| m.tokens).sum())?;
        let mut places = self.placeholders(&request.prompt);
        for item in media.iter() {
            let first = places.next();
            if first != Some(item.start) {
                let expected = format!("{first:?}, the place of its first placeholder");
                return Err(EngineError::parameter("media.start", expected, item.start));
            }
            if item.tokens > 1 {
                places.nth(item.tokens - 2);
            }
        }
        Ok(())
    }
}
