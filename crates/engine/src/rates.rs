//! How fast steps have been: the model `seconds = decode(rows) + prompt rows / rate` that pacing and estimates use.
//!
//! Steps without prompt rows teach `decode`, by bucket of rows; what a step with prompt rows took beyond `decode` teaches the
//! rate. Both forget exponentially. Nothing here reads a clock: seconds come in.

use serde::{Deserialize, Serialize};

/// Weight that the past keeps when a step is recorded.
const KEEP: f64 = 0.9;
/// Of a step with prompt rows at least this share belongs to them, however wrong the decode time is.
const LEAST_SHARE: f64 = 0.1;
/// Buckets 1, 2, 3, 4, 6, 8, 12, 16, ... rows: two for each power of two.
const BUCKETS: usize = 40;

/// Measured speeds.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Rates {
    /// Decayed sums: a step counts by its rows, so chunks too small to show the rate hardly matter.
    prompt_rows: f64,
    prompt_seconds: f64,
    /// Seconds of a step of decoding rows alone; 0 is unknown. Grows to the largest bucket seen.
    decode: Vec<f64>,
}

impl Rates {
    /// Records a step of so many prompt rows and decoding rows (drafts included) that took `seconds`, drafting included.
    /// Steps without rows and times that are not positive are ignored.
    pub fn record(&mut self, prompt_rows: usize, decode_rows: usize, seconds: f64) {
        if !(seconds > 0.0 && seconds.is_finite()) || prompt_rows + decode_rows == 0 {
            return;
        }
        if prompt_rows > 0 {
            let own = (seconds - self.decode_seconds(decode_rows)).max(seconds * LEAST_SHARE);
            self.prompt_rows = KEEP * self.prompt_rows + prompt_rows as f64;
            self.prompt_seconds = KEEP * self.prompt_seconds + own;
            return;
        }
        let bucket = bucket(decode_rows);
        if self.decode.len() <= bucket {
            self.decode.resize(bucket + 1, 0.0);
        }
        let past = &mut self.decode[bucket];
        *past = if *past > 0.0 { KEEP * *past + (1.0 - KEEP) * seconds } else { seconds };
    }

    /// Prompt tokens a second; `None` before any.
    pub fn prefill_rate(&self) -> Option<f64> {
        (self.prompt_seconds > 0.0).then(|| self.prompt_rows / self.prompt_seconds)
    }

    /// Seconds of a step of so many decoding rows and nothing else; 0 without rows or before any was measured. A bucket that
    /// was never measured takes the next larger one's time, else the largest's.
    pub fn decode_seconds(&self, rows: usize) -> f64 {
        if rows == 0 {
            return 0.0;
        }
        let from = bucket(rows).min(self.decode.len());
        let known = |seconds: &&f64| **seconds > 0.0;
        let above = self.decode[from..].iter().find(known);
        above.or_else(|| self.decode[..from].iter().rev().find(known)).copied().unwrap_or(0.0)
    }

    /// Prompt rows that fit a step of `seconds` beside so many decoding rows; `None` before any prompt was measured.
    pub fn prompt_rows_within(&self, seconds: f64, decode_rows: usize) -> Option<usize> {
        let rate = self.prefill_rate()?;
        Some(((seconds - self.decode_seconds(decode_rows)).max(0.0) * rate) as usize)
    }

    /// Seconds that a backlog of prompt tokens takes; `None` before any prompt was measured.
    pub fn backlog_seconds(&self, tokens: usize) -> Option<f64> {
        self.prefill_rate().map(|rate| tokens as f64 / rate)
    }
}

fn bucket(rows: usize) -> usize {
    let power = rows.max(1).ilog2();
    let upper = power.checked_sub(1).map_or(0, |half| rows >> half & 1);
    // Rows 2 and 3 begin the doubled series at index 1; row 1 has no upper half.
    (2 * power as usize + upper).saturating_sub(usize::from(power > 0)).min(BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * b.abs()
    }

    #[test]
    fn buckets_are_two_a_power_of_two() {
        let first: Vec<usize> = (1..200).filter(|&rows| rows == 1 || bucket(rows) != bucket(rows - 1)).collect();
        assert_eq!(first, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192]);
        assert!((1..20).all(|i| bucket(first_row(i)) == i), "no index is left out");
        assert_eq!(bucket(usize::MAX), BUCKETS - 1);
    }

    fn first_row(index: usize) -> usize {
        (1..).find(|&rows| bucket(rows) == index).unwrap()
    }

    #[test]
    fn the_step_model_is_recovered_from_mixed_steps() {
        let mut rates = Rates::default();
        assert_eq!((rates.prefill_rate(), rates.backlog_seconds(10)), (None, None));
        assert!(rates.decode_seconds(8).abs() < 1e-12);
        for _ in 0..50 {
            rates.record(0, 8, 0.02);
            rates.record(800, 8, 0.02 + 800.0 / 10_000.0);
        }
        assert!(close(rates.decode_seconds(8), 0.02) && close(rates.prefill_rate().unwrap(), 10_000.0));
        assert!(close(rates.backlog_seconds(5000).unwrap(), 0.5));
        assert_eq!(rates.prompt_rows_within(0.100_01, 8), Some(800));
        assert_eq!(rates.prompt_rows_within(0.01, 8), Some(0), "decoding alone takes longer");
    }

    #[test]
    fn unknown_buckets_take_the_next_larger_then_the_largest() {
        let mut rates = Rates::default();
        rates.record(0, 4, 0.01);
        rates.record(0, 32, 0.03);
        assert!(close(rates.decode_seconds(1), 0.01) && close(rates.decode_seconds(8), 0.03));
        assert!(close(rates.decode_seconds(500), 0.03));
    }

    #[test]
    fn a_stale_decode_time_cannot_take_a_whole_step_and_speed_is_followed() {
        let mut rates = Rates::default();
        rates.record(0, 8, 5.0);
        rates.record(100, 8, 1.0);
        assert!(rates.prefill_rate().unwrap() <= 100.0 / (1.0 * LEAST_SHARE) + 1e-9);
        let mut rates = Rates::default();
        (0..100).for_each(|_| rates.record(1000, 0, 0.1));
        (0..100).for_each(|_| rates.record(1000, 0, 0.5));
        assert!((rates.prefill_rate().unwrap() - 2000.0).abs() < 1.0);
    }

    #[test]
    fn nonsense_is_ignored() {
        let mut rates = Rates::default();
        for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            rates.record(10, 0, seconds);
            rates.record(0, 10, seconds);
        }
        rates.record(0, 0, 1.0);
        assert_eq!(rates, Rates::default());
    }
}
