//! `glimmer inspect`.

use std::{io::Write as _, process::ExitCode};

use glimmer_checkpoint::{inspect, inspect_open};

use crate::{args::InspectArgs, open};

/// Prints what a directory, a configuration or the embedded model holds. Exit code 1 when something is wrong with it.
pub(crate) fn run(args: &InspectArgs) -> anyhow::Result<ExitCode> {
    let inspection = match args.model.as_ref().or(args.named.as_ref()) {
        Some(path) => inspect(path, args.as_w4a16).or_else(|error| open::refuse(path, error, "inspect"))?,
        None => inspect_open("the embedded model", &open::embedded_model()?, args.as_w4a16)?,
    };
    let mut out = anstream::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &inspection)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", inspection.to_text())?;
    }
    Ok(ExitCode::from(u8::from(!inspection.problems.is_empty())))
}
