//! Colours and progress bars; silent in pipes.

use anstyle::{AnsiColor, Style};
use indicatif::{ProgressBar, ProgressStyle};

/// Errors.
pub(crate) const RED: Style = AnsiColor::Red.on_default().bold();
/// Warnings.
pub(crate) const YELLOW: Style = AnsiColor::Yellow.on_default().bold();
/// Headings.
pub(crate) const BOLD: Style = Style::new().bold();
/// Side remarks (reasoning, statistics).
pub(crate) const DIM: Style = Style::new().dimmed();

/// A bar of things that are counted, with the time left.
pub(crate) fn bar(length: u64, what: &str) -> ProgressBar {
    drawn(length, what, "{pos}/{len}")
}

/// A bar of work whose unit says nothing to people: its share is shown.
pub(crate) fn share(length: u64, what: &str) -> ProgressBar {
    drawn(length, what, "{percent:>3} %")
}

/// A bar of bytes.
pub(crate) fn bytes(what: &str) -> ProgressBar {
    drawn(0, what, "{binary_bytes} of {binary_total_bytes}")
}

fn drawn(length: u64, what: &str, position: &str) -> ProgressBar {
    let bar = ProgressBar::new(length);
    if let Ok(style) = ProgressStyle::with_template(&template(position)) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_prefix(what.to_owned());
    bar
}

fn template(position: &str) -> String {
    format!("{{prefix}} [{{bar:32}}] {position} {{msg}} {{elapsed}} (left {{eta}})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_template_is_one() {
        for position in ["{pos}/{len}", "{percent:>3} %", "{binary_bytes} of {binary_total_bytes}"] {
            assert!(ProgressStyle::with_template(&template(position)).is_ok(), "{position}");
        }
        assert_eq!(share(1, "quantizing").prefix(), "quantizing");
    }
}
