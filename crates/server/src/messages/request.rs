//! Reading Anthropic's messages as chat messages.
//!
//! Blocks of one message may become several: results of tools come first, each as a message of its own, then the rest of
//! the user's turn.

use glimmer_engine::request::Structure;
use glimmer_text::{Message, Role};
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::chat::Job;
use crate::chat::request::{Choice, Places, Tools, check_effort, check_model, set_effort};
use crate::error::{ApiError, shorten};
use crate::fields::{Fields, Problems};
use crate::sampling::Common;

/// Least budget of thinking that the API takes.
const LEAST_BUDGET: i64 = 1024;

/// Reads the body; counting tokens needs no `max_tokens`.
///
/// # Errors
/// Wrong types, all at once; then the first value that cannot be used.
pub(super) fn read(map: &Map<String, Value>, app: &App, generate: bool) -> Result<Job, ApiError> {
    let problems = Problems::default();
    let fields = Fields::new(map, &problems);
    check_model(&fields, app)?;
    if generate && fields.value("max_tokens").is_none() {
        fields.missing("max_tokens");
    }
    let (messages, places) = conversation(&fields)?;
    let common = Common::read(&fields, app, &["max_tokens"]);
    let stops = fields.texts("stop_sequences");
    problems.check()?;
    let mut common = common?;
    common.stop = stops.unwrap_or_default();
    if common.stop.iter().any(String::is_empty) {
        return Err(ApiError::parameter("stop_sequences", "stop_sequences must not hold empty texts"));
    }
    let mut variables = app.options.template_kwargs.clone();
    let thinking_budget = thinking(&fields, app, common.max_tokens, &mut variables)?;
    if let Some(config) = fields.object("output_config") {
        if let Some(effort) = config.text("effort") {
            check_effort("output_config.effort", effort)?;
            set_effort(&mut variables, effort, app);
        }
        if let Some(format) = config.object("format") {
            common.structure = Some(shape(&format, app)?);
            common.structure_field = "output_config.format";
        }
    }
    // An answer that the client has begun is gone on with.
    let begun = messages.last().is_some_and(|last| last.role == Role::Assistant && last.tool_calls.is_empty());
    let (tools, single_call) = tools(&fields, app)?;
    problems.check()?;
    Ok(Job {
        messages,
        places,
        tools: tools.definitions,
        schemas: tools.schemas,
        tool_mode: tools.mode,
        required_tool: tools.required,
        single_call,
        variables,
        add_generation_prompt: !begun,
        logprobs: None,
        thinking_budget,
        include_reasoning: true,
        echo: None,
        common,
    })
}

/// `output_config.format`.
fn shape(format: &Fields<'_, '_>, app: &App) -> Result<Structure, ApiError> {
    let wrong = |key: &str, message: &str| Err(ApiError::parameter(key, format!("{key} {message}")));
    if format.text("type") != Some("json_schema") {
        return wrong("output_config.format.type", "must be json_schema");
    }
    match format.value("schema") {
        Some(_) if app.model.grammars.is_none() => {
            wrong("output_config.format", "cannot be given: this server cannot constrain the shape of answers")
        }
        Some(schema @ Value::Object(_)) => Ok(Structure::JsonSchema(schema.to_string())),
        _ => wrong("output_config.format.schema", "must be a JSON schema object"),
    }
}

fn thinking(
    fields: &Fields<'_, '_>,
    app: &App,
    max_tokens: Option<u64>,
    variables: &mut Map<String, Value>,
) -> Result<Option<u32>, ApiError> {
    let Some(thinking) = fields.object("thinking") else { return Ok(app.options.thinking_budget) };
    match thinking.text("type") {
        Some("enabled") => {
            let budget = thinking.integer("budget_tokens");
            if budget.is_none_or(|budget| budget < LEAST_BUDGET) {
                let message = format!("thinking.budget_tokens must be at least {LEAST_BUDGET}");
                return Err(ApiError::parameter("thinking.budget_tokens", message));
            }
            let asked = budget.and_then(|budget| u64::try_from(budget).ok());
            if asked.zip(max_tokens).is_some_and(|(budget, most)| budget >= most) {
                let message = "max_tokens must be greater than thinking.budget_tokens";
                return Err(ApiError::parameter("thinking.budget_tokens", message));
            }
            Ok(budget.and_then(|budget| u32::try_from(budget).ok()))
        }
        // The model always thinks unless its template has a switch; the least effort is what comes nearest.
        Some("disabled") => {
            set_effort(variables, "low", app);
            variables.insert("enable_thinking".to_owned(), false.into());
            Ok(app.options.thinking_budget)
        }
        Some("adaptive") => Ok(app.options.thinking_budget),
        other => {
            let found = shorten(other.unwrap_or("nothing"));
            let message = format!("thinking.type must be enabled, disabled or adaptive, got {found}");
            Err(ApiError::parameter("thinking.type", message))
        }
    }
}

