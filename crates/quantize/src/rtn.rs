//! Round to nearest: every weight to the nearest code of its scale.

use half::bf16;

use crate::real::Real;

/// Codes of `w` `[rows, cols]` at `scales` `[rows, cols / group]`; the quotient is formed in f32.
pub fn round(w: &[f32], scales: &[bf16], group: usize) -> Vec<i8> {
    let mut codes = Vec::with_capacity(w.len());
    for (g, s) in w.chunks_exact(group).zip(scales) {
        let s = s.to_f32();
        codes.extend(g.iter().map(|&x| x.code(s) as i8));
    }
    codes
}

/// The weights that codes and scales stand for: `s * q`, rounded once to bfloat16.
pub fn dequantize(codes: &[i8], scales: &[bf16], group: usize) -> Vec<f32> {
    let mut w = Vec::with_capacity(codes.len());
    for (g, s) in codes.chunks_exact(group).zip(scales) {
        let s = s.to_f32();
        w.extend(g.iter().map(|&q| (f32::from(q) * s).to_bf16()));
    }
    w
}
