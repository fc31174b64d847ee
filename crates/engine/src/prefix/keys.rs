//! Names of pages by content: a hash chain.
//!
//! ```text
//! root    = SHA-256(0, 0)                or, with a salt,  SHA-256(0, 1, salt)
//! key(p)  = SHA-256(1, key(p - 1) or root, 64 tokens, (digest, kind, start, tokens) of each medium in the page)
//! ```
//! All fields before the media have a fixed width and every medium has the same, so different contents are different
//! messages, and two chains meet only where SHA-256 collides. A key therefore names all tokens, media and the salt of the
//! prefix that ends with its page; it depends on nothing behind that page.

use std::hash::{Hash, Hasher};

use glimmer_tensor::PAGE_TOKENS;
use sha2::{Digest, Sha256};

use crate::request::MediaKind;

/// Names a page together with everything before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PageKey([u8; 32]);

impl Hash for PageKey {
    /// A part of the digest is enough to spread keys; the map's own secret keeps its buckets unpredictable.
    fn hash<H: Hasher>(&self, state: &mut H) {
        let mut head = [0; 8];
        head.copy_from_slice(&self.0[..8]);
        state.write_u64(u64::from_ne_bytes(head));
    }
}

/// Where a medium stands in a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MediaSpan {
    /// SHA-256 of the file.
    pub digest: [u8; 32],
    /// Image or clip: the same file gives other features as the other one.
    pub kind: MediaKind,
    /// Index of the first placeholder.
    pub start: usize,
    /// Placeholders. Those of a clip have other tokens in between; its pages behind `start + tokens` are told apart by the
    /// chain.
    pub tokens: usize,
}

/// Keys of the full pages of one sequence.
#[derive(Debug, Clone)]
pub struct PageKeys {
    salted: bool,
    root: PageKey,
    keys: Vec<PageKey>,
    media: Vec<MediaSpan>,
    /// Media that end before the next page.
    passed: usize,
}

impl PageKeys {
    /// No keys yet. Sequences with different salts have no key in common; no salt is one of its own. `media` are in the
    /// order of their starts.
    pub fn new(salt: Option<&str>, media: Vec<MediaSpan>) -> Self {
        let mut hash = Sha256::new();
        hash.update([0, u8::from(salt.is_some())]);
        hash.update(salt.unwrap_or_default());
        let root = PageKey(hash.finalize().into());
        Self { salted: salt.is_some(), root, keys: Vec::new(), media, passed: 0 }
    }

    /// Computes the keys of the pages that `tokens`, all tokens of the sequence so far, fill. Tokens given before must not
    /// have changed; drafts are no tokens yet.
    pub fn extend(&mut self, tokens: &[u32]) {
        let (full, _) = tokens.as_chunks::<PAGE_TOKENS>();
        for page in full.iter().skip(self.keys.len()) {
            let mut hash = Sha256::new();
            let mut message = [0; 33 + 4 * PAGE_TOKENS];
            message[0] = 1;
            message[1..33].copy_from_slice(&self.keys.last().unwrap_or(&self.root).0);
            for (bytes, token) in message[33..].chunks_exact_mut(4).zip(page) {
                bytes.copy_from_slice(&token.to_le_bytes());
            }
            hash.update(message);
            let start = self.keys.len() * PAGE_TOKENS;
            let end = start + PAGE_TOKENS;
            while self.media.get(self.passed).is_some_and(|m| m.start + m.tokens <= start) {
                self.passed += 1;
            }
            let ahead = self.media[self.passed..].iter().take_while(|m| m.start < end);
            for medium in ahead.filter(|m| m.start + m.tokens > start) {
                hash.update(medium.digest);
                hash.update([matches!(medium.kind, MediaKind::Video).into()]);
                hash.update((medium.start as u64).to_le_bytes());
                hash.update((medium.tokens as u64).to_le_bytes());
            }
            self.keys.push(PageKey(hash.finalize().into()));
        }
    }

    /// The keys, page 0 first.
    pub fn keys(&self) -> &[PageKey] {
        &self.keys
    }

    /// Key of the page that ends at `position`, if that is the end of a page with a key.
    pub fn ending_at(&self, position: usize) -> Option<PageKey> {
        let page = (position / PAGE_TOKENS).checked_sub(1).filter(|_| position.is_multiple_of(PAGE_TOKENS))?;
        self.keys.get(page).copied()
    }

