//! G15: every file and every tensor is what `manifest.json` recorded when the artifact was written.
//!
//! A hash says that something changed, not what; so this gate speaks only where no other gate has. A tensor that another gate
//! rejected is passed over, and so is the file around it: its hash cannot match either. The index is passed over when
//! any tensor or shard was rejected, because its content follows from the shards (and G11 compares the two).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{self, Read},
};

use glimmer_checkpoint::{
    Digest, Manifest,
    digest::Hasher,
    manifest::{MANIFEST_FILE, SourceIdentity},
    shards::INDEX_FILE,
};

use super::{
    directory::{Directory, Source},
    sweep::sweep,
    verdict::GateId::G15,
    verdict::Ledger,
};

/// Bytes hashed at a time.
const CHUNK: usize = 1 << 20;

const CHANGED: &str = "it was changed after the artifact was written: copy it again, or quantize again";

/// Digests of a file and of the tensors in it.
struct Digests {
    file: Digest,
    tensors: Vec<(String, Digest)>,
}

/// G15.
pub(super) fn check(ledger: &mut Ledger, artifact: &Directory, source: Option<&Source>, required: bool) {
    let manifest = match artifact.read(MANIFEST_FILE) {
        Some(Ok(text)) => Manifest::parse(&text),
        Some(Err(e)) => {
            ledger.file(G15, MANIFEST_FILE, format!("expected to read it, found {e}"), "check the disk");
            return;
        }
        None if required => {
            let found = "expected the manifest that the quantizer writes, found none";
            ledger.file(G15, MANIFEST_FILE, found, "copy it from where the artifact was made; an artifact that has none never had its bytes recorded: quantize again");
            return;
        }
        None => {
            ledger.skip(G15, "there is no manifest.json");
            return;
        }
    };
    let manifest = match manifest {
        Ok(manifest) => manifest,
        Err(e) => {
            // The ledger names the file.
            let found = e.to_string();
            let found = found.strip_prefix(MANIFEST_FILE).map_or(&*found, |rest| rest.trim_start_matches([':', ' ']));
            ledger.file(G15, MANIFEST_FILE, found, "copy it again");
            return;
        }
    };
    origin(ledger, &manifest, source);

    let names: Vec<&str> = manifest.files.keys().map(String::as_str).collect();
    let present = |file: &str| artifact.files.contains_key(file);
    let results = sweep(&names, |file| present(file).then(|| digests(artifact, file)));
    let mut found_files = BTreeMap::new();
    let mut found_tensors = BTreeMap::new();
    for (file, result) in names.iter().zip(results) {
        match result {
            None => {}
            Some(Ok(digests)) => {
                found_files.insert(*file, digests.file);
                found_tensors.extend(digests.tensors);
            }
            Some(Err(e)) => ledger.file(G15, file, format!("expected to read it, found {e}"), "check the disk"),
        }
    }
    let before = claims(ledger, artifact, &manifest);
    let same = tensors(ledger, artifact, &manifest, &found_tensors);
    let claims = claims(ledger, artifact, &manifest);
    files(ledger, artifact, &manifest, &found_files, &claims);
    if before.passed_over > 0 {
        ledger.note(G15, format!("{} tensors left to the gates that rejected them", before.passed_over));
    }
    ledger.count(G15, same, manifest.tensors.len());
}

/// What the artifact was made from, and how.
fn origin(ledger: &mut Ledger, manifest: &Manifest, source: Option<&Source>) {
    if manifest.tool.trim().is_empty() || manifest.recipe.is_null() {
        let found = "expected the program's version and a recipe, found none";
        ledger.field(G15, "manifest.json: tool, recipe", found, "quantize again");
    }
    let Some(Ok(identity)) = source.map(|s| SourceIdentity::of(s.checkpoint())) else { return };
    let recorded = &manifest.source;
    let differs = recorded.config_sha256 != identity.config_sha256
        || (recorded.tensors, recorded.tensor_bytes) != (identity.tensors, identity.tensor_bytes);
    if differs {
        let found = format!(
            "expected config.json {} with {} tensors of {} bytes, found {} with {} of {} in the source",
            recorded.config_sha256,
            recorded.tensors,
            recorded.tensor_bytes,
            identity.config_sha256,
            identity.tensors,
            identity.tensor_bytes
        );
        ledger.field(G15, "manifest.json: source", found, "give the source that the artifact was made from");
    } else if let (Some(then), Some(now)) = (recorded.sample_sha256, identity.sample_sha256)
        && then != now
    {
        let found = format!("expected weights whose sample has SHA-256 {then}, found {now} in the source");
        ledger.field(G15, "manifest.json: source", found, "give the source that the artifact was made from");
    } else if recorded.index_sha256 != identity.index_sha256 {
        ledger.note(G15, "the source's index is not the recorded one: its shards were cut anew");
    }
}

/// What other gates have rejected.
struct Claims {
    /// Files with a rejected tensor, as found or as recorded.
    files: BTreeSet<String>,
    /// Any tensor or shard at all.
    any: bool,
    passed_over: usize,
}

