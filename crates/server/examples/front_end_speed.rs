//! How many stream events the front end sends, and how much it adds to a token's way.
//!
//! One worker thread serves, one thread plays the engine, the clients share a third. Two measurements:
//!
//! * `throughput`: keep-alive clients read long answers one after the other while the engine gives tokens as fast as it can;
//!   `joined` lets all ready tokens of a stream share a frame, `paced` gives each stream one token a step.
//! * `latency`: many streams at once, a token each every step; from the moment when the engine hands a token over to the
//!   moment when its client has read it. `burst` hands over the tokens of all streams at once, so that the last one waits
//!   for as many socket writes as there are streams; `spread` hands them over evenly.
//!
//! `cargo run --release -p glimmer-server --example front_end_speed -- [streams] [step_ms]`

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measuring program reports on the console")]

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use glimmer_engine::request::{Cost, Finish, FinishReason, Request, Token, TokenEvent};
use glimmer_server::app::{App, Options};
use glimmer_server::engine::{Asked, Counters, Engine, EventSender, GenerationDefaults, Model, Refusal, Status, Ticket};
use glimmer_server::serve::{bind, serve};
use glimmer_text::ChatFormat;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Times at which tokens were handed over, by request.
type Times = Arc<Mutex<HashMap<String, Vec<Instant>>>>;

/// An engine on a thread of its own that gives every stream `burst` tokens a step, in `slots` parts of the step.
struct Stepping {
    inbox: Mutex<mpsc::Sender<(Request, EventSender)>>,
}

impl Stepping {
    fn start(token: u32, pace: Duration, burst: usize, slots: usize, times: Option<Times>) -> Self {
        let (inbox, arrivals) = mpsc::channel::<(Request, EventSender)>();
        thread::spawn(move || {
            let mut running: Vec<(Request, EventSender, usize)> = Vec::new();
            let mut next = Instant::now();
            let (mut slot, mut arrived) = (0, 0);
            let mut numbers: HashMap<String, usize> = HashMap::new();
            loop {
                if running.is_empty() {
                    match arrivals.recv() {
                        Ok((request, events)) => running.push((request, events, 0)),
                        Err(_) => return,
                    }
                }
                running.extend(arrivals.try_iter().map(|(request, events)| (request, events, 0)));
                running.retain_mut(|(request, events, sent)| {
                    if slots > 1 {
                        let number = *numbers.entry(request.id.clone()).or_insert_with(|| {
                            arrived += 1;
                            arrived
                        });
                        if number % slots != slot {
                            return true;
                        }
                    }
                    let mut open = true;
                    for _ in 0..burst {
                        *sent += 1;
                        let last = *sent == request.limits.max_tokens as usize;
                        let finish = last.then(|| Finish { reason: FinishReason::Length, cost: Cost::default() });
                        let tokens = vec![Token { id: token, logprobs: None }];
                        if let Some(times) = &times {
                            times.lock().unwrap().entry(request.id.clone()).or_default().push(Instant::now());
                        }
                        open = events.send(TokenEvent { tokens, finish, prompt_logprobs: None }) && !last;
                        if !open {
                            break;
                        }
                    }
                    open
                });
                slot = (slot + 1) % slots;
                if !pace.is_zero() {
                    next += pace / u32::try_from(slots).unwrap();
                    thread::sleep(next.saturating_duration_since(Instant::now()));
                }
            }
        });
        Self { inbox: Mutex::new(inbox) }
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
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(async { tokio::spawn(serve(app, listener, std::future::pending())).await }).unwrap().unwrap();
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

async fn throughput(port: u16, clients: usize, tokens: usize, time: Duration) -> (usize, usize) {
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
    let counts = (events.load(Ordering::Relaxed), requests.load(Ordering::Relaxed));
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    counts
}

/// Arrival times of each stream's events.
async fn arrivals(port: u16, streams: usize, tokens: usize) -> HashMap<String, Vec<Instant>> {
    let mut tasks = Vec::new();
    for stream in 0..streams {
        tasks.push(tokio::spawn(async move {
            let id = format!("s{stream}");
            let mut socket = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            socket.write_all(&request(&id, tokens)).await.unwrap();
            let mut seen = Events::default();
            let mut times = Vec::with_capacity(tokens + 8);
            let mut buffer = vec![0; 16 << 10];
            while !seen.ended() {
                let count = socket.read(&mut buffer).await.unwrap();
                seen.feed(&buffer[..count]);
                let now = Instant::now();
                times.resize(seen.count, now);
            }
            (format!("chatcmpl-{id}"), times)
        }));
    }
    let mut all = HashMap::new();
    for task in tasks {
        let (id, times) = task.await.unwrap();
        all.insert(id, times);
    }
    all
}

fn percentile(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let streams: usize = arguments.next().map_or(1000, |text| text.parse().unwrap());
    let step_ms: u64 = arguments.next().map_or(50, |text| text.parse().unwrap());
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16"));
    let format = Arc::new(ChatFormat::from_dir(path).unwrap());
    let token = format.tokenizer().encode_ordinary("hello").unwrap()[0];
    let clients = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let time = Duration::from_secs(5);
    for (name, burst) in [("joined", 64), ("paced", 1)] {
        let port = start(Stepping::start(token, Duration::ZERO, burst, 1, None), &format);
        let (events, requests) = clients.block_on(throughput(port, 64, 512, time));
        println!(
            "throughput {name}: {:.2} M events/s, {:.0} answers/s of 512 tokens, 64 clients",
            events as f64 / time.as_secs_f64() / 1e6,
            requests as f64 / time.as_secs_f64()
        );
    }
    for (name, slots) in [("burst", 1), ("spread", 50)] {
        latency(&clients, &format, token, streams, Duration::from_millis(step_ms), (name, slots));
    }
}

fn latency(
    clients: &tokio::runtime::Runtime,
    format: &Arc<ChatFormat>,
    token: u32,
    streams: usize,
    step: Duration,
    (name, slots): (&str, usize),
) {
    let times = Times::default();
    let port = start(Stepping::start(token, step, 1, slots, Some(Arc::clone(&times))), format);
    let tokens = 100;
    let arrived = clients.block_on(arrivals(port, streams, tokens));
    let sent = times.lock().unwrap();
    let mut added = Vec::new();
    for (id, arrived) in &arrived {
        let sent = &sent[id];
        // The first event is the role's; events of tokens follow. The last tokens share frames with the end.
        let pairs = sent.iter().zip(&arrived[1..]).skip(tokens / 10);
        added.extend(pairs.map(|(sent, arrived)| arrived.saturating_duration_since(*sent).as_secs_f64() * 1e3));
    }
    added.sort_by(f64::total_cmp);
    println!(
        "latency {name}, {streams} streams, a token each every {} ms: p50 {:.3} ms, p90 {:.3} ms, p99 {:.3} ms, most {:.3} ms \
         over {} tokens",
        step.as_millis(),
        percentile(&added, 0.5),
        percentile(&added, 0.9),
        percentile(&added, 0.99),
        added.last().unwrap(),
        added.len()
    );
}
