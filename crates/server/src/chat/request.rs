//! Reading the body of a chat request.

use glimmer_text::{Content, Message, Part, Role, TextError, ToolMode, ToolSchemas, parse_messages};
use serde_json::{Map, Value};

use super::job::Job;
use crate::app::App;
use crate::error::{ApiError, shorten};
use crate::fields::{Fields, Problems};
use crate::sampling::{Common, top_count};

/// Values of `reasoning_effort`.
pub const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Reads the body.
///
/// # Errors
/// Wrong types, all at once; then the first value that cannot be used.
pub fn read(map: &Map<String, Value>, app: &App) -> Result<Job, ApiError> {
    let problems = Problems::default();
    let fields = Fields::new(map, &problems);
    check_model(&fields, app)?;
    let messages = match fields.list("messages") {
        None => {
            if fields.value("messages").is_none() {
                fields.missing("messages");
            }
            Vec::new()
        }
        Some([]) => {
            problems.add("messages", "expected at least one message");
            Vec::new()
        }
        Some(_) => parse_messages(&map["messages"])?,
    };
    let common = Common::read(&fields, app, &["max_completion_tokens", "max_tokens"]);
    // Types first: a range error may be the consequence of a field that was not read.
    problems.check()?;
    let common = common?;
    let tools = read_tools(&fields, app)?;
    let logprobs = logprobs(&fields, app)?;
    let variables = template_variables(&fields, app)?;
    let continue_final = fields.flag("continue_final_message").unwrap_or(false);
    let add_generation_prompt = fields.flag("add_generation_prompt").unwrap_or(!continue_final);
    let thinking_budget = thinking_budget(&fields, app)?;
    let include_reasoning = fields.flag("include_reasoning").unwrap_or(true);
    let echo = fields.flag("echo").unwrap_or(false);
    let single_call = fields.flag("parallel_tool_calls") == Some(false);
    if fields.value("chat_template").is_some() {
        let message = "chat_template cannot be given in a request: prompts are rendered with the server's template";
        return Err(ApiError::parameter("chat_template", message));
    }
    for (key, _) in map.iter().filter(|(key, _)| key.starts_with("guided_")) {
        tracing::warn!(field = key.as_str(), "ignored: the field was replaced by structured_outputs");
    }
    problems.check()?;
    if continue_final && add_generation_prompt {
        let message = "continue_final_message and add_generation_prompt exclude each other";
        return Err(ApiError::parameter("continue_final_message", message));
    }
    if continue_final && messages.last().is_none_or(|message| message.role != Role::Assistant) {
        let message = "continue_final_message needs a last message of the assistant";
        return Err(ApiError::parameter("continue_final_message", message));
    }
    let echo = if echo { last_text(&messages) } else { None };
    Ok(Job {
        messages,
        places: Places::default(),
        tools: tools.definitions,
        schemas: tools.schemas,
        tool_mode: tools.mode,
        required_tool: tools.required,
        single_call,
        variables,
        add_generation_prompt,
        logprobs,
        thinking_budget,
        include_reasoning,
        echo,
        common,
    })
}

/// Checks that the model asked for is served here; none asked for is fine.
///
/// # Errors
/// When it is not.
pub fn check_model(fields: &Fields<'_, '_>, app: &App) -> Result<(), ApiError> {
    match fields.text("model") {
        Some(name) if !app.model.served_names.iter().any(|served| served == name) => Err(ApiError::unknown_model(name)),
        _ => Ok(()),
    }
}

/// Text of the last message, if the assistant wrote it.
fn last_text(messages: &[Message]) -> Option<String> {
    let last = messages.last().filter(|message| message.role == Role::Assistant)?;
    match &last.content {
        Content::Text(text) => Some(text.clone()),
        Content::Parts(parts) => Some(
            parts.iter().filter_map(|p| if let Part::Text(text) = p { Some(text.as_str()) } else { None }).collect(),
        ),
    }
}

/// What the request says about tools.
#[derive(Debug)]
pub struct Tools {
    /// Definitions for the template.
    pub definitions: Vec<Value>,
    /// Their schemas.
    pub schemas: ToolSchemas,
    /// What to do with calls.
    pub mode: ToolMode,
    /// Whether a call must come, and of which function.
    pub required: Option<Option<String>>,
}

