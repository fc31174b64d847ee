//! One test a rule.

use super::*;

/// A waiting prompt.
fn prompt(id: u64, tokens: usize) -> View {
    View {
        id: SequenceId(id),
        arrival: id as f64 * 1e-3,
        priority: 0,
        prompt: tokens,
        known: tokens,
        computed: 0,
        drafts: 0,
        decoding: false,
        pages: 0,
        shared: 0,
        next_stop: None,
        max_rows: None,
        cached: 0,
        preempted: 0,
        max_len: tokens + 64,
    }
}

/// A running prompt of which `computed` tokens are done.
fn prefill(id: u64, tokens: usize, computed: usize) -> View {
    View { computed, pages: need(computed).pages, ..prompt(id, tokens) }
}

/// A decoding sequence with `known` tokens and pages for the computed ones only.
fn decoder(id: u64, known: usize, drafts: usize) -> View {
    let computed = known - 1;
    let max_len = known + 1000;
    View { known, computed, drafts, decoding: true, pages: need(computed).pages, max_len, ..prompt(id, known - 1) }
}

fn plenty() -> Resources {
    Resources {
        rows: 2048,
        logits: 512,
        free_slots: 64,
        free_pages: 100_000,
        all_pages: 100_000,
        sequences: 64,
        step: 0,
    }
}

fn unpaced() -> Policy {
    Policy { itl_target: None, ..Policy::default() }
}

/// 10,000 prompt tokens a second, 20 ms for few decoding rows.
fn measured() -> Rates {
    let mut rates = Rates::default();
    rates.record(10_000, 0, 1.0);
    rates.record(0, 16, 0.02);
    rates
}

fn decide(running: &[View], waiting: &[View], resources: &Resources, policy: &Policy) -> Decision {
    schedule(&Views { running, waiting }, resources, policy, &measured(), 1.0)
}

fn ids(ids: &[SequenceId]) -> Vec<u64> {
    ids.iter().map(|id| id.0).collect()
}

/// (id, rows, drafts) of the step.
fn rows(decision: &Decision) -> Vec<(u64, usize, usize)> {
    decision.work.iter().map(|work| (work.id.0, work.rows, work.drafts)).collect()
}

#[test]
fn decoding_comes_first_and_several_prompts_share_the_rest_of_a_step() {
    let running = [prefill(0, 300, 128), decoder(1, 21, 2)];
    let waiting = [prompt(2, 10), prompt(3, 500), prompt(4, 60)];
    let decision = decide(&running, &waiting, &Resources { rows: 320, ..plenty() }, &unpaced());
    // 3 + 172 + 10 rows leave 135: the next prompt's chunk ends with a page, and the last one finds no whole page.
    assert_eq!(rows(&decision), [(1, 3, 2), (0, 172, 0), (2, 10, 0), (3, 128, 0)]);
    assert_eq!(ids(&decision.admit), [2, 3]);
    assert_eq!(decision.waiting, Waiting { rows: 1, ..Waiting::default() });
    assert_eq!(decision.work.iter().map(|w| w.pages_after).collect::<Vec<_>>(), [1, 5, 1, 2]);
}

#[test]
fn a_prompt_that_finds_no_rows_is_not_overtaken_by_one_that_would() {
    let waiting = [prompt(1, 100), prompt(2, 500), prompt(3, 20)];
    let decision = decide(&[], &waiting, &Resources { rows: 150, ..plenty() }, &unpaced());
    // 50 rows are left: no whole page of the second one, all of the third.
    assert_eq!(rows(&decision), [(1, 100, 0)]);
    assert_eq!((ids(&decision.admit), decision.waiting.rows), (vec![1], 2));
}

#[test]
fn nothing_to_do_is_idle() {
    assert!(decide(&[], &[], &plenty(), &unpaced()).is_idle());
}

