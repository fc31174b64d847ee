//! The server, and one that only writes.

use std::sync::Arc;
use std::thread;

use glimmer_engine::request::Request;
use glimmer_server::app::{App, Options};
use glimmer_server::engine::{Engine as _, EventSender, GenerationDefaults, Model};
use glimmer_server::serve::{bind, serve};
use glimmer_text::ChatFormat;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::engine::Stepping;

/// Name of the server's worker thread, by which its processor time is found.
pub(crate) const WORKER: &str = "one-worker";
/// The same of the bare one.
const BARE_WORKER: &str = "bare-worker";

fn one_worker(name: &str) -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).thread_name(name).enable_all().build().unwrap()
}

/// A server on one worker thread; returns its port.
pub(crate) fn start(engine: Stepping, format: &Arc<ChatFormat>) -> u16 {
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
        one_worker(WORKER).block_on(async { tokio::spawn(serve(app, listener, std::future::pending())).await })
    });
    port
}

/// A server that reads a request's head, and writes a ready frame whenever the engine gives a token: the socket's part.
pub(crate) fn start_bare(engine: Stepping, template: Request, frame: &'static [u8]) -> u16 {
    let listener = bind(Some("127.0.0.1"), 0).unwrap();
    let port = listener.local_addr().unwrap().port();
    let engine = Arc::new(engine);
    thread::spawn(move || {
        one_worker(BARE_WORKER).block_on(async {
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
                        stream.write_all(frame).await.unwrap();
                        while let Some(parcel) = events.recv().await {
                            let (_, event) = glimmer_server::engine::Parcel::open(parcel);
                            stream.write_all(frame).await.unwrap();
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

/// Nanoseconds that the worker threads of this process have computed.
pub(crate) fn worker_time() -> u64 {
    let mut sum = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let path = task.unwrap().path();
        if std::fs::read_to_string(path.join("comm")).is_ok_and(|name| [WORKER, BARE_WORKER].contains(&name.trim())) {
            let text = std::fs::read_to_string(path.join("schedstat")).unwrap();
            sum += text.split(' ').next().unwrap().parse::<u64>().unwrap();
        }
    }
    sum
}
