//! Artifacts: what a directory holds, making one, checking it, mending it.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

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
    #[arg(long, default_value_t = 0, value_parser = crate::args::whole::<u64>)]
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
