//! Grammars over the micro model's tokenizer: random legal walks, rollback, and what hostile descriptions come to.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod schema;

use std::sync::LazyLock;

use glimmer_engine::constraint::{Constraint, ConstraintError, Grammars, TokenMask};
use glimmer_engine::request::Structure;
use glimmer_text::{Answer, EngineFinish, GrammarCompiler, ParseOptions, Start, Tokenizer, ToolSchemas, parse_answer};
use proptest::prelude::*;
use serde_json::{Value, json};

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    Tokenizer::from_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16").as_ref()).unwrap()
});
static ENDS: LazyLock<Vec<u32>> = LazyLock::new(|| {
    ["<|endoftext|>", "<|user|>", "<|observation|>"].iter().map(|text| TOKENIZER.added_id(text).unwrap()).collect()
});
static GRAMMARS: LazyLock<GrammarCompiler> = LazyLock::new(|| GrammarCompiler::new(&TOKENIZER, &ENDS).unwrap());

/// Ids of the model, padding included.
fn padded() -> usize {
    TOKENIZER.vocab_size().next_multiple_of(128) + 128
}

fn compile(structure: &Structure) -> Box<dyn Constraint> {
    GRAMMARS.compile(structure).unwrap_or_else(|error| panic!("{structure:?}: {error}"))
}

fn refusal(structure: &Structure) -> String {
    match GRAMMARS.compile(structure) {
        Ok(_) => panic!("compiled: {structure:?}"),
        Err(error) => error.0,
    }
}

fn schema(value: &Value) -> Structure {
    Structure::JsonSchema(value.to_string())
}

fn mask(constraint: &mut dyn Constraint) -> TokenMask {
    let mut mask = TokenMask::all(padded());
    constraint.mask(&mut mask).unwrap();
    mask
}

fn allowed(mask: &TokenMask) -> Vec<u32> {
    (0..mask.tokens() as u32).filter(|&id| mask.allows(id)).collect()
}

/// A small generator of numbers, so that a walk can be told by its seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % n as u64) as usize
    }
}

/// Walks until an end token is chosen, at most this many tokens. Tokens that close something are chosen often, so that
/// walks end. Returns the tokens without the end token, and whether the walk ended.
fn walk(constraint: &mut dyn Constraint, dice: &mut Dice, most: usize) -> (Vec<u32>, bool) {
    let closes =
        |id: u32| matches!(TOKENIZER.token_bytes(id), Some(b"\"" | b"}" | b"]" | b"</arg_value>" | b"</tool_call>"));
    let mut tokens = Vec::new();
    while tokens.len() < most {
        let all = allowed(&mask(constraint));
        assert!(!all.is_empty(), "nothing may follow {:?}", TOKENIZER.decode(&tokens, false));
        let closing: Vec<u32> = all.iter().copied().filter(|&id| closes(id) || ENDS.contains(&id)).collect();
        let from = if !closing.is_empty() && (dice.below(3) == 0 || tokens.len() > 100) { &closing } else { &all };
        let token = from[dice.below(from.len())];
        constraint.advance(token).unwrap();
        if ENDS.contains(&token) {
            return (tokens, true);
        }
        tokens.push(token);
    }
    (tokens, false)
}

fn walks(structure: &Structure, count: u64, mut check: impl FnMut(&[u32], &str)) {
    let mut ended = 0;
    for seed in 0..count {
        let (tokens, over) = walk(&mut *compile(structure), &mut Dice(seed * 77 + 5), 400);
        if over {
            ended += 1;
            check(&tokens, &TOKENIZER.decode(&tokens, false));
        }
    }
    assert!(ended * 2 > count, "only {ended} of {count} walks ended: {structure:?}");
}

fn takes(structure: &Structure, text: &str) -> bool {
    let mut constraint = compile(structure);
    let mut tokens = TOKENIZER.encode(text).unwrap();
    tokens.push(ENDS[0]);
    constraint.valid_prefix(&tokens) == tokens.len()
}

