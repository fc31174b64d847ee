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

/// A bar with position, rate and time left.
pub(crate) fn bar(length: u64, what: &str) -> ProgressBar {
    let bar = ProgressBar::new(length);
    if let Ok(style) = ProgressStyle::with_template("{prefix} [{bar:32}] {pos}/{len} {msg} {elapsed} (left {eta})") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_prefix(what.to_owned());
    bar
}
