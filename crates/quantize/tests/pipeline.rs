//! The pipeline on the tiny model: the artifact's contents, independence of how it was run, interruption and resumption.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::Path;

use glimmer_checkpoint::int4::dequantize_matrix;
use glimmer_checkpoint::manifest::Manifest;
use glimmer_checkpoint::writer::{ShardWriter, TensorHeader, write_index};
use glimmer_checkpoint::{Bytes, Checkpoint, DType, Inventory, TensorData};
use glimmer_quantize::gates::{VerifyOptions, verify};
use glimmer_quantize::report::Outcome;
use glimmer_quantize::{
    Budget, CalibrationSample, Error, Finished, ImageFeatures, Options, Progress, Recipe, Result, SaveStreams, quantize,
};
use glimmer_tensor::Cpu;
use tempfile::TempDir;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/goldens/tiny");

fn tiny() -> Checkpoint {
    Checkpoint::open(TINY).unwrap()
}

/// The tiny model in memory, with the bytes of some tensors changed.
fn altered(mut change: impl FnMut(&str, &mut [u8])) -> Checkpoint {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(TINY).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.ends_with(".safetensors") && !name.starts_with("model") {
            continue;
        }
        let mut bytes = std::fs::read(&path).unwrap();
        if name.ends_with(".safetensors") {
            for tensor in glimmer_checkpoint::header::Header::parse(&name, &bytes).unwrap().tensors {
                change(&tensor.name, &mut bytes[tensor.range]);
            }
        }
        files.push((name, Bytes::new(bytes)));
    }
    Checkpoint::from_files(files).unwrap()
}

/// Pseudo-random sequences, one of them with an image.
fn samples(checkpoint: &Checkpoint) -> Vec<CalibrationSample> {
    let config = checkpoint.config();
    let media = config.media.unwrap();
    let mut state = 7u32;
    let mut next = |bound: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % bound
    };
    let special = [media.image, media.video];
    let mut samples: Vec<CalibrationSample> = [40usize, 7, 90, 25]
        .map(|length| {
            let ids = (0..length).map(|_| next(config.text.vocab_size as u32));
            let ids = ids.map(|id| if special.contains(&id) { 1 } else { id }).collect();
            CalibrationSample { ids, images: Vec::new() }
        })
        .to_vec();
    samples[2].ids[10..14].fill(media.image);
    let values = (0..4 * config.text.hidden_size).map(|_| next(1000) as f32 / 500.0 - 1.0).collect();
    samples[2].images.push(ImageFeatures { values });
    samples
}

fn run(checkpoint: &Checkpoint, recipe: &Recipe, options: &Options) -> Result<Finished> {
    quantize(Cpu::new(2), checkpoint, &samples(checkpoint), recipe, options, &mut ())
}

/// All files below a directory.
fn contents(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut out = BTreeMap::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        assert!(path.is_file(), "{} is left over", path.display());
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        out.insert(name, std::fs::read(&path).unwrap());
    }
    out
}

fn assert_same(a: &Path, b: &Path) {
    let (a, b) = (contents(a), contents(b));
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (name, bytes) in &a {
        assert!(*bytes == b[name], "{name} differs");
    }
}

fn fresh() -> (TempDir, Options) {
    let folder = tempfile::tempdir().unwrap();
    let options = Options::new(folder.path().join("artifact"));
    (folder, options)
}

