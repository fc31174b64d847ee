//! `/v1/completions`: raw prompts, plain text back.
//!
//! The prompt is the client's own and complete, so control tokens in it are recognised, unlike in chat messages. Several
//! prompts and several answers to each make one request; answer `k` of prompt `p` is choice `p * n + k`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use axum::body::Body;
use axum::http::Response;
use bytes::Bytes;
use glimmer_engine::request::{Logprobs, Request, TokenEvent};
use glimmer_text::{Budget, Event};
use serde_json::{Map, Value};

use crate::answer::{AnswerState, Rules};
use crate::app::{App, unix_seconds};
use crate::chat::job::{children, constrained, group};
use crate::chat::request::check_model;
use crate::chat::whole::stop_reason;
use crate::error::{ApiError, Dialect};
use crate::fields::{Fields, Problems, parse_object};
use crate::frames::Produced;
use crate::json::Json;
use crate::logprobs::{CompletionLogprobs, TokenNames};
use crate::run::Run;
use crate::sampling::{Common, check_vocabulary, top_count};
use crate::streamed;
use crate::usage::Usage;
use crate::work::{Weight, off_thread};

/// Tokens of an answer if the client does not say.
const DEFAULT_MAX_TOKENS: u64 = 16;
/// Most prompts of a request.
const PROMPTS: usize = 1024;

#[derive(Debug)]
struct Plan {
    id: String,
    created: u64,
    prompts: Vec<Arc<[u32]>>,
    n: usize,
    rules: Rules,
    logprobs: bool,
    tokens_as_ids: bool,
    token_ids: bool,
    echo: bool,
    /// Only the prompt goes out; the engine computes a token with it, which is thrown away.
    prompt_only: bool,
    stream: bool,
    include_usage: bool,
    continuous_usage: bool,
}

/// Serves one request.
///
/// # Errors
/// Everything that is known before the first token.
pub async fn serve(app: Arc<App>, body: Bytes, request_id: Option<String>) -> Result<Response<Body>, ApiError> {
    let reader = Arc::clone(&app);
    let read = off_thread(Weight::Text(body.len()), move |gone| {
        read(&parse_object(&body)?, &reader, request_id.as_deref(), gone)
    });
    let (plan, requests) = read.await?;
    let shaped = requests.iter().any(|request| request.structure.is_some());
    let weight = if shaped { Weight::Heavy(0) } else { Weight::Text(0) };
    let compiler = Arc::clone(&app);
    let requests = off_thread(weight, move |_| constrained(&compiler, requests, "structured_outputs")).await?;
    let mut run = Run::start(&app, requests)?;
    let estimate = run.estimate();
    if !plan.stream {
        return Ok(estimate.stamp(whole(&app, &plan, run).await?));
    }
    let first = streamed::first(&mut run, app.options.keep_alive).await?;
    let body = Produced::new(|frames| async move {
        streamed::write(Writer::new(&app, &plan), run, first, app.options.keep_alive, frames).await;
    });
    Ok(estimate.stamp(crate::event_stream(body)))
}

