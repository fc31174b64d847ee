//! Random input: bodies, stop strings, answers.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

mod support;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use glimmer_server::stops::{Piece, StopFilter};
use proptest::prelude::*;
use serde_json::{Value, json};
use support::{Server, format, join_chat, join_whole, options, post, script_in_steps, tools, user};

/// JSON of any shape.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(|number| json!(number)),
        "[ -~\u{e9}<>|]{0,12}".prop_map(Value::from),
        prop::sample::select(vec!["user", "assistant", "tool", "auto", "text", "image_url", "function", "<think>"])
            .prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 6, |inner| {
        let key = prop::sample::select(vec![
            "role",
            "content",
            "type",
            "text",
            "image_url",
            "url",
            "function",
            "name",
            "arguments",
            "tool_calls",
            "parameters",
            "json_schema",
            "schema",
            "source",
            "input",
            "x",
        ]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..4)
                .prop_map(|pairs| Value::Object(pairs.into_iter().map(|(k, v)| (k.to_owned(), v)).collect())),
        ]
    })
}

const FIELDS: [&str; 40] = [
    "messages",
    "model",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "stream",
    "stream_options",
    "response_format",
    "structured_outputs",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "chat_template_kwargs",
    "thinking_token_budget",
    "prompt",
    "echo",
    "input",
    "instructions",
    "system",
    "thinking",
    "stop_sequences",
    "truncate_prompt_tokens",
    "bad_words",
    "allowed_token_ids",
    "text",
    "tokens",
];

const ROUTES: [&str; 7] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
];

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Cases of a property; `PROPTEST_CASES` asks for more, which fixed numbers would not hear.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(200)
}

