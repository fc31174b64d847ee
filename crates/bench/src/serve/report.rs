//! A run with everything that a reader must know to compare it: as JSON with the established tool's keys.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use super::arrival::{RampShape, Traffic};
use super::counters::SpeculationRun;
use super::dataset::Prompt;
use super::epochs::Quality;
use super::exchange::Outcome;
use super::load::Run;
use super::statistics::Sample;
use super::summary::{Goodput, Metric, Summary};

/// What was asked for, as far as results name it.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `openai` or `openai-chat`, as given.
    pub backend: String,
    /// The label of the run.
    pub label: Option<String>,
    /// Model.
    pub model: String,
    /// Tokenizer.
    pub tokenizer: String,
    /// Prompts asked for.
    pub num_prompts: usize,
    /// How they arrive.
    pub traffic: Traffic,
    /// Most at once.
    pub concurrency: Option<usize>,
    /// Quantities to report.
    pub metrics: Vec<Metric>,
    /// Percentiles of each.
    pub percentiles: Vec<f64>,
    /// Limits of good requests.
    pub goodput: Option<Goodput>,
    /// What the user says about the run.
    pub metadata: Vec<(String, String)>,
    /// What is known of the circumstances: flags, hardware, version of the server.
    pub environment: Map<String, Value>,
}

/// A run, summed up.
#[derive(Clone, Debug)]
pub struct Report {
    /// What was asked for.
    pub settings: Settings,
    /// What was measured.
    pub run: Run,
    /// The sums.
    pub summary: Summary,
    /// Speculative decoding, if the server drafts.
    pub speculation: Option<SpeculationRun>,
    /// Right answers, if the prompts say what is right.
    pub quality: Option<Quality>,
    /// When the run ended, in seconds since 1970.
    pub date: u64,
}

/// What the probes brought.
#[derive(Clone, Debug)]
pub struct Probes {
    /// Seconds each took.
    pub latencies: Sample,
    /// Those without an answer.
    pub failed: usize,
}

impl Report {
    /// Sums up a run. `count` counts the tokens of an answer whose server does not.
    #[must_use]
    pub fn new(settings: Settings, run: Run, count: &dyn Fn(&str) -> usize) -> Self {
        let summary = Summary::new(&run.outcomes, settings.goodput.as_ref(), count);
        let speculation = run.after.as_ref().zip(run.before.as_ref()).and_then(|(a, b)| a.speculation_since(b));
        let date = SystemTime::now().duration_since(UNIX_EPOCH).as_ref().map_or(0, Duration::as_secs);
        Self { settings, run, summary, speculation, quality: None, date }
    }

    /// Whether a quantity is reported: those asked for, as far as they exist.
    #[must_use]
    pub fn shows(&self, metric: Metric) -> bool {
        let exists = match metric {
            Metric::Queue => self.settings.concurrency.is_some(),
            Metric::QueuedE2el => self.settings.concurrency.is_some() && self.settings.traffic.rate.is_finite(),
            _ => true,
        };
        exists && self.settings.metrics.contains(&metric)
    }

    /// The probes; none if none were sent.
    #[must_use]
    pub fn probes(&self) -> Option<Probes> {
        let probes = &self.run.probes;
        let latencies = Sample::new(probes.iter().filter(|probe| probe.succeeded()).map(Outcome::latency));
        let failed = probes.len() - latencies.len();
        (!probes.is_empty()).then_some(Probes { latencies, failed })
    }

