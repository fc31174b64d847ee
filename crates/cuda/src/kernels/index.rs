//! Scores of the index with keys kept as halves.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::{Columns, IndexerWeights, PAGE_TOKENS, Result};

use crate::{
    backend::Cuda,
    compile::Unit,
    launch::{Arguments, File, Grid},
    plan::GROUP_ROWS,
    types::{CudaBuffer, require_equal},
};

pub(crate) static CHOOSE: File =
    File { name: "choose.cu", text: include_str!("choose.cu"), constants: &["KPOOL", "CLUSTER", "PER"] };
pub(crate) static FILE: File = File { name: "index.cu", text: include_str!("index.cu"), constants: &["PAGE", "KPOOL"] };

/// Width of a key.
pub(crate) const DIM: usize = 128;

/// Pools of a page.
pub(crate) const POOLS: usize = 16;

/// Heads of the indexer.
const HEADS: usize = 32;

/// Pools of a tile, and of a block's run at most.
const TILE: usize = 64;
const LONGEST_RUN: usize = 2048;

/// Threads of a block of the scores: eight warps that multiply and one that copies.
const SCORE_THREADS: usize = 32 * 9;

/// Threads that choose a row's pools.
const CHOOSE_THREADS: usize = 1024;

/// Bytes of shared memory: four tiles of keys, queries, weights of heads, barriers.
const SHARED: usize = 4 * TILE * DIM * 2 + GROUP_ROWS * HEADS * (2 * DIM + 4) + 64;

/// Arguments of the kernel, as it declares them.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Args {
    segments: u64,
    row_segment: u64,
    pages: u64,
    groups: u64,
    query: u64,
    proj: u64,
    pool_keys: u64,
    scores: u64,
    query_stride: i32,
    proj_stride: i32,
    keep: i32,
    stride: i32,
    first_row: i32,
    run: i32,
    aligned: i32,
    scale: f32,
}

/// Scores of rows that see more than `keep` pools, `[rows of the turn, width]` at an address. The turn is a range of groups, which
/// are a range of rows; `proj` has the weights of the heads from a column on.
pub(crate) fn score(
    cuda: &Cuda,
    weights: &IndexerWeights<Cuda>,
    query: Columns<'_, Cuda>,
    proj: (&CudaBuffer, usize),
    pool_keys: u64,
    [groups, rows]: [Range<usize>; 2],
    keep: usize,
    scores: (u64, usize),
) -> Result<()> {
    require_equal("dsa_select: heads of the indexer beside a cache of halves", HEADS, weights.heads)?;
    let address = query.buffer.at(query.start);
    let blocks = 2 * cuda.device.properties().multiprocessors;
    let run = (scores.1 * groups.len() / blocks).next_multiple_of(TILE).clamp(TILE, LONGEST_RUN);
    let args = Args {
        segments: cuda.plan.segments(),
        row_segment: cuda.plan.row_segments(),
        pages: cuda.plan.pages(),
        groups: cuda.plan.groups() + 4 * groups.start as u64,
        query: address,
        proj: proj.0.at(proj.1),
        pool_keys,
        scores: scores.0,
        query_stride: query.buffer.width as i32,
        proj_stride: proj.0.width as i32,
        keep: keep as i32,
        stride: scores.1 as i32,
        first_row: rows.start as i32,
        run: run as i32,
        aligned: i32::from(address.is_multiple_of(16) && query.buffer.width.is_multiple_of(4)),
        scale: 1.0 / ((HEADS * DIM) as f32).sqrt(),
    };
    let constants = [PAGE_TOKENS as i64, weights.kpool as i64];
    let kernel = cuda.kernels.get(&FILE, &constants, "score_pools")?;
    let grid = Grid { blocks: [scores.1.div_ceil(run), groups.len(), 1], threads: SCORE_THREADS, shared: SHARED };
    Ok(cuda.kernels.launch_early(kernel, grid, Arguments::new().with(args))?)
}

/// Blocks of a row and scores of a thread, which has them in registers where a variant's threads are enough for the pools.
const CHOICES: [[usize; 2]; 5] = [[1, 4], [1, 8], [4, 8], [1, 32], [8, 32]];

/// The variant for rows of `pools` pools at most. Where every block has a multiprocessor of its own, more of them are faster; the
/// list does not depend on it.
fn choice(pools: usize, rows: usize, multiprocessors: usize) -> [usize; 2] {
    let fits = |&[cluster, per]: &[usize; 2]| {
        let spread = cluster == 1 || pools > 32 * CHOOSE_THREADS || cluster * rows <= multiprocessors;
        spread && pools <= cluster * per * CHOOSE_THREADS
    };
    CHOICES.into_iter().find(fits).unwrap_or(CHOICES[4])
}

/// The units that choose among pools of `kpool` tokens.
pub(crate) fn choice_units(kpool: usize) -> [Unit; 5] {
    CHOICES.map(|[cluster, per]| CHOOSE.unit(&[kpool, cluster, per].map(|n| n as i64)))
}

/// Chooses the pools of `rows` rows that see `pools` pools at most; the arguments are those of the kernel `choose` in `dsa.cu`.
pub(crate) fn choose(cuda: &Cuda, kpool: usize, pools: usize, rows: usize, arguments: Arguments) -> Result<()> {
    let [cluster, per] = choice(pools, rows, cuda.device.properties().multiprocessors);
    let kernel = cuda.kernels.get(&CHOOSE, &[kpool, cluster, per].map(|n| n as i64), "choose_pools")?;
    let grid = Grid::new([rows * cluster, 1, 1], CHOOSE_THREADS);
    Ok(cuda.kernels.launch_clusters(kernel, grid, cluster, arguments)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_spread_where_that_is_faster() {
        assert_eq!(choice(0, 96, 132), [1, 4]);
        assert_eq!(choice(4096, 3, 132), [1, 4]);
        assert_eq!(choice(8192, 96, 132), [1, 8]);
        assert_eq!(choice(8193, 33, 132), [4, 8]);
        assert_eq!(choice(32768, 34, 132), [1, 32]);
        assert_eq!(choice(32769, 2048, 132), [8, 32]);
        assert_eq!(choice(1 << 20, 3, 132), [8, 32]);
    }
}
