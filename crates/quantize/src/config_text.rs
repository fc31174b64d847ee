//! config.json of the artifact: the source's text, byte for byte, with one member inserted (and a stale one removed).

use std::ops::Range;

use glimmer_checkpoint::{Config, MlpKind};
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::gptq::Order;
use crate::recipe::{IgnoreStyle, Method, Recipe};

/// Name of the member.
const KEY: &str = "quantization_config";

/// The source's config.json with the artifact's `quantization_config` as the last member; one that an FP8 source has is
/// removed.
///
/// # Errors
/// [`Error::ConfigText`] when the text is no JSON object.
pub fn artifact_config(source: &str, config: &Config, recipe: &Recipe, modules: &[String]) -> Result<String> {
    let mut text = source.to_owned();
    if let Some(range) = find_member(&text, KEY)? {
        text.replace_range(range, "");
    }
    let members = members(&text)?;
    let (at, comma) = match members.last() {
        Some(last) => (last.value.end, ","),
        None => (text.find('{').map_or(0, |i| i + 1), ""),
    };
    let block = serde_json::to_string_pretty(&quantization_config(config, recipe, modules)).map_err(|e| {
        Error::ConfigText { expected: "a quantization block that can be written", found: e.to_string() }
    })?;
    let block = block.replace('\n', "\n  ");
    let newline = if members.is_empty() { "\n" } else { "" };
    text.insert_str(at, &format!("{comma}\n  \"{KEY}\": {block}{newline}"));
    Ok(text)
}

/// The `quantization_config` block. `modules` are the names of modules with a weight that stay as they are (for
/// [`IgnoreStyle::Dual`]).
pub fn quantization_config(config: &Config, recipe: &Recipe, modules: &[String]) -> Value {
    let actorder = match (recipe.method, recipe.order) {
        (Method::Gptq, Order::Static) => json!("static"),
        _ => Value::Null,
    };
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
                    "group_size": glimmer_checkpoint::int4::GROUP,
                    "num_bits": glimmer_checkpoint::int4::BITS,
                    "strategy": "group",
                    "symmetric": true,
                    "type": "int"
                }
            }
        },
        "format": "pack-quantized",
        "global_compression_ratio": null,
        "ignore": ignore(config, recipe.ignore_style, modules),
        "kv_cache_scheme": null,
        "moe_sparsity_config": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.1"
    })
}

/// Matches exactly the routed experts of the decoder's sparse layers, under any prefix.
pub fn target(config: &Config) -> String {
    let layers: Vec<usize> =
        (0..config.text.num_hidden_layers).filter(|&l| config.text.mlp[l] == MlpKind::Sparse).collect();
    format!(r"re:.*\.layers\.(?:{})\.mlp\.experts\.\d+\.(?:gate|up|down)_proj$", alternation(&layers))
}

/// What readers that look at the ignore list alone must leave alone.
pub fn ignore(config: &Config, style: IgnoreStyle, modules: &[String]) -> Vec<String> {
    let mut list: Vec<String> = [
        r"re:.*lm_head$",
        r"re:.*\.self_attn\..*",
        r"re:.*\.shared_experts\..*",
        r"re:.*\.mlp\.(?:gate|up|gate_up|down)_proj$",
        r"re:.*\.mlp\.gate$",
        r"re:.*visual\..*",
    ]
    .map(str::to_owned)
    .to_vec();
    if let Some(layer) = config.text.mtp_layer() {
        list.push(format!(r"re:.*\.layers\.{layer}\..*"));
    }
    if style == IgnoreStyle::Dual {
        list.extend(spellings(modules));
    }
    list
}

/// Every module in the spellings of transformers and vLLM, fused names included; each once, in order.
fn spellings(modules: &[String]) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    let mut push = |name: String| {
        if seen.insert(name.clone()) {
            out.push(name);
        }
    };
    for module in modules {
        let served = if let Some(rest) = module.strip_prefix("model.language_model.") {
            format!("language_model.model.{rest}")
        } else if let Some(rest) = module.strip_prefix("model.visual.") {
            format!("visual.{rest}")
        } else if module == "lm_head" {
            "language_model.lm_head".to_owned()
        } else {
            module.clone()
        };
        for name in [module.clone(), served] {
            push(name.clone());
            for part in ["gate_proj", "up_proj"] {
                if let Some(stem) = name.strip_suffix(part) {
                    push(format!("{stem}gate_up_proj"));
                }
            }
        }
    }
    out
}

