//! `glimmer synth`.

use std::{io::Write as _, process::ExitCode, time::Instant};

use anyhow::bail;
use glimmer_checkpoint::{SynthOptions, synth};

use crate::{
    args::{SynthArgs, SynthFormat},
    open, progress,
};

/// Writes a random checkpoint.
pub(crate) fn run(args: &SynthArgs) -> anyhow::Result<ExitCode> {
    let Some(shard_bytes) = gigabytes(args.shard_gb) else {
        bail!("--shard-gb {}: expected a positive number of gigabytes", args.shard_gb);
    };
    let config = open::text(&args.config)?;
    let format = match args.format {
        SynthFormat::Bf16 => glimmer_checkpoint::SynthFormat::Bf16,
        SynthFormat::W4a16 => glimmer_checkpoint::SynthFormat::W4a16,
    };
    let began = Instant::now();
    let bar = progress::bytes("writing");
    let total = synth(&config, &args.out, SynthOptions { format, seed: args.seed, shard_bytes }, &mut |done, all| {
        bar.set_length(all);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    let seconds = began.elapsed().as_secs_f64();
    writeln!(
        anstream::stdout(),
        "{}: {} tensors, {} bytes in {seconds:.1} s ({:.2} GB/s), seed {}",
        args.out.display(),
        total.tensors,
        total.bytes,
        total.bytes as f64 / 1e9 / seconds.max(1e-9),
        args.seed
    )?;
    Ok(ExitCode::SUCCESS)
}

/// `gb` gigabytes in bytes; `None` unless that is a positive number of bytes.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
fn gigabytes(gb: f64) -> Option<u64> {
    let bytes = gb * 1e9;
    (bytes.is_finite() && (1.0..1e18).contains(&bytes)).then_some(bytes as u64)
}
