//! Answers as models really write them, right and wrong, through the parser token by token and as text at every split.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::LazyLock;

use glimmer_text::{
    Answer, AnswerCall, EngineFinish, Event, OutputParser, ParseOptions, Start, Tokenizer, ToolMode, ToolSchemas,
    UnknownTools, parse_answer,
};
use proptest::prelude::*;
use serde_json::json;

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    Tokenizer::from_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16").as_ref()).unwrap()
});

static TOOLS: LazyLock<ToolSchemas> = LazyLock::new(|| {
    let tool = |name: &str, properties: serde_json::Value| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}});
    let text = json!({"type": "string"});
    ToolSchemas::new(&[
        tool("get_weather", json!({"city": text})),
        tool("get_time", json!({})),
        tool("search", json!({"query": text, "n": {"type": "integer"}})),
        tool("run_command", json!({"command": text})),
    ])
});

use EngineFinish::{Length, Stop};

fn events(ids: &[u32], options: ParseOptions, finish: EngineFinish) -> Vec<Event> {
    let mut parser = OutputParser::new(&TOKENIZER, &TOOLS, options, Start::Reasoning);
    let mut events = Vec::new();
    for &id in ids {
        // A fresh list for each token, as a stream would have it.
        let mut now = Vec::new();
        parser.push(id, &mut now);
        events.extend(now);
    }
    parser.finish(finish, &mut events);
    events
}

fn from_text(pieces: &[&str], options: ParseOptions, finish: EngineFinish) -> Answer {
    let mut parser = OutputParser::new(&TOKENIZER, &TOOLS, options, Start::Reasoning);
    let mut events = Vec::new();
    for piece in pieces {
        parser.push_text(piece, &mut events);
    }
    parser.finish(finish, &mut events);
    Answer::from_events(&events)
}

/// Parses `output` in all ways and checks that they agree.
fn parse_with(output: &str, options: ParseOptions, finish: EngineFinish) -> Answer {
    let ids = TOKENIZER.encode(output).unwrap();
    let whole = parse_answer(&TOKENIZER, &ids, &TOOLS, options, Start::Reasoning, finish);
    assert_eq!(Answer::from_events(&events(&ids, options, finish)), whole, "token by token: {output}");
    for (cut, _) in output.char_indices() {
        let split = from_text(&[&output[..cut], &output[cut..]], options, finish);
        assert_eq!(split, whole, "as text, cut at {cut}: {output}");
    }
    let single: Vec<String> = output.chars().map(String::from).collect();
    let single: Vec<&str> = single.iter().map(String::as_str).collect();
    assert_eq!(from_text(&single, options, finish), whole, "character by character: {output}");
    whole
}

fn parse(output: &str) -> Answer {
    parse_with(output, ParseOptions::default(), Stop)
}

fn answer(reasoning: Option<&str>, content: Option<&str>, calls: &[(&str, &str)]) -> Answer {
    let call = |&(name, arguments): &(&str, &str)| AnswerCall {
        name: name.to_owned(),
        arguments: arguments.to_owned(),
        complete: true,
    };
    Answer {
        reasoning: reasoning.map(str::to_owned),
        content: content.map(str::to_owned),
        calls: calls.iter().map(call).collect(),
    }
}

const WEATHER: &str =
    "I will look<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>";

#[test]
fn case_01_a_call_without_arguments() {
    assert_eq!(parse("ok</think><tool_call>get_time</tool_call>"), answer(Some("ok"), None, &[("get_time", "{}")]));
}

