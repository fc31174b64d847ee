//! G6, G6b, G7, G8, G9 and G16: the values of the packed matrices, in one pass over them.
//!
//! A damaged matrix is reported by one gate. The order of suspicion in [`judge`] follows from what each damage changes:
//! a scale that is wrong by itself (G6) or collapsed codes (G6b) explain everything after them; a matrix that points
//! elsewhere than its source either is another expert's (G9) or has scrambled codes (G8); scales that do not fit the source
//! (G6) are only meaningful for a matrix that is otherwise itself; what is left is a matter of distance (G8).

use std::{
    collections::BTreeMap,
    io,
    time::{Duration, Instant},
};

use glimmer_checkpoint::DType;
use sha2::{Digest, Sha256};

use super::{
    Scene,
    directory::Source,
    expectation::Matrix,
    sweep::{sweep, workers},
    verdict::GateId::{self, G6, G6b, G7, G8, G9, G16},
    verdict::Ledger,
    weights::{Against, Packed, ScaleFault, Scan, widen},
};

/// Bounds of `|W' - W| / |W|`: below, the source was already quantized; above, the matrix is not the source's.
const RELATIVE_ERROR: std::ops::RangeInclusive<f64> = 0.04..=0.45;
/// Smallest cosine between a matrix and its source.
const MIN_COSINE: f64 = 0.90;
/// Smallest cosine of a single row; rows of a sound matrix stay far above it.
const MIN_ROW_COSINE: f64 = 0.5;
/// Largest mean error in steps.
const MAX_BIAS: f64 = 0.25;
/// Largest mean code in steps when there is no source to compare with.
const MAX_MEAN_CODE: f64 = 0.75;
/// Largest share of codes at the ends of the range.
const MAX_RAILS: f64 = 0.05;
/// Fewest distinct codes of a matrix.
const MIN_DISTINCT: usize = 8;
/// Rows used to find out whose weights a matrix holds.
const SAMPLE_ROWS: usize = 64;
/// One matrix in this many takes the round trip of G16, unless all do.
const ROUND_TRIP_EVERY: u64 = 100;

const AGAIN: &str = "quantize this matrix again";

/// What is wrong with a matrix.
struct Finding {
    gate: GateId,
    /// Suffix of the tensor that is to blame.
    tensor: &'static str,
    found: String,
}

/// Result of one matrix.
struct Judged {
    finding: Option<Finding>,
    relative_error: Option<f64>,
    digest: [u8; 32],
    round_trip: bool,
    times: [(GateId, Duration); 3],
}

/// The value gates on all packed matrices that G1 accepted.
pub(super) fn check(ledger: &mut Ledger, scene: &Scene, full: bool) {
    let accepted: Vec<&Matrix> = scene
        .expectation
        .matrices
        .iter()
        .filter(|m| ledger.tensor_claim(&m.packed()).is_none() && scene.artifact.shards.stored(&m.packed()).is_some())
        .collect();
    let total = scene.expectation.matrices.len();
    let hidden = scene.expectation.matrices.iter().filter(|m| scene.artifact.hidden(&m.packed())).count();
    let results = sweep(&accepted, |matrix| judge(scene, matrix, full || sampled(&matrix.base)));

    let mut sound = 0;
    let mut trips = (0, 0);
    let mut errors: BTreeMap<(usize, &str), Vec<(f64, &str)>> = BTreeMap::new();
    let mut digests: BTreeMap<(usize, [u8; 32]), Vec<&Matrix>> = BTreeMap::new();
    for (matrix, result) in accepted.iter().zip(results) {
        let judged = match result {
            Ok(judged) => judged,
            Err(e) => {
                ledger.tensor(G7, &matrix.packed(), format!("expected to read it, found {e}"), "check the disk");
                continue;
            }
        };
        for (gate, time) in judged.times {
            ledger.spend(gate, time / u32::try_from(workers()).unwrap_or(1));
        }
        trips.1 += usize::from(judged.round_trip);
        match judged.finding {
            Some(finding) => {
                ledger.tensor(finding.gate, &format!("{}.{}", matrix.base, finding.tensor), finding.found, AGAIN);
                for (name, ..) in matrix.triple() {
                    ledger.claim_tensor(finding.gate, &name);
                }
            }
            None => {
                sound += 1;
                trips.0 += usize::from(judged.round_trip);
                digests.entry((matrix.layer, judged.digest)).or_default().push(matrix);
                if let Some(r) = judged.relative_error {
                    errors.entry((matrix.layer, matrix.projection.name())).or_default().push((r, &matrix.base));
                }
            }
        }
    }
    duplicates(ledger, scene, digests);
    far_from_median(ledger, errors);
    for gate in [G6, G6b, G7] {
        ledger.count(gate, accepted.len(), total);
    }
    ledger.count(G16, trips.0, trips.1);
    if !full {
        ledger.note(G16, format!("a sample of {} matrices; all with the full option", trips.1));
    }
    ledger.count(G9, sound, total);
    if scene.source.is_some() {
        ledger.count(G8, sound, total);
    } else {
        ledger.skip(G8, "no source to compare with");
        ledger.note(G9, "no source: only duplicates were looked for");
        ledger.note(G6, "no source: scales were not compared with the weights");
    }
    if hidden > 0 {
        for gate in [G6, G6b, G7, G8, G9, G16] {
            ledger.skip(gate, format!("{hidden} matrices lie in files that G10 rejects"));
        }
    }
}

