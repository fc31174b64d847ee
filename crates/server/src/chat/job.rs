//! A conversation to be answered, whichever API it came by.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bytes::Bytes;
use glimmer_engine::request::{Request, Structure};
use glimmer_text::{Budget, ChatInput, MediaSource, Message, Part, Start, ToolMode, ToolSchemas};
use serde_json::{Map, Value};

use crate::answer::Rules;
use crate::app::{App, unix_seconds};
use crate::chat::request::Places;
use crate::engine::Asked;
use crate::error::ApiError;
use crate::fields::parse_object;
use crate::prepare::prepare;
use crate::run::Run;
use crate::sampling::Common;
use crate::work::{Weight, off_thread};

/// A conversation, what to make of it and how.
#[derive(Clone, Debug)]
pub struct Job {
    /// The conversation.
    pub messages: Vec<Message>,
    /// Where the client wrote it.
    pub places: Places,
    /// Tool definitions for the template.
    pub tools: Vec<Value>,
    /// Their schemas.
    pub schemas: ToolSchemas,
    /// What to do with calls.
    pub tool_mode: ToolMode,
    /// Whether a call must come, and of which function.
    pub required_tool: Option<Option<String>>,
    /// At most one call.
    pub single_call: bool,
    /// Variables of the template.
    pub variables: Map<String, Value>,
    /// Open the assistant's turn.
    pub add_generation_prompt: bool,
    /// Log-probabilities of the answer, with this many best tokens.
    pub logprobs: Option<u32>,
    /// Most tokens of reasoning.
    pub thinking_budget: Option<u32>,
    /// Report reasoning.
    pub include_reasoning: bool,
    /// Text to put before the answer.
    pub echo: Option<String>,
    /// Everything else.
    pub common: Common,
}

/// A job ready to be submitted.
#[derive(Debug)]
pub struct Ready {
    requests: Vec<Asked>,
    plan: Plan,
}

/// A submitted job.
#[derive(Debug)]
pub struct Submitted {
    /// What the answer's writer has to know.
    pub plan: Plan,
    /// The running request.
    pub run: Run,
}

/// What the writer of an answer has to know.
#[derive(Debug)]
pub struct Plan {
    /// Id of the answer, with the API's prefix.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Tokens of the prompt.
    pub prompt: Arc<[u32]>,
    /// Answers.
    pub n: usize,
    /// From tokens to text.
    pub rules: Rules,
    /// Whether log-probabilities go out.
    pub logprobs: bool,
    /// Write tokens of log-probabilities as `token_id:N`.
    pub tokens_as_ids: bool,
    /// Whether token ids go out.
    pub token_ids: bool,
    /// Text to put before each answer.
    pub echo: Option<String>,
    /// Stream.
    pub stream: bool,
    /// End the stream with the usage.
    pub include_usage: bool,
    /// Add the usage to every event.
    pub continuous_usage: bool,
}

/// Reads a body and makes its job ready, each where it does not hold up other connections. `read` may return something
/// else that the answer's writer needs.
///
/// # Errors
/// Everything that is known before the engine is asked.
pub async fn make_ready<T: Send + 'static>(
    app: &Arc<App>,
    body: Bytes,
    read: impl FnOnce(&Map<String, Value>, &App) -> Result<(Job, T), ApiError> + Send + 'static,
    prefix: &'static str,
) -> Result<(Ready, T), ApiError> {
    let (bytes, reader) = (body.len(), Arc::clone(app));
    let (job, rest) = off_thread(Weight::Body(bytes), move |_| read(&parse_object(&body)?, &reader)).await?;
    let (weight, app) = (job.weight(bytes), Arc::clone(app));
    let ready = off_thread(weight, move |gone| job.prepare(&app, prefix, gone)).await?;
    Ok((ready, rest))
}

impl Job {
    /// What preparing it is like. It may take long however short its body of so many bytes is: small files unpack to large
    /// pictures, short schemas to large grammars.
    pub(crate) fn weight(&self, bytes: usize) -> Weight {
        let parts = || self.messages.iter().flat_map(|message| message.content.parts());
        let urls = parts().filter_map(|part| match part {
            Part::Image(MediaSource::Url(url)) | Part::Video(MediaSource::Url(url)) => Some(url.len()),
            Part::Image(MediaSource::Supplied) | Part::Video(MediaSource::Supplied) => Some(0),
            Part::Text(_) | Part::Other(_) => None,
        });
        let (pictures, in_urls) = urls.fold((0, 0), |(count, sum), bytes| (count + 1, sum + bytes));
        let text = bytes.saturating_sub(in_urls);
        let shaped = self.required_tool.is_some() || self.common.structure.is_some();
        if shaped || pictures > 0 { Weight::Heavy(text) } else { Weight::Text(text) }
    }

    /// Tokens of the conversation alone, `most` of them unless they are to be cut or counted.
    ///
    /// # Errors
    /// As [`Job::prepare`].
    pub fn prompt(
        &self,
        app: &App,
        most: Option<usize>,
        gone: &AtomicBool,
    ) -> Result<crate::prepare::Prepared, ApiError> {
        let input = ChatInput {
            messages: &self.messages,
            tools: &self.tools,
            variables: Some(&self.variables),
            add_generation_prompt: self.add_generation_prompt,
            allow_special: false,
        };
        let prepared = prepare(app, &input, Budget { tokens: most, abandoned: Some(gone) });
        let mut prepared = prepared.map_err(|error| self.places.of(error))?;
        if let Some(keep) = self.common.truncate.filter(|&keep| keep < prepared.ids.len()) {
            if !prepared.media.is_empty() {
                let message = "a prompt with images cannot be truncated";
                return Err(ApiError::parameter("truncate_prompt_tokens", message));
            }
            prepared.ids.drain(..prepared.ids.len() - keep);
        }
        Ok(prepared)
    }

