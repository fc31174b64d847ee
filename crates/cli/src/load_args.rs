//! Flags of the load generator, with the names that `vllm bench serve` gave them.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use glimmer_bench::serve::arrival::RampShape;
use serde_json::{Map, Value};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// The completions API
    #[value(alias = "vllm")]
    Openai,
    /// The chat completions API
    OpenaiChat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DatasetName {
    /// Runs of consecutive tokens, equal to the established tool's for equal seeds
    Random,
    /// A JSONL file, see --dataset-path
    Custom,
    /// Few prefixes, many suffixes
    #[value(name = "prefix_repetition", alias = "prefix-repetition")]
    PrefixRepetition,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RampUp {
    /// By equal steps
    Linear,
    /// By equal factors
    Exponential,
}

impl From<RampUp> for RampShape {
    fn from(ramp: RampUp) -> Self {
        match ramp {
            RampUp::Linear => Self::Linear,
            RampUp::Exponential => Self::Exponential,
        }
    }
}

/// The server and its model.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
pub(crate) struct ServerArgs {
    /// Which API is asked
    #[arg(long, value_enum, default_value = "openai")]
    pub(crate) backend: Backend,
    /// The server's URL, instead of --host and --port
    #[arg(long, value_name = "URL")]
    pub(crate) base_url: Option<String>,
    /// Path of the API (default: that of --backend)
    #[arg(long, value_name = "PATH")]
    pub(crate) endpoint: Option<String>,
    /// The model (default: the first one that the server lists)
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// Its name in requests, where that is another one
    #[arg(long, value_name = "NAME")]
    pub(crate) served_model_name: Option<String>,
    /// Directory with tokenizer.json (default: --model, or the server's, if that is a directory here)
    #[arg(long, value_name = "DIR")]
    pub(crate) tokenizer: Option<String>,
    /// Headers of every request
    #[arg(long, value_name = "KEY=VALUE", num_args = 0.., value_parser = pair)]
    pub(crate) header: Vec<(String, String)>,
    /// Certificates (PEM) to trust instead of the public authorities, for an https URL
    #[arg(long, value_name = "FILE")]
    pub(crate) ca_file: Option<PathBuf>,
    /// After this long a request has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 21_600.0, value_parser = positive)]
    pub(crate) request_timeout_sec: f64,
    /// Ask again and again for so long until the first request is answered
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = crate::args::whole::<u32>)]
    pub(crate) ready_check_timeout_sec: u32,
}

/// What is sent.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Prompts")]
pub(crate) struct DatasetArgs {
    /// Where prompts come from
    #[arg(long, value_enum, default_value = "random")]
    pub(crate) dataset_name: DatasetName,
    /// JSONL of custom: {"prompt": "...", "output_tokens": N, "answer": "..."}, all but the prompt optional
    #[arg(long, value_name = "FILE")]
    pub(crate) dataset_path: Option<PathBuf>,
    /// Seed of prompts and arrival times
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = crate::args::whole::<u32>)]
    pub(crate) seed: u32,
    /// Tokens of a prompt, whatever the data set
    #[arg(long, value_name = "N", value_parser = crate::args::whole::<u32>)]
    pub(crate) input_len: Option<u32>,
    /// Tokens of an answer, whatever the data set
    #[arg(long, value_name = "N", value_parser = crate::args::whole::<u32>)]
    pub(crate) output_len: Option<u32>,
    /// Tokens of a random prompt
    #[arg(long, default_value_t = 1024, value_name = "N", value_parser = crate::args::whole::<u32>)]
    pub(crate) random_input_len: u32,
    /// Tokens of the answer to a random prompt
    #[arg(long, default_value_t = 128, value_name = "N", value_parser = crate::args::whole::<u32>)]
    pub(crate) random_output_len: u32,
    /// Lengths vary by this share to either side: in [0, 1), or {"input": A, "output": B}
    #[arg(long, default_value = "0.0", value_name = "RATIO", value_parser = ratios)]
    pub(crate) random_range_ratio: (f64, f64),
    /// Tokens that all random prompts begin with
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = crate::args::whole::<u32>)]
    pub(crate) random_prefix_len: u32,
    /// Tokens of a prefix
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = crate::args::whole::<u32>)]
    pub(crate) prefix_repetition_prefix_len: u32,
    /// Tokens of a suffix
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = crate::args::whole::<u32>)]
    pub(crate) prefix_repetition_suffix_len: u32,
    /// Different prefixes
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = crate::args::whole::<u32>)]
    pub(crate) prefix_repetition_num_prefixes: u32,
    /// Tokens of an answer
    #[arg(long, default_value_t = 128, value_name = "N", value_parser = crate::args::whole::<u32>)]
    pub(crate) prefix_repetition_output_len: u32,
    /// Tokens of an answer where a line of the file does not say
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = crate::args::whole::<u32>)]
    pub(crate) custom_output_len: u32,
    /// Send lines of the file as they are (the chat API never gets rendered ones)
    #[arg(long)]
    pub(crate) skip_chat_template: bool,
    /// Keep the order of the file
    #[arg(long)]
    pub(crate) disable_shuffle: bool,
    /// Template variables
    #[arg(long, value_name = "JSON", value_parser = object)]
    pub(crate) chat_template_kwargs: Option<Map<String, Value>>,
}

