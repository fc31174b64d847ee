//! A busy run is recorded and replays; a log that was changed is found out at the first difference.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::{collections::BTreeMap, path::Path};

use glimmer_engine::{
    EngineError, FinishReason, Flow, Generator, Recorded, ReplayError, Replayed, Request, Sampling, SequenceId,
    Settings,
    constraint::Grammars as _,
    replay,
    request::{Collector, Structure},
};
use glimmer_tensor::cpu::Cpu;
use support::{EvenGrammars, document, everything_is_back, image_prompt, load, settings};

fn busy_settings() -> Settings {
    Settings { pages: Some(8), context: Some(320), state_checkpoints: 5, rows: 48, ..settings(3, 2) }
}

/// What happens before a step.
enum Act {
    Submit(Box<Request>),
    Abort(u64),
    Reset,
}

/// Pictures, drafts, preemption, prefixes that are hit and evicted, shapes, samples, aborts and a deaf consumer.
fn acts(generator: &Generator<Cpu>) -> Vec<(u64, Act)> {
    let (prompt, patches) = image_prompt();
    let media = generator.media(&prompt, vec![patches]).unwrap();
    let picture = Request { media, ..Request::new(prompt, 60).ignoring_eos() };
    let text = document(0, 300);
    let plain = |end: usize, new: u32| Request::new(text[..end].to_vec(), new).ignoring_eos();
    let mut sampled = plain(70, 120);
    sampled.sampling = Sampling { temperature: 1.1, top_p: 0.9, frequency_penalty: 0.3, ..Sampling::default() };
    sampled.logprobs = Some(2);
    let shaped =
        Request { structure: Some(Structure::Regex("25".to_owned())), ..Request::new(text[..40].to_vec(), 80) };
    let scored = Request { prompt_logprobs: Some(1), ..plain(90, 10) };
    let submit = |request: Request| Act::Submit(Box::new(request));
    vec![
        (0, submit(picture.clone())),
        (0, submit(sampled.clone())),
        (1, submit(shaped.clone())),
        (2, submit(plain(150, 100))),
        (4, submit(scored)),
        (9, submit(plain(200, 90))),
        (12, submit(picture)),
        (20, Act::Abort(6)),
        (25, Act::Abort(3)),
        (25, submit(Request { cache_salt: Some("salt".to_owned()), ..plain(100, 40) })),
        (40, Act::Reset),
        (41, submit(sampled)),
        (45, submit(shaped)),
        // Three that all fit at first and grow until one has to give way.
        (45, submit(Request::new(document(3, 50), 150).ignoring_eos())),
        (45, submit(Request::new(document(4, 55), 150).ignoring_eos())),
        (45, submit(Request::new(document(5, 60), 150).ignoring_eos())),
    ]
}

/// Runs everything and gives the answers; the consumer of sequence 7 listens to ten tokens.
fn busy(generator: &mut Generator<Cpu>, grammars: &EvenGrammars) -> BTreeMap<SequenceId, (Vec<u32>, FinishReason)> {
    let mut acts = acts(generator);
    acts.reverse();
    let (mut collectors, mut answers) = (BTreeMap::<SequenceId, Collector>::new(), BTreeMap::new());
    let mut heard = 0;
    for step in 0.. {
        while acts.last().is_some_and(|(when, _)| *when <= step) {
            match acts.pop().unwrap().1 {
                Act::Submit(request) => {
                    let constraint = request.structure.as_ref().map(|s| grammars.compile(s).unwrap());
                    generator.submit_constrained(*request, constraint).unwrap();
                }
                Act::Abort(id) => assert!(generator.abort(SequenceId(id)).is_some(), "sequence {id} is there"),
                Act::Reset => generator.reset_prefix_cache(),
            }
        }
        let more = generator
            .step(&mut |id, event| {
                if id == SequenceId(7) {
                    heard += event.tokens.len();
                }
                if let Some(output) = collectors.entry(id).or_default().take(event) {
                    answers.insert(id, (output.tokens, output.finish));
                }
                if id == SequenceId(7) && heard >= 10 { Flow::Stop } else { Flow::Continue }
            })
            .unwrap();
        if !more && acts.is_empty() {
            break;
        }
    }
    everything_is_back(generator);
    answers
}

fn replay_file(file: &Path, grammars: &EvenGrammars) -> Result<Replayed, ReplayError> {
    let log = std::io::BufReader::new(std::fs::File::open(file).unwrap());
    let load = |recorded: &Recorded<'_>| {
        assert_eq!(recorded.tokenizer, Some("elsewhere"));
        Generator::load(Cpu::new(1), &support::checkpoint(), recorded.settings)
    };
    replay(log, load, Some(grammars))
}

