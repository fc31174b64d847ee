//! An engine without a model: it keeps the books that a real one keeps, takes virtual time for every step, and checks every
//! decision against them.

use std::collections::{HashMap, HashSet};

use glimmer_engine::{
    SequenceId,
    policy::{Order, Policy},
    pools::need,
    rates::Rates,
    schedule::{Decision, Lane, Refusal, Resources, View, Views, Work, schedule},
};
use glimmer_tensor::PAGE_TOKENS;

/// A stream of numbers, the same in every run.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0xd1b5_4a32_d192_ed03)
    }

    pub(crate) fn unit(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// From `low` to `high`, both possible.
    pub(crate) fn within(&mut self, low: usize, high: usize) -> usize {
        low + (self.unit() * (high - low + 1) as f64) as usize
    }

    pub(crate) fn chance(&mut self, share: f64) -> bool {
        self.unit() < share
    }
}

/// What a request will turn out to be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ask {
    pub(crate) arrival: f64,
    pub(crate) prompt: usize,
    pub(crate) output: usize,
    pub(crate) max_len: usize,
    pub(crate) priority: i64,
    /// Tokens of a prefix hit.
    pub(crate) cached: usize,
    pub(crate) scored: Option<usize>,
    /// Positions at which chunks must stop.
    pub(crate) stops: Option<usize>,
    pub(crate) abort: Option<f64>,
}

impl Ask {
    pub(crate) fn new(arrival: f64, prompt: usize, output: usize) -> Self {
        let max_len = prompt + output;
        Self { arrival, prompt, output, max_len, priority: 0, cached: 0, scored: None, stops: None, abort: None }
    }
}

/// How long steps take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Speed {
    /// Seconds of any step.
    pub(crate) step: f64,
    /// Seconds of a decoding row.
    pub(crate) row: f64,
    /// Prompt rows a second, at position 0.
    pub(crate) rate: f64,
    /// Position at which prompt rows take twice as long.
    pub(crate) slower: f64,
    /// Random share by which a step is faster or slower.
    pub(crate) noise: f64,
}

impl Speed {
    pub(crate) fn steady(rate: f64) -> Self {
        Self { step: 0.010, row: 0.0005, rate, slower: f64::INFINITY, noise: 0.0 }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Finished,
    Refused,
    Aborted,
}

/// What became of a request.
#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    pub(crate) end: End,
    pub(crate) first_token: Option<f64>,
    /// Times of steps that brought tokens.
    pub(crate) tokens: Vec<f64>,
    pub(crate) preempted: u32,
    /// Positions computed for it, those of a prefix hit not included; more than once after a preemption.
    pub(crate) rows: usize,
}

/// Who decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decider {
    Scheduler,
    /// Every prompt gets an equal part of the rows in every step: what the lanes are measured against.
    RoundRobin,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) now: f64,
    pub(crate) policy: Policy,
    pub(crate) limits: Resources,
    pub(crate) speed: Speed,
    pub(crate) depth: usize,
    pub(crate) decider: Decider,
    pub(crate) rates: Rates,
    asks: Vec<Ask>,
    pub(crate) outcomes: Vec<Outcome>,
    running: Vec<View>,
    waiting: Vec<View>,
    free_pages: usize,
    free_slots: usize,
    random: Random,
    /// Steps in a row without a row.
    barren: usize,
    pub(crate) most_running: usize,
}

impl World {
    /// `asks` in order of arrival; `limits` says what there is in all.
    pub(crate) fn new(asks: Vec<Ask>, limits: Resources, policy: Policy, speed: Speed, seed: u64) -> Self {
        let outcome = Outcome { end: End::Aborted, first_token: None, tokens: Vec::new(), preempted: 0, rows: 0 };
        Self {
            now: 0.0,
            policy,
            limits,
            speed,
            depth: 0,
            decider: Decider::Scheduler,
            rates: Rates::default(),
            outcomes: vec![outcome; asks.len()],
            asks,
            running: Vec::new(),
            waiting: Vec::new(),
            free_pages: limits.all_pages,
            free_slots: limits.free_slots,
            random: Random::new(seed),
            barren: 0,
            most_running: 0,
        }
    }

