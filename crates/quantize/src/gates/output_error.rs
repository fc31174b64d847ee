//! G8b: on calibration inputs, a calibrated matrix does not do worse than round-to-nearest.
//!
//! With inputs `X` `[tokens, in]` kept by the quantizer, the output error of a matrix is `|X (W' - W)^T|^2`. For experts that
//! saw at least two tokens per input column it must not exceed the error of plain rounding with min-max scales; with fewer
//! tokens a Hessian says too little, and the comparison would be noise.

use std::{collections::HashMap, fs, path::Path};

use glimmer_checkpoint::{header::Header, int4};

use super::{
    Scene,
    experts::{load, weight},
    sweep::sweep,
    verdict::GateId::G8b,
    verdict::Ledger,
    weights::widen,
};

/// Tokens per input column below which the comparison is not made.
const TOKENS_PER_COLUMN: i64 = 2;

/// G8b.
pub(super) fn check(ledger: &mut Ledger, scene: &Scene, statistics: Option<&Path>) {
    let Some(path) = statistics else {
        ledger.skip(G8b, "no calibration inputs at hand");
        return;
    };
    let Some(source) = &scene.source else {
        ledger.skip(G8b, "no source to compare with");
        return;
    };
    let file = path.display().to_string();
    let parsed = fs::read(path).map_err(|e| e.to_string()).and_then(|bytes| {
        let header = Header::parse(&file, &bytes).map_err(|e| e.to_string())?;
        Ok((bytes, header))
    });
    let (bytes, header) = match parsed {
        Ok(parsed) => parsed,
        Err(e) => {
            ledger.skip(G8b, format!("the calibration inputs cannot be read: {e}"));
            return;
        }
    };
    let entries: HashMap<&str, _> = header.tensors.iter().map(|t| (t.name.as_str(), t)).collect();
    let inputs = |base: &str, cols: usize| -> Option<Vec<f32>> {
        let tokens = entries.get(format!("{base}.tokens").as_str())?;
        let tokens = i64::from_le_bytes(*bytes[tokens.range.clone()].first_chunk::<8>()?);
        let entry = entries.get(format!("{base}.inputs").as_str())?;
        let fits = entry.shape.len() == 2 && entry.shape[1] == cols;
        let enough = tokens >= TOKENS_PER_COLUMN * i64::try_from(cols).ok()?;
        (fits && enough).then(|| widen(entry.dtype, &bytes[entry.range.clone()]))?
    };
    let matrices: Vec<_> = scene
        .expectation
        .matrices
        .iter()
        .filter(|m| ledger.tensor_claim(&m.packed()).is_none() && !scene.artifact.hidden(&m.packed()))
        .collect();
    let results = sweep(&matrices, |matrix| {
        let inputs = inputs(&matrix.base, matrix.cols)?;
        let truth = weight(source, matrix).ok()?;
        let packed = load(scene, matrix).ok()?;
        let rounded = int4::PackedMatrix::round_to_nearest(&truth, matrix.cols, int4::Quotient::F32).ok()?;
        let rounded = int4::dequantize_matrix(&rounded.packed, &rounded.scale, matrix.cols).ok()?;
        let mut row = Vec::new();
        let (mut ours, mut theirs) = (0.0, 0.0);
        for r in 0..matrix.rows {
            let span = r * matrix.cols..(r + 1) * matrix.cols;
            packed.row(r, &mut row);
            ours += output_error(&inputs, &truth[span.clone()], row.iter().copied());
            theirs += output_error(&inputs, &truth[span.clone()], rounded[span].iter().map(|v| v.to_f32()));
        }
        Some((ours, theirs))
    });
    let (mut judged, mut good) = (0, 0);
    for (matrix, result) in matrices.iter().zip(results) {
        let Some((ours, theirs)) = result else { continue };
        judged += 1;
        if ours <= theirs {
            good += 1;
            continue;
        }
        let found = format!("expected an output error of at most {theirs:.4e} (round-to-nearest), found {ours:.4e}");
        ledger.tensor(G8b, &matrix.packed(), found, "quantize this matrix again, with its own calibration inputs");
    }
    ledger.count(G8b, good, judged);
    if judged == 0 {
        ledger.skip(G8b, "no expert has enough tokens in the calibration inputs");
    }
}

/// `sum_t (x_t . (w' - w))^2` of one row.
fn output_error(inputs: &[f32], truth: &[f32], row: impl Iterator<Item = f32>) -> f64 {
    let difference: Vec<f32> = row.zip(truth).map(|(a, b)| a - b).collect();
    let dot = |x: &[f32]| x.iter().zip(&difference).map(|(a, b)| a * b).sum::<f32>();
    inputs.chunks_exact(difference.len()).map(|x| f64::from(dot(x)).powi(2)).sum()
}
