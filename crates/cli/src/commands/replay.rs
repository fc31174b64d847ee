//! `glimmer replay`.

use std::{fs::File, io::BufReader, io::Write as _, process::ExitCode};

use anyhow::Context as _;
use glimmer_engine::{Generator, ReplayError, replay};
use glimmer_tensor::Cpu;

use crate::{args::ReplayArgs, open};

/// Repeats a recorded run on the CPU.
pub(crate) fn run(args: &ReplayArgs, threads: usize) -> anyhow::Result<ExitCode> {
    let checkpoint = open::model(args.model.as_deref())?;
    let log = File::open(&args.log).with_context(|| format!("cannot read {}", args.log.display()))?;
    let load = |settings: &_| Generator::load(Cpu::new(threads), &checkpoint, settings);
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