#[test]
fn the_artifact_is_what_its_configuration_says_and_all_else_is_untouched() {
    let source = tiny();
    let (_folder, options) = fresh();
    let done = run(&source, &Recipe::default(), &options).unwrap();
    let artifact = Checkpoint::open(&options.out).unwrap();
    let inventory = Inventory::bf16(source.config()).as_w4a16().unwrap();
    assert_eq!(inventory.compare(&artifact), Vec::new());
    assert_eq!(artifact.config().text, source.config().text);
    for spec in Inventory::bf16(source.config()).tensors() {
        let original = source.tensor(&spec.name).unwrap();
        if artifact.has(&spec.name) {
            assert_eq!(
                artifact.tensor(&spec.name).unwrap().bytes.as_slice(),
                original.bytes.as_slice(),
                "{}",
                spec.name
            );
        }
    }
    let text = |c: &Checkpoint| String::from_utf8(c.file("config.json").unwrap().as_slice().to_vec()).unwrap();
    let head = text(&source).trim_end().strip_suffix('}').unwrap().trim_end().to_owned();
    assert!(text(&artifact).starts_with(&head));
    let generation = "generation_config.json";
    assert_eq!(artifact.file(generation).unwrap().as_slice(), source.file(generation).unwrap().as_slice());

    let full = VerifyOptions { full: true, ..VerifyOptions::default() };
    let verdict = verify(&options.out, Some(Path::new(TINY)), &full).unwrap();
    assert!(verdict.passed, "{verdict}");

    let manifest = Manifest::read(&options.out).unwrap();
    assert_eq!(manifest.check_files(&options.out).unwrap(), Vec::new());
    let names: Vec<String> = contents(&options.out).into_keys().filter(|name| name != "manifest.json").collect();
    assert_eq!(manifest.files.keys().cloned().collect::<Vec<_>>(), names);

    let expected = source.config().text.quantized_matrices().count();
    assert_eq!(done.report.matrices().count(), expected);
    assert_eq!(done.report.tokens, 162);
    let mut better = 0;
    for (matrix, report) in source.config().text.quantized_matrices().map(|m| {
        let report = done.report.matrices().find(|r| r.name == m.base()).unwrap();
        (m, report)
    }) {
        let bytes = |name: &str| artifact.tensor(name).unwrap().bytes.as_slice().to_vec();
        let stored = dequantize_matrix(&bytes(&matrix.packed()), &bytes(&matrix.scale()), matrix.cols).unwrap();
        let original = source.tensor(&matrix.weight()).unwrap();
        let original = original.bytes.as_slice().chunks(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f64());
        let (mut error, mut energy) = (0.0, 0.0);
        for (q, w) in stored.iter().zip(original) {
            error += (q.to_f64() - w).powi(2);
            energy += w * w;
        }
        let relative = f64::sqrt(error / energy);
        assert!((relative - report.relative_error).abs() < 1e-5 * relative, "{}", matrix.base());
        assert!((0.05..0.35).contains(&relative), "{}: {relative}", matrix.base());
        assert!(report.tokens > 0 && report.outcome == Outcome::Gptq && report.at_rails < 0.1);
        // The output error weighs what inputs do; it is below the square of the weights' error when GPTQ has worked.
        better += usize::from(report.output_error_own.unwrap() < relative * relative);
    }
    assert!(better > expected * 9 / 10, "{better} of {expected}");
    assert!(done.report.page().contains("| 1 | gate |"));
}

#[test]
fn bytes_do_not_depend_on_threads_budget_or_saved_streams() {
    let source = tiny();
    let (_a, first) = fresh();
    run(&source, &Recipe::default(), &first).unwrap();
    let least = Budget::Bytes(0);
    for (threads, budget, save_streams) in [
        (1, Budget::Bytes(1 << 30), SaveStreams::Never),
        (3, least, SaveStreams::Always),
        (4, Budget::Automatic { free_bytes: None }, SaveStreams::Never),
    ] {
        let (_b, other) = fresh();
        let other = Options { threads, budget, save_streams, ..other };
        let done = quantize(Cpu::new(threads), &source, &samples(&source), &Recipe::default(), &other, &mut ());
        done.unwrap();
        assert_same(&first.out, &other.out);
    }
}

/// Stops at the n-th question.
struct Fuse(usize);

impl Progress for Fuse {
    fn proceed(&mut self) -> bool {
        self.0 = self.0.saturating_sub(1);
        self.0 > 0
    }
}

