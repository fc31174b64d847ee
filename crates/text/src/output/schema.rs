//! Types for argument values.
//!
//! The model writes values without a type; the declared JSON schema of the parameter decides. Of the types that the schema
//! allows, the first that the text parses as is taken, in the order null, integer, number, boolean, object, array, string.
//! Text that parses as none of them stays a string, as does everything that has no schema.

use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::python_json::{python_float, python_json, write_string};

/// Parameter schemas of the functions that a request declares.
#[derive(Clone, Debug, Default)]
pub struct ToolSchemas {
    tools: HashMap<String, Value>,
}

impl ToolSchemas {
    /// Reads tool definitions, `{"type": "function", "function": {"name", "parameters"}}` or the inner object alone.
    /// Entries without a name are left out.
    #[must_use]
    pub fn new(tools: &[Value]) -> Self {
        let read = |tool: &Value| {
            let function = tool.get("function").unwrap_or(tool);
            let name = function.get("name")?.as_str()?.to_owned();
            Some((name, function.get("parameters").cloned().unwrap_or(Value::Null)))
        };
        Self { tools: tools.iter().filter_map(read).collect() }
    }

    /// Whether the function is declared.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.tools.contains_key(name)
    }

    /// The longest declared name that `text` starts with.
    pub(super) fn longest_prefix<'t>(&self, text: &'t str) -> Option<&'t str> {
        let lengths = self.tools.keys().filter(|name| text.starts_with(name.as_str())).map(String::len);
        lengths.max().map(|length| &text[..length])
    }

    /// Whether a value of this parameter can only be a string, so that it may be streamed before it is complete.
    pub(super) fn is_string(&self, tool: &str, parameter: &str) -> bool {
        let (root, schema) = self.parameter(tool, parameter);
        Types::of(schema, root, MAX_DEPTH) == Types::STRING
    }

    /// JSON text of a raw value.
    pub(super) fn typed(&self, tool: &str, parameter: &str, text: &str) -> String {
        let (root, schema) = self.parameter(tool, parameter);
        typed_text(text, schema, root)
    }

    fn parameter(&self, tool: &str, parameter: &str) -> (&Value, &Value) {
        let root = self.tools.get(tool).unwrap_or(&Value::Null);
        (root, &root["properties"][parameter])
    }
}

/// How deep unions and references are followed; deeper schemas count as untyped.
const MAX_DEPTH: usize = 16;

/// A set of JSON types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Types(u8);

impl Types {
    const NONE: Self = Self(0);
    const NULL: Self = Self(1);
    const INTEGER: Self = Self(1 << 1);
    const NUMBER: Self = Self(1 << 2);
    const BOOLEAN: Self = Self(1 << 3);
    const OBJECT: Self = Self(1 << 4);
    const ARRAY: Self = Self(1 << 5);
    const STRING: Self = Self(1 << 6);

    fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    fn union(sets: impl Iterator<Item = Self>) -> Self {
        sets.fold(Self::NONE, |all, set| Self(all.0 | set.0))
    }

    /// Types that a schema allows; only string if it names none.
    fn of(schema: &Value, root: &Value, depth: usize) -> Self {
        let found = Self::named(schema, root, depth);
        if found == Self::NONE { Self::STRING } else { found }
    }

