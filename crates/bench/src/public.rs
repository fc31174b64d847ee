//! Public question sets as they are distributed, one JSON object a line, as tasks.
//!
//! | format | keys of a line | grader |
//! |---|---|---|
//! | task | `messages`, `grader`, `answer`, ... ([`crate::read_task`]) | its own |
//! | worked answers (GSM8K) | `question`, `answer` with the result behind `####` | `boxed` |
//! | choices (GPQA) | `question`, `choices` (or `options`), `answer` as letter, index or text | `choice` |
//! | right and wrong answers (GPQA) | `Question`, `Correct Answer`, `Incorrect Answer 1`, ... | `choice` |
//! | integers (AIME) | `problem` (or `question`, `prompt`), `answer` as an integer | `boxed` |
//!
//! The format is that of the first line; a line that does not fit it is an error. Choices whose order the file leaves open
//! are put in an order that depends on the question alone, so every run and every model sees the same one.

use glimmer_text::{Message, Role};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use crate::error::BenchError;
use crate::tasks::{Grader, Item, Task, canonical, read_task};

/// What a line is asked with, and how it is graded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Worked,
    Choices,
    RightAndWrong,
    Integer,
}

/// Appended to questions whose answer is an integer.
const ASK_NUMBER: &str = "\n\nPut the final answer, a single integer, into \\boxed{}.";
/// Appended to questions with choices.
const ASK_LETTER: &str = "\n\nPut the letter of the right answer into \\boxed{}.";
/// Names of choices.
const LETTERS: &[u8] = b"ABCDEFGHIJ";

type Line = Map<String, Value>;

/// Reads a file of questions in any of the formats; `file` names it in errors and, without its ending, the task.
///
/// # Errors
/// [`BenchError::Line`] for a line that cannot be asked or graded, with what was expected; [`BenchError::Empty`] for a file
/// without lines.
pub fn read_questions(file: &str, text: &str) -> Result<Task, BenchError> {
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).peekable();
    let Some(&(first, line)) = lines.peek() else { return Err(BenchError::Empty { file: file.to_owned() }) };
    let at = |line: usize, problem: String| BenchError::Line { file: file.to_owned(), line: line + 1, problem };
    let keys = object(line).map_err(|problem| at(first, problem))?;
    if keys.contains_key("messages") && keys.contains_key("grader") {
        return read_task(file, text);
    }
    let format = Format::of(&keys).map_err(|problem| at(first, problem))?;
    let name = std::path::Path::new(file).file_stem().map_or_else(|| file.into(), |stem| stem.to_string_lossy());
    let mut items = Vec::new();
    for (number, line) in lines {
        let item = object(line).and_then(|line| format.item(&line, &format!("{name}-{:04}", items.len())));
        items.push(item.map_err(|problem| at(number, problem))?);
    }
    Ok(Task { name: name.into_owned(), items })
}

fn object(line: &str) -> Result<Line, String> {
    serde_json::from_str(line).map_err(|error| format!("expected a JSON object: {error}"))
}

impl Format {
    fn of(line: &Line) -> Result<Self, String> {
        let has = |keys: &[&str]| keys.iter().any(|key| line.contains_key(*key));
        if has(&["Correct Answer"]) && has(&["Question"]) {
            return Ok(Self::RightAndWrong);
        }
        if has(QUESTION) && has(CHOICES) && has(&["answer"]) {
            return Ok(Self::Choices);
        }
        if has(QUESTION) && line.get("answer").and_then(Value::as_str).is_some_and(|answer| answer.contains("####")) {
            return Ok(Self::Worked);
        }
        if has(QUESTION) && line.get("answer").and_then(integer).is_some() {
            return Ok(Self::Integer);
        }
        let keys: Vec<&str> = line.keys().map(String::as_str).collect();
        Err(format!(
            "none of the known formats: question and answer with #### before the result; question, choices and answer; \
             Question, Correct Answer and Incorrect Answer 1 and so on; problem and an integer answer; messages, grader and \
             answer. This line has the keys {}",
            keys.join(", ")
        ))
    }

