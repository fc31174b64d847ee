//! `/v1/completions` and the small routes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

mod support;

use glimmer_server::router::paths;
use glimmer_server::small::openapi_value;
use serde_json::{Value, json};
use support::{Server, options, script, tokens, user};

#[tokio::test]
async fn a_whole_completion_has_every_field() {
    let server = Server::saying("one two");
    let mut body = server.post("/v1/completions", json!({"prompt": "count:"})).await.ok();
    assert!(body["id"].as_str().unwrap().starts_with("cmpl-"));
    body["id"] = "ID".into();
    body["created"] = 0.into();
    body["system_fingerprint"] = "FP".into();
    let (prompt, count) = (server.engine.seen()[0].prompt.len(), tokens("one two").len());
    assert_eq!(
        body,
        json!({
            "id": "ID", "object": "text_completion", "created": 0, "model": "micro",
            "choices": [{"index": 0, "text": "one two", "logprobs": null, "finish_reason": "stop", "stop_reason": null}],
            "usage": {"prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count,
                      "prompt_tokens_details": null, "completion_tokens_details": null},
            "system_fingerprint": "FP",
        })
    );
    assert_eq!(server.engine.seen()[0].limits.max_tokens, 16, "the route's default");
}

#[tokio::test]
async fn the_four_forms_of_a_prompt() {
    let server = Server::saying("x");
    for (prompt, count) in [
        (json!("a"), 1),
        (json!(["a", "b"]), 2),
        (json!([1, 2, 3]), 1),
        (json!([[1], [2, 3]]), 2),
        (json!(["a", [5]]), 2),
    ] {
        let body = server.post("/v1/completions", json!({"prompt": prompt, "n": 2, "max_tokens": 4})).await.ok();
        let indices: Vec<u64> =
            body["choices"].as_array().unwrap().iter().map(|c| c["index"].as_u64().unwrap()).collect();
        assert_eq!(indices, (0..count * 2).collect::<Vec<u64>>(), "{prompt}");
    }
    let seen = server.engine.seen();
    assert_eq!(seen[6].prompt.as_ref(), [1, 2, 3]);
    for (prompt, param) in [
        (json!(null), Some("prompt")),
        (json!(5), Some("prompt")),
        (json!([]), Some("prompt")),
        (json!(""), Some("prompt")),
        (json!([[]]), Some("prompt")),
        (json!([1, "a"]), Some("prompt")),
        (json!([9_999_999]), Some("prompt")),
        (json!(["a", {}]), Some("prompt[1]")),
    ] {
        let reply = server.post("/v1/completions", json!({ "prompt": prompt })).await;
        let (status, _, found) = reply.error();
        assert_eq!((status, found.as_deref()), (400, param), "{prompt}");
    }
    assert_eq!(
        server.post("/v1/completions", json!({"prompt": "a", "suffix": "b"})).await.error().2.as_deref(),
        Some("suffix")
    );
}

#[tokio::test]
async fn a_streamed_completion_equals_the_whole() {
    for request in [
        json!({"prompt": "ab", "logprobs": 2, "echo": true}),
        json!({"prompt": "ab"}),
        json!({"prompt": ["a", "b"], "n": 2, "stop": "wo"}),
        json!({"prompt": "ab", "max_tokens": 2, "logprobs": 1}),
    ] {
        let server = Server::saying("one caf\u{e9} two");
        let whole = server.post("/v1/completions", request.clone()).await.ok();
        let mut streamed = request.clone();
        streamed["stream"] = true.into();
        streamed["stream_options"] = json!({"include_usage": true});
        let mut chunks = server.post("/v1/completions", streamed).await.chunks();
        let usage = chunks.pop().unwrap();
        assert_eq!(usage["usage"]["total_tokens"], whole["usage"]["total_tokens"]);
        for (index, expected) in whole["choices"].as_array().unwrap().iter().enumerate() {
            let mine = || chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == index);
            let text: String = mine().filter_map(|choice| choice["text"].as_str()).collect();
            assert_eq!(text, expected["text"].as_str().unwrap(), "{request}");
            let last = mine().next_back().unwrap();
            assert_eq!(
                (&last["finish_reason"], &last["stop_reason"]),
                (&expected["finish_reason"], &expected["stop_reason"])
            );
            assert!(mine().all(|choice| choice.get("delta").is_none()));
            for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                let joined: Vec<Value> =
                    mine().filter_map(|c| c["logprobs"][key].as_array().cloned()).flatten().collect();
                let expected = expected["logprobs"][key].as_array().cloned().unwrap_or_default();
                assert_eq!(joined, expected, "{request} {key}");
            }
        }
    }
}