/// Counts the questions.
struct Counter(usize);

impl Progress for Counter {
    fn proceed(&mut self) -> bool {
        self.0 += 1;
        true
    }
}

#[test]
fn an_interrupted_run_never_looks_finished_and_resumes_to_the_same_bytes() {
    let source = tiny();
    let samples = samples(&source);
    let (_a, whole) = fresh();
    let mut counter = Counter(0);
    quantize(Cpu::new(2), &source, &samples, &Recipe::default(), &whole, &mut counter).unwrap();
    let steps = counter.0;
    assert!(steps > 40, "{steps}");
    let mut at = 1;
    let mut modes = [SaveStreams::Always, SaveStreams::Never].into_iter().cycle();
    while at <= steps {
        let (_b, options) = fresh();
        let options = Options { save_streams: modes.next().unwrap(), ..options };
        let go = |options: &Options, fuse: usize| {
            quantize(Cpu::new(2), &source, &samples, &Recipe::default(), options, &mut Fuse(fuse))
        };
        assert!(matches!(go(&options, at), Err(Error::Interrupted)), "step {at}");
        if at < steps {
            assert!(Checkpoint::open(&options.out).is_err(), "step {at}: config.json came too early");
        }
        let judged = verify(&options.out, None, &VerifyOptions::default()).unwrap_err().to_string();
        assert!(judged.contains("not finished") && judged.contains("--resume"), "step {at}: {judged}");
        let error = go(&options, 1 << 30).unwrap_err();
        assert!(matches!(error, Error::Unfinished { .. }), "step {at}: a new run does not take over: {error}");
        assert!(error.to_string().contains("--resume"), "{error}");
        let options = Options { resume: true, ..options };
        // Interrupted once more, a little later.
        match go(&options, 5) {
            Err(Error::Interrupted) | Ok(_) => {}
            Err(other) => panic!("step {at}: {other}"),
        }
        let resumed = go(&options, 1 << 30).unwrap();
        assert_eq!(resumed.report.matrices().count(), source.config().text.quantized_matrices().count());
        assert_same(&whole.out, &options.out);
        // Nothing is left to do.
        go(&options, 1 << 30).unwrap();
        assert_same(&whole.out, &options.out);
        at += steps / 9 + 1;
    }
}

/// Starts a second run in the directory of one that is at work.
struct Intruder<'a> {
    source: &'a Checkpoint,
    options: Options,
    refused: usize,
}

impl Progress for Intruder<'_> {
    fn phase(&mut self, _text: &str) {
        for resume in [true, false] {
            let intrusion = run(self.source, &Recipe::default(), &Options { resume, ..self.options.clone() });
            assert!(matches!(&intrusion, Err(Error::Busy { path }) if *path == self.options.out), "{intrusion:?}");
        }
        self.refused += 1;
    }
}

#[test]
fn two_runs_do_not_work_in_one_directory() {
    let source = tiny();
    let (_a, options) = fresh();
    let resuming = Options { resume: true, ..options.clone() };
    let mut intruder = Intruder { source: &source, options: resuming.clone(), refused: 0 };
    quantize(Cpu::new(1), &source, &samples(&source), &Recipe::default(), &options, &mut intruder).unwrap();
    assert!(intruder.refused > 5, "{}", intruder.refused);
    run(&source, &Recipe::default(), &resuming).unwrap();
}

