//! How failures and warnings are told: one line with every cause once, whatever bytes the names of a damaged file hold.

use std::io::Write as _;

use glimmer_checkpoint::io_remedy;

use crate::progress::{RED, YELLOW};

/// Prints an error for people. A standard error that is closed or full is no reason to panic.
pub(crate) fn print(error: &anyhow::Error) {
    drop(writeln!(anstream::stderr(), "{RED}error:{RED:#} {}", explain(error)));
}

/// The exit code of an error: 130, as of a program that Ctrl-C ends, where it was asked to stop.
pub(crate) fn code(error: &anyhow::Error) -> u8 {
    let stopped = |cause: &(dyn std::error::Error + 'static)| {
        matches!(cause.downcast_ref(), Some(glimmer_quantize::error::Error::Interrupted))
    };
    if error.chain().any(stopped) { 130 } else { 2 }
}

/// Warnings of one kind that are printed at most.
const WARNINGS: usize = 8;

/// Prints warnings for people, of many only the first.
pub(crate) fn warn(warnings: &[String]) {
    let mut err = anstream::stderr().lock();
    for warning in warnings.iter().take(WARNINGS) {
        drop(writeln!(err, "{YELLOW}warning:{YELLOW:#} {}", warning.chars().flat_map(printable).collect::<String>()));
    }
    if warnings.len() > WARNINGS {
        drop(writeln!(err, "{YELLOW}warning:{YELLOW:#} and {} more like these", warnings.len() - WARNINGS));
    }
}

/// Whether the reader of our output went away (`glimmer inspect | head`): not an error.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let broken = std::io::ErrorKind::BrokenPipe;
    error.chain().any(|cause| {
        cause.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == broken)
            || cause.downcast_ref::<serde_json::Error>().is_some_and(|e| e.io_error_kind() == Some(broken))
    })
}

/// The causes from the outermost to the innermost. One that already stands in the text before it is left out (many
/// libraries quote their cause themselves); control characters, which could steer a terminal, are escaped.
pub(crate) fn explain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    // All other files and streams are named where they are opened.
    let written = error.downcast_ref::<std::io::Error>().is_some() && error.chain().len() == 1
        || error.downcast_ref::<serde_json::Error>().is_some_and(serde_json::Error::is_io);
    if written {
        text.push_str("cannot write to standard output");
    }
    for cause in error.chain() {
        // What says itself that it is an error is told so once.
        let cause = cause.to_string();
        let cause: String = cause.trim().trim_start_matches("error: ").chars().flat_map(printable).collect();
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    // Libraries say what to do; where only the system has spoken, its kind of error does.
    let system = error.chain().find_map(|cause| cause.downcast_ref::<std::io::Error>());
    if let Some(remedy) = system.and_then(|e| io_remedy(e.kind())).filter(|remedy| !text.contains(remedy)) {
        text = format!("{text}; {remedy}");
    }
    text
}

fn printable(c: char) -> impl Iterator<Item = char> {
    let escaped = c.is_control();
    escaped.then(|| c.escape_default()).into_iter().flatten().chain((!escaped).then_some(c))
}

#[cfg(test)]
mod tests {
    use anyhow::{Context as _, anyhow};

    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        let quoted = anyhow!("no such file").context("cannot read x: no such file; look again").context("model y");
        assert_eq!(explain(&quoted), "model y: cannot read x: no such file; look again");
        assert_eq!(explain(&anyhow!("b").context("a")), "a: b");
        assert_eq!(explain(&anyhow!("error: b").context("a")), "a: b");
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        let error = anyhow!("tensor `evil\n\u{1b}[31mname` is missing\n");
        assert_eq!(explain(&error), "tensor `evil\\n\\u{1b}[31mname` is missing");
    }

    struct Closed;

    impl std::io::Write for Closed {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_bare_io_error_is_that_of_standard_output() {
        let full = || std::io::Error::from(std::io::ErrorKind::StorageFull);
        assert!(explain(&full().into()).starts_with("cannot write to standard output: "));
        let json = serde_json::to_writer(Closed, &1).unwrap_err();
        assert!(is_broken_pipe(&json.into()), "JSON is written through its own error type");
        let named = Err::<(), _>(full()).context("cannot write x").unwrap_err();
        let text = explain(&named);
        assert!(
            text.starts_with("cannot write x: ") && text.ends_with("; make room on that disk and repeat the command"),
            "{text}"
        );
    }
}
