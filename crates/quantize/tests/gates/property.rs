//! Whatever happens to the files, the verifier answers; and what it passes is the good artifact.

use glimmer_checkpoint::shards::INDEX_FILE;
use proptest::prelude::*;

use crate::{
    artifact::{Files, good_files},
    harness::judge,
};

/// The files whose content the verifier has to parse.
const PARSED: [&str; 5] = [
    "config.json",
    INDEX_FILE,
    "manifest.json",
    "model-00001-of-00004.safetensors",
    "model-00003-of-00004.safetensors",
];

fn damaged(file: usize, place: f64, bytes: &[u8], insert: bool) -> Files {
    let mut files = good_files().clone();
    let content = files.get_mut(PARSED[file]).expect("a file of the good artifact");
    // Of a shard, mostly the header and the first tensors.
    let reach = content.len().min(40_000);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a place within the file")]
    let at = (place * (reach - bytes.len()) as f64) as usize;
    if insert {
        content.splice(at..at, bytes.iter().copied());
    } else {
        content[at..at + bytes.len()].copy_from_slice(bytes);
    }
    files
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn random_damage_gives_a_verdict(
        file in 0..PARSED.len(),
        place in 0.0..1.0_f64,
        bytes in proptest::collection::vec(any::<u8>(), 1..5),
        insert in any::<bool>(),
        with_source in any::<bool>(),
    ) {
        let files = damaged(file, place, &bytes, insert);
        let verdict = judge(&files, with_source);
        prop_assert_eq!(verdict.passed, verdict.failed().is_empty());
        // The manifest is not hashed itself: spaces in it, or digits of a size that is not judged, change nothing.
        let harmless = files == *good_files() || PARSED[file] == "manifest.json";
        prop_assert!(!verdict.passed || harmless, "{}", verdict);
    }

    #[test]
    fn a_file_cut_anywhere_gives_a_verdict(file in 0..PARSED.len(), place in 0.0..1.0_f64, with_source in any::<bool>()) {
        let mut files = good_files().clone();
        let content = files.get_mut(PARSED[file]).expect("a file of the good artifact");
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a place within the file")]
        let length = (place * (content.len() - 1) as f64) as usize;
        content.truncate(length);
        let verdict = judge(&files, with_source);
        prop_assert!(!verdict.passed, "{}", verdict);
    }
}
