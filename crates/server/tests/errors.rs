//! Bad input: each row of the table of errors, and every range of the parameters.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

mod support;

use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use glimmer_engine::request::{FinishReason, RequestError};
use glimmer_server::app::Options;
use glimmer_server::engine::{Refusal, Status};
use glimmer_server::scripted::{End, Script};
use serde_json::{Value, json};
use support::{Server, options, post, script, tools, user};

async fn refused(server: &Server, change: Value) -> (u16, String, Option<String>) {
    let mut body = json!({"messages": user("x")});
    for (key, value) in change.as_object().unwrap() {
        body[key] = value.clone();
    }
    let reply = server.chat(body).await;
    assert!(reply.text.len() < 4000, "errors are short: {}", reply.text.len());
    reply.error()
}

#[tokio::test]
async fn bodies_that_fail_the_schema() {
    let server = Server::saying("a");
    for (body, param) in [
        ("", None),
        ("{", None),
        ("[]", None),
        ("{}", Some("messages")),
        (r#"{"messages": 3}"#, Some("messages")),
        (r#"{"messages": []}"#, Some("messages")),
        (r#"{"messages": [{"role": "boss", "content": "x"}]}"#, Some("messages[0].role")),
        (r#"{"messages": [{"role": "user", "content": 7}]}"#, Some("messages[0].content")),
        (
            r#"{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}"#,
            Some("messages[0].tool_calls[0].function.arguments"),
        ),
        (r#"{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}"#, Some("temperature")),
        (r#"{"messages": [{"role": "user", "content": "x"}], "stop": [1]}"#, Some("stop")),
        (
            r#"{"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {}}]}"#,
            Some("tools[0].function.name"),
        ),
        (r#"{"messages": [{"role": "user", "content": "x"}], "stream_options": 5}"#, Some("stream_options")),
    ] {
        let reply = server.send(post("/v1/chat/completions", body)).await;
        assert_eq!(reply.error(), (400, "Bad Request".to_owned(), param.map(str::to_owned)), "{body}");
    }
}

#[tokio::test]
async fn an_error_repeats_little_of_a_large_body() {
    let server = Server::saying("a");
    let long = "x".repeat(4096);
    let stop: Vec<Value> = (0..1000).map(|_| json!({ "k": long })).collect();
    let body = json!({"messages": user("x"), "stop": stop, "seed": long, "n": long, "top_k": long});
    let reply = server.chat(body).await;
    assert_eq!(reply.status, 400);
    assert!(reply.text.len() < 2000, "{}", reply.text.len());
}

#[tokio::test]
async fn parameters_out_of_range() {
    let server = Server::saying("a");
    let bad = |param: &str| (400, "BadRequestError".to_owned(), Some(param.to_owned()));
    for (change, param) in [
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_completion_tokens": -5}), "max_completion_tokens"),
        (json!({"max_tokens": 5, "min_tokens": 6}), "min_tokens"),
        (json!({"min_tokens": -1}), "min_tokens"),
        (json!({"n": 0}), "n"),
        (json!({"n": 2, "temperature": 0}), "n"),
        (json!({"n": 100_000}), "n"),
        (json!({"request_id": "x".repeat(65)}), "request_id"),
        (json!({"request_id": "a b"}), "request_id"),
        (json!({"temperature": 2.5}), "temperature"),
        (json!({"temperature": -0.1}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"top_p": 1.5}), "top_p"),
        (json!({"top_k": -2}), "top_k"),
        (json!({"min_p": 1.1}), "min_p"),
        (json!({"presence_penalty": 3}), "presence_penalty"),
        (json!({"frequency_penalty": -3}), "frequency_penalty"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"logit_bias": {"-1": 1}}), "logit_bias"),
        (json!({"logit_bias": {"3328": 1}}), "logit_bias"),
        (json!({"stop": ""}), "stop"),
        (json!({"stop": ["a", "b", "c", "d", "e"]}), "stop"),
        (json!({"stop_token_ids": [99_999]}), "stop_token_ids"),
        (json!({"allowed_token_ids": []}), "allowed_token_ids"),
        (json!({"top_logprobs": 2}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"prompt_logprobs": 1, "stream": true}), "prompt_logprobs"),
        (json!({"stream_options": {"include_usage": true}}), "stream_options"),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema.schema"),
        (json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}), "structured_outputs"),
        (json!({"structured_outputs": {}}), "structured_outputs"),
        (json!({"structured_outputs": {"regex": "(a"}}), "structured_outputs"),
        (json!({"structured_outputs": {"choice": []}}), "structured_outputs.choice"),
        (json!({"tools": []}), "tools"),
        (json!({"tool_choice": "auto"}), "tool_choice"),
        (json!({"tools": tools(), "tool_choice": "maybe"}), "tool_choice"),
        (json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "other"}}}), "tool_choice"),
        (json!({"reasoning_effort": "extreme"}), "reasoning_effort"),
        (json!({"thinking_token_budget": -2}), "thinking_token_budget"),
        (json!({"continue_final_message": true, "add_generation_prompt": true}), "continue_final_message"),
        (json!({"continue_final_message": true}), "continue_final_message"),
        (json!({"priority": 1}), "priority"),
        (json!({"cache_salt": ""}), "cache_salt"),
        (json!({"chat_template": "x"}), "chat_template"),
        (json!({"truncate_prompt_tokens": 0}), "truncate_prompt_tokens"),
        (json!({"bad_words": [""]}), "bad_words"),
    ] {
        assert_eq!(refused(&server, change.clone()).await, bad(param), "{change}");
    }
    assert!(server.engine.seen().is_empty(), "nothing reached the engine");
    let plain = Server::new(Options::default(), |_| Ok(script("a")));
    for choice in ["auto", "required"] {
        let change = json!({"tools": tools(), "tool_choice": choice});
        assert_eq!(refused(&plain, change).await, bad("tool_choice"));
    }
    assert_eq!(refused(&plain, json!({"tools": tools()})).await, bad("tool_choice"), "auto without the flag");
}

