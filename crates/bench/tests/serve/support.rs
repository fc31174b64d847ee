//! Servers on a free port: scripted engines behind the real front end, and canned bytes.

use std::future::Future;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use glimmer_bench::serve::client::{Address, Client};
use glimmer_bench::serve::dataset::Prompt;
use glimmer_bench::serve::exchange::{Api, Ask};
use glimmer_bench::serve::load::Target;
use glimmer_engine::request::Request;
use glimmer_server::app::{App, Options};
use glimmer_server::engine::{Engine, GenerationDefaults, Model, Refusal};
use glimmer_server::port::Port;
use glimmer_server::scripted::{Script, Scripted};
use glimmer_server::serve::{bind, serve};
use glimmer_text::ChatFormat;
use hyper::header::HeaderMap;

/// Tokenizer and template of the micro model, read once.
pub(crate) fn format() -> Arc<ChatFormat> {
    static FORMAT: OnceLock<Arc<ChatFormat>> = OnceLock::new();
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16"));
    Arc::clone(FORMAT.get_or_init(|| Arc::new(ChatFormat::from_dir(path).unwrap())))
}

/// Runs a future as the program does: on one thread.
pub(crate) fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Starts the real front end over scripts on a thread of its own; returns its port and its engine.
pub(crate) fn scripted(
    options: Options,
    choose: impl Fn(&Request) -> Result<Script, Refusal> + Send + Sync + 'static,
) -> (u16, Arc<Scripted>) {
    start(options, choose, Port::from)
}

/// As [`scripted`], with a certificate for `localhost`.
#[cfg(feature = "tls")]
pub(crate) fn encrypted(
    options: Options,
    choose: impl Fn(&Request) -> Result<Script, Refusal> + Send + Sync + 'static,
) -> (u16, Arc<Scripted>) {
    use glimmer_server::tls::{Tls, TlsFiles};

    let file = |name: &str| format!("{}/../server/tests/tls-files/{name}", env!("CARGO_MANIFEST_DIR"));
    let files = TlsFiles {
        certificates: file("certificate.pem"),
        key: file("key.pem"),
        client_authorities: None,
        clients_must: false,
    };
    start(options, choose, |listener| Port::new(listener, Some(Tls::open(&files).unwrap())))
}

fn start(
    options: Options,
    choose: impl Fn(&Request) -> Result<Script, Refusal> + Send + Sync + 'static,
    open: impl FnOnce(TcpListener) -> Port,
) -> (u16, Arc<Scripted>) {
    let engine = Arc::new(Scripted::new(choose));
    let model = Model {
        format: format(),
        served_names: vec!["micro".to_owned()],
        root: "scripted".to_owned(),
        max_model_len: 8192,
        vocab_size: 3328,
        defaults: GenerationDefaults::default(),
        processors: None,
        grammars: None,
    };
    let options = Options { reasoning: true, log_stats: false, ..options };
    let app = App::new(Arc::clone(&engine) as Arc<dyn Engine>, model, options);
    let listener = bind(Some("127.0.0.1"), 0).unwrap();
    let port = listener.local_addr().unwrap().port();
    let listener = open(listener);
    std::thread::spawn(move || run(serve(app, listener, std::future::pending())));
    (port, engine)
}

/// Answers every connection with these bytes, `size` at a time, and closes it.
pub(crate) fn canned(answer: impl Into<Vec<u8>>, size: usize) -> u16 {
    let answer = answer.into();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, answer) = (stream.unwrap(), answer.clone());
            std::thread::spawn(move || {
                stream.set_nodelay(true).unwrap();
                let (mut head, mut byte) = (Vec::new(), [0]);
                while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap_or(0) == 1 {
                    head.push(byte[0]);
                }
                let head = String::from_utf8_lossy(&head).to_ascii_lowercase();
                let length = head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next());
                let mut body = vec![0; length.map_or(0, |text| text.parse().unwrap())];
                stream.read_exact(&mut body).unwrap();
                for piece in answer.chunks(size) {
                    // A client that has seen enough may go.
                    if stream.write_all(piece).and_then(|()| stream.flush()).is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

/// A whole answer of a stream of events.
pub(crate) fn events(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n{body}")
}

pub(crate) fn client(port: u16) -> Arc<Client> {
    Arc::new(Client::new(Address::of("127.0.0.1", port).unwrap(), HeaderMap::new()))
}

pub(crate) fn target(port: u16, api: Api) -> Target {
    let endpoint = match api {
        Api::Completions => "/v1/completions",
        Api::Chat => "/v1/chat/completions",
    };
    let ask = Ask {
        api,
        endpoint: endpoint.to_owned(),
        model: "micro".to_owned(),
        ignore_eos: false,
        logprobs: None,
        extra: serde_json::Map::new(),
        timeout: Duration::from_secs(3600),
    };
    Target { client: client(port), ask: Arc::new(ask) }
}

pub(crate) fn prompt(text: &str, output_tokens: u32) -> Prompt {
    Prompt { text: text.to_owned(), tokens: 3, output_tokens, id: None, answer: None, seed: None }
}

/// Tokens of a text and the model's end, a token a step.
pub(crate) fn script(text: &str) -> Script {
    let format = format();
    let mut ids = format.tokenizer().encode(text).unwrap();
    ids.push(format.tokenizer().added_id("<|user|>").unwrap());
    Script::of(&ids)
}
