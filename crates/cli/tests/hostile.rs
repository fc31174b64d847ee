//! Hostile use: every refusal names what is wrong, nothing panics, and a failed command leaves nothing that looks done.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

const MICRO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16");

fn glimmer(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_glimmer"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("the program starts")
}

/// The error of a command that must fail with exit code 2.
fn refusal(arguments: &[&str]) -> String {
    let output = glimmer(arguments);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
    assert!(output.stdout.is_empty(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stdout));
    error
}

#[track_caller]
fn refused(arguments: &[&str], wanted: &[&str]) {
    let error = refusal(arguments);
    for text in wanted {
        assert_eq!(error.matches(text).count(), 1, "`{text}` belongs once into: {error}");
    }
}

/// A copy of the micro model in which one file is replaced, or left out.
struct Altered {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

impl Altered {
    fn new(name: &str, content: Option<&[u8]>) -> Self {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("a model");
        fs::create_dir(&path).expect("created");
        for entry in fs::read_dir(MICRO).expect("the model is there") {
            let from = entry.expect("readable").path();
            let to = path.join(from.file_name().expect("a name"));
            if !to.ends_with(name) {
                fs::copy(&from, &to).expect("copied");
            }
        }
        if let Some(content) = content {
            fs::write(path.join(name), content).expect("written");
        }
        Self { _folder: folder, path }
    }

