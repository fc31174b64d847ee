//! The routed experts of one layer: statistics from the stored inputs, then codes, written as they come.
//!
//! ```text
//! pool   = second moments of all tokens of the layer
//! expert = second moments of its tokens, shrunk towards the pool -> one factor -> gate and up
//! act    = activation of the expert on its tokens                -> shrunk towards the mean over experts -> down
//! ```
//! Experts are independent, so a few of them are solved at a time, as many as threads and budget allow; which ones does not
//! matter to the result. Rows are gathered in pieces of fixed size, so that sums have one order.

use glimmer_checkpoint::writer::ShardWriter;
use glimmer_checkpoint::{Checkpoint, ExpertMatrix, Projection, TextConfig};
use glimmer_model::streaming::{Routes, Runner};
use glimmer_model::weights::{Loader, layer_prefix};
use glimmer_tensor::cpu::Pool;
use glimmer_tensor::{Backend, Swiglu};

use crate::error::{Error, Result};
use crate::gptq::Factor;
use crate::hessian::{Hessian, Moments, Shrunk};
use crate::matrix::{Quantized, Statistics, quantize};
use crate::memory::Shares;
use crate::overlay::Overlay;
use crate::progress::Progress;
use crate::recipe::{CalibratedExperts, DownInputs, Method, Recipe, TokenWeights};
use crate::report::{LayerReport, MatrixReport};
use crate::rows::RowStore;
use crate::workers;

/// Rows gathered at a time.
pub(crate) const PIECE: usize = 2048;

/// Calibration rows of an expert, ascending.
#[derive(Clone, Debug, Default)]
struct Rows {
    rows: Vec<u32>,
    /// What a row's values are multiplied with in the second moments: the root of its weight. None: all 1.
    factors: Vec<f32>,
}

impl Rows {
    /// All rows alike.
    fn all(tokens: usize) -> Self {
        Self { rows: (0..tokens as u32).collect(), factors: Vec::new() }
    }

    /// Scales the weights to a mean of 1, so that moments stay comparable with those of the pool.
    fn normalize(&mut self) {
        let total: f64 = self.factors.iter().map(|&f| f64::from(f) * f64::from(f)).sum();
        if total > 0.0 {
            let scale = (self.factors.len() as f64 / total).sqrt();
            self.factors.iter_mut().for_each(|f| *f = (f64::from(*f) * scale) as f32);
        }
    }

    /// Multiplies `values` `[count, width]`, which belong to the rows from `first` on.
    fn weigh(&self, first: usize, values: &mut [f32], width: usize) {
        for (row, &factor) in values.chunks_exact_mut(width).zip(self.factors.get(first..).unwrap_or(&[])) {
            row.iter_mut().for_each(|v| *v *= factor);
        }
    }
}

/// Inputs of a layer's experts over all calibration tokens.
pub(crate) struct LayerInputs<'a> {
    /// `[tokens, hidden]`.
    pub(crate) x: &'a RowStore,
    /// Tokens.
    pub(crate) tokens: usize,
    /// Chosen experts of every token.
    pub(crate) routes: &'a Routes,
}

/// What the work on a layer needs.
pub(crate) struct LayerWork<'a> {
    pub(crate) source: &'a Checkpoint,
    pub(crate) recipe: &'a Recipe,
    pub(crate) layer: usize,
    pub(crate) threads: &'a Pool,
    pub(crate) shares: Shares,
}

