//! Clients in a process of their own.

use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::now;

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
pub(crate) fn client(arguments: &[String]) {
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

pub(crate) fn run_client(arguments: &[String]) -> Vec<u64> {
    let program = std::env::current_exe().unwrap();
    let mut child = Command::new(program).arg("client").args(arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut bytes = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut bytes).unwrap();
    assert!(child.wait().unwrap().success());
    bytes.as_chunks::<8>().0.iter().map(|&bytes| u64::from_le_bytes(bytes)).collect()
}

/// What the server sends for a token in the middle of a stream, the length of its chunk included.
pub(crate) fn frame_of(port: u16) -> Vec<u8> {
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(&request("frame", 4)).unwrap();
    let (mut text, mut buffer) = (Vec::new(), [0; 4096]);
    while !text.ends_with(b"0\r\n\r\n") {
        let count = stream.read(&mut buffer).unwrap();
        text.extend_from_slice(&buffer[..count]);
    }
    let text = String::from_utf8(text).unwrap();
    let event = text.split("data: ").nth(2).unwrap().split("\n\n").next().unwrap();
    assert!(event.contains("\"delta\":{\"reasoning\"") || event.contains("\"delta\":{\"content\""), "{event}");
    let event = format!("data: {event}\n\n");
    format!("{:X}\r\n{event}\r\n", event.len()).into_bytes()
}