#[tokio::test]
async fn the_context_is_stated_with_its_three_numbers() {
    let server = Server::saying("a");
    let reply = server.chat(json!({"messages": user("x"), "max_tokens": 8190})).await;
    assert_eq!(reply.error(), (400, "BadRequestError".to_owned(), Some("messages".to_owned())));
    let message = reply.message();
    assert!(message.contains("8192 tokens") && message.contains("8190 output tokens"), "{message}");
    let given = 1_000_000_000_000_000_000_u64;
    let message = server.chat(json!({"messages": user("x"), "max_tokens": given})).await.message();
    assert!(message.contains(&format!("requested {given} output")), "{message}");
    let message = server.chat(json!({"messages": user("x"), "n": given})).await.message();
    assert!(message.ends_with(&format!("got {given}")), "{message}");
    let long = server.chat(json!({"messages": user(&"word ".repeat(9000))})).await;
    assert_eq!(long.error().0, 400);
    assert!(long.message().contains("leaves no room"), "{}", long.message());
    // What cannot fit is not counted to its end.
    let many = vec![json!({"role": "user", "content": "x"}); 6000];
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": user(&"word ".repeat(200_000))})),
        ("/v1/chat/completions", json!({"messages": many})),
        ("/v1/completions", json!({"prompt": "7".repeat(2_000_000)})),
    ] {
        let reply = server.post(path, body).await;
        let message = reply.message();
        let least = message.split("prompt contains at least ").nth(1).and_then(|rest| rest.split(' ').next());
        let least: usize = least.unwrap_or_else(|| panic!("{message}")).parse().unwrap();
        assert_eq!(reply.status, 400);
        assert!(message.starts_with("This model's maximum context length is 8192 tokens."), "{message}");
        assert!((8193..40_000).contains(&least), "{least}");
    }
    let cut = json!({"messages": user(&"word ".repeat(9000)), "truncate_prompt_tokens": 100});
    server.chat(cut).await.ok();
    assert_eq!(server.engine.seen()[0].prompt.len(), 100);
}

#[tokio::test]
async fn unknown_models_routes_and_methods() {
    let server = Server::saying("a");
    let reply = server.chat(json!({"messages": user("x"), "model": "gpt"})).await;
    assert_eq!(reply.error(), (404, "NotFoundError".to_owned(), Some("model".to_owned())));
    assert_eq!(reply.message(), "The model `gpt` does not exist.");
    assert_eq!(server.get("/v1/load").await.error(), (404, "Not Found".to_owned(), None));
    assert_eq!(server.get("/v1/chat/completions").await.error(), (405, "Method Not Allowed".to_owned(), None));
    assert_eq!(server.get("/v1/models/nope").await.error().0, 404);
}

#[tokio::test]
async fn bodies_need_their_content_type() {
    let server = Server::saying("a");
    let body = json!({"messages": user("x")}).to_string();
    for kind in [None, Some("text/plain"), Some("application/jsonp")] {
        let mut request = Request::post("/v1/chat/completions");
        if let Some(kind) = kind {
            request = request.header("content-type", kind);
        }
        let reply = server.send(request.body(Body::from(body.clone())).unwrap()).await;
        assert_eq!(reply.error(), (400, "Bad Request".to_owned(), None));
    }
    server.send(post("/v1/chat/completions", &body)).await.ok();
}

