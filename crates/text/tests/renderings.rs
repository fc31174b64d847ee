//! The chat templates render exactly what Python's Jinja2 renders.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use glimmer_text::{ChatFormat, ChatInput, ChatTemplate, Message, Tokenizer, parse_messages};
use serde_json::{Map, Value};

const MICRO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16");
const FLASH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/glm-5.3-flash");

fn json(path: &str) -> Map<String, Value> {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

struct Case {
    messages: Vec<Message>,
    tools: Vec<Value>,
    variables: Map<String, Value>,
    add_generation_prompt: bool,
}

impl Case {
    fn read(input: &Value) -> Self {
        let mut variables = input.as_object().unwrap().clone();
        let messages = parse_messages(&variables.remove("messages").unwrap()).unwrap();
        let tools = variables.remove("tools").map(|tools| tools.as_array().unwrap().clone()).unwrap_or_default();
        let add_generation_prompt = variables.remove("add_generation_prompt") == Some(Value::Bool(true));
        Self { messages, tools, variables, add_generation_prompt }
    }

    fn input(&self) -> ChatInput<'_> {
        ChatInput {
            messages: &self.messages,
            tools: &self.tools,
            variables: Some(&self.variables),
            add_generation_prompt: self.add_generation_prompt,
            allow_special: false,
        }
    }
}

fn micro_tokenizer() -> Tokenizer {
    Tokenizer::from_dir(MICRO.as_ref()).unwrap()
}

/// The real templates run over the micro tokenizer: their added tokens have the same literals.
fn flash_format(file: &str) -> ChatFormat {
    let source = std::fs::read_to_string(format!("{FLASH}/{file}")).unwrap();
    ChatFormat::new(micro_tokenizer(), ChatTemplate::new(&source).unwrap())
}

#[test]
fn all_examples_of_the_released_template() {
    let stock = flash_format("chat_template.jinja");
    let toggle = flash_format("chat_template.thinking_toggle.jinja");
    let cases = json(&format!("{FLASH}/chat_template_examples.json"));
    assert!(cases.len() >= 18);
    for (name, case) in &cases {
        let parsed = Case::read(&case["input"]);
        // A null content is normalised to empty text: the template alone would print the word None.
        let null_content = name == "assistant_content_null";
        let expected = |key: &str| {
            let text = case.get(key).or_else(|| case.get("stock")).and_then(Value::as_str).unwrap();
            if null_content { text.replace("None", "") } else { text.to_owned() }
        };
        assert_eq!(stock.prompt(&parsed.input()).unwrap().text, expected("stock"), "{name}");
        assert_eq!(toggle.prompt(&parsed.input()).unwrap().text, expected("thinking_toggle"), "{name}");
    }
}

#[test]
fn conversations_of_the_micro_model_render_and_encode_as_in_python() {
    let format = ChatFormat::from_dir(MICRO.as_ref()).unwrap();
    let cases = json(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/micro_renderings.json"));
    assert!(cases.len() >= 20);
    for (name, case) in &cases {
        let parsed = Case::read(&case["input"]);
        let prompt = format.prompt(&parsed.input()).unwrap();
        assert_eq!(prompt.text, case["text"].as_str().unwrap(), "{name}");
        let expected: Vec<u32> = serde_json::from_value(case["input_ids"].clone()).unwrap();
        assert_eq!(prompt.unexpanded_ids(), expected, "{name}");
    }
}

#[test]
fn messages_survive_their_own_json_in_every_example() {
    for (name, case) in &json(&format!("{FLASH}/chat_template_examples.json")) {
        for message in Case::read(&case["input"]).messages {
            let again: Message = serde_json::from_value(serde_json::to_value(&message).unwrap()).unwrap();
            assert_eq!(again, message, "{name}");
        }
    }
}
