//! The command line, as people read it in `--help`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::load_args::{BenchGridArgs, BenchServeArgs};

/// Quantize, verify, run and evaluate GLM-5.3-Flash models.
///
/// A MODEL is a directory with config.json and safetensors shards: the BF16 checkpoint or a W4A16 artifact made from it.
/// Where MODEL is left out, the small trained model inside this program is used. --source names the checkpoint that an
/// artifact is made from, --artifact the artifact, --out what is written.
#[derive(Debug, Parser)]
#[command(name = "glimmer", version, max_term_width = 110, arg_required_else_help = true, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Worker threads (default: all cores)
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
}

const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 the answer is no (a gate, a check or a comparison failed, a model is damaged or does not fit, a \
load test got no answer); 2 wrong flags, or an error; 130 ended by Ctrl-C";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// The whole chain on the embedded model, in under a minute: start here
    ///
    /// Quantizes the embedded BF16 model, verifies the artifact, evaluates both, measures how far they are apart and how
    /// many drafts are accepted, and answers a question with reasoning, a tool request and a question about a picture.
    Demo(DemoArgs),
    /// What a model directory or a config.json holds: groups, bytes, what is quantized; exit code 1 when something is wrong
    /// with it
    Inspect(InspectArgs),
    /// What a model and the flags of a server need of memory on each device, and what fits; exit code 1 when it does not
    #[command(disable_help_flag = true)]
    Plan(PlanArgs),
    /// Quantize the routed experts of a BF16 (or block-FP8) checkpoint to INT4, keep all else byte for byte
    Quantize(QuantizeArgs),
    /// Check an artifact with static gates; exit code 1 when one fails, 2 when there is nothing to judge
    Verify(VerifyArgs),
    /// Answer one prompt
    Generate(GenerateArgs),
    /// Talk to a model in the terminal
    Chat(ChatArgs),
    /// Serve a model over HTTP with OpenAI's and Anthropic's APIs (flags as `vllm serve` names them; see serve --help)
    #[command(disable_help_flag = true)]
    Serve(ServeArgs),
    /// Accuracy on task files, KL divergence against another model, acceptance of drafts
    Eval(EvalArgs),
    /// Write a random checkpoint for any configuration, reproducible by seed
    Synth(SynthArgs),
    /// Print one tensor of an artifact as numbers
    Dequantize(DequantizeArgs),
    /// Add the BF16 draft (MTP) layer of a checkpoint to an artifact that lacks it
    MergeMtp(MergeMtpArgs),
    /// Rewrite only the quantization targets and the ignore list of an artifact's config.json
    FixConfig(FixConfigArgs),
    /// Repeat a log of `serve --record-steps` and name the first difference; exit code 1 when there is one
    Replay(ReplayArgs),
    /// What this program finds of devices and their libraries, and what is missing; exit code 1 when a model could not
    /// run on a GPU
    Doctor(DoctorArgs),
    /// Measure this machine, or a server
    #[command(subcommand)]
    Bench(BenchCommand),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceName {
    /// The CPU
    Cpu,
    /// A GPU, in a program built with the feature `cuda`
    Cuda,
}

/// Where a model computes.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Device")]
pub(crate) struct DeviceArgs {
    /// Where to compute
    #[arg(long, value_enum, default_value = "cpu")]
    pub(crate) device: DeviceName,
    #[command(flatten)]
    pub(crate) cuda: CudaArgs,
}

