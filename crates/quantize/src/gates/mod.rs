//! The verifier: is this directory the W4A16 artifact of that source, whole and unharmed?
//!
//! [`verify`] runs the gates G1 to G17 over an artifact, with or without its source at hand, and returns a [`Verdict`]: for
//! each gate what it counted, what it expected and what it rejects, with the reason and the remedy. It needs no GPU, reads one
//! tensor at a time and works on damaged directories: what cannot be read is reported by the gate that owns the damage,
//! and gates that depended on it are skipped, so that one damage is reported once.
//!
//! What must be there is derived from the configuration (the source's, if there is one), never from the artifact's own
//! tensors: an artifact that lacks an expert must not be measured by what it has.

mod behaviour;
mod companions;
mod config_block;
mod container;
mod directory;
mod expectation;
mod experts;
mod hashes;
pub mod matcher;
mod output_error;
mod passthrough;
mod structure;
mod sweep;
mod verdict;
mod weights;

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    time::Instant,
};

use glimmer_checkpoint::{Config, int4};
use serde_json::Value;

pub use self::{
    behaviour::Behaviour,
    companions::is_companion,
    verdict::{GateId, GateReport, MAX_OFFENDERS, Offender, Status, Verdict},
};
use self::{
    directory::{Directory, Source},
    expectation::Expectation,
    verdict::{GateId as G, Ledger},
};

/// Bytes of tensors in a shard that hub tools and 32-bit readers handle: 5 GiB.
pub const MAX_SHARD_BYTES: u64 = 5 << 30;

/// How to verify.
#[derive(Debug, Clone)]
pub struct VerifyOptions {
    /// Take the round trip of G16 with every matrix instead of a sample.
    pub full: bool,
    /// Largest sum of tensor bytes in a shard.
    pub max_shard_bytes: u64,
    /// Whether an artifact without `manifest.json` (made by another program) fails G15; otherwise G15 is skipped.
    pub require_manifest: bool,
    /// The index as it was before an MTP layer was merged in; G4 then also demands that the merge only added.
    pub index_before_merge: Option<PathBuf>,
    /// Calibration inputs for G8b, which otherwise goes by the errors recorded in the manifest: a safetensors file with, for a matrix `BASE`, the tensors
    /// `BASE.inputs` `[tokens, in]` (a sample, a float type) and `BASE.tokens` U64 `[1]` (all tokens it was calibrated with).
    pub statistics: Option<PathBuf>,
}

impl Default for VerifyOptions {
    fn default() -> Self {
        Self {
            full: false,
            max_shard_bytes: MAX_SHARD_BYTES,
            require_manifest: true,
            index_before_merge: None,
            statistics: None,
        }
    }
}

