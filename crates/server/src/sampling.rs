//! The parameters that all generating routes share.
//!
//! Types are checked by [`Fields`], ranges here; nothing is clamped silently but `logit_bias`, which the protocol says to
//! clamp.

use glimmer_engine::request::{Limits, Sampling, Structure};
use serde_json::{Map, Value};

use crate::app::App;
use crate::error::{ApiError, shorten};
use crate::fields::Fields;

/// Parameters common to chat and completions.
#[derive(Clone, Debug)]
pub struct Common {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Most new tokens, if the client says so.
    pub max_tokens: Option<u64>,
    /// Least new tokens.
    pub min_tokens: u32,
    /// Go on behind end tokens.
    pub ignore_eos: bool,
    /// Stop strings.
    pub stop: Vec<String>,
    /// Stop tokens.
    pub stop_tokens: Vec<u32>,
    /// Keep the stop string in the text.
    pub include_stop: bool,
    /// Answers.
    pub n: usize,
    /// Scheduling priority.
    pub priority: i64,
    /// Salt of the prefix cache.
    pub cache_salt: Option<String>,
    /// Shape of the answer.
    pub structure: Option<Structure>,
    /// The field that gave it.
    pub structure_field: &'static str,
    /// Leave special tokens out of the text.
    pub skip_special: bool,
    /// Report token ids.
    pub return_token_ids: bool,
    /// Write tokens of log-probabilities as `token_id:N`.
    pub tokens_as_ids: bool,
    /// Keep only this many tokens at the end of the prompt.
    pub truncate: Option<usize>,
    /// Log-probabilities of the prompt, with this many best tokens.
    pub prompt_logprobs: Option<u32>,
    /// Stream the answer.
    pub stream: bool,
    /// Send a last event with the usage.
    pub include_usage: bool,
    /// Send the usage with each event.
    pub continuous_usage: bool,
    /// The client's name for the request.
    pub request_id: Option<String>,
}

/// Most stop strings of a request.
const STOPS: usize = 4;

impl Common {
    /// Reads the fields; `max_tokens` names the fields for the token limit, first one first.
    ///
    /// # Errors
    /// The first value that is out of range. Wrong types are left in the fields' problems.
    pub fn read(fields: &Fields<'_, '_>, app: &App, max_tokens: &[&str]) -> Result<Self, ApiError> {
        let stream = fields.flag("stream").unwrap_or(false);
        let (include_usage, continuous_usage) = stream_options(fields, stream)?;
        let max_tokens = max_tokens.iter().find_map(|key| fields.integer(key).map(|v| (*key, v)));
        let max_tokens = max_tokens.map(|(key, v)| positive(key, v)).transpose()?;
        let min_tokens = whole("min_tokens", fields.integer("min_tokens").unwrap_or(0))?;
        if let Some(most) = max_tokens.filter(|&most| most < u64::from(min_tokens)) {
            let message = format!("min_tokens must not exceed max_tokens={most}, got {min_tokens}");
            return Err(ApiError::parameter("min_tokens", message));
        }
        let sampling = sampling(fields, app)?;
        let n = usize::try_from(positive("n", fields.integer("n").unwrap_or(1))?).unwrap_or(usize::MAX);
        if n > 1 && sampling.temperature < GREEDY {
            return Err(ApiError::parameter("n", format!("n must be 1 with temperature 0, got {n}")));
        }
        if n > app.options.max_answers {
            let message = format!("n must be at most {}, got {n}", app.options.max_answers);
            return Err(ApiError::parameter("n", message));
        }
        let priority = fields.integer("priority").unwrap_or(0);
        if priority != 0 && !app.options.priority_policy {
            let message = "priority needs a server with --scheduling-policy priority";
            return Err(ApiError::parameter("priority", message));
        }
        let prompt_logprobs = match fields.integer("prompt_logprobs") {
            None => None,
            Some(_) if stream => {
                return Err(ApiError::parameter("prompt_logprobs", "prompt_logprobs cannot be streamed"));
            }
            Some(count) => Some(top_count(app, "prompt_logprobs", count)?),
        };
        let cache_salt = fields.text("cache_salt");
        if cache_salt == Some("") {
            return Err(ApiError::parameter("cache_salt", "cache_salt must not be empty"));
        }
        let structured = fields.value("structured_outputs").is_some();
        let stop_tokens = fields.token_ids("stop_token_ids").unwrap_or_default();
        check_vocabulary("stop_token_ids", &stop_tokens, app)?;
        Ok(Self {
            sampling,
            max_tokens,
            min_tokens,
            ignore_eos: fields.flag("ignore_eos").unwrap_or(false),
            stop: stops(fields)?,
            stop_tokens,
            include_stop: fields.flag("include_stop_str_in_output").unwrap_or(false),
            n,
            priority,
            cache_salt: cache_salt.map(str::to_owned),
            structure: structure(fields, app)?,
            structure_field: if structured { "structured_outputs" } else { "response_format" },
            skip_special: fields.flag("skip_special_tokens").unwrap_or(true),
            return_token_ids: fields.flag("return_token_ids").unwrap_or(false),
            tokens_as_ids: fields.flag("return_tokens_as_token_ids").unwrap_or(false),
            truncate: truncate(fields, app)?,
            prompt_logprobs,
            stream,
            include_usage: include_usage || (stream && app.options.force_include_usage),
            continuous_usage,
            request_id: request_id(fields)?,
        })
    }

