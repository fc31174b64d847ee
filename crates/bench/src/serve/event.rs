//! The payloads of a stream of OpenAI's APIs, and how such a stream ends.
//!
//! Invariant: nothing is read behind `[DONE]` or behind the first problem.

use serde::Deserialize;
use serde_json::Value;

use super::client::shortened;

/// One event.
#[derive(Debug, Deserialize)]
pub(crate) struct Event {
    #[serde(default)]
    choices: Vec<Choice>,
    pub(crate) usage: Option<Usage>,
    error: Option<Value>,
}

/// What an event says of an answer.
#[derive(Debug, Deserialize)]
pub(crate) struct Choice {
    /// Of completions.
    pub(crate) text: Option<String>,
    /// Of chats.
    pub(crate) delta: Option<Delta>,
    pub(crate) finish_reason: Option<String>,
}

/// What a chat's answer grows by.
#[derive(Debug, Deserialize)]
pub(crate) struct Delta {
    pub(crate) role: Option<String>,
    pub(crate) content: Option<String>,
    reasoning: Option<String>,
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<Value>>,
}

/// Counts.
#[derive(Debug, Deserialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: Option<usize>,
    pub(crate) completion_tokens: Option<usize>,
}

impl Event {
    /// The first answer's part.
    pub(crate) fn choice(&mut self) -> Option<Choice> {
        (!self.choices.is_empty()).then(|| self.choices.swap_remove(0))
    }
}

impl Delta {
    /// Reasoning, under whichever of its two names.
    pub(crate) fn thought(&mut self) -> Option<String> {
        self.reasoning.take().or(self.reasoning_content.take()).filter(|text| !text.is_empty())
    }

    /// Parts of tool calls.
    pub(crate) fn calls(&self) -> &[Value] {
        self.tool_calls.as_deref().unwrap_or_default()
    }
}

/// The events of one stream.
#[derive(Debug, Default)]
pub(crate) struct Events {
    done: bool,
    problem: Option<String>,
}

impl Events {
    /// Reads a payload; none where it is no event, or nothing is read any more.
    pub(crate) fn read(&mut self, data: &str) -> Option<Event> {
        if self.done || self.problem.is_some() {
            return None;
        }
        if data.trim() == "[DONE]" {
            self.done = true;
            return None;
        }
        let event: Event = match serde_json::from_str(data) {
            Ok(event) => event,
            Err(error) => {
                self.problem = Some(format!("an event of the stream is not readable: {error}: {}", shortened(data)));
                return None;
            }
        };
        if let Some(error) = event.error.as_ref().filter(|error| !error.is_null()) {
            let message = error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned);
            self.problem = Some(format!("the server ended the stream with an error: {}", shortened(&message)));
            return None;
        }
        Some(event)
    }

    /// Fails with what went wrong so far.
    ///
    /// # Errors
    /// That, in words.
    pub(crate) fn check(&mut self) -> Result<(), String> {
        self.problem.take().map_or(Ok(()), Err)
    }

    /// The end of the stream. `finished` says whether an answer told why it ended, which `[DONE]` may stand for.
    ///
    /// # Errors
    /// What went wrong, in words.
    pub(crate) fn end(mut self, finished: bool) -> Result<(), String> {
        self.check()?;
        if finished { Ok(()) } else { Err("the stream ended before the answer did".to_owned()) }
    }

    /// Whether `[DONE]` has come.
    pub(crate) fn done(&self) -> bool {
        self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_read_behind_the_end_or_a_problem() {
        for (end, problem) in [
            ("[DONE]", None),
            (r#"{"error": {"message": "dead"}}"#, Some("ended the stream with an error: dead")),
            (r#"{"error": "gone"}"#, Some("gone")),
            ("{", Some("not readable")),
        ] {
            let mut events = Events::default();
            let mut event =
                events.read(r#"{"choices": [{"delta": {"reasoning_content": "a"}}], "error": null}"#).unwrap();
            assert_eq!(event.choice().unwrap().delta.unwrap().thought().as_deref(), Some("a"));
            assert!(event.choice().is_none() && events.read(end).is_none());
            assert!(events.read(r#"{"choices": []}"#).is_none(), "{end}");
            assert_eq!(events.done(), problem.is_none());
            match (events.end(true), problem) {
                (Err(found), Some(part)) => assert!(found.contains(part), "{found}"),
                (found, part) => assert!(found.is_ok() && part.is_none(), "{found:?}"),
            }
        }
        assert!(Events::default().end(false).unwrap_err().contains("before the answer did"));
    }
}
