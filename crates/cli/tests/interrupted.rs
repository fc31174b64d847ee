//! A quantization that is interrupted, by Ctrl-C or a wrong turn, says how to go on wherever somebody meets it.
#![cfg(unix)]

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

const MICRO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16");

fn glimmer(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_glimmer"));
    command.args(arguments).stdin(Stdio::null()).output().expect("the program starts")
}

#[track_caller]
fn refused(arguments: &[&str], wanted: &[&str]) -> String {
    let output = glimmer(arguments);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
    for text in wanted {
        assert!(error.contains(text), "`{text}` belongs into: {error}");
    }
    error
}

#[test]
fn ctrl_c_leaves_a_run_that_every_command_knows_how_to_finish() {
    let folder = tempfile::tempdir().expect("a directory");
    let (calib, out) = (folder.path().join("c.jsonl"), folder.path().join("q"));
    let ids = (0..400).map(|i| (7 * i % 3000).to_string()).collect::<Vec<_>>().join(",");
    fs::write(&calib, format!("{{\"input_ids\": [{ids}]}}\n").repeat(4)).expect("written");
    let (calib, out) = (calib.to_str().expect("UTF-8"), out.to_str().expect("UTF-8"));
    let quantize = ["quantize", "--calib", calib, "--out", out];
    let mut command = Command::new(env!("CARGO_BIN_EXE_glimmer"));
    let child = command.args(quantize).stdin(Stdio::null()).stderr(Stdio::piped()).stdout(Stdio::null());
    let child = child.spawn().expect("the program starts");
    let begun = Path::new(out).join(".quantize/state.json");
    let limit = Instant::now() + Duration::from_secs(120);
    while !begun.exists() && Instant::now() < limit {
        std::thread::sleep(Duration::from_millis(5));
    }
    let pressed = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(pressed.expect("there is `kill`").success());
    let ended = child.wait_with_output().expect("it ends");
    let error = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(130), "{error}");
    assert!(error.starts_with("stopping behind") && error.contains("error: interrupted"), "{error}");
    assert!(error.contains("--resume"), "{error}");

    refused(&quantize, &["holds an interrupted run", "--resume"]);
    refused(&["verify", out], &["not finished", "--resume"]);
    refused(&["generate", "-m", out, "hi"], &["interrupted", "--resume"]);
    refused(&["inspect", out], &["interrupted", "--resume"]);
    refused(&["plan", out], &["interrupted", "--resume"]);
    let other = [&quantize[..], &["--resume", "--damp", "0.02", "--scales", "mse"]].concat();
    let error = refused(&other, &["another recipe: scales was imse and is mse now, damp was 0.01 and is 0.02 now"]);
    assert!(!error.contains("shrink"), "only what differs: {error}");

    let resumed = glimmer(&[&quantize[..], &["--resume"]].concat());
    assert!(resumed.status.success(), "{}", String::from_utf8_lossy(&resumed.stderr));
    let again = glimmer(&[&quantize[..], &["--resume"]].concat());
    assert!(String::from_utf8_lossy(&again.stdout).contains("finished already"), "{again:?}");
    let verified = glimmer(&["verify", out, "--source", MICRO]);
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stdout));
}

#[test]
fn a_budget_below_one_layer_is_raised_and_that_is_said() {
    let folder = tempfile::tempdir().expect("a directory");
    let out = folder.path().join("q");
    let output =
        glimmer(&["quantize", "--method", "rtn", "--budget-gib", "0.001", "--out", out.to_str().expect("UTF-8")]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    assert!(error.contains("warning: a budget of 0.00 GiB is less than one layer of this model takes"), "{error}");
}

#[test]
fn a_budget_beyond_every_machine_is_taken_as_no_limit() {
    let folder = tempfile::tempdir().expect("a directory");
    let out = folder.path().join("q");
    let output =
        glimmer(&["quantize", "--method", "rtn", "--budget-gib", "1e300", "--out", out.to_str().expect("UTF-8")]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_run_that_fails_half_way_says_first_what_is_wrong() {
    let folder = tempfile::tempdir().expect("a directory");
    let source = folder.path().join("source");
    fs::create_dir(&source).expect("a directory");
    for entry in fs::read_dir(MICRO).expect("the model is there") {
        let path = entry.expect("an entry").path();
        fs::copy(&path, source.join(path.file_name().expect("a name"))).expect("copied");
    }
    let shard = source.join("model-00001-of-00003.safetensors");
    let mut bytes = fs::read(&shard).expect("the shard is there");
    let tensors = glimmer_checkpoint::header::Header::parse("shard", &bytes).expect("a header").tensors;
    let name = "model.language_model.layers.1.mlp.experts.0.down_proj.weight";
    let at = tensors.iter().find(|tensor| tensor.name == name).expect("the tensor").range.start;
    bytes[at..at + 2].copy_from_slice(&[0xc0, 0x7f]);
    fs::write(&shard, bytes).expect("written");
    let (source, out) = (source.to_str().expect("UTF-8"), folder.path().join("q"));
    let out = out.to_str().expect("UTF-8");
    let error = refused(&["quantize", "--method", "rtn", "--source", source, "--out", out], &["NaN"]);
    assert!(error.starts_with(&format!("error: `{name}`, row 0, column 0:")), "{error}");
    assert!(error.trim_end().ends_with("what is finished is kept: repeat the command with --resume"), "{error}");
}
