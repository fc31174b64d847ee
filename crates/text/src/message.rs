//! Chat messages, typed, read from OpenAI-style JSON and written as the template wants them.
//!
//! Reading is lenient where clients differ (a missing or null `content` is empty text, `reasoning` and
//! `reasoning_content` are one field, `arguments` may be JSON text or an object) and strict where silence would change the
//! prompt: an unknown role, a part without its payload or arguments that are not an object are errors that name the place.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::TextError;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Instructions; `developer` is read as this, too.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name that templates test for.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// Where an image or a video comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MediaSource {
    /// A URL as the client wrote it; `data:` URLs are decoded by [`DataUrl`](crate::DataUrl).
    Url(String),
    /// A part without a source: the caller supplies the item separately, in order.
    Supplied,
}

/// One part of a message.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Text.
    Text(String),
    /// An image.
    Image(MediaSource),
    /// A video.
    Video(MediaSource),
    /// Of a tool's message, an object that is handed to the template as it is: outputs of several tool calls, tool references.
    Other(Map<String, Value>),
}

/// What a message says.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Plain text.
    Text(String),
    /// A list of parts.
    Parts(Vec<Part>),
}

/// A tool call in the history.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Id that the result refers to.
    pub id: Option<String>,
    /// Name of the function.
    pub name: String,
    /// Arguments, in the order in which they were written.
    pub arguments: Map<String, Value>,
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said.
    pub content: Content,
    /// The reasoning before the answer, of assistant messages.
    pub reasoning: Option<String>,
    /// Tool calls, of assistant messages.
    pub tool_calls: Vec<ToolCall>,
    /// The call that a tool message answers.
    pub tool_call_id: Option<String>,
    /// Name of the speaker or of the tool.
    pub name: Option<String>,
}

impl Message {
    /// A message of plain text.
    #[must_use]
    pub fn text(role: Role, text: impl Into<String>) -> Self {
        let content = Content::Text(text.into());
        Self { role, content, reasoning: None, tool_calls: Vec::new(), tool_call_id: None, name: None }
    }

    /// Reads one message; `path` names it in errors, for example `messages[3]`.
    ///
    /// # Errors
    /// [`TextError::Message`].
    pub fn from_json(value: &Value, path: &str) -> Result<Self, TextError> {
        let Some(map) = value.as_object() else { return Err(wrong(path, "a message object", value)) };
        let at = |key: &str| format!("{path}.{key}");
        let role = match map.get("role").and_then(Value::as_str) {
            Some("system" | "developer") => Role::System,
            Some("user") => Role::User,
            Some("assistant") => Role::Assistant,
            Some("tool") => Role::Tool,
            _ => {
                let expected = "one of system, developer, user, assistant, tool";
                return Err(wrong(&at("role"), expected, map.get("role").unwrap_or(&Value::Null)));
            }
        };
        let reasoning = match optional_text(map, "reasoning", path)? {
            Some(text) => Some(text),
            None => optional_text(map, "reasoning_content", path)?,
        };
        Ok(Self {
            role,
            content: content(map.get("content").unwrap_or(&Value::Null), &at("content"), role == Role::Tool)?,
            reasoning,
            tool_calls: tool_calls(map.get("tool_calls").unwrap_or(&Value::Null), &at("tool_calls"))?,
            tool_call_id: optional_text(map, "tool_call_id", path)?,
            name: optional_text(map, "name", path)?,
        })
    }

    /// The message as the template reads it: content is never null, arguments are objects, and media carry no data.
    #[must_use]
    pub fn to_template(&self) -> Value {
        let mut map = Map::new();
        map.insert("role".to_owned(), self.role.name().into());
        map.insert("content".to_owned(), self.content.to_template());
        if let Some(reasoning) = &self.reasoning {
            map.insert("reasoning_content".to_owned(), reasoning.as_str().into());
        }
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(ToolCall::to_template).collect();
            map.insert("tool_calls".to_owned(), Value::Array(calls));
        }
        if let Some(id) = &self.tool_call_id {
            map.insert("tool_call_id".to_owned(), id.as_str().into());
        }
        if let Some(name) = &self.name {
            map.insert("name".to_owned(), name.as_str().into());
        }
        Value::Object(map)
    }

    /// Sources of the images in this message, in order.
    pub fn images(&self) -> impl Iterator<Item = &MediaSource> {
        self.content.parts().iter().filter_map(|part| if let Part::Image(source) = part { Some(source) } else { None })
    }

    /// Sources of the videos in this message, in order.
    pub fn videos(&self) -> impl Iterator<Item = &MediaSource> {
        self.content.parts().iter().filter_map(|part| if let Part::Video(source) = part { Some(source) } else { None })
    }
}

impl TryFrom<Value> for Message {
    type Error = TextError;

