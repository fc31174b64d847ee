//! Stop strings over a stream of tokens.
//!
//! A stop string may begin in one token and end in another, so tokens whose text could still become part of one are held
//! back. Of several matches the one that ends first counts, and of those the longest: whichever way tokens cut the text,
//! the same answer ends at the same character.

use glimmer_text::{Detokenizer, Tokenizer};

/// A piece of an answer that no stop string can take back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// A whole token.
    Token(u32),
    /// The part of a token before a stop string, or up to its end.
    Text(String),
}

/// Holds back what may be a stop string.
#[derive(Debug)]
pub struct StopFilter<'a> {
    detokenizer: Detokenizer<'a>,
    stops: &'a [String],
    include: bool,
    /// Text of the held tokens.
    tail: String,
    held: Vec<Held>,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    id: u32,
    /// End of its text in the tail.
    end: usize,
    /// Whether the text ends at a character; other tokens cannot be released alone.
    whole: bool,
}

impl<'a> StopFilter<'a> {
    /// A filter for non-empty `stops`; `include` keeps the stop string in the answer.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer, stops: &'a [String], include: bool, skip_special: bool) -> Self {
        let detokenizer = tokenizer.detokenizer(skip_special);
        Self { detokenizer, stops, include, tail: String::new(), held: Vec::new() }
    }

    /// Feeds a token. Appends what is safe to `pieces`; returns the index of the stop string if one is complete, and then
    /// nothing more may be fed. With `match_now` false (below the least number of tokens) nothing matches or is held.
    pub fn push(&mut self, id: u32, match_now: bool, pieces: &mut Vec<Piece>) -> Option<usize> {
        self.detokenizer.push(id, &mut self.tail);
        self.held.push(Held { id, end: self.tail.len(), whole: !self.detokenizer.is_pending() });
        if !match_now {
            self.release(self.tail.len(), pieces);
            return None;
        }
        if let Some((stop, start, end)) = self.find() {
            let keep = if self.include { end } else { start };
            let done = self.release(keep, pieces);
            if done < keep {
                pieces.push(Piece::Text(self.tail[..keep - done].to_owned()));
            }
            return Some(stop);
        }
        self.release(self.tail.len() - self.partial(), pieces);
        None
    }

    /// The end of the answer: releases everything.
    pub fn finish(&mut self, pieces: &mut Vec<Piece>) {
        pieces.extend(self.held.drain(..).map(|held| Piece::Token(held.id)));
        self.tail.clear();
    }

    /// The match that ends first, of those the longest: stop, start, end.
    fn find(&self) -> Option<(usize, usize, usize)> {
        let matches = self.stops.iter().enumerate().filter_map(|(index, stop)| {
            let start = self.tail.find(stop.as_str())?;
            Some((index, start, start + stop.len()))
        });
        matches.min_by_key(|&(_, start, end)| (end, start))
    }

    /// Length of the longest end of the tail that begins a stop string.
    fn partial(&self) -> usize {
        let begins = |stop: &String| {
            let longest = self.tail.len().min(stop.len().saturating_sub(1));
            let fits = |&length: &usize| self.tail.as_bytes()[self.tail.len() - length..] == stop.as_bytes()[..length];
            (1..=longest).rev().find(fits).unwrap_or(0)
        };
        self.stops.iter().map(begins).max().unwrap_or(0)
    }

    /// Releases whole tokens that end at or before `limit`; returns how many bytes of text they had.
    fn release(&mut self, limit: usize, pieces: &mut Vec<Piece>) -> usize {
        let Some(last) = self.held.iter().rposition(|held| held.whole && held.end <= limit) else { return 0 };
        let done = self.held[last].end;
        pieces.extend(self.held.drain(..=last).map(|held| Piece::Token(held.id)));
        self.tail.drain(..done);
        for held in &mut self.held {
            held.end -= done;
        }
        done
    }
}