#[test]
fn damaged_saved_streams_are_made_again() {
    let source = tiny();
    let samples = samples(&source);
    let (_a, whole) = fresh();
    let mut counter = Counter(0);
    quantize(Cpu::new(2), &source, &samples, &Recipe::default(), &whole, &mut counter).unwrap();
    let damages: [fn(&mut Vec<u8>); 3] = [
        |bytes| bytes.truncate(bytes.len() / 2),
        |bytes| bytes.resize(bytes.len() + (1 << 16), 0),
        |bytes| bytes.iter_mut().for_each(|b| *b ^= 0x11),
    ];
    for damage in damages {
        let (_b, options) = fresh();
        let options = Options { save_streams: SaveStreams::Always, ..options };
        let go = |options: &Options, fuse: usize| {
            quantize(Cpu::new(2), &source, &samples, &Recipe::default(), options, &mut Fuse(fuse))
        };
        assert!(matches!(go(&options, counter.0 * 2 / 3), Err(Error::Interrupted)));
        let saved: Vec<_> = std::fs::read_dir(options.out.join(".quantize"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|e| e == "f32"))
            .collect();
        assert_eq!(saved.len(), 1, "{saved:?}");
        let mut bytes = std::fs::read(&saved[0]).unwrap();
        damage(&mut bytes);
        std::fs::write(&saved[0], bytes).unwrap();
        go(&Options { resume: true, ..options.clone() }, 1 << 30).unwrap();
        assert_same(&whole.out, &options.out);
    }
}

#[test]
fn a_damaged_or_torn_shard_is_made_again() {
    let source = tiny();
    let (_a, whole) = fresh();
    run(&source, &Recipe::default(), &whole).unwrap();
    let (_b, options) = fresh();
    let stopped = quantize(Cpu::new(2), &source, &samples(&source), &Recipe::default(), &options, &mut Fuse(40));
    assert!(matches!(stopped, Err(Error::Interrupted)));
    let mut shards: Vec<_> = contents_with_folder(&options.out);
    shards.retain(|name| name.ends_with(".safetensors"));
    assert!(shards.len() >= 2, "{shards:?}");
    for name in &shards {
        let path = options.out.join(name);
        let mut bytes = std::fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }
    std::fs::write(options.out.join("model-00099-of-00099.safetensors.tmp"), b"torn").unwrap();
    run(&source, &Recipe::default(), &Options { resume: true, ..options.clone() }).unwrap();
    assert_same(&whole.out, &options.out);
}

#[test]
fn a_source_that_changes_between_interruption_and_resumption_is_refused() {
    let told = after_a_change(false);
    assert!(told.contains("`model-00002-of-00005.safetensors` was written to after the run began"), "{told}");
    // A tool that gives the file its old time back: the system's own time of the change cannot be set.
    if cfg!(unix) {
        let told = after_a_change(true);
        assert!(told.contains("`model-00002-of-00005.safetensors` was changed, replaced or moved"), "{told}");
    }
}

/// Changes a byte of the source of an interrupted run and goes on: what is said. The time of writing may be set back.
fn after_a_change(set_back: bool) -> String {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("source");
    std::fs::create_dir(&copy).unwrap();
    for name in contents_with_folder(Path::new(TINY)) {
        if !name.ends_with(".safetensors") || name.starts_with("model") {
            std::fs::copy(Path::new(TINY).join(&name), copy.join(&name)).unwrap();
        }
    }
    let (_a, options) = fresh();
    let source = Checkpoint::open(&copy).unwrap();
    let stopped = quantize(Cpu::new(1), &source, &samples(&source), &Recipe::default(), &options, &mut Fuse(9));
    assert!(matches!(stopped, Err(Error::Interrupted)));
    drop(source);
    // The first byte of a large tensor: no part of the sample, and the header stays as it is.
    let path = copy.join("model-00002-of-00005.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let tensors = glimmer_checkpoint::header::Header::parse("shard", &bytes).unwrap().tensors;
    let large = tensors.iter().map(|t| t.range.clone()).find(|range| range.len() > 1000).unwrap();
    bytes[large.start] ^= 1;
    let written = path.metadata().unwrap().modified().unwrap();
    std::fs::write(&path, bytes).unwrap();
    if set_back {
        std::fs::File::options().write(true).open(&path).unwrap().set_modified(written).unwrap();
    }
    let source = Checkpoint::open(&copy).unwrap();
    run(&source, &Recipe::default(), &Options { resume: true, ..options }).unwrap_err().to_string()
}

#[test]
fn an_artifact_inside_its_source_or_around_it_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("models/source");
    std::fs::create_dir_all(&copy).unwrap();
    for name in contents_with_folder(Path::new(TINY)) {
        if !name.ends_with(".safetensors") || name.starts_with("model") {
            std::fs::copy(Path::new(TINY).join(&name), copy.join(&name)).unwrap();
        }
    }
    let before = contents_with_folder(&copy);
    let source = Checkpoint::open(&copy).unwrap();
    let roundabout = copy.join("../source/inside");
    for out in [copy.join("inside/deep"), copy.clone(), folder.path().join("models"), roundabout] {
        let refused = run(&source, &Recipe::default(), &Options::new(&out)).unwrap_err();
        let told = refused.to_string();
        assert!(matches!(refused, Error::Nested { .. }) && told.contains("outside"), "{told}");
        let told_both = [&copy, &out].iter().all(|path| told.contains(&*path.display().to_string()));
        assert!(told_both, "{told}");
    }
    assert_eq!(contents_with_folder(&copy).len(), before.len(), "nothing was made there");
}