    fn try_from(value: Value) -> Result<Self, TextError> {
        Self::from_json(&value, "message")
    }
}

impl From<Message> for Value {
    /// OpenAI-style JSON that reads back as the same message.
    fn from(message: Message) -> Self {
        let mut value = message.to_template();
        if let (Self::Object(map), Content::Parts(parts)) = (&mut value, &message.content) {
            map.insert("content".to_owned(), Self::Array(parts.iter().map(Part::to_json).collect()));
        }
        value
    }
}

/// Reads the `messages` list of a request.
///
/// # Errors
/// [`TextError::Message`] naming the message by its index.
pub fn parse_messages(value: &Value) -> Result<Vec<Message>, TextError> {
    let Some(list) = value.as_array() else { return Err(wrong("messages", "a list of messages", value)) };
    list.iter().enumerate().map(|(index, item)| Message::from_json(item, &format!("messages[{index}]"))).collect()
}

impl Content {
    /// The parts; none for plain text.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        match self {
            Self::Text(_) => &[],
            Self::Parts(parts) => parts,
        }
    }

    /// The text, if there is nothing else.
    #[must_use]
    pub fn plain_text(&self) -> Option<String> {
        match self {
            Self::Text(text) => Some(text.clone()),
            Self::Parts(parts) => {
                parts.iter().map(|part| if let Part::Text(text) = part { Some(text.as_str()) } else { None }).collect()
            }
        }
    }

    fn to_template(&self) -> Value {
        match self {
            Self::Text(text) => text.as_str().into(),
            Self::Parts(parts) => Value::Array(parts.iter().map(Part::to_template).collect()),
        }
    }
}

impl Part {
    fn to_template(&self) -> Value {
        match self {
            Self::Text(text) => serde_json::json!({"type": "text", "text": text}),
            Self::Image(_) => serde_json::json!({"type": "image"}),
            Self::Video(_) => serde_json::json!({"type": "video"}),
            Self::Other(map) => Value::Object(map.clone()),
        }
    }

    fn to_json(&self) -> Value {
        match self {
            Self::Image(MediaSource::Url(url)) => serde_json::json!({"type": "image_url", "image_url": {"url": url}}),
            Self::Video(MediaSource::Url(url)) => serde_json::json!({"type": "video_url", "video_url": {"url": url}}),
            other => other.to_template(),
        }
    }
}

impl ToolCall {
    fn to_template(&self) -> Value {
        let mut map = Map::new();
        if let Some(id) = &self.id {
            map.insert("id".to_owned(), id.as_str().into());
        }
        map.insert("type".to_owned(), "function".into());
        let function = serde_json::json!({"name": self.name, "arguments": self.arguments});
        map.insert("function".to_owned(), function);
        Value::Object(map)
    }
}

fn content(value: &Value, path: &str, tool: bool) -> Result<Content, TextError> {
    match value {
        Value::Null => Ok(Content::Text(String::new())),
        Value::String(text) => Ok(Content::Text(text.clone())),
        Value::Array(items) => {
            let parts = items.iter().enumerate().map(|(index, item)| part(item, &format!("{path}[{index}]"), tool));
            parts.collect::<Result<_, _>>().map(Content::Parts)
        }
        other => Err(wrong(path, "text, a list of parts or null", other)),
    }
}

fn part(value: &Value, path: &str, tool: bool) -> Result<Part, TextError> {
    let map = match value {
        Value::String(text) => return Ok(Part::Text(text.clone())),
        Value::Object(map) => map,
        other => return Err(wrong(path, "a part object or text", other)),
    };
    match map.get("type").and_then(Value::as_str) {
        Some("text" | "input_text" | "output_text") => match map.get("text") {
            Some(Value::String(text)) => Ok(Part::Text(text.clone())),
            other => Err(wrong(&format!("{path}.text"), "text", other.unwrap_or(&Value::Null))),
        },
        Some(kind @ ("image" | "image_url")) => Ok(Part::Image(media_source(map, kind, "image", path)?)),
        Some(kind @ ("video" | "video_url")) => Ok(Part::Video(media_source(map, kind, "video", path)?)),
        Some("input_image") => Ok(Part::Image(media_source(map, "image_url", "image", path)?)),
        Some("refusal") => match map.get("refusal") {
            Some(Value::String(text)) => Ok(Part::Text(text.clone())),
            other => Err(wrong(&format!("{path}.refusal"), "text", other.unwrap_or(&Value::Null))),
        },
        Some("tool_reference") if tool => Ok(Part::Other(map.clone())),
        None if tool && map.contains_key("output") => Ok(Part::Other(map.clone())),
        // Without a type the key says what it is.
        None if map.get("type").is_none_or(Value::is_null) => {
            let keys = ["text", "image_url", "image", "video_url", "video"];
            match keys.into_iter().find(|key| map.contains_key(*key)) {
                Some(kind) => {
                    let mut typed = map.clone();
                    typed.insert("type".to_owned(), kind.into());
                    part(&Value::Object(typed), path, tool)
                }
                None => Err(wrong(&format!("{path}.type"), PARTS, &Value::Null)),
            }
        }
        _ => Err(wrong(&format!("{path}.type"), PARTS, &map["type"])),
    }
}

