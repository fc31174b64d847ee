//! `glimmer bench parity`: greedy answers of a device against the CPU's.

use std::{io::Write as _, process::ExitCode, time::Instant};

use anyhow::bail;
use glimmer_bench::{
    ModelText, PictureReader,
    exactness::{Case, cases},
    parity::{Greedy, compare, greedy},
};
use glimmer_checkpoint::Checkpoint;
use glimmer_engine::Settings;
use glimmer_tensor::{Backend, Cpu};
use serde_json::json;

use super::exactness::{CONTEXT_TOKENS, read};
use crate::{
    args::BenchParityArgs,
    device::{Place, on_device},
    open,
    output::OutputFile,
};

/// Sequences at once.
const SEQUENCES: usize = 8;
/// Draft depth: the one that is served by default.
const DEPTH: usize = 2;

/// Answers all prompts on the CPU and on the device. Exit code 1 when too many differ, or one that is no near tie.
pub(crate) fn run(args: &BenchParityArgs, threads: usize) -> anyhow::Result<ExitCode> {
    let file = OutputFile::prepare_optional(args.json.as_deref())?;
    let place = Place::of(&args.device)?;
    let name = place.name(threads);
    let checkpoint = open::model(args.model.as_deref())?;
    let text = ModelText::read(&checkpoint)?;
    let (tasks, documents) = read(&args.data)?;
    let context = checkpoint.config().text.max_position_embeddings.min(CONTEXT_TOKENS);
    let pictures = PictureReader::load(&checkpoint)?;
    let cases = cases(&text, pictures.as_ref(), &tasks, &documents, args.prompts as usize, context)?;
    if cases.is_empty() {
        bail!("no prompt of {} fits the context of {context} tokens", args.data.display());
    }
    let depth = if checkpoint.config().text.mtp_layer().is_some() { DEPTH } else { 0 };
    let settings = Settings {
        sequences: SEQUENCES,
        context: Some(context),
        rows: 256,
        depth,
        real_vocab: Some(text.format.tokenizer().vocab_size()),
        ..Settings::default()
    };
    let mut out = anstream::stdout().lock();
    writeln!(
        out,
        "{}, {} prompts of {} to {} tokens, {} new tokens each, draft depth {depth}",
        checkpoint.location(),
        cases.len(),
        cases.iter().map(|c| c.ids.len()).min().unwrap_or(0),
        cases.iter().map(|c| c.ids.len()).max().unwrap_or(0),
        args.tokens
    )?;
    let answers = Answers { checkpoint: &checkpoint, cases: &cases, tokens: args.tokens, settings: &settings };
    let (expected, seconds) = answers.of(Cpu::new(threads))?;
    writeln!(out, "the CPU: {seconds:.1} s")?;
    let (found, seconds) = on_device!(place, open => answers.of(open(threads)?)?);
    writeln!(out, "{name}: {seconds:.1} s")?;
    let parity = compare(&cases, &expected, &found);
    for d in &parity.differences {
        let gap = d.gap.map_or_else(|| "not among the CPU's best".to_owned(), |gap| format!("{gap:.2e} below"));
        writeln!(out, "  {}: token {} is {}, the CPU has {}; {gap}", d.id, d.equal, d.found, d.expected)?;
    }
    let holds = parity.share() >= args.share && parity.all_ties(args.tie);
    writeln!(
        out,
        "{} of {} answers equal ({:.1} %, wanted {:.1} %), {} tokens; near ties up to a gap of {}: {}",
        parity.identical,
        parity.answers,
        100.0 * parity.share(),
        100.0 * args.share,
        parity.tokens,
        args.tie,
        if parity.all_ties(args.tie) { "all others" } else { "NOT all others" }
    )?;
    if let Some(file) = file {
        file.finish_json(&json!({"model": checkpoint.location(), "device": name, "parity": parity}))?;
    }
    Ok(ExitCode::from(u8::from(!holds)))
}

struct Answers<'a> {
    checkpoint: &'a Checkpoint,
    cases: &'a [Case],
    tokens: u32,
    settings: &'a Settings,
}

impl Answers<'_> {
    /// The answers of a backend, and how long they took.
    fn of<B: Backend>(&self, backend: B) -> anyhow::Result<(Vec<Greedy>, f64)> {
        let began = Instant::now();
        let answers = greedy(backend, self.checkpoint, self.cases, self.tokens, self.settings)?;
        Ok((answers, began.elapsed().as_secs_f64()))
    }
}
