//! What a soak found.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use super::asks::Ask;
use super::http::{Connection, Request};
use super::server::{Figures, KEY, Server};
use super::{SETTLE, SoakOptions, excerpt};
use crate::exactness::Dice;

/// Tokens of an answer that holds a slot: two pages, so that the answers of all slots fit beside each other.
const REFILL_TOKENS: u32 = 120;
/// Problems told in full.
const TOLD: usize = 20;

/// Resident memory over the run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Memory {
    /// Seconds since the start, MiB.
    pub samples: Vec<(f64, f64)>,
}

impl Memory {
    /// Growth that counts as none, relative to the third quarter's peak. Allocators keep what they were once given, so peaks
    /// are compared, not means.
    const FLAT: f64 = 0.03;
    /// Fewer samples say nothing.
    const ENOUGH: usize = 300;

    /// Highest of a share of the samples.
    fn peak(&self, from: f64, to: f64) -> f64 {
        let at = |share: f64| (self.samples.len() as f64 * share) as usize;
        self.samples[at(from)..at(to)].iter().map(|sample| sample.1).fold(0.0, f64::max)
    }

    /// Whether the last quarter needed no more than the one before; `None` for a run too short to tell.
    #[must_use]
    pub fn flat(&self) -> Option<bool> {
        let enough = self.samples.len() >= Self::ENOUGH;
        enough.then(|| self.peak(0.75, 1.0) <= self.peak(0.5, 0.75) * (1.0 + Self::FLAT))
    }

    /// Peaks of the four quarters in MiB.
    #[must_use]
    pub fn quarters(&self) -> [f64; 4] {
        [0.0, 0.25, 0.5, 0.75].map(|from| self.peak(from, from + 0.25))
    }
}

/// An answer that will be repeated.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) ask: Ask,
    pub(super) essence: Value,
}

/// What clients count.
#[derive(Debug, Default)]
pub(super) struct Tally {
    kinds: BTreeMap<&'static str, u64>,
    refusals: BTreeMap<u16, u64>,
    pub(super) left: u64,
    pub(super) too_late: u64,
    most_running: f64,
    most_waiting: f64,
    most_page_use: f64,
    pub(super) problem_count: u64,
    problems: Vec<String>,
    pub(super) samples: Vec<Sample>,
}

impl Tally {
    pub(super) fn answers(&self) -> u64 {
        self.kinds.values().sum()
    }

    pub(super) fn refused(&self) -> u64 {
        self.refusals.values().sum()
    }

    pub(super) fn answered(&mut self, kind: &'static str) {
        *self.kinds.entry(kind).or_default() += 1;
    }

    pub(super) fn refuse(&mut self, status: u16) {
        *self.refusals.entry(status).or_default() += 1;
    }

    pub(super) fn seen(&mut self, figures: &Figures) {
        self.most_running = self.most_running.max(figures.running);
        self.most_waiting = self.most_waiting.max(figures.waiting);
        self.most_page_use = self.most_page_use.max(figures.page_use);
    }

    pub(super) fn problem(&mut self, problem: String) {
        self.problem_count += 1;
        if self.problems.len() < TOLD {
            self.problems.push(problem);
        }
    }

    /// Keeps `most` of all answers, each with the same chance. To be called after [`Tally::answered`].
    pub(super) fn sample(&mut self, sample: Sample, most: usize, dice: &mut Dice) {
        let place = dice.below(self.answers() as usize);
        if self.samples.len() < most {
            self.samples.push(sample);
        } else if let Some(kept) = self.samples.get_mut(place) {
            *kept = sample;
        }
    }
}

/// The result.
#[derive(Clone, Debug, Serialize)]
pub struct SoakReport {
    /// Clients.
    pub clients: usize,
    /// Most running sequences.
    pub sequences: usize,
    /// Seed.
    pub seed: u64,
    /// From the first request to the end of the last one.
    pub seconds: f64,
    /// Answers by kind.
    pub answers: BTreeMap<&'static str, u64>,
    /// Refusals that were asked for, by status.
    pub refusals: BTreeMap<u16, u64>,
    /// Clients that went in the middle.
    pub left: u64,
    /// Clients that meant to go and were answered before.
    pub too_late: u64,
    /// Tokens of all answers, also of those that nobody waited for.
    pub generated_tokens: f64,
    /// Answers that the server counts as aborted.
    pub aborts: f64,
    /// Preemptions.
    pub preemptions: f64,
    /// Share of prompt tokens that came from the prefix cache.
    pub prefix_hit_rate: f64,
    /// Pictures whose features were there already.
    pub image_hits: f64,
    /// Drafts that stood.
    pub accepted_drafts: f64,
    /// Most requests seen running, waiting, and the highest share of pages held.
    pub peaks: [f64; 3],
    /// Resident memory.
    pub memory: Memory,
    /// Whether nothing ran, waited or was held after the last client.
    pub idle: bool,
    /// Whether all slots could be lent at once after that.
    pub refilled: bool,
    /// Answers repeated alone.
    pub compared: usize,
    /// Of them with another result.
    pub different: usize,
    /// Everything that was not as it should be.
    pub problem_count: u64,
    /// The first of them, in words.
    pub problems: Vec<String>,
}

