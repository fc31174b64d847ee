//! The `quantization_config` of a W4A16 artifact: which modules a loader must take for packed.
//!
//! Loaders match `targets` and `ignore` against module names of their own spelling, each in its own way. The block is
//! therefore narrow twice over: one target that matches the routed experts of the quantized layers and nothing else, and
//! prefix-agnostic `ignore` patterns for loaders that look only there.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    config::{Config, MlpKind},
    error::Error,
    int4,
    inventory::{Group, Inventory, TensorSpec},
};

/// Key of the block in `config.json`.
pub const QUANTIZATION_KEY: &str = "quantization_config";

/// Version of the compressed-tensors library whose layout the block states.
const LAYOUT_VERSION: &str = "0.20.1";

/// How much `ignore` spells out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IgnoreStyle {
    /// Patterns only.
    #[default]
    Regex,
    /// The patterns, and every module by name in the spellings of transformers and vLLM (fused names included), for loaders
    /// that compare names literally.
    Dual,
}

/// What the block says beyond the layout itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Scheme {
    /// Whether columns were quantized in the order of their importance (`actorder: static`); it leaves no trace in the tensors.
    pub static_order: bool,
    /// How much `ignore` spells out.
    pub ignore: IgnoreStyle,
}

/// The block for a configuration.
pub fn quantization_config(config: &Config, scheme: Scheme) -> Value {
    let actorder = if scheme.static_order { json!("static") } else { Value::Null };
    json!({
        "config_groups": {
            "group_0": {
                "format": "pack-quantized",
                "input_activations": null,
                "output_activations": null,
                "targets": [target(config)],
                "weights": {
                    "actorder": actorder,
                    "dynamic": false,
                    "group_size": int4::GROUP,
                    "num_bits": int4::BITS,
                    "strategy": "group",
                    "symmetric": true,
                    "type": "int",
                },
            },
        },
        "format": "pack-quantized",
        "global_compression_ratio": null,
        "ignore": ignore(config, scheme.ignore),
        "kv_cache_scheme": null,
        "moe_sparsity_config": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": LAYOUT_VERSION,
    })
}

/// The first field of a packed block that tells a loader to read the codes otherwise than they are stored: its path, what
/// was expected and what was found. Fields that a loader fills in by itself may be absent.
pub(crate) fn unreadable_field(block: &Value) -> Option<(String, String, String)> {
    let Some(groups) = block["config_groups"].as_object().filter(|groups| !groups.is_empty()) else {
        return Some((".config_groups".to_owned(), "a group".to_owned(), block["config_groups"].to_string()));
    };
    let wanted = [
        ("num_bits", json!(int4::BITS), false),
        ("group_size", json!(int4::GROUP), false),
        ("strategy", json!("group"), true),
        ("symmetric", json!(true), true),
        ("type", json!("int"), true),
    ];
    groups.iter().find_map(|(name, group)| {
        wanted.iter().find_map(|(field, expected, optional)| {
            let found = &group["weights"][*field];
            let right = found == expected || (*optional && found.is_null());
            let path = || format!(".config_groups.{name}.weights.{field}");
            (!right).then(|| (path(), expected.to_string(), found.to_string()))
        })
    })
}

/// The text of `config.json` with `block` as its `quantization_config`. All other text stays as it is; only where the source
/// has such a block already (an FP8 source) is the file laid out anew, without it.
///
/// # Errors
/// [`Error::Invalid`] when the text is not a JSON object.
pub fn with_quantization_config(text: &str, block: &Value) -> Result<String, Error> {
    let malformed = |found: String| Error::invalid("config.json", "a JSON object", found, "restore it from its source");
    let mut value: Value = serde_json::from_str(text).map_err(|e| malformed(e.to_string()))?;
    let Value::Object(map) = &mut value else { return Err(malformed("another JSON value".to_owned())) };
    let mut stale = map.shift_remove(QUANTIZATION_KEY).is_some();
    if let Some(Value::Object(nested)) = map.get_mut("text_config") {
        stale |= nested.shift_remove(QUANTIZATION_KEY).is_some();
    }
    let empty = map.is_empty();
    let anew;
    let text = if stale {
        anew = format!("{value:#}");
        anew.as_str()
    } else {
        text
    };
    let end = text.rfind('}').expect("an object ends in a brace");
    let (head, tail) = (text[..end].trim_end(), &text[end..]);
    let block = format!("{block:#}").replace('\n', "\n  ");
    let comma = if empty { "" } else { "," };
    Ok(format!("{head}{comma}\n  \"{QUANTIZATION_KEY}\": {block}\n{tail}"))
}

/// A pattern for exactly the quantized modules.
fn target(config: &Config) -> String {
    let text = &config.text;
    let sparse: Vec<usize> = (0..text.num_hidden_layers).filter(|&l| text.mlp[l] == MlpKind::Sparse).collect();
    let runs = sparse.chunk_by(|a, b| a + 1 == *b);
    let layers: Vec<String> = runs.flat_map(|run| numbers(run[0], run[run.len() - 1])).collect();
    format!(r"re:.*\.layers\.(?:{})\.mlp\.experts\.\d+\.(?:gate|up|down)_proj$", layers.join("|"))
}