/// Whether a matrix belongs to the sample of G16: a fixed choice by name.
fn sampled(name: &str) -> bool {
    let fnv = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    (fnv ^ (fnv >> 32)) % ROUND_TRIP_EVERY == 0
}

/// Equal packed words within a layer: an expert was written twice.
fn duplicates(ledger: &mut Ledger, scene: &Scene, digests: BTreeMap<(usize, [u8; 32]), Vec<&Matrix>>) {
    for ((layer, _), equal) in digests {
        let [first, rest @ ..] = &equal[..] else { continue };
        for matrix in rest {
            // With the source at hand all of them have been found near their own expert: the source repeats itself.
            if scene.source.is_some() {
                ledger.note(G9, format!("{} equals {}, in the source too", matrix.base, first.base));
                continue;
            }
            let found = format!("expected words of its own in layer {layer}, found those of {}", first.base);
            ledger.tensor(G9, &matrix.packed(), found, AGAIN);
            for (name, ..) in matrix.triple() {
                ledger.claim_tensor(G9, &name);
            }
        }
    }
}

/// Remarks on the errors: their range, and matrices out of line with the same projection of other experts.
fn far_from_median(ledger: &mut Ledger, errors: BTreeMap<(usize, &str), Vec<(f64, &str)>>) {
    let mut all: Vec<f64> = errors.values().flatten().map(|(r, _)| *r).collect();
    all.sort_by(f64::total_cmp);
    if let [low, .., high] = all[..] {
        let median = all[all.len() / 2];
        ledger.note(G8, format!("relative error {low:.3} to {high:.3}, median {median:.3}"));
    }
    for ((layer, projection), mut list) in errors {
        list.sort_by(|a, b| a.0.total_cmp(&b.0));
        let median = list[list.len() / 2].0;
        let far: Vec<_> = list.iter().filter(|(r, _)| *r > 1.5 * median).collect();
        if let Some((r, name)) = far.last() {
            let text = format!(
                "layer {layer} {projection}: {} of {} above 1.5 times the median error {median:.3}, most {r:.3} ({name})",
                far.len(),
                list.len()
            );
            ledger.note(G8, text);
        }
    }
}

/// Reads and judges one matrix.
fn judge(scene: &Scene, matrix: &Matrix, round_trip: bool) -> io::Result<Judged> {
    let packed = load(scene, matrix)?;
    let start = Instant::now();
    let digest = Sha256::digest(&packed.codes).into();
    let hashed = start.elapsed();
    let start = Instant::now();
    let source = scene.source.as_ref().map(|source| weight(source, matrix)).transpose()?;
    let scan = packed.scan(source.as_deref(), round_trip);
    let scanned = start.elapsed();
    let start = Instant::now();
    let finding = by_itself(matrix, &packed, &scan, source.is_some())
        .or_else(|| scan.against.as_ref().and_then(|against| compared(scene, matrix, &packed, against)))
        .or_else(|| round_trip_finding(&scan));
    let booked = if source.is_some() { G8 } else { G6b };
    Ok(Judged {
        finding,
        relative_error: scan.against.as_ref().map(|a| a.relative_error),
        digest,
        round_trip,
        times: [(G9, hashed), (booked, scanned), (G9, start.elapsed())],
    })
}

