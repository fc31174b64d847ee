//! `glimmer replay`.

use std::{fs::File, io::BufReader, io::Write as _, process::ExitCode, sync::OnceLock};

use anyhow::Context as _;
use glimmer_bench::ModelText;
use glimmer_checkpoint::Checkpoint;
use glimmer_engine::{
    Generator, ReplayError, Settings,
    constraint::{Constraint, ConstraintError, Grammars},
    replay,
    request::Structure,
};
use glimmer_tensor::Backend;
use glimmer_text::GrammarCompiler;

use crate::{
    args::ReplayArgs,
    device::{Place, on_device},
    open,
};

/// Repeats a recorded run.
pub(crate) fn run(args: &ReplayArgs, threads: usize) -> anyhow::Result<ExitCode> {
    on_device!(Place::of(&args.device)?, open => repeat(args, open(threads)?))
}

fn repeat<B: Backend>(args: &ReplayArgs, backend: B) -> anyhow::Result<ExitCode> {
    let checkpoint = open::model(args.model.as_deref())?;
    let log = File::open(&args.log).with_context(|| format!("cannot read {}", args.log.display()))?;
    let shapes = Shapes { checkpoint: &checkpoint, ends: OnceLock::new(), compiler: OnceLock::new() };
    let load = |settings: &Settings| {
        let ends = settings.end_tokens.as_ref().unwrap_or(&checkpoint.config().text.eos_token_ids);
        shapes.ends.get_or_init(|| ends.clone());
        Generator::load(backend, &checkpoint, settings)
    };
    let mut out = anstream::stdout().lock();
    match replay(BufReader::new(log), load, Some(&shapes)) {
        Ok(done) => {
            writeln!(out, "{} steps and {} tokens, all as recorded", done.steps, done.tokens)?;
            if done.unfinished {
                writeln!(out, "The log ends within its last step, which was finished here.")?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(difference @ ReplayError::Difference { .. }) => {
            writeln!(out, "{}: {difference}", args.log.display())?;
            Ok(ExitCode::from(1))
        }
        Err(error) => Err(error).with_context(|| args.log.display().to_string()),
    }
}

/// Makes the shapes of answers anew from what the log says about them. Most logs have none, so the tokenizer is read and the
/// tree of its tokens built at the first one.
#[derive(Debug)]
struct Shapes<'a> {
    checkpoint: &'a Checkpoint,
    /// End tokens of the recorded engine.
    ends: OnceLock<Vec<u32>>,
    compiler: OnceLock<Result<GrammarCompiler, ConstraintError>>,
}

impl Shapes<'_> {
    fn open(&self) -> Result<GrammarCompiler, ConstraintError> {
        let wrong = |error: &dyn std::fmt::Display| {
            ConstraintError(format!("answers have a shape, for which the model's tokenizer is needed: {error}"))
        };
        let text = ModelText::read(self.checkpoint).map_err(|error| wrong(&error))?;
        let ends = self.ends.get().map_or(&[][..], Vec::as_slice);
        GrammarCompiler::new(text.format.tokenizer(), ends).map_err(|error| wrong(&error))
    }
}

impl Grammars for Shapes<'_> {
    fn compile(&self, structure: &Structure) -> Result<Box<dyn Constraint>, ConstraintError> {
        match self.compiler.get_or_init(|| self.open()) {
            Ok(compiler) => compiler.compile(structure),
            Err(error) => Err(error.clone()),
        }
    }
}
