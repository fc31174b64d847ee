//! `tokenizer.json`: byte-level BPE with added tokens.
//!
//! The file is handed to the `tokenizers` library *without* its added tokens, so that the library only ever sees ordinary
//! text; added tokens are matched here, where it is known which parts of a prompt a user wrote. Decoding is a table from
//! id to bytes, because token boundaries cut through characters and only bytes can be joined.

use std::ops::Range;
use std::path::Path;

use serde_json::Value;

use crate::added::{AddedToken, AddedTokens};
use crate::detokenizer::Detokenizer;
use crate::error::TextError;

/// A loaded tokenizer. Cheap to share behind an `Arc`; all methods take `&self`.
#[derive(Debug)]
pub struct Tokenizer {
    /// The library's tokenizer with an empty added vocabulary.
    ordinary: tokenizers::Tokenizer,
    added: AddedTokens,
    /// Bytes of all tokens, one after the other.
    bytes: Vec<u8>,
    /// Token `id` is `bytes[ends[id - 1]..ends[id]]`; ids that the file skips are empty.
    ends: Vec<usize>,
    /// Which ids exist, and which of them are flagged special.
    kinds: Vec<Kind>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Absent,
    Plain,
    Added,
    Special,
}

impl Tokenizer {
    /// Reads `tokenizer.json` from a model directory.
    ///
    /// # Errors
    /// [`TextError::Read`] if the file cannot be read, else as [`Tokenizer::from_bytes`].
    pub fn from_dir(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer.json");
        let bytes = std::fs::read(&path).map_err(|source| TextError::Read { path, source })?;
        Self::from_bytes(&bytes)
    }