    /// Limits for a prompt of `prompt` tokens.
    ///
    /// # Errors
    /// The context error, naming `param`.
    pub fn limits(&self, app: &App, prompt: usize, param: &str) -> Result<Limits, ApiError> {
        let context = app.model.max_model_len;
        let room = context.saturating_sub(prompt);
        let asked = self.max_tokens.map(|v| usize::try_from(v).unwrap_or(usize::MAX));
        if room == 0 || asked.is_some_and(|asked| asked > room) {
            return Err(ApiError::context(param, context, prompt, asked));
        }
        let default = app.model.defaults.max_new_tokens.map_or(room, |v| room.min(v as usize));
        let max_tokens = u32::try_from(asked.unwrap_or(default)).unwrap_or(u32::MAX);
        if self.min_tokens > max_tokens {
            let message = format!("min_tokens must not exceed the {max_tokens} tokens that are left for the answer");
            return Err(ApiError::parameter("min_tokens", message));
        }
        Ok(Limits {
            max_tokens,
            min_tokens: self.min_tokens,
            ignore_eos: self.ignore_eos,
            stop_tokens: self.stop_tokens.clone(),
        })
    }
}

/// Temperatures below are greedy.
const GREEDY: f32 = 1e-5;

/// A client's own id, which goes into logs and the answer's.
fn request_id(fields: &Fields<'_, '_>) -> Result<Option<String>, ApiError> {
    match fields.text("request_id") {
        Some(id) if id.is_empty() || id.len() > 64 || !id.bytes().all(|byte| byte.is_ascii_graphic()) => {
            let message = "request_id must be 1 to 64 visible ASCII characters without spaces";
            Err(ApiError::parameter("request_id", message))
        }
        id => Ok(id.map(str::to_owned)),
    }
}

fn stream_options(fields: &Fields<'_, '_>, stream: bool) -> Result<(bool, bool), ApiError> {
    let Some(options) = fields.object("stream_options") else { return Ok((false, false)) };
    if !stream {
        return Err(ApiError::parameter("stream_options", "stream_options can only be given with stream=true"));
    }
    let include = options.flag("include_usage").unwrap_or(false);
    Ok((include, include && options.flag("continuous_usage_stats").unwrap_or(false)))
}

