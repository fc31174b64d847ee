//! G13: `config.json` is the source's plus one `quantization_config`, and every loader reads that block alike.
//!
//! The block is judged field by field (unknown keys are accepted: readers and writers of several versions are about), then
//! by [`super::matcher`]. A block left over from an FP8 source belongs to G14.

use serde_json::{Map, Value};

use super::{
    matcher::{self, Modules, Rules},
    verdict::{GateId::G13, Ledger, Offender},
};

/// Key of the block.
pub(super) const BLOCK: &str = "quantization_config";

const FIX: &str = "write the field as expected";
const MEND: &str = "run `glimmer fix-config`, which writes the narrow target and the ignore patterns";

/// Compares the artifact's `config.json` with the source's, both without any quantization block.
pub(super) fn compare(ledger: &mut Ledger, source: &Value, artifact: &Value) {
    let mut differences = Vec::new();
    diff(&mut differences, "", &without_block(source), &without_block(artifact));
    for (path, found) in differences {
        ledger.field(G13, &path, found, "copy config.json from the source and add nothing but `quantization_config`");
    }
}

fn without_block(config: &Value) -> Value {
    let mut config = config.clone();
    if let Some(map) = config.as_object_mut() {
        map.remove(BLOCK);
        if let Some(text) = map.get_mut("text_config").and_then(Value::as_object_mut) {
            text.remove(BLOCK);
        }
    }
    config
}

fn diff(out: &mut Vec<(String, String)>, path: &str, expected: &Value, found: &Value) {
    let join = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    match (expected, found) {
        (Value::Object(a), Value::Object(b)) => {
            for (key, value) in a {
                match b.get(key) {
                    Some(other) => diff(out, &join(key), value, other),
                    None => out.push((join(key), format!("expected {value} as in the source, found no such key"))),
                }
            }
            for (key, value) in b.iter().filter(|(key, _)| !a.contains_key(*key)) {
                out.push((join(key), format!("expected no such key as in the source, found {value}")));
            }
        }
        (a, b) if a == b => {}
        (a, b) => out.push((path.to_owned(), format!("expected {a} as in the source, found {b}"))),
    }
}

/// A demand on one field.
enum Demand {
    /// Exactly this value.
    Is(Value),
    /// Null or absent.
    Null,
    /// Null, absent or an empty object.
    Empty,
    /// Absent, null or one of these values.
    OneOf(&'static [&'static str]),
}

impl Demand {
    fn text(&self) -> String {
        match self {
            Self::Is(value) => value.to_string(),
            Self::Null => "null".to_owned(),
            Self::Empty => "null or {}".to_owned(),
            Self::OneOf(words) => format!("null or one of {words:?}"),
        }
    }

    fn holds(&self, found: Option<&Value>) -> bool {
        match (self, found) {
            (Self::Is(value), Some(found)) => value == found,
            (Self::Is(_), None) => false,
            (_, None | Some(Value::Null)) => true,
            (Self::Empty, Some(Value::Object(map))) => map.is_empty(),
            (Self::OneOf(words), Some(Value::String(word))) => words.contains(&word.as_str()),
            _ => false,
        }
    }
}

/// What the fields of a block violate, apart from what loaders make of `targets` and `ignore`.
pub(super) fn problems(value: &Value, group_size: usize) -> Vec<Offender> {
    let mut ledger = Ledger::new();
    block(&mut ledger, value, None, group_size);
    ledger.finish().into_iter().flat_map(|gate| gate.offenders).collect()
}

