//! Typed access to a JSON object that remembers its path, so that every error can name the key in full.
//!
//! JSON `null` counts as absent. Numbers are bounded: a width beyond [`MAX_WIDTH`] or a list longer than the layer limit is
//! a damaged file, and refusing it here keeps all later products inside 64 bits.

use serde_json::{Map, Value};

use super::ConfigError;

/// Largest accepted width (hidden sizes, head widths, ranks).
pub(super) const MAX_WIDTH: usize = 1 << 20;
/// Largest accepted small count (layers, heads, experts, kernel taps).
pub(super) const MAX_COUNT: usize = 1 << 12;

/// A JSON object and its path from the root (empty, or ending in a dot).
#[derive(Debug, Clone)]
pub(super) struct Object<'a> {
    path: String,
    map: &'a Map<String, Value>,
}

impl<'a> Object<'a> {
    pub(super) fn root(map: &'a Map<String, Value>) -> Self {
        Self { path: String::new(), map }
    }

    /// Path of `key` for messages.
    pub(super) fn key(&self, key: &str) -> String {
        format!("{}{key}", self.path)
    }

    /// The value of `key`, unless absent or null.
    pub(super) fn value(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<Self>, ConfigError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self { path: format!("{}.", self.key(key)), map })),
            Some(other) => Err(self.wrong(key, "an object", other)),
        }
    }

    pub(super) fn missing(&self, key: &str, expected: &'static str) -> ConfigError {
        ConfigError::Missing { key: self.key(key), expected }
    }

    #[allow(clippy::needless_pass_by_value, reason = "callers hand over temporaries")]
    pub(super) fn invalid(
        &self,
        key: &str,
        expected: impl Into<String>,
        found: impl ToString,
        remedy: &'static str,
    ) -> ConfigError {
        ConfigError::Value { key: self.key(key), expected: expected.into(), found: found.to_string(), remedy }
    }

    fn wrong(&self, key: &str, expected: &'static str, found: &Value) -> ConfigError {
        ConfigError::Type { key: self.key(key), expected, found: shorten(found) }
    }

    /// An integer in `1 ..= max`, or `None` when absent.
    pub(super) fn count_or_none(&self, key: &str, max: usize) -> Result<Option<usize>, ConfigError> {
        self.integer(key, 1, max)
    }

    /// A required integer in `1 ..= max`.
    pub(super) fn count(&self, key: &str, max: usize) -> Result<usize, ConfigError> {
        self.count_or_none(key, max)?.ok_or_else(|| self.missing(key, "a positive integer"))
    }

    /// A required width in `1 ..= MAX_WIDTH`.
    pub(super) fn width(&self, key: &str) -> Result<usize, ConfigError> {
        self.count(key, MAX_WIDTH)
    }

    /// An integer in `min ..= max`, or `None` when absent.
    pub(super) fn integer(&self, key: &str, min: usize, max: usize) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let number = value.as_u64().ok_or_else(|| self.wrong(key, "a non-negative integer", value))?;
        match usize::try_from(number) {
            Ok(n) if (min..=max).contains(&n) => Ok(Some(n)),
            _ => Err(self.invalid(key, format!("an integer in {min}..={max}"), number, "correct the value")),
        }
    }

    /// A finite number, or `None` when absent.
    pub(super) fn number_or_none(&self, key: &str) -> Result<Option<f32>, ConfigError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let wide = value.as_f64().ok_or_else(|| self.wrong(key, "a number", value))?;
        // The checkpoint's own precision for scalars is f32 on every path.
        #[allow(clippy::cast_possible_truncation, reason = "the narrowing is the point; overflow becomes infinite")]
        let narrow = wide as f32;
        if narrow.is_finite() { Ok(Some(narrow)) } else { Err(self.wrong(key, "a finite number", value)) }
    }

    /// A required finite number.
    pub(super) fn number(&self, key: &str) -> Result<f32, ConfigError> {
        self.number_or_none(key)?.ok_or_else(|| self.missing(key, "a number"))
    }

    /// A required number above zero.
    pub(super) fn positive(&self, key: &str) -> Result<f32, ConfigError> {
        let number = self.number(key)?;
        if number > 0.0 { Ok(number) } else { Err(self.invalid(key, "a number above 0", number, "correct the value")) }
    }

    pub(super) fn bool_or_none(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(other) => Err(self.wrong(key, "true or false", other)),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => Err(self.wrong(key, "a string", other)),
        }
    }

    /// A list of strings.
    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let texts = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
        texts.map(Some).ok_or_else(|| self.wrong(key, "a list of strings", value))
    }

    /// A list of layer indices.
    pub(super) fn indices(&self, key: &str) -> Result<Option<Vec<usize>>, ConfigError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let index = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok());
        let list = value.as_array().and_then(|list| list.iter().map(index).collect::<Option<Vec<_>>>());
        list.map(Some).ok_or_else(|| self.wrong(key, "a list of layer indices", value))
    }

    /// A token id.
    pub(super) fn token(&self, key: &str) -> Result<Option<u32>, ConfigError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        token_id(value).map(Some).ok_or_else(|| self.wrong(key, "a token id", value))
    }

    /// One token id or a list of them, without repetitions.
    pub(super) fn tokens(&self, key: &str) -> Result<Option<Vec<u32>>, ConfigError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let ids = match value {
            Value::Array(list) => list.iter().map(token_id).collect::<Option<Vec<_>>>(),
            one => token_id(one).map(|id| vec![id]),
        };
        let ids = ids.ok_or_else(|| self.wrong(key, "a token id or a list of token ids", value))?;
        let mut unique = Vec::with_capacity(ids.len());
        for id in ids {
            if !unique.contains(&id) {
                unique.push(id);
            }
        }
        Ok(Some(unique))
    }

    /// Refuses any value of a string key but `only`; absent is accepted.
    pub(super) fn only_text(&self, key: &str, only: &str, remedy: &'static str) -> Result<(), ConfigError> {
        match self.text(key)? {
            Some(found) if found != only => Err(self.invalid(key, format!("`{only}`"), format!("`{found}`"), remedy)),
            _ => Ok(()),
        }
    }

    /// Refuses any value of a boolean key but `only`; absent is accepted.
    pub(super) fn only_bool(&self, key: &str, only: bool, remedy: &'static str) -> Result<(), ConfigError> {
        match self.bool_or_none(key)? {
            Some(found) if found != only => Err(self.invalid(key, only.to_string(), found, remedy)),
            _ => Ok(()),
        }
    }
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|n| u32::try_from(n).ok())
}

/// The value as JSON, cut to a length that fits a message.
fn shorten(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text,
    }
}
