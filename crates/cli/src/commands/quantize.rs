//! `glimmer quantize`.

use std::{io::Write as _, path::Path, process::ExitCode};

use anyhow::{Context as _, anyhow, bail};
use glimmer_bench::{PictureEncoder, calibration_samples, read_calibration};
use glimmer_checkpoint::Checkpoint;
use glimmer_quantize::{
    Budget, CalibratedExperts, CalibrationSample, Error, Method, Options, Progress, Recipe, gptq::Order, is_unfinished,
    quantize, report::Timing, scales::ScaleRule,
};
use glimmer_server::sizing::host_memory;
use glimmer_tensor::Cpu;
use glimmer_text::Tokenizer;
use indicatif::ProgressBar;

use super::mend::damaged;
use crate::{args, args::QuantizeArgs, embedded, failure, interrupt::Interrupt, open, progress};

/// Makes a W4A16 artifact.
pub(crate) fn run(args: &QuantizeArgs, threads: usize) -> anyhow::Result<ExitCode> {
    let recipe = recipe(args);
    if recipe.method == Method::Rtn && args.calib.is_some() {
        bail!("--calib: `--method rtn` rounds without calibration; leave one of the two out");
    }
    let budget = budget(args.budget_gib)?;
    let source = open::model(args.source.as_deref())?;
    failure::warn(&speechless(&source));
    let calibration = if recipe.method == Method::Rtn { None } else { Some(calibration(args, &source, threads)?) };
    let samples = calibration.as_ref().map_or(&[][..], |c| &c.samples);
    let options = Options { budget, threads, resume: args.resume, ..Options::new(args.out.clone()) };
    let interrupt = Interrupt::watch(Some("stopping behind what is being computed; Ctrl-C again ends at once"))?;
    let mut bar = Bar { bar: progress::share(0, "quantizing"), interrupt };
    let finished =
        quantize(Cpu::new(threads), &source, samples, &recipe, &options, &mut bar).map_err(|error| {
            match (&error, &calibration) {
                (Error::Calibration { sample, problem }, Some(c)) => {
                    let id = c.ids.get(*sample).map_or("", String::as_str);
                    anyhow!("{}, sample {} ({id}): {problem}", c.file, sample + 1)
                }
                (
                    Error::Interrupted
                    | Error::Busy { .. }
                    | Error::Nested { .. }
                    | Error::NotEmpty { .. }
                    | Error::OtherRun { .. }
                    | Error::Unfinished { .. },
                    _,
                ) => error.into(),
                _ if is_unfinished(&args.out) => {
                    let told = failure::explain(&error.into());
                    anyhow!("{told}; what is finished is kept: repeat the command with --resume")
                }
                _ => error.into(),
            }
        })?;
    bar.bar.finish_and_clear();
    let (report, timing) = (&finished.report, &finished.timing);
    let fallbacks = report.fallbacks().count();
    failure::warn(&damaged(&report.non_finite));
    let unexpected = |name| format!("`{name}` is not a tensor of this configuration; it was copied byte for byte");
    failure::warn(&report.unexpected.iter().map(unexpected).collect::<Vec<_>>());
    let mut out = anstream::stdout().lock();
    if *timing == Timing::default() {
        writeln!(out, "{}: finished already, with this source and these settings", args.out.display())?;
        return Ok(ExitCode::SUCCESS);
    }
    writeln!(
        out,
        "{}: {} matrices, {} calibration tokens, {:.1} s (forward {:.1}, solve {:.1}, copies {:.1})",
        args.out.display(),
        report.matrices().count(),
        report.tokens,
        timing.total,
        timing.forward,
        timing.solve,
        timing.copies
    )?;
    if fallbacks > 0 {
        writeln!(out, "{fallbacks} matrices were rounded to nearest: the report in the directory lists them")?;
    }
    let source = args.source.as_ref().map_or(String::new(), |dir| format!(" --source {}", quoted(dir)));
    writeln!(out, "next: glimmer verify {}{source}", quoted(&args.out))?;
    Ok(ExitCode::SUCCESS)
}

