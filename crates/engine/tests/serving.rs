//! The core on the micro model: prefix reuse, preemption, depth, chunks and batches change no token; pools come back; one
//! request's fault is its own.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeMap;

use glimmer_engine::{
    FinishReason, Flow, Generator, Request, SequenceId, Settings,
    policy::Policy,
    request::{Collector, Media, MediaKind, RequestError, Structure},
};
use glimmer_tensor::cpu::Cpu;
use support::{alone, document, everything_is_back, load, request, run, settings, tokens};

/// Conversations: turns that repeat what came before, siblings that part inside it, strangers.
fn requests() -> Vec<Request> {
    let text = document(0, 700);
    let cut = |end: usize, other: u32| -> Vec<u32> { text[..end].iter().copied().chain([other, other + 1]).collect() };
    let mut all = Vec::new();
    for (number, prompt) in (0..).zip([
        text[..130].to_vec(),
        text[..130].to_vec(),
        text[..128].to_vec(),
        cut(100, 30),
        cut(100, 40),
        text[..260].to_vec(),
        cut(200, 50),
        document(1, 75),
        text[..300].to_vec(),
        text[..64].to_vec(),
    ]) {
        let mut request = request(prompt, 20 + (number as u32 * 7) % 50, number);
        request.turn_start = (number % 3 == 0).then_some(request.prompt.len() * 2 / 3);
        all.push(request);
    }
    all
}

#[test]
fn cache_depth_chunks_and_batches_change_no_token() {
    let requests = requests();
    let plain = alone(&requests);
    // Few pages and states: what is cached is evicted all the time.
    for (caching, depth, rows, sequences, plenty) in [
        (true, 0, 96, 1, true),
        (true, 1, 33, 1, true),
        (true, 2, 256, 1, false),
        (true, 3, 96, 4, true),
        (true, 2, 40, 4, false),
        (false, 2, 40, 4, true),
        (false, 3, 256, 1, true),
    ] {
        let (pages, states) = if plenty { (128, 64) } else { (12, 3) };
        let mut generator = load(&Settings {
            prefix_caching: caching,
            rows,
            pages: Some(pages),
            context: Some(512),
            state_checkpoints: states,
            ..settings(sequences, depth)
        });
        for round in 0..2 {
            let arrivals = requests.iter().enumerate().map(|(i, r)| (i * 5, r.clone())).collect();
            let outputs = run(&mut generator, arrivals);
            let what = format!("cache {caching}, depth {depth}, rows {rows}, {sequences} at once, round {round}");
            assert_eq!(tokens(&outputs), tokens(&plain), "{what}");
            let cached: u32 = outputs.iter().map(|output| output.cost.cached_tokens).sum();
            assert_eq!(caching, cached > 0, "{what}: {cached} tokens");
            if round == 1 && caching && plenty {
                // Everything but the last page was there, and short prompts have none.
                for (output, request) in outputs.iter().zip(&requests) {
                    let most = (request.prompt.len() as u32 - 1) / 64 * 64;
                    assert_eq!(output.cost.cached_tokens, most, "{what}");
                }
            }
        }
        let counters = generator.snapshot().counters;
        assert_eq!(counters.prefix_hits > 0, caching);
        assert!(caching || counters.prefix_queries == 0);
    }
}

/// One conversation for each kind of state checkpoint, in which it alone can be hit.
#[test]
fn a_hit_through_every_kind_of_state_equals_a_cold_prompt() {
    let text = document(2, 700);
    for depth in [0, 3] {
        let hit = |first: Request, second: Request, expected: u32| {
            let plain = alone(std::slice::from_ref(&second));
            let mut generator = load(&settings(1, depth));
            generator.generate(first, &mut |_| Flow::Continue).unwrap();
            let output = generator.generate(second, &mut |_| Flow::Continue).unwrap();
            assert_eq!(output.cost.cached_tokens, expected, "depth {depth}");
            assert_eq!(output.tokens, plain[0].tokens, "depth {depth}, {expected} tokens cached");
            everything_is_back(&generator);
        };
        // The last boundary of the prompt.
        hit(request(text[..150].to_vec(), 3, 0), request(text[..200].to_vec(), 40, 0), 128);
        // The last boundary before the last turn: what follows it was another turn.
        let mut first = request([&text[..140], &[77; 80]].concat(), 3, 0);
        first.turn_start = Some(135);
        hit(first, request(text[..240].to_vec(), 40, 1), 128);
        // A boundary crossed while decoding, drafts or not: the next turn repeats the answer.
        for (prompt, new) in [(60, 30), (61, 29), (62, 28), (63, 27), (100, 60)] {
            let first = request(text[..prompt].to_vec(), new, 0);
            let answer = alone(std::slice::from_ref(&first)).remove(0).tokens;
            let next = [&text[..prompt], &answer, &text[300..320]].concat();
            let boundary = (prompt as u32 + new - 1) / 64 * 64;
            hit(first, request(next, 40, 1), boundary);
        }
    }
}