#[test]
fn chunks_end_with_pages_stops_or_the_known_tokens() {
    let chunk = |view: View, budget: usize| {
        let decision = decide(&[view], &[], &Resources { rows: budget, ..plenty() }, &unpaced());
        rows(&decision).first().map_or(0, |work| work.1)
    };
    assert_eq!(chunk(prefill(0, 1000, 0), 200), 192);
    assert_eq!(chunk(prefill(0, 1000, 10), 200), 182, "up to position 192");
    assert_eq!(chunk(prefill(0, 150, 64), 200), 86, "the end of the prompt");
    assert_eq!(chunk(View { next_stop: Some(128), ..prefill(0, 1000, 0) }, 900), 128);
    assert_eq!(chunk(View { next_stop: Some(100), ..prefill(0, 1000, 0) }, 900), 100);
    assert_eq!(chunk(View { next_stop: Some(64), ..prefill(0, 1000, 64) }, 200), 192, "a stop that is behind");
    assert_eq!(chunk(prefill(0, 1000, 0), 50), 50, "a step without room for a page still advances");
    let output = View { known: 700, prompt: 600, ..prefill(0, 600, 576) };
    assert_eq!(chunk(output, 200), 124, "a preempted sequence computes its output again");
}

#[test]
fn rows_of_a_scored_prompt_want_logits_and_are_capped() {
    let scored = View { max_rows: Some(48), ..prefill(0, 300, 0) };
    let decision = decide(&[scored, decoder(1, 30, 3)], &[], &Resources { logits: 40, ..plenty() }, &unpaced());
    assert_eq!(rows(&decision), [(1, 4, 3), (0, 36, 0)], "40 logits, of which the decoding rows want 4");
    assert!(decision.work[1].scored && !decision.work[0].scored);
    let decision = decide(&[scored], &[], &plenty(), &unpaced());
    assert_eq!(rows(&decision), [(0, 48, 0)]);
    let decision = decide(&[View { max_rows: Some(100), ..scored }], &[], &plenty(), &unpaced());
    assert_eq!(rows(&decision), [(0, 64, 0)]);
}

#[test]
fn a_prompt_does_not_end_without_a_logit_for_its_last_row() {
    let running = [decoder(0, 30, 0), decoder(1, 30, 0), prefill(2, 200, 0)];
    let decision = decide(&running, &[], &Resources { logits: 2, ..plenty() }, &unpaced());
    assert_eq!(rows(&decision), [(0, 1, 0), (1, 1, 0), (2, 192, 0)]);
    let decision = decide(&running, &[], &Resources { logits: 3, ..plenty() }, &unpaced());
    assert_eq!(rows(&decision)[2], (2, 200, 0));
}

#[test]
fn drafts_are_the_first_to_go_when_rows_logits_pages_or_the_length_are_short() {
    let running = [decoder(0, 64, 3), decoder(1, 30, 3)];
    let all = |resources: Resources| rows(&decide(&running, &[], &resources, &unpaced()));
    assert_eq!(all(plenty()), [(0, 4, 3), (1, 4, 3)]);
    assert_eq!(all(Resources { rows: 6, ..plenty() }), [(0, 4, 3), (1, 2, 1)]);
    assert_eq!(all(Resources { logits: 2, ..plenty() }), [(0, 1, 0), (1, 1, 0)]);
    // Position 63 fits the held page, drafts at 64 and on do not.
    assert_eq!(all(Resources { free_pages: 0, ..plenty() }), [(0, 1, 0), (1, 4, 3)]);
    let short = View { max_len: 66, ..running[0] };
    assert_eq!(rows(&decide(&[short], &[], &plenty(), &unpaced())), [(0, 2, 1)], "tokens 65 and 66");
    // A page's rows are kept for prompts, whatever is drafted.
    let tight = Resources { rows: 68, ..plenty() };
    let decision = decide(&[running[0], running[1], prefill(2, 500, 0)], &[], &tight, &unpaced());
    assert_eq!(rows(&decision), [(0, 3, 2), (1, 1, 0), (2, 64, 0)]);
    // No more than the pace gives them, where that is less.
    let mut slow = Rates::default();
    slow.record(1000, 0, 10.0);
    slow.record(0, 1, 0.2);
    let views = [running[0], running[1], prefill(2, 500, 0)];
    let paced = schedule(&Views { running: &views, waiting: &[] }, &tight, &Policy::default(), &slow, 1.0);
    assert_eq!(rows(&paced), [(0, 4, 3), (1, 4, 3), (2, 10, 0)]);
    // Not for those that cannot start.
    let full = Resources { sequences: 2, ..tight };
    let drafted = |resources: &Resources, policy: &Policy| {
        decide(&running, &[prompt(2, 500)], resources, policy).work.iter().map(|work| work.drafts).sum::<usize>()
    };
    assert_eq!((drafted(&tight, &unpaced()), drafted(&full, &unpaced())), (2, 6));
    assert_eq!(drafted(&Resources { step: 1, ..tight }, &Policy { interval: 2, ..unpaced() }), 6);
}

