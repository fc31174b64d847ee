//! What a run comes to.
//!
//! A request is sent at `s` and its content arrives in events at `t_1 <= ... <= t_m`. Time to first token (TTFT) is
//! `t_1 - s`, end-to-end latency (E2EL) `t_m - s`, inter-token latencies (ITL) are all `t_i - t_(i-1)` of all requests
//! together: per event, so that one spans several tokens where several arrive at once. Time per output token (TPOT) is
//! `(E2EL - TTFT) / (output tokens - 1)` of requests with more than one. The duration reaches from the first send to the
//! end of the last answer. Failed requests count as failed and nowhere else.

use super::exchange::Outcome;
use super::statistics::Sample;

/// A measured quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Time to first token.
    Ttft,
    /// Time per output token.
    Tpot,
    /// Inter-token latency.
    Itl,
    /// End-to-end latency.
    E2el,
    /// Time that requests waited in the client for their turn.
    Queue,
    /// End-to-end latency with that time.
    QueuedE2el,
}

impl Metric {
    /// All of them in the order of reports.
    pub const ALL: [Self; 6] = [Self::Ttft, Self::Tpot, Self::Itl, Self::E2el, Self::Queue, Self::QueuedE2el];

    /// Name in flags and keys.
    #[must_use]
    pub fn key(self) -> &'static str {
        match self {
            Self::Ttft => "ttft",
            Self::Tpot => "tpot",
            Self::Itl => "itl",
            Self::E2el => "e2el",
            Self::Queue => "client_queue_time",
            Self::QueuedE2el => "e2el_including_client_queue",
        }
    }

    /// Short name in tables.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Ttft => "TTFT",
            Self::Tpot => "TPOT",
            Self::Itl => "ITL",
            Self::E2el => "E2EL",
            Self::Queue => "Client Queue Time",
            Self::QueuedE2el => "E2EL incl. Client Queue",
        }
    }

    /// Heading in tables.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::Ttft => "Time to First Token",
            Self::Tpot => "Time per Output Token (excl. 1st token)",
            Self::Itl => "Inter-token Latency",
            Self::E2el => "End-to-end Latency",
            Self::Queue => "Client-side Queueing",
            Self::QueuedE2el => "Queue-inclusive End-to-end Latency",
        }
    }
}

/// Upper limits that a good request keeps, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Goodput {
    /// Of the time to first token.
    pub ttft: Option<f64>,
    /// Of the time per output token.
    pub tpot: Option<f64>,
    /// Of the end-to-end latency.
    pub e2el: Option<f64>,
}

impl Goodput {
    fn keeps(&self, outcome: &Outcome, tpot: Option<f64>) -> bool {
        let within = |limit: Option<f64>, seconds: f64| limit.is_none_or(|limit| seconds <= limit / 1000.0);
        within(self.ttft, outcome.ttft())
            && within(self.tpot, tpot.unwrap_or(0.0))
            && within(self.e2el, outcome.latency())
    }
}

/// Sums and samples of a run; times in seconds.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// First send to last end.
    pub duration: f64,
    /// Answers that came whole.
    pub completed: usize,
    /// The others.
    pub failed: usize,
    /// Of the failed, those that took too long.
    pub timed_out: usize,
    /// Tokens of the prompts of whole answers.
    pub input_tokens: usize,
    /// Tokens of whole answers.
    pub output_tokens: usize,
    /// Tokens of each answer, 0 of those that failed.
    pub output_lengths: Vec<usize>,
    /// Answers that keep the limits.
    pub good: Option<usize>,
    /// Most events within one second of the run.
    pub peak_events: usize,
    /// Most requests under way at the same time.
    pub peak_requests: usize,
    samples: [Sample; Metric::ALL.len()],
}