#[tokio::test]
async fn an_echo_with_log_probabilities_covers_the_prompt() {
    let server = Server::saying("x");
    let body = server
        .post("/v1/completions", json!({"prompt": "ab cd", "logprobs": 1, "echo": true, "max_tokens": 1}))
        .await
        .ok();
    let choice = &body["choices"][0];
    let count = server.engine.seen()[0].prompt.len();
    assert_eq!(choice["text"], "ab cdx");
    assert_eq!(choice["logprobs"]["token_logprobs"].as_array().unwrap().len(), count + 1);
    assert_eq!(choice["logprobs"]["token_logprobs"][0], Value::Null);
    assert_eq!(choice["logprobs"]["text_offset"][count], 5);
    let with = json!({"prompt": "ab cd", "prompt_logprobs": 1});
    let body = server.post("/v1/completions", with).await.ok();
    assert_eq!(body["choices"][0]["prompt_logprobs"].as_array().unwrap().len(), count);
}

#[tokio::test]
async fn a_prompt_alone_is_scored() {
    let server = Server::saying("xyz");
    let request = json!({"prompt": ["ab cd", "e"], "logprobs": 1, "echo": true, "max_tokens": 0, "stop": "x"});
    let body = server.post("/v1/completions", request.clone()).await.ok();
    for (index, text) in ["ab cd", "e"].iter().enumerate() {
        let (choice, count) = (&body["choices"][index], server.engine.seen()[index].prompt.len());
        assert_eq!(choice["text"], *text);
        assert_eq!(choice["logprobs"]["token_logprobs"].as_array().unwrap().len(), count);
        assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("length"), &Value::Null));
    }
    assert_eq!(body["usage"]["completion_tokens"], 0);
    let mut streamed = request;
    streamed["stream"] = true.into();
    let chunks = server.post("/v1/completions", streamed).await.chunks();
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert!(text == "ab cde" || text == "eab cd", "{text}");
    for refused in [json!({"prompt": "a", "max_tokens": 0}), json!({"prompt": "a", "max_tokens": -1, "echo": true})] {
        assert_eq!(server.post("/v1/completions", refused).await.error().2.as_deref(), Some("max_tokens"));
    }
    let least = json!({"prompt": "a", "max_tokens": 0, "echo": true, "min_tokens": 1});
    assert_eq!(server.post("/v1/completions", least).await.error().2.as_deref(), Some("min_tokens"));
}

#[tokio::test]
async fn control_tokens_are_recognised_in_raw_prompts() {
    let server = Server::saying("x");
    server.post("/v1/completions", json!({"prompt": "<|user|>hi<|assistant|><think>"})).await.ok();
    let tokenizer = server.app.model.format.tokenizer();
    let prompt = &server.engine.seen()[0].prompt;
    assert_eq!(prompt.iter().filter(|&&id| tokenizer.is_added(id)).count(), 3);
}