#[test]
fn with_fewer_rows_than_decoding_sequences_the_first_ones_go() {
    let running = [decoder(0, 10, 2), decoder(1, 10, 2), decoder(2, 10, 2)];
    let decision = decide(&running, &[], &Resources { rows: 2, ..plenty() }, &unpaced());
    assert_eq!(rows(&decision), [(0, 1, 0), (1, 1, 0)]);
}

#[test]
fn prompts_get_what_the_target_leaves() {
    let running = [decoder(0, 100, 0), prefill(1, 8000, 0)];
    let rows_at = |target: Option<f64>| {
        let policy = Policy { itl_target: target, ..Policy::default() };
        rows(&decide(&running, &[], &Resources { rows: 4097, ..plenty() }, &policy))[1].1
    };
    // (0.1 - 0.02) s at 10,000 tokens a second, whole pages.
    assert_eq!(rows_at(Some(0.1)), 768);
    // 0.03 s leave one page; half of them more is allowed.
    assert_eq!(rows_at(Some(0.03)), 128);
    // No target that decoding alone misses keeps prompts from half of that time, and 512 rows are enough of it.
    assert_eq!(rows_at(Some(0.01)), 64);
    let slow_decoding = |seconds: f64| {
        let mut rates = measured();
        (0..200).for_each(|_| rates.record(0, 1, seconds));
        let policy = Policy { itl_target: Some(0.01), ..Policy::default() };
        let views = Views { running: &running, waiting: &[] };
        rows(&schedule(&views, &Resources { rows: 4097, ..plenty() }, &policy, &rates, 1.0))[1].1
    };
    assert_eq!((slow_decoding(0.05), slow_decoding(1.0)), (192, 512));
    assert_eq!(rows_at(Some(10.0)), 4096);
    assert_eq!(rows_at(None), 4096);
    let alone = decide(&running[1..], &[], &Resources { rows: 4097, ..plenty() }, &Policy::default());
    assert_eq!(rows(&alone), [(1, 4096, 0)], "nobody decodes: no pace");
    let views = Views { running: &running, waiting: &[] };
    let unknown = schedule(&views, &plenty(), &Policy::default(), &Rates::default(), 1.0);
    assert_eq!(rows(&unknown)[1].1, 512, "unknown speed: the least quantum");
}

#[test]
fn the_least_quantum_follows_the_machine() {
    let running = [decoder(0, 100, 0), prefill(1, 8000, 0)];
    let views = Views { running: &running, waiting: &[] };
    let rows_at = |rate: f64| {
        let mut rates = Rates::default();
        rates.record(1000, 0, 1000.0 / rate);
        rates.record(0, 1, 0.2);
        rows(&schedule(&views, &plenty(), &Policy::default(), &rates, 1.0))[1].1
    };
    // Decoding takes 0.2 s, twice the target: prompts get 0.1 s.
    assert_eq!([5.0, 100.0, 1000.0, 3000.0, 100_000.0].map(rows_at), [1, 10, 64, 256, 512]);
}

