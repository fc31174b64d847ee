//! `glimmer merge-mtp` and `glimmer fix-config`: artifacts of other tools made whole.

use std::{io::Write as _, process::ExitCode};

use glimmer_quantize::{IgnoreStyle, mend};

use crate::{
    args::{self, FixConfigArgs, MergeMtpArgs},
    open,
};

/// Adds the draft layer of a checkpoint to an artifact.
pub(crate) fn merge_mtp(args: &MergeMtpArgs) -> anyhow::Result<ExitCode> {
    let source = open::model(Some(&args.source))?;
    let added = mend::merge_mtp(&source, &args.artifact)?;
    writeln!(anstream::stdout(), "{}: {added} tensors of the draft layer added", args.artifact.display())?;
    Ok(ExitCode::SUCCESS)
}

/// Rewrites the quantization block of an artifact's config.json.
pub(crate) fn fix_config(args: &FixConfigArgs) -> anyhow::Result<ExitCode> {
    let style = match args.ignore_style {
        args::IgnoreStyle::Regex => IgnoreStyle::Regex,
        args::IgnoreStyle::Dual => IgnoreStyle::Dual,
    };
    let changed = mend::fix_config(&args.artifact, style.into())?;
    let what = if changed { "rewritten" } else { "right already" };
    writeln!(anstream::stdout(), "{}: targets and ignore list {what}", args.artifact.display())?;
    Ok(ExitCode::SUCCESS)
}
