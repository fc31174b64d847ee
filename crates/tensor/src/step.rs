//! The plan of one step as plain data: rows of several sequences at different positions, prefill chunks and decode rows
//! mixed. A step says *what* to compute and *where* the caches are; it carries no activations, so it can be logged and
//! replayed on any backend.
//!
//! # State of a sequence
//! A slot holds one KDA state version. It covers the positions `0 .. position - fold` of the segment's sequence. The next
//! `fold` positions are in the slot's record ring (rows that an earlier step computed without writing the state and that
//! have since been accepted). A stage folds them in, goes on over the segment's rows, writes the state back after the first
//! `commit` rows and leaves records of the rest. Rollback is therefore not an operation: rejected rows are simply not
//! folded. Latents, index keys and convolution columns are keyed by position and overwritten when a position is redone.

use serde::{Deserialize, Serialize};

use crate::Error;

/// Tokens a page of the DSA cache.
pub const PAGE_TOKENS: usize = 64;

/// A contiguous run of rows of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// KDA slot (also owner of convolution, record and tail rings).
    pub slot: u32,
    /// Position of the first row in its sequence.
    pub position: u32,
    /// Number of rows.
    pub rows: u32,
    /// Records of the slot's ring to fold into the state before the first row; their positions are
    /// `position - fold .. position`.
    pub fold: u32,
    /// Rows (from the first) whose effect the written state includes; the rest leave records. Prefill and plain decode:
    /// `rows`; verification of drafts: 1.
    pub commit: u32,
    /// Start of the page table in [`Step::pages`].
    pub first_page: u32,
    /// Length of the page table; covers `position + rows` tokens.
    pub pages: u32,
}

/// A row whose embedding is replaced by an image feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeatureRow {
    /// Row of the step.
    pub row: u32,
    /// Row of the feature buffer.
    pub feature: u32,
}

/// One step.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Token of each row, `[rows]`.
    pub tokens: Vec<u32>,
    /// Segments in row order; together they cover all rows. No two share a slot.
    pub segments: Vec<Segment>,
    /// Page tables of all segments.
    pub pages: Vec<u32>,
    /// Rows whose logits are wanted, ascending.
    pub logits: Vec<u32>,
    /// Image features, ascending by row.
    pub features: Vec<FeatureRow>,
}

/// Dimensions of the caches and of a step; everything is allocated from it once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheShape {
    /// KDA layers.
    pub kda_layers: usize,
    /// KDA heads.
    pub kda_heads: usize,
    /// Width of a KDA head.
    pub kda_head_dim: usize,
    /// Taps of the convolution.
    pub conv_kernel: usize,
    /// DSA layers, the MTP layer included (last).
    pub dsa_layers: usize,
    /// Width of a latent.
    pub latent: usize,
    /// Width of an index key.
    pub index_dim: usize,
    /// Tokens a pool; divides [`PAGE_TOKENS`].
    pub kpool: usize,
    /// Slots (running sequences, plus state checkpoints when prefix reuse is on).
    pub slots: usize,
    /// Pages.
    pub pages: usize,
    /// Most rows of a segment beyond its committed ones (the draft depth).
    pub max_draft: usize,
}

impl CacheShape {
    /// Width of the latents of pages that can be of halves.
    pub const HALF_LATENT: usize = 512;
    /// Width of their index keys.
    pub const HALF_INDEX: usize = 128;
    /// Index keys of such a page.
    pub const HALF_POOLS: usize = 16;

    /// Whether latents and index keys have the widths for which a GPU has kernels that take them as halves. Sizing and
    /// allocation both ask here.
    pub fn half_pages(&self) -> bool {
        self.dsa_layers > 0
            && self.latent == Self::HALF_LATENT
            && self.index_dim == Self::HALF_INDEX
            && self.kpool > 0
            && PAGE_TOKENS / self.kpool == Self::HALF_POOLS
    }
}

/// A segment together with the index of its first row.
#[derive(Debug, Clone, Copy)]
pub struct Placed<'a> {
    /// Index of the first row in the step.
    pub row: usize,
    /// The segment.
    pub segment: &'a Segment,
    /// Its page table.
    pub pages: &'a [u32],
}