fn tools(fields: &Fields<'_, '_>, app: &App) -> Result<(Tools, bool), ApiError> {
    let choice = fields.object("tool_choice");
    let single = choice.as_ref().and_then(|choice| choice.flag("disable_parallel_tool_use")).unwrap_or(false);
    let list = fields.list("tools").unwrap_or_default();
    if list.is_empty() {
        return match choice.as_ref().and_then(|choice| choice.text("type")) {
            None | Some("auto" | "none") => Ok((Tools::none(), single)),
            Some(_) => Err(ApiError::parameter("tool_choice", "tool_choice needs tools")),
        };
    }
    let mut definitions = Vec::with_capacity(list.len());
    for (index, tool) in list.iter().enumerate() {
        let path = format!("tools[{index}]");
        if let Some(kind) = tool["type"].as_str().filter(|kind| *kind != "custom") {
            let message = format!("{path}: tools of type {:?} run at Anthropic, not here", shorten(kind));
            return Err(ApiError::parameter(&path, message));
        }
        let Some(name) = tool["name"].as_str().filter(|name| !name.is_empty()) else {
            fields.problems().add(format!("{path}.name"), "expected the name of a tool");
            continue;
        };
        let mut function = Map::new();
        function.insert("name".to_owned(), name.into());
        for (key, fits, expected) in [
            ("description", Value::is_string as fn(&Value) -> bool, "text"),
            ("strict", Value::is_boolean, "true or false"),
        ] {
            match &tool[key] {
                Value::Null => {}
                value if fits(value) => drop(function.insert(key.to_owned(), value.clone())),
                _ => fields.problems().add(format!("{path}.{key}"), format!("expected {expected}")),
            }
        }
        let schema = &tool["input_schema"];
        if !schema.is_object() {
            fields.problems().add(format!("{path}.input_schema"), "expected a JSON schema object");
        }
        function.insert("parameters".to_owned(), schema.clone());
        definitions.push(json!({"type": "function", "function": function}));
    }
    fields.problems().check()?;
    let choice = match choice {
        None => Choice::Auto,
        Some(choice) => match choice.text("type") {
            Some("auto") => Choice::Auto,
            Some("any") => Choice::Required,
            Some("none") => Choice::None,
            Some("tool") => Choice::Named(choice.text("name").unwrap_or_default().to_owned()),
            other => {
                let found = shorten(other.unwrap_or("nothing"));
                let message = format!("tool_choice.type must be auto, any, tool or none, got {found}");
                return Err(ApiError::parameter("tool_choice.type", message));
            }
        },
    };
    Ok((Tools::new(definitions, &choice, app)?, single))
}

fn conversation(fields: &Fields<'_, '_>) -> Result<(Vec<Message>, Places), ApiError> {
    let (mut messages, mut places) = (Vec::new(), Vec::new());
    match fields.value("system") {
        None => {}
        Some(Value::String(text)) => messages.push(json!({"role": "system", "content": text})),
        Some(Value::Array(blocks)) => {
            let mut texts = Vec::with_capacity(blocks.len());
            for (at, block) in blocks.iter().enumerate() {
                let key = if block["type"].is_null() || block["type"] == "text" { "text" } else { "type" };
                match block["text"].as_str().filter(|_| key == "text") {
                    Some(text) => texts.push(text),
                    None => fields.problems().add(format!("system[{at}].{key}"), "expected a block of text"),
                }
            }
            messages.push(json!({"role": "system", "content": texts.join("\n")}));
        }
        Some(other) => fields.wrong("system", "text or a list of text blocks", other),
    }
    places.resize(messages.len(), "system".to_owned());
    let list = fields.list("messages").unwrap_or_default();
    if list.is_empty() {
        fields.problems().add("messages", "expected at least one message");
    }
    for (index, message) in list.iter().enumerate() {
        let path = format!("messages[{index}]");
        match message["role"].as_str() {
            Some("user") => user(&message["content"], &path, fields.problems(), &mut messages, &mut places),
            Some("assistant") => assistant(&message["content"], &path, fields.problems(), &mut messages),
            Some("system") => messages.push(json!({"role": "system", "content": message["content"]})),
            _ => fields.problems().add(format!("{path}.role"), "expected user or assistant"),
        }
        places.resize(messages.len(), path);
    }
    fields.problems().check()?;
    let places = Places { each: places, ..Places::default() };
    Ok((places.parse(messages)?, places))
}

