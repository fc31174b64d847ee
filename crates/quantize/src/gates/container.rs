//! G10 to G12: files, index, shards.
//!
//! The container rules themselves live in the checkpoint crate; here each broken rule is given to its gate. A referenced file
//! that does not exist is G10's, unless all its tensors are found elsewhere: then the index is stale and it is G11's.

use std::collections::{BTreeMap, BTreeSet};

use glimmer_checkpoint::{Fault, shards::INDEX_FILE};

use super::{
    Scene,
    directory::Directory,
    verdict::GateId::{self, G10, G11, G12},
    verdict::Ledger,
};

/// G10 and G11.
pub(super) fn files_and_index(ledger: &mut Ledger, artifact: &Directory) {
    let stale: BTreeSet<&str> = artifact
        .broken
        .iter()
        .map(String::as_str)
        .filter(|file| !artifact.files.contains_key(*file))
        .filter(|file| {
            let mut named = artifact.weight_map.iter().filter(|(_, f)| f == file);
            named.all(|(name, _)| artifact.shards.stored(name).is_some())
        })
        .collect();
    for damage in &artifact.damages {
        let gate = match damage.fault {
            Fault::MissingShard if stale.contains(damage.file.as_str()) => continue,
            // Without a single shard there is nothing that an index could name.
            Fault::NoIndex if artifact.shards.files().is_empty() => G10,
            fault => owner(fault),
        };
        let subject = damage.tensor.clone().unwrap_or_else(|| damage.file.clone());
        let place = damage.tensor.as_ref().map(|_| format!(" (`{}`)", damage.file)).unwrap_or_default();
        let found = format!("expected {}, found {}{place}", damage.expected, damage.found);
        ledger.field(gate, &subject, found, damage.fault.remedy());
        ledger.claim_file(gate, if gate == G11 { INDEX_FILE } else { &damage.file });
    }
    names(ledger, artifact, &stale);
    let present = artifact.files.keys().filter(|f| f.ends_with(".safetensors")).count();
    ledger.count(G10, artifact.shards.files().len(), present);
    index(ledger, artifact);
}

/// Which gate a broken rule belongs to.
fn owner(fault: Fault) -> GateId {
    match fault {
        Fault::IndexJson | Fault::MissingTensor | Fault::UnindexedTensor | Fault::WrongShard | Fault::NoIndex => G11,
        _ => G10,
    }
}

/// Names `model-%05d-of-%05d.safetensors` (with an optional word after `model-`), numbered without holes.
fn names(ledger: &mut Ledger, artifact: &Directory, stale: &BTreeSet<&str>) {
    let remedy = "name shards `model-00001-of-0000N.safetensors` and so on, in the index too";
    let mut sets: BTreeMap<(String, usize), BTreeSet<usize>> = BTreeMap::new();
    let referenced: BTreeSet<&str> = artifact.weight_map.values().map(String::as_str).collect();
    let single = referenced.is_empty() && artifact.shards.files().len() == 1;
    for shard in artifact.shards.files() {
        if single && shard.file == "model.safetensors" {
            continue;
        }
        match numbered(&shard.file) {
            Some((set, i, n)) => {
                sets.entry((set, n)).or_default().insert(i);
            }
            None => {
                let found = "expected a name like `model-00001-of-00002.safetensors`, found another";
                ledger.file(G10, &shard.file, found, remedy);
            }
        }
    }
    // Holes that come from files reported above are not reported again.
    for file in artifact.broken.iter().filter(|f| !stale.contains(f.as_str())) {
        if let Some((set, i, n)) = numbered(file) {
            sets.entry((set, n)).or_default().insert(i);
        }
    }
    for ((set, n), numbers) in sets {
        let missing: Vec<usize> = (1..=n).filter(|i| !numbers.contains(i)).take(3).collect();
        if !missing.is_empty() || numbers.len() > n {
            let found = format!("expected the numbers 1 to {n} once each, found {} of them", numbers.len());
            ledger.field(G10, &format!("{set}-*-of-{n:05}.safetensors"), found, remedy);
            for shard in artifact.shards.files() {
                if numbered(&shard.file).is_some_and(|(s, _, m)| (s, m) == (set.clone(), n)) {
                    ledger.claim_file(G10, &shard.file);
                }
            }
        }
    }
}

