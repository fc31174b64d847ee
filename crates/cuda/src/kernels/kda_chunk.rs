//! Kimi delta attention over whole chunks on tensor cores: which steps have them, and the launch.

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::{Result, Segment};

use super::kda::{Ring, Stage, constants};
use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    types::CudaBuffer,
};

pub(crate) static FILE: File =
    File { name: "kda_chunk.cu", text: include_str!("kda_chunk.cu"), constants: &["DIM", "TAPS"] };

/// Width of a head that has a chunked form; others go row after row.
pub(crate) const DIM: usize = 128;

/// Rows of a chunk.
const CHUNK: usize = 64;

/// What a row may lose at most, as a logarithm: sixteen rows stay above the smallest normal f32.
const LOWEST_BOUND: f32 = -5.4;

/// Heads that are walked at a time: the other blocks prepare chunks for them.
const WALKERS: usize = 32;

/// Images of a walker that may lie in memory, and bytes of one, as in `kda_chunk.cu`.
const PLACES: usize = 8;
const IMAGE_BYTES: usize = 74752;

/// Dynamic shared memory: two teams' (a walker needs less).
const SHARED: usize = 2 * 113_664;

/// Arguments of the kernel, as it declares them.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Args {
    segments: u64,
    proj: u64,
    gates: u64,
    taps: u64,
    a_log: u64,
    dt_bias: u64,
    weight: u64,
    out: u64,
    counters: u64,
    images: u64,
    ring: Ring,
    segment_count: i32,
    proj_stride: i32,
    gates_stride: i32,
    out_stride: i32,
    bf16: i32,
    taps_pitch: i32,
    heads: i32,
    walkers: i32,
    bound: f32,
    eps: f32,
}

/// Whether the step has whole chunks and the device and the shapes a kernel for them.
pub(super) fn takes(cuda: &Cuda, stage: &Stage<'_>, out: &CudaBuffer) -> bool {
    cuda.device().properties().capability == (9, 0)
        && stage.weights.dim == DIM
        && stage.weights.gate_lower_bound >= LOWEST_BOUND
        && stage.proj.width.is_multiple_of(4)
        && stage.gates.width.is_multiple_of(4)
        && out.width.is_multiple_of(4)
        && cuda.device().properties().multiprocessors > 1
        && cuda.plan.step.segments.iter().any(|s| whole(s).1 > 0)
}

/// The row of a segment that its whole chunks begin with, and their number: among the committed rows, at multiples of their length
/// from position 0 on.
fn whole(s: &Segment) -> (usize, usize) {
    let first = (CHUNK - s.position as usize % CHUNK) % CHUNK;
    (first, (s.commit as usize).saturating_sub(first) / CHUNK)
}

/// Whether anything is left to do row after row in front of the chunks (records, too) and behind them.
pub(super) fn outside(segments: &[Segment]) -> (bool, bool) {
    let left = |s: &Segment| match whole(s) {
        (_, 0) => (s.fold + s.rows > 0, false),
        (first, count) => (s.fold > 0 || first > 0, first + CHUNK * count < s.rows as usize),
    };
    segments.iter().map(left).fold((false, false), |(a, b), (c, d)| (a || c, b || d))
}

/// All whole chunks of the step.
pub(super) fn chunks(cuda: &mut Cuda, stage: &Stage<'_>, out: &CudaBuffer) -> Result<()> {
    let (weights, heads, segments) = (stage.weights, stage.weights.heads, cuda.plan.step.segments.len());
    let blocks = cuda.device().properties().multiprocessors;
    let walkers = (segments * heads).min(WALKERS).min(blocks - 1);
    let count = 32 + walkers * (1 + PLACES);
    let counters = cuda.scratch("counters of the delta rule", 4 * count)?;
    let clear = cuda.kernels.get(&FILE, &constants(DIM, stage.taps), "clear")?;
    cuda.kernels.launch(clear, Grid::new([1, 1, 1], 256), Arguments::new().with(counters).int(count))?;
    let args = Args {
        segments: cuda.plan.segments(),
        proj: stage.proj.at(0),
        gates: stage.gates.at(0),
        taps: weights.conv.address(),
        a_log: weights.a_log.address(),
        dt_bias: weights.dt_bias.address(),
        weight: weights.o_norm.weight.address(),
        out: out.at(0),
        counters,
        images: cuda.scratch("chunks of the delta rule", walkers * PLACES * IMAGE_BYTES)?,
        ring: stage.ring,
        segment_count: segments as i32,
        proj_stride: stage.proj.width as i32,
        gates_stride: stage.gates.width as i32,
        out_stride: out.width as i32,
        bf16: weights.conv.plain("kda: taps")?,
        taps_pitch: weights.conv.pitch as i32,
        heads: heads as i32,
        walkers: walkers as i32,
        bound: weights.gate_lower_bound,
        eps: weights.o_norm.eps,
    };
    let kernel = cuda.kernels.get(&FILE, &constants(DIM, stage.taps), "chunks")?;
    // Blocks wait for each other: as many as the device holds, one a multiprocessor.
    let grid = Grid { blocks: [blocks, 1, 1], threads: 512, shared: SHARED };
    Ok(cuda.kernels.launch(kernel, grid, Arguments::new().with(args))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(position: u32, rows: u32, fold: u32, commit: u32) -> Segment {
        Segment { slot: 0, position, rows, fold, commit, first_page: 0, pages: 0 }
    }

    #[test]
    fn whole_chunks_lie_at_multiples_of_their_length() {
        assert_eq!(whole(&segment(0, 64, 0, 64)), (0, 1));
        assert_eq!(whole(&segment(0, 64, 0, 63)), (0, 0));
        assert_eq!(whole(&segment(1, 200, 0, 198)), (63, 2));
        assert_eq!(whole(&segment(64, 10, 0, 10)), (0, 0));
    }

    #[test]
    fn rows_outside_chunks_are_found() {
        assert_eq!(outside(&[segment(0, 64, 0, 64)]), (false, false));
        assert_eq!(outside(&[segment(64, 64, 1, 64)]), (true, false));
        assert_eq!(outside(&[segment(0, 66, 0, 64)]), (false, true));
        assert_eq!(outside(&[segment(0, 64, 0, 64), segment(3, 1, 0, 1)]), (true, false));
        assert_eq!(outside(&[segment(63, 66, 0, 65)]), (true, true));
    }
}
