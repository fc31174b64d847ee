//! G1 to G4: names, dtypes and shapes, judged from headers alone.
//!
//! The sets that must be there come from the configuration (and the source), never from the artifact. Compression outside
//! the expected matrices belongs to G2 wherever it occurs, so that G3 and G4 speak only of presence and form.

use std::collections::BTreeMap;

use glimmer_checkpoint::DType;

use super::{
    Scene,
    expectation::{Matrix, Part},
    verdict::GateId::{self, G1, G2, G3, G4},
    verdict::Ledger,
};

/// Last name components that only compressed layers have.
const COMPRESSED: [&str; 10] = [
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight_global_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "input_zero_point",
    "output_scale",
];

/// The module that a compressed tensor belongs to; `None` for ordinary names.
fn compressed_module(name: &str) -> Option<&str> {
    let (module, last) = name.rsplit_once('.')?;
    let input = last.starts_with("input_") && last.ends_with("scale");
    (COMPRESSED.contains(&last) || input || last.ends_with("_packed")).then_some(module)
}

/// G1: each expected matrix is there as a triple of the right form, and not as a plain weight.
pub(super) fn packed(ledger: &mut Ledger, scene: &Scene) {
    let mut found = 0;
    let mut hidden = 0;
    for matrix in &scene.expectation.matrices {
        let names = matrix.triple();
        if names.iter().any(|(name, ..)| scene.artifact.hidden(name)) {
            hidden += 1;
            continue;
        }
        let problem = triple_problem(scene, matrix);
        found += usize::from(problem.is_none());
        if let Some((name, problem)) = problem {
            ledger.field(G1, &name, problem, "quantize this matrix again");
            for (name, ..) in &names {
                ledger.claim_tensor(G1, name);
            }
            ledger.claim_tensor(G1, &matrix.weight());
        }
    }
    ledger.count(G1, found, scene.expectation.matrices.len());
    if hidden > 0 {
        ledger.skip(G1, format!("{hidden} matrices lie in files that G10 rejects"));
    }
}

/// The first thing wrong with a triple.
fn triple_problem(scene: &Scene, matrix: &Matrix) -> Option<(String, String)> {
    let weight = matrix.weight();
    let plain = scene.artifact.shards.stored(&weight).is_some();
    let triple = matrix.triple();
    let missing: Vec<&str> =
        triple.iter().map(|t| t.0.as_str()).filter(|name| scene.artifact.shards.stored(name).is_none()).collect();
    if missing.len() == triple.len() {
        let found = if plain { "the plain weight" } else { "nothing" };
        let expected = "expected the triple weight_packed, weight_scale, weight_shape, found";
        return Some((matrix.base.clone(), format!("{expected} {found}")));
    }
    if let Some(name) = missing.first() {
        return Some((
            (*name).to_owned(),
            "expected it beside the rest of the triple, found no such tensor".to_owned(),
        ));
    }
    if plain {
        return Some((weight, "expected only the triple, found the plain weight beside it".to_owned()));
    }
    for (name, dtype, shape) in &triple {
        let stored = scene.artifact.shards.stored(name)?;
        if stored.dtype != *dtype || stored.shape != *shape {
            let found = format!("expected {dtype} {shape:?}, found {} {:?}", stored.dtype, stored.shape);
            return Some((name.clone(), found));
        }
    }
    let name = &triple[2].0;
    let bytes = match scene.artifact.bytes(scene.artifact.shards.stored(name)?) {
        Ok(bytes) => bytes,
        Err(e) => return Some((name.clone(), format!("expected to read it, found {e}"))),
    };
    let values: Vec<i64> = bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
    let expected = [matrix.rows, matrix.cols];
    let same = values.iter().zip(expected).all(|(&v, e)| usize::try_from(v) == Ok(e));
    (!same).then(|| (name.clone(), format!("expected the values {expected:?}, found {values:?}")))
}

/// G2: nothing outside the expected matrices is compressed; the trunk's other names are the expected ones.
pub(super) fn uncompressed(ledger: &mut Ledger, scene: &Scene) {
    for name in scene.artifact.names().filter(|name| !scene.expectation.packed.contains(*name)) {
        let Some(module) = compressed_module(name) else { continue };
        let found = "expected no compressed tensor outside the routed matrices of the decoder, found this one";
        ledger.tensor(G2, name, found, "store the source's tensor here and drop what compression added");
        ledger.claim_tensor(G2, &format!("{module}.weight"));
    }
    presence(ledger, scene, G2, Part::Trunk);
}

