//! A soak: many clients for a long time, most of them well-behaved, and then the question whether anything is left behind.
//!
//! Clients ask for texts of all lengths, tool calls, shaped answers and pictures over every API; some leave while they send,
//! wait or read, some ask what must be refused. It holds when
//!
//! * every answer came, and every refusal was the one asked for;
//! * pages ran out and sequences gave way to others, where that was to be;
//! * a random sample of the answers is equal to those of a fresh server without prefix cache and drafts that answers each
//!   alone, sampled ones included;
//! * nothing runs, waits or is held at the end, and every slot can be lent again at once;
//! * memory did not grow over the second half;
//! * the server ended as it should when it was asked to.

mod answers;
mod asks;
mod http;
mod report;
mod server;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use answers::essence;
use asks::{Ask, Conduct, MOST_BODY_BYTES, Material};
use http::{Connection, Request};
pub use report::{Memory, SoakReport};
use report::{Sample, Tally};
use serde_json::{Value, json};
use server::{KEY, Server};

use crate::error::BenchError;
use crate::exactness::Dice;

/// What to do.
#[derive(Clone, Debug)]
pub struct SoakOptions {
    /// The glimmer program, which serves.
    pub program: PathBuf,
    /// Model and further flags of its `serve`.
    pub flags: Vec<OsString>,
    /// Clients, each with one request at a time.
    pub clients: usize,
    /// Most running sequences of the server.
    pub sequences: usize,
    /// How long requests are started.
    pub time: Duration,
    /// Requests after which it ends earlier.
    pub requests: Option<u64>,
    /// Whether pages must have run out, so that sequences gave way to others.
    pub preempting: bool,
    /// Answers to repeat alone.
    pub compare: usize,
    /// Seed of everything that clients do.
    pub seed: u64,
}

/// How long a server gets to become idle, or to fill.
const SETTLE: Duration = Duration::from_secs(120);
/// How often the server is looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Stack of a client's thread.
const STACK_BYTES: usize = 512 << 10;

/// Runs a soak. `progress` gets a line now and then.
///
/// # Errors
/// A server that does not start, or a thread. What goes wrong later is in the report.
pub fn soak(options: &SoakOptions, progress: &mut dyn FnMut(&str)) -> Result<SoakReport, BenchError> {
    let material = Material::new(options.seed)?;
    let server = Server::start(&options.program, &loaded_flags(options))?;
    let tally = Mutex::new(Tally::default());
    let started = Instant::now();
    let stop = AtomicBool::new(false);
    let asked = AtomicU64::new(0);
    let mut memory = Memory::default();
    thread::scope(|scope| -> Result<(), BenchError> {
        for index in 0..options.clients {
            let client =
                Client { options, material: &material, server: &server, tally: &tally, stop: &stop, asked: &asked };
            let spawned = thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, move || client.run(index));
            if let Err(error) = spawned {
                stop.store(true, Ordering::Relaxed);
                return Err(BenchError::model(format!("thread {index} of the clients"), error));
            }
        }
        watch(options, &server, &tally, started, &stop, &mut memory, progress);
        Ok(())
    })?;
    let seconds = started.elapsed().as_secs_f64();
    progress("clients have ended; looking for what is left");
    let mut report = SoakReport::new(options, seconds, memory);
    report.settle(&server, options.sequences);
    if options.preempting && report.preemptions == 0.0 {
        report.problem("no sequence was preempted: pages never ran out, so the run says nothing of it".to_owned());
    }
    if let Err(problem) = server.stop() {
        report.problem(problem);
    }
    let mut tally = tally.into_inner().unwrap_or_else(PoisonError::into_inner);
    let samples = std::mem::take(&mut tally.samples);
    report.take(tally);
    progress(&format!("asking {} requests again, each alone", samples.len()));
    alone(options, &samples, &mut report)?;
    Ok(report)
}

/// What the server under load is given before the caller's flags: room for less than what is asked for, and drafts.
fn loaded_flags(options: &SoakOptions) -> Vec<OsString> {
    let drafts = json!({"method": "mtp", "num_speculative_tokens": 2}).to_string();
    let mut flags = plain_flags(options);
    flags.extend(["--speculative-config", &drafts].map(OsString::from));
    flags.extend(options.flags.iter().cloned());
    flags
}

fn plain_flags(options: &SoakOptions) -> Vec<OsString> {
    let (sequences, body) = (options.sequences.to_string(), MOST_BODY_BYTES.to_string());
    let flags = ["--max-num-seqs", &sequences, "--max-request-body-bytes", &body, "--reasoning-parser", "glm45"];
    let parsers = ["--tool-call-parser", "glm47", "--enable-auto-tool-choice"];
    flags.into_iter().chain(parsers).map(OsString::from).collect()
}

fn lock(tally: &Mutex<Tally>) -> MutexGuard<'_, Tally> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks at the server once a second until the time is over.
fn watch(
    options: &SoakOptions,
    server: &Server,
    tally: &Mutex<Tally>,
    started: Instant,
    stop: &AtomicBool,
    memory: &mut Memory,
    progress: &mut dyn FnMut(&str),
) {
    let mut told = Instant::now();
    while started.elapsed() < options.time && !stop.load(Ordering::Relaxed) {
        thread::sleep(LOOK.min(options.time.saturating_sub(started.elapsed())));
        if let Some(mib) = server.resident_mib() {
            memory.samples.push((started.elapsed().as_secs_f64(), mib));
        }
        match server.get("/health") {
            Ok((200, _)) => {}
            Ok((status, _)) => lock(tally).problem(format!("/health answered {status}")),
            Err(error) => lock(tally).problem(format!("/health: {error}")),
        }
        match server.figures() {
            Ok(figures) => lock(tally).seen(&figures),
            Err(problem) => lock(tally).problem(problem),
        }
        if told.elapsed() > 60 * LOOK {
            told = Instant::now();
            let tally = lock(tally);
            let mib = memory.samples.last().map_or(0.0, |sample| sample.1);
            progress(&format!(
                "{:5.0} s: {} answers, {} left, {} refused, {} problems, {mib:.0} MiB",
                started.elapsed().as_secs_f64(),
                tally.answers(),
                tally.left,
                tally.refused(),
                tally.problem_count,
            ));
        }
    }
    stop.store(true, Ordering::Relaxed);
}

