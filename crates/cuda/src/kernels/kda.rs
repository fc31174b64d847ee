//! Kimi delta attention: one kernel from the projections to the gated norm, row after row; whole chunks of long prompts on
//! tensor cores, the form of prompts on this backend.

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::{KdaForm, KdaWeights, Result};

use super::kda_chunk;
use crate::{
    backend::Cuda,
    cache::CudaCache,
    launch::{Arguments, File, Grid},
    types::{CudaBuffer, Format, require, require_equal},
};

pub(crate) static FILE: File = File { name: "kda.cu", text: include_str!("kda.cu"), constants: &["DIM", "TAPS"] };

/// Widths of heads are multiples of this.
const VALUES: usize = 32;

/// The slots of a layer, as the kernels declare them.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Ring {
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
    if form == KdaForm::Recurrent || !kda_chunk::takes(cuda, &stage, out) {
        return stage.rows(cuda, 0, out);
    }
    let (before, behind) = kda_chunk::outside(&cuda.plan.step.segments);
    if before {
        stage.rows(cuda, 1, out)?;
    }
    kda_chunk::chunks(cuda, &stage, out)?;
    if behind {
        stage.rows(cuda, 2, out)?;
    }
    Ok(())
}

/// What all launches of the stage are given.
pub(super) struct Stage<'a> {
    pub(super) weights: &'a KdaWeights<Cuda>,
    pub(super) proj: &'a CudaBuffer,
    pub(super) gates: &'a CudaBuffer,
    pub(super) ring: Ring,
    pub(super) taps: usize,
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
            grid.threads += PRODUCERS * dim + 64;
            grid.shared = shared(dim, self.taps);
        }
        let arguments = arguments
            .with(self.proj.at(0))
            .int(self.proj.width)
            .with(self.gates.at(0))
            .int(self.gates.width)
            .with(weights.conv.address())
            .with(weights.conv.plain("kda: taps")?)
            .int(weights.conv.pitch)
            .with(weights.a_log.address())
            .with(weights.dt_bias.address())
            .with(weights.gate_lower_bound)
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
}

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

/// Rows of a batch of the pipelined form, and words of what is known of one, as in `kda_cursor.cuh`.
const BATCH: usize = 3;
const PLAN: usize = 12;

/// Dynamic shared memory of the pipelined form: two states, sums, constants, what comes for two batches, and these (as in
/// `kda_pipeline.cuh`).
fn shared(dim: usize, taps: usize) -> usize {
    let groups = dim / VALUES;
    let coming = dim * (3 * (taps - 1 + BATCH) + 2 * BATCH + 3) + 4 * BATCH + PLAN;
    let batch = dim * (BATCH * (6 + groups) + 3) + 8 + PLAN;
    4 * (dim * (2 * dim + 2 * groups + PRODUCERS * (3 * taps + 1)) + PRODUCERS * (coming + batch))
}

/// Constants of the kernel for heads of width `dim` and a convolution of `taps` taps.
pub(crate) fn constants(dim: usize, taps: usize) -> [i64; 2] {
    [dim as i64, taps as i64]
}