#[test]
fn prompts_wait_for_their_interval_only_while_sequences_decode() {
    let policy = Policy { interval: 3, ..unpaced() };
    let at = |step: u64, running: &[View]| {
        let decision = decide(running, &[prompt(9, 10)], &Resources { step, ..plenty() }, &policy);
        (decision.work.len(), decision.waiting.rows)
    };
    assert_eq!(at(3, &[decoder(0, 10, 0), prefill(1, 500, 0)]), (3, 0));
    assert_eq!(at(4, &[decoder(0, 10, 0), prefill(1, 500, 0)]), (1, 1));
    assert_eq!(at(4, &[prefill(1, 500, 0)]), (2, 0));
}

#[test]
fn short_prompts_take_at_most_half_while_a_long_one_advances_and_unused_rows_go_back() {
    let long = prefill(0, 100_000, 640);
    let resources = Resources { rows: 2048, ..plenty() };
    let decision = decide(&[long], &[prompt(1, 5000), prompt(2, 5000)], &resources, &unpaced());
    assert_eq!(rows(&decision), [(0, 1024, 0), (1, 1024, 0)]);
    assert_eq!(decision.waiting, Waiting { rows: 1, ..Waiting::default() });
    // A little short one: the rest of its half goes to the long one.
    let decision = decide(&[long], &[prompt(1, 100)], &resources, &unpaced());
    assert_eq!(rows(&decision), [(0, 1920, 0), (1, 100, 0)]);
    // The end of the long one: what it does not need goes to short ones.
    let decision = decide(&[prefill(0, 10_000, 9900)], &[prompt(1, 5000)], &resources, &unpaced());
    assert_eq!(rows(&decision), [(0, 100, 0), (1, 1920, 0)]);
}

#[test]
fn one_long_prompt_at_a_time_and_short_ones_go_past_it() {
    let waiting = [prompt(1, 50_000), prompt(2, 60_000), prompt(3, 100)];
    let decision = decide(&[], &waiting, &plenty(), &unpaced());
    assert_eq!(ids(&decision.admit), [1, 3]);
    assert_eq!(decision.waiting, Waiting { lane: 1, ..Waiting::default() });
    // Nor does it matter to them that the second long one would not fit yet.
    let tight = Resources { free_pages: 1200, all_pages: 2000, ..plenty() };
    let decision = decide(&[prefill(0, 50_000, 64)], &waiting[1..], &tight, &unpaced());
    assert_eq!((ids(&decision.admit), decision.waiting.lane), (vec![3], 1));
    let two = Policy { long_prefills: 2, ..unpaced() };
    let decision = decide(&[prefill(0, 50_000, 64)], &waiting[..2], &plenty(), &two);
    assert_eq!(rows(&decision), [(0, 1024, 0), (1, 1024, 0)], "two abreast share evenly");
    // Uncached tokens count, and the lane is kept on the way.
    let hit = View { cached: 49_984, ..prompt(1, 50_000) };
    assert_eq!((hit.lane(&two), waiting[0].lane(&two)), (Lane::Short, Lane::Long));
    assert_eq!(prefill(0, 50_000, 49_000).lane(&two), Lane::Long);
}

#[test]
fn the_next_long_prompt_starts_in_the_step_in_which_the_last_one_ends() {
    let decision = decide(&[prefill(0, 50_000, 49_900)], &[prompt(1, 50_000)], &plenty(), &unpaced());
    assert_eq!(rows(&decision), [(0, 100, 0), (1, 1920, 0)]);
}

#[test]
fn long_prompts_go_by_what_is_left_and_how_old_they_are() {
    let at = |now: f64, waiting: &[View]| {
        let views = Views { running: &[], waiting };
        ids(&schedule(&views, &plenty(), &unpaced(), &measured(), now).admit)
    };
    let (large, small) = (prompt(0, 60_000), View { arrival: 5.0, ..prompt(1, 20_000) });
    assert_eq!(at(5.0, &[large, small]), [1], "40,000 tokens more, and 5 s older");
    let late = View { arrival: 8.1, ..small };
    assert_eq!(at(8.1, &[large, late]), [0], "8 s are worth 40,000 tokens");
    // A much shorter one goes before one that has begun, but no third one.
    let begun = prefill(0, 500_000, 100_000);
    let overtaken = decide(&[begun], &[small], &plenty(), &unpaced());
    assert_eq!(rows(&overtaken), [(1, 2048, 0)]);
    let third = decide(&[begun, prefill(1, 20_000, 64)], &[prompt(2, 9_000)], &plenty(), &unpaced());
    assert!(third.admit.is_empty());
}

