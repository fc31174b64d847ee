//! What an answer says, however it came: in one piece or as a stream, by whichever API.

use serde_json::{Map, Value, json};

/// What must be equal whenever a request is repeated: everything but names, times and what the cache did.
///
/// # Errors
/// An answer that is none, in words.
pub(super) fn essence(path: &str, stream: bool, body: &[u8]) -> Result<Value, String> {
    let text = std::str::from_utf8(body).map_err(|_| "an answer that is not UTF-8".to_owned())?;
    let parse = |text: &str| serde_json::from_str::<Value>(text).map_err(|error| format!("{error} in {text:?}"));
    let whole = match (path, stream) {
        (_, false) => parse(text)?,
        ("/v1/messages", true) => message(&events(text)?)?,
        ("/v1/responses", true) => {
            let last = events(text)?.pop().unwrap_or_default();
            match last["type"].as_str() {
                Some("response.completed" | "response.incomplete") => last["response"].clone(),
                _ => return Err(format!("a stream that ends with {last}")),
            }
        }
        _ => {
            let (events, end) = text.split_at(text.len() - text.len().min(END.len()));
            if end != END {
                return Err(format!("a stream that ends with {end:?}"));
            }
            choices(&self::events(events)?)?
        }
    };
    let said = match path {
        "/v1/messages" => json!([whole["content"], whole["stop_reason"], whole["stop_sequence"]]),
        "/v1/responses" => json!([whole["output"], whole["status"]]),
        _ => Value::Array(whole["choices"].as_array().into_iter().flatten().map(choice).collect()),
    };
    Ok(without_names(&said))
}

/// Behind the last event of OpenAI's first two APIs.
const END: &str = "data: [DONE]\n\n";

fn events(text: &str) -> Result<Vec<Value>, String> {
    let mut events = Vec::new();
    for block in text.split_terminator("\n\n").filter(|block| !block.starts_with(':')) {
        let data = block.lines().find_map(|line| line.strip_prefix("data: "));
        let data = data.ok_or_else(|| format!("an event without data: {block:?}"))?;
        let event: Value = serde_json::from_str(data).map_err(|error| format!("{error} in {data:?}"))?;
        if event.get("error").is_some_and(|error| !error.is_null()) {
            return Err(format!("an error in a stream: {event}"));
        }
        events.push(event);
    }
    Ok(events)
}

/// Appends `piece` to the text under a key.
fn join(to: &mut Value, key: &str, piece: &Value) {
    if let Some(piece) = piece.as_str() {
        let joined = format!("{}{piece}", to[key].as_str().unwrap_or_default());
        to[key] = joined.into();
    }
}

/// Chunks of chat or completions as one answer.
fn choices(events: &[Value]) -> Result<Value, String> {
    let mut choices: Vec<Value> = Vec::new();
    for found in events.iter().flat_map(|event| event["choices"].as_array().into_iter().flatten()) {
        let index = found["index"].as_u64().unwrap_or(0) as usize;
        while choices.len() <= index {
            choices.push(json!({"message": {"tool_calls": []}, "finish_reason": null}));
        }
        let choice = &mut choices[index];
        join(choice, "text", &found["text"]);
        let delta = &found["delta"];
        for key in ["content", "reasoning"] {
            join(&mut choice["message"], key, &delta[key]);
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let number = call["index"].as_u64().unwrap_or(0) as usize;
            let Value::Array(calls) = &mut choice["message"]["tool_calls"] else { continue };
            if number == calls.len() {
                calls
                    .push(json!({"type": "function", "function": {"name": call["function"]["name"], "arguments": ""}}));
            }
            let Some(open) = calls.get_mut(number) else { return Err(format!("a call out of order: {call}")) };
            join(&mut open["function"], "arguments", &call["function"]["arguments"]);
        }
        if !found["finish_reason"].is_null() {
            choice["finish_reason"] = found["finish_reason"].clone();
            choice["stop_reason"] = found["stop_reason"].clone();
        }
    }
    if choices.is_empty() || choices.iter().any(|choice| choice["finish_reason"].is_null()) {
        return Err("a stream without an end".to_owned());
    }
    Ok(json!({ "choices": choices }))
}

/// What a choice of chat or completions says. Nothing and empty text are the same.
fn choice(choice: &Value) -> Value {
    let filled = |value: &Value| if value == "" { Value::Null } else { value.clone() };
    let message = &choice["message"];
    let calls: Vec<Value> =
        message["tool_calls"].as_array().into_iter().flatten().map(|c| c["function"].clone()).collect();
    json!({
        "text": filled(&choice["text"]), "content": filled(&message["content"]), "reasoning": filled(&message["reasoning"]),
        "calls": calls, "finish": choice["finish_reason"], "stop": choice["stop_reason"],
    })
}

