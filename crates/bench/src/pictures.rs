//! Pictures on their way into a model.
//!
//! A [`PictureReader`] decodes a file and cuts it into patches, which fixes the number of visual tokens; a
//! [`PictureEncoder`] also runs the vision tower.

use glimmer_checkpoint::Checkpoint;
use glimmer_model::vision::{DecodeLimits, Patches, Processor, Processors, RgbImage, VisionTower};
use glimmer_tensor::Backend;

use crate::error::BenchError;

/// Picture settings of a model.
#[derive(Clone, Copy, Debug)]
pub struct PictureReader {
    processor: Processor,
    limits: DecodeLimits,
}

impl PictureReader {
    /// Reads the settings of a checkpoint; `None` for a text-only model.
    ///
    /// # Errors
    /// Settings that cannot be used.
    pub fn load(checkpoint: &Checkpoint) -> Result<Option<Self>, BenchError> {
        let Some(vision) = &checkpoint.config().vision else { return Ok(None) };
        let nested = checkpoint.file("processor_config.json");
        let flat = checkpoint.file("preprocessor_config.json");
        let slice = |file: &Option<glimmer_checkpoint::Bytes>| file.as_ref().map(|bytes| bytes.as_slice().to_vec());
        let processors = Processors::from_files(vision, slice(&nested).as_deref(), slice(&flat).as_deref())
            .map_err(|error| BenchError::model("its picture settings", error))?;
        Ok(Some(Self { processor: processors.image, limits: DecodeLimits::default() }))
    }

    /// Decodes a picture (PNG, JPEG, WebP, GIF, BMP) and cuts it into patches; `what` names it in errors.
    ///
    /// # Errors
    /// If the file cannot be decoded.
    pub fn read(&self, what: &str, file: &[u8]) -> Result<Patches, BenchError> {
        let picture = RgbImage::decode(file, self.limits).map_err(|error| BenchError::model(what, error))?;
        Ok(self.processor.image(&picture))
    }
}

/// Picture settings and vision tower of a model.
#[derive(Debug)]
pub struct PictureEncoder<B: Backend> {
    reader: PictureReader,
    backend: B,
    tower: VisionTower<B>,
}

impl<B: Backend> PictureEncoder<B> {
    /// Loads settings and tower of a checkpoint; `None` for a text-only model.
    ///
    /// # Errors
    /// Errors of loading; settings that cannot be used.
    pub fn load(backend: B, checkpoint: &Checkpoint) -> Result<Option<Self>, BenchError> {
        let Some(reader) = PictureReader::load(checkpoint)? else { return Ok(None) };
        let tower = VisionTower::load(&backend, checkpoint).map_err(|error| BenchError::model("loading", error))?;
        Ok(tower.map(|tower| Self { reader, backend, tower }))
    }

    /// Features of a picture, `[tokens, hidden]`; `what` names it in errors.
    ///
    /// # Errors
    /// If the file cannot be decoded or the tower fails.
    pub fn encode(&mut self, what: &str, file: &[u8]) -> Result<Vec<f32>, BenchError> {
        let patches = self.reader.read(what, file)?;
        self.tower.forward(&mut self.backend, &patches).map_err(|error| BenchError::model(what, error))
    }
}
