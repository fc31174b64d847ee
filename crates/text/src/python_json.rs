//! JSON text exactly as Python's `json.dumps` writes it.
//!
//! Chat templates put tool schemas and arguments into the prompt with Python's `tojson`; the model was trained on that
//! text, so separators (`", "`, `": "`), float spelling (`1e-07`, `1e+20`, `1.0`), escapes and key order must agree to the
//! byte. Nothing is escaped for HTML.

use minijinja::value::{Serde, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Options of `json.dumps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JsonStyle {
    /// Write characters beyond ASCII as `\uXXXX`.
    pub ensure_ascii: bool,
    /// Text of one level of indentation; `None` writes one line.
    pub indent: Option<String>,
    /// Between items; Python's default is `", "`, or `","` with an indent.
    pub item_separator: String,
    /// Between key and value; Python's default is `": "`.
    pub key_separator: String,
    /// Sort the keys of objects.
    pub sort_keys: bool,
}

impl Default for JsonStyle {
    fn default() -> Self {
        Self {
            ensure_ascii: false,
            indent: None,
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
            sort_keys: false,
        }
    }
}

/// Writes a JSON value on one line with Python's default separators, keys in their own order and no ASCII escapes.
#[must_use]
pub fn python_json(value: &serde_json::Value) -> String {
    let mut out = String::new();
    write_value(&Value::from(Serde(value)), &JsonStyle::default(), 0, &mut out)
        .expect("every JSON value can be written as JSON");
    out
}

/// Writes a float as Python's `repr` does: shortest digits that read back, an exponent below 1e-4 and from 1e16 on.
#[must_use]
pub fn python_float(x: f64) -> String {
    if x.is_nan() {
        return "NaN".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    // Rust's exponent form has the same shortest digits; only their layout differs.
    let text = format!("{x:e}");
    let (mantissa, exponent) = text.split_once('e').expect("the e format always writes an exponent");
    let exponent: i32 = exponent.parse().expect("the exponent of an f64 is a small integer");
    if (-4..16).contains(&exponent) {
        return format!("{x:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs())
}

/// Writes a template value; `Err` for values that JSON cannot hold.
pub(crate) fn write_value(value: &Value, style: &JsonStyle, depth: usize, out: &mut String) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&number(value)?),
        ValueKind::String => {
            let text = value.as_str().ok_or_else(|| not_json(value))?;
            write_string(text, style.ensure_ascii, out);
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            write_items(('[', ']'), items.len(), style, depth, out, |index, out| {
                write_value(&items[index], style, depth + 1, out)
            })?;
        }
        ValueKind::Map => {
            let mut pairs = Vec::new();
            for key in value.try_iter()? {
                let item = value.get_item(&key)?;
                pairs.push((key_text(&key)?, item));
            }
            if style.sort_keys {
                pairs.sort_by(|a, b| a.0.cmp(&b.0));
            }
            write_items(('{', '}'), pairs.len(), style, depth, out, |index, out| {
                write_string(&pairs[index].0, style.ensure_ascii, out);
                out.push_str(&style.key_separator);
                write_value(&pairs[index].1, style, depth + 1, out)
            })?;
        }
        _ => return Err(not_json(value)),
    }
    Ok(())
}

fn write_items(
    (open, close): (char, char),
    count: usize,
    style: &JsonStyle,
    depth: usize,
    out: &mut String,
    mut write: impl FnMut(usize, &mut String) -> Result<(), Error>,
) -> Result<(), Error> {
    let newline = |levels: usize, out: &mut String| {
        if let Some(indent) = &style.indent {
            out.push('\n');
            (0..levels).for_each(|_| out.push_str(indent));
        }
    };
    out.push(open);
    for index in 0..count {
        if index > 0 {
            out.push_str(&style.item_separator);
        }
        newline(depth + 1, out);
        write(index, out)?;
    }
    if count > 0 {
        newline(depth, out);
    }
    out.push(close);
    Ok(())
}

fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        return Ok(value.to_string());
    }
    Ok(python_float(f64::try_from(value.clone())?))
}

/// Python turns the scalar keys of a dict into text.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => key.as_str().map(str::to_owned).ok_or_else(|| not_json(key)),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number => number(key),
        _ => Err(not_json(key)),
    }
}

fn not_json(value: &Value) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("a value of kind {} cannot be written as JSON", value.kind()))
}

/// Appends `text` as a JSON string with its quotes.
pub(crate) fn write_string(text: &str, ensure_ascii: bool, out: &mut String) {
    out.push('"');
    write_escaped(text, ensure_ascii, out);
    out.push('"');
}

/// Appends `text` as the inside of a JSON string.
pub(crate) fn write_escaped(text: &str, ensure_ascii: bool, out: &mut String) {
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (ensure_ascii && !(' '..='~').contains(&c)) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
            c => out.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_spelled_as_python_spells_them() {
        for (x, expected) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1e-7, "1e-07"),
            (1.5e-7, "1.5e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1e20, "1e+20"),
            (1.25e100, "1.25e+100"),
            (123_456.789, "123456.789"),
            (f64::MAX, "1.7976931348623157e+308"),
            (5e-324, "5e-324"),
            (f64::INFINITY, "Infinity"),
            (f64::NEG_INFINITY, "-Infinity"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(python_float(x), expected);
        }
    }

    #[test]
    fn one_line_with_python_separators_and_own_key_order() {
        let value: serde_json::Value = serde_json::from_str(
            r#"{"z":[1,-2,1e20,18446744073709551615],"a":{},"b":[],"s":"<\u00e9&\n\u0001\"\u007f>","n":null,"t":true}"#,
        )
        .unwrap();
        let expected = "{\"z\": [1, -2, 1e+20, 18446744073709551615], \"a\": {}, \"b\": [], \
                        \"s\": \"<\u{e9}&\\n\\u0001\\\"\u{7f}>\", \"n\": null, \"t\": true}";
        assert_eq!(python_json(&value), expected);
    }

    #[test]
    fn the_options_follow_json_dumps() {
        let value = Value::from(Serde(serde_json::json!({"b": [1, {"c": "\u{1f600}\u{7f}"}], "a": []})));
        let style = JsonStyle {
            ensure_ascii: true,
            indent: Some("  ".to_owned()),
            item_separator: ",".to_owned(),
            sort_keys: true,
            ..JsonStyle::default()
        };
        let mut out = String::new();
        write_value(&value, &style, 0, &mut out).unwrap();
        let expected =
            "{\n  \"a\": [],\n  \"b\": [\n    1,\n    {\n      \"c\": \"\\ud83d\\ude00\\u007f\"\n    }\n  ]\n}";
        assert_eq!(out, expected);
    }
}
