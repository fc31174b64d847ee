//! The micro model's tokenizer and template behind a scripted engine.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::needless_pass_by_value, reason = "test helpers take JSON literals by value")]

use std::path::Path;
use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use glimmer_engine::request::{FinishReason, Request as EngineRequest};
use glimmer_server::app::{App, Options};
use glimmer_server::engine::{GenerationDefaults, Model, Refusal};
use glimmer_server::router::router;
use glimmer_server::scripted::{AnyShape, End, Script, Scripted};
use glimmer_text::ChatFormat;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tower::ServiceExt as _;

pub(crate) fn micro_dir() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16"))
}

/// Tokenizer and template, read once.
pub(crate) fn format() -> Arc<ChatFormat> {
    static FORMAT: OnceLock<Arc<ChatFormat>> = OnceLock::new();
    Arc::clone(FORMAT.get_or_init(|| Arc::new(ChatFormat::from_dir(micro_dir()).unwrap())))
}

pub(crate) fn model() -> Model {
    let processors = glimmer_model::vision::Processors {
        image: glimmer_model::vision::Processor::default(),
        video: glimmer_model::vision::Processor::default(),
    };
    Model {
        format: format(),
        served_names: vec!["micro".to_owned(), "alias".to_owned()],
        root: "models/micro-bf16".to_owned(),
        max_model_len: 8192,
        vocab_size: 3328,
        defaults: GenerationDefaults::default(),
        processors: Some(processors),
        grammars: Some(Arc::new(AnyShape)),
    }
}

pub(crate) fn options() -> Options {
    Options { reasoning: true, tools: true, auto_tool_choice: true, ..Options::default() }
}

/// A server and its engine.
pub(crate) struct Server {
    pub(crate) app: Arc<App>,
    pub(crate) engine: Arc<Scripted>,
    pub(crate) router: Router,
}

impl Server {
    pub(crate) fn new(
        options: Options,
        choose: impl Fn(&EngineRequest) -> Result<Script, Refusal> + Send + Sync + 'static,
    ) -> Self {
        Self::with_model(model(), options, choose)
    }

    pub(crate) fn with_model(
        model: Model,
        options: Options,
        choose: impl Fn(&EngineRequest) -> Result<Script, Refusal> + Send + Sync + 'static,
    ) -> Self {
        let engine = Arc::new(Scripted::new(choose));
        let app = App::new(Arc::clone(&engine) as Arc<dyn glimmer_server::engine::Engine>, model, options);
        let router = router(Arc::clone(&app));
        Self { app, engine, router }
    }

    /// A server that says `text` to everybody, a token a step.
    pub(crate) fn saying(text: &str) -> Self {
        let script = script(text);
        Self::new(options(), move |_| Ok(script.clone()))
    }

    pub(crate) async fn send(&self, request: Request<Body>) -> Reply {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Reply { status: parts.status, headers: parts.headers, text: String::from_utf8(body.to_vec()).unwrap() }
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Reply {
        self.send(post(path, &body.to_string())).await
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        self.send(Request::get(path).body(Body::empty()).unwrap()).await
    }

    pub(crate) async fn chat(&self, body: Value) -> Reply {
        self.post("/v1/chat/completions", body).await
    }
}

pub(crate) fn post(path: &str, body: &str) -> Request<Body> {
    let request = Request::post(path).header("content-type", "application/json; charset=utf-8");
    request.body(Body::from(body.to_owned())).unwrap()
}

/// A response.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl Reply {
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// The JSON of a successful response.
    #[track_caller]
    pub(crate) fn ok(&self) -> Value {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        self.json()
    }

    /// Status, type and param of an error.
    #[track_caller]
    pub(crate) fn error(&self) -> (u16, String, Option<String>) {
        let body = self.json();
        assert_eq!(body["error"]["code"], self.status.as_u16(), "{body}");
        let text = |key: &str| body["error"][key].as_str().map(str::to_owned);
        (self.status.as_u16(), text("type").unwrap(), text("param"))
    }

    pub(crate) fn message(&self) -> String {
        self.json()["error"]["message"].as_str().unwrap_or_default().to_owned()
    }

    /// `data:` lines of a stream as JSON; the last must be `[DONE]`.
    #[track_caller]
    pub(crate) fn chunks(&self) -> Vec<Value> {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        assert_eq!(self.headers["content-type"], "text/event-stream; charset=utf-8");
        let blocks = self.text.split_terminator("\n\n").filter(|block| !block.starts_with(':'));
        let mut data: Vec<&str> = blocks.map(|block| block.strip_prefix("data: ").expect("only data")).collect();
        assert_eq!(data.pop(), Some("[DONE]"));
        data.iter().map(|text| serde_json::from_str(text).unwrap()).collect()
    }