    fn directory(&self) -> &str {
        self.path.to_str().expect("UTF-8")
    }
}

fn micro(name: &str) -> Vec<u8> {
    fs::read(Path::new(MICRO).join(name)).expect("the model is there")
}

#[test]
fn values_out_of_range_are_named_with_their_range() {
    let ask = |option: &str, value: &str| refusal(&["generate", option, value, "hi"]);
    for value in ["-1", "nan", "inf", "7"] {
        assert!(ask("--temperature", value).contains("`temperature`: expected a number from 0 to 2"), "{value}");
    }
    for value in ["0", "-0.5", "1.5", "NaN"] {
        assert!(ask("--top-p", value).contains("`top_p`: expected a number above 0 and up to 1"), "{value}");
    }
    assert!(ask("--min-p", "-1").contains("`min_p`: expected a number from 0 to 1, found -1"));
    assert!(ask("--stop-token", "4294967295").contains("--stop-token 4294967295: expected a token id below"));
    for (arguments, flag, range) in [
        (&["generate", "--max-tokens", "-1", "hi"][..], "--max-tokens", "1..=4294967295"),
        (&["generate", "--top-k", "-3", "hi"], "--top-k", "a whole number from 0 to 4294967295"),
        (&["generate", "--stop-token", "-1", "hi"], "--stop-token", "from 0 to 4294967295"),
        (&["generate", "--threads", "-2", "hi"], "--threads", "1..=1024"),
        (&["eval", "--limit", "-1"], "--limit", "a whole number from 0 to"),
        (&["eval", "--batch", "-16"], "--batch", "a whole number from 0 to"),
        (&["synth", "--config", "x", "--out", "y", "--seed", "-1"], "--seed", "a whole number from 0 to"),
        (&["bench", "step", "--sequences", "1,-8"], "--sequences", "a whole number from 0 to 65535"),
        (&["bench", "serve", "--num-prompts", "-1"], "--num-prompts", "a whole number from 0 to"),
        (&["bench", "parity", "--share", "-1"], "--share", "a share from 0 to 1"),
        (&["bench", "soak", "--minutes", "-1"], "--minutes", "a number above 0"),
        (&["serve", "--max-num-seqs", "-1"], "--max-num-seqs", "a whole number, at least 1"),
        (&["plan", "--max-num-seqs", "-1"], "--max-num-seqs", "a whole number, at least 1"),
    ] {
        refused(arguments, &["error:", range]);
        assert!(refusal(arguments).contains(flag), "{arguments:?}");
    }
    for (option, value) in [("--max-tokens", "0"), ("--draft-depth", "17"), ("--threads", "0"), ("--threads", "1025")] {
        assert!(ask(option, value).contains(option), "{option} {value}");
    }
}

#[test]
fn a_reasoning_effort_is_one_of_those_that_there_are() {
    let error = refusal(&["generate", "--reasoning-effort", "banana", "hi"]);
    assert!(
        error.contains("banana") && error.contains("low") && error.contains("medium") && error.contains("high"),
        "{error}"
    );
    assert!(refusal(&["chat", "--reasoning-effort", ""]).contains("--reasoning-effort"));
}

#[test]
fn flags_of_a_server_are_refused_as_other_flags_are() {
    for arguments in [
        &["serve", "--no-such-flag"][..],
        &["serve", "--port", "0"],
        &["plan", "--no-such-flag"],
        &["bench", "grid", "--html", "/dev/null", "--", "--no-such-flag"],
    ] {
        let error = refusal(arguments);
        assert_eq!(error.matches("error:").count(), 1, "{arguments:?}: {error}");
    }
    let conflict = glimmer(&["serve", "--enable-auto-tool-choice", "--tool-call-parser", "none", "m"]);
    let error = String::from_utf8_lossy(&conflict.stderr).into_owned();
    assert!(
        conflict.status.code() == Some(1) && error.starts_with("error: --enable-auto-tool-choice requires"),
        "{error}"
    );
    let idle = glimmer(&["serve", "--dummy-layers", "1"]);
    let error = String::from_utf8_lossy(&idle.stderr).into_owned();
    assert!(idle.status.code() == Some(1) && error.contains("--dummy-layers is for --load-format dummy"), "{error}");
}

#[test]
fn options_that_would_be_ignored_are_refused() {
    refused(&["generate", "--raw", "--no-thinking", "hi"], &["'--raw' cannot be used with '--no-thinking'"]);
    refused(&["eval", "--documents", "x"], &["  --kld-against [<MODEL>]"]);
    refused(&["generate", "--nvrtc", "/absent", "hi"], &["--nvrtc", "--device cuda"]);
    refused(&["eval", "--acceptance", "--kld-against"], &["cannot be used with"]);
    let folder = tempfile::tempdir().expect("a directory");
    let out = folder.path().join("q");
    let out = out.to_str().expect("UTF-8");
    for option in [["--damp", "0.5"], ["--method", "rtn"], ["--scales", "mse"]] {
        refused(&["quantize", "--parity", option[0], option[1], "--out", out], &["--parity' cannot be used with"]);
    }
    refused(&["quantize", "--method", "rtn", "--calib", "/absent", "--out", out], &["--calib", "without calibration"]);
    assert!(!Path::new(out).exists());
}

/// What a machine without a usable GPU says. One with a GPU answers instead, if the program was built for it.
#[test]
fn a_gpu_that_is_not_there_is_named_with_what_to_do() {
    let doctor = glimmer(&["doctor"]);
    let text = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(text.contains("CPU") && text.contains("--device cuda"), "{text}");
    if doctor.status.code() == Some(1) {
        assert!(text.contains("MISSING"), "{text}");
        refused(&["generate", "--device", "cuda", "hi"], &["--device cuda", "cpu"]);
    }
    let json = glimmer(&["doctor", "--json"]);
    assert!(serde_json::from_slice::<serde_json::Value>(&json.stdout).is_ok_and(|v| v.is_array()));
}

#[test]
fn the_cpu_answers_as_itself() {
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/eval");
    let output = glimmer(&["bench", "parity", "--prompts", "3", "--tokens", "3", "--data", data]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains("3 of 3 answers equal"), "{text}");
}

#[test]
fn numbers_of_the_pipeline_are_checked_before_anything_is_written() {
    let folder = tempfile::tempdir().expect("a directory");
    let out = folder.path().join("q");
    let out = out.to_str().expect("UTF-8");
    for (option, value, wanted) in [
        ("--budget-gib", "0", "--budget-gib 0: expected a positive number"),
        ("--budget-gib", "-1", "--budget-gib -1: expected a positive number"),
        ("--budget-gib", "nan", "--budget-gib NaN: expected a positive number"),
        ("--damp", "nan", "`damp`: a share of 0 to 1 expected, found NaN"),
        ("--damp", "-1", "`damp`: a share of 0 to 1 expected, found -1"),
        ("--shrink", "inf", "`shrink`: a number of tokens from 0 up expected, found inf"),
    ] {
        refused(&["quantize", option, value, "--method", "rtn", "--out", out], &[wanted]);
    }
    let config = format!("{MICRO}/config.json");
    for value in ["0", "-1", "nan", "1e300"] {
        refused(&["synth", "--config", &config, "--shard-gb", value, "--out", out], &["--shard-gb"]);
    }
    assert!(!Path::new(out).exists());
}

#[test]
fn calibration_samples_that_do_not_fit_are_named_by_file_and_line() {
    let folder = tempfile::tempdir().expect("a directory");
    let (calib, out) = (folder.path().join("c.jsonl"), folder.path().join("q"));
    let (calib, out) = (calib.to_str().expect("UTF-8"), out.to_str().expect("UTF-8"));
    let long = vec!["7"; 9000].join(",");
    for (line, wanted) in [
        ("{\"input_ids\": [99999]}".to_owned(), "(line 2): token 99999 does not exist"),
        (format!("{{\"input_ids\": [{long}]}}"), "(line 2): 9000 tokens"),
        ("{\"text\": \"<|image|>\"}".to_owned(), "(line 2): 1 image placeholder tokens, but features for 0"),
        ("{\"input_ids\": [3233], \"images\": [\"AAAA\"]}".to_owned(), "line 2: image: "),
    ] {
        fs::write(calib, format!("{{\"input_ids\": [5]}}\n{line}\n")).expect("written");
        refused(&["quantize", "--source", MICRO, "--calib", calib, "--out", out], &[calib, wanted]);
    }
    assert!(!Path::new(out).exists());
}

#[test]
fn nothing_to_measure_is_refused() {
    refused(&["eval", "--limit", "0"], &["--limit 0: nothing would be measured"]);
    refused(&["eval", "--batch", "0"], &["--batch 0"]);
    let folder = tempfile::tempdir().expect("a directory");
    let short = folder.path().join("short.jsonl");
    fs::write(&short, "{\"input_ids\": [5]}\n").expect("written");
    let short = short.to_str().expect("UTF-8");
    refused(&["eval", "--documents", short, "--kld-against"], &["no position to compare"]);
    refused(&["eval", "--task", "no-such-task"], &["--task no-such-task: neither a file nor an embedded task"]);
}

#[test]
fn more_room_than_there_are_items_is_not_allocated() {
    let output = glimmer(&["eval", "--task", "arithmetic", "--limit", "1", "--thinking", "off", "--batch", "1000000"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_result_file_that_cannot_be_written_is_refused_before_the_work() {
    let folder = tempfile::tempdir().expect("a directory");
    let absent = folder.path().join("absent/r.json");
    let (absent, directory) = (absent.to_str().expect("UTF-8"), folder.path().to_str().expect("UTF-8"));
    for path in [absent, directory] {
        refused(&["eval", "--task", "arithmetic", "--limit", "1", "--json", path], &["cannot write", path]);
        refused(&["bench", "kernels", "--json", path], &["cannot write", path]);
        refused(&["dequantize", "--artifact", MICRO, "--tensor", "lm_head", "--out", path], &["cannot write", path]);
    }
    refused(&["demo", "--json", directory], &["cannot write", "it is a directory"]);
    refused(&["demo", "--json", absent], &["cannot write", "make it first"]);
    assert!(!folder.path().join("absent").exists(), "no command makes folders for the files that it writes");
    // A command that fails later leaves no file.
    let file = folder.path().join("r.json");
    refused(&["eval", "--task", "absent", "--json", file.to_str().expect("UTF-8")], &["--task absent"]);
    assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 0);
}

#[test]
fn a_dequantized_tensor_does_not_land_in_the_artifact() {
    let model = Altered::new("README.md", None);
    let before = fs::read(model.path.join("config.json")).expect("read");
    for name in ["config.json", "new.bin"] {
        let out = model.path.join(name);
        let out = out.to_str().expect("UTF-8");
        let arguments = ["dequantize", "--artifact", model.directory(), "--tensor", "lm_head", "--out", out];
        refused(&arguments, &[out, "must stay as they are"]);
    }
    assert_eq!(fs::read(model.path.join("config.json")).expect("read"), before);
    assert!(!model.path.join("new.bin").exists());
}

#[test]
fn damaged_files_are_named_once_with_their_directory() {
    let name = "model-00001-of-00003.safetensors";
    let shard = micro(name);
    let mut huge = shard.clone();
    huge[..8].fill(0xff);
    for (content, wanted) in [
        (&shard[..1_000_000], "the file is incomplete"),
        (&[][..], "expected at least 8 bytes, found 0 bytes"),
        (&huge[..], "found a length field of 18446744073709551615"),
    ] {
        let model = Altered::new(name, Some(content));
        refused(&["generate", "-m", model.directory(), "hi"], &[wanted, model.directory(), name]);
        let out = model.path.with_file_name("out");
        let arguments = ["quantize", "--method", "rtn", "--source", model.directory(), "--out"];
        refused(&[&arguments[..], &[out.to_str().expect("UTF-8")]].concat(), &[wanted]);
        assert!(!out.exists());
        assert_eq!(glimmer(&["inspect", model.directory()]).status.code(), Some(1));
    }
    let model = Altered::new(name, None);
    refused(&["generate", "-m", model.directory(), "hi"], &["found no such file", name]);
    for (name, content, wanted) in [
        ("config.json", "{nope", "expected one JSON object"),
        ("config.json", "[]", "expected one JSON object"),
        ("tokenizer.json", "", "tokenizer.json: not JSON"),
        ("chat_template.jinja", "{% for x in %}", "chat template, line 1"),
        ("generation_config.json", "{nope", "generation_config.json"),
        ("generation_config.json", r#"{"eos_token_id": "x"}"#, "eos_token_id: expected a token id"),
        (
            "generation_config.json",
            r#"{"eos_token_id": 3206, "temperature": "hot"}"#,
            "`temperature`: expected a number",
        ),
        ("generation_config.json", r#"{"eos_token_id": 3206, "top_k": -3}"#, "`top_k`: expected a whole number"),
        ("generation_config.json", r#"{"eos_token_id": 3206, "do_sample": 1}"#, "`do_sample`: expected true or false"),
    ] {
        let model = Altered::new(name, Some(content.as_bytes()));
        refused(&["generate", "-m", model.directory(), "hi"], &[wanted]);
    }
    let model = Altered::new("config.json", Some(b"{nope"));
    refused(&["inspect", model.directory()], &[model.directory(), "expected one JSON object"]);
    for name in ["tokenizer.json", "chat_template.jinja"] {
        let model = Altered::new(name, None);
        refused(&["generate", "-m", model.directory(), "hi"], &[&format!("it has no {name}"), model.directory()]);
    }
    for path in ["/absent", "/dev/null"] {
        refused(&["generate", "-m", path, "hi"], &["cannot list the directory"]);
        refused(&["verify", "--artifact", path], &["cannot read the artifact's directory"]);
    }
}

#[test]
fn a_quantization_block_that_is_no_object_is_named() {
    let mut config: serde_json::Value = serde_json::from_slice(&micro("config.json")).expect("JSON");
    for block in [serde_json::json!("w4a16"), serde_json::json!([1]), serde_json::json!(4)] {
        config["quantization_config"] = block;
        let model = Altered::new("config.json", Some(config.to_string().as_bytes()));
        let wanted = ["key `quantization_config`: expected an object"];
        refused(&["generate", "-m", model.directory(), "hi"], &wanted);
        refused(&["inspect", model.directory()], &wanted);
        let serve = glimmer(&["serve", model.directory()]);
        let error = String::from_utf8_lossy(&serve.stderr).into_owned();
        assert!(serve.status.code() == Some(1) && error.contains(wanted[0]), "{error}");
        let verify = glimmer(&["verify", model.directory()]);
        let told = String::from_utf8_lossy(&verify.stdout).into_owned();
        assert!(verify.status.code() == Some(1) && told.contains("quantization_config"), "{told}");
    }
}

#[test]
fn a_source_that_cannot_speak_is_quantized_with_a_warning() {
    for (content, wanted) in [(None, "there is no tokenizer.json"), (Some(&b"{nope"[..]), "tokenizer.json: not JSON")] {
        let model = Altered::new("tokenizer.json", content);
        let out = model.path.with_file_name("out");
        let out = out.to_str().expect("UTF-8");
        let output = glimmer(&["quantize", "--method", "rtn", "--source", model.directory(), "--out", out]);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{told}");
        assert!(told.contains("warning:") && told.contains(wanted) && told.contains(model.directory()), "{told}");
        // Calibration text cannot be read without it.
        let (calib, other) = (model.path.with_file_name("c.jsonl"), model.path.with_file_name("other"));
        fs::write(&calib, "{\"text\": \"What is 47 + 85?\"}\n").expect("written");
        let paths = [&calib, &other].map(|path| path.to_str().expect("UTF-8"));
        let error = refusal(&["quantize", "--source", model.directory(), "--calib", paths[0], "--out", paths[1]]);
        assert!(error.contains("error:") && error.contains("tokenizer.json"), "{error}");
        assert!(!other.exists());
    }
}

#[test]
fn weights_that_are_no_numbers_are_named_with_their_place() {
    let mut files = Vec::new();
    for i in 1..=3 {
        let name = format!("model-0000{i}-of-00003.safetensors");
        let mut bytes = micro(&name);
        let header = glimmer_checkpoint::header::Header::parse(&name, &bytes).expect("sound");
        let expert =
            |t: &&glimmer_checkpoint::header::HeaderEntry| t.name.ends_with("layers.1.mlp.experts.0.up_proj.weight");
        if let Some(tensor) = header.tensors.iter().find(expert) {
            let second = tensor.range.start + 2 * tensor.shape[1];
            bytes[second..second + 2].copy_from_slice(&[0xc0, 0x7f]);
            files.push((name, bytes));
        }
    }
    let [(name, bytes)] = &files[..] else { unreachable!("one shard holds the matrix") };
    let model = Altered::new(name, Some(bytes));
    let out = model.path.with_file_name("out");
    let arguments =
        ["quantize", "--method", "rtn", "--source", model.directory(), "--out", out.to_str().expect("UTF-8")];
    let place = "experts.0.up_proj.weight`, row 1, column 0";
    refused(&arguments, &[place, "found NaN or infinity", "get the shard that holds this tensor anew"]);
}

#[test]
fn without_generation_config_the_stop_ids_are_those_of_the_configuration() {
    let model = Altered::new("generation_config.json", None);
    let plain = ["generate", "--temperature", "0", "What is 47 + 85?"];
    let with = glimmer(&[&plain[..], &["-m", MICRO]].concat());
    let without = glimmer(&[&plain[..], &["-m", model.directory()]].concat());
    assert!(with.status.success() && without.status.success());
    assert_eq!(with.stdout, without.stdout);
}

#[test]
fn a_router_that_is_damaged_does_not_pass_for_an_answer() {
    let mut files = Vec::new();
    for i in 1..=3 {
        let name = format!("model-0000{i}-of-00003.safetensors");
        let mut bytes = micro(&name);
        let header = glimmer_checkpoint::header::Header::parse(&name, &bytes).expect("sound");
        if let Some(gate) = header.tensors.iter().find(|t| t.name.ends_with("layers.1.mlp.gate.weight")) {
            bytes[gate.range.start..gate.range.start + 2].copy_from_slice(&[0xc0, 0x7f]);
            files.push((name, bytes));
        }
    }
    let [(name, bytes)] = &files[..] else { unreachable!("one shard holds the router") };
    let model = Altered::new(name, Some(bytes));
    refused(&["generate", "-m", model.directory(), "What is 47 + 85?"], &["a logit is not a number"]);
}

#[test]
fn prompts_and_pictures_that_cannot_be_used_are_refused() {
    refused(&["generate", " "], &["the prompt is empty"]);
    refused(&["generate", &"3 ".repeat(8200)], &["the context holds 8192"]);
    let folder = tempfile::tempdir().expect("a directory");
    let file = |name: &str, content: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, content).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    };
    for content in [&b""[..], b"text", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a\xff\xff", b"BM"] {
        let picture = file("picture", content);
        let error = refusal(&["generate", "--image", &picture, "hi"]);
        assert_eq!(error.lines().count(), 1, "{error}");
        assert_eq!(error.matches("image: ").count(), 1, "{error}");
        assert!(error.contains(&picture), "{error}");
    }
    refused(&["generate", "--image", "/absent", "hi"], &["cannot read the picture /absent"]);
    for content in ["{}", "[1]", "nonsense", r#"[{"type": "function", "function": {}}]"#] {
        let tools = file("tools.json", content.as_bytes());
        refused(&["generate", "--tools", &tools, "hi"], &[&tools]);
    }
}

#[test]
fn a_conversation_survives_lines_that_are_no_text() {
    let mut chat = Command::new(env!("CARGO_BIN_EXE_glimmer"))
        .args(["chat", "--no-thinking"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let lines = b"\xff\xfe\n/image\n/image /absent\n/nonsense\nWhat is 47 + 85?\n";
    chat.stdin.take().expect("piped").write_all(lines).expect("written");
    let output = chat.wait_with_output().expect("it ends");
    let remarks = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{remarks}");
    for wanted in ["not UTF-8", "/image needs", "cannot read the picture /absent", "/nonsense: no such command"] {
        assert!(remarks.contains(wanted), "{wanted}: {remarks}");
    }
    assert!(String::from_utf8_lossy(&output.stdout).contains("132"));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_output_is_an_error_and_no_panic() {
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").expect("a device");
    let run = |arguments: &[&str], out: Stdio, err: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_glimmer"));
        command.args(arguments).stdin(Stdio::null()).stdout(out).stderr(err).output().expect("the program starts")
    };
    let output = run(&["inspect"], full().into(), Stdio::piped());
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write to standard output"));
    let output = run(&["inspect", "/absent"], Stdio::piped(), full().into());
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn models_are_named_alike_and_exit_codes_are_told() {
    let inspected = |arguments: &[&str]| {
        let output = glimmer(arguments);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!(inspected(&["inspect", MICRO]), inspected(&["inspect", "-m", MICRO]));
    for arguments in [&["verify", MICRO][..], &["verify", "--artifact", MICRO]] {
        assert_eq!(glimmer(arguments).status.code(), Some(1), "no artifact: {arguments:?}");
    }
    assert!(refusal(&["verify"]).contains("<ARTIFACT>"));
    refused(&["verify", MICRO, "--artifact", MICRO], &["cannot be used with"]);
    refused(&["eval", MICRO], &["a model directory is named with -m"]);
    assert!(inspected(&["--help"]).contains("Exit codes: 0 done; 1 the answer is no"));
}

#[test]
fn directories_in_use_are_left_alone() {
    let folder = tempfile::tempdir().expect("a directory");
    fs::write(folder.path().join("notes.txt"), "mine").expect("written");
    let out = folder.path().to_str().expect("UTF-8");
    refused(&["quantize", "--method", "rtn", "--out", out], &["is not empty (it holds `notes.txt`)"]);
    refused(&["quantize", "--method", "rtn", "--resume", "--out", out], &["is not empty (it holds `notes.txt`)"]);
    refused(&["synth", "--config", &format!("{MICRO}/config.json"), "--out", out], &["expected an empty directory"]);
    refused(&["demo", "--keep", out], &["the directory is not empty"]);
    let model = Altered::new("README.md", None);
    let inside = model.path.join("w4a16");
    let arguments = ["quantize", "--method", "rtn", "--source", model.directory(), "--out"];
    for out in [&inside, model.path.parent().expect("a folder")] {
        refused(&[&arguments[..], &[out.to_str().expect("UTF-8")]].concat(), &["would lie one inside the other"]);
    }
    assert!(!inside.exists());
    assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 1);
}
