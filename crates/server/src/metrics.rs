//! Prometheus metrics under the names that dashboards already query.
//!
//! The front end observes requests as they pass; what only the engine knows (queue lengths, cache, drafts) is read from it
//! when somebody scrapes. Two old names are kept as aliases.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use glimmer_engine::request::{Cost, FinishReason};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, NoLabelSet, prometheus_text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::engine::{Counters, Status};

/// Content type of [`Metrics::render`].
pub const CONTENT_TYPE: &str = prometheus_text::CONTENT_TYPE;

type Labels = Vec<(&'static str, Cow<'static, str>)>;
type Ratio = Gauge<f64, AtomicU64>;

/// All metrics of a server.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    steps: std::sync::Arc<Steps>,
    running: Gauge,
    waiting: Gauge,
    waiting_by_reason: Family<Labels, Gauge>,
    kv_usage: [Ratio; 2],
    cache_config: Family<Labels, Gauge>,
    engine_counters: EngineCounters,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    prompt_tokens_cached: Counter,
    success: Family<Labels, Counter>,
    rejections: Counter,
    first_token: Histogram,
    inter_token: Histogram,
    per_output_token: [Histogram; 2],
    latency: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
    request_prompt_tokens: Histogram,
    request_generation_tokens: Histogram,
    params_n: Histogram,
    params_max_tokens: Histogram,
    most_generation_tokens: Histogram,
    request_preemptions: Histogram,
    computed_prompt_tokens: Histogram,
}

/// Counters that the engine keeps; copied over on a scrape.
#[derive(Debug, Default)]
struct EngineCounters {
    preemptions: Counter,
    prefix_queries: Counter,
    prefix_hits: Counter,
    state_hits: Counter,
    state_misses: Family<Labels, Counter>,
    media_queries: Counter,
    media_hits: Counter,
    drafts: Counter,
    draft_tokens: Counter,
    accepted: Counter,
    accepted_by_position: Family<Labels, Counter>,
}

