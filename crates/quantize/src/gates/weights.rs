//! The numbers of one packed matrix: scales, codes, dequantized values, and their distance from the source.
//!
//! A code `q` in `[-8, 7]` is stored as the nibble `u = q + 8`; byte `c / 2` of a row holds column `c` in its low nibble
//! when `c` is even, in its high nibble when it is odd. A weight is `bf16(scale * q)`. One pass over the matrix collects
//! everything that the gates ask; sums run in f64 per row, so results do not depend on how matrices are spread over threads.

use glimmer_checkpoint::{DType, int4};
use half::{bf16, f16};

/// A packed matrix in memory.
#[derive(Debug)]
pub(super) struct Packed {
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Columns that share a scale; divides `cols`, even.
    pub(super) group: usize,
    /// `[rows, cols / 2]` bytes, two codes each.
    pub(super) codes: Vec<u8>,
    /// `[rows, cols / group]`.
    pub(super) scales: Vec<f32>,
}

/// What is wrong with a scale by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScaleFault {
    /// NaN or infinite.
    NotFinite,
    /// Zero, minus zero or negative.
    NotPositive,
    /// [`int4::ZERO_GROUP_SCALE`] on a group whose codes are not all zero and yet far from their range.
    Idle,
}

/// Findings of one pass over a matrix.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// How often each nibble occurs.
    pub(super) histogram: [u64; 16],
    /// The first scale that is wrong by itself (row, group), and how many there are.
    pub(super) scale_fault: Option<(usize, usize, ScaleFault)>,
    pub(super) scale_faults: u64,
    /// All scales are equal, and there are at least two.
    pub(super) all_equal: bool,
    /// The first group with a dequantized value that is not finite.
    pub(super) not_finite: Option<(usize, usize)>,
    /// Groups whose codes do not come back from their dequantized values, and the first of them.
    pub(super) recoded: u64,
    pub(super) first_recoded: Option<(usize, usize)>,
    /// Comparison with the source.
    pub(super) against: Option<Against>,
}

/// A matrix against its source.
#[derive(Debug, Default, Clone)]
pub(super) struct Against {
    /// `|W' - W| / |W|` (Frobenius); 0 when both are zero, infinite when only the source is.
    pub(super) relative_error: f64,
    /// Cosine of the angle between W' and W.
    pub(super) cosine: f64,
    /// Mean of `(w' - w) / scale`: 0 for a sound rounding, about 1 for a code offset that is off by one.
    pub(super) bias: f64,
    /// The row with the smallest cosine.
    pub(super) worst_row: usize,
    pub(super) worst_row_cosine: f64,
    /// The first group whose scale does not fit its largest weight (row, group, `scale * 7.5 / absmax`), and how many.
    pub(super) misfit: Option<(usize, usize, f64)>,
    pub(super) misfits: u64,
    /// The first group with all codes zero although its largest weight is at least half a step, and how many.
    pub(super) lost: Option<(usize, usize)>,
    pub(super) lost_groups: u64,
    /// The source is all zero.
    pub(super) zero_source: bool,
}

impl Packed {
    fn groups(&self) -> usize {
        self.cols / self.group
    }

    fn group_codes(&self, row: usize, group: usize) -> &[u8] {
        let start = (row * self.cols + group * self.group) / 2;
        &self.codes[start..start + self.group / 2]
    }

    /// Dequantized row.
    pub(super) fn row(&self, row: usize, out: &mut Vec<f32>) {
        out.clear();
        for group in 0..self.groups() {
            let values = table(self.scales[row * self.groups() + group]);
            for &byte in self.group_codes(row, group) {
                out.push(values[usize::from(byte & 15)]);
                out.push(values[usize::from(byte >> 4)]);
            }
        }
    }

