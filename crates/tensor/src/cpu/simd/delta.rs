//! Kernels of the delta rule: convolution, gates, state update, gated norm. One head, a block of rows.

use super::lanes::{LANES, Lanes, dot_lanes, fma_scalar, inverse_rms, multiversion};
use super::math::{exp, sigmoid, silu};

/// Value columns of the state that are worked on together; `dim * COLUMNS` f32 stay in the first-level cache while a block
/// of rows passes.
pub(crate) const COLUMNS: usize = 64;

/// A line of the tile.
type Columns = [f32; COLUMNS];

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
    /// Log-decays of one row: `g[d] = bound sigmoid(rate (f[d] + bias[d]))` with `rate = exp(A_log)`.
    pub(crate) fn log_decays(bound: f32, rate: f32, f: &[f32], bias: &[f32], g: &mut [f32]) {
        for ((g, f), bias) in g.iter_mut().zip(f).zip(bias) {
            *g = bound * sigmoid(rate * (f + bias));
        }
    }
}

multiversion! {
    /// `x = exp(x)`.
    pub(crate) fn exp_in_place(x: &mut [f32]) {
        for x in x {
            *x = exp(*x);
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
        let tile = &mut block.as_chunks_mut::<COLUMNS>().0[..dim];
        for start in (0..dim).step_by(COLUMNS) {
            let width = COLUMNS.min(dim - start);
            load(state, dim, start, width, tile);
            for (t, &beta) in rows.beta.iter().enumerate() {
                if t == commit && commit > 0 {
                    store(state, dim, start, width, tile);
                }
                let (q, rest) = rows.qkv[3 * t * dim..][..3 * dim].split_at(dim);
                let (k, v) = rest.split_at(dim);
                let seen = decay_and_read(tile, &rows.decay[t * dim..][..dim], k);
                let mut u = [0.0; COLUMNS];
                for ((u, seen), v) in u.iter_mut().zip(seen).zip(&v[start..start + width]) {
                    *u = beta * (v - seen);
                }
                let o = write_and_read(tile, &u, k, q);
                put(&u, &mut update[t * dim + start..][..width]);
                put(&o, &mut out[t * dim + start..][..width]);
            }
            if commit == rows.beta.len() {
                store(state, dim, start, width, tile);
            }
        }
    }
}

/// `S = diag(decay) S`, then `S^T k`. Lanes are copied in and out, so that the sums stay in registers.
#[inline(always)]
fn decay_and_read(tile: &mut [Columns], decay: &[f32], k: &[f32]) -> Columns {
    let mut acc = [[0.0; LANES]; COLUMNS / LANES];
    for ((s, &e), &k) in tile.iter_mut().zip(decay).zip(k) {
        let s = s.as_chunks_mut::<LANES>().0;
        for i in 0..COLUMNS / LANES {
            let mut v = s[i];
            for v in &mut v {
                *v *= e;
            }
            fma_scalar(&mut acc[i], k, &v);
            s[i] = v;
        }
    }
    flat(&acc)
}

/// `S = S + k u^T`, then `S^T q`.
#[inline(always)]
fn write_and_read(tile: &mut [Columns], u: &Columns, k: &[f32], q: &[f32]) -> Columns {
    let mut acc = [[0.0; LANES]; COLUMNS / LANES];
    let u = u.as_chunks::<LANES>().0;
    let mut parts = [[0.0; LANES]; COLUMNS / LANES];
    parts.copy_from_slice(u);
    for ((s, &k), &q) in tile.iter_mut().zip(k).zip(q) {
        let s = s.as_chunks_mut::<LANES>().0;
        for i in 0..COLUMNS / LANES {
            let mut v = s[i];
            fma_scalar(&mut v, k, &parts[i]);
            fma_scalar(&mut acc[i], q, &v);
            s[i] = v;
        }
    }
    flat(&acc)
}

#[inline(always)]
fn flat(acc: &[Lanes; COLUMNS / LANES]) -> Columns {
    let mut flat = [0.0; COLUMNS];
    flat.copy_from_slice(acc.as_flattened());
    flat
}

#[inline(always)]
fn load(state: &[f32], dim: usize, start: usize, width: usize, tile: &mut [Columns]) {
    for (b, s) in tile.iter_mut().zip(state.chunks_exact(dim)) {
        let s = &s[start..start + width];
        if let Ok(whole) = s.try_into() {
            *b = whole;
        } else {
            b[..width].copy_from_slice(s);
            b[width..].fill(0.0);
        }
    }
}

#[inline(always)]
fn store(state: &mut [f32], dim: usize, start: usize, width: usize, tile: &[Columns]) {
    for (b, s) in tile.iter().zip(state.chunks_exact_mut(dim)) {
        put(b, &mut s[start..start + width]);
    }
}

/// Writes the first columns, as many as `to` has. A whole line has a length that the compiler knows: it goes in registers,
/// without a call.
#[inline(always)]
fn put(from: &Columns, to: &mut [f32]) {
    if let Ok(whole) = <&mut Columns>::try_from(&mut *to) {
        *whole = *from;
    } else {
        let width = to.len();
        to.copy_from_slice(&from[..width]);
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

// A tile is whole registers wide.
const _: () = assert!(COLUMNS.is_multiple_of(LANES));
