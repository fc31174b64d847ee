//! What was done, how fast, and how many drafts were right.

use serde::{Deserialize, Serialize};

/// Counts of drafts by position, position 0 first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftCounts {
    /// Verifying steps that judged at least this many drafts.
    pub drafted: Vec<u64>,
    /// Verifying steps in which at least this many stood.
    pub accepted: Vec<u64>,
}

impl DraftCounts {
    /// Records a verifying step.
    pub fn record(&mut self, drafted: usize, accepted: usize) {
        if self.drafted.len() < drafted {
            self.drafted.resize(drafted, 0);
            self.accepted.resize(drafted, 0);
        }
        self.drafted[..drafted].iter_mut().for_each(|n| *n += 1);
        self.accepted[..accepted.min(drafted)].iter_mut().for_each(|n| *n += 1);
    }

    /// Verifying steps with drafts.
    pub fn steps(&self) -> u64 {
        self.drafted.first().copied().unwrap_or(0)
    }

    /// Share of the drafts at `position` (0-based) that stood together with all before them, `None` without drafts.
    pub fn rate(&self, position: usize) -> Option<f64> {
        let drafted = *self.drafted.get(position).filter(|n| **n > 0)?;
        Some(self.accepted[position] as f64 / drafted as f64)
    }

    /// Mean number of tokens that a verifying step yields, its own one included.
    pub fn mean_length(&self) -> f64 {
        let accepted: u64 = self.accepted.iter().sum();
        if self.steps() == 0 { 1.0 } else { 1.0 + accepted as f64 / self.steps() as f64 }
    }
}

/// Counters since loading.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompt tokens taken from it.
    pub prefix_hits: u64,
    /// Prompts that went on from a saved state.
    pub prefix_state_hits: u64,
    /// Prompts without any hit, by reason.
    pub prefix_misses: Vec<(String, u64)>,
    /// Images and clips looked up in the cache of features.
    pub media_queries: u64,
    /// Images and clips found in it.
    pub media_hits: u64,
    /// Sequences that gave up their pages for others.
    pub preemptions: u64,
    /// Requests that ended by a fault of their own rows.
    pub failed: u64,
    /// Steps by rows: for each bound of [`Counters::STEP_BOUNDS`], then above all.
    pub steps: [u64; 16],
    /// Rows over all steps.
    pub step_rows: u64,
    /// Drafts.
    pub drafts: DraftCounts,
    /// Tokens a page.
    pub page_tokens: u64,
    /// Pages of the cache.
    pub pages: u64,
}

impl Counters {
    /// Upper bounds of the buckets of [`Counters::steps`].
    pub const STEP_BOUNDS: [u64; 15] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384];

    /// Counts a step of so many rows.
    pub(crate) fn step(&mut self, rows: usize) {
        let rows = rows as u64;
        self.steps[Self::STEP_BOUNDS.partition_point(|&bound| bound < rows)] += 1;
        self.step_rows += rows;
    }
}

/// A look at an engine between two steps.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Snapshot {
    /// Running sequences.
    pub running: usize,
    /// Requests that wait for a slot or pages.
    pub waiting_capacity: usize,
    /// Requests held back by policy.
    pub waiting_deferred: usize,
    /// Share of the pages in use by running sequences, 0 to 1.
    pub page_use: f64,
    /// Tokens of prompts still to be computed, waiting ones included.
    pub backlog_tokens: u64,
    /// Prompt tokens computed a second, lately; 0 before any.
    pub prefill_rate: f64,
    /// Tokens generated so far.
    pub generated_tokens: u64,
    /// Why steps are no longer recorded, if they should be.
    pub record_error: Option<String>,
    /// Why the engine has ended, if it has.
    pub dead: Option<String>,
    /// Whether work is pending and no step has finished for too long.
    pub stuck: bool,
    /// Counters since loading.
    pub counters: Counters,
}

/// Work and time. The time of a step that mixes prompt rows and decoding rows is shared by rows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// Prompt tokens computed.
    pub prefill_tokens: u64,
    /// Time spent on them.
    pub prefill_seconds: f64,
    /// Tokens yielded by decoding rows (the first token of an answer comes from prompt rows and is not counted).
    pub decode_tokens: u64,
    /// Time spent on them, drafting included.
    pub decode_seconds: f64,
    /// Steps of the model.
    pub steps: u64,
    /// Drafts.
    pub drafts: DraftCounts,
}

impl Stats {
    /// Prompt tokens a second; 0 before any.
    pub fn prefill_rate(&self) -> f64 {
        rate(self.prefill_tokens, self.prefill_seconds)
    }

    /// Decoded tokens a second, all sequences together; 0 before any.
    pub fn decode_rate(&self) -> f64 {
        rate(self.decode_tokens, self.decode_seconds)
    }

    /// Books the time of a step by its rows.
    pub(crate) fn book(&mut self, seconds: f64, prefill_rows: usize, decode_rows: usize) {
        let rows = (prefill_rows + decode_rows).max(1) as f64;
        self.prefill_seconds += seconds * prefill_rows as f64 / rows;
        self.decode_seconds += seconds * decode_rows as f64 / rows;
        self.steps += 1;
    }
}

fn rate(count: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_fall_with_the_position() {
        let mut counts = DraftCounts::default();
        for (drafted, accepted) in [(2, 2), (2, 1), (2, 0), (1, 1), (0, 0)] {
            counts.record(drafted, accepted);
        }
        assert_eq!((counts.steps(), counts.drafted.clone(), counts.accepted.clone()), (4, vec![4, 3], vec![3, 1]));
        assert!((counts.rate(0).unwrap() - 0.75).abs() < 1e-12);
        assert!((counts.rate(1).unwrap() - 1.0 / 3.0).abs() < 1e-12);
        assert_eq!(counts.rate(2), None);
        assert!((counts.mean_length() - 2.0).abs() < 1e-12);
    }

    #[test]
    fn steps_fall_into_the_bucket_of_their_bound() {
        let mut counters = Counters::default();
        for rows in [1, 2, 3, 4, 5, 16_384, 16_385] {
            counters.step(rows);
        }
        assert_eq!((counters.steps[..4].to_vec(), counters.steps[14..].to_vec()), (vec![1, 1, 2, 1], vec![1, 1]));
        assert_eq!(counters.step_rows, 15 + 16_384 + 16_385);
    }

    #[test]
    fn mixed_steps_share_their_time() {
        let mut stats = Stats { prefill_tokens: 30, decode_tokens: 10, ..Stats::default() };
        stats.book(4.0, 3, 1);
        assert!((stats.prefill_rate() - 10.0).abs() < 1e-12 && (stats.decode_rate() - 10.0).abs() < 1e-12);
        assert!(Stats::default().decode_rate().abs() < 1e-12);
    }
}
