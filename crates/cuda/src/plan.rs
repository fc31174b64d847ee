//! The step on the device: tokens, segments and page tables as one block of 32-bit words, sent by one copy.
//!
//! Words: `tokens [rows] | segment of each row [rows] | image feature or -1 [rows] | segments [n, 8] | pages | logit rows |
//! first row of each group`; a group is up to [`GROUP_ROWS`] rows of a segment in sequence.
//! The device block is overwritten in the stream's order, so kernels of the previous step have read theirs before.

use glimmer_tensor::{Result, Step};

use crate::{
    device::Device,
    memory::{Allocator, Memory, Pinned},
    types::require,
};

/// Words of a segment as the kernels read it: slot, position, rows, fold, commit, first page, first row, pages.
const SEGMENT_WORDS: usize = 8;

/// Rows of a segment that a kernel takes together.
pub(crate) const GROUP_ROWS: usize = 4;

/// Pinned blocks in turn, so that packing a step does not wait for the copy of the one before.
const TURNS: usize = 4;

/// The current step.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) step: Step,
    words: Vec<u32>,
    /// First row of each group.
    pub(crate) groups: Vec<u32>,
    block: Option<Memory>,
    lists: Option<Memory>,
    pinned: Vec<Pinned>,
    turn: usize,
    /// Rows that a step may have, when that is known.
    pub(crate) reserved_rows: Option<usize>,
}

impl Plan {
    pub(crate) fn new() -> Self {
        Self {
            step: Step::default(),
            words: Vec::new(),
            groups: Vec::new(),
            block: None,
            lists: None,
            pinned: Vec::new(),
            turn: 0,
            reserved_rows: None,
        }
    }

    /// Room for steps of `rows` rows over contexts of `tokens` tokens.
    pub(crate) fn reserve(&mut self, device: &Device, memory: &Allocator, rows: usize, tokens: usize) -> Result<()> {
        self.reserved_rows = Some(rows);
        let words = rows * (5 + SEGMENT_WORDS) + rows.max(tokens);
        grow(&mut self.block, memory, words)?;
        grow(&mut self.lists, memory, rows)?;
        self.pin(device, words)
    }

    fn pin(&mut self, device: &Device, words: usize) -> Result<()> {
        if self.pinned.first().is_none_or(|p| p.bytes() < 4 * words) {
            self.pinned.clear();
            for _ in 0..TURNS {
                self.pinned.push(Pinned::new(device, 4 * words.next_power_of_two())?);
            }
        }
        Ok(())
    }

    /// Takes over a step and sends it.
    pub(crate) fn begin(&mut self, device: &Device, memory: &Allocator, step: &Step) -> Result<()> {
        if let Some(rows) = self.reserved_rows {
            require("begin: rows of the step", step.rows(), rows)?;
        }
        // Field by field: the vectors keep their memory.
        self.step.tokens.clone_from(&step.tokens);
        self.step.segments.clone_from(&step.segments);
        self.step.pages.clone_from(&step.pages);
        self.step.logits.clone_from(&step.logits);
        self.step.features.clone_from(&step.features);
        let words = &mut self.words;
        words.clear();
        words.extend(&step.tokens);
        for (i, s) in step.segments.iter().enumerate() {
            words.extend((0..s.rows).map(|_| i as u32));
        }
        let features = words.len();
        words.resize(features + step.rows(), u32::MAX);
        for f in &step.features {
            words[features + f.row as usize] = f.feature;
        }
        self.groups.clear();
        let mut row = 0;
        for s in &step.segments {
            words.extend([s.slot, s.position, s.rows, s.fold, s.commit, s.first_page, row, s.pages]);
            self.groups.extend((row..row + s.rows).step_by(GROUP_ROWS));
            row += s.rows;
        }
        words.extend(&step.pages);
        words.extend(&step.logits);
        words.extend(&self.groups);
        let len = words.len();
        let block = grow(&mut self.block, memory, len)?.clone();
        self.pin(device, len)?;
        self.turn = (self.turn + 1) % TURNS;
        self.pinned[self.turn].send(&self.words, &block, 0)?;
        Ok(())
    }

    /// Sends a list of row numbers; it stays until the next one.
    pub(crate) fn list(&mut self, device: &Device, memory: &Allocator, rows: &[u32]) -> Result<u64> {
        if rows == self.step.logits {
            return Ok(self.logits());
        }
        let lists = grow(&mut self.lists, memory, rows.len())?.clone();
        self.pin(device, rows.len())?;
        self.turn = (self.turn + 1) % TURNS;
        self.pinned[self.turn].send(rows, &lists, 0)?;
        Ok(lists.address())
    }

    pub(crate) fn rows(&self) -> usize {
        self.step.rows()
    }

    fn word(&self, at: usize) -> u64 {
        self.block.as_ref().map_or(0, Memory::address) + 4 * at as u64
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.word(0)
    }

    pub(crate) fn row_segments(&self) -> u64 {
        self.word(self.rows())
    }

    pub(crate) fn features(&self) -> u64 {
        self.word(2 * self.rows())
    }

    pub(crate) fn segments(&self) -> u64 {
        self.word(3 * self.rows())
    }

    pub(crate) fn pages(&self) -> u64 {
        self.word(3 * self.rows() + SEGMENT_WORDS * self.step.segments.len())
    }

    fn logits(&self) -> u64 {
        self.word(3 * self.rows() + SEGMENT_WORDS * self.step.segments.len() + self.step.pages.len())
    }

    /// First rows of the groups.
    pub(crate) fn groups(&self) -> u64 {
        self.logits() + 4 * self.step.logits.len() as u64
    }

    /// Position after the furthest row.
    pub(crate) fn end(&self) -> usize {
        self.step.segments.iter().map(|s| s.position as usize + s.rows as usize).max().unwrap_or(0)
    }
}

/// Makes a piece of words large enough.
fn grow<'a>(piece: &'a mut Option<Memory>, memory: &Allocator, words: usize) -> Result<&'a Memory> {
    if piece.as_ref().is_some_and(|p| p.bytes() < 4 * words) {
        *piece = None;
    }
    match piece {
        Some(piece) => Ok(piece),
        none => Ok(none.insert(memory.uninitialized("the step's plan", 4 * words.next_power_of_two())?)),
    }
}