impl LayerWork<'_> {
    fn text(&self) -> &TextConfig {
        &self.source.config().text
    }

    fn matrices(&self, projection: Projection) -> Vec<ExpertMatrix> {
        self.text().expert_matrices(self.layer).filter(|m| m.projection == projection).collect()
    }

    /// All matrices in the order in which they are written.
    pub(crate) fn matrices_in_order(&self) -> Vec<ExpertMatrix> {
        let all = || self.text().expert_matrices(self.layer);
        let is_down = |m: &ExpertMatrix| m.projection == Projection::Down;
        all().filter(|m| !is_down(m)).chain(all().filter(is_down)).collect()
    }

    /// Rounds to nearest without calibration.
    ///
    /// # Errors
    /// As the solver's; [`Error::Interrupted`].
    pub(crate) fn round(&self, writer: &mut ShardWriter, progress: &mut dyn Progress) -> Result<LayerReport> {
        let matrices = self.matrices_in_order();
        let mut reports = Vec::with_capacity(matrices.len());
        let task = |i: usize, _: Option<&Pool>| quantize(self.source, &matrices[i], self.recipe, None, None);
        workers::run(matrices.len(), self.shares.gate_up_solvers, 1, task, |done| {
            self.write(writer, &done, &mut reports, progress)?;
            check(progress)
        })?;
        Ok(LayerReport { layer: self.layer, matrices: reports })
    }

    /// Quantizes all experts over calibration inputs.
    ///
    /// # Errors
    /// As the solver's and the runner's; [`Error::NonFinite`]; [`Error::Interrupted`].
    pub(crate) fn solve<B: Backend>(
        &self,
        runner: &mut Runner<B>,
        inputs: &LayerInputs<'_>,
        writer: &mut ShardWriter,
        progress: &mut dyn Progress,
    ) -> Result<LayerReport> {
        let rows = self.rows_by_expert(inputs);
        let mut reports = Vec::new();
        let quantized = self.solve_gate_up(inputs, &rows, writer, &mut reports, progress)?;
        self.solve_down(runner, inputs, &rows, &quantized, writer, &mut reports, progress)?;
        Ok(LayerReport { layer: self.layer, matrices: reports })
    }

    /// Gate and up of every expert; returns them when the down projections want them.
    fn solve_gate_up(
        &self,
        inputs: &LayerInputs<'_>,
        rows: &[Rows],
        writer: &mut ShardWriter,
        reports: &mut Vec<MatrixReport>,
        progress: &mut dyn Progress,
    ) -> Result<Vec<Quantized>> {
        let (gates, ups) = (self.matrices(Projection::Gate), self.matrices(Projection::Up));
        let hidden = self.text().hidden_size;
        let k = self.recipe.shrink_for(hidden);
        let shared = self.recipe.experts == CalibratedExperts::All;
        let pool = if shared || k > 0.0 {
            let all = Rows::all(inputs.tokens);
            Some(self.input_moments(inputs, &all, Some(self.threads))?)
        } else {
            None
        };
        let common = match &pool {
            Some(pool) if shared => Some(Factor::new(&Shrunk::own(pool), &self.recipe.settings(), Some(self.threads))),
            _ => None,
        };
        let workers = self.shares.gate_up_solvers;
        let inner = (self.threads.threads() / workers).max(1);
        let mut kept = Vec::new();
        let task = |e: usize, threads: Option<&Pool>| {
            let (own, factor);
            let statistics = match (&common, &pool) {
                (Some(factor), Some(pool)) => Statistics { factor, own: pool, pool: None },
                _ => {
                    own = self.input_moments(inputs, &rows[e], threads)?;
                    factor = self.factor(&own, pool.as_ref(), k, threads);
                    Statistics { factor: &factor, own: &own, pool: pool.as_ref() }
                }
            };
            let quantize = |m| quantize(self.source, m, self.recipe, Some(statistics), threads);
            Ok([quantize(&gates[e])?, quantize(&ups[e])?])
        };
        workers::run(gates.len(), workers, inner, task, |pair| {
            for done in pair {
                self.write(writer, &done, reports, progress)?;
                if self.recipe.down_inputs == DownInputs::Quantized {
                    kept.push(done);
                }
            }
            check(progress)
        })?;
        Ok(kept)
    }

    /// Down of every expert.
    fn solve_down<B: Backend>(
        &self,
        runner: &mut Runner<B>,
        inputs: &LayerInputs<'_>,
        rows: &[Rows],
        quantized: &[Quantized],
        writer: &mut ShardWriter,
        reports: &mut Vec<MatrixReport>,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let downs = self.matrices(Projection::Down);
        let width = self.text().moe.intermediate_size;
        let k = self.recipe.shrink_for(width);
        // Either every expert's moments are kept between making the pool and solving, or they are made twice.
        let keep = self.shares.keep_moments;
        let mut kept: Vec<Option<Hessian>> = downs.iter().map(|_| None).collect();
        let mut pool = None;
        if k > 0.0 {
            let mut sum = Moments::new(width);
            for (e, slot) in kept.iter_mut().enumerate() {
                check(progress)?;
                let moments = self.activation_moments(runner, inputs, e, &rows[e], quantized)?;
                sum.merge(&moments);
                *slot = keep.then_some(moments);
            }
            pool = Some(sum.finish());
        }
        let workers = self.shares.down_solvers;
        let inner = (self.threads.threads() / workers).max(1);
        // Activations need the runner, so they are made here, for as many experts as fit; kept ones need no such pauses.
        let group = if kept.iter().all(Option::is_some) { downs.len() } else { workers };
        for first in (0..downs.len()).step_by(group) {
            let count = group.min(downs.len() - first);
            let own = (first..first + count)
                .map(|e| match kept[e].take() {
                    Some(moments) => Ok(moments),
                    None => self.activation_moments(runner, inputs, e, &rows[e], quantized),
                })
                .collect::<Result<Vec<_>>>()?;
            let task = |i: usize, threads: Option<&Pool>| {
                let factor = self.factor(&own[i], pool.as_ref(), k, threads);
                let statistics = Statistics { factor: &factor, own: &own[i], pool: pool.as_ref() };
                quantize(self.source, &downs[first + i], self.recipe, Some(statistics), threads)
            };
            workers::run(count, workers, inner, task, |done| {
                self.write(writer, &done, reports, progress)?;
                check(progress)
            })?;
        }
        Ok(())
    }

    fn factor(&self, own: &Hessian, pool: Option<&Hessian>, k: f64, threads: Option<&Pool>) -> Factor {
        let shrunk = match pool {
            Some(pool) => Shrunk::towards(own, pool, k),
            None => Shrunk::own(own),
        };
        Factor::new(&shrunk, &self.recipe.settings(), threads)
    }

    /// Calibration rows of every expert.
    fn rows_by_expert(&self, inputs: &LayerInputs<'_>) -> Vec<Rows> {
        let experts = self.text().moe.num_experts;
        if self.recipe.experts == CalibratedExperts::All {
            return vec![Rows::all(inputs.tokens); experts];
        }
        let weighted = self.recipe.weights == TokenWeights::Affinity;
        let mut rows = vec![Rows::default(); experts];
        let chosen = inputs.routes.experts.iter().zip(&inputs.routes.weights);
        for (i, (&expert, &weight)) in chosen.enumerate() {
            let rows = &mut rows[expert as usize];
            rows.rows.push((i / inputs.routes.top) as u32);
            if weighted {
                rows.factors.push(weight);
            }
        }
        rows.iter_mut().for_each(Rows::normalize);
        rows
    }

    /// Second moments of the layer's inputs over some rows.
    fn input_moments(&self, inputs: &LayerInputs<'_>, rows: &Rows, threads: Option<&Pool>) -> Result<Hessian> {
        let hidden = self.text().hidden_size;
        let mut moments = Moments::new(hidden);
        let mut x = vec![0.0; PIECE.min(rows.rows.len()) * hidden];
        for (i, piece) in rows.rows.chunks(PIECE).enumerate() {
            let x = &mut x[..piece.len() * hidden];
            inputs.x.gather(piece, x)?;
            rows.weigh(i * PIECE, x, hidden);
            moments.add(x, threads).map_err(|place| {
                let row = piece[place.row] as usize;
                Error::NonFiniteActivation {
                    what: format!("layer {}: inputs of the experts", self.layer),
                    row,
                    col: place.col,
                }
            })?;
        }
        Ok(moments.finish())
    }

    /// Second moments of an expert's activations over some rows.
    fn activation_moments<B: Backend>(
        &self,
        runner: &mut Runner<B>,
        inputs: &LayerInputs<'_>,
        expert: usize,
        rows: &Rows,
        quantized: &[Quantized],
    ) -> Result<Hessian> {
        let (hidden, width) = (self.text().hidden_size, self.text().moe.intermediate_size);
        let mut moments = Moments::new(width);
        if rows.rows.is_empty() {
            return Ok(moments.finish());
        }
        let weights: Swiglu<B> = {
            let mine = quantized.iter().filter(|q| q.matrix.expert == expert);
            let overlay = Overlay::new(self.source, mine.flat_map(Quantized::tensors));
            let prefix = format!("{}mlp.experts.{expert}.", layer_prefix(self.source, self.layer));
            Loader::new(runner.backend(), &overlay, prefix).swiglu(hidden, width, hidden)?
        };
        let mut x = vec![0.0; PIECE.min(rows.rows.len()) * hidden];
        let mut act = vec![0.0; PIECE.min(rows.rows.len()) * width];
        for (i, piece) in rows.rows.chunks(PIECE).enumerate() {
            let (x, act) = (&mut x[..piece.len() * hidden], &mut act[..piece.len() * width]);
            inputs.x.gather(piece, x)?;
            runner.expert_activation(&weights, x, act)?;
            rows.weigh(i * PIECE, act, width);
            moments.add(act, Some(self.threads)).map_err(|place| Error::NonFiniteActivation {
                what: format!("layer {}: activations of expert {expert}", self.layer),
                row: piece[place.row] as usize,
                col: place.col,
            })?;
        }
        for m in self.text().expert_matrices(self.layer).filter(|m| m.expert == expert) {
            self.source.tensor(&m.weight())?.bytes.release();
        }
        Ok(moments.finish())
    }

    /// Writes a matrix, which must be the next one, and files its report.
    fn write(
        &self,
        writer: &mut ShardWriter,
        done: &Quantized,
        reports: &mut Vec<MatrixReport>,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        writer.write_named(&done.matrix.packed(), &done.packed.packed)?;
        writer.write_named(&done.matrix.scale(), &done.packed.scale)?;
        writer.write_named(&done.matrix.shape(), &done.packed.shape())?;
        reports.push(done.report.clone());
        progress.advance(matrix_units(self.recipe.method, &done.matrix));
        Ok(())
    }
}

