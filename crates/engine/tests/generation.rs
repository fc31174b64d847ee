//! Generation on the micro model: goldens, speculation against plain decoding, batches against single runs, pools.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::sync::Arc;

use glimmer_checkpoint::Checkpoint;
use glimmer_engine::{
    DraftSampling, EngineError, FinishReason, Flow, Generator, IndexSharing, Output, Request, Sampling, Settings,
    request::{Collector, Media},
};
use glimmer_tensor::cpu::Cpu;
use safetensors::SafeTensors;
use support::{REAL_VOCAB, everything_is_back, load, repository, run, settings, tokens};

/// Prompt and greedy continuation of a golden.
fn golden(name: &str) -> (Vec<u32>, Vec<u32>) {
    let bytes = std::fs::read(repository(&format!("data/goldens/micro/{name}.safetensors"))).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let read = |key: &str| -> Vec<u32> {
        file.tensor(key).unwrap().data().as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    };
    (read("input_ids"), read("decode.tokens"))
}

/// The first `take` tokens of some documents without pictures: prompts that end anywhere.
fn prompts(count: usize) -> Vec<Vec<u32>> {
    let text = std::fs::read_to_string(repository("data/eval/documents.jsonl")).unwrap();
    text.lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .filter(|v| v["images"].as_array().unwrap().is_empty())
        .enumerate()
        .map(|(i, v)| {
            let ids: Vec<u32> = v["input_ids"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect();
            let take = 3 + (i * 37) % ids.len().saturating_sub(3).max(1);
            ids[..take.min(ids.len())].to_vec()
        })
        .take(count)
        .collect()
}

fn ignoring_stops(prompt: Vec<u32>, max_tokens: u32) -> Request {
    Request::new(prompt, max_tokens).ignoring_eos()
}

#[test]
fn greedy_continuations_equal_the_goldens_at_every_depth() {
    for depth in 0..=3 {
        let mut generator = load(&settings(2, depth));
        for name in ["short_think", "short_direct", "tool_think", "recall_400", "recall_1000"] {
            let (prompt, continuation) = golden(name);
            let output = generator.generate(ignoring_stops(prompt.clone(), 64), &mut |_| Flow::Continue).unwrap();
            assert_eq!(output.tokens, continuation, "{name} at depth {depth}");
            assert_eq!(output.finish, FinishReason::Length);
            if prompt.len() > 200 {
                continue;
            }
            // With stop tokens the same continuation ends at the first of them.
            let stops = &generator.model().config().eos_token_ids;
            let end = continuation.iter().position(|t| stops.contains(t)).unwrap();
            let output = generator.generate(Request::new(prompt, 64), &mut |_| Flow::Continue).unwrap();
            assert_eq!(output.tokens, continuation[..end], "{name} at depth {depth}");
            assert_eq!(output.finish, FinishReason::EndToken);
        }
        everything_is_back(&generator);
        assert_eq!(generator.stats().drafts.drafted.len(), depth);
    }
}

#[test]
fn an_image_prompt_equals_the_golden() {
    let (prompt, patches) = support::image_prompt();
    let (_, continuation) = golden("image_direct");
    for depth in [0, 2] {
        // A step of 8 rows cuts the picture into several chunks.
        let mut generator = load(&Settings { rows: 8, ..settings(1, depth) });
        let media = generator.media(&prompt, vec![patches.clone()]).unwrap();
        let with = |media: Arc<[Media]>| Request { media, ..ignoring_stops(prompt.clone(), 64) };
        for round in 0..2u64 {
            let output = generator.generate(with(media.clone()), &mut |_| Flow::Continue).unwrap();
            assert_eq!(output.tokens, continuation, "depth {depth}");
            assert_eq!(generator.media_lookups(), (round + 1, round), "the tower sees a picture once");
        }

        let twice = generator.media(&prompt, vec![patches.clone(); 2]).unwrap_err();
        assert!(matches!(twice, EngineError::ImageTokens { placeholders: 24, features: 48 }), "{twice}");
        let moved = Media { start: media[0].start + 1, ..media[0].clone() };
        let error = generator.submit(with([moved].into())).unwrap_err();
        assert!(error.to_string().contains("media.start"), "{error}");
        let none = generator.submit(Request::new(prompt.clone(), 4)).unwrap_err();
        assert!(matches!(none, EngineError::ImageTokens { placeholders: 24, features: 0 }), "{none}");
    }
}

#[test]
fn speculation_and_batches_change_no_greedy_token() {
    let prompts = prompts(24);
    let lengths: Vec<u32> = (0..prompts.len() as u32).map(|i| 6 + (i * 11) % 30).collect();
    let request = |i: usize| ignoring_stops(prompts[i].clone(), lengths[i]);
    let mut alone = load(&settings(1, 0));
    let plain: Vec<Output> =
        (0..prompts.len()).map(|i| alone.generate(request(i), &mut |_| Flow::Continue).unwrap()).collect();
    for depth in 0..=3 {
        for sharing in [IndexSharing::Off, IndexSharing::On] {
            let mut batch = load(&Settings { index_sharing: sharing, ..settings(5, depth) });
            // Ragged arrivals: sequences join while others are anywhere, and leave when they are done.
            let arrivals = (0..prompts.len()).map(|i| (i * 3 / 2, request(i))).collect();
            let outputs = run(&mut batch, arrivals);
            assert_eq!(tokens(&outputs), tokens(&plain), "depth {depth}, sharing {sharing:?}");
            let counts = &batch.stats().drafts;
            assert_eq!(counts.drafted.len(), depth);
            assert!(depth == 0 || counts.rate(0).unwrap() > 0.3, "drafts mean something: {counts:?}");
            if depth < 2 {
                // Without a chain there is nothing to share.
                break;
            }
        }
    }
}

/// A draft behind the stop token has no right answer; counting it as wrong would make short answers look badly drafted.
#[test]
fn drafts_behind_the_end_are_not_counted() {
    let mut generator = load(&settings(1, 2));
    for name in ["short_think", "short_direct", "tool_think"] {
        let (prompt, _) = golden(name);
        let output = generator.generate(Request::new(prompt, 64), &mut |_| Flow::Continue).unwrap();
        assert!(output.finish == FinishReason::EndToken);
        assert_eq!(output.cost.drafted, output.cost.accepted, "{name}: every judged draft is right");
    }
}

/// The tiny model has random weights: its draft layer is nearly always wrong, it shares selections, and one of its layers
/// reuses the selection of the layer before.
#[test]
fn rejected_drafts_leave_no_trace() {
    let checkpoint = Checkpoint::open(repository("data/goldens/tiny")).unwrap();
    let vocab = checkpoint.config().text.vocab_size as u32;
    let load = |sequences, depth, index_sharing| {
        let settings =
            Settings { sequences, depth, index_sharing, context: Some(256), rows: 24, ..Settings::default() };
        Generator::load(Cpu::new(1), &checkpoint, &settings).unwrap()
    };
    let media: Vec<u32> = (500..512).collect();
    // Prompts around pool and page boundaries; sampled ones among greedy ones; a depth of their own for some.
    let request = |i: u32, depth: u32| {
        let length = [1, 3, 4, 15, 16, 17, 60, 63, 64, 65, 100][i as usize % 11];
        let prompt =
            (0..length).map(|t| (t * 31 + i * 17 + t * t) % vocab).map(|t| if media.contains(&t) { 1 } else { t });
        let temperature = if i.is_multiple_of(2) { 0.0 } else { 0.7 };
        let sampling = Sampling { temperature, min_p: 0.02, seed: Some(i64::from(i)), ..Sampling::default() };
        let bias = media.iter().map(|&t| (t, -100.0)).collect();
        let sampling = Sampling { logit_bias: bias, ..sampling };
        let own = (i % 5 == 4).then_some(depth / 2);
        Request { sampling, depth: own, ..ignoring_stops(prompt.collect(), 24) }
    };
    let mut alone = load(1, 0, IndexSharing::Auto);
    let plain: Vec<Output> = (0..22).map(|i| alone.generate(request(i, 0), &mut |_| Flow::Continue).unwrap()).collect();
    for (depth, sharing) in [(1, IndexSharing::Auto), (3, IndexSharing::Auto), (2, IndexSharing::Off)] {
        let mut batch = load(6, depth as usize, sharing);
        let outputs = run(&mut batch, (0..22).map(|i| (i as usize, request(i, depth))).collect());
        assert_eq!(tokens(&outputs), tokens(&plain), "depth {depth}, sharing {sharing:?}");
        let counts = &batch.stats().drafts;
        assert!(counts.rate(0).unwrap() < 0.5, "drafts are mostly rejected here: {counts:?}");
        let summed: u64 = outputs.iter().map(|o| u64::from(o.cost.draft_steps)).sum();
        assert_eq!(summed, counts.steps(), "sequences count what the generator counts");
    }
}

#[test]
fn a_seed_gives_the_same_tokens_in_any_batch_and_at_any_depth() {
    let prompts = prompts(12);
    let request = |i: usize| {
        let sampling = Sampling {
            temperature: 1.2,
            top_p: 0.95,
            top_k: Some(40),
            repetition_penalty: 1.1,
            presence_penalty: 0.2,
            seed: Some(77 + i as i64),
            ..Sampling::default()
        };
        Request { sampling, ..ignoring_stops(prompts[i].clone(), 20) }
    };
    let mut alone = load(&settings(1, 0));
    let plain: Vec<Output> =
        (0..prompts.len()).map(|i| alone.generate(request(i), &mut |_| Flow::Continue).unwrap()).collect();
    let greedy: Vec<Output> = prompts
        .iter()
        .map(|p| alone.generate(ignoring_stops(p.clone(), 20), &mut |_| Flow::Continue).unwrap())
        .collect();
    assert_ne!(tokens(&plain), tokens(&greedy), "a temperature is at work");
    for depth in [0, 2] {
        let mut batch = load(&settings(4, depth));
        let outputs = run(&mut batch, (0..prompts.len()).map(|i| (i, request(i))).collect());
        assert_eq!(tokens(&outputs), tokens(&plain), "depth {depth}");
    }
    // Drawn drafts: other tokens, but the same ones in any batch.
    let drawn = |sequences| Settings { draft_sampling: DraftSampling::Probabilistic, ..settings(sequences, 2) };
    let mut single = load(&drawn(1));
    let one: Vec<Output> =
        (0..prompts.len()).map(|i| single.generate(request(i), &mut |_| Flow::Continue).unwrap()).collect();
    let many = run(&mut load(&drawn(4)), (0..prompts.len()).map(|i| (i, request(i))).collect());
    assert_eq!(tokens(&one), tokens(&many));
    assert!(single.stats().drafts.steps() > 0);
}

#[test]
fn stop_rules() {
    let (prompt, continuation) = golden("short_think");
    let mut generator = load(&settings(1, 2));
    let mut go = |request: Request| generator.generate(request, &mut |_| Flow::Continue).unwrap();
    // A stop token of the request, inside what speculation accepts at once.
    let stop = continuation[5];
    let at = continuation.iter().position(|&t| t == stop).unwrap();
    let mut stopping = ignoring_stops(prompt.clone(), 64);
    stopping.limits.stop_tokens = vec![stop];
    let output = go(stopping);
    assert_eq!((output.tokens.as_slice(), output.finish), (&continuation[..at], FinishReason::StopToken(stop)));
    // Fewer tokens than a step of drafts yields.
    for max in 1..=4 {
        let output = go(ignoring_stops(prompt.clone(), max));
        assert_eq!((output.tokens.as_slice(), output.finish), (&continuation[..max as usize], FinishReason::Length));
    }
    // min_tokens: no stop token before, at any row.
    let (direct, answer) = golden("short_direct");
    let mut patient = Request::new(direct, 40);
    patient.limits.min_tokens = 20;
    let output = go(patient);
    assert!(output.tokens.len() >= 20, "{}", output.tokens.len());
    assert_eq!(output.tokens[..7], answer[..7]);
    // The consumer ends the sequence at the third token.
    let mut seen = 0;
    let output = generator
        .generate(ignoring_stops(prompt, 64), &mut |_| {
            seen += 1;
            if seen == 3 { Flow::Stop } else { Flow::Continue }
        })
        .unwrap();
    assert_eq!((output.tokens.as_slice(), output.finish, seen), (&continuation[..3], FinishReason::Abort, 3));
    everything_is_back(&generator);
}

#[test]
fn the_context_ends_a_sequence() {
    let (prompt, continuation) = golden("short_think");
    for depth in [0, 3] {
        let mut generator = load(&Settings { context: Some(32), pages: None, ..settings(1, depth) });
        let output = generator.generate(ignoring_stops(prompt.clone(), 500), &mut |_| Flow::Continue).unwrap();
        assert_eq!((output.tokens.as_slice(), output.finish), (&continuation[..12], FinishReason::Length));
    }
}

#[test]
fn bad_requests_are_refused_with_the_reason() {
    let mut generator = load(&Settings { context: Some(64), ..settings(1, 1) });
    let fails = |generator: &mut Generator<Cpu>, request: Request| generator.submit(request).unwrap_err().to_string();
    let mut contradicting = Request::new(vec![1], 4);
    contradicting.limits.min_tokens = 5;
    for (request, part) in [
        (Request::new(Vec::new(), 4), "at least one token"),
        (Request::new(vec![5; 64], 4), "64 tokens, but the context holds 64"),
        (Request::new(vec![1, REAL_VOCAB as u32], 4), "token 1 is 3235, but ids end at 3234"),
        (Request::new(vec![1], 0), "max_tokens"),
        (contradicting, "min_tokens"),
        (Request { depth: Some(2), ..Request::new(vec![1], 4) }, "depth"),
        (Request { sampling: Sampling { top_p: 2.0, ..Sampling::default() }, ..Request::new(vec![1], 4) }, "top_p"),
    ] {
        let error = fails(&mut generator, request);
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(generator.unfinished(), (0, 0));
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let checkpoint = Checkpoint::open(repository("models/micro-bf16")).unwrap();
    let good = settings(2, 1);
    for (bad, name) in [
        (Settings { sequences: 0, ..good.clone() }, "sequences"),
        (Settings { rows: 1, ..good.clone() }, "rows"),
        (Settings { context: Some(1 << 20), ..good.clone() }, "context"),
        (Settings { pages: Some(1), ..good.clone() }, "pages"),
        (Settings { real_vocab: Some(1 << 20), ..good }, "real_vocab"),
    ] {
        let error = Generator::load(Cpu::new(1), &checkpoint, &bad).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn waiting_sequences_start_when_pages_come_back_and_aborts_free_them() {
    // Pages for one full context only, although there are three slots.
    let mut generator = load(&Settings { context: Some(128), pages: Some(2), ..settings(3, 1) });
    let (prompt, continuation) = golden("short_think");
    let long = ignoring_stops(prompt.clone(), 100);
    let first = generator.submit(long.clone()).unwrap();
    let second = generator.submit(long).unwrap();
    let third = generator.submit(ignoring_stops(prompt, 8)).unwrap();
    generator.step(&mut |_, _| Flow::Continue).unwrap();
    assert_eq!(generator.unfinished(), (2, 1), "one runs, two wait");
    assert_eq!(generator.abort(first).unwrap().reason, FinishReason::Abort);
    assert_eq!(generator.abort(second).unwrap().reason, FinishReason::Abort);
    assert!(generator.abort(second).is_none());
    everything_is_back(&generator);
    let (mut collector, mut result) = (Collector::default(), None);
    generator
        .run(&mut |sequence, event| {
            result = collector.take(event).map(|output| (sequence, output.tokens));
            Flow::Continue
        })
        .unwrap();
    assert_eq!(result, Some((third, continuation[..8].to_vec())));
    everything_is_back(&generator);
}

#[test]
fn log_probabilities_of_a_prompt_do_not_depend_on_chunks() {
    let (mut tokens, continuation) = golden("short_think");
    let prompt = tokens.len();
    tokens.extend(&continuation);
    let mut reference = None;
    for rows in [96, 7, 1] {
        let mut generator = load(&Settings { rows, ..settings(1, 0) });
        let request = Request { prompt_logprobs: Some(REAL_VOCAB as u32), ..ignoring_stops(tokens.clone(), 1) };
        let output = generator.generate(request, &mut |_| Flow::Continue).unwrap();
        let scores = output.prompt_logprobs.unwrap();
        assert_eq!((scores.len(), &scores[0]), (tokens.len(), &None));
        for (position, score) in scores.iter().enumerate().skip(1) {
            let score = score.as_ref().unwrap();
            assert_eq!((score.id, score.top.len()), (tokens[position], REAL_VOCAB));
            let sum: f64 = score.top.iter().map(|&(_, l)| f64::from(l).exp()).sum();
            assert!((sum - 1.0).abs() < 1e-5, "{sum}");
            // Greedy continuations are the most probable tokens.
            assert!(position < prompt || (score.rank, score.top[0].0) == (1, score.id), "position {position}");
        }
        assert!(*reference.get_or_insert_with(|| scores.clone()) == scores, "{rows} rows a step");
        everything_is_back(&generator);
    }
}
