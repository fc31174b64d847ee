//! Dense stages: projections, SwiGLU, embedding, norms, the head.

use glimmer_tensor::{Columns, Linear, Norm, Result, Streams, Swiglu};

use super::{
    few,
    gemm::{self, Input},
    narrow, several, wide,
};
use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    plan::Role,
    types::{CudaBuffer, CudaMatrix, Format, Kind, require, require_equal},
};

pub(crate) static FILE: File = File { name: "dense.cu", text: include_str!("dense.cu"), constants: &[] };

const NORM_THREADS: usize = 256;

/// Checks the parts of a linear layer against its input.
pub(crate) fn check(what: &'static str, linear: &Linear<Cuda>, width: usize) -> Result<()> {
    require_equal(what, linear.weight.columns, width)?;
    linear.bias.as_ref().map_or(Ok(()), |bias| require_equal(what, linear.weight.out, bias.len))
}

fn check_norm(what: &'static str, norm: &Norm<Cuda>, width: usize) -> Result<()> {
    require_equal(what, width, norm.weight.len)?;
    norm.bias.as_ref().map_or(Ok(()), |bias| require_equal(what, width, bias.len))
}

/// f32 dot products `out[row, start ..] = W x + bias` with a plainly stored matrix.
pub(crate) fn dot(
    cuda: &Cuda,
    rows: usize,
    input: Input<'_>,
    matrix: &CudaMatrix,
    bias: u64,
    out: (u64, usize),
) -> Result<()> {
    const WARPS: usize = 4;
    let kernel = cuda.kernels.get(&FILE, &[], "dot")?;
    let arguments = Arguments::new()
        .with(input.buffer.at(0))
        .int(input.buffer.width)
        .int(input.start)
        .int(rows)
        .with(matrix.address())
        .with(matrix.plain("an f32 dot product")?)
        .int(matrix.pitch)
        .int(matrix.out)
        .int(matrix.columns)
        .with(bias)
        .with(input.list)
        .with(out.0)
        .int(out.1);
    let grid = Grid::new([matrix.out.div_ceil(WARPS), rows.div_ceil(4), 1], 32 * WARPS);
    Ok(cuda.kernels.launch_early(kernel, grid, arguments)?)
}

/// `out[row, start ..] = [W0 x | W1 x | ...]`.
pub(crate) fn joint(
    cuda: &mut Cuda,
    rows: usize,
    input: Input<'_>,
    weights: &[&Linear<Cuda>],
    out: &mut CudaBuffer,
    start: usize,
) -> Result<()> {
    if input.list == 0 {
        input.buffer.require("linear: the input", rows, input.start + input.width)?;
    }
    let mut width = 0;
    for linear in weights {
        check("linear: columns of the input", linear, input.width)?;
        width += linear.weight.out;
    }
    out.require("linear: the output", rows, start + width)?;
    let several = several::takes(cuda, rows, input, weights);
    if !several && wide::linear(cuda, rows, input, weights, out, start)? {
        return Ok(());
    }
    out.format = Format::Float;
    let mut planes: Option<(Kind, gemm::Planes)> = None;
    let mut column = start;
    let mut left = weights;
    while let Some((linear, rest)) = left.split_first() {
        let together = if several { several::together(left) } else { few::together(cuda, rows, input, left) };
        if together > 0 {
            let multiply = if several { several::product } else { few::product };
            multiply(cuda, rows, input, &left[..together], out, column)?;
            column += left[..together].iter().map(|l| l.weight.out).sum::<usize>();
            left = &left[together..];
            continue;
        }
        left = rest;
        let kind = linear.weight.kind;
        match planes {
            Some((held, planes)) if held == kind => gemm::product(cuda, rows, planes, linear, out, column)?,
            _ if linear.weight.multiplies() => {
                let made = gemm::planes(cuda, rows, input, kind)?;
                planes = Some((kind, made));
                gemm::product(cuda, rows, made, linear, out, column)?;
            }
            _ => {
                let bias = linear.bias.as_ref().map_or(0, |b| b.address());
                dot(cuda, rows, input, &linear.weight, bias, (out.at(column), out.width))?;
            }
        }
        column += linear.weight.out;
    }
    Ok(())
}

/// [`glimmer_tensor::Backend::linear`].
pub(crate) fn linear(
    cuda: &mut Cuda,
    rows: usize,
    x: Columns<'_, Cuda>,
    weights: &[&Linear<Cuda>],
    out: &mut CudaBuffer,
    start: usize,
) -> Result<()> {
    joint(cuda, rows, Input { buffer: x.buffer, start: x.start, width: x.width, list: 0 }, weights, out, start)
}

