//! `glimmer chat`: a conversation in the terminal.

use std::{io::Write as _, path::Path, process::ExitCode, time::Instant};

use glimmer_tensor::Backend;
use glimmer_text::{Message, Role};

use super::generate::{read_image, user_message};
use crate::{
    args::ChatArgs,
    device::{Place, on_device},
    failure,
    interrupt::Interrupt,
    lines::{Line, Lines},
    progress,
    session::Session,
};

const HELP: &str = "/image FILE  ask the next question about a picture\n\
                    /clear       forget the conversation\n\
                    /help        this\n\
                    /quit        leave (so does Ctrl-D)\n\
                    Ctrl-C interrupts an answer; what it said so far stays in the conversation";

/// Reads questions line by line and answers them. Works in a pipe, too: one question a line.
pub(crate) fn run(args: &ChatArgs, threads: usize) -> anyhow::Result<ExitCode> {
    on_device!(Place::of(&args.device)?, open => talk(args, open(threads)?))
}

fn talk<B: Backend>(args: &ChatArgs, backend: B) -> anyhow::Result<ExitCode> {
    let mut session = Session::open(args.model.as_deref(), &args.prompting, &args.sampling, backend)?;
    let system = || args.prompting.system.iter().map(|text| Message::text(Role::System, text));
    let (mut messages, mut images): (Vec<Message>, Vec<_>) = (system().collect(), Vec::new());
    let mut waiting = Vec::new();
    let mut lines = Lines::open()?;
    // Whoever pipes questions in wants Ctrl-C to end the program.
    let interrupt = if lines.interactive() { Interrupt::watch(None)? } else { Interrupt::default() };
    let (bold, dim) = (progress::BOLD, progress::DIM);
    if lines.interactive() {
        writeln!(anstream::stderr(), "{bold}{}{bold:#}. /help lists the commands.", session.name())?;
    }
    loop {
        let text = match lines.next("> ")? {
            Line::Text(text) => text,
            Line::NotText => {
                writeln!(anstream::stderr(), "this line is not UTF-8 text and was left out; ask again")?;
                continue;
            }
            Line::Cancelled => {
                writeln!(anstream::stderr(), "Ctrl-D or /quit leaves")?;
                continue;
            }
            Line::End => return Ok(ExitCode::SUCCESS),
        };
        let text = text.trim();
        match text.split_once(char::is_whitespace).unwrap_or((text, "")) {
            ("", _) => {}
            ("/quit" | "/exit", _) => return Ok(ExitCode::SUCCESS),
            ("/help", _) => writeln!(anstream::stderr(), "{HELP}")?,
            ("/clear", _) => {
                messages = system().collect();
                images.clear();
                waiting.clear();
            }
            ("/image", "") => writeln!(anstream::stderr(), "/image needs the name of a picture file")?,
            ("/image", file) => match read_image(Path::new(file.trim())) {
                Ok(image) => waiting.push(image),
                Err(error) => writeln!(anstream::stderr(), "{}", failure::explain(&error))?,
            },
            (command, _) if command.starts_with('/') && !command[1..].contains('/') => {
                writeln!(anstream::stderr(), "{command}: no such command\n{HELP}")?;
            }
            _ => {
                let began = Instant::now();
                // A press that came too late for the last answer is not meant for this one.
                interrupt.take();
                let (kept_messages, kept_images) = (messages.len(), images.len());
                messages.push(user_message(text, waiting.len()));
                images.append(&mut waiting);
                let answered = session
                    .chat_request(&messages, &[], &images)
                    .and_then(|request| session.answer(request, &[], false, &|| interrupt.take()));
                match answered {
                    Ok(answered) => {
                        let mut reply =
                            Message::text(Role::Assistant, answered.answer.content.clone().unwrap_or_default());
                        reply.reasoning.clone_from(&answered.answer.reasoning);
                        messages.push(reply);
                        writeln!(anstream::stderr(), "{dim}{}{dim:#}", session.summary(&answered, began))?;
                    }
                    // The conversation goes on as if the question had not been asked.
                    Err(error) if failure::is_broken_pipe(&error) => return Err(error),
                    Err(error) => {
                        messages.truncate(kept_messages);
                        images.truncate(kept_images);
                        writeln!(anstream::stderr(), "{}", failure::explain(&error))?;
                    }
                }
            }
        }
    }
}
