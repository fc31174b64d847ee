//! `--override-generation-config`: defaults of sampling, in the ranges that requests have.

use serde_json::{Map, Value};

use super::{FlagError, conflict};

/// Keys, what each takes, and whether a value is that.
const KEYS: [(&str, &str, fn(&Value) -> bool); 6] = [
    ("temperature", "a number from 0 to 2", |value| value.as_f64().is_some_and(|v| (0.0..=2.0).contains(&v))),
    ("top_p", "a number above 0 and up to 1", |value| value.as_f64().is_some_and(|v| v > 0.0 && v <= 1.0)),
    ("top_k", "a whole number, -1 or 0 (off) or at least 1", |value| {
        value.as_i64().is_some_and(|v| (-1..=i64::from(u32::MAX)).contains(&v))
    }),
    ("min_p", "a number from 0 to 1", |value| value.as_f64().is_some_and(|v| (0.0..=1.0).contains(&v))),
    ("repetition_penalty", "a number above 0", |value| {
        value.as_f64().is_some_and(|v| v as f32 > 0.0 && (v as f32).is_finite())
    }),
    ("max_new_tokens", "a whole number, at least 1", |value| {
        value.as_u64().is_some_and(|v| (1..=u64::from(u32::MAX)).contains(&v))
    }),
];

/// Refuses values that every request would be refused for.
///
/// # Errors
/// [`FlagError::Conflict`] naming the key and its range.
pub(super) fn check(overrides: &Map<String, Value>) -> Result<(), FlagError> {
    for (key, takes, fits) in KEYS {
        if let Some(value) = overrides.get(key).filter(|value| !value.is_null() && !fits(value)) {
            return conflict(format!("--override-generation-config: {key} must be {takes}, found {value}"));
        }
    }
    Ok(())
}

/// What is said of keys that nothing here reads.
pub(super) fn notes(overrides: &Map<String, Value>) -> impl Iterator<Item = String> {
    let unread = overrides.keys().filter(|name| KEYS.iter().all(|(key, ..)| key != name));
    unread.map(|name| {
        let known = KEYS.map(|(key, ..)| key).join(", ");
        format!("--override-generation-config: {name} is ignored; known are {known}")
    })
}
