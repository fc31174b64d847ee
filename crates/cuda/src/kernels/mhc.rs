//! Hyper-connections: a site in one kernel, or merge, mixing product, coefficients with the collapsed input and its norm.

use glimmer_tensor::{MhcWeights, Norm, Result, Streams};

use super::{dense, gemm::Input};
use crate::{
    backend::Cuda,
    launch::{Arguments, File, Grid},
    types::{CudaBuffer, Format, Kind, require_equal},
};

pub(crate) static FILE: File = File { name: "mhc.cu", text: include_str!("mhc.cu"), constants: &["N"] };

/// The fused site.
pub(crate) static SITE: File = File { name: "mhc_site.cu", text: include_str!("mhc_site.cu"), constants: &[] };

/// Streams that the fused site takes.
pub(crate) const STREAMS: usize = 4;

/// [`glimmer_tensor::Backend::mhc`].
pub(crate) fn mhc(
    cuda: &mut Cuda,
    rows: usize,
    mixer: &MhcWeights<Cuda>,
    norm: &Norm<Cuda>,
    y: Option<&CudaBuffer>,
    streams: &mut Streams<Cuda>,
    x: &mut CudaBuffer,
) -> Result<()> {
    let n = mixer.streams;
    let hidden = checked(n, rows, norm, y, streams)?;
    let count = 2 * n + n * n;
    x.require("mhc: the normed input", rows, hidden)?;
    require_equal("mhc: columns of the mixing matrix", n * hidden, mixer.mix.columns)?;
    require_equal("mhc: rows of the mixing matrix", count, mixer.mix.out)?;
    require_equal("mhc: base", count, mixer.base.len)?;
    require_equal("mhc: scale", 3, mixer.scale.len)?;
    if let Some(blocks) = whole(cuda, mixer, hidden, y, streams, x) {
        let kernel = cuda.kernels.get(&SITE, &[], "site")?;
        let grid = Grid { blocks: [blocks, 1, 1], threads: THREADS, shared: SHARED };
        let resident = match blocks {
            1 => cuda.device().properties().multiprocessors,
            _ => cuda.kernels.resident_clusters(kernel, grid, blocks)?,
        };
        // Clusters of more than eight blocks need not fit.
        if resident > 0 {
            return site(cuda, rows, mixer, norm, y, streams, x, [hidden, blocks, resident]);
        }
    }
    merge(cuda, rows, n, hidden, y, streams)?;
    let products = cuda.scratch("mixing products", 4 * rows * count)?;
    let input = Input { buffer: &streams.x, start: 0, width: n * hidden, list: 0 };
    dense::dot(cuda, rows, input, &mixer.mix, 0, (products, count))?;
    let kernel = cuda.kernels.get(&FILE, &[n as i64], "mix")?;
    let arguments = Arguments::new()
        .with(streams.x.at(0))
        .with(products)
        .with(mixer.base.address())
        .with(mixer.scale.address())
        .with(mixer.rms_eps)
        .with(mixer.eps)
        .int(mixer.sinkhorn_iters)
        .with(streams.post.at(0))
        .with(streams.comb.at(0))
        .with(streams.collapsed.at(0))
        .int(streams.collapsed.width)
        .with(norm.weight.address())
        .with(norm.eps)
        .with(x.at(0))
        .int(x.width)
        .int(hidden);
    x.format = Format::Float;
    Ok(cuda.kernels.launch(kernel, Grid::new([rows, 1, 1], 256), arguments)?)
}

/// Columns of a block of the fused site, and blocks of a cluster at most.
const COLUMNS: usize = 256;
const MAX_BLOCKS: usize = 16;
/// Rows that a cluster takes at a time, at most.
const GROUP: usize = 8;
/// Threads of a block: 64 a row, and the warp of the coefficients.
const THREADS: usize = GROUP * COLUMNS / 4 + 32;
/// Sums of a block for the others: what all of them need, and what one needs for a row's coefficients.
const SUMS: usize = 112 + 20;
/// Dynamic shared memory of a block. For its steps of 16 columns of a stream: streams as operands (with 32 bytes between steps)
/// and the matrix as operands. For its threads: the norm's weight and the streams of the rows before. Four groups' sums.
const SHARED: usize =
    STREAMS * COLUMNS / 16 * (800 + 768) + 2 * COLUMNS * 16 * (1 + STREAMS) + 4 * MAX_BLOCKS * SUMS * 4;

/// Blocks of a cluster, when the fused site takes these shapes: four streams, a BF16 matrix, rows aligned to 16 bytes.
fn whole(
    cuda: &Cuda,
    mixer: &MhcWeights<Cuda>,
    hidden: usize,
    y: Option<&CudaBuffer>,
    streams: &Streams<Cuda>,
    x: &CudaBuffer,
) -> Option<usize> {
    let widths = [hidden, streams.collapsed.width, x.width, y.map_or(0, |y| y.width), mixer.mix.pitch];
    let fits = cuda.device().properties().capability.0 >= 9
        && mixer.streams == STREAMS
        && mixer.mix.kind == Kind::Bf16
        && widths.iter().all(|w| w % 4 == 0)
        && hidden <= COLUMNS * MAX_BLOCKS;
    fits.then(|| hidden.div_ceil(COLUMNS))
}