#[test]
fn a_long_prompt_is_capped_unless_it_is_alone() {
    let policy = Policy { long_prefill_tokens: Some(256), ..unpaced() };
    let long = prefill(0, 50_000, 0);
    assert_eq!(rows(&decide(&[long], &[], &plenty(), &policy)), [(0, 2048, 0)]);
    let decision = decide(&[long, decoder(1, 10, 0)], &[], &plenty(), &policy);
    assert_eq!(rows(&decision), [(1, 1, 0), (0, 256, 0)]);
    let decision = decide(&[long], &[prompt(1, 5000)], &plenty(), &policy);
    assert_eq!(rows(&decision), [(0, 256, 0), (1, 1792, 0)]);
}

#[test]
fn priorities_order_the_queue_and_the_running_ones() {
    let urgent = View { priority: -1, ..prompt(3, 2000) };
    let waiting = [prompt(1, 2000), prompt(2, 2000), urgent];
    let policy = Policy { order: Order::Priority, ..unpaced() };
    assert_eq!(ids(&decide(&[], &waiting, &plenty(), &policy).admit), [3]);
    assert_eq!(ids(&decide(&[], &waiting, &plenty(), &unpaced()).admit), [1]);
    // A preempted one goes in front of its equals, not in front of more important ones.
    let back = View { preempted: 1, arrival: 9.0, ..prompt(4, 2000) };
    let waiting = [prompt(1, 2000), urgent, back];
    assert_eq!(ids(&decide(&[], &waiting, &plenty(), &policy).admit), [3]);
    assert_eq!(ids(&decide(&[], &waiting, &plenty(), &unpaced()).admit), [4]);
    let running = [prefill(1, 2000, 0), View { priority: -1, ..prefill(2, 2000, 0) }];
    assert_eq!(rows(&decide(&running, &[], &plenty(), &policy))[0], (2, 2000, 0));
}

#[test]
fn the_whole_prompt_must_fit_beside_what_admitted_prompts_still_need() {
    // 100 pages free, of which the running prompt still needs 40; one page is the reserve.
    let resources = Resources { rows: 64, free_pages: 100, all_pages: 100, ..plenty() };
    let running = [prefill(0, 41 * 64, 64)];
    let fits = |pages: usize, resources: &Resources| {
        let decision = decide(&running, &[prompt(1, pages * 64)], resources, &unpaced());
        (decision.admit.len(), decision.waiting.pages)
    };
    let both = Resources { rows: 192, ..resources };
    assert_eq!(fits(59, &Resources { rows: 41 * 64, ..resources }), (1, 0));
    assert_eq!(fits(60, &Resources { rows: 41 * 64, ..resources }), (0, 1));
    // Rows of this step change nothing about that.
    assert_eq!(fits(60, &both), (0, 1));
    // Two that fit alone do not both count on the same pages.
    let waiting = [prompt(1, 30 * 64), prompt(2, 30 * 64)];
    let decision = decide(&running, &waiting, &Resources { rows: 4096, ..resources }, &unpaced());
    assert_eq!((ids(&decision.admit), decision.waiting.pages), (vec![1], 1));
}

#[test]
fn a_shared_prefix_costs_nothing_and_an_unshared_one_what_it_holds() {
    let resources = Resources { free_pages: 20, all_pages: 200, ..plenty() };
    let running = [decoder(0, 6000, 0)];
    let hit = View { cached: 64 * 64, shared: 64, ..prompt(1, 80 * 64) };
    let decision = decide(&running, &[hit], &resources, &unpaced());
    assert_eq!(rows(&decision), [(0, 1, 0), (1, 16 * 64, 0)]);
    assert_eq!(decision.work[1].pages_after, 80);
    let decision = decide(&running, &[View { shared: 0, ..hit }], &resources, &unpaced());
    assert_eq!((decision.admit.len(), decision.waiting.pages), (0, 1));
}

