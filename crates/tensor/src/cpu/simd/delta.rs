//! Kernels of the delta rule: convolution, gates, state update, gated norm. One head, a block of rows.

use super::lanes::{Lanes, dot_lanes, exp, fma_scalar, inverse_rms, multiversion, sigmoid, silu};

/// Value columns of the state that are worked on together; `dim * COLUMNS` f32 stay in the first-level cache while a block
/// of rows passes.
pub(crate) const COLUMNS: usize = 64;

multiversion! {
    /// Causal depthwise convolution and SiLU: `out[t, c] = silu(sum_j taps[j, c] raw[t + j, c])`, `j` ascending, the last
    /// tap on the current row. `raw` is `[rows + taps - 1, width]`, `taps` `[taps, width]`, `out` `[rows, width]`.
    pub(crate) fn conv_silu(taps: &[f32], width: usize, raw: &[f32], out: &mut [f32]) {
        let kernel = taps.len() / width;
        for (t, out) in out.chunks_exact_mut(width).enumerate() {
            let (first, rest) = (&raw[t * width..][..width], &raw[(t + 1) * width..]);
            for ((o, w), x) in out.iter_mut().zip(&taps[..width]).zip(first) {
                *o = w * x;
            }
            for j in 1..kernel {
                let x = &rest[(j - 1) * width..][..width];
                for ((o, w), x) in out.iter_mut().zip(&taps[j * width..][..width]).zip(x) {
                    *o = w.mul_add(*x, *o);
                }
            }
            for o in out {
                *o = silu(*o);
            }
        }
    }
}

multiversion! {
    /// Decay factors of one row: `decay[d] = exp(bound * sigmoid(rate (f[d] + bias[d])))` with `rate = exp(A_log)`.
    pub(crate) fn decays(bound: f32, rate: f32, f: &[f32], bias: &[f32], decay: &mut [f32]) {
        for ((e, f), bias) in decay.iter_mut().zip(f).zip(bias) {
            *e = exp(bound * sigmoid(rate * (f + bias)));
        }
    }
}

multiversion! {
    /// `x * factor / sqrt(sum x^2 + 1e-6)` in place.
    pub(crate) fn normalize(factor: f32, x: &mut [f32]) {
        let scale = factor / (dot_lanes(x, x) + 1e-6).sqrt();
        for v in x {
            *v *= scale;
        }
    }
}

/// Rows of one head, prepared for the delta rule.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeltaRows<'a> {
    /// `[rows, 3, dim]`: q and k normalised, v.
    pub(crate) qkv: &'a [f32],
    /// `[rows, dim]`: `exp(g)`.
    pub(crate) decay: &'a [f32],
    /// `[rows]`.
    pub(crate) beta: &'a [f32],
    /// Width of the head.
    pub(crate) dim: usize,
}

multiversion! {
    /// The delta rule over the rows: `S = diag(decay) S; u = beta (v - S^T k); S = S + k u^T; o = S^T q`.
    ///
    /// `state` `[dim, dim]` becomes the state after the first `commit` rows; the rest continues on a copy. Writes `out` and
    /// `update` (the `u`), both `[rows, dim]`. `block` is scratch `[dim, COLUMNS]`. Columns do not depend on each other,
    /// and the sums over keys go up by key.
    pub(crate) fn delta(
        rows: &DeltaRows<'_>,
        commit: usize,
        state: &mut [f32],
        block: &mut [f32],
        update: &mut [f32],
        out: &mut [f32],
    ) {
        let dim = rows.dim;
        let block = block.as_chunks_mut::<COLUMNS>().0;
        for start in (0..dim).step_by(COLUMNS) {
            let width = COLUMNS.min(dim - start);
            load(state, dim, start, width, block);
            for (t, beta) in rows.beta.iter().enumerate() {
                if t == commit && commit > 0 {
                    store(state, dim, start, width, block);
                }
                let [q, k, v] = [0, 1, 2].map(|i| &rows.qkv[(3 * t + i) * dim..][..dim]);
                let decay = &rows.decay[t * dim..][..dim];
                let mut seen = [[0.0; 16]; COLUMNS / 16];
                for ((s, k), e) in block.iter_mut().zip(k).zip(decay) {
                    for (s, seen) in s.as_chunks_mut::<16>().0.iter_mut().zip(&mut seen) {
                        for s in &mut *s {
                            *s *= *e;
                        }
                        fma_scalar(seen, *k, s);
                    }
                }
                let mut u = [0.0; COLUMNS];
                for ((u, seen), v) in u.iter_mut().zip(seen.as_flattened()).zip(&v[start..start + width]) {
                    *u = beta * (v - seen);
                }
                let parts = u.as_chunks::<16>().0;
                let mut o = [[0.0; 16]; COLUMNS / 16];
                for ((s, k), q) in block.iter_mut().zip(k).zip(q) {
                    for ((s, u), o) in s.as_chunks_mut::<16>().0.iter_mut().zip(parts).zip(&mut o) {
                        fma_scalar(s, *k, u);
                        fma_scalar(o, *q, s);
                    }
                }
                update[t * dim + start..][..width].copy_from_slice(&u[..width]);
                out[t * dim + start..][..width].copy_from_slice(&o.as_flattened()[..width]);
            }
            if commit == rows.beta.len() {
                store(state, dim, start, width, block);
            }
        }
    }
}

#[inline(always)]
fn load(state: &[f32], dim: usize, start: usize, width: usize, block: &mut [[f32; COLUMNS]]) {
    for (b, s) in block.iter_mut().zip(state.chunks_exact(dim)) {
        b[..width].copy_from_slice(&s[start..start + width]);
        b[width..].fill(0.0);
    }
}

#[inline(always)]
fn store(state: &mut [f32], dim: usize, start: usize, width: usize, block: &[[f32; COLUMNS]]) {
    for (b, s) in block.iter().zip(state.chunks_exact_mut(dim)) {
        s[start..start + width].copy_from_slice(&b[..width]);
    }
}

multiversion! {
    /// Applies a record: `S = diag(decay) S + k u^T` with the operations of [`delta`], so that the state is the one that
    /// `delta` held after that row, bit for bit.
    pub(crate) fn fold(key: &[f32], decay: &[f32], update: &[f32], state: &mut [f32]) {
        let dim = update.len();
        for ((s, k), e) in state.chunks_exact_mut(dim).zip(key).zip(decay) {
            for (s, u) in s.iter_mut().zip(update) {
                *s = k.mul_add(*u, *s * *e);
            }
        }
    }
}

multiversion! {
    /// `out = o / rms(o) * weight * sigmoid(z)`.
    pub(crate) fn gated_norm(eps: f32, weight: &[f32], z: &[f32], o: &[f32], out: &mut [f32]) {
        let scale = inverse_rms(o, eps);
        for (((out, o), w), z) in out.iter_mut().zip(o).zip(weight).zip(z) {
            *out = o * scale * w * sigmoid(*z);
        }
    }
}

/// Kept so that the widths above stay whole registers.
const _: () = assert!(COLUMNS.is_multiple_of(size_of::<Lanes>() / size_of::<f32>()));