/// One client.
struct Client<'a> {
    options: &'a SoakOptions,
    material: &'a Material,
    server: &'a Server,
    tally: &'a Mutex<Tally>,
    stop: &'a AtomicBool,
    asked: &'a AtomicU64,
}

/// How an exchange went.
enum Outcome {
    /// An answer to its end.
    Answer(Value),
    /// The refusal that was asked for.
    Refused(u16),
    /// The client went as it had meant to.
    Left,
    /// The answer was there before the client went.
    TooLate,
}

impl Client<'_> {
    fn run(&self, index: usize) {
        let mut dice = Dice::new(self.options.seed ^ (index as u64 + 1).wrapping_mul(0x2545_F491_4F6C_DD1D));
        let mut connection = None;
        while !self.stop.load(Ordering::Relaxed) {
            if self.options.requests.is_some_and(|most| self.asked.fetch_add(1, Ordering::Relaxed) >= most) {
                self.stop.store(true, Ordering::Relaxed);
                break;
            }
            let ask = self.material.ask(&mut dice);
            let outcome = carry_out(self.server, &mut connection, &ask);
            let mut tally = lock(self.tally);
            match outcome {
                Ok(Outcome::Answer(essence)) => {
                    tally.answered(ask.kind);
                    tally.sample(Sample { ask, essence }, self.options.compare, &mut dice);
                }
                Ok(Outcome::Refused(status)) => tally.refuse(status),
                Ok(Outcome::Left) => tally.left += 1,
                Ok(Outcome::TooLate) => tally.too_late += 1,
                Err(problem) => {
                    connection = None;
                    tally.problem(format!("{} ({:?}, {}): {problem}", ask.kind, ask.conduct, excerpt(&ask.body)));
                }
            }
        }
    }
}

/// The beginning of a body.
fn excerpt(body: &[u8]) -> String {
    String::from_utf8_lossy(body).chars().take(300).collect()
}

/// Sends a request and behaves as it says. The connection is kept where that is possible.
fn carry_out(server: &Server, kept: &mut Option<Connection>, ask: &Ask) -> Result<Outcome, String> {
    let told = |error: std::io::Error| error.to_string();
    let mut connection = match kept.take() {
        Some(connection) => connection,
        None => Connection::open(server.address).map_err(told)?,
    };
    let key = if ask.authorised { KEY } else { "another" };
    let request = Request { method: ask.method, path: ask.path, kind: ask.media_type, key, body: &ask.body };
    if ask.conduct == Conduct::HalfABody {
        connection.send(&request, ask.body.len() / 2).map_err(told)?;
        return Ok(Outcome::Left);
    }
    connection.send(&request, ask.body.len()).map_err(told)?;
    let begun = match ask.conduct {
        Conduct::LeaveUnless(patience) => connection.head_within(patience).map_err(told)?,
        _ => Some(connection.head().map_err(told)?),
    };
    let Some(mut head) = begun else { return Ok(Outcome::Left) };
    if let (Conduct::LeaveAfter(pieces), 200) = (ask.conduct, head.status) {
        for _ in 0..pieces {
            if connection.piece(&mut head).map_err(told)?.is_none() {
                *kept = Some(connection);
                return Ok(Outcome::TooLate);
            }
        }
        return Ok(Outcome::Left);
    }
    let body = connection.rest(&mut head).map_err(told)?;
    if !head.closes {
        *kept = Some(connection);
    }
    match ask.conduct {
        Conduct::Wrong(status) if status == head.status => Ok(Outcome::Refused(status)),
        Conduct::Stay | Conduct::LeaveUnless(_) if head.status == 200 => {
            if ask.conduct != Conduct::Stay {
                return Ok(Outcome::TooLate);
            }
            essence(ask.path, ask.stream, &body).map(Outcome::Answer)
        }
        _ => Err(format!("status {}: {}", head.status, excerpt(&body))),
    }
}

/// Repeats the sample on a fresh server that reuses nothing, drafts nothing and computes each request alone.
fn alone(options: &SoakOptions, samples: &[Sample], report: &mut SoakReport) -> Result<(), BenchError> {
    let mut flags = plain_flags(options);
    flags.extend(options.flags.iter().cloned());
    flags.push("--no-enable-prefix-caching".into());
    let server = Server::start(&options.program, &flags)?;
    let mut connection = None;
    for Sample { ask, essence: expected } in samples {
        let ask = ask.whole();
        match carry_out(&server, &mut connection, &ask) {
            Ok(Outcome::Answer(essence)) => report.compare(&ask, expected, &essence),
            Ok(_) => {}
            Err(problem) => report.problem(format!("alone, {}: {problem}: {}", ask.kind, excerpt(&ask.body))),
        }
    }
    if let Err(problem) = server.stop() {
        report.problem(problem);
    }
    Ok(())
}