/// Patterns for the decimal numbers `low ..= high`, one for each stretch in which the digits vary independently.
fn numbers(low: usize, high: usize) -> Vec<String> {
    let mut patterns = Vec::new();
    let mut start = low;
    while start <= high {
        // The longest stretch from `start`: as many trailing digits as possible run from 0 (or, for the last one, from the
        // digit of `start`) to 9 (or the digit that `high` allows).
        let mut unit = 1;
        while start.is_multiple_of(unit * 10) && start + unit * 10 - 1 <= high && start > 0 {
            unit *= 10;
        }
        let digit = start / unit % 10;
        let steps = (9 - digit).min((high + 1 - start) / unit - 1);
        let prefix = if start / unit >= 10 { (start / unit / 10).to_string() } else { String::new() };
        let varying = match steps {
            0 => digit.to_string(),
            9 => r"\d".to_owned(),
            _ => format!("[{digit}-{}]", digit + steps),
        };
        patterns.push(format!("{prefix}{varying}{}", r"\d".repeat(unit.ilog10() as usize)));
        start += (steps + 1) * unit;
    }
    patterns
}

fn ignore(config: &Config, style: IgnoreStyle) -> Vec<String> {
    let mut patterns: Vec<String> = [
        r"re:.*lm_head$",
        r"re:.*\.self_attn\..*",
        r"re:.*\.shared_experts\..*",
        r"re:.*\.mlp\.(?:gate|up|gate_up|down)_proj$",
        r"re:.*\.mlp\.gate$",
        r"re:.*visual\..*",
    ]
    .map(str::to_owned)
    .to_vec();
    patterns.extend(config.text.mtp_layer().map(|layer| format!(r"re:.*\.layers\.{layer}\..*")));
    if style == IgnoreStyle::Dual {
        let inventory = Inventory::bf16(config);
        let mut names: Vec<String> = inventory.tensors().iter().flat_map(modules).collect();
        names.sort();
        names.dedup();
        patterns.append(&mut names);
    }
    patterns
}

/// The names under which loaders know the module of an unquantized matrix.
fn modules(spec: &TensorSpec) -> Vec<String> {
    let routed = matches!(spec.group, Group::MoeRouted | Group::Mtp | Group::MtpRouted);
    let Some(module) =
        spec.name.strip_suffix(".weight").filter(|m| !routed && spec.shape.len() == 2 && !m.ends_with("embed_tokens"))
    else {
        return Vec::new();
    };
    let mut names = vec![module.to_owned()];
    for gate in ["f_a_proj", "f_b_proj"] {
        if let Some(parent) = module.strip_suffix(gate) {
            names.push(format!("{parent}forget_gate.{gate}"));
        }
    }
    for half in ["gate_proj", "up_proj"] {
        names.extend(module.strip_suffix(half).map(|parent| format!("{parent}gate_up_proj")));
    }
    for i in 0..names.len() {
        let other = [
            ("model.language_model.", "language_model.model."),
            ("model.visual.", "visual."),
            ("lm_head", "language_model.lm_head"),
        ];
        let renamed = other.iter().find_map(|(from, to)| names[i].strip_prefix(from).map(|rest| format!("{to}{rest}")));
        names.extend(renamed);
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_for_numbers() {
        for (low, high, expected) in [
            (3, 44, r"[3-9]|[1-3]\d|4[0-4]"),
            (1, 7, "[1-7]"),
            (0, 9, r"\d"),
            (0, 10, r"\d|10"),
            (5, 5, "5"),
            (17, 17, "17"),
            (8, 123, r"[8-9]|[1-9]\d|1[0-1]\d|12[0-3]"),
            (95, 1000, r"9[5-9]|[1-9]\d\d|1000"),
        ] {
            assert_eq!(numbers(low, high).join("|"), expected, "{low}..={high}");
        }
    }

    /// Whether one of the patterns (digits, `[a-b]`, `\d`) matches a number, independently of how they were made.
    fn matches(patterns: &[String], number: usize) -> bool {
        let digits: Vec<char> = number.to_string().chars().collect();
        patterns.iter().any(|pattern| {
            let mut rest = pattern.as_str();
            for &digit in &digits {
                let (fits, length) = if rest.starts_with(r"\d") {
                    (true, 2)
                } else if rest.starts_with('[') {
                    (rest[1..2] <= *digit.to_string() && *digit.to_string() <= rest[3..4], 5)
                } else {
                    (rest.starts_with(digit), 1)
                };
                if !fits || rest.is_empty() {
                    return false;
                }
                rest = &rest[length..];
            }
            rest.is_empty()
        })
    }

    #[test]
    fn patterns_match_exactly_their_numbers() {
        for low in 0..130 {
            for high in low..130 {
                let patterns = numbers(low, high);
                for number in 0..250 {
                    assert_eq!(matches(&patterns, number), (low..=high).contains(&number), "{number} in {patterns:?}");
                }
            }
        }
    }
}
