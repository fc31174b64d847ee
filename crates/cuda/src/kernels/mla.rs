//! Latent attention over the selected tokens, absorbed.

use glimmer_tensor::{Columns, DsaWeights, Error, PAGE_TOKENS, Result};

use super::{
    dsa::check_pages,
    gemm::Input,
    heads as products,
    sparse::{self, Attended},
    wide,
};
use crate::{
    backend::Cuda,
    cache::{CudaCache, DsaLayer},
    launch::{Arguments, File, Grid},
    library::{Operand, Product},
    types::{CudaBuffer, CudaSelection, Format, Kind, require, require_equal},
};

pub(crate) static FILE: File = File { name: "mla.cu", text: include_str!("mla.cu"), constants: &["LATENT", "PAGE"] };

/// Rows that share a weight.
const ROWS: usize = 8;
/// Heads of a block, one a warp.
const HEADS: usize = 8;
/// Tokens of a tile.
const TILE: usize = 32;
/// Rows at most whose absorbed queries and attended latents are held at a time where their products are the library's.
const TURN: usize = 2048;

/// [`glimmer_tensor::Backend::mla`].
pub(crate) fn mla(
    cuda: &mut Cuda,
    weights: &DsaWeights<Cuda>,
    query: Columns<'_, Cuda>,
    selection: &CudaSelection,
    cache: &CudaCache,
    layer: usize,
    out: &mut CudaBuffer,
) -> Result<()> {
    let (heads, qk, v) = (weights.heads, weights.qk_dim, weights.v_dim);
    let (rows, latent) = (cuda.plan.rows(), cache.shape.latent);
    require_equal("mla: width of the queries", heads * qk, query.width)?;
    query.buffer.require("mla: queries", rows, query.start + query.width)?;
    out.require("mla: output", rows, heads * v)?;
    require("mla: rows of the selection", rows, selection.rows)?;
    require_equal("mla: columns of kv_b", latent, weights.kv_b.columns)?;
    require_equal("mla: rows of kv_b", heads * (qk + v), weights.kv_b.out)?;
    check_pages(cuda, cache.shape.pages)?;
    if latent == 0 || latent % 32 != 0 {
        return Err(Error::Capacity {
            what: "mla: latent in warps",
            needed: latent.next_multiple_of(32),
            available: latent,
        });
    }
    let plain = weights.kv_b.plain("mla: kv_b")?;
    let held = cache.dsa(layer)?;
    let half = cache.half && latent == sparse::LATENT;
    let scale = 1.0 / (qk as f32).sqrt();
    if half && products::takes(cuda, rows, weights, query) {
        let absorbed = cuda.scratch("absorbed queries", 2 * rows * heads * latent)?;
        let attended = cuda.scratch("attended latents", 4 * rows * heads * latent)?;
        products::absorb(cuda, rows, weights, query, absorbed)?;
        sparse::attend(
            cuda,
            0..rows,
            selection,
            held.latents.address(),
            absorbed,
            Attended::Floats(attended),
            heads,
            scale,
        )?;
        return products::values(cuda, rows, weights, attended, out);
    }
    if half && many(cuda, weights, query, selection, held, out)? {
        return Ok(());
    }
    let constants = [latent as i64, PAGE_TOKENS as i64];
    let absorbed = cuda.scratch("absorbed queries", 4 * rows * heads * latent)?;

    let arguments = Arguments::new()
        .with(query.buffer.at(0))
        .int(query.buffer.width)
        .int(query.start)
        .int(rows)
        .with(weights.kv_b.address())
        .with(plain)
        .int(weights.kv_b.pitch)
        .int(qk)
        .int(v)
        .int(heads)
        .with(absorbed)
        .int(usize::from(half));
    let blocks = [latent.div_ceil(128), heads, rows.div_ceil(ROWS)];
    let grid = Grid { blocks, threads: 128, shared: 4 * ROWS * qk };
    cuda.kernels.launch_early(cuda.kernels.get(&FILE, &constants, "absorb")?, grid, arguments)?;

    let attended = if half {
        let out = cuda.scratch("attended latents", 4 * rows * heads * latent)?;
        sparse::attend(
            cuda,
            0..rows,
            selection,
            held.latents.address(),
            absorbed,
            Attended::Floats(out),
            heads,
            scale,
        )?;
        out
    } else {
        let arguments = Arguments::new()
            .with(cuda.plan.segments())
            .with(cuda.plan.row_segments())
            .with(cuda.plan.pages())
            .with(held.latents.address())
            .with(selection.tokens.address())
            .int(selection.width)
            .with(selection.lens.address())
            .with(scale)
            .int(heads)
            .with(absorbed);
        let shared = 4 * (TILE * (latent + 4) + HEADS * latent);
        let grid = Grid { blocks: [heads.div_ceil(HEADS), rows, 1], threads: 32 * HEADS, shared };
        cuda.kernels.launch_early(cuda.kernels.get(&FILE, &constants, "attend")?, grid, arguments)?;
        absorbed
    };

    let arguments = Arguments::new()
        .with(attended)
        .int(rows)
        .with(weights.kv_b.address())
        .with(plain)
        .int(weights.kv_b.pitch)
        .int(qk)
        .int(v)
        .int(heads)
        .with(out.at(0))
        .int(out.width);
    out.format = Format::Float;
    let grid = Grid::new([v.div_ceil(8), heads, rows.div_ceil(ROWS)], 256);
    Ok(cuda.kernels.launch_early(cuda.kernels.get(&FILE, &constants, "values")?, grid, arguments)?)
}