    /// Runs until every request has ended, and checks that everything came back.
    pub(crate) fn run(&mut self) {
        let rows: usize = self.asks.iter().map(|ask| ask.prompt + ask.output).sum();
        let (mut next, mut steps) = (0, 0);
        let abort = |(index, ask): (usize, &Ask)| ask.abort.map(|time| (time, index));
        let mut aborts: Vec<(f64, usize)> = self.asks.iter().enumerate().filter_map(abort).collect();
        aborts.sort_by(|a, b| b.0.total_cmp(&a.0));
        loop {
            if self.running.is_empty() && self.waiting.is_empty() {
                match self.asks.get(next) {
                    Some(ask) => self.now = self.now.max(ask.arrival),
                    None => break,
                }
            }
            while let Some(ask) = self.asks.get(next).filter(|ask| ask.arrival <= self.now) {
                self.waiting.push(Self::waiting_view(next, ask, self.depth));
                next += 1;
            }
            while let Some(&(_, index)) = aborts.last().filter(|&&(time, index)| time <= self.now && index < next) {
                aborts.pop();
                self.abort(index);
            }
            self.step();
            steps += 1;
            assert!(
                steps < 1000 + 4 * rows,
                "it goes round in circles: {} left",
                self.running.len() + self.waiting.len()
            );
        }
        assert_eq!((self.free_pages, self.free_slots), (self.limits.all_pages, self.limits.free_slots), "a leak");
    }

    fn waiting_view(index: usize, ask: &Ask, drafts: usize) -> View {
        View {
            id: SequenceId(index as u64),
            arrival: ask.arrival,
            priority: ask.priority,
            prompt: ask.prompt,
            known: ask.prompt,
            computed: 0,
            drafts: drafts.min(ask.output.saturating_sub(1)),
            decoding: false,
            pages: 0,
            shared: 0,
            next_stop: ask.stops.map(|every| (ask.cached / every + 1) * every),
            max_rows: ask.scored,
            cached: ask.cached,
            preempted: 0,
            max_len: ask.max_len,
        }
    }

    fn abort(&mut self, index: usize) {
        let id = SequenceId(index as u64);
        self.waiting.retain(|view| view.id != id);
        if let Some(at) = self.running.iter().position(|view| view.id == id) {
            self.release(at);
        }
    }

    fn release(&mut self, at: usize) -> View {
        let view = self.running.remove(at);
        self.free_pages += view.pages;
        self.free_slots += 1;
        view
    }

    fn step(&mut self) {
        let resources = Resources { free_slots: self.free_slots, free_pages: self.free_pages, ..self.limits };
        self.limits.step += 1;
        let views = Views { running: &self.running, waiting: &self.waiting };
        let decision = match self.decider {
            Decider::Scheduler => {
                let decision = schedule(&views, &resources, &self.policy, &self.rates, self.now);
                let again = schedule(&views, &resources, &self.policy, &self.rates, self.now);
                assert_eq!(decision, again, "a decision depends on what it is given alone");
                decision
            }
            Decider::RoundRobin => self.round_robin(),
        };
        self.check_moves(&decision);
        for id in &decision.preempt {
            let at = self.running.iter().position(|view| view.id == *id).expect("a running one");
            let view = self.release(at);
            self.outcomes[id.0 as usize].preempted += 1;
            let ask = &self.asks[id.0 as usize];
            let fresh = Self::waiting_view(id.0 as usize, ask, self.depth);
            self.waiting.push(View { known: view.known, preempted: view.preempted + 1, max_rows: None, ..fresh });
        }
        for (id, _) in &decision.refuse {
            self.outcomes[id.0 as usize].end = End::Refused;
            self.waiting.retain(|view| view.id != *id);
        }
        for id in &decision.admit {
            let at = self.waiting.iter().position(|view| view.id == *id).expect("a waiting one");
            let view = self.waiting.remove(at);
            let pages = view.cached / PAGE_TOKENS;
            self.free_slots = self.free_slots.checked_sub(1).expect("a free slot");
            self.free_pages = self.free_pages.checked_sub(pages).expect("pages of the hit");
            self.running.push(View { computed: view.cached, pages, ..view });
        }
        self.most_running = self.most_running.max(self.running.len());
        assert!(self.running.len() <= self.limits.sequences);
        self.work(&decision);
    }

