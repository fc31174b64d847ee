//! `glimmer merge-mtp` and `glimmer fix-config`: artifacts of other tools made whole.

use std::{io::Write as _, process::ExitCode};

use glimmer_quantize::{NonFiniteTensor, mend};

use crate::{
    args::{FixConfigArgs, MergeMtpArgs},
    failure, open,
};

/// Adds the draft layer of a checkpoint to an artifact.
pub(crate) fn merge_mtp(args: &MergeMtpArgs) -> anyhow::Result<ExitCode> {
    let source = open::model(Some(&args.source))?;
    let merge = mend::merge_mtp(&source, &args.artifact)?;
    let mut out = anstream::stdout().lock();
    writeln!(out, "{}: {} tensors of the draft layer added", args.artifact.display(), merge.added)?;
    failure::warn(&damaged(&merge.non_finite));
    Ok(ExitCode::SUCCESS)
}

/// What is said about tensors that were copied with NaN or infinity.
pub(super) fn damaged(tensors: &[NonFiniteTensor]) -> Vec<String> {
    tensors
        .iter()
        .map(|tensor| format!("{tensor}; it was copied as the source has it, which is damaged: get that shard anew"))
        .collect()
}

/// Rewrites targets and ignore list of an artifact's config.json. Exit code 1 when something else in the block is wrong.
pub(crate) fn fix_config(args: &FixConfigArgs) -> anyhow::Result<ExitCode> {
    let fix = mend::fix_config(&args.artifact, args.ignore_style.into())?;
    let mut out = anstream::stdout().lock();
    let place = args.artifact.display();
    if fix.replaced.is_empty() {
        writeln!(out, "{place}: `targets` and `ignore` are as recommended, nothing was written")?;
    } else {
        let replaced: Vec<String> = fix.replaced.iter().map(|field| format!("`{field}`")).collect();
        writeln!(out, "{place}: {} replaced; the old text is {}", replaced.join(" and "), mend::CONFIG_COPY)?;
    }
    for wrong in &fix.wrong {
        writeln!(out, "not mended: {}: {}", wrong.subject, wrong.found)?;
    }
    Ok(ExitCode::from(u8::from(!fix.wrong.is_empty())))
}