    fn item(self, line: &Line, id: &str) -> Result<Item, String> {
        let (question, grader, answer) = match self {
            Self::Worked => {
                let answer = text(line, &["answer"])?;
                let result = answer.rsplit_once("####").map(|(_, result)| result.trim());
                let result = result.and_then(|result| integer(&Value::from(result)));
                let result = result.ok_or("answer: expected #### and an integer at its end")?;
                (text(line, QUESTION)?.to_owned() + ASK_NUMBER, Grader::Boxed, result)
            }
            Self::Integer => {
                let answer = line.get("answer").and_then(integer).ok_or("answer: expected an integer")?;
                (text(line, QUESTION)?.to_owned() + ASK_NUMBER, Grader::Boxed, answer)
            }
            Self::Choices => {
                let choices = CHOICES.iter().find_map(|key| line.get(*key)).and_then(Value::as_array);
                let choices: Option<Vec<&str>> = choices.and_then(|all| all.iter().map(Value::as_str).collect());
                let choices = choices.ok_or("choices: expected a list of texts")?;
                let right = place(line.get("answer").unwrap_or(&Value::Null), &choices)?;
                (asked(text(line, QUESTION)?, &choices)?, Grader::Choice, letter(right))
            }
            Self::RightAndWrong => {
                let question = text(line, &["Question"])?;
                let right = text(line, &["Correct Answer"])?.trim();
                let mut choices = vec![right];
                for (key, value) in line.iter().filter(|(key, _)| key.starts_with("Incorrect Answer")) {
                    choices.push(value.as_str().ok_or_else(|| format!("{key}: expected text"))?.trim());
                }
                choices.sort_by_cached_key(|choice| Sha256::digest(format!("{question}\0{choice}")));
                let place = choices.iter().position(|choice| *choice == right).unwrap_or(0);
                (asked(question, &choices)?, Grader::Choice, letter(place))
            }
        };
        Ok(Item {
            id: line.get("id").map_or_else(|| id.to_owned(), plain),
            level: line.get("level").map(plain).unwrap_or_default(),
            messages: vec![Message::text(Role::User, question)],
            tools: Vec::new(),
            grader,
            answer: answer.into(),
            direct: false,
        })
    }
}

const QUESTION: &[&str] = &["question", "problem", "prompt"];
const CHOICES: &[&str] = &["choices", "options"];

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn text<'a>(line: &'a Line, keys: &[&str]) -> Result<&'a str, String> {
    let found = keys.iter().find_map(|key| line.get(*key)).and_then(Value::as_str);
    found.filter(|text| !text.trim().is_empty()).ok_or_else(|| format!("{}: expected text", keys.join(" or ")))
}

/// An integer with or without separators of thousands, in one spelling.
fn integer(value: &Value) -> Option<String> {
    match value {
        Value::Number(number) => canonical(&number.to_string()),
        Value::String(text) => canonical(&text.trim().replace(',', "")),
        _ => None,
    }
}

fn letter(place: usize) -> String {
    LETTERS.get(place).map(|&letter| char::from(letter).to_string()).unwrap_or_default()
}

/// Which choice is meant: by its letter, its index from 0, or its text.
fn place(answer: &Value, choices: &[&str]) -> Result<usize, String> {
    let found = match answer {
        Value::Number(index) => index.as_u64().and_then(|index| usize::try_from(index).ok()),
        Value::String(text) => {
            let named =
                |(index, choice): (usize, &&str)| (*choice == text || letter(index) == text.trim()).then_some(index);
            choices.iter().enumerate().find_map(named)
        }
        _ => None,
    };
    let expected =
        || format!("answer: expected a letter, an index or the text of one of {} choices, got {answer}", choices.len());
    found.filter(|&index| index < choices.len()).ok_or_else(expected)
}

