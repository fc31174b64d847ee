//! Measurements of kernels against what the device can do.
//!
//! A measurement captures several calls over rotating buffers in a graph, replays it, and takes the median of the replays.
//! Contents are random, never zeros. The limits are measured in the same run: the rate of reading 2 GiB once for streams of
//! memory, the rate of warpgroup products of random halves for arithmetic on tensor cores. One file a family of kernels.

mod attention;
mod dense;
mod experts;
mod kda;
mod latent;
mod mhc;
mod router;
mod sampler;
mod slice;
mod small;
mod step;

pub use experts::{Chain, expert_chain, random_experts};
use glimmer_tensor::Result;
pub use step::{StepParts, step_parts};

use crate::{
    backend::Cuda,
    compile::Unit as Source,
    graph::Graph,
    launch::{Arguments, File, Grid},
    memory::{Event, Memory},
    types::{BLOCK, CudaMatrix, Kind, require_equal, unique},
    units::{needs_warpgroups, units},
};

pub(crate) static FILE: File = File { name: "measure.cu", text: include_str!("../kernels/measure.cu"), constants: &[] };

/// Replays of a graph: usually, and at least where they take long.
const REPLAYS: usize = 15;
const FEWEST_REPLAYS: usize = 5;

/// Microseconds that the calls of a graph and all its replays may take, within the numbers above.
const GRAPH_MICROS: f64 = 6_000.0;
const REPLAY_MICROS: f64 = 60_000.0;

/// Calls that are made before anything is measured, so that kernels are there and scratch has grown.
const FIRST_CALLS: usize = 4;

/// What does a kernel's arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Tensor cores on 16-bit operands.
    Tensor,
    /// f32 lanes.
    Float,
}

/// A row of results: one kernel at one size.
#[derive(Debug, Clone)]
pub struct Row {
    /// What was measured, with the sizes other than the rows; a slice of one of several ranks ends with `TP=` and their number.
    pub kernel: String,
    /// Rows of the step (M).
    pub rows: usize,
    /// Microseconds a call: median, 10th and 90th percentile.
    pub micros: [f64; 3],
    /// Bytes that must be moved: every input read once, every output written once.
    pub bytes: f64,
    /// Operations (a multiplication with its addition is two).
    pub flops: f64,
    /// What does the operations.
    pub unit: Unit,
}

/// Rates of the device in this run.
#[derive(Debug, Clone, Copy)]
pub struct Ceilings {
    /// Reading, GB/s.
    pub read: f64,
    /// Copying, bytes read and written, GB/s.
    pub copy: f64,
    /// Products on tensor cores, TFLOP/s.
    pub tensor: f64,
    /// f32 arithmetic, TFLOP/s: two operations a lane and clock of 128 lanes a multiprocessor at 1.755 GHz.
    pub float: f64,
}

impl Row {
    /// Of how many ranks the slice is one's; none where every rank has the whole.
    pub fn ranks(&self) -> Option<usize> {
        let (_, number) = self.kernel.rsplit_once("TP=")?;
        number.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    }

    /// Width of the middle eight tenths of the replays, over their median.
    pub fn spread(&self) -> f64 {
        let [median, low, high] = self.micros;
        (high - low) / median
    }

    /// Bytes over time in GB/s.
    pub fn gigabytes(&self) -> f64 {
        self.bytes / self.micros[0] / 1e3
    }

    /// Operations over time in TFLOP/s.
    pub fn teraflops(&self) -> f64 {
        self.flops / self.micros[0] / 1e6
    }

    /// Least time in microseconds: of the bytes at the read rate or of the operations at their unit's rate.
    pub fn floor(&self, ceilings: &Ceilings) -> f64 {
        let rate = if self.unit == Unit::Tensor { ceilings.tensor } else { ceilings.float };
        (self.bytes / ceilings.read / 1e3).max(self.flops / rate / 1e6)
    }

    /// Least time over measured time. Above 1 the bytes are counted wrongly or come from the second-level cache.
    pub fn achieved(&self, ceilings: &Ceilings) -> f64 {
        self.floor(ceilings) / self.micros[0]
    }

    /// Names of the columns of [`Self::line`].
    pub const HEADER: &'static str = "| kernel | M | us | p10 .. p90 | GB/s | TFLOP/s | floor us | of the limit |\n|---|---|---|---|---|---|---|---|";