fn claims(ledger: &Ledger, artifact: &Directory, manifest: &Manifest) -> Claims {
    let mut files = BTreeSet::new();
    for name in ledger.claimed_tensors() {
        files.extend(artifact.shards.file_of(name).map(str::to_owned));
        files.extend(manifest.tensors.get(name).map(|record| record.file.clone()));
    }
    // A file lost tensors to a file that another gate rejects.
    for (name, record) in &manifest.tensors {
        let now = artifact.shards.file_of(name).unwrap_or(&record.file);
        if now != record.file && ledger.file_claim(now).is_some() {
            files.insert(record.file.clone());
        }
    }
    let shard_claimed = artifact.files.keys().chain(&artifact.broken);
    let shard_claimed = shard_claimed.filter(|f| f.ends_with(".safetensors")).any(|f| ledger.file_claim(f).is_some());
    let passed_over = manifest.tensors.keys().filter(|name| ledger.tensor_claim(name).is_some()).count();
    Claims { any: shard_claimed || !files.is_empty(), files, passed_over }
}

/// Compares tensors; returns how many are as recorded.
fn tensors(ledger: &mut Ledger, artifact: &Directory, manifest: &Manifest, found: &BTreeMap<String, Digest>) -> usize {
    let (mut same, mut hidden) = (0, 0);
    for (name, record) in &manifest.tensors {
        if ledger.tensor_claim(name).is_some() {
            continue;
        }
        let Some(file) = artifact.shards.file_of(name) else {
            if artifact.hidden(name) {
                hidden += 1;
            } else {
                ledger.tensor(G15, name, "expected the recorded tensor, found none", CHANGED);
            }
            continue;
        };
        match found.get(name) {
            Some(digest) if *digest != record.sha256 => {
                let found = format!("expected SHA-256 {}, found {digest}", record.sha256);
                ledger.tensor(G15, name, found, CHANGED);
            }
            _ if file != record.file && ledger.file_claim(file).is_none() => {
                let found = format!("expected it in `{}`, found it in `{file}`", record.file);
                ledger.tensor(G15, name, found, CHANGED);
            }
            _ => same += 1,
        }
    }
    let unrecorded: Vec<String> = artifact
        .names()
        .filter(|name| !manifest.tensors.contains_key(*name) && ledger.tensor_claim(name).is_none())
        .map(str::to_owned)
        .collect();
    for name in unrecorded {
        ledger.tensor(G15, &name, "expected a record of the tensor, found none", CHANGED);
    }
    if hidden > 0 {
        ledger.skip(G15, format!("{hidden} tensors lie in files that G10 rejects"));
    }
    same
}

/// Compares files, where no rejected tensor or file explains a difference.
fn files(
    ledger: &mut Ledger,
    artifact: &Directory,
    manifest: &Manifest,
    found: &BTreeMap<&str, Digest>,
    claims: &Claims,
) {
    for (file, record) in &manifest.files {
        let explained =
            ledger.file_claim(file).is_some() || claims.files.contains(file) || (file == INDEX_FILE && claims.any);
        if explained {
            continue;
        }
        match found.get(file.as_str()) {
            Some(digest) if *digest != record.sha256 => {
                let found = format!("expected SHA-256 {}, found {digest}", record.sha256);
                ledger.file(G15, file, found, CHANGED);
            }
            Some(_) => {}
            // A renamed shard is rejected under its new name.
            None if !artifact.files.contains_key(file) && !moved(ledger, artifact, manifest, file) => {
                ledger.file(G15, file, "expected the recorded file, found none", "copy it too");
            }
            None => {}
        }
    }
    let unrecorded: Vec<&String> = artifact
        .files
        .keys()
        .filter(|f| *f != MANIFEST_FILE && !manifest.files.contains_key(*f))
        .filter(|f| ledger.file_claim(f).is_none() && !claims.files.contains(*f))
        .collect();
    for file in unrecorded {
        let found = "expected only recorded files, found another one";
        ledger.file(G15, file, found, "remove it, or quantize again if it was left by an unfinished run");
    }
}

/// Whether all tensors recorded for a file now lie in files that other gates reject.
fn moved(ledger: &Ledger, artifact: &Directory, manifest: &Manifest, file: &str) -> bool {
    let mut recorded = manifest.tensors.iter().filter(|(_, record)| record.file == file).peekable();
    recorded.peek().is_some()
        && recorded.all(|(name, _)| artifact.shards.file_of(name).is_some_and(|f| ledger.file_claim(f).is_some()))
}

/// Reads a file once for its own digest and those of its tensors.
fn digests(artifact: &Directory, file: &str) -> io::Result<Digests> {
    let mut parts: Vec<(usize, usize, &str)> = artifact
        .shards
        .tensors()
        .filter(|(_, t)| artifact.shards.files()[t.shard].file == file)
        .map(|(name, t)| (t.range.start, t.range.end, name))
        .collect();
    parts.sort_unstable();
    let mut reader = File::open(artifact.path(file))?;
    let mut whole = Hasher::default();
    let mut buffer = vec![0; CHUNK];
    let mut position = 0;
    let mut read_to = |end: usize, part: &mut Hasher| -> io::Result<bool> {
        while position < end {
            let n = CHUNK.min(end - position);
            let n = reader.read(&mut buffer[..n])?;
            if n == 0 {
                return Ok(false);
            }
            whole.update(&buffer[..n]);
            part.update(&buffer[..n]);
            position += n;
        }
        Ok(true)
    };
    let mut tensors = Vec::with_capacity(parts.len());
    for (start, end, name) in parts {
        read_to(start, &mut Hasher::default())?;
        let mut part = Hasher::default();
        if !read_to(end, &mut part)? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        tensors.push((name.to_owned(), part.finish()));
    }
    while read_to(usize::MAX, &mut Hasher::default())? {}
    Ok(Digests { file: whole.finish(), tensors })
}