#[tokio::test]
async fn models_have_their_length() {
    let server = Server::saying("x");
    let body = server.get("/v1/models").await.ok();
    let ids: Vec<&str> = body["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["micro", "alias"]);
    let card = &body["data"][0];
    assert_eq!(
        (&card["max_model_len"], &card["object"], &card["parent"]),
        (&json!(8192), &json!("model"), &Value::Null)
    );
    assert!(card["permission"].is_array());
    assert_eq!(server.get("/v1/models/alias").await.ok()["id"], "alias");
}

#[tokio::test]
async fn tokens_there_and_back() {
    let server = Server::saying("x");
    let text = "caf\u{e9} <think>";
    let body = server.post("/tokenize", json!({"prompt": text, "return_token_strs": true})).await.ok();
    assert_eq!(
        (&body["max_model_len"], body["count"].as_u64().unwrap() as usize),
        (&json!(8192), body["tokens"].as_array().unwrap().len())
    );
    assert_eq!(body["token_strs"].as_array().unwrap().len(), body["tokens"].as_array().unwrap().len());
    let back = server.post("/detokenize", json!({"tokens": body["tokens"]})).await.ok();
    assert_eq!(back, json!({"prompt": text}));
    let chat = server.post("/tokenize", json!({"messages": user("x")})).await.ok();
    server.chat(json!({"messages": user("x")})).await.ok();
    assert_eq!(chat["tokens"], json!(server.engine.seen()[0].prompt.to_vec()));
    assert_eq!(chat["token_strs"], Value::Null);
    assert_eq!(
        server.post("/tokenize", json!({})).await.error(),
        (400, "Bad Request".to_owned(), Some("prompt".to_owned()))
    );
    assert_eq!(server.post("/detokenize", json!({})).await.error().2.as_deref(), Some("tokens"));
    assert_eq!(server.post("/detokenize", json!({"tokens": [4000]})).await.error().0, 400);
}

#[tokio::test]
async fn the_small_routes_answer() {
    let server = Server::saying("x");
    for path in ["/health", "/ping"] {
        let reply = server.get(path).await;
        assert_eq!((reply.status.as_u16(), reply.text.as_str()), (200, ""));
    }
    assert!(server.get("/version").await.ok()["version"].is_string());
    assert_eq!(server.get("/load").await.ok(), json!({"server_load": 0}));
    let metrics = server.get("/metrics").await;
    assert!(metrics.headers["content-type"].to_str().unwrap().starts_with("text/plain; version=0.0.4"));
    assert_eq!(server.post("/reset_prefix_cache", json!({})).await.error().0, 404, "outside development");
}

#[tokio::test]
async fn requests_are_counted_by_how_they_end() {
    let server = Server::saying("a</think>b");
    server.chat(json!({"messages": user("x")})).await.ok();
    server.chat(json!({"messages": user("x"), "max_tokens": 1})).await.ok();
    server.chat(json!({"messages": user("x"), "stop": "a"})).await.ok();
    let metrics = server.get("/metrics").await.text;
    let base = r#"model_name="micro",engine="0""#;
    for line in [
        format!("vllm:request_success_total{{{base},finished_reason=\"stop\"}} 2"),
        format!("vllm:request_success_total{{{base},finished_reason=\"length\"}} 1"),
        format!("vllm:e2e_request_latency_seconds_count{{{base}}} 3"),
        format!("vllm:time_to_first_token_seconds_count{{{base}}} 3"),
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} in\n{metrics}");
    }
}

#[tokio::test]
async fn browsers_may_call() {
    let server = Server::new(options(), |_| Ok(script("x")));
    let request = axum::http::Request::options("/v1/chat/completions")
        .header("origin", "http://page.example")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization,content-type")
        .body(axum::body::Body::empty())
        .unwrap();
    let reply = server.send(request).await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.headers["access-control-allow-origin"], "*");
    let closed = glimmer_server::app::Options { allowed_origins: vec!["http://a.example".to_owned()], ..options() };
    let server = Server::new(closed, |_| Ok(script("x")));
    for (origin, allowed) in [("http://a.example", true), ("http://b.example", false)] {
        let request =
            axum::http::Request::get("/version").header("origin", origin).body(axum::body::Body::empty()).unwrap();
        let reply = server.send(request).await;
        assert_eq!(reply.headers.get("access-control-allow-origin").is_some_and(|v| v == origin), allowed);
    }
}

#[tokio::test]
async fn the_description_lists_exactly_the_routes() {
    let server = Server::saying("x");
    let description = server.get("/openapi.json").await.ok();
    assert_eq!(description, openapi_value());
    let described: Vec<(String, Vec<String>)> = description["paths"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(path, methods)| (path.clone(), methods.as_object().unwrap().keys().cloned().collect()))
        .collect();
    let routes: Vec<(String, Vec<String>)> = paths()
        .iter()
        .map(|(path, methods)| ((*path).to_owned(), methods.iter().map(|&m| m.to_owned()).collect()))
        .collect();
    assert_eq!(described, routes);
    // Every reference inside the document leads somewhere.
    let text = description.to_string();
    for reference in text.split("\"$ref\":\"#").skip(1).map(|rest| rest.split('"').next().unwrap()) {
        assert!(description.pointer(reference).is_some(), "{reference}");
    }
}