    /// The row as a line of a table in Markdown.
    pub fn line(&self, ceilings: &Ceilings) -> String {
        let [median, low, high] = self.micros;
        let achieved = self.achieved(ceilings);
        format!(
            "| {} | {} | {median:.1} | {low:.1} .. {high:.1} | {:.0} | {:.1} | {:.1} | {:.1} %{} |",
            self.kernel,
            self.rows,
            self.gigabytes(),
            self.teraflops(),
            self.floor(ceilings),
            100.0 * achieved,
            if achieved > 1.0 { " !" } else { "" }
        )
    }
}

/// Random contents of a piece of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contents {
    /// Any bits.
    Bits = 0,
    /// f32 in -1 .. 1.
    Floats = 1,
    /// Blocks of INT4 with scales in 1/256 .. 1/128.
    Int4 = 2,
    /// bf16 in -1 .. 1.
    Bf16 = 3,
}

/// Fills memory with random contents, different ones each time.
pub(crate) fn fill(cuda: &Cuda, memory: &Memory, contents: Contents) -> Result<()> {
    let words = memory.bytes() / 4;
    let arguments = Arguments::new().with(memory.address()).with(words as u64).with(unique()).with(contents as i32);
    let grid = Grid::new([words.div_ceil(256).clamp(1, 4096), 1, 1], 256);
    Ok(cuda.kernels.launch(cuda.kernels.get(&FILE, &[], "fill")?, grid, arguments)?)
}

/// A random matrix `[out, columns]` in BF16, -1 .. 1.
///
/// # Errors
/// Errors of the device.
pub fn random_matrix(cuda: &Cuda, out: usize, columns: usize) -> Result<CudaMatrix> {
    // Padding of a row that is no whole number of blocks would have to be zero.
    let pitch = columns.next_multiple_of(BLOCK);
    require_equal("random matrix: columns in whole blocks", columns, pitch)?;
    let data = cuda.memory.uninitialized("random weights", 2 * out * pitch)?;
    fill(cuda, &data, Contents::Bf16)?;
    Ok(CudaMatrix { kind: Kind::Bf16, out, columns, pitch, data, id: unique() })
}

