//! What the front end takes from a checkpoint: tokenizer, template, sampling defaults, picture settings, sizes.

use std::path::Path;
use std::sync::Arc;

use glimmer_checkpoint::{Checkpoint, TextConfig};
use glimmer_engine::constraint::Grammars;
use glimmer_model::vision::{Processors, VisionError};
use glimmer_text::{ChatFormat, ChatTemplate, TextError, Tokenizer};
use serde_json::{Map, Value};

use crate::engine::{GenerationDefaults, Model};
use crate::flags::config::{GenerationConfig, MaxModelLen};
use crate::flags::{ModelShape, ServeConfig};

/// Why a checkpoint cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A file is missing.
    #[error("{root} has no {file}; a model directory needs it")]
    Missing {
        /// Where was looked.
        root: String,
        /// What is missing.
        file: &'static str,
    },
    /// A file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: String,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// Steps cannot be recorded there.
    #[error("--record-steps: {path} {problem}")]
    Record {
        /// The file.
        path: String,
        /// What stands against it.
        problem: &'static str,
    },
    /// A file is not a JSON object.
    #[error("{file}: expected a JSON object: {problem}")]
    Json {
        /// The file or flag.
        file: String,
        /// What the parser said.
        problem: String,
    },
    /// Tokenizer or template.
    #[error(transparent)]
    Text(#[from] TextError),
    /// Picture settings.
    #[error(transparent)]
    Vision(#[from] VisionError),
}

impl ModelShape {
    /// What flags have to fit.
    #[must_use]
    pub fn of(checkpoint: &Checkpoint) -> Self {
        Self::of_text(&checkpoint.config().text)
    }

    /// What flags have to fit of a configuration.
    #[must_use]
    pub fn of_text(text: &TextConfig) -> Self {
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        Self {
            attention_heads: count(text.mla.num_heads),
            routed_experts: count(text.moe.num_experts),
            max_positions: text.max_position_embeddings,
        }
    }
}

impl Model {
    /// The served model. `max_model_len` is what the engine settled on where the flags leave it open.
    ///
    /// # Errors
    /// A file that is missing or cannot be used.
    pub fn open(
        checkpoint: &Checkpoint,
        config: &ServeConfig,
        max_model_len: usize,
        grammars: Option<Arc<dyn Grammars>>,
    ) -> Result<Self, OpenError> {
        let root = config.model.clone().unwrap_or_else(|| "embedded".to_owned());
        let names = if config.served_names.is_empty() { vec![root.clone()] } else { config.served_names.clone() };
        let takes_media = config.options.max_images > 0 || config.options.max_videos > 0;
        let processors = match &checkpoint.config().vision {
            Some(vision) if !config.text_only && takes_media => {
                let [nested, flat] =
                    ["processor_config.json", "preprocessor_config.json"].map(|name| checkpoint.file(name));
                let bytes = |file: &Option<glimmer_checkpoint::Bytes>| file.as_ref().map(|f| f.as_slice().to_vec());
                Some(Processors::from_files(vision, bytes(&nested).as_deref(), bytes(&flat).as_deref())?)
            }
            _ => None,
        };
        let asked = match config.max_model_len {
            Some(MaxModelLen::Tokens(tokens)) => tokens.min(max_model_len),
            _ => max_model_len,
        };
        Ok(Self {
            format: Arc::new(format(checkpoint, config)?),
            served_names: names,
            root,
            max_model_len: asked,
            vocab_size: checkpoint.config().text.vocab_size,
            defaults: generation_defaults(checkpoint, config)?,
            processors,
            grammars,
        })
    }
}

/// Checks the files of the front end that the flags name, and with a checkpoint those that it brings, as the start does.
///
/// # Errors
/// A file that is missing or cannot be used.
pub fn check(checkpoint: Option<&Checkpoint>, config: &ServeConfig) -> Result<(), OpenError> {
    match checkpoint {
        Some(checkpoint) => Model::open(checkpoint, config, usize::MAX, None).map(drop)?,
        None => {
            config.tokenizer.as_ref().map(|directory| Tokenizer::from_dir(Path::new(directory))).transpose()?;
            config.chat_template.as_deref().map(given_template).transpose()?;
        }
    }
    check_record(config)
}

/// Whether a file can be made where steps are to be recorded. None is.
///
/// # Errors
/// [`OpenError::Record`].
pub fn check_record(config: &ServeConfig) -> Result<(), OpenError> {
    let Some(path) = &config.record_steps else { return Ok(()) };
    let fail = |problem: &'static str| Err(OpenError::Record { path: path.clone(), problem });
    let file = Path::new(path);
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match () {
        () if file.is_dir() => fail("is a folder; name a file"),
        () if !folder.is_dir() => fail("is in a folder that does not exist"),
        () => Ok(()),
    }
}

fn file(checkpoint: &Checkpoint, name: &'static str) -> Result<Vec<u8>, OpenError> {
    let missing = || OpenError::Missing { root: checkpoint.location().to_owned(), file: name };
    Ok(checkpoint.file(name).ok_or_else(missing)?.as_slice().to_vec())
}

fn format(checkpoint: &Checkpoint, config: &ServeConfig) -> Result<ChatFormat, OpenError> {
    let tokenizer = match &config.tokenizer {
        Some(directory) => Tokenizer::from_dir(Path::new(directory))?,
        None => Tokenizer::from_bytes(&file(checkpoint, "tokenizer.json")?)?,
    };
    let template = match &config.chat_template {
        Some(given) => given_template(given)?,
        None => ChatTemplate::new(&String::from_utf8_lossy(&file(checkpoint, "chat_template.jinja")?))?,
    };
    Ok(ChatFormat::new(tokenizer, template))
}

/// A template in one line has tags; a path has none.
fn given_template(given: &str) -> Result<ChatTemplate, OpenError> {
    let inline = given.contains("{%") || given.contains("{{");
    let text = if inline { given.to_owned() } else { read(given)? };
    Ok(ChatTemplate::new(&text)?)
}

fn read(path: &str) -> Result<String, OpenError> {
    std::fs::read_to_string(path).map_err(|source| OpenError::Read { path: path.to_owned(), source })
}

fn generation_defaults(checkpoint: &Checkpoint, config: &ServeConfig) -> Result<GenerationDefaults, OpenError> {
    let map = match &config.generation_config {
        GenerationConfig::Neutral => Map::new(),
        _ => generation_file(checkpoint, config)?,
    };
    Ok(GenerationDefaults::default().with(&map).with(&config.generation_overrides))
}

/// Tokens that end an answer, as the generation configuration says (also where its sampling defaults are not wanted: without
/// them the model would go on and play the user's part); `None` where it does not.
///
/// # Errors
/// When the file cannot be used.
pub fn end_tokens(checkpoint: &Checkpoint, config: &ServeConfig) -> Result<Option<Vec<u32>>, OpenError> {
    let map = generation_file(checkpoint, config)?;
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids = match map.get("eos_token_id") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(list)) => list.iter().map(id).collect::<Option<Vec<u32>>>(),
        Some(one) => id(one).map(|id| vec![id]),
    };
    let problem = || "eos_token_id must be a token id or a list of them".to_owned();
    ids.map(Some).ok_or_else(|| OpenError::Json { file: GENERATION.to_owned(), problem: problem() })
}