/// What is said about a source whose artifact will not be able to answer.
fn speechless(source: &Checkpoint) -> Vec<String> {
    let remedy = "the artifact can be made without it, but generate and serve need it: put the model's own file there";
    match source.file("tokenizer.json").map(|file| Tokenizer::from_bytes(file.as_slice())) {
        Some(Ok(_)) => Vec::new(),
        Some(Err(error)) => vec![format!("{}: {error}; {remedy}", source.location())],
        None => vec![format!("{}: there is no tokenizer.json; {remedy}", source.location())],
    }
}

/// The budget asked for, or one that goes by what is free.
fn budget(asked_gib: Option<f64>) -> anyhow::Result<Budget> {
    let Some(gib) = asked_gib else {
        return Ok(Budget::Automatic { free_bytes: host_memory().map(|(_, free)| free) });
    };
    let bytes = gib * f64::from(1 << 30);
    if !(gib.is_finite() && bytes >= 1.0) {
        bail!("--budget-gib {gib}: expected a positive number of GiB");
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive; saturates")]
    Ok(Budget::Bytes(bytes as usize))
}

/// A path as a shell takes it.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+,:@%".contains(c);
    if text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

fn recipe(args: &QuantizeArgs) -> Recipe {
    let ignore_style = args.ignore_style.into();
    if args.parity {
        return Recipe { ignore_style, ..Recipe::parity() };
    }
    Recipe {
        method: match args.method {
            args::Method::Gptq => Method::Gptq,
            args::Method::Rtn => Method::Rtn,
        },
        order: match args.order {
            args::Order::Static => Order::Static,
            args::Order::None => Order::None,
        },
        scales: match args.scales {
            args::Scales::Minmax => ScaleRule::Minmax,
            args::Scales::Mse => ScaleRule::Mse,
            args::Scales::Imse => ScaleRule::Imse,
        },
        shrink: args.shrink,
        damp: args.damp,
        experts: match args.experts {
            args::CalibratedExperts::Routed => CalibratedExperts::Routed,
            args::CalibratedExperts::All => CalibratedExperts::All,
        },
        ignore_style,
        ..Recipe::default()
    }
}

/// Calibration samples, and what they are called in errors.
struct Calibration {
    file: String,
    ids: Vec<String>,
    samples: Vec<CalibrationSample>,
}

/// The calibration samples that `--calib` names; the embedded set for the embedded model.
fn calibration(args: &QuantizeArgs, source: &Checkpoint, threads: usize) -> anyhow::Result<Calibration> {
    let (name, text) = match (&args.calib, &args.source) {
        (Some(path), _) => (path.display().to_string(), open::text(path)?),
        (None, None) => ("the embedded calibration set".to_owned(), String::from_utf8(embedded::CALIBRATION.to_vec())?),
        (None, Some(_)) => bail!(
            "--calib is missing: GPTQ needs calibration samples (JSON lines with `text` or `input_ids`); without any, use --method rtn"
        ),
    };
    let documents = read_calibration(&name, &text, source)?;
    let pictures = documents.iter().any(|d| !d.images.is_empty());
    let mut pictures = if pictures { PictureEncoder::load(Cpu::new(threads), source)? } else { None };
    let samples = calibration_samples(&documents, pictures.as_mut()).with_context(|| name.clone())?;
    Ok(Calibration { file: name, ids: documents.into_iter().map(|d| d.id).collect(), samples })
}

/// Draws the run.
struct Bar {
    bar: ProgressBar,
    interrupt: Interrupt,
}

impl Progress for Bar {
    fn start(&mut self, total: u64, done: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
        self.bar.reset_eta();
    }

    fn advance(&mut self, units: u64) {
        self.bar.inc(units);
    }

    fn note(&mut self, text: &str) {
        self.bar.suspend(|| failure::warn(&[text.to_owned()]));
    }

    fn proceed(&mut self) -> bool {
        !self.interrupt.pressed()
    }

    fn phase(&mut self, text: &str) {
        self.bar.set_message(text.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_quoted_for_the_shell() {
        assert_eq!(quoted(Path::new("out/a-b_1.0")), "out/a-b_1.0");
        assert_eq!(quoted(Path::new("a b/it's")), r"'a b/it'\''s'");
    }
}
