//! `glimmer verify`.

use std::{io::Write as _, path::Path, process::ExitCode};

use anyhow::bail;
use glimmer_bench::{ModelText, behaviour};
use glimmer_checkpoint::Checkpoint;
use glimmer_quantize::gates::{Behaviour, VerifyOptions, verify};
use glimmer_tensor::Cpu;

use super::eval::documents;
use crate::{args::VerifyArgs, progress};

/// Runs the gates. Exit code 1 when one fails.
pub(crate) fn run(args: &VerifyArgs, threads: usize) -> anyhow::Result<ExitCode> {
    if !(args.max_divergence > 0.0 && args.max_divergence.is_finite()) {
        bail!("--max-divergence {}: expected a number of nats above 0", args.max_divergence);
    }
    let Some(artifact) = args.artifact.as_deref().or(args.named.as_deref()) else { bail!("name the artifact") };
    let options = VerifyOptions { full: args.full, ..VerifyOptions::default() };
    let mut verdict = verify(artifact, args.source.as_deref(), &options)?;
    // What is damaged need not be run, and would only be reported twice.
    if let Some(source) = args.source.as_deref().filter(|_| args.run && verdict.passed) {
        verdict.judge_behaviour(|| measure(args, source, artifact, threads).map_err(|error| format!("{error:#}")));
    }
    let mut out = anstream::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &verdict)?;
        writeln!(out)?;
    } else {
        writeln!(out, "{verdict}")?;
    }
    Ok(ExitCode::from(u8::from(!verdict.passed)))
}

/// The figures of G17.
fn measure(args: &VerifyArgs, source: &Path, artifact: &Path, threads: usize) -> anyhow::Result<Behaviour> {
    let (source, artifact) = (Checkpoint::open(source)?, Checkpoint::open(artifact)?);
    let documents = documents(args.documents.as_deref())?;
    let vocabulary = ModelText::read(&source)?.format.tokenizer().vocab_size();
    let bar = progress::bar(documents.len() as u64, "running both models");
    let open = || Ok(Cpu::new(threads));
    let mut done = |done: usize, _: usize| bar.set_position(done as u64);
    let figures = behaviour(&open, [&source, &artifact], vocabulary, &documents, args.max_divergence, &mut done);
    bar.finish_and_clear();
    Ok(figures?)
}