    /// The result as JSON; with `detailed` every request.
    #[must_use]
    pub fn json(&self, detailed: bool) -> Map<String, Value> {
        let (s, settings) = (&self.summary, &self.settings);
        let mut map = Map::new();
        let mut put = |key: &str, value: Value| {
            map.insert(key.to_owned(), value);
        };
        put("date", stamp(self.date).into());
        put("endpoint_type", settings.backend.clone().into());
        put("backend", settings.backend.clone().into());
        put("label", settings.label.clone().into());
        put("model_id", settings.model.clone().into());
        put("tokenizer_id", settings.tokenizer.clone().into());
        put("num_prompts", settings.num_prompts.into());
        for (key, value) in &settings.metadata {
            put(key, value.clone().into());
        }
        put("request_rate", finite(settings.traffic.rate));
        put("burstiness", finite(settings.traffic.burstiness));
        put("max_concurrency", settings.concurrency.into());
        if let Some(ramp) = settings.traffic.ramp {
            let shape = match ramp.shape {
                RampShape::Linear => "linear",
                RampShape::Exponential => "exponential",
            };
            put("ramp_up_strategy", shape.into());
            put("ramp_up_start_rps", ramp.from.into());
            put("ramp_up_end_rps", ramp.to.into());
        }
        put("duration", s.duration.into());
        put("completed", s.completed.into());
        put("failed", s.failed.into());
        put("timed_out", s.timed_out.into());
        put("total_input_tokens", s.input_tokens.into());
        put("total_output_tokens", s.output_tokens.into());
        put("request_throughput", s.request_throughput().into());
        put("request_goodput", s.goodput().into());
        put("output_throughput", s.output_throughput().into());
        put("total_token_throughput", s.total_throughput().into());
        if detailed {
            let all = |of: &dyn Fn(&Outcome) -> Value| self.run.outcomes.iter().map(of).collect::<Vec<Value>>().into();
            put("input_lens", all(&|o| o.prompt_tokens.into()));
            put("output_lens", s.output_lengths.clone().into());
            put("ttfts", all(&|o| o.ttft().into()));
            put("itls", all(&|o| o.gaps().collect::<Vec<f64>>().into()));
            put("latencies", all(&|o| o.latency().into()));
            put("start_times", all(&|o| o.start.into()));
            put("queue_times", all(&|o| o.queue.into()));
            put("finish_reasons", all(&|o| o.finish.clone().into()));
            put("generated_texts", all(&|o| o.text.clone().into()));
            put("errors", all(&|o| o.error.clone().unwrap_or_default().into()));
        }
        put("max_output_tokens_per_s", (s.peak_events as f64).into());
        put("max_concurrent_requests", s.peak_requests.into());
        if let Some(probes) = self.probes().filter(|probes| !probes.latencies.is_empty()) {
            put("probe_completed", probes.latencies.len().into());
            put("probe_failed", probes.failed.into());
            put("probe_median_e2el_ms", (1e3 * probes.latencies.median()).into());
            put("probe_p99_e2el_ms", (1e3 * probes.latencies.percentile(99.0)).into());
            put("probe_max_e2el_ms", (1e3 * probes.latencies.max()).into());
        }
        if let Some(run) = &self.speculation {
            put("spec_decode_acceptance_rate", run.acceptance_rate.into());
            put("spec_decode_acceptance_length", run.acceptance_length.into());
            put("spec_decode_num_drafts", run.drafts.into());
            put("spec_decode_draft_tokens", run.draft_tokens.into());
            put("spec_decode_accepted_tokens", run.accepted_tokens.into());
            put("spec_decode_per_position_acceptance_rates", run.by_position.clone().into());
        }
        for metric in Metric::ALL.into_iter().filter(|&metric| self.shows(metric)) {
            let (sample, key) = (s.sample(metric), metric.key());
            put(&format!("mean_{key}_ms"), (1e3 * sample.mean()).into());
            put(&format!("median_{key}_ms"), (1e3 * sample.median()).into());
            put(&format!("std_{key}_ms"), (1e3 * sample.deviation()).into());
            for &percent in &settings.percentiles {
                put(&format!("p{percent}_{key}_ms"), (1e3 * sample.percentile(percent)).into());
            }
        }
        if let Some(quality) = &self.quality {
            put("epochs", json!(quality.epochs));
            put("score", quality.score.into());
            put("score_sigma", quality.sigma.into());
            put("truncated", quality.truncated.into());
        }
        put("environment", Value::Object(settings.environment.clone()));
        map
    }

    /// The name under which the established tool would save this.
    #[must_use]
    pub fn file_name(&self) -> String {
        let settings = &self.settings;
        let label = settings.label.as_deref().unwrap_or(&settings.backend);
        let most = settings.concurrency.map_or(String::new(), |most| format!("-concurrency{most}"));
        let model = settings.model.rsplit('/').next().unwrap_or_default();
        let pace = match settings.traffic.ramp {
            None if settings.traffic.rate.is_infinite() => "infqps".to_owned(),
            None => format!("{}qps", glimmer_text::python_float(settings.traffic.rate)),
            Some(ramp) => {
                let shape = if ramp.shape == RampShape::Linear { "linear" } else { "exponential" };
                format!("ramp-up-{shape}-{}qps-{}qps", ramp.from, ramp.to)
            }
        };
        format!("{label}-{pace}{most}-{model}-{}.json", stamp(self.date))
    }
}

/// A number, or `"inf"`.
fn finite(value: f64) -> Value {
    if value.is_finite() { value.into() } else { json!("inf") }
}

/// SHA-256 of all prompts and lengths in order, in hexadecimal digits: equal for runs that may be compared.
#[must_use]
pub fn prompts_hash(prompts: &[Prompt]) -> String {
    let mut hash = Sha256::new();
    for prompt in prompts {
        hash.update((prompt.text.len() as u64).to_le_bytes());
        hash.update(&prompt.text);
        hash.update(prompt.output_tokens.to_le_bytes());
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Seconds since 1970 as `YYYYMMDD-HHMMSS`, UTC.
#[must_use]
pub fn stamp(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    format!("{year:04}{month:02}{day:02}-{:02}{:02}{:02}", rest / 3600, rest / 60 % 60, rest % 60)
}

/// The date of a day since 1970 in the Gregorian calendar, whose pattern of 146,097 days is counted from a first of March.
pub(crate) fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_are_dates() {
        assert_eq!(stamp(0), "19700101-000000");
        assert_eq!(stamp(951_827_696), "20000229-123456");
        assert_eq!(stamp(1_796_018_291), "20261130-055811");
    }
}
