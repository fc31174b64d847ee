//! Task files and their graders.
//!
//! A task is a JSONL file, one item a line: `id`, `task`, `level`, `messages`, optional `tools`, `grader`, `answer` and
//! `direct` (whether the item can be answered without reasoning). A tool is its definition, or the name of one that the file
//! has defined before: many items offer the same ones. Graders look at the *body* of an answer: the text behind
//! the last `</think>`, up to the first stop token, stripped. They are strict comparisons, so that a score is a count and
//! nothing else.

use std::collections::BTreeMap;

use glimmer_text::{Message, parse_messages, python_json};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::BenchError;
use crate::jsonl;

/// How an answer is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Grader {
    /// The last integer in the body (`-?` and digits) equals the expected integer.
    Number,
    /// The body equals the expected text.
    Text,
    /// The expected text occurs in the body.
    Contains,
    /// The body parses as JSON to a value equal to the expected one; `1` and `1.0` are equal, order of keys is free.
    Json,
    /// The calls, in order, have the expected names and arguments; values that are not strings compare by their JSON text.
    Tool,
    /// The integer inside the last `\boxed{}`, else the last number of the body, equals the expected one. Separators of
    /// thousands and a fraction of zeros do not count.
    Boxed,
    /// The letter inside the last `\boxed{}`, else the last single capital letter of the body's last line, is the expected
    /// one.
    Choice,
}

/// A tool call as the grader sees it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Call {
    /// Name of the function.
    pub name: String,
    /// Arguments.
    pub arguments: Map<String, Value>,
}

/// One item of a task.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// Unique id.
    pub id: String,
    /// Difficulty.
    pub level: String,
    /// The conversation; its last turn is to be answered.
    pub messages: Vec<Message>,
    /// Tools offered.
    pub tools: Vec<Value>,
    /// How the answer is compared.
    pub grader: Grader,
    /// What it is compared with.
    pub answer: Value,
    /// Whether the item can be answered without reasoning.
    pub direct: bool,
}

/// A task.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    /// Name.
    pub name: String,
    /// Items in the order of the file.
    pub items: Vec<Item>,
}

/// Reads a task file; `file` names it in errors.
///
/// # Errors
/// [`BenchError::Line`] for a line that is not an item, [`BenchError::Empty`] for a file without items.
pub fn read_task(file: &str, text: &str) -> Result<Task, BenchError> {
    let mut task = Task { name: String::new(), items: Vec::new() };
    let mut defined = BTreeMap::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let at = |problem: String| BenchError::Line { file: file.to_owned(), line: index + 1, problem };
        let (name, item) = read_item(line, &mut defined).map_err(at)?;
        if task.items.is_empty() {
            task.name = name;
        }
        task.items.push(item);
    }
    if task.items.is_empty() {
        return Err(BenchError::Empty { file: file.to_owned() });
    }
    Ok(task)
}

#[derive(Deserialize)]
struct RawItem {
    id: String,
    task: String,
    #[serde(default)]
    level: String,
    messages: Value,
    #[serde(default)]
    tools: Vec<Value>,
    grader: Grader,
    answer: Value,
    #[serde(default)]
    direct: bool,
}

fn read_item(line: &str, defined: &mut BTreeMap<String, Value>) -> Result<(String, Item), String> {
    let mut raw: RawItem = jsonl::object(line)?;
    raw.tools.iter_mut().try_for_each(|tool| define(tool, defined))?;
    let messages = parse_messages(&raw.messages).map_err(|error| error.to_string())?;
    if messages.is_empty() {
        return Err("messages: expected at least one, found none".to_owned());
    }
    check_answer(raw.grader, &raw.answer)?;
    let RawItem { id, task, level, tools, grader, answer, direct, .. } = raw;
    Ok((task, Item { id, level, messages, tools, grader, answer, direct }))
}

