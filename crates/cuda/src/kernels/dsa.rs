//! Sparse attention: writing latents and index keys, choosing tokens.

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::{Columns, DsaColumns, DsaWeights, Error, IndexerWeights, PAGE_TOKENS, Result};

use super::index;
use crate::{
    backend::Cuda,
    cache::CudaCache,
    launch::{Arguments, File, Grid},
    plan::{GROUP_ROWS, Role},
    types::{CudaBuffer, CudaSelection, Format, require, require_equal},
};

pub(crate) static FILE: File =
    File { name: "dsa.cu", text: include_str!("dsa.cu"), constants: &["PAGE", "KPOOL", "DIM", "HEADS"] };

/// Constants of a layer without an indexer, where only the page matters.
pub(crate) const WITHOUT_INDEXER: [usize; 4] = [PAGE_TOKENS, 1, 32, 1];

/// Floats of scores held at a time; more rows are taken in turns.
const SCORES: usize = 16 << 20;

/// Pools of a block of the scores.
const TILE: usize = 32;

/// What writing rows takes, as the kernels declare it.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RowsArgs {
    proj: u64,
    q_weight: u64,
    kv_weight: u64,
    k_weight: u64,
    k_bias: u64,
    q_residual: u64,
    latents: u64,
    proj_stride: i32,
    q_lora: i32,
    latent: i32,
    indexer: i32,
    q_stride: i32,
    half: i32,
    q_eps: f32,
    kv_eps: f32,
    k_eps: f32,
    unused: i32,
}

/// What keys of pools and the ring take.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PoolsArgs {
    proj: u64,
    ape: u64,
    tails: u64,
    pool_keys: u64,
    proj_stride: i32,
    gate_column: i32,
    ring: i32,
    half: i32,
}

fn constants(i: &IndexerWeights<Cuda>) -> [i64; 4] {
    [PAGE_TOKENS as i64, i.kpool as i64, i.dim as i64, i.heads as i64]
}

/// [`glimmer_tensor::Backend::dsa_write`].
pub(crate) fn dsa_write(
    cuda: &mut Cuda,
    weights: &DsaWeights<Cuda>,
    columns: DsaColumns,
    proj: &CudaBuffer,
    indexer: bool,
    cache: &CudaCache,
    layer: usize,
    q_residual: &mut CudaBuffer,
) -> Result<()> {
    let rows = cuda.plan.rows();
    let DsaColumns { q_lora, latent } = columns;
    let indexer = if indexer { weights.indexer.as_ref() } else { None };
    let shape = &cache.shape;
    let needed = q_lora + latent + indexer.map_or(0, |i| 2 * i.dim + i.heads);
    proj.require("dsa_write: projections", rows, needed)?;
    q_residual.require("dsa_write: query residual", rows, q_lora)?;
    require_equal("dsa_write: query norm", q_lora, weights.q_norm.weight.len)?;
    require_equal("dsa_write: latent norm", latent, weights.kv_norm.weight.len)?;
    require_equal("dsa_write: latent of the cache", latent, shape.latent)?;
    check_pages(cuda, shape.pages)?;
    if let Some(i) = indexer {
        check_indexer(i, cache)?;
    }
    let held = cache.dsa(layer)?;
    let (segments, row_segments, pages) = (cuda.plan.segments(), cuda.plan.row_segments(), cuda.plan.pages());
    let dim = indexer.map_or(32, |i| i.dim);
    let keys = cuda.scratch("index keys", 4 * rows * dim)?;
    let constants = indexer.map_or(WITHOUT_INDEXER.map(|c| c as i64), constants);
    let norm = indexer.map(|i| &i.k_norm);
    q_residual.format = Format::Float;
    let rows_args = RowsArgs {
        proj: proj.at(0),
        q_weight: weights.q_norm.weight.address(),
        kv_weight: weights.kv_norm.weight.address(),
        k_weight: norm.map_or(0, |n| n.weight.address()),
        k_bias: norm.and_then(|n| n.bias.as_ref()).map_or(0, |b| b.address()),
        q_residual: q_residual.at(0),
        latents: held.latents.address(),
        proj_stride: proj.width as i32,
        q_lora: q_lora as i32,
        latent: latent as i32,
        indexer: i32::from(indexer.is_some()),
        q_stride: q_residual.width as i32,
        half: i32::from(cache.half),
        q_eps: weights.q_norm.eps,
        kv_eps: weights.kv_norm.eps,
        k_eps: norm.map_or(0.0, |n| n.eps),
        unused: 0,
    };
    let kernel = |entry| cuda.kernels.get(&FILE, &constants, entry);
    let pools_args = indexer.map(|i| PoolsArgs {
        proj: proj.at(0),
        ape: i.ape.address(),
        tails: held.tails.address(),
        pool_keys: held.pool_keys.address(),
        proj_stride: proj.width as i32,
        gate_column: (q_lora + latent + i.dim + i.heads) as i32,
        ring: cache.tail_ring() as i32,
        half: i32::from(cache.half),
    });
    if let Some(pools) = pools_args
        && cuda.plan.groups.len() == cuda.plan.step.segments.len()
    {
        // No segment has more rows than a group.
        let arguments = Arguments::new().with(segments).with(pages).with(rows_args).with(pools);
        let grid = Grid::new([cuda.plan.step.segments.len(), 1, 1], 256 * GROUP_ROWS);
        return Ok(cuda.kernels.launch_early(kernel("write_short")?, grid, arguments)?);
    }
    let arguments = Arguments::new().with(segments).with(row_segments).with(pages).with(rows_args).with(keys);
    cuda.kernels.launch_early(kernel("write_rows")?, Grid::new([rows, 1, 1], 256), arguments)?;
    let (Some(i), Some(pools)) = (indexer, pools_args) else { return Ok(()) };
    let arguments = Arguments::new().with(segments).with(row_segments).with(pages).with(pools).with(keys);
    cuda.kernels.launch_early(kernel("write_pools")?, Grid::new([rows, 1, 1], i.dim), arguments)?;
    let arguments = Arguments::new().with(segments).with(pools).with(keys);
    let grid = Grid::new([cache.tail_ring(), cuda.plan.step.segments.len(), 1], i.dim);
    Ok(cuda.kernels.launch_early(kernel("write_tails")?, grid, arguments)?)
}

