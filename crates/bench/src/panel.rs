//! The token panel: documents already tokenised for a model.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use crate::error::BenchError;
use crate::jsonl;

/// A document of the panel, or a calibration sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// Unique id.
    pub id: String,
    /// Tokens, image placeholders expanded.
    pub ids: Vec<u32>,
    /// Encoded image files, in the order of their placeholders.
    pub images: Vec<Vec<u8>>,
}

#[derive(Deserialize)]
struct RawDocument {
    #[serde(default)]
    id: Option<String>,
    input_ids: Vec<u32>,
    #[serde(default)]
    images: Vec<String>,
}

/// Reads a JSONL file of documents: `input_ids`, optional `id` and `images` (base64). `file` names it in errors.
///
/// # Errors
/// [`BenchError::Line`] for a line that is not a document, [`BenchError::Empty`] for a file without documents.
pub fn read_documents(file: &str, text: &str) -> Result<Vec<Document>, BenchError> {
    let mut documents = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let at = |problem: String| BenchError::Line { file: file.to_owned(), line: index + 1, problem };
        let raw: RawDocument = jsonl::object(line).map_err(at)?;
        if raw.input_ids.is_empty() {
            return Err(at("input_ids is empty; expected at least one token".to_owned()));
        }
        let decode =
            |image: &String| STANDARD.decode(image).map_err(|error| at(format!("images: not base64: {error}")));
        let images = raw.images.iter().map(decode).collect::<Result<_, _>>()?;
        documents.push(Document {
            id: raw.id.unwrap_or_else(|| format!("line {}", index + 1)),
            ids: raw.input_ids,
            images,
        });
    }
    if documents.is_empty() {
        return Err(BenchError::Empty { file: file.to_owned() });
    }
    Ok(documents)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_with_and_without_images() {
        let text = "{\"id\": \"a\", \"input_ids\": [1, 2], \"images\": [\"aGk=\"]}\n\n{\"input_ids\": [3]}\n";
        let documents = read_documents("f", text).unwrap();
        assert_eq!(documents[0], Document { id: "a".to_owned(), ids: vec![1, 2], images: vec![b"hi".to_vec()] });
        assert_eq!(documents[1].id, "line 3");
    }

    #[test]
    fn bad_lines_name_file_and_line() {
        for (bad, needle) in [
            ("{\"input_ids\": []}", "input_ids is empty"),
            ("{\"input_ids\": [-1]}", "-1"),
            ("{\"text\": \"x\"}", "input_ids"),
            ("{\"input_ids\": [1], \"images\": [\"!\"]}", "base64"),
        ] {
            let error = read_documents("d.jsonl", bad).unwrap_err().to_string();
            assert!(error.starts_with("d.jsonl, line 1: ") && error.contains(needle), "{error}");
        }
        assert!(matches!(read_documents("d", ""), Err(BenchError::Empty { .. })));
    }
}
