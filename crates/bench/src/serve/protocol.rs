//! Measurements beyond the common table: decoding by itself, cohorts, the prefill ceiling, and what guards them.
//!
//! A stream is a whole answer with more than one token. Its decode rate is `(output tokens - 1) / (t_m - t_1)`: prefill is
//! not in it. A rate over less than 50 ms says more about buffers than about decoding, so such streams are dropped and
//! counted, and fewer than three whole answers give no rates at all.

use serde::{Deserialize, Serialize};

use super::exchange::Outcome;
use super::statistics::Sample;

/// Shortest time between first and last event over which a rate is taken, in seconds.
pub const SHORTEST: f64 = 0.050;
/// Fewest whole answers of which rates are reported.
pub const FEWEST: usize = 3;

/// Least and greatest rate of a group of streams, in tokens a second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Band {
    /// Streams in the group.
    pub streams: usize,
    /// Slowest.
    pub min: f64,
    /// Fastest.
    pub max: f64,
}

/// Decoding by itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decode {
    /// Streams whose rate counts.
    pub streams: usize,
    /// Streams dropped because they were too short to time.
    pub too_short: usize,
    /// Median rate of a stream, in tokens a second.
    pub median: f64,
    /// Those that began first, half of all.
    pub early: Band,
    /// The others. Prefills come one after the other, so early streams decode beside the others' prefills: a median over
    /// both would hide that. None if there is but one stream.
    pub late: Option<Band>,
    /// What happened while as many streams as allowed were decoding and none prefilling.
    pub overlap: Option<Overlap>,
}

/// The time in which all streams decode: since the last of them had its first token, until the first of them ends.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Overlap {
    /// Its length in seconds; with more requests than streams that of all such times together.
    pub seconds: f64,
    /// Tokens a second of all streams in it.
    pub throughput: f64,
    /// The same of one stream.
    pub per_stream: f64,
}

/// Decoding of a run.
///
/// # Errors
/// Why there are no rates.
pub fn decode(outcomes: &[Outcome], lengths: &[usize], concurrency: usize) -> Result<Decode, String> {
    let whole = outcomes.iter().filter(|outcome| outcome.succeeded()).count();
    if whole < FEWEST {
        return Err(format!("{whole} whole answers; rates need at least {FEWEST}"));
    }
    let streams: Vec<Stream<'_>> = outcomes
        .iter()
        .zip(lengths)
        .filter(|(outcome, tokens)| outcome.succeeded() && **tokens > 1)
        .map(|(outcome, &tokens)| Stream { outcome, tokens })
        .collect();
    let (mut timed, short): (Vec<_>, Vec<_>) = streams.iter().partition(|stream| stream.seconds() >= SHORTEST);
    if timed.len() < FEWEST {
        return Err(format!(
            "{} answers decode for {} ms or longer; rates need at least {FEWEST}",
            timed.len(),
            1e3 * SHORTEST
        ));
    }
    timed.sort_by(|a, b| a.first().total_cmp(&b.first()));
    let (early, late) = timed.split_at(timed.len().div_ceil(2));
    let band = |streams: &[&Stream<'_>]| {
        let rates = Sample::new(streams.iter().map(|stream| stream.rate()));
        (!rates.is_empty()).then(|| Band { streams: rates.len(), min: rates.min(), max: rates.max() })
    };
    Ok(Decode {
        streams: timed.len(),
        too_short: short.len(),
        median: Sample::new(timed.iter().map(|stream| stream.rate())).median(),
        early: band(early).ok_or("no streams")?,
        late: band(late),
        overlap: overlap(&streams, concurrency),
    })
}

#[derive(Debug)]
struct Stream<'a> {
    outcome: &'a Outcome,
    tokens: usize,
}

impl Stream<'_> {
    /// When the first token came, since the start of the run.
    fn first(&self) -> f64 {
        self.outcome.start + self.outcome.ttft()
    }

    fn last(&self) -> f64 {
        self.outcome.start + self.outcome.latency()
    }

    fn seconds(&self) -> f64 {
        self.outcome.latency() - self.outcome.ttft()
    }

    fn rate(&self) -> f64 {
        (self.tokens - 1) as f64 / self.seconds()
    }

    /// Tokens that came within a time, its beginning not included: events times the tokens of one.
    fn tokens_within(&self, from: f64, to: f64) -> f64 {
        let moments = self.outcome.events.iter().map(|event| self.outcome.start + event);
        let events = moments.filter(|&moment| moment > from && moment <= to).count();
        let gaps = self.outcome.events.len() - 1;
        if gaps == 0 { 0.0 } else { events as f64 * (self.tokens - 1) as f64 / gaps as f64 }
    }
}

fn overlap(streams: &[Stream<'_>], concurrency: usize) -> Option<Overlap> {
    let mut changes: Vec<(f64, i64)> =
        streams.iter().flat_map(|stream| [(stream.first(), 1), (stream.last(), -1)]).collect();
    changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let all = i64::try_from(concurrency).ok()?;
    let (mut decoding, mut seconds, mut tokens) = (0, 0.0, 0.0);
    for pair in changes.windows(2) {
        decoding += pair[0].1;
        let (from, to) = (pair[0].0, pair[1].0);
        if decoding == all && to > from {
            seconds += to - from;
            tokens += streams.iter().map(|stream| stream.tokens_within(from, to)).sum::<f64>();
        }
    }
    let throughput = tokens / seconds;
    (seconds >= SHORTEST).then(|| Overlap { seconds, throughput, per_stream: throughput / concurrency as f64 })
}

/// Prompts read as fast as the server can.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prefill {
    /// Prompts sent at once.
    pub concurrency: usize,
    /// Their tokens.
    pub tokens: usize,
    /// From the first send until every prompt has its first token, in seconds.
    pub seconds: f64,
    /// Tokens a second.
    pub throughput: f64,
    /// `seconds / (concurrency * seconds of one prompt)`: 1 where prompts are read one after the other, the inverse of the
    /// concurrency where company costs nothing. None where one prompt alone was not timed.
    pub serialization: Option<f64>,
}

/// The prefill ceiling of a run with one token an answer; `alone` are the seconds of a single prompt.
///
/// # Errors
/// Which requests failed.
pub fn prefill(outcomes: &[Outcome], alone: Option<f64>) -> Result<Prefill, String> {
    if let Some(error) = outcomes.iter().find_map(|outcome| outcome.error.as_deref()) {
        return Err(error.to_owned());
    }
    let first = outcomes.iter().map(|outcome| outcome.start).fold(f64::INFINITY, f64::min);
    let last = outcomes.iter().map(|outcome| outcome.start + outcome.ttft()).fold(0.0, f64::max);
    let (seconds, tokens) = (last - first, outcomes.iter().map(|outcome| outcome.prompt_tokens).sum::<usize>());
    let concurrency = outcomes.len();
    Ok(Prefill {
        concurrency,
        tokens,
        seconds,
        throughput: if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 },
        serialization: alone.filter(|&alone| alone > 0.0).map(|alone| seconds / (concurrency as f64 * alone)),
    })
}
