//! Turning a stream of token ids into a stream of text.
//!
//! A token may end inside a character, so its last bytes are held back until the character is complete. The invariant is
//! that all pieces, joined with the final [`Detokenizer::flush`], equal [`Tokenizer::decode`] of all ids: bytes that can
//! never become a character turn into one U+FFFD per maximal invalid run, as `String::from_utf8_lossy` has it.

use crate::tokenizer::Tokenizer;

/// Incremental decoder; see the module text.
#[derive(Clone, Debug)]
pub struct Detokenizer<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    /// The unfinished character, at most three bytes.
    pending: Vec<u8>,
}

impl<'a> Detokenizer<'a> {
    pub(crate) fn new(tokenizer: &'a Tokenizer, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, pending: Vec::new() }
    }

    /// Appends the text that `id` completes to `out`; unknown ids add nothing.
    pub fn push(&mut self, id: u32, out: &mut String) {
        if self.skip_special && self.tokenizer.is_special(id) {
            return;
        }
        let Some(bytes) = self.tokenizer.token_bytes(id) else { return };
        if self.pending.is_empty() {
            let taken = take_complete(bytes, out);
            self.pending.extend_from_slice(&bytes[taken..]);
            return;
        }
        self.pending.extend_from_slice(bytes);
        let taken = take_complete(&self.pending, out);
        self.pending.drain(..taken);
    }

    /// Ends the text: an unfinished character becomes U+FFFD. The decoder can be used again afterwards.
    pub fn flush(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
            self.pending.clear();
        }
    }

    /// Whether bytes are held back.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }
}

/// Decodes all of `bytes` but an unfinished character at the end; returns how many bytes were used.
fn take_complete(bytes: &[u8], out: &mut String) -> usize {
    let mut used = 0;
    loop {
        match std::str::from_utf8(&bytes[used..]) {
            Ok(text) => {
                out.push_str(text);
                return bytes.len();
            }
            Err(error) => {
                let valid = &bytes[used..used + error.valid_up_to()];
                out.push_str(std::str::from_utf8(valid).expect("the error says that this much is valid"));
                used += error.valid_up_to();
                let Some(invalid) = error.error_len() else { return used };
                out.push(char::REPLACEMENT_CHARACTER);
                used += invalid;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_pieces(bytes: &[u8], cuts: &[usize]) -> String {
        let mut out = String::new();
        let mut pending = Vec::new();
        let mut start = 0;
        for &end in cuts.iter().chain([&bytes.len()]) {
            pending.extend_from_slice(&bytes[start..end]);
            let used = take_complete(&pending, &mut out);
            pending.drain(..used);
            start = end;
        }
        if !pending.is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
        }
        out
    }

    #[test]
    fn a_character_cut_anywhere_comes_out_whole() {
        let text = "a\u{e9}\u{20ac}\u{1f600}z".as_bytes();
        for cut in 0..=text.len() {
            assert_eq!(in_pieces(text, &[cut]), "a\u{e9}\u{20ac}\u{1f600}z");
        }
    }

    #[test]
    fn invalid_bytes_are_replaced_as_in_one_piece() {
        let bad: &[u8] = b"a\xF0\x9F\x98z\xFF\xE2\x82";
        let whole = String::from_utf8_lossy(bad);
        for first in 0..=bad.len() {
            for second in first..=bad.len() {
                assert_eq!(in_pieces(bad, &[first, second]), whole);
            }
        }
    }
}
