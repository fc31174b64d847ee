//! Teacher-forced scores of a local model.
//!
//! A document goes through the model in chunks of rows, every row with logits; the caches of one sequence are reused from
//! document to document, because a sequence that starts at position 0 starts from an empty state.

use glimmer_model::weights::Source;
use glimmer_model::{Limits, Model, Options};
use glimmer_tensor::{Backend, PAGE_TOKENS, Segment, Step};

use crate::error::BenchError;
use crate::kld::{RowSink, Scorer};
use crate::panel::Document;

/// Rows a step: enough for the matrix products, small enough for the logits of a large vocabulary.
pub(crate) const CHUNK: usize = 256;

/// A model that scores documents without images.
#[derive(Debug)]
pub struct PanelScorer<B: Backend> {
    model: Model<B>,
    vocabulary: usize,
    row: Vec<f32>,
}

impl<B: Backend> PanelScorer<B> {
    /// Loads a model for documents of up to `longest` tokens; `vocabulary` is the number of ids that the tokenizer knows.
    ///
    /// # Errors
    /// Errors of loading.
    pub fn load(backend: B, source: &dyn Source, vocabulary: usize, longest: usize) -> Result<Self, BenchError> {
        let text = &source.config().text;
        let limits = Limits {
            max_rows: CHUNK,
            max_logits: CHUNK,
            slots: 1,
            pages: longest.max(1).div_ceil(PAGE_TOKENS),
            max_draft: 0,
            features: 0,
        };
        let vocabulary = vocabulary.min(text.vocab_size);
        let row = vec![0.0; text.vocab_size];
        let options = Options { draft_layer: false, ..Options::default() };
        let model = Model::load(backend, source, limits, options).map_err(|e| BenchError::model("loading", e))?;
        Ok(Self { model, vocabulary, row })
    }

    fn chunk(&mut self, document: &Document, first: usize, sink: &mut RowSink<'_>) -> Result<(), glimmer_model::Error> {
        let tokens: Vec<u32> = document.ids[first..].iter().take(CHUNK).copied().collect();
        let step = chunk(first, tokens);
        self.model.forward(&step, &mut ())?;
        for index in 0..step.rows() {
            self.model.logits(index, &mut self.row)?;
            sink(first + index, &self.row[..self.vocabulary]);
        }
        Ok(())
    }
}

/// A step over some rows of the one sequence from position `first` on, every row with logits.
pub(crate) fn chunk(first: usize, tokens: Vec<u32>) -> Step {
    let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let rows = narrow(tokens.len());
    let pages: Vec<u32> = (0..narrow((first + tokens.len()).div_ceil(PAGE_TOKENS))).collect();
    let segment = Segment {
        slot: 0,
        position: narrow(first),
        rows,
        fold: 0,
        commit: rows,
        first_page: 0,
        pages: narrow(pages.len()),
    };
    Step { tokens, segments: vec![segment], pages, logits: (0..rows).collect(), features: Vec::new() }
}

impl<B: Backend> Scorer for PanelScorer<B> {
    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn score(&mut self, document: &Document, row: &mut RowSink<'_>) -> Result<(), BenchError> {
        let what = || format!("document {}", document.id);
        if !document.images.is_empty() {
            return Err(BenchError::model(what(), "it has images; the panel takes text only"));
        }
        for first in (0..document.ids.len()).step_by(CHUNK) {
            self.chunk(document, first, row).map_err(|error| BenchError::model(what(), error))?;
        }
        Ok(())
    }
}
