//! Real sockets: closed connections, the end of service, slow engines.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

#[path = "support/hollow.rs"]
mod hollow;
mod support;

use std::sync::Arc;
use std::time::Duration;

use glimmer_engine::request::FinishReason;
use glimmer_server::app::Options;
use glimmer_server::engine::Status;
use glimmer_server::scripted::{End, Script};
use glimmer_server::serve::{ServeError, bind, serve};
use serde_json::{Value, json};
use support::{Server, options, script, tokens, user};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

/// A server on a port of its own, and how to stop it.
struct Listening {
    server: Server,
    port: u16,
    stop: Option<oneshot::Sender<()>>,
    task: tokio::task::JoinHandle<Result<(), ServeError>>,
}

impl Listening {
    fn start(server: Server) -> Self {
        let listener = bind(Some("127.0.0.1"), 0).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (stop, stopped) = oneshot::channel::<()>();
        let stopped = async {
            let _ended = stopped.await;
        };
        let task = tokio::spawn(serve(Arc::clone(&server.app), listener, stopped));
        Self { server, port, stop: Some(stop), task }
    }

    async fn send(&self, path: &str, body: &Value) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(body.as_bytes()).await.unwrap();
        stream
    }

    async fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    fn stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }
}

/// Reads until the text has been seen.
async fn until(stream: &mut TcpStream, needle: &str) -> String {
    let mut text = String::new();
    let mut buffer = [0; 4096];
    while !text.contains(needle) {
        let count = stream.read(&mut buffer).await.unwrap();
        assert!(count > 0, "closed before {needle:?}: {text}");
        text.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
    text
}

fn endless() -> Script {
    let steps = std::iter::repeat_n(vec![tokens("x")[0]], 100_000).collect();
    Script { steps, pace: Duration::from_millis(2), ..script("") }
}

#[tokio::test]
async fn a_closed_connection_aborts_a_stream() {
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": user("x"), "stream": true, "n": 3})),
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 8000, "stream": true})),
        ("/v1/messages", json!({"messages": user("x"), "max_tokens": 8000, "stream": true})),
        ("/v1/responses", json!({"input": "x", "stream": true})),
    ] {
        let listening = Listening::start(Server::new(options(), |_| Ok(endless())));
        let mut stream = listening.send(path, &body).await;
        until(&mut stream, "data: ").await;
        assert!(listening.server.engine.running() > 0);
        drop(stream);
        listening.server.engine.idle().await;
        assert_eq!(listening.server.engine.aborted(), if path.contains("chat") { 3 } else { 1 });
        listening.server.app.idle().await;
        let metrics = listening.get("/metrics").await;
        assert!(metrics.contains("finished_reason=\"abort\""), "{metrics}");
    }
}

#[tokio::test]
async fn a_closed_connection_aborts_a_request_without_a_stream() {
    for script in [endless(), Script { first: Duration::from_secs(3600), ..script("a") }] {
        let listening = Listening::start(Server::new(options(), move |_| Ok(script.clone())));
        let stream = listening.send("/v1/chat/completions", &json!({"messages": user("x")})).await;
        while listening.server.engine.running() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(stream);
        listening.server.engine.idle().await;
        assert_eq!(listening.server.engine.aborted(), 1);
        listening.server.app.idle().await;
    }
}