/// A regular expression for exactly these (ascending) numbers: alternatives by number of digits and common prefix.
fn alternation(numbers: &[usize]) -> String {
    let mut parts = Vec::new();
    for run in numbers.chunk_by(|a, b| a + 1 == *b) {
        range_parts(run[0], run[run.len() - 1], &mut parts);
    }
    if parts.is_empty() {
        // Matches nothing: there is no layer to quantize.
        return "[^0-9]".to_owned();
    }
    parts.join("|")
}

/// Alternatives for `low ..= high`.
fn range_parts(low: usize, high: usize, parts: &mut Vec<String>) {
    // Cut at powers of ten, then at tens, so that each piece is one prefix with a range of last digits, or a range of
    // prefixes with any last digit.
    let mut low = low;
    while low <= high {
        let digits_end = 10usize.pow(low.checked_ilog10().unwrap_or(0) + 1) - 1;
        let end = high.min(digits_end);
        if low < 10 {
            parts.push(class(low, end));
        } else {
            let (mut first, last) = (low / 10, end / 10);
            if !low.is_multiple_of(10) || first == last {
                let stop = end.min(first * 10 + 9);
                parts.push(format!("{first}{}", class(low % 10, stop % 10)));
                first += 1;
            }
            let whole = if end % 10 == 9 { last + 1 } else { last };
            if first < whole {
                let mut prefixes = Vec::new();
                range_parts(first, whole - 1, &mut prefixes);
                parts.extend(prefixes.into_iter().map(|p| format!(r"{p}\d")));
            }
            if first <= last && whole == last {
                parts.push(format!("{last}{}", class(0, end % 10)));
            }
        }
        low = end + 1;
    }
}

/// One digit of a range.
fn class(low: usize, high: usize) -> String {
    if low == high { low.to_string() } else { format!("[{low}-{high}]") }
}

/// A member of the top-level object.
struct Member {
    key: Range<usize>,
    value: Range<usize>,
}

/// Range to delete so that the member `key` is gone, its comma included.
fn find_member(text: &str, key: &str) -> Result<Option<Range<usize>>> {
    let members = members(text)?;
    let name = |m: &Member| serde_json::from_str::<String>(&text[m.key.clone()]).unwrap_or_default();
    let Some(i) = members.iter().position(|m| name(m) == key) else { return Ok(None) };
    Ok(Some(match (i.checked_sub(1), members.get(i + 1)) {
        (Some(before), _) => members[before].value.end..members[i].value.end,
        (None, Some(after)) => members[i].key.start..after.key.start,
        (None, None) => members[i].key.start..members[i].value.end,
    }))
}