/// Work of a matrix in units of progress.
pub(crate) fn matrix_units(method: Method, matrix: &ExpertMatrix) -> u64 {
    let (rows, cols) = (matrix.rows as u64, matrix.cols as u64);
    match method {
        Method::Gptq => rows * cols * cols + cols * cols * cols / 3,
        Method::Rtn => rows * cols,
    }
}

/// Stops when the caller says so.
pub(crate) fn check(progress: &mut dyn Progress) -> Result<()> {
    if progress.proceed() { Ok(()) } else { Err(Error::Interrupted) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_have_a_mean_of_one_and_follow_the_squared_routing_weight() {
        let mut rows = Rows { rows: vec![3, 5, 9], factors: vec![1.0, 2.0, 0.5] };
        rows.normalize();
        let weights: Vec<f32> = rows.factors.iter().map(|f| f * f).collect();
        assert!((weights.iter().sum::<f32>() - 3.0).abs() < 1e-5);
        assert!((weights[1] / weights[0] - 4.0).abs() < 1e-5);
        let mut values = [1.0, 1.0, 1.0, 1.0];
        rows.weigh(1, &mut values, 2);
        let expected = [1, 1, 2, 2].map(|i: usize| rows.factors[i].to_bits());
        assert_eq!(values.map(f32::to_bits), expected);
        let mut alike = [2.0, 3.0];
        Rows::all(7).weigh(5, &mut alike, 1);
        assert_eq!(alike.map(f32::to_bits), [2.0f32, 3.0].map(f32::to_bits));
    }
}