#[tokio::test]
async fn keys_are_asked_for_under_v1_only() {
    let server =
        Server::new(Options { api_keys: vec!["k1".to_owned(), "k2".to_owned()], ..options() }, |_| Ok(script("a")));
    let with =
        |header: &str, value: &str| Request::get("/v1/models").header(header, value).body(Body::empty()).unwrap();
    let reply = server.get("/v1/models").await;
    assert_eq!((reply.status.as_u16(), reply.json()), (401, json!({"error": "Unauthorized"})));
    for (header, value, status) in [
        ("authorization", "Bearer k1", 200),
        ("authorization", "bearer k2", 200),
        ("x-api-key", "k2", 200),
        ("authorization", "Bearer k3", 401),
        ("authorization", "Bearer k", 401),
        ("authorization", "k1", 401),
        ("x-api-key", "", 401),
    ] {
        assert_eq!(server.send(with(header, value)).await.status, status, "{header}: {value}");
    }
    assert_eq!(server.get("/health").await.status, 200);
    assert_eq!(server.get("/v1/nothing").await.status, 401, "routes cannot be told apart without a key");
    let anthropic = server.post("/v1/messages", json!({})).await;
    assert_eq!(anthropic.json()["error"]["type"], "authentication_error");
}

#[tokio::test]
async fn bodies_over_the_limit() {
    let server = Server::new(Options { max_body_bytes: 1000, ..options() }, |_| Ok(script("a")));
    let reply = server.chat(json!({"messages": user(&"x".repeat(2000))})).await;
    assert_eq!(reply.error(), (413, "Payload Too Large".to_owned(), None));
    let message = reply.message();
    assert!(message.contains("1000 bytes") && message.contains("--max-request-body-bytes"), "{message}");
}

#[tokio::test]
async fn a_busy_engine_says_when_to_come_back() {
    let server = Server::new(options(), |_| {
        Err(Refusal::Overloaded { reason: "8 requests wait, the limit".to_owned(), retry_after_s: 12 })
    });
    let reply = server.chat(json!({"messages": user("x")})).await;
    assert_eq!(reply.error(), (503, "Service Unavailable".to_owned(), None));
    assert_eq!(reply.headers["retry-after"], "12");
    assert!(
        server
            .get("/metrics")
            .await
            .text
            .contains("vllm:admission_rejections_total{model_name=\"micro\",engine=\"0\"} 1")
    );
    let anthropic = server.post("/v1/messages", json!({"max_tokens": 5, "messages": user("x")})).await;
    assert_eq!((anthropic.status.as_u16(), &anthropic.json()["error"]["type"]), (503, &json!("overloaded_error")));
}

#[tokio::test]
async fn a_refusal_of_a_later_answer_aborts_the_earlier_ones() {
    let server = Server::new(options(), |request| match request.id.as_bytes()[0] {
        b'0' | b'1' => Ok(Script { end: End::Hang, ..script("a") }),
        _ => Err(Refusal::Overloaded { reason: "full".to_owned(), retry_after_s: 1 }),
    });
    assert_eq!(server.chat(json!({"messages": user("x"), "n": 3})).await.error().0, 503);
    server.engine.idle().await;
    assert_eq!(server.engine.aborted(), 2);
    assert_eq!(server.app.in_flight(), 0);
}

#[tokio::test]
async fn a_dead_engine() {
    let server = Server::saying("a");
    server.engine.set_status(Status { dead: Some("out of memory".to_owned()), ..Status::default() });
    assert_eq!(server.get("/health").await.status, 503);
    let reply = server.chat(json!({"messages": user("x")})).await;
    assert_eq!((reply.error().0, reply.error().1), (503, "InternalServerError".to_owned()));
    assert!(!reply.text.contains("memory"));
    // Running requests.
    let server = Server::new(options(), |_| Ok(Script { steps: Vec::new(), end: End::Die, ..script("a") }));
    for stream in [false, true] {
        let reply = server.chat(json!({"messages": user("x"), "stream": stream})).await;
        assert_eq!((reply.error().0, reply.error().1), (500, "InternalServerError".to_owned()));
    }
    server.engine.set_status(Status { stuck: true, ..Status::default() });
    assert_eq!(server.get("/health").await.status, 503, "stuck is unhealthy");
}