/// [`glimmer_tensor::Backend::linear_each`].
pub(crate) fn linear_each(
    cuda: &mut Cuda,
    rows: usize,
    parts: &[(Columns<'_, Cuda>, &Linear<Cuda>, usize)],
    out: &mut CudaBuffer,
) -> Result<()> {
    if narrow::takes(cuda, rows, parts) {
        return narrow::products(cuda, rows, parts, out);
    }
    parts.iter().try_for_each(|&(x, weights, start)| linear(cuda, rows, x, &[weights], out, start))
}

/// Checks the parts of a SwiGLU against each other.
pub(crate) fn check_swiglu(weights: &Swiglu<Cuda>, input: usize) -> Result<()> {
    check("SwiGLU: columns of the gate", &weights.gate, input)?;
    check("SwiGLU: columns of up", &weights.up, input)?;
    require_equal("SwiGLU: rows of up", weights.gate.weight.out, weights.up.weight.out)?;
    check("SwiGLU: columns of down", &weights.down, weights.gate.weight.out)
}

/// The first half of a SwiGLU: the activation.
pub(crate) fn gated(
    cuda: &mut Cuda,
    rows: usize,
    input: Input<'_>,
    weights: &Swiglu<Cuda>,
    limit: f32,
    act: &mut CudaBuffer,
) -> Result<()> {
    let Swiglu { gate, up, down } = weights;
    if several::takes_gate(cuda, rows, input, [gate, up]) {
        return several::gated(cuda, rows, input, [gate, up], limit, act);
    }
    if [gate, up].iter().all(|l| few::takes(cuda, rows, input, &l.weight)) {
        return few::gated(cuda, rows, input, gate, up, limit, act);
    }
    if wide::gated(cuda, rows, input, [gate, up], &down.weight, limit, act)? {
        return Ok(());
    }
    let planes = gemm::planes(cuda, rows, input, gate.weight.kind)?;
    gemm::gated(cuda, rows, planes, gate, up, limit, down.weight.kind, act)
}

/// [`glimmer_tensor::Backend::swiglu`].
pub(crate) fn swiglu(
    cuda: &mut Cuda,
    rows: usize,
    weights: &Swiglu<Cuda>,
    limit: f32,
    x: &CudaBuffer,
    act: &mut CudaBuffer,
    out: &mut CudaBuffer,
) -> Result<()> {
    let (input, width) = (weights.gate.weight.columns, weights.gate.weight.out);
    check_swiglu(weights, input)?;
    x.require("swiglu: the input", rows, input)?;
    act.require("swiglu: the activation", rows, width)?;
    gated(cuda, rows, Input { buffer: x, start: 0, width: input, list: 0 }, weights, limit, act)?;
    joint(cuda, rows, Input { buffer: act, start: 0, width, list: 0 }, &[&weights.down], out, 0)
}

/// [`glimmer_tensor::Backend::embed`].
pub(crate) fn embed(
    cuda: &mut Cuda,
    table: &CudaMatrix,
    features: &CudaBuffer,
    streams: &mut Streams<Cuda>,
    n: usize,
) -> Result<()> {
    let (rows, hidden) = (cuda.plan.rows(), table.columns);
    streams.x.require("embed: the streams", rows, n * hidden)?;
    let step = &cuda.plan.step;
    for &token in &step.tokens {
        require("embed: rows of the table", token as usize + 1, table.out)?;
    }
    for f in &step.features {
        features.require("embed: image features", f.feature as usize + 1, hidden)?;
    }
    let kernel = cuda.kernels.get(&FILE, &[], "embed")?;
    let arguments = Arguments::new()
        .with(cuda.plan.tokens())
        .with(cuda.plan.features())
        .with(table.address())
        .with(table.plain("embedding table")?)
        .int(table.pitch)
        .with(features.at(0))
        .int(features.width)
        .with(streams.x.at(0))
        .int(streams.x.width)
        .int(n)
        .int(hidden);
    Ok(cuda.kernels.launch_early(kernel, Grid::new([hidden.div_ceil(256), rows, 1], 256), arguments)?)
}

/// [`glimmer_tensor::Backend::mtp_input`].
pub(crate) fn mtp_input(
    cuda: &mut Cuda,
    table: &CudaMatrix,
    enorm: &Norm<Cuda>,
    hnorm: &Norm<Cuda>,
    hidden: &CudaBuffer,
    source: &[u32],
    out: &mut CudaBuffer,
) -> Result<()> {
    let (rows, width) = (cuda.plan.rows(), table.columns);
    check_norm("mtp_input: width of enorm", enorm, width)?;
    check_norm("mtp_input: width of hnorm", hnorm, width)?;
    require_equal("mtp_input: source rows", rows, source.len())?;
    out.require("mtp_input: the output", rows, 2 * width)?;
    for (&token, &from) in cuda.plan.step.tokens.iter().zip(source) {
        require("mtp_input: rows of the table", token as usize + 1, table.out)?;
        hidden.require("mtp_input: hidden states", from as usize + 1, width)?;
    }
    let list = cuda.list(Role::Source, source)?;
    let kernel = cuda.kernels.get(&FILE, &[], "mtp_input")?;
    let arguments = Arguments::new()
        .with(cuda.plan.tokens())
        .with(table.address())
        .with(table.plain("embedding table")?)
        .int(table.pitch)
        .with(enorm.weight.address())
        .with(enorm.eps)
        .with(hnorm.weight.address())
        .with(hnorm.eps)
        .with(hidden.at(0))
        .int(hidden.width)
        .with(list)
        .with(out.at(0))
        .int(out.width)
        .int(width);
    out.format = Format::Float;
    Ok(cuda.kernels.launch_early(kernel, Grid::new([rows, 1, 1], NORM_THREADS), arguments)?)
}

/// `x += y`, `out = norm(x)` with a GELU behind it when `gelu`; `out` may be `x` itself.
fn norm_rows(
    cuda: &Cuda,
    rows: usize,
    y: Option<&CudaBuffer>,
    norm: &Norm<Cuda>,
    gelu: bool,
    x: &CudaBuffer,
    out: (u64, usize),
) -> Result<()> {
    let kernel = cuda.kernels.get(&FILE, &[], "add_norm")?;
    let arguments = Arguments::new()
        .with(x.at(0))
        .int(x.width)
        .with(y.map_or(0, |y| y.at(0)))
        .int(y.map_or(0, |y| y.width))
        .with(norm.weight.address())
        .with(norm.bias.as_ref().map_or(0, |b| b.address()))
        .with(norm.eps)
        .int(norm.weight.len)
        .int(usize::from(gelu))
        .with(out.0)
        .int(out.1);
    Ok(cuda.kernels.launch_early(kernel, Grid::new([rows, 1, 1], NORM_THREADS), arguments)?)
}

/// [`glimmer_tensor::Backend::add_norm`].
pub(crate) fn add_norm(
    cuda: &mut Cuda,
    rows: usize,
    y: Option<&CudaBuffer>,
    norm: &Norm<Cuda>,
    x: &mut CudaBuffer,
    out: &mut CudaBuffer,
) -> Result<()> {
    let width = norm.weight.len;
    check_norm("add_norm: width of the norm", norm, width)?;
    x.require("add_norm: the residual", rows, width)?;
    out.require("add_norm: the output", rows, width)?;
    if let Some(y) = y {
        y.require("add_norm: the addend", rows, width)?;
    }
    out.format = Format::Float;
    norm_rows(cuda, rows, y, norm, false, x, (out.at(0), out.width))
}

/// [`glimmer_tensor::Backend::norm_gelu`].
pub(crate) fn norm_gelu(cuda: &mut Cuda, rows: usize, norm: &Norm<Cuda>, x: &mut CudaBuffer) -> Result<()> {
    let width = norm.weight.len;
    require_equal("norm_gelu: width", width, x.width)?;
    require("norm_gelu: rows", rows, x.rows)?;
    if norm.bias.is_none() {
        return Err(glimmer_tensor::Error::Weight {
            name: "norm of the merger".to_owned(),
            expected: "a LayerNorm with a bias".to_owned(),
            found: "no bias".to_owned(),
        });
    }
    norm_rows(cuda, rows, None, norm, true, x, (x.at(0), x.width))
}

/// [`glimmer_tensor::Backend::head`].
pub(crate) fn head(
    cuda: &mut Cuda,
    matrix: &CudaMatrix,
    rows: &[u32],
    hidden: &CudaBuffer,
    logits: &mut CudaBuffer,
) -> Result<()> {
    let last = rows.iter().max().map_or(0, |&row| row as usize + 1);
    hidden.require("head: hidden states", last, matrix.columns)?;
    logits.require("head: logits", rows.len(), matrix.out)?;
    let list = cuda.list(Role::Logits, rows)?;
    let input = Input { buffer: hidden, start: 0, width: matrix.columns, list };
    logits.format = Format::Float;
    if several::head(cuda, rows.len(), input, matrix, logits)? {
        return Ok(());
    }
    if few::takes(cuda, rows.len(), input, matrix) {
        return few::product_of(cuda, rows.len(), input, matrix, logits);
    }
    if wide::head(cuda, rows.len(), input, matrix, logits)? {
        return Ok(());
    }
    if matrix.multiplies() {
        let planes = gemm::planes(cuda, rows.len(), input, matrix.kind)?;
        return gemm::product_of(cuda, rows.len(), planes, matrix, 0, logits, 0);
    }
    dot(cuda, rows.len(), input, matrix, 0, (logits.at(0), logits.width))
}
