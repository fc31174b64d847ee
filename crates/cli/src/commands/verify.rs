//! `glimmer verify`.

use std::{io::Write as _, process::ExitCode};

use glimmer_quantize::gates::{VerifyOptions, verify};

use crate::args::VerifyArgs;

/// Runs the gates. Exit code 1 when one fails.
pub(crate) fn run(args: &VerifyArgs) -> anyhow::Result<ExitCode> {
    let options = VerifyOptions { full: args.full, ..VerifyOptions::default() };
    let verdict = verify(&args.artifact, args.source.as_deref(), &options)?;
    let mut out = anstream::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &verdict)?;
        writeln!(out)?;
    } else {
        write!(out, "{verdict}")?;
    }
    Ok(ExitCode::from(u8::from(!verdict.passed)))
}
