//! How many stream events the front end sends, what they cost, and how much it adds to a token's way.
//!
//! The server runs on one worker thread, a thread plays the engine, the clients are a process of their own. Measured are
//!
//! * `throughput`: keep-alive clients read long answers one after the other while the engine gives tokens as fast as it can;
//!   `joined` lets all ready tokens of a stream share a frame, `paced` gives each stream one token a step. Beside the rate
//!   stands the processor time of the worker for an event, which does not depend on what else the machine does: its
//!   inverse is what one worker can send.
//! * `latency`: many streams at once, a token each every step; from the moment when the engine hands a token over to the
//!   moment when its client has read it. `burst` hands over the tokens of all streams at once, so that the last one waits
//!   for as many socket writes as there are streams; `spread` hands them over evenly. `bare` is the same with a server that
//!   writes ready bytes to the socket and nothing else: what sockets, threads and the client take by themselves.
//!
//! `cargo run --release -p glimmer-server --example front_end_speed -- [streams] [step_ms] [part]`; `part` measures only what has it in
//! its name.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measuring program reports on the console")]

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use glimmer_engine::request::{Cost, Finish, FinishReason, Request, Token, TokenEvent};
use glimmer_server::app::{App, Options};
use glimmer_server::engine::{
    Asked, Counters, Engine, EventSender, GenerationDefaults, Model, Refusal, Status, Ticket,
};
use glimmer_server::serve::{bind, serve};
use glimmer_text::ChatFormat;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Nanoseconds since 1970: a clock that two processes share.
fn now() -> u64 {
    u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap()
}

/// Times at which the tokens of each request were handed over.
type Times = Arc<Mutex<HashMap<String, Vec<u64>>>>;

/// How the engine gives tokens.
#[derive(Clone, Copy)]
struct Schedule {
    token: u32,
    /// Time of a step; zero is as fast as it goes.
    pace: Duration,
    /// Tokens of a stream in a step.
    burst: usize,
    /// Parts of a step, each with its share of the streams.
    slots: usize,
}

/// An engine on a thread of its own.
struct Stepping {
    inbox: Mutex<mpsc::Sender<(Request, EventSender)>>,
}

struct Running {
    request: Request,
    events: EventSender,
    slot: usize,
    sent: Vec<u64>,
}

impl Stepping {
    fn start(schedule: Schedule, times: Times) -> Self {
        let (inbox, arrivals) = mpsc::channel::<(Request, EventSender)>();
        thread::spawn(move || {
            let mut running: Vec<Running> = Vec::new();
            let (mut next, mut slot, mut arrived) = (Instant::now(), 0, 0);
            let mut enter = |(request, events): (Request, EventSender)| {
                arrived += 1;
                Running { request, events, slot: arrived % schedule.slots, sent: Vec::new() }
            };
            loop {
                if running.is_empty() {
                    match arrivals.recv() {
                        Ok(new) => running.push(enter(new)),
                        Err(_) => return,
                    }
                }
                running.extend(arrivals.try_iter().map(&mut enter));
                running.retain_mut(|stream| stream.slot != slot || stream.step(schedule, &times));
                slot = (slot + 1) % schedule.slots;
                if !schedule.pace.is_zero() {
                    next += schedule.pace / u32::try_from(schedule.slots).unwrap();
                    thread::sleep(next.saturating_duration_since(Instant::now()));
                }
            }
        });
        Self { inbox: Mutex::new(inbox) }
    }
}

impl Running {
    /// Gives the stream its tokens; false at its end.
    fn step(&mut self, schedule: Schedule, times: &Times) -> bool {
        for _ in 0..schedule.burst {
            self.sent.push(now());
            let last = self.sent.len() == self.request.limits.max_tokens as usize;
            let finish = last.then(|| Finish { reason: FinishReason::Length, cost: Cost::default() });
            let tokens = vec![Token { id: schedule.token, logprobs: None }];
            let open = self.events.send(TokenEvent { tokens, finish, prompt_logprobs: None });
            if last || !open {
                times.lock().unwrap().insert(self.request.id.clone(), std::mem::take(&mut self.sent));
                return false;
            }
        }
        true
    }
}

impl Engine for Stepping {
    fn submit(&self, asked: Asked, events: EventSender) -> Result<Ticket, Refusal> {
        self.inbox.lock().unwrap().send((asked.request, events)).map_err(|_| Refusal::Dead)?;
        Ok(Ticket::new(|| {}))
    }

    fn status(&self) -> Status {
        Status::default()
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }
}

