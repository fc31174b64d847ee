//! What reaches the engine beside the tokens: where the last turn begins, pictures as patches, compiled shapes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

mod support;

use base64::Engine as _;
use serde_json::{Value, json};
use support::{Server, tools, user};

fn picture() -> Value {
    let png = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/goldens/micro/image_direct.png")).unwrap();
    let url = format!("data:image/png;base64,{}", base64::engine::general_purpose::STANDARD.encode(png));
    json!({"type": "image_url", "image_url": {"url": url}})
}

#[tokio::test]
async fn the_last_turn_begins_at_a_marker_of_the_template() {
    let server = Server::saying("a</think>b");
    let call = json!([{"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}]);
    let turns =
        |last: Value| json!([{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, last]);
    for (messages, marker, tail) in [
        (user("hi"), "<|user|>", "hi"),
        (turns(json!({"role": "user", "content": "see <|user|> and <|observation|>"})), "<|user|>", "see <|user|>"),
        (
            json!([{"role": "user", "content": "w?"}, {"role": "assistant", "content": "", "tool_calls": call},
                   {"role": "tool", "tool_call_id": "1", "content": "sunny"}]),
            "<|observation|>",
            "sunny",
        ),
    ] {
        server.chat(json!({"messages": messages, "tools": tools()})).await.ok();
        let request = server.engine.seen().pop().unwrap();
        let tokenizer = server.app.model.format.tokenizer();
        let start = request.turn_start.unwrap();
        assert_eq!(request.prompt[start], tokenizer.added_id(marker).unwrap());
        assert!(tokenizer.decode(&request.prompt[start..], false).contains(tail));
        let rest = &request.prompt[start + 1..];
        for marker in ["<|user|>", "<|observation|>"] {
            assert!(!rest.contains(&tokenizer.added_id(marker).unwrap()), "{marker} is a token further on");
        }
    }
    server.post("/v1/completions", json!({"prompt": "x"})).await.ok();
    assert_eq!(server.engine.seen().pop().unwrap().turn_start, None);
}

#[tokio::test]
async fn pictures_beyond_the_context_are_refused_before_they_are_cut() {
    let mut model = support::model();
    model.max_model_len = 40;
    let server = Server::with_model(model, support::options(), |_| Ok(support::script("a</think>b")));
    let parts = |count: usize| json!([{"role": "user", "content": vec![picture(); count]}]);
    assert_eq!(server.chat(json!({"messages": parts(1)})).await.status, 200);
    let reply = server.chat(json!({"messages": parts(3)})).await;
    assert_eq!(reply.error(), (400, "BadRequestError".to_owned(), Some("messages".to_owned())));
    assert!(reply.text.contains("maximum context length is 40"), "{}", reply.text);
}

#[tokio::test]
async fn a_shape_is_compiled_for_every_answer() {
    let server = Server::saying("a</think>b");
    server.chat(json!({"messages": user("x")})).await.ok();
    assert_eq!(server.engine.constrained(), 0);
    let shape = json!({"type": "json_object"});
    server.chat(json!({"messages": user("x"), "response_format": shape, "n": 3})).await.ok();
    assert_eq!(server.engine.constrained(), 3);
    server.chat(json!({"messages": user("x"), "tools": tools(), "tool_choice": "required"})).await.ok();
    assert_eq!(server.engine.constrained(), 4);
    let body = json!({"prompt": ["x", "y"], "structured_outputs": {"choice": ["a"]}});
    server.post("/v1/completions", body).await.ok();
    assert_eq!(server.engine.constrained(), 6);
}

#[tokio::test]
async fn the_estimate_of_the_wait_goes_with_the_answer() {
    let server = Server::saying("a</think>b");
    let body = || json!({"messages": user("x"), "max_tokens": 9});
    assert!(server.chat(body()).await.headers.get("x-estimated-ttft-ms").is_none());
    let status = glimmer_server::engine::Status { backlog_tokens: 1000, prefill_rate: 1000.0, ..Default::default() };
    server.engine.set_status(status);
    let mut stream = body();
    stream["stream"] = true.into();
    for (path, body) in [
        ("/v1/chat/completions", body()),
        ("/v1/chat/completions", stream.clone()),
        ("/v1/messages", body()),
        ("/v1/messages", stream),
        ("/v1/completions", json!({"prompt": "x"})),
        ("/v1/completions", json!({"prompt": "x", "stream": true})),
        ("/v1/responses", json!({"input": "x"})),
        ("/invocations", body()),
    ] {
        let reply = server.post(path, body).await;
        let prompt = server.engine.seen().pop().unwrap().prompt.len();
        assert_eq!(reply.headers["x-estimated-ttft-ms"].to_str().unwrap(), (1000 + prompt).to_string(), "{path}");
    }
}

#[tokio::test]
async fn one_route_takes_both_kinds_of_body() {
    let server = Server::saying("a</think>b");
    assert_eq!(server.post("/invocations", json!({"messages": user("x")})).await.ok()["object"], "chat.completion");
    assert_eq!(server.post("/invocations", json!({"prompt": "x"})).await.ok()["object"], "text_completion");
    let error = server.post("/invocations", json!({"inputs": "x"})).await.error();
    assert_eq!(error, (400, "Bad Request".to_owned(), Some("messages".to_owned())));
}

#[tokio::test]
async fn the_page_loads_nothing_from_elsewhere() {
    let reply = Server::saying("a").get("/").await;
    assert_eq!(reply.headers["content-type"], "text/html; charset=utf-8");
    let policy = reply.headers["content-security-policy"].to_str().unwrap();
    assert!(policy.starts_with("default-src 'none'") && policy.contains("connect-src 'self'"));
    // The namespace of SVG is a name, not an address.
    let text = reply.text.replace("http://www.w3.org/2000/svg", "");
    assert!(!text.contains("http://") && !text.contains("https://") && !text.contains("src=\"//"));
    // A proxy may serve it below a path: addresses are relative.
    assert!(text.contains("fetch(\"v1/chat/completions\"") && !text.contains("fetch(\"/"));
}
