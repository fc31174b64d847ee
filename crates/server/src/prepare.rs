//! From a conversation to the engine's prompt: template, tokens, pictures.
//!
//! Pictures become patches here, away from the engine's thread and the connections': a broken file is the client's error,
//! how many tokens a picture takes has to be known before the prompt exists, and the vision tower wants nothing else. The
//! tokens of all pictures are counted against the context before any patches are cut, so that small files which unpack to
//! large pictures cannot take more memory than the context they would fill.

use std::sync::Arc;

use glimmer_engine::request::{Media, MediaKind};
use glimmer_model::vision::image::Animation;
use glimmer_model::vision::{Clip, DecodeLimits, Patches, Processor, RgbImage, Sampler, video};
use glimmer_text::{Budget, ChatInput, DataUrl, MediaSource, Message, Part, Tokenizer, VideoFrame};
use sha2::{Digest as _, Sha256};

use crate::app::App;
use crate::error::{ApiError, shorten};
use crate::fetch;

/// A prompt as the engine takes it.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// Token ids, placeholders expanded.
    pub ids: Vec<u32>,
    /// Pictures and clips in order.
    pub media: Vec<Media>,
}

impl Prepared {
    /// Where the last turn begins: a later turn of the conversation shares the tokens before it. Decided by the tokens
    /// alone, so that text which looks like a marker does not count.
    #[must_use]
    pub fn turn_start(&self, tokenizer: &Tokenizer) -> Option<usize> {
        let markers = ["<|user|>", "<|observation|>"].map(|marker| tokenizer.added_id(marker).ok());
        self.ids.iter().rposition(|&id| markers.contains(&Some(id)))
    }
}

/// One picture or clip of the conversation.
struct Item {
    kind: MediaKind,
    digest: [u8; 32],
    patches: Arc<Patches>,
    /// Placeholders of a picture, or of each frame pair.
    runs: Vec<usize>,
    captions: Vec<String>,
}

/// Renders and encodes a conversation.
///
/// # Errors
/// What the template, the pictures or the limits refuse.
pub fn prepare(app: &App, input: &ChatInput<'_>, budget: Budget<'_>) -> Result<Prepared, ApiError> {
    let items = collect(app, input.messages)?;
    let format = &app.model.format;
    let prompt = format.prompt_within(input, budget)?;
    let images: Vec<usize> = items.iter().filter(|i| i.kind == MediaKind::Image).map(|i| i.runs[0]).collect();
    let videos: Vec<Vec<VideoFrame>> = items.iter().filter(|i| i.kind == MediaKind::Video).map(frames).collect();
    let ids = format.expand(&prompt, &images, &videos)?;
    let media = place(app, items, &ids)?;
    Ok(Prepared { ids, media })
}

fn frames(item: &Item) -> Vec<VideoFrame> {
    let pairs = item.runs.iter().zip(&item.captions);
    pairs.map(|(&tokens, caption)| VideoFrame { tokens, caption: caption.clone() }).collect()
}

/// Finds the placeholders of each item. The template renders parts in their order, so the runs follow each other.
fn place(app: &App, items: Vec<Item>, ids: &[u32]) -> Result<Vec<Media>, ApiError> {
    if items.is_empty() {
        return Ok(Vec::new());
    }
    let placeholder = app.model.format.tokenizer().added_id("<|image|>")?;
    let mut at = 0;
    let mut media = Vec::with_capacity(items.len());
    for item in items {
        let mut start = None;
        for &run in &item.runs {
            let Some(skipped) = ids[at..].iter().position(|&id| id == placeholder) else {
                return Err(ApiError::internal());
            };
            at += skipped;
            start = start.or(Some(at));
            at += run;
        }
        media.push(Media {
            kind: item.kind,
            digest: item.digest,
            bytes: Arc::default(),
            patches: item.patches,
            start: start.unwrap_or(at),
            tokens: item.runs.iter().sum(),
        });
    }
    Ok(media)
}

fn collect(app: &App, messages: &[Message]) -> Result<Vec<Item>, ApiError> {
    let count = |pick: fn(&Part) -> bool| messages.iter().flat_map(|m| m.content.parts()).filter(|p| pick(p)).count();
    let limits = [
        ("image", count(|part| matches!(part, Part::Image(_))), app.options.max_images),
        ("video", count(|part| matches!(part, Part::Video(_))), app.options.max_videos),
    ];
    for (kind, found, most) in limits {
        if found > most {
            let message = format!("at most {most} {kind}(s) may be given in one request, got {found}");
            return Err(ApiError::parameter("messages", message));
        }
    }
    let mut items = Vec::new();
    let mut room = Room { app, taken: 0 };
    for (index, message) in messages.iter().enumerate() {
        for (part_index, part) in message.content.parts().iter().enumerate() {
            let path = || format!("messages[{index}].content[{part_index}]");
            match part {
                Part::Image(source) => items.push(image(&mut room, source, &path())?),
                Part::Video(source) => items.push(clip(&mut room, source, &path())?),
                _ => {}
            }
        }
    }
    Ok(items)
}