    /// One pass; `source` is `[rows, cols]`.
    pub(super) fn scan(&self, source: Option<&[f32]>, recode: bool) -> Scan {
        let groups = self.groups();
        let mut scan = Scan {
            all_equal: self.scales.len() > 1 && self.scales.windows(2).all(|p| p[0].to_bits() == p[1].to_bits()),
            ..Scan::default()
        };
        let mut against = Against { worst_row_cosine: f64::INFINITY, zero_source: true, ..Against::default() };
        let (mut error, mut norm, mut dot, mut norm_q, mut bias) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for row in 0..self.rows {
            let (mut row_dot, mut row_norm, mut row_norm_q) = (0.0, 0.0, 0.0);
            for group in 0..groups {
                let scale = self.scales[row * groups + group];
                let values = table(scale);
                let codes = self.group_codes(row, group);
                let mut count = [0_u32; 16];
                for &byte in codes {
                    count[usize::from(byte & 15)] += 1;
                    count[usize::from(byte >> 4)] += 1;
                }
                scan.note_group(row, group, scale, &values, &count, recode);
                let Some(source) = source else { continue };
                let start = row * self.cols + group * self.group;
                let sums = Sums::new(codes, &values, &source[start..start + self.group]);
                against.note_group(row, group, scale, &sums, count[8] as usize == self.group);
                error += sums.error;
                bias += sums.difference / f64::from(scale);
                row_dot += sums.dot;
                row_norm += sums.norm;
                row_norm_q += sums.norm_q;
            }
            let cosine = row_dot / (row_norm * row_norm_q).sqrt();
            if row_norm > 0.0 && (cosine.is_nan() || cosine < against.worst_row_cosine) {
                (against.worst_row, against.worst_row_cosine) = (row, cosine);
            }
            dot += row_dot;
            norm += row_norm;
            norm_q += row_norm_q;
        }
        if source.is_some() {
            against.relative_error = match (norm > 0.0, error > 0.0) {
                (true, _) => (error / norm).sqrt(),
                (false, true) => f64::INFINITY,
                (false, false) => 0.0,
            };
            against.cosine = if norm > 0.0 { dot / (norm * norm_q).sqrt() } else { 1.0 };
            against.bias = bias / (self.rows * self.cols).max(1) as f64;
            scan.against = Some(against);
        }
        scan
    }
}

impl Scan {
    fn note_group(
        &mut self,
        row: usize,
        group: usize,
        scale: f32,
        values: &[f32; 16],
        count: &[u32; 16],
        recode: bool,
    ) {
        for (total, &n) in self.histogram.iter_mut().zip(count) {
            *total += u64::from(n);
        }
        let used = |u: usize| count[u] > 0;
        let all_zero = (0..16).all(|u| u == 8 || !used(u));
        // A group that owns its scale reaches at least code 5 (the scale is at most absmax / 5.36); one that was given the
        // zero group's scale by accident does not.
        let reaches = (0..16).any(|u| used(u) && u.abs_diff(8) >= 4);
        let fault = if !scale.is_finite() {
            Some(ScaleFault::NotFinite)
        } else if scale <= 0.0 {
            Some(ScaleFault::NotPositive)
        } else if bf16::from_f32(scale) == int4::ZERO_GROUP_SCALE && !all_zero && !reaches {
            Some(ScaleFault::Idle)
        } else {
            None
        };
        if let Some(fault) = fault {
            self.scale_faults += 1;
            self.scale_fault.get_or_insert((row, group, fault));
            return;
        }
        if (0..16).any(|u| used(u) && !values[u].is_finite()) {
            self.not_finite.get_or_insert((row, group));
        } else if recode && (0..16).any(|u| used(u) && code_of(values[u], scale) != u) {
            self.recoded += 1;
            self.first_recoded.get_or_insert((row, group));
        }
    }
}

impl Against {
    fn note_group(&mut self, row: usize, group: usize, scale: f32, sums: &Sums, all_zero: bool) {
        // A zero source group may carry any scale, and codes too: GPTQ moves the error of other columns into it.
        let absmax = f64::from(sums.absmax);
        self.zero_source &= sums.absmax == 0.0;
        if absmax > 0.0 {
            let ratio = f64::from(scale) * 7.5 / absmax;
            if !(0.6..=1.4).contains(&ratio) {
                self.misfits += 1;
                self.misfit.get_or_insert((row, group, ratio));
            }
        }
        if all_zero && absmax >= f64::from(scale) / 2.0 {
            self.lost_groups += 1;
            self.lost.get_or_insert((row, group));
        }
    }
}

/// Sums over a group.
struct Sums {
    absmax: f32,
    error: f64,
    difference: f64,
    dot: f64,
    norm: f64,
    norm_q: f64,
}

