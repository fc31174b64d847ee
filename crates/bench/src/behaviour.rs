//! An artifact beside its source: the figures that the gate of behaviour judges.

use glimmer_checkpoint::Checkpoint;
use glimmer_model::{HiddenSource, Limits, Model, MtpStep, Options};
use glimmer_quantize::gates::Behaviour;
use glimmer_tensor::{Backend, PAGE_TOKENS};

use crate::error::BenchError;
use crate::kld::divergence;
use crate::panel::Document;
use crate::panel_scorer::{CHUNK, PanelScorer, chunk};

/// Measures how far `artifact` is from `source` over `documents` (capped mean, the bound is `divergence_bound`, both in nats a
/// token), and how often each of the two would accept the first draft of its draft layer there. Both models read the same
/// tokens, so that their figures differ by what they are and not by where their answers led. Models without a draft layer have
/// no acceptance. `vocabulary` is the number of ids that the tokenizer knows.
///
/// # Errors
/// Errors of loading and running either model; [`BenchError::NotFinite`] for scores that are no numbers.
pub fn behaviour<B: Backend>(
    open: &dyn Fn() -> Result<B, BenchError>,
    [source, artifact]: [&Checkpoint; 2],
    vocabulary: usize,
    documents: &[Document],
    divergence_bound: f64,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Behaviour, BenchError> {
    let longest = documents.iter().map(|d| d.ids.len()).max().unwrap_or(1);
    let scorer = |checkpoint| PanelScorer::load(open()?, checkpoint, vocabulary, longest);
    let distance = divergence(&mut scorer(source)?, &mut scorer(artifact)?, documents, progress)?;
    let accepted = |checkpoint: &Checkpoint| match checkpoint.config().text.mtp_layer() {
        Some(_) => Ok(vec![Drafter::load(open()?, checkpoint, vocabulary, longest)?.acceptance(documents)?]),
        None => Ok::<_, BenchError>(Vec::new()),
    };
    Ok(Behaviour {
        divergence: distance.capped,
        divergence_bound,
        acceptance: accepted(artifact)?,
        source_acceptance: accepted(source)?,
    })
}

/// A model that drafts the token after the next one behind every row of a document.
struct Drafter<B: Backend> {
    model: Model<B>,
    vocabulary: usize,
    row: Vec<f32>,
}

impl<B: Backend> Drafter<B> {
    fn load(backend: B, checkpoint: &Checkpoint, vocabulary: usize, longest: usize) -> Result<Self, BenchError> {
        let limits = Limits {
            max_rows: CHUNK,
            max_logits: CHUNK,
            slots: 1,
            pages: longest.max(1).div_ceil(PAGE_TOKENS),
            max_draft: 1,
            features: 0,
        };
        let model = Model::load(backend, checkpoint, limits, Options::default())
            .map_err(|error| BenchError::model("loading", error))?;
        let text = &checkpoint.config().text;
        Ok(Self { model, vocabulary: vocabulary.min(text.vocab_size), row: vec![0.0; text.vocab_size] })
    }

    /// Share of drafts that the model itself would have chosen, 1 if the documents are too short for any.
    fn acceptance(&mut self, documents: &[Document]) -> Result<f64, BenchError> {
        let (mut accepted, mut drafted) = (0usize, 0usize);
        for document in documents {
            let failed = |error| BenchError::model(format!("document {}", document.id), error);
            let (mut chosen, mut drafts) = (Vec::new(), Vec::new());
            for first in (0..document.ids.len()).step_by(CHUNK) {
                self.read(document, first, &mut chosen, &mut drafts).map_err(failed)?;
            }
            // The draft behind a row stands for the token that the trunk chooses one row later.
            let pairs = drafts.iter().zip(chosen.iter().skip(1));
            drafted += pairs.len();
            accepted += pairs.filter(|(draft, chosen)| draft == chosen).count();
        }
        Ok(if drafted == 0 { 1.0 } else { accepted as f64 / drafted as f64 })
    }

    /// The trunk's choices at the rows of a chunk, and the drafts behind those that have a next token.
    fn read(
        &mut self,
        document: &Document,
        first: usize,
        chosen: &mut Vec<usize>,
        drafts: &mut Vec<usize>,
    ) -> Result<(), glimmer_model::Error> {
        let part = |from: usize| -> Vec<u32> { document.ids.iter().skip(from).take(CHUNK).copied().collect() };
        let step = chunk(first, part(first));
        self.model.forward(&step, &mut ())?;
        for index in 0..step.rows() {
            self.model.logits(index, &mut self.row)?;
            chosen.push(largest(&self.row[..self.vocabulary]));
        }
        let next = part(first + 1);
        if next.is_empty() {
            return Ok(());
        }
        let source = (0..).take(next.len()).collect();
        let step = MtpStep { step: chunk(first, next), from: HiddenSource::Trunk, source, shared: None };
        self.model.draft(&step, &mut ())?;
        for index in 0..step.step.rows() {
            self.model.draft_logits(index, &mut self.row)?;
            drafts.push(largest(&self.row[..self.vocabulary]));
        }
        Ok(())
    }
}

/// Index of the largest value, the first of equals.
fn largest(row: &[f32]) -> usize {
    row.iter().enumerate().fold(0, |best, (i, x)| if *x > row[best] { i } else { best })
}
