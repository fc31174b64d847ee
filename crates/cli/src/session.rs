//! A model opened for answering in the terminal: text side, engine, and the printing of an answer as it comes.

use std::{io::Write as _, path::Path, time::Instant};

use anyhow::{Context as _, bail};
use glimmer_bench::{ModelText, PictureReader};
use glimmer_checkpoint::Checkpoint;
use glimmer_engine::{FinishReason, Flow, Generator, Output, Request, Sampling, Settings};
use glimmer_tensor::Backend;
use glimmer_text::{
    Answer, ChatFormat, ChatInput, ChatTemplate, EngineFinish, Event, Message, OutputParser, ParseOptions, Start,
    ToolMode, ToolSchemas,
};
use serde_json::{Map, Value};

use crate::{
    args::{PromptArgs, SamplingArgs},
    open, progress,
};

/// Rows of a prefill chunk.
const CHUNK_ROWS: usize = 256;
/// Most tokens of a conversation kept in the caches unless the model's own context is shorter.
const CONTEXT_TOKENS: usize = 1 << 16;

/// A model ready to answer.
#[derive(Debug)]
pub(crate) struct Session<B: Backend> {
    checkpoint: Checkpoint,
    text: ModelText,
    generator: Generator<B>,
    pictures: Option<PictureReader>,
    variables: Map<String, Value>,
    sampling: Sampling,
    max_tokens: u32,
}

/// An answer with what it took.
#[derive(Debug)]
pub(crate) struct Answered {
    /// Reasoning, content and calls.
    pub(crate) answer: Answer,
    /// Tokens and acceptance.
    pub(crate) output: Output,
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: usize,
}

impl<B: Backend> Session<B> {
    /// Opens a model for one conversation at a time.
    ///
    /// # Errors
    /// Whatever is wrong with the model, the template or the sampling options.
    pub(crate) fn open(
        model: Option<&Path>,
        prompting: &PromptArgs,
        sampling: &SamplingArgs,
        backend: B,
    ) -> anyhow::Result<Self> {
        let checkpoint = open::model(model)?;
        let mut text = ModelText::read(&checkpoint)?;
        if let Some(path) = &prompting.chat_template {
            let template = ChatTemplate::new(&open::text(path)?).with_context(|| path.display().to_string())?;
            let tokenizer = checkpoint.file("tokenizer.json").context("the model has no tokenizer.json")?;
            text.format = ChatFormat::new(glimmer_text::Tokenizer::from_bytes(tokenizer.as_slice())?, template);
        }
        let context = checkpoint.config().text.max_position_embeddings.min(CONTEXT_TOKENS);
        let depth = if checkpoint.config().text.mtp_layer().is_some() { sampling.draft_depth as usize } else { 0 };
        let settings = Settings {
            sequences: 1,
            context: Some(context),
            rows: CHUNK_ROWS,
            depth,
            real_vocab: Some(text.format.tokenizer().vocab_size()),
            // One conversation: its newest turns.
            state_checkpoints: 4,
            ..Settings::default()
        };
        let generator = Generator::load(backend, &checkpoint, &settings)?;
        let pictures = PictureReader::load(&checkpoint)?;
        let sampling_params = sampling_params(&checkpoint, sampling)?;
        sampling_params.validate(checkpoint.config().text.vocab_size)?;
        let mut variables = Map::new();
        variables.insert("enable_thinking".to_owned(), (!prompting.no_thinking).into());
        if let Some(effort) = &prompting.reasoning_effort {
            variables.insert("reasoning_effort".to_owned(), effort.as_str().into());
        }
        Ok(Self {
            checkpoint,
            text,
            generator,
            pictures,
            variables,
            sampling: sampling_params,
            max_tokens: sampling.max_tokens,
        })
    }

    /// The model's name for a greeting.
    pub(crate) fn name(&self) -> &str {
        self.checkpoint.location()
    }

    /// Number of token ids that can be chosen.
    pub(crate) fn vocabulary(&self) -> usize {
        self.generator.vocabulary()
    }

