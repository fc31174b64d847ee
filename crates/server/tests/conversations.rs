//! `/v1/messages` and `/v1/responses`.

#![allow(clippy::needless_pass_by_value, reason = "test helpers take JSON literals by value")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

mod support;

use serde_json::{Value, json};
use support::{Server, cut, options, script_in_steps, tokens, user};

const ANSWER: &str = "Look it up.</think>Let me see. <tool_call>get_weather<arg_key>city</arg_key><arg_value>Par\"is</arg_value></tool_call>";

fn anthropic_tools() -> Value {
    json!([{"name": "get_weather", "description": "d", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}])
}

fn message(change: Value) -> Value {
    let mut body = json!({"model": "micro", "max_tokens": 2000, "messages": user("x"), "tools": anthropic_tools()});
    for (key, value) in change.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

#[tokio::test]
async fn a_whole_message() {
    let server = Server::saying(ANSWER);
    let mut body = server.post("/v1/messages", message(json!({}))).await.ok();
    assert!(body["id"].as_str().unwrap().starts_with("msg_"));
    let call = body["content"][2]["id"].as_str().unwrap().to_owned();
    assert!(call.starts_with("toolu_"));
    body["id"] = "ID".into();
    let (prompt, count) = (server.engine.seen()[0].prompt.len(), tokens(ANSWER).len());
    assert_eq!(
        body,
        json!({
            "id": "ID", "type": "message", "role": "assistant", "model": "micro",
            "content": [
                {"type": "thinking", "thinking": "Look it up.", "signature": "glimmer"},
                {"type": "text", "text": "Let me see. "},
                {"type": "tool_use", "id": call, "name": "get_weather", "input": {"city": "Par\"is"}},
            ],
            "stop_reason": "tool_use", "stop_sequence": null,
            "usage": {"input_tokens": prompt, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": count},
        })
    );
}

/// Blocks of a streamed message, with the rules of the protocol checked on the way.
fn blocks(events: &[(String, Value)]) -> (Vec<Value>, Value) {
    let mut blocks: Vec<Value> = Vec::new();
    let mut open = false;
    let mut end = Value::Null;
    for (name, data) in events {
        assert_eq!(data["type"], name.as_str());
        let index = data["index"].as_u64().map(|index| index as usize);
        match name.as_str() {
            "content_block_start" => {
                assert_eq!((open, index), (false, Some(blocks.len())));
                open = true;
                blocks.push(data["content_block"].clone());
            }
            "content_block_delta" => {
                assert_eq!((open, index), (true, Some(blocks.len() - 1)));
                let (block, delta) = (blocks.last_mut().unwrap(), &data["delta"]);
                let (key, text) = match delta["type"].as_str().unwrap() {
                    "thinking_delta" => ("thinking", &delta["thinking"]),
                    "signature_delta" => ("signature", &delta["signature"]),
                    "text_delta" => ("text", &delta["text"]),
                    "input_json_delta" => ("json", &delta["partial_json"]),
                    other => panic!("{other}"),
                };
                block[key] = format!("{}{}", block[key].as_str().unwrap_or_default(), text.as_str().unwrap()).into();
            }
            "content_block_stop" => {
                assert_eq!((open, index), (true, Some(blocks.len() - 1)));
                open = false;
            }
            "message_delta" => end = data.clone(),
            "message_start" | "message_stop" | "ping" => {}
            other => panic!("{other}"),
        }
    }
    assert!(!open);
    for block in &mut blocks {
        if let Some(text) = block.as_object_mut().unwrap().remove("json") {
            block["input"] = serde_json::from_str(text.as_str().unwrap()).unwrap();
        }
    }
    (blocks, end)
}

#[tokio::test]
async fn a_streamed_message_equals_the_whole_at_any_step() {
    let without_id = |blocks: &mut Vec<Value>| blocks.iter_mut().for_each(|block| block["id"] = Value::Null);
    for step in [1, 2, 3, 100] {
        let script = script_in_steps(ANSWER, step);
        let server = Server::new(options(), move |_| Ok(script.clone()));
        let whole = server.post("/v1/messages", message(json!({}))).await.ok();
        let reply = server.post("/v1/messages", message(json!({"stream": true}))).await;
        let events = reply.events();
        let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!((names[0], names[1]), ("message_start", "ping"));
        assert_eq!(names[names.len() - 2..], ["message_delta", "message_stop"]);
        assert!(!reply.text.contains("[DONE]"));
        let start = &events[0].1["message"];
        assert_eq!(
            (&start["content"], &start["stop_reason"], &start["role"]),
            (&json!([]), &Value::Null, &json!("assistant"))
        );
        let (mut streamed, end) = blocks(&events);
        let mut expected = whole["content"].as_array().unwrap().clone();
        without_id(&mut streamed);
        without_id(&mut expected);
        assert_eq!(streamed, expected);
        assert_eq!(end["delta"], json!({"stop_reason": "tool_use", "stop_sequence": null}));
        assert_eq!(end["usage"], whole["usage"]);
    }
}

#[tokio::test]
async fn reasons_to_stop() {
    let plain = Server::saying("a</think>one two");
    let end = |body: Value| (body["stop_reason"].clone(), body["stop_sequence"].clone());
    let body = plain.post("/v1/messages", message(json!({}))).await.ok();
    assert_eq!(end(body), (json!("end_turn"), Value::Null));
    let body = plain.post("/v1/messages", message(json!({"stop_sequences": ["tw"]}))).await.ok();
    assert_eq!(end(body), (json!("stop_sequence"), json!("tw")));
    let body = plain.post("/v1/messages", message(json!({"max_tokens": 2}))).await.ok();
    assert_eq!(end(body), (json!("max_tokens"), Value::Null));
    let partial = Server::new(options(), |_| Ok(cut("a<tool_call>get_weather<arg_key>city</arg_key><arg_value>P")));
    let body = partial.post("/v1/messages", message(json!({}))).await.ok();
    assert_eq!(body["content"][1]["input"], json!({}));
    assert_eq!(end(body), (json!("max_tokens"), Value::Null), "never tool_use for a call that is not whole");
}

#[tokio::test]
async fn blocks_become_messages() {
    let server = Server::saying("a</think>b");
    let png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC";
    let messages = json!([
        {"role": "user", "content": [
            {"type": "text", "text": "Weather?"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Call.", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "One moment."},
            {"type": "tool_use", "id": "t", "name": "get_weather", "input": {"city": "Rome"}}]},
        {"role": "user", "content": [
            {"type": "text", "text": "and then?"},
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "18C"}]}]},
    ]);
    let system = json!([{"type": "text", "text": "Be brief."}]);
    let body = message(json!({"messages": messages, "system": system, "output_config": {"effort": "high"}}));
    server.post("/v1/messages", body.clone()).await.ok();
    let request = &server.engine.seen()[0];
    let text = server.app.model.format.tokenizer().decode(&request.prompt, false);
    for part in [
        "Reasoning Effort: High",
        "<|system|>Be brief.<|user|>Weather?<|begin_of_image|><|image|>",
        "<|end_of_image|><|assistant|><think>Call.</think>One moment.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>",
        "<|observation|><tool_response>18C</tool_response><|user|>and then?<|assistant|><think>",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!((request.media.len(), request.media[0].tokens), (1, 16));
    let mut count = body;
    count.as_object_mut().unwrap().remove("max_tokens");
    let counted = server.post("/v1/messages/count_tokens", count).await.ok();
    assert_eq!(counted, json!({"input_tokens": request.prompt.len()}));
}

/// Shapes, efforts, and answers that the client has begun.
#[tokio::test]
async fn output_is_configured_and_goes_on_with_what_is_there() {
    let server = Server::saying("a</think>b");
    let ask = |change: Value| server.post("/v1/messages", message(change));
    let of = |kind: &str| json!({"output_config": {"format": {"type": kind, "schema": {"type": "object"}}}});
    ask(of("json_schema")).await.ok();
    let shape = server.engine.seen().pop().unwrap().structure;
    assert!(format!("{shape:?}").contains("JsonSchema"), "{shape:?}");
    let refused = |reply: support::Reply| reply.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(refused(ask(of("text")).await).starts_with("output_config.format.type"));
    assert!(refused(ask(json!({"output_config": {"effort": "zzz"}})).await).starts_with("output_config.effort"));
    ask(json!({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "1 + 2 ="}]}))
        .await
        .ok();
    let prompt = server.app.model.format.tokenizer().decode(&server.engine.seen().pop().unwrap().prompt, false);
    assert!(prompt.ends_with("1 + 2 ="), "{prompt}");
}

