//! Kimi delta attention: one kernel from the projections to the gated norm, row after row; whole chunks of long prompts on
//! tensor cores when that form is asked for.

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::{KdaForm, KdaWeights, Result, Segment};

use crate::{
    backend::Cuda,
    cache::CudaCache,
    launch::{Arguments, File, Grid},
    types::{CudaBuffer, Format, require, require_equal},
};

pub(crate) static FILE: File = File { name: "kda.cu", text: include_str!("kda.cu"), constants: &["DIM", "TAPS"] };

pub(crate) static CHUNKS: File =
    File { name: "kda_chunk.cu", text: include_str!("kda_chunk.cu"), constants: &["DIM", "TAPS"] };

/// Width of a head that has a chunked form; others go row after row.
pub(crate) const CHUNKED_DIM: usize = 128;

/// Rows of a chunk.
const CHUNK: usize = 64;

/// Widths of heads are multiples of this.
const VALUES: usize = 32;

/// The slots of a layer, as the kernels declare them.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Ring {
    state: u64,
    records: u64,
    columns: u64,
    record_ring: i32,
    column_ring: i32,
    record_magic: u32,
    column_magic: u32,
    head_magic: u32,
    pad: u32,
}

/// [`glimmer_tensor::Backend::kda`].
pub(crate) fn kda(
    cuda: &mut Cuda,
    weights: &KdaWeights<Cuda>,
    form: KdaForm,
    proj: &CudaBuffer,
    gates: &CudaBuffer,
    cache: &CudaCache,
    layer: usize,
    out: &mut CudaBuffer,
) -> Result<()> {
    let (heads, dim) = (weights.heads, weights.dim);
    let (rows, inner) = (cuda.plan.rows(), heads * dim);
    let shape = &cache.shape;
    proj.require("kda: projections", rows, 3 * inner + heads)?;
    gates.require("kda: gates", rows, 2 * inner)?;
    out.require("kda: output", rows, inner)?;
    require_equal("kda: heads of the cache", heads, shape.kda_heads)?;
    require_equal("kda: head width of the cache", dim, shape.kda_head_dim)?;
    require_equal("kda: taps", weights.conv.columns, shape.conv_kernel)?;
    require_equal("kda: channels of the convolution", 3 * inner, weights.conv.out)?;
    require_equal("kda: A_log", heads, weights.a_log.len)?;
    require_equal("kda: dt_bias", inner, weights.dt_bias.len)?;
    require_equal("kda: o_norm", dim, weights.o_norm.weight.len)?;
    if dim == 0 || dim % VALUES != 0 || dim > 128 {
        let what = "kda: head width, a multiple of 32 up to 128";
        return Err(glimmer_tensor::Error::Capacity { what, needed: dim, available: 128 });
    }
    for s in &cuda.plan.step.segments {
        require("kda: slots of the cache", s.slot as usize + 1, shape.slots)?;
        require("kda: uncommitted rows", s.rows.saturating_sub(s.commit) as usize, shape.max_draft)?;
        require("kda: records to fold", s.fold as usize, shape.max_draft.min(s.position as usize))?;
    }
    let held = cache.kda(layer)?;
    let (record_ring, column_ring) = (shape.max_draft + 1, shape.conv_kernel + shape.max_draft);
    let ring = Ring {
        state: held.state.address(),
        records: held.records.address(),
        columns: held.columns.address(),
        record_ring: record_ring as i32,
        column_ring: column_ring as i32,
        record_magic: magic(record_ring),
        column_magic: magic(column_ring),
        head_magic: magic(heads),
        pad: 0,
    };
    let stage = Stage { weights, proj, gates, ring, taps: shape.conv_kernel };
    out.format = Format::Float;
    let chunks = cuda.plan.step.segments.iter().map(whole_chunks).max().unwrap_or(0);
    if form == KdaForm::Recurrent || chunks == 0 || dim != CHUNKED_DIM || !out.width.is_multiple_of(2) {
        return stage.rows(cuda, 0, out);
    }
    stage.rows(cuda, 1, out)?;
    stage.chunks(cuda, chunks, out)?;
    stage.rows(cuda, 2, out)
}

/// Whole chunks among the committed rows of a segment, at multiples of their length from position 0 on.
fn whole_chunks(s: &Segment) -> usize {
    let first = (CHUNK - s.position as usize % CHUNK) % CHUNK;
    (s.commit as usize).saturating_sub(first) / CHUNK
}

/// What all launches of the stage are given.
struct Stage<'a> {
    weights: &'a KdaWeights<Cuda>,
    proj: &'a CudaBuffer,
    gates: &'a CudaBuffer,
    ring: Ring,
    taps: usize,
}

