//! Log-probabilities as the two OpenAI routes show them.

use glimmer_engine::request::{Logprobs, Token};
use glimmer_text::Tokenizer;

use crate::json::Json;

/// How tokens are shown.
#[derive(Clone, Copy, Debug)]
pub struct TokenNames<'a> {
    /// For their text.
    pub tokenizer: &'a Tokenizer,
    /// Show `token_id:N` instead.
    pub as_ids: bool,
}

impl TokenNames<'_> {
    /// Text of a token; bytes that are no UTF-8 are replaced.
    #[must_use]
    pub fn name(&self, id: u32) -> String {
        if self.as_ids { format!("token_id:{id}") } else { self.tokenizer.decode(&[id], false) }
    }

    /// `"token":..,"logprob":..,"bytes":[..]`.
    fn entry(&self, json: &mut Json<'_>, id: u32, logprob: f32) {
        json.raw("\"token\":").text(&self.name(id)).raw(",\"logprob\":").float(f64::from(logprob)).raw(",\"bytes\":");
        let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
        json.list(bytes, |json, &byte| {
            json.number(u64::from(byte));
        });
    }

    /// The entries of `content`, without its brackets; tokens that have no log-probabilities are left out.
    pub fn chat<'t>(&self, json: &mut Json<'_>, tokens: impl IntoIterator<Item = &'t Token>, mut first: bool) {
        for found in tokens.into_iter().filter_map(|token| token.logprobs.as_deref()) {
            if !first {
                json.raw(",");
            }
            first = false;
            json.raw("{");
            self.entry(json, found.id, found.logprob);
            json.raw(",\"top_logprobs\":").list(&found.top, |json, &(id, logprob)| {
                json.raw("{");
                self.entry(json, id, logprob);
                json.raw("}");
            });
            json.raw("}");
        }
    }

    /// `prompt_logprobs`: a list with, for each token, null or an object from id to log-probability, rank and text.
    pub fn prompt(&self, json: &mut Json<'_>, positions: &[Option<Logprobs>]) {
        json.list(positions, |json, position| {
            let Some(found) = position else {
                json.raw("null");
                return;
            };
            let own =
                (!found.top.iter().any(|&(id, _)| id == found.id)).then_some((found.id, found.logprob, found.rank));
            let top = found.top.iter().zip(1..).map(|(&(id, logprob), rank)| (id, logprob, rank));
            json.raw("{");
            for (index, (id, logprob, rank)) in own.into_iter().chain(top).enumerate() {
                if index > 0 {
                    json.raw(",");
                }
                json.raw("\"").number(u64::from(id)).raw("\":{\"logprob\":").float(f64::from(logprob));
                json.raw(",\"rank\":").number(u64::from(rank)).raw(",\"decoded_token\":").text(&self.name(id)).raw("}");
            }
            json.raw("}");
        });
    }
}

/// The four lists of the completions route.
#[derive(Clone, Debug, Default)]
pub struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top: Vec<Option<Vec<(String, f32)>>>,
    offsets: Vec<usize>,
}

impl CompletionLogprobs {
    /// Adds a token of which nothing is known: the first of an echoed prompt.
    pub fn unknown(&mut self, names: TokenNames<'_>, id: u32, offset: &mut usize) {
        let name = names.name(id);
        self.offsets.push(*offset);
        *offset += name.chars().count();
        self.tokens.push(name);
        self.token_logprobs.push(None);
        self.top.push(None);
    }

    /// Adds a token; `offset` is where its text begins, in characters, and moves on.
    pub fn known(&mut self, names: TokenNames<'_>, found: &Logprobs, offset: &mut usize) {
        let name = names.name(found.id);
        self.offsets.push(*offset);
        *offset += name.chars().count();
        let mut top: Vec<(String, f32)> = found.top.iter().map(|&(id, logprob)| (names.name(id), logprob)).collect();
        if !found.top.iter().any(|&(id, _)| id == found.id) {
            top.push((name.clone(), found.logprob));
        }
        self.tokens.push(name);
        self.token_logprobs.push(Some(found.logprob));
        self.top.push(Some(top));
    }

    /// Writes the object.
    pub fn write(&self, json: &mut Json<'_>) {
        json.raw("{\"text_offset\":").list(&self.offsets, |json, &offset| {
            json.number(offset as u64);
        });
        json.raw(",\"token_logprobs\":").list(&self.token_logprobs, |json, logprob| {
            match logprob {
                Some(logprob) => json.float(f64::from(*logprob)),
                None => json.raw("null"),
            };
        });
        json.raw(",\"tokens\":").list(&self.tokens, |json, token| {
            json.text(token);
        });
        json.raw(",\"top_logprobs\":").list(&self.top, |json, top| {
            let Some(top) = top else {
                json.raw("null");
                return;
            };
            json.raw("{");
            for (index, (token, logprob)) in top.iter().enumerate() {
                if index > 0 {
                    json.raw(",");
                }
                json.text(token).raw(":").float(f64::from(*logprob));
            }
            json.raw("}");
        });
        json.raw("}");
    }

    /// Whether nothing was added.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}
