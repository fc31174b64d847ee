//! A clip: which frames are seen, and the text that tells the model when.
//!
//! The model sees frame pairs. `want = seconds * fps` frames are asked for; a clip with fewer frames gives them all, spread
//! by index, a longer one is walked by time. Afterwards frames are unique, in order and even in number (the last repeats).
//! Each pair becomes one group of image placeholders followed by its time.

use super::{Patches, Processor, RgbImage, VisionError, image::Animation};

/// Which of the two published samplers is used. They differ in the walk's step and in how short clips are spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sampler {
    /// Step `1 / (2 fps)`, short clips by `floor(i n / want)`, whole seconds in the text: what the model was trained with.
    #[default]
    V,
    /// Step `1 / fps`, short clips by a truncated linspace, fractions of seconds in the text.
    T,
}

/// Frames of one size at a constant rate.
#[derive(Debug, Clone, PartialEq)]
pub struct Clip {
    frames: Vec<RgbImage>,
    fps: f64,
    seconds: Option<f64>,
}

/// The frames of a clip that the model sees.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledFrames {
    /// Indices into the clip, ascending, even in number.
    pub indices: Vec<usize>,
    /// Time of the first frame of each pair in seconds.
    pub pair_seconds: Vec<f64>,
}

impl Clip {
    /// A clip of `frames` at `fps` frames a second; `seconds` is the container's own duration, if it has one.
    ///
    /// # Errors
    /// [`VisionError::Clip`] when there is no frame or the rate or duration is no positive number.
    pub fn new(frames: Vec<RgbImage>, fps: f64, seconds: Option<f64>) -> Result<Self, VisionError> {
        let fail = |reason: String| Err(VisionError::Clip { reason });
        if frames.is_empty() {
            return fail("expected at least one frame, found none".to_owned());
        }
        if !(fps.is_finite() && fps > 0.0) {
            return fail(format!("expected a positive number of frames a second, found {fps}"));
        }
        if let Some(s) = seconds.filter(|s| !(s.is_finite() && *s > 0.0)) {
            return fail(format!("expected a positive duration in seconds, found {s}"));
        }
        Ok(Self { frames, fps, seconds })
    }

    /// The clip of an animated GIF or WebP: its mean frame rate.
    ///
    /// # Errors
    /// As [`Clip::new`]. An animation without delays is taken at 10 frames a second, as viewers do.
    pub fn from_animation(animation: Animation) -> Result<Self, VisionError> {
        let Animation { frames, seconds } = animation;
        if seconds > 0.0 {
            let fps = frames.len() as f64 / seconds;
            Self::new(frames, fps, Some(seconds))
        } else {
            Self::new(frames, 10.0, None)
        }
    }

    /// Chooses the frames.
    pub fn sample(&self, processor: &Processor, sampler: Sampler) -> SampledFrames {
        let n = self.frames.len();
        let indices = sample_indices(n, self.fps, self.seconds, processor, sampler);
        let pair_seconds =
            indices.chunks(processor.temporal_patch_size).map(|pair| pair[0] as f64 / self.fps).collect();
        SampledFrames { indices, pair_seconds }
    }

    /// Patches of the chosen frames, and what was chosen.
    ///
    /// # Errors
    /// [`VisionError::Clip`] when frames differ in size.
    pub fn patches(&self, processor: &Processor, sampler: Sampler) -> Result<(Patches, SampledFrames), VisionError> {
        let sampled = self.sample(processor, sampler);
        let frames: Vec<&RgbImage> = sampled.indices.iter().map(|&i| &self.frames[i]).collect();
        Ok((processor.clip(&frames)?, sampled))
    }
}

/// Text after the placeholders of a pair: `3.0 seconds`.
pub fn caption(seconds: f64, sampler: Sampler) -> String {
    let shown = match sampler {
        Sampler::V => seconds.trunc(),
        Sampler::T => seconds,
    };
    format!("{shown:.1} seconds")
}

/// Text of one clip between (and including) its begin and end markers, with `frame_tokens` image placeholders a pair:
/// `<|begin_of_video|>` then per pair `<|begin_of_image|>`, placeholders, `<|end_of_image|>`, `"1.0 seconds"`, then
/// `<|end_of_video|>`. The placeholders are image tokens inside a video span.
pub fn prompt_text(pair_seconds: &[f64], frame_tokens: usize, sampler: Sampler) -> String {
    let mut text = String::from("<|begin_of_video|>");
    for &seconds in pair_seconds {
        text.push_str("<|begin_of_image|>");
        text.push_str(&"<|image|>".repeat(frame_tokens));
        text.push_str("<|end_of_image|>");
        text.push_str(&caption(seconds, sampler));
    }
    text.push_str("<|end_of_video|>");
    text
}

