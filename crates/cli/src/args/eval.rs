//! Evaluating a model or a server.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::DeviceArgs;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Thinking {
    /// With reasoning
    On,
    /// Without, for items that can be answered at once
    Off,
    /// One after the other
    Both,
}

#[derive(Debug, Args)]
pub(crate) struct EvalArgs {
    /// Evaluate what answers here with OpenAI's chat completions API, as http://host:8000, instead of a model on this
    /// machine
    #[arg(value_name = "URL", conflicts_with_all = ["kld_against", "acceptance", "draft_depth"])]
    pub(crate) url: Option<String>,
    /// Model directory (default: the embedded model); with a URL the model's name there (default: the first it lists)
    #[arg(long, short, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// Task file (JSONL) or the name of an embedded one; may be given several times (default: all embedded ones)
    #[arg(long, value_name = "TASK")]
    pub(crate) task: Vec<String>,
    /// Questions (JSONL): GSM8K as distributed, choices as of GPQA, integers as of AIME, or a task file; may be given
    /// several times
    #[arg(long, value_name = "FILE", conflicts_with = "kld_against")]
    pub(crate) data: Vec<PathBuf>,
    /// Items of each task
    #[arg(long, value_name = "N", value_parser = crate::args::whole::<usize>)]
    pub(crate) limit: Option<usize>,
    /// With or without reasoning
    #[arg(long, value_enum, default_value = "both")]
    pub(crate) thinking: Thinking,
    /// Measure the KL divergence of --model from this model (without MODEL: the embedded one) on the token panel, instead
    /// of tasks
    #[arg(long, value_name = "MODEL", num_args = 0..=1, conflicts_with_all = ["task", "acceptance"])]
    pub(crate) kld_against: Option<Option<PathBuf>>,
    /// Documents for the panel (JSONL with input_ids; default: the embedded 200)
    #[arg(long, value_name = "FILE", requires = "kld_against")]
    pub(crate) documents: Option<PathBuf>,
    /// Measure how many drafts are accepted, by position, instead of tasks
    #[arg(long)]
    pub(crate) acceptance: bool,
    /// Most new tokens an item (default: 192; with a URL what the server allows)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: Option<u32>,
    /// Items answered at the same time
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = crate::args::whole::<usize>)]
    pub(crate) batch: usize,
    /// Tokens drafted a step
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=16))]
    pub(crate) draft_depth: u32,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) remote: RemoteArgs,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

/// Evaluation of a server.
#[derive(Debug, Args)]
#[command(next_help_heading = "With a URL")]
pub(crate) struct RemoteArgs {
    /// Passes over all items, each with a seed of its own
    #[arg(long, default_value_t = 1, value_name = "N", requires = "url", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) epochs: u32,
    /// Seed of the first pass
    #[arg(long, default_value_t = 0, value_name = "N", requires = "url", value_parser = crate::args::whole::<u32>)]
    pub(crate) seed: u32,
    /// 0 is greedy (default: the server's)
    #[arg(long, value_name = "T", requires = "url", value_parser = crate::load_args::not_negative)]
    pub(crate) temperature: Option<f64>,
    /// Keep the likeliest tokens that make up this probability (default: the server's)
    #[arg(long, value_name = "P", requires = "url", value_parser = crate::load_args::not_negative)]
    pub(crate) top_p: Option<f64>,
    /// Most tokens of reasoning before the answer is forced, where the server can do that
    #[arg(long, value_name = "N", requires = "url", value_parser = crate::args::whole::<u32>)]
    pub(crate) thinking_budget: Option<u32>,
    /// After this long a request has failed
    #[arg(long, default_value_t = 3600, value_name = "SECONDS", requires = "url", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) timeout: u32,
    /// How often a request is sent again that the server was too busy to take (status 503 or 429)
    #[arg(long, default_value_t = 10, value_name = "N", requires = "url", value_parser = crate::args::whole::<u32>)]
    pub(crate) retries: u32,
    /// Headers of every request
    #[arg(long, value_name = "KEY=VALUE", requires = "url", value_parser = crate::load_args::pair)]
    pub(crate) header: Vec<(String, String)>,
    /// Certificates (PEM) to trust instead of the public authorities, for an https URL
    #[arg(long, value_name = "FILE", requires = "url")]
    pub(crate) ca_file: Option<PathBuf>,
}
