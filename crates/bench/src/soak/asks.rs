//! What clients ask, and how they behave.
//!
//! Everything is drawn from [`Dice`], so a seed names a run. Whatever can be answered can be asked again alone: sampled
//! requests bring a seed of their own.

use std::io::Cursor;
use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Map, Value, json};

use crate::error::BenchError;
use crate::exactness::Dice;

/// Body limit of the server, by which one kind of bad request is too long.
pub(super) const MOST_BODY_BYTES: usize = 1_000_000;

/// A request and the conduct of whoever sends it.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    /// For the report.
    pub(super) kind: &'static str,
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    pub(super) media_type: &'static str,
    /// Whether the right key is shown.
    pub(super) authorised: bool,
    pub(super) body: Vec<u8>,
    pub(super) stream: bool,
    pub(super) conduct: Conduct,
}

/// How a client behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Conduct {
    /// Reads the answer to its end.
    Stay,
    /// Asks what must be refused with this status.
    Wrong(u16),
    /// Sends half of the body and goes.
    HalfABody,
    /// Reads so many pieces of the stream and goes.
    LeaveAfter(usize),
    /// Goes unless the answer begins within this time.
    LeaveUnless(Duration),
}

impl Ask {
    fn post(kind: &'static str, path: &'static str, body: &Value) -> Self {
        Self {
            kind,
            method: "POST",
            path,
            media_type: "application/json",
            authorised: true,
            body: body.to_string().into_bytes(),
            stream: body["stream"] == true,
            conduct: Conduct::Stay,
        }
    }

    fn wrong(self, status: u16) -> Self {
        Self { kind: "bad", conduct: Conduct::Wrong(status), ..self }
    }

    /// The same request, answered in one piece.
    pub(super) fn whole(&self) -> Self {
        let mut body: Value = serde_json::from_slice(&self.body).unwrap_or_default();
        if let Value::Object(map) = &mut body {
            map.remove("stream");
        }
        Self { body: body.to_string().into_bytes(), stream: false, conduct: Conduct::Stay, ..self.clone() }
    }
}

/// Words of made-up documents.
const WORDS: [&str; 24] = [
    "river", "stone", "seven", "answer", "the", "of", "a", "green", "house", "number", "12", "405", "and", "walks",
    "under", "bright", "paper", "city", "is", "not", "old", "name", "9", "table",
];
const CHAT: &str = "/v1/chat/completions";

/// What requests are made of: documents and pictures that many of them share, so that caches have something to find.
#[derive(Debug)]
pub(super) struct Material {
    documents: Vec<String>,
    /// Data URLs of PNGs.
    pictures: Vec<String>,
}

impl Material {
    pub(super) fn new(seed: u64) -> Result<Self, BenchError> {
        let mut dice = Dice::new(seed);
        let documents = (0..16).map(|_| words(&mut dice, 500)).collect();
        let pictures = (0..12).map(|_| picture(&mut dice)).collect::<Result<_, _>>()?;
        Ok(Self { documents, pictures })
    }

    /// The next request of a client.
    pub(super) fn ask(&self, dice: &mut Dice) -> Ask {
        match dice.below(100) {
            0..8 => self.bad(dice),
            8..17 => self.left(dice),
            17..49 => self.text(dice),
            49..57 => self.long(dice),
            57..67 => self.tools(dice),
            67..75 => self.shaped(dice),
            75..84 => self.seen(dice),
            84..92 => self.completion(dice),
            92..96 => self.message(dice),
            _ => self.response(dice),
        }
    }

    /// The beginning of a shared document, of random length.
    fn document(&self, dice: &mut Dice) -> &str {
        let document = &self.documents[dice.below(self.documents.len())];
        let length = spread(dice, 8, document.len());
        &document[..length]
    }

