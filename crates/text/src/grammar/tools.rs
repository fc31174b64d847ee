//! Tool calls in the model's own markup.
//!
//! ```text
//! answer := call+                      one call if only one is wanted
//! call   := <tool_call> name arg* </tool_call>
//! arg    := <arg_key> key </arg_key> <arg_value> value </arg_value>
//! ```
//!
//! Tags are tokens, by id. Arguments come in any order, each at most once, and those that are required are there. A value
//! is written without quotes, so its text must be one that the answer's parser reads back with the declared type: a string
//! is any text, everything else is the JSON of its schema. Tools are declared for people as much as for machines, so what a
//! grammar cannot express is left out, unless the tool says `strict`.

use std::fmt::Write as _;

use glimmer_engine::constraint::ConstraintError;
use serde_json::{Map, Value, json};

use super::json::{Lenience, escaped, prepared, with_definitions};
use super::lark;
use super::vocabulary::Vocabulary;

/// Parameters whose order is free: each needs one of 64 bits.
const FREE_ORDER: usize = 60;
/// Longer bounds on the length of a string are left out: each character would be a state of the lexer.
const LONGEST_BOUND: u64 = 2000;
/// How deep references and unions are followed.
const MAX_DEPTH: usize = 16;

/// Ids of the six tags.
struct Tags {
    call: [String; 2],
    key: [String; 2],
    value: [String; 2],
}

/// The functions that may be called.
pub(super) struct Tools {
    functions: Vec<Function>,
    tags: Tags,
}

struct Function {
    /// Where the definition stands, for messages.
    place: String,
    name: String,
    parameters: Value,
    lenience: Lenience,
}

/// Compiles a schema alone.
pub(super) type Check<'a> = dyn Fn(Value) -> Result<(), ConstraintError> + 'a;

impl Tools {
    pub(super) fn new(tools: &[String], only: Option<&str>, vocabulary: &Vocabulary) -> Result<Self, ConstraintError> {
        let tag = |literal: &str| {
            let missing = || ConstraintError(format!("the tokenizer has no token {literal}, which tool calls need"));
            vocabulary.added(literal).map(lark::token).ok_or_else(missing)
        };
        let tags = Tags {
            call: [tag("<tool_call>")?, tag("</tool_call>")?],
            key: [tag("<arg_key>")?, tag("</arg_key>")?],
            value: [tag("<arg_value>")?, tag("</arg_value>")?],
        };
        let mut functions = Vec::new();
        for (index, text) in tools.iter().enumerate() {
            let function = Function::read(&format!("tools[{index}]"), text)?;
            if only.is_none_or(|only| only == function.name) {
                functions.push(function);
            }
        }
        match (functions.is_empty(), only) {
            (false, _) => Ok(Self { functions, tags }),
            (true, Some(only)) => Err(ConstraintError(format!("no tool is named {only:?}"))),
            (true, None) => Err(ConstraintError("no tool is declared; expected at least one".to_owned())),
        }
    }

    /// The grammar of one call, or of one or more.
    pub(super) fn to_lark(&self, single: bool, check: &Check<'_>) -> Result<String, ConstraintError> {
        let calls: Vec<String> = (0..self.functions.len()).map(|index| format!("call_{index}")).collect();
        let mut out = format!("start: call{}\ncall: {}\n", if single { "" } else { "+" }, calls.join(" | "));
        for (index, function) in self.functions.iter().enumerate() {
            function.write(index, &self.tags, check, &mut out)?;
        }
        Ok(out)
    }
}

impl Function {
    fn read(place: &str, text: &str) -> Result<Self, ConstraintError> {
        let tool: Value =
            serde_json::from_str(text).map_err(|error| ConstraintError(format!("{place}: not JSON: {error}")))?;
        let function = tool.get("function").unwrap_or(&tool);
        let Some(name) = function["name"].as_str().filter(|name| !name.trim().is_empty()) else {
            return Err(ConstraintError(format!("{place}.function.name: expected a name")));
        };
        let strict = function["strict"] == Value::Bool(true);
        let parameters = function.get("parameters").cloned().unwrap_or(Value::Null);
        if !(parameters.is_object() || parameters.is_null()) {
            return Err(ConstraintError(format!("{place}.function.parameters: expected a JSON schema of type object")));
        }
        Ok(Self {
            place: format!("{place}.function.parameters"),
            name: name.trim().to_owned(),
            parameters,
            lenience: if strict { Lenience::Strict } else { Lenience::Lenient },
        })
    }