/// The members of the top-level object, in order.
fn members(text: &str) -> Result<Vec<Member>> {
    let refuse = |found: &str| Error::ConfigText { expected: "a JSON object", found: found.to_owned() };
    serde_json::from_str::<serde_json::Map<String, Value>>(text).map_err(|e| refuse(&e.to_string()))?;
    // The text is valid JSON: strings and depth are all that has to be followed.
    let bytes = text.as_bytes();
    let mut members: Vec<Member> = Vec::new();
    let (mut depth, mut i) = (0usize, 0usize);
    let mut key: Option<Range<usize>> = None;
    let mut value_start: Option<usize> = None;
    while i < bytes.len() {
        let c = bytes[i];
        let start = i;
        if c == b'"' {
            i += 1;
            while i < bytes.len() && bytes[i] != b'"' {
                i += if bytes[i] == b'\\' { 2 } else { 1 };
            }
        }
        i += 1;
        if c.is_ascii_whitespace() {
            continue;
        }
        match c {
            b'{' | b'[' => {
                if depth == 1 {
                    value_start.get_or_insert(start);
                }
                depth += 1;
            }
            b'}' | b']' => {
                depth -= 1;
                if depth == 1
                    && let (Some(k), Some(s)) = (key.clone(), value_start)
                {
                    members.push(Member { key: k, value: s..i });
                    (key, value_start) = (None, None);
                }
            }
            b',' | b':' => {}
            b'"' if depth == 1 && key.is_none() => key = Some(start..i),
            _ if depth == 1 => {
                // A scalar: it ends before the next comma, brace or white space.
                if c != b'"' {
                    while i < bytes.len() && !matches!(bytes[i], b',' | b'}') && !bytes[i].is_ascii_whitespace() {
                        i += 1;
                    }
                }
                if let Some(k) = key.take() {
                    members.push(Member { key: k, value: start..i });
                }
            }
            _ => {}
        }
    }
    Ok(members)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data");

    fn released() -> (String, Config) {
        let text = std::fs::read_to_string(format!("{DATA}/glm-5.3-flash/config.json")).unwrap();
        let config = Config::parse(&text).unwrap();
        (text, config)
    }

    #[test]
    fn the_released_models_block_is_the_recommended_one() {
        let (_, config) = released();
        let text = std::fs::read_to_string(format!("{DATA}/vectors/quantization_config.json")).unwrap();
        let expected: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(quantization_config(&config, &Recipe::default(), &[]), expected);
    }

    #[test]
    fn alternations_match_their_numbers_and_no_others() {
        let cases: [&[usize]; 8] = [
            &[0],
            &[1, 2, 3, 4, 5, 6, 7],
            &[3, 5, 9, 10, 11],
            &[8, 9, 10],
            &[10],
            &[19, 20, 21],
            &[0, 99, 100, 101, 250],
            &[],
        ];
        let long: Vec<usize> = (3..=44).collect();
        let wide: Vec<usize> = (7..=123).collect();
        for numbers in cases.into_iter().chain([&long[..], &wide[..]]) {
            let pattern = regex::Regex::new(&format!("^(?:{})$", alternation(numbers))).unwrap();
            for n in 0..400usize {
                assert_eq!(pattern.is_match(&n.to_string()), numbers.contains(&n), "{n} in {}", alternation(numbers));
            }
        }
        assert_eq!(alternation(&long), r"[3-9]|[1-3]\d|4[0-4]");
    }

    #[test]
    fn everything_but_the_inserted_member_stays_byte_for_byte() {
        let (text, config) = released();
        let out = artifact_config(&text, &config, &Recipe::default(), &[]).unwrap();
        let range = find_member(&out, KEY).unwrap().unwrap();
        let mut back = out.clone();
        back.replace_range(range, "");
        assert_eq!(back, text);
        let parsed: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(parsed[KEY], quantization_config(&config, &Recipe::default(), &[]));
        assert_eq!(Config::parse(&out).unwrap().text, config.text);
    }

    #[test]
    fn a_stale_block_is_replaced_wherever_it_stands() {
        let (_, config) = released();
        for text in [
            r#"{"quantization_config": {"quant_method": "fp8", "a": [1, "}"]}, "b": 1}"#,
            r#"{"b": 1, "quantization_config": {"quant_method": "fp8"}}"#,
            r#"{"x": "\"quantization_config\": 3", "quantization_config" : "s", "b": 1}"#,
            r#"{"quantization_config": 7}"#,
            "{}",
            "{\n}\n",
            r#"{"b": {"quantization_config": 5}, "c": -1.5e3 }"#,
        ] {
            let out = artifact_config(text, &config, &Recipe::default(), &[]).unwrap();
            let (mut old, new): (Value, Value) =
                (serde_json::from_str(text).unwrap(), serde_json::from_str(&out).unwrap());
            old[KEY] = quantization_config(&config, &Recipe::default(), &[]);
            assert_eq!(new, old, "{text}");
            assert_eq!(out.matches("compressed-tensors").count(), 1);
        }
        assert!(artifact_config("[1]", &config, &Recipe::default(), &[]).is_err());
        assert!(artifact_config("{", &config, &Recipe::default(), &[]).is_err());
    }

    #[test]
    fn dual_spelling_adds_every_name_once() {
        let (_, config) = released();
        let modules = [
            "model.language_model.layers.0.mlp.gate_proj",
            "model.language_model.layers.0.mlp.up_proj",
            "model.visual.blocks.0.attn.qkv",
            "lm_head",
        ]
        .map(str::to_owned);
        let list = ignore(&config, IgnoreStyle::Dual, &modules);
        for name in [
            "model.language_model.layers.0.mlp.gate_proj",
            "model.language_model.layers.0.mlp.gate_up_proj",
            "language_model.model.layers.0.mlp.gate_up_proj",
            "language_model.model.layers.0.mlp.up_proj",
            "visual.blocks.0.attn.qkv",
            "language_model.lm_head",
            r"re:.*\.layers\.45\..*",
        ] {
            assert_eq!(list.iter().filter(|entry| *entry == name).count(), 1, "{name}");
        }
    }
}
