//! The step on the device: tokens, segments and page tables as one block of 32-bit words, sent by one copy.
//!
//! Words: `tokens [rows] | segment of each row [rows] | image feature or -1 [rows] | segments [n, 8] | logit rows | first row of
//! each group | source rows | shared rows | rows of taken tokens | pages`; a group is up to [`GROUP_ROWS`] rows of a segment in sequence. The page tables
//! come last, because all before them is as long as the step's [`Key`] says: steps of one key find everything at the same place.
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

/// Contexts are told apart by the eighth part of an octave, and not at all below this.
const SHORT_CONTEXT: usize = 1024;

/// What a stage takes a list of rows for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Rows whose logits are wanted.
    Logits,
    /// Rows whose hidden state a draft row continues.
    Source,
    /// Rows whose selection is used again.
    Shared,
    /// Rows whose largest logits' tokens are the step's.
    Taken,
}

/// All that the launches of a step depend on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    stages: u32,
    rows: usize,
    segments: usize,
    groups: usize,
    logits: usize,
    reach: usize,
    regular: bool,
}

/// Pinned blocks in turn, so that packing a step does not wait for the copy of the one before.
const TURNS: usize = 4;

/// The current step.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) step: Step,
    words: Vec<u32>,
    /// First row of each group.
    pub(crate) groups: Vec<u32>,
    /// Rows that draft rows continue, whose selections are shared, and whose tokens are taken.
    source: Vec<u32>,
    shared: Vec<u32>,
    taken: Vec<u32>,
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
            source: Vec::new(),
            shared: Vec::new(),
            taken: Vec::new(),
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
        let words = rows * (8 + SEGMENT_WORDS) + rows.max(tokens);
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

    /// Takes over a step with its source, shared and taken rows, and sends it; whether the block had to move for it.
    pub(crate) fn begin(
        &mut self,
        device: &Device,
        memory: &Allocator,
        step: &Step,
        lists: [&[u32]; 3],
    ) -> Result<bool> {
        if let Some(rows) = self.reserved_rows {
            require("begin: rows of the step", step.rows(), rows)?;
        }
        self.pack(step, lists);
        let (len, before) = (self.words.len(), self.word(0));
        let block = grow(&mut self.block, memory, len)?.clone();
        self.pin(device, len)?;
        self.turn = (self.turn + 1) % TURNS;
        self.pinned[self.turn].send(&self.words, &block, 0)?;
        Ok(before != 0 && before != self.word(0))
    }

    /// The step as words.
    fn pack(&mut self, step: &Step, [source, shared, taken]: [&[u32]; 3]) {
        // Field by field: the vectors keep their memory.
        self.step.tokens.clone_from(&step.tokens);
        self.step.segments.clone_from(&step.segments);
        self.step.pages.clone_from(&step.pages);
        self.step.logits.clone_from(&step.logits);
        self.step.features.clone_from(&step.features);
        let held = [&mut self.source, &mut self.shared, &mut self.taken];
        for (held, given) in held.into_iter().zip([source, shared, taken]) {
            held.clear();
            held.extend(given);
        }
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
        for list in [&step.logits, &self.groups, &self.source, &self.shared, &self.taken, &step.pages] {
            words.extend(list);
        }
    }

    /// What the launches of the step depend on when it runs `stages`.
    pub(crate) fn key(&self, stages: u32) -> Key {
        Key {
            stages,
            rows: self.rows(),
            segments: self.step.segments.len(),
            groups: self.groups.len(),
            logits: self.step.logits.len(),
            reach: self.reach(),
            regular: self.regular(),
        }
    }

    /// The device's list of the rows that the step has in a role, when these are they.
    pub(crate) fn list(&self, role: Role, rows: &[u32]) -> Option<u64> {
        let (held, address) = match role {
            Role::Logits => (&self.step.logits, self.logits()),
            Role::Source => (&self.source, self.sources()),
            Role::Shared => (&self.shared, self.sources() + 4 * self.source.len() as u64),
            Role::Taken => (&self.taken, self.sources() + 4 * (self.source.len() + self.shared.len()) as u64),
        };
        (held == rows).then_some(address)
    }

    /// Sends a list of row numbers; it stays until the next one.
    pub(crate) fn send_list(&mut self, device: &Device, memory: &Allocator, rows: &[u32]) -> Result<u64> {
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

    fn logits(&self) -> u64 {
        self.word(3 * self.rows() + SEGMENT_WORDS * self.step.segments.len())
    }

    /// First rows of the groups.
    pub(crate) fn groups(&self) -> u64 {
        self.logits() + 4 * self.step.logits.len() as u64
    }

    fn sources(&self) -> u64 {
        self.groups() + 4 * self.groups.len() as u64
    }

    pub(crate) fn pages(&self) -> u64 {
        self.sources() + 4 * (self.source.len() + self.shared.len() + self.taken.len()) as u64
    }

    /// Whether every group but the last is full, so that the number of rows says where each begins.
    pub(crate) fn regular(&self) -> bool {
        self.groups.iter().enumerate().all(|(i, &row)| row as usize == GROUP_ROWS * i)
    }

    /// Position after the furthest row.
    pub(crate) fn end(&self) -> usize {
        self.step.segments.iter().map(|s| s.position as usize + s.rows as usize).max().unwrap_or(0)
    }

    /// [`Self::end`] rounded up, for the size of launches that look through a sequence's context.
    pub(crate) fn reach(&self) -> usize {
        rounded(self.end())
    }
}