/// What a GPU needs beside its driver.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub(crate) struct CudaArgs {
    /// Library of the kernel compiler, libnvrtc.so.13 (default: where the loader and CUDA's folder have it)
    #[arg(long, value_name = "FILE")]
    pub(crate) nvrtc: Option<PathBuf>,
    /// Folder of compiled kernels (default: glimmer/kernels in the user's cache folder)
    #[arg(long, value_name = "DIR")]
    pub(crate) kernel_cache: Option<PathBuf>,
    /// Launch every kernel of a step by itself instead of repeating steps as graphs
    #[arg(long)]
    pub(crate) enforce_eager: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub(crate) cuda: CudaArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Also write all results as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Keep the artifact that the demo makes in this (new) directory
    #[arg(long, value_name = "DIR")]
    pub(crate) keep: Option<PathBuf>,
    /// Folder of the sources, whose models/micro-bf16 and data are used instead of what is embedded
    #[arg(long, value_name = "DIR")]
    pub(crate) from: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// A model directory, if any, and flags
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "FLAGS")]
    pub(crate) flags: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// Model directory or a lone config.json (default: the embedded model)
    #[arg(value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// The same, as other commands take it
    #[arg(long = "model", short = 'm', value_name = "MODEL", conflicts_with = "model")]
    pub(crate) named: Option<PathBuf>,
    /// Show what the W4A16 artifact of this checkpoint would hold
    #[arg(long)]
    pub(crate) as_w4a16: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Model directory or a lone config.json (default: the embedded model), then flags of a server; --help lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "MODEL AND FLAGS")]
    pub(crate) arguments: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Method {
    /// Second-order error compensation over calibration data
    Gptq,
    /// Round to nearest, no calibration
    Rtn,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Order {
    /// Columns by falling Hessian diagonal; leaves no trace in the file
    Static,
    /// Columns as they are
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scales {
    /// Largest magnitude / 7.5
    Minmax,
    /// Least squared error
    Mse,
    /// Least squared error weighted by each column's importance
    Imse,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CalibratedExperts {
    /// Each expert sees the tokens routed to it
    Routed,
    /// Each expert sees every token
    All,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum IgnoreStyle {
    /// Seven patterns that fit every loader's names
    Regex,
    /// The patterns and every name spelt out, for loaders that only compare names
    Dual,
}

impl From<IgnoreStyle> for glimmer_checkpoint::IgnoreStyle {
    fn from(style: IgnoreStyle) -> Self {
        match style {
            IgnoreStyle::Regex => Self::Regex,
            IgnoreStyle::Dual => Self::Dual,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct QuantizeArgs {
    /// Checkpoint to quantize (default: the embedded model)
    #[arg(long, value_name = "DIR")]
    pub(crate) source: Option<PathBuf>,
    /// Directory of the artifact; must be empty or absent, unless --resume
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Calibration samples, one JSON object a line: {"input_ids": [...]} or {"text": "..."}, optional "images": [base64]
    /// (default for the embedded model: its own set)
    #[arg(long, value_name = "FILE")]
    pub(crate) calib: Option<PathBuf>,
    /// Quantization method
    #[arg(long, value_enum, default_value = "gptq")]
    pub(crate) method: Method,
    /// Order in which GPTQ takes columns
    #[arg(long, value_enum, default_value = "static")]
    pub(crate) order: Order,
    /// How scales are chosen
    #[arg(long, value_enum, default_value = "imse")]
    pub(crate) scales: Scales,
    /// Tokens' worth of the layer's Hessian mixed into each expert's (default: the matrix's columns)
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub(crate) shrink: Option<f64>,
    /// Dampening, as a fraction of the mean Hessian diagonal
    #[arg(long, default_value_t = 0.01, value_name = "F", allow_negative_numbers = true)]
    pub(crate) damp: f64,
    /// Which tokens an expert is calibrated on
    #[arg(long, value_enum, default_value = "routed")]
    pub(crate) experts: CalibratedExperts,
    /// How config.json says what is not quantized
    #[arg(long, value_enum, default_value = "regex")]
    pub(crate) ignore_style: IgnoreStyle,
    /// Memory that the run may take in all, in GiB; less than one layer takes is raised to that (default: what makes the
    /// run faster, at most half of the free memory)
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) budget_gib: Option<f64>,
    /// Go on with an interrupted run in --out; the result is the same, byte for byte
    #[arg(long)]
    pub(crate) resume: bool,
    /// Do as llm-compressor's defaults do: all experts see all tokens, min-max scales, dead columns zeroed
    #[arg(long, conflicts_with_all = ["method", "order", "scales", "shrink", "damp", "experts"])]
    pub(crate) parity: bool,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// The artifact
    #[arg(value_name = "ARTIFACT", required_unless_present = "named")]
    pub(crate) artifact: Option<PathBuf>,
    /// The same, as other commands take it
    #[arg(long = "artifact", value_name = "ARTIFACT", conflicts_with = "artifact")]
    pub(crate) named: Option<PathBuf>,
    /// The checkpoint that it was made from; without it the comparing gates are skipped
    #[arg(long, value_name = "DIR")]
    pub(crate) source: Option<PathBuf>,
    /// Check every tensor where the default takes a sample
    #[arg(long)]
    pub(crate) full: bool,
    /// Also run artifact and source, which must both fit into memory, and judge the behaviour (G17)
    #[arg(long, requires = "source")]
    pub(crate) run: bool,
    /// Largest divergence from the source that passes: KL in nats a token, each capped at 0.05
    #[arg(long, value_name = "NATS", default_value_t = 5e-4, requires = "run", allow_negative_numbers = true)]
    pub(crate) max_divergence: f64,
    /// Documents to run on (JSONL with input_ids; default: the embedded 200)
    #[arg(long, value_name = "FILE", requires = "run")]
    pub(crate) documents: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// How answers are sampled.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// 0 is greedy (default: generation_config.json)
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f32>,
    /// Keep the K likeliest tokens
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<u32>,
    /// Keep the likeliest tokens that make up this probability
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Keep tokens at least this likely, relative to the likeliest
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Seed of the random numbers; equal seeds give equal answers
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Most tokens of an answer
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    /// Tokens drafted a step by the MTP layer; the answers do not depend on it
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=16))]
    pub(crate) draft_depth: u32,
}

/// How the prompt is built.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Prompt")]
pub(crate) struct PromptArgs {
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Let the model answer at once, without reasoning
    #[arg(long)]
    pub(crate) no_thinking: bool,
    /// Reasoning effort named in the prompt
    #[arg(long, value_name = "LEVEL")]
    pub(crate) reasoning_effort: Option<String>,
    /// Chat template to use instead of the model's
    #[arg(long, value_name = "FILE")]
    pub(crate) chat_template: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// Model directory (default: the embedded model)
    #[arg(long, short, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// The question; `-` reads it from standard input
    pub(crate) prompt: String,
    /// Picture to ask about (PNG, JPEG, WebP, GIF, BMP); may be given several times
    #[arg(long, value_name = "FILE")]
    pub(crate) image: Vec<PathBuf>,
    /// Tools the model may call: a JSON file with a list of OpenAI-style tools
    #[arg(long, value_name = "FILE")]
    pub(crate) tools: Option<PathBuf>,
    /// Take the prompt as it is: no chat template
    #[arg(long, conflicts_with_all = ["image", "tools", "system", "no_thinking", "reasoning_effort", "chat_template"])]
    pub(crate) raw: bool,
    /// Print the parsed answer as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Go on past the model's own stop tokens
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Further stop token ids
    #[arg(long, value_name = "ID")]
    pub(crate) stop_token: Vec<u32>,
    #[command(flatten)]
    pub(crate) prompting: PromptArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    /// Model directory (default: the embedded model)
    #[arg(long, short, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) prompting: PromptArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

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
    #[arg(long, value_name = "N")]
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
    #[arg(long, default_value_t = 16, value_name = "N")]
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
    #[arg(long, default_value_t = 0, value_name = "N", requires = "url")]
    pub(crate) seed: u32,
    /// 0 is greedy (default: the server's)
    #[arg(long, value_name = "T", requires = "url")]
    pub(crate) temperature: Option<f64>,
    /// Keep the likeliest tokens that make up this probability (default: the server's)
    #[arg(long, value_name = "P", requires = "url")]
    pub(crate) top_p: Option<f64>,
    /// Most tokens of reasoning before the answer is forced, where the server can do that
    #[arg(long, value_name = "N", requires = "url")]
    pub(crate) thinking_budget: Option<u32>,
    /// After this long a request has failed
    #[arg(long, default_value_t = 3600, value_name = "SECONDS", requires = "url", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) timeout: u32,
    /// How often a request is sent again that the server was too busy to take (status 503 or 429)
    #[arg(long, default_value_t = 10, value_name = "N", requires = "url")]
    pub(crate) retries: u32,
    /// Headers of every request
    #[arg(long, value_name = "KEY=VALUE", requires = "url", value_parser = crate::load_args::pair)]
    pub(crate) header: Vec<(String, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SynthFormat {
    /// The BF16 checkpoint
    Bf16,
    /// Its W4A16 artifact
    W4a16,
}

#[derive(Debug, Args)]
pub(crate) struct SynthArgs {
    /// Configuration to fill with random weights
    #[arg(long, value_name = "FILE")]
    pub(crate) config: PathBuf,
    /// Directory to write; must be empty or absent
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// What to write
    #[arg(long, value_enum, default_value = "bf16")]
    pub(crate) format: SynthFormat,
    /// Equal seeds give equal bytes
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Largest shard, in GB
    #[arg(long, default_value_t = 5.0, value_name = "GB", allow_negative_numbers = true)]
    pub(crate) shard_gb: f64,
}

#[derive(Debug, Args)]
pub(crate) struct DequantizeArgs {
    /// The artifact
    #[arg(long, value_name = "DIR")]
    pub(crate) artifact: PathBuf,
    /// Tensor name, with or without `.weight`
    #[arg(long, value_name = "NAME")]
    pub(crate) tensor: String,
    /// Write little-endian f32 values here instead of printing a summary
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct MergeMtpArgs {
    /// Checkpoint that has the draft layer
    #[arg(long, value_name = "DIR")]
    pub(crate) source: PathBuf,
    /// Artifact that lacks it
    #[arg(long, value_name = "DIR")]
    pub(crate) artifact: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct FixConfigArgs {
    /// The artifact; its old config.json is kept beside the new one
    #[arg(long, value_name = "DIR")]
    pub(crate) artifact: PathBuf,
    /// How config.json says what is not quantized
    #[arg(long, value_enum, default_value = "regex")]
    pub(crate) ignore_style: IgnoreStyle,
}

#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// The log
    #[arg(value_name = "FILE")]
    pub(crate) log: PathBuf,
    /// Model directory that the log was recorded with (default: the embedded model)
    #[arg(long, short, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

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
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,8,32")]
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
    #[arg(long, default_value_t = 0.99, value_name = "P")]
    pub(crate) share: f64,
    /// Largest difference of the CPU's two logits that counts as a near tie
    #[arg(long, default_value_t = 0.01, value_name = "GAP")]
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
    #[arg(long, default_value_t = 20.0, value_name = "MINUTES")]
    pub(crate) minutes: f64,
    /// End after so many requests, if that is earlier
    #[arg(long, value_name = "N")]
    pub(crate) requests: Option<u64>,
    /// Answers to be repeated alone and compared
    #[arg(long, default_value_t = 1000, value_name = "N")]
    pub(crate) compare: usize,
    /// Seed of everything that clients do
    #[arg(long, default_value_t = 0, value_name = "N")]
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
    #[arg(long, default_value_t = 0, value_name = "N")]
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