/// Notes a tool's definition under its name, or puts the last one of that name in the place of the name.
fn define(tool: &mut Value, defined: &mut BTreeMap<String, Value>) -> Result<(), String> {
    match &*tool {
        Value::String(name) => match defined.get(name) {
            Some(definition) => *tool = definition.clone(),
            None => return Err(format!("tools: `{name}` is defined by no earlier item of this file")),
        },
        definition => {
            if let Some(name) = definition["function"]["name"].as_str() {
                defined.insert(name.to_owned(), definition.clone());
            }
        }
    }
    Ok(())
}

/// An expectation that no answer could meet would silently score zero.
fn check_answer(grader: Grader, answer: &Value) -> Result<(), String> {
    let fits = match grader {
        Grader::Number | Grader::Boxed => expected_number(answer).is_some(),
        Grader::Choice => answer.as_str().and_then(single_letter).is_some(),
        Grader::Text | Grader::Contains => answer.is_string(),
        Grader::Json => true,
        Grader::Tool => expected_calls(answer).is_some(),
    };
    if fits { Ok(()) } else { Err(format!("answer: {answer} does not fit the grader {grader:?}")) }
}

/// The part of a raw answer that is graded: behind the last `</think>`, stripped. `text` ends before the first stop token.
#[must_use]
pub fn body(text: &str) -> &str {
    text.rsplit_once("</think>").map_or(text, |(_, body)| body).trim()
}

/// Whether an answer is right.
#[must_use]
pub fn grade(item: &Item, body: &str, calls: &[Call]) -> bool {
    match item.grader {
        Grader::Number => {
            let expected = expected_number(&item.answer);
            expected.is_some() && last_number(body) == expected
        }
        Grader::Text => item.answer.as_str() == Some(body),
        Grader::Contains => item.answer.as_str().is_some_and(|answer| body.contains(answer)),
        Grader::Json => serde_json::from_str(body).is_ok_and(|found: Value| json_equal(&found, &item.answer)),
        Grader::Tool => expected_calls(&item.answer).is_some_and(|expected| calls_equal(&expected, calls)),
        Grader::Boxed => {
            let expected = expected_number(&item.answer);
            expected.is_some() && last_result(boxed(body).unwrap_or(body)) == expected
        }
        Grader::Choice => {
            let expected = item.answer.as_str().and_then(single_letter);
            expected.is_some() && chosen(body) == expected
        }
    }
}

/// What stands inside the last `\boxed{}`, braces inside it in pairs.
fn boxed(body: &str) -> Option<&str> {
    const OPENING: &str = "\\boxed{";
    let inside = &body[body.rfind(OPENING)? + OPENING.len()..];
    let mut open = 1;
    let end = inside.char_indices().find(|(_, c)| {
        open += match c {
            '{' => 1,
            '}' => -1,
            _ => 0,
        };
        open == 0
    })?;
    Some(&inside[..end.0])
}

/// The last number of a text, if it is an integer, without separators.
fn last_result(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let end = text.rfind(|c: char| c.is_ascii_digit())? + 1;
    let mut start = end - 1;
    // A number goes on over single commas and points between digits.
    while start > 0 && (digit(start - 1) || (matches!(bytes[start - 1], b',' | b'.') && start > 1 && digit(start - 2)))
    {
        start -= 1;
    }
    let (whole, fraction) = text[start..end].split_once('.').unwrap_or((&text[start..end], ""));
    let mut groups = whole.split(',');
    let first = groups.next().unwrap_or_default();
    let whole = match groups.clone().all(|group| group.len() == 3) && first.len() <= 3 {
        true => whole.replace(',', ""),
        // No separators but a list: its last entry.
        false => whole.rsplit(',').next().unwrap_or_default().to_owned(),
    };
    let negative = text[..start].ends_with('-') && !text[..start - 1].ends_with(|c: char| c.is_alphanumeric());
    let integer = fraction.bytes().all(|digit| digit == b'0');
    canonical(&format!("{}{whole}", if negative { "-" } else { "" })).filter(|_| integer)
}

