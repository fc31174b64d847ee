//! Answering questions with a model on this machine.
//!
//! This is the glue between text and engine: messages become token ids with image features, generated ids become text and
//! tool calls. The engine itself stands behind [`Completer`], which pulls prompts when it has room for another sequence, so
//! that pictures of waiting questions do not pile up.

use glimmer_checkpoint::Checkpoint;
use glimmer_model::vision::Patches;
use glimmer_text::{
    Answer, ChatFormat, ChatInput, ChatTemplate, DataUrl, EngineFinish, MediaSource, ParseOptions, Start, Tokenizer,
    ToolMode, ToolSchemas, parse_answer,
};
use serde_json::{Map, Value};

use crate::error::BenchError;
use crate::evaluate::{Answerer, Finish, Question, Reply, ReplySink};
use crate::pictures::PictureReader;
use crate::tasks::Call;

/// A prompt to be completed greedily.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompted {
    /// Token ids, placeholders expanded.
    pub ids: Vec<u32>,
    /// Pictures in the order of their placeholders.
    pub pictures: Vec<Patches>,
    /// Ids that end the completion.
    pub stop_ids: Vec<u32>,
    /// Most new tokens.
    pub max_tokens: usize,
}

/// What followed a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// New token ids, without the stop token.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
}

/// Gives the next prompt, if there is one.
pub type PromptSource<'a> = dyn FnMut() -> Option<Result<Prompted, BenchError>> + 'a;

/// Takes the completion of the prompt with this index, in the order in which prompts were pulled.
pub type CompletionSink<'a> = dyn FnMut(usize, Completion) + 'a;

/// An engine that completes prompts.
pub trait Completer {
    /// Completes all prompts of `next`.
    ///
    /// # Errors
    /// Errors of the engine and of `next`.
    fn complete(&mut self, next: &mut PromptSource<'_>, done: &mut CompletionSink<'_>) -> Result<(), BenchError>;
}

/// What a checkpoint says about text: tokenizer, template and stop ids.
#[derive(Debug)]
pub struct ModelText {
    /// Tokenizer and template.
    pub format: ChatFormat,
    /// Ids that end an answer, from `generation_config.json`, or from `config.json` if there is none.
    pub stop_ids: Vec<u32>,
}

impl ModelText {
    /// Reads `tokenizer.json`, `chat_template.jinja` and `generation_config.json` of a checkpoint.
    ///
    /// # Errors
    /// [`BenchError::Model`] naming a file that is missing or damaged, errors of tokenizer and template.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, BenchError> {
        let file = |name: &str| {
            let missing = || {
                BenchError::model(
                    checkpoint.location(),
                    format!("it has no {name}; copy the file from the model it was made from"),
                )
            };
            checkpoint.file(name).ok_or_else(missing)
        };
        let tokenizer = Tokenizer::from_bytes(file("tokenizer.json")?.as_slice())?;
        let template = file("chat_template.jinja")?;
        let not_text = |error| BenchError::model("chat_template.jinja", error);
        let template = ChatTemplate::new(std::str::from_utf8(template.as_slice()).map_err(not_text)?)?;
        let stop_ids = match checkpoint.file("generation_config.json") {
            Some(text) => stop_ids(text.as_slice())?,
            None => checkpoint.config().text.eos_token_ids.clone(),
        };
        Ok(Self { format: ChatFormat::new(tokenizer, template), stop_ids })
    }
}

/// `eos_token_id` of a generation configuration: one id or a list.
fn stop_ids(text: &[u8]) -> Result<Vec<u32>, BenchError> {
    let wrong = |problem: String| BenchError::model("generation_config.json", problem);
    let file: Value = serde_json::from_slice(text).map_err(|error| wrong(error.to_string()))?;
    let ids = match &file["eos_token_id"] {
        Value::Array(ids) => ids.as_slice(),
        id => std::slice::from_ref(id),
    };
    let read = |id: &Value| {
        let read = id.as_u64().and_then(|id| u32::try_from(id).ok());
        read.ok_or_else(|| wrong(format!("eos_token_id: expected a token id or a list of them, found {id}")))
    };
    ids.iter().map(read).collect()
}

/// Answers questions with an engine.
#[derive(Debug)]
pub struct LocalAnswerer<'a, C> {
    text: &'a ModelText,
    completer: C,
    pictures: Option<PictureReader>,
}

impl<'a, C: Completer> LocalAnswerer<'a, C> {
    /// Joins an engine with the text side of its model and, for models that see, its picture settings.
    pub fn new(text: &'a ModelText, completer: C, pictures: Option<PictureReader>) -> Self {
        Self { text, completer, pictures }
    }

