//! The prefix cache on the micro model: whatever a prompt is continued from, its answer is that of an engine without a cache,
//! and a conversation computes what is new in each turn and at most a page besides.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::{collections::BTreeMap, sync::Arc};

use glimmer_engine::{
    Counters, FinishReason, Flow, Generator, Output, Request, SequenceId, Settings, request::Collector,
};
use glimmer_model::vision::Patches;
use glimmer_tensor::{PAGE_TOKENS, cpu::Cpu};
use support::{alone, document, everything_is_back, image_prompt, load, request, run, settings, tokens};

/// The answer, and what the engine's counters say about it: prompt tokens computed, and taken from the cache.
fn ask(generator: &mut Generator<Cpu>, request: Request) -> (Output, u64, u64) {
    let count =
        |generator: &Generator<Cpu>| (generator.stats().prefill_tokens, generator.snapshot().counters.prefix_hits);
    let before = count(generator);
    let output = generator.generate(request, &mut |_| Flow::Continue).unwrap();
    let after = count(generator);
    (output, after.0 - before.0, after.1 - before.1)
}

fn misses(counters: &Counters, reason: &str) -> u64 {
    counters.prefix_misses.iter().find(|(name, _)| name == reason).unwrap().1
}

/// A test's random numbers, the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below
    }
}

/// An agent's conversation: every prompt is the one before, its answer and what a tool returned.
struct Agent {
    number: usize,
    turn: usize,
    prompt: Vec<u32>,
    turn_start: usize,
    /// Tokens of the prompt that no earlier one of the conversation had and no answer either.
    new: usize,
}

const TURNS: usize = 10;

impl Agent {
    fn new(number: usize) -> Self {
        let prompt = document(number, 150 + 23 * number);
        Self { number, turn: 0, turn_start: 40, new: prompt.len(), prompt }
    }

    /// Answers end by length or, in every second turn, by a token of their own, wherever that comes.
    fn request(&self, stop: Option<u32>) -> Request {
        let number = (self.turn + self.number) as i64;
        let mut request = request(self.prompt.clone(), 17 + (self.turn as u32 * 29) % 83, number);
        request.turn_start = Some(self.turn_start);
        request.limits.stop_tokens.extend(stop);
        request
    }

    fn go_on(&mut self, output: &Output) {
        self.prompt.extend(&output.tokens);
        self.turn_start = self.prompt.len();
        if let FinishReason::StopToken(stop) = output.finish {
            self.prompt.push(stop);
        }
        self.prompt.extend(document(100 + self.turn, 30 + (self.turn * 41) % 90));
        self.new = self.prompt.len() - self.turn_start;
        self.turn += 1;
    }
}

#[test]
fn ten_turns_of_an_agent_compute_what_is_new_and_at_most_a_page() {
    let mut plain = load(&Settings { prefix_caching: false, ..settings(1, 0) });
    let mut agent = Agent::new(0);
    let mut turns = Vec::new();
    for turn in 0..TURNS {
        let mut request = agent.request(None);
        let mut answer = plain.generate(request.clone(), &mut |_| Flow::Continue).unwrap();
        if turn % 2 == 1 {
            // A token that the answer has not had before its last third.
            let stop = answer.tokens[answer.tokens.len() * 2 / 3];
            request = agent.request(Some(stop));
            answer = plain.generate(request.clone(), &mut |_| Flow::Continue).unwrap();
            assert_eq!(answer.finish, FinishReason::StopToken(stop));
        }
        turns.push((request, answer.clone(), agent.new));
        agent.go_on(&answer);
    }
    for depth in [0, 1, 3] {
        let mut generator = load(&settings(2, depth));
        for (turn, (request, plain, new)) in turns.iter().enumerate() {
            let what = format!("turn {turn} at depth {depth}");
            let (output, computed, cached) = ask(&mut generator, request.clone());
            assert_eq!((&output.tokens, &output.finish), (&plain.tokens, &plain.finish), "{what}");
            assert_eq!(computed + cached, request.prompt.len() as u64, "{what}");
            assert!(computed as usize <= new + PAGE_TOKENS, "{what}: {computed} computed, {new} new");
        }
        let counters = generator.snapshot().counters;
        assert_eq!(counters.prefix_state_hits, TURNS as u64 - 1);
        assert!(depth == 0 || counters.drafts.steps() > 0);
        everything_is_back(&generator);
    }
}