/// G3: the vision tower has the expected names, dtypes and shapes.
pub(super) fn vision(ledger: &mut Ledger, scene: &Scene) {
    presence(ledger, scene, G3, Part::Vision);
    let mut wrong = Vec::new();
    for (name, spec) in scene.expectation.plain.iter().filter(|(_, s)| s.part == Part::Vision) {
        let Some(stored) = scene.artifact.shards.stored(name).filter(|_| ledger.tensor_claim(name).is_none()) else {
            continue;
        };
        if let Some(problem) = spec.problem(stored.dtype, &stored.shape) {
            wrong.push((name, problem));
        }
    }
    for (name, problem) in wrong {
        ledger.tensor(G3, name, problem, "copy the tensor from the source");
    }
}

/// G4: the MTP layer has the expected names.
pub(super) fn mtp(ledger: &mut Ledger, scene: &Scene) {
    if scene.config.text.mtp_layer().is_none() {
        ledger.skip(G4, "the model has no MTP layer");
        return;
    }
    presence(ledger, scene, G4, Part::Mtp);
}

/// Names of one part: all expected ones present, no other ones.
fn presence(ledger: &mut Ledger, scene: &Scene, gate: GateId, part: Part) {
    let expected = scene.expectation.plain.iter().filter(|(_, spec)| spec.part == part);
    let (mut total, mut found, mut hidden) = (0, 0, 0);
    let mut missing = Vec::new();
    for (name, _) in expected {
        total += 1;
        if scene.artifact.shards.stored(name).is_some() {
            found += 1;
        } else if scene.artifact.hidden(name) {
            hidden += 1;
        } else if ledger.tensor_claim(name).is_none() {
            missing.push(name);
        }
    }
    for name in missing {
        ledger.tensor(gate, name, "expected the tensor, found no such name", "copy the tensor from the source");
    }
    let extra: Vec<&str> = scene
        .artifact
        .names()
        .filter(|name| scene.expectation.part_of(name) == part && !scene.expectation.plain.contains_key(*name))
        .filter(|name| !scene.expectation.packed.contains(*name) && ledger.tensor_claim(name).is_none())
        .collect();
    for name in extra {
        let origin =
            if scene.source.is_some() { "the source does not have" } else { "config.json does not account for" };
        ledger.tensor(gate, name, format!("expected no such tensor: {origin} it"), "remove the tensor");
    }
    ledger.count(gate, found, total);
    if hidden > 0 {
        ledger.skip(gate, format!("{hidden} tensors lie in files that G10 rejects"));
    }
}

/// The additive rule of a merge: every entry of the old index kept as it was, and nothing added but the MTP layer.
pub(super) fn merged_index(ledger: &mut Ledger, scene: &Scene, before: &BTreeMap<String, String>) {
    let remedy = "write the index again from the old one, adding the MTP layer's entries only";
    let after = &scene.artifact.weight_map;
    for (name, file) in before {
        match after.get(name) {
            Some(now) if now == file => {}
            now => {
                let found = now.map_or("no entry".to_owned(), |f| format!("`{f}`"));
                ledger.field(G4, name, format!("expected `{file}` as before the merge, found {found}"), remedy);
            }
        }
    }
    for name in after.keys().filter(|name| !before.contains_key(*name)) {
        if scene.expectation.part_of(name) != Part::Mtp {
            ledger.field(G4, name, "expected the merge to add MTP tensors only, found this entry added", remedy);
        }
    }
}

/// Whether a dtype holds floating-point values that can be scanned.
pub(super) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::Bf16 | DType::F16 | DType::F32 | DType::F64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compressed_names_are_recognised() {
        for name in ["a.b.weight_packed", "a.input_scale", "a.input_global_scale", "a.experts.gate_up_proj_packed"] {
            assert!(compressed_module(name).is_some(), "{name}");
        }
        for name in ["a.b.weight", "a.hc_attn_scale", "a.mlp.gate.e_score_correction_bias", "packed", "a.k_norm.bias"] {
            assert_eq!(compressed_module(name), None, "{name}");
        }
    }
}
