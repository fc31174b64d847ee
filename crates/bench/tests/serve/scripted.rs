//! Whole runs against the real front end over scripted engines.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use glimmer_bench::serve::dataset::{Prompt, RandomShape};
use glimmer_bench::serve::epochs::{quality, repeat};
use glimmer_bench::serve::exchange::{Api, Ask};
use glimmer_bench::serve::load::{Load, Run};
use glimmer_bench::serve::server::{first_model, token_count, version};
use glimmer_bench::serve::summary::{Metric, Summary};
use glimmer_bench::serve::workload::Workload;
use glimmer_engine::request::FinishReason;
use glimmer_server::app::Options;
use glimmer_server::engine::Counters;
use glimmer_server::scripted::{End, Script};
use serde_json::json;

use crate::support::{client, format, prompt, run, script, scripted, target};

fn paced(steps: usize, first: u64, pace: u64) -> Script {
    Script {
        steps: vec![vec![65]; steps],
        end: End::Finish(FinishReason::Length),
        first: Duration::from_millis(first),
        pace: Duration::from_millis(pace),
    }
}

fn load(prompts: Vec<Prompt>, concurrency: Option<usize>) -> Load {
    Load { times: vec![0.0; prompts.len()], prompts, concurrency, probe_rate: 0.0 }
}

fn finished(run: &Run) -> Summary {
    let errors: Vec<_> = run.outcomes.iter().filter_map(|outcome| outcome.error.as_ref()).collect();
    assert!(errors.is_empty(), "{errors:?}");
    Summary::new(&run.outcomes, None, &|_| 0)
}

#[test]
fn times_are_at_least_those_of_the_script_and_counts_are_its_own() {
    for api in [Api::Completions, Api::Chat] {
        let (port, engine) = scripted(Options::default(), |_| Ok(paced(4, 60, 20)));
        let mut seen = 0;
        let run = run(async {
            let load = load(vec![prompt("one two three", 4); 3], Some(3));
            target(port, api).run(&load, &mut |_| seen += 1, std::future::pending()).await
        });
        let summary = finished(&run);
        assert_eq!((seen, summary.completed, summary.output_tokens), (3, 3, 12));
        assert!(summary.input_tokens >= 3 * 3 && !run.stopped);
        assert!(summary.sample(Metric::Ttft).min() >= 0.060);
        assert!(summary.sample(Metric::E2el).min() >= 0.060 + 3.0 * 0.020);
        assert!(summary.duration >= summary.sample(Metric::E2el).max());
        assert_eq!(summary.sample(Metric::Tpot).len(), 3);
        assert_eq!(engine.seen().len(), 3);
    }
}

