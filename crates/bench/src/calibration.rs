//! Calibration samples: reading them in the forms in which people have them, and the features of their pictures.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use glimmer_checkpoint::Checkpoint;
use glimmer_quantize::{CalibrationSample, ImageFeatures};
use glimmer_tensor::Backend;

use glimmer_text::{ChatInput, Message};
use serde::Deserialize;
use serde_json::Value;

use crate::error::BenchError;
use crate::jsonl;
use crate::local::ModelText;
use crate::panel::Document;
use crate::pictures::PictureEncoder;

#[derive(Deserialize)]
struct RawSample {
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    input_ids: Option<Vec<u32>>,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    messages: Option<Vec<Message>>,
    #[serde(default)]
    tools: Vec<Value>,
    #[serde(default)]
    images: Vec<String>,
}

/// Reads a JSONL file of calibration samples. A line has `input_ids` (with `images`, base64, if it has placeholders), or
/// `text` as the model would see it, control tokens included, or `messages` (and `tools`) to be rendered with the model's
/// template. `input_ids` win over `text`, and both over `messages`. `file` names the file in errors.
///
/// # Errors
/// [`BenchError::Line`] for a line that is none of these or that the model's tokenizer or template refuses,
/// [`BenchError::Empty`] for a file without samples, errors of a model without tokenizer where one is needed.
pub fn read_calibration(file: &str, text: &str, source: &Checkpoint) -> Result<Vec<Document>, BenchError> {
    let (mut documents, mut model) = (Vec::new(), None);
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let at = |problem: String| BenchError::Line { file: file.to_owned(), line: index + 1, problem };
        let raw: RawSample = jsonl::object(line).map_err(at)?;
        let ids = if let Some(ids) = raw.input_ids {
            ids
        } else {
            if model.is_none() {
                model = Some(ModelText::read(source)?);
            }
            let Some(model) = &model else { continue };
            match (&raw.text, &raw.messages) {
                (Some(text), _) => model.format.tokenizer().encode(text).map_err(|e| at(e.to_string()))?,
                (None, Some(messages)) if messages.is_empty() => {
                    return Err(at("messages: expected at least one, found none".to_owned()));
                }
                (None, Some(messages)) => {
                    let input = ChatInput { messages, tools: &raw.tools, ..ChatInput::default() };
                    let prompt = model.format.prompt(&input).map_err(|e| at(e.to_string()))?;
                    model.format.expand(&prompt, &[], &[]).map_err(|e| at(e.to_string()))?
                }
                (None, None) => return Err(at("expected `input_ids`, `text` or `messages`, found none".to_owned())),
            }
        };
        if ids.is_empty() {
            return Err(at("it has no tokens".to_owned()));
        }
        let decode =
            |image: &String| STANDARD.decode(image).map_err(|error| at(format!("images: not base64: {error}")));
        let images = raw.images.iter().map(decode).collect::<Result<_, _>>()?;
        documents.push(Document { id: raw.id.unwrap_or_else(|| format!("line {}", index + 1)), ids, images });
    }
    if documents.is_empty() {
        return Err(BenchError::Empty { file: file.to_owned() });
    }
    Ok(documents)
}

/// Turns documents into calibration samples; pictures go through the model's own vision tower.
///
/// # Errors
/// [`BenchError::Model`] for a picture that cannot be encoded, or any picture if the model has no vision tower.
pub fn calibration_samples<B: Backend>(
    documents: &[Document],
    mut pictures: Option<&mut PictureEncoder<B>>,
) -> Result<Vec<CalibrationSample>, BenchError> {
    let mut samples = Vec::with_capacity(documents.len());
    for document in documents {
        let mut images = Vec::with_capacity(document.images.len());
        for file in &document.images {
            let Some(pictures) = pictures.as_deref_mut() else {
                return Err(BenchError::model(&document.id, "it has pictures, the model has no vision tower"));
            };
            images.push(ImageFeatures { values: pictures.encode(&document.id, file)? });
        }
        samples.push(CalibrationSample { ids: document.ids.clone(), images });
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micro() -> Checkpoint {
        Checkpoint::open(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16")).unwrap()
    }

    #[test]
    fn ids_text_and_messages_are_read() {
        let text = r#"{"input_ids": [5, 6], "text": "ignored"}

{"id": "t", "text": "<|user|>Hi<|assistant|><think></think>Hi<|user|>"}
{"messages": [{"role": "user", "content": "<|user|>"}, {"role": "assistant", "content": "Yes"}]}
"#;
        let source = micro();
        let documents = read_calibration("f", text, &source).unwrap();
        assert_eq!((documents[0].ids.as_slice(), documents[0].id.as_str()), (&[5, 6][..], "line 1"));
        let user = ModelText::read(&source).unwrap().format.tokenizer().added_id("<|user|>").unwrap();
        let count = |ids: &[u32]| ids.iter().filter(|&&id| id == user).count();
        assert_eq!((documents[1].id.as_str(), count(&documents[1].ids)), ("t", 2));
        assert_eq!(count(&documents[2].ids), 1, "a control token in a message is ordinary text");
    }

    #[test]
    fn bad_lines_name_file_and_line() {
        let source = micro();
        for (bad, needle) in [
            (r#"{"messages": []}"#, "messages: expected at least one"),
            ("[]", "line 2: expected one JSON object"),
            ("{}", "found none"),
            ("{\"input_ids\": []}", "no tokens"),
            ("{\"text\": \"\"}", "no tokens"),
            ("[1]", "line 2"),
            ("{\"input_ids\": [1], \"images\": [\"!\"]}", "base64"),
        ] {
            let error = read_calibration("calib.jsonl", &format!("\n{bad}\n"), &source).unwrap_err().to_string();
            assert!(error.contains("calib.jsonl") && error.contains(needle), "{bad}: {error}");
        }
        assert!(read_calibration("calib.jsonl", "\n", &source).is_err());
    }
}
