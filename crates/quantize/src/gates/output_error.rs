//! G8b: on calibration inputs, a calibrated matrix does not do worse than round-to-nearest.
//!
//! With inputs `X` `[tokens, in]` kept by the quantizer, the output error of a matrix is `|X (W' - W)^T|^2`. For experts that
//! saw at least two tokens per input column it must not exceed the error of plain rounding with min-max scales; with fewer
//! tokens a Hessian says too little, and the comparison would be noise.
//!
//! Without inputs, the errors that the quantizer measured on all its tokens and recorded in the manifest are compared: there
//! the rounding has the scales of the matrix itself. That is the quantizer's word, protected by the manifest's place in the
//! artifact, not a measurement of the words on disk; the fidelity gate ties those to the source.

use std::{collections::HashMap, fs, path::Path};

use glimmer_checkpoint::{Manifest, header::Header, int4, manifest::MANIFEST_FILE};

use super::{
    Scene,
    experts::{load, weight},
    sweep::sweep,
    verdict::GateId::G8b,
    verdict::Ledger,
    weights::widen,
};
use crate::report::Report;

/// Tokens per input column below which the comparison is not made.
const TOKENS_PER_COLUMN: u64 = 2;

/// G8b.
pub(super) fn check(ledger: &mut Ledger, scene: &Scene, statistics: Option<&Path>) {
    match statistics {
        Some(path) => measured(ledger, scene, path),
        None => recorded(ledger, scene),
    }
}

/// Compares the errors that the quantizer recorded.
fn recorded(ledger: &mut Ledger, scene: &Scene) {
    let manifest = scene.artifact.read(MANIFEST_FILE).and_then(Result::ok);
    let manifest = manifest.and_then(|text| Manifest::parse(&text).ok());
    let report = manifest.and_then(|m| serde_json::from_value::<Report>(m.statistics).ok());
    let matrices: Vec<_> = report.into_iter().flat_map(|r| r.layers).flat_map(|l| l.matrices).collect();
    let columns: HashMap<&str, usize> = scene.expectation.matrices.iter().map(|m| (m.base.as_str(), m.cols)).collect();
    let (mut judged, mut good) = (0, 0);
    for matrix in &matrices {
        let Some(&cols) = columns.get(matrix.name.as_str()) else { continue };
        let (Some(ours), Some(theirs)) = (matrix.output_error_own, matrix.output_error_rounded) else { continue };
        let rejected = ledger.tensor_claim(&format!("{}.weight_packed", matrix.name)).is_some();
        if rejected || matrix.tokens < TOKENS_PER_COLUMN * cols as u64 {
            continue;
        }
        judged += 1;
        good += usize::from(ours <= theirs);
        if ours > theirs {
            reject(ledger, &matrix.name, ours, theirs);
        }
    }
    ledger.count(G8b, good, judged);
    if judged == 0 {
        ledger.skip(G8b, "no calibration inputs, and no output errors in the manifest");
    } else {
        ledger.note(G8b, "as recorded by the quantizer in the manifest");
    }
}

fn reject(ledger: &mut Ledger, base: &str, ours: f64, theirs: f64) {
    let found = format!("expected an output error of at most {theirs:.4e} (round-to-nearest), found {ours:.4e}");
    let remedy = "quantize this matrix again, with its own calibration inputs";
    ledger.tensor(G8b, &format!("{base}.weight_packed"), found, remedy);
}

/// Measures the errors on kept inputs.
fn measured(ledger: &mut Ledger, scene: &Scene, path: &Path) {
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
        let tokens = u64::from_le_bytes(*bytes[tokens.range.clone()].first_chunk::<8>()?);
        let entry = entries.get(format!("{base}.inputs").as_str())?;
        let fits = entry.shape.len() == 2 && entry.shape[1] == cols;
        let enough = tokens >= TOKENS_PER_COLUMN * cols as u64;
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
        reject(ledger, &matrix.base, ours, theirs);
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
