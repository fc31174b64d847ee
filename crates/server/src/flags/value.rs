//! From text to the value of a flag, and what is said where it is none.

use serde_json::Value;

use super::FlagError;
use super::table::{Flag, Kind};

/// Reads the text of a value.
///
/// # Errors
/// [`wrong`].
pub(super) fn value_of(flag: &Flag, text: &str) -> Result<Value, FlagError> {
    let refuse = || wrong(flag, text);
    match flag.kind {
        Kind::Switch => boolean(text).map(Value::from).ok_or_else(refuse),
        Kind::Text => Ok(text.into()),
        Kind::Texts => Ok(Value::Array(vec![text.into()])),
        Kind::Int(least, most) => {
            let number = text.parse::<i64>().ok().filter(|number| (least..=most).contains(number));
            number.map(Value::from).ok_or_else(refuse)
        }
        Kind::Size(least, most) => {
            let auto = (text == "auto" && least < 0).then_some(-1);
            let number = auto
                .or_else(|| human(text))
                .filter(|number| (least..=most).contains(number) && *number != 0 || (*number == 0 && least == 0));
            number.map(Value::from).ok_or_else(refuse)
        }
        Kind::Number(least, most, open) => {
            let number = text.parse::<f64>().ok();
            let number = number.filter(|&number| number <= most && if open { number > least } else { number >= least });
            number.map(Value::from).ok_or_else(refuse)
        }
        Kind::Json => match serde_json::from_str(text) {
            Ok(value @ Value::Object(_)) => Ok(value),
            _ => Err(refuse()),
        },
        Kind::JsonTexts => match serde_json::from_str::<Vec<String>>(text) {
            Ok(texts) => Ok(texts.into()),
            Err(_) if text.starts_with('[') => Err(refuse()),
            Err(_) => Ok(vec![text.to_owned()].into()),
        },
        Kind::Word(words) => words.contains(&text).then(|| text.into()).ok_or_else(refuse),
    }
}

/// Says what a flag takes and what was found.
pub(super) fn wrong(flag: &Flag, text: &str) -> FlagError {
    FlagError::Usage(format!("--{}: expected {}, found {text:?}", flag.name, accepted(flag.kind)))
}

/// What a kind takes, in words.
pub(super) fn accepted(kind: Kind) -> String {
    let range = |least: i64, most: i64| {
        if most == i64::MAX { format!("at least {least}") } else { format!("{least} to {most}") }
    };
    match kind {
        Kind::Switch => "true or false".to_owned(),
        Kind::Text => "text".to_owned(),
        Kind::Texts => "one or more texts".to_owned(),
        Kind::Int(least, most) => format!("a whole number, {}", range(least, most)),
        Kind::Size(-1, _) => "a whole number, at least 1 (64k, 1M and the like), or auto".to_owned(),
        Kind::Size(least, most) => format!("a whole number, {} (64k, 1M and the like)", range(least, most)),
        Kind::Number(least, most, true) => format!("a number above {least} and up to {most}"),
        Kind::Number(least, most, false) => format!("a number from {least} to {most}"),
        Kind::Json => "a JSON object".to_owned(),
        Kind::JsonTexts => "a JSON list of texts".to_owned(),
        Kind::Word(words) => {
            let words: Vec<&str> = words.iter().copied().filter(|word| !word.is_empty()).collect();
            format!("one of {}", words.join(", "))
        }
    }
}

/// The spellings of yes and no.
pub(super) fn boolean(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" => Some(true),
        "false" | "0" | "no" | "off" => Some(false),
        _ => None,
    }
}

/// `64k` is 64,000 and `64K` is 65,536; fractions only with the small letters.
fn human(text: &str) -> Option<i64> {
    if let Ok(number) = text.parse::<i64>() {
        return Some(number);
    }
    let unit = text.chars().last()?;
    let number = &text[..text.len() - unit.len_utf8()];
    match unit {
        'k' | 'm' | 'g' => {
            let factor = match unit {
                'k' => 1e3,
                'm' => 1e6,
                _ => 1e9,
            };
            let product = number.parse::<f64>().ok().filter(|number| number.is_finite())? * factor;
            (product.abs() < 9e18).then_some(product.round() as i64)
        }
        'K' => number.parse::<i64>().ok()?.checked_mul(1 << 10),
        'M' => number.parse::<i64>().ok()?.checked_mul(1 << 20),
        'G' => number.parse::<i64>().ok()?.checked_mul(1 << 30),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::table::{FLAGS, find};
    use super::*;

    #[test]
    fn sizes_as_people_write_them() {
        let size_of = |text: &str| value_of(find("max-model-len").unwrap(), text);
        for (text, size) in
            [("7", 7), ("64k", 64_000), ("1.5k", 1500), ("64K", 65_536), ("1M", 1 << 20), ("2g", 2_000_000_000)]
        {
            assert_eq!(size_of(text).unwrap(), size);
        }
        for text in ["auto", "-1"] {
            assert_eq!(size_of(text).unwrap(), -1);
        }
        for text in ["0", "1.5K", "x", "k", "", "9999999999999G", "-2", "1e3"] {
            assert!(size_of(text).is_err(), "{text}");
        }
    }

    #[test]
    fn every_default_is_a_value_of_its_kind() {
        for flag in FLAGS {
            let default: Value = serde_json::from_str(flag.default).unwrap();
            let text = default.as_str().map_or_else(|| default.to_string(), str::to_owned);
            assert!(default.is_null() || value_of(flag, &text).is_ok(), "--{}: {text}", flag.name);
        }
        let names: std::collections::BTreeSet<&str> = FLAGS.iter().map(|flag| flag.name).collect();
        assert_eq!(names.len(), FLAGS.len(), "each flag once");
    }
}
