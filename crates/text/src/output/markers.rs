//! The eight markers of an answer, by token id and by text.

use crate::tokenizer::Tokenizer;

/// A control token inside an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marker {
    Think,
    EndThink,
    CallOpen,
    CallClose,
    KeyOpen,
    KeyClose,
    ValueOpen,
    ValueClose,
}

impl Marker {
    const ALL: [Self; 8] = [
        Self::Think,
        Self::EndThink,
        Self::CallOpen,
        Self::CallClose,
        Self::KeyOpen,
        Self::KeyClose,
        Self::ValueOpen,
        Self::ValueClose,
    ];

    pub(super) fn literal(self) -> &'static str {
        match self {
            Self::Think => "<think>",
            Self::EndThink => "</think>",
            Self::CallOpen => "<tool_call>",
            Self::CallClose => "</tool_call>",
            Self::KeyOpen => "<arg_key>",
            Self::KeyClose => "</arg_key>",
            Self::ValueOpen => "<arg_value>",
            Self::ValueClose => "</arg_value>",
        }
    }

    pub(super) fn is_reasoning(self) -> bool {
        matches!(self, Self::Think | Self::EndThink)
    }
}

/// Ids of the markers in one tokenizer; absent ones are never seen.
#[derive(Clone, Debug)]
pub(super) struct MarkerIds([Option<u32>; 8]);

impl MarkerIds {
    pub(super) fn new(tokenizer: &Tokenizer) -> Self {
        Self(Marker::ALL.map(|marker| tokenizer.added_id(marker.literal()).ok()))
    }

    pub(super) fn marker(&self, id: u32) -> Option<Marker> {
        self.0.iter().position(|&known| known == Some(id)).map(|index| Marker::ALL[index])
    }
}

/// Finds markers in text that arrives in pieces; holds back only what could still become a marker.
#[derive(Debug, Default)]
pub(super) struct TextScanner {
    held: String,
}

impl TextScanner {
    /// Calls `found` with text (`Ok`) and markers (`Err`) in order.
    pub(super) fn push(&mut self, text: &str, mut found: impl FnMut(Result<&str, Marker>)) {
        self.held.push_str(text);
        let mut done = 0;
        while let Some((start, marker)) = first_marker(&self.held[done..]) {
            if start > 0 {
                found(Ok(&self.held[done..done + start]));
            }
            found(Err(marker));
            done += start + marker.literal().len();
        }
        let keep = self.held.len() - partial_marker(&self.held[done..]);
        if keep > done {
            found(Ok(&self.held[done..keep]));
        }
        self.held.drain(..keep);
    }

    /// What was held back, at the end of the text.
    pub(super) fn take_rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

fn first_marker(text: &str) -> Option<(usize, Marker)> {
    let here = |start: usize| Marker::ALL.into_iter().find(|marker| text[start..].starts_with(marker.literal()));
    text.match_indices('<').find_map(|(start, _)| here(start).map(|marker| (start, marker)))
}

/// Length of the longest suffix of `text` that is the beginning of a marker.
fn partial_marker(text: &str) -> usize {
    let Some(start) = text.rfind('<') else { return 0 };
    let tail = &text[start..];
    if Marker::ALL.iter().any(|marker| marker.literal().starts_with(tail)) { tail.len() } else { 0 }
}