fn read(
    map: &Map<String, Value>,
    app: &App,
    request_id: Option<&str>,
    gone: &AtomicBool,
) -> Result<(Plan, Vec<Request>), ApiError> {
    let problems = Problems::default();
    let fields = Fields::new(map, &problems);
    check_model(&fields, app)?;
    let mut prompts = prompts(&fields, app, gone)?;
    let echo = fields.flag("echo").unwrap_or(false);
    let prompt_only = echo && fields.value("max_tokens").is_some_and(|most| most == 0);
    let common = Common::read(&fields, app, if prompt_only { &[] } else { &["max_tokens"] });
    let logprobs = fields.integer("logprobs");
    problems.check()?;
    let mut common = common?;
    if fields.value("suffix").is_some_and(|suffix| suffix != "") {
        return Err(ApiError::parameter("suffix", "suffix is not supported"));
    }
    let logprobs = logprobs.map(|count| top_count(app, "logprobs", count)).transpose()?;
    if prompt_only && common.min_tokens > 0 {
        let message = format!("min_tokens must not exceed max_tokens=0, got {}", common.min_tokens);
        return Err(ApiError::parameter("min_tokens", message));
    }
    common.max_tokens = common.max_tokens.or(Some(if prompt_only { 1 } else { DEFAULT_MAX_TOKENS }));
    if let Some(keep) = common.truncate {
        for prompt in &mut prompts {
            prompt.drain(..prompt.len().saturating_sub(keep));
        }
    }
    let fresh = app.fresh_id();
    let id = format!("cmpl-{}", request_id.or(common.request_id.as_deref()).unwrap_or(&fresh));
    let prompts: Vec<Arc<[u32]>> = prompts.into_iter().map(Into::into).collect();
    let mut requests = Vec::with_capacity(prompts.len() * common.n);
    for (index, prompt) in prompts.iter().enumerate() {
        let template = Request {
            id: if prompts.len() > 1 { format!("{id}-{index}") } else { id.clone() },
            group: group(&fresh).wrapping_add(index as u64),
            prompt: Arc::clone(prompt),
            media: Arc::new([]),
            sampling: common.sampling.clone(),
            limits: common.limits(app, prompt.len(), "prompt")?,
            logprobs,
            prompt_logprobs: common.prompt_logprobs.or(logprobs.filter(|_| echo)),
            priority: common.priority,
            cache_salt: common.cache_salt.clone(),
            structure: common.structure.clone(),
            thinking_budget: None,
            starts_in_reasoning: false,
            turn_start: None,
            depth: None,
        };
        requests.extend(children(template, common.n));
    }
    let plan = Plan {
        id,
        created: unix_seconds(),
        prompts,
        n: common.n,
        rules: Rules::plain(common.stop, common.include_stop, common.min_tokens, common.skip_special),
        logprobs: logprobs.is_some(),
        tokens_as_ids: common.tokens_as_ids,
        token_ids: common.return_token_ids,
        echo,
        prompt_only,
        stream: common.stream,
        include_usage: common.include_usage,
        continuous_usage: common.continuous_usage,
    };
    if app.options.log_requests {
        tracing::info!(id = plan.id, prompts = plan.prompts.len(), n = plan.n, "Received request");
    }
    Ok((plan, requests))
}

/// A text, a list of texts, a list of token ids, or a list of such lists.
fn prompts(fields: &Fields<'_, '_>, app: &App, gone: &AtomicBool) -> Result<Vec<Vec<u32>>, ApiError> {
    // What is cut fits whatever its length.
    let most = fields.value("truncate_prompt_tokens").is_none().then_some(app.model.max_model_len);
    let budget = Budget { tokens: most, abandoned: Some(gone) };
    let encode = |text: &str| {
        let ids = app.model.format.tokenizer().encode_within(text, &[], budget);
        ids.map_err(|error| ApiError::of_text("prompt", error))
    };
    let prompts = match fields.value("prompt") {
        None => {
            fields.missing("prompt");
            return fields.problems().check().map(|()| Vec::new());
        }
        Some(Value::String(text)) => vec![encode(text)?],
        Some(Value::Array(list)) if list.first().is_some_and(Value::is_number) => {
            vec![fields.token_ids("prompt").unwrap_or_default()]
        }
        Some(Value::Array(list)) if list.len() > PROMPTS => {
            let message = format!("a request takes at most {PROMPTS} prompts, got {}", list.len());
            return Err(ApiError::parameter("prompt", message));
        }
        Some(Value::Array(list)) => {
            let read = |(index, item): (usize, &Value)| match item {
                Value::String(text) => encode(text),
                Value::Array(ids) => {
                    let ids: Option<Vec<u32>> =
                        ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect();
                    Ok(ids.unwrap_or_else(|| {
                        fields.problems().add(format!("prompt[{index}]"), "expected a list of token ids");
                        Vec::new()
                    }))
                }
                _ => {
                    fields.problems().add(format!("prompt[{index}]"), "expected text or a list of token ids");
                    Ok(Vec::new())
                }
            };
            list.iter().enumerate().map(read).collect::<Result<_, _>>()?
        }
        Some(other) => {
            fields.wrong("prompt", "text, a list of texts or token ids", other);
            Vec::new()
        }
    };
    fields.problems().check()?;
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(ApiError::parameter("prompt", "prompt must hold at least one token"));
    }
    for ids in &prompts {
        check_vocabulary("prompt", ids, app)?;
    }
    Ok(prompts)
}

