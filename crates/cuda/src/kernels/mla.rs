//! Latent attention over the selected tokens, absorbed.

use glimmer_tensor::{Columns, DsaWeights, Error, PAGE_TOKENS, Result};

use super::{dsa::check_pages, sparse};
use crate::{
    backend::Cuda,
    cache::CudaCache,
    launch::{Arguments, File, Grid},
    types::{CudaBuffer, CudaSelection, Format, require, require_equal},
};

pub(crate) static FILE: File = File { name: "mla.cu", text: include_str!("mla.cu"), constants: &["LATENT", "PAGE"] };

/// Rows that share a weight.
const ROWS: usize = 8;
/// Heads of a block, one a warp.
const HEADS: usize = 8;
/// Tokens of a tile.
const TILE: usize = 32;

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
    let constants = [latent as i64, PAGE_TOKENS as i64];
    let absorbed = cuda.scratch("absorbed queries", 4 * rows * heads * latent)?;
    let half = cache.half && latent == sparse::LATENT;

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

    let scale = 1.0 / (qk as f32).sqrt();
    let attended = if half {
        let out = cuda.scratch("attended latents", 4 * rows * heads * latent)?;
        sparse::attend(cuda, selection, held.latents.address(), [absorbed, out], heads, scale)?;
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