/// A file that is nearly a picture: a real one with bytes changed and its end cut off, or a known beginning and noise.
fn nearly_a_picture() -> impl Strategy<Value = Vec<u8>> {
    let real = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/goldens/micro/image_direct.png"));
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6);
    let changed = (changes, any::<prop::sample::Index>(), any::<bool>()).prop_map(move |(changes, end, cut)| {
        let mut bytes = real.to_vec();
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        bytes.truncate(if cut { end.index(bytes.len()) } else { bytes.len() });
        bytes
    });
    let beginnings: Vec<&'static [u8]> = vec![
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        b"\xff\xd8\xff\xe0\0\x10JFIF\0",
        b"GIF89a",
        b"RIFF\x40\0\0\0WEBPVP8 ",
        b"BM",
        b"",
    ];
    let noise = (prop::sample::select(beginnings), prop::collection::vec(any::<u8>(), 0..200))
        .prop_map(|(beginning, noise)| [beginning, &noise].concat());
    prop_oneof![changed, noise]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    #[test]
    fn no_picture_makes_the_server_fail(file in nearly_a_picture(), media_type in prop::sample::select(vec!["png", "jpeg", "webp", "gif", "x"])) {
        let server = Server::saying("a</think>b");
        let url = format!("data:image/{media_type};base64,{}", STANDARD.encode(&file));
        let parts = json!([{"type": "image_url", "image_url": {"url": url}}]);
        let reply = runtime().block_on(server.chat(json!({"messages": [{"role": "user", "content": parts}]})));
        let status = reply.status.as_u16();
        prop_assert!(status == 200 || status == 400, "{status} {}", reply.text);
    }

    #[test]
    fn no_body_makes_the_server_fail(
        route in prop::sample::select(ROUTES.to_vec()),
        valid in any::<bool>(),
        fields in prop::collection::vec((prop::sample::select(FIELDS.to_vec()), any_json()), 0..5),
    ) {
        let server = Server::saying("a</think>b");
        let mut body = if valid {
            json!({"messages": user("x"), "prompt": "x", "input": "x", "max_tokens": 5, "tokens": [1]})
        } else {
            json!({})
        };
        for (key, value) in fields {
            body[key] = value;
        }
        let reply = runtime().block_on(server.post(route, body.clone()));
        let status = reply.status.as_u16();
        prop_assert!(status == 200 || status == 400 || status == 404, "{status} {body} {}", reply.text);
        prop_assert!(status == 200 || reply.text.len() < 8000, "{}", reply.text.len());
        prop_assert_eq!(server.app.in_flight(), 0);
    }

    #[test]
    fn no_text_makes_the_server_fail(route in prop::sample::select(ROUTES.to_vec()), body in "\\PC{0,60}") {
        let reply = runtime().block_on(async { Server::saying("a").send(post(route, &body)).await });
        prop_assert_eq!(reply.status.as_u16(), 400);
    }

    #[test]
    fn a_stream_is_the_whole_for_any_answer(
        parts in prop::collection::vec(prop::sample::select(vec![
            "a", " b", "\u{e9}\u{1f600}", "\n", "</think>", "<think>", "<tool_call>", "</tool_call>", "get_weather", "get_time",
            "search", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "city", "n", "12", "{\"x\": 1}", "stop",
        ]), 0..24),
        step in 1_usize..6,
        stop in prop::option::of(prop::sample::select(vec!["stop", "b", "12", "\u{1f600}"])),
    ) {
        let answer: String = parts.concat();
        let one = script_in_steps(&answer, 1);
        let many = script_in_steps(&answer, step);
        let body = |stream: bool| json!({"messages": user("x"), "tools": tools(), "stop": stop, "stream": stream});
        let (whole, streamed) = runtime().block_on(async {
            let whole = Server::new(options(), move |_| Ok(one.clone())).chat(body(false)).await;
            let streamed = Server::new(options(), move |_| Ok(many.clone())).chat(body(true)).await;
            (whole, streamed)
        });
        prop_assert_eq!(join_chat(&streamed.chunks(), 0), join_whole(&whole.ok(), 0));
    }

    #[test]
    fn stop_strings_cut_the_text_wherever_tokens_do(
        text in "[ab \u{e9}]{0,24}",
        stops in prop::collection::vec("[ab \u{e9}]{1,4}", 1..4),
        include in any::<bool>(),
    ) {
        let format = format();
        let tokenizer = format.tokenizer();
        // What the definition says: the match that ends first, of those the longest.
        let ends = (0..=text.len()).filter(|&end| text.is_char_boundary(end));
        let found = ends.filter_map(|end| {
            stops.iter().filter(|stop| text[..end].ends_with(stop.as_str())).map(|stop| (end, end - stop.len())).min_by_key(|&(_, start)| start)
        }).next();
        let expected = match found {
            Some((end, start)) => text[..if include { end } else { start }].to_owned(),
            None => text.clone(),
        };
        // Whole tokens, and one token a byte, where the vocabulary has one.
        let whole = tokenizer.encode_ordinary(&text).unwrap();
        let bytes: Option<Vec<u32>> = text.bytes().map(|byte| {
            (0..3328).find(|&id| tokenizer.token_bytes(id) == Some(&[byte][..]) && !tokenizer.is_added(id))
        }).collect();
        for ids in [Some(whole), bytes].into_iter().flatten() {
            let mut filter = StopFilter::new(tokenizer, &stops, include, true);
            let mut pieces = Vec::new();
            let stopped = ids.iter().any(|&id| filter.push(id, true, &mut pieces).is_some());
            if !stopped {
                filter.finish(&mut pieces);
            }
            prop_assert_eq!(stopped, found.is_some());
            let mut detokenizer = tokenizer.detokenizer(true);
            let mut out = String::new();
            for piece in &pieces {
                match piece {
                    Piece::Token(id) => detokenizer.push(*id, &mut out),
                    Piece::Text(text) => out.push_str(text),
                }
            }
            prop_assert!(!detokenizer.is_pending());
            prop_assert_eq!(&out, &expected);
        }
    }
}