/// [`glimmer_tensor::Backend::dsa_select`].
pub(crate) fn dsa_select(
    cuda: &mut Cuda,
    weights: &IndexerWeights<Cuda>,
    columns: DsaColumns,
    query: Columns<'_, Cuda>,
    proj: &CudaBuffer,
    cache: &CudaCache,
    layer: usize,
    selection: &mut CudaSelection,
) -> Result<()> {
    let rows = cuda.plan.rows();
    let (heads, dim, kpool) = (weights.heads, weights.dim, weights.kpool);
    let head_weights = columns.q_lora + columns.latent + dim;
    check_indexer(weights, cache)?;
    check_pages(cuda, cache.shape.pages)?;
    proj.require("dsa_select: projections", rows, head_weights + heads)?;
    query.buffer.require("dsa_select: index queries", rows, query.start + query.width)?;
    require_equal("dsa_select: width of the index queries", heads * dim, query.width)?;
    require("dsa_select: rows of the selection", rows, selection.rows)?;
    let keep = weights.topk / kpool;
    require("dsa_select: width of the selection", cuda.plan.end().min((keep + 1) * kpool - 1), selection.width)?;
    let constants = constants(weights);
    let (segments, row_segments, pages) = (cuda.plan.segments(), cuda.plan.row_segments(), cuda.plan.pages());
    let pools = cuda.plan.reach() / kpool;
    // Where everything fits, nothing is scored.
    let scored = if pools > keep { pools } else { 0 };
    let turn = SCORES.checked_div(scored).unwrap_or(rows).clamp(GROUP_ROWS, rows.max(GROUP_ROWS));
    let scores = cuda.scratch("index scores", 4 * turn * scored)?;
    let pool_keys = cache.dsa(layer)?.pool_keys.address();
    // Whole groups of rows, for the kernel that takes them together.
    let groups = cuda.plan.groups.len();
    let starts = |group: usize| cuda.plan.groups.get(group).map_or(rows, |&row| row as usize);
    if turn < rows && !cuda.plan.regular() {
        // The turns below begin where this step's segments do.
        cuda.kernels.stop_noting();
    }
    let together = if turn < rows { turn / GROUP_ROWS } else { groups.max(1) };
    for group in (0..groups).step_by(together) {
        let end = (group + together).min(groups);
        let (first, count) = (starts(group), starts(end) - starts(group));
        if cache.half {
            index::score(
                cuda,
                weights,
                query,
                (proj, head_weights),
                pool_keys,
                [group..end, first..first + count],
                keep,
                (scores, scored),
            )?;
        } else {
            let arguments = Arguments::new()
                .with(segments)
                .with(row_segments)
                .with(pages)
                .int(first)
                .with(query.buffer.at(0))
                .int(query.buffer.width)
                .int(query.start)
                .with(proj.at(0))
                .int(proj.width)
                .int(head_weights)
                .with(1.0 / (heads as f32).sqrt())
                .with(1.0 / (dim as f32).sqrt())
                .with(pool_keys)
                .int(keep)
                .with(scores)
                .int(scored);
            let score = cuda.kernels.get(&FILE, &constants, "score")?;
            cuda.kernels.launch_early(score, Grid::new([scored.div_ceil(TILE), count, 1], 128), arguments)?;
        }
        let arguments = Arguments::new()
            .with(segments)
            .with(row_segments)
            .int(first)
            .with(scores)
            .int(scored)
            .int(keep)
            .with(selection.tokens.address())
            .int(selection.width)
            .with(selection.lens.address());
        if cache.half {
            index::choose(cuda, kpool, scored, count, arguments)?;
        } else {
            let choose = cuda.kernels.get(&FILE, &constants, "choose")?;
            cuda.kernels.launch_early(choose, Grid::new([count, 1, 1], 256), arguments)?;
        }
    }
    Ok(())
}