    /// Who is moved, and in which order.
    fn check_moves(&self, decision: &Decision) {
        let fcfs = self.policy.order == Order::Fcfs;
        let gone = |view: &View| decision.preempt.contains(&view.id);
        let first = self.running.iter().min_by(|a, b| a.arrival.total_cmp(&b.arrival).then(a.id.cmp(&b.id)));
        if fcfs && first.is_some_and(gone) {
            assert!(self.running.iter().all(|v| gone(v) || v.pages == 0), "the first gives way to nobody");
        }
        for (id, refusal) in &decision.refuse {
            let view = self.waiting.iter().find(|view| view.id == *id).expect("a waiting one");
            let fits = need(view.max_len).pages <= self.limits.all_pages;
            assert!(
                matches!(refusal, Refusal::Never { .. }) && !fits,
                "{refusal}: without leaks nothing else is refused"
            );
        }
        if !decision.preempt.is_empty() {
            assert!(decision.admit.is_empty());
        }
        // Nobody starts before another one of its lane that came first, unless the other is much longer.
        let left = |view: &View| (view.known - view.cached) as f64;
        for id in decision.admit.iter().filter(|_| fcfs) {
            let view = self.waiting.iter().find(|view| view.id == *id).expect("a waiting one");
            let stays = |v: &&View| {
                let moved = decision.admit.contains(&v.id) || decision.refuse.iter().any(|(id, _)| *id == v.id);
                !moved && v.lane(&self.policy) == view.lane(&self.policy)
            };
            for other in self.waiting.iter().filter(stays) {
                let (ahead, age) = (other.preempted > 0, view.arrival - other.arrival);
                match view.lane(&self.policy) {
                    Lane::Short => assert!(!ahead && age <= 0.0 || view.preempted > 0, "{view:?} before {other:?}"),
                    Lane::Long => {
                        let rate = self.rates.prefill_rate().unwrap_or(0.0);
                        assert!(age * rate * 0.5 <= left(other) - left(view) + 1e-6, "{view:?} before {other:?}");
                    }
                }
            }
        }
    }

    fn work(&mut self, decision: &Decision) {
        let (mut prompt_rows, mut decode_rows, mut logits, mut seconds) = (0, 0, 0, 0.0);
        let mut seen = HashSet::new();
        let is_prompt = |work: &&Work| self.running.iter().any(|view| view.id == work.id && !view.decoding);
        let all_rows = decision.work.iter().filter(is_prompt).map(|work| work.rows).sum();
        let places: HashMap<SequenceId, usize> = self.running.iter().enumerate().map(|(i, v)| (v.id, i)).collect();
        for work in &decision.work {
            assert!(seen.insert(work.id), "one piece of work a sequence");
            let view = &mut self.running[places[&work.id]];
            assert!(work.rows > 0 && work.drafts <= view.drafts);
            let end = view.computed + work.rows;
            assert!(work.pages_after >= need(end).pages && work.pages_after >= view.pages);
            let further = work.pages_after - view.pages;
            self.free_pages = self.free_pages.checked_sub(further).expect("free pages");
            view.pages = work.pages_after;
            if view.decoding {
                assert_eq!(work.rows, 1 + work.drafts);
                assert!(end <= view.max_len, "rows beyond the longest sequence");
                decode_rows += work.rows;
                logits += work.rows;
            } else {
                check_chunk(view, work, all_rows);
                logits += if work.scored { work.rows } else { usize::from(end == view.known) };
                seconds += work.rows as f64 / self.speed.rate * (1.0 + view.computed as f64 / self.speed.slower);
                prompt_rows += work.rows;
            }
        }
        assert!(prompt_rows + decode_rows <= self.limits.rows && logits <= self.limits.logits);
        let served = |view: &View| !view.decoding || seen.contains(&view.id);
        assert!(self.running.iter().all(served), "every decoding sequence has a row in every step");
        if decision.work.is_empty() {
            self.barren = if decision.refuse.is_empty() { self.barren + 1 } else { 0 };
            assert!(self.barren <= 1, "nothing moves: {:?} {:?}", self.running, self.waiting);
            return;
        }
        self.barren = 0;
        seconds += self.speed.step + decode_rows as f64 * self.speed.row;
        seconds *= 1.0 + self.speed.noise * (2.0 * self.random.unit() - 1.0);
        self.now += seconds;
        self.rates.record(prompt_rows, decode_rows, seconds);
        let mut ended = Vec::new();
        for work in &decision.work {
            let place = places[&work.id];
            if self.advance(place, work) {
                ended.push(place);
            }
        }
        ended.sort_unstable();
        for place in ended.into_iter().rev() {
            self.release(place);
        }
    }

