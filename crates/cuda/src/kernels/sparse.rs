//! Latent attention over selected tokens with latents kept as halves.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::{PAGE_TOKENS, Result};

use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    library::OWN_ROWS,
    types::CudaSelection,
};

pub(crate) static FILE: File =
    File { name: "sparse.cu", text: include_str!("sparse.cu"), constants: &["HEADS", "PAGE"] };

/// Width of a latent.
pub(crate) const LATENT: usize = 512;

/// Tokens of a tile.
const TILE: usize = 64;

/// Parts of a row's list in steps of up to so many rows; beyond, rows are not cut. Among steps of equal parts a row's bits do not depend
/// on the number of rows.
const PARTS: usize = 4;
const PARTED_ROWS: usize = 320;

/// Parts in steps with few rows, up to where products become the library's. Where it is not there its line does not exist either.
const MORE_PARTS: usize = 5;

/// Threads of a block: a warpgroup of scores, one of sums, one that gathers, one that looks ahead.
const THREADS: usize = 512;

/// Bytes of sums of parts held at a time; more rows are taken in turns.
const PIECES: usize = 256 << 20;

/// Arguments of the kernel, as it declares them.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Args {
    segments: u64,
    row_segment: u64,
    pages: u64,
    tokens: u64,
    lens: u64,
    latents: u64,
    queries: u64,
    pieces: u64,
    stats: u64,
    items: u32,
    groups: u32,
    parts: u32,
    heads: u32,
    width: u32,
    scale: f32,
    halves: u32,
    unused: u32,
}

/// Where attended latents `[rows, heads, LATENT]` go, and as what.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Attended {
    Floats(u64),
    /// For steps whose lists are [`whole`].
    Halves(u64),
}

/// Parts of a list in a step of so many rows.
fn parts(rows: usize, library: bool) -> usize {
    match rows {
        0..=OWN_ROWS if library => MORE_PARTS,
        0..=PARTED_ROWS => PARTS,
        _ => 1,
    }
}

/// Whether lists of a step of so many rows are not cut.
pub(crate) fn whole(rows: usize) -> bool {
    rows > PARTED_ROWS
}

/// Heads of an item, of which a layer may have several.
pub(crate) fn item_heads(heads: usize) -> usize {
    match heads {
        0..=8 => 8,
        9..=16 => 16,
        _ => 32,
    }
}

/// Bytes of shared memory of a block: ring, queries, weights of two tiles, maxima and factors, marks, places and items known ahead,
/// barriers.
fn shared(heads: usize) -> usize {
    let (units, places, items) = (11, 16, 4);
    let ahead = places * 4 * TILE + items * 16;
    units * TILE * 256 + heads * (1024 + 2 * 128 + 28) + 16 + ahead + (units + places + items + 3) * 16
}

/// `out[row, head]` = attended latent for absorbed `queries` in halves, both `[rows, heads, LATENT]` and of a range of the step's
/// rows. Infinite queries count as the largest half.
pub(crate) fn attend(
    cuda: &mut Cuda,
    range: Range<usize>,
    selection: &CudaSelection,
    latents: u64,
    queries: u64,
    out: Attended,
    heads: usize,
    scale: f32,
) -> Result<()> {
    let rows = cuda.plan.rows();
    let of_item = item_heads(heads);
    let groups = heads.div_ceil(of_item);
    let parts = parts(rows, cuda.has_library());
    let (out, halves) = match out {
        Attended::Floats(address) => (address, false),
        Attended::Halves(address) => (address, true),
    };
    let piece = 4 * of_item * LATENT * groups * parts;
    let turn = (PIECES / piece).clamp(1, range.len().max(1));
    // A row that is not cut needs no pieces.
    let held = if parts > 1 { turn } else { 0 };
    let pieces = cuda.scratch("attention of parts", held * piece)?;
    let stats = cuda.scratch("softmax of parts", 8 * held * groups * parts * of_item)?;
    let constants = [of_item as i64, PAGE_TOKENS as i64];
    let kernel = |entry| cuda.kernels.get(&FILE, &constants, entry);
    let (attend, merge) =
        (kernel("attend_selected")?, kernel(if parts == MORE_PARTS { "merge_5" } else { "merge_4" })?);
    for first in range.clone().step_by(turn) {
        let count = turn.min(range.end - first);
        let (words, elements) = (4 * first as u64, ((first - range.start) * heads * LATENT) as u64);
        let result = out + if halves { 2 } else { 4 } * elements;
        let items = count * groups * parts;
        let args = Args {
            segments: cuda.plan.segments(),
            row_segment: cuda.plan.row_segments() + words,
            pages: cuda.plan.pages(),
            tokens: selection.tokens.address() + words * selection.width as u64,
            lens: selection.lens.address() + words,
            latents,
            queries: queries + 2 * elements,
            pieces: if parts > 1 { pieces } else { result },
            stats,
            items: items as u32,
            groups: groups as u32,
            parts: parts as u32,
            heads: heads as u32,
            width: selection.width as u32,
            scale: scale * std::f32::consts::LOG2_E,
            halves: u32::from(halves),
            unused: 0,
        };
        let blocks = items.min(cuda.device.properties().multiprocessors);
        let grid = Grid { blocks: [blocks, 1, 1], threads: THREADS, shared: shared(of_item) };
        cuda.kernels.launch_early(attend, grid, Arguments::new().with(args))?;
        if parts > 1 {
            let arguments = Arguments::new().with(pieces).with(stats).int(groups).int(heads).with(result);
            cuda.kernels.launch_early(merge, Grid::new([count, groups * of_item / 8, LATENT / 128], 128), arguments)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_have_lines_of_the_products_only_with_the_library() {
        assert_eq!([1, 24, 25, 320, 321].map(|rows| parts(rows, true)), [5, 5, 4, 4, 1]);
        assert_eq!([1, 24, 25, 320, 321].map(|rows| parts(rows, false)), [4, 4, 4, 4, 1]);
        assert!(whole(321) && !whole(320));
    }
}