/// Runs up to `calls` of `call(i)` as a graph several times: microseconds a call, median, 10th and 90th percentile. Calls that
/// take long are fewer, at least two where there are as many.
pub(crate) fn timed(
    cuda: &mut Cuda,
    calls: usize,
    mut call: impl FnMut(&mut Cuda, usize) -> Result<()>,
) -> Result<[f64; 3]> {
    let device = cuda.device().clone();
    let (start, end) = (Event::new(&device)?, Event::new(&device)?);
    let first = calls.min(FIRST_CALLS);
    for i in 0..first {
        call(cuda, i)?;
    }
    start.record()?;
    call(cuda, 0)?;
    end.record()?;
    end.wait()?;
    let one = end.micros_since(&start)?.max(1.0);
    let calls = calls.min(((GRAPH_MICROS / one) as usize).max(2));
    for i in first..calls {
        call(cuda, i)?;
    }
    let mut graph = Graph::capture(&device, || (0..calls).try_for_each(|i| call(cuda, i)))?;
    let replays = (REPLAY_MICROS / (one * calls as f64)) as usize;
    let replays = replays.clamp(FEWEST_REPLAYS, REPLAYS);
    for _ in 0..replays / FEWEST_REPLAYS {
        graph.launch()?;
    }
    let mut times = Vec::with_capacity(replays);
    for _ in 0..replays {
        start.record()?;
        graph.launch()?;
        end.record()?;
        end.wait()?;
        times.push(end.micros_since(&start)? / calls as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok([times[replays / 2], times[replays / 10], times[replays - 1 - replays / 10]])
}

/// The read rate: 2 GiB read once.
///
/// # Errors
/// Errors of the device.
pub fn read_rate(cuda: &mut Cuda) -> Result<Row> {
    let memory = cuda.memory.uninitialized("measurement", 2 << 30)?;
    let out = cuda.memory.uninitialized("measurement", 4)?;
    fill(cuda, &memory, Contents::Bits)?;
    let kernel = cuda.kernels.get(&FILE, &[], "read_all")?;
    let blocks = 8 * cuda.device().properties().multiprocessors;
    let micros = timed(cuda, 3, |cuda, _| {
        let arguments = Arguments::new().with(memory.address()).with(memory.bytes() as u64 / 16).with(out.address());
        Ok(cuda.kernels.launch(kernel, Grid::new([blocks, 1, 1], 512), arguments)?)
    })?;
    Ok(ceiling("read 2 GiB", micros, memory.bytes() as f64, 0.0))
}

/// The copy rate: 1 GiB read and written once, by the same loads as [`read_rate`].
///
/// # Errors
/// Errors of the device.
pub fn copy_rate(cuda: &mut Cuda) -> Result<Row> {
    let (from, to) =
        (cuda.memory.uninitialized("measurement", 1 << 30)?, cuda.memory.uninitialized("measurement", 1 << 30)?);
    fill(cuda, &from, Contents::Bits)?;
    let kernel = cuda.kernels.get(&FILE, &[], "copy_all")?;
    let blocks = 8 * cuda.device().properties().multiprocessors;
    let micros = timed(cuda, 3, |cuda, _| {
        let arguments = Arguments::new().with(from.address()).with(from.bytes() as u64 / 16).with(to.address());
        Ok(cuda.kernels.launch(kernel, Grid::new([blocks, 1, 1], 512), arguments)?)
    })?;
    Ok(ceiling("copy 1 GiB", micros, 2.0 * from.bytes() as f64, 0.0))
}

/// The rate of the tensor cores: warpgroup products `64 x 128 x 16` of random halves without a load from memory (compute
/// capability 9.0; elsewhere products of a warp).
///
/// # Errors
/// Errors of the device.
pub fn tensor_rate(cuda: &mut Cuda) -> Result<Row> {
    /// Products of a warpgroup.
    const STEPS: usize = 4096;
    /// Warpgroups of a block, blocks of a multiprocessor.
    const GROUPS: usize = 4;
    let blocks = cuda.device().properties().multiprocessors;
    let out = cuda.memory.uninitialized("measurement", 4 * 128 * GROUPS * blocks)?;
    let kernel = cuda.kernels.get(&FILE, &[], "multiply_all")?;
    let micros = timed(cuda, 3, |cuda, _| {
        let arguments = Arguments::new().int(STEPS).with(unique()).with(out.address());
        Ok(cuda.kernels.launch(kernel, Grid::new([blocks, 1, 1], 128 * GROUPS), arguments)?)
    })?;
    let flops = 2.0 * (64 * 128 * 16 * STEPS * GROUPS * blocks) as f64;
    Ok(ceiling("products of random halves", micros, 0.0, flops))
}

/// Measures one family of kernels at the released model's shapes.
pub type Family = fn(&mut Cuda, &mut dyn FnMut(Row)) -> Result<()>;

/// The families by name.
pub const FAMILIES: [(&str, Family); 9] = [
    ("experts", experts::rows),
    ("kda", kda::rows),
    ("mhc", mhc::rows),
    ("attention", attention::rows),
    ("latent", latent::rows),
    ("dense", dense::rows),
    ("router", router::rows),
    ("sampler", sampler::rows),
    ("small", small::rows),
];

/// Compiles the kernels that the families launch, in parallel, into the folder of compiled kernels: how many there are. Without a
/// folder this is of no use.
///
/// # Errors
/// The first that does not compile.
pub fn prepare(cuda: &Cuda) -> Result<usize> {
    let mut all: Vec<Source> = Vec::new();
    for ranks in slice::RANKS {
        let fresh = units(&slice::slice(ranks)?, false);
        all.extend(fresh.into_iter().filter(|unit| !all.contains(unit)).collect::<Vec<_>>());
    }
    let (major, _) = cuda.device().properties().capability;
    all.retain(|unit| major == 9 || !needs_warpgroups(unit));
    Ok(cuda.kernels.prepare(&all)?.len())
}

fn ceiling(kernel: &str, micros: [f64; 3], bytes: f64, flops: f64) -> Row {
    Row { kernel: kernel.to_owned(), rows: 0, micros, bytes, flops, unit: Unit::Tensor }
}

/// The ceilings, measured now.
///
/// # Errors
/// Errors of the device.
pub fn ceilings(cuda: &mut Cuda) -> Result<Ceilings> {
    let multiprocessors = cuda.device().properties().multiprocessors as f64;
    Ok(Ceilings {
        read: read_rate(cuda)?.gigabytes(),
        copy: copy_rate(cuda)?.gigabytes(),
        tensor: tensor_rate(cuda)?.teraflops(),
        float: multiprocessors * 128.0 * 2.0 * 1.755e-3,
    })
}
