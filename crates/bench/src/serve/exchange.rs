//! One request and what becomes of it: the moments at which content arrives, the counts, or why it failed.

use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::header::{HeaderName, HeaderValue};
use serde_json::{Map, Value, json};

use super::client::{Client, refusal, shortened};
use super::dataset::Prompt;
use super::event::{Delta, Events};
use super::sse::EventReader;

/// Which of OpenAI's APIs is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
}

/// What all requests of a run have in common.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The API.
    pub api: Api,
    /// Path of the API.
    pub endpoint: String,
    /// The model's name.
    pub model: String,
    /// Go on behind the model's own end.
    pub ignore_eos: bool,
    /// Log-probabilities of this many tokens a position.
    pub logprobs: Option<u32>,
    /// Further fields of the body; they win over ours.
    pub extra: Map<String, Value>,
    /// After this long a request has failed.
    pub timeout: Duration,
}

/// What became of a request. Times are seconds; all are 0 or empty where nothing came.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// When the request was sent, since the start of the run.
    pub start: f64,
    /// When the answer was over, since the start of the run.
    pub end: f64,
    /// How long it waited for its turn before.
    pub queue: f64,
    /// When each event with content came, since the request was sent.
    pub events: Vec<f64>,
    /// Tokens of the prompt: as the server counts, else as the data set does.
    pub prompt_tokens: usize,
    /// Tokens of the answer, as the server counts.
    pub output_tokens: Option<usize>,
    /// Reasoning and answer, as they came.
    pub text: String,
    /// The answer without reasoning.
    pub content: String,
    /// Why it ended.
    pub finish: Option<String>,
    /// Why it failed.
    pub error: Option<String>,
    /// Whether it failed because time ran out.
    pub timed_out: bool,
}

impl Outcome {
    /// Whether the answer came, whole.
    #[must_use]
    pub fn succeeded(&self) -> bool {
        self.error.is_none()
    }

    /// Time to the first token.
    #[must_use]
    pub fn ttft(&self) -> f64 {
        self.events.first().copied().unwrap_or(0.0)
    }

    /// Time to the last token.
    #[must_use]
    pub fn latency(&self) -> f64 {
        self.events.last().copied().unwrap_or(0.0)
    }

    /// Times between events.
    pub fn gaps(&self) -> impl Iterator<Item = f64> {
        self.events.windows(2).map(|pair| pair[1] - pair[0])
    }
}

impl Ask {
    /// The body of a request.
    #[must_use]
    pub fn body(&self, prompt: &Prompt) -> Map<String, Value> {
        let mut body = match self.api {
            Api::Completions => json!({
                "model": self.model, "prompt": prompt.text, "repetition_penalty": 1.0,
                "max_tokens": prompt.output_tokens, "logprobs": self.logprobs,
            }),
            Api::Chat => json!({
                "model": self.model,
                "messages": [{"role": "user", "content": [{"type": "text", "text": prompt.text}]}],
                "max_completion_tokens": prompt.output_tokens,
            }),
        };
        let body = body.as_object_mut().map(std::mem::take);
        let mut body = body.unwrap_or_default();
        body.insert("stream".to_owned(), true.into());
        body.insert("stream_options".to_owned(), json!({"include_usage": true}));
        if self.ignore_eos {
            body.insert("ignore_eos".to_owned(), true.into());
        }
        if let Some(seed) = prompt.seed {
            body.insert("seed".to_owned(), seed.into());
        }
        body.extend(self.extra.clone());
        body
    }