impl Step {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Segments with the index of their first row and their page table.
    ///
    /// # Panics
    /// When a page table reaches beyond [`Step::pages`]; [`Step::validate`] excludes that.
    pub fn placed(&self) -> impl Iterator<Item = Placed<'_>> {
        let mut row = 0;
        self.segments.iter().map(move |segment| {
            let first = segment.first_page as usize;
            let placed = Placed { row, segment, pages: &self.pages[first..first + segment.pages as usize] };
            row += segment.rows as usize;
            placed
        })
    }

    /// Checks every index against the caches.
    ///
    /// # Errors
    /// [`Error::Step`] naming the segment and the rule that it breaks.
    pub fn validate(&self, shape: &CacheShape) -> Result<(), Error> {
        let fail = |segment: usize, rule: &'static str| Err(Error::Step { segment, rule });
        let mut rows = 0usize;
        for (i, s) in self.segments.iter().enumerate() {
            if s.rows == 0 {
                return fail(i, "a segment has at least one row");
            }
            if s.slot as usize >= shape.slots {
                return fail(i, "the slot exists");
            }
            if self.segments[..i].iter().any(|o| o.slot == s.slot) {
                return fail(i, "no two segments share a slot");
            }
            if s.commit > s.rows || (s.rows - s.commit) as usize > shape.max_draft {
                return fail(i, "at most max_draft rows are left uncommitted");
            }
            if s.fold > s.position || s.fold as usize > shape.max_draft {
                return fail(i, "at most max_draft records are folded");
            }
            let end = s.position as usize + s.rows as usize;
            if (s.pages as usize) * PAGE_TOKENS < end {
                return fail(i, "the page table covers the last row");
            }
            let Some(table) = (s.first_page as usize)
                .checked_add(s.pages as usize)
                .and_then(|e| self.pages.get(s.first_page as usize..e))
            else {
                return fail(i, "the page table lies inside the step's pages");
            };
            if table.iter().any(|&p| p as usize >= shape.pages) {
                return fail(i, "every page exists");
            }
            rows += s.rows as usize;
        }
        if rows != self.rows() {
            return fail(self.segments.len(), "segments cover the rows exactly");
        }
        if self.logits.iter().any(|&r| r as usize >= rows) || !self.logits.is_sorted_by(|a, b| a < b) {
            return fail(self.segments.len(), "logit rows are ascending and exist");
        }
        if self.features.iter().any(|f| f.row as usize >= rows) || !self.features.is_sorted_by(|a, b| a.row < b.row) {
            return fail(self.segments.len(), "feature rows are ascending and exist");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> CacheShape {
        CacheShape {
            kda_layers: 1,
            kda_heads: 1,
            kda_head_dim: 4,
            conv_kernel: 4,
            dsa_layers: 1,
            latent: 4,
            index_dim: 4,
            kpool: 4,
            slots: 2,
            pages: 4,
            max_draft: 2,
        }
    }

    /// A chunk of 60 rows that ends behind the first page, and three rows of which two are drafts.
    fn step() -> Step {
        let chunk = Segment { slot: 1, position: 10, rows: 60, fold: 0, commit: 60, first_page: 0, pages: 2 };
        let verify = Segment { slot: 0, position: 61, rows: 3, fold: 2, commit: 1, first_page: 2, pages: 1 };
        Step {
            tokens: vec![7; 63],
            segments: vec![chunk, verify],
            pages: vec![3, 0, 2],
            logits: vec![59, 60, 61, 62],
            features: vec![FeatureRow { row: 4, feature: 1 }, FeatureRow { row: 5, feature: 0 }],
        }
    }

    #[test]
    fn each_rule_of_a_step_is_checked_by_itself() {
        assert!(step().validate(&shape()).is_ok());
        let broken = |expected_segment: usize, part: &str, damage: fn(&mut Step)| {
            let mut step = step();
            damage(&mut step);
            let Err(Error::Step { segment, rule }) = step.validate(&shape()) else {
                unreachable!("`{part}` is not checked");
            };
            assert!(segment == expected_segment && rule.contains(part), "segment {segment}: {rule}");
        };
        broken(1, "at least one row", |s| s.segments[1].rows = 0);
        broken(1, "the slot exists", |s| s.segments[1].slot = 2);
        broken(1, "share a slot", |s| s.segments[1].slot = 1);
        broken(1, "left uncommitted", |s| s.segments[1].commit = 0);
        broken(0, "left uncommitted", |s| s.segments[0].commit = 61);
        broken(1, "are folded", |s| s.segments[1].fold = 3);
        broken(1, "are folded", |s| s.segments[1].position = 1);
        broken(1, "covers the last row", |s| s.segments[1].position = 62);
        broken(0, "covers the last row", |s| s.segments[0].position = u32::MAX);
        broken(1, "inside the step's pages", |s| s.segments[1].first_page = 3);
        broken(1, "inside the step's pages", |s| s.segments[1].first_page = u32::MAX);
        broken(0, "every page exists", |s| s.pages[1] = 4);
        broken(2, "cover the rows", |s| s.tokens.push(1));
        broken(2, "logit rows", |s| s.logits[3] = 63);
        broken(2, "logit rows", |s| s.logits.swap(0, 1));
        broken(2, "feature rows", |s| s.features[1].row = 4);
        broken(2, "feature rows", |s| s.features[1].row = 63);
    }
}
