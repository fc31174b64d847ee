//! Structural tags: free text in which certain tags must have a certain content.
//!
//! Two descriptions are in use: `{"structures": [{begin, schema, end}], "triggers"}` and a tree of formats under
//! `{"type": "structural_tag", "format"}`. The first is rewritten as the second. Where a literal of an added token stands
//! in a tag, the token itself is meant, because that is what the model writes.

use std::fmt::Write as _;

use glimmer_engine::constraint::ConstraintError;
use serde_json::{Value, json};

use super::vocabulary::Vocabulary;
use super::{ebnf, json as schemas, lark};

/// Grammar of a description.
pub(super) fn to_lark(text: &str, vocabulary: &Vocabulary) -> Result<String, ConstraintError> {
    let description: Value =
        serde_json::from_str(text).map_err(|error| ConstraintError(format!("structural_tag: not JSON: {error}")))?;
    let mut writer = Writer { vocabulary, rules: String::new(), count: 0 };
    let root = if description.get("format").is_some() {
        writer.format(&description["format"], "structural_tag.format", "")?
    } else {
        writer.format(&modern(&description)?, "structural_tag", "")?
    };
    Ok(format!("start: {root}\n{}", writer.rules))
}

/// The older description as a format.
fn modern(description: &Value) -> Result<Value, ConstraintError> {
    let Some(structures) = description["structures"].as_array() else {
        return Err(ConstraintError("structural_tag: expected `format`, or `structures` and `triggers`".to_owned()));
    };
    let tag = |structure: &Value| {
        let schema = structure.get("schema").unwrap_or(&Value::Bool(true));
        json!({"type": "tag", "begin": structure["begin"], "end": structure["end"],
               "content": {"type": "json_schema", "json_schema": schema}})
    };
    let tags: Vec<Value> = structures.iter().map(tag).collect();
    Ok(json!({"type": "triggered_tags", "triggers": description["triggers"], "tags": tags}))
}

struct Writer<'v> {
    vocabulary: &'v Vocabulary,
    rules: String,
    count: usize,
}