/// Anthropic's events as one message.
fn message(events: &[Value]) -> Result<Value, String> {
    let mut message = json!({"content": []});
    let mut inputs: Vec<String> = Vec::new();
    let mut ended = false;
    for event in events {
        let index = event["index"].as_u64().unwrap_or(0) as usize;
        match event["type"].as_str().unwrap_or_default() {
            "content_block_start" => {
                let Value::Array(blocks) = &mut message["content"] else { continue };
                blocks.push(event["content_block"].clone());
                inputs.push(String::new());
            }
            "content_block_delta" => {
                let Some(block) = message["content"].get_mut(index) else {
                    return Err(format!("a delta without a block: {event}"));
                };
                let delta = &event["delta"];
                for key in ["text", "thinking", "signature"] {
                    join(block, key, &delta[key]);
                }
                inputs[index].push_str(delta["partial_json"].as_str().unwrap_or_default());
            }
            "message_delta" => {
                for key in ["stop_reason", "stop_sequence"] {
                    message[key] = event["delta"][key].clone();
                }
            }
            "message_stop" => ended = true,
            _ => {}
        }
    }
    for (index, input) in inputs.iter().enumerate().filter(|(_, input)| !input.is_empty()) {
        message["content"][index]["input"] = serde_json::from_str(input).unwrap_or_else(|_| Value::Object(Map::new()));
    }
    if ended { Ok(message) } else { Err("a message without an end".to_owned()) }
}

/// The value without what the server names afresh each time.
fn without_names(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let named = |key: &str| matches!(key, "id" | "call_id" | "item_id");
            map.iter().filter(|(key, _)| !named(key)).map(|(key, inner)| (key.clone(), without_names(inner))).collect()
        }
        Value::Array(list) => list.iter().map(without_names).collect(),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(events: &[Value], end: &str) -> Vec<u8> {
        let events: Vec<String> = events.iter().map(|event| format!("data: {event}\n\n")).collect();
        format!(": keep-alive\n\n{}{end}", events.concat()).into_bytes()
    }

    #[test]
    fn a_chat_stream_says_what_the_whole_says() {
        let delta = |delta: Value| json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]});
        let call = |fields: Value| delta(json!({"tool_calls": [fields]}));
        let events = [
            delta(json!({"role": "assistant", "content": ""})),
            delta(json!({"reasoning": "a", "reasoning_content": "a"})),
            delta(json!({"reasoning": "b"})),
            call(json!({"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": ""}})),
            call(json!({"index": 0, "function": {"arguments": "{\"a\""}})),
            call(json!({"index": 0, "function": {"arguments": ": 1}"}})),
            json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls", "stop_reason": null}]}),
        ];
        let whole = json!({"id": "y", "choices": [{"index": 0, "message": {"content": null, "reasoning": "ab", "tool_calls":
            [{"id": "z", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]}, "finish_reason": "tool_calls",
            "stop_reason": null}]});
        let path = "/v1/chat/completions";
        let streamed = essence(path, true, &stream(&events, END)).expect("an answer");
        assert_eq!(streamed, essence(path, false, whole.to_string().as_bytes()).expect("an answer"));
        assert!(essence(path, true, &stream(&events, "")).is_err(), "no [DONE]");
        assert!(essence(path, true, &stream(&events[..6], END)).is_err(), "no finish_reason");
        let failed = [json!({"error": {"message": "no"}})];
        assert!(essence(path, true, &stream(&failed, END)).expect_err("an error").contains("no"));
    }

    #[test]
    fn a_message_stream_says_what_the_whole_says() {
        let events = [
            json!({"type": "message_start", "message": {}}),
            json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
            json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}),
            json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "b"}}),
            json!({"type": "content_block_start", "index": 1, "content_block":
                {"type": "tool_use", "id": "t", "name": "f", "input": {}}}),
            json!({"type": "content_block_delta", "index": 1, "delta":
                {"type": "input_json_delta", "partial_json": "{\"a\": 1}"}}),
            json!({"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": null}}),
            json!({"type": "message_stop"}),
        ];
        let whole = json!({"content": [{"type": "text", "text": "ab"}, {"type": "tool_use", "id": "u", "name": "f",
            "input": {"a": 1}}], "stop_reason": "tool_use", "stop_sequence": null});
        let streamed = essence("/v1/messages", true, &stream(&events, "")).expect("an answer");
        assert_eq!(streamed, essence("/v1/messages", false, whole.to_string().as_bytes()).expect("an answer"));
        assert!(essence("/v1/messages", true, &stream(&events[..7], "")).is_err());
    }

    #[test]
    fn a_response_stream_ends_with_the_whole() {
        let response = json!({"id": "r", "status": "completed", "output": [{"id": "m", "type": "message"}]});
        let events = [json!({"type": "response.created"}), json!({"type": "response.completed", "response": response})];
        let streamed = essence("/v1/responses", true, &stream(&events, "")).expect("an answer");
        assert_eq!(streamed, essence("/v1/responses", false, response.to_string().as_bytes()).expect("an answer"));
        assert!(essence("/v1/responses", true, &stream(&events[..1], "")).is_err());
    }
}
