//! Settings of picture processing, from `processor_config.json` or `preprocessor_config.json`.
//!
//! Invariant: a [`Processor`] that was read fits the vision tower (same patch, depth and merge sizes) and cannot divide by
//! zero or overflow.

use glimmer_checkpoint::VisionConfig;
use serde_json::Value;

use super::VisionError;

/// Settings of one kind of picture input (`image_processor` or `video_processor`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Processor {
    /// Pixels a patch, each way.
    pub patch_size: usize,
    /// Frames a patch.
    pub temporal_patch_size: usize,
    /// Patches a token, each way.
    pub merge_size: usize,
    /// Factor on the canvas unit.
    pub patch_expand_factor: usize,
    /// Fewest tokens.
    pub min_tokens: usize,
    /// Most tokens (of the whole clip, for a video).
    pub max_tokens: usize,
    /// Factor on a byte.
    pub rescale: f64,
    /// Mean of each channel, on the scale of rescaled values.
    pub mean: [f32; 3],
    /// Standard deviation of each channel.
    pub std: [f32; 3],
    /// Frames a second that a clip is sampled at (before the temporal patch doubles it).
    pub fps: f64,
    /// Most frames of a clip.
    pub max_frames: usize,
}

/// Settings of images and clips.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Processors {
    /// Images.
    pub image: Processor,
    /// Clips.
    pub video: Processor,
}

impl Processors {
    /// Settings of a model directory: `processor_config.json` with nested `image_processor` and `video_processor`, or a flat
    /// `preprocessor_config.json`. Keys that neither file has take the values of the vision tower and of the family.
    ///
    /// # Errors
    /// [`VisionError::Settings`] when a file is no JSON object, a field has another type or a value is impossible.
    pub fn from_files(
        vision: &VisionConfig,
        processor_config: Option<&[u8]>,
        preprocessor_config: Option<&[u8]>,
    ) -> Result<Self, VisionError> {
        const NESTED: &str = "processor_config.json";
        const FLAT: &str = "preprocessor_config.json";
        let nested = processor_config.map(|bytes| parse(NESTED, bytes)).transpose()?;
        let flat = preprocessor_config.map(|bytes| parse(FLAT, bytes)).transpose()?;
        let section = |key: &'static str| nested.as_ref().and_then(|v| v.get(key)).filter(|v| v.is_object());
        let base = Processor {
            patch_size: vision.patch_size,
            temporal_patch_size: vision.temporal_patch_size,
            merge_size: vision.spatial_merge_size,
            ..Processor::default()
        };
        let image = match (section("image_processor"), &flat) {
            (Some(v), _) => base.with(NESTED, "image_processor.", v)?,
            (None, Some(v)) => base.with(FLAT, "", v)?,
            (None, None) => base,
        };
        let mut video = Processor { max_tokens: Processor::VIDEO_TOKENS, ..image };
        if let Some(v) = section("video_processor") {
            video = video.with(NESTED, "video_processor.", v)?;
        }
        for (file, processor) in [("image processor", &image), ("video processor", &video)] {
            processor.check(file, vision)?;
        }
        Ok(Self { image, video })
    }
}

impl Default for Processor {
    /// The family's values (CLIP statistics, 16 to 8000 tokens, 2 frames a second).
    fn default() -> Self {
        Self {
            patch_size: 14,
            temporal_patch_size: 2,
            merge_size: 2,
            patch_expand_factor: 1,
            min_tokens: 16,
            max_tokens: 8000,
            rescale: 1.0 / 255.0,
            mean: [0.481_454_66, 0.457_827_5, 0.408_210_73],
            std: [0.268_629_54, 0.261_302_6, 0.275_777_1],
            fps: 2.0,
            max_frames: Self::VIDEO_FRAMES,
        }
    }
}

impl Processor {
    /// Most tokens of a clip where no file says so.
    pub(super) const VIDEO_TOKENS: usize = 240_000;
    /// Most frames of a clip where no file says so.
    const VIDEO_FRAMES: usize = 1 << 11;