/// Parts of a message that are known.
const PARTS: &str =
    "one of text, image_url, video_url, input_text, output_text, input_image, refusal (of a tool: tool_reference)";

/// Finds the URL in the forms `{"image_url": {"url": U}}`, `{"image_url": U}`, `{"image": U}` and `{"url": U}`.
fn media_source(map: &Map<String, Value>, kind: &str, family: &str, path: &str) -> Result<MediaSource, TextError> {
    let url_key = format!("{family}_url");
    for key in [url_key.as_str(), family, "url"] {
        match map.get(key) {
            None | Some(Value::Null) => {}
            Some(Value::String(url)) => return Ok(MediaSource::Url(url.clone())),
            Some(Value::Object(inner)) => {
                return match inner.get("url") {
                    Some(Value::String(url)) => Ok(MediaSource::Url(url.clone())),
                    other => Err(wrong(&format!("{path}.{key}.url"), "a URL", other.unwrap_or(&Value::Null))),
                };
            }
            Some(other) => return Err(wrong(&format!("{path}.{key}"), "a URL or an object with url", other)),
        }
    }
    if kind == family {
        return Ok(MediaSource::Supplied);
    }
    Err(wrong(&format!("{path}.{kind}"), "a URL or an object with url", &Value::Null))
}

fn tool_calls(value: &Value, path: &str) -> Result<Vec<ToolCall>, TextError> {
    let items = match value {
        Value::Null => return Ok(Vec::new()),
        Value::Array(items) => items,
        other => return Err(wrong(path, "a list of tool calls", other)),
    };
    items.iter().enumerate().map(|(index, item)| tool_call(item, &format!("{path}[{index}]"))).collect()
}

fn tool_call(value: &Value, path: &str) -> Result<ToolCall, TextError> {
    let Some(map) = value.as_object() else { return Err(wrong(path, "a tool call object", value)) };
    let (function, path) = match map.get("function") {
        None | Some(Value::Null) => (map, path.to_owned()),
        Some(Value::Object(function)) => (function, format!("{path}.function")),
        Some(other) => return Err(wrong(&format!("{path}.function"), "an object with name and arguments", other)),
    };
    let Some(Value::String(name)) = function.get("name") else {
        let found = function.get("name").unwrap_or(&Value::Null);
        return Err(wrong(&format!("{path}.name"), "the name of a function", found));
    };
    let arguments = arguments(function.get("arguments").unwrap_or(&Value::Null), &format!("{path}.arguments"))?;
    Ok(ToolCall { id: map.get("id").and_then(Value::as_str).map(str::to_owned), name: name.clone(), arguments })
}

fn arguments(value: &Value, path: &str) -> Result<Map<String, Value>, TextError> {
    match value {
        Value::Null => Ok(Map::new()),
        Value::Object(map) => Ok(map.clone()),
        Value::String(text) if text.trim().is_empty() => Ok(Map::new()),
        Value::String(text) => match serde_json::from_str(text) {
            Ok(Value::Object(map)) => Ok(map),
            Ok(other) => Err(wrong(path, "JSON text of an object", &other)),
            Err(error) => Err(TextError::Message {
                path: path.to_owned(),
                expected: "JSON text of an object".to_owned(),
                found: format!("{} ({error})", shorten(text)),
            }),
        },
        other => Err(wrong(path, "an object, or JSON text of one", other)),
    }
}

fn optional_text(map: &Map<String, Value>, key: &str, path: &str) -> Result<Option<String>, TextError> {
    match map.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => Err(wrong(&format!("{path}.{key}"), "text or null", other)),
    }
}

fn wrong(path: &str, expected: &str, found: &Value) -> TextError {
    let found = match found {
        Value::Null => "nothing".to_owned(),
        other => shorten(&other.to_string()),
    };
    TextError::Message { path: path.to_owned(), expected: expected.to_owned(), found }
}