/// Set, number and count of a shard's name.
fn numbered(file: &str) -> Option<(String, usize, usize)> {
    let number = |digits: &str| -> Option<usize> {
        (digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok())?
    };
    let (rest, count) = file.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (set, i) = rest.rsplit_once('-')?;
    let word = set.strip_prefix("model")?;
    let plain = word.is_empty()
        || word.strip_prefix('-').is_some_and(|w| !w.is_empty() && w.bytes().all(|b| b.is_ascii_lowercase()));
    plain.then_some((set.to_owned(), number(i)?, number(count)?))
}

/// G11 beyond what the container rules say: the total, and which of the two conventions it follows.
fn index(ledger: &mut Ledger, artifact: &Directory) {
    if !artifact.shards.is_indexed() {
        return;
    }
    // Entries that hold, of all names that either side has.
    let stored = |name: &str| artifact.shards.file_of(name);
    let right = artifact.weight_map.iter().filter(|(name, file)| stored(name) == Some(file.as_str())).count();
    let unnamed = artifact.names().filter(|name| !artifact.weight_map.contains_key(*name)).count();
    ledger.count(G11, right, artifact.weight_map.len() + unnamed);
    if !artifact.broken.is_empty() && !ledger.has_failed(G11) {
        ledger.skip(G11, "some shards cannot be read (G10)");
        return;
    }
    let tensors = artifact.shards.tensor_bytes();
    let files: u64 = artifact.shards.files().iter().filter_map(|s| artifact.files.get(&s.file)).copied().sum();
    match artifact.shards.index_total_size() {
        Some(total) if total == tensors => ledger.note(G11, "total_size is the sum of the tensors' bytes"),
        Some(total) if total == files => ledger.note(G11, "total_size is the sum of the files' sizes"),
        // A tensor too many or too few, already reported, changes the sum as well.
        _ if ledger.has_failed(G11) || ledger.has_failed(G10) => {}
        total => {
            let found = total.map_or("none".to_owned(), |t| t.to_string());
            let found =
                format!("expected {tensors} (bytes of all tensors) or {files} (sizes of all files), found {found}");
            ledger.file(G11, INDEX_FILE, found, "write the index again");
        }
    }
}

/// G12: no shard larger than the limit, and the routed experts of a layer in one shard.
pub(super) fn layout(ledger: &mut Ledger, scene: &Scene, limit: u64) {
    let artifact = &scene.artifact;
    let mut sizes = vec![(0_u64, 0_usize); artifact.shards.files().len()];
    for (_, stored) in artifact.shards.tensors() {
        sizes[stored.shard].0 += stored.range.len() as u64;
        sizes[stored.shard].1 += 1;
    }
    for (shard, (size, tensors)) in artifact.shards.files().iter().zip(sizes) {
        // One tensor larger than the limit cannot be divided.
        if size > limit && tensors > 1 {
            let found = format!("expected at most {limit} bytes of tensors, found {size}");
            ledger.file(G12, &shard.file, found, "write smaller shards");
        }
    }
    let mut layers: BTreeMap<usize, (BTreeSet<usize>, u64)> = BTreeMap::new();
    for matrix in &scene.expectation.matrices {
        let (shards, bytes) = layers.entry(matrix.layer).or_default();
        for (name, ..) in matrix.triple() {
            if let Some(stored) = artifact.shards.stored(&name) {
                shards.insert(stored.shard);
                *bytes += stored.range.len() as u64;
            }
        }
    }
    for (layer, (shards, bytes)) in layers {
        if shards.len() > 1 && bytes <= limit {
            let files: Vec<&str> = shards.iter().map(|&i| artifact.shards.files()[i].file.as_str()).collect();
            let found = format!("expected the layer's routed experts in one shard, found them in {}", files.join(", "));
            ledger.field(G12, &format!("layer {layer}"), found, "write the experts of a layer into one shard");
            for file in files {
                ledger.claim_file(G12, file);
            }
        }
    }
    ledger.count(G12, artifact.shards.files().len(), artifact.shards.files().len());
    if !artifact.broken.is_empty() {
        ledger.skip(G12, "some shards cannot be read (G10)");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_names_are_read() {
        let set = |s: &str, i, n| Some((s.to_owned(), i, n));
        assert_eq!(numbered("model-00002-of-00120.safetensors"), set("model", 2, 120));
        assert_eq!(numbered("model-mtp-00001-of-00001.safetensors"), set("model-mtp", 1, 1));
        for bad in [
            "model.safetensors",
            "model-1-of-2.safetensors",
            "model-00001-of-00002.bin",
            "model--00001-of-00002.safetensors",
            "model-00001-of-+0002.safetensors",
            "mymodel-00001-of-00002.safetensors",
        ] {
            assert_eq!(numbered(bad), None, "{bad}");
        }
    }
}
