//! Tokens from rows of logits where the logits are: what is asked of a backend, and what a plain answer is.
//!
//! A row's logits are changed token by token, tokens outside its mask are excluded, and then the largest logit is taken (the
//! lower token among equals), or a token is drawn. [`Backend::sample`](crate::Backend::sample) gives the token, or leaves the row to
//! the caller.

use std::ops::Range;

use crate::{Error, Result};

/// Why a row has no token whose logits are sound: all of them are minus infinity.
pub const EXCLUDED: &str = "every token is excluded";

/// Rows whose tokens are wanted, with the changes and masks that they refer to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Samples {
    /// The rows.
    pub rows: Vec<SampleRow>,
    /// Changes of all rows.
    pub changes: Vec<LogitChange>,
    /// Masks of all rows: a bit for each token that may come, 64 tokens a word, the lowest token in the lowest bit. A mask
    /// has a word for each 64 tokens of the vocabulary or part of them.
    pub masks: Vec<u64>,
}

/// Rows whose tokens a backend finds; to describe others to it would be in vain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Finds {
    /// None.
    Nothing,
    /// Those whose largest logit is taken.
    Largest,
    /// Those that are drawn, too.
    Drawn,
}

/// How the token of one row is found.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleRow {
    /// The row of the buffer.
    pub row: u32,
    /// Its changes: ascending by token, no token twice.
    pub changes: Range<usize>,
    /// First word of its mask; without one every token may come.
    pub mask: Option<usize>,
    /// How it is drawn; without it the largest logit is taken.
    pub draw: Option<Draw>,
}

/// How a token is drawn, in this order: logits below the best one's weight times `min_p` go, all but the `top_k` best go, all but
/// the smallest set of best ones with `top_p` of the mass left go; of the weights `exp(logit / temperature)` left, summed by
/// ascending token, the first sum above `uniform` of the total is the token's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// Above 0.
    pub temperature: f32,
    /// From 0 to 1.
    pub min_p: f32,
    /// 0: all.
    pub top_k: u32,
    /// Above 0 and up to 1.
    pub top_p: f32,
    /// From 0 to below 1.
    pub uniform: f64,
}

/// A change of one logit: [`LogitChange::apply`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitChange {
    /// The token.
    pub token: u32,
    /// Added first.
    pub bias: f32,
    /// Divides what is above zero then, and multiplies what is not.
    pub repetition: f32,
    /// Taken away last; infinite for a token that may not come.
    pub minus: f32,
}

impl LogitChange {
    /// A change that changes nothing.
    pub fn none(token: u32) -> Self {
        Self { token, bias: 0.0, repetition: 1.0, minus: 0.0 }
    }

    /// The changed logit; every operation is rounded to f32.
    pub fn apply(&self, logit: f32) -> f32 {
        let logit = logit + self.bias;
        (if logit > 0.0 { logit / self.repetition } else { logit * self.repetition }) - self.minus
    }
}

