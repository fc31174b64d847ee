//! The verdict: one report per gate, as data (serde) and as a table for people.
//!
//! The invariant is that a damage is reported once. Gates run in a fixed order and a gate that rejects a tensor or a
//! file *claims* it in the [`Ledger`]; later gates pass over what is claimed. A gate that could not see all it has to
//! judge (because its input was claimed) never says "pass": it is skipped, with the reason.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Offenders listed by a gate; the rest is only counted.
pub const MAX_OFFENDERS: usize = 20;

/// The gates in the order of the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum GateId {
    /// Every routed matrix of the decoder is packed, with the right triple.
    G1,
    /// Nothing else is compressed, and the other names are the source's.
    G2,
    /// The vision tower is complete and as in the source.
    G3,
    /// The MTP layer is complete.
    G4,
    /// Dtype, shape and bytes of everything that is passed through.
    G5,
    /// Values of the scales.
    G6,
    /// Codes that have collapsed.
    #[serde(rename = "G6b")]
    G6b,
    /// No NaN and no infinity.
    G7,
    /// Dequantized weights against the source's.
    G8,
    /// Output error on calibration inputs against round-to-nearest.
    #[serde(rename = "G8b")]
    G8b,
    /// Each expert is itself, once.
    G9,
    /// Files: headers, offsets, names, strays.
    G10,
    /// The index against the headers.
    G11,
    /// Sizes of the shards; a layer's routed experts in one shard.
    G12,
    /// `config.json` and its `quantization_config`.
    G13,
    /// Tokenizer, template, generation and processor files.
    G14,
    /// `manifest.json` against the files.
    G15,
    /// Unpack, dequantize, quantize, pack gives the same words.
    G16,
    /// Behaviour of the model: divergence and acceptance.
    G17,
}

impl GateId {
    /// All gates, in order.
    pub const ALL: [Self; 19] = [
        Self::G1,
        Self::G2,
        Self::G3,
        Self::G4,
        Self::G5,
        Self::G6,
        Self::G6b,
        Self::G7,
        Self::G8,
        Self::G8b,
        Self::G9,
        Self::G10,
        Self::G11,
        Self::G12,
        Self::G13,
        Self::G14,
        Self::G15,
        Self::G16,
        Self::G17,
    ];

    /// A few words on what the gate demands.
    pub fn title(self) -> &'static str {
        match self {
            Self::G1 => "every routed matrix packed",
            Self::G2 => "nothing else compressed",
            Self::G3 => "vision tower intact",
            Self::G4 => "MTP layer complete",
            Self::G5 => "passthrough byte for byte",
            Self::G6 => "scales healthy",
            Self::G6b => "codes not collapsed",
            Self::G7 => "all values finite",
            Self::G8 => "weights near the source",
            Self::G8b => "output error below RTN",
            Self::G9 => "experts are themselves",
            Self::G10 => "files well formed",
            Self::G11 => "index agrees with shards",
            Self::G12 => "shard sizes and layout",
            Self::G13 => "config and its reading by loaders",
            Self::G14 => "companion files identical",
            Self::G15 => "manifest hashes",
            Self::G16 => "codes survive a round trip",
            Self::G17 => "behaviour",
        }
    }
}

impl fmt::Display for GateId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::G6b => f.pad("G6b"),
            Self::G8b => f.pad("G8b"),
            other => f.pad(&format!("{other:?}")),
        }
    }
}

/// Outcome of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Everything was seen and nothing was wrong.
    Pass,
    /// At least one offender.
    Fail,
    /// Not judged; `reason` says why.
    Skipped,
}

/// One thing that a gate rejects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offender {
    /// Tensor, file or field.
    pub subject: String,
    /// What was expected and what was found.
    pub found: String,
    /// What to do about it.
    pub remedy: String,
}

/// What a gate says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GateReport {
    /// The gate.
    pub id: GateId,
    /// A few words on what it demands.
    pub title: String,
    /// The outcome.
    pub status: Status,
    /// Why the gate was skipped.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reason: Option<String>,
    /// Things found (tensors, files, entries: what the gate counts).
    pub counted: u64,
    /// Things that should be found.
    pub expected: u64,
    /// The first offenders, at most [`MAX_OFFENDERS`].
    pub offenders: Vec<Offender>,
    /// All offenders.
    pub offenders_total: u64,
    /// Remarks that do not decide.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub notes: Vec<String>,
    /// Time spent, in seconds.
    pub seconds: f64,
}

