//! A load test at several concurrencies, twice: what is quoted is the second time.
//!
//! The first pass over the whole grid meets a server that has just been started: caches are cold, kernels not compiled,
//! memory not touched. Invariants: a pass is called warm only if a whole pass went before it on the same process, and
//! every prompt is sent once only, so that no figure owes anything to a prefix cache (unless equal prompts are asked for).
//! Random prompts over a small vocabulary may begin alike by chance: each cell says what the server's prefix cache held.

use std::future::Future;

use glimmer_text::ChatFormat;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::arrival::Traffic;
use super::counters::Counters;
use super::error::ServeBenchError;
use super::interference::Interference;
use super::load::{Load, Target};
use super::protocol::{Decode, Prefill, decode, prefill};
use super::report::{Report, Settings, prompts_hash};
use super::statistics::Sample;
use super::summary::Metric;
use super::workload::Workload;

/// What is run.
#[derive(Clone, Debug)]
pub struct GridPlan {
    /// Concurrencies and how many requests each gets.
    pub cells: Vec<(usize, usize)>,
    /// Passes over all of them.
    pub passes: usize,
    /// Whether to measure the prefill ceiling in the last pass.
    pub prefill: bool,
    /// Whether every pass sends the same prompts.
    pub same_prompts: bool,
    /// Seed of the first prompts.
    pub seed: u32,
}

impl GridPlan {
    /// Requests of a concurrency where nothing else is said: enough for four rounds, at least eight.
    #[must_use]
    pub fn usual_requests(concurrency: usize) -> usize {
        (4 * concurrency).max(8)
    }

    /// Whether this can be run.
    ///
    /// # Errors
    /// [`ServeBenchError::Flag`].
    pub fn check(&self) -> Result<(), ServeBenchError> {
        if self.cells.is_empty() || self.cells.iter().any(|&(concurrency, _)| concurrency == 0) {
            return Err(ServeBenchError::flag("--concurrency", "expected numbers from 1, for example 1,2,4,8"));
        }
        if let Some((concurrency, requests)) = self.cells.iter().find(|(concurrency, requests)| requests < concurrency)
        {
            let problem =
                format!("{requests} requests never reach a concurrency of {concurrency}; send at least as many");
            return Err(ServeBenchError::flag("--num-prompts", problem));
        }
        if self.passes == 0 {
            return Err(ServeBenchError::flag("--passes", "0 passes measure nothing"));
        }
        Ok(())
    }

    /// Requests in all, without prefills.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.passes * self.cells.iter().map(|(_, requests)| requests).sum::<usize>()
    }

    /// The seed of a cell: another one for each, so that no prompt comes twice.
    fn cell_seed(&self, pass: usize, index: usize) -> u32 {
        let pass = if self.same_prompts { 0 } else { pass };
        let place = pass * (self.cells.len() + 1) + index;
        self.seed.wrapping_add(u32::try_from(place).unwrap_or(u32::MAX).wrapping_mul(0x9E37_79B9))
    }
}

/// Statistics of a quantity, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub median: f64,
    /// 99th percentile.
    pub p99: f64,
}

impl Spread {
    fn of(sample: &Sample) -> Self {
        let p99 = 1e3 * sample.percentile(99.0);
        Self { mean: 1e3 * sample.mean(), median: 1e3 * sample.median(), p99 }
    }
}

/// One concurrency in one pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Pass, from 0.
    pub pass: usize,
    /// Whether no whole pass went before it on the same process.
    pub cold: bool,
    /// Most requests at once.
    pub concurrency: usize,
    /// Requests sent.
    pub requests: usize,
    /// Whole answers.
    pub completed: usize,
    /// The others.
    pub failed: usize,
    /// Of these, those that took too long.
    pub timed_out: usize,
    /// Why requests failed, each reason once.
    pub errors: Vec<String>,
    /// Output tokens a second.
    pub output_throughput: f64,
    /// Input and output tokens a second.
    pub total_throughput: f64,
    /// Answers a second.
    pub request_throughput: f64,
    /// Time to first token.
    pub ttft: Spread,
    /// Time per output token.
    pub tpot: Spread,
    /// Inter-token latency.
    pub itl: Spread,
    /// End-to-end latency.
    pub e2el: Spread,
    /// Decoding by itself.
    pub decode: Option<Decode>,
    /// Why there are no rates of decoding.
    pub decode_dropped: Option<String>,
    /// Share of the prompt tokens that the server's prefix cache held, where it says so.
    pub prefix_hits: Option<f64>,
    /// Acceptance of drafts, where the server drafts: percent, tokens a step, shares by position.
    pub speculation: Option<super::counters::SpeculationRun>,
    /// SHA-256 of the prompts.
    pub prompts_sha256: String,
    /// The whole result with the established keys.
    pub result: Map<String, Value>,
}