    /// Sends a request and waits for the end of its answer. `origin` is the start of the run, `queued` the moment at which
    /// the request was due.
    pub async fn send(&self, client: &Client, prompt: &Prompt, origin: Instant, queued: Instant) -> Outcome {
        let body = Bytes::from(Value::Object(self.body(prompt)).to_string());
        let start = Instant::now();
        let mut outcome = Outcome {
            start: (start - origin).as_secs_f64(),
            queue: (start - queued).as_secs_f64(),
            prompt_tokens: prompt.tokens,
            ..Outcome::default()
        };
        let read = self.read(client, prompt, body, start, &mut outcome);
        match tokio::time::timeout(self.timeout, read).await {
            Ok(Ok(())) => {}
            Ok(Err(problem)) => outcome.error = Some(problem),
            Err(_) => {
                outcome.timed_out = true;
                outcome.error = Some(format!("no complete answer within {} s", self.timeout.as_secs_f64()));
            }
        }
        outcome.end = (Instant::now() - origin).as_secs_f64();
        outcome
    }

    async fn read(
        &self,
        client: &Client,
        prompt: &Prompt,
        body: Bytes,
        start: Instant,
        outcome: &mut Outcome,
    ) -> Result<(), String> {
        let mut headers = Vec::new();
        if let Some(id) = prompt.id.as_deref().and_then(|id| HeaderValue::from_str(id).ok()) {
            headers.push((HeaderName::from_static("x-request-id"), id));
        }
        let broken = |error: super::client::ClientError| error.to_string();
        let mut answer = client.post(&self.endpoint, body, &headers).await.map_err(broken)?;
        let status = answer.status();
        if !status.is_success() {
            return Err(refusal(status, &answer.text().await.map_err(broken)?));
        }
        if !answer.content_type().starts_with("text/event-stream") {
            let found = answer.content_type().to_owned();
            let text = shortened(&answer.text().await.map_err(broken)?);
            return Err(format!("expected a stream of events, the answer is {found:?}: {text}"));
        }
        let (mut reader, mut events) = (EventReader::default(), Events::default());
        while let Some(chunk) = answer.chunk().await.map_err(broken)? {
            let now = start.elapsed().as_secs_f64();
            reader.feed(&chunk, |data| take(&mut events, self.api, data, now, outcome));
            events.check()?;
        }
        let now = start.elapsed().as_secs_f64();
        reader.finish(|data| take(&mut events, self.api, data, now, outcome));
        let finished = events.done() || outcome.finish.is_some();
        events.end(finished)?;
        if outcome.events.is_empty() {
            return Err("the stream held no content".to_owned());
        }
        answer.keep();
        Ok(())
    }
}

/// Takes the payload of an event that came at `now`.
fn take(events: &mut Events, api: Api, data: &str, now: f64, outcome: &mut Outcome) {
    let Some(mut event) = events.read(data) else { return };
    let choice = event.choice();
    if let Some(usage) = event.usage {
        outcome.output_tokens = usage.completion_tokens.or(outcome.output_tokens);
        outcome.prompt_tokens = usage.prompt_tokens.unwrap_or(outcome.prompt_tokens);
    }
    let Some(choice) = choice else { return };
    let counts = match api {
        // An event without text stands for a token, too: part of a character, or the end.
        Api::Completions => {
            let text = choice.text.unwrap_or_default();
            outcome.text.push_str(&text);
            outcome.content.push_str(&text);
            true
        }
        Api::Chat => choice.delta.is_some_and(|delta| counts(delta, outcome)),
    };
    if counts {
        outcome.events.push(now);
    }
    outcome.finish = choice.finish_reason.or(outcome.finish.take());
}

/// Adds the text of a chat's event; whether it stands for tokens.
fn counts(mut delta: Delta, outcome: &mut Outcome) -> bool {
    let reasoning = delta.thought();
    // The event that only opens the answer carries the role and empty content.
    let said = delta.content.as_ref().is_some_and(|text| !text.is_empty() || delta.role.is_none());
    let counts = reasoning.is_some() || !delta.calls().is_empty() || said;
    outcome.text.push_str(&reasoning.unwrap_or_default());
    let content = delta.content.unwrap_or_default();
    outcome.text.push_str(&content);
    outcome.content.push_str(&content);
    counts
}