/// Tokens that pictures may still take.
struct Room<'a> {
    app: &'a App,
    taken: usize,
}

impl Room<'_> {
    /// Takes the tokens of a picture or clip.
    fn take(&mut self, tokens: usize) -> Result<(), ApiError> {
        self.taken = self.taken.saturating_add(tokens);
        let context = self.app.model.max_model_len;
        if self.taken >= context { Err(ApiError::context("messages", context, self.taken, None)) } else { Ok(()) }
    }
}

fn image(room: &mut Room<'_>, source: &MediaSource, path: &str) -> Result<Item, ApiError> {
    let bytes = load(room.app, source, path)?;
    let processor = &processors(room.app, path)?.image;
    let picture = RgbImage::decode(&bytes, DecodeLimits::default()).map_err(|error| unusable(path, &error))?;
    let tokens = tokens(processor, picture.height(), picture.width(), processor.temporal_patch_size);
    room.take(tokens)?;
    Ok(Item {
        kind: MediaKind::Image,
        digest: digest(b"image", &bytes),
        patches: Arc::new(processor.image(&picture)),
        runs: vec![tokens],
        captions: Vec::new(),
    })
}

fn clip(room: &mut Room<'_>, source: &MediaSource, path: &str) -> Result<Item, ApiError> {
    let bytes = load(room.app, source, path)?;
    let processor = &processors(room.app, path)?.video;
    let animation = Animation::decode(&bytes, DecodeLimits::default()).map_err(|error| unusable(path, &error))?;
    let (height, width) = animation.frames.first().map_or((1, 1), |frame| (frame.height(), frame.width()));
    let clip = Clip::from_animation(animation).map_err(|error| unusable(path, &error))?;
    let sampled = clip.sample(processor, Sampler::V);
    let each = tokens(processor, height, width, sampled.indices.len());
    let captions: Vec<String> = sampled.pair_seconds.iter().map(|&s| video::caption(s, Sampler::V)).collect();
    room.take(each.saturating_mul(captions.len()))?;
    let (patches, _) = clip.patches(processor, Sampler::V).map_err(|error| unusable(path, &error))?;
    Ok(Item {
        kind: MediaKind::Video,
        digest: digest(b"video", &bytes),
        patches: Arc::new(patches),
        runs: vec![each; captions.len()],
        captions,
    })
}

/// Identity of the patches: one file is cut differently as a picture and as a clip.
fn digest(kind: &[u8], bytes: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(kind).chain_update(bytes).finalize().into()
}

/// Tokens of a picture, or of one frame pair.
fn tokens(processor: &Processor, height: usize, width: usize, frames: usize) -> usize {
    let canvas = processor.canvas(height, width, frames);
    let side = processor.patch_size * processor.merge_size;
    (canvas.height / side) * (canvas.width / side)
}

fn processors<'a>(app: &'a App, path: &str) -> Result<&'a glimmer_model::vision::Processors, ApiError> {
    app.model.processors.as_ref().ok_or_else(|| {
        ApiError::parameter(path, "this server takes text only (it runs with --language-model-only or a limit of 0)")
    })
}

fn unusable(path: &str, error: &glimmer_model::vision::VisionError) -> ApiError {
    ApiError::parameter(path, error.to_string())
}

/// The bytes behind a URL. Files and other schemes are never read.
fn load(app: &App, source: &MediaSource, path: &str) -> Result<Arc<[u8]>, ApiError> {
    let MediaSource::Url(url) = source else {
        return Err(ApiError::parameter(path, "the part has no URL; give a data: URL"));
    };
    let scheme = url.split(':').next().unwrap_or_default().to_ascii_lowercase();
    match scheme.as_str() {
        "data" => {
            let data = DataUrl::parse(url).map_err(|error| ApiError::parameter(path, error.to_string()))?;
            Ok(data.bytes.into())
        }
        "http" | "https" => {
            let image = fetch::image(url, &app.options.media_domains, app.options.max_body_bytes);
            image.map(Into::into).map_err(|problem| ApiError::parameter(path, problem))
        }
        _ => {
            let message = format!("{:?} is no URL of an image; send a data: URL", shorten(&scheme));
            Err(ApiError::parameter(path, message))
        }
    }
}
