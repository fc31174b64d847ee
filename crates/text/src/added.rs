//! Finding added tokens in text.
//!
//! A tokenizer's *added tokens* are vocabulary entries matched by their literal before byte-pair encoding sees the text.
//! Some are flagged special (`<|user|>`), some are not (`<think>`, `<tool_call>`, `<|image|>`); both steer the model, so
//! both are treated alike here. The matcher is leftmost-longest: at the first byte where any literal starts, the longest
//! one wins and the search goes on behind it. Ranges of bytes may be declared protected; a match must not touch them.

use std::ops::Range;

/// One added token of `tokenizer.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddedToken {
    /// Token id.
    pub id: u32,
    /// Literal text.
    pub content: String,
    /// The file's own flag: such tokens are left out of decoded text on request.
    pub special: bool,
}

/// All added tokens, ready for matching.
#[derive(Clone, Debug, Default)]
pub struct AddedTokens {
    /// Longest literal first, so that the first hit at a position is the longest.
    tokens: Vec<AddedToken>,
    /// Indices into `tokens` by first byte of the literal.
    by_first_byte: Vec<Vec<usize>>,
    /// Places inside literals, as index into `tokens` and bytes before it, by the byte before the place.
    cuts_by_byte_before: Vec<Vec<(usize, usize)>>,
    /// The same by the byte behind the place.
    cuts_by_byte_behind: Vec<Vec<(usize, usize)>>,
}

impl AddedTokens {
    /// Builds the matcher. Tokens with an empty literal can never match and are left out.
    #[must_use]
    pub fn new(mut tokens: Vec<AddedToken>) -> Self {
        tokens.retain(|token| !token.content.is_empty());
        tokens.sort_by(|a, b| b.content.len().cmp(&a.content.len()).then_with(|| a.id.cmp(&b.id)));
        let mut by_first_byte = vec![Vec::new(); 256];
        let [mut cuts_by_byte_before, mut cuts_by_byte_behind] = [(); 2].map(|()| vec![Vec::new(); 256]);
        for (index, token) in tokens.iter().enumerate() {
            let bytes = token.content.as_bytes();
            by_first_byte[usize::from(bytes[0])].push(index);
            for (cut, _) in token.content.char_indices().skip(1) {
                cuts_by_byte_before[usize::from(bytes[cut - 1])].push((index, cut));
                cuts_by_byte_behind[usize::from(bytes[cut])].push((index, cut));
            }
        }
        Self { tokens, by_first_byte, cuts_by_byte_before, cuts_by_byte_behind }
    }

    /// The tokens, longest literal first.
    pub fn iter(&self) -> impl Iterator<Item = &AddedToken> {
        self.tokens.iter()
    }

    /// The token with exactly this literal.
    #[must_use]
    pub fn by_content(&self, content: &str) -> Option<&AddedToken> {
        self.tokens.iter().find(|token| token.content == content)
    }

    /// First match at or after byte `from` that does not touch a protected range.
    ///
    /// `protected` holds disjoint byte ranges in ascending order.
    pub(crate) fn next_match(
        &self,
        text: &str,
        from: usize,
        protected: &[Range<usize>],
    ) -> Option<(Range<usize>, &AddedToken)> {
        let bytes = text.as_bytes();
        (from..bytes.len()).find_map(|start| {
            self.by_first_byte[usize::from(bytes[start])].iter().find_map(|&index| {
                let token = &self.tokens[index];
                let range = start..start + token.content.len();
                let hit = bytes[start..].starts_with(token.content.as_bytes()) && !touches(&range, protected);
                hit.then_some((range, token))
            })
        })
    }

    /// Byte ranges of `text` that must not take part in a match when `text` comes from a user: every occurrence of a
    /// literal, a beginning of a literal at the end of the text, and an ending of a literal at the start of the text
    /// (both also where only white space separates them from the edge, because templates strip it). Without the last two,
    /// `<thi` and `nk>` in two neighbouring strings would fuse into a control token.
    ///
    /// The result is disjoint, ascending and lies on character boundaries.
    #[must_use]
    pub(crate) fn user_ranges(&self, text: &str) -> Vec<Range<usize>> {
        let mut ranges = Vec::new();
        let bytes = text.as_bytes();
        for start in 0..bytes.len() {
            for &index in &self.by_first_byte[usize::from(bytes[start])] {
                let literal = self.tokens[index].content.as_bytes();
                if bytes[start..].starts_with(literal) {
                    ranges.push(start..start + literal.len());
                }
            }
        }
        // Conversations may be of very many short strings, so that only cuts are tried whose byte at the edge is right.
        let trimmed = text.trim();
        let inner = (trimmed.len() < text.len()).then(|| (leading_space(text), trimmed));
        for (offset, edge) in std::iter::once((0, text)).chain(inner) {
            let (Some(&first), Some(&last)) = (edge.as_bytes().first(), edge.as_bytes().last()) else { continue };
            for &(index, cut) in &self.cuts_by_byte_before[usize::from(last)] {
                if edge.ends_with(&self.tokens[index].content[..cut]) {
                    ranges.push(offset + edge.len() - cut..offset + edge.len());
                }
            }
            for &(index, cut) in &self.cuts_by_byte_behind[usize::from(first)] {
                let rest = &self.tokens[index].content[cut..];
                if edge.starts_with(rest) {
                    ranges.push(offset..offset + rest.len());
                }
            }
        }
        merge(ranges)
    }
}

fn leading_space(text: &str) -> usize {
    text.len() - text.trim_start().len()
}

fn touches(range: &Range<usize>, protected: &[Range<usize>]) -> bool {
    let next = protected.partition_point(|p| p.end <= range.start);
    protected.get(next).is_some_and(|p| p.start < range.end)
}

fn merge(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matcher(literals: &[&str]) -> AddedTokens {
        let token = |(id, content): (usize, &&str)| AddedToken {
            id: u32::try_from(id).unwrap(),
            content: (*content).to_owned(),
            special: false,
        };
        AddedTokens::new(literals.iter().enumerate().map(token).collect())
    }

    #[test]
    fn the_longest_literal_at_the_leftmost_place_wins() {
        let added = matcher(&["<a>", "<a>b", "a>"]);
        let (range, token) = added.next_match("x<a>b", 0, &[]).unwrap();
        assert_eq!((range, token.content.as_str()), (1..5, "<a>b"));
    }

    #[test]
    fn a_match_must_not_touch_a_protected_range() {
        let added = matcher(&["<a>"]);
        let protected = 1..2;
        assert!(added.next_match("<a>", 0, std::slice::from_ref(&protected)).is_none());
        let (range, _) = added.next_match("<a><a>", 0, std::slice::from_ref(&protected)).unwrap();
        assert_eq!(range, 3..6);
    }

    #[test]
    fn a_shorter_literal_is_taken_when_the_longer_one_touches_user_text() {
        let added = matcher(&["<a>", "<a>b"]);
        let protected = 3..4;
        let (range, _) = added.next_match("<a>b", 0, std::slice::from_ref(&protected)).unwrap();
        assert_eq!(range, 0..3);
    }

    #[test]
    fn user_ranges_cover_whole_literals_and_both_edges() {
        let added = matcher(&["<think>"]);
        assert_eq!(added.user_ranges("a <think> b"), vec![2..9]);
        assert_eq!(added.user_ranges("nk> and <thi"), vec![0..3, 8..12]);
        assert_eq!(added.user_ranges("  nk> and <thi \n"), vec![2..5, 10..14]);
        assert_eq!(added.user_ranges("a < b > c"), Vec::<Range<usize>>::new());
    }
}