    fn with(mut self, file: &'static str, path: &str, object: &Value) -> Result<Self, VisionError> {
        let field = Fields { file, path, object };
        field.count("patch_size", &mut self.patch_size)?;
        field.count("temporal_patch_size", &mut self.temporal_patch_size)?;
        field.count("merge_size", &mut self.merge_size)?;
        field.count("patch_expand_factor", &mut self.patch_expand_factor)?;
        field.count("min_image_tokens", &mut self.min_tokens)?;
        field.count("max_image_tokens", &mut self.max_tokens)?;
        field.count("max_frames", &mut self.max_frames)?;
        field.number("rescale_factor", &mut self.rescale)?;
        field.number("fps", &mut self.fps)?;
        field.triple("image_mean", &mut self.mean)?;
        field.triple("image_std", &mut self.std)?;
        for key in ["do_resize", "do_rescale", "do_normalize", "do_convert_rgb"] {
            field.must_be_true(key)?;
        }
        match object.get("resample").filter(|v| !v.is_null()) {
            None => {}
            Some(v) if v.as_u64() == Some(3) => {}
            Some(v) => return Err(field.error("resample", "3 (bicubic)", v)),
        }
        Ok(self)
    }

    fn check(&self, file: &'static str, vision: &VisionConfig) -> Result<(), VisionError> {
        let rules = [
            ("patch_size", self.patch_size, vision.patch_size),
            ("temporal_patch_size", self.temporal_patch_size, vision.temporal_patch_size),
            ("merge_size", self.merge_size, vision.spatial_merge_size),
        ];
        let fail = |field: &str, expected: String, found: String| {
            Err(VisionError::Settings { file, field: field.to_owned(), expected, found })
        };
        for (field, found, expected) in rules {
            if found != expected {
                return fail(field, format!("{expected}, as in vision_config"), found.to_string());
            }
        }
        if self.min_tokens > self.max_tokens {
            let expected = format!("at most max_image_tokens ({})", self.max_tokens);
            return fail("min_image_tokens", expected, self.min_tokens.to_string());
        }
        if self.std.iter().any(|&s| !(s.is_finite() && s > 0.0)) {
            return fail("image_std", "positive numbers".to_owned(), format!("{:?}", self.std));
        }
        if !(self.fps.is_finite() && self.fps > 0.0) {
            return fail("fps", "a positive number".to_owned(), self.fps.to_string());
        }
        Ok(())
    }
}

/// Typed access to the fields of a processor file.
struct Fields<'a> {
    file: &'static str,
    path: &'a str,
    object: &'a Value,
}

impl Fields<'_> {
    fn error(&self, key: &str, expected: &str, found: &Value) -> VisionError {
        VisionError::Settings {
            file: self.file,
            field: format!("{}{key}", self.path),
            expected: expected.to_owned(),
            found: found.to_string(),
        }
    }

    fn present(&self, key: &str) -> Option<&Value> {
        self.object.get(key).filter(|v| !v.is_null())
    }

    fn count(&self, key: &str, to: &mut usize) -> Result<(), VisionError> {
        /// Beyond this the arithmetic of a canvas could overflow.
        const MOST: u64 = 1 << 31;
        if let Some(v) = self.present(key) {
            match v.as_u64() {
                Some(n) if (1..=MOST).contains(&n) => *to = n as usize,
                _ => return Err(self.error(key, "a positive integer below 2^31", v)),
            }
        }
        Ok(())
    }

    fn number(&self, key: &str, to: &mut f64) -> Result<(), VisionError> {
        if let Some(v) = self.present(key) {
            *to = v.as_f64().ok_or_else(|| self.error(key, "a number", v))?;
        }
        Ok(())
    }

    fn triple(&self, key: &str, to: &mut [f32; 3]) -> Result<(), VisionError> {
        let Some(v) = self.present(key) else { return Ok(()) };
        let numbers: Option<Vec<f32>> =
            v.as_array().and_then(|a| a.iter().map(|x| x.as_f64().map(|x| x as f32)).collect());
        *to = numbers
            .and_then(|n| <[f32; 3]>::try_from(n).ok())
            .ok_or_else(|| self.error(key, "three numbers (red, green, blue)", v))?;
        Ok(())
    }

    fn must_be_true(&self, key: &str) -> Result<(), VisionError> {
        match self.present(key) {
            None | Some(Value::Bool(true)) => Ok(()),
            Some(v) => Err(self.error(key, "true (other settings are not implemented)", v)),
        }
    }
}