#[test]
fn the_head_that_does_not_fit_holds_up_those_behind_it() {
    let resources = Resources { free_pages: 10, all_pages: 100, ..plenty() };
    let waiting = [prompt(1, 20 * 64), prompt(2, 10)];
    let decision = decide(&[decoder(0, 100, 0)], &waiting, &resources, &unpaced());
    assert!(decision.admit.is_empty() && decision.refuse.is_empty());
    assert_eq!(decision.waiting, Waiting { pages: 2, ..Waiting::default() });
    let decision = decide(&[decoder(0, 100, 0)], &waiting, &Resources { free_slots: 0, ..plenty() }, &unpaced());
    assert_eq!(decision.waiting, Waiting { slots: 2, ..Waiting::default() });
    let decision = decide(&[decoder(0, 100, 0)], &waiting, &Resources { sequences: 2, ..plenty() }, &unpaced());
    assert_eq!((ids(&decision.admit), decision.waiting.slots), (vec![1], 1));
}

#[test]
fn when_nothing_runs_the_head_is_admitted_or_refused_at_once() {
    // No reserve for an empty engine: a prompt of all pages is admitted.
    let resources = Resources { free_pages: 10, all_pages: 10, ..plenty() };
    let whole = View { max_len: 640, ..prompt(1, 640) };
    assert_eq!(ids(&decide(&[], &[whole], &resources, &unpaced()).admit), [1]);
    // Pages that somebody lost: what no longer fits fails, what does goes on.
    let lost = Resources { free_pages: 4, ..resources };
    let decision = decide(&[], &[whole, prompt(2, 65)], &lost, &unpaced());
    let (need_all, free) = (need(640), Need { slots: 64, pages: 4 });
    assert_eq!(decision.refuse, [(SequenceId(1), Refusal::Stuck { need: need_all, free })]);
    assert_eq!(ids(&decision.admit), [2]);
    let decision = decide(&[], &[whole], &Resources { free_slots: 0, ..plenty() }, &unpaced());
    assert!(matches!(decision.refuse[..], [(SequenceId(1), Refusal::Stuck { .. })]));
    // More than there is in all is refused whoever runs, and holds up nobody.
    let decision = decide(&[decoder(0, 10, 0)], &[prompt(1, 6500), prompt(2, 10)], &lost, &unpaced());
    let all = Need { slots: 64, pages: 10 };
    assert_eq!(decision.refuse, [(SequenceId(1), Refusal::Never { need: need(6564), all })]);
    assert_eq!(ids(&decision.admit), [2]);
    let text = decision.refuse[0].1.to_string();
    assert!(text.contains("103 pages") && text.contains("10 pages in all"), "{text}");
}

#[test]
fn whoever_loses_least_gives_way_but_never_one_that_came_before() {
    let none = Resources { free_pages: 0, all_pages: 100, ..plenty() };
    // The asking one is at a page's end; 1 came before it, 3 and 4 after it, 4 has computed less than 3.
    let asking = decoder(2, 65, 0);
    let running = [decoder(1, 70, 0), asking, decoder(3, 1000, 0), decoder(4, 500, 0)];
    let decision = decide(&running, &[prompt(9, 10)], &none, &unpaced());
    assert_eq!(ids(&decision.preempt), [4]);
    assert_eq!(rows(&decision), [(1, 1, 0), (2, 1, 0), (3, 1, 0)]);
    assert!(decision.admit.is_empty(), "what came free is not given away in the same step");
    // Nobody behind it: it gives way itself, and that ends it.
    let decision = decide(&running[..2], &[], &none, &unpaced());
    assert_eq!((ids(&decision.preempt), rows(&decision)), (vec![2], vec![(1, 1, 0)]));
    // What returns no page is no use as a victim.
    let shared = View { shared: 8, ..running[3] };
    let decision = decide(&[running[0], asking, running[2], shared], &[], &none, &unpaced());
    assert_eq!(ids(&decision.preempt), [3]);
}