impl Writer<'_> {
    /// A new rule with this body and these attributes; its name.
    fn rule(&mut self, attributes: &str, body: &str) -> String {
        let name = format!("f{}", self.count);
        self.count += 1;
        // Writing to a string does not fail.
        let _ = writeln!(self.rules, "{name}{attributes}: {body}");
        name
    }

    /// Rule of a format that is followed by the text `end`, which the rule includes.
    fn format(&mut self, format: &Value, place: &str, end: &str) -> Result<String, ConstraintError> {
        let problem = |what: &str| ConstraintError(format!("{place}: {what}"));
        let list = |key: &str| {
            let items = format[key].as_array().filter(|items| !items.is_empty());
            items.ok_or_else(|| ConstraintError(format!("{place}.{key}: expected a list that is not empty")))
        };
        let text = |key: &str| {
            format[key].as_str().ok_or_else(|| ConstraintError(format!("{place}.{key}: expected a string")))
        };
        let flag = |key: &str| format[key] == Value::Bool(true);
        let body = match format["type"].as_str() {
            Some("any_text") => return Ok(self.any_text(end)),
            Some("const_string") => self.literal(text("value")?),
            Some("regex") => lark::regex(lark::whole(text("pattern")?)?),
            Some("json_schema") => {
                let schema = format.get("json_schema").unwrap_or(&Value::Null);
                if !(schema.is_object() || schema.is_boolean()) {
                    return Err(problem("json_schema: expected a schema"));
                }
                lark::json(&schemas::prepared(schema.clone(), schemas::Lenience::Strict))
            }
            Some("grammar") => {
                let grammar = text("grammar")?;
                if !ebnf::is_ebnf(grammar) {
                    return Err(problem("grammar: expected rules like root ::= \"a\""));
                }
                let (root, rules) = ebnf::to_rules(grammar, &format!("g{}", self.count))?;
                self.count += 1;
                self.rules += &rules;
                root
            }
            Some("tag") => self.tag(format, "", place)?,
            Some("or") => {
                let mut branches = Vec::new();
                for (index, element) in list("elements")?.iter().enumerate() {
                    branches.push(self.format(element, &format!("{place}.elements[{index}]"), end)?);
                }
                return Ok(self.rule("", &branches.join(" | ")));
            }
            Some("sequence") => return self.sequence(list("elements")?, place, end),
            Some(kind @ ("optional" | "star" | "plus")) => {
                let content = self.format(&format["content"], &format!("{place}.content"), "")?;
                let times = match kind {
                    "optional" => "?",
                    "star" => "*",
                    _ => "+",
                };
                format!("{content}{times}")
            }
            Some("triggered_tags") => {
                let triggers: Option<Vec<&str>> = list("triggers")?.iter().map(Value::as_str).collect();
                let triggers = triggers.ok_or_else(|| problem("triggers: expected strings"))?;
                let (tags, once) = (list("tags")?, flag("stop_after_first"));
                return self.triggered(&triggers, tags, flag("at_least_one"), once, place, end);
            }
            Some("tags_with_separator") => {
                let mut tags = Vec::new();
                for (index, tag) in list("tags")?.iter().enumerate() {
                    let body = self.tag(tag, "", &format!("{place}.tags[{index}]"))?;
                    tags.push(self.rule("", &body));
                }
                let tag = self.rule("", &tags.join(" | "));
                let more = if flag("stop_after_first") {
                    String::new()
                } else {
                    format!(" ({} {tag})*", self.literal(text("separator")?))
                };
                let all = self.rule("", &format!("{tag}{more}"));
                if flag("at_least_one") { all } else { format!("{all}?") }
            }
            Some(other) => {
                let known = "any_text, const_string, json_schema, regex, grammar, tag, or, sequence, optional, star, \
                             plus, triggered_tags and tags_with_separator";
                return Err(problem(&format!("type {other:?} is not supported; known are {known}")));
            }
            None => return Err(problem("expected a format, an object with `type`")),
        };
        let end = self.literal(end);
        Ok(self.rule("", &format!("{body} {end}")))
    }

    /// A tag without the part of its beginning that has been written already.
    fn tag(&mut self, tag: &Value, written: &str, place: &str) -> Result<String, ConstraintError> {
        let text =
            |key: &str| tag[key].as_str().ok_or_else(|| ConstraintError(format!("{place}.{key}: expected a string")));
        let begin = text("begin")?;
        let begin = begin.strip_prefix(written).unwrap_or(begin);
        let ends: Vec<&str> = match &tag["end"] {
            Value::Array(ends) => ends.iter().filter_map(Value::as_str).collect(),
            _ => vec![text("end")?],
        };
        let mut contents = Vec::new();
        for end in ends {
            contents.push(self.format(&tag["content"], &format!("{place}.content"), end)?);
        }
        Ok(format!("{} ({})", self.literal(begin), contents.join(" | ")))
    }

    /// Free text up to and including `end`.
    fn any_text(&mut self, end: &str) -> String {
        match (self.vocabulary.leading_added(end), self.plain_length(end)) {
            (Some(_), _) => {
                let end = self.literal(end);
                self.rule("", &format!("{} {end}", lark::ANY_TEXT))
            }
            (None, 0) => self.rule("", lark::ANY_TEXT),
            (None, plain) => {
                let stop = lark::literal(&end[..plain]);
                let head = self.rule(&format!("[suffix={stop}]"), lark::ANY_TEXT);
                let rest = self.literal(&end[plain..]);
                self.rule("", &format!("{head} {rest}"))
            }
        }
    }

    fn sequence(&mut self, elements: &[Value], place: &str, end: &str) -> Result<String, ConstraintError> {
        let mut words = Vec::new();
        let mut written = "";
        for (index, element) in elements.iter().enumerate() {
            let here = format!("{place}.elements[{index}]");
            let begin_of = |element: &Value| match element["type"].as_str() {
                Some("tag") => element["begin"].as_str().map(str::to_owned),
                Some("const_string") => element["value"].as_str().map(str::to_owned),
                _ => None,
            };
            let already = std::mem::take(&mut written);
            if element["type"] == "any_text"
                && let Some(next) = elements.get(index + 1)
            {
                // Free text goes up to where the next element begins, and takes that beginning with it.
                let Some(begin) = begin_of(next).filter(|begin| !begin.is_empty()) else {
                    let problem = "free text must be followed by a tag or a const_string, which ends it";
                    return Err(ConstraintError(format!("{here}: {problem}")));
                };
                words.push(self.any_text(&begin));
                written = "written";
                continue;
            }
            let last = if index + 1 == elements.len() { end } else { "" };
            match (already.is_empty(), element["type"].as_str()) {
                (false, Some("tag")) => {
                    let begin = begin_of(element).unwrap_or_default();
                    let tag = self.tag(element, &begin, &here)?;
                    let last = self.literal(last);
                    words.push(self.rule("", &format!("{tag} {last}")));
                }
                (false, _) => words.push(self.literal(last)),
                (true, _) => words.push(self.format(element, &here, last)?),
            }
        }
        Ok(self.rule("", &words.join(" ")))
    }

    fn triggered(
        &mut self,
        triggers: &[&str],
        tags: &[Value],
        at_least_one: bool,
        once: bool,
        place: &str,
        end: &str,
    ) -> Result<String, ConstraintError> {
        let mut heads = Vec::new();
        for (index, trigger) in triggers.iter().enumerate() {
            if trigger.is_empty() {
                return Err(ConstraintError(format!("{place}.triggers[{index}]: expected text")));
            }
            let mut bodies = Vec::new();
            for (number, tag) in tags.iter().enumerate() {
                if tag["begin"].as_str().is_some_and(|begin| begin.starts_with(trigger)) {
                    let body = self.tag(tag, trigger, &format!("{place}.tags[{number}]"))?;
                    bodies.push(self.rule("", &body));
                }
            }
            if bodies.is_empty() {
                return Err(ConstraintError(format!("{place}.triggers[{index}]: no tag begins with {trigger:?}")));
            }
            let head = self.any_text(trigger);
            heads.push(self.rule("", &format!("{head} ({})", bodies.join(" | "))));
        }
        let reached = |tag: &Value| triggers.iter().any(|t| tag["begin"].as_str().is_some_and(|b| b.starts_with(t)));
        if let Some(number) = tags.iter().position(|tag| !reached(tag)) {
            return Err(ConstraintError(format!("{place}.tags[{number}].begin: no trigger leads to it")));
        }
        let any = self.rule("", &heads.join(" | "));
        let rest = self.any_text(end);
        let end = self.literal(end);
        Ok(match (once, at_least_one) {
            (true, true) => self.rule("", &format!("{any} {end}")),
            (true, false) => self.rule("", &format!("{any} {end} | {rest}")),
            (false, true) => self.rule("", &format!("{any}+ {rest}")),
            (false, false) => self.rule("", &format!("{any}* {rest}")),
        })
    }

    /// Bytes of `text` in front of the first literal of an added token.
    fn plain_length(&self, text: &str) -> usize {
        let cut = text.char_indices().find(|&(at, _)| self.vocabulary.leading_added(&text[at..]).is_some());
        cut.map_or(text.len(), |(at, _)| at)
    }

    /// Text of a tag; literals of added tokens are those tokens.
    fn literal(&self, text: &str) -> String {
        let mut words = Vec::new();
        let mut rest = text;
        loop {
            let plain = self.plain_length(rest);
            if plain > 0 {
                words.push(lark::literal(&rest[..plain]));
            }
            rest = &rest[plain..];
            let Some((id, behind)) = self.vocabulary.leading_added(rest) else { break };
            words.push(lark::token(id));
            rest = behind;
        }
        words.join(" ")
    }
}
