//! JSON schemas on their way into a grammar.
//!
//! A schema is used as it is, but for three things: runs of white space are bounded, so that an answer cannot lose itself
//! in them; formats that the grammar does not know are the annotations that JSON Schema says they are; and a client cannot
//! set the library's own options. [`Lenience`] says what happens to keywords that a grammar cannot express.

use glimmer_engine::constraint::ConstraintError;
use serde_json::{Value, json};

/// What to do with keywords that a grammar cannot express.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lenience {
    /// They are errors.
    Strict,
    /// They are ignored, and `oneOf` means `anyOf`.
    Lenient,
}

/// Deepest nesting of subschemas that is looked into.
const MAX_DEPTH: usize = 64;

/// Formats of strings that the library enforces.
const FORMATS: &[&str] = &["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Keywords whose value is a schema.
const ONE: &[&str] = &["items", "additionalItems", "additionalProperties", "not", "contains", "propertyNames"];
/// Keywords whose value is a list of schemas.
const LISTS: &[&str] = &["anyOf", "oneOf", "allOf", "prefixItems", "items"];
/// Keywords whose value is an object of schemas.
const MAPS: &[&str] = &["properties", "patternProperties", "$defs", "definitions"];

/// Schema of any JSON object.
pub(super) fn any_object() -> Value {
    prepared(json!({"type": "object"}), Lenience::Strict)
}

/// Reads the text of a schema.
pub(super) fn parse(name: &str, text: &str) -> Result<Value, ConstraintError> {
    let schema: Value =
        serde_json::from_str(text).map_err(|error| ConstraintError(format!("{name}: not JSON: {error}")))?;
    if schema.is_object() || schema.is_boolean() {
        return Ok(schema);
    }
    Err(ConstraintError(format!("{name}: expected a JSON schema, an object or a boolean")))
}

/// The schema as the library gets it.
pub(super) fn prepared(mut schema: Value, lenience: Lenience) -> Value {
    drop_unknown_formats(&mut schema, MAX_DEPTH);
    let Value::Object(map) = &mut schema else { return schema };
    let options = json!({
        "whitespace_pattern": r"[ \n\r\t]{1,64}",
        "lenient": lenience == Lenience::Lenient,
    });
    map.insert("x-guidance".to_owned(), options);
    schema
}

fn drop_unknown_formats(schema: &mut Value, depth: usize) {
    if depth == 0 {
        return;
    }
    if let Value::Object(map) = schema
        && map.get("format").is_some_and(|format| format.as_str().is_some_and(|name| !FORMATS.contains(&name)))
    {
        map.remove("format");
    }
    for inner in children_mut(schema) {
        drop_unknown_formats(inner, depth - 1);
    }
}

/// The schemas directly inside a schema, each with its JSON pointer relative to it.
pub(super) fn children(schema: &Value) -> Vec<(String, &Value)> {
    let Value::Object(map) = schema else { return Vec::new() };
    let mut found = Vec::new();
    for (keyword, value) in map {
        let keyword = keyword.as_str();
        match value {
            Value::Array(items) if LISTS.contains(&keyword) => {
                let numbered = items.iter().enumerate();
                found.extend(numbered.map(|(index, item)| (format!("/{keyword}/{index}"), item)));
            }
            Value::Object(items) if MAPS.contains(&keyword) => {
                found.extend(items.iter().map(|(name, item)| (format!("/{keyword}/{}", escaped(name)), item)));
            }
            Value::Object(_) | Value::Bool(_) if ONE.contains(&keyword) => {
                found.push((format!("/{keyword}"), value));
            }
            _ => {}
        }
    }
    found
}

fn children_mut(schema: &mut Value) -> Vec<&mut Value> {
    let Value::Object(map) = schema else { return Vec::new() };
    let mut found = Vec::new();
    for (keyword, value) in map {
        let keyword = keyword.as_str();
        if value.is_object() && ONE.contains(&keyword) {
            found.push(value);
            continue;
        }
        match value {
            Value::Array(items) if LISTS.contains(&keyword) => found.extend(items),
            Value::Object(items) if MAPS.contains(&keyword) => found.extend(items.values_mut()),
            _ => {}
        }
    }
    found
}

/// A name as one step of a JSON pointer.
pub(super) fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// A part of a schema on its own: with the definitions of the whole, so that references to them still lead somewhere.
pub(super) fn with_definitions(part: &Value, whole: &Value) -> Value {
    let Value::Object(part) = part else { return part.clone() };
    let mut alone = part.clone();
    for key in ["$schema", "$defs", "definitions"] {
        if let Some(definitions) = whole.get(key)
            && !alone.contains_key(key)
        {
            alone.insert(key.to_owned(), definitions.clone());
        }
    }
    Value::Object(alone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clients_options_do_not_reach_the_library() {
        let schema = json!({"type": "object", "x-guidance": {"item_separator": "(.*)"}});
        let prepared = prepared(schema, Lenience::Strict);
        assert_eq!(prepared["x-guidance"].get("item_separator"), None);
        assert_eq!(prepared["x-guidance"]["lenient"], json!(false));
    }

    #[test]
    fn formats_are_dropped_where_they_are_keywords_only() {
        let schema = json!({"properties": {"format": {"type": "string", "format": "password"},
                                           "at": {"type": "string", "format": "date"}},
                            "items": [{"format": "int32"}]});
        let prepared = prepared(schema, Lenience::Strict);
        assert_eq!(
            prepared["properties"],
            json!({"format": {"type": "string"},
                                                  "at": {"type": "string", "format": "date"}})
        );
        assert_eq!(prepared["items"], json!([{}]));
    }
}
