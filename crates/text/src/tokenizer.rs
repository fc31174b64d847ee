//! `tokenizer.json`: byte-level BPE with added tokens.
//!
//! The file is handed to the `tokenizers` library *without* its added tokens, so that the library only ever sees ordinary
//! text; added tokens are matched here, where it is known which parts of a prompt a user wrote. Decoding is a table from
//! id to bytes, because token boundaries cut through characters and only bytes can be joined.
//!
//! The library takes hundreds of times a text's memory, so a long text is handed to it in pieces, cut where the pattern that
//! splits words cuts in any case; with another pattern it goes in one piece.

use std::ops::Range;
use std::path::Path;

use serde_json::Value;

use crate::added::{AddedToken, AddedTokens};
use crate::budget::Budget;
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
    /// Bytes of the longest token; `None` if a text may lose bytes on its way to tokens.
    longest: Option<usize>,
    /// Whether a text may be cut behind a word.
    cuts: bool,
}

/// Bytes of a piece that the library is given, or a little more.
const PIECE: usize = 64 << 10;

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
        let (cuts, plain) = (cuts_behind_words(&file), file["normalizer"].is_null());
        let ordinary = tokenizers::Tokenizer::from_bytes(file.to_string())
            .map_err(|error| file_error(error.to_string(), "a tokenizer of the `tokenizers` library"))?;
        let (bytes, ends, kinds) = byte_table(&ordinary, &added)?;
        let lengths = || std::iter::once(0).chain(ends.iter().copied()).zip(&ends).map(|(start, end)| end - start);
        let singles = lengths().filter(|&length| length == 1).count();
        let longest = lengths().max().filter(|_| plain && singles >= 256);
        Ok(Self { ordinary, added: AddedTokens::new(added), bytes, ends, kinds, longest, cuts })
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

    /// Least number of tokens that a text of so many bytes has.
    #[must_use]
    pub fn least_tokens(&self, bytes: usize) -> usize {
        self.longest.map_or(0, |longest| bytes.div_ceil(longest))
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
        self.append_ordinary(text, 0, Budget::default(), &mut ids)?;
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
        self.encode_within(text, protected, Budget::default())
    }

    /// As [`Tokenizer::encode_protected`], within a budget: a text that is too long for it by its bytes is not begun.
    ///
    /// # Errors
    /// [`TextError::TooManyTokens`], [`TextError::Abandoned`], [`TextError::Encode`].
    pub fn encode_within(
        &self,
        text: &str,
        protected: &[Range<usize>],
        budget: Budget<'_>,
    ) -> Result<Vec<u32>, TextError> {
        budget.check(self.least_tokens(text.len()))?;
        let mut ids = Vec::new();
        let mut done = 0;
        while let Some((range, token)) = self.added.next_match(text, done, protected) {
            self.append_ordinary(&text[done..range.start], text.len() - range.start, budget, &mut ids)?;
            ids.push(token.id);
            done = range.end;
        }
        self.append_ordinary(&text[done..], 0, budget, &mut ids)?;
        budget.check(ids.len())?;
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

    /// Appends the tokens of a text behind which `more` bytes are still to be encoded.
    fn append_ordinary(
        &self,
        text: &str,
        more: usize,
        budget: Budget<'_>,
        ids: &mut Vec<u32>,
    ) -> Result<(), TextError> {
        let mut rest = text;
        while !rest.is_empty() {
            budget.check(ids.len().saturating_add(self.least_tokens(rest.len() + more)))?;
            let cut = if self.cuts { word_end(rest, PIECE) } else { rest.len() };
            let (piece, behind) = rest.split_at(cut);
            let encoding = self
                .ordinary
                .encode_fast(piece, false)
                .map_err(|error| TextError::Encode { bytes: piece.len(), problem: error.to_string() })?;
            ids.extend_from_slice(encoding.get_ids());
            rest = behind;
        }
        Ok(())
    }
}

/// Whether words are split by the pattern of this model family, in one of its two forms. It has no alternative with a letter
/// before something else, and none that looks back, so behind a letter that no letter follows it always cuts.
fn cuts_behind_words(file: &Value) -> bool {
    let parts = file["pre_tokenizer"]["pretokenizers"].as_array().map(Vec::as_slice);
    let Some([split, bytes]) = parts else { return false };
    let pattern = split["pattern"]["Regex"].as_str().unwrap_or_default();
    let known = ["", "{1,3}"].iter().any(|digits| {
        pattern
            == format!(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            )
    });
    let split_is_plain = split["type"] == "Split" && split["behavior"] == "Isolated" && split["invert"] == false;
    let bytes_are_plain =
        bytes["type"] == "ByteLevel" && bytes["add_prefix_space"] == false && bytes["use_regex"] == false;
    known && split_is_plain && bytes_are_plain && file["normalizer"].is_null()
}

