//! Pictures to visual tokens: decode, cut into patches, run the vision tower.

use glimmer_checkpoint::Checkpoint;
use glimmer_model::vision::{DecodeLimits, Processor, Processors, RgbImage, VisionTower};
use glimmer_tensor::Backend;

use crate::error::BenchError;

/// Vision tower of a model with everything around it.
#[derive(Debug)]
pub struct Pictures<B: Backend> {
    backend: B,
    tower: VisionTower<B>,
    processor: Processor,
    limits: DecodeLimits,
    hidden: usize,
}

/// Features of one picture.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// Visual tokens.
    pub tokens: usize,
    /// `[tokens, hidden]`.
    pub features: Vec<f32>,
}

impl<B: Backend> Pictures<B> {
    /// Loads the tower and the picture settings of a checkpoint; `None` for a text-only model.
    ///
    /// # Errors
    /// Errors of loading; settings that cannot be used.
    pub fn load(backend: B, checkpoint: &Checkpoint) -> Result<Option<Self>, BenchError> {
        let Some(vision) = &checkpoint.config().vision else { return Ok(None) };
        let Some(tower) = VisionTower::load(&backend, checkpoint).map_err(|e| BenchError::model("loading", e))? else {
            return Ok(None);
        };
        let file = |name: &str| checkpoint.file(name);
        let (nested, flat) = (file("processor_config.json"), file("preprocessor_config.json"));
        let bytes = |file: &'_ Option<glimmer_checkpoint::Bytes>| file.as_ref().map(|bytes| bytes.as_slice().to_vec());
        let processors = Processors::from_files(vision, bytes(&nested).as_deref(), bytes(&flat).as_deref())
            .map_err(|e| BenchError::model("its picture settings", e))?;
        let hidden = checkpoint.config().text.hidden_size;
        Ok(Some(Self { backend, tower, processor: processors.image, limits: DecodeLimits::default(), hidden }))
    }

    /// Features of an encoded picture (PNG, JPEG, WebP, GIF, BMP); `what` names it in errors.
    ///
    /// # Errors
    /// If the file cannot be decoded or the tower fails.
    pub fn encode(&mut self, what: &str, file: &[u8]) -> Result<Picture, BenchError> {
        let picture = RgbImage::decode(file, self.limits).map_err(|e| BenchError::model(what, e))?;
        let patches = self.processor.image(&picture);
        let features = self.tower.forward(&mut self.backend, &patches).map_err(|e| BenchError::model(what, e))?;
        let tokens = patches.tokens();
        if features.len() != tokens * self.hidden {
            let what = format!("{what}: feature values");
            return Err(BenchError::Mismatch { what, reference: tokens * self.hidden, found: features.len() });
        }
        Ok(Picture { tokens, features })
    }
}
