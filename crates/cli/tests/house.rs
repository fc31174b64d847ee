//! Rules of the house: sizes, licences, duplicate dependencies, where constants and `unsafe` may live, which way crates
//! depend on each other.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace root exists")
}

/// Files under `dir` with one of the extensions, recursively.
fn files(dir: &Path, extensions: &[&str], found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("a readable directory") {
        let path = entry.expect("a readable entry").path();
        if path.is_dir() {
            if path.file_name().is_none_or(|n| n != "target" && n != ".git") {
                files(&path, extensions, found);
            }
        } else if extensions.is_empty() || path.extension().is_some_and(|e| extensions.iter().any(|x| e == *x)) {
            found.push(path);
        }
    }
}

fn sources() -> Vec<PathBuf> {
    let mut found = Vec::new();
    files(&root().join("crates"), &["rs"], &mut found);
    assert!(found.len() > 50, "the source scan finds the sources");
    found
}

/// The part of a source before its unit tests.
fn library_part(text: &str) -> &str {
    text.split("#[cfg(test)]").next().unwrap_or(text)
}

fn is_test(path: &Path) -> bool {
    path.components().any(|c| ["tests", "benches", "examples"].iter().any(|d| c.as_os_str() == *d))
        || path.ends_with("tests.rs")
        // Measurements at the released sizes.
        || path.starts_with(root().join("crates/cuda/src/bench"))
}

fn metadata() -> Value {
    // Only what this platform builds: the others' packages need not be on this machine.
    let rustc = Command::new(env!("CARGO")).args(["-vV"]).output().expect("cargo runs");
    let host = String::from_utf8_lossy(&rustc.stdout);
    let host = host.lines().find_map(|l| l.strip_prefix("host: ")).expect("cargo names its host").to_owned();
    let out = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked", "--offline", "--filter-platform", &host])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(out.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).expect("cargo metadata is JSON")
}

/// Package ids that the workspace reaches through normal and build dependencies.
fn shipped(meta: &Value) -> BTreeSet<String> {
    let nodes: BTreeMap<&str, &Value> = meta["resolve"]["nodes"]
        .as_array()
        .expect("nodes")
        .iter()
        .map(|n| (n["id"].as_str().expect("id"), n))
        .collect();
    let mut todo: Vec<&str> =
        meta["workspace_members"].as_array().expect("members").iter().filter_map(Value::as_str).collect();
    let mut seen = BTreeSet::new();
    while let Some(id) = todo.pop() {
        if !seen.insert(id.to_owned()) {
            continue;
        }
        for dep in nodes[id]["deps"].as_array().expect("deps") {
            let normal = dep["dep_kinds"].as_array().is_some_and(|k| k.iter().any(|k| k["kind"] != "dev"));
            if normal {
                todo.push(dep["pkg"].as_str().expect("pkg"));
            }
        }
    }
    seen
}

#[test]
fn sources_stay_small() {
    for path in sources() {
        let lines = fs::read_to_string(&path).expect("a source is text").lines().count();
        assert!(lines <= 800, "{}: {lines} lines; one idea a file, at most 800 lines", path.display());
    }
}

#[test]
fn tracked_files_fit_the_budget() {
    let out = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output();
    let Ok(out) = out.as_ref().map(|o| o.stdout.as_slice()) else {
        return; // an unpacked release has no git
    };
    let mut total = 0;
    for name in out.split(|&b| b == 0).filter(|n| !n.is_empty()) {
        let name = String::from_utf8_lossy(name);
        total += fs::metadata(root().join(&*name)).map_or(0, |m| m.len());
    }
    assert!(total < 45_000_000, "tracked files: {total} bytes, the budget is 45 MB");
}

#[test]
fn dependencies_are_permissive() {
    const ALLOWED: &[&str] = &[
        "MIT",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "Zlib",
        "ISC",
        "Unlicense",
        "Unicode-3.0",
        "BSL-1.0",
        "0BSD",
        "Apache-2.0 WITH LLVM-exception",
        "CC0-1.0",
        "MIT-0",
        "bzip2-1.0.6",
    ];
    let meta = metadata();
    let shipped = shipped(&meta);
    for package in meta["packages"].as_array().expect("packages") {
        if !shipped.contains(package["id"].as_str().expect("id")) {
            continue;
        }
        let license = package["license"].as_str().unwrap_or("none");
        // An expression passes when each AND part has an allowed OR alternative.
        let ok = license
            .replace(['(', ')'], "")
            .replace('/', " OR ")
            .split(" AND ")
            .all(|part| part.split(" OR ").any(|l| ALLOWED.contains(&l.trim())));
        assert!(ok, "{} {}: licence `{license}` is not on the list", package["name"], package["version"]);
    }
}

#[test]
fn no_dependency_comes_in_two_majors() {
    /// Duplicates that upstream forces on us, each with the crate that holds it back.
    const KNOWN: &[(&str, &str)] = &[
        ("base64", "tokenizers, through its reader of compiled normalizers"),
        ("miniz_oxide", "the picture decoders differ"),
        ("syn", "derive macros differ; not in the binary"),
    ];
    let meta = metadata();
    let shipped = shipped(&meta);
    let mut majors: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for package in meta["packages"].as_array().expect("packages") {
        if shipped.contains(package["id"].as_str().expect("id")) {
            let version = package["version"].as_str().expect("version");
            let mut parts = version.split('.');
            let major = match parts.next().expect("major") {
                "0" => format!("0.{}", parts.next().unwrap_or("0")),
                m => m.to_owned(),
            };
            majors.entry(package["name"].as_str().expect("name")).or_default().insert(major);
        }
    }
    for (name, majors) in majors {
        let known = KNOWN.iter().any(|(n, _)| *n == name);
        assert!(majors.len() == 1 || known, "{name} comes in several majors: {majors:?}");
        assert!(majors.len() > 1 || !known, "{name} comes in one major now: take it off the list");
    }
}

