//! What chat templates expect of Jinja2 and Python, and minijinja does not bring.
//!
//! Each shim closes one difference: the `tojson` filter of Python's `json.dumps`, `none` not being iterable,
//! `raise_exception`, `strftime_now`, Python's idea of white space in `str.strip`, and the `{% generation %}` block of
//! training templates.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use crate::python_json::{JsonStyle, write_value};

/// Marks an error as coming from `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Refusal(pub(crate) String);

/// Adds all shims to an environment.
pub(crate) fn install(env: &mut Environment<'_>) {
    env.add_filter("tojson", tojson);
    env.add_test("iterable", is_iterable);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", strftime_now);
    env.set_unknown_method_callback(python_method);
}

#[allow(clippy::needless_pass_by_value, reason = "the template engine hands keyword arguments over by value")]
fn tojson(value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    let ensure_ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    let sort_keys: Option<bool> = kwargs.get("sort_keys")?;
    let indent: Option<Value> = kwargs.get("indent")?;
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    kwargs.assert_all_used()?;
    let mut style = JsonStyle {
        ensure_ascii: ensure_ascii.unwrap_or(false),
        sort_keys: sort_keys.unwrap_or(false),
        ..JsonStyle::default()
    };
    match indent {
        Some(indent) if !indent.is_none() => {
            style.indent = Some(match indent.as_str() {
                Some(text) => text.to_owned(),
                None => " ".repeat(usize::try_from(indent).unwrap_or(0)),
            });
            style.item_separator = ",".to_owned();
        }
        _ => {}
    }
    match separators.as_deref() {
        None => {}
        Some([item, key]) => {
            style.item_separator.clone_from(item);
            style.key_separator.clone_from(key);
        }
        Some(_) => {
            let detail = "tojson: separators must be a pair (item separator, key separator)";
            return Err(Error::new(ErrorKind::InvalidOperation, detail));
        }
    }
    let mut out = String::new();
    write_value(value, &style, 0, &mut out)?;
    Ok(out)
}

/// Jinja2 asks Python's `iter`, which refuses `None`; minijinja would iterate over it as if it were empty.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raised by the template").with_source(Refusal(message)))
}

/// Python strips four separator characters that Unicode does not count as white space.
fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn python_method(state: &mut State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let (ValueKind::String, Some(text), true) = (value.kind(), value.as_str(), args.is_empty()) {
        match method {
            "strip" => return Ok(Value::from(text.trim_matches(is_python_space))),
            "lstrip" => return Ok(Value::from(text.trim_start_matches(is_python_space))),
            "rstrip" => return Ok(Value::from(text.trim_end_matches(is_python_space))),
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

fn strftime_now(format: &str) -> Result<String, Error> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    strftime(format, now).map_err(|detail| Error::new(ErrorKind::InvalidOperation, detail))
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// Formats a time in UTC, given in seconds since 1970, with the directives that templates use.
fn strftime(format: &str, seconds: u64) -> Result<String, String> {
    let days = seconds / 86_400;
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let (year, month, day) = civil(days);
    let month_name = MONTHS[usize::try_from(month - 1).map_err(|_| "month out of range".to_owned())?];
    let day_name = DAYS[usize::try_from(days % 7).map_err(|_| "day out of range".to_owned())?];
    let hour_12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str(&format!("{year}")),
            Some('y') => out.push_str(&format!("{:02}", year % 100)),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('H') => out.push_str(&format!("{hour:02}")),
            Some('I') => out.push_str(&format!("{hour_12:02}")),
            Some('M') => out.push_str(&format!("{minute:02}")),
            Some('S') => out.push_str(&format!("{second:02}")),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('%') => out.push('%'),
            other => {
                let directive = other.map_or_else(|| "%".to_owned(), |c| format!("%{c}"));
                return Err(format!("strftime_now: the directive {directive} is not supported"));
            }
        }
    }
    Ok(out)
}

/// Year, month and day (both from 1) of a day counted from 1970-01-01, in the Gregorian calendar.
fn civil(days: u64) -> (u64, u64, u64) {
    // Counting from 1 March of year 0 puts the leap day at the end of a year and makes months regular.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

/// Replaces `{% generation %}` and `{% endgeneration %}` by a block that does nothing but keeps their white-space control.
pub(crate) fn without_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let inside = &rest[start + 2..start + length];
        let word = inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let replacement = match word {
            "generation" => inside.replace("generation", "if true"),
            "endgeneration" => inside.replace("endgeneration", "endif"),
            _ => inside.to_owned(),
        };
        out.push_str(&rest[..start + 2]);
        out.push_str(&replacement);
        out.push_str("%}");
        rest = &rest[start + length + 2..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_of_known_days() {
        for (seconds, expected) in [
            (0, "1970-01-01 00:00:00 Thu Jan"),
            (951_782_400, "2000-02-29 00:00:00 Tue Feb"),
            (1_709_251_199, "2024-02-29 23:59:59 Thu Feb"),
            (4_102_444_800, "2100-01-01 00:00:00 Fri Jan"),
        ] {
            assert_eq!(strftime("%Y-%m-%d %H:%M:%S %a %b", seconds).unwrap(), expected);
        }
        assert_eq!(strftime("%d %B %y, %I %p, 100%%", 46_800).unwrap(), "01 January 70, 01 PM, 100%");
        assert!(strftime("%Q", 0).unwrap_err().contains("%Q"));
    }

    #[test]
    fn generation_blocks_keep_their_white_space_control() {
        let source = "a {%- generation -%} b {% endgeneration %}\n{% if x %}c{% endif %} {{ '{%' }}";
        let expected = "a {%- if true -%} b {% endif %}\n{% if x %}c{% endif %} {{ '{%' }}";
        assert_eq!(without_generation_blocks(source), expected);
    }
}