/// One choice on its way out.
struct Choice<'a> {
    state: AnswerState<'a>,
    events: Vec<Event>,
    /// Characters of text sent, where text offsets count from.
    offset: usize,
    logprobs: CompletionLogprobs,
    ids: Vec<u32>,
    text: String,
    begun: bool,
    held: u32,
}

impl Plan {
    fn names<'a>(&self, app: &'a App) -> TokenNames<'a> {
        TokenNames { tokenizer: app.model.format.tokenizer(), as_ids: self.tokens_as_ids }
    }

    fn choices<'a>(&'a self, app: &'a App) -> Vec<Choice<'a>> {
        let tokenizer = app.model.format.tokenizer();
        let choice = |_| Choice {
            state: AnswerState::new(tokenizer, &self.rules),
            events: Vec::new(),
            offset: 0,
            logprobs: CompletionLogprobs::default(),
            ids: Vec::new(),
            text: String::new(),
            begun: false,
            held: 0,
        };
        (0..self.prompts.len() * self.n).map(choice).collect()
    }

    fn usage(&self, app: &App, run: &Run, choices: &[Choice<'_>]) -> Usage {
        Usage {
            prompt: self.prompts.iter().map(|prompt| prompt.len() as u64).sum(),
            completion: choices.iter().map(|choice| choice.state.tokens).filter(|_| !self.prompt_only).sum(),
            cached: app.options.prompt_tokens_details.then(|| u64::from(run.cached_tokens())),
            reasoning: None,
        }
    }

    /// Feeds an event to its choice; true once the choice has ended.
    fn feed(
        &self,
        app: &App,
        run: &mut Run,
        index: usize,
        event: &TokenEvent,
        choices: &mut [Choice<'_>],
    ) -> Result<bool, ApiError> {
        let names = self.names(app);
        let choice = &mut choices[index];
        if choice.state.ending.is_some() {
            return Ok(true);
        }
        if !choice.begun {
            choice.begun = true;
            if self.echo {
                let prompt = &self.prompts[index / self.n];
                choice.text.push_str(&names.tokenizer.decode(prompt, self.rules.skip_special));
                if self.logprobs {
                    choice.echo_logprobs(names, prompt, event.prompt_logprobs.as_deref());
                }
            }
        }
        let counted = run.feed(index, event, &mut choice.state, &mut choice.events)?;
        if self.prompt_only {
            choice.events.clear();
            return Ok(choice.state.ending.is_some());
        }
        choice.held += u32::try_from(counted).unwrap_or(u32::MAX);
        for token in &event.tokens[..counted] {
            if self.token_ids {
                choice.ids.push(token.id);
            }
            if let Some(found) = token.logprobs.as_deref().filter(|_| self.logprobs) {
                choice.logprobs.known(names, found, &mut choice.offset);
            }
        }
        for event in choice.events.drain(..) {
            if let Event::Content(text) = event {
                choice.text.push_str(&text);
            }
        }
        Ok(choice.state.ending.is_some())
    }
}

impl Choice<'_> {
    fn echo_logprobs(&mut self, names: TokenNames<'_>, prompt: &[u32], found: Option<&[Option<Logprobs>]>) {
        for (index, &id) in prompt.iter().enumerate() {
            match found.and_then(|found| found.get(index)).and_then(Option::as_ref) {
                Some(found) => self.logprobs.known(names, found, &mut self.offset),
                None => self.logprobs.unknown(names, id, &mut self.offset),
            }
        }
    }

    fn write(&mut self, index: usize, plan: &Plan, json: &mut Json<'_>) {
        json.raw("{\"index\":").number(index as u64).raw(",\"text\":").text(&self.text).raw(",\"logprobs\":");
        if plan.logprobs {
            std::mem::take(&mut self.logprobs).write(json);
        } else {
            json.raw("null");
        }
        let ending = self.state.ending.as_ref();
        let reason = ending.map(|ending| if plan.prompt_only { "length" } else { ending.reason });
        json.raw(",\"finish_reason\":").optional_text(reason).raw(",\"stop_reason\":");
        stop_reason(json, ending.and_then(|ending| ending.stop.as_ref()).filter(|_| !plan.prompt_only));
        if plan.token_ids {
            json.raw(",\"token_ids\":").list(self.ids.drain(..), |json, id| {
                json.number(u64::from(id));
            });
        }
        json.raw("}");
        self.text.clear();
        self.held = 0;
    }
}