fn asked(question: &str, choices: &[&str]) -> Result<String, String> {
    if !(2..=LETTERS.len()).contains(&choices.len()) {
        return Err(format!("choices: expected 2 to {}, got {}", LETTERS.len(), choices.len()));
    }
    let mut asked = format!("{question}\n");
    for (place, choice) in choices.iter().enumerate() {
        asked.push_str(&format!("\n{}) {choice}", letter(place)));
    }
    Ok(asked + ASK_LETTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Task, String> {
        read_questions("some/set.jsonl", text).map_err(|error| error.to_string())
    }

    fn one(line: &str) -> Item {
        read(line).unwrap().items.remove(0)
    }

    fn question(item: &Item) -> String {
        item.messages[0].content.plain_text().unwrap()
    }

    #[test]
    fn formats_are_told_by_their_keys() {
        let worked = one(r#####"{"question": "How many?", "answer": "2 + 2 = <<2+2=4>>4\n#### 1,234"}"#####);
        assert_eq!((worked.grader, worked.answer.as_str()), (Grader::Boxed, Some("1234")));
        assert!(question(&worked).starts_with("How many?") && question(&worked).contains("\\boxed{}"));
        assert_eq!((worked.id.as_str(), worked.direct), ("set-0000", false));
        for line in [
            r#"{"id": 60, "problem": "p", "answer": 204}"#,
            r#"{"id": "60", "problem": "p", "solution": "...", "answer": "204"}"#,
            r#"{"id": "60", "prompt": "p", "answer": " 0204 "}"#,
        ] {
            let item = one(line);
            assert_eq!(
                (item.id.as_str(), item.grader, item.answer.as_str()),
                ("60", Grader::Boxed, Some("204")),
                "{line}"
            );
        }
        for answer in ["\"B\"", "1", "\"blue\""] {
            let item = one(&format!(r#"{{"question": "q", "choices": ["red", "blue", "green"], "answer": {answer}}}"#));
            assert_eq!((item.grader, item.answer.as_str()), (Grader::Choice, Some("B")), "{answer}");
            assert!(question(&item).contains("\nA) red\nB) blue\nC) green"));
        }
    }

    #[test]
    fn an_order_that_the_file_leaves_open_depends_on_the_question_alone() {
        let line = |wrong: [&str; 3], question: &str| {
            format!(
                r#"{{"Question": "{question}", "Correct Answer": "right", "Incorrect Answer 1": "{}",
                "Incorrect Answer 2": "{}", "Incorrect Answer 3": "{}"}}"#,
                wrong[0], wrong[1], wrong[2]
            )
            .replace('\n', " ")
        };
        let (first, second) = (one(&line(["x", "y", "z"], "q")), one(&line(["z", "x", "y"], "q")));
        assert_eq!((&first.messages, &first.answer), (&second.messages, &second.answer));
        let letters: std::collections::BTreeSet<String> =
            (0..40).map(|i| one(&line(["x", "y", "z"], &format!("q{i}"))).answer.to_string()).collect();
        assert_eq!(letters.len(), 4, "the right answer stands anywhere");
        let right = first.answer.as_str().unwrap();
        assert!(question(&first).contains(&format!("\n{right}) right")));
    }

    #[test]
    fn what_cannot_be_asked_or_graded_is_named() {
        let worked = r#####"{"question": "q", "answer": "#### 4"}"#####;
        for (line, part) in [
            ("{", "line 2: expected a JSON object"),
            ("[1]", "line 2: expected a JSON object"),
            (r#####"{"question": "q", "answer": "#### four"}"#####, "line 2: answer: expected ####"),
            (
                r#####"{"question": " ", "answer": "#### 4"}"#####,
                "line 2: question or problem or prompt: expected text",
            ),
        ] {
            let error = read(&format!("{worked}\n{line}")).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        let unknown = read(r#"{"text": "x", "label": 1}"#).unwrap_err();
        assert!(unknown.contains("line 1: none of the known formats") && unknown.contains("text, label"), "{unknown}");
        let choice = |answer: &str, choices: &str| {
            read(&format!(r#"{{"question": "q", "choices": {choices}, "answer": {answer}}}"#)).unwrap_err()
        };
        assert!(choice("\"E\"", r#"["a", "b"]"#).contains("one of 2 choices"));
        assert!(choice("2", r#"["a", "b"]"#).contains("one of 2 choices"));
        assert!(choice("0", r#"["a"]"#).contains("expected 2 to 10"));
        assert!(choice("0", r#"[1, 2]"#).contains("a list of texts"));
        assert!(read("\n \n").unwrap_err().contains("no items"));
    }

    #[test]
    fn task_files_are_read_as_such() {
        let line = r#"{"id": "a", "task": "t", "messages": [{"role": "user", "content": "x"}], "grader": "text", "answer": "y"}"#;
        let task = read(line).unwrap();
        assert_eq!((task.name.as_str(), task.items[0].grader), ("t", Grader::Text));
    }
}
