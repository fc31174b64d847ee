//! Reading a responses request as a chat job.

use glimmer_text::{Message, TextError};
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::chat::Job;
use crate::chat::request::{self as chat, Places};
use crate::error::{ApiError, shorten};
use crate::fields::{Fields, Problems};

/// Reads the body.
///
/// # Errors
/// Wrong types, all at once; then the first value that cannot be used.
pub(super) fn read(map: &Map<String, Value>, app: &App) -> Result<Job, ApiError> {
    let problems = Problems::default();
    let fields = Fields::new(map, &problems);
    chat::check_model(&fields, app)?;
    if let Some(id) = fields.text("previous_response_id") {
        let message =
            format!("Response with id '{}' not found: responses are not stored; send the whole input", shorten(id));
        return Err(ApiError::not_found("previous_response_id", message));
    }
    for key in ["conversation", "prompt"] {
        if fields.value(key).is_some() {
            let message = format!("{key} cannot be given: nothing is stored here; send the whole input");
            return Err(ApiError::parameter(key, message));
        }
    }
    if fields.flag("background") == Some(true) {
        return Err(ApiError::parameter("background", "background responses are not supported"));
    }
    let (messages, places) = conversation(&fields)?;
    let mut chat_body = Map::new();
    for key in
        ["temperature", "top_p", "stream", "parallel_tool_calls", "model", "chat_template_kwargs", "seed", "user"]
    {
        if let Some(value) = fields.value(key) {
            chat_body.insert(key.to_owned(), value.clone());
        }
    }
    if let Some(limit) = fields.value("max_output_tokens") {
        chat_body.insert("max_tokens".to_owned(), limit.clone());
    }
    if let Some(effort) = fields.object("reasoning").and_then(|reasoning| reasoning.value("effort").cloned()) {
        chat_body.insert("reasoning_effort".to_owned(), effort);
    }
    if let Some(format) = fields.object("text").and_then(|text| text.object("format")) {
        let kind = format.text("type").unwrap_or("text");
        let format = match kind {
            // Flat here, nested there.
            "json_schema" => json!({"type": kind, "json_schema": format.map()}),
            _ => Value::Object(format.map().clone()),
        };
        chat_body.insert("response_format".to_owned(), format);
    }
    tools(&fields, &mut chat_body);
    problems.check()?;
    chat_body.insert("messages".to_owned(), json!([{"role": "user", "content": ""}]));
    let mut job = chat::read(&chat_body, app).map_err(|error| error.renamed(NAMES))?;
    (job.messages, job.places) = (messages, places);
    job.common.structure_field = "text.format";
    Ok(job)
}