async fn whole(app: &App, plan: &Plan, mut run: Run) -> Result<Response<Body>, ApiError> {
    let mut choices = plan.choices(app);
    let mut prompt_logprobs: Vec<Option<Vec<Option<Logprobs>>>> = vec![None; choices.len()];
    while run.open() > 0 {
        let (index, mut event) = run.wait().await?;
        plan.feed(app, &mut run, index, &event, &mut choices)?;
        prompt_logprobs[index] = event.prompt_logprobs.take().or(prompt_logprobs[index].take());
    }
    let mut body = Vec::new();
    let mut json = Json::new(&mut body);
    json.raw("{\"id\":").text(&plan.id).raw(",\"object\":\"text_completion\",\"created\":").number(plan.created);
    json.raw(",\"model\":").text(app.served_name()).raw(",\"choices\":");
    let usage = plan.usage(app, &run, &choices);
    json.list(choices.iter_mut().enumerate(), |json, (index, choice)| {
        choice.write(index, plan, json);
        if let Some(found) = prompt_logprobs[index].as_ref().filter(|_| !plan.echo) {
            // Into the object that was just closed.
            json.0.pop();
            json.raw(",\"prompt_logprobs\":");
            plan.names(app).prompt(json, found);
            json.raw("}");
        }
    });
    json.raw(",\"usage\":");
    usage.write(&mut json, true);
    json.raw(",\"system_fingerprint\":").text(crate::FINGERPRINT).raw("}");
    Ok(crate::json_response(body))
}

/// Writes the events of all choices of a request.
struct Writer<'a> {
    app: &'a App,
    plan: &'a Plan,
    /// Everything before the choice.
    head: Vec<u8>,
    choices: Vec<Choice<'a>>,
}

impl<'a> Writer<'a> {
    fn new(app: &'a App, plan: &'a Plan) -> Self {
        let mut head = Vec::new();
        let mut json = Json::new(&mut head);
        json.raw("data: {\"id\":").text(&plan.id).raw(",\"object\":\"text_completion\",\"created\":");
        json.number(plan.created).raw(",\"model\":").text(app.served_name()).raw(",\"choices\":[");
        Self { app, plan, head, choices: plan.choices(app) }
    }

    /// The counts so far, behind the choices.
    fn usage(&self, run: &Run, json: &mut Json<'_>) {
        json.raw(",\"usage\":");
        self.plan.usage(self.app, run, &self.choices).write(json, false);
    }
}

impl streamed::Writer for Writer<'_> {
    fn event(&mut self, run: &mut Run, index: usize, event: TokenEvent, out: &mut Vec<u8>) -> Result<(), ApiError> {
        let first = !self.choices[index].begun;
        if self.choices[index].state.ending.is_some() {
            return Ok(());
        }
        let ended = self.plan.feed(self.app, run, index, &event, &mut self.choices)?;
        let choice = &mut self.choices[index];
        let visible = !choice.text.is_empty() || !choice.ids.is_empty() || !choice.logprobs.is_empty();
        let full = first || choice.held >= self.app.options.stream_interval;
        if ended || (visible && full) {
            out.extend_from_slice(&self.head);
            let mut json = Json::new(out);
            choice.write(index, self.plan, &mut json);
            json.raw("]");
            if self.plan.continuous_usage {
                self.usage(run, &mut json);
            }
            json.raw("}\n\n");
        }
        Ok(())
    }

    fn end(&mut self, run: &Run, failure: Option<&ApiError>, out: &mut Vec<u8>) {
        if let Some(error) = failure {
            out.extend_from_slice(b"data: ");
            error.write(Dialect::OpenAi, out);
            out.extend_from_slice(b"\n\n");
        } else if self.plan.include_usage {
            out.extend_from_slice(&self.head);
            let mut json = Json::new(out);
            json.raw("]");
            self.usage(run, &mut json);
            json.raw("}\n\n");
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }
}
