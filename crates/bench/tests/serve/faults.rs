//! What goes wrong with a request is counted and named, never swallowed.

use std::time::{Duration, Instant};

use glimmer_bench::serve::exchange::{Api, Ask, Outcome};
use glimmer_bench::serve::load::Target;
use glimmer_bench::serve::server::first_model;
use glimmer_engine::request::RequestError;
use glimmer_server::app::Options;
use glimmer_server::scripted::{End, Script};

use crate::support::{canned, client, events, prompt, run, script, scripted, target};

fn send(target: &Target, output: u32) -> Outcome {
    let now = Instant::now();
    run(target.ask.send(&target.client, &prompt("one two three", output), now, now))
}

fn error(port: u16, api: Api) -> String {
    let outcome = send(&target(port, api), 5);
    outcome.error.unwrap_or_else(|| panic!("no error: {:?}", outcome.text))
}

const CHUNK: &str = "data: {\"choices\":[{\"text\":\"a\",\"finish_reason\":null}]}\n\n";

#[test]
fn broken_answers_are_failures_with_their_reason() {
    let status = |line: &str, body: &str| {
        format!("HTTP/1.1 {line}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    };
    let failed = "data: {\"error\":{\"message\":\"out of slots\",\"code\":500}}\n\ndata: [DONE]\n\n";
    let cut = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 9999\r\n\r\n";
    for (answer, needle) in [
        (
            status("401 Unauthorized", r#"{"error":{"message":"no key"}}"#),
            "HTTP 401 Unauthorized: no key; give the key by --header",
        ),
        (
            status("404 Not Found", r#"{"detail":"no route"}"#),
            "HTTP 404 Not Found: no route; compare --model and --endpoint",
        ),
        (status("503 Service Unavailable", "busy"), "HTTP 503 Service Unavailable: busy"),
        (
            status("200 OK", r#"{"choices":[]}"#),
            "expected a stream of events, the answer is \"application/json\": {\"choices\"",
        ),
        (events(&format!("{CHUNK}{failed}")), "the server ended the stream with an error: out of slots"),
        (events(&format!("{CHUNK}data: {{\"choices\"\n\n")), "an event of the stream is not readable"),
        (events(CHUNK), "the stream ended before the answer did"),
        (events("data: [DONE]\n\n"), "the stream held no content"),
        (format!("{cut}{CHUNK}"), "the connection to 127.0.0.1:"),
        ("SSH-2.0-x\r\n\r\n".to_owned(), "the connection to 127.0.0.1:"),
    ] {
        let error = error(canned(answer, usize::MAX), Api::Completions);
        assert!(error.starts_with(needle), "{error}");
    }
}

#[test]
fn nobody_listening_is_said_with_the_address() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let said = error(port, Api::Chat);
    let address = format!("cannot connect to 127.0.0.1:{port}: ");
    assert!(said.starts_with(&address) && said.contains("is the server running"), "{said}");
    let said = run(first_model(&client(port))).unwrap_err().to_string();
    assert!(said.contains("/v1/models: cannot connect"), "{said}");
    let empty = "HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{\"data\": []}";
    let said = run(first_model(&client(canned(empty, usize::MAX)))).unwrap_err().to_string();
    assert!(said.contains("no models are listed; name one by --model"), "{said}");
}

#[test]
fn events_may_be_split_anywhere() {
    let body = format!(
        ": hello\r\n\r\n{CHUNK}data: {{\"choices\":[{{\"text\":\"\u{e9}\u{1f600}\",\"finish_reason\":\"length\"}}]}}\n\n\
         data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":7,\"completion_tokens\":5}}}}\n\ndata: [DONE]\n\n"
    );
    for size in [1, 2, 3, 7, usize::MAX] {
        let outcome = send(&target(canned(events(&body), size), Api::Completions), 5);
        assert_eq!(outcome.error, None);
        assert_eq!((outcome.text.as_str(), outcome.finish.as_deref()), ("a\u{e9}\u{1f600}", Some("length")));
        assert_eq!((outcome.prompt_tokens, outcome.output_tokens, outcome.events.len()), (7, Some(5), 2));
    }
}

#[test]
fn chat_events_count_when_they_say_something() {
    let delta = |delta: &str| format!("data: {{\"choices\":[{{\"delta\":{delta}}}]}}\n\n");
    let body: String = [
        r#"{"role":"assistant","content":""}"#,
        r#"{"reasoning":"r","reasoning_content":"r"}"#,
        r#"{"content":""}"#,
        r#"{"content":"c"}"#,
        r#"{"tool_calls":[{"index":0}]}"#,
        r#"{"reasoning":"","tool_calls":[]}"#,
        "{}",
    ]
    .map(delta)
    .concat();
    let outcome = send(&target(canned(events(&format!("{body}data: [DONE]\n\n")), usize::MAX), Api::Chat), 5);
    assert_eq!(outcome.error, None);
    assert_eq!((outcome.events.len(), outcome.text.as_str(), outcome.content.as_str()), (4, "rc", "c"));
}

#[test]
fn time_that_runs_out_is_a_failure_of_its_own_kind() {
    let (port, _engine) = scripted(Options::default(), |_| Ok(Script { end: End::Hang, ..script("a b c") }));
    let mut target = target(port, Api::Completions);
    target.ask = Ask { timeout: Duration::from_millis(300), ..(*target.ask).clone() }.into();
    let outcome = send(&target, 50);
    assert!(outcome.timed_out && outcome.error.as_deref().unwrap().contains("no complete answer within 0.3 s"));
}

#[test]
fn errors_of_the_real_front_end_are_understood() {
    let keyed = Options { api_keys: vec!["secret".to_owned()], ..Options::default() };
    let (port, _engine) = scripted(keyed, |_| Ok(script("a")));
    assert!(error(port, Api::Chat).starts_with("HTTP 401 Unauthorized: "));
    let (port, _engine) = scripted(Options::default(), |_| {
        Ok(Script { end: End::Fail(RequestError::Internal("x".to_owned())), ..script("a b") })
    });
    assert!(error(port, Api::Chat).starts_with("the server ended the stream with an error: "));
    let mut other = target(port, Api::Completions);
    other.ask = Ask { model: "other".to_owned(), ..(*other.ask).clone() }.into();
    let said = send(&other, 5).error.unwrap();
    assert!(said.starts_with("HTTP 404 Not Found: ") && said.contains("other"), "{said}");
}
