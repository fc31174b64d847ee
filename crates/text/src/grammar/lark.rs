//! Writing grammars: the library's dialect of Lark.
//!
//! Everything a client supplies goes through [`literal`], [`regex`] or [`json`], so that no text of a client can become
//! syntax of the grammar around it.

use std::fmt::Write as _;

use glimmer_engine::constraint::ConstraintError;
use serde_json::Value;

/// Any text.
pub(super) const ANY_TEXT: &str = "/(?s:.*)/";

/// A string literal.
pub(super) fn literal(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            c if c < ' ' || c == '\x7f' => {
                // Writing to a string does not fail.
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// A regular expression in slashes.
pub(super) fn regex(pattern: &str) -> String {
    format!("/{}/", llguidance::regex_to_lark(pattern, ""))
}

/// The added token with this id.
pub(super) fn token(id: u32) -> String {
    format!("<[{id}]>")
}

/// JSON of a schema.
pub(super) fn json(schema: &Value) -> String {
    format!("%json {schema}")
}

/// Grammar of a text that a regular expression matches as a whole.
pub(super) fn of_regex(pattern: &str) -> Result<String, ConstraintError> {
    Ok(format!("start: {}\n", regex(whole(pattern)?)))
}

/// The pattern without the anchors at its ends, which a match of the whole text makes superfluous.
pub(super) fn whole(pattern: &str) -> Result<&str, ConstraintError> {
    // Anchors bind tighter than alternatives: in `^a|b$` each holds for one branch only, and both branches must match
    // the whole text here anyway.
    let inner = pattern.strip_prefix('^').unwrap_or(pattern);
    let slashes = |text: &str| text.bytes().rev().take_while(|&byte| byte == b'\\').count();
    let inner = inner.strip_suffix('$').filter(|rest| slashes(rest).is_multiple_of(2)).unwrap_or(inner);
    if inner.is_empty() {
        return Err(ConstraintError(format!("regex {pattern:?} matches the empty text only")));
    }
    Ok(inner)
}

/// Grammar of a choice between texts.
pub(super) fn of_choices(choices: &[String]) -> Result<String, ConstraintError> {
    if choices.is_empty() {
        return Err(ConstraintError("choice is empty; expected at least one text".to_owned()));
    }
    let texts: Vec<String> = choices.iter().map(|text| literal(text)).collect();
    Ok(format!("start: {}\n", texts.join("\n  | ")))
}
