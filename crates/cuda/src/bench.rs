//! Measurements: the read rate of the device and the expert chain against it.
//!
//! A measurement captures several calls over rotating sets of weights in a graph, replays it, and takes the median of the
//! replays. Contents are random, never zeros. The limit for streaming is the read rate measured in the same run.

use glimmer_tensor::{Backend, Experts, Linear, Result, Swiglu};

use crate::{
    backend::Cuda,
    graph::Graph,
    kernels::moe,
    launch::{Arguments, File, Grid},
    memory::{Event, Memory},
    types::{CudaMatrix, GROUP, INT4_BLOCK_BYTES, INT4_ROWS, Kind, unique},
};

pub(crate) static FILE: File = File { name: "measure.cu", text: include_str!("kernels/measure.cu"), constants: &[] };

/// Replays of a graph.
const REPLAYS: usize = 15;

/// A row of results.
#[derive(Debug, Clone)]
pub struct Row {
    /// What was measured.
    pub name: String,
    /// Microseconds a call: median, 10th and 90th percentile.
    pub micros: [f64; 3],
    /// Bytes that must be read.
    pub bytes: f64,
    /// Arithmetic of the call.
    pub flops: f64,
}

impl Row {
    /// Bytes over time in GB/s.
    pub fn gigabytes(&self) -> f64 {
        self.bytes / self.micros[0] / 1e3
    }

    /// Operations over time in TFLOP/s.
    pub fn teraflops(&self) -> f64 {
        self.flops / self.micros[0] / 1e6
    }
}

/// A slice of the experts and the work to be measured.
#[derive(Debug, Clone, Copy)]
pub struct Chain {
    /// Experts.
    pub experts: usize,
    /// Experts a row.
    pub top: usize,
    /// Width of the model.
    pub hidden: usize,
    /// Width of an expert's slice.
    pub width: usize,
    /// Rows.
    pub rows: usize,
}

fn fill(cuda: &Cuda, memory: &Memory, kind: i32) -> Result<()> {
    let words = memory.bytes() / 4;
    let arguments = Arguments::new().with(memory.address()).with(words as u64).with(unique()).with(kind);
    let grid = Grid::new([words.div_ceil(256).clamp(1, 4096), 1, 1], 256);
    Ok(cuda.kernels.launch(cuda.kernels.get(&FILE, &[], "fill")?, grid, arguments)?)
}