    fn text(&self, dice: &mut Dice) -> Ask {
        let question = format!("{} What is {} minus {}?", self.document(dice), 500 + dice.below(500), dice.below(500));
        let mut messages = vec![json!({"role": "user", "content": question})];
        if dice.below(5) == 0 {
            messages.push(json!({"role": "assistant", "reasoning_content": "I count.", "content": "It is 7."}));
            messages.push(json!({"role": "user", "content": format!("And {} plus 5?", dice.below(50))}));
        }
        let mut body = json!({ "messages": messages });
        sampling(dice, &mut body, 600);
        match dice.below(14) {
            0..5 => body["ignore_eos"] = true.into(),
            5 => body["stop"] = json!(["1", " is"]),
            6 => body["thinking_token_budget"] = dice.below(20).into(),
            7 => body["logprobs"] = true.into(),
            8 => body["presence_penalty"] = 0.5.into(),
            9 if body["temperature"] != 0 => body["n"] = 2.into(),
            _ => {}
        }
        Ask::post("text", CHAT, &body)
    }

    /// Little to read and much to say: admitted where there is room for the prompt, it needs many pages later.
    fn long(&self, dice: &mut Dice) -> Ask {
        let question = format!("Count from {} on.", dice.below(1000));
        let mut body = json!({"messages": [{"role": "user", "content": question}], "ignore_eos": true});
        sampling(dice, &mut body, 1);
        body["max_tokens"] = spread(dice, 300, 1200).into();
        Ask::post("long", CHAT, &body)
    }

    fn tools(&self, dice: &mut Dice) -> Ask {
        let city = ["Ankara", "Oslo", "Lima", "Quito"][dice.below(4)];
        let mut messages = vec![json!({"role": "user", "content": format!("Tell me the weather in {city}.")})];
        if dice.below(3) == 0 {
            let function = json!({"name": "get_weather", "arguments": json!({ "city": city }).to_string()});
            let call = json!({"id": "call_1", "type": "function", "function": function});
            messages.push(json!({"role": "assistant", "content": null, "tool_calls": [call]}));
            let result = json!({"temperature": dice.below(40), "condition": "sunny"}).to_string();
            messages.push(json!({"role": "tool", "tool_call_id": "call_1", "content": result}));
        }
        let mut body = json!({"messages": messages, "tools": [tool()]});
        body["tool_choice"] = ["auto", "auto", "required", "none"][dice.below(4)].into();
        sampling(dice, &mut body, 150);
        Ask::post("tools", CHAT, &body)
    }

    fn shaped(&self, dice: &mut Dice) -> Ask {
        let question = format!("What is {} plus {}?", dice.below(100), dice.below(100));
        let schema = json!({"type": "object", "properties": {"answer": {"type": "integer"}, "sure": {"type": "boolean"}},
            "required": ["answer", "sure"], "additionalProperties": false});
        let mut body = json!({"messages": [{"role": "user", "content": question}]});
        match dice.below(3) {
            0 => body["structured_outputs"] = json!({"choice": ["left", "right", "both"]}),
            1 => body["structured_outputs"] = json!({"regex": "[a-c]{3}-[0-9]{2}"}),
            _ => {
                body["response_format"] =
                    json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
            }
        }
        sampling(dice, &mut body, 150);
        Ask::post("shape", CHAT, &body)
    }

    fn seen(&self, dice: &mut Dice) -> Ask {
        let mut parts = vec![json!({"type": "text", "text": "What do you see?"})];
        for _ in 0..1 + dice.below(2) {
            let url = &self.pictures[dice.below(self.pictures.len())];
            parts.insert(dice.below(parts.len() + 1), json!({"type": "image_url", "image_url": {"url": url}}));
        }
        let mut body = json!({"messages": [{"role": "user", "content": parts}]});
        sampling(dice, &mut body, 60);
        Ask::post("images", CHAT, &body)
    }

    fn completion(&self, dice: &mut Dice) -> Ask {
        let mut body = json!({"prompt": self.document(dice), "ignore_eos": dice.below(4) == 0});
        sampling(dice, &mut body, 100);
        Ask::post("completions", "/v1/completions", &body)
    }

    fn message(&self, dice: &mut Dice) -> Ask {
        let content = format!("{} What is {} plus 4?", self.document(dice), dice.below(90));
        let mut body = json!({"messages": [{"role": "user", "content": content}], "temperature": 0});
        body["max_tokens"] = spread(dice, 1, 120).into();
        body["stream"] = (dice.below(2) == 0).into();
        Ask::post("messages", "/v1/messages", &body)
    }

