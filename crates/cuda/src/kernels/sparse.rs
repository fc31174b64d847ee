//! Latent attention over selected tokens with latents kept as halves.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::{PAGE_TOKENS, Result};

use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    types::CudaSelection,
};

pub(crate) static FILE: File =
    File { name: "sparse.cu", text: include_str!("sparse.cu"), constants: &["HEADS", "PAGE"] };

/// Width of a latent.
pub(crate) const LATENT: usize = 512;

/// Tokens of a tile.
const TILE: usize = 64;

/// Parts of a row's list: its bits do not depend on the step's number of rows up to here. Beyond, rows are not cut.
const PARTS: usize = 4;
const PARTED_ROWS: usize = 320;

/// Bytes of sums of parts held at a time; more rows are taken in turns.
const PIECES: usize = 256 << 20;

/// Arguments of the kernel, as it declares them.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Args {
    latents: u64,
    places: u64,
    lens: u64,
    queries: u64,
    pieces: u64,
    stats: u64,
    items: u32,
    groups: u32,
    parts: u32,
    heads: u32,
    pitch: u32,
    scale: f32,
}

/// Heads of an item, of which a layer may have several.
pub(crate) fn item_heads(heads: usize) -> usize {
    match heads {
        0..=8 => 8,
        9..=16 => 16,
        _ => 32,
    }
}

/// Bytes of shared memory of a block: ring, queries, weights of both warpgroups, maxima, sums and marks, barriers.
fn shared(heads: usize) -> usize {
    11 * TILE * 256 + heads * (1024 + 2 * 128 + 2 * 16 + 2 * 8) + 16 + 11 * 16
}

/// `out[row, head]` = attended latent in f32 for absorbed `queries` in halves, both `[rows, heads, LATENT]` and of a range of the
/// step's rows.
pub(crate) fn attend(
    cuda: &mut Cuda,
    range: Range<usize>,
    selection: &CudaSelection,
    latents: u64,
    [queries, out]: [u64; 2],
    heads: usize,
    scale: f32,
) -> Result<()> {
    let rows = cuda.plan.rows();
    let of_item = item_heads(heads);
    let groups = heads.div_ceil(of_item);
    let parts = if rows <= PARTED_ROWS { PARTS } else { 1 };
    let pitch = selection.width.next_multiple_of(TILE);
    let piece = 4 * of_item * LATENT * groups * parts;
    let turn = (PIECES / piece).clamp(1, range.len().max(1));
    let places = cuda.scratch("places of selected tokens", 4 * turn * pitch)?;
    let pieces = cuda.scratch("attention of parts", turn * piece)?;
    let stats = cuda.scratch("softmax of parts", 8 * turn * groups * parts * of_item)?;
    let constants = [of_item as i64, PAGE_TOKENS as i64];
    let kernel = |entry| cuda.kernels.get(&FILE, &constants, entry);
    let (find_places, attend, merge) = (kernel("find_places")?, kernel("attend_selected")?, kernel("merge")?);
    for first in range.clone().step_by(turn) {
        let count = turn.min(range.end - first);
        let (words, halves) = (4 * first as u64, (2 * (first - range.start) * heads * LATENT) as u64);
        let lens = selection.lens.address() + words;
        let arguments = Arguments::new()
            .with(cuda.plan.segments())
            .with(cuda.plan.row_segments() + words)
            .with(cuda.plan.pages())
            .with(selection.tokens.address() + words * selection.width as u64)
            .int(selection.width)
            .with(lens)
            .with(places)
            .int(pitch);
        cuda.kernels.launch_early(find_places, Grid::new([count, 1, 1], 256), arguments)?;
        let items = count * groups * parts;
        let args = Args {
            latents,
            places,
            lens,
            queries: queries + halves,
            pieces,
            stats,
            items: items as u32,
            groups: groups as u32,
            parts: parts as u32,
            heads: heads as u32,
            pitch: pitch as u32,
            scale: scale * std::f32::consts::LOG2_E,
        };
        let blocks = items.min(cuda.device.properties().multiprocessors);
        let grid = Grid { blocks: [blocks, 1, 1], threads: 384, shared: shared(of_item) };
        cuda.kernels.launch_early(attend, grid, Arguments::new().with(args))?;
        let arguments =
            Arguments::new().with(pieces).with(stats).int(parts).int(groups).int(heads).with(out + 2 * halves);
        cuda.kernels.launch_early(merge, Grid::new([count, heads, 1], LATENT / 4), arguments)?;
    }
    Ok(())
}
