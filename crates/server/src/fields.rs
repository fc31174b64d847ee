//! Reading typed fields out of a JSON body.
//!
//! Reading goes on after a wrong field, so that a client sees all its mistakes at once; a wrong or null field reads as
//! absent. Invariant: whoever reads with [`Fields`] calls [`Problems::check`] before using what was read.

use std::cell::RefCell;

use serde_json::{Map, Value};

use crate::error::{ApiError, shorten};

/// Mistakes found so far: dotted path and what is wrong there.
#[derive(Debug, Default)]
pub struct Problems(RefCell<Vec<(String, String)>>);

impl Problems {
    /// Notes a mistake.
    pub fn add(&self, path: impl Into<String>, problem: impl Into<String>) {
        self.0.borrow_mut().push((path.into(), problem.into()));
    }

    /// Fails if there was a mistake.
    ///
    /// # Errors
    /// The schema error that lists them.
    pub fn check(&self) -> Result<(), ApiError> {
        let found = self.0.borrow();
        if found.is_empty() { Ok(()) } else { Err(ApiError::schema(&found)) }
    }
}

/// An object whose fields are read.
#[derive(Clone, Debug)]
pub struct Fields<'v, 'p> {
    map: &'v Map<String, Value>,
    path: String,
    problems: &'p Problems,
}

impl<'v, 'p> Fields<'v, 'p> {
    /// The body itself.
    #[must_use]
    pub fn new(map: &'v Map<String, Value>, problems: &'p Problems) -> Self {
        Self { map, path: String::new(), problems }
    }

    /// Dotted path of a field.
    #[must_use]
    pub fn path(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The problems that this object reports to.
    #[must_use]
    pub fn problems(&self) -> &'p Problems {
        self.problems
    }

    /// The object.
    #[must_use]
    pub fn map(&self) -> &'v Map<String, Value> {
        self.map
    }

    /// The field as it is; null is absent.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<&'v Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Text.
    #[must_use]
    pub fn text(&self, key: &str) -> Option<&'v str> {
        self.read(key, "text", Value::as_str)
    }

    /// A boolean.
    #[must_use]
    pub fn flag(&self, key: &str) -> Option<bool> {
        self.read(key, "true or false", Value::as_bool)
    }

    /// A whole number; `5.0` is one.
    #[must_use]
    pub fn integer(&self, key: &str) -> Option<i64> {
        self.read(key, "a whole number", integer)
    }

    /// A number.
    #[must_use]
    pub fn number(&self, key: &str) -> Option<f64> {
        self.read(key, "a number", Value::as_f64)
    }

    /// A list.
    #[must_use]
    pub fn list(&self, key: &str) -> Option<&'v [Value]> {
        self.read(key, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    /// An object.
    #[must_use]
    pub fn object(&self, key: &str) -> Option<Fields<'v, 'p>> {
        let map = self.read(key, "an object", Value::as_object)?;
        Some(Fields { map, path: self.path(key), problems: self.problems })
    }

    /// A list of token ids.
    #[must_use]
    pub fn token_ids(&self, key: &str) -> Option<Vec<u32>> {
        let list = self.list(key)?;
        let ids: Option<Vec<u32>> =
            list.iter().map(|value| integer(value).and_then(|id| u32::try_from(id).ok())).collect();
        if ids.is_none() {
            self.problems.add(self.path(key), "expected a list of token ids");
        }
        ids
    }

    /// Text, or a list of texts.
    #[must_use]
    pub fn texts(&self, key: &str) -> Option<Vec<String>> {
        match self.value(key)? {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(list) => {
                let texts: Option<Vec<String>> = list.iter().map(|v| v.as_str().map(str::to_owned)).collect();
                if texts.is_none() {
                    self.problems.add(self.path(key), "expected text or a list of texts");
                }
                texts
            }
            other => {
                self.wrong(key, "text or a list of texts", other);
                None
            }
        }
    }

    /// Notes that a field must be there.
    pub fn missing(&self, key: &str) {
        self.problems.add(self.path(key), "the field is required");
    }

    /// Notes that a field has another type.
    pub fn wrong(&self, key: &str, expected: &str, found: &Value) {
        self.problems.add(self.path(key), format!("expected {expected}, found {}", shorten(&found.to_string())));
    }

    fn read<T>(&self, key: &str, expected: &str, convert: impl Fn(&'v Value) -> Option<T>) -> Option<T> {
        let value = self.value(key)?;
        let converted = convert(value);
        if converted.is_none() {
            self.wrong(key, expected, value);
        }
        converted
    }
}

fn integer(value: &Value) -> Option<i64> {
    /// Whole numbers below this are exact in a double.
    const EXACT: f64 = 9.0e15;
    value.as_i64().or_else(|| {
        let number = value.as_f64()?;
        (number.fract().abs() < f64::EPSILON && number.abs() < EXACT && !value.is_u64()).then_some(number as i64)
    })
}

/// Parses a body as a JSON object.
///
/// # Errors
/// A schema error that says where the text stops being JSON.
pub fn parse_object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match serde_json::from_slice(body) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => {
            let found = shorten(&other.to_string());
            Err(ApiError::schema(&[(String::new(), format!("the body must be a JSON object, found {found}"))]))
        }
        Err(error) => Err(ApiError::schema(&[(String::new(), format!("the body is not JSON: {error}"))])),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn wrong_fields_are_collected_with_their_paths() {
        let body = json!({"a": 1.5, "b": "x", "c": {"d": 3, "e": null}, "f": [1, -1], "g": 5.0});
        let problems = Problems::default();
        let fields = Fields::new(body.as_object().unwrap(), &problems);
        assert_eq!(fields.integer("g"), Some(5));
        assert!(problems.check().is_ok());
        assert_eq!((fields.integer("a"), fields.flag("b")), (None, None));
        let inner = fields.object("c").unwrap();
        assert_eq!((inner.text("d"), inner.text("e")), (None, None));
        assert_eq!(fields.token_ids("f"), None);
        let error = problems.check().unwrap_err();
        assert_eq!(error.param.as_deref(), Some("a"));
        assert_eq!(
            error.message,
            "a: expected a whole number, found 1.5; b: expected true or false, found \"x\"; c.d: expected text, found 3; \
             f: expected a list of token ids"
        );
    }

    #[test]
    fn bodies_that_are_no_objects() {
        for (body, needle) in [("[1]", "found [1]"), ("{", "not JSON"), ("", "not JSON"), ("\u{1}", "not JSON")] {
            let error = parse_object(body.as_bytes()).unwrap_err();
            assert!(error.message.contains(needle), "{}", error.message);
        }
        let deep = "[".repeat(100_000);
        assert!(parse_object(deep.as_bytes()).is_err());
    }
}
