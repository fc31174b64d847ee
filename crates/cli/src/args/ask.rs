//! Asking a model: prompts and how answers are sampled.

use std::path::PathBuf;

use clap::Args;

use super::DeviceArgs;

/// How answers are sampled.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// 0 is greedy (default: generation_config.json)
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f32>,
    /// Keep the K likeliest tokens
    #[arg(long, value_name = "K", value_parser = crate::args::whole::<u32>)]
    pub(crate) top_k: Option<u32>,
    /// Keep the likeliest tokens that make up this probability
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Keep tokens at least this likely, relative to the likeliest
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Seed of the random numbers; equal seeds give equal answers
    #[arg(long, default_value_t = 0, value_parser = crate::args::whole::<u64>)]
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
    #[arg(long, value_name = "LEVEL", value_parser = glimmer_server::chat::request::EFFORTS)]
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
    #[arg(long, value_name = "ID", value_parser = crate::args::whole::<u32>)]
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