/// [`glimmer_tensor::Backend::copy_selection`].
pub(crate) fn copy_selection(
    cuda: &mut Cuda,
    from: &CudaSelection,
    rows: &[u32],
    out: &mut CudaSelection,
) -> Result<()> {
    require("copy_selection: rows of the target", rows.len(), out.rows)?;
    require_equal("copy_selection: width of the target", from.width, out.width)?;
    for &row in rows {
        require("copy_selection: rows of the source", row as usize + 1, from.rows)?;
    }
    let list = cuda.list(Role::Shared, rows)?;
    let kernel = cuda.kernels.get(&super::dense::FILE, &[], "copy_lists")?;
    let arguments = Arguments::new()
        .with(from.tokens.address())
        .with(from.lens.address())
        .with(list)
        .int(from.width)
        .with(out.tokens.address())
        .with(out.lens.address());
    Ok(cuda.kernels.launch_early(kernel, Grid::new([rows.len(), 1, 1], 256), arguments)?)
}

fn check_indexer(i: &IndexerWeights<Cuda>, cache: &CudaCache) -> Result<()> {
    require_equal("indexer: width of an index key in the cache", i.dim, cache.shape.index_dim)?;
    require_equal("indexer: tokens a pool of the cache", i.kpool, cache.shape.kpool)?;
    require_equal("indexer: norm of the key", i.dim, i.k_norm.weight.len)?;
    require_equal("indexer: ape", i.kpool * i.dim, i.ape.len)?;
    require("indexer: width of a key", i.dim, 256)?;
    require_equal("indexer: width of a key in warps", i.dim.next_multiple_of(32), i.dim)?;
    match &i.k_norm.bias {
        Some(bias) => require_equal("indexer: bias of the key's norm", i.dim, bias.len),
        None => Err(Error::Weight {
            name: "indexer k_norm".to_owned(),
            expected: "a LayerNorm with a bias".to_owned(),
            found: "no bias".to_owned(),
        }),
    }
}

/// Every page of the step exists in the cache, and the page tables cover the rows.
pub(crate) fn check_pages(cuda: &Cuda, pages: usize) -> Result<()> {
    for placed in cuda.plan.step.placed() {
        let end = placed.segment.position as usize + placed.segment.rows as usize;
        require("dsa: pages of a segment", end.div_ceil(PAGE_TOKENS), placed.pages.len())?;
        for &page in placed.pages {
            require("dsa: pages of the cache", page as usize + 1, pages)?;
        }
    }
    Ok(())
}
