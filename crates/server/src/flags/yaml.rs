//! The part of YAML that files of flags are written in.
//!
//! Keys at the start of a line, values as plain or quoted scalars, flow lists and maps (`{a: 1, b: [x, y]}`, also in JSON's
//! form), and below a key an indented list or map of such values. Anchors, tags, multi-line scalars and deeper nesting are refused with their
//! line rather than misread.

use serde_json::{Map, Value};

/// Reads the keys of a file in order.
///
/// # Errors
/// What is wrong, with its line.
pub fn parse(text: &str) -> Result<Vec<(String, Value)>, String> {
    let mut entries: Vec<(String, Value)> = Vec::new();
    for (index, raw) in text.lines().enumerate() {
        let fail = |problem: &str| Err(format!("line {}: {problem}", index + 1));
        let line = without_comment(raw).trim_end();
        if line.trim().is_empty() || line == "---" {
            continue;
        }
        let indented = line.starts_with([' ', '\t']);
        let content = line.trim_start();
        if !indented {
            let Some((key, value)) = key_value(content) else { return fail("expected `key: value`") };
            match scalar(value) {
                Ok(value) => entries.push((key, value)),
                Err(problem) => return fail(&problem),
            }
            continue;
        }
        let Some((_, parent)) = entries.last_mut() else { return fail("an indented line needs a key above") };
        if let Some(item) = content.strip_prefix("- ").or_else(|| (content == "-").then_some("")) {
            let item = scalar(item).map_err(|problem| format!("line {}: {problem}", index + 1))?;
            match parent {
                Value::Null => *parent = Value::Array(vec![item]),
                Value::Array(items) => items.push(item),
                _ => return fail("a list item below a key that has a value"),
            }
        } else if let Some((key, value)) = key_value(content) {
            let value = scalar(value).map_err(|problem| format!("line {}: {problem}", index + 1))?;
            match parent {
                Value::Null => *parent = Value::Object(Map::from_iter([(key, value)])),
                Value::Object(map) => {
                    map.insert(key, value);
                }
                _ => return fail("a key below a key that has a value"),
            }
        } else {
            return fail("expected `- item` or `key: value`");
        }
    }
    Ok(entries)
}

/// Cuts at a `#` that is outside quotes and begins a word.
fn without_comment(line: &str) -> &str {
    let mut quote = None;
    let mut before = ' ';
    for (at, c) in line.char_indices() {
        match (quote, c) {
            (None, '#') if before.is_whitespace() => return &line[..at],
            (None, '"' | '\'') if !before.is_alphanumeric() => quote = Some(c),
            (Some(open), c) if c == open && before != '\\' => quote = None,
            _ => {}
        }
        before = c;
    }
    line
}

fn key_value(text: &str) -> Option<(String, &str)> {
    let (key, value) = text.split_once(':')?;
    let key = key.trim().trim_matches(['"', '\'']);
    let plain = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    let separated = value.is_empty() || value.starts_with([' ', '\t']);
    (plain && separated).then(|| (key.to_owned(), value.trim()))
}

fn scalar(text: &str) -> Result<Value, String> {
    let text = text.trim();
    let first = text.chars().next();
    match first {
        None => Ok(Value::Null),
        Some('"') => serde_json::from_str(text).map_err(|error| format!("{text}: {error}")),
        Some('\'') => match text[1..].strip_suffix('\'') {
            Some(inner) => Ok(inner.replace("''", "'").into()),
            None => Err(format!("{text}: the quote is not closed")),
        },
        Some('[' | '{') => {
            let json = serde_json::from_str(text);
            json.or_else(|_| Flow { rest: text, depth: 0 }.whole()).map_err(|problem| format!("{text}: {problem}"))
        }
        Some('&' | '*' | '!' | '|' | '>' | '%' | '@' | '`') => {
            Err(format!("{text}: this form of YAML is not read here"))
        }
        Some(_) => Ok(plain(text)),
    }
}

/// Lists and maps on one line.
struct Flow<'t> {
    rest: &'t str,
    depth: usize,
}