/// Three agents in one engine, each turn of one beside turns of the others, with states for little more than one each.
#[test]
fn agents_beside_each_other_keep_their_places() {
    let mut agents: Vec<Agent> = (0..3).map(Agent::new).collect();
    let mut generator = load(&Settings { pages: Some(96), state_checkpoints: 12, ..settings(3, 2) });
    for turn in 0..6 {
        let requests: Vec<Request> = agents.iter().map(|agent| agent.request(None)).collect();
        let arrivals = requests.iter().enumerate().map(|(i, r)| (i * 3, r.clone())).collect();
        let outputs = run(&mut generator, arrivals);
        assert_eq!(tokens(&outputs), tokens(&alone(&requests)), "turn {turn}");
        for ((agent, request), output) in agents.iter_mut().zip(&requests).zip(&outputs) {
            let computed = request.prompt.len() - output.cost.cached_tokens as usize;
            assert!(computed <= agent.new + PAGE_TOKENS, "turn {turn} of agent {}: {computed} computed", agent.number);
            agent.go_on(output);
        }
    }
}

#[test]
fn pages_behind_the_last_state_are_computed_again_and_shared() {
    let text = document(4, 420);
    for depth in [0, 2] {
        let mut generator = load(&settings(1, depth));
        // States at 64 (before the last turn), 320 (the prompt's end) and behind.
        let first = Request { turn_start: Some(100), ..request(text[..380].to_vec(), 8, 0) };
        ask(&mut generator, first.clone());
        // This one leaves after 250 tokens: three full pages are there, and the state before the turn.
        let second = request([&text[..250], &text[300..340]].concat(), 40, 0);
        let pages = generator.pools().free().pages;
        let (output, computed, cached) = ask(&mut generator, second.clone());
        assert_eq!((computed, cached), (290 - 64, 64));
        assert_eq!(output.tokens, alone(std::slice::from_ref(&second))[0].tokens, "depth {depth}");
        // Of its six pages the first three are those of the other one.
        assert_eq!(
            pages - generator.pools().free().pages,
            330usize.div_ceil(PAGE_TOKENS) - 3 - usize::from(330 % 64 != 0)
        );
        // And it left states where the next one goes on.
        let (again, computed, _) = ask(&mut generator, second);
        assert_eq!((again.tokens, computed), (output.tokens, 290 - 256));

        // Pages without any state on the way: nothing to go on from, and the counter says so.
        let third = request([&text[..60], &text[300..360]].concat(), 5, 0);
        let (_, computed, cached) = ask(&mut generator, third);
        assert_eq!((computed, cached), (120, 0), "the first page differs");
        let mut bare = load(&settings(1, depth));
        ask(&mut bare, request(text[..380].to_vec(), 3, 0));
        let fourth = request([&text[..250], &text[300..340]].concat(), 20, 1);
        let (output, _, cached) = ask(&mut bare, fourth.clone());
        assert_eq!((output.tokens, cached), (alone(&[fourth])[0].tokens.clone(), 0));
        let counters = bare.snapshot().counters;
        assert_eq!((misses(&counters, "no_page"), misses(&counters, "no_state")), (1, 1));
    }
}

#[test]
fn what_one_step_computes_twice_is_kept_once() {
    let text = document(5, 200);
    for depth in [0, 2] {
        let requests: Vec<Request> = (0..3).map(|i| request(text.clone(), 20 + i * 11, 0)).collect();
        let mut generator = load(&Settings { rows: 768, ..settings(3, depth) });
        let outputs = run(&mut generator, requests.iter().map(|r| (0, r.clone())).collect());
        assert_eq!(tokens(&outputs), tokens(&alone(&requests)));
        // Nothing is visible before its step has ended, so each computed all; what is left is one copy.
        assert_eq!(outputs.iter().map(|output| output.cost.cached_tokens).sum::<u32>(), 0);
        assert_eq!(generator.pools().idle(), (200 + 42 - 1) / PAGE_TOKENS);
    }
}