impl Sums {
    fn new(codes: &[u8], values: &[f32; 16], source: &[f32]) -> Self {
        let (mut absmax, mut error, mut difference, mut dot, mut norm, mut norm_q) =
            (0.0_f32, 0.0_f32, 0.0_f32, 0.0_f32, 0.0_f32, 0.0_f32);
        for (&byte, pair) in codes.iter().zip(source.as_chunks::<2>().0) {
            for (nibble, &w) in [byte & 15, byte >> 4].into_iter().zip(pair) {
                let v = values[usize::from(nibble)];
                absmax = absmax.max(w.abs());
                error += (v - w) * (v - w);
                difference += v - w;
                dot += v * w;
                norm += w * w;
                norm_q += v * v;
            }
        }
        Self {
            absmax,
            error: error.into(),
            difference: difference.into(),
            dot: dot.into(),
            norm: norm.into(),
            norm_q: norm_q.into(),
        }
    }
}

/// The sixteen values of a group.
fn table(scale: f32) -> [f32; 16] {
    std::array::from_fn(|u| bf16::from_f32(scale * (u as f32 - 8.0)).to_f32())
}

/// The nibble of a dequantized value: divide, clamp, round half to even, add the offset. Values below the normal
/// range of f32 count as zero, as they do in kernels that flush them.
fn code_of(value: f32, scale: f32) -> usize {
    let flush = |x: f32| if x.is_subnormal() { 0.0 } else { x };
    let quotient = flush(value) / flush(scale);
    let code = quotient.clamp(-8.0, 7.0).round_ties_even() + 8.0;
    // NaN (0 / 0) saturates to 0 and so counts as changed unless the nibble was 0.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "in 0..=15 by the clamp above")]
    let nibble = code as usize;
    nibble
}

/// Widens stored floats; `None` for other dtypes.
pub(super) fn widen(dtype: DType, bytes: &[u8]) -> Option<Vec<f32>> {
    Some(match dtype {
        DType::Bf16 => bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        DType::F16 => bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        DType::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(scale: f32, nibble: impl Fn(usize) -> u8) -> Packed {
        let codes = (0..64).map(|b| nibble(2 * b) | nibble(2 * b + 1) << 4).collect();
        Packed { rows: 1, cols: 128, group: 128, codes, scales: vec![scale] }
    }

    #[test]
    fn every_code_survives_a_round_trip_with_a_normal_scale() {
        for scale in [2.0_f32.powi(-120), 0.0078125, 0.1, 3.0, 1e30] {
            let scale = bf16::from_f32(scale).to_f32();
            let scan = packed(scale, |c| (c % 16) as u8).scan(None, true);
            assert_eq!((scan.recoded, scan.scale_faults), (0, 0), "{scale}");
            assert_eq!(scan.histogram, [8; 16]);
        }
    }

    #[test]
    fn a_subnormal_scale_does_not_survive() {
        let scan = packed(2.0_f32.powi(-130), |c| (c % 16) as u8).scan(None, true);
        assert_eq!(scan.first_recoded, Some((0, 0)));
    }

    #[test]
    fn an_overflowing_scale_is_not_finite() {
        let scan = packed(bf16::MAX.to_f32(), |c| (c % 16) as u8).scan(None, true);
        assert_eq!(scan.not_finite, Some((0, 0)));
    }

    #[test]
    fn low_nibble_is_the_even_column() {
        let mut row = Vec::new();
        packed(1.0, |c| if c % 2 == 0 { 15 } else { 0 }).row(0, &mut row);
        assert_eq!(row[..4], [7.0, -8.0, 7.0, -8.0]);
    }

    #[test]
    fn an_offset_of_seven_shows_as_bias() {
        let truth = packed(0.5, |c| (2 + c % 13) as u8);
        let mut source = Vec::new();
        truth.row(0, &mut source);
        let shifted = packed(0.5, |c| (1 + c % 13) as u8);
        let bias = |p: &Packed| p.scan(Some(&source), false).against.expect("a source was given").bias;
        assert!(bias(&truth).abs() < 1e-6 && (bias(&shifted) + 1.0).abs() < 1e-6);
    }

    #[test]
    fn epsilon_scale_is_for_zero_groups_or_groups_that_use_their_range() {
        let fault = |nibble: &dyn Fn(usize) -> u8| {
            packed(int4::ZERO_GROUP_SCALE.to_f32(), nibble).scan(None, false).scale_fault
        };
        assert_eq!(fault(&|_| 8), None, "an all-zero group");
        assert_eq!(fault(&|c| (c % 16) as u8), None, "a group that happens to have this scale");
        assert_eq!(fault(&|c| (8 + c % 2) as u8), Some((0, 0, ScaleFault::Idle)));
    }
}