const TTFT: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
const ITL: [f64; 19] =
    [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
const LATENCY: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
const FEW: [f64; 6] = [0.0, 1.0, 2.0, 5.0, 10.0, 20.0];
const ANSWERS: [f64; 5] = [1.0, 2.0, 5.0, 10.0, 20.0];

/// 1, 2, 5, 10, ... up to `most`.
fn token_bounds(most: usize) -> Vec<f64> {
    let decades = (0..).map(|exponent| 10.0_f64.powi(exponent));
    decades.flat_map(|ten| [ten, 2.0 * ten, 5.0 * ten]).take_while(|&bound| bound <= most as f64).collect()
}

impl Metrics {
    /// Metrics of a server for `model_name` with a context of `max_model_len` tokens.
    #[must_use]
    pub fn new(model_name: &str, max_model_len: usize) -> Self {
        let labels = [("model_name", model_name.to_owned()), ("engine", "0".to_owned())];
        let labels = labels.map(|(key, value)| (Cow::Borrowed(key), Cow::Owned(value)));
        let mut registry = Registry::with_labels(labels.into_iter());
        let mut add = Adder(&mut registry);
        let tokens = token_bounds(max_model_len);
        let steps = std::sync::Arc::new(Steps::default());
        let per_output_token = Histogram::new(ITL);
        let kv = Ratio::default();
        let metrics = Self {
            steps: std::sync::Arc::clone(&steps),
            running: add.it("num_requests_running", "Requests that the engine is working on"),
            waiting: add.it("num_requests_waiting", "Requests that wait for the engine"),
            waiting_by_reason: add.it("num_requests_waiting_by_reason", "Waiting requests by what they wait for"),
            kv_usage: [
                add.this("kv_cache_usage_perc", "Share of the cache pages in use, 1 is all", kv.clone()),
                add.this("gpu_cache_usage_perc", "Alias of kv_cache_usage_perc", kv),
            ],
            cache_config: add.it("cache_config_info", "Sizes of the cache"),
            engine_counters: EngineCounters {
                preemptions: add.it("num_preemptions", "Preemptions"),
                prefix_queries: add.it("prefix_cache_queries", "Tokens looked up in the prefix cache"),
                prefix_hits: add.it("prefix_cache_hits", "Tokens found in the prefix cache"),
                state_hits: add.it("prefix_state_hits", "Lookups that found a saved state"),
                state_misses: add.it("prefix_state_misses", "Lookups that found no saved state, by reason"),
                media_queries: add.it("mm_cache_queries", "Images looked up in the feature cache"),
                media_hits: add.it("mm_cache_hits", "Images found in the feature cache"),
                drafts: add.it("spec_decode_num_drafts", "Verified drafts"),
                draft_tokens: add.it("spec_decode_num_draft_tokens", "Tokens in drafts"),
                accepted: add.it("spec_decode_num_accepted_tokens", "Accepted tokens of drafts"),
                accepted_by_position: add
                    .it("spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by their place in the draft"),
            },
            prompt_tokens: add.it("prompt_tokens", "Tokens of prompts whose answer has begun"),
            generation_tokens: add.it("generation_tokens", "Tokens of answers"),
            prompt_tokens_cached: add.it("prompt_tokens_cached", "Tokens of prompts taken from the prefix cache"),
            success: add.it("request_success", "Ended requests by their finish reason"),
            rejections: add.it("admission_rejections", "Requests refused because the server was busy"),
            first_token: add.histogram("time_to_first_token_seconds", "Seconds to the first token", &TTFT),
            inter_token: add.histogram("inter_token_latency_seconds", "Seconds between steps of an answer", &ITL),
            per_output_token: [
                add.this(
                    "request_time_per_output_token_seconds",
                    "Mean seconds of a request's tokens behind the first",
                    per_output_token.clone(),
                ),
                add.this(
                    "time_per_output_token_seconds",
                    "Alias of request_time_per_output_token_seconds",
                    per_output_token,
                ),
            ],
            latency: add.histogram("e2e_request_latency_seconds", "Seconds of a request", &LATENCY),
            queue: add.histogram("request_queue_time_seconds", "Seconds in the queue", &LATENCY),
            prefill: add.histogram(
                "request_prefill_time_seconds",
                "Seconds from the queue to the first token",
                &LATENCY,
            ),
            decode: add.histogram("request_decode_time_seconds", "Seconds from the first to the last token", &LATENCY),
            inference: add.histogram("request_inference_time_seconds", "Seconds outside the queue", &LATENCY),
            request_prompt_tokens: add.histogram("request_prompt_tokens", "Tokens of a prompt", &tokens),
            request_generation_tokens: add.histogram("request_generation_tokens", "Tokens of an answer", &tokens),
            params_n: add.histogram("request_params_n", "Answers asked for", &ANSWERS),
            params_max_tokens: add.histogram("request_params_max_tokens", "Token limit of a request", &tokens),
            most_generation_tokens: add.histogram(
                "request_max_num_generation_tokens",
                "Tokens of a request's longest answer",
                &tokens,
            ),
            request_preemptions: add.histogram("request_num_preemptions", "Preemptions of a request", &FEW),
            computed_prompt_tokens: add.histogram(
                "request_prefill_kv_computed_tokens",
                "Tokens of a prompt that the cache did not have",
                &tokens,
            ),
            registry: Registry::default(),
        };
        registry.register_collector(Box::new(steps));
        Self { registry, ..metrics }
    }

    /// The text that Prometheus scrapes.
    #[must_use]
    pub fn render(&self, status: &Status, counters: &Counters) -> String {
        let gauge = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
        self.running.set(gauge(status.running));
        self.waiting.set(gauge(status.waiting_capacity + status.waiting_deferred));
        for (reason, count) in [("capacity", status.waiting_capacity), ("deferred", status.waiting_deferred)] {
            self.waiting_by_reason.get_or_create(&vec![("reason", reason.into())]).set(gauge(count));
        }
        for usage in &self.kv_usage {
            usage.set(status.kv_usage);
        }
        let config = vec![
            ("block_size", counters.page_tokens.to_string().into()),
            ("num_gpu_blocks", counters.pages.to_string().into()),
        ];
        self.cache_config.get_or_create(&config).set(1);
        self.engine_counters.copy(counters);
        *self.steps.0.lock().unwrap_or_else(PoisonError::into_inner) = counters.clone();
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _written = prometheus_text::encode(&mut text, &self.registry);
        text
    }

    /// A request was refused because the server is busy.
    pub fn rejected(&self) {
        self.rejections.inc();
    }

    /// Tokens of prompts and answers so far.
    #[must_use]
    pub fn throughput(&self) -> (u64, u64) {
        (self.prompt_tokens.get(), self.generation_tokens.get())
    }

    /// A request of `n` answers with their token limit was taken.
    pub fn submitted(&self, n: usize, max_tokens: u32) {
        self.params_n.observe(n as f64);
        self.params_max_tokens.observe(f64::from(max_tokens));
    }

    /// All answers of a request have ended.
    pub fn longest(&self, tokens: u64) {
        self.most_generation_tokens.observe(tokens as f64);
    }
}

impl EngineCounters {
    fn copy(&self, from: &Counters) {
        let pairs = [
            (&self.preemptions, from.preemptions),
            (&self.prefix_queries, from.prefix_queries),
            (&self.prefix_hits, from.prefix_hits),
            (&self.state_hits, from.state_hits),
            (&self.media_queries, from.media_queries),
            (&self.media_hits, from.media_hits),
            (&self.drafts, from.drafts),
            (&self.draft_tokens, from.draft_tokens),
            (&self.accepted, from.accepted()),
        ];
        for (counter, value) in pairs {
            counter.inner().store(value, Ordering::Relaxed);
        }
        for (reason, value) in &from.state_misses {
            self.state_misses
                .get_or_create(&vec![("reason", Cow::Owned(reason.clone()))])
                .inner()
                .store(*value, Ordering::Relaxed);
        }
        for (position, &value) in from.accepted_by_position.iter().enumerate() {
            let labels = vec![("position", Cow::Owned(position.to_string()))];
            self.accepted_by_position.get_or_create(&labels).inner().store(value, Ordering::Relaxed);
        }
    }
}

/// Registers metrics under the family's prefix.
struct Adder<'a>(&'a mut Registry);

