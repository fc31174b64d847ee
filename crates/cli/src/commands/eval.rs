//! `glimmer eval`: tasks, divergence, acceptance.

use std::{io::Write as _, path::Path, process::ExitCode};

use anyhow::bail;
use glimmer_bench::{
    Acceptance, Document, EngineCompleter, EvalOptions, LocalAnswerer, ModelText, PanelScorer, PictureReader, Task,
    acceptance_table, divergence, divergence_table, evaluate, read_documents, read_questions, read_task, task_table,
};
use glimmer_checkpoint::Checkpoint;
use glimmer_engine::Settings;
use glimmer_tensor::Backend;
use serde_json::{Value, json};

use crate::{
    args::{EvalArgs, Thinking},
    device::{Place, on_device},
    embedded, open,
    output::OutputFile,
    progress,
};

/// Longest prompt with its answer.
const CONTEXT_TOKENS: usize = 1 << 14;
/// Rows a step.
const ROWS: usize = 256;
/// New tokens an item on this machine, unless told otherwise.
const MAX_TOKENS: u32 = 192;

/// Evaluates a model.
pub(crate) fn run(args: &EvalArgs, threads: usize) -> anyhow::Result<ExitCode> {
    if args.batch == 0 {
        bail!("--batch 0: at least one item is answered at a time");
    }
    if args.limit == Some(0) {
        bail!("--limit 0: nothing would be measured; give at least 1, or leave it out for all");
    }
    if let Some(url) = &args.url {
        if Path::new(url).join("config.json").is_file() {
            bail!(
                "{url}: a model directory is named with -m {url}; the argument without a flag is the URL of a server"
            );
        }
        return super::eval_url::run(args, url, &questions(args)?, &options(args));
    }
    let json = OutputFile::prepare_optional(args.json.as_deref())?;
    let checkpoint = open::model(args.model.as_deref())?;
    let text = ModelText::read(&checkpoint)?;
    let result = on_device!(Place::of(&args.device)?, open => {
        let open = || open(threads);
        match &args.kld_against {
            Some(reference) => panel(args, &checkpoint, reference.as_deref(), &text, &open)?,
            None => tasks(args, &checkpoint, &text, &open)?,
        }
    });
    if let Some(file) = json {
        file.finish_json(&result)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Accuracy, or with `--acceptance` only the share of accepted drafts, by task.
fn tasks<B: Backend>(
    args: &EvalArgs,
    checkpoint: &Checkpoint,
    text: &ModelText,
    open: &dyn Fn() -> anyhow::Result<B>,
) -> anyhow::Result<Value> {
    let tasks = questions(args)?;
    let has_draft_layer = checkpoint.config().text.mtp_layer().is_some();
    if args.acceptance && (args.draft_depth == 0 || !has_draft_layer) {
        bail!("--acceptance needs a model with a draft layer and a --draft-depth of at least 1");
    }
    let depth = if has_draft_layer { args.draft_depth as usize } else { 0 };
    // Room for more sequences than there are items would only take memory.
    let most = tasks.iter().map(|task| task.items.len()).max().unwrap_or(1);
    let batch = args.batch.min(args.limit.unwrap_or(usize::MAX)).min(most.max(1));
    let settings = Settings {
        sequences: batch,
        context: Some(CONTEXT_TOKENS.min(checkpoint.config().text.max_position_embeddings)),
        rows: ROWS.max(batch * (depth + 1)),
        depth,
        real_vocab: Some(text.format.tokenizer().vocab_size()),
        // What questions share is their beginning; few states hold that.
        state_checkpoints: 8,
        ..Settings::default()
    };
    let options = options(args);
    let bar = progress::bar(0, "answering");
    let (mut results, mut sets) = (Vec::new(), Vec::new());
    for task in &tasks {
        // An engine for each task: drafts are counted by task.
        let completer = EngineCompleter::load(open()?, checkpoint, &settings)?;
        let mut answerer = LocalAnswerer::new(text, completer, PictureReader::load(checkpoint)?);
        bar.set_message(task.name.clone());
        results.extend(evaluate(&mut answerer, std::slice::from_ref(task), &options, &mut |done, all| {
            bar.set_length(all as u64);
            bar.set_position(done as u64);
        })?);
        sets.push((task.name.clone(), Acceptance::from(answerer.completer().drafts())));
    }
    bar.finish_and_clear();
    let mut out = anstream::stdout().lock();
    if !args.acceptance {
        writeln!(out, "{}", task_table(&[(checkpoint.location(), &results)]))?;
    }
    if depth > 0 {
        let named: Vec<(&str, &Acceptance)> = sets.iter().map(|(name, set)| (name.as_str(), set)).collect();
        writeln!(out, "{}", acceptance_table(&named))?;
    }
    let sets: serde_json::Map<String, Value> =
        sets.into_iter().map(|(name, set)| Ok((name, serde_json::to_value(set)?))).collect::<anyhow::Result<_>>()?;
    Ok(json!({"model": checkpoint.location(), "tasks": results, "acceptance": sets}))
}

/// Divergence from a reference on the token panel.
fn panel<B: Backend>(
    args: &EvalArgs,
    checkpoint: &Checkpoint,
    reference: Option<&Path>,
    text: &ModelText,
    open: &dyn Fn() -> anyhow::Result<B>,
) -> anyhow::Result<Value> {
    let reference = open::model(reference)?;
    let mut documents = documents(args.documents.as_deref())?;
    documents.truncate(args.limit.unwrap_or(usize::MAX));
    if documents.iter().all(|d| d.ids.len() < 2) {
        bail!("the documents have no position to compare: expected at least one with two tokens");
    }
    let longest = documents.iter().map(|d| d.ids.len()).max().unwrap_or(1);
    let vocabulary = text.format.tokenizer().vocab_size();
    let load = |checkpoint| Ok::<_, anyhow::Error>(PanelScorer::load(open()?, checkpoint, vocabulary, longest)?);
    let (mut ours, mut theirs) = (load(checkpoint)?, load(&reference)?);
    let bar = progress::bar(documents.len() as u64, "scoring");
    let result = divergence(&mut theirs, &mut ours, &documents, &mut |done, _| bar.set_position(done as u64))?;
    bar.finish_and_clear();
    writeln!(anstream::stdout(), "{}", divergence_table(&[(checkpoint.location(), &result)]))?;
    Ok(json!({"model": checkpoint.location(), "reference": reference.location(), "divergence": result}))
}

/// What to ask, and how.
fn options(args: &EvalArgs) -> EvalOptions {
    EvalOptions {
        thinking_on: args.thinking != Thinking::Off,
        thinking_off: args.thinking != Thinking::On,
        limit: args.limit,
        max_tokens: args.max_tokens.unwrap_or(MAX_TOKENS) as usize,
    }
}

/// The tasks and question sets that the arguments name.
fn questions(args: &EvalArgs) -> anyhow::Result<Vec<Task>> {
    let mut tasks = match args.task.is_empty() && !args.data.is_empty() {
        true => Vec::new(),
        false => read_tasks(&args.task)?,
    };
    for file in &args.data {
        let mut task = read_questions(&file.display().to_string(), &open::text(file)?)?;
        // Such sets are asked with reasoning, unless that is ruled out.
        task.items.iter_mut().for_each(|item| item.direct |= args.thinking == Thinking::Off);
        tasks.push(task);
    }
    Ok(tasks)
}

fn read_tasks(names: &[String]) -> anyhow::Result<Vec<Task>> {
    let embedded_task = |(name, bytes): &embedded::File| Ok(read_task(name, std::str::from_utf8(bytes)?)?);
    if names.is_empty() {
        if embedded::TASKS.is_empty() {
            bail!("this build has no embedded tasks: name task files with --task");
        }
        return embedded::TASKS.iter().map(embedded_task).collect();
    }
    names
        .iter()
        .map(|name| {
            let found = embedded::TASKS.iter().find(|(file, _)| file.trim_end_matches(".jsonl") == name);
            match found {
                Some(file) => embedded_task(file),
                None if Path::new(name).exists() => Ok(read_task(name, &open::text(Path::new(name))?)?),
                None => {
                    let known: Vec<&str> = embedded::TASKS.iter().map(|(f, _)| f.trim_end_matches(".jsonl")).collect();
                    bail!("--task {name}: neither a file nor an embedded task ({})", known.join(", "))
                }
            }
        })
        .collect()
}

/// The documents of a file, or the embedded ones.
pub(super) fn documents(path: Option<&Path>) -> anyhow::Result<Vec<Document>> {
    match path {
        Some(path) => Ok(read_documents(&path.display().to_string(), &open::text(path)?)?),
        None if embedded::DOCUMENTS.is_empty() => bail!("this build has no embedded documents: give --documents FILE"),
        None => Ok(read_documents("the embedded documents", std::str::from_utf8(embedded::DOCUMENTS)?)?),
    }
}