const GENERATION: &str = "generation_config.json";

fn generation_file(checkpoint: &Checkpoint, config: &ServeConfig) -> Result<Map<String, Value>, OpenError> {
    let text = match &config.generation_config {
        GenerationConfig::Neutral | GenerationConfig::Model => {
            checkpoint.file(GENERATION).map(|bytes| bytes.as_slice().to_vec())
        }
        GenerationConfig::Directory(directory) => {
            let path = Path::new(directory).join(GENERATION).display().to_string();
            Some(read(&path)?.into_bytes())
        }
    };
    match text {
        None => Ok(Map::new()),
        Some(text) => serde_json::from_slice(&text)
            .map_err(|error| OpenError::Json { file: GENERATION.to_owned(), problem: error.to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::Settings;

    const MICRO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16");

    fn config(flags: &[&str]) -> ServeConfig {
        let flags: Vec<String> = flags.iter().map(|&flag| flag.to_owned()).collect();
        let settings = Settings::parse(&flags, &|_| None, &|_| Err(std::io::ErrorKind::NotFound.into())).unwrap();
        ServeConfig::new(&settings).unwrap()
    }

    #[test]
    fn the_micro_model_opens_as_the_flags_say() {
        let checkpoint = Checkpoint::open(MICRO).unwrap();
        let model = Model::open(&checkpoint, &config(&[]), 4096, None).unwrap();
        assert_eq!((model.served_names.as_slice(), model.max_model_len), (&["embedded".to_owned()][..], 4096));
        assert!(model.processors.is_some());
        assert_eq!(model.vocab_size, checkpoint.config().text.vocab_size);
        let flags = [
            "m",
            "--served-model-name",
            "a",
            "b",
            "--max-model-len",
            "1000",
            "--language-model-only",
            "--override-generation-config",
            r#"{"temperature": 0.5}"#,
            "--chat-template",
            "{{ messages[0].content }}",
        ];
        let model = Model::open(&checkpoint, &config(&flags), 4096, None).unwrap();
        assert_eq!((model.served_names.len(), model.root.as_str(), model.max_model_len), (2, "m", 1000));
        assert!(model.processors.is_none() && (model.defaults.temperature - 0.5).abs() < 1e-6);
        let shape = ModelShape::of(&checkpoint);
        assert_eq!((shape.attention_heads, shape.routed_experts), (4, 8));
    }

    #[test]
    fn files_that_cannot_be_used_are_named() {
        let checkpoint = Checkpoint::open(MICRO).unwrap();
        for (flags, needle) in [
            (["--chat-template", "/no/such.jinja"], "/no/such.jinja"),
            (["--chat-template", "{% if %}"], "chat template"),
            (["--tokenizer", "/no/such"], "/no/such/tokenizer.json"),
            (["--generation-config", "/no/such"], "/no/such/generation_config.json"),
        ] {
            let error = Model::open(&checkpoint, &config(&flags), 1, None).unwrap_err().to_string();
            assert!(error.contains(needle), "{error}");
        }
    }
}