#[test]
fn case_02_a_call_ends_reasoning() {
    let parsed = parse(WEATHER);
    assert_eq!(parsed, answer(Some("I will look"), None, &[("get_weather", r#"{"city": "Paris"}"#)]));
    assert_eq!(parsed.finish_reason(Stop), "tool_calls");
}

#[test]
fn case_03_the_name_comes_once_and_whole() {
    let all = events(&TOKENIZER.encode(WEATHER).unwrap(), ParseOptions::default(), Stop);
    let names: Vec<_> = all
        .iter()
        .filter_map(|e| if let Event::CallStart { name, .. } = e { Some(name.as_str()) } else { None })
        .collect();
    assert_eq!(names, ["get_weather"]);
}

#[test]
fn case_04_the_opening_tag_of_the_key_is_missing() {
    let parsed = parse("x</think><tool_call>run_commandcommand</arg_key><arg_value>ls</arg_value></tool_call>");
    assert_eq!(parsed, answer(Some("x"), None, &[("run_command", r#"{"command": "ls"}"#)]));
}

#[test]
fn case_05_the_opening_tag_of_the_value_is_missing() {
    let parsed = parse("x</think><tool_call>search<arg_key>query</arg_key>how many days</arg_value></tool_call>");
    assert_eq!(parsed, answer(Some("x"), None, &[("search", r#"{"query": "how many days"}"#)]));
}

#[test]
fn case_06_a_stray_closing_tag_and_the_end() {
    let output = "x</think><tool_call>get_time</arg_value>";
    assert_eq!(parse(output), answer(Some("x"), None, &[("get_time", "{}")]));
    let cut = parse_with(output, ParseOptions::default(), Length);
    assert!(cut.calls.is_empty(), "cut off, the name may be half a name");
}

#[test]
fn case_07_a_second_opening_tag_instead_of_a_key() {
    let parsed = parse(
        "x</think><tool_call>run_command<tool_call>command</arg_key><arg_value>whoami && id</arg_value></tool_call>",
    );
    assert_eq!(parsed, answer(Some("x"), None, &[("run_command", r#"{"command": "whoami && id"}"#)]));
}

#[test]
fn case_08_values_take_their_declared_types() {
    let parsed = parse(
        "x</think><tool_call>search<arg_key>query</arg_key><arg_value>123</arg_value>\
         <arg_key>n</arg_key><arg_value>10</arg_value></tool_call>",
    );
    assert_eq!(parsed, answer(Some("x"), None, &[("search", r#"{"query": "123", "n": 10}"#)]));
}

#[test]
fn case_09_newlines_and_backslashes_are_escaped_once() {
    for (value, expected) in [("bla\nbla", r#"{"command": "bla\nbla"}"#), (r"bla\nbla", r#"{"command": "bla\\nbla"}"#)]
    {
        let output = format!(
            "x</think><tool_call>run_command<arg_key>command</arg_key><arg_value>{value}</arg_value></tool_call>"
        );
        let parsed = parse(&output);
        assert_eq!(parsed.calls[0].arguments, expected);
        let object: serde_json::Value = serde_json::from_str(&parsed.calls[0].arguments).unwrap();
        assert_eq!(object["command"], value);
    }
}

#[test]
fn case_10_an_answer_without_think_is_reasoning_and_content() {
    let output = "The answer is 4.";
    assert_eq!(parse(output), answer(Some(output), Some(output), &[]));
    assert_eq!(parse_with(output, ParseOptions::default(), Length), answer(Some(output), None, &[]));
    let off = ParseOptions { answer_without_think_is_content: false, ..ParseOptions::default() };
    assert_eq!(parse_with(output, off, Stop), answer(Some(output), None, &[]));
}

#[test]
fn case_11_stray_closing_think_is_dropped() {
    assert_eq!(parse("</think>1+1=2.</think>1+1=2."), answer(None, Some("1+1=2.1+1=2."), &[]));
}

#[test]
fn case_12_no_markup_reaches_the_content_when_calls_are_suppressed() {
    let options = ParseOptions { tools: ToolMode::Suppress, ..ParseOptions::default() };
    let output = "x</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Dublin</arg_value></tool_call>";
    let parsed = parse_with(output, options, Stop);
    assert_eq!(parsed, answer(Some("x"), None, &[]));
    assert_eq!(parsed.finish_reason(Stop), "stop");
}

#[test]
fn case_13_the_prompt_decides_where_the_answer_starts() {
    let start = |prompt: &str| Start::of_prompt(&TOKENIZER, &TOKENIZER.encode(prompt).unwrap());
    assert_eq!(start("<|user|>x<|assistant|><think>"), Start::Reasoning);
    assert_eq!(start("<|user|>x<|assistant|><think></think>"), Start::Content);
    assert_eq!(start("<|user|>x<|assistant|>"), Start::Content);
    assert_eq!(start("<|assistant|><think><|user|>x"), Start::Content, "only the current turn counts");
    assert_eq!(start("<|assistant|><think>cut off rea"), Start::Reasoning);
    assert_eq!(start(""), Start::Content);
    assert_eq!(parse("thinking\u{2026}</think>Hi"), answer(Some("thinking\u{2026}"), Some("Hi"), &[]));
}

#[test]
fn case_14_a_call_cut_by_the_limit_stays_open() {
    let cut = &WEATHER[..WEATHER.find("is</arg").unwrap()];
    let parsed = parse_with(cut, ParseOptions::default(), Length);
    assert_eq!(parsed.calls[0].arguments, r#"{"city": "Par"#);
    assert!(!parsed.calls[0].complete);
    assert_eq!(parsed.finish_reason(Length), "length");
}

#[test]
fn case_16_text_that_only_looked_like_a_marker_is_flushed() {
    assert_eq!(parse("x</think>see <tool_"), answer(Some("x"), Some("see <tool_"), &[]));
    assert_eq!(parse("x</thin"), answer(Some("x</thin"), Some("x</thin"), &[]));
}

#[test]
fn case_17_unknown_names_follow_the_policy() {
    let output = "x</think><tool_call>nope</tool_call>";
    assert_eq!(parse(output), answer(Some("x"), None, &[("nope", "{}")]));
    let drop = ParseOptions { unknown_tools: UnknownTools::Drop, ..ParseOptions::default() };
    assert_eq!(parse_with(output, drop, Stop), answer(Some("x"), None, &[]));
    assert_eq!(parse("x</think><tool_call>no such name!</tool_call>"), answer(Some("x"), None, &[]), "not well formed");
    assert_eq!(parse("x</think><tool_call></tool_call>"), answer(Some("x"), None, &[]), "never an empty name");
}

#[test]
fn case_18_two_calls_at_once() {
    let parsed = parse(&format!("{WEATHER}<tool_call>get_time</tool_call>"));
    let expected = [("get_weather", r#"{"city": "Paris"}"#), ("get_time", "{}")];
    assert_eq!(parsed, answer(Some("I will look"), None, &expected));
    let single = ParseOptions { single_call: true, ..ParseOptions::default() };
    let parsed = parse_with(&format!("{WEATHER}<tool_call>get_time</tool_call>"), single, Stop);
    assert_eq!(parsed, answer(Some("I will look"), None, &expected[..1]));
}

#[test]
fn case_19_white_space_around_the_name() {
    assert_eq!(parse("x</think><tool_call>get_time\n</tool_call>"), answer(Some("x"), None, &[("get_time", "{}")]));
    let spaced = "x</think>\n<tool_call>\nget_weather\n<arg_key> city </arg_key>\n<arg_value> Paris\n</arg_value>\n</tool_call>\n";
    assert_eq!(parse(spaced), answer(Some("x"), None, &[("get_weather", r#"{"city": " Paris\n"}"#)]));
}

#[test]
fn case_20_markers_spelled_as_ordinary_text_stay_text() {
    let mut ids = TOKENIZER.encode("x</think><tool_call>run_command<arg_key>command</arg_key><arg_value>").unwrap();
    ids.extend(TOKENIZER.encode_ordinary("echo </arg_value></tool_call> <think>").unwrap());
    ids.extend(TOKENIZER.encode("</arg_value></tool_call>").unwrap());
    let parsed = parse_answer(&TOKENIZER, &ids, &TOOLS, ParseOptions::default(), Start::Reasoning, Stop);
    let expected = r#"{"command": "echo </arg_value></tool_call> <think>"}"#;
    assert_eq!(parsed, answer(Some("x"), None, &[("run_command", expected)]));
}

#[test]
fn case_21_characters_cut_across_tokens_come_out_whole() {
    let value = "caf\u{e9} \u{1f469}\u{200d}\u{1f4bb} \u{65e5}";
    let output = format!(
        "x</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>{value}</arg_value></tool_call>{value}"
    );
    let ids = TOKENIZER.encode(&output).unwrap();
    for event in events(&ids, ParseOptions::default(), Stop) {
        if let Event::CallArguments { fragment: text, .. } | Event::Content(text) = event {
            assert!(!text.contains('\u{fffd}'), "{text}");
        }
    }
    assert_eq!(
        parse(&output),
        answer(Some("x"), Some(value), &[("get_weather", &format!(r#"{{"city": "{value}"}}"#))])
    );
}

#[test]
fn case_22_arguments_go_to_their_own_call() {
    let parsed = parse(
        "x</think><tool_call>get_time</tool_call><tool_call>search<arg_key>n</arg_key><arg_value>42</arg_value></tool_call>",
    );
    assert_eq!(parsed, answer(Some("x"), None, &[("get_time", "{}"), ("search", r#"{"n": 42}"#)]));
}

#[test]
fn more_missing_tags() {
    let argument = r#"{"query": "a", "n": 5}"#;
    for output in [
        // No </arg_key>, no </arg_value>, no </arg_value> at the end, no <arg_key> later on.
        "</think><tool_call>search<arg_key>query<arg_value>a</arg_value><arg_key>n</arg_key><arg_value>5</arg_value></tool_call>",
        "</think><tool_call>search<arg_key>query</arg_key><arg_value>a<arg_key>n</arg_key><arg_value>5</arg_value></tool_call>",
        "</think><tool_call>search<arg_key>query</arg_key><arg_value>a</arg_value><arg_key>n</arg_key><arg_value>5</tool_call>",
        "</think><tool_call>search<arg_key>query</arg_key><arg_value>a</arg_value>n</arg_key><arg_value>5</arg_value></tool_call>",
    ] {
        assert_eq!(parse(output), answer(None, None, &[("search", argument)]));
    }
    let unclosed =
        "</think><tool_call>search<arg_key>n</arg_key><arg_value>5</arg_value><tool_call>get_time</tool_call>";
    assert_eq!(parse(unclosed), answer(None, None, &[("search", r#"{"n": 5}"#), ("get_time", "{}")]));
    let doubled = "</think><tool_call>get_time<tool_call>get_weather</tool_call>";
    assert_eq!(parse(doubled), answer(None, None, &[("get_time", "{}"), ("get_weather", "{}")]));
}

#[test]
fn text_around_calls_is_content_and_blank_text_before_them_is_not() {
    let call = "<tool_call>get_time</tool_call>";
    let one = &[("get_time", "{}")][..];
    assert_eq!(parse(&format!("r</think>\n\n{call}\n")), answer(Some("r"), None, one));
    assert_eq!(parse(&format!("r</think>\nHi {call} there")), answer(Some("r"), Some("\nHi  there"), one));
    assert_eq!(parse("r</think>\n"), answer(Some("r"), Some("\n"), &[]));
    assert_eq!(parse("r</think>a<think>b</think>c"), answer(Some("rb"), Some("ac"), &[]));
}

#[test]
fn markup_is_text_when_the_request_has_no_tools() {
    let off = ParseOptions { tools: ToolMode::Off, ..ParseOptions::default() };
    let call = "<tool_call>get_time</tool_call>";
    assert_eq!(parse_with(&format!("r</think>{call}"), off, Stop), answer(Some("r"), Some(call), &[]));
    let raw = ParseOptions { reasoning: false, ..off };
    assert_eq!(
        parse_with(&format!("r</think>{call}"), raw, Stop),
        answer(None, Some(&format!("r</think>{call}")), &[])
    );
}

#[test]
fn a_repeated_key_is_written_twice_and_the_last_one_wins() {
    let parsed = parse(
        "</think><tool_call>search<arg_key>n</arg_key><arg_value>1</arg_value><arg_key>n</arg_key><arg_value>2</arg_value></tool_call>",
    );
    let object: serde_json::Value = serde_json::from_str(&parsed.calls[0].arguments).unwrap();
    assert_eq!(object, json!({"n": 2}));
}

#[test]
fn stop_tokens_add_nothing() {
    assert_eq!(parse_answer_of("r</think>a<|user|>"), answer(Some("r"), Some("a"), &[]));
}

fn parse_answer_of(output: &str) -> Answer {
    let ids = TOKENIZER.encode(output).unwrap();
    parse_answer(&TOKENIZER, &ids, &TOOLS, ParseOptions::default(), Start::Reasoning, Stop)
}

/// Pieces of answers: markers, names, text.
fn piece() -> impl Strategy<Value = String> {
    let markers = prop_oneof![
        Just("<think>"),
        Just("</think>"),
        Just("<tool_call>"),
        Just("</tool_call>"),
        Just("<arg_key>"),
        Just("</arg_key>"),
        Just("<arg_value>"),
        Just("</arg_value>"),
        Just("get_time"),
        Just("search"),
        Just("query"),
        Just("n"),
        Just("\n"),
    ];
    prop_oneof![4 => markers.prop_map(str::to_owned), 1 => "[ -~]{0,4}", 1 => "\\PC{0,2}"]
}

proptest! {
    #[test]
    fn any_sequence_parses_alike_in_all_ways(pieces in prop::collection::vec(piece(), 0..16), by_itself in any::<bool>()) {
        let finish = if by_itself { Stop } else { Length };
        let parsed = parse_with(&pieces.concat(), ParseOptions::default(), finish);
        for call in &parsed.calls {
            prop_assert!(!call.name.is_empty());
            if call.complete {
                let object: Result<serde_json::Map<String, serde_json::Value>, _> = serde_json::from_str(&call.arguments);
                prop_assert!(object.is_ok(), "{}", call.arguments);
            }
        }
        let open: Vec<_> = parsed.calls.iter().rev().skip(1).filter(|call| !call.complete).collect();
        prop_assert!(open.is_empty(), "only the last call may be open");
    }

    #[test]
    fn random_tokens_never_panic(ids in prop::collection::vec(0u32..4000, 0..60)) {
        let whole = parse_answer(&TOKENIZER, &ids, &TOOLS, ParseOptions::default(), Start::Reasoning, Stop);
        prop_assert_eq!(Answer::from_events(&events(&ids, ParseOptions::default(), Stop)), whole);
    }
}