    /// Whether there is a salt.
    pub fn is_salted(&self) -> bool {
        self.salted
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn keys(salt: Option<&str>, media: &[MediaSpan], tokens: &[u32]) -> Vec<PageKey> {
        let mut keys = PageKeys::new(salt, media.to_vec());
        keys.extend(tokens);
        keys.keys().to_vec()
    }

    fn tokens(n: usize) -> Vec<u32> {
        (0..n as u32).map(|i| i * 31 % 977).collect()
    }

    fn image(digest: u8, start: usize, tokens: usize) -> MediaSpan {
        MediaSpan { digest: [digest; 32], kind: MediaKind::Image, start, tokens }
    }

    #[test]
    fn only_full_pages_have_keys_and_growing_in_pieces_changes_none() {
        let all = tokens(200);
        let whole = keys(None, &[], &all);
        assert_eq!(whole.len(), 3);
        assert!(keys(None, &[], &all[..63]).is_empty());
        let mut grown = PageKeys::new(None, Vec::new());
        for n in [1, 63, 64, 65, 128, 191, 200] {
            grown.extend(&all[..n]);
            assert_eq!(grown.keys().len(), n / 64);
        }
        assert_eq!(grown.keys(), whole);
        assert_eq!(grown.ending_at(128), Some(whole[1]));
        assert_eq!([0, 1, 127, 256].map(|p| grown.ending_at(p)), [None; 4]);
    }

    #[test]
    fn every_token_reaches_its_page_and_all_behind_it_and_none_before() {
        let all = tokens(192);
        let whole = keys(None, &[], &all);
        for at in 0..192 {
            let mut other = all.clone();
            other[at] ^= 1 << (at % 32);
            let other = keys(None, &[], &other);
            for page in 0..3 {
                assert_eq!(other[page] == whole[page], page < at / 64, "token {at}, page {page}");
            }
        }
    }

    #[test]
    fn equal_pages_at_different_places_have_different_keys() {
        let page = tokens(64);
        let twice = keys(None, &[], &[page.clone(), page].concat());
        assert_ne!(twice[0], twice[1]);
    }

    #[test]
    fn salts_have_no_key_in_common() {
        let all = tokens(128);
        let salts = [None, Some(""), Some("a"), Some("b"), Some("a\0"), Some("\0")];
        let found: BTreeSet<PageKey> = salts.iter().flat_map(|s| keys(*s, &[], &all)).collect();
        assert_eq!(found.len(), 2 * salts.len());
    }

    #[test]
    fn media_enter_the_pages_of_their_placeholders() {
        let all = tokens(256);
        let plain = keys(None, &[], &all);
        let pictured = keys(None, &[image(1, 70, 80)], &all);
        assert_eq!(pictured[0], plain[0], "the page before the picture is the text's");
        assert!((1..4).all(|p| pictured[p] != plain[p]));
        for other in [image(2, 70, 80), image(1, 71, 80), image(1, 70, 81)] {
            let other = keys(None, &[other], &all);
            assert!(other[0] == plain[0] && (1..4).all(|p| other[p] != pictured[p]));
        }
        let clip = MediaSpan { kind: MediaKind::Video, ..image(1, 70, 80) };
        assert_ne!(keys(None, &[clip], &all)[1], pictured[1]);
    }

    #[test]
    fn a_later_medium_does_not_touch_earlier_pages() {
        let all = tokens(320);
        let one = keys(None, &[image(1, 10, 100)], &all);
        let two = keys(None, &[image(1, 10, 100), image(2, 200, 10)], &all);
        assert_eq!(one[..3], two[..3]);
        assert!(one[3] != two[3] && one[4] != two[4]);
    }

    #[test]
    fn several_media_of_one_page_all_count_and_their_order_too() {
        let all = tokens(64);
        let at = |a: u8, b: u8, c: u8| keys(None, &[image(a, 0, 4), image(b, 4, 4), image(c, 9, 55)], &all)[0];
        let found: BTreeSet<PageKey> =
            [at(1, 2, 3), at(2, 1, 3), at(1, 3, 2), at(1, 2, 4), at(1, 1, 3)].into_iter().collect();
        assert_eq!(found.len(), 5);
    }
}
