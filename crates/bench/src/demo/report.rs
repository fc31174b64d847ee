//! What the demo found, as data. The names of the fields are the keys of its JSON.

use glimmer_quantize::gates::Verdict;
use serde::Serialize;
use serde_json::Value;

use crate::evaluate::TaskResult;
use crate::kld::Divergence;
use crate::tasks::Call;

/// Result of the quantizing stage.
#[derive(Clone, Debug, Serialize)]
pub struct QuantizeSummary {
    /// Seconds for the artifact.
    pub seconds: f64,
    /// Seconds for the artifact of the comparison recipe.
    pub parity_seconds: f64,
    /// Quantized matrices.
    pub matrices: usize,
    /// Calibration tokens.
    pub tokens: usize,
}

/// Result of the verifying stage.
#[derive(Clone, Debug, Serialize)]
pub struct VerifySummary {
    /// Whether no gate failed.
    pub passed: bool,
    /// Seconds.
    pub seconds: f64,
    /// The verdict, gate by gate.
    pub verdict: Verdict,
}

/// One task on both models.
#[derive(Clone, Debug, Serialize)]
pub struct TaskPair {
    /// Task.
    pub task: String,
    /// Whether the models could reason.
    pub thinking: bool,
    /// Items.
    pub items: usize,
    /// Right answers of the BF16 model, percent.
    pub bf16: f64,
    /// Right answers of the W4A16 model, percent.
    pub w4a16: f64,
}

/// Divergence from the BF16 model.
#[derive(Clone, Debug, Serialize)]
pub struct KldSummary {
    /// Capped mean of our default recipe, in nats a token.
    pub default: f64,
    /// Capped mean of the recipe that does as llm-compressor's defaults do.
    pub parity: f64,
    /// Everything about the default recipe.
    pub default_detail: Divergence,
    /// Everything about the comparison recipe.
    pub parity_detail: Divergence,
}

/// Acceptance of drafts.
#[derive(Clone, Debug, Serialize)]
pub struct MtpSummary {
    /// Share of steps in which all drafts up to this position were accepted, of the W4A16 model.
    pub acceptance: Vec<f64>,
    /// The same of the BF16 model.
    pub acceptance_bf16: Vec<f64>,
    /// Tokens a step of the W4A16 model.
    pub mean_length: f64,
}

/// One answer in full.
#[derive(Clone, Debug, Serialize)]
pub struct DemoAnswer {
    /// Id of the item.
    pub id: String,
    /// The question's text.
    pub question: String,
    /// Whether a picture belongs to it.
    pub picture: bool,
    /// Names of the tools offered.
    pub tools: Vec<String>,
    /// Reasoning.
    pub reasoning: Option<String>,
    /// Content.
    pub content: Option<String>,
    /// Tool calls.
    pub calls: Vec<Call>,
    /// The expected answer.
    pub expected: Value,
    /// Whether it was given.
    pub right: bool,
}

/// Everything that the demo found.
#[derive(Clone, Debug, Serialize)]
pub struct DemoReport {
    /// Seconds in all.
    pub seconds: f64,
    /// Quantizing.
    pub quantize: QuantizeSummary,
    /// Verifying.
    pub verify: VerifySummary,
    /// Accuracy.
    pub tasks: Vec<TaskPair>,
    /// Divergence.
    pub kld: KldSummary,
    /// Acceptance of drafts.
    pub mtp: MtpSummary,
    /// Answers in full, of the W4A16 model.
    pub answers: Vec<DemoAnswer>,
    /// Seconds by stage.
    pub stages: Vec<StageTime>,
}

/// Seconds of one stage.
#[derive(Clone, Debug, Serialize)]
pub struct StageTime {
    /// Stage.
    pub stage: String,
    /// Seconds.
    pub seconds: f64,
}

impl TaskPair {
    pub(super) fn join(bf16: &[TaskResult], w4a16: &[TaskResult]) -> Vec<Self> {
        let both = |(a, b): (&TaskResult, &TaskResult)| Self {
            task: a.task.clone(),
            thinking: a.thinking,
            items: a.items,
            bf16: a.accuracy,
            w4a16: b.accuracy,
        };
        bf16.iter().zip(w4a16).map(both).collect()
    }
}