    /// Builds the request for a conversation. `images` are the encoded files of its picture parts, in order.
    ///
    /// # Errors
    /// A template that fails, a picture that cannot be decoded, a prompt that does not fit.
    pub(crate) fn chat_request(
        &mut self,
        messages: &[Message],
        tools: &[Value],
        images: &[(String, Vec<u8>)],
    ) -> anyhow::Result<Request> {
        let input = ChatInput {
            messages,
            tools,
            variables: Some(&self.variables),
            add_generation_prompt: true,
            allow_special: false,
        };
        let prompt = self.text.format.prompt(&input)?;
        let mut patches = Vec::with_capacity(images.len());
        for (name, bytes) in images {
            let Some(pictures) = &self.pictures else { bail!("this model has no vision tower: ask without a picture") };
            patches.push(pictures.read(name, bytes)?);
        }
        let counts: Vec<usize> = patches.iter().map(|picture| picture.tokens()).collect();
        let mut ids = self.text.format.expand(&prompt, &counts, &[])?;
        let thinking = self.variables.get("enable_thinking").and_then(Value::as_bool).unwrap_or(true);
        if !thinking {
            self.text.format.close_reasoning(&mut ids)?;
        }
        let media = self.generator.media(&ids, patches)?;
        Ok(Request { media, ..self.request(ids) })
    }

    /// Builds the request for a prompt taken as it is.
    ///
    /// # Errors
    /// Text that the tokenizer cannot encode, or none.
    pub(crate) fn raw_request(&self, prompt: &str) -> anyhow::Result<Request> {
        Ok(self.request(self.text.format.tokenizer().encode(prompt)?))
    }

    fn request(&self, ids: Vec<u32>) -> Request {
        let mut request = Request::new(ids, self.max_tokens);
        request.sampling = self.sampling.clone();
        request.limits.stop_tokens.clone_from(&self.text.stop_ids);
        request
    }

    /// Generates and prints an answer as it comes, until `stop` says otherwise; `quiet` prints nothing.
    ///
    /// # Errors
    /// The engine's, and a standard output that went away.
    pub(crate) fn answer(
        &mut self,
        request: Request,
        tools: &[Value],
        quiet: bool,
        stop: &dyn Fn() -> bool,
    ) -> anyhow::Result<Answered> {
        let tokenizer = self.text.format.tokenizer();
        let schemas = ToolSchemas::new(tools);
        let mode = if tools.is_empty() { ToolMode::Off } else { ToolMode::Parse };
        let options = ParseOptions { tools: mode, ..ParseOptions::default() };
        let mut parser = OutputParser::new(tokenizer, &schemas, options, Start::of_prompt(tokenizer, &request.prompt));
        let (mut events, mut printed, mut failed) = (Vec::new(), Printer::default(), None);
        let prompt_tokens = request.prompt.len();
        self.generator.reset_stats();
        let output = self.generator.generate(request, &mut |token| {
            let mut fresh = Vec::new();
            parser.push(token, &mut fresh);
            if !quiet && let Err(error) = printed.print(&fresh) {
                failed = Some(error);
                return Flow::Stop;
            }
            events.append(&mut fresh);
            if stop() { Flow::Stop } else { Flow::Continue }
        })?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        let cut = matches!(output.finish, FinishReason::Length | FinishReason::Abort);
        let finish = if cut { EngineFinish::Length } else { EngineFinish::Stop };
        let mut rest = Vec::new();
        parser.finish(finish, &mut rest);
        if !quiet {
            printed.print(&rest)?;
            printed.end()?;
        }
        events.append(&mut rest);
        Ok(Answered { answer: Answer::from_events(&events), output, prompt_tokens })
    }

