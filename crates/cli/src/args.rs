//! The command line, as people read it in `--help`.

mod artifact;
mod ask;
mod bench;
mod eval;

use std::path::PathBuf;

use clap::{
    ArgMatches, Args, Command as Commands, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum,
};

pub(crate) use artifact::{
    CalibratedExperts, DequantizeArgs, FixConfigArgs, InspectArgs, MergeMtpArgs, Method, Order, PlanArgs, QuantizeArgs,
    Scales, SynthArgs, SynthFormat, VerifyArgs,
};
pub(crate) use ask::{ChatArgs, GenerateArgs, PromptArgs, SamplingArgs};
pub(crate) use bench::{
    BenchCommand, BenchExactnessArgs, BenchGptqArgs, BenchKernelsArgs, BenchModelArgs, BenchParityArgs,
    BenchPrefixCostArgs, BenchSoakArgs, BenchStepArgs,
};
pub(crate) use eval::{EvalArgs, Thinking};

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
Files that a command writes (--json, --html, --out FILE) go into folders that exist; only directories named as a result \
(--out DIR, --keep, --result-dir) are made.
Exit codes: 0 done; 1 the answer is no (a gate, a check or a comparison failed, a model is damaged or does not fit, a \
load test got no answer); 2 wrong flags, or an error; 130 ended by Ctrl-C";

impl Cli {
    /// Reads the command line. A number below 0 is the value of the option before it, so that the option says what it takes.
    ///
    /// # Errors
    /// What is wrong with it, or the help that it asks for.
    pub(crate) fn read(arguments: impl IntoIterator<Item = std::ffi::OsString>) -> Result<Self, clap::Error> {
        let mut commands = with_negative_numbers(Self::command());
        let matches: ArgMatches = commands.try_get_matches_from_mut(arguments)?;
        Self::from_arg_matches(&matches).map_err(|error| error.format(&mut commands))
    }
}

fn with_negative_numbers(commands: Commands) -> Commands {
    let takes = |arg: &clap::Arg| arg.get_long().is_some() && arg.get_action().takes_values();
    let commands = commands.mut_args(|arg| if takes(&arg) { arg.allow_negative_numbers(true) } else { arg });
    let names: Vec<String> = commands.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    names.into_iter().fold(commands, |commands, name| commands.mut_subcommand(name, with_negative_numbers))
}

/// A whole number of a type.
pub(crate) fn whole<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    let most = u64::MAX >> (64 - 8 * size_of::<T>());
    let number = text.parse().ok().and_then(|number: u64| T::try_from(number).ok());
    number.ok_or_else(|| format!("expected a whole number from 0 to {most}"))
}

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
    /// Element type of latents and index keys (default: auto, which is 16 bits)
    #[arg(long, value_enum, value_name = "TYPE")]
    pub(crate) kv_cache_dtype: Option<CacheType>,
}

/// How a GPU keeps latents and index keys, by vLLM's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CacheType {
    /// IEEE halves where the model has the widths for them, which this model has
    Auto,
    /// The same: 16 bits
    Bfloat16,
    /// f32, as on the CPU
    Float32,
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
pub(crate) struct ReplayArgs {
    /// The log
    #[arg(value_name = "FILE")]
    pub(crate) log: PathBuf,
    /// Model directory that the log was recorded with (default: the embedded model)
    #[arg(long, short, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// Directory with tokenizer.json, where the log's answers have shapes (default: the one that the log names, which is what
    /// the server was given by its --tokenizer, else the model's)
    #[arg(long, value_name = "DIR")]
    pub(crate) tokenizer: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}
