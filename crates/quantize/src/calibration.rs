//! Calibration samples: token sequences with image features, and the streams that enter the first layer.

use std::ops::Range;

use glimmer_checkpoint::{Checkpoint, Config};
use glimmer_model::streaming::embed_streams;
use sha2::{Digest as _, Sha256};

use crate::error::{Error, Result};

/// The features of one image: one row a placeholder token.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageFeatures {
    /// `[tokens, hidden]`, the output of the vision tower's merger.
    pub values: Vec<f32>,
}

/// One calibration sequence.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CalibrationSample {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Features of its images, in the order of their placeholder tokens.
    pub images: Vec<ImageFeatures>,
}

/// Checked samples.
#[derive(Debug)]
pub(crate) struct Calibration<'a> {
    samples: &'a [CalibrationSample],
    hidden: usize,
    /// Placeholder rows of each sample.
    rows: Vec<Vec<usize>>,
}

impl<'a> Calibration<'a> {
    /// Checks ids and images against the model. Empty samples are refused.
    pub(crate) fn new(samples: &'a [CalibrationSample], config: &Config) -> Result<Self> {
        let hidden = config.text.hidden_size;
        let rows = samples
            .iter()
            .enumerate()
            .map(|(i, sample)| {
                let refuse = |problem: String| Err(Error::Calibration { sample: i, problem });
                if sample.ids.is_empty() {
                    return refuse("it has no tokens; remove it".to_owned());
                }
                if let Some(id) = sample.ids.iter().find(|&&id| id as usize >= config.text.vocab_size) {
                    let vocab = config.text.vocab_size;
                    return refuse(format!("token {id} does not exist, the vocabulary has {vocab} rows; was it made with another tokenizer?"));
                }
                if sample.ids.len() > config.text.max_position_embeddings {
                    let (found, limit) = (sample.ids.len(), config.text.max_position_embeddings);
                    return refuse(format!("{found} tokens, the model's context is {limit}; cut it"));
                }
                let is_place = |id: u32| config.media.is_some_and(|m| id == m.image || id == m.video);
                let places: Vec<usize> = (0..sample.ids.len()).filter(|&r| is_place(sample.ids[r])).collect();
                let values: usize = sample.images.iter().map(|image| image.values.len()).sum();
                if values != places.len() * hidden {
                    let (found, rows) = (values / hidden.max(1), places.len());
                    return refuse(format!("{rows} image placeholder tokens, but features for {found}; give every image of the text"));
                }
                if sample.images.iter().any(|image| image.values.iter().any(|x| !x.is_finite())) {
                    return refuse("an image feature is NaN or infinite".to_owned());
                }
                Ok(places)
            })
            .collect::<Result<_>>()?;
        Ok(Self { samples, hidden, rows })
    }

    /// Tokens of all samples.
    pub(crate) fn tokens(&self) -> usize {
        self.samples.iter().map(|s| s.ids.len()).sum()
    }

    /// Longest sample.
    pub(crate) fn longest(&self) -> usize {
        self.samples.iter().map(|s| s.ids.len()).max().unwrap_or(0)
    }

    /// Groups of whole samples of at most `rows` tokens (a longer sample stands alone).
    pub(crate) fn batches(&self, rows: usize) -> Vec<Batch> {
        let mut batches: Vec<Batch> = Vec::new();
        let mut first = 0;
        for (i, sample) in self.samples.iter().enumerate() {
            let length = sample.ids.len();
            match batches.last_mut() {
                Some(b) if b.rows() + length <= rows => {
                    b.samples.end = i + 1;
                    b.lengths.push(length);
                }
                _ => batches.push(Batch { samples: i..i + 1, first, lengths: vec![length] }),
            }
            first += length;
        }
        batches
    }

    /// Streams that enter layer 0 for a batch.
    pub(crate) fn embed(&self, source: &Checkpoint, batch: &Batch) -> Result<Vec<f32>> {
        let samples = &self.samples[batch.samples.clone()];
        let tokens: Vec<u32> = samples.iter().flat_map(|s| s.ids.iter().copied()).collect();
        let mut features: Vec<(usize, &[f32])> = Vec::new();
        let mut first = 0;
        for (sample, rows) in samples.iter().zip(&self.rows[batch.samples.clone()]) {
            let values = sample.images.iter().flat_map(|image| image.values.chunks_exact(self.hidden));
            features.extend(rows.iter().map(|&row| first + row).zip(values));
            first += sample.ids.len();
        }
        Ok(embed_streams(source, &tokens, &features)?)
    }

    /// SHA-256 of everything that influences the result.
    pub(crate) fn digest(&self) -> String {
        let mut hash = Sha256::new();
        for sample in self.samples {
            hash.update((sample.ids.len() as u64).to_le_bytes());
            sample.ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
            hash.update((sample.images.len() as u64).to_le_bytes());
            for image in &sample.images {
                hash.update((image.values.len() as u64).to_le_bytes());
                image.values.iter().for_each(|x| hash.update(x.to_le_bytes()));
            }
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Some whole samples in a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Batch {
    samples: Range<usize>,
    /// Row of the first token among all samples' tokens.
    pub(crate) first: usize,
    /// Length of each sample.
    pub(crate) lengths: Vec<usize>,
}

impl Batch {
    /// Tokens.
    pub(crate) fn rows(&self) -> usize {
        self.lengths.iter().sum()
    }
}