fn contents_with_folder(directory: &Path) -> Vec<String> {
    std::fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn another_runs_directory_is_refused_with_what_differs() {
    let source = tiny();
    let (_a, options) = fresh();
    let stopped = quantize(Cpu::new(1), &source, &samples(&source), &Recipe::default(), &options, &mut Fuse(9));
    assert!(matches!(stopped, Err(Error::Interrupted)));
    let options = Options { resume: true, ..options };
    let other_recipe = Recipe { damp: 0.02, ..Recipe::default() };
    let refused = run(&source, &other_recipe, &options).unwrap_err();
    let told = "another recipe: damp was 0.01 and is 0.02 now; ";
    assert!(refused.to_string().contains(told), "only what differs: {refused}");
    let mut other_samples = samples(&source);
    other_samples[0].ids[0] ^= 1;
    let refused = quantize(Cpu::new(1), &source, &other_samples, &Recipe::default(), &options, &mut ());
    assert!(matches!(refused, Err(Error::OtherRun { what: "calibration", .. })));
    let other_source = Checkpoint::from_files(
        ["config.json", "model.safetensors.index.json"]
            .into_iter()
            .map(|name| (name, std::fs::read_to_string(format!("{TINY}/{name}")).unwrap()))
            .map(|(name, text)| (name.to_owned(), Bytes::new(text.replace("  \"", " \"").into_bytes())))
            .chain((1..=5).map(|i| format!("model-0000{i}-of-00005.safetensors")).map(|name| {
                let bytes = std::fs::read(format!("{TINY}/{name}")).unwrap();
                (name, Bytes::new(bytes))
            }))
            .collect(),
    );
    let refused = run(&other_source.unwrap(), &Recipe::default(), &options);
    assert!(matches!(refused, Err(Error::OtherRun { what: "source", .. })));
    // The same names, shapes, index and configuration, other weights: a model that was trained further.
    let trained = altered(|_, bytes| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
    });
    let refused = run(&trained, &Recipe::default(), &options);
    assert!(matches!(refused, Err(Error::OtherRun { what: "source", .. })));

    let (folder, options) = fresh();
    let strange = Options { out: folder.path().to_owned(), ..options };
    std::fs::write(folder.path().join("notes.txt"), b"mine").unwrap();
    #[cfg(unix)]
    {
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        let refused = run(&source, &Recipe::default(), &Options { out: link, ..strange });
        assert!(refused.unwrap_err().to_string().contains("it leads nowhere"));
    }
    for resume in [false, true] {
        let refused = run(&source, &Recipe::default(), &Options { resume, ..strange.clone() });
        assert!(matches!(refused, Err(Error::NotEmpty { .. })));
    }
    assert_eq!(std::fs::read(folder.path().join("notes.txt")).unwrap(), b"mine");
}