/// Fields of the request that shape the answer. What is not given is left to the server.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct RequestArgs {
    /// Go on behind the model's own end; always so with random prompts
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Log-probabilities of so many tokens a position
    #[arg(long, value_name = "N", value_parser = crate::args::whole::<u32>)]
    pub(crate) logprobs: Option<u32>,
    /// 0 is greedy
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f64>,
    /// Keep the likeliest tokens that make up this probability
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f64>,
    /// Keep the K likeliest tokens
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub(crate) top_k: Option<i64>,
    /// Keep tokens at least this likely, relative to the likeliest
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f64>,
    /// Penalty by count
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f64>,
    /// Penalty by presence
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f64>,
    /// Factor on repeated tokens
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) repetition_penalty: Option<f64>,
    /// Further fields of every request
    #[arg(long, value_name = "JSON", value_parser = object)]
    pub(crate) extra_body: Option<Map<String, Value>>,
}

/// Load a server with OpenAI's API and measure what its clients see
///
/// Prompts, arrival times, definitions, table and JSON are those of `vllm bench serve` for the same flags and seed.
#[derive(Debug, Args)]
pub(crate) struct BenchServeArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// The server's host
    #[arg(long, default_value = "127.0.0.1", help_heading = "Server")]
    pub(crate) host: String,
    /// The server's port
    #[arg(long, default_value_t = 8000, help_heading = "Server", value_parser = crate::args::whole::<u16>)]
    pub(crate) port: u16,
    #[command(flatten)]
    pub(crate) dataset: DatasetArgs,
    /// Prompts; 0 takes all lines of a custom file
    #[arg(long, default_value_t = 1000, value_name = "N", help_heading = "Prompts", value_parser = crate::args::whole::<usize>)]
    pub(crate) num_prompts: usize,
    /// Send all prompts so many times, each time with another seed, and score the answers of a file that names them
    #[arg(long, default_value_t = 0, value_name = "N", help_heading = "Prompts", value_parser = crate::args::whole::<u32>)]
    pub(crate) epochs: u32,
    #[command(flatten)]
    pub(crate) request: RequestArgs,
    #[command(flatten)]
    pub(crate) traffic: TrafficArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Load tests over several concurrencies, twice, and one page of HTML with plots
