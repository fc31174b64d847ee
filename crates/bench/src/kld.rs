//! How far a model is from a reference, token by token.
//!
//! At every position of a document that has a next token, both models give a distribution over the vocabulary; the
//! divergence is `KL(reference || model) = sum_v p(v) (log p(v) - log q(v))` in nats. Accuracy on tasks saturates long
//! before this does. A few positions carry most of the plain mean, so it is reported together with a mean in which each
//! token counts at most [`KLD_CAP`] and with the median over documents.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use serde::{Deserialize, Serialize};

use crate::error::BenchError;
use crate::exponential::{exp, sum_of_exponentials};
use crate::panel::Document;

/// Cap of a token's divergence in the capped mean, in nats.
pub const KLD_CAP: f64 = 0.05;

/// Takes the scores of one position: its index in the document, and a logit (or log-probability) for each vocabulary entry.
pub type RowSink<'a> = dyn FnMut(usize, &[f32]) + 'a;

/// A model that scores documents.
pub trait Scorer {
    /// Entries of a row: the real vocabulary, padding rows left out.
    fn vocabulary(&self) -> usize;

    /// Calls `row` with the scores of the next token at every position, in order, the last one included.
    ///
    /// # Errors
    /// If the model fails.
    fn score(&mut self, document: &Document, row: &mut RowSink<'_>) -> Result<(), BenchError>;
}

/// Divergence of a model from a reference over a panel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Divergence {
    /// Documents.
    pub documents: usize,
    /// Compared positions: all that have a next token.
    pub tokens: usize,
    /// Mean divergence a token, in nats.
    pub mean: f64,
    /// Mean with each token counting at most [`KLD_CAP`].
    pub capped: f64,
    /// Median over documents of their mean divergence.
    pub median_document: f64,
    /// Largest divergence of a token.
    pub max: f64,
    /// Positions at which both models prefer the same token, in percent.
    pub top1_agreement: f64,
    /// Mean negative log-likelihood of the actual next token under the reference.
    pub nll_reference: f64,
    /// And under the model.
    pub nll_model: f64,
}

/// Measures a model against a reference; see [`divergences`].
///
/// # Errors
/// As [`divergences`].
pub fn divergence(
    reference: &mut dyn Scorer,
    model: &mut dyn Scorer,
    documents: &[Document],
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Divergence, BenchError> {
    let mut all = divergences(reference, &mut [model], documents, progress)?;
    Ok(all.pop().expect("one result for one model"))
}

/// Measures several models against a reference, which scores every document once; `progress` is called with documents done
/// and all.
///
/// # Errors
/// [`BenchError::Mismatch`] if vocabularies or numbers of rows differ, [`BenchError::NotFinite`] if scores are not
/// numbers, and errors of the models.
pub fn divergences(
    reference: &mut dyn Scorer,
    models: &mut [&mut dyn Scorer],
    documents: &[Document],
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<Divergence>, BenchError> {
    check_vocabularies(reference, models.iter().map(|model| model.vocabulary()))?;
    let mut sums = Vec::with_capacity(documents.len());
    for (index, document) in documents.iter().enumerate() {
        let rows = Rows::of(reference, document)?;
        let of_models = models.iter_mut().map(|model| rows.compare(*model, document));
        sums.push(of_models.collect::<Result<Vec<_>, _>>()?);
        progress(index + 1, documents.len());
    }
    Ok(summaries(models.len(), &sums))
}

/// A reference and the models to be measured against it, for one thread.
pub struct ScorerSet<'a> {
    /// The reference.
    pub reference: Box<dyn Scorer + Send + 'a>,
    /// The models.
    pub models: Vec<Box<dyn Scorer + Send + 'a>>,
}

/// [`divergences`] on as many threads as there are sets. All sets must hold the same models; documents go to whichever set
/// is free, and the results are those of one set, to the bit. Progress is reported on the calling thread.
///
/// # Errors
/// As [`divergences`].
pub fn divergences_on_threads(
    sets: Vec<ScorerSet<'_>>,
    documents: &[Document],
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<Divergence>, BenchError> {
    let models = sets.first().map_or(0, |set| set.models.len());
    let next = AtomicUsize::new(0);
    let (results, received) = mpsc::channel();
    let mut sums: Vec<Vec<Sums>> = vec![Vec::new(); documents.len()];
    std::thread::scope(|scope| {
        for mut set in sets {
            let (results, next) = (results.clone(), &next);
            scope.spawn(move || {
                while let Some((index, document)) = take(next, documents) {
                    let result = set.measure(document);
                    let failed = result.is_err();
                    if results.send((index, result)).is_err() || failed {
                        return;
                    }
                }
            });
        }
        drop(results);
        for (done, (index, result)) in received.iter().enumerate() {
            match result {
                Ok(of_models) => sums[index] = of_models,
                Err(error) => {
                    // The other threads end after the document at hand.
                    next.store(documents.len(), Ordering::Relaxed);
                    return Err(error);
                }
            }
            progress(done + 1, documents.len());
        }
        Ok(())
    })?;
    Ok(summaries(models, &sums))
}

fn take<'d>(next: &AtomicUsize, documents: &'d [Document]) -> Option<(usize, &'d Document)> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    documents.get(index).map(|document| (index, document))
}

impl ScorerSet<'_> {
    fn measure(&mut self, document: &Document) -> Result<Vec<Sums>, BenchError> {
        check_vocabularies(self.reference.as_ref(), self.models.iter().map(|model| model.vocabulary()))?;
        let rows = Rows::of(self.reference.as_mut(), document)?;
        self.models.iter_mut().map(|model| rows.compare(model.as_mut(), document)).collect()
    }
}