#[test]
fn an_expert_without_tokens_is_rounded_to_nearest_and_listed() {
    // Expert 3 of every layer is never chosen.
    let source = altered(|name, bytes| {
        if name.ends_with("mlp.gate.e_score_correction_bias") {
            bytes[12..16].copy_from_slice(&(-100.0f32).to_le_bytes());
        }
    });
    let (_a, options) = fresh();
    let done = run(&source, &Recipe::default(), &options).unwrap();
    let layers = done.report.layers.len();
    let fallbacks: Vec<_> = done.report.fallbacks().collect();
    assert_eq!(fallbacks.len(), 3 * layers);
    for report in fallbacks {
        assert!(report.name.contains(".experts.3.") && report.tokens == 0);
        assert!(report.outcome == Outcome::RtnNoTokens && (0.05..0.2).contains(&report.relative_error));
    }
    assert!(done.report.page().contains("Rounded to nearest"));
    // The published tool's way of calibrating reaches it.
    let (_b, options) = fresh();
    let done = run(&source, &Recipe::parity(), &options).unwrap();
    assert_eq!(done.report.fallbacks().count(), 0);
    assert!(done.report.matrices().all(|m| m.tokens == 162));
}

#[test]
fn values_that_are_not_finite_stop_the_run_with_the_tensor_name() {
    let bad = "model.language_model.layers.2.mlp.experts.1.up_proj.weight";
    let source = altered(|name, bytes| {
        if name == bad {
            bytes[258..260].copy_from_slice(&half::bf16::NAN.to_le_bytes());
        }
    });
    for recipe in [Recipe::default(), Recipe::rtn()] {
        let (_a, options) = fresh();
        let message = run(&source, &recipe, &options).unwrap_err().to_string();
        let expected = if recipe == Recipe::rtn() { "row 1, column 1" } else { "" };
        assert!(message.contains(bad) && message.contains(expected), "{message}");
    }
    let source = altered(|name, bytes| {
        if name.ends_with("layers.1.post_attention_layernorm.weight") {
            bytes[0..2].copy_from_slice(&half::bf16::INFINITY.to_le_bytes());
        }
    });
    let (_a, options) = fresh();
    let message = run(&source, &Recipe::default(), &options).unwrap_err().to_string();
    assert!(message.contains("layer 1: inputs of the experts") && message.contains("column 0"), "{message}");
}

#[test]
fn bad_calibration_is_refused_before_anything_is_written() {
    let source = tiny();
    let hidden = source.config().text.hidden_size;
    let image = source.config().media.unwrap().image;
    let sample = |ids: Vec<u32>, images: usize| CalibrationSample {
        ids,
        images: vec![ImageFeatures { values: vec![0.0; hidden] }; images],
    };
    for (samples, needle) in [
        (vec![], "needs calibration samples"),
        (vec![sample(vec![1], 0), sample(vec![], 0)], "calibration sample 1: it has no tokens"),
        (vec![sample(vec![1, 100_000], 0)], "token 100000 does not exist"),
        (vec![sample(vec![1; 5000], 0)], "5000 tokens"),
        (vec![sample(vec![1, image], 0)], "1 image placeholder tokens, but features for 0"),
        (vec![sample(vec![1, image], 2)], "features for 2"),
    ] {
        let (_a, options) = fresh();
        let error = quantize(Cpu::new(1), &source, &samples, &Recipe::default(), &options, &mut ()).unwrap_err();
        assert!(error.to_string().contains(needle), "{error}");
        assert!(!options.out.exists());
    }
    let (_a, options) = fresh();
    for recipe in [Recipe { damp: f64::NAN, ..Recipe::default() }, Recipe { shrink: Some(-1.0), ..Recipe::default() }] {
        assert!(matches!(run(&source, &recipe, &options), Err(Error::Setting { .. })));
    }
    assert!(!options.out.exists());
}

