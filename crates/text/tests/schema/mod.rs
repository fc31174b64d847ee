//! A small validator of JSON schemas, written from the specification's words for the keywords that the tests use.

use serde_json::Value;

/// What a value violates, if anything.
pub(crate) fn violation(value: &Value, schema: &Value, root: &Value) -> Option<String> {
    let fail = |what: &str| Some(format!("{value} violates {what} of {schema}"));
    match schema {
        Value::Bool(true) => return None,
        Value::Bool(false) => return fail("false"),
        _ => {}
    }
    if let Some(pointer) = schema["$ref"].as_str() {
        let target = root.pointer(pointer.strip_prefix('#').expect("a local reference")).expect("a target");
        if let Some(problem) = violation(value, target, root) {
            return Some(problem);
        }
    }
    let is = |name: &str| match name {
        "integer" => value.as_f64().is_some_and(|x| x.fract() == 0.0),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "object" => value.is_object(),
        "array" => value.is_array(),
        _ => false,
    };
    let types: Vec<&str> = match &schema["type"] {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    if !types.is_empty() && !types.iter().any(|name| is(name)) {
        return fail("type");
    }
    if schema.get("const").is_some_and(|wanted| wanted != value) {
        return fail("const");
    }
    if schema["enum"].as_array().is_some_and(|all| !all.contains(value)) {
        return fail("enum");
    }
    let count = |key: &str| {
        let parts = schema[key].as_array()?;
        Some((parts.iter().filter(|part| violation(value, part, root).is_none()).count(), parts.len()))
    };
    if count("anyOf").is_some_and(|(n, _)| n == 0) {
        return fail("anyOf");
    }
    if count("oneOf").is_some_and(|(n, _)| n != 1) {
        return fail("oneOf");
    }
    if count("allOf").is_some_and(|(n, all)| n != all) {
        return fail("allOf");
    }
    if let Some(x) = value.as_f64() {
        let bound = |key: &str| schema[key].as_f64();
        if bound("minimum").is_some_and(|b| x < b) || bound("maximum").is_some_and(|b| x > b) {
            return fail("its bounds");
        }
        if bound("exclusiveMinimum").is_some_and(|b| x <= b) || bound("exclusiveMaximum").is_some_and(|b| x >= b) {
            return fail("its exclusive bounds");
        }
        if bound("multipleOf").is_some_and(|m| (x / m).fract() != 0.0) {
            return fail("multipleOf");
        }
    }
    let size = |low: &str, high: &str, n: usize| {
        let bound = |key: &str| schema[key].as_u64();
        bound(low).is_some_and(|b| (n as u64) < b) || bound(high).is_some_and(|b| n as u64 > b)
    };
    if let Some(text) = value.as_str() {
        if size("minLength", "maxLength", text.chars().count()) {
            return fail("its length");
        }
        if schema["pattern"].as_str().is_some_and(|p| !regex::Regex::new(p).expect("a pattern").is_match(text)) {
            return fail("pattern");
        }
    }
    if let Some(items) = value.as_array() {
        if size("minItems", "maxItems", items.len()) {
            return fail("its number of items");
        }
        let first = schema["prefixItems"].as_array().map(Vec::as_slice).unwrap_or_default();
        for (index, item) in items.iter().enumerate() {
            let wanted = first.get(index).or(schema.get("items"));
            if let Some(problem) = wanted.and_then(|wanted| violation(item, wanted, root)) {
                return Some(problem);
            }
        }
    }
    if let Some(map) = value.as_object() {
        let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
        if let Some(name) = required.into_iter().find(|name| !map.contains_key(*name)) {
            return fail(&format!("required ({name})"));
        }
        for (name, item) in map {
            let wanted = schema["properties"].get(name).or(schema.get("additionalProperties"));
            if let Some(problem) = wanted.and_then(|wanted| violation(item, wanted, root)) {
                return Some(problem);
            }
        }
    }
    None
}