    /// The engine.
    pub fn completer(&self) -> &C {
        &self.completer
    }

    /// Gives the engine back.
    pub fn into_completer(self) -> C {
        self.completer
    }

    /// Answers one question and parses the answer into reasoning, content and calls.
    ///
    /// # Errors
    /// Errors of the text layer and of the engine.
    pub fn ask(&mut self, question: &Question<'_>) -> Result<(Answer, Completion), BenchError> {
        let mut prompted = Some(prompt(self.text, self.pictures.as_ref(), question));
        let start = match &prompted {
            Some(Ok(prompted)) => Start::of_prompt(self.text.format.tokenizer(), &prompted.ids),
            _ => Start::Content,
        };
        let mut completed = None;
        self.completer.complete(&mut || prompted.take(), &mut |_, completion| completed = Some(completion))?;
        let completion = completed.ok_or_else(|| BenchError::model(question.id, "it returned no answer"))?;
        Ok((parse(self.text, question, &completion, start), completion))
    }
}

impl<C: Completer> Answerer for LocalAnswerer<'_, C> {
    fn answer(&mut self, questions: &[Question<'_>], done: &mut ReplySink<'_>) -> Result<(), BenchError> {
        let (text, pictures) = (self.text, self.pictures.as_ref());
        let mut next = 0;
        let starts = std::cell::RefCell::new(Vec::with_capacity(questions.len()));
        let mut source = || {
            let question = questions.get(next)?;
            next += 1;
            let prompted = prompt(text, pictures, question);
            if let Ok(prompted) = &prompted {
                starts.borrow_mut().push(Start::of_prompt(text.format.tokenizer(), &prompted.ids));
            }
            Some(prompted)
        };
        self.completer.complete(&mut source, &mut |index, completion| {
            let start = starts.borrow().get(index).copied();
            if let (Some(question), Some(start)) = (questions.get(index), start) {
                done(index, reply(text, question, &completion, start));
            }
        })
    }
}

pub(crate) fn prompt(
    text: &ModelText,
    pictures: Option<&PictureReader>,
    question: &Question<'_>,
) -> Result<Prompted, BenchError> {
    let mut variables = Map::new();
    variables.insert("enable_thinking".to_owned(), question.thinking.into());
    let input = ChatInput {
        messages: question.messages,
        tools: question.tools,
        variables: Some(&variables),
        add_generation_prompt: true,
        allow_special: false,
    };
    let prompt = text.format.prompt(&input)?;
    let mut encoded = Vec::new();
    for source in question.messages.iter().flat_map(|message| message.images()) {
        encoded.push(picture(pictures, question.id, source)?);
    }
    let counts: Vec<usize> = encoded.iter().map(Patches::tokens).collect();
    let mut ids = text.format.expand(&prompt, &counts, &[])?;
    if !question.thinking {
        text.format.close_reasoning(&mut ids)?;
    }
    Ok(Prompted { ids, pictures: encoded, stop_ids: text.stop_ids.clone(), max_tokens: question.max_tokens })
}

fn picture(pictures: Option<&PictureReader>, id: &str, source: &MediaSource) -> Result<Patches, BenchError> {
    let Some(pictures) = pictures else {
        return Err(BenchError::model(id, "the question has a picture, the model has no vision tower"));
    };
    match source {
        MediaSource::Url(url) => pictures.read(id, &DataUrl::parse(url)?.bytes),
        MediaSource::Supplied => Err(BenchError::model(id, "the picture has no data; expected a data: URL")),
    }
}

pub(crate) fn parse(text: &ModelText, question: &Question<'_>, completion: &Completion, start: Start) -> Answer {
    let schemas = ToolSchemas::new(question.tools);
    let tools = if question.tools.is_empty() { ToolMode::Off } else { ToolMode::Parse };
    let options = ParseOptions { tools, ..ParseOptions::default() };
    let finish = match completion.finish {
        Finish::Stop => EngineFinish::Stop,
        Finish::Length => EngineFinish::Length,
    };
    parse_answer(text.format.tokenizer(), &completion.ids, &schemas, options, start, finish)
}

fn reply(text: &ModelText, question: &Question<'_>, completion: &Completion, start: Start) -> Reply {
    let answer = parse(text, question, completion, start);
    // Arguments of a call that was cut off are no JSON; such a call has none.
    let call = |call: glimmer_text::AnswerCall| Call {
        name: call.name,
        arguments: serde_json::from_str(&call.arguments).unwrap_or_default(),
    };
    Reply {
        text: text.format.tokenizer().decode(&completion.ids, false),
        calls: answer.calls.into_iter().map(call).collect(),
        finish: completion.finish,
        tokens: completion.ids.len(),
    }
}
