//! The glue between text and engine, with a scripted engine over the micro model's files.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use glimmer_bench::{
    Answerer, BenchError, Completer, Completion, CompletionSink, EvalOptions, Finish, LocalAnswerer, ModelText,
    PictureReader, PromptSource, Prompted, Question, Task, evaluate, read_task,
};
use glimmer_checkpoint::{Bytes, Checkpoint};
use serde_json::Value;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

fn checkpoint() -> Checkpoint {
    Checkpoint::open(format!("{ROOT}/models/micro-bf16")).unwrap()
}

/// All files of the micro model but one, which is replaced.
fn with_file(name: &str, content: Option<Vec<u8>>) -> Checkpoint {
    let entries = std::fs::read_dir(format!("{ROOT}/models/micro-bf16")).unwrap().map(|entry| entry.unwrap());
    let mut files: Vec<(String, Bytes)> = entries
        .map(|entry| (entry.file_name().into_string().unwrap(), Bytes::new(std::fs::read(entry.path()).unwrap())))
        .filter(|(file, _)| file != name)
        .collect();
    files.extend(content.map(|content| (name.to_owned(), Bytes::new(content))));
    Checkpoint::from_files(files).unwrap()
}

fn lines(task: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(format!("{ROOT}/data/eval/{task}.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn task(name: &str) -> Task {
    read_task(name, &std::fs::read_to_string(format!("{ROOT}/data/eval/{name}.jsonl")).unwrap()).unwrap()
}

/// Completes the n-th prompt with the n-th text, in batches from the back.
struct Scripted<'a> {
    text: &'a ModelText,
    answers: Vec<String>,
    seen: Vec<Prompted>,
}

impl Completer for Scripted<'_> {
    fn complete(&mut self, next: &mut PromptSource<'_>, done: &mut CompletionSink<'_>) -> Result<(), BenchError> {
        let first = self.seen.len();
        while let Some(prompt) = next() {
            self.seen.push(prompt?);
        }
        for index in (first..self.seen.len()).rev() {
            let ids = self.text.format.tokenizer().encode(&self.answers[index])?;
            done(index - first, Completion { ids, finish: Finish::Stop });
        }
        Ok(())
    }
}

/// The reference answer as the model would write it.
fn written(line: &Value, thinking: bool) -> String {
    let reference = &line["reference"];
    let mut text = String::new();
    if thinking {
        text = format!("{}</think>", reference["reasoning"].as_str().unwrap_or("I know the answer."));
    }
    text.push_str(reference["content"].as_str().unwrap());
    for call in reference["tool_calls"].as_array().into_iter().flatten() {
        text.push_str(&format!("<tool_call>{}", call["name"].as_str().unwrap()));
        for (key, value) in call["arguments"].as_object().unwrap() {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            text.push_str(&format!("<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"));
        }
        text.push_str("</tool_call>");
    }
    text
}

#[test]
fn written_reference_answers_score_full_marks() {
    let text = ModelText::read(&checkpoint()).unwrap();
    for name in ["tools", "tools_final", "text", "word_problem"] {
        for thinking in [true, false] {
            let mut answers: Vec<String> = Vec::new();
            for line in lines(name) {
                if thinking || line["direct"] == true {
                    answers.push(written(&line, thinking));
                }
            }
            let options = EvalOptions {
                thinking_on: thinking,
                thinking_off: !thinking,
                limit: Some(60),
                ..EvalOptions::default()
            };
            let completer = Scripted { text: &text, answers, seen: Vec::new() };
            let mut answerer = LocalAnswerer::new(&text, completer, None);
            for result in evaluate(&mut answerer, &[task(name)], &options, &mut |_, _| {}).unwrap() {
                assert_eq!((result.correct, result.thinking), (60, thinking), "{name}: {:?}", result.wrong);
            }
            for prompt in &answerer.completer().seen {
                let shown = text.format.tokenizer().decode(&prompt.ids, false);
                assert!(shown.ends_with(if thinking {
                    "<|assistant|><think>"
                } else {
                    "<|assistant|><think></think>"
                }));
                assert_eq!(prompt.stop_ids, text.stop_ids);
            }
        }
    }
}

#[test]
fn a_template_without_a_switch_is_closed_by_hand() {
    let stock = std::fs::read(format!("{ROOT}/data/glm-5.3-flash/chat_template.jinja")).unwrap();
    let text = ModelText::read(&with_file("chat_template.jinja", Some(stock))).unwrap();
    let completer = Scripted { text: &text, answers: vec!["Paris".to_owned()], seen: Vec::new() };
    let mut answerer = LocalAnswerer::new(&text, completer, None);
    let item = &task("facts").items[0];
    let question = Question { id: &item.id, messages: &item.messages, tools: &[], thinking: false, max_tokens: 8 };
    let (answer, _) = answerer.ask(&question).unwrap();
    assert_eq!((answer.reasoning, answer.content.as_deref()), (None, Some("Paris")));
    let shown = text.format.tokenizer().decode(&answerer.completer().seen[0].ids, false);
    assert!(shown.ends_with("<|assistant|><think></think>"), "{shown}");
}

#[test]
fn pictures_become_features_and_placeholders() {
    let checkpoint = checkpoint();
    let text = ModelText::read(&checkpoint).unwrap();
    let item = &task("vision").items[0];
    let question = Question { id: &item.id, messages: &item.messages, tools: &[], thinking: false, max_tokens: 8 };
    let scripted = || Scripted { text: &text, answers: vec!["yellow".to_owned()], seen: Vec::new() };
    let pictures = PictureReader::load(&checkpoint).unwrap();
    let mut answerer = LocalAnswerer::new(&text, scripted(), pictures);
    answerer.ask(&question).unwrap();
    let seen = &answerer.completer().seen[0];
    let image = text.format.tokenizer().added_id("<|image|>").unwrap();
    let placeholders = seen.ids.iter().filter(|&&id| id == image).count();
    assert_eq!(seen.pictures.len(), 1);
    assert_eq!(seen.pictures[0].tokens(), placeholders);
    // Without a tower the question is refused, not answered blindly.
    let mut blind = LocalAnswerer::new(&text, scripted(), None);
    assert!(blind.answer(&[question], &mut |_, _| {}).unwrap_err().to_string().contains("no vision tower"));
}

#[test]
fn missing_and_damaged_files_are_named() {
    let with = |name: &str, content: Option<&str>| {
        let changed = with_file(name, content.map(|content| content.as_bytes().to_vec()));
        ModelText::read(&changed).unwrap_err().to_string()
    };
    for name in ["tokenizer.json", "chat_template.jinja"] {
        assert!(with(name, None).contains(&format!("it has no {name}")));
    }
    assert!(with("tokenizer.json", Some("{}")).contains("tokenizer.json"));
    assert!(with("generation_config.json", Some("{\"eos_token_id\": \"x\"}")).contains("eos_token_id"));
    let stop_ids = ModelText::read(&checkpoint()).unwrap().stop_ids;
    assert_eq!(stop_ids.len(), 3);
    // config.json names the same ones.
    assert_eq!(ModelText::read(&with_file("generation_config.json", None)).unwrap().stop_ids, stop_ids);
}
