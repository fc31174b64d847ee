//! One matrix from weight to packed codes.

use glimmer_checkpoint::int4::{GROUP, PackedMatrix};
use glimmer_checkpoint::{Bytes, Checkpoint, DType, ExpertMatrix, TensorData};
use glimmer_tensor::cpu::Pool;

use crate::error::{Error, Result};
use crate::gptq::Factor;
use crate::hessian::{Hessian, non_finite};
use crate::real::{MAX_CODE, MIN_CODE};
use crate::recipe::{Method, Recipe};
use crate::report::{MatrixReport, Outcome};
use crate::rtn;
use crate::scales::scales;

/// Rows over which output errors are measured.
const SAMPLED_ROWS: usize = 64;

/// A quantized matrix.
#[derive(Debug)]
pub(crate) struct Quantized {
    /// Where it belongs.
    pub(crate) matrix: ExpertMatrix,
    /// Codes and scales as stored.
    pub(crate) packed: PackedMatrix,
    /// What was done.
    pub(crate) report: MatrixReport,
}

impl Quantized {
    /// The two tensors that a forward pass needs.
    pub(crate) fn tensors(&self) -> [TensorData; 2] {
        let (m, cols) = (&self.matrix, self.packed.cols);
        let packed = Bytes::new(self.packed.packed.clone());
        let scale = Bytes::new(self.packed.scale.clone());
        [
            TensorData { name: m.packed(), dtype: DType::I32, shape: vec![m.rows, cols / 8], bytes: packed },
            TensorData { name: m.scale(), dtype: DType::Bf16, shape: vec![m.rows, cols / GROUP], bytes: scale },
        ]
    }
}

/// What is known about the inputs of a matrix.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Statistics<'a> {
    /// The factored Hessian, and weights for the scales.
    pub(crate) factor: &'a Factor,
    /// Of the expert's own tokens.
    pub(crate) own: &'a Hessian,
    /// Of the layer's tokens.
    pub(crate) pool: Option<&'a Hessian>,
}

/// Quantizes a matrix of the source; without statistics it is rounded to nearest over plainly searched scales. Works on
/// `threads`, or on this one alone.
///
/// # Errors
/// [`Error::NonFinite`] naming the tensor, or what reading it can go wrong with.
pub(crate) fn quantize(
    source: &Checkpoint,
    matrix: &ExpertMatrix,
    recipe: &Recipe,
    statistics: Option<Statistics<'_>>,
    threads: Option<&Pool>,
) -> Result<Quantized> {
    let w = weights(source, &matrix.weight())?;
    let cols = matrix.cols;
    if let Some(place) = non_finite(&w, cols) {
        return Err(Error::non_finite(matrix.weight(), 0, place));
    }
    let importance = statistics.filter(|s| s.own.tokens() > 0 || s.pool.is_some_and(|p| p.tokens() > 0));
    let scales = scales(recipe.scales, &w, cols, GROUP, importance.map(|s| s.factor.importance()));
    let solvable = statistics.filter(|s| recipe.method == Method::Gptq && s.own.tokens() > 0);
    let (codes, outcome) = match solvable {
        Some(s) if s.factor.damp().is_some() => (s.factor.solve(&w, &scales, GROUP, threads).codes, Outcome::Gptq),
        Some(_) => (rtn::round(&w, &scales, GROUP), Outcome::RtnNoFactor),
        None if recipe.method == Method::Gptq => (rtn::round(&w, &scales, GROUP), Outcome::RtnNoTokens),
        None => (rtn::round(&w, &scales, GROUP), Outcome::Rtn),
    };
    let error_of = |codes: &[i8]| -> Vec<f32> {
        rtn::dequantize(codes, &scales, GROUP).iter().zip(&w).map(|(q, w)| q - w).collect()
    };
    let error = error_of(&codes);
    let squares = |x: &[f32]| x.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>();
    let energy = squares(&w);
    let output_error = |error: &[f32], h: &Hessian| {
        let step = matrix.rows.div_ceil(SAMPLED_ROWS);
        let sample = |m: &[f32]| -> Vec<f32> { m.chunks_exact(cols).step_by(step).flatten().copied().collect() };
        let total = h.energy(&sample(&w));
        (h.tokens() > 0 && total > 0.0).then(|| significant(h.energy(&sample(error)) / total))
    };
    let rails = codes.iter().filter(|&&q| q == MIN_CODE || q == MAX_CODE).count();
    let report = MatrixReport {
        name: matrix.base(),
        tokens: statistics.map_or(0, |s| s.own.tokens()),
        outcome,
        relative_error: if energy > 0.0 { significant((squares(&error) / energy).sqrt()) } else { 0.0 },
        output_error_own: statistics.and_then(|s| output_error(&error, s.own)),
        output_error_rounded: solvable
            .filter(|_| outcome == Outcome::Gptq)
            .and_then(|s| output_error(&error_of(&rtn::round(&w, &scales, GROUP)), s.own)),
        output_error_pooled: statistics.and_then(|s| s.pool).and_then(|pool| output_error(&error, pool)),
        damp: solvable.and_then(|s| s.factor.damp()),
        failed_factors: statistics.map_or(0, |s| s.factor.failed()),
        dead_columns: statistics.map_or(0, |s| s.factor.dead()),
        at_rails: significant(rails as f64 / codes.len().max(1) as f64),
    };
    Ok(Quantized { matrix: matrix.clone(), packed: PackedMatrix::from_codes(&codes, &scales, cols)?, report })
}

/// Six significant decimal digits: enough for a report, and few enough that every JSON reader gives the same number back.
fn significant(x: f64) -> f64 {
    format!("{x:.5e}").parse().unwrap_or(x)
}

/// A BF16 (or F32) tensor as f32; its pages are given back.
fn weights(source: &Checkpoint, name: &str) -> Result<Vec<f32>> {
    let tensor = source.tensor(name)?;
    let bytes = tensor.bytes.as_slice();
    let values = match tensor.dtype {
        DType::F32 => bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
        _ => bytes.as_chunks::<2>().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f32()).collect(),
    };
    tensor.bytes.release();
    Ok(values)
}