    fn named(schema: &Value, root: &Value, depth: usize) -> Self {
        if depth == 0 {
            return Self::NONE;
        }
        match &schema["type"] {
            Value::String(name) => return Self::from_name(name),
            Value::Array(names) => return Self::union(names.iter().filter_map(Value::as_str).map(Self::from_name)),
            _ => {}
        }
        if let Some(target) = reference(schema, root) {
            return Self::named(target, root, depth - 1);
        }
        let unions = ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|key| schema[key].as_array()).flatten();
        let from_unions = Self::union(unions.map(|inner| Self::named(inner, root, depth - 1)));
        let constants = schema["enum"].as_array().into_iter().flatten().chain(schema.get("const"));
        let from_constants = Self::union(constants.map(Self::of_value));
        let from_shape = if schema.get("properties").is_some() {
            Self::OBJECT
        } else if schema.get("items").is_some() {
            Self::ARRAY
        } else {
            Self::NONE
        };
        Self::union([from_unions, from_constants, from_shape].into_iter())
    }

    fn from_name(name: &str) -> Self {
        match name {
            "null" => Self::NULL,
            "integer" => Self::INTEGER,
            "number" => Self::NUMBER,
            "boolean" => Self::BOOLEAN,
            "object" => Self::OBJECT,
            "array" => Self::ARRAY,
            "string" => Self::STRING,
            _ => Self::NONE,
        }
    }

    fn of_value(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(n) if n.is_f64() => Self::NUMBER,
            Value::Number(_) => Self::INTEGER,
            Value::String(_) => Self::STRING,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }
}

/// Follows a reference inside the document, `#/$defs/Name`.
fn reference<'a>(schema: &Value, root: &'a Value) -> Option<&'a Value> {
    root.pointer(schema["$ref"].as_str()?.strip_prefix('#')?)
}

fn typed_text(text: &str, schema: &Value, root: &Value) -> String {
    let types = Types::of(schema, root, MAX_DEPTH);
    let trimmed = text.trim();
    if types.has(Types::NULL) && trimmed == "null" {
        return "null".to_owned();
    }
    if types.has(Types::INTEGER)
        && let Some(integer) = integer_literal(trimmed)
    {
        return integer;
    }
    if types.has(Types::NUMBER)
        && let Some(number) = number_literal(trimmed)
    {
        return number;
    }
    if types.has(Types::BOOLEAN) {
        match trimmed.to_ascii_lowercase().as_str() {
            "true" | "1" => return "true".to_owned(),
            "false" | "0" => return "false".to_owned(),
            _ => {}
        }
    }
    if types.has(Types::OBJECT) || types.has(Types::ARRAY) {
        match serde_json::from_str::<Value>(trimmed) {
            Ok(value @ Value::Object(_)) if types.has(Types::OBJECT) => {
                return python_json(&coerce(value, schema, root, MAX_DEPTH));
            }
            Ok(value @ Value::Array(_)) if types.has(Types::ARRAY) => {
                return python_json(&coerce(value, schema, root, MAX_DEPTH));
            }
            _ => {}
        }
    }
    let mut out = String::new();
    write_string(text, false, &mut out);
    out
}

/// An integer of any length in JSON's spelling.
fn integer_literal(text: &str) -> Option<String> {
    let (sign, digits) = text.strip_prefix('-').map_or(("", text), |digits| ("-", digits));
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    match digits.trim_start_matches('0') {
        "" => Some("0".to_owned()),
        digits => Some(format!("{sign}{digits}")),
    }
}

/// Floats up to here hold every integer exactly.
const EXACT_INTEGERS: f64 = 9_007_199_254_740_992.0;

/// A finite number in JSON's spelling; whole numbers become integers.
fn number_literal(text: &str) -> Option<String> {
    if let Some(integer) = integer_literal(text) {
        return Some(integer);
    }
    // Rust also reads "inf", "nan" and "infinity"; those are not numbers here.
    let numeric = text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
    let x: f64 = text.parse().ok().filter(|x: &f64| numeric && x.is_finite())?;
    if x.fract() == 0.0 && x.abs() <= EXACT_INTEGERS {
        // Adding zero turns -0.0 into 0.0.
        return Some(format!("{:.0}", x + 0.0));
    }
    Some(python_float(x))
}