/// Why no verdict could be reached.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// The artifact's directory cannot be read at all.
    #[error("{}: cannot read the artifact's directory ({source}); check the path and its permissions", path.display())]
    Artifact {
        /// The directory.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The quantizer has not finished it.
    #[error(
        "{}: this artifact is not finished, its quantization was interrupted; repeat that command with --resume \
         (glimmer quantize ... --out {} --resume), then verify",
        path.display(),
        path.display()
    )]
    Unfinished {
        /// The directory.
        path: PathBuf,
    },
    /// The source cannot serve as a reference.
    #[error("{}: the source cannot be used as a reference: {source}", path.display())]
    Source {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: Box<glimmer_checkpoint::Error>,
    },
    /// The source and its configuration do not agree, or cannot be stored as W4A16.
    #[error("{}: {problem}; give the BF16 (or FP8) checkpoint that the artifact was made from", path.display())]
    Reference {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

/// What the gates look at.
#[derive(Debug)]
struct Scene {
    artifact: Directory,
    source: Option<Source>,
    config: Config,
    expectation: Expectation,
}

/// The gates that judge tensors, and are skipped where these cannot be told from the configuration.
const TENSOR_GATES: [G; 13] =
    [G::G1, G::G2, G::G3, G::G4, G::G5, G::G6, G::G6b, G::G7, G::G8, G::G8b, G::G9, G::G12, G::G16];

/// Judges the artifact in `artifact`, against the checkpoint in `source` if given.
///
/// # Errors
/// Only when there is nothing to judge or to compare with; damage in the artifact is a verdict, not an error.
pub fn verify(artifact: &Path, source: Option<&Path>, options: &VerifyOptions) -> Result<Verdict, VerifyError> {
    let start = Instant::now();
    let path = artifact;
    if crate::is_unfinished(path) {
        return Err(VerifyError::Unfinished { path: path.to_owned() });
    }
    let unreadable = |source| VerifyError::Artifact { path: path.to_owned(), source };
    let artifact = Directory::open(path).map_err(unreadable)?;
    let mut reference = None;
    if let Some(path) = source {
        let unusable = |e| VerifyError::Source { path: path.to_owned(), source: Box::new(e) };
        reference = Some(Source::open(path).map_err(unusable)?);
    }

    let mut ledger = Ledger::new();
    let opened = Instant::now();
    container::files_and_index(&mut ledger, &artifact);
    ledger.spend(G::G10, opened.elapsed());
    let value = config_value(&mut ledger, &artifact);
    let config = match (&reference, &value) {
        (Some(reference), _) => Some(reference.checkpoint().config().clone()),
        (None, Some(value)) => own_config(&mut ledger, value),
        (None, None) => None,
    };
    let expectation = config.as_ref().map(|config| Expectation::new(config, reference.as_ref()));
    let modules = expectation.as_ref().and_then(|e| e.as_ref().ok()).map(|e| e.modules.clone());
    if let Some(value) = &value {
        let start = Instant::now();
        config_gates(&mut ledger, reference.as_ref(), value, modules.as_ref());
        ledger.spend(G::G13, start.elapsed());
    }

    match (config, expectation) {
        (Some(config), Some(Ok(expectation))) => {
            let scene = Scene { artifact, source: reference, config, expectation };
            tensor_gates(&mut ledger, &scene, options);
            file_gates(&mut ledger, &scene.artifact, scene.source.as_ref(), options);
        }
        (_, Some(Err(problem))) => match source {
            Some(path) => return Err(VerifyError::Reference { path: path.to_owned(), problem }),
            None => {
                ledger.field(G::G1, "config.json", problem, "this model cannot be stored as W4A16 with groups");
                skip_all(&mut ledger, &TENSOR_GATES, "config.json implies no W4A16 artifact (G1)");
                file_gates(&mut ledger, &artifact, None, options);
            }
        },
        _ => {
            skip_all(&mut ledger, &TENSOR_GATES, "config.json cannot be used (G13) and there is no source");
            file_gates(&mut ledger, &artifact, reference.as_ref(), options);
        }
    }
    ledger.skip(G::G17, "needs a run of the model");

    let gates = ledger.finish();
    Ok(Verdict {
        artifact: path.display().to_string(),
        source: source.map(|s| s.display().to_string()),
        passed: gates.iter().all(|g| g.status != Status::Fail),
        gates,
        seconds: start.elapsed().as_secs_f64(),
    })
}

fn skip_all(ledger: &mut Ledger, gates: &[G], reason: &str) {
    for &gate in gates {
        ledger.skip(gate, reason);
    }
}

/// Runs a gate and books its time.
fn timed(ledger: &mut Ledger, gate: G, run: impl FnOnce(&mut Ledger)) {
    let start = Instant::now();
    run(ledger);
    ledger.spend(gate, start.elapsed());
}

/// The artifact's `config.json`; when it is no JSON object, G13 says so.
fn config_value(ledger: &mut Ledger, artifact: &Directory) -> Option<Value> {
    let remedy = "copy config.json from the source and add `quantization_config`";
    let text = match artifact.read("config.json") {
        Some(Ok(text)) => text,
        Some(Err(e)) => {
            ledger.file(G::G13, "config.json", format!("expected to read it, found {e}"), remedy);
            return None;
        }
        None => {
            ledger.file(G::G13, "config.json", "expected the file, found none", remedy);
            return None;
        }
    };
    match serde_json::from_slice(&text) {
        Ok(value @ Value::Object(_)) => Some(value),
        Ok(_) => {
            ledger.file(G::G13, "config.json", "expected a JSON object, found another value", remedy);
            None
        }
        Err(e) => {
            ledger.file(G::G13, "config.json", format!("expected JSON, found {e}"), remedy);
            None
        }
    }
}

fn own_config(ledger: &mut Ledger, value: &Value) -> Option<Config> {
    match Config::from_value(value) {
        Ok(config) => Some(config),
        Err(e) => {
            ledger.file(G::G13, "config.json", e.to_string(), "copy config.json from the source");
            None
        }
    }
}

/// What the fields of a `quantization_config` violate; `targets` and `ignore` are only looked at for their form.
pub(crate) fn block_problems(block: &Value) -> Vec<Offender> {
    config_block::problems(block, int4::GROUP)
}

/// G13, and G14 on leftover blocks.
fn config_gates(ledger: &mut Ledger, source: Option<&Source>, value: &Value, modules: Option<&matcher::Modules>) {
    ledger.count(G::G13, 1, 1);
    match source.map(|s| s.directory().read("config.json")) {
        Some(Some(Ok(text))) => {
            if let Ok(theirs) = serde_json::from_slice(&text) {
                config_block::compare(ledger, &theirs, value);
            }
        }
        Some(_) => ledger.skip(G::G13, "the source's config.json cannot be read"),
        None => ledger.note(G::G13, "no source: the block was judged, the rest of config.json was not compared"),
    }
    if !companions::stale_block(ledger, value) {
        match value.get(config_block::BLOCK) {
            Some(block) => config_block::block(ledger, block, modules, int4::GROUP),
            None => {
                let remedy = "copy the block from another artifact of this model";
                ledger.field(G::G13, config_block::BLOCK, "expected the block, found no such key", remedy);
            }
        }
    }
    if ledger.has_failed(G::G13) {
        ledger.claim_file(G::G13, "config.json");
    }
}

fn tensor_gates(ledger: &mut Ledger, scene: &Scene, options: &VerifyOptions) {
    if scene.artifact.shards.files().is_empty() {
        skip_all(ledger, &TENSOR_GATES, "there is no shard that can be read (G10)");
        return;
    }
    timed(ledger, G::G12, |l| container::layout(l, scene, options.max_shard_bytes));
    timed(ledger, G::G1, |l| structure::packed(l, scene));
    timed(ledger, G::G2, |l| structure::uncompressed(l, scene));
    timed(ledger, G::G3, |l| structure::vision(l, scene));
    timed(ledger, G::G4, |l| {
        structure::mtp(l, scene);
        if let Some(path) = &options.index_before_merge {
            merged_index(l, scene, path);
        }
    });
    passthrough::check(ledger, scene);
    experts::check(ledger, scene, options.full);
    timed(ledger, G::G8b, |l| output_error::check(l, scene, options.statistics.as_deref()));
}

fn merged_index(ledger: &mut Ledger, scene: &Scene, path: &Path) {
    let value: Option<Value> = fs::read(path).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let map: Option<BTreeMap<String, String>> =
        value.and_then(|mut v| serde_json::from_value(v.get_mut("weight_map")?.take()).ok());
    match map {
        Some(before) => structure::merged_index(ledger, scene, &before),
        None => {
            let found = "expected an index with a `weight_map`, found something that cannot be read";
            ledger.field(G::G4, &path.display().to_string(), found, "give the index as it was before the merge");
        }
    }
}

fn file_gates(ledger: &mut Ledger, artifact: &Directory, source: Option<&Source>, options: &VerifyOptions) {
    timed(ledger, G::G14, |l| companions::check(l, artifact, source));
    timed(ledger, G::G15, |l| hashes::check(l, artifact, source, options.require_manifest));
}