#[test]
fn no_more_than_allowed_are_under_way_and_turns_are_taken_in_order() {
    static MOST: AtomicUsize = AtomicUsize::new(0);
    static RUNNING: AtomicUsize = AtomicUsize::new(0);
    let (port, engine) = scripted(Options::default(), |_| {
        MOST.fetch_max(RUNNING.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        Ok(paced(1, 20, 0))
    });
    let prompts: Vec<Prompt> = (0..7).map(|n| prompt(&format!("{n}"), 1)).collect();
    let run = run(async {
        let mut done = |_: &_| {
            RUNNING.fetch_sub(1, Ordering::SeqCst);
        };
        target(port, Api::Completions).run(&load(prompts, Some(2)), &mut done, std::future::pending()).await
    });
    let summary = finished(&run);
    // The front end may see a third request before the client has told of the first one's end.
    assert!(MOST.load(Ordering::SeqCst) <= 3);
    assert_eq!(summary.peak_requests, 2);
    assert!(run.outcomes.windows(2).all(|pair| pair[0].start <= pair[1].start));
    assert!(run.outcomes[6].queue >= 0.060, "three pairs went before");
    let first: Vec<u32> = engine.seen()[..2].iter().map(|request| request.prompt[0]).collect();
    assert_eq!(first.len(), 2);
}

#[test]
fn requests_are_sent_when_they_are_due() {
    let (port, _engine) = scripted(Options::default(), |_| Ok(paced(1, 0, 0)));
    let times = vec![0.0, 0.05, 0.15];
    let plan = Load { times: times.clone(), ..load(vec![prompt("x", 1); 3], None) };
    let run = run(async { target(port, Api::Completions).run(&plan, &mut |_| (), std::future::pending()).await });
    finished(&run);
    assert!(run.outcomes.iter().zip(times).all(|(outcome, time)| outcome.start >= time));
}

#[test]
fn the_engine_sees_what_was_asked_for() {
    let (port, engine) = scripted(Options::default(), |_| Ok(script("a b c d e f g h i j k l m n o p")));
    let shape = RandomShape { input: 20, output: 6, prefix: 4, input_ratio: 0.3, output_ratio: 0.3 };
    let (prompts, _) = Workload::Random(shape).prompts(&format(), 4, 1, "id-").unwrap();
    let extra = json!({"temperature": 0.25, "top_k": 7});
    let mut target = target(port, Api::Completions);
    let ask = Ask { ignore_eos: true, extra: extra.as_object().unwrap().clone(), ..(*target.ask).clone() };
    target.ask = Arc::new(ask);
    let plan = load(prompts.clone(), Some(1));
    let run = run(async { target.run(&plan, &mut |_| (), std::future::pending()).await });
    let summary = finished(&run);
    for ((request, prompt), outcome) in engine.seen().iter().zip(&prompts).zip(&run.outcomes) {
        assert_eq!(request.prompt.len(), prompt.tokens);
        assert_eq!(request.limits.max_tokens, prompt.output_tokens);
        assert!((request.sampling.temperature - 0.25).abs() < 1e-6 && request.sampling.top_k == Some(7));
        assert_eq!(outcome.prompt_tokens, prompt.tokens);
        assert_eq!(outcome.output_tokens, Some(prompt.output_tokens as usize));
    }
    assert_eq!(summary.input_tokens, prompts.iter().map(|prompt| prompt.tokens).sum::<usize>());
}

#[test]
fn the_servers_counters_are_read_before_and_after() {
    let (port, engine) = scripted(Options::default(), |_| Ok(paced(2, 0, 0)));
    let counters = |drafts: u64| Counters {
        drafts,
        draft_tokens: 2 * drafts,
        accepted_by_position: vec![drafts / 2, drafts / 4],
        prefix_queries: 10 * drafts,
        prefix_hits: drafts,
        ..Counters::default()
    };
    engine.set_counters(counters(100));
    let run = run(async {
        let mut done = |_: &_| engine.set_counters(counters(300));
        target(port, Api::Chat).run(&load(vec![prompt("x", 2)], None), &mut done, std::future::pending()).await
    });
    let (before, after) = (run.before.unwrap(), run.after.unwrap());
    let speculation = after.speculation_since(&before).unwrap();
    assert_eq!((speculation.drafts, speculation.draft_tokens, speculation.accepted_tokens), (200, 400, 150));
    assert_eq!(speculation.by_position, [0.5, 0.25]);
    assert!((after.prefix_hits_since(&before).unwrap() - 0.1).abs() < 1e-12);
    assert!(after.continues(&before));
}

#[test]
fn a_stopped_run_keeps_what_is_there() {
    let (port, engine) = scripted(Options::default(), |request| {
        Ok(if request.limits.max_tokens == 1 { paced(1, 0, 0) } else { Script { end: End::Hang, ..paced(1, 0, 1) } })
    });
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let run = run(async {
        let mut stop = Some(stop);
        let mut done = |_: &_| drop(stop.take());
        let prompts = vec![prompt("hangs", 9), prompt("ends", 1)];
        let stopped = async {
            let _dropped = stopped.await;
        };
        let run = target(port, Api::Completions).run(&load(prompts, None), &mut done, stopped).await;
        engine.idle().await;
        run
    });
    assert!(run.stopped && run.outcomes[1].error.is_none());
    assert!(run.outcomes[0].error.as_deref().unwrap().starts_with("stopped before"));
    assert_eq!(engine.aborted(), 1, "the server was told");
}

#[test]
fn warm_ups_readiness_and_probes() {
    let (port, engine) = scripted(Options::default(), |_| Ok(paced(1, 30, 0)));
    run(async {
        let target = target(port, Api::Completions);
        assert_eq!(target.ready(&prompt("x", 1), Duration::from_secs(60)).await, Ok(()));
        assert_eq!(target.warm_up(&prompt("x", 1), 3, Some(1)).await, Vec::<String>::new());
        assert_eq!(engine.seen().len(), 4);
        let plan = Load { probe_rate: 200.0, ..load(vec![prompt("x", 1); 4], Some(1)) };
        let run = target.run(&plan, &mut |_| (), std::future::pending()).await;
        assert!(!run.probes.is_empty() && run.probes.iter().all(|probe| probe.error.is_none()));
        assert_eq!(finished(&run).completed, 4);
    });
    let dead = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let refused = run(target(dead, Api::Completions).ready(&prompt("x", 1), Duration::ZERO)).unwrap_err();
    assert!(refused.contains("cannot connect"), "{refused}");
}

#[test]
fn a_server_tells_its_model_version_and_counts() {
    let (port, _engine) = scripted(Options::default(), |_| Ok(script("a")));
    run(async {
        let client = client(port);
        let card = first_model(&client).await.unwrap();
        assert_eq!((card.id.as_str(), card.root.as_str(), card.length), ("micro", "scripted", Some(8192)));
        assert!(version(&client).await.is_some());
        let count = format().tokenizer().encode("one two three").unwrap().len();
        assert_eq!(token_count(&client, "micro", "one two three").await, Some(count));
        assert_eq!(token_count(&client, "other", "x").await, None);
    });
}

#[test]
fn epochs_send_the_same_items_with_other_seeds_and_are_scored() {
    let (port, engine) = scripted(Options::default(), |request| {
        Ok(script(if request.sampling.seed == Some(1) { "so it is 8" } else { "it is 7" }))
    });
    let item = Prompt { answer: Some("7".to_owned()), ..prompt("three and four", 50) };
    let prompts = repeat(vec![item], 2);
    let run = run(async {
        target(port, Api::Completions).run(&load(prompts.clone(), Some(1)), &mut |_| (), std::future::pending()).await
    });
    finished(&run);
    let found = quality(&prompts, &run.outcomes).unwrap();
    assert_eq!(found.epochs.iter().map(|epoch| epoch.right).collect::<Vec<_>>(), [1, 0]);
    assert_eq!(engine.seen().iter().map(|request| request.sampling.seed).collect::<Vec<_>>(), [Some(0), Some(1)]);
}
