//! Whose the time of a step is.
//!
//! Nothing is read off the device: the step that was kept last as a graph is repeated without each of its kernels in turn, and
//! once with as many launches of a kernel that does nothing. What a kernel would have written is then what it wrote before, so
//! the others do the same work as ever.

use std::collections::BTreeMap;

use glimmer_tensor::Result;

use super::FILE;
use crate::{
    backend::Cuda,
    graph::Graph,
    launch::{Arguments, Grid, Launch, Work},
    memory::Event,
};

/// Repetitions of each, and microseconds of one from which on there is only one.
const REPEATS: usize = 9;
const LONG: f64 = 50_000.0;

/// Parts of a step in microseconds. Parts that overlap add up to less than the whole.
#[derive(Debug, Clone)]
pub struct StepParts {
    /// The step.
    pub whole: f64,
    /// The step when every launch begins behind the end of the one in front of it.
    pub apart: f64,
    /// As many launches that do nothing.
    pub nothing: f64,
    /// Kernels with their launches and what the step is shorter by without them, the largest first.
    pub kernels: Vec<(String, usize, f64)>,
}

/// The parts of the step that was kept last; none where none was kept. Caches are left as steps leave them.
///
/// # Errors
/// Errors of the device.
pub fn step_parts(cuda: &mut Cuda) -> Result<Option<StepParts>> {
    let work = cuda.last_kept().to_vec();
    if work.is_empty() {
        return Ok(None);
    }
    let name = |work: &Work| match work {
        // What waits for counters at zero is not left without the launch that clears them.
        Work::Launch(launch) if launch.kernel.entry == "clear" => (launch.kernel.file, "chunks"),
        Work::Launch(launch) => (launch.kernel.file, launch.kernel.entry),
        Work::Product(_) => ("library", "product"),
    };
    let mut counts: BTreeMap<(&'static str, &'static str), usize> = BTreeMap::new();
    for work in &work {
        *counts.entry(name(work)).or_default() += 1;
    }
    let whole = timed(cuda, &work)?;
    let mut kernels = Vec::with_capacity(counts.len());
    for (kernel, count) in counts {
        let others: Vec<Work> = work.iter().filter(|w| name(w) != kernel).cloned().collect();
        kernels.push((format!("{} {}", kernel.0, kernel.1), count, whole - timed(cuda, &others)?));
    }
    kernels.sort_by(|a, b| b.2.total_cmp(&a.2));
    let kernel = cuda.kernels.get(&FILE, &[], "nothing")?;
    let nothing = |work: &Work| {
        let early = matches!(work, Work::Launch(launch) if launch.early);
        let grid = Grid::new([1, 1, 1], 32);
        Work::Launch(Launch { kernel, grid, cluster: 1, early, arguments: Arguments::new() })
    };
    let apart = |work: &Work| match work {
        Work::Launch(launch) => Work::Launch(Launch { early: false, ..launch.clone() }),
        Work::Product(call) => Work::Product(*call),
    };
    let (apart, idle): (Vec<Work>, Vec<Work>) = work.iter().map(|w| (apart(w), nothing(w))).unzip();
    Ok(Some(StepParts { whole, apart: timed(cuda, &apart)?, nothing: timed(cuda, &idle)?, kernels }))
}

/// Microseconds of work as a graph, the median.
fn timed(cuda: &mut Cuda, work: &[Work]) -> Result<f64> {
    if work.is_empty() {
        return Ok(0.0);
    }
    let device = &cuda.device;
    let mut graph = Graph::capture(device, || cuda.kernels.repeat(work, &mut cuda.library))?;
    let (start, end) = (Event::new(device)?, Event::new(device)?);
    let mut times = Vec::with_capacity(REPEATS);
    while times.len() <= REPEATS && times.last().is_none_or(|&last| last < LONG) {
        start.record()?;
        graph.launch()?;
        end.record()?;
        end.wait()?;
        times.push(end.micros_since(&start)?);
    }
    if times.len() > 1 {
        // The first one brought the graph to the device.
        times.remove(0);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
