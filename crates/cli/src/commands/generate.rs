//! `glimmer generate`.

use std::{
    io::{Read as _, Write as _},
    path::Path,
    process::ExitCode,
    time::Instant,
};

use anyhow::{Context as _, bail};
use glimmer_engine::FinishReason;
use glimmer_tensor::Backend;
use glimmer_text::{Content, MediaSource, Message, Part, Role};
use serde_json::{Value, json};

use crate::{
    args::GenerateArgs,
    device::{Place, on_device},
    open, progress,
    session::Session,
};

/// Answers one prompt.
pub(crate) fn run(args: &GenerateArgs, threads: usize) -> anyhow::Result<ExitCode> {
    on_device!(Place::of(&args.device)?, open => answer(args, || open(threads)))
}

fn answer<B: Backend>(args: &GenerateArgs, open: impl FnOnce() -> anyhow::Result<B>) -> anyhow::Result<ExitCode> {
    let text = prompt_text(&args.prompt)?;
    let began = Instant::now();
    let tools = args.tools.as_deref().map(read_tools).transpose()?.unwrap_or_default();
    let images = args.image.iter().map(|path| read_image(path)).collect::<anyhow::Result<Vec<_>>>()?;
    let mut session = Session::open(args.model.as_deref(), &args.prompting, &args.sampling, open()?)?;
    if let Some(id) = args.stop_token.iter().find(|&&id| id as usize >= session.vocabulary()) {
        bail!("--stop-token {id}: expected a token id below {}", session.vocabulary());
    }
    let mut request = if args.raw {
        session.raw_request(&text)?
    } else {
        let mut messages: Vec<Message> =
            args.prompting.system.iter().map(|system| Message::text(Role::System, system)).collect();
        messages.push(user_message(&text, images.len()));
        session.chat_request(&messages, &tools, &images)?
    };
    request.limits.ignore_eos = args.ignore_eos;
    if args.ignore_eos {
        request.limits.stop_tokens.clear();
    }
    request.limits.stop_tokens.extend(&args.stop_token);
    let answered = session.answer(request, &tools, args.json, &|| false)?;
    if args.json {
        let answer = &answered.answer;
        let calls: Vec<Value> = answer
            .calls
            .iter()
            .map(|call| json!({"name": call.name, "arguments": call.arguments, "complete": call.complete}))
            .collect();
        let object = json!({
            "reasoning": answer.reasoning,
            "content": answer.content,
            "tool_calls": calls,
            "finish": finish_word(&answered.output.finish),
            "tokens": answered.output.tokens,
            "prompt_tokens": answered.prompt_tokens,
        });
        writeln!(anstream::stdout(), "{object:#}")?;
    }
    let (dim, line) = (progress::DIM, session.summary(&answered, began));
    writeln!(anstream::stderr(), "{dim}{line}{dim:#}")?;
    Ok(ExitCode::SUCCESS)
}

/// Why an answer ended, in the words of the chat completions API where it has one.
fn finish_word(finish: &FinishReason) -> &'static str {
    match finish {
        FinishReason::EndToken | FinishReason::StopToken(_) => "stop",
        FinishReason::Length => "length",
        FinishReason::Abort => "abort",
        FinishReason::Error(_) => "error",
    }
}

/// A user's message with `pictures` pictures before its text.
pub(crate) fn user_message(text: &str, pictures: usize) -> Message {
    let mut message = Message::text(Role::User, text);
    if pictures > 0 {
        let mut parts: Vec<Part> = (0..pictures).map(|_| Part::Image(MediaSource::Supplied)).collect();
        parts.push(Part::Text(text.to_owned()));
        message.content = Content::Parts(parts);
    }
    message
}

/// The file's name and its bytes.
pub(crate) fn read_image(path: &Path) -> anyhow::Result<(String, Vec<u8>)> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read the picture {}", path.display()))?;
    Ok((path.display().to_string(), bytes))
}

fn prompt_text(argument: &str) -> anyhow::Result<String> {
    let mut text = argument.to_owned();
    if argument == "-" {
        text.clear();
        std::io::stdin().read_to_string(&mut text).context("cannot read the prompt from standard input")?;
        // The end of the last line is the shell's, not the question's.
        let end = text.strip_suffix('\n').map(|text| text.strip_suffix('\r').unwrap_or(text).len());
        text.truncate(end.unwrap_or(text.len()));
    }
    if text.trim().is_empty() {
        bail!("the prompt is empty: give a question, or `-` and a question on standard input");
    }
    Ok(text)
}

fn read_tools(path: &Path) -> anyhow::Result<Vec<Value>> {
    let value: Value = serde_json::from_str(&open::text(path)?)
        .with_context(|| format!("{}: expected a JSON list of tools", path.display()))?;
    let Value::Array(tools) = value else { bail!("{}: expected a JSON list of tools", path.display()) };
    for (i, tool) in tools.iter().enumerate() {
        let name = tool["function"]["name"].as_str().or_else(|| tool["name"].as_str());
        if name.is_none_or(str::is_empty) {
            bail!("{}: tool {i}: expected {{\"type\": \"function\", \"function\": {{\"name\": ...}}}}", path.display());
        }
    }
    Ok(tools)
}