/// A text that is one capital letter, brackets and the like around it aside.
fn single_letter(text: &str) -> Option<char> {
    let mut letters = text.trim().strip_prefix("\\text").unwrap_or(text).chars().filter(|c| c.is_alphanumeric());
    letters.next().filter(|letter| letter.is_ascii_uppercase() && letters.next().is_none())
}

fn chosen(body: &str) -> Option<char> {
    if let Some(inside) = boxed(body) {
        return single_letter(inside);
    }
    let line = body.lines().rfind(|line| !line.trim().is_empty())?;
    line.split(|c: char| !c.is_alphanumeric()).filter_map(single_letter).next_back()
}

/// An integer of any length in one spelling: no leading zeros, no minus zero.
pub(crate) fn canonical(text: &str) -> Option<String> {
    let (sign, digits) = text.strip_prefix('-').map_or(("", text), |digits| ("-", digits));
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    match digits.trim_start_matches('0') {
        "" => Some("0".to_owned()),
        digits => Some(format!("{sign}{digits}")),
    }
}

fn expected_number(answer: &Value) -> Option<String> {
    match answer {
        Value::Number(number) => canonical(&number.to_string()),
        Value::String(text) => canonical(text.trim()),
        _ => None,
    }
}

/// Last match of `-?[0-9]+`.
fn last_number(body: &str) -> Option<String> {
    let end = body.rfind(|c: char| c.is_ascii_digit())? + 1;
    let start = body[..end].rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| {
        let width = body[at..].chars().next().map_or(1, char::len_utf8);
        if body[at..].starts_with('-') { at } else { at + width }
    });
    canonical(&body[start..end])
}

fn json_equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(x), Value::Number(y)) => x == y || numbers_equal(x, y),
        (Value::Array(x), Value::Array(y)) => x.len() == y.len() && x.iter().zip(y).all(|(x, y)| json_equal(x, y)),
        (Value::Object(x), Value::Object(y)) => {
            x.len() == y.len() && x.iter().all(|(key, x)| y.get(key).is_some_and(|y| json_equal(x, y)))
        }
        _ => a == b,
    }
}

#[allow(clippy::float_cmp, reason = "equality of the written numbers is what is asked")]
fn numbers_equal(x: &serde_json::Number, y: &serde_json::Number) -> bool {
    (x.is_f64() || y.is_f64()) && x.as_f64() == y.as_f64()
}

fn expected_calls(answer: &Value) -> Option<Vec<Call>> {
    let read = |call: &Value| {
        let name = call.get("name")?.as_str()?.to_owned();
        Some(Call { name, arguments: call.get("arguments")?.as_object()?.clone() })
    };
    answer.as_array()?.iter().map(read).collect()
}

