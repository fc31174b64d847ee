//! Measuring a machine or a server. What `bench serve` and `bench grid` take stands in [`crate::load_args`].

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::DeviceArgs;
use crate::load_args::{BenchGridArgs, BenchServeArgs, number, positive};

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Kernels against the limits of this machine, measured in the same run
    Kernels(BenchKernelsArgs),
    /// Decode and prefill speed of a model at several batch sizes
    Model(BenchModelArgs),
    /// The GPTQ solve against the machine's f32 rate
    Gptq(BenchGptqArgs),
    /// Load a server with OpenAI's API and measure what its clients see (flags as `vllm bench serve` names them)
    Serve(Box<BenchServeArgs>),
    /// Load tests over several concurrencies, twice, and one page of HTML with plots
    Grid(Box<BenchGridArgs>),
    /// Whether answers depend on prefix cache, drafts, chunks, company or preemption (they must not)
    Exactness(BenchExactnessArgs),
    /// What the prefix cache costs when nothing hits, against an engine without it in the same run
    PrefixCost(BenchPrefixCostArgs),
    /// Greedy answers on a GPU against the CPU's: equal, or a near tie where they part; exit code 1 otherwise
    Parity(BenchParityArgs),
    /// Many clients against a server for a long time, some of them badly behaved: does anything break or stay behind?
    Soak(BenchSoakArgs),
    /// How long a step of a configuration takes with random weights, as many layers as wanted, against what it must read
    Step(BenchStepArgs),
}

#[derive(Debug, Args)]
pub(crate) struct BenchStepArgs {
    /// Configuration
    #[arg(long, value_name = "FILE", default_value = "data/glm-5.3-flash/config.json")]
    pub(crate) config: PathBuf,
    /// First layers of it (default: all)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) layers: Option<u16>,
    /// Leave the routed experts in BF16
    #[arg(long)]
    pub(crate) bf16: bool,
    /// Sequences of the decoding steps
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,8,32", value_parser = crate::args::whole::<u16>)]
    pub(crate) sequences: Vec<u16>,
    /// Rows of each: a token and its drafts
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=17))]
    pub(crate) rows: u16,
    /// Tokens before them
    #[arg(long, default_value_t = 8192, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) context: u32,
    /// Rows of a chunk of a prompt; 0 measures none
    #[arg(long, default_value_t = 8192, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=65536))]
    pub(crate) prefill: u32,
    /// Steps of each kind
    #[arg(long, default_value_t = 40, value_name = "N", value_parser = clap::value_parser!(u16).range(4..=10_000))]
    pub(crate) repeats: u16,
    /// Take INT4 codes from this file, in turn, to see how fast weights are read from files
    #[arg(long, value_name = "FILE")]
    pub(crate) codes: Option<PathBuf>,
    /// Also whose the time is: how much shorter a step is without each kernel
    #[arg(long)]
    pub(crate) parts: bool,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BenchParityArgs {
    /// Model directory (default: the embedded model)
    #[arg(long, short, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// Directory with the task files and documents.jsonl
    #[arg(long, value_name = "DIR", default_value = "data/eval")]
    pub(crate) data: PathBuf,
    /// Prompts: text, tools, pictures and long contexts in turn
    #[arg(long, default_value_t = 200, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) prompts: u32,
    /// New tokens of each answer
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) tokens: u32,
    /// Share of answers that must be equal
    #[arg(long, default_value_t = 0.99, value_name = "P", value_parser = share)]
    pub(crate) share: f64,
    /// Largest difference of the CPU's two logits that counts as a near tie
    #[arg(long, default_value_t = 0.01, value_name = "GAP", value_parser = gap)]
    pub(crate) tie: f32,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BenchSoakArgs {
    /// Clients, each with one request at a time
    #[arg(long, default_value_t = 128, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) clients: u32,
    /// Most sequences that the server runs at once
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) sequences: u32,
    /// How long requests are started
    #[arg(long, default_value_t = 20.0, value_name = "MINUTES", value_parser = positive)]
    pub(crate) minutes: f64,
    /// End after so many requests, if that is earlier
    #[arg(long, value_name = "N", value_parser = crate::args::whole::<u64>)]
    pub(crate) requests: Option<u64>,
    /// Answers to be repeated alone and compared
    #[arg(long, default_value_t = 1000, value_name = "N", value_parser = crate::args::whole::<usize>)]
    pub(crate) compare: usize,
    /// Seed of everything that clients do
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = crate::args::whole::<u64>)]
    pub(crate) seed: u64,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// A model directory, if any, and further flags of the server (default: so little cache that pages run out)
    #[arg(last = true, value_name = "SERVE FLAGS")]
    pub(crate) flags: Vec<std::ffi::OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct BenchExactnessArgs {
    /// Model directory (default: the embedded model)
    #[arg(long, short, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// Directory with the task files and documents.jsonl
    #[arg(long, value_name = "DIR", default_value = "data/eval")]
    pub(crate) data: PathBuf,
    /// Prompts: text, tools, pictures and long contexts in turn
    #[arg(long, default_value_t = 200, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) prompts: u32,
    /// Seed of the order in which sequences join and leave
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = crate::args::whole::<u64>)]
    pub(crate) seed: u64,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BenchKernelsArgs {
    /// Families of a GPU's kernels (default: all; a wrong one says which there are)
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub(crate) family: Vec<String>,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BenchModelArgs {
    /// Model directory (default: the embedded model)
    #[arg(long, short, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// Tokens of each prompt
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) prompt_tokens: u32,
    /// Tokens generated a sequence
    #[arg(long, default_value_t = 128, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) tokens: u32,
    /// Tokens drafted a step
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=16))]
    pub(crate) draft_depth: u32,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BenchPrefixCostArgs {
    /// Model directory (default: the embedded model)
    #[arg(long, short, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// Prompts at once
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) sequences: u32,
    /// Tokens of each prompt
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) prompt_tokens: u32,
    /// Tokens generated a sequence
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) tokens: u32,
    /// Tokens drafted a step
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=16))]
    pub(crate) draft_depth: u32,
    /// Rounds: in each, the same prompts with the cache and without
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) rounds: u32,
    /// Write the result as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BenchGptqArgs {
    /// Columns of the matrix
    #[arg(long, default_value_t = 2048, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub(crate) columns: u32,
    /// Rows of the matrix
    #[arg(long, default_value_t = 2048, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) rows: u32,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

fn share(text: &str) -> Result<f64, String> {
    number(text, |number| (0.0..=1.0).contains(&number), "a share from 0 to 1")
}

fn gap(text: &str) -> Result<f32, String> {
    #[expect(clippy::cast_possible_truncation, reason = "logits have no more bits")]
    number(text, |number| (0.0..1e6).contains(&number), "a difference of logits from 0").map(|number| number as f32)
}
