//! `--speculative-config`.

use serde_json::{Map, Value};

use super::{FlagError, conflict};

/// How drafts are made.
#[derive(Clone, Debug, PartialEq)]
pub struct Speculative {
    /// Who drafts.
    pub method: Method,
    /// Directory of the drafter, where it has one.
    pub model: Option<String>,
    /// Tokens of a draft.
    pub depth: u32,
    /// Depth by the number of running sequences: first, last, depth.
    pub depth_by_batch: Vec<(u32, u32, u32)>,
    /// Take the depth, up to [`Speculative::depth`], that measures best.
    pub adaptive: bool,
    /// Draft by chance instead of the most probable token.
    pub probabilistic: bool,
    /// Accept by chance at these rates, whatever the model says: for measurements only.
    pub synthetic_rates: Option<Vec<f64>>,
}

/// Who drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The checkpoint's own prediction head.
    Mtp,
    /// A separate block drafter.
    DFlash,
    /// Repetition of the context.
    NGram,
}

impl Method {
    /// Its name in the flag.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mtp => "mtp",
            Self::DFlash => "dflash",
            Self::NGram => "ngram",
        }
    }
}

const KEYS: [&str; 17] = [
    "method",
    "model",
    "num_speculative_tokens",
    "draft_tensor_parallel_size",
    "attention_backend",
    "kv_cache_dtype",
    "disable_padded_drafter_batch",
    "num_speculative_tokens_per_batch_size",
    "rejection_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "draft_sample_method",
    "enforce_eager",
    "max_model_len",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "quantization",
];

/// Deepest draft.
const DEEPEST: u64 = 128;

impl Speculative {
    /// Reads the object.
    ///
    /// # Errors
    /// An unknown key, a missing or wrong value.
    pub fn read(map: &Map<String, Value>) -> Result<Self, FlagError> {
        let fail = |message: String| conflict(format!("--speculative-config: {message}"));
        if let Some(key) = map.keys().find(|key| !KEYS.contains(&key.as_str())) {
            return fail(format!("unknown key {key:?}; known are {}", KEYS.join(", ")));
        }
        let model = map.get("model").and_then(Value::as_str).map(str::to_owned);
        let method = match map.get("method").and_then(Value::as_str) {
            Some("mtp" | "glm5_next_mtp") => Method::Mtp,
            Some("dflash") => Method::DFlash,
            Some("ngram") => Method::NGram,
            None if model.is_some() => Method::DFlash,
            other => return fail(format!("method must be mtp, dflash or ngram, found {}", other.unwrap_or("nothing"))),
        };
        if method == Method::DFlash && model.is_none() {
            return fail("dflash needs model, the drafter's directory".to_owned());
        }
        let Some(depth) = map.get("num_speculative_tokens") else {
            return fail("num_speculative_tokens is missing".to_owned());
        };
        let depth = depth.as_u64().filter(|depth| (1..=DEEPEST).contains(depth));
        let Some(depth) = depth.and_then(|depth| u32::try_from(depth).ok()) else {
            return fail(format!(
                "num_speculative_tokens must be 1 to {DEEPEST}, found {}",
                map["num_speculative_tokens"]
            ));
        };
        let word = |key: &str, allowed: &[&str]| match map.get(key).and_then(Value::as_str) {
            Some(found) if !allowed.contains(&found) => {
                conflict(format!("--speculative-config: {key} must be one of {}, found {found}", allowed.join(", ")))
            }
            found => Ok(found),
        };
        let sampling = word("draft_sample_method", &["greedy", "probabilistic"])?;
        let rejection = word("rejection_sample_method", &["standard", "synthetic", "block"])?;
        let synthetic_rates = if rejection == Some("synthetic") { Some(synthetic(map, depth)?) } else { None };
        Ok(Self {
            method,
            model,
            depth,
            adaptive: map.get("num_speculative_tokens_per_batch_size").is_some_and(|value| value == "auto"),
            depth_by_batch: by_batch(map)?,
            probabilistic: sampling == Some("probabilistic"),
            synthetic_rates,
        })
    }
}