///
/// Without --base-url a server is started in this process: of the embedded model, or of what the flags behind -- say.
/// The first pass warms the server up; what is shown is the last one.
#[derive(Debug, Args)]
pub(crate) struct BenchGridArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(flatten)]
    pub(crate) dataset: DatasetArgs,
    #[command(flatten)]
    pub(crate) request: RequestArgs,
    /// Requests under way at the same time, one cell each
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,2,4,8", help_heading = "Grid", value_parser = crate::args::whole::<usize>)]
    pub(crate) concurrency: Vec<usize>,
    /// Requests of a cell: one number for all or one for each (default: four times the concurrency, at least 8)
    #[arg(long, value_name = "LIST", value_delimiter = ',', help_heading = "Grid", value_parser = crate::args::whole::<usize>)]
    pub(crate) num_prompts: Vec<usize>,
    /// Passes over all cells; one alone stays cold
    #[arg(long, value_name = "N", default_value_t = 2, help_heading = "Grid", value_parser = crate::args::whole::<usize>)]
    pub(crate) passes: usize,
    /// Send the same prompts in every pass, so that a prefix cache serves all but the first
    #[arg(long, help_heading = "Grid")]
    pub(crate) same_prompts: bool,
    /// Do not measure how fast prompts alone are read
    #[arg(long, help_heading = "Grid")]
    pub(crate) skip_prefill: bool,
    /// A second replica of the model: also measure how much the two disturb each other, each alone and both at once
    #[arg(long, value_name = "URL", help_heading = "Grid")]
    pub(crate) beside: Option<String>,
    /// The page
    #[arg(long, value_name = "FILE", default_value = "bench-grid.html", help_heading = "Results")]
    pub(crate) html: PathBuf,
    /// Also write everything as JSON
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    pub(crate) json: Option<PathBuf>,
    /// Heading of the page
    #[arg(long, value_name = "TEXT", help_heading = "Results")]
    pub(crate) title: Option<String>,
    /// What else is known of this run, for example hardware=...
    #[arg(long, value_name = "KEY=VALUE", num_args = 0.., value_parser = pair, help_heading = "Results")]
    pub(crate) metadata: Vec<(String, String)>,
    /// Show no progress
    #[arg(long, help_heading = "Results")]
    pub(crate) disable_tqdm: bool,
    /// Model and flags of the server that is started, as behind `glimmer serve`
    #[arg(last = true, value_name = "SERVE FLAGS")]
    pub(crate) serve_flags: Vec<String>,
}

/// When requests are sent.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Traffic")]
pub(crate) struct TrafficArgs {
    /// Requests a second; inf sends all at once
    #[arg(long, default_value_t = f64::INFINITY, value_name = "RATE", allow_negative_numbers = true)]
    pub(crate) request_rate: f64,
    /// Shape of the gaps' gamma distribution: 1 is a Poisson process, less is burstier
    #[arg(long, default_value_t = 1.0, value_name = "SHAPE", allow_negative_numbers = true)]
    pub(crate) burstiness: f64,
    /// Most requests under way at the same time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) max_concurrency: Option<u32>,
    /// Raise the rate during the run
    #[arg(long, value_enum, requires = "ramp_up_start_rps", requires = "ramp_up_end_rps")]
    pub(crate) ramp_up_strategy: Option<RampUp>,
    /// Rate of the first request
    #[arg(long, value_name = "RATE", allow_negative_numbers = true, requires = "ramp_up_strategy")]
    pub(crate) ramp_up_start_rps: Option<f64>,
    /// Rate of the last request
    #[arg(long, value_name = "RATE", allow_negative_numbers = true, requires = "ramp_up_strategy")]
    pub(crate) ramp_up_end_rps: Option<f64>,
    /// Send the first prompt so many times before
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = crate::args::whole::<usize>)]
    pub(crate) num_warmups: usize,
    /// Single-token requests a second beside the others, reported by themselves
    #[arg(long, default_value_t = 0.0, value_name = "RATE", value_parser = not_negative)]
    pub(crate) probe_request_rate: f64,
}

/// What is reported and kept.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Results")]
pub(crate) struct OutputArgs {
    /// Quantities to report: ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "ttft,tpot,itl")]
    pub(crate) percentile_metrics: Vec<String>,
    /// Percentiles to report
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "99", value_parser = percentile)]
    pub(crate) metric_percentiles: Vec<f64>,
    /// Limits of good requests in milliseconds, of ttft, tpot and e2el
    #[arg(long, value_name = "NAME:MS", num_args = 1..)]
    pub(crate) goodput: Vec<String>,
    /// Write the result as JSON
    #[arg(long)]
    pub(crate) save_result: bool,
    /// Put every request into it
    #[arg(long)]
    pub(crate) save_detailed: bool,
    /// Append the result to the file as a line of JSON
    #[arg(long)]
    pub(crate) append_result: bool,
    /// Directory of the result (default: here)
    #[arg(long, value_name = "DIR")]
    pub(crate) result_dir: Option<PathBuf>,
    /// Name of the file (default: made of label, rate, concurrency, model and time)
    #[arg(long, value_name = "FILE")]
    pub(crate) result_filename: Option<PathBuf>,
    /// What else is known of this run; goes into the result
    #[arg(long, value_name = "KEY=VALUE", num_args = 0.., value_parser = pair)]
    pub(crate) metadata: Vec<(String, String)>,
    /// Label of the result (default: the backend)
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// Show no progress
    #[arg(long)]
    pub(crate) disable_tqdm: bool,
    /// What ids of requests begin with (default: bench- and a time)
    #[arg(long, value_name = "TEXT")]
    pub(crate) request_id_prefix: Option<String>,
}