impl std::fmt::Debug for ScorerSet<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ScorerSet({} models)", self.models.len())
    }
}

fn check_vocabularies(reference: &dyn Scorer, mut models: impl Iterator<Item = usize>) -> Result<(), BenchError> {
    let vocabulary = reference.vocabulary();
    match models.find(|&other| other != vocabulary) {
        Some(found) => Err(BenchError::Mismatch { what: "vocabulary".to_owned(), reference: vocabulary, found }),
        None => Ok(()),
    }
}

/// Joins the sums of documents (`[document][model]`) in the order of the documents.
fn summaries(models: usize, sums: &[Vec<Sums>]) -> Vec<Divergence> {
    let summary = |model: usize| {
        let (mut total, mut means) = (Sums::default(), Vec::new());
        for document in sums.iter().filter_map(|of_models| of_models.get(model)) {
            if document.tokens > 0 {
                means.push(document.divergence / document.tokens as f64);
            }
            total.join(document);
        }
        total.finish(sums.len(), means)
    };
    (0..models).map(summary).collect()
}

/// The reference's distributions at the compared positions of one document.
struct Rows(Vec<Distribution>);

struct Distribution {
    /// The scores.
    row: Vec<f32>,
    top: usize,
    /// Logarithm of the sum of exponentials of the scores.
    log: f64,
}

impl Rows {
    fn of(reference: &mut dyn Scorer, document: &Document) -> Result<Self, BenchError> {
        let compared = document.ids.len().saturating_sub(1);
        let mut rows = Vec::with_capacity(compared);
        let mut failure = None;
        reference.score(document, &mut |position, row| {
            if position < compared {
                match normaliser(row) {
                    Some((top, log)) => rows.push(Distribution { row: row.to_vec(), top, log }),
                    None => failure = failure.or(Some(position)),
                }
            }
        })?;
        match failure {
            Some(position) => Err(BenchError::NotFinite { document: document.id.clone(), position }),
            None => Ok(Self(rows)),
        }
    }

    fn compare(&self, model: &mut dyn Scorer, document: &Document) -> Result<Sums, BenchError> {
        let compared = document.ids.len().saturating_sub(1);
        let mut sums = Sums::default();
        let mut failure = None;
        let mut seen = 0;
        model.score(document, &mut |position, q| {
            if position >= compared {
                return;
            }
            seen += 1;
            let Some(p) = self.0.get(position) else { return };
            match compare(p, q, document.ids[position + 1]) {
                Some(token) => sums.add(&token),
                None => failure = failure.or(Some(position)),
            }
        })?;
        if self.0.len() != compared || seen != compared {
            let what = format!("rows of document {}", document.id);
            return Err(BenchError::Mismatch { what, reference: self.0.len(), found: seen });
        }
        match failure {
            Some(position) => Err(BenchError::NotFinite { document: document.id.clone(), position }),
            None => Ok(sums),
        }
    }
}

/// One position.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Token {
    divergence: f64,
    same_top: bool,
    nll_reference: f64,
    nll_model: f64,
}