/// The picture's placeholders lie across a page boundary at which a state is saved: the rest of the picture is fed behind it.
#[test]
fn a_hit_may_end_inside_a_picture_and_another_picture_is_no_hit() {
    let (prompt, patches) = image_prompt();
    let mut darker: Patches = patches.clone();
    darker.values.iter_mut().for_each(|value| *value *= 0.25);
    for depth in [0, 3] {
        let mut generator = load(&settings(2, depth));
        let mut plain = load(&Settings { prefix_caching: false, ..settings(1, 0) });
        let start = generator.media(&prompt, vec![patches.clone()]).unwrap()[0].start;
        let lead = PAGE_TOKENS - start - 10;
        let long = [document(6, lead), prompt.clone(), document(7, 90)].concat();
        let turn_start = Some(lead + start + 20);
        let with = |patches: &Patches, end: usize, media_of: &mut Generator<Cpu>| {
            let ids = long[..end].to_vec();
            let media = media_of.media(&ids, vec![patches.clone()]).unwrap();
            Request { media, turn_start, ..request(ids, 24, 0) }
        };
        // Ends a few tokens behind the picture.
        let first = with(&patches, lead + start + 27, &mut generator);
        let (output, _, _) = ask(&mut generator, first.clone());
        assert_eq!(output.tokens, plain.generate(first, &mut |_| Flow::Continue).unwrap().tokens);
        // The same picture with more behind it; the state at 64, inside the picture, is the only one.
        let second = with(&patches, long.len(), &mut generator);
        let (output, _, cached) = ask(&mut generator, second.clone());
        assert_eq!(cached, 64, "depth {depth}");
        assert_eq!(output.tokens, plain.generate(second, &mut |_| Flow::Continue).unwrap().tokens, "depth {depth}");
        // Another picture in its place.
        let other = with(&darker, long.len(), &mut generator);
        let (output, _, cached) = ask(&mut generator, other.clone());
        assert_eq!(cached, 0);
        assert_eq!(output.tokens, plain.generate(other, &mut |_| Flow::Continue).unwrap().tokens);
        everything_is_back(&generator);
    }
}

#[test]
fn salts_keep_conversations_apart() {
    let text = document(8, 200);
    let mut generator = load(&settings(1, 1));
    let salted =
        |salt: Option<&str>| Request { cache_salt: salt.map(ToOwned::to_owned), ..request(text.clone(), 12, 0) };
    let plain = alone(&[salted(None)]).remove(0).tokens;
    for (salt, expected) in [(None, 0), (Some("a"), 0), (Some("b"), 0), (Some("a"), 192), (None, 192), (Some(""), 0)] {
        let (output, _, cached) = ask(&mut generator, salted(salt));
        assert_eq!((output.tokens, cached), (plain.clone(), expected), "{salt:?}");
    }
    assert_eq!(misses(&generator.snapshot().counters, "salt"), 3);
}

#[test]
fn a_cache_that_is_cleared_while_it_is_shared_takes_nothing_from_those_who_use_it() {
    let text = document(9, 400);
    let requests: Vec<Request> = [(330, 70), (340, 60), (350, 50), (330, 30)]
        .into_iter()
        .enumerate()
        .map(|(i, (prompt, new))| request(text[..prompt].to_vec(), new, i as i64))
        .collect();
    let plain = alone(&requests);
    for depth in [0, 2] {
        let mut generator = load(&Settings { pages: Some(20), context: Some(512), ..settings(3, depth) });
        let mut collectors: BTreeMap<SequenceId, Collector> = BTreeMap::new();
        let mut outputs: BTreeMap<SequenceId, Output> = BTreeMap::new();
        let mut ids = Vec::new();
        // The second shares with the first; then the tree is cleared under both, the third shares with nobody, and is
        // cleared away as well before the fourth.
        let (arrivals, clearings) = ([0, 8, 14, 40], [12, 20, 38]);
        for step in 0.. {
            if let Some(next) = arrivals.iter().position(|&when| when == step) {
                ids.push(generator.submit(requests[next].clone()).unwrap());
            }
            if clearings.contains(&step) {
                generator.reset_prefix_cache();
            }
            let busy = generator.step(&mut |id, event| {
                if let Some(output) = collectors.entry(id).or_default().take(event) {
                    outputs.insert(id, output);
                }
                Flow::Continue
            });
            if !busy.unwrap() && step > 40 {
                break;
            }
        }
        for (i, (id, plain)) in ids.iter().zip(&plain).enumerate() {
            assert_eq!(outputs[id].tokens, plain.tokens, "request {i}, depth {depth}");
        }
        assert_eq!((outputs[&ids[1]].cost.cached_tokens, outputs[&ids[2]].cost.cached_tokens), (320, 0));
        everything_is_back(&generator);
        generator.reset_prefix_cache();
        assert_eq!(generator.pools().free(), generator.pools().all());
        assert_eq!(generator.pools().free_checkpoints(), generator.pools().all_checkpoints());
    }
}