    /// Reads the contents of a `tokenizer.json`.
    ///
    /// # Errors
    /// [`TextError::TokenizerFile`] if the text is not a byte-level BPE tokenizer, or if an added token asks for a kind of
    /// matching (`lstrip`, `rstrip`, `single_word`) that this model family does not use.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, TextError> {
        let mut file: Value = serde_json::from_slice(bytes)
            .map_err(|error| file_error(format!("not JSON: {error}"), "the text of a tokenizer.json"))?;
        check_byte_level(&file)?;
        let added = added_tokens(&file)?;
        if let Some(map) = file.as_object_mut() {
            map.insert("added_tokens".to_owned(), Value::Array(Vec::new()));
            // None of these may change ids: the template writes every control token, and the engine checks lengths.
            for key in ["truncation", "padding", "post_processor"] {
                map.insert(key.to_owned(), Value::Null);
            }
        }
        let ordinary = tokenizers::Tokenizer::from_bytes(file.to_string())
            .map_err(|error| file_error(error.to_string(), "a tokenizer of the `tokenizers` library"))?;
        let (bytes, ends, kinds) = byte_table(&ordinary, &added)?;
        Ok(Self { ordinary, added: AddedTokens::new(added), bytes, ends, kinds })
    }

    /// One past the largest id of the file: the model's rows from here on are padding.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.ends.len()
    }

    /// Tokens of the vocabulary proper, without added ones.
    #[must_use]
    pub fn base_vocab_size(&self) -> usize {
        self.ordinary.get_vocab_size(false)
    }

    /// The added tokens.
    #[must_use]
    pub fn added(&self) -> &AddedTokens {
        &self.added
    }

    /// Id of the added token with this literal.
    ///
    /// # Errors
    /// [`TextError::MissingToken`] if there is none.
    pub fn added_id(&self, literal: &str) -> Result<u32, TextError> {
        let missing = || TextError::MissingToken { token: literal.to_owned() };
        self.added.by_content(literal).map(|token| token.id).ok_or_else(missing)
    }

    /// Whether the file defines this id.
    #[must_use]
    pub fn contains(&self, id: u32) -> bool {
        self.kind(id) != Kind::Absent
    }

    /// Whether the id is an added token, flagged special or not.
    #[must_use]
    pub fn is_added(&self, id: u32) -> bool {
        matches!(self.kind(id), Kind::Added | Kind::Special)
    }

    /// Whether the id is an added token flagged special: decoding leaves these out on request.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.kind(id) == Kind::Special
    }

    /// Bytes of a token; `None` for ids that the file does not define.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        if !self.contains(id) {
            return None;
        }
        let index = usize::try_from(id).ok()?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        Some(&self.bytes[start..self.ends[index]])
    }

    /// Encodes trusted text, for instance a rendered prompt: literals of added tokens become those tokens.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the library fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode_protected(text, &[])
    }

    /// Encodes text in which no added token is recognised.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the library fails.
    pub fn encode_ordinary(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::new();
        self.append_ordinary(text, &mut ids)?;
        Ok(ids)
    }

    /// Encodes text in which added tokens are recognised only where they do not touch a protected range.
    ///
    /// Protection does not cut the text: what lies between two recognised tokens is encoded in one piece, exactly as if
    /// the tokenizer had no added tokens. `protected` holds disjoint ascending byte ranges.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the library fails.
    pub fn encode_protected(&self, text: &str, protected: &[Range<usize>]) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::new();
        let mut done = 0;
        while let Some((range, token)) = self.added.next_match(text, done, protected) {
            self.append_ordinary(&text[done..range.start], &mut ids)?;
            ids.push(token.id);
            done = range.end;
        }
        self.append_ordinary(&text[done..], &mut ids)?;
        Ok(ids)
    }

    /// Decodes ids at once; bytes that are not UTF-8 become U+FFFD and unknown ids are left out.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let kept = ids.iter().filter(|&&id| !(skip_special && self.is_special(id)));
        let bytes: Vec<u8> = kept.filter_map(|&id| self.token_bytes(id)).flatten().copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// An incremental decoder over this tokenizer.
    #[must_use]
    pub fn detokenizer(&self, skip_special: bool) -> Detokenizer<'_> {
        Detokenizer::new(self, skip_special)
    }

    fn kind(&self, id: u32) -> Kind {
        usize::try_from(id).ok().and_then(|index| self.kinds.get(index)).copied().unwrap_or(Kind::Absent)
    }

    fn append_ordinary(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TextError> {
        if text.is_empty() {
            return Ok(());
        }
        let encoding = self
            .ordinary
            .encode_fast(text, false)
            .map_err(|error| TextError::Encode { bytes: text.len(), problem: error.to_string() })?;
        ids.extend_from_slice(encoding.get_ids());
        Ok(())
    }
}

fn file_error(problem: String, expected: &'static str) -> TextError {
    TextError::TokenizerFile { problem, expected }
}

/// The decoder must be byte-level, alone or as the only effective member of a sequence.
fn check_byte_level(file: &Value) -> Result<(), TextError> {
    let decoder = &file["decoder"];
    let kind = decoder["type"].as_str().unwrap_or("none");
    let alone = kind == "ByteLevel";
    let inner = decoder["decoders"].as_array();
    let in_sequence = kind == "Sequence" && inner.is_some_and(|list| list.len() == 1 && list[0]["type"] == "ByteLevel");
    if alone || in_sequence {
        return Ok(());
    }
    Err(file_error(format!("decoder.type is {kind:?}"), "decoder.type \"ByteLevel\""))
}

fn added_tokens(file: &Value) -> Result<Vec<AddedToken>, TextError> {
    let Some(list) = file["added_tokens"].as_array() else {
        return Err(file_error("added_tokens is missing or not a list".to_owned(), "a list of added tokens"));
    };
    list.iter()
        .enumerate()
        .map(|(index, entry)| {
            let id = entry["id"].as_u64().and_then(|id| u32::try_from(id).ok());
            let (Some(id), Some(content)) = (id, entry["content"].as_str()) else {
                let problem = format!("added_tokens[{index}] has no usable id and content");
                return Err(file_error(problem, "an id below 2^32 and a content string"));
            };
            for flag in ["lstrip", "rstrip", "single_word"] {
                if entry[flag] == true {
                    let problem = format!("added token {content:?} sets {flag}");
                    return Err(file_error(problem, "added tokens that match their literal and nothing else"));
                }
            }
            Ok(AddedToken { id, content: content.to_owned(), special: entry["special"] == true })
        })
        .collect()
}

