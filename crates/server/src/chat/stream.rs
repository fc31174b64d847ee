//! A chat answer as server-sent events.

use std::sync::Arc;

use axum::body::Body;
use axum::http::Response;
use glimmer_engine::request::{Token, TokenEvent};
use glimmer_text::Event;

use super::job::{Plan, Submitted};
use super::whole::{stop_reason, tool_call_id, usage};
use crate::answer::AnswerState;
use crate::app::App;
use crate::each::Each;
use crate::error::{ApiError, Dialect};
use crate::frames::Produced;
use crate::json::Json;
use crate::logprobs::TokenNames;
use crate::run::Run;
use crate::streamed;

/// Answers the request with a stream.
///
/// # Errors
/// What happens before the first output.
pub async fn respond(app: Arc<App>, submitted: Submitted) -> Result<Response<Body>, ApiError> {
    let Submitted { plan, mut run } = submitted;
    let first = streamed::first(&mut run, app.options.keep_alive).await?;
    let body = Produced::new(|frames| async move {
        streamed::write(Writer::new(&app, &plan), run, first, app.options.keep_alive, frames).await;
    });
    Ok(crate::event_stream(body))
}

/// Writes the events of all answers of a request.
struct Writer<'a> {
    app: &'a App,
    plan: &'a Plan,
    names: TokenNames<'a>,
    /// Everything before the number of the choice.
    head: Vec<u8>,
    choices: Each<Choice<'a>>,
}

/// What a stream keeps of a choice.
struct Choice<'a> {
    state: AnswerState<'a>,
    begun: bool,
    /// Held back until the stream interval is full. The lists keep no room between steps: it would be memory long out of the
    /// caches, where a new list gets what was used last.
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
        let choice = |_| Choice {
            state: AnswerState::new(names.tokenizer, &plan.rules),
            begun: false,
            events: Vec::new(),
            tokens: Vec::new(),
            held: 0,
        };
        let choices = (0..plan.n).map(choice).collect();
        Self { app, plan, names, head, choices }
    }

    /// The event that opens a choice.
    fn role(&mut self, choice: usize, run: &Run, out: &mut Vec<u8>) {
        let mut json = self.open(choice, out);
        json.raw("{\"role\":").text(&self.app.options.response_role).raw(",\"content\":\"\"}");
        json.raw(",\"logprobs\":null,\"finish_reason\":null}]");
        if self.plan.token_ids && choice == 0 {
            json.raw(",\"prompt_token_ids\":").list(self.plan.prompt.iter(), |json, &id| {
                json.number(u64::from(id));
            });
        }
        self.close(run, out);
        if let Some(echo) = &self.plan.echo {
            let mut json = self.open(choice, out);
            json.raw("{\"content\":").text(echo).raw("},\"logprobs\":null,\"finish_reason\":null}]");
            self.close(run, out);
        }
    }

    /// The held events, each as one event of the stream; token ids and log-probabilities go with the first.
    fn deltas(&mut self, choice: usize, run: &Run, out: &mut Vec<u8>) {
        let mut events = std::mem::take(&mut self.choices[choice].events);
        let tokens = std::mem::take(&mut self.choices[choice].tokens);
        let mut extras = Some(&tokens).filter(|tokens| !tokens.is_empty());
        merge(&mut events);
        for event in &events {
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
            self.close(run, out);
        }
        if let Some(tokens) = extras {
            let mut json = self.open(choice, out);
            json.raw("{}");
            self.extras(Some(tokens), &mut json);
            json.raw(",\"finish_reason\":null}]");
            self.close(run, out);
        }
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
    fn last(&mut self, choice: usize, run: &Run, out: &mut Vec<u8>) {
        let Some(ending) = &self.choices[choice].state.ending else { return };
        let mut json = self.open(choice, out);
        json.raw("{},\"logprobs\":null,\"finish_reason\":").text(ending.reason).raw(",\"stop_reason\":");
        stop_reason(&mut json, ending.stop.as_ref());
        json.raw("}]");
        self.close(run, out);
        if self.app.options.log_outputs {
            let tokens = self.choices[choice].state.tokens;
            tracing::info!(id = self.plan.id, choice, tokens, reason = ending.reason, "Generated response");
        }
    }

    /// The event with the counts.
    fn usage(&self, run: &Run, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.head);
        let mut json = Json::new(out);
        json.raw("],\"usage\":");
        usage(self.app, self.plan, run, self.choices.iter().map(|choice| &choice.state)).write(&mut json, false);
        json.raw("}\n\n");
    }

    fn open<'o>(&self, choice: usize, out: &'o mut Vec<u8>) -> Json<'o> {
        out.extend_from_slice(&self.head);
        let mut json = Json::new(out);
        json.raw("{\"index\":").number(choice as u64).raw(",\"delta\":");
        json
    }

    fn close(&self, run: &Run, out: &mut Vec<u8>) {
        if self.plan.continuous_usage {
            let mut json = Json::new(out);
            json.raw(",\"usage\":");
            usage(self.app, self.plan, run, self.choices.iter().map(|choice| &choice.state)).write(&mut json, false);
        }
        out.extend_from_slice(b"}\n\n");
    }
}

impl streamed::Writer for Writer<'_> {
    fn event(&mut self, run: &mut Run, index: usize, mut event: TokenEvent, out: &mut Vec<u8>) -> Result<(), ApiError> {
        let choice = &mut self.choices[index];
        if choice.state.ending.is_some() {
            return Ok(());
        }
        let hidden = !self.plan.rules.include_reasoning && choice.state.in_reasoning();
        let counted = run.feed(index, &event, &mut choice.state, &mut choice.events)?;
        let ended = choice.state.ending.is_some();
        choice.held += u32::try_from(counted).unwrap_or(u32::MAX);
        if (self.plan.logprobs || self.plan.token_ids) && !hidden {
            choice.tokens.extend(event.tokens.drain(..counted));
        }
        if !choice.begun {
            choice.begun = true;
            self.role(index, run, out);
        } else if !ended && choice.held < self.app.options.stream_interval {
            return Ok(());
        }
        self.choices[index].held = 0;
        self.deltas(index, run, out);
        if ended {
            self.last(index, run, out);
        }
        Ok(())
    }

    fn end(&mut self, run: &Run, failure: Option<&ApiError>, out: &mut Vec<u8>) {
        match failure {
            Some(error) => {
                out.extend_from_slice(b"data: ");
                error.write(Dialect::OpenAi, out);
                out.extend_from_slice(b"\n\n");
            }
            None if self.plan.include_usage => self.usage(run, out),
            None => {}
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }
}

/// Joins neighbours that say more of the same and leaves the ends of calls out.
fn merge(events: &mut Vec<Event>) {
    events.retain(|event| !matches!(event, Event::CallEnd { .. }));
    events.dedup_by(|event, last| match (last, event) {
        (Event::Reasoning(last), Event::Reasoning(text)) | (Event::Content(last), Event::Content(text)) => {
            last.push_str(text);
            true
        }
        (Event::CallArguments { index: last, fragment }, Event::CallArguments { index, fragment: text })
            if last == index =>
        {
            fragment.push_str(text);
            true
        }
        _ => false,
    });
}
