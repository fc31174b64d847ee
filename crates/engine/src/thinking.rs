//! Reasoning, as far as tokens show it: where it ends, and how a budget ends it.
//!
//! An answer is inside its reasoning from the beginning or never: the prompt says so. The first end marker ends it for
//! good, and so does the first token that opens a tool call, which belongs to what comes behind; nothing that comes later
//! begins it again, so a budget cannot strike in the text behind it. A budget of `n` lets
//! `n` tokens of reasoning pass, then the end sequence comes token by token. Invariant: the state is a function of the
//! tokens taken in, whether they came one by one or as drafts.

use std::sync::Arc;

use crate::EngineError;

/// How a model's reasoning ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReasoningEnd {
    marker: u32,
    /// What a used-up budget forces; the marker is its last token and no other.
    sequence: Arc<[u32]>,
    /// Ends reasoning without being a part of it.
    opener: Option<u32>,
}

impl ReasoningEnd {
    /// The marker alone.
    pub fn new(marker: u32) -> Self {
        Self { marker, sequence: Arc::new([marker]), opener: None }
    }

    /// A marker that a used-up budget reaches over some closing words, `sequence`, which ends with the marker.
    ///
    /// # Errors
    /// [`EngineError::Setting`] when the marker is not the last token of the sequence, or comes before it.
    pub fn with_sequence(marker: u32, sequence: Vec<u32>) -> Result<Self, EngineError> {
        if sequence.is_empty() || sequence.iter().position(|&t| t == marker) != sequence.len().checked_sub(1) {
            return Err(EngineError::Setting {
                setting: "thinking end sequence",
                expected: format!("tokens that end with the marker {marker} and do not hold it before"),
                found: format!("{sequence:?}"),
            });
        }
        Ok(Self { marker, sequence: sequence.into(), opener: None })
    }

    /// Lets a token that opens a tool call end reasoning as well: it is the first token behind it.
    #[must_use]
    pub fn with_opener(self, opener: Option<u32>) -> Self {
        Self { opener, ..self }
    }

    /// The token that ends reasoning without being a part of it.
    pub fn opener(&self) -> Option<u32> {
        self.opener
    }

    /// The token that ends reasoning.
    pub fn marker(&self) -> u32 {
        self.marker
    }
}

/// The reasoning of one answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thinking {
    /// Present while inside.
    inside: Option<Inside>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Inside {
    end: ReasoningEnd,
    budget: Option<u32>,
    /// Tokens so far, forced ones included.
    tokens: usize,
}

impl Thinking {
    /// An answer without reasoning, or behind it.
    pub fn over() -> Self {
        Self { inside: None }
    }

    /// An answer that begins inside its reasoning, of which at most `budget` tokens are left free.
    pub fn begun(end: ReasoningEnd, budget: Option<u32>) -> Self {
        Self { inside: Some(Inside { end, budget, tokens: 0 }) }
    }

    /// Whether everything so far was reasoning, and its end has not come.
    pub fn is_inside(&self) -> bool {
        self.inside.is_some()
    }

    /// Whether `token`, should it come next, belongs to the reasoning. The end marker is its last token.
    pub fn owns(&self, token: u32) -> bool {
        self.inside.as_ref().is_some_and(|inside| inside.end.opener != Some(token))
    }

    /// The token that must come next, when the budget is used up.
    pub fn forced(&self) -> Option<u32> {
        let inside = self.inside.as_ref()?;
        let behind = inside.tokens.checked_sub(inside.budget? as usize)?;
        inside.end.sequence.get(behind).copied()
    }

    /// Takes the next token in.
    pub fn push(&mut self, token: u32) {
        if let Some(inside) = &mut self.inside {
            inside.tokens += 1;
            if token == inside.end.marker || inside.end.opener == Some(token) {
                self.inside = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: u32 = 9;

    /// Tokens of an answer whose model would like to say `wish`.
    fn answer(mut thinking: Thinking, wish: &[u32]) -> Vec<u32> {
        let mut tokens = Vec::new();
        for &token in wish {
            let token = thinking.forced().unwrap_or(token);
            thinking.push(token);
            tokens.push(token);
        }
        tokens
    }

    #[test]
    fn a_used_up_budget_ends_reasoning_and_never_comes_back() {
        let wish = [1, 2, 3, 4, 5, 6];
        let begun = |budget| Thinking::begun(ReasoningEnd::new(END), budget);
        assert_eq!(answer(begun(Some(0)), &wish), [END, 2, 3, 4, 5, 6]);
        assert_eq!(answer(begun(Some(2)), &wish), [1, 2, END, 4, 5, 6]);
        assert_eq!(answer(begun(Some(6)), &wish), wish);
        assert_eq!(answer(begun(None), &wish), wish);
        assert_eq!(answer(begun(Some(3)), &[1, END, 3, 4, 5, 6]), [1, END, 3, 4, 5, 6], "ended by itself");
        assert_eq!(answer(Thinking::over(), &wish), wish, "no reasoning, no budget");
    }

    #[test]
    fn closing_words_come_whole() {
        let end = ReasoningEnd::with_sequence(END, vec![7, 8, END]).unwrap();
        assert_eq!(answer(Thinking::begun(end, Some(1)), &[1, 2, 3, 4, 5]), [1, 7, 8, END, 5]);
    }

    #[test]
    fn a_tool_call_ends_reasoning_and_is_no_part_of_it() {
        let end = ReasoningEnd::new(END).with_opener(Some(8));
        let mut thinking = Thinking::begun(end, Some(3));
        assert!(thinking.owns(1) && thinking.owns(END) && !thinking.owns(8));
        thinking.push(1);
        thinking.push(8);
        assert!(!thinking.is_inside() && !thinking.owns(1));
        let end = ReasoningEnd::new(END).with_opener(Some(8));
        assert_eq!(answer(Thinking::begun(end, Some(3)), &[1, 8, 3, 4, 5]), [1, 8, 3, 4, 5], "the budget is settled");
    }

    #[test]
    fn the_marker_is_the_last_token_of_the_sequence_alone() {
        for bad in [vec![], vec![1], vec![END, 1], vec![END, END]] {
            let error = ReasoningEnd::with_sequence(END, bad).unwrap_err().to_string();
            assert!(error.contains("thinking end sequence"), "{error}");
        }
    }
}