/// Ids far beyond the number of entries would make the table explode; real files are dense.
const MAX_SPARSENESS: usize = 4;

fn byte_table(
    ordinary: &tokenizers::Tokenizer,
    added: &[AddedToken],
) -> Result<(Vec<u8>, Vec<usize>, Vec<Kind>), TextError> {
    let alphabet = byte_alphabet();
    let vocabulary = ordinary.get_vocab(false);
    let entries = vocabulary.len() + added.len();
    let ids = vocabulary.values().copied().chain(added.iter().map(|token| token.id));
    let size = ids.max().map_or(0, |id| usize::try_from(id).unwrap_or(usize::MAX).saturating_add(1));
    if size > entries.saturating_mul(MAX_SPARSENESS) {
        let problem = format!("the largest id is {} but there are only {entries} tokens", size - 1);
        return Err(file_error(problem, "nearly contiguous ids"));
    }
    let mut tokens: Vec<(Vec<u8>, Kind)> = vec![(Vec::new(), Kind::Absent); size];
    for (token, id) in vocabulary {
        let mapped: Option<Vec<u8>> = token.chars().map(|c| alphabet.get(&c).copied()).collect();
        tokens[id as usize] = (mapped.unwrap_or_else(|| token.into_bytes()), Kind::Plain);
    }
    for token in added {
        let kind = if token.special { Kind::Special } else { Kind::Added };
        tokens[token.id as usize] = (token.content.clone().into_bytes(), kind);
    }
    let mut bytes = Vec::new();
    let mut ends = Vec::with_capacity(size);
    let mut kinds = Vec::with_capacity(size);
    for (text, kind) in tokens {
        bytes.extend_from_slice(&text);
        ends.push(bytes.len());
        kinds.push(kind);
    }
    Ok((bytes, ends, kinds))
}

/// The byte-level alphabet: printable Latin-1 bytes stand for themselves, the other bytes follow from U+0100 on.
fn byte_alphabet() -> std::collections::HashMap<char, u8> {
    let mut next = 0x100_u32;
    (0..=255_u8)
        .map(|byte| {
            let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
            let code = if printable {
                u32::from(byte)
            } else {
                next += 1;
                next - 1
            };
            (char::from_u32(code).expect("codes below 0x200 are characters"), byte)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_a_bijection() {
        let alphabet = byte_alphabet();
        assert_eq!(alphabet.len(), 256);
        assert_eq!(alphabet[&'A'], b'A');
        assert_eq!(alphabet[&'\u{120}'], b' ');
        assert_eq!(alphabet[&'\u{10a}'], b'\n');
    }

    #[test]
    fn damaged_files_are_refused_with_the_key() {
        for (text, needle) in [
            ("{", "not JSON"),
            (r#"{"decoder": {"type": "WordPiece"}}"#, "decoder.type is \"WordPiece\""),
            (r#"{"decoder": {"type": "ByteLevel"}}"#, "added_tokens"),
            (r#"{"decoder": {"type": "ByteLevel"}, "added_tokens": [{"id": -1, "content": "x"}]}"#, "added_tokens[0]"),
            (
                r#"{"decoder": {"type": "ByteLevel"}, "added_tokens": [{"id": 1, "content": "x", "lstrip": true}]}"#,
                "sets lstrip",
            ),
            (r#"{"decoder": {"type": "ByteLevel"}, "added_tokens": []}"#, "tokenizer.json"),
        ] {
            let error = Tokenizer::from_bytes(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(needle), "{error}");
        }
    }
}
