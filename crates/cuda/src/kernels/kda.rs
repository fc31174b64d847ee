//! Kimi delta attention. Both forms run the recurrence row by row: a chunked form would equal it to rounding only.

use bytemuck::{Pod, Zeroable};
use glimmer_tensor::{KdaWeights, Result};

use crate::{
    backend::Cuda,
    cache::CudaCache,
    launch::{Arguments, File, Grid},
    types::{CudaBuffer, Format, require, require_equal},
};

pub(crate) static FILE: File = File { name: "kda.cu", text: include_str!("kda.cu"), constants: &["DIM", "TAPS"] };

/// Value columns of a block of the delta rule.
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
}

/// [`glimmer_tensor::Backend::kda`].
pub(crate) fn kda(
    cuda: &mut Cuda,
    weights: &KdaWeights<Cuda>,
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
    let ring = Ring {
        state: held.state.address(),
        records: held.records.address(),
        columns: held.columns.address(),
        record_ring: shape.max_draft as i32 + 1,
        column_ring: (shape.conv_kernel + shape.max_draft) as i32,
    };
    let constants = [dim as i64, shape.conv_kernel as i64];
    let ready = cuda.scratch("rows ready for the delta rule", 4 * rows * heads * 4 * dim)?;
    let beta = cuda.scratch("write strengths", 4 * rows * heads)?;
    let (segments, row_segments) = (cuda.plan.segments(), cuda.plan.row_segments());
    let count = cuda.plan.step.segments.len();

    let prepare = Arguments::new()
        .with(segments)
        .with(row_segments)
        .with(proj.at(0))
        .int(proj.width)
        .with(gates.at(0))
        .int(gates.width)
        .with(weights.conv.address())
        .with(weights.conv.plain("kda: taps")?)
        .int(weights.conv.pitch)
        .with(weights.a_log.address())
        .with(weights.dt_bias.address())
        .with(weights.gate_lower_bound)
        .with(ring)
        .int(heads)
        .with(ready)
        .with(beta);
    cuda.kernels.launch(cuda.kernels.get(&FILE, &constants, "prepare")?, Grid::new([rows, heads, 1], dim), prepare)?;

    let delta =
        Arguments::new().with(segments).with(ready).with(beta).with(ring).int(heads).with(out.at(0)).int(out.width);
    let grid = Grid::new([dim / VALUES, heads, count], 128);
    cuda.kernels.launch(cuda.kernels.get(&FILE, &constants, "delta")?, grid, delta)?;

    let gate = Arguments::new()
        .with(out.at(0))
        .int(out.width)
        .with(gates.at(0))
        .int(gates.width)
        .with(weights.o_norm.weight.address())
        .with(weights.o_norm.eps)
        .int(heads);
    cuda.kernels.launch(cuda.kernels.get(&FILE, &constants, "gate")?, Grid::new([rows, heads, 1], dim), gate)?;

    let remember = Arguments::new().with(segments).with(proj.at(0)).int(proj.width).with(ring).int(heads);
    let grid = Grid::new([ring.column_ring as usize, heads, count], dim);
    out.format = Format::Float;
    Ok(cuda.kernels.launch(cuda.kernels.get(&FILE, &constants, "remember")?, grid, remember)?)
}