    /// Named events of a stream.
    #[track_caller]
    pub(crate) fn events(&self) -> Vec<(String, Value)> {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        let blocks = self.text.split_terminator("\n\n").filter(|block| !block.starts_with(':'));
        let read = |block: &str| {
            let (name, data) = block.split_once("\ndata: ").expect("event and data");
            (name.strip_prefix("event: ").expect("a name").to_owned(), serde_json::from_str(data).unwrap())
        };
        blocks.map(read).collect()
    }
}

/// The tokens of an answer, markers as tokens, a token a step, ended by the model's end token.
pub(crate) fn script(text: &str) -> Script {
    Script::of(&tokens(text))
}

/// The tokens of an answer and the end token.
pub(crate) fn tokens(text: &str) -> Vec<u32> {
    let format = format();
    let mut ids = format.tokenizer().encode(text).unwrap();
    ids.push(format.tokenizer().added_id("<|user|>").unwrap());
    ids
}

/// As [`script`], several tokens a step.
pub(crate) fn script_in_steps(text: &str, tokens_a_step: usize) -> Script {
    let steps = tokens(text).chunks(tokens_a_step).map(<[u32]>::to_vec).collect();
    Script { steps, ..Script::of(&[]) }
}

/// A script cut off by the token limit.
pub(crate) fn cut(text: &str) -> Script {
    let mut script = script(text);
    script.steps.pop();
    Script { end: End::Finish(FinishReason::Length), ..script }
}

pub(crate) fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

/// Tools of the specification's table of known failures.
pub(crate) fn tools() -> Value {
    let tool = |name: &str, properties: Value| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}});
    json!([
        tool("get_weather", json!({"city": {"type": "string"}})),
        tool("get_time", json!({})),
        tool("search", json!({"query": {"type": "string"}, "n": {"type": "integer"}})),
        tool("run_command", json!({"command": {"type": "string"}})),
    ])
}

/// Joins the deltas of a chat stream into a message like that of a whole answer.
pub(crate) fn join_chat(chunks: &[Value], choice: u64) -> Value {
    let mut message = json!({"content": null, "reasoning": null, "tool_calls": []});
    let mut finish = Value::Null;
    for chunk in chunks {
        for found in chunk["choices"].as_array().unwrap().iter().filter(|found| found["index"] == choice) {
            let delta = &found["delta"];
            assert_eq!(delta.get("reasoning"), delta.get("reasoning_content"), "both names, same text");
            for key in ["content", "reasoning"] {
                if let Some(text) = delta[key].as_str().filter(|text| !text.is_empty()) {
                    message[key] = format!("{}{text}", message[key].as_str().unwrap_or_default()).into();
                }
            }
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                let calls = message["tool_calls"].as_array_mut().unwrap();
                let index = call["index"].as_u64().unwrap() as usize;
                if index == calls.len() {
                    assert_eq!((&call["type"], &call["function"]["arguments"]), (&json!("function"), &json!("")));
                    assert!(!call["id"].as_str().unwrap().is_empty());
                    calls.push(json!({"name": call["function"]["name"], "arguments": ""}));
                } else {
                    assert!(call.get("id").is_none() && call["function"].get("name").is_none(), "{call}");
                    let fragment = call["function"]["arguments"].as_str().unwrap();
                    let joined = format!("{}{fragment}", calls[index]["arguments"].as_str().unwrap());
                    calls[index]["arguments"] = joined.into();
                }
            }
            if !found["finish_reason"].is_null() {
                assert_eq!(delta, &json!({}), "the end is an event of its own");
                assert!(finish.is_null(), "one end");
                finish = found["finish_reason"].clone();
            }
        }
    }
    message["finish_reason"] = finish;
    message
}

/// A whole answer in the same form.
pub(crate) fn join_whole(body: &Value, choice: usize) -> Value {
    let choice = &body["choices"][choice];
    let message = &choice["message"];
    assert_eq!(message["reasoning"], message["reasoning_content"]);
    let calls = message["tool_calls"].as_array().into_iter().flatten().map(|call| call["function"].clone());
    let content = if message["content"] == "" { Value::Null } else { message["content"].clone() };
    json!({
        "content": content, "reasoning": message["reasoning"], "tool_calls": calls.collect::<Vec<_>>(),
        "finish_reason": choice["finish_reason"],
    })
}