/// What all gates say about an artifact.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The directory that was judged.
    pub artifact: String,
    /// The source it was compared with.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub source: Option<String>,
    /// True when no gate failed. Skipped gates do not count against it.
    pub passed: bool,
    /// One report per gate, in the order of [`GateId::ALL`].
    pub gates: Vec<GateReport>,
    /// Time spent, in seconds.
    pub seconds: f64,
}

impl Verdict {
    /// The gates that failed, in order.
    pub fn failed(&self) -> Vec<GateId> {
        self.gates.iter().filter(|g| g.status == Status::Fail).map(|g| g.id).collect()
    }

    /// The report of one gate.
    pub fn gate(&self, id: GateId) -> Option<&GateReport> {
        self.gates.iter().find(|g| g.id == id)
    }
}

impl fmt::Display for Verdict {
    /// A table of the gates, then the offenders of those that failed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<4} {:<34} {:<5} {:>15} {:>8}", "gate", "demand", "", "counted", "seconds")?;
        for gate in &self.gates {
            let word = match gate.status {
                Status::Pass => "pass",
                Status::Fail => "FAIL",
                Status::Skipped => "skip",
            };
            let count = if gate.status == Status::Skipped && gate.counted == 0 {
                "-".to_owned()
            } else if gate.counted == gate.expected {
                gate.counted.to_string()
            } else {
                format!("{} of {}", gate.counted, gate.expected)
            };
            write!(f, "{:<4} {:<34} {:<5} {:>15} {:>8.2}", gate.id, gate.title, word, count, gate.seconds)?;
            match &gate.reason {
                Some(reason) => writeln!(f, "  {reason}")?,
                None => writeln!(f)?,
            }
            for note in &gate.notes {
                writeln!(f, "       note: {note}")?;
            }
        }
        for gate in self.gates.iter().filter(|g| g.status == Status::Fail) {
            writeln!(f, "\n{} {}: {} offender(s)", gate.id, gate.title, gate.offenders_total)?;
            for offender in &gate.offenders {
                writeln!(f, "  {}: {}", offender.subject, offender.found)?;
                writeln!(f, "    -> {}", offender.remedy)?;
            }
            let hidden = gate.offenders_total - gate.offenders.len() as u64;
            if hidden > 0 {
                writeln!(f, "  ... and {hidden} more")?;
            }
        }
        let failed = self.failed();
        let skipped = self.gates.iter().filter(|g| g.status == Status::Skipped).count();
        if self.passed {
            write!(f, "\npassed ({skipped} skipped, {:.1} s)", self.seconds)
        } else {
            let names: Vec<String> = failed.iter().map(GateId::to_string).collect();
            write!(f, "\nFAILED: {} ({skipped} skipped, {:.1} s)", names.join(", "), self.seconds)
        }
    }
}

/// Collects the reports while the gates run, and remembers who rejected what.
#[derive(Debug)]
pub(super) struct Ledger {
    gates: BTreeMap<GateId, Entry>,
    tensors: BTreeMap<String, GateId>,
    files: BTreeMap<String, GateId>,
}

#[derive(Debug, Default)]
struct Entry {
    counted: u64,
    expected: u64,
    offenders: Vec<Offender>,
    total: u64,
    reason: Option<String>,
    notes: Vec<String>,
    time: Duration,
}

impl Ledger {
    pub(super) fn new() -> Self {
        let gates = GateId::ALL.into_iter().map(|id| (id, Entry::default())).collect();
        Self { gates, tensors: BTreeMap::new(), files: BTreeMap::new() }
    }

    fn entry(&mut self, gate: GateId) -> &mut Entry {
        self.gates.entry(gate).or_default()
    }

    /// Rejects a tensor and claims it.
    pub(super) fn tensor(&mut self, gate: GateId, name: &str, found: impl Into<String>, remedy: &str) {
        self.field(gate, name, found, remedy);
        self.claim_tensor(gate, name);
    }

    /// Rejects a file and claims it.
    pub(super) fn file(&mut self, gate: GateId, name: &str, found: impl Into<String>, remedy: &str) {
        self.field(gate, name, found, remedy);
        self.claim_file(gate, name);
    }

    /// Rejects something that is neither tensor nor file.
    pub(super) fn field(&mut self, gate: GateId, subject: &str, found: impl Into<String>, remedy: &str) {
        let entry = self.entry(gate);
        entry.total += 1;
        if entry.offenders.len() < MAX_OFFENDERS {
            let (subject, remedy) = (subject.to_owned(), remedy.to_owned());
            entry.offenders.push(Offender { subject, found: found.into(), remedy });
        }
    }