impl Adder<'_> {
    fn it<M: prometheus_client::registry::Metric + Clone + Default>(&mut self, name: &str, help: &str) -> M {
        self.this(name, help, M::default())
    }

    fn this<M: prometheus_client::registry::Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        self.0.register(format!("vllm:{name}"), help, metric.clone());
        metric
    }

    fn histogram(&mut self, name: &str, help: &str, bounds: &[f64]) -> Histogram {
        self.this(name, help, Histogram::new(bounds.iter().copied()))
    }
}

/// The histogram of step sizes, which the engine keeps.
#[derive(Debug, Default)]
struct Steps(Mutex<Counters>);

impl Collector for Steps {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let counters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bounds = Counters::STEP_BOUNDS.iter().map(|&bound| bound as f64).chain([f64::MAX]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counters.steps).collect();
        let count = counters.steps.iter().sum();
        encoder
            .encode_descriptor("vllm:iteration_tokens_total", "Tokens of a step", None, MetricType::Histogram)?
            .encode_histogram::<NoLabelSet>(counters.step_tokens as f64, count, &buckets, None)
    }
}

/// Follows one answer; records its end when dropped, as an abort if nothing else was said.
#[derive(Debug)]
pub struct Meter {
    started: Instant,
    last: Option<Instant>,
    first: Option<Instant>,
    prompt_tokens: usize,
    /// Answers of a request share a prompt; it counts once.
    counts_prompt: bool,
    tokens: u64,
    outcome: Option<(&'static str, Cost)>,
}

impl Meter {
    /// A meter that starts now.
    #[must_use]
    pub fn new(prompt_tokens: usize, counts_prompt: bool) -> Self {
        let started = Instant::now();
        Self { started, last: None, first: None, prompt_tokens, counts_prompt, tokens: 0, outcome: None }
    }

    /// A step gave `tokens` tokens.
    pub fn step(&mut self, metrics: &Metrics, tokens: usize) {
        if tokens == 0 {
            return;
        }
        let now = Instant::now();
        match self.last {
            None => {
                self.first = Some(now);
                metrics.first_token.observe((now - self.started).as_secs_f64());
                if self.counts_prompt {
                    metrics.prompt_tokens.inc_by(self.prompt_tokens as u64);
                }
            }
            Some(last) => metrics.inter_token.observe((now - last).as_secs_f64()),
        }
        self.last = Some(now);
        self.tokens += tokens as u64;
        metrics.generation_tokens.inc_by(tokens as u64);
    }

    /// The engine ended the answer.
    pub fn finished(&mut self, reason: &FinishReason, cost: Cost) {
        let label = match reason {
            FinishReason::EndToken | FinishReason::StopToken(_) => "stop",
            FinishReason::Length => "length",
            FinishReason::Abort => "abort",
            FinishReason::Error(_) => "error",
        };
        self.outcome = Some((label, cost));
    }

    /// A stop string ended the answer.
    pub fn stopped(&mut self) {
        self.outcome = Some(("stop", Cost::default()));
    }