#[test]
fn a_busy_run_replays_and_a_changed_log_names_the_first_difference() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("steps.jsonl");
    let mut generator = load(&busy_settings());
    let grammars = EvenGrammars(generator.model().config().eos_token_ids.clone());
    generator.record(&file, Some("elsewhere")).unwrap();
    let answers = busy(&mut generator, &grammars);
    let counters = generator.snapshot().counters;
    assert!(counters.preemptions > 0 && counters.prefix_hits > 0 && counters.drafts.steps() > 0, "{counters:?}");
    assert_eq!(generator.snapshot().record_error, None);
    for id in [2, 9] {
        let (tokens, finish) = &answers[&SequenceId(id)];
        assert_eq!((tokens.len(), finish), (25, &FinishReason::EndToken), "{tokens:?}");
        assert!(tokens.iter().all(|token| token % 2 == 0));
    }
    assert!(!answers.contains_key(&SequenceId(7)), "nobody listened to its end");
    drop(generator);

    // Recording changes nothing.
    let mut unrecorded = load(&busy_settings());
    assert_eq!(busy(&mut unrecorded, &grammars), answers);

    let replayed = replay_file(&file, &grammars).unwrap();
    assert!(replayed.steps > 60 && replayed.tokens > 300 && !replayed.unfinished, "{replayed:?}");

    let text = std::fs::read_to_string(&file).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let changed = |line: usize, change: &dyn Fn(&mut serde_json::Value)| {
        let mut value: serde_json::Value = serde_json::from_str(lines[line]).unwrap();
        change(&mut value);
        let mut all: Vec<String> = lines.iter().map(|&line| line.to_owned()).collect();
        all[line] = value.to_string();
        let path = directory.path().join("changed.jsonl");
        std::fs::write(&path, all.join("\n")).unwrap();
        replay_file(&path, &grammars).unwrap_err().to_string()
    };
    let find =
        |key: &str, from: usize| (from..lines.len()).find(|&i| lines[i].starts_with(&format!("{{\"{key}\""))).unwrap();
    let with_tokens =
        (0..lines.len()).filter(|&i| lines[i].starts_with("{\"yield\"") && lines[i].contains("\"tokens\":[")).nth(30);
    let at = with_tokens.unwrap();
    let error = changed(at, &|v| v["yield"]["events"][0]["tokens"][0] = 7.into());
    assert!(error.contains(&format!("line {}: step ", at + 1)) && error.contains("tokens of sequence"), "{error}");
    let at = find("step", lines.len() / 2);
    let error = changed(at, &|v| v["step"]["step"]["segments"][0]["slot"] = 40.into());
    assert!(error.contains(&format!("line {}: ", at + 1)) && error.contains("segment 0"), "{error}");
    let error = changed(at, &|v| v["step"]["step"]["tokens"][0] = 9.into());
    assert!(error.contains("token of row 0"), "{error}");
    // Another input changes what comes behind it.
    let error = changed(find("submit", 1), &|v| v["submit"]["prompt"][0] = 33.into());
    assert!(error.contains("recorded"), "{error}");
    let error = changed(find("abort", 1), &|v| v["abort"]["id"] = 1.into());
    assert!(error.contains("recorded") || error.contains("abort"), "{error}");
    // Another model, another version, no log.
    let error = changed(0, &|v| v["header"]["model"] = "00".into());
    assert!(error.contains("another") || error.contains("SHA-256 00"), "{error}");
    let error = changed(0, &|v| v["header"]["version"] = 99.into());
    assert!(error.contains("version 99"), "{error}");
    let error = changed(find("submit", 1), &|v| *v = serde_json::json!({"nonsense": 1}));
    assert!(error.starts_with(&format!("line {}", find("submit", 1) + 1)), "{error}");

    // A log that ends within a step, as one of an engine that died there, is repeated as far as it goes.
    let cut = directory.path().join("cut.jsonl");
    std::fs::write(&cut, lines[..=find("step", 20)].join("\n")).unwrap();
    assert!(replay_file(&cut, &grammars).unwrap().unfinished);
}

#[test]
fn a_record_begins_before_the_first_request() {
    let directory = tempfile::tempdir().unwrap();
    let mut generator = load(&settings(1, 0));
    let missing = generator.record(&directory.path().join("no/such/steps.jsonl"), None);
    assert!(matches!(missing, Err(EngineError::Record { .. })), "{missing:?}");
    generator.generate(Request::new(vec![30, 31], 2).ignoring_eos(), &mut |_| Flow::Continue).unwrap();
    let late = generator.record(&directory.path().join("steps.jsonl"), None);
    assert!(
        matches!(&late, Err(EngineError::Record { reason, .. }) if reason.contains("before the first")),
        "{late:?}"
    );
}