/// Unconditional acceptance rates by position, falling, in [0, 1].
fn synthetic(map: &Map<String, Value>, depth: u32) -> Result<Vec<f64>, FlagError> {
    let fail = |message: String| conflict(format!("--speculative-config: {message}"));
    if let Some(rates) = map.get("synthetic_acceptance_rates") {
        let rates: Option<Vec<f64>> = rates.as_array().and_then(|list| list.iter().map(Value::as_f64).collect());
        let valid = |rates: &Vec<f64>| {
            rates.len() == depth as usize
                && rates.iter().all(|rate| (0.0..=1.0).contains(rate))
                && rates.windows(2).all(|pair| pair[0] >= pair[1])
        };
        return match rates.filter(valid) {
            Some(rates) => Ok(rates),
            None => fail(format!("synthetic_acceptance_rates must be {depth} falling numbers in [0, 1]")),
        };
    }
    let length = map.get("synthetic_acceptance_length").and_then(Value::as_f64);
    let Some(length) = length.filter(|length| (1.0..=f64::from(depth + 1)).contains(length)) else {
        return fail(format!(
            "synthetic needs synthetic_acceptance_rates, or synthetic_acceptance_length in [1, {}]",
            depth + 1
        ));
    };
    Ok((0..depth).map(|position| (length - 1.0 - f64::from(position)).clamp(0.0, 1.0)).collect())
}

fn by_batch(map: &Map<String, Value>) -> Result<Vec<(u32, u32, u32)>, FlagError> {
    let table = map.get("num_speculative_tokens_per_batch_size").filter(|value| *value != "auto");
    let Some(table) = table else { return Ok(Vec::new()) };
    let row = |row: &Value| {
        let numbers = row.as_array().filter(|row| row.len() == 3)?;
        let mut numbers = numbers.iter().map(|number| number.as_u64().and_then(|number| u32::try_from(number).ok()));
        let (first, last, depth) = (numbers.next()??, numbers.next()??, numbers.next()??);
        (first <= last).then_some((first, last, depth))
    };
    let rows: Option<Vec<_>> = table.as_array().and_then(|rows| rows.iter().map(row).collect());
    rows.map_or_else(
        || {
            conflict(
                "--speculative-config: num_speculative_tokens_per_batch_size must be a list of [first, last, depth]",
            )
        },
        Ok,
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: &Value) -> Result<Speculative, FlagError> {
        Speculative::read(value.as_object().unwrap())
    }

    #[test]
    fn the_published_forms() {
        let mtp = read(&json!({"method": "mtp", "num_speculative_tokens": 2})).unwrap();
        assert_eq!((mtp.method, mtp.depth), (Method::Mtp, 2));
        let dflash = read(&json!({"method": "dflash", "model": "/d", "num_speculative_tokens": 7})).unwrap();
        assert_eq!((dflash.method, dflash.model.as_deref()), (Method::DFlash, Some("/d")));
        let half = read(&json!({
            "method": "mtp", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 2.5, "num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 64, 1]],
        }))
        .unwrap();
        assert_eq!(half.synthetic_rates.unwrap(), [1.0, 0.5, 0.0]);
        assert_eq!(half.depth_by_batch, [(1, 8, 3), (9, 64, 1)]);
    }

    #[test]
    fn wrong_configs_say_what_is_wrong() {
        for (value, needle) in [
            (json!({"method": "mtp"}), "num_speculative_tokens is missing"),
            (json!({"method": "mtp", "num_speculative_tokens": 129}), "1 to 128, found 129"),
            (json!({"method": "mtp", "num_speculative_tokens": 0}), "1 to 128"),
            (json!({"method": "mtp", "num_speculative_tokens": 2, "nonsense": 1}), "unknown key \"nonsense\""),
            (json!({"method": "eagle", "num_speculative_tokens": 2}), "mtp, dflash or ngram, found eagle"),
            (json!({"method": "dflash", "num_speculative_tokens": 2}), "dflash needs model"),
            (
                json!({"method": "mtp", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic",
                       "synthetic_acceptance_rates": [0.5, 0.9]}),
                "falling",
            ),
        ] {
            let error = read(&value).unwrap_err();
            assert_eq!(error.exit_code(), 1);
            assert!(error.to_string().contains(needle), "{error}");
        }
    }
}