fn sampling(fields: &Fields<'_, '_>, app: &App) -> Result<Sampling, ApiError> {
    let defaults = &app.model.defaults;
    let ranged = |key: &str, default: f32, range: std::ops::RangeInclusive<f64>| match fields.number(key) {
        None => Ok(default),
        Some(value) if range.contains(&value) => Ok(value as f32),
        Some(value) => {
            let message = format!("{key} must be in [{}, {}], got {value}", range.start(), range.end());
            Err(ApiError::parameter(key, message))
        }
    };
    let top_p = ranged("top_p", defaults.top_p, 0.0..=1.0)?;
    if top_p <= 0.0 {
        return Err(ApiError::parameter("top_p", format!("top_p must be in (0, 1], got {top_p}")));
    }
    let top_k = match fields.integer("top_k") {
        None => defaults.top_k,
        Some(0 | -1) => None,
        Some(value) => Some(u32::try_from(value.min(i64::from(u32::MAX))).map_err(|_| {
            ApiError::parameter("top_k", format!("top_k must be -1 or 0 (off) or at least 1, got {value}"))
        })?),
    };
    let repetition = fields.number("repetition_penalty").map_or(defaults.repetition_penalty, |v| v as f32);
    if repetition <= 0.0 || !repetition.is_finite() {
        let message = format!("repetition_penalty must be greater than 0, got {repetition}");
        return Err(ApiError::parameter("repetition_penalty", message));
    }
    let allowed_tokens = fields.token_ids("allowed_token_ids");
    if let Some(ids) = &allowed_tokens {
        if ids.is_empty() {
            return Err(ApiError::parameter("allowed_token_ids", "allowed_token_ids must not be empty"));
        }
        check_vocabulary("allowed_token_ids", ids, app)?;
    }
    Ok(Sampling {
        temperature: ranged("temperature", defaults.temperature, 0.0..=2.0)?,
        top_p,
        top_k,
        min_p: ranged("min_p", defaults.min_p, 0.0..=1.0)?,
        presence_penalty: ranged("presence_penalty", 0.0, -2.0..=2.0)?,
        frequency_penalty: ranged("frequency_penalty", 0.0, -2.0..=2.0)?,
        repetition_penalty: repetition,
        logit_bias: logit_bias(fields, app)?,
        allowed_tokens,
        bad_words: bad_words(fields, app)?,
        seed: fields.integer("seed"),
    })
}

fn logit_bias(fields: &Fields<'_, '_>, app: &App) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(entries) = fields.object("logit_bias") else { return Ok(Vec::new()) };
    let read = |(key, value): (&String, &Value)| {
        let id = key.parse::<i64>().ok().and_then(|id| u32::try_from(id).ok());
        let Some(id) = id.filter(|&id| (id as usize) < app.model.vocab_size) else {
            let message = format!("logit_bias: {:?} is no token id below {}", shorten(key), app.model.vocab_size);
            return Err(ApiError::parameter("logit_bias", message));
        };
        let Some(bias) = value.as_f64() else {
            return Err(ApiError::parameter("logit_bias", format!("logit_bias.{id} must be a number")));
        };
        Ok((id, bias.clamp(-100.0, 100.0) as f32))
    };
    entries.map().iter().map(read).collect()
}

/// Each word as it would continue a text, with and without a space before it.
fn bad_words(fields: &Fields<'_, '_>, app: &App) -> Result<Vec<Vec<u32>>, ApiError> {
    let mut words = Vec::new();
    for word in fields.texts("bad_words").unwrap_or_default() {
        if word.is_empty() {
            return Err(ApiError::parameter("bad_words", "bad_words must not hold empty texts"));
        }
        for text in [format!(" {}", word.trim_start()), word] {
            let ids = app.model.format.tokenizer().encode_ordinary(&text)?;
            if !words.contains(&ids) {
                words.push(ids);
            }
        }
    }
    Ok(words)
}

fn stops(fields: &Fields<'_, '_>) -> Result<Vec<String>, ApiError> {
    let stops = fields.texts("stop").unwrap_or_default();
    if stops.len() > STOPS {
        return Err(ApiError::parameter("stop", format!("stop takes at most {STOPS} texts, got {}", stops.len())));
    }
    if stops.iter().any(String::is_empty) {
        return Err(ApiError::parameter("stop", "stop must not hold empty texts"));
    }
    Ok(stops)
}

fn truncate(fields: &Fields<'_, '_>, app: &App) -> Result<Option<usize>, ApiError> {
    match fields.integer("truncate_prompt_tokens") {
        None => Ok(None),
        Some(-1) => Ok(Some(app.model.max_model_len)),
        Some(value) => match usize::try_from(value) {
            Ok(count) if (1..=app.model.max_model_len).contains(&count) => Ok(Some(count)),
            _ => {
                let most = app.model.max_model_len;
                let message = format!("truncate_prompt_tokens must be -1 or in [1, {most}], got {value}");
                Err(ApiError::parameter("truncate_prompt_tokens", message))
            }
        },
    }
}