    fn response(&self, dice: &mut Dice) -> Ask {
        let input = format!("{} What is {} plus 6?", self.document(dice), dice.below(90));
        let mut body = json!({"input": input, "temperature": 0, "max_output_tokens": spread(dice, 1, 120)});
        body["stream"] = (dice.below(2) == 0).into();
        Ask::post("responses", "/v1/responses", &body)
    }

    /// Somebody who goes away: while sending, while waiting, while reading.
    fn left(&self, dice: &mut Dice) -> Ask {
        let mut body = json!({"messages": [{"role": "user", "content": self.document(dice)}], "ignore_eos": true});
        sampling(dice, &mut body, 50);
        body["max_tokens"] = 2000.into();
        let stream = dice.below(2) == 0;
        body["stream"] = stream.into();
        let conduct = match dice.below(6) {
            0 => Conduct::HalfABody,
            _ if stream => Conduct::LeaveAfter(1 + dice.below(40)),
            _ => Conduct::LeaveUnless(Duration::from_millis(1 + spread(dice, 1, 2000) as u64)),
        };
        Ask { conduct, ..Ask::post("left", CHAT, &body) }
    }

    /// Requests that must be refused, each in its own way.
    fn bad(&self, dice: &mut Dice) -> Ask {
        let chat = |more: Value| {
            let mut body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 5});
            if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
                body.extend(more);
            }
            Ask::post("bad", CHAT, &body)
        };
        let image = |url: &str| {
            let part = json!({"type": "image_url", "image_url": {"url": url}});
            chat(json!({"messages": [{"role": "user", "content": [part]}]})).wrong(400)
        };
        match dice.below(20) {
            0 => Ask { body: b"{\"messages\": [".to_vec(), ..chat(json!({})) }.wrong(400),
            1 => chat(json!({"messages": []})).wrong(400),
            2 => chat(json!({"temperature": 9})).wrong(400),
            3 => chat(json!({"max_tokens": 0})).wrong(400),
            4 => chat(json!({"model": "nothing"})).wrong(404),
            5 => Ask { path: "/v1/nothing", ..chat(json!({})) }.wrong(404),
            6 => Ask { media_type: "text/plain", ..chat(json!({})) }.wrong(400),
            7 => Ask { authorised: false, ..chat(json!({})) }.wrong(401),
            8 => Ask { method: "GET", body: Vec::new(), ..chat(json!({})) }.wrong(405),
            9 => Ask { body: vec![b' '; MOST_BODY_BYTES + 1], ..chat(json!({})) }.wrong(413),
            10 => Ask::post("bad", "/v1/completions", &json!({"prompt": vec![300; 200_000]})).wrong(400),
            11 => image("data:image/png;base64,AAAA"),
            12 => image("https://example.com/a.png"),
            13 => image("data:image/png;base64,#"),
            14 => {
                let schema = json!({"type": "object", "properties": {"a": {"type": "what"}}});
                let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
                chat(json!({ "response_format": format })).wrong(400)
            }
            15 => chat(json!({"tools": []})).wrong(400),
            16 => chat(json!({"structured_outputs": {"regex": "["}})).wrong(400),
            17 => Ask::post("bad", "/v1/messages", &json!({"messages": []})).wrong(400),
            18 => Ask::post("bad", "/tokenize", &json!({"prompt": 7})).wrong(400),
            _ => Ask::post("bad", "/v1/completions", &json!({"prompt": "x", "n": 2, "temperature": 0})).wrong(400),
        }
    }
}

/// Temperature and its kin, the length of the answer, whether it is streamed.
fn sampling(dice: &mut Dice, body: &mut Value, most_tokens: usize) {
    let mut fields = Map::new();
    if dice.below(2) == 0 {
        fields.insert("temperature".to_owned(), 0.into());
    } else {
        fields.insert("temperature".to_owned(), [0.7, 1.0][dice.below(2)].into());
        fields.insert("top_p".to_owned(), [0.95, 1.0][dice.below(2)].into());
        fields.insert("seed".to_owned(), dice.below(1 << 31).into());
        if dice.below(4) == 0 {
            fields.insert("top_k".to_owned(), 20.into());
        }
    }
    fields.insert("max_tokens".to_owned(), spread(dice, 1, most_tokens).into());
    fields.insert("stream".to_owned(), (dice.below(5) < 3).into());
    if let Value::Object(body) = body {
        body.extend(fields);
    }
}

