//! The micro model and its data inside the binary (feature `embedded`, on by default).

/// A file of the embedded model: its name and its bytes.
pub(crate) type File = (&'static str, &'static [u8]);

#[cfg(feature = "embedded")]
macro_rules! bundle {
    ($folder:literal: $($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../", $folder, "/", $name)))),*]
    };
}

/// Files of the micro model; empty without the feature.
#[cfg(feature = "embedded")]
pub(crate) const MODEL: &[File] = bundle!("models/micro-bf16":
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json", "tokenizer.json",
    "tokenizer_config.json", "chat_template.jinja", "model.safetensors.index.json", "model-00001-of-00003.safetensors",
    "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors");

/// Task files by name.
#[cfg(feature = "embedded")]
pub(crate) const TASKS: &[File] = bundle!("data/eval":
    "arithmetic.jsonl", "arithmetic_hard.jsonl", "word_problem.jsonl", "text.jsonl", "facts.jsonl", "tools.jsonl",
    "tools_final.jsonl", "vision.jsonl", "recall.jsonl", "arithmetic_beyond.jsonl");

/// The token panel.
#[cfg(feature = "embedded")]
pub(crate) const DOCUMENTS: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/eval/documents.jsonl"));

/// The calibration set of the micro model.
#[cfg(feature = "embedded")]
pub(crate) const CALIBRATION: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/calib/calib.jsonl"));

#[cfg(not(feature = "embedded"))]
pub(crate) const MODEL: &[File] = &[];
#[cfg(not(feature = "embedded"))]
pub(crate) const TASKS: &[File] = &[];
#[cfg(not(feature = "embedded"))]
pub(crate) const DOCUMENTS: &[u8] = &[];
#[cfg(not(feature = "embedded"))]
pub(crate) const CALIBRATION: &[u8] = &[];
