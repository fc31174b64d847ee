//! The front end over scripts: what clients see, without a model.
//!
//! Questions are answered with `It is 4.`, images with a colour, tools with a call and its result with a sentence, a
//! required shape with `{"answer": 4}`. `cargo run -p glimmer-server --example scripted -- 8000`

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program for trying things out")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use glimmer_engine::request::Structure;
use glimmer_server::app::{App, Options};
use glimmer_server::engine::{GenerationDefaults, Model};
use glimmer_server::scripted::{AnyShape, Script, Scripted};
use glimmer_server::serve::{bind, serve, stop_signal};
use glimmer_text::ChatFormat;

const CALL: &str =
    "I need the weather.</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>";

#[tokio::main]
async fn main() {
    let port = std::env::args().nth(1).map_or(8000, |text| text.parse().unwrap());
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16"));
    let format = Arc::new(ChatFormat::from_dir(path).unwrap());
    let words = Arc::clone(&format);
    let engine = Scripted::new(move |request| {
        let tokenizer = words.tokenizer();
        let prompt = tokenizer.decode(&request.prompt, false);
        let last = prompt.rsplit("<|user|>").next().unwrap_or_default();
        let answer = if matches!(request.structure, Some(Structure::JsonSchema(_) | Structure::JsonObject)) {
            "Count.</think>{\"answer\": 4}"
        } else if !request.media.is_empty() {
            "I see it.</think>It is red."
        } else if prompt.contains("<tools>") && !last.contains("<tool_response>") {
            CALL
        } else if last.contains("<tool_response>") {
            "Read it.</think>It is 18 degrees in Paris."
        } else if request.starts_in_reasoning {
            "Two and two.</think>It is 4."
        } else {
            "It is 4."
        };
        let mut ids = tokenizer.encode(answer).unwrap();
        ids.push(tokenizer.added_id("<|user|>").unwrap());
        Ok(Script { pace: Duration::from_millis(2), ..Script::of(&ids) })
    });
    let model = Model {
        vocab_size: format.tokenizer().vocab_size(),
        format,
        served_names: vec!["micro".to_owned()],
        root: "scripted".to_owned(),
        max_model_len: 8192,
        defaults: GenerationDefaults::default(),
        processors: Some(glimmer_model::vision::Processors {
            image: glimmer_model::vision::Processor::default(),
            video: glimmer_model::vision::Processor::default(),
        }),
        grammars: Some(Arc::new(AnyShape)),
    };
    let options = Options { reasoning: true, tools: true, auto_tool_choice: true, ..Options::default() };
    let app = App::new(Arc::new(engine), model, options);
    let listener = bind(Some("127.0.0.1"), port).unwrap();
    println!("listening on {}", listener.local_addr().unwrap());
    let stop = async {
        let _signal = stop_signal().await;
    };
    serve(app, listener, stop).await.unwrap();
}
