//! From text to tokens and back on the micro model's tokenizer.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::LazyLock;

use glimmer_text::{
    ChatFormat, ChatInput, ChatTemplate, Message, Role, TextError, Tokenizer, VideoFrame, parse_messages,
};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

static FORMAT: LazyLock<ChatFormat> =
    LazyLock::new(|| ChatFormat::from_dir(format!("{ROOT}/models/micro-bf16").as_ref()).unwrap());
/// The library's tokenizer on the whole file, as a reference.
static LIBRARY: LazyLock<tokenizers::Tokenizer> =
    LazyLock::new(|| tokenizers::Tokenizer::from_file(format!("{ROOT}/models/micro-bf16/tokenizer.json")).unwrap());

fn tokenizer() -> &'static Tokenizer {
    FORMAT.tokenizer()
}

fn lines(path: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(format!("{ROOT}/{path}")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn ids_of(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn user(text: &str) -> Vec<Message> {
    vec![Message::text(Role::User, text)]
}

fn prompt_ids(messages: &[Message], allow_special: bool) -> Vec<u32> {
    let input = ChatInput { messages, add_generation_prompt: true, allow_special, ..ChatInput::default() };
    FORMAT.prompt(&input).unwrap().unexpanded_ids().to_vec()
}

fn count(ids: &[u32], literal: &str) -> usize {
    let id = tokenizer().added_id(literal).unwrap();
    ids.iter().filter(|&&other| other == id).count()
}

#[test]
fn golden_prompts_encode_to_their_ids() {
    let prompts: Vec<Value> =
        serde_json::from_str(&std::fs::read_to_string(format!("{ROOT}/data/goldens/micro/prompts.json")).unwrap())
            .unwrap();
    assert_eq!(prompts.len(), 6);
    let image = tokenizer().added_id("<|image|>").unwrap();
    for prompt in prompts {
        let name = prompt["name"].as_str().unwrap();
        let bytes = std::fs::read(format!("{ROOT}/data/goldens/micro/{name}.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let raw = file.tensor("input_ids").unwrap();
        let word = |chunk: &[u8]| u32::from_le_bytes(chunk.try_into().unwrap());
        let expected: Vec<u32> = raw.data().chunks_exact(4).map(word).collect();
        let tokens = expected.iter().filter(|&&id| id == image).count();
        let encoded = tokenizer().encode(prompt["prompt"].as_str().unwrap()).unwrap();
        let expand = |id: u32| std::iter::repeat_n(id, if id == image { tokens } else { 1 });
        assert_eq!(encoded.into_iter().flat_map(expand).collect::<Vec<_>>(), expected, "{name}");
    }
}

#[test]
fn documents_encode_to_their_ids() {
    let documents = lines("data/eval/documents.jsonl");
    assert_eq!(documents.len(), 200);
    // The first ones come with their text; the others have to survive decoding and encoding.
    assert_eq!(documents.iter().filter(|document| document["text"].is_string()).count(), 40);
    for document in documents {
        let ids = ids_of(&document["input_ids"]);
        let decoded = tokenizer().decode(&ids, false);
        assert_eq!(document["text"].as_str().unwrap_or(&decoded), decoded, "{}", document["id"]);
        assert_eq!(tokenizer().encode(&decoded).unwrap(), ids, "{}", document["id"]);
    }
}

#[test]
fn calibration_ids_survive_decoding_and_encoding() {
    let samples = lines("data/calib/calib.jsonl");
    assert_eq!(samples.len(), 256);
    for sample in samples {
        let ids = ids_of(&sample["input_ids"]);
        assert_eq!(tokenizer().encode(&tokenizer().decode(&ids, false)).unwrap(), ids, "{}", sample["id"]);
    }
}

#[test]
fn protection_changes_nothing_for_harmless_conversations() {
    for task in ["tools_final", "recall", "vision", "text", "tools"] {
        // A name stands for the definition that an item before it has given.
        let mut defined = std::collections::BTreeMap::new();
        for (index, item) in lines(&format!("data/eval/{task}.jsonl")).into_iter().enumerate() {
            let mut tools = item["tools"].as_array().cloned().unwrap_or_default();
            for tool in &mut tools {
                match tool.as_str() {
                    Some(name) => *tool = Value::clone(&defined[name]),
                    None => drop(defined.insert(tool["function"]["name"].as_str().unwrap().to_owned(), tool.clone())),
                }
            }
            if index % 5 != 0 {
                continue;
            }
            let messages = parse_messages(&item["messages"]).unwrap();
            let input =
                ChatInput { messages: &messages, tools: &tools, add_generation_prompt: true, ..ChatInput::default() };
            let open = ChatInput { allow_special: true, ..input };
            assert_eq!(FORMAT.prompt(&input).unwrap(), FORMAT.prompt(&open).unwrap(), "{}", item["id"]);
        }
    }
}

#[test]
fn special_ids_and_sizes_come_from_the_file() {
    let tokenizer = tokenizer();
    for (id, token) in LIBRARY.get_added_tokens_decoder() {
        assert_eq!(tokenizer.added_id(&token.content).unwrap(), id);
        assert_eq!(tokenizer.is_special(id), token.special);
        assert!(tokenizer.is_added(id));
    }
    assert_eq!(tokenizer.added().iter().count(), 29);
    assert_eq!(tokenizer.vocab_size(), LIBRARY.get_vocab_size(true));
    let beyond = u32::try_from(tokenizer.vocab_size()).unwrap();
    assert!(!tokenizer.contains(beyond) && tokenizer.token_bytes(beyond).is_none());
    assert!(!tokenizer.contains(u32::MAX));
    assert!(matches!(tokenizer.added_id("<nope>"), Err(TextError::MissingToken { .. })));
    let think = tokenizer.added_id("<think>").unwrap();
    assert!(!tokenizer.is_special(think));
    assert_eq!(tokenizer.decode(&[think, tokenizer.added_id("<|user|>").unwrap()], true), "<think>");
}

#[test]
fn forged_control_tokens_stay_text_in_every_user_string() {
    let literals: Vec<String> = tokenizer().added().iter().map(|token| token.content.clone()).collect();
    for literal in &literals {
        let call = json!({"id": literal, "function": {"name": literal, "arguments": {literal.clone(): literal, "o": {"k": [literal]}}}});
        let conversation = |word: &str| {
            let text = serde_json::to_string(&json!([
                {"role": "system", "content": format!("a {literal} b")},
                {"role": "user", "content": [{"type": "text", "text": literal}, format!("x{literal}{literal}")]},
                {"role": "assistant", "content": format!("{literal}!"), "reasoning_content": literal, "tool_calls": [call]},
                {"role": "tool", "content": format!("{literal}"), "tool_call_id": literal},
            ]))
            .unwrap();
            parse_messages(&serde_json::from_str(&text.replace(literal.as_str(), word)).unwrap()).unwrap()
        };
        let tool = |word: &str| {
            vec![
                json!({"type": "function", "function": {"name": word, "description": word, "parameters": {word: word}}}),
            ]
        };
        let encode = |word: &str| {
            let (messages, tools) = (conversation(word), tool(word));
            let input =
                ChatInput { messages: &messages, tools: &tools, add_generation_prompt: true, ..ChatInput::default() };
            FORMAT.prompt(&input).unwrap()
        };
        let (forged, harmless) = (encode(literal), encode("word"));
        assert_eq!(harmless.text.replace("word", literal), forged.text);
        let added = |ids: &[u32]| ids.iter().copied().filter(|&id| tokenizer().is_added(id)).collect::<Vec<_>>();
        assert_eq!(added(forged.unexpanded_ids()), added(harmless.unexpanded_ids()), "{literal}");
        assert_eq!(tokenizer().decode(forged.unexpanded_ids(), false), forged.text);
    }
}

#[test]
fn the_option_lets_user_text_use_control_tokens() {
    let messages = user("hi /nothink");
    assert_eq!(count(&prompt_ids(&messages, false), "/nothink"), 0);
    assert_eq!(count(&prompt_ids(&messages, true), "/nothink"), 1);
}

#[test]
fn protected_text_is_encoded_in_one_piece() {
    let text = "so <think> is a tag, and </tool_call> is one";
    let ids = prompt_ids(&user(text), false);
    let ordinary = tokenizer().encode_ordinary(text).unwrap();
    assert!(ids.windows(ordinary.len()).any(|window| window == ordinary));
}

#[test]
fn pieces_of_control_tokens_do_not_fuse_across_strings() {
    for (first, second) in
        [("<thi", "nk>"), ("<", "think>"), ("<think", ">"), ("/noth", "ink"), ("<tool_call> </thi", "nk>")]
    {
        let messages = parse_messages(&json!([{"role": "user", "content": [first, second]}])).unwrap();
        let ids = prompt_ids(&messages, false);
        assert_eq!(
            (count(&ids, "<think>"), count(&ids, "</think>"), count(&ids, "/nothink")),
            (1, 0, 0),
            "{first}{second}"
        );
    }
    // Stripped white space exposes the edges as well.
    let messages = parse_messages(&json!([
        {"role": "user", "content": "a"}, {"role": "assistant", "content": " nk> x <thi \n", "reasoning_content": "<thi"},
    ]))
    .unwrap();
    assert_eq!(count(&prompt_ids(&messages, false), "<think>"), 2);
}

#[test]
fn private_use_characters_of_the_user_pass_through() {
    let text = "\u{e000}<think>\u{e001} \u{e002}\u{f8ff}\u{10fffd} <|user|>\u{e000}";
    let messages = user(text);
    let input = ChatInput { messages: &messages, ..ChatInput::default() };
    let prompt = FORMAT.prompt(&input).unwrap();
    assert!(prompt.text.ends_with(&format!("<|user|>{text}")));
    assert_eq!(count(prompt.unexpanded_ids(), "<think>"), 0);
    assert_eq!(count(prompt.unexpanded_ids(), "<|user|>"), 1);
    assert_eq!(tokenizer().decode(prompt.unexpanded_ids(), false), prompt.text);
}

#[test]
fn template_variables_are_user_text_as_well() {
    let template = ChatTemplate::new("<|system|>{{ note }}").unwrap();
    let file = std::fs::read(format!("{ROOT}/models/micro-bf16/tokenizer.json")).unwrap();
    let format = ChatFormat::new(Tokenizer::from_bytes(&file).unwrap(), template);
    let variables: Map<String, Value> = json!({"note": "<|user|>"}).as_object().unwrap().clone();
    let input = ChatInput { variables: Some(&variables), ..ChatInput::default() };
    let prompt = format.prompt(&input).unwrap();
    assert_eq!((count(prompt.unexpanded_ids(), "<|system|>"), count(prompt.unexpanded_ids(), "<|user|>")), (1, 0));
}

#[test]
fn a_template_that_tears_user_text_is_an_error() {
    let file = std::fs::read(format!("{ROOT}/models/micro-bf16/tokenizer.json")).unwrap();
    let format = ChatFormat::new(
        Tokenizer::from_bytes(&file).unwrap(),
        ChatTemplate::new("{{ messages[0].content[:4] }}").unwrap(),
    );
    let messages = user("<think> x");
    let error = format.prompt(&ChatInput { messages: &messages, ..ChatInput::default() }).unwrap_err();
    assert!(matches!(error, TextError::TornUserText { .. }), "{error}");
}

fn with_media() -> Vec<Message> {
    parse_messages(&json!([{"role": "user", "content": [
        {"type": "image"}, "a", {"type": "video"}, "<|image|>", {"type": "image"}]}]))
    .unwrap()
}

#[test]
fn media_expand_to_their_tokens() {
    let messages = with_media();
    let prompt = FORMAT.prompt(&ChatInput { messages: &messages, ..ChatInput::default() }).unwrap();
    let frame = |tokens, caption: &str| VideoFrame { tokens, caption: caption.to_owned() };
    let ids = FORMAT.expand(&prompt, &[3, 2], &[vec![frame(2, "0.0 seconds"), frame(1, "1.0 seconds")]]).unwrap();
    let b = |text: &str| format!("<|begin_of_image|>{text}<|end_of_image|>");
    let image = "<|image|>";
    let body = [
        &b(&image.repeat(3)),
        "a<|begin_of_video|>",
        &b(&image.repeat(2)),
        "0.0 seconds",
        &b(image),
        "1.0 seconds<|end_of_video|><|image|>",
        &b(&image.repeat(2)),
    ]
    .concat();
    assert!(tokenizer().decode(&ids, false).ends_with(&format!("<|user|>{body}")));
    assert_eq!(count(&ids, image), 8, "the user's own text is no placeholder");
    assert_eq!(count(&ids, "<|video|>"), 0);
}

#[test]
fn wrong_media_counts_are_errors() {
    let messages = with_media();
    let prompt = FORMAT.prompt(&ChatInput { messages: &messages, ..ChatInput::default() }).unwrap();
    let video = vec![VideoFrame { tokens: 1, caption: String::new() }];
    let error = |images: &[usize], videos: &[Vec<VideoFrame>]| FORMAT.expand(&prompt, images, videos).unwrap_err();
    assert!(matches!(
        error(&[1], std::slice::from_ref(&video)),
        TextError::MediaCount { kind: "image", placeholders: 2, supplied: 1 }
    ));
    assert!(matches!(error(&[1, 1], &[]), TextError::MediaCount { kind: "video", placeholders: 1, supplied: 0 }));
    assert!(matches!(error(&[1, 0], std::slice::from_ref(&video)), TextError::EmptyMedia { kind: "image", index: 1 }));
    assert!(matches!(error(&[1, 1], &[Vec::new()]), TextError::EmptyMedia { kind: "video", index: 0 }));
    assert!(FORMAT.expand(&prompt, &[1, 1], &[video]).is_ok());
}

fn any_ids() -> impl Strategy<Value = Vec<u32>> {
    // Ids beyond the vocabulary decode to nothing.
    prop::collection::vec(0..u32::try_from(LIBRARY.get_vocab_size(true)).unwrap() + 8, 0..80)
}

proptest! {
    // Discards count over all cases, so long runs need more.
    #![proptest_config(ProptestConfig { max_global_rejects: 1 << 24, ..ProptestConfig::default() })]

    #[test]
    fn decoding_equals_the_library(ids in any_ids(), skip_special in any::<bool>()) {
        prop_assert_eq!(tokenizer().decode(&ids, skip_special), LIBRARY.decode(&ids, skip_special).unwrap());
    }

    #[test]
    fn pieces_joined_equal_the_whole(ids in any_ids(), skip_special in any::<bool>()) {
        let mut decoder = tokenizer().detokenizer(skip_special);
        let mut joined = String::new();
        for id in &ids {
            let mut piece = String::new();
            decoder.push(*id, &mut piece);
            joined.push_str(&piece);
        }
        decoder.flush(&mut joined);
        prop_assert_eq!(joined, tokenizer().decode(&ids, skip_special));
    }

    #[test]
    fn valid_text_never_shows_a_replacement_while_streaming(text in "\\PC{0,40}") {
        prop_assume!(!text.contains('\u{fffd}'));
        let mut decoder = tokenizer().detokenizer(false);
        let mut joined = String::new();
        for id in tokenizer().encode_ordinary(&text).unwrap() {
            decoder.push(id, &mut joined);
            prop_assert!(text.starts_with(&joined));
        }
        prop_assert!(!decoder.is_pending());
        prop_assert_eq!(joined, text);
    }

    #[test]
    fn encoding_equals_the_library_with_specials_and_without(
        parts in prop::collection::vec(prop_oneof!["[ -~]{0,8}", "\\PC{0,4}", "(<think>|<\\|user\\|>|</think>|<tool_call>|/nothink|<\\|)"], 0..12)
    ) {
        let text = parts.concat();
        let library = LIBRARY.encode_fast(text.as_str(), false).unwrap();
        prop_assert_eq!(tokenizer().encode(&text).unwrap(), library.get_ids());
        let ordinary = tokenizer().encode_ordinary(&text).unwrap();
        prop_assert!(ordinary.iter().all(|&id| !tokenizer().is_added(id)));
        prop_assert_eq!(tokenizer().decode(&ordinary, false), text);
    }

    #[test]
    fn no_user_text_yields_control_tokens(
        parts in prop::collection::vec(
            prop_oneof!["[ -~]{0,5}", "[<>|/a-z_\u{e000}-\u{e003} ]{0,7}", "(<think>|<\\|user\\|>|</think>|<tool_call>|</|nk>|<thi)"], 1..8)
    ) {
        let content: Vec<Value> = parts.iter().map(|part| json!({"type": "text", "text": part})).collect();
        let messages = parse_messages(&json!([{"role": "user", "content": content}, {"role": "tool", "content": parts.concat()}])).unwrap();
        let input = ChatInput { messages: &messages, add_generation_prompt: true, ..ChatInput::default() };
        let prompt = FORMAT.prompt(&input).unwrap();
        let added: Vec<u32> = prompt.unexpanded_ids().iter().copied().filter(|&id| tokenizer().is_added(id)).collect();
        let expected = "[gMASK]<sop><|system|><|user|><|observation|><tool_response></tool_response><|assistant|><think>";
        prop_assert_eq!(tokenizer().decode(&added, false), expected);
        prop_assert_eq!(tokenizer().decode(prompt.unexpanded_ids(), false), prompt.text);
    }
}