#[tokio::test]
async fn a_body_that_is_too_long_by_its_length_is_refused_before_it_comes() {
    let listening = Listening::start(Server::saying("a"));
    let mut stream = TcpStream::connect(("127.0.0.1", listening.port)).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99999999\r\n\r\n{";
    stream.write_all(head.as_bytes()).await.unwrap();
    let answer = tokio::time::timeout(Duration::from_secs(10), until(&mut stream, "--max-request-body-bytes")).await;
    assert!(answer.unwrap().starts_with("HTTP/1.1 413"));
}

#[tokio::test]
async fn draining_finishes_what_runs_and_refuses_the_rest() {
    let mut script = script("a</think>b c d e f");
    script.pace = Duration::from_millis(60);
    let mut listening = Listening::start(Server::new(options(), move |_| Ok(script.clone())));
    let mut stream = listening.send("/v1/chat/completions", &json!({"messages": user("x"), "stream": true})).await;
    until(&mut stream, "data: ").await;
    listening.stop();
    while !listening.server.app.is_draining() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(listening.get("/health").await.starts_with("HTTP/1.1 503"));
    let mut refused = listening.send("/v1/chat/completions", &json!({"messages": user("x")})).await;
    let head = until(&mut refused, "shutting down").await;
    assert!(
        head.starts_with("HTTP/1.1 503") && head.contains("retry-after: 1") && head.contains("connection: close"),
        "{head}"
    );
    let rest = until(&mut stream, "[DONE]").await;
    assert!(rest.contains("\"finish_reason\":\"stop\""));
    listening.task.await.unwrap().unwrap();
    assert_eq!(listening.server.engine.aborted(), 0);
    assert!(TcpStream::connect(("127.0.0.1", listening.port)).await.is_err(), "the listener is closed");
}

#[tokio::test]
async fn draining_gives_up_after_its_time() {
    let options = Options { shutdown_timeout: Duration::from_millis(50), ..options() };
    let mut listening = Listening::start(Server::new(options, |_| Ok(Script { end: End::Hang, ..endless() })));
    let mut stream = listening.send("/v1/chat/completions", &json!({"messages": user("x"), "stream": true})).await;
    until(&mut stream, "data: ").await;
    listening.stop();
    listening.task.await.unwrap().unwrap();
    drop(stream);
    listening.server.engine.idle().await;
}

#[tokio::test]
async fn a_dead_engine_ends_the_server() {
    let listening = Listening::start(Server::new(options(), |_| Ok(script("a"))));
    assert!(listening.get("/health").await.starts_with("HTTP/1.1 200"));
    listening.server.engine.set_status(Status { dead: Some("lost".to_owned()), ..Status::default() });
    let error = listening.task.await.unwrap().unwrap_err();
    assert!(matches!(&error, ServeError::EngineDead(reason) if reason == "lost"), "{error}");
}

#[tokio::test]
async fn silent_streams_are_kept_alive() {
    let mut script = script("a</think>bcd");
    script.pace = Duration::from_millis(100);
    let options = Options { keep_alive: Some(Duration::from_millis(20)), ..options() };
    let listening = Listening::start(Server::new(options, move |_| Ok(script.clone())));
    let mut stream = listening.send("/v1/chat/completions", &json!({"messages": user("x"), "stream": true})).await;
    let text = until(&mut stream, "[DONE]").await;
    assert!(text.matches(": keep-alive\n\n").count() >= 3, "{text}");
    let mut stream =
        listening.send("/v1/messages", &json!({"messages": user("x"), "max_tokens": 9, "stream": true})).await;
    let text = until(&mut stream, "message_stop").await;
    assert!(text.matches("event: ping").count() >= 3, "{text}");
}

#[tokio::test]
async fn many_streams_at_once_all_end() {
    let listening = Listening::start(Server::new(options(), |_| {
        let mut script = script("a</think>b c");
        script.pace = Duration::from_millis(1);
        Ok(script)
    }));
    let body = json!({"messages": user("x"), "stream": true});
    let mut streams = Vec::new();
    for _ in 0..200 {
        streams.push(listening.send("/v1/chat/completions", &body).await);
    }
    for mut stream in streams {
        until(&mut stream, "[DONE]").await;
    }
    listening.server.app.idle().await;
    assert_eq!((listening.server.engine.running(), listening.server.engine.aborted()), (0, 0));
}

/// Splits the bytes of one answer of chunks: head, chunks, and what follows.
fn split(bytes: &[u8]) -> (String, Vec<String>, &[u8]) {
    let line = |rest: &[u8], end: &[u8]| rest.windows(end.len()).position(|part| part == end).unwrap();
    let head = line(bytes, b"\r\n\r\n");
    let (mut rest, mut chunks) = (&bytes[head + 4..], Vec::new());
    loop {
        let digits = line(rest, b"\r\n");
        let length = usize::from_str_radix(std::str::from_utf8(&rest[..digits]).unwrap(), 16).unwrap();
        let chunk = &rest[digits + 2..][..length];
        assert_eq!(&rest[digits + 2 + length..][..2], b"\r\n");
        rest = &rest[digits + 4 + length..];
        if length == 0 {
            return (String::from_utf8(bytes[..head].to_vec()).unwrap(), chunks, rest);
        }
        chunks.push(String::from_utf8(chunk.to_vec()).unwrap());
    }
}

/// A paced answer goes past hyper; what is before and behind it on the same connection does not.
#[tokio::test]
async fn a_connection_serves_streams_and_others_in_any_order() {
    let mut script = script("a</think>b c d e");
    script.pace = Duration::from_millis(5);
    let listening = Listening::start(Server::new(options(), move |_| Ok(script.clone())));
    let request = |version: &str, stream: bool, last: bool| {
        let body = json!({"messages": user("x"), "stream": stream}).to_string();
        let close = if last { "connection: close\r\n" } else { "" };
        format!(
            "POST /v1/chat/completions HTTP/{version}\r\nhost: x\r\n{close}content-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    let mut read = Vec::new();
    let mut socket = TcpStream::connect(("127.0.0.1", listening.port)).await.unwrap();
    // The second and the third request are sent while the first one is answered.
    for (stream, last) in [(true, false), (true, false), (false, true)] {
        socket.write_all(request("1.1", stream, last).as_bytes()).await.unwrap();
    }
    socket.read_to_end(&mut read).await.unwrap();
    let (first, second, rest) = {
        let (head, first, rest) = split(&read);
        assert!(head.contains("transfer-encoding: chunked"), "{head}");
        let (_, second, rest) = split(rest);
        (first.concat(), second.concat(), String::from_utf8(rest.to_vec()).unwrap())
    };
    assert!(rest.starts_with("HTTP/1.1 200") && rest.contains("\"content\":\"b c d e\""), "{rest}");
    for text in [&first, &second] {
        assert!(text.ends_with("data: [DONE]\n\n") && text.matches("\"content\":").count() >= 4, "{text}");
    }
    // Without chunks the answer ends with its connection.
    let mut old = TcpStream::connect(("127.0.0.1", listening.port)).await.unwrap();
    old.write_all(request("1.0", true, false).as_bytes()).await.unwrap();
    let mut text = String::new();
    old.read_to_string(&mut text).await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(
        !head.contains("chunked") && body.starts_with("data: ") && body.ends_with("\n\ndata: [DONE]\n\n"),
        "{text}"
    );
    assert_eq!(body.matches("data: ").count(), first.matches("data: ").count());
    assert_eq!(listening.server.engine.aborted(), 0);
}

/// A client that does not read holds back its own stream only, and gets all of it later.
#[tokio::test]
async fn a_slow_client_gets_everything() {
    slow_clients_get_everything(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn slow_clients_get_everything_from_several_threads() {
    slow_clients_get_everything(5).await;
}

async fn slow_clients_get_everything(clients: usize) {
    const TOKENS: usize = 6000;
    const ANSWERS: usize = 4;
    let steps: Vec<Vec<u32>> = std::iter::repeat_n(vec![tokens("x")[0]], TOKENS).collect();
    let script =
        Script { steps, first: Duration::from_millis(20), end: End::Finish(FinishReason::Length), ..script("") };
    let listening = Listening::start(Server::new(options(), move |_| Ok(script.clone())));
    let body = json!({"prompt": "x", "max_tokens": TOKENS, "n": ANSWERS, "stream": true, "logprobs": 5});
    let mut slow = Vec::new();
    for _ in 0..clients {
        slow.push(listening.send("/v1/completions", &body).await);
    }
    let mut buffer = vec![0; 64 << 10];
    // A busy machine may take its time until all have begun.
    for _ in 0..200 {
        if listening.server.app.in_flight() < clients {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(listening.server.app.in_flight(), clients, "the answers are too long for the socket");
    assert!(listening.get("/health").await.starts_with("HTTP/1.1 200"));
    for mut slow in slow {
        let mut read = Vec::new();
        while !read.ends_with(b"\r\n0\r\n\r\n") {
            let count = tokio::time::timeout(Duration::from_secs(60), slow.read(&mut buffer)).await.unwrap().unwrap();
            assert!(count > 0 && (!read.is_empty() || buffer.starts_with(b"HTTP/1.1 200")));
            read.extend_from_slice(&buffer[..count]);
        }
        let (_, chunks, rest) = split(&read);
        assert!(rest.is_empty());
        let text = chunks.concat();
        assert!(text.ends_with("data: [DONE]\n\n"));
        let length = |(at, key): (usize, &str)| text[at + key.len()..].find('"').unwrap();
        assert_eq!(text.match_indices("\"text\":\"").map(length).sum::<usize>(), TOKENS * ANSWERS);
    }
    assert_eq!(listening.server.engine.aborted(), 0);
    // One that goes without reading ends too.
    let mut gone = listening.send("/v1/completions", &body).await;
    gone.read_exact(&mut [0]).await.unwrap();
    drop(gone);
    listening.server.app.idle().await;
    // The engine learns of it in a thread of its own.
    for _ in 0..200 {
        if listening.server.engine.running() > 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    assert_eq!(listening.server.engine.running(), 0);
}

/// A device that is lost in a step: what runs gets 500, `/health` and new requests 503, and the server ends with an error.
#[tokio::test]
async fn a_lost_device_fails_what_runs_and_ends_the_server() {
    use glimmer_checkpoint::Checkpoint;
    use glimmer_engine::worker::{Worker, WorkerSettings};
    use glimmer_engine::{Generator, Settings};
    use glimmer_server::{app::App, live::Live, router::router};
    use tower::ServiceExt as _;

    let mut steps = 0;
    let begin = move || {
        steps += 1;
        let lost = "cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS";
        if steps < 5 { Ok(()) } else { Err(glimmer_tensor::Error::Device(lost.into())) }
    };
    let load = move || {
        let settings = Settings { sequences: 4, context: Some(512), ..Settings::default() };
        Generator::load(hollow::Hollow(Box::new(begin)), &Checkpoint::open(support::micro_dir()).unwrap(), &settings)
    };
    let (worker, _) = Worker::spawn(load, WorkerSettings::default()).unwrap();
    let app = App::new(Arc::new(Live::new(worker)), support::model(), options());
    let send = |request: axum::http::Request<axum::body::Body>| {
        let router = router(Arc::clone(&app));
        async move { router.oneshot(request).await.unwrap().status().as_u16() }
    };
    let get = |path| axum::http::Request::get(path).body(axum::body::Body::empty()).unwrap();
    let chat = || {
        let body = json!({"model": "micro", "messages": user("x"), "max_tokens": 100, "ignore_eos": true});
        support::post("/v1/chat/completions", &body.to_string())
    };
    let streamed = async {
        let body =
            json!({"model": "micro", "messages": user("x"), "max_tokens": 100, "ignore_eos": true, "stream": true});
        let request = support::post("/v1/chat/completions", &body.to_string());
        let answer = router(Arc::clone(&app)).oneshot(request).await.unwrap();
        let status = answer.status().as_u16();
        let bytes = axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
        (status, String::from_utf8_lossy(&bytes).into_owned())
    };
    assert_eq!(send(get("/health")).await, 200);
    let (first, second, (status, stream)) = tokio::join!(send(chat()), send(chat()), streamed);
    // What runs fails, a stream in its last event; a request that arrives only after the loss is refused.
    assert!([500, 503].contains(&first) && [500, 503].contains(&second), "{first} {second}");
    assert!(status == 503 || status == 500 || status == 200 && stream.contains("\"code\":500"), "{status}: {stream}");
    assert!([first, second, status].iter().any(|&status| status != 503), "something ran when the device was lost");
    assert_eq!(send(get("/health")).await, 503);
    assert_eq!(send(chat()).await, 503);
    let ended = serve(app, bind(Some("127.0.0.1"), 0).unwrap(), std::future::pending()).await;
    let Err(ServeError::EngineDead(reason)) = ended else { panic!("{ended:?}") };
    assert!(reason.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{reason}");
}

/// A device that never ends its step: the server does not wait for it for ever.
#[tokio::test]
async fn a_stuck_engine_ends_the_server() {
    let mut listening = Listening::start(Server::saying("a"));
    listening.server.engine.set_status(Status { stuck: true, ..Status::default() });
    let ended = (&mut listening.task).await.unwrap();
    assert!(
        matches!(&ended, Err(ServeError::EngineDead(reason)) if reason.contains("--execute-model-timeout")),
        "{ended:?}"
    );
}
