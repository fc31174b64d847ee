//! `glimmer serve` as a process: sockets, signals, exit codes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn micro() -> String {
    root().join("models/micro-bf16").display().to_string()
}

fn glimmer(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_glimmer"));
    command.arg("serve").args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A server that ends with the test.
struct Server {
    child: Option<Child>,
    port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

impl Server {
    /// Starts and waits until it says that it is healthy.
    fn start(arguments: &[&str]) -> Self {
        let port = free_port();
        let text = port.to_string();
        let mut arguments = arguments.to_vec();
        arguments.extend(["--host", "127.0.0.1", "--port", &text]);
        let mut server = Self { child: Some(glimmer(&arguments).spawn().unwrap()), port };
        loop {
            let child = server.child.as_mut().unwrap();
            if child.try_wait().unwrap().is_some() {
                let output = server.child.take().unwrap().wait_with_output().unwrap();
                panic!("{arguments:?} ended: {}", String::from_utf8_lossy(&output.stderr));
            }
            match server.try_send("GET", "/health", "") {
                Ok(answer) if answer.starts_with("HTTP/1.1 200") => return server,
                Ok(answer) => assert!(answer.starts_with("HTTP/1.1 503"), "{answer}"),
                Err(_) => {}
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn try_send(&self, method: &str, path: &str, body: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: \
             {length}\r\n\r\n{body}"
        )?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    }

    fn post(&self, path: &str, body: &str) -> String {
        self.try_send("POST", path, body).unwrap()
    }

    fn until_metrics_say(&self, needle: &str) {
        while !self.try_send("GET", "/metrics", "").unwrap().contains(needle) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Asks it to stop and gives what it left behind.
    fn stop(mut self) -> Output {
        let child = self.child.take().unwrap();
        let killed = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
        assert!(killed.success());
        child.wait_with_output().unwrap()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_embedded_model_answers_and_a_signal_ends_it() {
    let server = Server::start(&[]);
    let models = server.try_send("GET", "/v1/models", "").unwrap();
    assert!(models.contains("\"max_model_len\":8192"), "{models}");
    let question = r#"{"messages": [{"role": "user", "content": "What is 423 minus 269?"}], "temperature": 0"#;
    let whole = server.post("/v1/chat/completions", &format!("{question}}}"));
    assert!(
        whole.starts_with("HTTP/1.1 200") && whole.contains("154") && whole.contains("\"reasoning\":\""),
        "{whole}"
    );
    let stream = server.post("/v1/chat/completions", &format!("{question}, \"stream\": true}}"));
    assert!(stream.contains("\"reasoning_content\":") && stream.contains("data: [DONE]"), "{stream}");
    let metrics = server.try_send("GET", "/metrics", "").unwrap();
    assert!(
        metrics.contains("vllm:request_success_total{model_name=\"embedded\",engine=\"0\",finished_reason=\"stop\"} 2"),
        "{metrics}"
    );
    let output = server.stop();
    let log = text(&output.stderr);
    assert!(output.status.success(), "{log}");
    for line in
        ["GPU KV cache size: ", "Maximum concurrency for 8,192 tokens per request: ", "Application startup complete"]
    {
        assert!(log.contains(line), "{line} in {log}");
    }
    assert!(output.stdout.is_empty());
}

/// The JSON body of an answer.
fn body(answer: &str) -> serde_json::Value {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    serde_json::from_str(body).unwrap()
}

#[test]
fn answers_have_the_shape_that_was_asked_for() {
    let drafts = r#"{"method": "mtp", "num_speculative_tokens": 2}"#;
    let parsers = ["--reasoning-parser", "glm45", "--tool-call-parser", "glm47", "--enable-auto-tool-choice"];
    let model = micro();
    let server = Server::start(&[&[model.as_str(), "--speculative-config", drafts][..], &parsers].concat());
    let ask = |more: &str| {
        let question = r#""messages": [{"role": "user", "content": "What is 423 minus 269?"}], "max_tokens": 400"#;
        server.post("/v1/chat/completions", &format!("{{{question}, {more}}}"))
    };
    let schema = r#"{"type": "object", "properties": {"n": {"type": "integer", "minimum": 100, "maximum": 999}, "sure":
        {"type": "boolean"}}, "required": ["n", "sure"], "additionalProperties": false}"#;
    for seed in 0..3 {
        let format = format!(r#"{{"type": "json_schema", "json_schema": {{"name": "x", "schema": {schema}}}}}"#);
        let answer = body(&ask(&format!(r#""response_format": {format}, "seed": {seed}"#)));
        let message = &answer["choices"][0]["message"];
        let found: serde_json::Value = serde_json::from_str(message["content"].as_str().unwrap()).unwrap();
        assert!((100..1000).contains(&found["n"].as_i64().unwrap()) && found["sure"].is_boolean(), "{found}");
        let choice = body(&ask(&format!(r#""structured_outputs": {{"choice": ["left", "right"]}}, "seed": {seed}"#)));
        let text = choice["choices"][0]["message"]["content"].as_str().unwrap();
        assert!(["left", "right"].contains(&text), "{text}");
        let tool = r#"{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties":
            {"row": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["row"]}}}"#;
        let call = body(&ask(&format!(r#""tools": [{tool}], "tool_choice": "required", "seed": {seed}"#)));
        let calls = call["choices"][0]["message"]["tool_calls"].as_array().unwrap();
        assert!(!calls.is_empty() && call["choices"][0]["message"]["content"].is_null(), "{call}");
        for call in calls {
            let arguments: serde_json::Value =
                serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
            assert_eq!(call["function"]["name"], "lookup");
            assert!((1..10).contains(&arguments["row"].as_i64().unwrap()), "{arguments}");
        }
    }
    let refused = ask(r#""response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema":
        {"type": "object", "properties": {"a": {"type": "what"}}}}}"#);
    assert!(refused.starts_with("HTTP/1.1 400") && refused.contains("json_schema/properties/a: "), "{refused}");
}

#[test]
fn drafts_and_json_log_lines() {
    let drafts = r#"{"method": "mtp", "num_speculative_tokens": 2}"#;
    let model = micro();
    let server = Server::start(&[&model, "--speculative-config", drafts, "--log-format", "json"]);
    let answer = server.post("/v1/completions", r#"{"prompt": "one two three", "max_tokens": 20, "ignore_eos": true}"#);
    assert!(answer.contains("\"completion_tokens\":20"), "{answer}");
    let metrics = server.try_send("GET", "/metrics", "").unwrap();
    let drafted = metrics.lines().find(|line| line.starts_with("vllm:spec_decode_num_draft_tokens_total{")).unwrap();
    assert!(!drafted.ends_with(" 0"), "{drafted}");
    let output = server.stop();
    assert!(output.status.success());
    let mut lines = 0;
    for line in text(&output.stderr).lines() {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(value["message"].is_string() && value["level"].is_string(), "{line}");
        lines += 1;
    }
    assert!(lines > 2);
}

#[test]
fn steps_are_recorded_and_prefixes_reused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("steps.jsonl");
    let name = file.display().to_string();
    let server = Server::start(&["--record-steps", &name, "--enable-prompt-tokens-details"]);
    let words = "one two three four five six seven eight nine ten ".repeat(20);
    let body = format!("{{\"prompt\": \"{words}\", \"max_tokens\": 4, \"temperature\": 0, \"ignore_eos\": true}}");
    let text_of = |answer: &str| answer.split("\"text\":").nth(1).unwrap().split(",\"").next().unwrap().to_owned();
    let cold = server.post("/v1/completions", &body);
    let warm = server.post("/v1/completions", &body);
    assert!(cold.contains("\"cached_tokens\":0"), "{cold}");
    assert!(warm.contains("\"cached_tokens\":") && !warm.contains("\"cached_tokens\":0"), "{warm}");
    assert_eq!(text_of(&cold), text_of(&warm));
    let shaped = r#"{"messages": [{"role": "user", "content": "A city?"}], "max_tokens": 60, "temperature": 0, "response_format":
        {"type": "json_schema", "json_schema": {"name": "city", "schema": {"type": "object", "properties": {"city": {"enum":
        ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": false}}}, "thinking_token_budget": 4}"#;
    let shaped = server.post("/v1/chat/completions", shaped);
    assert!(shaped.contains("\\\"city\\\""), "{shaped}");
    let metrics = server.try_send("GET", "/metrics", "").unwrap();
    let value = |name: &str| {
        let line = metrics.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {metrics}"));
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    assert!(value("vllm:prefix_cache_hits_total{") >= 64.0);
    assert!((value("vllm:prefix_state_hits_total{") - 1.0).abs() < 1e-9);
    assert!(metrics.contains("vllm:prefix_state_misses_total{") && metrics.contains("reason=\""));
    assert!(server.stop().status.success());
    let recorded = std::fs::read_to_string(&file).unwrap();
    let lines: Vec<serde_json::Value> = recorded.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.len() > 8, "{recorded}");
    // The log says what shape the answer had to have, so the run can be repeated.
    let replayed = Command::new(env!("CARGO_BIN_EXE_glimmer")).args(["replay", &name]).output().unwrap();
    let said = String::from_utf8_lossy(&replayed.stdout);
    assert!(replayed.status.success() && said.contains("all as recorded"), "{said} {replayed:?}");
    assert!(recorded.contains("Paris"), "{recorded}");
    // A log whose server had another tokenizer names it; where it is not at hand, the user may say where it is.
    assert!(lines[0]["header"].get("tokenizer").is_none());
    let moved = directory.path().join("moved.jsonl");
    let named = recorded.replacen("\"settings\"", "\"tokenizer\":\"/no/such\",\"settings\"", 1);
    std::fs::write(&moved, named).unwrap();
    let replay = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_glimmer"));
        command.arg("replay").arg(&moved).args(more).output().unwrap()
    };
    let missing = String::from_utf8_lossy(&replay(&[]).stderr).into_owned();
    assert!(missing.contains("/no/such") && missing.contains("name one by --tokenizer"), "{missing}");
    let micro = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16");
    let found = replay(&["--tokenizer", micro]);
    assert!(found.status.success(), "{found:?}");
}

/// `glimmer bench` against a port.
fn bench(port: u16, arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_glimmer"));
    command.args(["bench", "serve", "--port", &port.to_string(), "--disable-tqdm"]).args(arguments.split_whitespace());
    command.stdin(Stdio::null()).output().unwrap()
}

#[test]
fn a_served_model_is_benched() {
    let drafts = r#"{"method": "mtp", "num_speculative_tokens": 2}"#;
    let server = Server::start(&["--speculative-config", drafts]);
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().display();
    let run = bench(
        server.port,
        &format!(
            "--num_prompts 4 --random-input-len 40 --random-output-len 6 --random-range-ratio 0.3 --max-concurrency=2 \
             --temperature 0 --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,99 --goodput ttft:60000 \
             --num-warmups 1 --save-result --save-detailed --result-dir {folder}/new --result-filename r.json \
             --metadata hardware=here --header x-key=secret"
        ),
    );
    let (table, log) = (text(&run.stdout), text(&run.stderr));
    assert!(run.status.success() && log.is_empty(), "{log}");
    let value = |label: &str| {
        let line = table.lines().find(|line| line.starts_with(label)).unwrap_or_else(|| panic!("{label} in {table}"));
        line.rsplit(':').next().unwrap().trim().parse::<f64>().unwrap()
    };
    for (label, wanted) in
        [("Successful requests:", 4.0), ("Failed requests:", 0.0), ("Maximum request concurrency:", 2.0)]
    {
        assert!((value(label) - wanted).abs() < 1e-9, "{table}");
    }
    assert!(
        value("Request goodput (req/s):") > 0.0 && value("Acceptance length:") >= 1.0 && value("P99 E2EL (ms):") > 0.0
    );
    let saved: serde_json::Value =
        serde_json::from_slice(&std::fs::read(directory.path().join("new/r.json")).unwrap()).unwrap();
    // Lengths are NumPy's for the seed 0.
    assert_eq!((&saved["model_id"], &saved["hardware"]), (&"embedded".into(), &"here".into()));
    assert_eq!(saved["output_lens"].as_array().unwrap().len(), 4);
    assert_eq!(saved["total_output_tokens"].as_f64(), Some(value("Total generated tokens:")));
    assert_eq!(saved["environment"]["prompts_sha256"].as_str().unwrap().len(), 64);
    let flags = saved["environment"]["flags"].to_string();
    assert!(flags.contains("x-key=...") && !flags.contains("secret"), "{flags}");
    let chat = bench(
        server.port,
        "--backend openai-chat --num-prompts 2 --input-len 30 --output-len 5 --request-rate 50 --tokenizer embedded",
    );
    assert!(chat.status.success() && text(&chat.stdout).contains("Request rate configured (RPS):           50.00"));
    let wrong = bench(server.port, "--model other --tokenizer embedded --num-prompts 2 --input-len 8 --output-len 2");
    assert_eq!(wrong.status.code(), Some(1));
    let (table, log) = (text(&wrong.stdout), text(&wrong.stderr));
    assert!(table.contains("Failed requests:                         2") && log.contains("2 x HTTP 404"), "{log}");
    assert!(server.stop().status.success());
}

#[test]
fn a_grid_serves_itself_and_writes_one_page() {
    let directory = tempfile::tempdir().unwrap();
    let (page, numbers) = (directory.path().join("g.html"), directory.path().join("g.json"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_glimmer"));
    command.args([
        "bench",
        "grid",
        "--concurrency",
        "1,2",
        "--num-prompts",
        "3",
        "--input_len",
        "20",
        "--output_len",
        "9",
    ]);
    command.args(["--disable-tqdm", "--metadata", "hardware=here", "--html"]).arg(&page).arg("--json").arg(&numbers);
    command.args(["--", "--speculative-config", r#"{"method": "mtp", "num_speculative_tokens": 1}"#]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let (table, log) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && table.contains("warm pass") && log.contains("serving on http://"), "{log}");
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(html.starts_with("<!doctype html>") && html.contains("Serving embedded") && html.contains("<polyline"));
    let numbers: serde_json::Value = serde_json::from_slice(&std::fs::read(&numbers).unwrap()).unwrap();
    let cells = numbers["cells"].as_array().unwrap();
    assert_eq!((cells.len(), cells[3]["concurrency"].as_u64(), cells[3]["completed"].as_u64()), (4, Some(2), Some(3)));
    assert!(
        cells[3]["speculation"]["drafts"].as_u64().unwrap() > 0 && numbers["prefill"].as_array().unwrap().len() == 2
    );
    for (arguments, needle) in [
        (&["--num-prompts", "3,4,5", "--concurrency", "1,2"][..], "--num-prompts: 3 numbers for 2 concurrencies"),
        (&["--base-url", "http://127.0.0.1:1", "--", "--port", "1"], "flags behind -- are for the server"),
        (&["--html", "/no/such/x.html"], "cannot write /no/such/x.html"),
        (&["--html", "/dev/null", "--", "/no/such/model"], "/no/such/model"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_glimmer"));
        let output = command.current_dir(directory.path()).args(["bench", "grid"]).args(arguments).output().unwrap();
        let log = text(&output.stderr);
        assert!(output.status.code() == Some(2) && log.contains(needle), "{arguments:?}: {log}");
    }
}

#[test]
fn a_bench_that_cannot_be_says_why() {
    let free = free_port();
    for (arguments, needle) in [
        ("", "/v1/models: cannot connect to 127.0.0.1:"),
        ("--base-url localhost", "--base-url: \"localhost\" does not begin with http://"),
        ("--model m", "\"m\" is no directory with a tokenizer.json here; name one by --tokenizer"),
        ("--model embedded --random-range-ratio 1", "--random-range-ratio: 1 is not in [0, 1)"),
        ("--model embedded --dataset-name custom", "--dataset-name custom needs --dataset-path"),
        ("--model embedded --dataset-name custom --dataset-path /no/such.jsonl", "cannot read /no/such.jsonl"),
        ("--goodput itl:3", "--goodput itl:3: expected ttft:MS"),
        ("--percentile-metrics ttft,x", "--percentile-metrics: \"x\" is none of ttft, tpot"),
        ("--request-rate -1", "--request-rate: -1 is not a number of requests a second"),
        ("--max-concurrency 0", "invalid value '0' for '--max-concurrency"),
        ("--save-result --result-filename /no/such/r.json", "cannot write /no/such/r.json"),
        ("--extra-body [1]", "expected a JSON object"),
        ("--model embedded --ready-check-timeout-sec 1 --input-len 4", "the first request was not answered within 1 s"),
    ] {
        let output = bench(free, arguments);
        let log = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments}: {log}");
        assert!(log.contains(needle), "{arguments}: {log}");
    }
}

#[test]
fn a_full_queue_answers_at_once() {
    let server = Server::start(&["--max-num-seqs", "1", "--max-num-queued-reqs", "1"]);
    let body = r#"{"prompt": "one two three", "max_tokens": 4000, "ignore_eos": true, "stream": true}"#;
    let open = || {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
        write!(
            stream,
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        stream
    };
    let running = open();
    let mut byte = [0];
    (&running).read_exact(&mut byte).unwrap();
    // The head of the answer may come before its place.
    server.until_metrics_say("vllm:num_requests_running{model_name=\"embedded\",engine=\"0\"} 1");
    let waiting = open();
    server.until_metrics_say("vllm:num_requests_waiting{model_name=\"embedded\",engine=\"0\"} 1");
    let refused = server.post("/v1/completions", &body.replace("4000", "1"));
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    assert!(
        refused.to_ascii_lowercase().contains("retry-after: ") && refused.contains("Service Unavailable"),
        "{refused}"
    );
    // Whoever goes away makes room.
    drop((running, waiting));
    server.until_metrics_say("finished_reason=\"abort\"} 2");
    for queue in ["running", "waiting"] {
        server.until_metrics_say(&format!("vllm:num_requests_{queue}{{model_name=\"embedded\",engine=\"0\"}} 0"));
    }
    let served = server.post("/v1/completions", r#"{"prompt": "one", "max_tokens": 1}"#);
    assert!(served.starts_with("HTTP/1.1 200"), "{served}");
    assert!(served.to_ascii_lowercase().contains("x-estimated-ttft-ms: "), "{served}");
    assert!(server.stop().status.success());
}

/// Every published command starts, with the path of the model there is and a port of our own.
#[test]
fn every_recipe_starts_on_the_cpu() {
    let mut count = 0;
    for entry in std::fs::read_dir(root().join("data/recipes")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "args") {
            continue;
        }
        count += 1;
        let recipe = std::fs::read_to_string(&path).unwrap();
        let model = micro();
        let mut arguments: Vec<&str> = recipe.lines().collect();
        arguments[0] = &model;
        if arguments.contains(&"--headless") {
            // A rank without HTTP: it runs until it is told to stop.
            let mut child = glimmer(&arguments).spawn().unwrap();
            let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
            let server = Server { child: Some(child), port: 0 };
            assert!(lines.any(|line| line.unwrap().contains("--headless: on the CPU")), "{}", path.display());
            assert!(server.stop().status.success());
            continue;
        }
        // The last of two counts.
        let server = Server::start(&arguments);
        let answer = server.post("/v1/completions", r#"{"prompt": "one two three", "max_tokens": 3}"#);
        assert!(answer.starts_with("HTTP/1.1 200"), "{}: {answer}", path.display());
        let output = server.stop();
        let log = text(&output.stderr);
        assert!(output.status.success() && log.contains("--tensor-parallel-size"), "{}: {log}", path.display());
    }
    assert_eq!(count, 9);
}

#[test]
fn a_short_soak_holds() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_glimmer"));
    // One thread: beside the other tests, two would mostly wait for each other.
    command.args(["--threads", "1", "bench", "soak", "--clients", "12", "--sequences", "6"]);
    command.args(["--requests", "40", "--compare", "8"]);
    let output = command.output().unwrap();
    let report = text(&output.stdout);
    assert!(output.status.success(), "{report}{}", text(&output.stderr));
    assert!(report.contains("8 compared, 0 differ") && report.contains("problems         0"), "{report}");
}

#[test]
fn a_dry_run_prints_every_setting_with_its_origin() {
    let output = glimmer(&["--dry-run", "--max-num-seqs", "7"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines = text(&output.stdout);
    let line = |name: &str| lines.lines().find(|l| l.split_whitespace().next() == Some(name)).unwrap().to_owned();
    assert!(line("--max-num-seqs").ends_with("7  (command line)"));
    assert!(line("--max-num-batched-tokens").ends_with("(default on the CPU)"));
    assert!(line("--max-model-len").ends_with("8192  (the model's length)"));
    assert!(line("--tool-call-parser").ends_with("\"glm47\"  (the model family's)"));
    assert!(line("--port").ends_with("8000  (default)"));
    let output = glimmer(&["/no/such/model", "--dry-run"]).output().unwrap();
    assert!(output.status.success() && text(&output.stderr).contains("/no/such/model"));
}

#[test]
fn what_is_wrong_ends_before_anything_is_loaded() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let (port, free) = (taken.local_addr().unwrap().port().to_string(), free_port().to_string());
    for (arguments, code, needle) in [
        (&["--no-such-flag"][..], 2, "unknown flag --no-such-flag"),
        (&["--port", "0"], 2, "--port: expected a whole number"),
        (&["--enable-auto-tool-choice", "--tool-call-parser", "none", "m"], 1, "requires --tool-call-parser"),
        (&["/no/such/model"], 1, "/no/such/model"),
        (&["--host", "127.0.0.1", "--port", &port], 1, "cannot listen on 127.0.0.1:"),
        (&["--chat-template", "/no/such.jinja", "--port", &free], 1, "/no/such.jinja"),
        (&["--device", "cuda"], 1, "--device cuda"),
        (&["--kv-cache-memory", "1000", "--port", &free], 1, "the cache gets 1000 bytes"),
        (
            &["--max-num-batched-tokens", "100M", "--port", &free],
            1,
            "error: --max-num-batched-tokens 104857600: cannot",
        ),
        (&["--api-key", ""], 2, "--api-key must not be empty"),
        (&["--dry-run", "--chat-template", "/no/such.jinja"], 1, "/no/such.jinja"),
        (&["--dry-run", "--chat-template", "{% if %}"], 1, "chat template"),
        (&["--dry-run", "--tokenizer", "/no/such"], 1, "/no/such/tokenizer.json"),
        (&["/no/such/model", "--dry-run", "--tokenizer", "/no/such"], 1, "/no/such/tokenizer.json"),
        (&["--dry-run", "--record-steps", "/no/such/steps"], 1, "--record-steps: /no/such/steps is in a folder"),
        (&["--record-steps", "/no/such/steps"], 1, "--record-steps: /no/such/steps is in a folder"),
        (&["--dry-run", "--host", "no.such.host.invalid"], 1, "cannot listen on no.such.host.invalid:8000"),
        (&["--dry-run", "--override-generation-config", "{\"top_p\": 7}"], 1, "top_p must be a number above 0"),
    ] {
        let output = glimmer(arguments).output().unwrap();
        let log = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {log}");
        assert!(log.contains(needle), "{arguments:?}: {log}");
    }
    let help = glimmer(&["--help"]).output().unwrap();
    assert!(help.status.success() && text(&help.stdout).contains("--speculative-config"));
}

#[test]
fn invented_weights_serve_too() {
    let model = micro();
    let server =
        Server::start(&[&model, "--load-format", "dummy", "--served-model-name", "noise", "--max-num-seqs", "2"]);
    let answer =
        server.post("/v1/completions", r#"{"model": "noise", "prompt": "a", "max_tokens": 2, "ignore_eos": true}"#);
    assert!(answer.contains("\"completion_tokens\":2"), "{answer}");
    assert!(server.stop().status.success());
}