/// Runs `calls` of `call(i)` as a graph several times.
fn timed(cuda: &mut Cuda, calls: usize, mut call: impl FnMut(&mut Cuda, usize) -> Result<()>) -> Result<[f64; 3]> {
    for i in 0..calls {
        call(cuda, i)?;
    }
    let device = cuda.device().clone();
    let mut graph = Graph::capture(&device, || (0..calls).try_for_each(|i| call(cuda, i)))?;
    for _ in 0..3 {
        graph.launch()?;
    }
    let (start, end) = (Event::new(&device)?, Event::new(&device)?);
    let mut times = Vec::with_capacity(REPLAYS);
    for _ in 0..REPLAYS {
        start.record()?;
        graph.launch()?;
        end.record()?;
        end.wait()?;
        times.push(end.micros_since(&start)? / calls as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok([times[REPLAYS / 2], times[REPLAYS / 10], times[REPLAYS - 1 - REPLAYS / 10]])
}

/// The read rate: 2 GiB read once.
///
/// # Errors
/// Errors of the device.
pub fn read_rate(cuda: &mut Cuda) -> Result<Row> {
    let memory = cuda.memory.uninitialized("measurement", 2 << 30)?;
    let out = cuda.memory.uninitialized("measurement", 4)?;
    fill(cuda, &memory, 0)?;
    let kernel = cuda.kernels.get(&FILE, &[], "read_all")?;
    let blocks = 8 * cuda.device().properties().multiprocessors;
    let micros = timed(cuda, 3, |cuda, _| {
        let arguments = Arguments::new().with(memory.address()).with(memory.bytes() as u64 / 16).with(out.address());
        Ok(cuda.kernels.launch(kernel, Grid::new([blocks, 1, 1], 512), arguments)?)
    })?;
    Ok(Row { name: "read 2 GiB".to_owned(), micros, bytes: memory.bytes() as f64, flops: 0.0 })
}

fn int4(cuda: &Cuda, out: usize, columns: usize) -> Result<Linear<Cuda>> {
    let data = cuda
        .memory
        .uninitialized("random weights", out.next_multiple_of(INT4_ROWS) / 8 * (columns / GROUP) * INT4_BLOCK_BYTES)?;
    fill(cuda, &data, 2)?;
    let weight = CudaMatrix { kind: Kind::Int4, out, columns, pitch: columns, data, id: unique() };
    Ok(Linear { weight, bias: None })
}

/// Full-size random experts in INT4.
///
/// # Errors
/// Errors of the device.
pub fn random_experts(cuda: &Cuda, chain: Chain) -> Result<Experts<Cuda>> {
    let Chain { hidden, width, .. } = chain;
    let routed = (0..chain.experts)
        .map(|_| {
            Ok(Swiglu {
                gate: int4(cuda, width, hidden)?,
                up: int4(cuda, width, hidden)?,
                down: int4(cuda, hidden, width)?,
            })
        })
        .collect::<Result<_>>()?;
    Ok(Experts { routed, shared: None, limit: 10.0 })
}

/// The chain work list with the rows in their slots, gate and up with SwiGLU, down, combination, over the sets in turn; then
/// parts of it. `tuning` are sizes of the experts' kernel: tokens of an item, warpgroups, tiles of 64
/// rows of a warpgroup, stages.
///
/// # Errors
/// Errors of the device.
pub fn expert_chain(
    cuda: &mut Cuda,
    chain: Chain,
    sets: &[Experts<Cuda>],
    tuning: Option<[i64; 4]>,
) -> Result<(Vec<Row>, usize)> {
    let Chain { experts, top, hidden, width, rows } = chain;
    let choices = rows * top;
    cuda.tuning = tuning;
    let x = cuda.buffer(rows, hidden)?;
    fill(cuda, &x.memory, 1)?;
    let (mut act, mut shared) = (cuda.buffer(choices, width)?, cuda.buffer(1, 1)?);
    let mut out = cuda.buffer(rows, hidden)?;
    let mut routings = Vec::new();
    let mut distinct = 0;
    const ROUTINGS: usize = 8;
    for set in 0..ROUTINGS {
        let routing = cuda.routing(rows, top, experts)?;
        let chosen = random_choices(set as u64 * 7919 + rows as u64, rows, top, experts);
        let mut seen = vec![false; experts];
        chosen.iter().for_each(|&e| seen[e as usize] = true);
        distinct += seen.iter().filter(|s| **s).count();
        routing.experts.write(0, &chosen)?;
        routing.weights.write(0, &vec![0.3f32; choices])?;
        routings.push(routing);
    }
    let distinct_mean = distinct as f64 / ROUTINGS as f64;
    let weights = 3.0 * (width * hidden) as f64;
    let bytes = distinct_mean * weights * (0.5 + 2.0 / 128.0);
    let flops = 2.0 * choices as f64 * weights;
    let name = |what: &str| format!("{what} width {width} M {rows}");
    let calls = 2 * ROUTINGS;
    let full = timed(cuda, calls, |cuda, i| {
        let (set, routing) = (&sets[i % sets.len()], &routings[i % ROUTINGS]);
        cuda.planned = None;
        moe::moe_up(cuda, rows, set, routing, &x, &mut act, &mut shared)?;
        moe::moe_down(cuda, rows, set, routing, &act, &shared, &mut out)
    })?;
    let up = timed(cuda, calls, |cuda, i| {
        let (set, routing) = (&sets[i % sets.len()], &routings[i % ROUTINGS]);
        cuda.planned = None;
        moe::moe_up(cuda, rows, set, routing, &x, &mut act, &mut shared)
    })?;
    let lists = timed(cuda, calls, |cuda, i| {
        cuda.planned = None;
        moe::list_for(cuda, rows, &routings[i % ROUTINGS], &x)
    })?;
    cuda.tuning = None;
    let rows = vec![
        Row { name: name("chain"), micros: full, bytes, flops },
        Row { name: name("list"), micros: lists, bytes: 0.0, flops: 0.0 },
        Row { name: name("list + gate/up"), micros: up, bytes: bytes * 2.0 / 3.0, flops: flops * 2.0 / 3.0 },
    ];
    Ok((rows, distinct_mean as usize))
}

/// `top` different experts for each row, ascending.
fn random_choices(seed: u64, rows: usize, top: usize, experts: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut all = Vec::with_capacity(rows * top);
    for _ in 0..rows {
        let mut row: Vec<u32> = Vec::with_capacity(top);
        while row.len() < top {
            let e = (next() >> 20) as u32 % experts as u32;
            if !row.contains(&e) {
                row.push(e);
            }
        }
        row.sort_unstable();
        all.extend(row);
    }
    all
}
