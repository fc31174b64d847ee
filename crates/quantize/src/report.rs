//! What a quantization did, matrix by matrix.
//!
//! The report in the artifact holds nothing that depends on the machine or the moment (times are in [`Timing`], which the
//! caller gets), so that an interrupted and resumed run leaves the same bytes as an undisturbed one.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::copy::NonFiniteTensor;
use crate::recipe::Recipe;

/// File name of the report as JSON.
pub const REPORT_JSON: &str = "quantization_report.json";
/// File name of the report to be read.
pub const REPORT_PAGE: &str = "quantization_report.md";

/// How the codes of a matrix were found in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// GPTQ.
    Gptq,
    /// Round to nearest, as asked.
    Rtn,
    /// Round to nearest because no calibration token reached the expert.
    RtnNoTokens,
    /// Round to nearest because the Hessian could not be factored under any dampening.
    RtnNoFactor,
}

/// One matrix.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MatrixReport {
    /// Name without `.weight`.
    pub name: String,
    /// Calibration tokens of the expert.
    pub tokens: u64,
    /// How the codes were found.
    pub outcome: Outcome,
    /// Norm of the error over norm of the weight (Frobenius).
    pub relative_error: f64,
    /// Mean squared output error over mean squared output on the expert's own tokens, over a sample of rows.
    pub output_error_own: Option<f64>,
    /// What rounding to nearest with the same scales would have given; only where GPTQ found the codes.
    #[serde(default)]
    pub output_error_rounded: Option<f64>,
    /// The output error on the pooled tokens of the layer.
    pub output_error_pooled: Option<f64>,
    /// Dampening used.
    pub damp: Option<f64>,
    /// Factorisations that failed before.
    pub failed_factors: usize,
    /// Inputs that were zero for every token.
    pub dead_columns: usize,
    /// Share of codes at -8 or 7.
    pub at_rails: f64,
}

/// One layer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerReport {
    /// The layer.
    pub layer: usize,
    /// Its matrices.
    pub matrices: Vec<MatrixReport>,
}

/// The whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The recipe.
    pub recipe: Recipe,
    /// Calibration samples.
    pub samples: usize,
    /// Calibration tokens.
    pub tokens: usize,
    /// Layers in order.
    pub layers: Vec<LayerReport>,
    /// Copied tensors that hold NaN or infinity, as the source does.
    #[serde(default)]
    pub non_finite: Vec<NonFiniteTensor>,
    /// Tensors that the configuration does not imply; copied byte for byte.
    #[serde(default)]
    pub unexpected: Vec<String>,
}

/// Where the time went, in seconds. Not part of the artifact.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Timing {
    /// Copied tensors.
    pub copies: f64,
    /// Forward passes over the calibration tokens.
    pub forward: f64,
    /// Hessians, factors, codes.
    pub solve: f64,
    /// Everything, and by layer.
    pub total: f64,
    /// Each quantized layer.
    pub layers: Vec<(usize, f64)>,
}

/// Smallest, median and largest of some values.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Spread {
    low: f64,
    median: f64,
    high: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let median = *values.get(values.len() / 2)?;
        Some(Self { low: values[0], median, high: values[values.len() - 1] })
    }
}

/// The word for a setting, as flags and JSON have it.
fn word(setting: impl Serialize) -> String {
    serde_json::to_value(setting).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

impl LayerReport {
    fn of_kind(&self, projection: &str) -> impl Iterator<Item = &MatrixReport> {
        let suffix = format!(".{projection}");
        self.matrices.iter().filter(move |m| m.name.ends_with(&suffix))
    }
}

impl Report {
    /// All matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &MatrixReport> {
        self.layers.iter().flat_map(|l| &l.matrices)
    }

    /// Matrices that were rounded to nearest although GPTQ was asked for.
    pub fn fallbacks(&self) -> impl Iterator<Item = &MatrixReport> {
        self.matrices().filter(|m| matches!(m.outcome, Outcome::RtnNoTokens | Outcome::RtnNoFactor))
    }

    /// The readable page (Markdown).
    pub fn page(&self) -> String {
        let mut page = String::new();
        let r = &self.recipe;
        let count = self.matrices().count();
        // Writing to a string cannot fail.
        let mut line = |text: std::fmt::Arguments<'_>| {
            let _: std::fmt::Result = writeln!(page, "{text}");
        };
        line(format_args!("# Quantization report\n"));
        line(format_args!(
            "{count} matrices, method {}, order {}, scales {}, dampening {}, experts {}, shrinkage {}.",
            word(r.method),
            word(r.order),
            word(r.scales),
            r.damp,
            word(r.experts),
            r.shrink.map_or_else(|| "n".to_owned(), |k| k.to_string()),
        ));
        line(format_args!("Calibrated on {} tokens in {} samples.\n", self.tokens, self.samples));
        line(format_args!(
            "`r` is the norm of the error over the norm of the weight; `out` the squared output error over the squared"
        ));
        line(format_args!("output on the expert's own tokens. Lowest / median / highest of a layer's experts.\n"));
        line(format_args!(
            "| layer | projection | tokens an expert | r | out | codes at the rails % | dampening raised | fallbacks |"
        ));
        line(format_args!("|---|---|---|---|---|---|---|---|"));
        for layer in &self.layers {
            for projection in ["gate_proj", "up_proj", "down_proj"] {
                let all = || layer.of_kind(projection);
                let spread = |values: Option<Spread>, scale: f64, digits: usize| match values {
                    Some(s) => format!(
                        "{:.digits$} / {:.digits$} / {:.digits$}",
                        s.low * scale,
                        s.median * scale,
                        s.high * scale
                    ),
                    None => "-".to_owned(),
                };
                line(format_args!(
                    "| {} | {} | {} | {} | {} | {} | {} | {} |",
                    layer.layer,
                    projection.trim_end_matches("_proj"),
                    spread(Spread::of(all().map(|m| m.tokens as f64)), 1.0, 0),
                    spread(Spread::of(all().map(|m| m.relative_error)), 1.0, 4),
                    spread(Spread::of(all().filter_map(|m| m.output_error_own)), 1.0, 5),
                    spread(Spread::of(all().map(|m| m.at_rails)), 100.0, 2),
                    all().filter(|m| m.failed_factors > 0).count(),
                    all().filter(|m| matches!(m.outcome, Outcome::RtnNoTokens | Outcome::RtnNoFactor)).count(),
                ));
            }
        }
        let fallbacks: Vec<_> = self.fallbacks().collect();
        if !fallbacks.is_empty() {
            line(format_args!("\n## Rounded to nearest for want of a usable Hessian\n"));
            for m in fallbacks {
                line(format_args!("- `{}`: {} tokens, {}", m.name, m.tokens, word(m.outcome)));
            }
        }
        if !self.non_finite.is_empty() {
            line(format_args!("\n## Copied with NaN or infinity, as the source has them\n"));
            self.non_finite.iter().for_each(|tensor| line(format_args!("- {tensor}")));
        }
        if !self.unexpected.is_empty() {
            line(format_args!("\n## Copied although the configuration does not imply them\n"));
            self.unexpected.iter().for_each(|name| line(format_args!("- `{name}`")));
        }
        page
    }
}
