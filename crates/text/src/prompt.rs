//! From messages to token ids.
//!
//! Render, encode with user text protected, expand media. The template writes one placeholder token per image or video;
//! the model wants one placeholder per visual token, and how many that is only the image processor knows, so the caller
//! supplies the counts. A conversation and its counts must agree exactly: an image is never silently dropped.

use std::path::Path;

use serde_json::{Map, Value};

use crate::budget::Budget;
use crate::error::TextError;
use crate::media::VideoFrame;
use crate::message::{Content, Message, Part, Role};
use crate::output::Start;
use crate::protect::Marks;
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;

/// Literals of the tokens that media expand to.
const IMAGE: &str = "<|image|>";
const VIDEO: &str = "<|video|>";
const BEGIN_IMAGE: &str = "<|begin_of_image|>";
const END_IMAGE: &str = "<|end_of_image|>";

/// A conversation to be turned into a prompt.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChatInput<'a> {
    /// The messages.
    pub messages: &'a [Message],
    /// Tool definitions as the client sent them (`{"type": "function", "function": {...}}`).
    pub tools: &'a [Value],
    /// Further variables of the template, for example `reasoning_effort`, `enable_thinking` or `clear_thinking`.
    pub variables: Option<&'a Map<String, Value>>,
    /// End with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Let literals of added tokens in user text act as those tokens.
    pub allow_special: bool,
}

/// A prompt, as text and as tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The rendered text, media not expanded.
    pub text: String,
    /// Token ids, media not expanded.
    ids: Vec<u32>,
}

/// Tokenizer and template of one model.
#[derive(Debug)]
pub struct ChatFormat {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    media: MediaIds,
}

/// Ids of the media tokens; a text-only tokenizer has none.
#[derive(Clone, Copy, Debug)]
struct MediaIds {
    image: Option<u32>,
    video: Option<u32>,
    begin_image: Option<u32>,
    end_image: Option<u32>,
}

impl ChatFormat {
    /// Reads `tokenizer.json` and `chat_template.jinja` of a model directory.
    ///
    /// # Errors
    /// As [`Tokenizer::from_dir`] and [`ChatTemplate::from_dir`].
    pub fn from_dir(dir: &Path) -> Result<Self, TextError> {
        Ok(Self::new(Tokenizer::from_dir(dir)?, ChatTemplate::from_dir(dir)?))
    }

