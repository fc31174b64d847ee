//! How many stream events the front end sends, what they cost, and how much it adds to a token's way.
//!
//! The server runs on one worker thread, a thread plays the engine, the clients are a process of their own. Measured are
//!
//! * `throughput`: keep-alive clients read long answers one after the other while the engine gives tokens as fast as it can;
//!   `joined` lets all ready tokens of a stream share a frame, `paced` gives each stream one token a step. Beside the rate
//!   stands the processor time of the worker for an event, which does not depend on what else the machine does: its
//!   inverse is what one worker can send.
//! * `latency`: many streams at once, a token each every step; from the moment when the engine hands a token over to the
//!   moment when its client has read it. `a step` hands over the tokens of as many streams at once as the default server runs
//!   at most, so that the last one waits for as many socket writes; `a burst` those of all streams, `spread` hands them over
//!   evenly. In turns with it runs a server that writes the same bytes to the socket and does nothing else: what sockets,
//!   threads and the clients take by themselves. The difference is what the front end adds.
//!
//! `cargo run --release -p glimmer-server --example front_end_speed -- [streams] [step_ms] [part]`; `part` measures only what has it in
//! its name.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measuring program reports on the console")]

mod clients;
mod engine;
mod servers;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clients::{client, frame_of, run_client};
use engine::{Schedule, Stepping, Times};
use glimmer_engine::request::Request;
use glimmer_text::ChatFormat;
use servers::{start, start_bare, worker_time};

/// Sequences that the default server runs at once on a small device.
const STEP: usize = 256;

/// Tokens of a stream whose latency is measured.
const LATENCY_TOKENS: u32 = 50;

/// Nanoseconds since 1970: a clock that two processes share.
fn now() -> u64 {
    u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap()
}

fn throughput(format: &Arc<ChatFormat>, schedule: Schedule, name: &str) {
    const CLIENTS: usize = 64;
    const TOKENS: usize = 512;
    let time = Duration::from_secs(5);
    let port = start(Stepping::start(schedule, Times::default()), format);
    let before = worker_time();
    let arguments = ["throughput".to_owned()]
        .into_iter()
        .chain([usize::from(port), CLIENTS, TOKENS, usize::try_from(time.as_millis()).unwrap()].map(|n| n.to_string()));
    let numbers = run_client(&arguments.collect::<Vec<_>>());
    let (events, answers) = (numbers[0] as f64, numbers[1] as f64);
    let each = (worker_time() - before) as f64 / events;
    println!(
        "{name}: {:.2} M events/s ({:.0} answers/s of {TOKENS} tokens, {CLIENTS} clients); {each:.0} ns of the \
         worker an event: one worker can send {:.2} M events/s",
        events / time.as_secs_f64() / 1e6,
        answers / time.as_secs_f64(),
        1e3 / each,
    );
}

fn percentile(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

/// Milliseconds from the engine to the client, for every token of every stream but the first ones; and the worker's time.
fn latency(port: u16, times: &Times, streams: usize) -> (Vec<f64>, f64) {
    let before = worker_time();
    let arguments = ["arrivals".to_owned()]
        .into_iter()
        .chain([usize::from(port), streams, LATENCY_TOKENS as usize].map(|n| n.to_string()));
    let mut numbers = run_client(&arguments.collect::<Vec<_>>()).into_iter();
    let computed = (worker_time() - before) as f64;
    let sent = times.lock().unwrap();
    let (mut added, mut stream, mut events) = (Vec::new(), 0, 0);
    while let Some(count) = numbers.next() {
        let arrived: Vec<u64> = numbers.by_ref().take(usize::try_from(count).unwrap()).collect();
        let sent = &sent[&format!("chatcmpl-s{stream}")];
        stream += 1;
        events += arrived.len();
        // The first event opens the answer; events of tokens follow. The last tokens share frames with the end.
        let pairs = sent.iter().zip(&arrived[1..]).skip(LATENCY_TOKENS as usize / 10);
        added.extend(pairs.map(|(sent, arrived)| arrived.saturating_sub(*sent) as f64 / 1e6));
    }
    (added, computed / 1e3 / events as f64)
}

/// The front end against bare writes of the same bytes, in turns, so that both meet the same machine.
fn latencies(format: &Arc<ChatFormat>, frame: &'static [u8], streams: usize, schedule: Schedule, name: &str) {
    const TURNS: usize = 4;
    let mut runs = [(Vec::new(), 0.0), (Vec::new(), 0.0)];
    for turn in 0..2 * TURNS {
        let times = Times::default();
        let engine = Stepping::start(schedule, Arc::clone(&times));
        let port = match turn % 2 {
            0 => start_bare(engine, Request::new(vec![schedule.token], LATENCY_TOKENS), frame),
            _ => start(engine, format),
        };
        let (added, each) = latency(port, &times, streams);
        runs[turn % 2].0.extend(added);
        runs[turn % 2].1 += each / TURNS as f64;
    }
    let step = schedule.pace.as_millis();
    println!("{name}, {streams} streams, a token each every {step} ms, {} at once:", streams / schedule.slots);
    for (who, (added, each)) in ["bare writes", "the front end"].iter().zip(&mut runs) {
        added.sort_by(f64::total_cmp);
        let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|share| percentile(added, share));
        println!("  {who:13} p50 {p50:.3} ms, p90 {p90:.3} ms, p99 {p99:.3} ms; {each:.2} us of the worker an event");
    }
    let added = [0.5, 0.9, 0.99].map(|share| percentile(&runs[1].0, share) - percentile(&runs[0].0, share));
    println!("  {:13} p50 {:.3} ms, p90 {:.3} ms, p99 {:.3} ms", "added", added[0], added[1], added[2]);
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "client") {
        return client(&arguments[1..]);
    }
    let number = |index: usize, default: u64| arguments.get(index).map_or(default, |text| text.parse().unwrap());
    let (streams, step) = (usize::try_from(number(0, 1000)).unwrap(), Duration::from_millis(number(1, 50)));
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16"));
    let format = Arc::new(ChatFormat::from_dir(path).unwrap());
    let token = format.tokenizer().encode_ordinary("hello").unwrap()[0];
    let fast = Schedule { token, pace: Duration::ZERO, burst: 64, slots: 1 };
    let wanted = |name: &str| arguments.get(2).is_none_or(|part| name.contains(part.as_str()));
    for (name, burst) in [("throughput joined", 64), ("throughput paced", 1)] {
        if wanted(name) {
            throughput(&format, Schedule { burst, ..fast }, name);
        }
    }
    let slow = Schedule { pace: step, burst: 1, ..fast };
    let frame = frame_of(start(Stepping::start(slow, Times::default()), &format)).leak();
    // As many at once as a step of the default server serves at most, all of them, hardly any.
    for (name, slots) in
        [("latency of a step", streams.div_ceil(STEP)), ("latency of a burst", 1), ("latency when spread", 50)]
    {
        if wanted(name) {
            latencies(&format, frame, streams, Schedule { slots, ..slow }, name);
        }
    }
}
