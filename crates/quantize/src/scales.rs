//! Scales of the 4-bit grid, one for each row and group of columns.
//!
//! All rules return bfloat16 values, because that is what the artifact stores: a weight is always quantized against the
//! stored scale. An all-zero group gets [`ZERO_GROUP_SCALE`].

use glimmer_checkpoint::int4::ZERO_GROUP_SCALE;
use glimmer_tensor::cpu::simd::{Isa, Kernel, Simd};
use half::bf16;

use crate::real::{MAX_CODE, MIN_CODE, Real, round_bf16};

/// How scales are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScaleRule {
    /// `A / 7.5` with `A` the largest magnitude of the group.
    Minmax,
    /// llm-compressor's `mse` observer: ranges shrunk by up to 19 %, error `|e|^2.4`, all in bfloat16 arithmetic.
    Mse,
    /// Weighted squared error over `A / d`, `d = 6.0, 6.1, ..., 10.0`, in f32; the weights are the inputs' second moments.
    Imse,
}

/// Scales of `w` `[rows, cols]`: `[rows, cols / group]`.
///
/// `importance` `[cols]` weighs the columns' squared errors under [`ScaleRule::Imse`] (all equal when absent); the other
/// rules ignore it.
///
/// # Panics
/// When `cols` is no multiple of `group`: the pipeline refuses such a matrix before any work.
pub fn scales(rule: ScaleRule, w: &[f32], cols: usize, group: usize, importance: Option<&[f32]>) -> Vec<bf16> {
    assert!(group > 0 && cols.is_multiple_of(group), "columns come in whole groups");
    match rule {
        ScaleRule::Minmax => w.chunks_exact(group).map(|g| from_range(largest(g))).collect(),
        ScaleRule::Mse => shrinking_ranges(w, group),
        ScaleRule::Imse => {
            let uniform;
            let importance = match importance {
                Some(i) => i,
                None => {
                    uniform = vec![1.0; cols];
                    &uniform
                }
            };
            Isa::best().run(Search { w, importance, group })
        }
    }
}

/// Largest magnitude.
#[inline(always)]
fn largest(group: &[f32]) -> f32 {
    group.iter().fold(0.0f32, |a, &x| if x.abs() > a { x.abs() } else { a })
}

/// The min-max scale of a range `-a..a`.
fn from_range(a: f32) -> bf16 {
    let s = bf16::from_f32(a / 7.5);
    if s.to_f32() > 0.0 { s } else { ZERO_GROUP_SCALE }
}

/// The `mse` observer. The number of ranges tried depends on the whole tensor: the search stops after five ranges in a row
/// that improve no group.
fn shrinking_ranges(w: &[f32], group: usize) -> Vec<bf16> {
    const STEPS: u32 = 20;
    const PATIENCE: u32 = 5;
    /// 2.4, which bfloat16 arithmetic turns into this.
    const EXPONENT: f64 = 2.406_25;
    let groups = w.len() / group;
    let full: Vec<f32> = w.chunks_exact(group).map(largest).collect();
    let mut best = vec![f32::INFINITY; groups];
    let mut range = full.clone();
    let mut idle = 0;
    for step in 0..STEPS {
        let shrink = (1.0 - f64::from(step) / 100.0) as f32;
        let mut improved = false;
        for (i, g) in w.chunks_exact(group).enumerate() {
            let a = round_bf16(full[i] * shrink);
            let s = from_range(a).to_f32();
            let mut sum = 0.0f32;
            for &x in g {
                let q = round_bf16(round_bf16(x / s).code(1.0) * s);
                let e = round_bf16(q - x).abs();
                sum += round_bf16(f64::from(e).powf(EXPONENT) as f32);
            }
            let error = round_bf16(sum);
            if error < best[i] {
                (best[i], range[i], improved) = (error, a, true);
            }
        }
        idle = if improved { 0 } else { idle + 1 };
        if idle >= PATIENCE {
            break;
        }
    }
    range.into_iter().map(from_range).collect()
}

/// Lanes of an error sum; a fixed number makes the order of additions a definition.
const LANES: usize = 16;

/// The weighted search over all groups of a matrix.
struct Search<'a> {
    w: &'a [f32],
    importance: &'a [f32],
    group: usize,
}