#[test]
fn a_prompt_more_than_half_done_gives_way_to_nobody_who_came_later() {
    let none = Resources { free_pages: 0, all_pages: 100, ..plenty() };
    let policy = Policy { order: Order::Priority, ..unpaced() };
    let urgent = View { priority: -1, ..decoder(5, 65, 0) };
    let preempted = |prompt: View| ids(&decide(&[prompt, urgent], &[], &none, &policy).preempt);
    assert_eq!(preempted(prefill(1, 1000, 448)), [1]);
    assert_eq!(preempted(prefill(1, 1000, 512)), [5], "rather itself");
    assert_eq!(preempted(prefill(9, 1000, 512)), [9], "it came later");
    // The least important one goes first, whatever it has computed.
    let others = [View { priority: 2, ..decoder(1, 900, 0) }, View { priority: 1, ..decoder(2, 100, 0) }, urgent];
    assert_eq!(ids(&decide(&others, &[], &none, &policy).preempt), [1]);
}

#[test]
fn when_prompts_hold_every_page_the_first_goes_on() {
    let none = Resources { free_pages: 0, all_pages: 20, ..plenty() };
    let decision = decide(&[prefill(1, 1000, 640), prefill(2, 1000, 640)], &[], &none, &unpaced());
    assert_eq!((ids(&decision.preempt), rows(&decision)), (vec![2], vec![(1, 360, 0)]));
    // Alone and without pages it gives way, to be refused when its turn comes.
    let decision = decide(&[prefill(1, 1000, 640)], &[], &none, &unpaced());
    assert_eq!((ids(&decision.preempt), rows(&decision)), (vec![1], vec![]));
}

#[test]
fn boot_sizes_come_from_the_same_need() {
    let all = Need { slots: 8, pages: 10 };
    assert!(boot_check(640, all).is_ok());
    assert_eq!(boot_check(641, all), Err(Refusal::Never { need: need(641), all }));
    assert!(boot_check(1, Need { slots: 0, pages: 10 }).is_err());
    assert_eq!((most_sequences(4, all), most_sequences(100, all)), (4, 8));
    assert_eq!(most_sequences(100, Need { slots: 100, pages: 30 }), 30);
}

proptest::proptest! {
    /// Whatever passes the proof at boot is admitted into empty caches in the first step.
    #[test]
    fn every_length_within_the_boot_proof_is_admitted(
        most in 1usize..200_000, share in 0.0f64..=1.0, spare in 0usize..50, watermark in 0.0f64..0.99, logits in 1usize..4,
        rows in 1usize..5000, priority: bool, cached in 0.0f64..1.0, scored: bool,
    ) {
        let pages = need(most).pages + spare;
        let all = Need { slots: 1, pages };
        proptest::prop_assert!(boot_check(most, all).is_ok());
        let known = ((most as f64 * share) as usize).max(1);
        let cached = ((known - 1) as f64 * cached) as usize / 64 * 64;
        let view = View { max_len: most, cached, max_rows: scored.then_some(64), ..prompt(1, known) };
        let order = if priority { Order::Priority } else { Order::Fcfs };
        let policy = Policy { watermark, order, ..Policy::default() };
        let resources = Resources { rows, logits, free_slots: 1, free_pages: pages, all_pages: pages, sequences: 1, step: 5 };
        let decision = decide(&[], &[view], &resources, &policy);
        proptest::prop_assert_eq!(ids(&decision.admit), [1]);
        proptest::prop_assert!(decision.work.len() == 1 && decision.work[0].rows > 0 && decision.refuse.is_empty());
        proptest::prop_assert!(decision.work[0].pages_after <= pages && decision.work[0].rows <= rows);
        // And whatever does not pass it is refused, whatever is free.
        let beyond = View { max_len: pages * 64 + 1, ..view };
        let decision = decide(&[], &[beyond], &resources, &policy);
        let never = matches!(decision.refuse[..], [(SequenceId(1), Refusal::Never { .. })]);
        proptest::prop_assert!(never);
    }
}