/// Judges the block: fields, then what loaders make of `targets` and `ignore`.
pub(super) fn block(ledger: &mut Ledger, block: &Value, modules: Option<&Modules>, group_size: usize) {
    let Some(map) = block.as_object() else {
        ledger.field(G13, BLOCK, format!("expected an object, found {block}"), FIX);
        return;
    };
    use Demand::{Empty, Is, Null, OneOf};
    let top = [
        ("quant_method", Is("compressed-tensors".into())),
        ("format", Is("pack-quantized".into())),
        ("quantization_status", Is("compressed".into())),
        ("kv_cache_scheme", Null),
        ("sparsity_config", Empty),
        ("transform_config", Empty),
    ];
    fields(ledger, BLOCK, map, &top);
    let ignore = strings(map.get("ignore").unwrap_or(&Value::Array(Vec::new())));
    if ignore.is_none() {
        let found = map.get("ignore").map(Value::to_string).unwrap_or_default();
        ledger.field(G13, "quantization_config.ignore", format!("expected a list of strings, found {found}"), MEND);
    }
    let Some(groups) = map.get("config_groups").and_then(Value::as_object).filter(|g| !g.is_empty()) else {
        ledger.field(G13, "quantization_config.config_groups", "expected one group, found none", FIX);
        return;
    };
    if groups.len() > 1 {
        let found = format!("expected one group, found {}", groups.len());
        ledger.field(G13, "quantization_config.config_groups", found, FIX);
    }
    let mut targets = Vec::new();
    for (name, group) in groups {
        let path = format!("quantization_config.config_groups.{name}");
        let Some(group) = group.as_object() else {
            ledger.field(G13, &path, format!("expected an object, found {group}"), FIX);
            return;
        };
        fields(
            ledger,
            &path,
            group,
            &[("format", OneOf(&["pack-quantized"])), ("input_activations", Null), ("output_activations", Null)],
        );
        weights(ledger, &path, group, group_size);
        match group.get("targets").and_then(strings).filter(|t| !t.is_empty()) {
            Some(entries) => targets.extend(entries),
            None => {
                ledger.field(G13, &format!("{path}.targets"), "expected a list of patterns, found none", MEND);
                return;
            }
        }
    }
    if let (Some(ignore), Some(modules)) = (ignore, modules) {
        loaders(ledger, &targets, &ignore, modules);
    }
}

fn weights(ledger: &mut Ledger, path: &str, group: &Map<String, Value>, group_size: usize) {
    let path = format!("{path}.weights");
    let Some(weights) = group.get("weights").and_then(Value::as_object) else {
        ledger.field(G13, &path, "expected the quantization arguments, found none", FIX);
        return;
    };
    use Demand::{Is, OneOf};
    let demands = [
        ("num_bits", Is(4.into())),
        ("type", Is("int".into())),
        ("symmetric", Is(true.into())),
        ("strategy", Is("group".into())),
        ("group_size", Is(group_size.into())),
        ("dynamic", Is(false.into())),
        // "group" would need a `weight_g_idx`, which no loader of this layout accepts.
        ("actorder", OneOf(&["static", "weight"])),
    ];
    fields(ledger, &path, weights, &demands);
}

fn fields(ledger: &mut Ledger, path: &str, map: &Map<String, Value>, demands: &[(&str, Demand)]) {
    for (key, demand) in demands {
        let found = map.get(*key);
        if !demand.holds(found) {
            let found = found.map_or("no such key".to_owned(), Value::to_string);
            ledger.field(G13, &format!("{path}.{key}"), format!("expected {}, found {found}", demand.text()), FIX);
        }
    }
}

fn strings(value: &Value) -> Option<Vec<String>> {
    value.as_array()?.iter().map(|v| v.as_str().map(str::to_owned)).collect()
}

fn loaders(ledger: &mut Ledger, targets: &[String], ignore: &[String], modules: &Modules) {
    let rules = Rules::new(targets.iter().map(String::as_str), ignore.iter().map(String::as_str));
    let rules = match rules {
        Ok(rules) => rules,
        Err(e) => {
            ledger.field(G13, "quantization_config", e.to_string(), MEND);
            return;
        }
    };
    for wrong in matcher::wrong_layers(&rules, modules) {
        let found = format!("{} in {}", wrong.problem, wrong.reader);
        ledger.field(G13, &wrong.module, found, MEND);
    }
}