impl Kernel for Search<'_> {
    type Output = Vec<bf16>;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> Vec<bf16> {
        let mut scales = Vec::with_capacity(self.w.len() / self.group);
        for row in self.w.chunks_exact(self.importance.len()) {
            for (g, h) in row.chunks_exact(self.group).zip(self.importance.chunks_exact(self.group)) {
                scales.push(weighted_search(g, h));
            }
        }
        scales
    }
}

/// The candidate `A / d` with the least weighted squared error; the first of equals.
#[inline(always)]
fn weighted_search(g: &[f32], h: &[f32]) -> bf16 {
    let a = largest(g);
    let mut best = (f32::INFINITY, from_range(a));
    for tenths in 60..=100u16 {
        let s = bf16::from_f32(a * 10.0 / f32::from(tenths));
        // Smaller ones have no finite inverse.
        if s.to_f32() < f32::MIN_POSITIVE {
            continue;
        }
        let error = weighted_error(g, h, s.to_f32());
        if error < best.0 {
            best = (error, s);
        }
    }
    best.1
}

/// `sum h (w - s q(w / s))^2` for a scale above zero. The quotient is a product with `1 / s`: a tie that falls to the other
/// side has the same error to rounding.
#[inline(always)]
fn weighted_error(g: &[f32], h: &[f32], s: f32) -> f32 {
    let (low, high) = (f32::from(MIN_CODE), f32::from(MAX_CODE));
    let inverse = 1.0 / s;
    let term = |x: f32, h: f32| {
        let q = x * inverse;
        let q = if q < low { low } else { q };
        let q = if q > high { high } else { q };
        let q = (q + f32::ROUNDER) - f32::ROUNDER;
        let e = x - s * q;
        h * (e * e)
    };
    let mut lanes = [0.0f32; LANES];
    let (gc, hc) = (g.chunks_exact(LANES), h.chunks_exact(LANES));
    for (l, (&x, &h)) in lanes.iter_mut().zip(gc.remainder().iter().zip(hc.remainder())) {
        *l += term(x, h);
    }
    for (g, h) in gc.zip(hc) {
        for ((l, &x), &h) in lanes.iter_mut().zip(g).zip(h) {
            *l += term(x, h);
        }
    }
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(n: usize) -> Vec<f32> {
        (0..n).map(|i| round_bf16(f32::sin(i as f32 * 1.7) * f32::cos((i * i) as f32 * 0.31))).collect()
    }

    #[test]
    fn minmax_maps_the_largest_magnitude_to_seven_and_a_half() {
        let mut w = weights(256);
        w[5] = -3.0;
        let s = scales(ScaleRule::Minmax, &w, 256, 128, None);
        assert_eq!(s[0], bf16::from_f32(0.4));
    }

    #[test]
    fn a_group_of_zeros_gets_the_spacing_of_one_under_every_rule() {
        for rule in [ScaleRule::Minmax, ScaleRule::Mse, ScaleRule::Imse] {
            let s = scales(rule, &[0.0; 128], 128, 128, Some(&[1.0; 128]));
            assert_eq!(s, vec![ZERO_GROUP_SCALE]);
            let tiny = scales(rule, &[1.0e-41; 128], 128, 128, Some(&[1.0; 128]));
            assert!(tiny[0].to_f32() > 0.0 && tiny[0].is_finite());
        }
    }

    #[test]
    fn the_search_never_loses_to_minmax_and_obeys_its_weights() {
        let w = weights(128 * 8);
        let h: Vec<f32> = (0..128).map(|i| if i % 7 == 0 { 50.0 } else { 0.1 }).collect();
        let found = scales(ScaleRule::Imse, &w, 128, 128, Some(&h));
        let flat = scales(ScaleRule::Imse, &w, 128, 128, None);
        let plain = scales(ScaleRule::Minmax, &w, 128, 128, None);
        assert_ne!(found, flat, "weights matter");
        for (i, g) in w.chunks(128).enumerate() {
            let error = |s: bf16, h: &[f32]| weighted_error(g, h, s.to_f32());
            assert!(error(found[i], &h) <= error(plain[i], &h));
            assert!(error(found[i], &h) <= error(flat[i], &h));
            assert!(error(flat[i], &[1.0; 128]) <= error(found[i], &[1.0; 128]));
            let bound = found[i].to_f32() * 7.5 / largest(g);
            assert!((0.74..=1.26).contains(&bound), "{bound}");
        }
    }
}