    /// Takes in a sequence's rows; whether it has ended.
    fn advance(&mut self, place: usize, work: &Work) -> bool {
        let view = &mut self.running[place];
        let ask = &self.asks[view.id.0 as usize];
        let outcome = &mut self.outcomes[view.id.0 as usize];
        let end = view.computed + work.rows - work.drafts;
        view.next_stop = ask.stops.map(|every| (end / every + 1) * every);
        outcome.rows += work.rows - work.drafts;
        if end < view.known {
            view.computed = end;
            return false;
        }
        let accepted = if work.drafts > 0 { self.random.within(0, work.drafts) } else { 0 };
        outcome.rows += accepted;
        view.computed = end + accepted;
        view.known = view.computed + 1;
        view.decoding = true;
        view.drafts = if self.depth > 0 { self.random.within(0, self.depth) } else { 0 };
        outcome.first_token.get_or_insert(self.now);
        outcome.tokens.push(self.now);
        assert!(view.known <= view.max_len, "longer than it may become");
        let done = view.known - view.prompt >= ask.output || view.known == view.max_len;
        if done {
            outcome.end = End::Finished;
        }
        done
    }

    fn round_robin(&self) -> Decision {
        let mut decision = Decision::default();
        let newcomers = self.waiting.iter().map(|view| View { pages: 0, ..*view });
        let all: Vec<View> = self.running.iter().copied().chain(newcomers).collect();
        decision.admit = self.waiting.iter().map(|view| view.id).collect();
        let decoding = all.iter().filter(|view| view.decoding).count();
        let target = self.policy.itl_target.expect("a pace");
        let paced = self.rates.prompt_rows_within(target, decoding).unwrap_or(0).max(self.policy.min_quantum);
        let quantum = if decoding > 0 { paced } else { usize::MAX }.min(self.limits.rows - decoding);
        let each = (quantum / (all.len() - decoding).max(1) / PAGE_TOKENS).max(1) * PAGE_TOKENS;
        for view in &all {
            let rows = if view.decoding { 1 } else { each.min(view.known - view.computed) };
            let pages_after = need(view.computed + rows).pages.max(view.pages);
            decision.work.push(Work { id: view.id, rows, drafts: 0, pages_after, scored: false });
        }
        decision
    }
}

/// A chunk stays within the known tokens, its cap and the next stop, and ends in one of the places where it may. The step has
/// `all_rows` prompt rows.
fn check_chunk(view: &View, work: &Work, all_rows: usize) {
    let end = view.computed + work.rows;
    assert!(end <= view.known && work.drafts == 0);
    assert!(view.max_rows.is_none_or(|most| work.rows <= most));
    assert!(view.next_stop.is_none_or(|stop| view.computed >= stop || end <= stop));
    let placed = end == view.known || Some(end) == view.next_stop || end.is_multiple_of(PAGE_TOKENS);
    // With hardly any rows for prompts in the step a chunk may end anywhere, as may one whose rows all want logits.
    assert!(placed || work.scored || all_rows < 2 * PAGE_TOKENS, "{view:?} {work:?}");
}

/// The value that a share of the values do not exceed.
pub(crate) fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share).round() as usize]
}