fn schemas() -> Vec<Value> {
    vec![
        json!({"type": "object", "properties": {
            "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
            "age": {"type": "integer", "minimum": 3, "maximum": 140},
            "kind": {"enum": ["cat", "dog", 7, null]},
            "home": {"type": "object", "properties": {"street": {"type": "string", "maxLength": 5}, "n": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2}},
                     "required": ["street"], "additionalProperties": false}},
            "required": ["name", "age", "home"], "additionalProperties": false}),
        json!({"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"type": "string", "minLength": 2, "maxLength": 4},
            {"type": "object", "properties": {"x": {"const": "y"}}, "required": ["x"], "additionalProperties": false}]}, "minItems": 2, "maxItems": 4}),
        json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
            "value": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["value", "next"], "additionalProperties": false}}}),
        json!({"oneOf": [
            {"type": "object", "properties": {"t": {"const": "a"}, "n": {"type": "integer", "multipleOf": 5}}, "required": ["t", "n"], "additionalProperties": false},
            {"type": "object", "properties": {"t": {"const": "b"}}, "required": ["t"], "additionalProperties": false}]}),
        json!({"allOf": [{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
                         {"type": "object", "properties": {"b": {"type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}], "items": false, "minItems": 2}}, "required": ["b"]}],
               "additionalProperties": true}),
    ]
}

#[test]
fn walks_through_schemas_give_valid_json() {
    for value in schemas() {
        walks(&schema(&value), 12, |_, text| {
            let found: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(schema::violation(&found, &value, &value), None, "{text}\n{value}");
        });
    }
}

#[test]
fn schemas_refuse_what_violates_them() {
    let person = schema(&schemas()[0]);
    assert!(takes(&person, r#"{"name": "Ada", "age": 36, "kind": "cat", "home": {"street": "a"}}"#));
    assert!(takes(&person, "{\n  \"name\": \"Ada\",\n  \"age\": 36,\n  \"home\": {\"street\": \"a\", \"n\": 1.25}\n}"));
    for text in [
        r#"{"name": "ada", "age": 36, "home": {"street": "a"}}"#,
        r#"{"name": "Ada", "age": 2, "home": {"street": "a"}}"#,
        r#"{"name": "Ada", "age": 36, "kind": "cow", "home": {"street": "a"}}"#,
        r#"{"name": "Ada", "age": 36, "home": {"street": "abcdef"}}"#,
        r#"{"name": "Ada", "age": 36, "home": {"street": "a", "n": 2}}"#,
        r#"{"name": "Ada", "age": 36}"#,
        r#"{"name": "Ada", "age": 36, "home": {"street": "a"}, "more": 1}"#,
    ] {
        assert!(!takes(&person, text), "{text}");
    }
    assert!(takes(&Structure::JsonObject, r#"{"any": [1, {"thing": null}]}"#));
    assert!(!takes(&Structure::JsonObject, "[1]"));
    let blank = format!("{{{}}}", " ".repeat(100));
    assert!(!takes(&Structure::JsonObject, &blank), "white space without end");
}

#[test]
fn unknown_formats_are_annotations_and_known_ones_hold() {
    let text = |format: &str| schema(&json!({"type": "string", "format": format}));
    assert!(takes(&text("password"), "\"x\""));
    assert!(takes(&text("date"), "\"2024-02-29\""));
    assert!(!takes(&text("date"), "\"2024-02-30\""));
}

#[test]
fn regexes_match_the_whole_text() {
    for (pattern, good, bad) in [
        (r"\d{3}-[a-z]+", "123-ab", "x123-ab"),
        ("^[ab]+$", "abba", "abc"),
        (r"cost \$", "cost $", "cost"),
        ("a/b|c", "a/b", "a"),
        ("(?i)yes", "YES", "no"),
        ("é|ü", "ü", "u"),
    ] {
        let structure = Structure::Regex(pattern.to_owned());
        assert!(takes(&structure, good), "{pattern} takes {good}");
        assert!(!takes(&structure, bad), "{pattern} does not take {bad}");
    }
}

#[test]
fn choices_are_taken_as_they_are() {
    let texts = ["yes", "no \"quoted\"\n\t\\", "", "a/b", "\u{7f}\u{1}é", "<tool_call>"];
    let choice = Structure::Choice(texts.iter().map(|&text| text.to_owned()).collect());
    for text in &texts[..5] {
        assert!(takes(&choice, text), "{text:?}");
    }
    assert!(!takes(&choice, "yesno"));
    walks(&choice, 20, |_, text| assert!(texts.contains(&text), "{text}"));
    // The literal of a control token is text, never the token.
    assert!(!takes(&choice, "<tool_call>"));
    let mut spelled = TOKENIZER.encode_ordinary("<tool_call>").unwrap();
    spelled.push(ENDS[0]);
    assert_eq!(compile(&choice).valid_prefix(&spelled), spelled.len());
}

#[test]
fn lark_and_the_other_dialect() {
    let sum = "start: expr\nexpr: term | expr \"+\" term\nterm: /[0-9]+/ | \"(\" expr \")\"\n";
    let same = "root ::= expr\nexpr ::= term | expr \"+\" term\nterm ::= [0-9]+ | \"(\" expr \")\"\n";
    for text in [sum, same] {
        let structure = Structure::Grammar(text.to_owned());
        assert!(takes(&structure, "1+(22+3)+4"), "{text}");
        for bad in ["1+", "(1", "1++2", ""] {
            assert!(!takes(&structure, bad), "{text}: {bad:?}");
        }
    }
    let sql = Structure::Grammar(
        "root ::= select_statement\nselect_statement ::= \"SELECT \" column \" from \" table \" where \" condition\n\
         column ::= \"col_1 \" | \"col_2 \"\ntable ::= \"table_1 \" | \"table_2 \"\ncondition ::= column \"= \" number\n\
         number ::= \"1 \" | \"2 \""
            .to_owned(),
    );
    assert!(takes(&sql, "SELECT col_1  from table_2  where col_2 = 1 "));
    assert!(!takes(&sql, "SELECT col_3  from table_2  where col_2 = 1 "));
    // One character belongs to whoever needs it, not to the first that can take it.
    let exact = Structure::Grammar("root ::= word \"x\" [^\\]\\n]?\nword ::= [a-z]*".to_owned());
    assert!(takes(&exact, "abx") && takes(&exact, "x") && takes(&exact, "xx]") == takes(&exact, "x]"));
    assert!(!takes(&exact, "ab]"));
    let list = Structure::Grammar(
        "root ::= ws list ws\nlist ::= \"[\" ws (list (\",\" ws list)*)? \"]\" ws\nws ::= [ \\t\\n]*".to_owned(),
    );
    assert!(takes(&list, " [ [ ],[]] "));
    assert!(!takes(&list, " [ [ ],] "));
}

#[test]
fn text_of_schemas_never_becomes_a_control_token() {
    let control: Vec<u32> = TOKENIZER.added().iter().map(|token| token.id).filter(|id| !ENDS.contains(id)).collect();
    let structures = [
        schema(&json!({"type": "object", "properties": {"<tool_call>": {"enum": ["</think>", "<|assistant|>"]}}})),
        Structure::Regex("(<tool_call>|.)*".to_owned()),
        Structure::Grammar("root ::= (\"<think>\" | .)*".to_owned()),
        Structure::Choice(vec!["<think>".to_owned(), "<|assistant|>".to_owned()]),
    ];
    for structure in structures {
        let mut constraint = compile(&structure);
        let mut dice = Dice(3);
        for _ in 0..60 {
            let all = allowed(&mask(&mut *constraint));
            assert!(!all.iter().any(|id| control.contains(id)), "{structure:?}");
            let going: Vec<u32> = all.into_iter().filter(|id| !ENDS.contains(id)).collect();
            let Some(&token) = going.get(dice.below(going.len().max(1))) else { break };
            constraint.advance(token).unwrap();
        }
    }
}

fn tools() -> Vec<Value> {
    let tool = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    vec![
        tool(
            "get_weather",
            json!({"type": "object", "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 20}, "unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
            "required": ["city", "days"]}),
        ),
        tool("get_time", json!({"type": "object", "properties": {}})),
        tool(
            "search",
            json!({"type": "object", "$defs": {"range": {"type": "object", "properties": {"from": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["from"], "additionalProperties": false}},
            "properties": {"query": {"type": "string"}, "ranges": {"type": "array", "items": {"$ref": "#/$defs/range"}, "maxItems": 3},
                "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "weight": {"type": "number"}},
            "required": ["ranges"]}),
        ),
    ]
}

fn calls(only: Option<&str>, single: bool) -> Structure {
    let tools = tools().iter().map(Value::to_string).collect();
    Structure::ToolCalls { tools, only: only.map(str::to_owned), single }
}

fn parsed(tokens: &[u32]) -> Answer {
    let schemas = ToolSchemas::new(&tools());
    parse_answer(&TOKENIZER, tokens, &schemas, ParseOptions::default(), Start::Content, EngineFinish::Stop)
}

fn check_calls(answer: &Answer) {
    assert_eq!((&answer.reasoning, &answer.content), (&None, &None));
    for call in &answer.calls {
        assert!(call.complete);
        let tool = tools().into_iter().find(|tool| tool["function"]["name"] == call.name.as_str()).unwrap();
        let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
        let parameters = &tool["function"]["parameters"];
        assert_eq!(schema::violation(&arguments, parameters, parameters), None, "{} {}", call.name, call.arguments);
    }
}

#[test]
fn tool_calls_parse_back_with_their_types() {
    let mut seen = std::collections::BTreeSet::new();
    let mut most = 0;
    walks(&calls(None, false), 40, |tokens, _| {
        let answer = parsed(tokens);
        assert!(!answer.calls.is_empty());
        check_calls(&answer);
        most = most.max(answer.calls.len());
        seen.extend(answer.calls.into_iter().map(|call| call.name));
    });
    assert_eq!(seen.len(), 3, "{seen:?}");
    assert!(most > 1);
    walks(&calls(Some("search"), true), 15, |tokens, _| {
        let answer = parsed(tokens);
        assert_eq!(answer.calls.len(), 1);
        assert_eq!(answer.calls[0].name, "search");
        check_calls(&answer);
    });
}

#[test]
fn tool_calls_take_what_the_model_writes() {
    let arg = |key: &str, value: &str| format!("<arg_key>{key}</arg_key><arg_value>{value}</arg_value>");
    let call = |name: &str, args: &str| format!("<tool_call>{name}{args}</tool_call>");
    let weather = call("get_weather", &(arg("city", "New\nYork <b>") + &arg("days", "3")));
    let turned = call("get_weather", &(arg("days", "3") + &arg("unit", "C") + &arg("city", "x")));
    let time = call("get_time", "");
    let any = calls(None, false);
    for text in
        [&weather, &turned, &time, &(weather.clone() + &time), &call("search", &arg("ranges", "[{\"from\": 5}]"))]
    {
        assert!(takes(&any, text), "{text}");
    }
    for text in [
        "",
        "sure",
        &format!("sure {time}"),
        &call("get_tim", ""),
        &call("get_weather", &arg("city", "x")),
        &call("get_weather", &(arg("city", "x") + &arg("days", "0"))),
        &call("get_weather", &(arg("city", "x") + &arg("days", "1") + &arg("days", "2"))),
        &call("get_weather", &(arg("city", "x") + &arg("days", "1") + &arg("unit", "K"))),
        &call("get_weather", &(arg("town", "x") + &arg("days", "1"))),
    ] {
        assert!(!takes(&any, text), "{text}");
    }
    let one = calls(Some("get_time"), true);
    assert!(takes(&one, &time));
    assert!(!takes(&one, &(time.clone() + &time)));
    assert!(!takes(&one, &weather));
    // The same characters as ordinary text are no call, and stay inside a value.
    let spelled = TOKENIZER.encode_ordinary(&time).unwrap();
    assert_eq!(compile(&any).valid_prefix(&spelled), 0);
    let mut value = TOKENIZER
        .encode(
            "<tool_call>search<arg_key>ranges</arg_key><arg_value>[]</arg_value><arg_key>query</arg_key><arg_value>",
        )
        .unwrap();
    value.extend(TOKENIZER.encode_ordinary("</arg_value></tool_call>").unwrap());
    value.extend(TOKENIZER.encode("</arg_value></tool_call>").unwrap());
    assert_eq!(compile(&any).valid_prefix(&value), value.len());
    assert!(parsed(&value).calls[0].arguments.contains("</arg_value></tool_call>"));
}

#[test]
fn arguments_that_are_not_declared_come_where_they_are_invited() {
    let tool = |parameters: Value| Structure::ToolCalls {
        tools: vec![json!({"name": "f", "parameters": parameters}).to_string()],
        only: None,
        single: true,
    };
    let text = |key: &str| format!("<tool_call>f<arg_key>{key}</arg_key><arg_value>v</arg_value></tool_call>");
    let free = tool(json!({"type": "object"}));
    let open = tool(
        json!({"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": {"type": "string"}}),
    );
    let closed = tool(json!({"type": "object", "properties": {"n": {"type": "integer"}}}));
    assert!(takes(&free, &text("a")) && takes(&open, &text("a")) && !takes(&closed, &text("a")));
    assert!(!takes(&open, &text("n")), "a declared argument has its own type");
    // More parameters than a grammar has bits: their order is the declared one.
    let many: serde_json::Map<String, Value> = (0..70).map(|i| (format!("p{i}"), json!({"type": "string"}))).collect();
    let many = tool(json!({"type": "object", "properties": many, "required": ["p69"]}));
    assert!(takes(&many, &text("p69")) && !takes(&many, &text("p1")));
}

#[test]
fn structural_tags() {
    let old = Structure::StructuralTag(
        json!({"structures": [
            {"begin": "<function=f>", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}, "end": "</function>"},
            {"begin": "<function=g>", "schema": {"type": "boolean"}, "end": "</function>"}],
            "triggers": ["<function="]})
        .to_string(),
    );
    assert!(takes(&old, "no call at all"));
    assert!(takes(&old, "well <function=f>{\"a\": 1}</function> and <function=g>true</function>."));
    assert!(!takes(&old, "well <function=h>{\"a\": 1}</function>"));
    assert!(!takes(&old, "well <function=g>1</function>"));
    let tagged =
        |format: Value| Structure::StructuralTag(json!({"type": "structural_tag", "format": format}).to_string());
    let by_token = tagged(
        json!({"type": "triggered_tags", "triggers": ["<tool_call>"], "at_least_one": true, "tags": [
        {"type": "tag", "begin": "<tool_call>f\n", "content": {"type": "json_schema", "json_schema": {"type": "object"}}, "end": "</tool_call>"}]}),
    );
    assert!(takes(&by_token, "first <tool_call>f\n{}</tool_call> then"));
    assert!(!takes(&by_token, "first"));
    assert!(!takes(&by_token, "first <tool_call>g\n{}</tool_call>"));
    let sequence = tagged(json!({"type": "sequence", "elements": [
        {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"},
        {"type": "or", "elements": [{"type": "const_string", "value": "x"}, {"type": "regex", "pattern": "[0-9]+"}]},
        {"type": "any_text"}, {"type": "const_string", "value": "!"},
        {"type": "grammar", "grammar": "root ::= \"(\" root? \")\""}]}));
    assert!(takes(&sequence, "<a>any < thing</a>x and so!(())"));
    assert!(!takes(&sequence, "<a>any</a>y!()"));
    assert!(!takes(&sequence, "<a>any</a>x!("));
    let list = tagged(json!({"type": "tags_with_separator", "separator": "; ", "at_least_one": true, "tags": [
        {"type": "tag", "begin": "[", "content": {"type": "regex", "pattern": "[a-z]+"}, "end": "]"}]}));
    assert!(takes(&list, "[a]; [bc]") && !takes(&list, "[a]; ") && !takes(&list, ""));
    let error = refusal(&tagged(json!({"type": "sequence", "elements": [{"type": "any_text"}, {"type": "nonsense"}]})));
    assert!(error.contains("elements[0]"), "{error}");
    let error = refusal(&tagged(json!({"type": "or", "elements": [{"type": "nonsense"}]})));
    assert!(error.contains("structural_tag.format.elements[0]: type \"nonsense\""), "{error}");
}

#[test]
fn errors_name_the_place_in_the_schema() {
    let bad = json!({"type": "object", "properties": {"fine": {"type": "string"}, "list": {"type": "array", "items": {"if": {}, "then": {}}}}});
    let error = refusal(&schema(&bad));
    assert!(error.starts_with("json_schema/properties/list/items: "), "{error}");
    assert!(!error.contains("non-verbose") && !error.contains("backtrace"), "{error}");
    let error = refusal(&schema(&json!({"anyOf": [{"type": "string"}, {"type": "text"}]})));
    assert!(error.starts_with("json_schema/anyOf/1: "), "{error}");
    let error = refusal(&schema(&json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}})));
    assert!(error.contains("missing"), "{error}");
    let error = refusal(&Structure::JsonSchema("{\"type\": ".to_owned()));
    assert!(error.contains("not JSON"), "{error}");
    let strict = json!({"type": "function", "function": {"name": "f", "strict": true, "parameters": {"type": "object",
        "properties": {"a": {"type": "object", "if": {}}}}}});
    let lax = json!({"type": "function", "function": {"name": "f", "parameters": strict["function"]["parameters"]}});
    let of = |tool: &Value| Structure::ToolCalls {
        tools: vec![lax.to_string(), tool.to_string()],
        only: None,
        single: false,
    };
    compile(&of(&lax));
    let error = refusal(&of(&strict));
    assert!(error.starts_with("tools[1].function.parameters/properties/a: "), "{error}");
    for pattern in ["^(?=a)b$", "("] {
        let parameters = json!({"type": "object", "properties": {"city": {"type": "string", "pattern": pattern}}});
        let tool =
            |strict| json!({"type": "function", "function": {"name": "f", "strict": strict, "parameters": parameters}});
        compile(&of(&tool(false)));
        let error = refusal(&of(&tool(true)));
        assert!(error.starts_with("tools[1].function.parameters/properties/city/pattern: this regular"), "{error}");
    }
    let error = refusal(&calls(Some("nope"), true));
    assert!(error.contains("nope"), "{error}");
}

/// Whatever comes in, out comes a constraint that works or an error; the process stays.
#[test]
fn hostile_descriptions_end_as_errors() {
    let deep = |open: &str, close: &str, n: usize| format!("{}{}", open.repeat(n), close.repeat(n));
    let n = 10_000;
    let chain: String = (0..n).map(|i| format!("r{i} ::= r{}\n", i + 1)).collect::<String>() + "r10000 ::= \"x\"";
    let chain_of_recursive = format!("root ::= r0 | \"(\" root\n{}r10000 ::= root \"x\"", &chain[..chain.len() - 14]);
    let nested = format!(
        "start: T0\n{}T10000: \"x\"",
        (0..n).map(|i| format!("T{i}: (T{} \"a\")?\n", i + 1)).collect::<String>()
    );
    let lark_chain: String =
        format!("start: r0\n{}r10000: \"x\"", (0..n).map(|i| format!("r{i}: r{}\n", i + 1)).collect::<String>());
    let terminals: String =
        format!("start: T0\n{}T10000: \"x\"", (0..n).map(|i| format!("T{i}: T{}\n", i + 1)).collect::<String>());
    let mut references = serde_json::Map::new();
    for i in 0..5_000 {
        references.insert(format!("d{i}"), json!({"$ref": format!("#/$defs/d{}", i + 1)}));
    }
    references.insert("d5000".to_owned(), json!({"type": "null"}));
    let must_fail = [
        Structure::Regex(deep("(", ")", 100_000)),
        Structure::Regex("[".to_owned()),
        Structure::Regex("(?=a)b".to_owned()),
        Structure::Regex(String::new()),
        Structure::Regex("a".repeat(2 << 20)),
        Structure::Choice(Vec::new()),
        Structure::Grammar(String::new()),
        Structure::Grammar(format!("start: {}", deep("(", ")", 50_000))),
        Structure::Grammar(format!("root ::= {}", deep("(", ")", 50_000))),
        Structure::Grammar("start: /a/\nstart[max_tokens=3]: /a/".to_owned()),
        Structure::Grammar("start: a\na[max_tokens=3]: /a+/".to_owned()),
        Structure::Grammar("start: a\na[stop=\"x\"]: /a+/".to_owned()),
        Structure::JsonSchema(deep("[", "]", 100_000)),
        Structure::JsonSchema(deep("{\"items\":", "}", 1_000)),
        schema(&json!({"$ref": "http://example.com/schema.json"})),
        schema(&json!({"$ref": "#"})),
        schema(&json!(false)),
        Structure::StructuralTag("[]".to_owned()),
        Structure::ToolCalls { tools: vec!["{}".to_owned()], only: None, single: false },
        Structure::ToolCalls { tools: Vec::new(), only: None, single: false },
    ];
    let mut compiled = Vec::new();
    for structure in must_fail {
        let Err(ConstraintError(error)) = GRAMMARS.compile(&structure) else {
            compiled.push(format!("{structure:?}").chars().take(300).collect::<String>());
            continue;
        };
        assert!(error.len() < 2_000, "{} bytes of message: {}", error.len(), &error[..500]);
    }
    assert!(compiled.is_empty(), "compiled: {compiled:#?}");
    let either = [
        Structure::Grammar(chain),
        Structure::Grammar(chain_of_recursive),
        Structure::Grammar(nested),
        Structure::Regex("(a?".repeat(200) + &")?".repeat(200)),
        Structure::Grammar(lark_chain),
        Structure::Grammar(terminals),
        Structure::Grammar("start: start start | \"a\" | \"\"".to_owned()),
        Structure::Grammar("root ::= root root | \"\"".to_owned()),
        schema(&json!({"$defs": references, "$ref": "#/$defs/d0"})),
        schema(&json!({"type": "string", "minLength": 100_000_000})),
        schema(&json!({"type": "array", "minItems": 1_000_000_000, "items": {"type": "null"}})),
        schema(&json!({"type": "string", "pattern": "(x+x+)+y"})),
        schema(&json!({"type": "integer", "multipleOf": 1_000_003, "minimum": -1e300})),
        Structure::Regex("(.*a.{200})".to_owned()),
        schema(&json!({"type": "string", "pattern": "(a{1,500}){500}{500}"})),
        Structure::Regex("(a{1,1000}){1,1000}(b{1,1000}){1,1000}".to_owned()),
        Structure::Choice((0..5_000).map(|i| format!("choice number {i}")).collect()),
    ];
    for structure in either {
        assert!(format!("{structure:?}").len() < 300_000, "it is the limits of the grammar that are of interest here");
        let Ok(mut constraint) = GRAMMARS.compile(&structure) else { continue };
        let mut dice = Dice(9);
        for _ in 0..50 {
            let mut mask = TokenMask::all(padded());
            if constraint.mask(&mut mask).is_err() {
                break;
            }
            let all = allowed(&mask);
            if constraint.advance(all[dice.below(all.len())]).is_err() {
                break;
            }
        }
    }
}

fn structures() -> Vec<Structure> {
    let mut all: Vec<Structure> = schemas().iter().map(schema).collect();
    all.extend([
        Structure::JsonObject,
        Structure::Regex("(ab|[0-9]{2,4}é)*x".to_owned()),
        Structure::Choice(vec!["one".to_owned(), "once more".to_owned(), String::new()]),
        Structure::Grammar("root ::= \"(\" root? \")\" | [a-c]+ root | \"x\"".to_owned()),
        Structure::StructuralTag(
            json!({"structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"},
                {"begin": "<tool_call>", "schema": {"type": "integer"}, "end": "</tool_call>"}], "triggers": ["<f", "<tool_call>"]})
            .to_string(),
        ),
        calls(None, false),
        calls(Some("search"), true),
    ]);
    all
}

#[test]
fn masks_agree_with_advance_for_every_token() {
    for structure in structures() {
        let mut constraint = compile(&structure);
        let mut dice = Dice(11);
        for step in 0..14 {
            let now = mask(&mut *constraint);
            let all = allowed(&now);
            assert!(all.iter().all(|&id| TOKENIZER.contains(id)), "padding in the mask of {structure:?}");
            if step % 3 == 0 {
                for id in 0..padded() as u32 {
                    assert_eq!(
                        constraint.valid_prefix(&[id]),
                        usize::from(now.allows(id)),
                        "{id} at {step}: {structure:?}"
                    );
                    let taken = constraint.advance(id);
                    assert_eq!(taken.is_ok(), now.allows(id), "{id} at {step}: {structure:?}");
                    if taken.is_ok() {
                        constraint.rollback(1).unwrap();
                    }
                }
                assert_eq!(mask(&mut *constraint), now, "{structure:?}");
            }
            constraint.advance(all[dice.below(all.len())]).unwrap();
        }
    }
}

#[test]
fn behind_the_end_only_end_tokens_come() {
    let mut constraint = compile(&Structure::Choice(vec!["yes".to_owned()]));
    for token in TOKENIZER.encode("yes").unwrap() {
        constraint.advance(token).unwrap();
    }
    let mut ends = ENDS.clone();
    ends.sort_unstable();
    for _ in 0..3 {
        assert_eq!(allowed(&mask(&mut *constraint)), ends);
        constraint.advance(ENDS[1]).unwrap();
    }
    assert!(constraint.advance(5).is_err());
    assert_eq!(constraint.valid_prefix(&[ENDS[0], ENDS[2], 5]), 2);
    assert!(constraint.rollback(100).is_err());
    constraint.rollback(4).unwrap();
    assert!(!mask(&mut *constraint).allows(ENDS[0]));
    // A mask that covers fewer tokens than the tokenizer has, and one that covers none.
    for tokens in [1000, 1001, 64, 0] {
        let mut small = TokenMask::all(tokens);
        constraint.mask(&mut small).unwrap();
        assert_eq!(small.words().len(), tokens.div_ceil(64));
        let clear = tokens % 64 == 0 || small.words().last().unwrap() >> (tokens % 64) == 0;
        assert!(clear, "bits beyond {tokens}");
    }
}

#[test]
fn one_structure_compiles_once_and_the_memory_is_bounded() {
    let grammars = GrammarCompiler::new(&TOKENIZER, &ENDS).unwrap();
    let choice = |n: usize| Structure::Choice(vec![format!("text {n}")]);
    for n in [0, 1, 0, 0, 1] {
        grammars.compile(&choice(n)).unwrap();
    }
    assert_eq!(grammars.remembered(), 2);
    for n in 0..100 {
        grammars.compile(&choice(n)).unwrap();
    }
    assert_eq!(grammars.remembered(), 64);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// What is taken back was never there: masks, and what may follow, are as if the walk had not been.
    #[test]
    fn rollback_is_as_if_nothing_had_been(which in 0_usize..12, seed in any::<u64>(), first in 0_usize..30, detour in 0_usize..12, second in 0_usize..12) {
        let all = structures();
        let structure = &all[which % all.len()];
        let (mut wandering, mut straight) = (compile(structure), compile(structure));
        let mut dice = Dice(seed);
        let step = |constraint: &mut dyn Constraint, dice: &mut Dice| {
            let all = allowed(&mask(constraint));
            let token = all[dice.below(all.len())];
            constraint.advance(token).unwrap();
            token
        };
        for _ in 0..first {
            let token = step(&mut *wandering, &mut dice);
            straight.advance(token).unwrap();
        }
        for length in [detour, second] {
            let wrong: Vec<u32> = (0..length).map(|_| step(&mut *wandering, &mut dice)).collect();
            wandering.rollback(length).unwrap();
            // Looking ahead changes nothing either.
            prop_assert_eq!(wandering.valid_prefix(&wrong), length);
            prop_assert_eq!(mask(&mut *wandering), mask(&mut *straight));
            let token = step(&mut *wandering, &mut dice);
            straight.advance(token).unwrap();
            prop_assert_eq!(mask(&mut *wandering), mask(&mut *straight));
        }
    }
}