/// Compares a row with the reference's; `None` if it is not finite or the next token is outside the vocabulary.
fn compare(p: &Distribution, q: &[f32], next: u32) -> Option<Token> {
    let next = usize::try_from(next).ok().filter(|&next| next < q.len() && p.row.len() == q.len())?;
    let (q_top, q_log) = normaliser(q)?;
    let divergence = expected_gap(p, q, q_log);
    // Rounding can leave a sum of zero slightly negative; a divergence never is.
    let token = Token {
        divergence: divergence.max(0.0),
        same_top: p.top == q_top,
        nll_reference: p.log - f64::from(p.row[next]),
        nll_model: q_log - f64::from(q[next]),
    };
    (token.divergence.is_finite() && token.nll_reference.is_finite() && token.nll_model.is_finite()).then_some(token)
}

/// `sum_v p(v) (log p(v) - log q(v))`, in eight interleaved sums that are joined in a fixed order.
fn expected_gap(p: &Distribution, q: &[f32], q_log: f64) -> f64 {
    const LANES: usize = 8;
    let term = |x: f32, y: f32| {
        let log_p = f64::from(x) - p.log;
        exp(log_p) * (log_p - (f64::from(y) - q_log))
    };
    let mut sums = [0.0; LANES];
    let ((xs, x_rest), (ys, y_rest)) = (p.row.as_chunks::<LANES>(), q.as_chunks::<LANES>());
    for (xs, ys) in xs.iter().zip(ys) {
        for ((sum, &x), &y) in sums.iter_mut().zip(xs).zip(ys) {
            *sum += term(x, y);
        }
    }
    let rest: f64 = x_rest.iter().zip(y_rest).map(|(&x, &y)| term(x, y)).sum();
    sums.iter().sum::<f64>() + rest
}

/// Index of the largest score (the first of equals) and the logarithm of the sum of exponentials.
fn normaliser(row: &[f32]) -> Option<(usize, f64)> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !row.iter().all(|x| x.is_finite()) {
        return None;
    }
    let top = row.iter().position(|&x| x >= max)?;
    Some((top, f64::from(max) + sum_of_exponentials(row, f64::from(max)).ln()))
}

#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    tokens: usize,
    divergence: f64,
    capped: f64,
    max: f64,
    same_top: usize,
    nll_reference: f64,
    nll_model: f64,
}

impl Sums {
    fn add(&mut self, token: &Token) {
        self.join(&Self {
            tokens: 1,
            divergence: token.divergence,
            capped: token.divergence.min(KLD_CAP),
            max: token.divergence,
            same_top: usize::from(token.same_top),
            nll_reference: token.nll_reference,
            nll_model: token.nll_model,
        });
    }

    fn join(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.divergence += other.divergence;
        self.capped += other.capped;
        self.max = self.max.max(other.max);
        self.same_top += other.same_top;
        self.nll_reference += other.nll_reference;
        self.nll_model += other.nll_model;
    }