    /// Writes the rule `call_<index>`. The parameter of `args_<index>` has a bit for each argument that was written;
    /// required ones have the lowest bits.
    fn write(&self, index: usize, tags: &Tags, check: &Check<'_>, out: &mut String) -> Result<(), ConstraintError> {
        let none = Map::new();
        let root = resolved(&self.parameters, &self.parameters, MAX_DEPTH);
        let properties = root["properties"].as_object().unwrap_or(&none);
        let required: Vec<&str> = root["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        if self.lenience == Lenience::Strict
            && let Some(name) = required.iter().find(|name| !properties.contains_key(**name))
        {
            return Err(ConstraintError(format!("{}.required: {name:?} is not among the properties", self.place)));
        }
        let mut names: Vec<&str> =
            properties.iter().filter(|(_, s)| **s != json!(false)).map(|(n, _)| n.as_str()).collect();
        let [open, close] = &tags.call;
        let name = lark::literal(&self.name);
        let mut arguments = Vec::new();
        let free = names.len() <= FREE_ORDER;
        if free {
            names.sort_by_key(|name| !required.contains(name));
        }
        for (bit, name) in names.iter().enumerate() {
            let place = format!("{}/properties/{}", self.place, escaped(name));
            let value = self.value(&properties[*name], &place, check)?;
            let rule = format!("arg_{index}_{bit}");
            self.write_argument(&rule, &lark::literal(name), &value, tags, out);
            arguments.push(rule);
        }
        let extra = self.extra(index, root, &names, tags, out);
        if !free || arguments.is_empty() {
            // The declared order; a rule without arguments has no use for a parameter.
            let each = names
                .iter()
                .zip(&arguments)
                .map(|(name, rule)| if required.contains(name) { rule.clone() } else { format!("{rule}?") });
            let each: Vec<String> = each.chain(extra.map(|rule| format!("{rule}*"))).collect();
            let _ = writeln!(out, "call_{index}: {open} {name} {} {close}", each.join(" "));
            return Ok(());
        }
        let needed = names.iter().filter(|name| required.contains(*name)).count();
        let end = if needed == 0 { String::new() } else { format!(" %if is_ones([0:{needed}])") };
        let _ = writeln!(out, "call_{index}: {open} {name} args_{index}::0x0 {close}\nargs_{index}::_: \"\"{end}");
        for (bit, rule) in arguments.iter().enumerate() {
            let _ = writeln!(out, "  | {rule} args_{index}::set_bit({bit}) %if bit_clear({bit})");
        }
        if let Some(rule) = extra {
            let _ = writeln!(out, "  | {rule} args_{index}::_");
        }
        Ok(())
    }

    fn write_argument(&self, rule: &str, key: &str, value: &str, tags: &Tags, out: &mut String) {
        let ([key_open, key_close], [value_open, value_close]) = (&tags.key, &tags.value);
        let _ = writeln!(out, "{rule}: {key_open} {key} {key_close} {value_open} ({value}) {value_close}");
    }

    /// Arguments that no property declares, where the schema invites them.
    fn extra(&self, index: usize, root: &Value, names: &[&str], tags: &Tags, out: &mut String) -> Option<String> {
        let invited = match &root["additionalProperties"] {
            Value::Bool(invited) => *invited,
            Value::Object(_) => true,
            _ => root.is_object() && root.get("properties").is_none(),
        };
        if !invited {
            return None;
        }
        let rule = format!("extra_{index}");
        let mut key = "/[A-Za-z0-9_.:-]{1,128}/".to_owned();
        if !names.is_empty() {
            let known: Vec<String> = names.iter().map(|name| lark::literal(name)).collect();
            let _ = write!(key, " & ~({})", known.join(" | "));
        }
        let _ = writeln!(out, "KEY_{index}: {key}");
        self.write_argument(&rule, &format!("KEY_{index}"), lark::ANY_TEXT, tags, out);
        Some(rule)
    }

    /// What may stand between the tags of a value.
    fn value(&self, schema: &Value, place: &str, check: &Check<'_>) -> Result<String, ConstraintError> {
        let mut branches = Vec::new();
        self.branches(schema, place, check, MAX_DEPTH, &mut branches)?;
        // Any text swallows the other branches.
        if branches.iter().any(|branch| branch == lark::ANY_TEXT) {
            return Ok(lark::ANY_TEXT.to_owned());
        }
        branches.dedup();
        Ok(branches.join(" | "))
    }

    fn branches(
        &self,
        schema: &Value,
        place: &str,
        check: &Check<'_>,
        depth: usize,
        out: &mut Vec<String>,
    ) -> Result<(), ConstraintError> {
        let schema = resolved(schema, &self.parameters, MAX_DEPTH);
        if depth == 0 {
            out.push(lark::ANY_TEXT.to_owned());
            return Ok(());
        }
        let constants = schema.get("const").into_iter().chain(schema["enum"].as_array().into_iter().flatten());
        let constants: Vec<String> = constants.map(constant).collect();
        if !constants.is_empty() {
            out.extend(constants);
            return Ok(());
        }
        for key in ["anyOf", "oneOf", "allOf"] {
            let parts = schema[key].as_array().map(Vec::as_slice).unwrap_or_default();
            if (key == "allOf" && parts.len() == 1) || (key != "allOf" && !parts.is_empty()) {
                for (index, part) in parts.iter().enumerate() {
                    self.branches(part, &format!("{place}/{key}/{index}"), check, depth - 1, out)?;
                }
                return Ok(());
            }
        }
        let named = match &schema["type"] {
            Value::String(name) => vec![name.as_str()],
            Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
            _ if schema.get("properties").is_some() => vec!["object"],
            _ if schema.get("items").is_some() => vec!["array"],
            _ => vec!["string"],
        };
        for name in named {
            out.push(match name {
                "string" => self.text(schema, place, check)?,
                "null" => "\"null\"".to_owned(),
                "boolean" => "\"true\" | \"false\"".to_owned(),
                other => self.typed(schema, other, place, check)?,
            });
        }
        Ok(())
    }

    /// A string, written as it is.
    fn text(&self, schema: &Value, place: &str, check: &Check<'_>) -> Result<String, ConstraintError> {
        let bound = |key: &str| schema[key].as_u64();
        let (least, most) = (bound("minLength").unwrap_or(0), bound("maxLength"));
        let strict = self.lenience == Lenience::Strict;
        if let Some(pattern) = schema["pattern"].as_str() {
            let beside = || "alternatives beside an anchor are not supported; put them in parentheses".to_owned();
            let unknown =
                |_| "this regular expression is not supported (look-around, back references) or not well formed";
            // Compiled alone first: an error of the whole grammar would not say where it stands.
            let found = search(pattern).ok_or_else(beside).and_then(|found| {
                let alone = check(json!({"type": "string", "pattern": found}));
                alone.map_err(unknown).map(|()| found).map_err(str::to_owned)
            });
            match found {
                Ok(pattern) => return Ok(lark::regex(&pattern)),
                Err(problem) if strict => return Err(ConstraintError(format!("{place}/pattern: {problem}"))),
                Err(_) => {}
            }
        }
        if least > LONGEST_BOUND || most.is_some_and(|most| most > LONGEST_BOUND || most < least) {
            if strict && most.is_some_and(|most| most < least) {
                return Err(ConstraintError(format!("{place}/maxLength: less than minLength")));
            }
            return Ok(lark::ANY_TEXT.to_owned());
        }
        Ok(match most {
            Some(most) => format!("/(?s:.{{{least},{most}}})/"),
            None if least > 0 => format!("/(?s:.{{{least},}})/"),
            None => lark::ANY_TEXT.to_owned(),
        })
    }

    /// A number, an object or an array: the JSON of its schema.
    fn typed(&self, schema: &Value, name: &str, place: &str, check: &Check<'_>) -> Result<String, ConstraintError> {
        let bounds = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];
        let bounded = bounds.iter().any(|key| schema.get(*key).is_some());
        match name {
            "integer" if !bounded => return Ok("/-?(0|[1-9][0-9]*)/".to_owned()),
            // Two digits of an exponent keep the number one that every reader can represent.
            "number" if !bounded => return Ok(r"/-?(0|[1-9][0-9]{0,99})(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?/".to_owned()),
            "integer" | "number" | "object" | "array" => {}
            other if self.lenience == Lenience::Strict => {
                return Err(ConstraintError(format!("{place}/type: {other:?} is not a type of JSON")));
            }
            _ => return Ok(lark::ANY_TEXT.to_owned()),
        }
        let mut alone = with_definitions(schema, &self.parameters);
        if let Value::Object(map) = &mut alone {
            map.insert("type".to_owned(), json!(name));
        }
        let alone = prepared(alone, self.lenience);
        match check(alone.clone()) {
            Ok(()) => Ok(lark::json(&alone)),
            Err(error) if self.lenience == Lenience::Strict => Err(ConstraintError(format!("{place}: {}", error.0))),
            Err(_) => Ok(lark::json(&prepared(json!({"type": name}), self.lenience))),
        }
    }
}