/// A grid that was run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Grid {
    /// Heading of the page.
    pub title: String,
    /// Date, UTC.
    pub date: String,
    /// Model.
    pub model: String,
    /// What was sent.
    pub workload: Map<String, Value>,
    /// Flags, hardware, versions.
    pub environment: Map<String, Value>,
    /// What the user says about it.
    pub metadata: Vec<(String, String)>,
    /// All cells in the order in which they ran.
    pub cells: Vec<Cell>,
    /// Prefill ceilings, of the last pass.
    pub prefill: Vec<Prefill>,
    /// Two replicas side by side, if that was measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub interference: Vec<Interference>,
    /// What a reader should know: restarts, dropped figures.
    pub notes: Vec<String>,
    /// Whether it was stopped before its end.
    pub stopped: bool,
}

impl Grid {
    /// The cells to be quoted: those of the last pass.
    pub fn quoted(&self) -> impl Iterator<Item = &Cell> {
        let last = self.cells.last().map_or(0, |cell| cell.pass);
        self.cells.iter().filter(move |cell| cell.pass == last)
    }

    /// The cells of the first pass, if another one is quoted.
    pub fn first_pass(&self) -> impl Iterator<Item = &Cell> {
        let several = self.cells.last().is_some_and(|cell| cell.pass > 0);
        self.cells.iter().filter(move |cell| several && cell.pass == 0)
    }
}

/// Where a grid stands.
#[derive(Clone, Copy, Debug)]
pub enum GridProgress {
    /// A request has ended.
    Request,
    /// A cell begins: pass from 0, concurrency, requests.
    Cell(usize, usize, usize),
}

/// Runs a grid. `settings` are taken over into each cell's result. When `stop` is ready, what is there is returned.
///
/// # Errors
/// [`ServeBenchError`] if the plan or the workload cannot be; failed requests are no error.
pub async fn run_grid(
    plan: &GridPlan,
    target: &Target,
    workload: &Workload,
    format: &ChatFormat,
    settings: &Settings,
    title: &str,
    progress: &mut dyn FnMut(GridProgress),
    stop: impl Future<Output = ()>,
) -> Result<Grid, ServeBenchError> {
    plan.check()?;
    let count = |text: &str| format.tokenizer().encode(text).map_or(0, |ids| ids.len());
    let mut stop = std::pin::pin!(stop);
    let mut grid = Grid {
        title: title.to_owned(),
        date: String::new(),
        model: settings.model.clone(),
        workload: describe(workload),
        environment: settings.environment.clone(),
        metadata: settings.metadata.clone(),
        cells: Vec::new(),
        prefill: Vec::new(),
        interference: Vec::new(),
        notes: Vec::new(),
        stopped: false,
    };
    // Passes that the server's process has seen to their end.
    let mut seen = 0;
    let mut last: Option<Counters> = Counters::read(&target.client).await;
    'passes: for pass in 0..plan.passes {
        let mut whole = true;
        for (index, &(concurrency, requests)) in plan.cells.iter().enumerate() {
            progress(GridProgress::Cell(pass, concurrency, requests));
            let (prompts, mut generator) = workload.prompts(format, requests, plan.cell_seed(pass, index), "grid-")?;
            let hash = prompts_hash(&prompts);
            let times = Traffic::AT_ONCE.times(prompts.len(), &mut generator);
            let load = Load { prompts, times, concurrency: Some(concurrency), probe_rate: 0.0 };
            let run = target.run(&load, &mut |_| progress(GridProgress::Request), &mut stop).await;
            let stopped = run.stopped;
            if let (Some(before), Some(now)) = (&last, &run.before)
                && !now.continues(before)
            {
                grid.notes
                    .push(format!("the server was restarted before pass {}, concurrency {concurrency}", pass + 1));
                (seen, whole) = (0, false);
            }
            last = run.after.clone().or(last);
            let settings = Settings { concurrency: Some(concurrency), num_prompts: requests, ..settings.clone() };
            let report = Report::new(settings, run, &count);
            let cell = cell(&report, pass, seen == 0, hash);
            whole &= cell.completed > 0;
            if let Some(why) = &cell.decode_dropped {
                grid.notes.push(format!("no decode rates in pass {}, concurrency {concurrency}: {why}", pass + 1));
            }
            grid.date = super::report::stamp(report.date);
            grid.cells.push(cell);
            if stopped {
                grid.stopped = true;
                break 'passes;
            }
        }
        seen += usize::from(whole);
    }
    if plan.prefill && !grid.stopped {
        measure_prefill(plan, target, workload, format, &mut grid, &mut stop).await?;
    }
    Ok(grid)
}

