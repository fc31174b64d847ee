//! Manifold-constrained hyper-connections (mHC): several residual streams, mixed by small matrices that each row computes
//! for itself.
//!
//! With `x` the concatenation of the `n` streams and `m = W x / rms(x)`:
//!
//! - `pre[i] = sigmoid(m[i] scale[0] + base[i]) + eps`: weights of the streams in the sub-block's input `u`,
//! - `post[i] = 2 sigmoid(m[n + i] scale[1] + base[n + i])`: weights of the sub-block's output in the streams,
//! - `C[i][j] = softmax_j(m[2n + n i + j] scale[2] + base[2n + n i + j]) + eps`, then made doubly stochastic (Sinkhorn):
//!   columns first and last, `iters` times, rows in between, every division by `sum + eps`,
//! - after the sub-block: `S'[j] = post[j] y + sum_i C[i][j] S[i]`, old stream `i`, new stream `j`.
//!
//! Two epsilons: `rms_eps` under the root of the RMS, `eps` everywhere else. Everything is f32.

use super::{
    Chunks, Cpu, CpuBuffer, CpuMatrix, Panels,
    simd::{
        stored::{Weights, dots},
        streams::{MAX_STREAMS, Mixing, coefficients, collapse, merge, sum_of_squares},
    },
    types::{require, require_equal},
};
use crate::{Error, MhcWeights, Norm, Result, Streams};

/// Most coefficients of a row.
pub(super) const MAX_COEFFICIENTS: usize = 2 * MAX_STREAMS + MAX_STREAMS * MAX_STREAMS;

/// Rows of a task of the mixing product.
const ROWS: usize = 4;

/// Coefficients of a task of the mixing product, when there are few rows.
const COEFFICIENTS: usize = 4;

/// The mixing step of the previous sub-block, then this mixer and the norm.
pub(super) fn mhc(
    cpu: &mut Cpu,
    rows: usize,
    mixer: &MhcWeights<Cpu>,
    norm: &Norm<Cpu>,
    y: Option<&CpuBuffer>,
    streams: &mut Streams<Cpu>,
    x: &mut CpuBuffer,
) -> Result<()> {
    let n = mixer.streams;
    let width = checked(n, rows, norm, y, streams)?;
    x.require("mhc: the normed input", rows, width)?;
    require_equal("mhc: columns of the mixing matrix", n * width, mixer.mix.columns())?;
    require_equal("mhc: rows of the mixing matrix", 2 * n + n * n, mixer.mix.out())?;
    require_equal("mhc: base", 2 * n + n * n, mixer.base.len())?;
    require_equal("mhc: scale", 3, mixer.scale.len())?;
    let mix = stored("mhc: mixing matrix", &mixer.mix)?;
    let isa = cpu.isa;
    let mixing = Mixing {
        base: mixer.base.as_slice(),
        scale: mixer.scale.as_slice(),
        eps: mixer.eps,
        iters: mixer.sinkhorn_iters,
    };
    merge_rows(cpu, rows, n, y, streams);
    let count = 2 * n + n * n;
    mix_rows(cpu, rows, mix, count, n * width, &streams.x)?;

    let (x_width, collapsed_width) = (x.width(), streams.collapsed.width());
    let (source, products) = (&streams.x, cpu.mixes.as_slice());
    let outputs = (
        Chunks::new(&mut streams.post.as_mut_slice()[..rows * n], n),
        Chunks::new(&mut streams.comb.as_mut_slice()[..rows * n * n], n * n),
        Chunks::new(&mut streams.collapsed.as_mut_slice()[..rows * collapsed_width], collapsed_width),
        Chunks::new(&mut x.as_mut_slice()[..rows * x_width], x_width),
    );
    cpu.pool.split(outputs, |row, (post, comb, collapsed, x), _| {
        let s = source.row(row);
        let mut pre = [0.0; MAX_STREAMS];
        let mut m = [0.0; MAX_COEFFICIENTS];
        let scale = 1.0 / (sum_of_squares(isa, s) / s.len() as f32 + mixer.rms_eps).sqrt();
        for (m, product) in m.iter_mut().zip(&products[row * count..][..count]) {
            *m = product * scale;
        }
        coefficients(isa, mixing, &m[..count], &mut pre[..n], post, comb);
        let u = &mut collapsed[..width];
        collapse(isa, &pre[..n], s, u);
        isa.rms_norm(u, norm.weight.as_slice(), norm.eps, &mut x[..width]);
    });
    Ok(())
}