#[test]
fn pages_are_shared_while_both_run_and_come_back_when_both_are_gone() {
    let text = document(3, 400);
    let mut generator = load(&Settings { pages: Some(12), context: Some(512), ..settings(3, 1) });
    let first = generator.submit(request(text[..330].to_vec(), 60, 0)).unwrap();
    let mut collectors: BTreeMap<SequenceId, Collector> = BTreeMap::new();
    let mut outputs = BTreeMap::new();
    let mut step = |generator: &mut Generator<Cpu>| {
        generator
            .step(&mut |id, event| {
                if let Some(output) = collectors.entry(id).or_default().take(event) {
                    outputs.insert(id, output);
                }
                Flow::Continue
            })
            .unwrap()
    };
    (0..12).for_each(|_| {
        step(&mut generator);
    });
    // Seven pages for the first; the second needs six, of which five are there. Without sharing they would not fit.
    let second = generator.submit(request(text[..340].to_vec(), 30, 1)).unwrap();
    while step(&mut generator) {}
    assert_eq!(outputs[&second].cost.cached_tokens, 320);
    assert_eq!((outputs[&first].cost.preemptions, outputs[&second].cost.preemptions), (0, 0));
    let plain = alone(&[request(text[..330].to_vec(), 60, 0), request(text[..340].to_vec(), 30, 1)]);
    assert_eq!([&outputs[&first].tokens, &outputs[&second].tokens], [&plain[0].tokens, &plain[1].tokens]);
    everything_is_back(&generator);
    generator.reset_prefix_cache();
    assert_eq!(generator.pools().free(), generator.pools().all());
    assert_eq!(generator.pools().free_checkpoints(), generator.pools().all_checkpoints());
}

#[test]
fn preempted_and_resumed_equals_undisturbed() {
    // Four sequences that grow to three or four pages each, and five pages: some have to give way again and again.
    let requests: Vec<Request> = (0..8)
        .map(|i| {
            let mut request = request(document(i as usize, 50 + 13 * i as usize), 100, i);
            request.logprobs = (i == 3).then_some(2);
            request.prompt_logprobs = (i == 5).then_some(1);
            request
        })
        .collect();
    let plain = alone(&requests);
    for (caching, depth) in [(false, 0), (false, 2), (true, 0), (true, 3)] {
        let tight = Settings { pages: Some(5), context: Some(256), prefix_caching: caching, ..settings(4, depth) };
        let mut generator = load(&tight);
        let outputs = run(&mut generator, requests.iter().map(|r| (0, r.clone())).collect());
        let preemptions = generator.snapshot().counters.preemptions;
        assert!(preemptions >= 3, "{preemptions} preemptions");
        let own: u64 = outputs.iter().map(|output| u64::from(output.cost.preemptions)).sum();
        assert_eq!(own, preemptions);
        for (i, (output, plain)) in outputs.iter().zip(&plain).enumerate() {
            let what = format!("request {i}, cache {caching}, depth {depth}");
            assert_eq!(output.tokens, plain.tokens, "{what}");
            assert_eq!(output.logprobs, plain.logprobs, "{what}");
            assert_eq!(output.prompt_logprobs, plain.prompt_logprobs, "{what}");
            assert_eq!(output.prompt_logprobs.is_some(), i == 5);
        }
    }
}

