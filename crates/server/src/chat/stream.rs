//! A chat answer as server-sent events.
//!
//! One frame a batch of ready events. The headers wait for the first output, so that a request which fails before it is an
//! HTTP error; only when that takes longer than the keep-alive interval they go out early, because proxies cut silent
//! connections.

use std::sync::Arc;

use axum::body::Body;
use axum::http::Response;
use bytes::Bytes;
use glimmer_engine::request::{Token, TokenEvent};
use glimmer_text::Event;

use super::job::{Plan, Submitted};
use super::whole::{stop_reason, tool_call_id, usage};
use crate::answer::AnswerState;
use crate::app::App;
use crate::error::{ApiError, Dialect};
use crate::frames::{Frames, Produced};
use crate::json::Json;
use crate::logprobs::TokenNames;
use crate::run::Run;

/// Answers the request with a stream.
///
/// # Errors
/// What happens before the first output.
pub async fn respond(app: Arc<App>, submitted: Submitted) -> Result<Response<Body>, ApiError> {
    let Submitted { plan, mut run } = submitted;
    let mut batch = Vec::new();
    run.wait_for(app.options.keep_alive, &mut batch).await?;
    first_error(&batch)?;
    let body = Produced::new(|frames| produce(app, plan, run, batch, frames));
    Ok(crate::event_stream(body.boxed()))
}