/// A header or label as `KEY=VALUE`.
pub(crate) fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected KEY=VALUE")?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

fn object(text: &str) -> Result<Map<String, Value>, String> {
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err("expected a JSON object".to_owned()),
        Err(error) => Err(format!("not JSON: {error}")),
    }
}

pub(crate) fn number(text: &str, holds: impl Fn(f64) -> bool, expected: &str) -> Result<f64, String> {
    text.parse().ok().filter(|&number| holds(number)).ok_or_else(|| format!("expected {expected}"))
}

pub(crate) fn positive(text: &str) -> Result<f64, String> {
    number(text, |number| number > 0.0 && number < 1e9, "a number above 0")
}

pub(crate) fn not_negative(text: &str) -> Result<f64, String> {
    number(text, |number| (0.0..1e6).contains(&number), "a number from 0")
}

fn percentile(text: &str) -> Result<f64, String> {
    number(text, |number| (0.0..=100.0).contains(&number), "a number from 0 to 100")
}

/// One ratio for both, or `{"input": A, "output": B}`.
fn ratios(text: &str) -> Result<(f64, f64), String> {
    if let Ok(ratio) = text.parse() {
        return Ok((ratio, ratio));
    }
    let map = object(text)?;
    let ratio = |key: &str| map.get(key).and_then(Value::as_f64);
    match (ratio("input"), ratio("output")) {
        (Some(input), Some(output)) if map.len() == 2 => Ok((input, output)),
        _ => Err("expected a number or {\"input\": A, \"output\": B}".to_owned()),
    }
}

/// The command line with underscores in the names of the load generator's flags made dashes: the established tool takes
/// both.
pub(crate) fn with_dashes(arguments: impl Iterator<Item = std::ffi::OsString>) -> Vec<std::ffi::OsString> {
    let mut arguments: Vec<_> = arguments.collect();
    let first = |name: &str| arguments.iter().position(|argument| argument == name);
    let ours =
        first("bench").is_some_and(|at| arguments.get(at + 1).is_some_and(|next| next == "serve" || next == "grid"));
    if ours {
        let end = first("--").unwrap_or(arguments.len());
        for argument in &mut arguments[..end] {
            let Some(flag) = argument.to_str().and_then(|text| text.strip_prefix("--")) else { continue };
            let (name, value) = flag.split_at(flag.find('=').unwrap_or(flag.len()));
            *argument = format!("--{}{value}", name.replace('_', "-")).into();
        }
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn underscores_in_names_of_flags_are_dashes() {
        let made = |text: &str| {
            let made = with_dashes(text.split(' ').map(Into::into));
            made.iter().map(|argument| argument.to_str().unwrap().to_owned()).collect::<Vec<_>>().join(" ")
        };
        let line =
            "glimmer --threads 2 bench grid --num_prompts=a_b --dataset_name prefix_repetition -- --max_num_seqs 1";
        let wanted =
            "glimmer --threads 2 bench grid --num-prompts=a_b --dataset-name prefix_repetition -- --max_num_seqs 1";
        assert_eq!(made(line), wanted);
        assert_eq!(made("glimmer serve --max_num_seqs 1"), "glimmer serve --max_num_seqs 1");
    }

    #[test]
    fn ratios_are_one_number_or_two() {
        assert_eq!(ratios("0.2"), Ok((0.2, 0.2)));
        assert_eq!(ratios(r#"{"input": 0.1, "output": 0}"#), Ok((0.1, 0.0)));
        assert!(ratios("{\"input\": 0.1}").is_err() && ratios("x").is_err());
    }
}