fn calls_equal(expected: &[Call], found: &[Call]) -> bool {
    let as_text = |value: &Value| value.as_str().map_or_else(|| python_json(value), str::to_owned);
    let equal = |a: &Call, b: &Call| {
        let same = |(key, value): (&String, &Value)| {
            b.arguments.get(key).is_some_and(|other| as_text(other) == as_text(value))
        };
        a.name == b.name && a.arguments.len() == b.arguments.len() && a.arguments.iter().all(same)
    };
    expected.len() == found.len() && expected.iter().zip(found).all(|(a, b)| equal(a, b))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn item(grader: Grader, answer: Value) -> Item {
        let (id, level) = (String::new(), String::new());
        Item { id, level, messages: Vec::new(), tools: Vec::new(), grader, answer, direct: false }
    }

    fn graded(grader: Grader, answer: Value, body: &str) -> bool {
        grade(&item(grader, answer), body, &[])
    }

    fn call(name: &str, arguments: Value) -> Call {
        Call { name: name.to_owned(), arguments: arguments.as_object().unwrap().clone() }
    }

    #[test]
    fn number_takes_the_last_integer() {
        for (answer, body) in [
            (json!(132), "47 + 85 = 132"),
            (json!("2010"), "2010"),
            (json!(-5), "it is -5."),
            (json!(7), "3 and 007"),
            (json!(0), "-0"),
            (json!(5), "3-5 or 5"),
            (json!(3), "\u{e9}3"),
            (json!("123456789012345678901234567890"), "=123456789012345678901234567890"),
        ] {
            assert!(graded(Grader::Number, answer.clone(), body), "{answer} in {body:?}");
        }
        for (answer, body) in [
            (json!(132), "132 = 47 + 85"),
            (json!(5), "3-5"),
            (json!(1), "1.5"),
            (json!(4), "four"),
            (json!(4), ""),
            (json!(13), "132"),
        ] {
            assert!(!graded(Grader::Number, answer.clone(), body), "{answer} in {body:?}");
        }
    }

    #[test]
    fn boxed_takes_the_box_and_else_the_last_number() {
        for (answer, body) in [
            (json!(18), "so 9 * 2 = 18"),
            (json!(18), "She makes $18.00."),
            (json!("1234"), "1,234 dollars"),
            (json!(1_234_567), "it is 1,234,567"),
            (json!(3), "the roots are 1,2,3"),
            (json!(204), "\\boxed{7} no, \\boxed{\\text{204} minutes}, of 60"),
            (json!(-5), "\\boxed{-5}"),
            (json!(5), "3-5"),
            (json!(42), "\\boxed{42"),
        ] {
            assert!(graded(Grader::Boxed, answer.clone(), body), "{answer} in {body:?}");
        }
        for (answer, body) in [
            (json!(18), "18.5"),
            (json!(18), "\\boxed{x} = 18"),
            (json!(0), "none"),
            (json!(5), "\\boxed{}5"),
            (json!(-5), "3-5"),
        ] {
            assert!(!graded(Grader::Boxed, answer.clone(), body), "{answer} in {body:?}");
        }
    }

    #[test]
    fn choice_takes_the_box_and_else_a_letter_of_the_last_line() {
        for body in
            ["\\boxed{B}", "A or C?\n\\boxed{\\text{(B)}} A", "A is wrong.\nThe answer is (B).\n", "**B**", "B) blue"]
        {
            assert!(graded(Grader::Choice, json!("B"), body), "{body:?}");
        }
        for body in ["B\nno, it is C", "\\boxed{AB}", "b", "", "\\boxed{} B", "Both"] {
            assert!(!graded(Grader::Choice, json!("B"), body), "{body:?}");
        }
    }

    #[test]
    fn text_is_the_whole_body() {
        assert!(graded(Grader::Text, json!("red"), "red"));
        for wrong in ["red.", "Red", " red", "", "a red one"] {
            assert!(!graded(Grader::Text, json!("red"), wrong), "{wrong:?}");
        }
    }

    #[test]
    fn contains_is_a_part_of_the_body() {
        assert!(graded(Grader::Contains, json!("Paris"), "The capital of France is Paris."));
        for wrong in ["paris", "Pari s", ""] {
            assert!(!graded(Grader::Contains, json!("Paris"), wrong), "{wrong:?}");
        }
    }

    #[test]
    fn json_compares_values() {
        let answer = json!({"name": "Julia", "age": 47, "l": [1, 2.5, null]});
        for right in [
            r#"{"name": "Julia", "age": 47, "l": [1, 2.5, null]}"#,
            r#" {"l":[1.0,2.5,null],"age":47.0,"name":"Julia"} "#,
        ] {
            assert!(graded(Grader::Json, answer.clone(), right), "{right}");
        }
        for wrong in [
            r#"{"name": "Julia", "age": "47", "l": [1, 2.5, null]}"#,
            r#"{"name": "Julia", "age": 47}"#,
            r#"{"name": "Julia", "age": 47, "l": [1, 2.5, null], "x": 1}"#,
            r#"{"name": "Julia", "age": 47, "l": [2.5, 1, null]}"#,
            r#"{"name": "Julia", "age": 47, "l": [1, 2.5, null]"#,
            r#"here: {"name": "Julia", "age": 47, "l": [1, 2.5, null]}"#,
            "",
        ] {
            assert!(!graded(Grader::Json, answer.clone(), wrong), "{wrong}");
        }
    }

    #[test]
    fn tool_compares_names_arguments_and_order() {
        let expected =
            item(Grader::Tool, json!([{"name": "f", "arguments": {"s": "5", "n": 5}}, {"name": "g", "arguments": {}}]));
        let (f, g) = (call("f", json!({"n": 5, "s": "5"})), call("g", json!({})));
        assert!(grade(&expected, "any body", &[f.clone(), g.clone()]));
        // A value that came without its type is as good as the typed one.
        assert!(grade(&expected, "", &[call("f", json!({"n": "5", "s": 5})), g.clone()]));
        for wrong in [
            vec![g.clone(), f.clone()],
            vec![f.clone()],
            vec![f, g.clone(), g.clone()],
            vec![call("f", json!({"n": 6, "s": "5"})), g.clone()],
            vec![call("f", json!({"n": 5})), g.clone()],
            vec![call("f", json!({"n": 5, "s": "5", "x": 1})), g.clone()],
            vec![call("F", json!({"n": 5, "s": "5"})), g],
            vec![],
        ] {
            assert!(!grade(&expected, "", &wrong), "{wrong:?}");
        }
    }

    #[test]
    fn the_body_is_behind_the_last_think() {
        assert_eq!(body("a</think> b </think>\n c \n"), "c");
        assert_eq!(body(" no tags "), "no tags");
        assert_eq!(body("</think>"), "");
    }

    #[test]
    fn bad_lines_name_file_and_line() {
        let good = r#"{"id": "a", "task": "t", "messages": [{"role": "user", "content": "x"}], "grader": "number", "answer": 1}"#;
        assert_eq!(read_task("f", good).unwrap().items.len(), 1);
        for (bad, needle) in [
            (r#"{"id":"a","task":"t","messages":[],"grader":"json","answer":1}"#, "messages: expected at least one"),
            ("[]", "expected one JSON object"),
            ("{", "EOF"),
            (r#"{"id": "a"}"#, "missing field"),
            (&good.replace("number", "guess"), "guess"),
            (&good.replace("\"user\"", "\"boss\""), "messages[0].role"),
            (&good.replace(": 1}", ": [1]}"), "does not fit the grader Number"),
            (&good.replace(": 1}", ": 1.5}"), "does not fit the grader Number"),
            (&good.replace(": 1}", r#": 1, "tools": ["f"]}"#), "tools: `f` is defined by no earlier item"),
        ] {
            let error = read_task("file.jsonl", &format!("{good}\n\n{bad}\n")).unwrap_err().to_string();
            assert!(error.starts_with("file.jsonl, line 3: ") && error.contains(needle), "{error}");
        }
        assert!(matches!(read_task("f", "\n"), Err(BenchError::Empty { .. })));
    }

    #[test]
    fn a_tool_by_name_is_the_last_definition_of_that_name() {
        let item = |tools: Value| {
            json!({"id": "a", "task": "t", "messages": [{"role": "user", "content": "x"}], "grader": "number", "answer": 1,
                "tools": tools})
            .to_string()
        };
        let tool =
            |description: &str| json!({"type": "function", "function": {"name": "f", "description": description}});
        let lines = [json!([tool("old")]), json!(["f"]), json!([tool("new")]), json!(["f", tool("g")])].map(item);
        let tools: Vec<Vec<Value>> =
            read_task("f", &lines.join("\n")).unwrap().items.into_iter().map(|item| item.tools).collect();
        assert_eq!(tools, [vec![tool("old")], vec![tool("old")], vec![tool("new")], vec![tool("new"), tool("g")]]);
    }
}