/// Follows references inside the document.
fn resolved<'a>(schema: &'a Value, root: &'a Value, depth: usize) -> &'a Value {
    let target = || root.pointer(schema["$ref"].as_str()?.strip_prefix('#')?);
    match target() {
        Some(target) if depth > 0 => resolved(target, root, depth - 1),
        _ => schema,
    }
}

/// One value: a string as it is, everything else as JSON.
fn constant(value: &Value) -> String {
    match value {
        Value::String(text) => lark::literal(text),
        other => lark::literal(&other.to_string()),
    }
}

/// The pattern of all texts in which the given pattern is found; `None` if its anchors hold for a branch only.
fn search(pattern: &str) -> Option<String> {
    let inner = pattern.strip_prefix('^');
    let (begins, inner) = (inner.is_some(), inner.unwrap_or(pattern));
    let slashes = |text: &str| text.bytes().rev().take_while(|&byte| byte == b'\\').count();
    let without = inner.strip_suffix('$').filter(|rest| slashes(rest).is_multiple_of(2));
    let (ends, inner) = (without.is_some(), without.unwrap_or(inner));
    if (begins || ends) && has_top_level_bar(inner) {
        return None;
    }
    let any = "(?s:.*)";
    Some(format!("{}(?:{inner}){}", if begins { "" } else { any }, if ends { "" } else { any }))
}

fn has_top_level_bar(pattern: &str) -> bool {
    let (mut depth, mut in_class, mut escaped) = (0_i64, false, false);
    for c in pattern.chars() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            ']' => in_class = false,
            _ if in_class => {}
            '[' => in_class = true,
            '(' => depth += 1,
            ')' => depth -= 1,
            '|' if depth == 0 => return true,
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_searched_for_as_json_schema_says() {
        assert_eq!(search("^a$").as_deref(), Some("(?:a)"));
        assert_eq!(search("a").as_deref(), Some("(?s:.*)(?:a)(?s:.*)"));
        assert_eq!(search("^a").as_deref(), Some("(?:a)(?s:.*)"));
        assert_eq!(search(r"a\$").as_deref(), Some(r"(?s:.*)(?:a\$)(?s:.*)"));
        assert_eq!(search("a|b").as_deref(), Some("(?s:.*)(?:a|b)(?s:.*)"));
        assert_eq!(search("^(a|b)$").as_deref(), Some("(?:(a|b))"));
        assert_eq!(search("^a|b$"), None);
        assert_eq!(search("^[|]$").as_deref(), Some("(?:[|])"));
    }
}