/// Many rows over latents of halves, in turns: absorption and values are products of the library, a head each. Whether they were.
fn many(
    cuda: &mut Cuda,
    weights: &DsaWeights<Cuda>,
    query: Columns<'_, Cuda>,
    selection: &CudaSelection,
    held: &DsaLayer,
    out: &mut CudaBuffer,
) -> Result<bool> {
    let (heads, qk, v, kv_b) = (weights.heads, weights.qk_dim, weights.v_dim, &weights.kv_b);
    let (rows, latent, width) = (cuda.plan.rows(), kv_b.columns, heads * kv_b.columns);
    if !wide::wide(cuda, rows) || kv_b.kind != Kind::Bf16 || latent != sparse::LATENT || !out.width.is_multiple_of(4) {
        return Ok(false);
    }
    // Equal turns, so that none of them has few rows.
    let turn = rows.div_ceil(rows.div_ceil(TURN));
    // Where products take halves the library writes absorbed queries so, and attention what it attended to.
    let halves = wide::halved(turn, kv_b) && sparse::whole(rows);
    let sums = if halves { 0 } else { cuda.scratch("absorbed queries in f32", 4 * turn * width)? };
    let absorbed = cuda.scratch("absorbed queries", 2 * turn * width)?;
    let attended = cuda.scratch("attended latents", if halves { 2 } else { 4 } * turn * width)?;
    let of_head = (qk + v) * kv_b.pitch;
    let input = |width| Input { buffer: query.buffer, start: 0, width, list: 0 };
    let to_halves = cuda.kernels.get(&super::dense::FILE, &[], "to_halves")?;
    for first in (0..rows).step_by(turn) {
        let count = turn.min(rows - first);
        let from = (query.buffer.at(query.start) + (4 * first * query.buffer.width) as u64, query.buffer.width);
        let x = wide::split(cuda, "activations as planes", count, from, input(query.width), kv_b)?;
        let absorb = Product {
            operand: if halves { Operand::HalfToHalf } else { Operand::Bf16 },
            outputs: latent,
            columns: qk,
            across: true,
            pitches: [kv_b.pitch, x.pitch(), width],
            batch: heads,
            strides: [of_head, qk, latent],
        };
        if !wide::multiply(cuda, count, x, absorb, (kv_b, 0), 0, if halves { absorbed } else { sums })? {
            return Ok(false);
        }
        if !halves {
            let arguments = Arguments::new().with(sums).with((count * width) as u64).with(absorbed);
            cuda.kernels.launch(to_halves, Grid::new([(count * width).div_ceil(4 * 256), 1, 1], 256), arguments)?;
        }
        let (scale, latents) = (1.0 / (qk as f32).sqrt(), held.latents.address());
        let result = if halves { Attended::Halves(attended) } else { Attended::Floats(attended) };
        sparse::attend(cuda, first..first + count, selection, latents, absorbed, result, heads, scale)?;
        let x = match result {
            Attended::Halves(address) => wide::Rows::of_halves(address, width),
            Attended::Floats(address) => {
                wide::split(cuda, "attended latents as planes", count, (address, width), input(width), kv_b)?
            }
        };
        let values = Product {
            operand: Operand::Bf16,
            outputs: v,
            columns: latent,
            across: false,
            pitches: [kv_b.pitch, x.pitch(), out.width],
            batch: heads,
            strides: [of_head, latent, v],
        };
        let y = out.at(0) + (4 * first * out.width) as u64;
        if !wide::multiply(cuda, count, x, values, (kv_b, qk * kv_b.pitch), 0, y)? {
            return Ok(false);
        }
    }
    out.format = Format::Float;
    Ok(true)
}
