//! `glimmer replay`.

use std::{fs::File, io::BufReader, io::Write as _, process::ExitCode};

use anyhow::Context as _;
use glimmer_engine::{Generator, ReplayError, replay};
use glimmer_tensor::Backend;

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
    let load = |settings: &_| Generator::load(backend, &checkpoint, settings);
    let mut out = anstream::stdout().lock();
    match replay(BufReader::new(log), load, None) {
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
