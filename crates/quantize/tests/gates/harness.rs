//! Runs the verifier over damaged copies of the good artifact.
//!
//! A damage to the plan is one that the tool that wrote the artifact could have made: it is tried with a manifest of the damaged
//! files and with the manifest of the good ones. A damage to the files happened afterwards. Each is judged with the source
//! at hand and without.

use glimmer_checkpoint::manifest::MANIFEST_FILE;
use glimmer_quantize::gates::{GateId, Verdict, VerifyOptions, verify};

use crate::artifact::{Files, Plan, good, good_files, source_directory, write};

/// A way to damage an artifact.
pub(crate) enum Damage {
    /// Before it was written.
    Made(fn(&mut Plan)),
    /// Afterwards.
    Later(fn(&mut Files)),
}

/// A kind of damage and the gates that must fail.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) damage: Damage,
    pub(crate) with_source: &'static [GateId],
    pub(crate) alone: &'static [GateId],
}

/// A damage made by the writing tool, found with the source and without it.
pub(crate) const fn made(name: &'static str, gates: &'static [GateId], damage: fn(&mut Plan)) -> Case {
    Case { name, damage: Damage::Made(damage), with_source: gates, alone: gates }
}

/// A damage made by the writing tool that looks different, or not at all, without the source.
pub(crate) const fn made_alone(
    name: &'static str,
    with_source: &'static [GateId],
    alone: &'static [GateId],
    damage: fn(&mut Plan),
) -> Case {
    Case { name, damage: Damage::Made(damage), with_source, alone }
}

/// A damage done afterwards.
pub(crate) const fn later(name: &'static str, gates: &'static [GateId], damage: fn(&mut Files)) -> Case {
    Case { name, damage: Damage::Later(damage), with_source: gates, alone: gates }
}

pub(crate) fn options() -> VerifyOptions {
    // The largest shard, with the MTP layer, has 1.57 MB of tensors.
    VerifyOptions { full: true, max_shard_bytes: 1_600_000, ..VerifyOptions::default() }
}

pub(crate) fn judge(files: &Files, with_source: bool) -> Verdict {
    let directory = tempfile::tempdir().expect("a temporary directory");
    write(directory.path(), files);
    verify(directory.path(), with_source.then(source_directory), &options()).expect("a directory and a sound source")
}

/// The offenders of a verdict, one a line.
fn failed(verdict: &Verdict) -> String {
    let lines = verdict.gates.iter().flat_map(|g| g.offenders.iter().map(move |o| (g.id, o)));
    lines.map(|(id, o)| format!("{id} {}: {}; {}\n", o.subject, o.found, o.remedy)).collect()
}

pub(crate) fn run(cases: &[Case]) {
    let mut failures = String::new();
    let mut check = |name: &str, how: &str, files: &Files, with_source: bool, expected: &[GateId]| {
        let verdict = judge(files, with_source);
        let sound = verdict
            .gates
            .iter()
            .flat_map(|g| &g.offenders)
            .all(|o| !o.subject.is_empty() && !o.found.is_empty() && !o.remedy.is_empty())
            && verdict.gates.iter().all(|g| g.counted <= g.expected);
        if verdict.failed() != expected || !sound || verdict.passed != expected.is_empty() {
            failures +=
                &format!("\n== {name} ({how}, source: {with_source}): expected {expected:?}\n{}\n", failed(&verdict));
        }
    };
    for case in cases {
        match case.damage {
            Damage::Made(damage) => {
                let mut plan = good().clone();
                damage(&mut plan);
                let fresh = plan.render_with_manifest();
                check(case.name, "own manifest", &fresh, true, case.with_source);
                check(case.name, "own manifest", &fresh, false, case.alone);
                let mut stale = fresh;
                stale.insert(MANIFEST_FILE.to_owned(), good_files()[MANIFEST_FILE].clone());
                // What only the source could show still differs from the good artifact's hashes.
                let alone = if case.alone.is_empty() { &[GateId::G15] } else { case.alone };
                check(case.name, "good manifest", &stale, true, case.with_source);
                check(case.name, "good manifest", &stale, false, alone);
            }
            Damage::Later(damage) => {
                let mut files = good_files().clone();
                damage(&mut files);
                check(case.name, "afterwards", &files, true, case.with_source);
                check(case.name, "afterwards", &files, false, case.alone);
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}