/// `response_format` and `structured_outputs`: together at most one shape.
fn structure(fields: &Fields<'_, '_>, app: &App) -> Result<Option<Structure>, ApiError> {
    let mut shapes = Vec::new();
    if let Some(format) = fields.object("response_format") {
        match format.text("type") {
            Some("text") => {}
            Some("json_object") => shapes.push(Structure::JsonObject),
            Some("json_schema") => {
                let schema = format.object("json_schema").and_then(|inner| inner.value("schema").cloned());
                let Some(schema) = schema else {
                    let message = "response_format of type json_schema needs json_schema.schema";
                    return Err(ApiError::parameter("response_format.json_schema.schema", message));
                };
                shapes.push(Structure::JsonSchema(schema.to_string()));
            }
            Some("structural_tag") => shapes.push(Structure::StructuralTag(json_text(format.map()))),
            Some(other) => {
                let message = format!(
                    "response_format.type must be text, json_object, json_schema or structural_tag, got {:?}",
                    shorten(other)
                );
                return Err(ApiError::parameter("response_format.type", message));
            }
            None => format.missing("type"),
        }
    }
    if let Some(outputs) = fields.object("structured_outputs") {
        let before = shapes.len();
        if let Some(schema) = outputs.value("json") {
            let text = schema.as_str().map_or_else(|| schema.to_string(), str::to_owned);
            shapes.push(Structure::JsonSchema(text));
        }
        shapes.extend(outputs.text("regex").map(|v| Structure::Regex(v.to_owned())));
        shapes.extend(outputs.texts("choice").map(Structure::Choice));
        shapes.extend(outputs.text("grammar").map(|v| Structure::Grammar(v.to_owned())));
        shapes.extend(outputs.text("structural_tag").map(|v| Structure::StructuralTag(v.to_owned())));
        if outputs.flag("json_object") == Some(true) {
            shapes.push(Structure::JsonObject);
        }
        if shapes.len() == before && fields.problems().check().is_ok() {
            let message = "structured_outputs needs one of json, regex, choice, grammar";
            return Err(ApiError::parameter("structured_outputs", message));
        }
    }
    if shapes.len() > 1 {
        let message =
            "the answer can have one shape only: give one of response_format and the keys of structured_outputs";
        return Err(ApiError::parameter("structured_outputs", message));
    }
    if matches!(shapes.first(), Some(Structure::Choice(choices)) if choices.is_empty()) {
        return Err(ApiError::parameter("structured_outputs.choice", "choice must not be empty"));
    }
    if !shapes.is_empty() && app.model.grammars.is_none() {
        let message =
            "this server cannot constrain the shape of answers; leave response_format and structured_outputs out";
        return Err(ApiError::parameter("response_format", message));
    }
    Ok(shapes.pop())
}

fn json_text(map: &Map<String, Value>) -> String {
    Value::Object(map.clone()).to_string()
}

/// A number of best tokens for log-probabilities; -1 is the whole vocabulary.
///
/// # Errors
/// When it is negative or above the server's limit.
pub fn top_count(app: &App, param: &str, count: i64) -> Result<u32, ApiError> {
    let most = app.options.max_logprobs.map_or(app.model.vocab_size, |most| most as usize);
    let wanted = if count == -1 { app.model.vocab_size as i64 } else { count };
    match u32::try_from(wanted) {
        Ok(wanted) if wanted as usize <= most => Ok(wanted),
        _ if count == -1 => {
            let message = format!("{param} of -1 asks for all {wanted} tokens; this server gives at most {most}");
            Err(ApiError::parameter(param, message))
        }
        _ => Err(ApiError::parameter(param, format!("{param} must be in [0, {most}], got {count}"))),
    }
}

/// Checks that all ids are below the vocabulary's size.
///
/// # Errors
/// Naming the first id that is not.
pub fn check_vocabulary(param: &str, ids: &[u32], app: &App) -> Result<(), ApiError> {
    let size = app.model.vocab_size;
    match ids.iter().find(|&&id| id as usize >= size) {
        None => Ok(()),
        Some(id) => Err(ApiError::parameter(param, format!("{param}: token id {id} is not below {size}"))),
    }
}

fn positive(param: &str, value: i64) -> Result<u64, ApiError> {
    match u64::try_from(value) {
        Ok(value) if value > 0 => Ok(value),
        _ => Err(ApiError::parameter(param, format!("{param} must be at least 1, got {value}"))),
    }
}

fn whole(param: &str, value: i64) -> Result<u32, ApiError> {
    u32::try_from(value).map_err(|_| ApiError::parameter(param, format!("{param} must be at least 0, got {value}")))
}
