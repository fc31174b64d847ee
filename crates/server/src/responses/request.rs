//! Reading a responses request as a chat job.

use glimmer_text::Message;
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::chat::Job;
use crate::chat::request as chat;
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
    let messages = conversation(&fields)?;
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
    job.messages = messages;
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
            let choice = json!({"type": "function", "function": {"name": choice["name"]}});
            chat_body.insert("tool_choice".to_owned(), choice);
        }
        Some(choice) => {
            chat_body.insert("tool_choice".to_owned(), choice.clone());
        }
    }
}

fn conversation(fields: &Fields<'_, '_>) -> Result<Vec<Message>, ApiError> {
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
                places.resize(messages.len(), format!("input[{index}]"));
            }
        }
        Some(other) => fields.wrong("input", "text or a list of items", other),
    }
    fields.problems().check()?;
    chat::parse_as(messages, &places)
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
    match kind {
        "message" if item["role"] == "assistant" => {
            let text = match &item["content"] {
                Value::String(text) => text.clone(),
                content => texts(content),
            };
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
            let text = format!("{}{}", texts(&item["content"]), texts(&item["summary"]));
            messages.push(json!({"role": "assistant", "content": "", "reasoning_content": text}));
        }
        "function_call" => {
            let call = json!({
                "id": item["call_id"], "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            });
            if let Some(turn) = turn(messages) {
                match turn["tool_calls"].as_array_mut() {
                    Some(calls) => calls.push(call),
                    None => turn["tool_calls"] = json!([call]),
                }
            }
        }
        "function_call_output" => {
            let output = match &item["output"] {
                Value::Array(parts) => Value::Array(parts.iter().map(part).collect()),
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

/// Texts of a list of parts, joined.
fn texts(parts: &Value) -> String {
    parts.as_array().into_iter().flatten().filter_map(|part| part["text"].as_str()).collect()
}

/// A part in the terms of chat.
fn part(part: &Value) -> Value {
    if part["type"] == "input_image" {
        return json!({"type": "image_url", "image_url": {"url": part["image_url"]}});
    }
    part.clone()
}
