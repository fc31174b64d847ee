//! G14: the files beside the weights are the source's, byte for byte, and no block of an FP8 source is left over.

use serde_json::Value;

use super::{
    config_block::BLOCK,
    directory::{Directory, Source},
    verdict::GateId::{self, G13, G14},
    verdict::Ledger,
};

/// Files that other tools would read as a quantization configuration.
const FOREIGN: [&str; 3] = ["hf_quant_config.json", "quantize_config.json", "quant_config.json"];

const COPY: &str = "copy the file from the source";

/// Whether a file has to be carried over unchanged.
pub fn is_companion(file: &str) -> bool {
    const EXACT: [&str; 8] = [
        "added_tokens.json",
        "generation_config.json",
        "merges.txt",
        "preprocessor_config.json",
        "processor_config.json",
        "special_tokens_map.json",
        "video_preprocessor_config.json",
        "vocab.json",
    ];
    const PREFIXES: [&str; 4] = ["tokenizer", "chat_template", "LICENSE", "NOTICE"];
    EXACT.contains(&file) || PREFIXES.iter().any(|p| file.starts_with(p))
}

/// G14 on files.
pub(super) fn check(ledger: &mut Ledger, artifact: &Directory, source: Option<&Source>) {
    for file in FOREIGN.iter().filter(|f| artifact.files.contains_key(**f)) {
        let found = "expected the quantization to be described by config.json alone, found this file";
        ledger.file(G14, file, found, "remove the file");
    }
    for file in artifact.files.keys().filter(|f| is_companion(f) && f.ends_with(".json")) {
        let parsed = artifact.read(file).map(|bytes| bytes.map(|b| serde_json::from_slice::<Value>(&b).is_ok()));
        if !matches!(parsed, Some(Ok(true))) {
            ledger.file(G14, file, "expected JSON, found something that does not parse", COPY);
        }
    }
    let Some(source) = source else {
        let present = artifact.files.keys().filter(|f| is_companion(f)).count();
        ledger.count(G14, present, present);
        ledger.note(G14, "no source: the files were parsed, not compared");
        return;
    };
    let source = source.directory();
    let (mut same, mut total) = (0, 0);
    for file in source.files.keys().filter(|f| is_companion(f)) {
        total += 1;
        match (artifact.read(file), source.read(file)) {
            _ if ledger.file_claim(file).is_some() => {}
            (None, _) => ledger.file(G14, file, "expected the source's file, found none", COPY),
            (Some(Ok(ours)), Some(Ok(theirs))) if ours == theirs => same += 1,
            (Some(Ok(ours)), Some(Ok(theirs))) => {
                let at = ours.iter().zip(&theirs).position(|(a, b)| a != b).unwrap_or(ours.len().min(theirs.len()));
                let found = format!("expected the source's bytes, found a difference at byte {at}");
                ledger.file(G14, file, found, COPY);
            }
            _ => ledger.file(G14, file, "expected to read it here and in the source, could not", COPY),
        }
    }
    let extra: Vec<String> = artifact
        .files
        .keys()
        .filter(|f| is_companion(f) && !source.files.contains_key(*f) && ledger.file_claim(f).is_none())
        .cloned()
        .collect();
    for file in extra {
        let found = "expected no such file, as in the source, found one: it changes how the model is used";
        ledger.file(G14, &file, found, "remove the file");
    }
    ledger.count(G14, same, total);
}

/// G14 on the configuration: a block that describes the FP8 source rather than this artifact. Returns whether there is one at
/// the top level; G13 then has nothing to judge.
pub(super) fn stale_block(ledger: &mut Ledger, config: &Value) -> bool {
    let remedy = "drop the source's block and write the artifact's own";
    let describes_fp8 = |block: &Value| {
        let method = block.get("quant_method").and_then(Value::as_str);
        method == Some("fp8") || block.get("weight_block_size").is_some()
    };
    let nested = config.get("text_config").and_then(|t| t.get(BLOCK));
    if nested.is_some_and(|b| !b.is_null()) {
        let found = "expected no second block, found one that loaders may prefer";
        claim(ledger, G14, "text_config.quantization_config", found, remedy);
    }
    let top = config.get(BLOCK).is_some_and(describes_fp8);
    if top {
        claim(ledger, G14, BLOCK, "expected the artifact's block, found that of an FP8 source", remedy);
        ledger.skip(G13, "the block is an FP8 source's (G14)");
    }
    top
}

fn claim(ledger: &mut Ledger, gate: GateId, subject: &str, found: &str, remedy: &str) {
    ledger.field(gate, subject, found, remedy);
    ledger.claim_file(gate, "config.json");
}