/// Name of the server's worker thread, by which its processor time is found.
const WORKER: &str = "one-worker";

fn one_worker() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).thread_name(WORKER).enable_all().build().unwrap()
}

/// A server on one worker thread; returns its port.
fn start(engine: Stepping, format: &Arc<ChatFormat>) -> u16 {
    let model = Model {
        format: Arc::clone(format),
        served_names: vec!["micro".to_owned()],
        root: "micro".to_owned(),
        max_model_len: 1 << 20,
        vocab_size: format.tokenizer().vocab_size(),
        defaults: GenerationDefaults::default(),
        processors: None,
        grammars: None,
    };
    let options =
        Options { reasoning: true, tools: true, auto_tool_choice: true, log_stats: false, ..Options::default() };
    let app = App::new(Arc::new(engine), model, options);
    let listener = bind(Some("127.0.0.1"), 0).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        one_worker().block_on(async { tokio::spawn(serve(app, listener, std::future::pending())).await })
    });
    port
}

/// What the bare server writes for a token.
const BARE: &[u8] = b"c0\r\ndata: {\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\",\
    \"created\":1234567890,\"model\":\"micro\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" hello\"},\"finish_reason\":\
    null}]}\n\n\r\n";

/// A server that reads a request's head, and writes ready bytes whenever the engine gives a token.
fn start_bare(engine: Stepping, template: Request) -> u16 {
    let listener = bind(Some("127.0.0.1"), 0).unwrap();
    let port = listener.local_addr().unwrap().port();
    let engine = Arc::new(engine);
    thread::spawn(move || {
        one_worker().block_on(async {
            tokio::spawn(async move {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                while let Ok((mut stream, _)) = listener.accept().await {
                    stream.set_nodelay(true).unwrap();
                    let (engine, mut request) = (Arc::clone(&engine), template.clone());
                    tokio::spawn(async move {
                        let mut head = vec![0; 4096];
                        let count = stream.read(&mut head).await.unwrap();
                        let head = String::from_utf8_lossy(&head[..count]).into_owned();
                        let id = head.split("x-request-id: ").nth(1).unwrap().split("\r\n").next().unwrap();
                        request.id = format!("chatcmpl-{id}");
                        let (sender, mut events) = tokio::sync::mpsc::unbounded_channel();
                        let _ticket = engine.submit(request.into(), EventSender::new(0, sender)).unwrap();
                        // In the place of the event that opens an answer.
                        stream.write_all(BARE).await.unwrap();
                        while let Some((_, event)) = events.recv().await {
                            stream.write_all(BARE).await.unwrap();
                            if event.finish.is_some() {
                                stream.write_all(b"0\r\n\r\n").await.unwrap();
                            }
                        }
                    });
                }
            })
            .await
        })
    });
    port
}

fn request(id: &str, tokens: usize) -> Vec<u8> {
    let body = format!(
        "{{\"model\":\"micro\",\"messages\":[{{\"role\":\"user\",\"content\":\"hi\"}}],\"max_tokens\":{tokens},\"stream\":true}}"
    );
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {id}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Counts the ends of events in a stream of bytes.
#[derive(Default)]
struct Events {
    newline: bool,
    count: usize,
    tail: Vec<u8>,
}

impl Events {
    fn feed(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.count += usize::from(byte == b'\n' && self.newline);
            self.newline = byte == b'\n';
        }
        let keep = bytes.len().saturating_sub(16);
        self.tail.extend_from_slice(&bytes[keep..]);
        let excess = self.tail.len().saturating_sub(16);
        self.tail.drain(..excess);
    }

    fn ended(&self) -> bool {
        self.tail.ends_with(b"0\r\n\r\n")
    }
}

/// Reads answers for a while; events and answers of that time.
async fn read_throughput(port: u16, clients: usize, tokens: usize, time: Duration) -> (usize, usize) {
    let stop = Arc::new(AtomicBool::new(false));
    let (events, requests) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = Vec::new();
    for client in 0..clients {
        let (stop, events, requests) = (Arc::clone(&stop), Arc::clone(&events), Arc::clone(&requests));
        tasks.push(tokio::spawn(async move {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            let mut buffer = vec![0; 256 << 10];
            let mut number = 0;
            while !stop.load(Ordering::Relaxed) {
                number += 1;
                stream.write_all(&request(&format!("{client}-{number}"), tokens)).await.unwrap();
                let mut seen = Events::default();
                while !seen.ended() {
                    let before = seen.count;
                    let count = stream.read(&mut buffer).await.unwrap();
                    seen.feed(&buffer[..count]);
                    events.fetch_add(seen.count - before, Ordering::Relaxed);
                }
                requests.fetch_add(1, Ordering::Relaxed);
            }
        }));
    }
    tokio::time::sleep(time).await;
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    (events.load(Ordering::Relaxed), requests.load(Ordering::Relaxed))
}