impl Tools {
    /// Tools and a choice in OpenAI's terms: `auto`, `none`, `required`, or `named`.
    ///
    /// # Errors
    /// When they do not fit each other or the server.
    pub fn new(definitions: Vec<Value>, choice: &Choice, app: &App) -> Result<Self, ApiError> {
        let needs_parser = |message: &str| Err(ApiError::parameter("tool_choice", message));
        let schemas = ToolSchemas::new(&definitions);
        let (mode, required) = match choice {
            Choice::None => (ToolMode::Suppress, None),
            Choice::Auto if !(app.options.auto_tool_choice && app.options.tools) => {
                return needs_parser(
                    "\"auto\" tool choice requires a server with --enable-auto-tool-choice and --tool-call-parser",
                );
            }
            Choice::Auto => (ToolMode::Parse, None),
            Choice::Required | Choice::Named(_) if !app.options.tools => {
                return needs_parser("this tool choice requires a server with --tool-call-parser");
            }
            Choice::Required => (ToolMode::Parse, Some(None)),
            Choice::Named(name) if !schemas.contains(name) => {
                let message = format!("tool_choice names {:?}, which is not among the tools", shorten(name));
                return Err(ApiError::parameter("tool_choice", message));
            }
            Choice::Named(name) => (ToolMode::Parse, Some(Some(name.clone()))),
        };
        Ok(Self { definitions, schemas, mode, required })
    }

    /// No tools at all.
    #[must_use]
    pub fn none() -> Self {
        Self { definitions: Vec::new(), schemas: ToolSchemas::default(), mode: ToolMode::Off, required: None }
    }
}

/// Whether and what to call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The model decides.
    Auto,
    /// Nothing.
    None,
    /// Something.
    Required,
    /// This function.
    Named(String),
}

fn read_tools(fields: &Fields<'_, '_>, app: &App) -> Result<Tools, ApiError> {
    let choice = match fields.value("tool_choice") {
        None => None,
        Some(Value::String(word)) => Some(match word.as_str() {
            "auto" => Choice::Auto,
            "none" => Choice::None,
            "required" => Choice::Required,
            other => {
                let message =
                    format!("tool_choice must be none, auto, required or a function, got {:?}", shorten(other));
                return Err(ApiError::parameter("tool_choice", message));
            }
        }),
        Some(object) => {
            let name = object["function"]["name"].as_str().or_else(|| object["name"].as_str());
            let Some(name) = name else {
                fields.wrong("tool_choice", "a word or {\"type\": \"function\", \"function\": {\"name\"}}", object);
                return Ok(Tools::none());
            };
            Some(Choice::Named(name.to_owned()))
        }
    };
    let Some(list) = fields.list("tools") else {
        return match choice {
            None | Some(Choice::None) => Ok(Tools::none()),
            Some(_) => Err(ApiError::parameter("tool_choice", "tool_choice needs tools")),
        };
    };
    if list.is_empty() {
        return Err(ApiError::parameter("tools", "tools must not be empty; leave the field out instead"));
    }
    for (index, tool) in list.iter().enumerate() {
        let name = tool["function"]["name"].as_str();
        if name.is_none_or(str::is_empty) {
            fields.problems().add(format!("tools[{index}].function.name"), "expected the name of a function");
        }
        let parameters = &tool["function"]["parameters"];
        if !(parameters.is_null() || parameters.is_object()) {
            fields.problems().add(format!("tools[{index}].function.parameters"), "expected a JSON schema object");
        }
        for (key, fits, expected) in [
            ("description", Value::is_string as fn(&Value) -> bool, "text"),
            ("strict", Value::is_boolean, "true or false"),
        ] {
            let value = &tool["function"][key];
            if !(value.is_null() || fits(value)) {
                fields.problems().add(format!("tools[{index}].function.{key}"), format!("expected {expected}"));
            }
        }
    }
    fields.problems().check()?;
    Tools::new(list.to_vec(), &choice.unwrap_or(Choice::Auto), app)
}