/// Gives nested strings the types of their schemas.
fn coerce(value: Value, schema: &Value, root: &Value, depth: usize) -> Value {
    let schema = reference(schema, root).unwrap_or(schema);
    if depth == 0 {
        return value;
    }
    match value {
        Value::Object(map) => {
            let properties = &schema["properties"];
            let typed = |(key, item)| {
                let inner = properties.get(&key).unwrap_or(&Value::Null);
                let item = coerce(item, inner, root, depth - 1);
                (key, item)
            };
            Value::Object(map.into_iter().map(typed).collect::<Map<_, _>>())
        }
        Value::Array(items) => {
            let inner = schema.get("items").unwrap_or(&Value::Null);
            Value::Array(items.into_iter().map(|item| coerce(item, inner, root, depth - 1)).collect())
        }
        Value::String(text) => {
            if Types::of(schema, root, MAX_DEPTH).has(Types::STRING) {
                return Value::String(text);
            }
            let json = typed_text(&text, schema, root);
            serde_json::from_str(&json).unwrap_or(Value::String(text))
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn typed(text: &str, schema: Value) -> String {
        typed_text(text, &schema, &Value::Null)
    }

    #[test]
    fn one_type() {
        for (text, name, expected) in [
            ("null", "null", "null"),
            ("5", "integer", "5"),
            ("-007", "integer", "-7"),
            ("-0", "integer", "0"),
            ("123456789012345678901234567890", "integer", "123456789012345678901234567890"),
            ("5.0", "integer", "\"5.0\""),
            ("5.0", "number", "5"),
            ("-0.0", "number", "0"),
            ("1e3", "number", "1000"),
            ("2.5", "number", "2.5"),
            ("1e300", "number", "1e+300"),
            ("1e999", "number", "\"1e999\""),
            ("NaN", "number", "\"NaN\""),
            ("inf", "number", "\"inf\""),
            ("true", "boolean", "true"),
            ("False", "boolean", "false"),
            ("1", "boolean", "true"),
            ("0", "boolean", "false"),
            ("yes", "boolean", "\"yes\""),
            ("{\"b\":1,\"a\":[]}", "object", "{\"b\": 1, \"a\": []}"),
            ("[1,2]", "object", "\"[1,2]\""),
            ("[1,2]", "array", "[1, 2]"),
            ("[NaN]", "array", "\"[NaN]\""),
            ("123", "string", "\"123\""),
            (" a\n\"", "string", "\" a\\n\\\"\""),
        ] {
            assert_eq!(typed(text, json!({"type": name})), expected, "{text} as {name}");
        }
    }

    #[test]
    fn unions_go_by_priority_and_no_schema_means_string() {
        assert_eq!(typed("5", json!({"type": ["string", "integer"]})), "5");
        assert_eq!(typed("null", json!({"anyOf": [{"type": "string"}, {"type": "null"}]})), "null");
        assert_eq!(typed("1", json!({"type": ["boolean", "integer"]})), "1");
        assert_eq!(typed("2", json!({"enum": [1, 2]})), "2");
        assert_eq!(typed("5", json!({})), "\"5\"");
        assert_eq!(typed("5", Value::Null), "\"5\"");
        assert_eq!(typed("[]", json!({"items": {}})), "[]");
    }

    #[test]
    fn nested_strings_take_the_types_of_their_schemas() {
        let schema = json!({"type": "object", "properties": {
            "n": {"type": "integer"}, "s": {"type": "string"}, "l": {"type": "array", "items": {"type": "number"}}}});
        let text = r#"{"n": "10", "s": "10", "l": ["1.5", "x", 2], "other": "3"}"#;
        assert_eq!(typed(text, schema), r#"{"n": 10, "s": "10", "l": [1.5, "x", 2], "other": "3"}"#);
    }

    #[test]
    fn references_inside_the_document_are_followed_and_loops_end() {
        let tool = json!({"name": "f", "parameters": {
            "properties": {"a": {"$ref": "#/$defs/N"}, "b": {"$ref": "#/$defs/Loop"}},
            "$defs": {"N": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}}}});
        let schemas = ToolSchemas::new(&[tool]);
        assert_eq!(schemas.typed("f", "a", "7"), "7");
        assert_eq!(schemas.typed("f", "b", "7"), "\"7\"");
        assert!(!schemas.is_string("f", "a"));
        assert!(schemas.is_string("f", "unknown"));
    }
}