/// `W x` of every row into the device's `mixes`, `[rows, count]`. Few rows are split by coefficients, many by rows, so that
/// the threads share the work and a weight serves several rows.
fn mix_rows(cpu: &mut Cpu, rows: usize, mix: Weights<'_>, count: usize, inner: usize, x: &CpuBuffer) -> Result<()> {
    let isa = cpu.isa;
    cpu.mixes.grow("mixing products", rows * count)?;
    let products = &mut cpu.mixes.as_mut_slice()[..rows * count];
    if rows < ROWS * cpu.pool.threads() {
        let panels = Panels::new(products, rows, count, 0, count, COEFFICIENTS);
        cpu.pool.split(panels, |_, mut panel, scratch| {
            let (first, width) = (panel.start(), panel.width());
            let [products] = scratch.floats([rows * width]);
            let weights = mix.rows(first, width, inner);
            dots(isa, weights, width, inner, &x.as_slice()[..rows * inner], products, width);
            for (row, products) in products.chunks_exact(width).enumerate() {
                panel.row_mut(row).copy_from_slice(products);
            }
        });
    } else {
        cpu.pool.split(Chunks::new(products, ROWS * count), |task, products, _| {
            let x = &x.as_slice()[task * ROWS * inner..][..products.len() / count * inner];
            dots(isa, mix, count, inner, x, products, count);
        });
    }
    Ok(())
}

/// The last mixing step, then the norm of the mean stream.
pub(super) fn mhc_head(
    cpu: &mut Cpu,
    rows: usize,
    norm: &Norm<Cpu>,
    y: &CpuBuffer,
    streams: &mut Streams<Cpu>,
    hidden: &mut CpuBuffer,
) -> Result<()> {
    let n = streams.post.width();
    let width = checked(n, rows, norm, Some(y), streams)?;
    hidden.require("mhc_head: the hidden states", rows, width)?;
    let isa = cpu.isa;
    merge_rows(cpu, rows, n, Some(y), streams);
    let hidden_width = hidden.width();
    let collapsed_width = streams.collapsed.width();
    let source = &streams.x;
    let outputs = (
        Chunks::new(&mut streams.collapsed.as_mut_slice()[..rows * collapsed_width], collapsed_width),
        Chunks::new(&mut hidden.as_mut_slice()[..rows * hidden_width], hidden_width),
    );
    cpu.pool.split(outputs, |row, (mean, hidden), _| {
        let mean = &mut mean[..width];
        collapse(isa, &[1.0; MAX_STREAMS][..n], source.row(row), mean);
        for v in &mut *mean {
            *v /= n as f32;
        }
        isa.rms_norm(mean, norm.weight.as_slice(), norm.eps, &mut hidden[..width]);
    });
    Ok(())
}

/// Width of a stream, when all buffers agree.
fn checked(n: usize, rows: usize, norm: &Norm<Cpu>, y: Option<&CpuBuffer>, streams: &Streams<Cpu>) -> Result<usize> {
    if n == 0 {
        return Err(Error::Capacity { what: "mhc: streams", needed: 1, available: 0 });
    }
    require("mhc: streams", n, MAX_STREAMS)?;
    let width = norm.weight.len();
    require_equal("mhc: width of the streams", n * width, streams.x.width())?;
    require_equal("mhc: width of post", n, streams.post.width())?;
    require_equal("mhc: width of comb", n * n, streams.comb.width())?;
    streams.x.require("mhc: the streams", rows, n * width)?;
    streams.post.require("mhc: post", rows, n)?;
    streams.comb.require("mhc: comb", rows, n * n)?;
    streams.collapsed.require("mhc: the collapsed input", rows, width)?;
    y.map_or(Ok(()), |y| y.require("mhc: the sub-block's output", rows, width))?;
    Ok(width)
}

/// `S'[j] = post[j] y + sum_i C[i][j] S[i]` for every row.
fn merge_rows(cpu: &Cpu, rows: usize, n: usize, y: Option<&CpuBuffer>, streams: &mut Streams<Cpu>) {
    let Some(y) = y else { return };
    let (isa, line) = (cpu.isa, streams.x.width());
    let (post, comb) = (&streams.post, &streams.comb);
    cpu.pool.split(Chunks::new(&mut streams.x.as_mut_slice()[..rows * line], line), |row, s, _| {
        merge(isa, post.row(row), comb.row(row), &y.row(row)[..line / n], s);
    });
}

/// A dense matrix's bytes.
pub(super) fn stored<'a>(what: &'static str, matrix: &'a CpuMatrix) -> Result<Weights<'a>> {
    match matrix {
        CpuMatrix::Bf16 { bytes, .. } => Ok(Weights::Bf16(bytes.as_slice())),
        CpuMatrix::F32 { bytes, .. } => Ok(Weights::F32(bytes.as_slice())),
        CpuMatrix::Int4 { .. } => Err(Error::Weight {
            name: what.to_owned(),
            expected: "BF16 or F32".to_owned(),
            found: "INT4 (only routed experts are quantized)".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests;
