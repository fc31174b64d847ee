//! The delta rule over a whole chunk as matrix products.
//!
//! With `G_i` the running sum of the log-decays inside the chunk (inclusive, by key channel) and `S` the state before it:
//!
//! - `P[i][j] = sum_d q_i k_j exp(G_i - G_j)` for `j <= i`, `A[i][j] = -beta_i sum_d k_i k_j exp(G_i - G_j)` for `j < i`,
//! - `u_i = beta_i (v_i - (k_i exp G_i)^T S) + sum_{j<i} A[i][j] u_j`,
//! - `o_i = (q_i exp G_i)^T S + sum_{j<=i} P[i][j] u_j`,
//! - `S' = diag(exp G_last) S + sum_j (k_j exp(G_last - G_j)) u_j^T`.
//!
//! `G` falls by up to 5 a row, so `exp(-G_j)` alone overflows after 17 rows. Only exponentials of differences that are not
//! positive are formed: inside a group of rows directly, between groups through the `G` at the start of the later group.

use super::BLOCK;
use crate::cpu::simd::{
    Isa,
    attend::{Keys, scores, weighted_sum},
    chunk::{decayed, decayed_products, exps, running_sum, subtract_scaled},
};

/// Rows within which differences are taken pair by pair.
const GROUP: usize = 16;

/// A chunk of one head, prepared.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chunk<'a> {
    /// `[BLOCK, 3, dim]`: q and k normalised, v.
    pub(super) qkv: &'a [f32],
    /// `[BLOCK]`.
    pub(super) beta: &'a [f32],
    /// Width of the head.
    pub(super) dim: usize,
}

/// Floats that [`Chunk::run`] works in.
pub(super) fn work_floats(dim: usize) -> usize {
    2 * BLOCK * BLOCK + 3 * BLOCK * dim + 2 * dim
}

impl Chunk<'_> {
    fn q(&self, i: usize) -> &[f32] {
        &self.qkv[3 * i * self.dim..][..self.dim]
    }

    fn k(&self, i: usize) -> &[f32] {
        &self.qkv[(3 * i + 1) * self.dim..][..self.dim]
    }

    fn v(&self, i: usize) -> &[f32] {
        &self.qkv[(3 * i + 2) * self.dim..][..self.dim]
    }

    /// Takes `state` over the chunk and writes its outputs `[BLOCK, dim]`. `g` `[BLOCK, dim]` holds the log-decays and is
    /// replaced by their running sums.
    pub(super) fn run(&self, isa: Isa, g: &mut [f32], work: &mut [f32], state: &mut [f32], out: &mut [f32]) {
        let dim = self.dim;
        let (a, rest) = work.split_at_mut(BLOCK * BLOCK);
        let (p, rest) = rest.split_at_mut(BLOCK * BLOCK);
        let (left, rest) = rest.split_at_mut(BLOCK * dim);
        let (right, rest) = rest.split_at_mut(BLOCK * dim);
        let (u, rest) = rest.split_at_mut(BLOCK * dim);
        let (zeros, decay) = rest.split_at_mut(dim);
        zeros.fill(0.0);
        running_sum(isa, dim, g);
        let g = &*g;
        self.within_groups(isa, g, a, p);
        self.between_groups(isa, g, left, right, a, p);

        // u = beta (v - (k exp G)^T S), then forward substitution.
        for i in 0..BLOCK {
            decayed(isa, self.k(i), &g[i * dim..][..dim], zeros, &mut left[i * dim..][..dim]);
        }
        u.fill(0.0);
        weighted_sum(isa, left, Keys::Dense(state), dim, dim, u);
        for i in 0..BLOCK {
            let (done, row) = u.split_at_mut(i * dim);
            let row = &mut row[..dim];
            subtract_scaled(isa, self.beta[i], self.v(i), row);
            let a = &mut a[i * BLOCK..][..i];
            for a in &mut *a {
                *a *= -self.beta[i];
            }
            weighted_sum(isa, a, Keys::Dense(done), i, dim, row);
        }

        // o = (q exp G)^T S + P u.
        for i in 0..BLOCK {
            decayed(isa, self.q(i), &g[i * dim..][..dim], zeros, &mut left[i * dim..][..dim]);
        }
        out.fill(0.0);
        weighted_sum(isa, left, Keys::Dense(state), dim, dim, out);
        for (i, out) in out.chunks_exact_mut(dim).enumerate() {
            weighted_sum(isa, &p[i * BLOCK..][..=i], Keys::Dense(u), i + 1, dim, out);
        }

        // S' = diag(exp G_last) S + (k exp(G_last - G))^T u, the left factor as [dim, BLOCK].
        let last = &g[(BLOCK - 1) * dim..][..dim];
        for j in 0..BLOCK {
            let line = &mut right[..dim];
            decayed(isa, self.k(j), last, &g[j * dim..][..dim], line);
            for (d, v) in line.iter().enumerate() {
                left[d * BLOCK + j] = *v;
            }
        }
        exps(isa, last, &mut decay[..dim]);
        for (line, decay) in state.chunks_exact_mut(dim).zip(&*decay) {
            for s in line {
                *s *= decay;
            }
        }
        weighted_sum(isa, left, Keys::Dense(u), BLOCK, dim, state);
    }

    /// Entries of `A` (without `-beta`) and `P` whose rows are in one group.
    fn within_groups(&self, isa: Isa, g: &[f32], a: &mut [f32], p: &mut [f32]) {
        let dim = self.dim;
        for i in 0..BLOCK {
            for j in i / GROUP * GROUP..=i {
                let (gi, gj) = (&g[i * dim..][..dim], &g[j * dim..][..dim]);
                let [kk, qk] = decayed_products(isa, self.k(i), self.q(i), self.k(j), gi, gj);
                a[i * BLOCK + j] = kk;
                p[i * BLOCK + j] = qk;
            }
        }
    }

    /// Entries whose rows are in different groups: with `R` the running sum before the later group,
    /// `exp(G_i - G_j) = exp(G_i - R) exp(R - G_j)`, both factors at most 1.
    fn between_groups(&self, isa: Isa, g: &[f32], left: &mut [f32], right: &mut [f32], a: &mut [f32], p: &mut [f32]) {
        let dim = self.dim;
        for start in (GROUP..BLOCK).step_by(GROUP) {
            let reference = &g[(start - 1) * dim..][..dim];
            for j in 0..start {
                decayed(isa, self.k(j), reference, &g[j * dim..][..dim], &mut right[j * dim..][..dim]);
            }
            for (i, line) in left.chunks_exact_mut(dim).take(2 * GROUP).enumerate() {
                let row = start + i % GROUP;
                let x = if i < GROUP { self.k(row) } else { self.q(row) };
                decayed(isa, x, &g[row * dim..][..dim], reference, line);
            }
            for (half, to) in [&mut *a, &mut *p].into_iter().enumerate() {
                let mut products = [0.0; GROUP * BLOCK];
                let products = &mut products[..GROUP * start];
                let left = &left[half * GROUP * dim..][..GROUP * dim];
                scores(isa, left, Keys::Dense(right), start, dim, 1.0, products);
                for (i, line) in products.chunks_exact(start).enumerate() {
                    to[(start + i) * BLOCK..][..start].copy_from_slice(line);
                }
            }
        }
    }
}
