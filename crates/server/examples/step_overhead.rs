//! What the engine's thread does of a step beside computing: deciding, planning, judging, drafts' bookkeeping, publishing pages and
//! handing out tokens.
//!
//! The device computes nothing and takes a fixed time for each trunk, as a GPU does, while the engine's thread sleeps; everything
//! else of a step is the host's. Measured is the time from the end of one device's step to the beginning of the next, draft
//! steps, which take no time here, left in. Tokens go to a channel for each request, read on another thread, as the server's do.
//!
//! `cargo run --release -p glimmer-server --example step_overhead -- [sequences] [device_ms] [steps]`

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measuring program reports on the console")]

#[path = "../tests/support/hollow.rs"]
mod hollow;

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use glimmer_checkpoint::Checkpoint;
use glimmer_engine::request::Request;
use glimmer_engine::worker::{Worker, WorkerSettings};
use glimmer_engine::{Generator, Settings};
use glimmer_server::engine::EventSender;

/// Tokens of a prompt.
const PROMPT: u32 = 500;

/// When the device's steps began and ended.
type Log = Arc<Mutex<Vec<(Instant, Instant)>>>;

/// Microseconds of the host between the device's steps, sorted, when all sequences decode.
fn host(sequences: usize, device: Duration, steps: usize, depth: usize) -> Vec<f64> {
    let log = Log::default();
    let mut calls = 0;
    let writer = Arc::clone(&log);
    let begin = move || {
        // The first of a step is the trunk, each draft has one behind it.
        let trunk = calls % (depth + 1) == 0;
        calls += 1;
        if trunk {
            let start = Instant::now();
            std::thread::sleep(device);
            writer.lock().unwrap().push((start, Instant::now()));
        }
        Ok(())
    };
    let settings = Settings { sequences, context: Some(4096), rows: 8192, depth, ..Settings::default() };
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16"));
    let load = move || Generator::load(hollow::Hollow(Box::new(begin)), &Checkpoint::open(path).unwrap(), &settings);
    let (worker, _) = Worker::spawn(load, WorkerSettings::default()).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let tokens = u32::try_from(steps * (depth + 1) * 2).unwrap();
    let mut readers = Vec::new();
    for index in 0..sequences {
        let (sender, mut events) = tokio::sync::mpsc::unbounded_channel();
        let prompt: Vec<u32> =
            (0..PROMPT).map(|place| 300 + (place * 7 + u32::try_from(index).unwrap()) % 200).collect();
        let request = Request::new(prompt, tokens).ignoring_eos();
        worker.submit(request, None, Box::new(EventSender::new(0, sender))).unwrap();
        readers.push(runtime.spawn(async move { while events.recv().await.is_some() {} }));
    }
    // Prompts take some steps of their own.
    while log.lock().unwrap().len() < steps + steps / 2 {
        std::thread::sleep(device);
    }
    let running = worker.snapshot().running;
    assert_eq!(running, sequences, "all sequences should still decode");
    worker.shutdown();
    let (log, counted) = (log.lock().unwrap(), worker.snapshot().counters.steps.iter().sum::<u64>());
    assert_eq!(log.len() as u64, counted, "the device slept once a step");
    let last = &log[log.len() - steps..];
    let mut gaps: Vec<f64> = last.windows(2).map(|pair| (pair[1].0 - pair[0].1).as_secs_f64() * 1e6).collect();
    gaps.sort_by(f64::total_cmp);
    gaps
}

fn main() {
    let arguments: Vec<u64> = std::env::args().skip(1).map(|text| text.parse().unwrap()).collect();
    let number = |index: usize, default: u64| arguments.get(index).copied().unwrap_or(default);
    let (sequences, steps) = (usize::try_from(number(0, 256)).unwrap(), usize::try_from(number(2, 200)).unwrap());
    let device = Duration::from_millis(number(1, 10));
    for depth in [0, 1, 2, 3] {
        let gaps = host(sequences, device, steps, depth);
        let [p10, p50, p90] = [0.1, 0.5, 0.9].map(|share| gaps[((gaps.len() - 1) as f64 * share) as usize]);
        let share = 100.0 * p50 / (p50 + device.as_secs_f64() * 1e6);
        println!(
            "{sequences} sequences, {depth} drafts a step, {} ms of the device: the host takes {p50:.0} us (10th and 90th \
             percentile {p10:.0} and {p90:.0}), {share:.1} % of a step",
            device.as_millis()
        );
    }
}