    /// Makes the prompt and the engine's requests.
    ///
    /// # Errors
    /// What the template, the pictures or the limits refuse.
    pub fn prepare(self, app: &App, prefix: &str, gone: &AtomicBool) -> Result<Ready, ApiError> {
        let most = self.common.truncate.is_none().then_some(app.model.max_model_len);
        let prepared = self.prompt(app, most, gone)?;
        let limits = self.common.limits(app, prepared.ids.len(), self.places.field)?;
        let tokenizer = app.model.format.tokenizer();
        let start = Start::of_prompt(tokenizer, &prepared.ids);
        let turn_start = prepared.turn_start(tokenizer);
        let structure = self.structure(app)?;
        let shape_of = if self.required_tool.is_some() { "tools" } else { self.common.structure_field };
        let mut parse = app.options.parse_options();
        parse.tools = if app.options.tools { self.tool_mode } else { ToolMode::Off };
        parse.single_call = self.single_call;
        let common = self.common;
        let fresh = app.fresh_id();
        let id = format!("{prefix}{}", common.request_id.as_deref().unwrap_or(&fresh));
        let template = Request {
            id: id.clone(),
            group: group(&fresh),
            prompt: prepared.ids.into(),
            media: prepared.media.into(),
            sampling: common.sampling,
            limits,
            logprobs: self.logprobs,
            prompt_logprobs: common.prompt_logprobs,
            priority: common.priority,
            cache_salt: common.cache_salt,
            structure,
            thinking_budget: self.thinking_budget,
            starts_in_reasoning: start == Start::Reasoning,
            turn_start,
            depth: None,
        };
        let plan = Plan {
            id,
            created: unix_seconds(),
            prompt: Arc::clone(&template.prompt),
            n: common.n,
            rules: Rules {
                parse,
                schemas: self.schemas,
                start,
                stop: common.stop,
                include_stop: common.include_stop,
                min_tokens: common.min_tokens,
                skip_special: common.skip_special,
                include_reasoning: self.include_reasoning,
                named_tool: matches!(self.required_tool, Some(Some(_))),
            },
            logprobs: self.logprobs.is_some(),
            tokens_as_ids: common.tokens_as_ids,
            token_ids: common.return_token_ids,
            echo: self.echo,
            stream: common.stream,
            include_usage: common.include_usage,
            continuous_usage: common.continuous_usage,
        };
        if app.options.log_requests {
            tracing::info!(
                id = plan.id, prompt_tokens = plan.prompt.len(), n = plan.n, sampling = ?template.sampling,
                limits = ?template.limits, "Received request"
            );
        }
        let requests = constrained(app, children(template, common.n), shape_of)?;
        Ok(Ready { requests, plan })
    }

    /// The shape of the answer: the one asked for, or the calls that must come.
    fn structure(&self, app: &App) -> Result<Option<Structure>, ApiError> {
        let Some(only) = &self.required_tool else { return Ok(self.common.structure.clone()) };
        if self.common.structure.is_some() {
            let message = "a required tool call and a shape of the answer exclude each other";
            return Err(ApiError::parameter("tool_choice", message));
        }
        // Without grammars the prompt alone has to do it, and a missing call is reported as what it is.
        if app.model.grammars.is_none() {
            return Ok(None);
        }
        let tools = self.tools.iter().map(Value::to_string).collect();
        Ok(Some(Structure::ToolCalls { tools, only: only.clone(), single: self.single_call || only.is_some() }))
    }
}

impl Ready {
    /// Hands the requests to the engine.
    ///
    /// # Errors
    /// The engine's refusal.
    pub fn submit(self, app: &Arc<App>) -> Result<Submitted, ApiError> {
        let run = Run::start(app, self.requests)?;
        Ok(Submitted { plan: self.plan, run })
    }
}

/// One request for each answer. With a seed each answer has its own, counted up.
#[must_use]
pub fn children(template: Request, n: usize) -> Vec<Request> {
    let mut children = vec![template; n];
    if n > 1 {
        for (index, child) in children.iter_mut().enumerate() {
            child.id = format!("{index}_{}", child.id);
            child.sampling.seed = child.sampling.seed.map(|seed| seed.wrapping_add(index as i64));
        }
    }
    children
}

/// Compiles the shape of each request's answer; `field` is the one that asked for it.
///
/// # Errors
/// What is wrong with the schema or grammar.
pub fn constrained(app: &App, requests: Vec<Request>, field: &str) -> Result<Vec<Asked>, ApiError> {
    let compile = |request: Request| {
        let shape = request.structure.as_ref().zip(app.model.grammars.as_ref());
        let constraint = shape.map(|(structure, grammars)| grammars.compile(structure)).transpose();
        let constraint = constraint.map_err(|error| ApiError::parameter(field, error.to_string()))?;
        Ok(Asked { request, constraint })
    };
    requests.into_iter().map(compile).collect()
}

/// A number for the requests of one call.
#[must_use]
pub fn group(fresh_id: &str) -> u64 {
    u64::from_str_radix(&fresh_id[..16], 16).unwrap_or(0)
}
