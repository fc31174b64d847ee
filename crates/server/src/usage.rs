//! Token counts as OpenAI's routes report them.

use crate::json::Json;

/// What a request used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: u64,
    /// Tokens of all answers.
    pub completion: u64,
    /// Tokens of the prompt that came from the cache, if the server reports them.
    pub cached: Option<u64>,
    /// Tokens of reasoning, where reasoning is told apart.
    pub reasoning: Option<u64>,
}

impl Usage {
    /// Writes the object; `nulls` writes absent details as null instead of leaving them out.
    pub fn write(&self, json: &mut Json<'_>, nulls: bool) {
        json.raw("{\"prompt_tokens\":").number(self.prompt);
        json.raw(",\"total_tokens\":").number(self.prompt + self.completion);
        json.raw(",\"completion_tokens\":").number(self.completion);
        match self.cached {
            Some(cached) => {
                json.raw(",\"prompt_tokens_details\":{\"cached_tokens\":").number(cached).raw("}");
            }
            None if nulls => {
                json.raw(",\"prompt_tokens_details\":null");
            }
            None => {}
        }
        match self.reasoning {
            Some(reasoning) => {
                json.raw(",\"completion_tokens_details\":{\"reasoning_tokens\":").number(reasoning).raw("}");
            }
            None if nulls => {
                json.raw(",\"completion_tokens_details\":null");
            }
            None => {}
        }
        json.raw("}");
    }
}