fn parse(file: &'static str, bytes: &[u8]) -> Result<Value, VisionError> {
    let fail = |found: String| VisionError::Settings {
        file,
        field: "(whole file)".to_owned(),
        expected: "a JSON object".to_owned(),
        found,
    };
    let value: Value = serde_json::from_slice(bytes).map_err(|e| fail(e.to_string()))?;
    if value.is_object() { Ok(value) } else { Err(fail(value.to_string().chars().take(40).collect())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tower() -> VisionConfig {
        VisionConfig {
            depth: 2,
            hidden_size: 128,
            num_heads: 4,
            intermediate_size: 384,
            out_hidden_size: 256,
            projection_intermediate_size: 512,
            patch_size: 14,
            temporal_patch_size: 2,
            spatial_merge_size: 2,
            in_channels: 3,
            swiglu_limit: 10.0,
            rms_norm_eps: 1e-6,
            block_norm_eps: 1e-6,
            block_norm_eps_origin: glimmer_checkpoint::NormEpsOrigin::Config,
        }
    }

    #[test]
    fn settings_nested_flat_and_absent() {
        let nested =
            br#"{"image_processor": {"min_image_tokens": 16, "max_image_tokens": 9, "image_mean": [0, 0.5, 1]},
            "video_processor": {"max_image_tokens": 1000, "fps": 1}}"#;
        let flat = br#"{"max_image_tokens": 36, "resample": 3, "do_resize": true}"#;
        let error = Processors::from_files(&tower(), Some(nested), None).unwrap_err();
        assert!(error.to_string().contains("min_image_tokens"), "{error}");
        let nested = String::from_utf8(nested.to_vec()).unwrap().replace("tokens\": 9,", "tokens\": 90,");
        let both = Processors::from_files(&tower(), Some(nested.as_bytes()), Some(flat)).unwrap();
        assert_eq!((both.image.max_tokens, both.image.mean), (90, [0.0, 0.5, 1.0]));
        assert_eq!((both.video.max_tokens, both.video.fps, both.video.mean), (1000, 1.0, [0.0, 0.5, 1.0]));
        let micro = Processors::from_files(&tower(), Some(br#"{"processor_class": "x"}"#), Some(flat)).unwrap();
        assert_eq!(micro.image.max_tokens, 36);
        assert_eq!(Processors::from_files(&tower(), None, None).unwrap().image, Processor::default());
    }

    #[test]
    fn settings_errors_name_the_field() {
        for (text, part) in [
            (r#"{"image_processor": {"patch_size": "x"}}"#, "image_processor.patch_size"),
            (r#"{"image_processor": {"patch_size": 16}}"#, "as in vision_config"),
            (r#"{"image_processor": {"image_std": [1, 2]}}"#, "three numbers"),
            (r#"{"image_processor": {"image_std": [1, 0, 2]}}"#, "positive"),
            (r#"{"image_processor": {"do_normalize": false}}"#, "do_normalize"),
            (r#"{"image_processor": {"resample": 2}}"#, "bicubic"),
            (r#"{"video_processor": {"fps": -1}}"#, "fps"),
            ("[1]", "a JSON object"),
            ("{", "processor_config.json"),
        ] {
            let error = Processors::from_files(&tower(), Some(text.as_bytes()), None).unwrap_err();
            assert!(error.to_string().contains(part), "{text}: {error}");
        }
    }
}
