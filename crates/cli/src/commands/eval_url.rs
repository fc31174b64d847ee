//! `glimmer eval URL`: tasks and question sets against a server.

use std::{io::Write as _, process::ExitCode, time::Duration};

use anyhow::bail;
use glimmer_bench::{
    EvalOptions, RemoteOptions, RemoteResult, Task, evaluate_remote, questions_digest, remote_table,
    serve::{
        client::Address,
        server::{first_model, version},
    },
};
use serde_json::json;

use super::bench_serve::{client, interrupted, runtime};
use crate::{args::EvalArgs, output::OutputFile, progress};

/// Asks everything and prints the scores. Exit code 1 when some requests failed or were not sent.
pub(crate) fn run(args: &EvalArgs, url: &str, tasks: &[Task], which: &EvalOptions) -> anyhow::Result<ExitCode> {
    let json = OutputFile::prepare_optional(args.json.as_deref())?;
    // Clients of OpenAI's API are given the address with the version of the API behind it.
    let base = url.trim_end_matches('/');
    let address = Address::parse("URL", base.strip_suffix("/v1").unwrap_or(base))?;
    let client = client(address, &args.remote.header, args.remote.ca_file.as_deref())?;
    let (model, server, results) = runtime()?.block_on(async {
        let model = match &args.model {
            Some(name) => name.display().to_string(),
            None => first_model(&client).await?.id,
        };
        let options = options(args, &model);
        let bar = progress::bar(0, "answering");
        let mut progress = |done: usize, all: usize| {
            bar.set_length(all as u64);
            bar.set_position(done as u64);
        };
        let results = evaluate_remote(&client, tasks, which, &options, &mut progress, interrupted()).await;
        bar.finish_and_clear();
        anyhow::Ok((model, version(&client).await, results))
    })?;
    if results.is_empty() {
        bail!("nothing to ask: no item can be answered with --thinking as given");
    }
    writeln!(anstream::stdout(), "{}", remote_table(&results))?;
    tell(&results)?;
    if let Some(file) = json {
        let remote = &args.remote;
        file.finish_json(&json!({
            "url": url, "model": model, "server_version": server, "questions": questions_digest(tasks),
            "epochs": remote.epochs, "seed": remote.seed, "temperature": remote.temperature, "top_p": remote.top_p,
            "max_tokens": args.max_tokens, "thinking_budget": remote.thinking_budget, "concurrency": args.batch,
            "retries": remote.retries, "results": results,
        }))?;
    }
    let whole = results.iter().all(|result| result.failed.is_empty() && result.not_asked == 0);
    Ok(if whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn options(args: &EvalArgs, model: &str) -> RemoteOptions {
    let remote = &args.remote;
    RemoteOptions {
        model: model.to_owned(),
        epochs: remote.epochs,
        seed: remote.seed,
        concurrency: args.batch,
        max_tokens: args.max_tokens,
        thinking_budget: remote.thinking_budget,
        temperature: remote.temperature,
        top_p: remote.top_p,
        timeout: Duration::from_secs(remote.timeout.into()),
        retries: remote.retries,
    }
}

/// What the table only counts: failures, and what was left out.
fn tell(results: &[RemoteResult]) -> anyhow::Result<()> {
    const SHOWN: usize = 5;
    let mut err = anstream::stderr().lock();
    let failed: Vec<_> = results.iter().flat_map(|result| &result.failed).collect();
    if !failed.is_empty() {
        writeln!(err, "{} requests failed and count as wrong:", failed.len())?;
        for entry in failed.iter().take(SHOWN) {
            writeln!(err, "  {}, seed {}: {}", entry.id, entry.seed, entry.what)?;
        }
    }
    let retries: u64 = results.iter().map(|result| result.retries).sum();
    if retries > 0 {
        writeln!(err, "{retries} requests were sent again because the server was busy")?;
    }
    let left: usize = results.iter().map(|result| result.not_asked).sum();
    if left > 0 {
        writeln!(err, "note: stopped; {left} items were not answered and count for nothing")?;
    }
    Ok(())
}