    /// Joins a tokenizer and a template.
    #[must_use]
    pub fn new(tokenizer: Tokenizer, template: ChatTemplate) -> Self {
        let id = |literal: &str| tokenizer.added_id(literal).ok();
        let media =
            MediaIds { image: id(IMAGE), video: id(VIDEO), begin_image: id(BEGIN_IMAGE), end_image: id(END_IMAGE) };
        Self { tokenizer, template, media }
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The template.
    #[must_use]
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// Renders and encodes a conversation; placeholders of media stay single, see [`ChatFormat::expand`].
    ///
    /// # Errors
    /// Errors of the template and the tokenizer; [`TextError::TornUserText`] if the template cuts marked text.
    pub fn prompt(&self, input: &ChatInput<'_>) -> Result<Prompt, TextError> {
        self.prompt_within(input, Budget::default())
    }

    /// As [`ChatFormat::prompt`], within a budget.
    ///
    /// # Errors
    /// As [`ChatFormat::prompt`]; [`TextError::TooManyTokens`], [`TextError::Abandoned`].
    pub fn prompt_within(&self, input: &ChatInput<'_>, budget: Budget<'_>) -> Result<Prompt, TextError> {
        let prompt = self.render(input, false, budget)?;
        let images = input.messages.iter().flat_map(Message::images).count();
        let shown = prompt.ids.iter().filter(|&&id| Some(id) == self.media.image).count();
        if images > 0 && shown == 0 {
            // Some published templates predate vision.
            return self.render(input, true, budget);
        }
        Ok(prompt)
    }

    /// Renders and encodes; with `insert_images` images are written at their places whatever the template makes of them.
    fn render(&self, input: &ChatInput<'_>, insert_images: bool, budget: Budget<'_>) -> Result<Prompt, TextError> {
        budget.check(0)?;
        let image = format!("{BEGIN_IMAGE}{IMAGE}{END_IMAGE}");
        let variables = template_variables(input, None);
        if input.allow_special {
            let variables = if insert_images { template_variables(input, Some(&image)) } else { variables };
            let text = self.template.render(&variables)?;
            let ids = self.tokenizer.encode_within(&text, &[], budget)?;
            return Ok(Prompt { text, ids });
        }
        let marks = Marks::choose(&variables, self.template.source())?;
        let variables = if insert_images { template_variables(input, Some(&marks.image())) } else { variables };
        let protect = |(key, value)| (key, marks.protect(self.tokenizer.added(), value));
        let protected: Map<String, Value> = variables.into_iter().map(protect).collect();
        budget.check(0)?;
        let (text, ranges) = marks.remove(&self.template.render(&protected)?, &image)?;
        let ids = self.tokenizer.encode_within(&text, &ranges, budget)?;
        Ok(Prompt { text, ids })
    }

    /// Replaces each image placeholder by as many as the image has visual tokens, and each video placeholder by its
    /// frames, every one `<|begin_of_image|>`, placeholders, `<|end_of_image|>` and its time as text.
    ///
    /// `images[i]` is the number of visual tokens of the i-th image of the conversation, `videos[i]` the temporal patches
    /// of the i-th video.
    ///
    /// # Errors
    /// [`TextError::MediaCount`] if the numbers of placeholders and items differ, [`TextError::EmptyMedia`] if an item has
    /// no tokens, [`TextError::MissingToken`] if a video is given to a tokenizer without image tokens.
    pub fn expand(&self, prompt: &Prompt, images: &[usize], videos: &[Vec<VideoFrame>]) -> Result<Vec<u32>, TextError> {
        let count = |id: Option<u32>| prompt.ids.iter().filter(|&&other| Some(other) == id).count();
        check_count("image", count(self.media.image), images.len())?;
        check_count("video", count(self.media.video), videos.len())?;
        if let Some(index) = images.iter().position(|&tokens| tokens == 0) {
            return Err(TextError::EmptyMedia { kind: "image", index });
        }
        let mut ids = Vec::with_capacity(prompt.ids.len() + images.iter().sum::<usize>());
        let (mut images, mut videos) = (images.iter(), videos.iter().enumerate());
        for &id in &prompt.ids {
            if Some(id) == self.media.image {
                let tokens = *images.next().expect("counted above");
                ids.extend(std::iter::repeat_n(id, tokens));
            } else if Some(id) == self.media.video {
                let (index, frames) = videos.next().expect("counted above");
                self.append_video(index, frames, &mut ids)?;
            } else {
                ids.push(id);
            }
        }
        Ok(ids)
    }

    /// Ends the reasoning that a prompt leaves open, so that the answer begins with content: what a template with a switch
    /// for it does itself, and one without cannot.
    ///
    /// # Errors
    /// [`TextError::MissingToken`] if the tokenizer has no `</think>`.
    pub fn close_reasoning(&self, ids: &mut Vec<u32>) -> Result<(), TextError> {
        if Start::of_prompt(&self.tokenizer, ids) == Start::Reasoning {
            ids.push(self.tokenizer.added_id("</think>")?);
        }
        Ok(())
    }

    fn append_video(&self, index: usize, frames: &[VideoFrame], ids: &mut Vec<u32>) -> Result<(), TextError> {
        let need =
            |id: Option<u32>, literal: &str| id.ok_or_else(|| TextError::MissingToken { token: literal.to_owned() });
        if frames.is_empty() || frames.iter().any(|frame| frame.tokens == 0) {
            return Err(TextError::EmptyMedia { kind: "video", index });
        }
        for frame in frames {
            ids.push(need(self.media.begin_image, BEGIN_IMAGE)?);
            ids.extend(std::iter::repeat_n(need(self.media.image, IMAGE)?, frame.tokens));
            ids.push(need(self.media.end_image, END_IMAGE)?);
            ids.extend(self.tokenizer.encode_ordinary(&frame.caption)?);
        }
        Ok(())
    }
}

impl Prompt {
    /// Token ids of a prompt without media.
    ///
    /// Prompts with media need [`ChatFormat::expand`]; it checks the counts.
    #[must_use]
    pub fn unexpanded_ids(&self) -> &[u32] {
        &self.ids
    }
}

fn check_count(kind: &'static str, placeholders: usize, supplied: usize) -> Result<(), TextError> {
    if placeholders == supplied { Ok(()) } else { Err(TextError::MediaCount { kind, placeholders, supplied }) }
}

/// Variables of the template; images become text if `image` is given.
fn template_variables(input: &ChatInput<'_>, image: Option<&str>) -> Map<String, Value> {
    let mut variables = input.variables.cloned().unwrap_or_default();
    let message = |message: &Message| {
        let mut message = hoist_inline_reasoning(message);
        if let (Some(image), Content::Parts(parts)) = (image, &mut message.content) {
            for part in parts.iter_mut().filter(|part| matches!(part, Part::Image(_))) {
                *part = Part::Text(image.to_owned());
            }
        }
        message.to_template()
    };
    let messages = input.messages.iter().map(message).collect();
    variables.insert("messages".to_owned(), Value::Array(messages));
    if !input.tools.is_empty() {
        variables.insert("tools".to_owned(), Value::Array(input.tools.to_vec()));
    }
    variables.insert("add_generation_prompt".to_owned(), input.add_generation_prompt.into());
    variables
}

/// Moves `<think>...</think>` in the text of an assistant message into its reasoning, as the templates themselves do.
/// Protected text no longer reads as `</think>` to a template, so it has to happen before.
fn hoist_inline_reasoning(message: &Message) -> Message {
    let mut hoisted = message.clone();
    if message.role != Role::Assistant || message.reasoning.is_some() {
        return hoisted;
    }
    let Some(text) = message.content.plain_text() else { return hoisted };
    let Some((before, _)) = text.split_once("</think>") else { return hoisted };
    let reasoning = before.rsplit_once("<think>").map_or(before, |(_, inside)| inside);
    let answer = text.rsplit_once("</think>").map_or("", |(_, after)| after);
    hoisted.reasoning = Some(reasoning.to_owned());
    hoisted.content = Content::Text(answer.to_owned());
    hoisted
}