#[tokio::test]
async fn failures_before_the_first_token_are_http_errors() {
    for (error, status, kind) in [
        (RequestError::Internal("NaN in row 3".to_owned()), 500, "InternalServerError"),
        (RequestError::Retryable("preempted".to_owned()), 503, "ServiceUnavailableError"),
    ] {
        let end = End::Fail(error);
        let server = Server::new(options(), move |_| Ok(Script { steps: Vec::new(), end: end.clone(), ..script("a") }));
        for stream in [false, true] {
            let reply = server.chat(json!({"messages": user("x"), "stream": stream})).await;
            assert_eq!(reply.error(), (status, kind.to_owned(), None));
            assert!(!reply.text.contains("NaN"));
        }
    }
}

#[tokio::test]
async fn failures_behind_the_headers_are_events() {
    let end = End::Fail(RequestError::Internal("secret".to_owned()));
    let mut script = script("a</think>bcd");
    script.end = end;
    let server = Server::new(options(), move |_| Ok(script.clone()));
    let reply = server.chat(json!({"messages": user("x"), "stream": true})).await;
    let chunks = reply.chunks();
    assert_eq!(chunks.last().unwrap()["error"]["code"], 500);
    assert!(!reply.text.contains("secret") && !reply.text.contains("finish_reason\":\"stop"));
    let whole = server.chat(json!({"messages": user("x")})).await;
    assert_eq!(whole.error().0, 500);
    let completion = server.post("/v1/completions", json!({"prompt": "x", "stream": true})).await;
    assert_eq!(completion.chunks().last().unwrap()["error"]["code"], 500);
    let metrics = server.get("/metrics").await.text;
    assert!(metrics.contains("finished_reason=\"error\"} 3"), "{metrics}");
}

#[tokio::test]
async fn an_abort_of_the_engine_is_told() {
    let server =
        Server::new(options(), |_| Ok(Script { end: End::Finish(FinishReason::Abort), ..script("a</think>b") }));
    let body = server.chat(json!({"messages": user("x")})).await.ok();
    assert_eq!(body["choices"][0]["finish_reason"], "abort");
}

#[tokio::test]
async fn images_that_cannot_be_used() {
    let server = Server::new(Options { max_images: 1, ..options() }, |_| Ok(script("a</think>b")));
    let with = |urls: &[&str]| {
        let parts: Vec<Value> =
            urls.iter().map(|url| json!({"type": "image_url", "image_url": {"url": url}})).collect();
        json!([{"role": "user", "content": parts}])
    };
    for (urls, needle) in [
        (&["https://example.com/a.png"][..], "without the feature tls"),
        (&["http://169.254.169.254/latest"], "without the feature tls"),
        (&["file:///etc/passwd"], "no URL of an image"),
        (&["data:image/png;base64,AAAA"], "not PNG"),
        (&["data:image/png;base64,!!"], "data URL"),
        (&["data:image/png;base64,iVBORw0KGgo="], "damaged"),
        (&["data:a;base64,AA==", "data:a;base64,AA=="], "at most 1 image(s)"),
    ] {
        let reply = server.chat(json!({"messages": with(urls)})).await;
        assert_eq!(reply.error().0, 400, "{urls:?}");
        assert!(reply.message().contains(needle), "{}", reply.message());
    }
    let text_only =
        Server::with_model(glimmer_server::engine::Model { processors: None, ..support::model() }, options(), |_| {
            Ok(script("a"))
        });
    let reply = text_only.chat(json!({"messages": with(&["data:image/png;base64,AAAA"])})).await;
    assert!(reply.message().contains("text only"), "{}", reply.message());
}

#[tokio::test]
async fn shapes_that_the_engine_cannot_make() {
    let model = glimmer_server::engine::Model { grammars: None, ..support::model() };
    let server = Server::with_model(model, options(), |_| Ok(script("a")));
    let change = json!({"response_format": {"type": "json_object"}});
    assert_eq!(refused(&server, change).await.2.as_deref(), Some("response_format"));
}

#[tokio::test]
async fn silence_before_the_first_token_still_ends_in_an_event() {
    let mut script = script("a");
    script.steps.clear();
    script.first = Duration::from_millis(120);
    script.end = End::Fail(RequestError::Internal("x".to_owned()));
    let options = Options { keep_alive: Some(Duration::from_millis(30)), ..options() };
    let server = Server::new(options, move |_| Ok(script.clone()));
    let reply = server.chat(json!({"messages": user("x"), "stream": true})).await;
    assert!(reply.text.starts_with(": keep-alive\n\n"), "{}", reply.text);
    assert_eq!(reply.chunks().last().unwrap()["error"]["code"], 500);
}
