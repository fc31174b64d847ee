//! `glimmer replay`.

use std::{fs::File, io::BufReader, io::Write as _, path::PathBuf, process::ExitCode, sync::OnceLock};

use anyhow::Context as _;
use glimmer_checkpoint::Checkpoint;
use glimmer_engine::{
    Generator, Recorded, ReplayError,
    constraint::{Constraint, ConstraintError, Grammars},
    replay,
    request::Structure,
};
use glimmer_tensor::Backend;
use glimmer_text::{GrammarCompiler, Tokenizer};

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
    let shapes = Shapes { checkpoint: &checkpoint, source: OnceLock::new(), compiler: OnceLock::new() };
    let load = |recorded: &Recorded<'_>| {
        let ends = recorded.settings.end_tokens.as_ref().unwrap_or(&checkpoint.config().text.eos_token_ids);
        let named = recorded.tokenizer.map(PathBuf::from);
        let tokenizer = args.tokenizer.clone().or(named);
        shapes.source.get_or_init(|| Source { tokenizer, ends: ends.clone() });
        Generator::load(backend, &checkpoint, recorded.settings)
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
    source: OnceLock<Source>,
    compiler: OnceLock<Result<GrammarCompiler, ConstraintError>>,
}

/// What grammars are made of.
#[derive(Debug, Default)]
struct Source {
    /// Directory of the tokenizer, if it is not the model's.
    tokenizer: Option<PathBuf>,
    /// End tokens of the recorded engine.
    ends: Vec<u32>,
}

impl Shapes<'_> {
    fn open(&self) -> Result<GrammarCompiler, ConstraintError> {
        let source = self.source.get().ok_or_else(|| ConstraintError("a log begins with its settings".to_owned()))?;
        let place = source.tokenizer.as_deref().map_or("the model".to_owned(), |path| path.display().to_string());
        let wrong = |error: &dyn std::fmt::Display| {
            let need = "answers have a shape, for which the tokenizer of the recorded server is needed";
            ConstraintError(format!("{need}; that of {place} does not do: {error}; name one by --tokenizer DIR"))
        };
        let tokenizer = match &source.tokenizer {
            Some(directory) => Tokenizer::from_dir(directory).map_err(|error| wrong(&error))?,
            None => {
                let file = self.checkpoint.file("tokenizer.json").ok_or_else(|| wrong(&"no tokenizer.json"))?;
                Tokenizer::from_bytes(file.as_slice()).map_err(|error| wrong(&error))?
            }
        };
        GrammarCompiler::new(&tokenizer, &source.ends).map_err(|error| wrong(&error))
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