#[tokio::test]
async fn thinking_is_a_budget() {
    let server = Server::saying("a</think>b");
    for (thinking, budget) in [
        (json!({"type": "enabled", "budget_tokens": 1024}), Some(1024)),
        (json!({"type": "adaptive"}), None),
        (json!({"type": "disabled"}), None),
    ] {
        server.post("/v1/messages", message(json!({ "thinking": thinking }))).await.ok();
        assert_eq!(server.engine.seen().last().unwrap().thinking_budget, budget);
    }
    let off = server.app.model.format.tokenizer().decode(&server.engine.seen()[2].prompt, false);
    assert!(off.contains("Reasoning Effort: Low") && off.ends_with("<think></think>"), "{off}");
}

#[tokio::test]
async fn bad_messages_are_refused_in_the_dialect() {
    let server = Server::saying("a");
    for (body, status, needle) in [
        (json!({"messages": user("x")}), 400, "max_tokens: the field is required"),
        (json!({"max_tokens": 5}), 400, "messages: expected at least one message"),
        (message(json!({"messages": [{"role": "boss", "content": "x"}]})), 400, "messages[0].role"),
        (message(json!({"messages": [{"role": "user", "content": 5}]})), 400, "messages[0].content"),
        (
            message(json!({"messages": [{"role": "user", "content": [{"type": "audio"}]}]})),
            400,
            "messages[0].content[0].type",
        ),
        (message(json!({"thinking": {"type": "enabled", "budget_tokens": 100}})), 400, "at least 1024"),
        (message(json!({"thinking": {"type": "enabled", "budget_tokens": 3000}})), 400, "max_tokens must be greater"),
        (message(json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]})), 400, "run at Anthropic"),
        (message(json!({"tools": [{"name": "f"}]})), 400, "tools[0].input_schema"),
        (message(json!({"tool_choice": {"type": "tool", "name": "other"}})), 400, "not among the tools"),
        (message(json!({"tools": [], "tool_choice": {"type": "any"}})), 400, "tool_choice needs tools"),
        (message(json!({"stop_sequences": [""]})), 400, "stop_sequences"),
        (
            message(json!({"messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": "x"}]}]})),
            400,
            "messages[1].content[0].input: expected an object",
        ),
        (message(json!({"system": [{"type": "image"}]})), 400, "system[0].type"),
        (message(json!({"tools": [{"name": "f", "input_schema": {}, "strict": "x"}]})), 400, "tools[0].strict"),
        (
            message(
                json!({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": 5}]}]}),
            ),
            400,
            "messages[0].content[0].content: expected text",
        ),
        (
            message(json!({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 5}]}]})),
            400,
            "messages[0].content[0].tool_use_id",
        ),
        (
            message(json!({"messages": [{"role": "assistant", "content": [{"type": "text"}]}]})),
            400,
            "messages[0].content[0].text",
        ),
        (message(json!({"request_id": "x".repeat(65)})), 400, "1 to 64 visible"),
        (message(json!({"model": "claude"})), 404, "The model `claude` does not exist."),
    ] {
        let reply = server.post("/v1/messages", body).await;
        let found = reply.json();
        assert_eq!((reply.status.as_u16(), &found["type"]), (status, &json!("error")), "{found}");
        let kind = if status == 404 { "not_found_error" } else { "invalid_request_error" };
        assert_eq!(found["error"]["type"], kind);
        assert!(found["error"]["message"].as_str().unwrap().contains(needle), "{found}");
    }
}