fn cell(report: &Report, pass: usize, cold: bool, prompts_sha256: String) -> Cell {
    let (s, outcomes) = (&report.summary, &report.run.outcomes);
    let concurrency = report.settings.concurrency.unwrap_or(1);
    let (decode, decode_dropped) = match decode(outcomes, &s.output_lengths, concurrency) {
        Ok(decode) => (Some(decode), None),
        Err(why) => (None, Some(why)),
    };
    let mut errors: Vec<String> = Vec::new();
    for error in outcomes.iter().filter_map(|outcome| outcome.error.as_ref()) {
        if !errors.contains(error) {
            errors.push(error.clone());
        }
    }
    let spread = |metric| Spread::of(s.sample(metric));
    let mut result = report.json(false);
    // Once for the whole grid.
    result.remove("environment");
    result.insert("cold".to_owned(), cold.into());
    Cell {
        pass,
        cold,
        concurrency,
        requests: outcomes.len(),
        completed: s.completed,
        failed: s.failed,
        timed_out: s.timed_out,
        errors,
        output_throughput: s.output_throughput(),
        total_throughput: s.total_throughput(),
        request_throughput: s.request_throughput(),
        ttft: spread(Metric::Ttft),
        tpot: spread(Metric::Tpot),
        itl: spread(Metric::Itl),
        e2el: spread(Metric::E2el),
        decode,
        decode_dropped,
        prefix_hits: report
            .run
            .after
            .as_ref()
            .zip(report.run.before.as_ref())
            .and_then(|(a, b)| a.prefix_hits_since(b)),
        speculation: report.speculation.clone(),
        prompts_sha256,
        result,
    }
}

/// Prompts of one length at every concurrency, one token each.
async fn measure_prefill(
    plan: &GridPlan,
    target: &Target,
    workload: &Workload,
    format: &ChatFormat,
    grid: &mut Grid,
    stop: &mut (impl Future<Output = ()> + Unpin),
) -> Result<(), ServeBenchError> {
    /// How often one prompt alone is timed; the median counts.
    const ALONE: usize = 3;
    let one_length = workload.of_one_length();
    let mut alone = Vec::new();
    let mut cells = vec![1; ALONE];
    cells.extend(plan.cells.iter().map(|&(concurrency, _)| concurrency).filter(|&concurrency| concurrency > 1));
    for (index, &concurrency) in cells.iter().enumerate() {
        let seed = plan.cell_seed(plan.passes, index).wrapping_add(1);
        let (mut prompts, _) = one_length.prompts(format, concurrency, seed, "prefill-")?;
        prompts.truncate(concurrency);
        prompts.iter_mut().for_each(|prompt| prompt.output_tokens = 1);
        let times = vec![0.0; prompts.len()];
        let load = Load { prompts, times, concurrency: None, probe_rate: 0.0 };
        let run = target.run(&load, &mut |_| (), &mut *stop).await;
        let middle = (!alone.is_empty()).then(|| Sample::new(alone.iter().copied()).median());
        match prefill(&run.outcomes, middle) {
            Ok(found) if index < ALONE => {
                alone.push(found.seconds);
                if index + 1 == ALONE {
                    let seconds = Sample::new(alone.iter().copied()).median();
                    let throughput = found.tokens as f64 / seconds;
                    grid.prefill.push(Prefill { seconds, throughput, serialization: Some(1.0), ..found });
                }
            }
            Ok(found) => grid.prefill.push(found),
            Err(error) => {
                let note = format!("no prefill ceiling at concurrency {concurrency}: {error}");
                if !grid.notes.contains(&note) {
                    grid.notes.push(note);
                }
            }
        }
        if run.stopped {
            grid.stopped = true;
            break;
        }
    }
    Ok(())
}

fn describe(workload: &Workload) -> Map<String, Value> {
    let value = match workload {
        Workload::Random(shape) => json!({
            "dataset": workload.name(), "input_tokens": shape.input, "output_tokens": shape.output,
            "prefix_tokens": shape.prefix, "input_ratio": shape.input_ratio, "output_ratio": shape.output_ratio,
        }),
        Workload::Repetition(shape) => json!({
            "dataset": workload.name(), "prefix_tokens": shape.prefix, "suffix_tokens": shape.suffix,
            "prefixes": shape.prefixes, "output_tokens": shape.output,
        }),
        Workload::Custom { file, options, .. } => json!({
            "dataset": workload.name(), "file": file, "output_tokens": options.output,
        }),
    };
    value.as_object().cloned().unwrap_or_default()
}