    /// Claims a tensor: a gate has explained what is wrong with it. The first claim stays.
    pub(super) fn claim_tensor(&mut self, gate: GateId, name: &str) {
        self.tensors.entry(name.to_owned()).or_insert(gate);
    }

    /// Claims a file. The first claim stays.
    pub(super) fn claim_file(&mut self, gate: GateId, name: &str) {
        self.files.entry(name.to_owned()).or_insert(gate);
    }

    /// The gate that rejected a tensor.
    pub(super) fn tensor_claim(&self, name: &str) -> Option<GateId> {
        self.tensors.get(name).copied()
    }

    /// The gate that rejected a file.
    pub(super) fn file_claim(&self, name: &str) -> Option<GateId> {
        self.files.get(name).copied()
    }

    /// Tensors that some gate rejected.
    pub(super) fn claimed_tensors(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether the gate has rejected anything so far.
    pub(super) fn has_failed(&self, gate: GateId) -> bool {
        self.gates.get(&gate).is_some_and(|e| e.total > 0)
    }

    /// Adds to what the gate has found and should find.
    pub(super) fn count(&mut self, gate: GateId, counted: usize, expected: usize) {
        let entry = self.entry(gate);
        entry.counted += counted as u64;
        entry.expected += expected as u64;
    }

    /// Says why the gate cannot judge; it has no effect on a gate that fails. The first reason stays.
    pub(super) fn skip(&mut self, gate: GateId, reason: impl Into<String>) {
        self.entry(gate).reason.get_or_insert_with(|| reason.into());
    }

    /// Adds a remark.
    pub(super) fn note(&mut self, gate: GateId, note: impl Into<String>) {
        self.entry(gate).notes.push(note.into());
    }

    /// Adds time.
    pub(super) fn spend(&mut self, gate: GateId, time: Duration) {
        self.entry(gate).time += time;
    }

    /// The reports, in order.
    pub(super) fn finish(self) -> Vec<GateReport> {
        let report = |(id, e): (GateId, Entry)| {
            let status = match (e.total, &e.reason) {
                (0, None) => Status::Pass,
                (0, Some(_)) => Status::Skipped,
                _ => Status::Fail,
            };
            GateReport {
                id,
                title: id.title().to_owned(),
                status,
                reason: e.reason.filter(|_| status == Status::Skipped),
                counted: e.counted,
                expected: e.expected,
                offenders: e.offenders,
                offenders_total: e.total,
                notes: e.notes,
                seconds: e.time.as_secs_f64(),
            }
        };
        self.gates.into_iter().map(report).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skipped_gate_that_found_something_fails() {
        let mut ledger = Ledger::new();
        ledger.skip(GateId::G5, "half of it unreadable");
        ledger.skip(GateId::G6, "no source");
        ledger.tensor(GateId::G5, "a.weight", "expected BF16, found F32", "copy it again");
        ledger.claim_tensor(GateId::G7, "a.weight");
        assert_eq!(ledger.tensor_claim("a.weight"), Some(GateId::G5), "the first claim stays");
        let gates = ledger.finish();
        let status = |id| gates.iter().find(|g| g.id == id).map(|g| g.status);
        assert_eq!(status(GateId::G5), Some(Status::Fail));
        assert_eq!(status(GateId::G6), Some(Status::Skipped));
        assert_eq!(status(GateId::G7), Some(Status::Pass));
    }

    #[test]
    fn offenders_are_capped_and_counted() {
        let mut ledger = Ledger::new();
        for i in 0..50 {
            ledger.field(GateId::G2, &format!("t{i}"), "extra", "remove it");
        }
        let gates = ledger.finish();
        let gate = gates.iter().find(|g| g.id == GateId::G2).expect("all gates report");
        assert_eq!((gate.offenders.len(), gate.offenders_total), (MAX_OFFENDERS, 50));
        let verdict = Verdict { artifact: "dir".into(), source: None, passed: false, gates, seconds: 0.0 };
        let text = verdict.to_string();
        assert!(text.contains("... and 30 more") && text.contains("FAILED: G2"), "{text}");
        let back: Verdict =
            serde_json::from_str(&serde_json::to_string(&verdict).expect("serialises")).expect("parses");
        assert_eq!(back, verdict);
    }
}