fn response_tools() -> Value {
    json!([{"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}])
}

#[tokio::test]
async fn a_whole_response() {
    let server = Server::saying(ANSWER);
    let request = json!({"input": "x", "instructions": "Be brief.", "tools": response_tools(), "metadata": {"k": "v"}});
    let body = server.post("/v1/responses", request).await.ok();
    assert!(body["id"].as_str().unwrap().starts_with("resp_"));
    assert_eq!(
        (&body["object"], &body["status"], &body["metadata"]),
        (&json!("response"), &json!("completed"), &json!({"k": "v"}))
    );
    let output = body["output"].as_array().unwrap();
    assert_eq!(output[0]["content"], json!([{"type": "reasoning_text", "text": "Look it up."}]));
    assert_eq!(output[1]["content"][0]["text"], "Let me see. ");
    assert_eq!((&output[2]["type"], &output[2]["name"]), (&json!("function_call"), &json!("get_weather")));
    assert_eq!(output[2]["arguments"], "{\"city\": \"Par\\\"is\"}");
    assert_eq!(body["usage"]["output_tokens"], tokens(ANSWER).len());
    let text = server.app.model.format.tokenizer().decode(&server.engine.seen()[0].prompt, false);
    assert!(text.contains("<|system|>Be brief.<|user|>x<|assistant|>"), "{text}");
    let short = server.post("/v1/responses", json!({"input": "x", "max_output_tokens": 2})).await.ok();
    assert_eq!(
        (&short["status"], &short["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
}

#[tokio::test]
async fn a_streamed_response_equals_the_whole() {
    for step in [1, 3, 100] {
        let script = script_in_steps(ANSWER, step);
        let server = Server::new(options(), move |_| Ok(script.clone()));
        let request = json!({"input": "x", "tools": response_tools(), "stream": true});
        let events = server.post("/v1/responses", request).await.events();
        for (number, (name, data)) in events.iter().enumerate() {
            assert_eq!((&data["sequence_number"], &data["type"]), (&json!(number), &json!(name)));
        }
        let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
        let mut firsts = names.clone();
        firsts.dedup();
        let message = [
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
        ];
        let mut expected = vec!["created".to_owned(), "in_progress".to_owned()];
        expected.extend(message.map(|name| name.replace("output_text", "reasoning_text")));
        expected.extend(message.map(str::to_owned));
        expected.extend(
            [
                "output_item.added",
                "function_call_arguments.delta",
                "function_call_arguments.done",
                "output_item.done",
                "completed",
            ]
            .map(str::to_owned),
        );
        let expected: Vec<String> = expected.iter().map(|name| format!("response.{name}")).collect();
        assert_eq!(firsts, expected);
        let last = &events.last().unwrap().1["response"];
        let done: Vec<&Value> = events
            .iter()
            .filter(|(name, _)| name == "response.output_item.done")
            .map(|(_, data)| &data["item"])
            .collect();
        assert_eq!(last["output"].as_array().unwrap().iter().collect::<Vec<_>>(), done);
        let joined = |name: &str| -> String {
            events.iter().filter(|(found, _)| found == name).filter_map(|(_, data)| data["delta"].as_str()).collect()
        };
        assert_eq!(joined("response.reasoning_text.delta"), "Look it up.");
        assert_eq!(joined("response.output_text.delta"), "Let me see. ");
        assert_eq!(joined("response.function_call_arguments.delta"), "{\"city\": \"Par\\\"is\"}");
        let id = |index: usize| last["output"][index]["id"].as_str().unwrap().to_owned();
        assert!(events.iter().all(|(_, data)| {
            data.get("item_id").is_none_or(|found| *found == id(data["output_index"].as_u64().unwrap() as usize))
        }));
    }
}

#[tokio::test]
async fn items_become_messages() {
    let server = Server::saying("a</think>b");
    let input = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Call."}], "summary": []},
        {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{\"city\": \"Rome\"}"},
        {"type": "function_call_output", "call_id": "c", "output": "18C"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "18C."}]},
        {"role": "user", "content": "Thanks"},
    ]);
    server.post("/v1/responses", json!({"input": input, "reasoning": {"effort": "low"}, "store": true})).await.ok();
    let text = server.app.model.format.tokenizer().decode(&server.engine.seen()[0].prompt, false);
    for part in [
        "Reasoning Effort: Low",
        "<|user|>Weather?<|assistant|><think>Call.</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>",
        "<|observation|><tool_response>18C</tool_response><|assistant|><think></think>18C.<|user|>Thanks<|assistant|>",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[tokio::test]
async fn responses_that_need_memory_are_not_found() {
    let server = Server::saying("a");
    let reply = server.post("/v1/responses", json!({"input": "x", "previous_response_id": "resp_1"})).await;
    assert_eq!(reply.error(), (404, "NotFoundError".to_owned(), Some("previous_response_id".to_owned())));
    assert_eq!(server.get("/v1/responses/resp_1").await.error().0, 404);
    assert_eq!(server.post("/v1/responses/resp_1/cancel", json!({})).await.error().0, 404);
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": "x", "background": true}), "background"),
        (json!({"input": "x", "tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"input": [{"type": "computer_call"}]}), "input[0].type"),
        (json!({"input": "x", "text": {"format": {"type": "json_schema"}}}), "text.format.schema"),
        (json!({"input": "x", "max_output_tokens": 0}), "max_output_tokens"),
        (json!({"input": "x", "reasoning": {"effort": "zzz"}}), "reasoning.effort"),
        (json!({"input": "x", "conversation": "c"}), "conversation"),
        (json!({"input": "x", "prompt": {"id": "p"}}), "prompt"),
        (
            json!({"instructions": "i", "input": [{"role": "user", "content": [{"type": "input_file"}]}]}),
            "input[0].content[0].type",
        ),
        (json!({"input": "x", "parallel_tool_calls": "x"}), "parallel_tool_calls"),
        (json!({"input": "x", "text": {"format": {"type": "json_schema", "schema": false}}}), "text.format"),
        (json!({"input": "x", "max_output_tokens": 9000}), "input"),
        (json!({"input": "x", "tools": response_tools(), "tool_choice": {"type": "function"}}), "tool_choice.name"),
        (json!({"input": [{"role": "assistant", "content": 5}]}), "input[0].content"),
        (json!({"input": [{"role": "assistant", "content": [{"type": "input_file"}]}]}), "input[0].content[0].type"),
        (json!({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}), "input[0].summary[0].type"),
        (
            json!({"instructions": "i", "input": [{"role": "user", "content": ["x", {"type": "input_image", "image_url": "data:,"}]}]}),
            "input[0].content[1]",
        ),
        (
            json!({"input": [{"role": "assistant", "content": "x"}, {"type": "function_call", "name": "f", "arguments": "{"}]}),
            "input[1].arguments",
        ),
        (json!({"input": [{"type": "function_call", "name": 5}]}), "input[0].name"),
        (json!({"input": [{"type": "function_call_output", "call_id": 5, "output": "x"}]}), "input[0].call_id"),
        (
            json!({"input": [{"type": "function_call_output", "output": [{"type": "input_file"}]}]}),
            "input[0].output[0].type",
        ),
        (json!({"input": [{"type": "function_call_output", "output": [{"output": "x"}]}]}), "input[0].output[0].type"),
        (json!({"input": [{"type": "function_call_output", "output": 5}]}), "input[0].output"),
    ] {
        assert_eq!(server.post("/v1/responses", body).await.error().2.as_deref(), Some(param));
    }
}
