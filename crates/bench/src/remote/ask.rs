//! One question to a server: the request, its stream of events, and when it may be sent again.

use std::time::Duration;

use bytes::Bytes;
use serde_json::{Map, Value};

use super::Asked;
use crate::serve::client::{Client, refusal};
use crate::serve::event::Events;
use crate::serve::sse::EventReader;
use crate::tasks::Call;

/// Path of the API.
const PATH: &str = "/v1/chat/completions";
/// Wait before a request is sent again, where the server names none; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest wait.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// An answer as it came.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RemoteReply {
    /// Reasoning that the server told apart.
    pub reasoning: String,
    /// The answer.
    pub content: String,
    /// Its tool calls. Arguments that are no JSON object are none.
    pub calls: Vec<Call>,
    /// `stop`, `length`, `tool_calls`.
    pub finish: String,
    /// New tokens, as the server counts.
    pub tokens: usize,
}

/// Why there is no answer.
#[derive(Debug)]
enum Refused {
    /// The request was not taken and may be sent again, after so long.
    Busy(Option<Duration>, String),
    /// It failed.
    Failed(String),
}

/// Asks, and asks again while the server says that it did not take the request, up to `retries` times.
pub(super) async fn ask(client: &Client, body: &Value, timeout: Duration, retries: u32) -> Asked {
    let body = Bytes::from(body.to_string());
    let mut pause = FIRST_PAUSE;
    for retry in 0.. {
        let answer = match tokio::time::timeout(timeout, once(client, body.clone())).await {
            Ok(answer) => answer,
            Err(_) => Err(Refused::Failed(format!("no complete answer within {} s", timeout.as_secs_f64()))),
        };
        match answer {
            Ok(reply) => return Asked { reply: Ok(reply), retries: retry },
            Err(Refused::Busy(wait, _)) if retry < retries => {
                tokio::time::sleep(wait.unwrap_or(pause).min(LONGEST_PAUSE)).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            Err(Refused::Busy(_, problem) | Refused::Failed(problem)) => {
                return Asked { reply: Err(problem), retries: retry };
            }
        }
    }
    Asked { reply: Err("it was never sent".to_owned()), retries: 0 }
}

async fn once(client: &Client, body: Bytes) -> Result<RemoteReply, Refused> {
    let failed = |error: crate::serve::client::ClientError| Refused::Failed(error.to_string());
    let mut answer = client.post(PATH, body, &[]).await.map_err(failed)?;
    let status = answer.status();
    if !status.is_success() {
        let wait =
            answer.header("retry-after").and_then(|seconds| seconds.trim().parse().ok()).map(Duration::from_secs);
        let problem = refusal(status, &answer.text().await.map_err(failed)?);
        return Err(match status.as_u16() {
            429 | 503 => Refused::Busy(wait, problem),
            _ => Refused::Failed(problem),
        });
    }
    let (mut reader, mut state) = (EventReader::default(), State::default());
    while let Some(chunk) = answer.chunk().await.map_err(failed)? {
        reader.feed(&chunk, |data| state.take(data));
    }
    reader.finish(|data| state.take(data));
    let reply = state.end().map_err(Refused::Failed)?;
    answer.keep();
    Ok(reply)
}

/// An answer on its way.
#[derive(Debug, Default)]
struct State {
    reply: RemoteReply,
    /// Name and arguments of each call, by the server's index.
    calls: Vec<(String, String)>,
    events: Events,
}

/// Most calls of an answer: what is beyond is noise, and an index may be anything.
const MOST_CALLS: usize = 256;

impl State {
    /// Takes the payload of one event.
    fn take(&mut self, data: &str) {
        let Some(mut event) = self.events.read(data) else { return };
        let choice = event.choice();
        if let Some(tokens) = event.usage.and_then(|usage| usage.completion_tokens) {
            self.reply.tokens = tokens;
        }
        let Some(choice) = choice else { return };
        if let Some(mut delta) = choice.delta {
            self.reply.reasoning.push_str(&delta.thought().unwrap_or_default());
            self.reply.content.push_str(delta.content.as_deref().unwrap_or_default());
            for part in delta.calls() {
                self.take_call(part);
            }
        }
        if let Some(finish) = choice.finish_reason {
            self.reply.finish = finish;
        }
    }

    /// Takes a part of a tool call.
    fn take_call(&mut self, part: &Value) {
        let index = part["index"].as_u64().and_then(|index| usize::try_from(index).ok()).unwrap_or(0);
        if index >= MOST_CALLS {
            return;
        }
        if self.calls.len() <= index {
            self.calls.resize_with(index + 1, Default::default);
        }
        let (name, arguments) = &mut self.calls[index];
        name.push_str(part["function"]["name"].as_str().unwrap_or_default());
        arguments.push_str(part["function"]["arguments"].as_str().unwrap_or_default());
    }

    fn end(self) -> Result<RemoteReply, String> {
        self.events.end(!self.reply.finish.is_empty())?;
        let call = |(name, arguments): (String, String)| {
            let arguments: Map<String, Value> = serde_json::from_str(&arguments).unwrap_or_default();
            Call { name, arguments }
        };
        Ok(RemoteReply { calls: self.calls.into_iter().map(call).collect(), ..self.reply })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(events: &[&str]) -> Result<RemoteReply, String> {
        let mut state = State::default();
        events.iter().for_each(|event| state.take(event));
        state.end()
    }

    #[test]
    fn parts_are_joined_by_kind() {
        let reply = read(&[
            r#"{"choices": [{"delta": {"role": "assistant", "content": ""}}]}"#,
            r#"{"choices": [{"delta": {"reasoning": "a", "reasoning_content": "a"}}]}"#,
            r#"{"choices": [{"delta": {"reasoning_content": "b"}}]}"#,
            r#"{"choices": [{"delta": {"content": "c"}}]}"#,
            r#"{"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": ""}}]}}]}"#,
            r#"{"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{\"k\":"}}]}}]}"#,
            r#"{"choices": [{"delta": {"tool_calls": [{"index": 1, "function": {"name": "g", "arguments": "{"}}]}}]}"#,
            r#"{"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}, "finish_reason": "length"}]}"#,
            r#"{"choices": [], "usage": {"completion_tokens": 9}}"#,
            "[DONE]",
            "not read any more",
        ]);
        let reply = reply.unwrap();
        assert_eq!((reply.reasoning.as_str(), reply.content.as_str()), ("ab", "c"));
        assert_eq!((reply.finish.as_str(), reply.tokens), ("length", 9));
        assert_eq!(reply.calls[0].arguments["k"], 1);
        assert!(reply.calls[1].name == "g" && reply.calls[1].arguments.is_empty(), "half of an object is none");
    }

    #[test]
    fn streams_that_break_off_are_no_answers() {
        let end = r#"{"choices": [{"delta": {}, "finish_reason": "stop"}]}"#;
        assert!(read(&[end]).is_ok());
        for (events, part) in [
            (vec![r#"{"choices": [{"delta": {"content": "c"}}]}"#], "before the answer did"),
            (vec![], "before the answer did"),
            (vec![r#"{"error": {"message": "dead"}}"#, end], "dead"),
            (vec!["{", end], "not readable"),
            (vec![r#"{"choices": [{"delta": {"tool_calls": [{"index": 99999999}]}}]}"#], "before the answer did"),
        ] {
            let error = read(&events).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