fn tool() -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    json!({"type": "function", "function": {"name": "get_weather", "parameters": parameters}})
}

/// A number from `low` to `high` whose logarithm is evenly spread: many small ones, a few large ones.
fn spread(dice: &mut Dice, low: usize, high: usize) -> usize {
    const STEPS: usize = 1 << 16;
    let share = dice.below(STEPS) as f64 / STEPS as f64;
    let number = low as f64 * (high as f64 / low as f64).powf(share);
    (number.round() as usize).clamp(low, high)
}

fn words(dice: &mut Dice, count: usize) -> String {
    let words: Vec<&str> = (0..count).map(|_| WORDS[dice.below(WORDS.len())]).collect();
    words.join(" ")
}

/// Two colours, somewhere parted, as a PNG in a data URL.
fn picture(dice: &mut Dice) -> Result<String, BenchError> {
    let side = 28 * (2 + dice.below(7) as u32);
    let mut colour = || image::Rgb([0_u8; 3].map(|_| dice.below(256) as u8));
    let (left, right) = (colour(), colour());
    let parted = dice.below(side as usize) as u32;
    let pixels = image::RgbImage::from_fn(side, side, |x, _| if x < parted { left } else { right });
    let mut file = Cursor::new(Vec::new());
    let written = pixels.write_to(&mut file, image::ImageFormat::Png);
    written.map_err(|error| BenchError::model("a picture of the soak", error))?;
    Ok(format!("data:image/png;base64,{}", STANDARD.encode(file.into_inner())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_names_a_run_and_every_kind_occurs() {
        let material = Material::new(3).expect("made");
        let again = Material::new(3).expect("made");
        let (mut one, mut two) = (Dice::new(5), Dice::new(5));
        let mut kinds = std::collections::BTreeSet::new();
        let mut conducts = std::collections::BTreeSet::new();
        for _ in 0..2000 {
            let ask = material.ask(&mut one);
            let same = again.ask(&mut two);
            assert_eq!((&ask.body, ask.conduct), (&same.body, same.conduct));
            kinds.insert(ask.kind);
            conducts.insert(match ask.conduct {
                Conduct::Wrong(status) => format!("{status}"),
                Conduct::LeaveAfter(_) => "in a stream".to_owned(),
                Conduct::LeaveUnless(_) => "in a wait".to_owned(),
                other => format!("{other:?}"),
            });
            assert!(ask.body.len() <= MOST_BODY_BYTES || ask.conduct == Conduct::Wrong(413));
        }
        let all = ["bad", "completions", "images", "left", "long", "messages", "responses", "shape", "text", "tools"];
        assert!(kinds.iter().eq(all.iter()), "{kinds:?}");
        let all = ["400", "401", "404", "405", "413", "HalfABody", "Stay", "in a stream", "in a wait"];
        assert!(conducts.iter().eq(all.iter()), "{conducts:?}");
    }

    #[test]
    fn the_whole_of_a_stream_is_the_same_request() {
        let ask = Ask::post("text", CHAT, &json!({"messages": [], "stream": true, "seed": 7}));
        assert!(ask.stream);
        let whole = ask.whole();
        assert_eq!(whole.body, json!({"messages": [], "seed": 7}).to_string().into_bytes());
        assert!(!whole.stream);
    }

    #[test]
    fn lengths_spread_over_their_range() {
        let mut dice = Dice::new(1);
        let lengths: Vec<usize> = (0..1000).map(|_| spread(&mut dice, 1, 200)).collect();
        assert!(lengths.iter().all(|&length| (1..=200).contains(&length)));
        assert!(lengths.iter().any(|&length| length < 3) && lengths.iter().any(|&length| length > 150));
    }
}
