//! The whole chain on a small model: quantize, verify, evaluate, measure, answer.
//!
//! Every stage takes its input from the one before through files, as a user's own run would. Answers are greedy with
//! speculation on, so the acceptance of drafts is measured by the evaluation itself.

mod page;
mod report;
mod stages;

pub use report::{DemoAnswer, DemoReport, KldSummary, MtpSummary, QuantizeSummary, StageTime, TaskPair, VerifySummary};

use std::path::Path;
use std::time::Instant;

use glimmer_checkpoint::Checkpoint;
use glimmer_quantize::Recipe;
use glimmer_quantize::gates::{Behaviour, VerifyOptions, verify};
use glimmer_tensor::{Backend, Cpu};

use crate::acceptance::Acceptance;
use crate::calibration::calibration_samples;
use crate::error::BenchError;
use crate::local::ModelText;
use crate::panel::Document;
use crate::pictures::PictureEncoder;
use crate::tasks::Task;

/// What the demo works on.
#[derive(Clone, Copy, Debug)]
pub struct DemoInput<'a> {
    /// Directory of the BF16 checkpoint.
    pub source: &'a Path,
    /// New or empty directory for the artifact.
    pub artifact: &'a Path,
    /// New or empty directory for the artifact of the comparison recipe.
    pub parity: &'a Path,
    /// Tasks.
    pub tasks: &'a [Task],
    /// Calibration set.
    pub calibration: &'a [Document],
    /// Token panel.
    pub documents: &'a [Document],
    /// Items of each task and mode.
    pub items: usize,
    /// Tokens drafted a step.
    pub draft_depth: usize,
    /// Sequences answered at the same time.
    pub batch: usize,
    /// Threads.
    pub threads: usize,
    /// Scorers of the token panel that run at the same time.
    pub scorers: usize,
}

/// Opens the device that evaluates and answers, for so many threads; several are open at once.
pub type DemoDevice<'a, B> = &'a (dyn Fn(usize) -> Result<B, BenchError> + Sync);

/// Hears what the demo is doing.
pub trait DemoProgress {
    /// A stage begins.
    fn stage(&mut self, name: &str);
    /// So much of it is done, from 0 to 1.
    fn done(&mut self, share: f64);
}

impl DemoProgress for () {
    fn stage(&mut self, _: &str) {}
    fn done(&mut self, _: f64) {}
}

/// Runs the chain: quantizes on the CPU, evaluates and answers on `device`.
///
/// # Errors
/// The first stage that could not be carried out. An artifact that fails a gate is a result, not an error.
pub fn demo<B: Backend>(
    input: &DemoInput<'_>,
    device: DemoDevice<'_, B>,
    progress: &mut dyn DemoProgress,
) -> Result<DemoReport, BenchError> {
    let mut clock = Clock::new(progress);
    let source = open(input.source)?;
    let text = ModelText::read(&source)?;

    clock.stage("quantize");
    let mut pictures = PictureEncoder::load(Cpu::new(input.threads), &source)?;
    let samples = calibration_samples(input.calibration, pictures.as_mut())?;
    drop(pictures);
    let quantized =
        stages::quantized(&source, &samples, &Recipe::default(), input.artifact, input.threads, &mut clock)?;

    clock.stage("verify");
    let mut verdict = verify(input.artifact, Some(input.source), &VerifyOptions::default())
        .map_err(|error| BenchError::model("verifying", error))?;

    clock.stage("quantize for comparison");
    stages::quantized(&source, &samples, &Recipe::parity(), input.parity, input.threads, &mut clock)?;
    drop(samples);

    let artifact = open(input.artifact)?;
    clock.stage("evaluate");
    let [bf16, w4a16] = stages::tasks([&source, &artifact], &text, input, device, &mut clock)?;

    clock.stage("measure divergence");
    let models = [&source, &artifact, &open(input.parity)?];
    let [default, parity] = stages::panel(models, &text, input, device, &mut clock)?;

    clock.stage("answer");
    let answers = stages::answers(&artifact, &text, input, device)?;

    let (seconds, stages) = clock.finish();
    let seconds_of = |name: &str| stages.iter().find(|time| time.stage == name).map_or(0.0, |time| time.seconds);
    let (acceptance, acceptance_bf16) = (Acceptance::from(&w4a16.drafts), Acceptance::from(&bf16.drafts));
    // An artifact of this program is at least as near to its source as one of the common recipe.
    verdict.judge_behaviour(|| {
        Ok(Behaviour {
            divergence: default.capped,
            divergence_bound: parity.capped,
            acceptance: acceptance.by_position.clone(),
            source_acceptance: acceptance_bf16.by_position.clone(),
        })
    });
    Ok(DemoReport {
        seconds,
        quantize: QuantizeSummary {
            seconds: seconds_of("quantize"),
            parity_seconds: seconds_of("quantize for comparison"),
            matrices: quantized.matrices,
            tokens: quantized.tokens,
        },
        verify: VerifySummary { passed: verdict.passed, seconds: seconds_of("verify"), verdict },
        tasks: TaskPair::join(&bf16.results, &w4a16.results),
        kld: KldSummary {
            default: default.capped,
            parity: parity.capped,
            default_detail: default,
            parity_detail: parity,
        },
        mtp: MtpSummary {
            acceptance: acceptance.by_position,
            acceptance_bf16: acceptance_bf16.by_position,
            mean_length: acceptance.mean_length,
        },
        answers,
        stages,
    })
}

fn open(path: &Path) -> Result<Checkpoint, BenchError> {
    Checkpoint::open(path).map_err(|error| BenchError::model("opening", error))
}

/// Times the stages and passes progress on.
struct Clock<'p> {
    progress: &'p mut dyn DemoProgress,
    start: Instant,
    stage: Option<(String, Instant)>,
    stages: Vec<StageTime>,
}

impl<'p> Clock<'p> {
    fn new(progress: &'p mut dyn DemoProgress) -> Self {
        Self { progress, start: Instant::now(), stage: None, stages: Vec::new() }
    }

    fn stage(&mut self, name: &str) {
        self.end_stage();
        self.progress.stage(name);
        self.stage = Some((name.to_owned(), Instant::now()));
    }

    fn done(&mut self, share: f64) {
        self.progress.done(share.min(1.0));
    }

    fn end_stage(&mut self) {
        if let Some((name, start)) = self.stage.take() {
            self.stages.push(StageTime { stage: name, seconds: start.elapsed().as_secs_f64() });
        }
    }

    fn finish(mut self) -> (f64, Vec<StageTime>) {
        self.end_stage();
        (self.start.elapsed().as_secs_f64(), self.stages)
    }
}