/// A number of tokens rounded up by an eighth at most.
fn rounded(tokens: usize) -> usize {
    let eighth = tokens.max(1).next_power_of_two() / 16;
    tokens.max(SHORT_CONTEXT).next_multiple_of(eighth.max(1))
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

#[cfg(test)]
mod tests {
    use super::*;

    use glimmer_tensor::{FeatureRow, Segment};

    fn segment(slot: u32, position: u32, rows: u32, first_page: u32) -> Segment {
        let pages = (position + rows).div_ceil(64);
        Segment { slot, position, rows, fold: 1, commit: 1, first_page, pages }
    }

    fn packed(step: &Step, source: &[u32]) -> Plan {
        let mut plan = Plan::new();
        plan.pack(step, [source, &[], &[]]);
        plan
    }

    #[test]
    fn everything_lies_where_the_key_says() {
        let (a, b) = (segment(4, 60, 3, 0), segment(2, 700, 2, 1));
        let pages: Vec<u32> = (20..32).collect();
        let features = vec![FeatureRow { row: 1, feature: 7 }];
        let step = Step { tokens: vec![5, 6, 7, 8, 9], segments: vec![a, b], pages, logits: vec![2, 4], features };
        let plan = packed(&step, &[0, 1, 2, 3, 3]);
        let at = |address: u64, count: usize| &plan.words[address as usize / 4..][..count];
        assert_eq!(at(plan.tokens(), 5), [5, 6, 7, 8, 9]);
        assert_eq!(at(plan.row_segments(), 5), [0, 0, 0, 1, 1]);
        assert_eq!(at(plan.features(), 5), [u32::MAX, 7, u32::MAX, u32::MAX, u32::MAX]);
        assert_eq!(at(plan.segments(), 16), [4, 60, 3, 1, 1, 0, 0, 1, 2, 700, 2, 1, 1, 1, 3, 11]);
        assert_eq!(at(plan.list(Role::Logits, &[2, 4]).unwrap(), 2), [2, 4]);
        assert_eq!(at(plan.groups(), 2), [0, 3]);
        assert_eq!(at(plan.list(Role::Source, &[0, 1, 2, 3, 3]).unwrap(), 5), [0, 1, 2, 3, 3]);
        assert_eq!(at(plan.pages(), 12), step.pages);
        assert!(plan.list(Role::Source, &[2, 4]).is_none(), "a list of another role is not taken for it");

        // Other slots, positions, pages and shares of the rows: another step of the same key.
        let (a, b) = (segment(1, 130, 2, 0), segment(0, 690, 3, 3));
        let other = Step { tokens: vec![1; 5], segments: vec![a, b], pages: (0..14).collect(), ..step };
        let same = packed(&other, &[4, 3, 2, 1, 0]);
        assert_eq!(plan.key(1), same.key(1));
        let places = |plan: &Plan| [plan.segments(), plan.groups(), plan.sources(), plan.pages()];
        assert_eq!(places(&plan), places(&same));

        // What launches depend on is in the key.
        assert_ne!(plan.key(1), plan.key(2));
        let far = Step { segments: vec![a, segment(0, 1300, 3, 3)], pages: (0..24).collect(), ..other.clone() };
        assert_ne!(packed(&far, &[0; 5]).key(1), plan.key(1));
        let fewer = Step { logits: vec![4], ..other };
        assert_ne!(packed(&fewer, &[0; 5]).key(1), plan.key(1));
    }

    #[test]
    fn contexts_are_rounded_up_by_an_eighth_at_most() {
        for tokens in (0..200_000).step_by(37) {
            let (reach, next) = (rounded(tokens), rounded(tokens + 1));
            assert!(reach >= tokens && reach <= next, "{tokens}: {reach}, then {next}");
            assert!(reach <= SHORT_CONTEXT || 8 * reach <= 9 * tokens + 8, "{tokens}: {reach}");
        }
        let distinct: std::collections::BTreeSet<usize> = (0..=1 << 20).map(rounded).collect();
        assert_eq!(distinct.len(), 1 + 10 * 8, "eight of each octave from 1024 to a million");
    }
}