fn logprobs(fields: &Fields<'_, '_>, app: &App) -> Result<Option<u32>, ApiError> {
    let wanted = fields.flag("logprobs").unwrap_or(false);
    let top = fields.integer("top_logprobs");
    match (wanted, top) {
        (false, Some(top)) if top != 0 => Err(ApiError::parameter("top_logprobs", "top_logprobs needs logprobs=true")),
        (false, _) => Ok(None),
        (true, top) => top_count(app, "top_logprobs", top.unwrap_or(0)).map(Some),
    }
}

fn template_variables(fields: &Fields<'_, '_>, app: &App) -> Result<Map<String, Value>, ApiError> {
    let mut variables = app.options.template_kwargs.clone();
    if let Some(effort) = fields.text("reasoning_effort") {
        check_effort("reasoning_effort", effort)?;
        set_effort(&mut variables, effort, app);
    }
    if let Some(kwargs) = fields.object("chat_template_kwargs") {
        // The conversation itself is not a variable that a client may replace.
        let reserved = ["messages", "tools", "add_generation_prompt"];
        let free = kwargs.map().iter().filter(|(key, _)| !reserved.contains(&key.as_str()));
        variables.extend(free.map(|(key, value)| (key.clone(), value.clone())));
    }
    if let Some(documents) = fields.list("documents") {
        variables.insert("documents".to_owned(), Value::Array(documents.to_vec()));
    }
    Ok(variables)
}

/// Checks that there is such an effort.
///
/// # Errors
/// Where there is not, naming the field.
pub fn check_effort(field: &str, effort: &str) -> Result<(), ApiError> {
    if EFFORTS.contains(&effort) {
        return Ok(());
    }
    let message = format!("{field} must be one of {}, got {:?}", EFFORTS.join(", "), shorten(effort));
    Err(ApiError::parameter(field, message))
}

/// Where a client wrote the messages, which errors name.
#[derive(Clone, Debug)]
pub struct Places {
    /// The field that holds them.
    pub field: &'static str,
    /// Places of messages that were made of other items, one for each; that of a tool's output may end in `output`, which is
    /// its content.
    pub each: Vec<String>,
}

impl Default for Places {
    fn default() -> Self {
        Self { field: "messages", each: Vec::new() }
    }
}

impl Places {
    /// Reads messages that were made of other items.
    ///
    /// # Errors
    /// As [`parse_messages`].
    pub fn parse(&self, messages: Vec<Value>) -> Result<Vec<Message>, ApiError> {
        parse_messages(&Value::Array(messages)).map_err(|mut error| {
            if let TextError::Message { path, .. } = &mut error {
                *path = self.path(path);
            }
            error.into()
        })
    }

    /// The error with the place that the client knows.
    #[must_use]
    pub fn of(&self, mut error: ApiError) -> ApiError {
        error.param = error.param.map(|path| self.path(&path));
        error
    }

    fn path(&self, path: &str) -> String {
        if path == "messages" {
            return self.field.to_owned();
        }
        let rest = path.strip_prefix("messages[").and_then(|rest| rest.split_once(']'));
        let found = rest.and_then(|(index, rest)| Some((self.each.get(index.parse::<usize>().ok()?)?, rest)));
        let Some((place, rest)) = found else { return path.to_owned() };
        let output = place.ends_with(".output").then(|| rest.strip_prefix(".content")).flatten();
        format!("{place}{}", output.unwrap_or(rest))
    }
}

/// Sets the template's effort, renamed as the server's options say.
pub fn set_effort(variables: &mut Map<String, Value>, effort: &str, app: &App) {
    let value = app.options.effort_map.get(effort).cloned().unwrap_or_else(|| effort.into());
    variables.insert("reasoning_effort".to_owned(), value);
}

fn thinking_budget(fields: &Fields<'_, '_>, app: &App) -> Result<Option<u32>, ApiError> {
    match fields.integer("thinking_token_budget") {
        None => Ok(app.options.thinking_budget),
        Some(-1) => Ok(None),
        Some(value) => u32::try_from(value).map(Some).map_err(|_| {
            let message = format!("thinking_token_budget must be at least 0, or -1 for no limit, got {value}");
            ApiError::parameter("thinking_token_budget", message)
        }),
    }
}