pub(super) fn load(scene: &Scene, matrix: &Matrix) -> io::Result<Packed> {
    let stored = |name: &str| {
        let missing = || io::Error::other(format!("no tensor {name}"));
        scene.artifact.shards.stored(name).ok_or_else(missing)
    };
    let codes = scene.artifact.bytes(stored(&matrix.packed())?)?;
    let scale = stored(&matrix.scale())?;
    let scales = widen(scale.dtype, &scene.artifact.bytes(scale)?).unwrap_or_default();
    Ok(Packed { rows: matrix.rows, cols: matrix.cols, group: matrix.group, codes, scales })
}

/// The source's weight in f32.
pub(super) fn weight(source: &Source, matrix: &Matrix) -> io::Result<Vec<f32>> {
    let name = matrix.weight();
    let tensor = source.tensor(&name).map_err(io::Error::other)?;
    let (dtype, shape) = source.checkpoint().describe(&name).unwrap_or((DType::Bf16, &[]));
    if shape != [matrix.rows, matrix.cols] {
        let expected = [matrix.rows, matrix.cols];
        return Err(io::Error::other(format!("the source's {name} is {shape:?}, not {expected:?}")));
    }
    let mut bytes = vec![0; matrix.rows * matrix.cols * dtype.size()];
    tensor.read_at(0, &mut bytes)?;
    widen(dtype, &bytes).ok_or_else(|| io::Error::other(format!("the source's {name} is {dtype}, not a float type")))
}

/// What is wrong without looking at the source.
fn by_itself(matrix: &Matrix, packed: &Packed, scan: &Scan, has_source: bool) -> Option<Finding> {
    let scale = |found: String| Some(Finding { gate: G6, tensor: "weight_scale", found });
    let codes = |found: String| Some(Finding { gate: G6b, tensor: "weight_packed", found });
    let zero_source = scan.against.as_ref().is_some_and(|a| a.zero_source);
    if let Some((row, group, fault)) = scan.scale_fault {
        let value = packed.scales[row * (matrix.cols / matrix.group) + group];
        let expected = match fault {
            ScaleFault::NotFinite => "finite scales",
            ScaleFault::NotPositive => "scales above zero",
            ScaleFault::Idle => "a scale that the group's codes make use of",
        };
        let n = scan.scale_faults;
        return scale(format!("expected {expected}, found {value} at row {row}, group {group} ({n} such scales)"));
    }
    if scan.all_equal && !zero_source {
        return scale(format!("expected scales that differ, found {} everywhere", packed.scales[0]));
    }
    let total: u64 = scan.histogram.iter().sum();
    let distinct = scan.histogram.iter().filter(|&&n| n > 0).count();
    if distinct < MIN_DISTINCT && !zero_source {
        return codes(format!("expected at least {MIN_DISTINCT} distinct codes, found {distinct}"));
    }
    let rails = (scan.histogram[0] + scan.histogram[15]) as f64 / total.max(1) as f64;
    if rails >= MAX_RAILS {
        let percent = 100.0 * rails;
        return codes(format!("expected less than 5 % of the codes at -8 and 7, found {percent:.1} %"));
    }
    if let Some((row, group)) = scan.against.as_ref().and_then(|a| a.lost) {
        let n = scan.against.as_ref().map_or(0, |a| a.lost_groups);
        return codes(format!(
            "expected codes for the weights of row {row}, group {group}, found all of them zero ({n} such groups)"
        ));
    }
    let steps = scan.histogram.iter().zip(-8_i32..).map(|(&n, q)| n as f64 * f64::from(q));
    let mean = steps.sum::<f64>() / total.max(1) as f64;
    if !has_source && mean.abs() > MAX_MEAN_CODE {
        return codes(format!("expected codes around 0, found a mean of {mean:.2}: a wrong offset"));
    }
    scan.not_finite.map(|(row, group)| Finding {
        gate: G7,
        tensor: "weight_scale",
        found: format!("expected finite weights, found NaN or infinity in row {row}, group {group} after dequantizing"),
    })
}

