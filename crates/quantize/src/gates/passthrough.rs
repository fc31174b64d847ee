//! G5 and the passthrough half of G7: dtype, shape and bytes of everything that is not quantized.
//!
//! Both gates come from one read of the data. A value that is NaN or infinite in the artifact but not in the source is G7's;
//! any other difference is G5's.

use std::{io, time::Instant};

use glimmer_checkpoint::{DType, StoredTensor};
use half::{bf16, f16};

use super::{
    Scene,
    directory::SourceTensor,
    expectation::Part,
    structure::is_float,
    sweep::sweep,
    verdict::GateId::{G5, G7},
    verdict::Ledger,
};

/// Bytes compared at a time; a multiple of every element size.
const CHUNK: usize = 1 << 20;

const COPY: &str = "copy the tensor's bytes from the source";

/// What comparing one tensor gives.
enum Finding {
    Same,
    /// First differing byte, number of differing bytes.
    Different(usize, usize),
    /// Index of the first element that is not finite.
    NotFinite(usize),
    Unreadable(String),
}

/// G5, and G7 on plain tensors.
pub(super) fn check(ledger: &mut Ledger, scene: &Scene) {
    let start = Instant::now();
    let mut total = 0;
    let mut hidden = 0;
    let mut items: Vec<(&str, &StoredTensor)> = Vec::new();
    for (name, spec) in &scene.expectation.plain {
        total += 1;
        let Some(stored) = scene.artifact.shards.stored(name) else {
            hidden += usize::from(scene.artifact.hidden(name));
            continue;
        };
        if ledger.tensor_claim(name).is_some() {
            continue;
        }
        // Form of vision tensors is G3's.
        match spec.problem(stored.dtype, &stored.shape).filter(|_| spec.part != Part::Vision) {
            Some(problem) => ledger.tensor(G5, name, problem, COPY),
            None => items.push((name, stored)),
        }
    }
    let findings = sweep(&items, |(name, stored)| match &scene.source {
        Some(source) => match source.tensor(name) {
            Ok(tensor) => compare(scene, stored, Some(&tensor)),
            Err(e) => Finding::Unreadable(e.to_string()),
        },
        None => compare(scene, stored, None),
    });
    let (mut same, mut scanned) = (0, 0);
    for ((name, stored), finding) in items.iter().zip(findings) {
        scanned += usize::from(is_float(stored.dtype));
        match finding {
            Finding::Same => same += 1,
            Finding::Different(at, count) => {
                let found =
                    format!("expected the source's bytes, found {count} of them different, the first at byte {at}");
                ledger.tensor(G5, name, found, COPY);
            }
            Finding::NotFinite(i) => {
                let found = format!("expected finite values, found NaN or infinity at element {i}");
                ledger.tensor(
                    G7,
                    name,
                    found,
                    "copy the tensor from the source, and look at the source if it is the same",
                );
            }
            Finding::Unreadable(e) => ledger.tensor(G5, name, format!("expected to read it, found {e}"), COPY),
        }
    }
    ledger.count(G5, same, total);
    ledger.count(G7, scanned, scanned);
    if scene.source.is_none() {
        ledger.note(G5, "no source: dtypes and shapes were judged, bytes were not");
    }
    if hidden > 0 {
        for gate in [G5, G7] {
            ledger.skip(gate, format!("{hidden} plain tensors lie in files that G10 rejects"));
        }
    }
    ledger.spend(G5, start.elapsed());
}

/// Reads a tensor piece by piece and compares it with the source, if there is one.
fn compare(scene: &Scene, stored: &StoredTensor, source: Option<&SourceTensor<'_>>) -> Finding {
    pieces(scene, stored, source).unwrap_or_else(|e| Finding::Unreadable(e.to_string()))
}

fn pieces(scene: &Scene, stored: &StoredTensor, source: Option<&SourceTensor<'_>>) -> io::Result<Finding> {
    let length = stored.range.len();
    let mut ours = vec![0; CHUNK.min(length)];
    let mut theirs = vec![0; if source.is_some() { ours.len() } else { 0 }];
    let mut first = None;
    let mut count = 0;
    for offset in (0..length).step_by(CHUNK) {
        let n = CHUNK.min(length - offset);
        scene.artifact.read_at(stored, offset, &mut ours[..n])?;
        if let Some(source) = source {
            source.read_at(offset, &mut theirs[..n])?;
            if ours[..n] == theirs[..n] {
                continue;
            }
            let differs = |i: &usize| ours[*i] != theirs[*i];
            first = first.or_else(|| (0..n).find(differs).map(|i| offset + i));
            count += (0..n).filter(differs).count();
        }
        let mine = not_finite(stored.dtype, &ours[..n]);
        let other = if source.is_some() { not_finite(stored.dtype, &theirs[..n]) } else { Vec::new() };
        if let Some(i) = mine.into_iter().find(|i| other.binary_search(i).is_err()) {
            return Ok(Finding::NotFinite(offset / stored.dtype.size() + i));
        }
    }
    Ok(first.map_or(Finding::Same, |at| Finding::Different(at, count)))
}

/// Indices of NaN and infinity, ascending.
fn not_finite(dtype: DType, bytes: &[u8]) -> Vec<usize> {
    fn find<const N: usize>(bytes: &[u8], finite: impl Fn([u8; N]) -> bool) -> Vec<usize> {
        let elements = bytes.as_chunks::<N>().0.iter().enumerate();
        elements.filter(|(_, b)| !finite(**b)).map(|(i, _)| i).collect()
    }
    match dtype {
        DType::Bf16 => find(bytes, |b| bf16::from_le_bytes(b).is_finite()),
        DType::F16 => find(bytes, |b| f16::from_le_bytes(b).is_finite()),
        DType::F32 => find(bytes, |b| f32::from_le_bytes(b).is_finite()),
        DType::F64 => find(bytes, |b| f64::from_le_bytes(b).is_finite()),
        _ => Vec::new(),
    }
}