/// A client that leaves while its prompt is computed: full pages may stay, half of one must not, and nothing is taken for
/// granted that was never written.
#[test]
fn a_prompt_given_up_half_way_leaves_only_what_is_finished() {
    let text = document(10, 400);
    let whole = request(text, 30, 0);
    let plain = alone(std::slice::from_ref(&whole)).remove(0).tokens;
    for (depth, rows) in [(0, 40), (2, 100)] {
        for steps in 0..5 {
            let mut generator = load(&Settings { rows, ..settings(2, depth) });
            let id = generator.submit(Request { turn_start: Some(130), ..whole.clone() }).unwrap();
            (0..steps).for_each(|_| {
                generator.step(&mut |_, _| Flow::Continue).unwrap();
            });
            generator.abort(id).unwrap();
            everything_is_back(&generator);
            let (output, computed, cached) = ask(&mut generator, whole.clone());
            assert_eq!(output.tokens, plain, "depth {depth}, {rows} rows, given up after {steps} steps");
            assert_eq!(computed + cached, 400);
            assert!(cached == 0 || cached == 128, "{cached}: the state before the turn is the only one");
        }
    }
}

#[test]
fn who_was_preempted_goes_on_from_its_own_states() {
    let requests: Vec<Request> = (0..5).map(|i| request(document(11 + i, 90), 150, i as i64)).collect();
    let plain = alone(&requests);
    for depth in [0, 2] {
        let tight =
            |prefix_caching| Settings { pages: Some(9), context: Some(256), prefix_caching, ..settings(3, depth) };
        let go = |settings: &Settings| {
            let mut generator = load(settings);
            let outputs = run(&mut generator, requests.iter().map(|r| (0, r.clone())).collect());
            assert_eq!(tokens(&outputs), tokens(&plain), "depth {depth}, cache {}", settings.prefix_caching);
            let counters = generator.snapshot().counters;
            assert!(counters.preemptions > 0);
            (generator.stats().prefill_tokens, counters.prefix_hits)
        };
        let ((without, _), (with, hits)) = (go(&tight(false)), go(&tight(true)));
        assert!(
            hits > 0 && with < without,
            "{with} tokens of prompts computed instead of {without}, {hits} from the cache"
        );
    }
}

/// Everything at once in a cache that is always full: shared beginnings, pictures, salts, turns, draws, aborts, clearings.
#[test]
fn a_crowded_cache_changes_no_token() {
    let (picture, patches) = image_prompt();
    let mut dice = Dice(1);
    let families: Vec<Vec<u32>> =
        (0..2).map(|i| document(20 + 3 * i, 230)).chain([[picture, document(33, 150)].concat()]).collect();
    let mut engine =
        load(&Settings { pages: Some(9), context: Some(384), state_checkpoints: 4, rows: 72, ..settings(3, 2) });
    let requests: Vec<Request> = (0..40)
        .map(|number| {
            let family = dice.below(families.len());
            let least = if family == 2 { 70 } else { 3 };
            let end = least + dice.below(families[family].len() - least);
            let mut ids = families[family][..end].to_vec();
            ids.extend(document(40 + dice.below(4), dice.below(60)));
            let media = if family == 2 { engine.media(&ids, vec![patches.clone()]).unwrap() } else { Arc::default() };
            let turn_start = (dice.below(2) == 0).then(|| dice.below(ids.len()));
            let cache_salt = (dice.below(6) == 0).then(|| "salt".to_owned());
            Request { media, turn_start, cache_salt, ..request(ids, 4 + dice.below(70) as u32, number) }
        })
        .collect();
    let plain = alone(&requests);
    let mut open: BTreeMap<SequenceId, (usize, Collector)> = BTreeMap::new();
    let (mut next, mut compared) = (0, 0);
    for step in 0.. {
        while next < requests.len() && open.len() < 4 && dice.below(3) == 0 {
            open.insert(engine.submit(requests[next].clone()).unwrap(), (next, Collector::default()));
            next += 1;
        }
        if dice.below(40) == 0
            && let Some(&id) = open.keys().next()
        {
            open.remove(&id);
            engine.abort(id).unwrap();
        }
        if step % 150 == 149 {
            engine.reset_prefix_cache();
        }
        let mut ended = Vec::new();
        engine
            .step(&mut |id, event| {
                let (_, collector) = open.get_mut(&id).unwrap();
                ended.extend(collector.take(event).map(|output| (id, output)));
                Flow::Continue
            })
            .unwrap();
        for (id, output) in ended {
            let (number, _) = open.remove(&id).unwrap();
            assert_eq!(output.tokens, plain[number].tokens, "request {number}, step {step}");
            compared += 1;
        }
        if next == requests.len() && open.is_empty() {
            break;
        }
    }
    let counters = engine.snapshot().counters;
    assert!(compared > 25 && counters.prefix_state_hits > 5 && counters.preemptions > 0, "{compared}, {counters:?}");
    everything_is_back(&engine);
}