#[test]
fn log_probabilities_are_those_of_a_prompt_whatever_runs_beside() {
    let prompt = document(4, 150);
    let mut asking = request(prompt.clone(), 12, 0);
    (asking.logprobs, asking.prompt_logprobs) = (Some(3), Some(2));
    for depth in [0, 2] {
        let mut generator = load(&settings(3, depth));
        let busy = request(document(5, 90), 60, 1);
        let outputs = run(&mut generator, vec![(0, busy.clone()), (3, asking.clone()), (4, busy)]);
        let output = &outputs[1];
        let mut all = prompt.clone();
        all.extend(&output.tokens);
        // The answer read as a prompt by an engine of its own.
        let reading = Request { prompt_logprobs: Some(3), ..request(all.clone(), 1, 0) };
        let expected = run(&mut load(&settings(1, 0)), vec![(0, reading)]).remove(0).prompt_logprobs.unwrap();
        let scores = output.prompt_logprobs.as_ref().unwrap();
        assert_eq!((scores.len(), &scores[0], output.logprobs.len()), (prompt.len(), &None, 12));
        let found: Vec<_> = scores.iter().flatten().chain(&output.logprobs).collect();
        assert_eq!(found.len(), prompt.len() - 1 + 12);
        for (found, expected) in found.into_iter().zip(expected.iter().flatten()) {
            assert_eq!(
                (found.id, found.rank, found.logprob.to_bits()),
                (expected.id, expected.rank, expected.logprob.to_bits())
            );
            let two = |top: &[(u32, f32)]| top.iter().take(2).map(|&(id, l)| (id, l.to_bits())).collect::<Vec<_>>();
            assert_eq!(two(&found.top), two(&expected.top));
        }
    }
}

#[test]
fn a_request_with_unusable_rows_fails_alone_and_leaves_nothing() {
    let (prompt, mut patches) = support::image_prompt();
    patches.values.iter_mut().for_each(|value| *value = f32::NAN);
    let mut generator = load(&settings(4, 2));
    let media = generator.media(&prompt, vec![patches]).unwrap();
    let broken = Request { media, ..request(prompt, 30, 0) };
    let others: Vec<Request> = (0..4).map(|i| request(document(6 + i as usize, 80), 30, i)).collect();
    let mut arrivals: Vec<(usize, Request)> = others.iter().enumerate().map(|(i, r)| (i, r.clone())).collect();
    arrivals.insert(2, (1, broken.clone()));
    let mut outputs = run(&mut generator, arrivals);
    let failed = outputs.remove(2);
    let not_a_number = |finish: &FinishReason| matches!(finish, FinishReason::Error(RequestError::Internal(text)) if text.contains("not a number"));
    assert!(not_a_number(&failed.finish), "{:?}", failed.finish);
    assert_eq!(tokens(&outputs), tokens(&alone(&others)));
    assert_eq!(generator.snapshot().counters.failed, 1);
    // Slot and pages of the broken request are used again, and nothing of it is left.
    let again = run(&mut generator, others.iter().map(|r| (0, r.clone())).collect());
    assert_eq!(tokens(&again), tokens(&outputs));
    let next = run(&mut generator, vec![(0, broken)]);
    assert!(not_a_number(&next[0].finish));
}

#[test]
fn pictures_and_salts_are_part_of_a_prefix() {
    let (prompt, patches) = support::image_prompt();
    let long: Vec<u32> = prompt.iter().copied().chain(document(7, 120)).collect();
    let mut generator = load(&settings(1, 1));
    let own = generator.media(&long, vec![patches.clone()]).unwrap();
    let mut darker = patches;
    darker.values.iter_mut().for_each(|value| *value *= 0.5);
    let other = generator.media(&long, vec![darker]).unwrap();
    let with = |media: &std::sync::Arc<[Media]>, salt: Option<&str>| Request {
        media: std::sync::Arc::clone(media),
        cache_salt: salt.map(ToOwned::to_owned),
        ..request(long.clone(), 20, 0)
    };
    let mut go = |request: Request| {
        let output = generator.generate(request, &mut |_| Flow::Continue).unwrap();
        (output.tokens, output.cost.cached_tokens)
    };
    let most = (long.len() as u32 - 1) / 64 * 64;
    let first = go(with(&own, None));
    assert_eq!(first.1, 0);
    assert_eq!(go(with(&own, None)), (first.0.clone(), most));
    assert_eq!(go(with(&other, None)).1, 0, "another picture in the same place");
    assert_eq!(go(with(&own, Some("a"))), (first.0.clone(), 0));
    assert_eq!(go(with(&own, Some("a"))), (first.0, most));
    let clip: Vec<Media> = own.iter().map(|m| Media { kind: MediaKind::Video, ..m.clone() }).collect();
    assert_eq!(go(with(&clip.into(), None)).1, 0);
    // The tower ran for each picture once; a hit behind a picture does not even ask.
    assert_eq!(generator.media_lookups(), (4, 1));
}

