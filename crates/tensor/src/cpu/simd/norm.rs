//! Norms of a row with the sums of all other kernels.

use super::lanes::{inverse_rms, multiversion, sum_lanes};

multiversion! {
    /// RMSNorm: `out = x / sqrt(mean(x^2) + eps) * weight`.
    pub(crate) fn rms_norm(eps: f32, weight: &[f32], x: &[f32], out: &mut [f32]) {
        let scale = inverse_rms(x, eps);
        for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
            *out = x * scale * w;
        }
    }
}

multiversion! {
    /// LayerNorm: `out = (x - mean) / sqrt(variance + eps) * weight + bias`.
    pub(crate) fn layer_norm(eps: f32, weight: &[f32], bias: &[f32], x: &[f32], out: &mut [f32]) {
        let mean = sum_lanes(x) / x.len() as f32;
        for (out, x) in out.iter_mut().zip(x) {
            *out = x - mean;
        }
        let scale = inverse_rms(out, eps);
        for ((out, w), b) in out.iter_mut().zip(weight).zip(bias) {
            *out = (*out * scale).mul_add(*w, *b);
        }
    }
}