/// Arrival times of each stream's events, the streams in order.
async fn read_arrivals(port: u16, streams: usize, tokens: usize) -> Vec<Vec<u64>> {
    let mut tasks = Vec::new();
    for stream in 0..streams {
        tasks.push(tokio::spawn(async move {
            let mut socket = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            socket.write_all(&request(&format!("s{stream}"), tokens)).await.unwrap();
            let mut seen = Events::default();
            let mut times = Vec::with_capacity(tokens + 8);
            let mut buffer = vec![0; 16 << 10];
            while !seen.ended() {
                let count = socket.read(&mut buffer).await.unwrap();
                seen.feed(&buffer[..count]);
                times.resize(seen.count, now());
            }
            times
        }));
    }
    let mut all = Vec::with_capacity(streams);
    for task in tasks {
        all.push(task.await.unwrap());
    }
    all
}

/// The process of the clients: reports in numbers of eight bytes on standard output.
fn client(arguments: &[String]) {
    let number = |index: usize| arguments[index].parse::<usize>().unwrap();
    let (port, streams, tokens) = (u16::try_from(number(1)).unwrap(), number(2), number(3));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let numbers: Vec<u64> = if arguments[0] == "arrivals" {
        let all = runtime.block_on(read_arrivals(port, streams, tokens));
        all.into_iter().flat_map(|times| std::iter::once(times.len() as u64).chain(times)).collect()
    } else {
        let time = Duration::from_millis(number(4) as u64);
        let (events, requests) = runtime.block_on(read_throughput(port, streams, tokens, time));
        vec![events as u64, requests as u64]
    };
    let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
    std::io::stdout().write_all(&bytes).unwrap();
}

fn run_client(arguments: &[String]) -> Vec<u64> {
    let program = std::env::current_exe().unwrap();
    let mut child = Command::new(program).arg("client").args(arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut bytes = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut bytes).unwrap();
    assert!(child.wait().unwrap().success());
    bytes.as_chunks::<8>().0.iter().map(|&bytes| u64::from_le_bytes(bytes)).collect()
}

/// Nanoseconds that the worker threads of this process have computed.
fn worker_time() -> u64 {
    let mut sum = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let path = task.unwrap().path();
        if std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name.trim() == WORKER) {
            let text = std::fs::read_to_string(path.join("schedstat")).unwrap();
            sum += text.split(' ').next().unwrap().parse::<u64>().unwrap();
        }
    }
    sum
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

fn latency(port: u16, times: &Times, streams: usize, step: Duration, name: &str) {
    const TOKENS: usize = 100;
    let before = worker_time();
    let arguments =
        ["arrivals".to_owned()].into_iter().chain([usize::from(port), streams, TOKENS].map(|n| n.to_string()));
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
        let pairs = sent.iter().zip(&arrived[1..]).skip(TOKENS / 10);
        added.extend(pairs.map(|(sent, arrived)| arrived.saturating_sub(*sent) as f64 / 1e6));
    }
    added.sort_by(f64::total_cmp);
    println!(
        "{name}, {streams} streams, a token each every {} ms: p50 {:.3} ms, p90 {:.3} ms, p99 {:.3} ms, most {:.3} \
         ms over {} tokens; {:.1} us of the worker an event",
        step.as_millis(),
        percentile(&added, 0.5),
        percentile(&added, 0.9),
        percentile(&added, 0.99),
        added.last().unwrap(),
        added.len(),
        computed / 1e3 / events as f64,
    );
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
    for (name, slots, bare) in [
        ("latency burst bare", 1, true),
        ("latency burst", 1, false),
        ("latency spread bare", 50, true),
        ("latency spread", 50, false),
    ] {
        if !wanted(name) {
            continue;
        }
        let (schedule, times) = (Schedule { pace: step, burst: 1, slots, ..fast }, Times::default());
        let engine = Stepping::start(schedule, Arc::clone(&times));
        let port = if bare { start_bare(engine, Request::new(vec![token], 100)) } else { start(engine, &format) };
        latency(port, &times, streams, step, name);
    }
}