impl Summary {
    /// Sums up outcomes. `count` counts the tokens of an answer whose server does not.
    #[must_use]
    pub fn new(outcomes: &[Outcome], goodput: Option<&Goodput>, count: &dyn Fn(&str) -> usize) -> Self {
        let length = |outcome: &Outcome| match outcome.output_tokens {
            _ if !outcome.succeeded() => 0,
            Some(tokens) if tokens > 0 => tokens,
            _ => count(&outcome.text),
        };
        let output_lengths: Vec<usize> = outcomes.iter().map(length).collect();
        let tpot = |(outcome, &tokens): (&Outcome, &usize)| {
            (tokens > 1).then(|| (outcome.latency() - outcome.ttft()) / (tokens - 1) as f64)
        };
        let whole = || outcomes.iter().zip(&output_lengths).filter(|(outcome, _)| outcome.succeeded());
        let sample = |of: &dyn Fn(&Outcome) -> f64| Sample::new(whole().map(|(outcome, _)| of(outcome)));
        let first = outcomes.iter().map(|outcome| outcome.start).fold(f64::INFINITY, f64::min);
        let last = outcomes.iter().map(|outcome| outcome.end).fold(0.0, f64::max);
        let completed = whole().count();
        Self {
            duration: if outcomes.is_empty() { 0.0 } else { last - first },
            completed,
            failed: outcomes.len() - completed,
            timed_out: outcomes.iter().filter(|outcome| outcome.timed_out).count(),
            input_tokens: whole().map(|(outcome, _)| outcome.prompt_tokens).sum(),
            output_tokens: output_lengths.iter().sum(),
            good: goodput.map(|limits| whole().filter(|&pair| limits.keeps(pair.0, tpot(pair))).count()),
            peak_events: peak_events(whole().map(|(outcome, _)| outcome)),
            peak_requests: peak_requests(whole().map(|(outcome, _)| outcome)),
            samples: [
                sample(&Outcome::ttft),
                Sample::new(whole().filter_map(tpot)),
                Sample::new(whole().flat_map(|(outcome, _)| outcome.gaps())),
                sample(&Outcome::latency),
                sample(&|outcome| outcome.queue),
                sample(&|outcome| outcome.queue + outcome.latency()),
            ],
            output_lengths,
        }
    }

    /// The sample of a quantity, in seconds.
    #[must_use]
    pub fn sample(&self, metric: Metric) -> &Sample {
        &self.samples[metric as usize]
    }

    fn rate(&self, count: usize) -> f64 {
        if self.duration > 0.0 { count as f64 / self.duration } else { 0.0 }
    }

    /// Whole answers a second.
    #[must_use]
    pub fn request_throughput(&self) -> f64 {
        self.rate(self.completed)
    }

    /// Answers a second that keep the limits.
    #[must_use]
    pub fn goodput(&self) -> Option<f64> {
        self.good.map(|good| self.rate(good))
    }

    /// Tokens of answers a second.
    #[must_use]
    pub fn output_throughput(&self) -> f64 {
        self.rate(self.output_tokens)
    }

    /// Tokens of prompts and answers a second.
    #[must_use]
    pub fn total_throughput(&self) -> f64 {
        self.rate(self.input_tokens + self.output_tokens)
    }
}

/// Most events in one of the seconds that begin with the first send.
fn peak_events<'a>(outcomes: impl Iterator<Item = &'a Outcome> + Clone) -> usize {
    let first = outcomes.clone().map(|outcome| outcome.start).fold(f64::INFINITY, f64::min);
    let mut seconds = std::collections::HashMap::<u64, usize>::new();
    for outcome in outcomes {
        for time in &outcome.events {
            *seconds.entry((outcome.start + time - first) as u64).or_default() += 1;
        }
    }
    seconds.into_values().max().unwrap_or(0)
}

/// Most requests at once, each from its send until just before its last event.
fn peak_requests<'a>(outcomes: impl Iterator<Item = &'a Outcome>) -> usize {
    let mut changes: Vec<(f64, i64)> =
        outcomes.flat_map(|outcome| [(outcome.start, 1), (outcome.start + outcome.latency(), -1)]).collect();
    // Who ends makes room for who begins at the same moment.
    changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut running = 0_i64;
    let peak = changes.iter().map(|(_, change)| {
        running += change;
        running
    });
    usize::try_from(peak.max().unwrap_or(0)).unwrap_or(0)
}