fn blocks<'v>(content: &'v Value, path: &str, problems: &Problems) -> &'v [Value] {
    content.as_array().map_or_else(
        || {
            problems.add(format!("{path}.content"), "expected text or a list of blocks");
            Default::default()
        },
        Vec::as_slice,
    )
}

fn user(content: &Value, path: &str, problems: &Problems, messages: &mut Vec<Value>, places: &mut Vec<String>) {
    if content.is_string() {
        messages.push(json!({"role": "user", "content": content}));
        return;
    }
    let mut parts = Vec::new();
    for (index, block) in blocks(content, path, problems).iter().enumerate() {
        let path = format!("{path}.content[{index}]");
        if block["type"] == "tool_result" {
            let inner = match &block["content"] {
                Value::Array(list) => {
                    let parts = list.iter().enumerate();
                    let parts =
                        parts.filter_map(|(at, part)| plain_part(part, &format!("{path}.content[{at}]"), problems));
                    Value::Array(parts.collect())
                }
                Value::Null => "".into(),
                other => other.clone(),
            };
            if !(block["tool_use_id"].is_null() || block["tool_use_id"].is_string()) {
                problems.add(format!("{path}.tool_use_id"), "expected text");
            }
            messages.push(json!({"role": "tool", "tool_call_id": block["tool_use_id"], "content": inner}));
            places.push(path);
        } else if let Some(part) = plain_part(block, &path, problems) {
            parts.push(part);
        }
    }
    if !parts.is_empty() {
        messages.push(json!({"role": "user", "content": parts}));
    }
}

/// Text and images.
fn plain_part(block: &Value, path: &str, problems: &Problems) -> Option<Value> {
    match block["type"].as_str() {
        Some("text") if block["text"].is_string() => Some(json!({"type": "text", "text": block["text"]})),
        Some("image") => {
            let source = &block["source"];
            let url = match (source["type"].as_str(), source["media_type"].as_str(), source["data"].as_str()) {
                (Some("base64"), Some(media_type), Some(data)) => format!("data:{media_type};base64,{data}"),
                _ => match source["url"].as_str() {
                    Some(url) => url.to_owned(),
                    None => {
                        problems.add(format!("{path}.source"), "expected base64 data with a media_type, or a url");
                        return None;
                    }
                },
            };
            Some(json!({"type": "image_url", "image_url": {"url": url}}))
        }
        other => {
            let found = shorten(other.unwrap_or("nothing"));
            problems.add(format!("{path}.type"), format!("expected text, image or tool_result, found {found}"));
            None
        }
    }
}

fn assistant(content: &Value, path: &str, problems: &Problems, messages: &mut Vec<Value>) {
    if content.is_string() {
        messages.push(json!({"role": "assistant", "content": content}));
        return;
    }
    let (mut text, mut reasoning, mut calls) = (String::new(), None::<String>, Vec::new());
    for (index, block) in blocks(content, path, problems).iter().enumerate() {
        let path = format!("{path}.content[{index}]");
        match block["type"].as_str() {
            Some(key @ ("text" | "thinking")) => match block[key].as_str() {
                Some(more) if key == "text" => text.push_str(more),
                Some(more) => reasoning.get_or_insert_default().push_str(more),
                None => problems.add(format!("{path}.{key}"), "expected text"),
            },
            Some("redacted_thinking") => {}
            Some("tool_use") => {
                if !block["name"].is_string() {
                    problems.add(format!("{path}.name"), "expected the name of a tool");
                }
                if !block["input"].is_object() {
                    problems.add(format!("{path}.input"), "expected an object");
                }
                calls.push(json!({
                    "id": block["id"], "type": "function",
                    "function": {"name": block["name"], "arguments": block["input"]},
                }));
            }
            other => {
                let found = shorten(other.unwrap_or("nothing"));
                problems.add(format!("{path}.type"), format!("expected text, thinking or tool_use, found {found}"));
            }
        }
    }
    let mut message = json!({"role": "assistant", "content": text});
    if let Some(reasoning) = reasoning {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = Value::Array(calls);
    }
    messages.push(message);
}