/// A failure that nothing precedes is still an HTTP error.
///
/// # Errors
/// That failure.
pub fn first_error(batch: &[(usize, TokenEvent)]) -> Result<(), ApiError> {
    use glimmer_engine::request::FinishReason;
    match batch.first() {
        Some((_, TokenEvent { tokens, finish: Some(finish), .. })) if tokens.is_empty() => match &finish.reason {
            FinishReason::Error(error) => Err(error.into()),
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}

async fn produce(app: Arc<App>, plan: Plan, mut run: Run, mut batch: Vec<(usize, TokenEvent)>, mut frames: Frames) {
    let tokenizer = app.model.format.tokenizer();
    let mut states: Vec<AnswerState<'_>> = (0..plan.n).map(|_| AnswerState::new(tokenizer, &plan.rules)).collect();
    let mut writer = Writer::new(&app, &plan);
    let mut out = Vec::with_capacity(1 << 10);
    let mut failure = None;
    loop {
        for (choice, event) in batch.drain(..) {
            if let Err(error) = writer.step(&mut run, choice, event, &mut states, &mut out) {
                failure = Some(error);
                break;
            }
        }
        if failure.is_some() || run.open() == 0 {
            break;
        }
        if !out.is_empty() {
            let next = Vec::with_capacity(out.len());
            frames.send(Bytes::from(std::mem::replace(&mut out, next))).await;
        }
        match run.wait_for(app.options.keep_alive, &mut batch).await {
            Ok(true) => {}
            Ok(false) => out.extend_from_slice(b": keep-alive\n\n"),
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    match failure {
        Some(error) => {
            out.extend_from_slice(b"data: ");
            error.write(Dialect::OpenAi, &mut out);
            out.extend_from_slice(b"\n\n");
        }
        None if plan.include_usage => writer.usage(&run, &states, &mut out),
        None => {}
    }
    out.extend_from_slice(b"data: [DONE]\n\n");
    // The engine's resources are free before the client knows that the answer is complete.
    drop(run);
    frames.send(Bytes::from(out)).await;
}

/// Writes the events of all answers of a request.
struct Writer<'a> {
    app: &'a App,
    plan: &'a Plan,
    names: TokenNames<'a>,
    /// Everything before the number of the choice.
    head: Vec<u8>,
    choices: Vec<Choice>,
    scratch: Vec<Event>,
}

/// What a stream keeps of a choice.
#[derive(Default)]
struct Choice {
    begun: bool,
    /// Held back until the stream interval is full.
    events: Vec<Event>,
    tokens: Vec<Token>,
    held: u32,
}

impl<'a> Writer<'a> {
    fn new(app: &'a App, plan: &'a Plan) -> Self {
        let mut head = Vec::new();
        let mut json = Json::new(&mut head);
        json.raw("data: {\"id\":").text(&plan.id).raw(",\"object\":\"chat.completion.chunk\",\"created\":");
        json.number(plan.created).raw(",\"model\":").text(app.served_name()).raw(",\"choices\":[");
        let names = TokenNames { tokenizer: app.model.format.tokenizer(), as_ids: plan.tokens_as_ids };
        let choices = (0..plan.n).map(|_| Choice::default()).collect();
        Self { app, plan, names, head, choices, scratch: Vec::new() }
    }

    fn step(
        &mut self,
        run: &mut Run,
        choice: usize,
        mut event: TokenEvent,
        states: &mut [AnswerState<'_>],
        out: &mut Vec<u8>,
    ) -> Result<(), ApiError> {
        let state = &mut states[choice];
        if state.ending.is_some() {
            return Ok(());
        }
        let hidden = !self.plan.rules.include_reasoning && state.in_reasoning();
        let counted = run.feed(choice, &event, state, &mut self.choices[choice].events)?;
        let ended = state.ending.is_some();
        let held = &mut self.choices[choice];
        held.held += u32::try_from(counted).unwrap_or(u32::MAX);
        if (self.plan.logprobs || self.plan.token_ids) && !hidden {
            held.tokens.extend(event.tokens.drain(..counted));
        }
        if !held.begun {
            held.begun = true;
            self.role(choice, run, states, out);
        } else if !ended && self.choices[choice].held < self.app.options.stream_interval {
            return Ok(());
        }
        self.choices[choice].held = 0;
        self.deltas(choice, run, states, out);
        if ended {
            self.last(choice, run, states, out);
        }
        Ok(())
    }

    /// The event that opens a choice.
    fn role(&mut self, choice: usize, run: &Run, states: &[AnswerState<'_>], out: &mut Vec<u8>) {
        let mut json = self.open(choice, out);
        json.raw("{\"role\":").text(&self.app.options.response_role).raw(",\"content\":\"\"}");
        json.raw(",\"logprobs\":null,\"finish_reason\":null}]");
        if self.plan.token_ids && choice == 0 {
            json.raw(",\"prompt_token_ids\":").list(self.plan.prompt.iter(), |json, &id| {
                json.number(u64::from(id));
            });
        }
        self.close(run, states, out);
        if let Some(echo) = &self.plan.echo {
            let mut json = self.open(choice, out);
            json.raw("{\"content\":").text(echo).raw("},\"logprobs\":null,\"finish_reason\":null}]");
            self.close(run, states, out);
        }
    }

    /// The held events, each as one event of the stream; token ids and log-probabilities go with the first.
    fn deltas(&mut self, choice: usize, run: &Run, states: &[AnswerState<'_>], out: &mut Vec<u8>) {
        let mut events = std::mem::take(&mut self.choices[choice].events);
        let tokens = std::mem::take(&mut self.choices[choice].tokens);
        let mut extras = Some(&tokens).filter(|tokens| !tokens.is_empty());
        let mut merged = std::mem::take(&mut self.scratch);
        merge(&mut events, &mut merged);
        for event in &merged {
            let mut json = self.open(choice, out);
            match event {
                Event::Reasoning(text) => {
                    json.raw("{\"reasoning\":").text(text).raw(",\"reasoning_content\":").text(text).raw("}");
                }
                Event::Content(text) => {
                    json.raw("{\"content\":").text(text).raw("}");
                }
                Event::CallStart { index, name } => {
                    json.raw("{\"tool_calls\":[{\"index\":").number(*index as u64).raw(",\"id\":");
                    json.text(&tool_call_id(self.app)).raw(",\"type\":\"function\",\"function\":{\"name\":").text(name);
                    json.raw(",\"arguments\":\"\"}}]}");
                }
                Event::CallArguments { index, fragment } => {
                    json.raw("{\"tool_calls\":[{\"index\":").number(*index as u64);
                    json.raw(",\"function\":{\"arguments\":").text(fragment).raw("}}]}");
                }
                Event::CallEnd { .. } => unreachable!("merging leaves the ends of calls out"),
            }
            self.extras(extras.take(), &mut json);
            json.raw(",\"finish_reason\":null}]");
            self.close(run, states, out);
        }
        if let Some(tokens) = extras {
            let mut json = self.open(choice, out);
            json.raw("{}");
            self.extras(Some(tokens), &mut json);
            json.raw(",\"finish_reason\":null}]");
            self.close(run, states, out);
        }
        // Both lists keep their room for the next step.
        merged.clear();
        self.scratch = merged;
        self.choices[choice].events = events;
    }

    /// Log-probabilities and token ids of an event.
    fn extras(&self, tokens: Option<&Vec<Token>>, json: &mut Json<'_>) {
        let Some(tokens) = tokens else {
            json.raw(",\"logprobs\":null");
            return;
        };
        if self.plan.logprobs {
            json.raw(",\"logprobs\":{\"content\":[");
            self.names.chat(json, tokens, true);
            json.raw("]}");
        } else {
            json.raw(",\"logprobs\":null");
        }
        if self.plan.token_ids {
            json.raw(",\"token_ids\":").list(tokens, |json, token| {
                json.number(u64::from(token.id));
            });
        }
    }

    /// The event that ends a choice.
    fn last(&mut self, choice: usize, run: &Run, states: &[AnswerState<'_>], out: &mut Vec<u8>) {
        let Some(ending) = &states[choice].ending else { return };
        let mut json = self.open(choice, out);
        json.raw("{},\"logprobs\":null,\"finish_reason\":").text(ending.reason).raw(",\"stop_reason\":");
        stop_reason(&mut json, ending.stop.as_ref());
        json.raw("}]");
        self.close(run, states, out);
        if self.app.options.log_outputs {
            let tokens = states[choice].tokens;
            tracing::info!(id = self.plan.id, choice, tokens, reason = ending.reason, "Generated response");
        }
    }

    /// The event with the counts.
    fn usage(&self, run: &Run, states: &[AnswerState<'_>], out: &mut Vec<u8>) {
        out.extend_from_slice(&self.head);
        let mut json = Json::new(out);
        json.raw("],\"usage\":");
        usage(self.app, self.plan, run, states).write(&mut json, false);
        json.raw("}\n\n");
    }

    fn open<'o>(&self, choice: usize, out: &'o mut Vec<u8>) -> Json<'o> {
        out.extend_from_slice(&self.head);
        let mut json = Json::new(out);
        json.raw("{\"index\":").number(choice as u64).raw(",\"delta\":");
        json
    }

    fn close(&self, run: &Run, states: &[AnswerState<'_>], out: &mut Vec<u8>) {
        if self.plan.continuous_usage {
            let mut json = Json::new(out);
            json.raw(",\"usage\":");
            usage(self.app, self.plan, run, states).write(&mut json, false);
        }
        out.extend_from_slice(b"}\n\n");
    }
}

/// Joins neighbours that say more of the same and leaves the ends of calls out.
fn merge(events: &mut Vec<Event>, merged: &mut Vec<Event>) {
    for event in events.drain(..) {
        match (merged.last_mut(), event) {
            (_, Event::CallEnd { .. }) => {}
            (Some(Event::Reasoning(last)), Event::Reasoning(text))
            | (Some(Event::Content(last)), Event::Content(text)) => last.push_str(&text),
            (Some(Event::CallArguments { index: last, fragment }), Event::CallArguments { index, fragment: text })
                if *last == index =>
            {
                fragment.push_str(&text);
            }
            (_, event) => merged.push(event),
        }
    }
}