/// Fields of a chat request and what they are called here.
const NAMES: &[(&str, &str)] = &[
    ("max_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    (".function.", "."),
];

fn tools(fields: &Fields<'_, '_>, chat_body: &mut Map<String, Value>) {
    let list = fields.list("tools").unwrap_or_default();
    let mut tools = Vec::with_capacity(list.len());
    for (index, tool) in list.iter().enumerate() {
        if tool["type"] != "function" {
            let found = shorten(&tool["type"].to_string());
            let problem = format!("expected function, found {found}: other tools run at OpenAI, not here");
            fields.problems().add(format!("tools[{index}].type"), problem);
            continue;
        }
        let function: Map<String, Value> = ["name", "description", "parameters", "strict"]
            .into_iter()
            .filter_map(|key| Some((key.to_owned(), tool.get(key).filter(|value| !value.is_null())?.clone())))
            .collect();
        tools.push(json!({"type": "function", "function": function}));
    }
    if tools.is_empty() {
        return;
    }
    chat_body.insert("tools".to_owned(), Value::Array(tools));
    match fields.value("tool_choice") {
        None => {}
        Some(choice @ Value::Object(_)) => {
            if !choice["name"].is_string() {
                fields.problems().add("tool_choice.name", "expected the name of a function");
            }
            let choice = json!({"type": "function", "function": {"name": choice["name"]}});
            chat_body.insert("tool_choice".to_owned(), choice);
        }
        Some(choice) => {
            chat_body.insert("tool_choice".to_owned(), choice.clone());
        }
    }
}

fn conversation(fields: &Fields<'_, '_>) -> Result<(Vec<Message>, Places), ApiError> {
    let (mut messages, mut places) = (Vec::new(), Vec::new());
    if let Some(text) = fields.text("instructions") {
        messages.push(json!({"role": "system", "content": text}));
    }
    places.resize(messages.len(), "instructions".to_owned());
    match fields.value("input") {
        None => fields.missing("input"),
        Some(Value::String(text)) => {
            messages.push(json!({"role": "user", "content": text}));
            places.push("input".to_owned());
        }
        Some(Value::Array(items)) => {
            if items.is_empty() {
                fields.problems().add("input", "expected at least one item");
            }
            for (index, item) in items.iter().enumerate() {
                push_item(item, index, fields.problems(), &mut messages);
                let output = if item["type"] == "function_call_output" { ".output" } else { "" };
                places.resize(messages.len(), format!("input[{index}]{output}"));
            }
        }
        Some(other) => fields.wrong("input", "text or a list of items", other),
    }
    fields.problems().check()?;
    let places = Places { field: "input", each: places };
    Ok((places.parse(messages)?, places))
}

/// The open message of the assistant, if the last one is: reasoning, text and calls of a turn are separate items.
fn turn(messages: &mut Vec<Value>) -> Option<&mut Value> {
    if messages.last().is_none_or(|message| message["role"] != "assistant") {
        messages.push(json!({"role": "assistant", "content": ""}));
    }
    messages.last_mut()
}

fn push_item(item: &Value, index: usize, problems: &Problems, messages: &mut Vec<Value>) {
    let path = format!("input[{index}]");
    let kind = item["type"].as_str().unwrap_or("message");
    if !(item["call_id"].is_null() || item["call_id"].is_string()) {
        problems.add(format!("{path}.call_id"), "expected text");
    }
    let said = |key: &str| texts(&item[key], &format!("{path}.{key}"), problems);
    match kind {
        "message" if item["role"] == "assistant" => {
            let text = said("content");
            if let Some(turn) = turn(messages) {
                turn["content"] = format!("{}{text}", turn["content"].as_str().unwrap_or_default()).into();
            }
        }
        "message" => {
            let content = match &item["content"] {
                Value::Array(parts) => Value::Array(parts.iter().map(part).collect()),
                other => other.clone(),
            };
            messages.push(json!({"role": item["role"], "content": content}));
        }
        "reasoning" => {
            let text = format!("{}{}", said("content"), said("summary"));
            messages.push(json!({"role": "assistant", "content": "", "reasoning_content": text}));
        }
        "function_call" => {
            let call = json!({
                "id": item["call_id"], "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            });
            // It will be one of several calls of a turn: what is wrong with it is said of the item.
            let alone = Message::try_from(json!({"role": "assistant", "tool_calls": [&call]}));
            if let Err(TextError::Message { path: at, expected, found }) = alone {
                let key = at.rsplit('.').next().unwrap_or_default();
                problems.add(format!("{path}.{key}"), format!("expected {expected}, found {found}"));
            }
            if let Some(turn) = turn(messages) {
                match turn["tool_calls"].as_array_mut() {
                    Some(calls) => calls.push(call),
                    None => turn["tool_calls"] = json!([call]),
                }
            }
        }
        "function_call_output" => {
            let output = match &item["output"] {
                Value::Array(parts) => {
                    // Parts of a chat's tool, not of this API.
                    for (at, part) in parts.iter().enumerate() {
                        if part["type"].is_null() && !part["output"].is_null() {
                            problems.add(format!("{path}.output[{at}].type"), "the field is required");
                        }
                    }
                    Value::Array(parts.iter().map(part).collect())
                }
                other => other.clone(),
            };
            messages.push(json!({"role": "tool", "tool_call_id": item["call_id"], "content": output}));
        }
        other => {
            let expected = "expected message, reasoning, function_call or function_call_output";
            problems.add(format!("{path}.type"), format!("{expected}, found {}", shorten(other)));
        }
    }
}

/// A text, or those of a list of parts, joined; nothing else can be said here.
fn texts(content: &Value, path: &str, problems: &Problems) -> String {
    let parts = match content {
        Value::Null => return String::new(),
        Value::String(text) => return text.clone(),
        Value::Array(parts) => parts,
        _ => {
            problems.add(path, "expected text or a list of parts");
            return String::new();
        }
    };
    let mut all = String::new();
    for (at, part) in parts.iter().enumerate() {
        let (key, expected) = match part["type"].as_str() {
            Some("refusal") => ("refusal", "text"),
            Some("text" | "input_text" | "output_text" | "reasoning_text" | "summary_text") => ("text", "text"),
            None if part["type"].is_null() && part["text"].is_string() => ("text", "text"),
            _ => ("type", "one of text, input_text, output_text, reasoning_text, summary_text, refusal"),
        };
        match part[key].as_str().filter(|_| key != "type") {
            Some(text) => all.push_str(text),
            None => {
                let found = shorten(&part[key].to_string());
                problems.add(format!("{path}[{at}].{key}"), format!("expected {expected}, found {found}"));
            }
        }
    }
    all
}

/// A part in the terms of chat.
fn part(part: &Value) -> Value {
    if part["type"] == "input_image" {
        return json!({"type": "image_url", "image_url": {"url": part["image_url"]}});
    }
    part.clone()
}