impl Samples {
    /// No rows, with the memory kept.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.changes.clear();
        self.masks.clear();
    }

    /// Checks the rows against a buffer `[rows, width]` and the vocabulary.
    ///
    /// # Errors
    /// [`Error::Capacity`] for what does not exist.
    pub fn check(&self, rows: usize, width: usize, vocabulary: usize) -> Result<()> {
        require("sample: columns of the logits", vocabulary, width)?;
        for row in &self.rows {
            require("sample: rows of logits", row.row as usize + 1, rows)?;
            require("sample: changes", row.changes.end, self.changes.len())?;
            require("sample: changes of a row", row.changes.start, row.changes.end)?;
            let changes = &self.changes[row.changes.clone()];
            for pair in changes.windows(2) {
                require("sample: changes ascending by token", pair[0].token as usize + 1, pair[1].token as usize)?;
            }
            let last = changes.last().map_or(0, |change| change.token as usize + 1);
            require("sample: tokens of the vocabulary", last, vocabulary)?;
            if let Some(first) = row.mask {
                require("sample: words of masks", first + vocabulary.div_ceil(64), self.masks.len())?;
            }
        }
        Ok(())
    }

    /// The token of a row of raw logits, of which all exist, where the largest logit is taken; `None` where a token is drawn,
    /// something is not a number or infinite, or nothing may come. `scratch` holds the changed logits.
    pub fn token(&self, row: &SampleRow, logits: &[f32], scratch: &mut Vec<f32>) -> Option<u32> {
        if row.draw.is_some() {
            return None;
        }
        if row.changes.is_empty() && row.mask.is_none() {
            return largest(logits).ok().map(|best| best.0);
        }
        if logits.iter().any(|logit| logit.is_nan()) {
            return None;
        }
        self.change(row, logits, scratch);
        largest(scratch).ok().map(|best| best.0)
    }

    /// Writes what changes and the mask make of a row of raw logits.
    pub fn change(&self, row: &SampleRow, logits: &[f32], scratch: &mut Vec<f32>) {
        scratch.clear();
        scratch.extend(logits);
        for change in &self.changes[row.changes.clone()] {
            if let Some(logit) = scratch.get_mut(change.token as usize) {
                *logit = change.apply(*logit);
            }
        }
        if let Some(first) = row.mask {
            for (logits, word) in scratch.chunks_mut(64).zip(&self.masks[first..]) {
                for (bit, logit) in logits.iter_mut().enumerate() {
                    if word >> bit & 1 == 0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

fn require(what: &'static str, needed: usize, available: usize) -> Result<()> {
    if needed <= available { Ok(()) } else { Err(Error::Capacity { what, needed, available }) }
}

/// Token and value of the largest logit, the first of equals.
///
/// # Errors
/// Says what is wrong with the logits: one is not a number, the largest is infinite, or all are minus infinity.
pub fn largest(logits: &[f32]) -> std::result::Result<(u32, f32), &'static str> {
    const LANES: usize = 16;
    // The maximum skips what is not a number, so that is looked for on its own; both loops are plain enough for vectors.
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut sound = true;
    let chunks = logits.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = if logit > *lane { logit } else { *lane };
            sound &= !logit.is_nan();
        }
    }
    let max = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |max, &logit| if logit > max { logit } else { max });
    if !sound || rest.iter().any(|logit| logit.is_nan()) {
        return Err("a logit is not a number; the weights are damaged or the computation overflowed");
    }
    if max == f32::INFINITY {
        return Err("a logit is infinite; the weights are damaged or the computation overflowed");
    }
    if max == f32::NEG_INFINITY {
        return Err(EXCLUDED);
    }
    let at = logits.iter().position(|&logit| logit >= max).unwrap_or(0);
    Ok((at as u32, max))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_come_before_masks_and_the_lower_of_equals_wins() {
        let change = |token, bias, repetition, minus| LogitChange { token, bias, repetition, minus };
        let samples = Samples {
            changes: vec![change(0, 0.0, 2.0, 0.25), change(2, 5.0, 1.0, 0.0), change(4, 100.0, 1.0, f32::INFINITY)],
            masks: vec![!(1 << 2)],
            rows: Vec::new(),
        };
        let logits = [4.0, 1.75, -4.0, 1.75, 3.0, -0.0, 0.0];
        let token =
            |changes, mask| samples.token(&SampleRow { row: 0, changes, mask, draw: None }, &logits, &mut Vec::new());
        assert_eq!(token(0..0, None), Some(0));
        assert_eq!(token(0..1, None), Some(4), "token 0 falls to 1.75");
        assert_eq!(token(0..3, None), Some(0), "token 4 is excluded, token 2 lifted to 1; 1.75 comes first at token 0");
        assert_eq!(token(1..2, Some(0)), Some(0), "what the mask excludes cannot be lifted");
        let masked = Samples { masks: vec![0b110_0000], ..Samples::default() };
        let row = SampleRow { row: 0, changes: 0..0, mask: Some(0), draw: None };
        assert_eq!(masked.token(&row, &logits, &mut Vec::new()), Some(5), "both zeros are equal");
    }

    #[test]
    fn what_does_not_exist_is_refused() {
        let row = SampleRow { row: 1, changes: 0..2, mask: Some(1), draw: None };
        let changes = vec![LogitChange::none(3), LogitChange::none(7)];
        let good = Samples { rows: vec![row], changes, masks: vec![0; 3] };
        good.check(2, 72, 70).unwrap();
        let wrong = |change: &dyn Fn(&mut Samples)| {
            let mut samples = good.clone();
            change(&mut samples);
            samples.check(2, 72, 70).unwrap_err().to_string()
        };
        assert!(good.check(2, 69, 70).unwrap_err().to_string().contains("columns"));
        assert!(good.check(1, 72, 70).unwrap_err().to_string().contains("rows of logits"));
        assert!(wrong(&|s| s.rows[0].changes = 1..3).contains("changes"));
        assert!(wrong(&|s| s.changes[1].token = 3).contains("ascending"));
        assert!(wrong(&|s| s.changes[1].token = 70).contains("vocabulary"));
        assert!(wrong(&|s| s.rows[0].mask = Some(2)).contains("masks"));
    }

    #[test]
    fn what_cannot_be_chosen_from_is_left_to_the_caller() {
        let plain = SampleRow { row: 0, changes: 0..0, mask: None, draw: None };
        let masked = SampleRow { mask: Some(0), ..plain.clone() };
        let samples = Samples { masks: vec![0], ..Samples::default() };
        for logits in [[0.0, f32::NAN], [f32::INFINITY, 0.0], [f32::NEG_INFINITY; 2]] {
            assert_eq!(samples.token(&plain, &logits, &mut Vec::new()), None);
            assert_eq!(samples.token(&masked, &logits, &mut Vec::new()), None);
        }
        assert_eq!(samples.token(&masked, &[1.0, 2.0], &mut Vec::new()), None);
    }

    #[test]
    fn damage_is_seen_anywhere() {
        for at in [0, 15, 16, 31, 32, 36] {
            let mut row = vec![1.0f32; 37];
            row[at] = f32::NAN;
            assert!(largest(&row).is_err(), "{at}");
            row[at] = f32::INFINITY;
            assert!(largest(&row).is_err(), "{at}");
        }
        assert!(largest(&[f32::NEG_INFINITY; 40]).is_err());
        assert!(largest(&[]).is_err());
        assert_eq!(largest(&[-0.0, 0.0]), Ok((0, -0.0)));
    }
}
