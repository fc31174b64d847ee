//! Evaluation against a server: what is sent, what counts, what is sent again.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::{
    future::pending,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use glimmer_bench::{
    EvalOptions, RemoteOptions, RemoteResult, Task, evaluate_remote, read_questions, read_task, remote_table,
    serve::client::{Address, Client},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// Status, further headers and body of an answer.
type Reply = (u16, &'static str, String);
type Answers = dyn Fn(&Value) -> Reply + Send + Sync;

/// A server that answers by a function of the body. It keeps what it was asked, and how many asked at once.
struct Scripted {
    address: String,
    seen: Arc<Mutex<Vec<Value>>>,
    most: Arc<AtomicUsize>,
}

impl Scripted {
    async fn new(answers: impl Fn(&Value) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let scripted = Self { address, seen: Arc::default(), most: Arc::default() };
        let (seen, most) = (Arc::clone(&scripted.seen), Arc::clone(&scripted.most));
        let (answers, now): (Arc<Answers>, _) = (Arc::new(answers), Arc::new(AtomicUsize::new(0)));
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (answers, seen, most, now) = (answers.clone(), seen.clone(), most.clone(), now.clone());
                tokio::spawn(async move {
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    exchange(stream, &*answers, &seen).await;
                    now.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        scripted
    }

    fn client(&self) -> Arc<Client> {
        Arc::new(Client::new(Address::parse("URL", &self.address).unwrap(), Default::default()))
    }
}

async fn exchange(mut stream: TcpStream, answers: &Answers, seen: &Mutex<Vec<Value>>) {
    let mut request = Vec::new();
    let body = loop {
        let mut part = [0; 4096];
        let read = stream.read(&mut part).await.unwrap();
        request.extend_from_slice(&part[..read]);
        let text = String::from_utf8_lossy(&request);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        assert!(head.starts_with("POST /v1/chat/completions "), "{head}");
        let length =
            head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-length: ").map(str::to_owned));
        if body.len() == length.unwrap().parse::<usize>().unwrap() {
            break serde_json::from_str::<Value>(body).unwrap();
        }
    };
    // Others come meanwhile, if they may.
    tokio::time::sleep(Duration::from_millis(5)).await;
    let (status, headers, body) = answers(&body);
    seen.lock().unwrap().push(body_of(&request));
    let head = format!("HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-type: text/event-stream\r\n{headers}\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body.as_bytes()).await.unwrap();
}

fn body_of(request: &[u8]) -> Value {
    let text = String::from_utf8_lossy(request);
    serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap()
}

/// A stream that reasons, says `content` and ends.
fn saying(content: &str, finish: &str, tokens: usize) -> Reply {
    let event = |value: Value| format!("data: {value}\n\n");
    let delta = |delta: Value| event(json!({"choices": [{"delta": delta}]}));
    let mut stream = delta(json!({"reasoning": "1 and 1 ", "content": null}));
    for part in content.split_inclusive(' ') {
        stream += &delta(json!({"content": part}));
    }
    stream += &event(json!({"choices": [{"delta": {}, "finish_reason": finish}]}));
    stream += &event(json!({"choices": [], "usage": {"completion_tokens": tokens}}));
    (200, "", stream + "data: [DONE]\n\n")
}

fn refusing(status: u16, headers: &'static str) -> Reply {
    (status, headers, json!({"error": {"message": "not now"}}).to_string())
}

fn question(body: &Value) -> &str {
    let content = &body["messages"].as_array().unwrap().last().unwrap()["content"];
    content.as_str().unwrap().lines().next().unwrap()
}

fn sums(count: usize) -> Task {
    let line = |i: usize| format!("{{\"question\": \"{i} + 1?\", \"answer\": \"#### {}\"}}\n", i + 1);
    read_questions("sums.jsonl", &(0..count).map(line).collect::<String>()).unwrap()
}

fn options() -> RemoteOptions {
    RemoteOptions {
        model: "m".to_owned(),
        epochs: 1,
        seed: 0,
        concurrency: 3,
        max_tokens: Some(50),
        thinking_budget: None,
        temperature: None,
        top_p: None,
        timeout: Duration::from_secs(60),
        retries: 2,
    }
}

async fn evaluate(server: &Scripted, tasks: &[Task], options: &RemoteOptions) -> Vec<RemoteResult> {
    evaluate_remote(&server.client(), tasks, &EvalOptions::default(), options, &mut |_, _| {}, pending()).await
}

#[tokio::test]
async fn passes_are_scored_apart_and_together_and_cut_answers_are_kept_account_of() {
    let server = Scripted::new(|body| match (question(body), body["seed"].as_u64().unwrap()) {
        ("0 + 1?", _) => saying("It is \\boxed{1}", "stop", 4),
        // Right in the second pass only.
        ("1 + 1?", seed) => saying(&format!("{}", if seed == 8 { 2 } else { 3 }), "stop", 2),
        // Cut off: once within the reasoning, once behind the result.
        ("2 + 1?", 7) => saying("", "length", 50),
        ("2 + 1?", _) => saying("3 because 2 + 1 = 3", "length", 50),
        _ => saying("so \\boxed{4}", "stop", 3),
    })
    .await;
    let options = RemoteOptions { epochs: 2, seed: 7, temperature: Some(1.0), thinking_budget: Some(9), ..options() };
    let results = evaluate(&server, &[sums(4)], &options).await;
    let [result] = &results[..] else { panic!("{results:?}") };
    let passes: Vec<_> = result.passes.iter().map(|p| (p.seed, p.asked, p.correct, p.truncated, p.failed)).collect();
    assert_eq!(passes, [(7, 4, 2, 1, 0), (8, 4, 4, 1, 0)]);
    assert!((result.accuracy - 75.0).abs() < 1e-9 && (result.sigma - 100.0 * (0.1875f64 / 8.0).sqrt()).abs() < 1e-9);
    assert!((result.accuracy_of_complete - 100.0 * 5.0 / 6.0).abs() < 1e-9);
    let ledger: Vec<_> = result.truncated.iter().map(|e| (e.id.as_str(), e.seed, e.what.as_str(), e.correct)).collect();
    assert_eq!(ledger, [("sums-0002", 7, "reasoning", false), ("sums-0002", 8, "answer", true)]);
    let wrong: Vec<_> = result.wrong.iter().map(|e| (e.id.as_str(), e.seed, e.what.as_str())).collect();
    assert_eq!(wrong, [("sums-0001", 7, "3"), ("sums-0002", 7, "")]);
    assert_eq!((result.tokens, result.retries, result.not_asked), (2 * (4 + 2 + 50 + 3), 0, 0));
    let table = remote_table(&results);
    assert!(table.contains("75.0") && table.contains("50.0 100.0"), "{table}");
    let seen = server.seen.lock().unwrap();
    assert_eq!(seen.len(), 8);
    for body in seen.iter() {
        assert_eq!((&body["model"], &body["stream"], &body["temperature"]), (&json!("m"), &json!(true), &json!(1.0)));
        assert_eq!((&body["max_completion_tokens"], &body["thinking_token_budget"]), (&json!(50), &json!(9)));
        assert!(
            body.get("top_p").is_none() && body.get("tools").is_none(),
            "what is not asked for is not sent: {body}"
        );
    }
    let most = server.most.load(Ordering::SeqCst);
    assert!((2..=3).contains(&most), "{most} at once");
}

#[tokio::test]
async fn only_what_was_not_taken_is_sent_again() {
    let refusals = AtomicUsize::new(0);
    let server = Scripted::new(move |body| match question(body) {
        // Busy once, and for good.
        "0 + 1?" if refusals.fetch_add(1, Ordering::SeqCst) == 0 => refusing(503, "retry-after: 0\r\n"),
        "0 + 1?" => saying("1", "stop", 1),
        "1 + 1?" => refusing(429, "retry-after: 0\r\n"),
        "2 + 1?" => refusing(500, ""),
        "3 + 1?" => refusing(400, ""),
        // Breaks off after it has begun.
        _ => (200, "", "data: {\"choices\": [{\"delta\": {\"content\": \"5\"}}]}\n\n".to_owned()),
    })
    .await;
    let results = evaluate(&server, &[sums(5)], &RemoteOptions { concurrency: 1, ..options() }).await;
    let result = &results[0];
    assert_eq!((result.passes[0].correct, result.passes[0].failed, result.retries), (1, 4, 1 + 2));
    assert!((result.accuracy - 20.0).abs() < 1e-9, "a request that failed is no right answer");
    let failed: Vec<_> = result.failed.iter().map(|e| (e.id.as_str(), e.what.as_str())).collect();
    for ((id, what), (expected, part)) in failed.iter().zip([
        ("sums-0001", "HTTP 429"),
        ("sums-0002", "HTTP 500"),
        ("sums-0003", "HTTP 400"),
        ("sums-0004", "before the answer did"),
    ]) {
        assert!(*id == expected && what.contains(part), "{id}: {what}");
    }
    assert_eq!(server.seen.lock().unwrap().len(), 2 + 3 + 1 + 1 + 1);
}

#[tokio::test]
async fn a_stopped_run_keeps_what_was_answered() {
    let server = Scripted::new(|_| saying("1", "stop", 1)).await;
    let (over, stop) = tokio::sync::oneshot::channel();
    let (mut over, options) = (Some(over), RemoteOptions { concurrency: 1, epochs: 2, ..options() });
    let mut heard = |done: usize, all: usize| {
        assert_eq!(all, 8);
        if done == 3 {
            over.take().unwrap().send(()).unwrap();
        }
    };
    let stopped = async { stop.await.unwrap() };
    let tasks = [sums(4)];
    let which = EvalOptions::default();
    let results = evaluate_remote(&server.client(), &tasks, &which, &options, &mut heard, stopped).await;
    let result = &results[0];
    let asked = result.passes[0].asked + result.passes[1].asked;
    assert!((3..8).contains(&asked) && result.not_asked == 8 - asked, "{result:?}");
    assert_eq!(result.passes[0].correct, 1);
}

#[tokio::test]
async fn tasks_are_sent_as_the_api_wants_them_and_calls_are_graded() {
    let line = json!({
        "id": "t", "task": "tools", "grader": "tool", "direct": true,
        "answer": [{"name": "f", "arguments": {"x": 1}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 0}}}]},
            {"role": "tool", "content": "r"}, {"role": "user", "content": "again"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    });
    let server = Scripted::new(|_| {
        let calls = json!([{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]);
        let event = json!({"choices": [{"delta": {"tool_calls": calls}, "finish_reason": "tool_calls"}]});
        (200, "", format!("data: {event}\n\ndata: [DONE]\n\n"))
    })
    .await;
    let task = read_task("tools.jsonl", &line.to_string()).unwrap();
    let results = evaluate(&server, &[task], &options()).await;
    let modes: Vec<_> = results.iter().map(|r| (r.thinking, r.passes[0].correct)).collect();
    assert_eq!(modes, [(true, 1), (false, 1)]);
    let seen = server.seen.lock().unwrap();
    let call = &seen[0]["messages"][1]["tool_calls"][0];
    assert_eq!((&call["function"]["arguments"], &call["type"]), (&json!("{\"x\":0}"), &json!("function")));
    assert_eq!(seen[0]["tools"][0]["function"]["name"], "f");
    let mut switches: Vec<String> = seen.iter().map(|body| body["chat_template_kwargs"].to_string()).collect();
    switches.sort();
    assert_eq!(switches, ["null", "{\"enable_thinking\":false}"]);
}