/// Requests may be megabytes; their errors are not.
fn shorten(text: &str) -> String {
    const LIMIT: usize = 80;
    if text.chars().count() <= LIMIT {
        return text.to_owned();
    }
    let head: String = text.chars().take(LIMIT).collect();
    format!("{head}...")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> Result<Message, TextError> {
        Message::from_json(&value, "messages[0]")
    }

    #[test]
    fn null_and_missing_content_are_empty_text() {
        for value in [json!({"role": "assistant"}), json!({"role": "assistant", "content": null})] {
            let message = read(value).unwrap();
            assert_eq!(message.content, Content::Text(String::new()));
            assert_eq!(message.to_template(), json!({"role": "assistant", "content": ""}));
        }
    }

    #[test]
    fn both_names_of_the_reasoning_field_are_read_and_the_first_wins() {
        for (value, expected) in [
            (json!({"role": "assistant", "reasoning_content": "a"}), "a"),
            (json!({"role": "assistant", "reasoning": "b"}), "b"),
            (json!({"role": "assistant", "reasoning": "b", "reasoning_content": "a"}), "b"),
        ] {
            assert_eq!(read(value).unwrap().reasoning.as_deref(), Some(expected));
        }
    }

    #[test]
    fn arguments_are_objects_or_their_json_text() {
        for arguments in [json!({"b": 1, "a": "x"}), json!(" {\"b\": 1, \"a\": \"x\"} ")] {
            let value = json!({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]});
            let message = read(value).unwrap();
            let keys: Vec<_> = message.tool_calls[0].arguments.keys().cloned().collect();
            assert_eq!(keys, ["b", "a"]);
        }
        for arguments in [json!(""), json!(null), json!({})] {
            let value = json!({"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]});
            assert!(read(value).unwrap().tool_calls[0].arguments.is_empty());
        }
    }

    #[test]
    fn bad_messages_name_the_place() {
        let call = |arguments: Value| json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]});
        for (value, needle) in [
            (json!(3), "messages[0]: expected a message object, found 3"),
            (json!({"role": "boss"}), "messages[0].role: expected one of"),
            (json!({"content": "x"}), "messages[0].role"),
            (json!({"role": "user", "content": 5}), "messages[0].content: expected text"),
            (json!({"role": "user", "content": [1]}), "messages[0].content[0]"),
            (json!({"role": "user", "content": [{"type": "text"}]}), "messages[0].content[0].text"),
            (json!({"role": "user", "content": [{"type": "image_url"}]}), "messages[0].content[0].image_url"),
            (
                json!({"role": "user", "content": [{"type": "input_audio"}]}),
                "content[0].type: expected one of text, image",
            ),
            (json!({"role": "user", "content": [{"type": 3}]}), "messages[0].content[0].type: expected one of"),
            (json!({"role": "user", "content": [{}]}), "messages[0].content[0].type: expected one of"),
            (json!({"role": "user", "content": [{"type": "tool_reference"}]}), "messages[0].content[0].type"),
            (json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}), "image_url.url"),
            (json!({"role": "user", "name": 3}), "messages[0].name"),
            (
                call(json!("{")),
                "messages[0].tool_calls[0].function.arguments: expected JSON text of an object, found {",
            ),
            (call(json!("[1]")), "found [1]"),
            (call(json!(7)), "expected an object, or JSON text of one, found 7"),
            (json!({"role": "assistant", "tool_calls": [{"function": {}}]}), "tool_calls[0].function.name"),
            (json!({"role": "assistant", "tool_calls": {}}), "tool_calls: expected a list"),
        ] {
            let error = read(value).unwrap_err().to_string();
            assert!(error.contains(needle), "{error}");
        }
        let error = parse_messages(&json!([{"role": "user"}, {"role": ""}])).unwrap_err().to_string();
        assert!(error.starts_with("messages[1].role"), "{error}");
    }

    #[test]
    fn media_sources_in_all_spellings() {
        for value in [
            json!({"type": "image_url", "image_url": {"url": "u"}}),
            json!({"type": "image_url", "image_url": "u"}),
            json!({"type": "image", "image": "u"}),
            json!({"type": "image", "url": "u"}),
            json!({"type": "input_image", "image_url": "u"}),
            json!({"image_url": {"url": "u"}}),
        ] {
            let message = read(json!({"role": "user", "content": [value]})).unwrap();
            assert_eq!(message.images().collect::<Vec<_>>(), [&MediaSource::Url("u".to_owned())]);
        }
        let message = read(json!({"role": "user", "content": [{"type": "image"}, {"type": "video"}]})).unwrap();
        assert_eq!((message.images().count(), message.videos().count()), (1, 1));
    }

    #[test]
    fn messages_survive_a_round_trip_through_json() {
        let value = json!({
            "role": "assistant", "content": [{"type": "text", "text": "t"}, {"type": "image_url", "image_url": {"url": "u"}}],
            "reasoning_content": "r", "name": "n", "tool_call_id": "i",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": [1.5]}}}],
        });
        let message: Message = serde_json::from_value(value).unwrap();
        let again: Message = serde_json::from_value(serde_json::to_value(&message).unwrap()).unwrap();
        assert_eq!(again, message);
    }

    #[test]
    fn long_garbage_is_shortened_in_errors() {
        let error = read(json!({"role": "x".repeat(10_000)})).unwrap_err().to_string();
        assert!(error.len() < 300, "{}", error.len());
    }
}
