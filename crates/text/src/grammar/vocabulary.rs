//! The tree of all tokens' bytes, and which ids mean what.
//!
//! An ordinary token stands in the tree under its bytes. An added token stands under a byte that no text can hold, followed
//! by its literal, so that no text leads to it; grammars name it by its id. Invariant: ids that the tokenizer does not
//! define, and tokens with a byte that never occurs in UTF-8, lead nowhere.

use toktrie::{TokRxInfo, TokTrie, TokenizerEnv};

use crate::error::TextError;
use crate::tokenizer::Tokenizer;

/// A tokenizer's tokens as a grammar sees them.
pub(super) struct Vocabulary {
    trie: TokTrie,
    /// The model's own end tokens.
    ends: Vec<u32>,
    /// One bit for each id: whether the tokenizer defines it.
    defined: Vec<u64>,
    /// Literals of the added tokens with their ids, longest first.
    added: Vec<(String, u32)>,
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tokens = self.trie.vocab_size();
        f.debug_struct("Vocabulary").field("tokens", &tokens).field("ends", &self.ends).finish_non_exhaustive()
    }
}

impl Vocabulary {
    pub(super) fn new(tokenizer: &Tokenizer, ends: &[u32]) -> Result<Self, TextError> {
        let refused = |problem: String| TextError::Grammar { problem };
        let Some(&first_end) = ends.first() else {
            return Err(refused("the model has no end token; expected at least one".to_owned()));
        };
        if let Some(missing) = ends.iter().find(|&&id| !tokenizer.contains(id)) {
            return Err(refused(format!("end token {missing} is not in the tokenizer")));
        }
        let tokens = u32::try_from(tokenizer.vocab_size()).map_err(|error| refused(error.to_string()))?;
        let mut defined = vec![0; tokenizer.vocab_size().div_ceil(64)];
        let mut words = Vec::with_capacity(tokenizer.vocab_size());
        for id in 0..tokens {
            let bytes = tokenizer.token_bytes(id);
            if bytes.is_some() {
                defined[id as usize / 64] |= 1 << (id % 64);
            }
            words.push(match bytes {
                Some(bytes) if tokenizer.is_added(id) => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
                Some(bytes) if !bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER) => bytes.to_vec(),
                _ => Vec::new(),
            });
        }
        let trie = TokTrie::from(&TokRxInfo::new(tokens, first_end), &words).with_eos_tokens(ends);
        let added = tokenizer.added().iter().map(|token| (token.content.clone(), token.id)).collect();
        Ok(Self { trie, ends: ends.to_vec(), defined, added })
    }

    pub(super) fn is_end(&self, id: u32) -> bool {
        self.ends.contains(&id)
    }

    pub(super) fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// Ids that a grammar can speak of: those below this number.
    pub(super) fn tokens(&self) -> usize {
        self.trie.vocab_size()
    }

    /// One bit for each id that the tokenizer defines, 64 a word.
    pub(super) fn defined(&self) -> &[u64] {
        &self.defined
    }

    /// The added token that `text` begins with, and the rest of the text.
    pub(super) fn leading_added<'t>(&self, text: &'t str) -> Option<(u32, &'t str)> {
        self.added.iter().find_map(|(literal, id)| Some((*id, text.strip_prefix(literal.as_str())?)))
    }

    /// Id of the added token with this literal.
    pub(super) fn added(&self, literal: &str) -> Option<u32> {
        self.added.iter().find(|(known, _)| known == literal).map(|&(_, id)| id)
    }
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        self.trie.greedy_tokenize(bytes)
    }

    // The model chooses how to cut a text into tokens, also where the grammar leaves one text only.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}