impl Flow<'_> {
    fn whole(mut self) -> Result<Value, String> {
        let value = self.value()?;
        if self.rest.trim().is_empty() { Ok(value) } else { Err(format!("unexpected {:?}", self.rest)) }
    }

    fn value(&mut self) -> Result<Value, String> {
        if self.take('[') {
            let item = |flow: &mut Self, list: &mut Vec<Value>| {
                list.push(flow.value()?);
                Ok(())
            };
            return self.items(']', Vec::new(), item).map(Value::Array);
        }
        if self.take('{') {
            let entry = |flow: &mut Self, map: &mut Map<String, Value>| {
                let Value::String(key) = flow.scalar(true)? else { return Err("a key must be text".to_owned()) };
                if !flow.take(':') {
                    return Err(format!("expected `:` behind {key:?}; quote a text that has one of ,:[]{{}} in it"));
                }
                map.insert(key, flow.value()?);
                Ok(())
            };
            return self.items('}', Map::new(), entry).map(Value::Object);
        }
        self.scalar(false)
    }

    fn items<T>(
        &mut self,
        close: char,
        mut all: T,
        mut one: impl FnMut(&mut Self, &mut T) -> Result<(), String>,
    ) -> Result<T, String> {
        const DEEPEST: usize = 16;
        self.depth += 1;
        if self.depth > DEEPEST {
            return Err("nested too deep".to_owned());
        }
        while !self.take(close) {
            one(self, &mut all)?;
            if !self.take(',') && !self.rest.trim_start().starts_with(close) {
                return Err(format!("the {} is not closed", if close == ']' { "list" } else { "map" }));
            }
        }
        self.depth -= 1;
        Ok(all)
    }

    fn take(&mut self, wanted: char) -> bool {
        let rest = self.rest.trim_start().strip_prefix(wanted);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// A quoted or plain text; keys stay text.
    fn scalar(&mut self, key: bool) -> Result<Value, String> {
        let text = self.rest.trim_start();
        let end = match text.chars().next() {
            Some(quote @ ('"' | '\'')) => {
                let mut before = ' ';
                let closed = text.char_indices().skip(1).find(|&(_, c)| {
                    let escaped = quote == '"' && before == '\\';
                    before = if escaped { ' ' } else { c };
                    c == quote && !escaped
                });
                closed.ok_or("the quote is not closed")?.0 + 1
            }
            // A value may hold a colon, as a URL does.
            _ => text.find(|c| ",[]{}".contains(c) || (key && c == ':')).unwrap_or(text.len()),
        };
        let (found, rest) = text.split_at(end);
        self.rest = rest;
        match found.trim() {
            "" => Err("a value is missing".to_owned()),
            word if key && !word.starts_with(['"', '\'']) => Ok(word.into()),
            word => scalar(word),
        }
    }
}

fn plain(text: &str) -> Value {
    match text {
        "null" | "~" | "Null" | "NULL" => Value::Null,
        "true" | "True" | "TRUE" => true.into(),
        "false" | "False" | "FALSE" => false.into(),
        _ => match serde_json::from_str(text) {
            Ok(number @ Value::Number(_)) => number,
            _ => text.into(),
        },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_forms_that_are_read() {
        let text = "# flags\nport: 8001 # here\nhost: 'it''s'\nname: \"a # b\"\nlist: [a, b]\njson: {\"a\": [1]}\n\
                    block:\n  - x\n  - 2\nmap:\n  method: mtp\n  n: 2\nempty:\nurl: http://x:1/#y\n";
        let read = parse(text).unwrap();
        let expected = [
            ("port", json!(8001)),
            ("host", json!("it's")),
            ("name", json!("a # b")),
            ("list", json!(["a", "b"])),
            ("json", json!({"a": [1]})),
            ("block", json!(["x", 2])),
            ("map", json!({"method": "mtp", "n": 2})),
            ("empty", json!(null)),
            ("url", json!("http://x:1/#y")),
        ];
        assert_eq!(read, expected.map(|(key, value)| (key.to_owned(), value)));
    }

    #[test]
    fn maps_and_lists_on_one_line_need_no_quotes() {
        let map = json!({"method": "mtp", "n": 2, "deep": {"a": [1, "x y", true]}});
        let text = "{method: mtp, n: 2, 'deep': {\"a\": [1, x y, true]}}";
        assert_eq!(parse(&format!("spec: {text} # here")).unwrap(), [("spec".to_owned(), map)]);
        let odd = parse("a: {}\nb: []\nc: [http://a:1, ]\nd: ['it, s', \"q\\\"]\"]").unwrap();
        let odd: Vec<Value> = odd.into_iter().map(|(_, value)| value).collect();
        assert_eq!(odd, [json!({}), json!([]), json!(["http://a:1"]), json!(["it, s", "q\"]"])]);
    }

    #[test]
    fn other_forms_are_refused_with_their_line() {
        for (text, needle) in [
            ("a: 1\nb", "line 2: expected `key: value`"),
            ("  a: 1", "line 1: an indented line"),
            ("a: 1\n  b: 2", "line 2: a key below"),
            ("a: |\n  x", "line 1: |: this form"),
            ("a: 'x", "not closed"),
            ("a: [1", "not closed"),
            ("a: {", "line 1"),
            ("a: {b: 1", "the map is not closed"),
            ("a: {b}", "expected `:` behind \"b\""),
            ("a: {b: }", "a value is missing"),
            ("a: [1] x", "unexpected"),
            ("a: [[[[[[[[[[[[[[[[[1", "nested too deep"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(needle), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[-a: \\[\\]{}'\"#\n0-9\\\\|]{0,60}") {
            let _result = parse(&text);
        }
    }
}