/// What is wrong against the source.
fn compared(scene: &Scene, matrix: &Matrix, packed: &Packed, against: &Against) -> Option<Finding> {
    let fidelity = |found: String| Some(Finding { gate: G8, tensor: "weight_packed", found });
    let cosine = against.cosine;
    if is_below(cosine, MIN_COSINE) {
        return match whose(scene, matrix, packed) {
            Some(Owner::Expert(expert)) => Some(Finding {
                gate: G9,
                tensor: "weight_packed",
                found: format!("expected the weights of expert {}, found those of expert {expert}", matrix.expert),
            }),
            Some(Owner::Sibling(name)) => {
                fidelity(format!("expected the weights of this matrix, found those of {name}"))
            }
            None => fidelity(format!("expected a cosine to the source of at least {MIN_COSINE}, found {cosine:.3}")),
        };
    }
    if let Some((row, group, ratio)) = against.misfit {
        return Some(Finding {
            gate: G6,
            tensor: "weight_scale",
            found: format!(
                "expected scale * 7.5 / absmax from 0.6 to 1.4, found {ratio:.3} at row {row}, group {group} ({} such scales)",
                against.misfits
            ),
        });
    }
    if is_below(-against.bias.abs(), -MAX_BIAS) {
        let found = format!("expected a mean error of 0 steps, found {:.2}: a wrong offset", against.bias);
        return fidelity(found);
    }
    let (r, low, high) = (against.relative_error, RELATIVE_ERROR.start(), RELATIVE_ERROR.end());
    if !RELATIVE_ERROR.contains(&r) && !against.zero_source {
        return fidelity(format!("expected a relative error from {low} to {high}, found {r:.3}"));
    }
    if is_below(against.worst_row_cosine, MIN_ROW_COSINE) {
        let (row, cosine) = (against.worst_row, against.worst_row_cosine);
        return fidelity(format!("expected rows near the source's, found row {row} at a cosine of {cosine:.3}"));
    }
    None
}

/// Whether a figure misses its lower bound; NaN does.
fn is_below(figure: f64, bound: f64) -> bool {
    figure.is_nan() || figure < bound
}

fn round_trip_finding(scan: &Scan) -> Option<Finding> {
    let (row, group) = scan.first_recoded?;
    let n = scan.recoded;
    let found = format!(
        "expected the same codes after dequantizing and quantizing, found others in row {row}, group {group} ({n} such groups)"
    );
    Some(Finding { gate: G16, tensor: "weight_packed", found })
}

/// Whose weights a matrix holds.
enum Owner {
    Expert(usize),
    Sibling(String),
}

/// Looks through the layer's source matrices of the same form for the one that this matrix resembles.
fn whose(scene: &Scene, matrix: &Matrix, packed: &Packed) -> Option<Owner> {
    let source = scene.source.as_ref()?;
    let rows: Vec<usize> = {
        let n = SAMPLE_ROWS.min(matrix.rows);
        (0..n).map(|i| i * matrix.rows / n).collect()
    };
    let mut row = Vec::new();
    let mine: Vec<Vec<f32>> = rows
        .iter()
        .map(|&r| {
            packed.row(r, &mut row);
            row.clone()
        })
        .collect();
    let same_form = |m: &&Matrix| {
        let same_place = m.expert == matrix.expert || m.projection == matrix.projection;
        m.layer == matrix.layer && same_place && (m.rows, m.cols) == (matrix.rows, matrix.cols) && m.base != matrix.base
    };
    scene.expectation.matrices.iter().filter(same_form).find_map(|other| {
        let cosine = sample_cosine(source, other, &rows, &mine).ok()?;
        (cosine >= MIN_COSINE).then(|| {
            if other.expert == matrix.expert { Owner::Sibling(other.base.clone()) } else { Owner::Expert(other.expert) }
        })
    })
}

fn sample_cosine(source: &Source, other: &Matrix, rows: &[usize], mine: &[Vec<f32>]) -> io::Result<f64> {
    let name = other.weight();
    let tensor = source.tensor(&name).map_err(io::Error::other)?;
    let dtype = source.checkpoint().describe(&name).map_or(DType::Bf16, |(d, _)| d);
    let mut bytes = vec![0; other.cols * dtype.size()];
    let (mut dot, mut norm, mut norm_q) = (0.0, 0.0, 0.0);
    for (&r, mine) in rows.iter().zip(mine) {
        tensor.read_at(r * bytes.len(), &mut bytes)?;
        let theirs = widen(dtype, &bytes).ok_or_else(|| io::Error::other("not a float type"))?;
        for (&a, b) in mine.iter().zip(theirs) {
            dot += f64::from(a) * f64::from(b);
            norm += f64::from(b) * f64::from(b);
            norm_q += f64::from(a) * f64::from(a);
        }
    }
    Ok(dot / (norm * norm_q).sqrt())
}