    fn finish(self, documents: usize, mut means: Vec<f64>) -> Divergence {
        means.sort_by(f64::total_cmp);
        let middle = means.len() / 2;
        let median_document = match means.len() {
            0 => 0.0,
            n if n % 2 == 1 => means[middle],
            _ => f64::midpoint(means[middle - 1], means[middle]),
        };
        let tokens = self.tokens.max(1) as f64;
        Divergence {
            documents,
            tokens: self.tokens,
            mean: self.divergence / tokens,
            capped: self.capped / tokens,
            median_document,
            max: self.max,
            top1_agreement: 100.0 * self.same_top as f64 / tokens,
            nll_reference: self.nll_reference / tokens,
            nll_model: self.nll_model / tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scores depend on token and position only.
    struct Fixed(Vec<Vec<f32>>);

    impl Scorer for Fixed {
        fn vocabulary(&self) -> usize {
            self.0[0].len()
        }

        fn score(&mut self, document: &Document, row: &mut RowSink<'_>) -> Result<(), BenchError> {
            (0..document.ids.len()).for_each(|position| row(position, &self.0[position % self.0.len()]));
            Ok(())
        }
    }

    fn document(ids: &[u32]) -> Document {
        Document { id: "d".to_owned(), ids: ids.to_vec(), images: Vec::new() }
    }

    fn measure(p: Vec<Vec<f32>>, q: Vec<Vec<f32>>, documents: &[Document]) -> Result<Divergence, BenchError> {
        divergence(&mut Fixed(p), &mut Fixed(q), documents, &mut |_, _| {})
    }

    #[test]
    fn a_known_divergence() {
        // p = (1/2, 1/2), q = (1/4, 3/4): KL = ln 2 - (1/2) ln 3 ... = 1/2 ln(2) + 1/2 ln(2/3).
        let p = vec![vec![0.0, 0.0]];
        let q = vec![vec![0.0, 3.0_f32.ln()]];
        let result = measure(p, q, &[document(&[0, 1, 0])]).unwrap();
        let expected = 0.5 * 2.0_f64.ln() + 0.5 * (2.0_f64 / 3.0).ln();
        assert!((result.mean - expected).abs() < 1e-7, "{result:?}");
        assert!((result.capped - KLD_CAP).abs() < 1e-12);
        assert_eq!((result.tokens, result.documents), (2, 1), "the last position has no next token");
        assert!((result.nll_reference - 2.0_f64.ln()).abs() < 1e-7);
        assert!((result.nll_model - 0.5 * (4.0_f64.ln() + (4.0_f64 / 3.0).ln())).abs() < 1e-7);
        assert!((result.top1_agreement - 0.0).abs() < 1e-12);
    }

    #[test]
    fn equal_models_and_constant_shifts_diverge_by_nothing() {
        let rows: Vec<Vec<f32>> = (0..4).map(|r| (0..50).map(|v| ((v * 7 + r * 3) % 13) as f32).collect()).collect();
        let shifted = rows.iter().map(|row| row.iter().map(|x| x + 64.0).collect()).collect();
        let result = measure(rows, shifted, &[document(&[1, 2, 3, 4, 5])]).unwrap();
        assert!(result.mean < 1e-12 && (result.top1_agreement - 100.0).abs() < 1e-12, "{result:?}");
    }

    #[test]
    fn far_apart_scores_stay_finite() {
        let result = measure(vec![vec![0.0, -3e4]], vec![vec![-3e4, 0.0]], &[document(&[0, 0])]).unwrap();
        assert!((result.mean - 3e4).abs() < 1.0);
    }

    #[test]
    fn the_median_is_over_documents() {
        let (p, q) = (vec![vec![0.0, 0.0], vec![0.0, 0.0]], vec![vec![0.0, 0.0], vec![0.0, 2.0]]);
        // Positions 0 are equal, positions 1 are not: documents of two tokens see only the first.
        let documents = [document(&[0, 0]), document(&[0, 0]), document(&[0, 0, 0])];
        let result = measure(p, q, &documents).unwrap();
        assert!(result.mean > 0.05 && result.median_document < 1e-12, "{result:?}");
    }

    #[test]
    fn threads_change_nothing_and_report_errors() {
        let rows = |shift: u16| -> Vec<Vec<f32>> {
            (0..5).map(|r| (0..40).map(|v| f32::from((v * 7 + r * shift) % 13)).collect()).collect()
        };
        let documents: Vec<Document> = (2..30).map(|n| document(&vec![1; n])).collect();
        let set = || ScorerSet {
            reference: Box::new(Fixed(rows(3))),
            models: vec![Box::new(Fixed(rows(4))), Box::new(Fixed(rows(5)))],
        };
        let mut calls = 0;
        let shared = divergences_on_threads(vec![set(), set(), set()], &documents, &mut |_, _| calls += 1).unwrap();
        assert_eq!(calls, documents.len());
        for (model, shift) in shared.iter().zip([4, 5]) {
            assert_eq!(*model, measure(rows(3), rows(shift), &documents).unwrap());
        }
        let broken = || ScorerSet { models: vec![Box::new(Fixed(vec![vec![0.0; 3]]))], ..set() };
        assert!(divergences_on_threads(vec![broken(), broken()], &documents, &mut |_, _| {}).is_err());
    }

    #[test]
    fn unequal_vocabularies_and_bad_scores_are_errors() {
        let error = measure(vec![vec![0.0; 2]], vec![vec![0.0; 3]], &[document(&[0, 0])]).unwrap_err();
        assert!(matches!(error, BenchError::Mismatch { reference: 2, found: 3, .. }));
        let error = measure(vec![vec![0.0; 2]], vec![vec![f32::NAN, 0.0]], &[document(&[0, 0])]).unwrap_err();
        assert!(matches!(error, BenchError::NotFinite { position: 0, .. }));
    }
}