#[test]
fn rounding_to_nearest_needs_no_calibration_and_an_artifact_is_no_source() {
    let source = tiny();
    let (_a, options) = fresh();
    let done = quantize(Cpu::new(1), &source, &[], &Recipe::rtn(), &options, &mut ()).unwrap();
    assert!(done.report.matrices().all(|m| m.outcome == Outcome::Rtn && m.relative_error < 0.12));
    let artifact = Checkpoint::open(&options.out).unwrap();
    let block = artifact.config().quantization.clone().unwrap();
    assert!(block["config_groups"]["group_0"]["weights"]["actorder"].is_null());
    let (_b, options) = fresh();
    let refused = quantize(Cpu::new(1), &artifact, &[], &Recipe::rtn(), &options, &mut ());
    assert!(matches!(refused, Err(Error::AlreadyQuantized { .. })));
    assert!(!options.out.exists());
}

#[test]
fn what_is_copied_although_damaged_or_unknown_is_named() {
    let (damaged, extra) =
        ("model.language_model.layers.1.self_attn.o_proj.weight", "model.language_model.extra.weight");
    let nan = half::bf16::NAN.to_le_bytes();
    let source = altered(|name, bytes| {
        if name == damaged {
            bytes[10..12].copy_from_slice(&nan);
            bytes[20..22].copy_from_slice(&half::bf16::INFINITY.to_le_bytes());
        }
    });
    // Rounding to nearest needs no forward pass, which would end at the NaN.
    let (_folder, options) = fresh();
    let report = quantize(Cpu::new(1), &source, &[], &Recipe::rtn(), &options, &mut ()).unwrap().report;
    assert_eq!(report.unexpected, Vec::<String>::new());
    let [found] = report.non_finite.as_slice() else { panic!("{:?}", report.non_finite) };
    assert_eq!((found.name.as_str(), found.count, found.first), (damaged, 2, 5));
    assert!(report.page().contains(damaged));
    let copy = Checkpoint::open(&options.out).unwrap();
    let bytes = |c: &Checkpoint| c.tensor(damaged).unwrap().bytes.as_slice().to_vec();
    assert!(bytes(&copy) == bytes(&source), "byte for byte all the same");

    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("source");
    std::fs::create_dir(&directory).unwrap();
    let tiny = tiny();
    let mut tensors: Vec<TensorData> = tiny.names().map(|name| tiny.tensor(name).unwrap()).collect();
    let odd = [1, 2, 3, 4, 5, 6];
    let (name, shape) = (extra.to_owned(), vec![3, 1]);
    tensors.push(TensorData { name, dtype: DType::Bf16, shape, bytes: Bytes::new(odd.to_vec()) });
    let headers = tensors.iter().map(TensorHeader::from).collect();
    let mut writer = ShardWriter::create(&directory, "model-00001-of-00001.safetensors", headers).unwrap();
    tensors.iter().for_each(|t| writer.write_tensor(t).unwrap());
    write_index(&directory, &[writer.finish().unwrap()]).unwrap();
    std::fs::write(directory.join("config.json"), tiny.file("config.json").unwrap().as_slice()).unwrap();
    let source = Checkpoint::open(&directory).unwrap();
    let options = Options::new(folder.path().join("artifact"));
    let report = quantize(Cpu::new(1), &source, &[], &Recipe::rtn(), &options, &mut ()).unwrap().report;
    assert_eq!((report.unexpected.as_slice(), report.non_finite.len()), (&[extra.to_owned()][..], 0));
    assert!(report.page().contains(extra));
    assert_eq!(Checkpoint::open(&options.out).unwrap().tensor(extra).unwrap().bytes.as_slice(), odd);
}
