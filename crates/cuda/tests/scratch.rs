//! Every piece of scratch is planned: the names in the launchers and those of the plan are the same.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeSet, fs, path::Path};

use glimmer_model::plan::scratch::PIECES;

/// Texts of the launchers, without their tests.
fn launchers() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let kernels = fs::read_dir(folder.join("kernels")).unwrap().map(|entry| entry.unwrap().path());
    let paths = kernels.chain(["library.rs", "plan.rs"].map(|name| folder.join(name)));
    let sources = paths.filter(|path| path.extension().is_some_and(|kind| kind == "rs"));
    sources.map(|path| fs::read_to_string(path).unwrap().split("#[cfg(test)]").next().unwrap().to_owned()).collect()
}

#[test]
fn every_piece_of_scratch_is_in_the_plan() {
    let text = launchers();
    let mut used = BTreeSet::new();
    for call in [".scratch(", ".scratch_memory(", ".zeroed_scratch("] {
        for rest in text.split(call).skip(1) {
            let argument = rest.trim_start().split(',').next().unwrap();
            // A constant or a parameter is looked for by the names below.
            if let Some(name) = argument.strip_prefix('"').and_then(|rest| rest.split('"').next()) {
                used.insert(name.to_owned());
            }
        }
    }
    assert!(used.len() > 20, "{used:?}");
    let unplanned: Vec<&String> = used.iter().filter(|name| !PIECES.contains(&name.as_str())).collect();
    assert!(unplanned.is_empty(), "crates/model/src/plan/scratch.rs does not count {unplanned:?}");
    let gone: Vec<&&str> = PIECES.iter().filter(|name| !text.contains(&format!("\"{name}\""))).collect();
    assert!(gone.is_empty(), "the plan counts what no launcher takes: {gone:?}");
}
