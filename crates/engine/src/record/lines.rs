//! The lines of a log.

use std::sync::Arc;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use glimmer_model::vision::Patches;
use glimmer_tensor::{PatchGrid, Step};
use serde::{Deserialize, Serialize};

use crate::{
    SequenceId, Settings,
    request::{FinishReason, Limits, Media, MediaKind, Request, Sampling, Structure, TokenEvent},
};

/// Version of the format.
pub(crate) const VERSION: u32 = 1;

/// A line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Line {
    Header(Header),
    Submit(Box<Submission>),
    Abort { id: SequenceId, clock: Vec<u64> },
    Reset,
    Step(Planned),
    Yield(Yielded),
}

/// What was recorded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Header {
    pub(crate) version: u32,
    /// SHA-256 of the model's configuration.
    pub(crate) model: String,
    pub(crate) settings: Settings,
    /// Where the tokens' meaning came from, if not from the model: shapes of answers are made of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tokenizer: Option<String>,
}

/// A step before it is computed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Planned {
    pub(crate) number: u64,
    pub(crate) decided: Decided,
    pub(crate) step: Step,
    pub(crate) clock: Vec<u64>,
}

/// Who moved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Decided {
    pub(crate) preempt: Vec<SequenceId>,
    pub(crate) refuse: Vec<SequenceId>,
    pub(crate) admit: Vec<SequenceId>,
}

/// What a step yielded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Yielded {
    pub(crate) number: u64,
    pub(crate) events: Vec<Event>,
    pub(crate) clock: Vec<u64>,
}

/// An event of one sequence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Event {
    pub(crate) id: SequenceId,
    pub(crate) tokens: Vec<u32>,
    /// Bits of their log-probabilities, when asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) logprobs: Vec<u32>,
    pub(crate) finish: Option<FinishReason>,
    /// The consumer wanted no more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) stopped: bool,
}

/// A request as it was taken in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Submission {
    pub(crate) id: SequenceId,
    pub(crate) clock: Vec<u64>,
    name: String,
    group: u64,
    prompt: Vec<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    media: Vec<Picture>,
    sampling: Sampling,
    limits: Limits,
    logprobs: Option<u32>,
    prompt_logprobs: Option<u32>,
    priority: i64,
    cache_salt: Option<String>,
    pub(crate) structure: Option<Structure>,
    thinking_budget: Option<u32>,
    starts_in_reasoning: bool,
    turn_start: Option<usize>,
    depth: Option<u32>,
}

/// An image or clip with its pixels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Picture {
    kind: MediaKind,
    digest: [u8; 32],
    start: usize,
    /// Frames, height, width in patches.
    grid: [usize; 3],
    width: usize,
    merge: usize,
    /// Little-endian f32, base64.
    values: String,
}

impl Submission {
    pub(crate) fn new(id: SequenceId, request: &Request, clock: Vec<f64>) -> Self {
        Self {
            id,
            clock: bits(clock),
            name: request.id.clone(),
            group: request.group,
            prompt: request.prompt.to_vec(),
            media: request.media.iter().map(Picture::new).collect(),
            sampling: request.sampling.clone(),
            limits: request.limits.clone(),
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs,
            priority: request.priority,
            cache_salt: request.cache_salt.clone(),
            structure: request.structure.clone(),
            thinking_budget: request.thinking_budget,
            starts_in_reasoning: request.starts_in_reasoning,
            turn_start: request.turn_start,
            depth: request.depth,
        }
    }

    /// The request; an error says what is wrong with the line.
    pub(crate) fn request(&self) -> Result<Request, String> {
        Ok(Request {
            id: self.name.clone(),
            group: self.group,
            prompt: self.prompt.as_slice().into(),
            media: self.media.iter().map(Picture::media).collect::<Result<_, _>>()?,
            sampling: self.sampling.clone(),
            limits: self.limits.clone(),
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            priority: self.priority,
            cache_salt: self.cache_salt.clone(),
            structure: self.structure.clone(),
            thinking_budget: self.thinking_budget,
            starts_in_reasoning: self.starts_in_reasoning,
            turn_start: self.turn_start,
            depth: self.depth,
        })
    }
}

impl Picture {
    fn new(media: &Media) -> Self {
        let patches = &media.patches;
        let bytes: Vec<u8> = patches.values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self {
            kind: media.kind,
            digest: media.digest,
            start: media.start,
            grid: [patches.grid.frames, patches.grid.height, patches.grid.width],
            width: patches.width,
            merge: patches.merge,
            values: BASE64_STANDARD.encode(bytes),
        }
    }

    fn media(&self) -> Result<Media, String> {
        let bytes = BASE64_STANDARD.decode(&self.values).map_err(|error| format!("pixels: {error}"))?;
        let [frames, height, width] = self.grid;
        let values: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let expected = [frames, height, width, self.width].iter().try_fold(4usize, |n, &side| n.checked_mul(side));
        if expected != Some(bytes.len()) || self.merge == 0 {
            return Err(format!("pixels: {} bytes do not make {:?} patches of {}", bytes.len(), self.grid, self.width));
        }
        let grid = PatchGrid { frames, height, width };
        let patches = Arc::new(Patches { grid, width: self.width, merge: self.merge, values });
        Ok(Media { digest: self.digest, ..Media::from_patches(self.kind, patches, self.start) })
    }
}

impl Event {
    pub(crate) fn new(id: SequenceId, event: &TokenEvent) -> Self {
        Self {
            id,
            tokens: event.tokens.iter().map(|token| token.id).collect(),
            logprobs: event.tokens.iter().filter_map(|t| t.logprobs.as_ref()).map(|l| l.logprob.to_bits()).collect(),
            finish: event.finish.as_ref().map(|finish| finish.reason.clone()),
            stopped: false,
        }
    }
}

/// Readings of the clock as they are written.
pub(crate) fn bits(clock: Vec<f64>) -> Vec<u64> {
    clock.into_iter().map(f64::to_bits).collect()
}