    /// Records the end.
    pub fn record(&self, metrics: &Metrics) {
        let (label, cost) = self.outcome.unwrap_or(("abort", Cost::default()));
        metrics.success.get_or_create(&vec![("finished_reason", label.into())]).inc();
        let total = self.started.elapsed().as_secs_f64();
        metrics.latency.observe(total);
        metrics.request_prompt_tokens.observe(self.prompt_tokens as f64);
        metrics.request_generation_tokens.observe(self.tokens as f64);
        let cached = u64::from(cost.cached_tokens);
        metrics.prompt_tokens_cached.inc_by(cached);
        metrics.computed_prompt_tokens.observe((self.prompt_tokens as u64).saturating_sub(cached) as f64);
        metrics.request_preemptions.observe(f64::from(cost.preemptions));
        metrics.queue.observe(cost.queue_seconds);
        metrics.prefill.observe(cost.prefill_seconds);
        if let (Some(first), Some(last)) = (self.first, self.last) {
            let decode = (last - first).as_secs_f64();
            metrics.decode.observe(decode);
            metrics.inference.observe(cost.prefill_seconds + decode);
            if self.tokens > 1 {
                for histogram in &metrics.per_output_token[..1] {
                    histogram.observe(decode / (self.tokens - 1) as f64);
                }
            }
        }
    }
}

/// Labels of the families above are vectors of pairs.
const _: fn() = || {
    fn labels<T: EncodeLabelSet>() {}
    labels::<Labels>();
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_of_the_dashboards_is_there() {
        let metrics = Metrics::new("m", 1000);
        let mut meter = Meter::new(7, true);
        meter.step(&metrics, 2);
        meter.step(&metrics, 1);
        meter.record(&metrics);
        metrics.submitted(1, 16);
        metrics.rejected();
        metrics.longest(3);
        let status =
            Status { running: 3, waiting_capacity: 1, waiting_deferred: 1, kv_usage: 0.25, ..Status::default() };
        let mut counters =
            Counters { drafts: 5, draft_tokens: 10, accepted_by_position: vec![4, 2], ..Counters::default() };
        counters.state_hits = 8;
        counters.state_misses = vec![("no state".to_owned(), 2)];
        counters.steps[3] = 9;
        counters.step_tokens = 60;
        let text = metrics.render(&status, &counters);
        let base = r#"model_name="m",engine="0""#;
        for line in [
            format!("vllm:num_requests_running{{{base}}} 3"),
            format!("vllm:num_requests_waiting{{{base}}} 2"),
            format!("vllm:num_requests_waiting_by_reason{{{base},reason=\"capacity\"}} 1"),
            format!("vllm:kv_cache_usage_perc{{{base}}} 0.25"),
            format!("vllm:gpu_cache_usage_perc{{{base}}} 0.25"),
            format!("vllm:cache_config_info{{{base},block_size=\"0\",num_gpu_blocks=\"0\"}} 1"),
            format!("vllm:prompt_tokens_total{{{base}}} 7"),
            format!("vllm:generation_tokens_total{{{base}}} 3"),
            format!("vllm:request_success_total{{{base},finished_reason=\"abort\"}} 1"),
            format!("vllm:admission_rejections_total{{{base}}} 1"),
            format!("vllm:prefix_state_hits_total{{{base}}} 8"),
            format!("vllm:prefix_state_misses_total{{{base},reason=\"no state\"}} 2"),
            format!("vllm:spec_decode_num_drafts_total{{{base}}} 5"),
            format!("vllm:spec_decode_num_draft_tokens_total{{{base}}} 10"),
            format!("vllm:spec_decode_num_accepted_tokens_total{{{base}}} 6"),
            format!("vllm:spec_decode_num_accepted_tokens_per_pos_total{{{base},position=\"1\"}} 2"),
            format!("vllm:iteration_tokens_total_count{{{base}}} 9"),
            format!("vllm:iteration_tokens_total_sum{{{base}}} 60.0"),
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        for name in [
            "num_preemptions_total",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "mm_cache_queries_total",
            "mm_cache_hits_total",
            "prompt_tokens_cached_total",
        ] {
            assert!(text.contains(&format!("\nvllm:{name}{{")), "{name}");
        }
        for name in [
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "request_time_per_output_token_seconds",
            "time_per_output_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_params_n",
            "request_params_max_tokens",
            "request_max_num_generation_tokens",
            "request_num_preemptions",
            "request_prefill_kv_computed_tokens",
        ] {
            assert!(text.contains(&format!("# TYPE vllm:{name} histogram\n")), "{name} in\n{text}");
            assert!(text.contains(&format!("\nvllm:{name}_count{{{base}}} 1\n")), "{name} was not observed in\n{text}");
        }
    }

    #[test]
    fn bounds_of_token_histograms_grow_by_one_two_five() {
        assert_eq!(token_bounds(60), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0]);
    }
}