#[test]
fn every_length_that_passes_the_check_is_served_when_pages_are_scarce() {
    let mut generator = load(&Settings { pages: Some(4), context: Some(256), ..settings(3, 2) });
    let lengths = [1usize, 63, 64, 65, 128, 190, 192, 250, 255];
    let requests: Vec<(usize, Request)> =
        lengths.iter().enumerate().map(|(i, &n)| (i, request(document(i, n), 300, 0))).collect();
    let outputs = run(&mut generator, requests);
    for (output, length) in outputs.iter().zip(lengths) {
        assert_eq!((output.tokens.len(), &output.finish), (256 - length, &FinishReason::Length));
    }
}

/// Reasoning of ten tokens at most, its end, then a shape of twelve even tokens and an end token.
#[test]
fn shapes_behind_reasoning_are_the_same_at_every_depth_and_over_preemption() {
    const THINK_END: u32 = 301;
    let requests: Vec<Request> = (0..4)
        .map(|i| {
            let mut request = request(document(i as usize, 52 + i as usize), 90, i);
            (request.limits.ignore_eos, request.limits.min_tokens) = (false, 11);
            request.structure = Some(Structure::Regex("60".to_owned()));
            (request.starts_in_reasoning, request.thinking_budget) = (true, Some(10));
            request
        })
        .collect();
    let with = |sequences, depth, pages| Settings {
        think_end: Some(THINK_END),
        pages: Some(pages),
        context: Some(256),
        ..settings(sequences, depth)
    };
    let go = |settings: &Settings| {
        let mut generator = load(settings);
        let outputs = run(&mut generator, requests.iter().map(|r| (0, r.clone())).collect());
        (outputs, generator.snapshot().counters.preemptions)
    };
    let (plain, _) = go(&with(1, 0, 16));
    for output in &plain {
        assert_eq!(
            (output.tokens.len(), &output.finish),
            (10 + 1 + 60, &FinishReason::EndToken),
            "{:?}",
            output.tokens
        );
        assert_eq!(output.tokens[10], THINK_END);
        assert!(output.tokens[11..].iter().all(|token| token % 2 == 0));
    }
    for (depth, pages) in [(0, 5), (1, 16), (2, 5), (3, 16)] {
        let (outputs, preemptions) = go(&with(4, depth, pages));
        assert_eq!(tokens(&outputs), tokens(&plain), "depth {depth}, {pages} pages");
        assert_eq!(preemptions > 0, pages == 5, "{preemptions} preemptions");
    }
    let mut generator = load(&with(1, 0, 16));
    let lonely = generator.submit(requests[0].clone()).unwrap_err().to_string();
    assert!(lonely.contains("structure"), "{lonely}");
}

#[test]
fn priorities_and_policies_change_no_token() {
    let requests: Vec<Request> =
        (0..6).map(|i| Request { priority: -i, ..request(document(i as usize, 70), 15, i) }).collect();
    let policy = Policy {
        order: glimmer_engine::policy::Order::Priority,
        itl_target: Some(1e-6),
        min_quantum: 16,
        long_prompt: 32,
        interval: 2,
        ..Policy::default()
    };
    let mut generator = load(&Settings { policy, ..settings(3, 1) });
    let outputs = run(&mut generator, requests.iter().map(|r| (0, r.clone())).collect());
    assert_eq!(tokens(&outputs), tokens(&alone(&requests)));
}