/// The first end of a word at or behind byte `from` that is certain to be one, or the end of the text. Digits stand by
/// themselves, in groups of up to three.
fn word_end(text: &str, from: usize) -> usize {
    let bytes = text.as_bytes();
    let start = (from..text.len()).find(|&at| text.is_char_boundary(at)).unwrap_or(text.len());
    let digits = bytes[..start].iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
    let group = start + (3 - digits % 3) % 3;
    // Digits beyond ASCII would count as well.
    let known = start == digits || bytes[start - digits - 1].is_ascii();
    if digits > 0 && known && bytes.get(start..group).is_some_and(|more| more.iter().all(u8::is_ascii_digit)) {
        return group;
    }
    let letter = |c: char| c.is_ascii_alphabetic() || ('\u{4e00}'..='\u{9fa5}').contains(&c);
    let other = |c: char| {
        if c.is_ascii() { !c.is_ascii_alphabetic() } else { ['\u{3001}', '\u{3002}', '\u{ff0c}'].contains(&c) }
    };
    let end = |before: char, after: char| match before.is_ascii_digit() {
        true => after.is_ascii() && !after.is_ascii_digit(),
        false => letter(before) && other(after),
    };
    let behind = text[start..].char_indices();
    let ends = behind.clone().zip(behind.skip(1)).find(|&((_, before), (_, after))| end(before, after));
    ends.map_or(text.len(), |(_, (at, _))| start + at)
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

    const MICRO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16");

    /// Words of a text as the library splits it.
    fn words(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
        use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _};
        let mut split = PreTokenizedString::from(text);
        tokenizer.ordinary.get_pre_tokenizer().unwrap().pre_tokenize(&mut split).unwrap();
        let splits = split.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(word, ..)| word.to_owned()).collect()
    }

    #[test]
    fn a_text_in_pieces_has_the_words_of_the_whole() {
        let parts = [
            "don't", " 'S", "it'LL ", "a", " b", "\n\n", "\r\n c", "12", "12345678", "９", "345 ", "0", "!?\n", "  ",
            "\t", "é", "\u{301}", "中文", "。", "、x", "ſ", " ſ", "/", "\u{3000}", "Ⅷ", "ab.", "«", "1a",
        ];
        let mut state = 1_u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % below
        };
        let file = String::from_utf8(std::fs::read(format!("{MICRO}/tokenizer.json")).unwrap()).unwrap();
        let grouped = file.replace(r"\\p{N}| ?", r"\\p{N}{1,3}| ?");
        assert_ne!(file, grouped);
        for tokenizer in [file, grouped].map(|file| Tokenizer::from_bytes(file.as_bytes()).unwrap()) {
            assert!(tokenizer.cuts);
            for _ in 0..1000 {
                let text: String = (0..40).map(|_| parts[random(parts.len())]).collect();
                let (mut rest, mut pieces) = (text.as_str(), Vec::new());
                while !rest.is_empty() {
                    let (piece, behind) = rest.split_at(word_end(rest, random(9)));
                    pieces.extend(words(&tokenizer, piece));
                    rest = behind;
                }
                assert_eq!(pieces, words(&tokenizer, &text), "{text:?}");
            }
            for long in ["A few words, 12 of them.\n".repeat(5000), "7".repeat(100_000)] {
                let whole = tokenizer.ordinary.encode_fast(long.as_str(), false).unwrap();
                assert_eq!(tokenizer.encode(&long).unwrap(), whole.get_ids());
                assert!(word_end(&long, PIECE) < PIECE + 30);
            }
        }
    }

    #[test]
    fn a_text_that_is_too_long_is_not_encoded_whole() {
        let tokenizer = Tokenizer::from_dir(Path::new(MICRO)).unwrap();
        let budget = Budget { tokens: Some(1000), abandoned: None };
        let at_least = |text: &str| match tokenizer.encode_within(text, &[], budget) {
            Err(TextError::TooManyTokens { most: 1000, at_least }) => at_least,
            other => panic!("{other:?}"),
        };
        // By its bytes, whatever it is; by its words; by its pieces.
        assert_eq!(at_least(&"7".repeat(10_000_000)), tokenizer.least_tokens(10_000_000));
        assert!((1001..40_000).contains(&at_least(&"some words ".repeat(7000))));
        assert_eq!(at_least(&"<|user|>x".repeat(5000)), 1001);
        let most = tokenizer.encode(&"x ".repeat(500)).unwrap();
        assert_eq!(tokenizer.encode_within(&"x ".repeat(500), &[], budget).unwrap(), most);
        let gone = std::sync::atomic::AtomicBool::new(true);
        let abandoned = tokenizer.encode_within("x", &[], Budget { tokens: None, abandoned: Some(&gone) });
        assert!(matches!(abandoned, Err(TextError::Abandoned)));
    }

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