    /// One line on speed and drafts of the last answer.
    pub(crate) fn summary(&self, answered: &Answered, began: Instant) -> String {
        let stats = self.generator.stats();
        let mut line = format!(
            "{} prompt tokens at {:.0}/s, {} new tokens at {:.0}/s, {:.2} s",
            answered.prompt_tokens,
            stats.prefill_rate(),
            answered.output.tokens.len(),
            stats.decode_rate(),
            began.elapsed().as_secs_f64()
        );
        let drafts = &stats.drafts;
        if drafts.steps() > 0 {
            let rates: Vec<String> = (0..drafts.drafted.len())
                .filter_map(|i| drafts.rate(i))
                .map(|rate| format!("{:.0} %", 100.0 * rate))
                .collect();
            line += &format!(", drafts accepted {} ({:.2} tokens a step)", rates.join(" / "), drafts.mean_length());
        }
        match answered.output.finish {
            FinishReason::Length => line += "; cut off by --max-tokens or the context",
            FinishReason::Abort => line += "; interrupted",
            _ => {}
        }
        line
    }
}

/// Sampling options over the model's `generation_config.json`.
fn sampling_params(checkpoint: &Checkpoint, args: &SamplingArgs) -> anyhow::Result<Sampling> {
    let file: Value = match checkpoint.file("generation_config.json") {
        Some(bytes) => serde_json::from_slice(bytes.as_slice()).context("generation_config.json")?,
        None => Value::Null,
    };
    let wrong = |key: &str, expected: &str| {
        anyhow::anyhow!("generation_config.json: `{key}`: expected {expected}, found {}; correct the file", file[key])
    };
    let stored = |key: &str| match &file[key] {
        Value::Null => Ok(None),
        value => value.as_f64().map(|x| Some(x as f32)).ok_or_else(|| wrong(key, "a number")),
    };
    let top_k = match &file["top_k"] {
        Value::Null => None,
        value => {
            let k = value.as_u64().and_then(|k| u32::try_from(k).ok());
            Some(k.ok_or_else(|| wrong("top_k", "a whole number from 0 up"))?)
        }
    };
    let greedy = match &file["do_sample"] {
        Value::Null => false,
        value => !value.as_bool().ok_or_else(|| wrong("do_sample", "true or false"))?,
    };
    let temperature = args.temperature.or(stored("temperature")?.filter(|_| !greedy));
    Ok(Sampling {
        temperature: temperature.unwrap_or(if greedy { 0.0 } else { 1.0 }),
        top_p: args.top_p.or(stored("top_p")?).unwrap_or(1.0),
        top_k: args.top_k.or(top_k).filter(|&k| k > 0),
        min_p: args.min_p.unwrap_or(0.0),
        seed: Some(args.seed.cast_signed()),
        ..Sampling::default()
    })
}

/// Prints events: reasoning dimmed, content plain, calls in one line each.
#[derive(Debug, Default)]
struct Printer {
    part: Part,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Part {
    #[default]
    Nothing,
    Reasoning,
    Content,
    Call,
}

impl Printer {
    fn print(&mut self, events: &[Event]) -> std::io::Result<()> {
        let mut out = anstream::stdout().lock();
        for event in events {
            let part = match event {
                Event::Reasoning(_) => Part::Reasoning,
                Event::Content(_) => Part::Content,
                Event::CallStart { .. } | Event::CallArguments { .. } | Event::CallEnd { .. } => Part::Call,
            };
            if part != self.part && self.part != Part::Nothing && self.part != Part::Call {
                writeln!(out)?;
            }
            self.part = part;
            let dim = progress::DIM;
            match event {
                Event::Reasoning(text) => write!(out, "{dim}{text}{dim:#}")?,
                Event::Content(text) => write!(out, "{text}")?,
                Event::CallStart { name, .. } => write!(out, "{dim}call{dim:#} {name}(")?,
                Event::CallArguments { fragment, .. } => write!(out, "{fragment}")?,
                Event::CallEnd { .. } => writeln!(out, ")")?,
            }
        }
        out.flush()
    }

    fn end(&self) -> std::io::Result<()> {
        if matches!(self.part, Part::Reasoning | Part::Content) { writeln!(anstream::stdout()) } else { Ok(()) }
    }
}