impl SoakReport {
    pub(super) fn new(options: &SoakOptions, seconds: f64, memory: Memory) -> Self {
        Self {
            clients: options.clients,
            sequences: options.sequences,
            seed: options.seed,
            seconds,
            answers: BTreeMap::new(),
            refusals: BTreeMap::new(),
            left: 0,
            too_late: 0,
            generated_tokens: 0.0,
            aborts: 0.0,
            preemptions: 0.0,
            prefix_hit_rate: 0.0,
            image_hits: 0.0,
            accepted_drafts: 0.0,
            peaks: [0.0; 3],
            memory,
            idle: false,
            refilled: false,
            compared: 0,
            different: 0,
            problem_count: 0,
            problems: Vec::new(),
        }
    }

    /// Whether everything was as it should be.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.problem_count == 0 && self.compared > 0 && self.idle && self.refilled && self.memory.flat() != Some(false)
    }

    pub(super) fn problem(&mut self, problem: String) {
        self.problem_count += 1;
        if self.problems.len() < TOLD {
            self.problems.push(problem);
        }
    }

    /// Adds what clients counted.
    pub(super) fn take(&mut self, tally: Tally) {
        self.answers = tally.kinds;
        self.refusals = tally.refusals;
        (self.left, self.too_late) = (tally.left, tally.too_late);
        self.peaks = [tally.most_running, tally.most_waiting, tally.most_page_use];
        self.problem_count += tally.problem_count;
        self.problems.splice(0..0, tally.problems);
        self.problems.truncate(TOLD);
    }

    pub(super) fn compare(&mut self, ask: &Ask, expected: &Value, found: &Value) {
        self.compared += 1;
        if expected != found {
            self.different += 1;
            self.problem(format!("{}: {} under load was {expected}, alone {found}", ask.kind, excerpt(&ask.body)));
        }
    }

    /// Looks at a server whose clients have gone: it must be idle, and able to run as many sequences as before.
    pub(super) fn settle(&mut self, server: &Server, sequences: usize) {
        match server.figures_until(SETTLE, Figures::idle) {
            Ok(figures) => {
                self.idle = figures.idle();
                self.generated_tokens = figures.generated_tokens;
                self.aborts = figures.aborts;
                self.preemptions = figures.preemptions;
                self.prefix_hit_rate = figures.prefix_hits / figures.prefix_queries.max(1.0);
                self.image_hits = figures.image_hits;
                self.accepted_drafts = figures.accepted_drafts;
                if !self.idle {
                    self.problem(format!("{} s after the last client: {figures:?}", SETTLE.as_secs()));
                }
                if figures.errors > 0.0 {
                    self.problem(format!("the engine failed {} requests", figures.errors));
                }
            }
            Err(problem) => self.problem(problem),
        }
        match refill(server, sequences) {
            Ok(()) => self.refilled = true,
            Err(problem) => self.problem(problem),
        }
    }
}

/// Fills every slot at the same time and empties them again.
fn refill(server: &Server, sequences: usize) -> Result<(), String> {
    let body = serde_json::json!({"prompt": "one", "max_tokens": REFILL_TOKENS, "ignore_eos": true, "stream": true})
        .to_string();
    let body = body.as_bytes();
    let request = Request { method: "POST", path: "/v1/completions", kind: "application/json", key: KEY, body };
    let mut connections = Vec::with_capacity(sequences);
    for _ in 0..sequences {
        let mut connection = Connection::open(server.address).map_err(|error| format!("refilling: {error}"))?;
        connection.send(&request, body.len()).map_err(|error| format!("refilling: {error}"))?;
        connections.push(connection);
    }
    let all = sequences as f64;
    let full = server.figures_until(SETTLE, |figures| figures.running >= all)?;
    drop(connections);
    let empty = server.figures_until(SETTLE, Figures::idle)?;
    match (full.running >= all, empty.idle()) {
        (true, true) => Ok(()),
        (false, _) => Err(format!("only {} of {sequences} slots can be lent: {full:?}", full.running)),
        (true, false) => Err(format!("not empty again after all had gone: {empty:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(mib: impl Fn(usize) -> f64) -> Memory {
        Memory { samples: (0..400).map(|second| (second as f64, mib(second))).collect() }
    }

    #[test]
    fn memory_is_flat_when_the_last_quarter_needs_no_more() {
        assert_eq!(memory(|_| 100.0).flat(), Some(true));
        assert_eq!(memory(|second| 100.0 + second.min(200) as f64).flat(), Some(true));
        assert_eq!(memory(|second| 100.0 + second as f64).flat(), Some(false));
        assert_eq!(Memory { samples: vec![(0.0, 1.0)] }.flat(), None);
        let quarters = memory(|second| second as f64).quarters().map(|mib| mib as u64);
        assert_eq!(quarters, [99, 199, 299, 399]);
    }

    #[test]
    fn every_answer_has_the_same_chance_to_be_kept() {
        let ask = crate::soak::asks::Material::new(0).expect("made").ask(&mut Dice::new(0));
        let (mut tally, mut dice) = (Tally::default(), Dice::new(1));
        for number in 0..1000 {
            tally.answered("text");
            tally.sample(Sample { ask: ask.clone(), essence: number.into() }, 100, &mut dice);
        }
        assert_eq!(tally.samples.len(), 100);
        let late = tally.samples.iter().filter(|sample| sample.essence.as_u64() >= Some(500)).count();
        assert!((35..65).contains(&late), "{late} of 100 from the later half");
    }
}
