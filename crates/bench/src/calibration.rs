//! Calibration documents with the features of their pictures.

use glimmer_quantize::{CalibrationSample, ImageFeatures};
use glimmer_tensor::Backend;

use crate::error::BenchError;
use crate::panel::Document;
use crate::pictures::PictureEncoder;

/// Turns documents into calibration samples; pictures go through the model's own vision tower.
///
/// # Errors
/// [`BenchError::Model`] for a picture that cannot be encoded, or any picture if the model has no vision tower.
pub fn calibration_samples<B: Backend>(
    documents: &[Document],
    mut pictures: Option<&mut PictureEncoder<B>>,
) -> Result<Vec<CalibrationSample>, BenchError> {
    let mut samples = Vec::with_capacity(documents.len());
    for document in documents {
        let mut images = Vec::with_capacity(document.images.len());
        for file in &document.images {
            let Some(pictures) = pictures.as_deref_mut() else {
                return Err(BenchError::model(&document.id, "it has pictures, the model has no vision tower"));
            };
            images.push(ImageFeatures { values: pictures.encode(&document.id, file)? });
        }
        samples.push(CalibrationSample { ids: document.ids.clone(), images });
    }
    Ok(samples)
}
