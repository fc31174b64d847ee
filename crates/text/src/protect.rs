//! Keeping track of which characters of a rendered prompt came from a user.
//!
//! Before rendering, every part of a user's string that could become (or help to become) an added token is wrapped in a
//! pair of private-use characters. The template copies them along; afterwards the pairs are removed and their places are
//! the protected ranges for the tokenizer. The two characters are chosen anew for each conversation from those that occur
//! neither in its strings nor in the template, so private-use characters of the user's own pass through untouched.

use std::collections::HashSet;
use std::ops::Range;

use serde_json::{Map, Value};

use crate::added::AddedTokens;
use crate::error::TextError;

/// The characters of one conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marks {
    open: char,
    close: char,
    /// Stands for an image in a template that renders none.
    image: char,
}

const PRIVATE_USE: [std::ops::RangeInclusive<char>; 3] =
    ['\u{e000}'..='\u{f8ff}', '\u{f0000}'..='\u{ffffd}', '\u{100000}'..='\u{10fffd}'];

impl Marks {
    /// Chooses three private-use characters that occur nowhere in `variables` and `template`.
    ///
    /// # Errors
    /// [`TextError::NoFreeMarker`] if all of them occur.
    pub(crate) fn choose(variables: &Map<String, Value>, template: &str) -> Result<Self, TextError> {
        let mut used = HashSet::new();
        collect(template, &mut used);
        for (key, value) in variables {
            collect(key, &mut used);
            collect_value(value, &mut used);
        }
        let mut free = PRIVATE_USE.into_iter().flatten().filter(|c| !used.contains(c));
        match (free.next(), free.next(), free.next()) {
            (Some(open), Some(close), Some(image)) => Ok(Self { open, close, image }),
            _ => Err(TextError::NoFreeMarker),
        }
    }

    /// Text that [`Marks::remove`] turns into control tokens.
    pub(crate) fn image(self) -> String {
        self.image.to_string()
    }

    /// Wraps whatever in the strings of `value` (keys too) could become an added token.
    pub(crate) fn protect(self, added: &AddedTokens, value: Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.protect_text(added, text)),
            Value::Array(items) => Value::Array(items.into_iter().map(|item| self.protect(added, item)).collect()),
            Value::Object(map) => {
                let pairs =
                    map.into_iter().map(|(key, item)| (self.protect_text(added, key), self.protect(added, item)));
                Value::Object(pairs.collect())
            }
            other => other,
        }
    }

    fn protect_text(self, added: &AddedTokens, text: String) -> String {
        let ranges = added.user_ranges(&text);
        if ranges.is_empty() {
            return text;
        }
        let mut out = String::with_capacity(text.len() + ranges.len() * 2 * self.open.len_utf8());
        let mut done = 0;
        for range in ranges {
            out.push_str(&text[done..range.start]);
            out.push(self.open);
            out.push_str(&text[range.clone()]);
            out.push(self.close);
            done = range.end;
        }
        out.push_str(&text[done..]);
        out
    }

    /// Removes the marks from rendered text, writing `image` for an image's; returns it with the byte ranges they enclosed.
    ///
    /// # Errors
    /// [`TextError::TornUserText`] if the marks do not pair up.
    pub(crate) fn remove(self, rendered: &str, image: &str) -> Result<(String, Vec<Range<usize>>), TextError> {
        let mut text = String::with_capacity(rendered.len());
        let mut ranges = Vec::new();
        let mut opened = None;
        for (position, c) in rendered.char_indices() {
            let torn = TextError::TornUserText { position };
            if c == self.open {
                if opened.replace(text.len()).is_some() {
                    return Err(torn);
                }
            } else if c == self.close {
                let start = opened.take().ok_or(torn)?;
                ranges.push(start..text.len());
            } else if c == self.image && opened.is_none() {
                text.push_str(image);
            } else {
                text.push(c);
            }
        }
        match opened {
            None => Ok((text, ranges)),
            Some(_) => Err(TextError::TornUserText { position: rendered.len() }),
        }
    }
}

fn collect(text: &str, used: &mut HashSet<char>) {
    used.extend(text.chars().filter(|c| PRIVATE_USE.iter().any(|range| range.contains(c))));
}

fn collect_value(value: &Value, used: &mut HashSet<char>) {
    match value {
        Value::String(text) => collect(text, used),
        Value::Array(items) => items.iter().for_each(|item| collect_value(item, used)),
        Value::Object(map) => map.iter().for_each(|(key, item)| {
            collect(key, used);
            collect_value(item, used);
        }),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn marks_avoid_characters_in_use() {
        let variables = json!({"a": ["\u{e000}"], "\u{e001}": 1});
        let marks = Marks::choose(variables.as_object().unwrap(), "\u{e003}").unwrap();
        assert_eq!(marks, Marks { open: '\u{e002}', close: '\u{e004}', image: '\u{e005}' });
    }

    #[test]
    fn a_text_of_all_private_use_characters_is_an_error_not_a_forgery() {
        let all: String = PRIVATE_USE.into_iter().flatten().collect();
        let variables = json!({"a": all});
        assert!(matches!(Marks::choose(variables.as_object().unwrap(), ""), Err(TextError::NoFreeMarker)));
    }

    #[test]
    fn torn_marks_are_noticed() {
        let marks = Marks { open: '(', close: ')', image: '#' };
        assert_eq!(marks.remove("a(b)c(d)", "").unwrap(), ("abcd".to_owned(), vec![1..2, 3..4]));
        assert_eq!(marks.remove("a#(b)(c)#", "<i>").unwrap(), ("a<i>bc<i>".to_owned(), vec![4..5, 5..6]));
        for torn in ["a(b", "ab)", "a(b(c))"] {
            assert!(matches!(marks.remove(torn, ""), Err(TextError::TornUserText { .. })), "{torn}");
        }
    }
}