fn site(
    cuda: &Cuda,
    rows: usize,
    mixer: &MhcWeights<Cuda>,
    norm: &Norm<Cuda>,
    y: Option<&CudaBuffer>,
    streams: &Streams<Cuda>,
    x: &mut CudaBuffer,
    [hidden, blocks, resident]: [usize; 3],
) -> Result<()> {
    let kernel = cuda.kernels.get(&SITE, &[], "site")?;
    // Few rows are spread over half of what the device holds, so that the next site's blocks come before these end. More clusters
    // than the device holds would begin when the others have ended.
    let few = (resident / 2).max(1);
    let together = if rows <= GROUP * few { rows.div_ceil(few).max(1) } else { GROUP };
    let clusters = rows.div_ceil(together).min(resident);
    let grid = Grid { blocks: [blocks * clusters, 1, 1], threads: THREADS, shared: SHARED };
    let arguments = Arguments::new()
        .with(streams.x.at(0))
        .with(y.map_or(0, |y| y.at(0)))
        .int(y.map_or(0, |y| y.width))
        .with(streams.post.at(0))
        .with(streams.comb.at(0))
        .with(mixer.mix.address())
        .int(mixer.mix.pitch)
        .with(mixer.base.address())
        .with(mixer.scale.address())
        .with(mixer.rms_eps)
        .with(mixer.eps)
        .int(mixer.sinkhorn_iters)
        .with(streams.collapsed.at(0))
        .int(streams.collapsed.width)
        .with(norm.weight.address())
        .with(norm.eps)
        .with(x.at(0))
        .int(x.width)
        .int(hidden)
        .int(rows)
        .int(blocks)
        .int(together);
    x.format = Format::Float;
    Ok(cuda.kernels.launch_clusters(kernel, grid, blocks, arguments)?)
}

/// [`glimmer_tensor::Backend::mhc_head`].
pub(crate) fn mhc_head(
    cuda: &mut Cuda,
    rows: usize,
    norm: &Norm<Cuda>,
    y: &CudaBuffer,
    streams: &mut Streams<Cuda>,
    out: &mut CudaBuffer,
) -> Result<()> {
    let n = streams.post.width;
    let hidden = checked(n, rows, norm, Some(y), streams)?;
    out.require("mhc_head: the hidden states", rows, hidden)?;
    merge(cuda, rows, n, hidden, Some(y), streams)?;
    let kernel = cuda.kernels.get(&FILE, &[n as i64], "mean_norm")?;
    let arguments = Arguments::new()
        .with(streams.x.at(0))
        .with(streams.collapsed.at(0))
        .int(streams.collapsed.width)
        .with(norm.weight.address())
        .with(norm.eps)
        .with(out.at(0))
        .int(out.width)
        .int(hidden);
    out.format = Format::Float;
    Ok(cuda.kernels.launch(kernel, Grid::new([rows, 1, 1], 256), arguments)?)
}

fn merge(
    cuda: &Cuda,
    rows: usize,
    n: usize,
    hidden: usize,
    y: Option<&CudaBuffer>,
    streams: &Streams<Cuda>,
) -> Result<()> {
    let Some(y) = y else { return Ok(()) };
    let kernel = cuda.kernels.get(&FILE, &[n as i64], "merge")?;
    let arguments = Arguments::new()
        .with(streams.x.at(0))
        .with(y.at(0))
        .int(y.width)
        .with(streams.post.at(0))
        .with(streams.comb.at(0))
        .int(hidden);
    Ok(cuda.kernels.launch(kernel, Grid::new([hidden.div_ceil(256), rows, 1], 256), arguments)?)
}

/// Width of a stream, when all buffers agree.
fn checked(n: usize, rows: usize, norm: &Norm<Cuda>, y: Option<&CudaBuffer>, streams: &Streams<Cuda>) -> Result<usize> {
    if n == 0 {
        return Err(glimmer_tensor::Error::Capacity { what: "mhc: streams", needed: 1, available: 0 });
    }
    let width = norm.weight.len;
    require_equal("mhc: width of the streams", n * width, streams.x.width)?;
    require_equal("mhc: width of post", n, streams.post.width)?;
    require_equal("mhc: width of comb", n * n, streams.comb.width)?;
    streams.x.require("mhc: the streams", rows, n * width)?;
    streams.post.require("mhc: post", rows, n)?;
    streams.comb.require("mhc: comb", rows, n * n)?;
    streams.collapsed.require("mhc: the collapsed input", rows, width)?;
    y.map_or(Ok(()), |y| y.require("mhc: the sub-block's output", rows, width))?;
    Ok(width)
}
