//! Lines that somebody types, with editing and a history, or that a pipe sends.

use std::io::{BufRead as _, IsTerminal as _};

use anyhow::Context as _;
use rustyline::{Behavior, Config, DefaultEditor, error::ReadlineError};

/// Where lines come from.
pub(crate) enum Lines {
    /// A terminal.
    Terminal(Box<DefaultEditor>),
    /// A pipe or a file.
    Pipe(Vec<u8>),
}

/// What came.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// A line without its end.
    Text(String),
    /// A line that is not UTF-8.
    NotText,
    /// Ctrl-C instead of a line.
    Cancelled,
    /// Nothing more will come.
    End,
}

impl Lines {
    /// Lines of standard input.
    ///
    /// # Errors
    /// The terminal cannot be used.
    pub(crate) fn open() -> anyhow::Result<Self> {
        if !std::io::stdin().is_terminal() {
            return Ok(Self::Pipe(Vec::new()));
        }
        // The answers may go to a file: questions are edited on the terminal all the same.
        let config = Config::builder().behavior(Behavior::PreferTerm).auto_add_history(true).build();
        let editor = DefaultEditor::with_config(config).context("cannot use this terminal")?;
        Ok(Self::Terminal(Box::new(editor)))
    }

    /// Whether somebody types them.
    pub(crate) fn interactive(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }

    /// The next one; a terminal shows `prompt`.
    ///
    /// # Errors
    /// Standard input cannot be read.
    pub(crate) fn next(&mut self, prompt: &str) -> anyhow::Result<Line> {
        let failed = "cannot read standard input";
        match self {
            Self::Terminal(editor) => typed(editor.readline(prompt)).context(failed),
            Self::Pipe(bytes) => {
                bytes.clear();
                if std::io::stdin().lock().read_until(b'\n', bytes).context(failed)? == 0 {
                    return Ok(Line::End);
                }
                Ok(std::str::from_utf8(bytes).map_or(Line::NotText, |text| Line::Text(text.to_owned())))
            }
        }
    }
}

/// What a terminal gave. Bytes that are no text end the line that they are in, not the conversation.
fn typed(line: Result<String, ReadlineError>) -> Result<Line, ReadlineError> {
    match line {
        Ok(line) => Ok(Line::Text(line)),
        Err(ReadlineError::Eof) => Ok(Line::End),
        Err(ReadlineError::Interrupted) => Ok(Line::Cancelled),
        Err(ReadlineError::Io(error)) if error.kind() == std::io::ErrorKind::InvalidData => Ok(Line::NotText),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_may_send_bytes_that_are_no_text() {
        let io = |kind: std::io::ErrorKind| Err(ReadlineError::Io(kind.into()));
        assert_eq!(typed(io(std::io::ErrorKind::InvalidData)).unwrap(), Line::NotText);
        assert!(typed(io(std::io::ErrorKind::BrokenPipe)).is_err());
        assert_eq!(typed(Err(ReadlineError::Eof)).unwrap(), Line::End);
        assert_eq!(typed(Err(ReadlineError::Interrupted)).unwrap(), Line::Cancelled);
        assert_eq!(typed(Ok("a".to_owned())).unwrap(), Line::Text("a".to_owned()));
    }
}