impl Stage<'_> {
    /// Row after row: all rows (part 0), those in front of the whole chunks (1) or behind them (2).
    fn rows(&self, cuda: &Cuda, part: usize, out: &CudaBuffer) -> Result<()> {
        let (weights, heads, dim) = (self.weights, self.weights.heads, self.weights.dim);
        let (count, properties) = (cuda.plan.step.segments.len(), cuda.device().properties());
        let mut arguments = Arguments::new().with(cuda.plan.segments());
        let mut grid = Grid::new([heads, count, 1], dim * dim / 32);
        // The pipelined form counts the segments and takes any grid; the plain one is a block a head and segment.
        if properties.capability.0 >= 9 {
            arguments = arguments.int(count);
            grid.blocks = [blocks(heads, count, properties.multiprocessors), 1, 1];
            grid.threads += PRODUCERS * dim + 32;
            grid.shared = shared(dim, self.taps);
        }
        let arguments = self
            .inputs(arguments)?
            .with(weights.o_norm.weight.address())
            .with(weights.o_norm.eps)
            .with(self.ring)
            .int(heads)
            .int(part)
            .with(out.at(0))
            .int(out.width);
        let kernel = cuda.kernels.get(&FILE, &constants(dim, self.taps), "delta")?;
        // States are asked for before the launch in front has ended, unless that is the one that writes them.
        Ok(if part < 2 {
            cuda.kernels.launch_early(kernel, grid, arguments)
        } else {
            cuda.kernels.launch(kernel, grid, arguments)
        }?)
    }

    fn inputs(&self, arguments: Arguments) -> Result<Arguments> {
        let weights = self.weights;
        Ok(arguments
            .with(self.proj.at(0))
            .int(self.proj.width)
            .with(self.gates.at(0))
            .int(self.gates.width)
            .with(weights.conv.address())
            .with(weights.conv.plain("kda: taps")?)
            .int(weights.conv.pitch)
            .with(weights.a_log.address())
            .with(weights.dt_bias.address())
            .with(weights.gate_lower_bound))
    }

    /// The whole chunks, at most `most` a segment, in windows that bound the scratch.
    fn chunks(&self, cuda: &mut Cuda, most: usize, out: &CudaBuffer) -> Result<()> {
        /// Bytes of scratch, about.
        const SCRATCH: usize = 192 << 20;
        let (weights, heads, dim) = (self.weights, self.weights.heads, self.weights.dim);
        let (count, rows) = (cuda.plan.step.segments.len(), cuda.plan.rows());
        // Q, K, W (twice), P in 16 bits, U and the decay in f32.
        let unit = 2 * (4 * CHUNK * dim + CHUNK * CHUNK) + 4 * (CHUNK * dim + dim);
        let window = (SCRATCH / (count * heads * unit)).clamp(1, most);
        let scratch = cuda.scratch("chunks of the delta rule", count * window * heads * unit)?;
        let constants = constants(dim, self.taps);
        let get = |entry| cuda.kernels.get(&CHUNKS, &constants, entry);
        let (prepare, walk, gate) = (get("chunk_prepare")?, get("chunk_walk")?, get("chunk_gate")?);
        let segments = cuda.plan.segments();
        for first in (0..most).step_by(window) {
            let arguments = self.inputs(Arguments::new().with(segments).int(first))?;
            let arguments = arguments.with(self.ring).int(heads).with(scratch);
            let grid = Grid { blocks: [window, heads, count], threads: 256, shared: PREPARED_BYTES };
            cuda.kernels.launch(prepare, grid, arguments)?;
            let arguments = Arguments::new()
                .with(segments)
                .int(first)
                .int(window)
                .with(self.ring)
                .int(heads)
                .with(scratch)
                .with(out.at(0))
                .int(out.width);
            let grid = Grid { blocks: [dim / VALUES, heads, count], threads: 128, shared: WALK_BYTES };
            cuda.kernels.launch(walk, grid, arguments)?;
        }
        let arguments = Arguments::new()
            .with(segments)
            .with(cuda.plan.row_segments())
            .with(self.proj.at(0))
            .int(self.proj.width)
            .with(self.gates.at(0))
            .int(self.gates.width)
            .with(weights.o_norm.weight.address())
            .with(weights.o_norm.eps)
            .with(self.ring)
            .int(heads)
            .with(out.at(0))
            .int(out.width);
        Ok(cuda.kernels.launch(gate, Grid::new([rows, heads.div_ceil(8), 1], 256), arguments)?)
    }
}

/// Dynamic shared memory of `chunk_prepare` and `chunk_walk`: their structures `Prepared` and `Walk`.
const PREPARED_BYTES: usize = 2 * 3 * CHUNK * (CHUNKED_DIM + 8)
    + 4 * CHUNK * (CHUNKED_DIM + 4 + CHUNK + 4)
    + 2 * CHUNK * (CHUNK + 8)
    + 4 * CHUNK
    + 512;
const WALK_BYTES: usize = 2
    * (2 * (4 * CHUNK * (CHUNKED_DIM + 8) + CHUNK * (CHUNK + 8)) + 4 * (CHUNK * (VALUES + 4) + CHUNKED_DIM))
    + 2 * 2 * (CHUNK + CHUNKED_DIM) * (VALUES + 8);

/// Groups of threads that prepare rows.
const PRODUCERS: usize = 2;

/// `ceil(2^32 / n)`, by which the kernel divides; for 1 it is not used.
fn magic(n: usize) -> u32 {
    (1u64 << 32).div_ceil(n.max(2) as u64) as u32
}

/// Blocks of the pipelined form: one a multiprocessor, fewer when then every block stays with one head.
fn blocks(heads: usize, count: usize, multiprocessors: usize) -> usize {
    let whole = multiprocessors / heads * heads;
    let most = if 10 * whole >= 9 * multiprocessors { whole } else { multiprocessors };
    (heads * count).min(most)
}

/// Dynamic shared memory of the pipelined form: two states, sums, numbers on their way, constants, six rows (as in `kda.cu`).
fn shared(dim: usize, taps: usize) -> usize {
    let groups = dim / VALUES;
    let columns = 2 * dim + 2 * groups + PRODUCERS * (2 * (3 * taps + 3) + 3 * taps + 1);
    4 * dim * columns + 6 * 4 * (dim * (9 + groups) + 8)
}

/// Constants of the kernel for heads of width `dim` and a convolution of `taps` taps.
pub(crate) fn constants(dim: usize, taps: usize) -> [i64; 2] {
    [dim as i64, taps as i64]
}
