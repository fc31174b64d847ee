//! `glimmer bench exactness`: whether an answer depends on how the engine got there.

use std::{io::Write as _, path::Path, process::ExitCode};

use anyhow::{Context as _, bail};
use glimmer_bench::{
    BenchError, Document, ModelText, PictureReader, Task,
    exactness::{Base, Case, CaseKind, Cell, Comparison, agents, cases, matrix, scenes},
    read_documents, read_task,
};
use glimmer_engine::Settings;
use glimmer_tensor::Backend;
use serde_json::json;

use crate::{
    args::BenchExactnessArgs,
    device::{Place, on_device},
    open,
    output::OutputFile,
};

/// Longest prompt with its answer, unless the model's own context is shorter.
pub(super) const CONTEXT_TOKENS: usize = 1 << 13;

/// Runs matrix and scenes. Exit code 1 when something differs.
pub(crate) fn run(args: &BenchExactnessArgs, threads: usize) -> anyhow::Result<ExitCode> {
    let place = Place::of(&args.device)?;
    let name = place.name(threads);
    on_device!(place, open => compare(args, &name, &|| open(threads)))
}

fn compare<B: Backend>(
    args: &BenchExactnessArgs,
    name: &str,
    open: &dyn Fn() -> anyhow::Result<B>,
) -> anyhow::Result<ExitCode> {
    let file = OutputFile::prepare_optional(args.json.as_deref())?;
    let checkpoint = open::model(args.model.as_deref())?;
    let text = ModelText::read(&checkpoint)?;
    let (tasks, documents) = read(&args.data)?;
    let context = checkpoint.config().text.max_position_embeddings.min(CONTEXT_TOKENS);
    let pictures = PictureReader::load(&checkpoint)?;
    let cases = cases(&text, pictures.as_ref(), &tasks, &documents, args.prompts as usize, context)?;
    if cases.is_empty() {
        bail!("no prompt of {} fits the context of {context} tokens", args.data.display());
    }
    let settings = Settings { real_vocab: Some(text.format.tokenizer().vocab_size()), ..Settings::default() };
    let base = Base { settings, context, seed: args.seed };
    let mut out = anstream::stdout().lock();
    writeln!(out, "{}, {name}, {}", checkpoint.location(), what(&cases))?;
    writeln!(out, "{HEADER}")?;
    // A line that cannot be written must not end the comparison; the last write reports it.
    let mut print = |comparison: &Comparison| {
        let _reported_at_the_end = writeln!(out, "{}", line(comparison)).and_then(|()| out.flush());
    };
    let mut backend = || open().map_err(|error| BenchError::model("opening the device", error));
    let mut comparisons = scenes(&mut backend, &checkpoint, &cases, &base, &mut print)?;
    comparisons.push(agents(&mut backend, &checkpoint, &text, &tasks, &base)?);
    comparisons.iter().rev().take(1).for_each(&mut print);
    comparisons.extend(matrix(&mut backend, &checkpoint, &cases, &Cell::all(), &base, &mut print)?);
    let different: usize = comparisons.iter().map(|c| c.different).sum();
    let tokens: usize = comparisons.iter().map(|c| c.tokens).sum();
    for difference in comparisons.iter().flat_map(|c| &c.differences) {
        writeln!(out, "  {difference}")?;
    }
    writeln!(out, "{} conditions, {tokens} tokens compared, {different} answers differ", comparisons.len())?;
    if let Some(file) = file {
        file.finish_json(&json!({"model": checkpoint.location(), "device": name, "prompts": cases.len(),
            "composition": what(&cases), "seed": args.seed, "comparisons": comparisons}))?;
    }
    Ok(if comparisons.iter().all(Comparison::holds) { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// How many prompts of which kind.
fn what(cases: &[Case]) -> String {
    let of = |kind: CaseKind| cases.iter().filter(|case| case.kind == kind).count();
    let drawn = cases.iter().filter(|case| case.sampling.temperature > 0.0).count();
    format!(
        "{} prompts ({} text, {} tools, {} pictures, {} long; {} greedy, {drawn} drawn; {} tokens)",
        cases.len(),
        of(CaseKind::Text),
        of(CaseKind::Tools),
        of(CaseKind::Picture),
        of(CaseKind::Long),
        cases.len() - drawn,
        cases.iter().map(|case| case.ids.len()).sum::<usize>(),
    )
}

const HEADER: &str = "answers   tokens   cached  drafted in  preempted  differ  condition";

fn line(c: &Comparison) -> String {
    format!(
        "{:7} {:8} {:8} {:11} {:10} {:7}  {}",
        c.answers, c.tokens, c.cached_tokens, c.accepted_drafts, c.preemptions, c.different, c.condition
    )
}

/// All task files of a directory, by name, and its documents.
pub(super) fn read(directory: &Path) -> anyhow::Result<(Vec<Task>, Vec<Document>)> {
    const DOCUMENTS: &str = "documents.jsonl";
    let entries = std::fs::read_dir(directory).with_context(|| {
        format!("cannot read {}: name the directory of task files with --data", directory.display())
    })?;
    let mut names = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| format!("cannot read {}", directory.display()))?.path();
        if path.extension().is_some_and(|extension| extension == "jsonl") {
            names.push(path);
        }
    }
    names.sort();
    let (mut tasks, mut documents) = (Vec::new(), Vec::new());
    for path in names {
        let (name, text) = (path.display().to_string(), open::text(&path)?);
        if path.file_name().is_some_and(|file| file == DOCUMENTS) {
            documents = read_documents(&name, &text)?;
        } else {
            tasks.push(read_task(&name, &text)?);
        }
    }
    if tasks.is_empty() {
        bail!("{} holds no task files (*.jsonl)", directory.display());
    }
    Ok((tasks, documents))
}