#[test]
fn no_native_code_is_compiled() {
    let meta = metadata();
    let shipped = shipped(&meta);
    for package in meta["packages"].as_array().expect("packages") {
        let name = package["name"].as_str().expect("name");
        if shipped.contains(package["id"].as_str().expect("id")) {
            assert!(
                !["cc", "cmake", "bindgen", "pkg-config", "openssl-sys", "onig_sys", "ring"].contains(&name),
                "{name}: the default build needs no C compiler"
            );
        }
    }
}

#[test]
fn crates_depend_one_way() {
    const ORDER: &[&str] = &[
        "glimmer-checkpoint",
        "glimmer-tensor",
        "glimmer-cuda",
        "glimmer-model",
        "glimmer-quantize",
        "glimmer-engine",
        "glimmer-text",
        "glimmer-server",
        "glimmer-bench",
        "glimmer-cli",
    ];
    let meta = metadata();
    for package in meta["packages"].as_array().expect("packages") {
        let name = package["name"].as_str().expect("name");
        let Some(rank) = ORDER.iter().position(|n| *n == name) else { continue };
        // Tests may look further up: the backend's run the model.
        for dep in package["dependencies"].as_array().expect("dependencies").iter().filter(|d| d["kind"] != "dev") {
            let dep_name = dep["name"].as_str().expect("name");
            if let Some(dep_rank) = ORDER.iter().position(|n| *n == dep_name) {
                assert!(dep_rank < rank, "{name} may not depend on {dep_name}");
            }
        }
    }
}

#[test]
fn constants_of_the_model_live_in_checkpoint() {
    for path in sources() {
        if is_test(&path) || path.starts_with(root().join("crates/checkpoint")) {
            continue;
        }
        let text = fs::read_to_string(&path).expect("a source is text");
        for (i, line) in library_part(&text).lines().enumerate() {
            let code = line.split("//").next().unwrap_or("");
            for constant in ["154880", "154_880", "154820", "154_820", "288", "12288", "12_288", "32768"] {
                let hit = code.match_indices(constant).any(|(at, _)| {
                    let before = code[..at].chars().next_back();
                    let after = code[at + constant.len()..].chars().next();
                    let part = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.');
                    !part(before) && !part(after)
                });
                assert!(!hit, "{}:{}: {constant} belongs into the config", path.display(), i + 1);
            }
        }
    }
}

#[test]
fn known_traps_have_their_tests() {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("the page is there");
    let (_, table) = page.split_once("## Known traps and their tests").expect("the page has the table");
    let rows: Vec<&str> = table.lines().filter(|l| l.starts_with("| ") && l.contains(". ")).collect();
    assert_eq!(rows.len(), 24, "one row a trap");
    let sources: Vec<String> = sources().iter().map(|p| fs::read_to_string(p).expect("a source is text")).collect();
    for row in rows {
        let tests: Vec<&str> = row.rsplit('|').nth(1).expect("a second column").split('`').skip(1).step_by(2).collect();
        assert!(!tests.is_empty(), "no test in: {row}");
        for test in tests {
            let definition = format!("fn {test}(");
            assert!(sources.iter().any(|s| s.contains(&definition)), "no such test: {test}");
        }
    }
}

#[test]
fn unsafe_lives_where_it_may() {
    for path in sources() {
        let relative = path.strip_prefix(root()).expect("under the root").to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).expect("a source is text");
        let uses = text.lines().any(|l| {
            let code = l.split("//").next().unwrap_or("");
            code.contains("unsafe {") || code.contains("unsafe fn") || code.contains("unsafe impl")
        });
        let may = relative.starts_with("crates/tensor/src/cpu/simd")
            || relative.starts_with("crates/tensor/src/cpu/pool")
            || relative == "crates/tensor/src/gemm/kernel.rs"
            || relative.starts_with("crates/cuda/")
            || relative == "crates/checkpoint/src/mapping.rs"
            || (is_test(&path) && text.contains("GlobalAlloc"));
        assert!(
            !uses || may,
            "{relative}: unsafe is allowed in the SIMD, matrix-tile, thread-pool and mapping modules and in the CUDA crate only"
        );
    }
}

#[test]
fn crates_without_unsafe_forbid_it() {
    for crate_name in ["model", "quantize", "engine", "text", "server", "bench"] {
        let lib = root().join("crates").join(crate_name).join("src/lib.rs");
        let text = fs::read_to_string(&lib).expect("a crate has a lib.rs");
        assert!(text.contains("#![forbid(unsafe_code)]"), "{}: forbid unsafe code", lib.display());
    }
    let main = fs::read_to_string(root().join("crates/cli/src/main.rs")).expect("main.rs");
    assert!(main.contains("#![forbid(unsafe_code)]"));
}