fn sample_indices(n: usize, fps: f64, seconds: Option<f64>, processor: &Processor, sampler: Sampler) -> Vec<usize> {
    let last = n - 1;
    let duration = seconds.unwrap_or_else(|| (last as f64 / fps).round_ties_even() + 1.0);
    let want = ((duration * processor.fps) as usize).min(processor.max_frames).max(1);
    let mut chosen: Vec<usize> = if n < want {
        match sampler {
            Sampler::T => linspace(0, last, want),
            Sampler::V => (0..want).map(|i| i * n / want).collect(),
        }
    } else {
        let step = match sampler {
            Sampler::T => 1.0 / processor.fps,
            Sampler::V => 1.0 / (2.0 * processor.fps),
        };
        let end = duration.trunc();
        let mut next = 0.0;
        let mut walked = Vec::new();
        for frame in 0..n {
            if frame as f64 * (1.0 / fps) >= next {
                next += step;
                walked.push(frame);
                if next >= end {
                    break;
                }
            }
        }
        walked
    };
    if chosen.len() < want {
        chosen = linspace(chosen[0], chosen[chosen.len() - 1], want);
    } else if chosen.len() > want {
        chosen = linspace(0, last, want);
    }
    // Ascending, so equal indices are neighbours.
    chosen.dedup();
    while !chosen.len().is_multiple_of(processor.temporal_patch_size) {
        chosen.push(chosen[chosen.len() - 1]);
    }
    chosen
}

/// `count` values from `first` to `last`, truncated to integers, with the roundings of numpy's `linspace`.
fn linspace(first: usize, last: usize, count: usize) -> Vec<usize> {
    if count == 1 {
        return vec![first];
    }
    let step = (last - first) as f64 / (count - 1) as f64;
    (0..count).map(|i| if i + 1 == count { last } else { (i as f64 * step + first as f64).floor() as usize }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn indices(n: usize, fps: f64, seconds: Option<f64>, sampler: Sampler) -> Vec<usize> {
        sample_indices(n, fps, seconds, &Processor::default(), sampler)
    }

    #[test]
    fn long_clips_are_walked_or_spread() {
        // 10 s at 24 frames a second: T takes a frame every half second.
        let t = indices(240, 24.0, Some(10.0), Sampler::T);
        assert_eq!(t.len(), 20);
        assert_eq!(t[..4], [0, 12, 24, 36]);
        assert_eq!(t[19], 228);
        // V's quarter-second walk finds 40, more than wanted, so 20 are spread over the whole clip.
        let v = indices(240, 24.0, Some(10.0), Sampler::V);
        assert_eq!(v.len(), 20);
        assert_eq!((v[0], v[1], v[19]), (0, 12, 239));
        assert_eq!(v[10], 125);
    }

    #[test]
    fn short_clips_differ_between_the_samplers() {
        // 3 frames at 1 a second: want 6.
        assert_eq!(indices(3, 1.0, None, Sampler::V), [0, 1, 2, 2]);
        assert_eq!(indices(3, 1.0, None, Sampler::T), [0, 1, 2, 2]);
        // 5 frames, 4 s: want 8; both keep every frame, an odd number, and repeat the last.
        assert_eq!(indices(5, 1.25, Some(4.0), Sampler::V), [0, 1, 2, 3, 4, 4]);
        assert_eq!(indices(1, 30.0, None, Sampler::V), [0, 0]);
        assert_eq!(indices(1, 30.0, Some(0.1), Sampler::T), [0, 0]);
    }

    #[test]
    fn the_number_of_frames_is_bounded() {
        let processor = Processor { max_frames: 8, ..Processor::default() };
        for sampler in [Sampler::T, Sampler::V] {
            let chosen = sample_indices(10_000, 30.0, None, &processor, sampler);
            assert_eq!(chosen.len(), 8);
            assert_eq!((chosen[0], chosen[7]), (0, 9_999));
        }
    }

    #[test]
    fn text_names_the_pairs_in_seconds() {
        let text = prompt_text(&[0.0, 3.5], 2, Sampler::T);
        let group = "<|begin_of_image|><|image|><|image|><|end_of_image|>";
        assert_eq!(text, format!("<|begin_of_video|>{group}0.0 seconds{group}3.5 seconds<|end_of_video|>"));
        assert!(prompt_text(&[3.5], 1, Sampler::V).contains("3.0 seconds"));
    }

    #[test]
    fn a_clip_becomes_patches() {
        let frames = (0..3u8).map(|v| RgbImage::new(120, 80, vec![v; 120 * 80 * 3]).unwrap()).collect();
        let clip = Clip::new(frames, 1.0, None).unwrap();
        let (patches, sampled) = clip.patches(&Processor::default(), Sampler::V).unwrap();
        assert_eq!(sampled.indices, [0, 1, 2, 2]);
        assert_eq!(sampled.pair_seconds, [0.0, 2.0]);
        assert_eq!(patches.grid.frames, 2);
        assert_eq!(patches.tokens(), 2 * patches.frame_tokens());
        assert!(Clip::new(Vec::new(), 1.0, None).is_err());
        assert!(Clip::new(vec![RgbImage::new(1, 1, vec![0; 3]).unwrap()], 0.0, None).is_err());
    }

    proptest::proptest! {
        #[test]
        fn samples_are_ascending_even_and_inside(n in 1usize..3000, fps in 0.5f64..120.0, v: bool) {
            let chosen = indices(n, fps, None, if v { Sampler::V } else { Sampler::T });
            proptest::prop_assert!(chosen.len().is_multiple_of(2) && !chosen.is_empty());
            proptest::prop_assert!(chosen.is_sorted());
            proptest::prop_assert!(chosen[chosen.len() - 1] < n);
            // Only the very last frame may repeat.
            proptest::prop_assert!(chosen.windows(2).rev().skip(1).all(|w| w[0] < w[1]));
        }
    }
}
