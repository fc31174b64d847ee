//! The micro model end to end: goldens, the CPU backend, drafts, a picture, INT4 experts, batches, chunks.

use std::{panic::catch_unwind, time::Instant};

use glimmer_checkpoint::{Bytes, Checkpoint, Config, DType, TensorData};
use glimmer_cuda::Cuda;
use glimmer_model::{
    HiddenSource, Limits, Model, Options,
    vision::{DecodeLimits, Processors, RgbImage, VisionTower},
    weights::Source,
};
use glimmer_tensor::{Backend, Cpu, Step};

use crate::harness::{Goldens, Recorder, Sequence, argmax, place_features, repository, sets};

/// Largest difference from a golden, as a part of its largest value: activations of products carry 16 to 17 bits.
const BOUND: f32 = 1e-4;

pub(crate) fn logits<B: Backend>(model: &Model<B>, index: usize) -> Vec<f32> {
    let mut values = vec![0.0; model.config().vocab_size];
    model.logits(index, &mut values).unwrap();
    values
}

pub(crate) fn draft_logits<B: Backend>(model: &Model<B>, index: usize) -> Vec<f32> {
    let mut values = vec![0.0; model.config().vocab_size];
    model.draft_logits(index, &mut values).unwrap();
    values
}

/// As [`BOUND`] where activations carry 11 bits: with INT4 experts, and in products of 512 rows and more by the library.
const BOUND_INT4: f32 = 1e-3;

/// The largest error seen, where, and what is allowed.
struct Worst(f32, String, f32);

impl Default for Worst {
    fn default() -> Self {
        Self(0.0, String::new(), BOUND)
    }
}

impl Worst {
    fn close(&mut self, name: &str, ours: &[f32], golden: &[f32]) {
        assert!(ours.len() >= golden.len(), "{name}: {} values against {}", ours.len(), golden.len());
        let ours = &ours[ours.len() - golden.len()..];
        let top = golden.iter().fold(1.0, |m: f32, g| m.max(g.abs()));
        for (i, (a, b)) in ours.iter().zip(golden).enumerate() {
            let error = (a - b).abs() / top;
            assert!(error <= self.2, "{name}: {a} against {b} at {i}: {error:.2e} of {top}");
            if error > self.0 {
                (self.0, self.1) = (error, name.to_owned());
            }
        }
    }
}

fn prompt<B: Backend>(backend: B, name: &str, bound: f32) -> Worst {
    let mut worst = Worst(0.0, String::new(), bound);
    let checkpoint = crate::harness::micro();
    let text = &checkpoint.config().text;
    let mut goldens = Goldens::open(&format!("data/goldens/micro/{name}.safetensors"));
    let ids = goldens.tokens("input_ids");
    let length = ids.len();
    let limits = Limits::for_sequences(2, length + 80, length, 1);
    let mut model = Model::load(backend, &checkpoint, limits, Options::default()).unwrap();
    let mut sequence = Sequence::new(&limits, 1);
    let mut step = sequence.step(&ids, 2);
    if goldens.has("vision.tokens") {
        let features = goldens.floats("vision.tokens");
        place_features(&mut step, checkpoint.config().media.unwrap().image);
        for (i, row) in features.values.chunks(text.hidden_size).enumerate() {
            model.set_feature(i, row).unwrap();
        }
    }
    let mut seen = Recorder::new(&checkpoint);
    model.forward(&step, &mut seen).unwrap();
    for layer in 0..text.num_hidden_layers {
        let prefix = format!("prefill.layer{layer}");
        let golden = goldens.floats(&format!("{prefix}.attn_out"));
        worst.close(&format!("{prefix}.attn_out"), seen.get(&format!("layer{layer}.attn_out")), &golden.values);
        let golden = goldens.floats(&format!("{prefix}.streams"));
        worst.close(&format!("{prefix}.streams"), seen.get(&format!("layer{}.streams_in", layer + 1)), &golden.values);
        if goldens.has(&format!("{prefix}.index")) {
            let golden = sets(&goldens.integers(&format!("{prefix}.index")), text.selection_width());
            let ours = &seen.selections[&layer];
            assert_eq!(ours[ours.len() - golden.len()..], golden, "{prefix}.index");
        }
        if goldens.has(&format!("{prefix}.experts")) {
            let top = text.moe.experts_per_token;
            let golden = sets(&goldens.integers(&format!("{prefix}.experts")), top);
            let ours = &seen.routings[&layer];
            for (ours, golden) in ours[ours.len() - golden.len()..].iter().zip(golden) {
                assert_eq!(ours.iter().map(|c| c.0).collect::<Vec<_>>(), golden, "{prefix}.experts");
            }
        }
    }
    for (ordinal, layer) in text.kda_layers().enumerate() {
        let name = format!("prefill.layer{layer}.recurrent_state");
        if goldens.has(&name) {
            worst.close(&name, &model.state(ordinal, 1).unwrap(), &goldens.floats(&name).values);
        }
    }
    let golden = goldens.floats("prefill.logits");
    let last: Vec<f32> = (2 - golden.rows()..2).flat_map(|i| logits(&model, i)).collect();
    worst.close("logits", &last, &golden.values);

    let tokens = goldens.tokens("decode.tokens");
    let drafts = goldens.tokens("mtp.drafts");
    let golden_logits = goldens.floats("mtp.logits");
    let vocab = text.vocab_size;
    let shifted: Vec<u32> = ids[1..].iter().copied().chain([tokens[0]]).collect();
    model.draft(&sequence.draft(0, &shifted, HiddenSource::Trunk, 0, 1), &mut ()).unwrap();
    let first = draft_logits(&model, 0);
    worst.close("mtp.logits 0", &first, &golden_logits.values[..vocab]);
    assert_eq!(argmax(&first), drafts[0]);
    model.draft(&sequence.draft(length, &drafts[..1], HiddenSource::Draft, length - 1, 1), &mut ()).unwrap();
    let second = draft_logits(&model, 0);
    worst.close("mtp.second_logits", &second, &goldens.floats("mtp.second_logits").values);
    assert_eq!(argmax(&second), drafts[1]);

    let golden_steps = goldens.floats("decode.logits");
    let mut current = logits(&model, 1);
    for (i, &token) in tokens.iter().enumerate() {
        assert_eq!(argmax(&current), token, "greedy token {i}");
        model.forward(&sequence.step(&[token], 1), &mut ()).unwrap();
        current = logits(&model, 0);
        if i < golden_steps.rows() {
            worst.close(&format!("decode.logits {i}"), &current, &golden_steps.values[i * vocab..(i + 1) * vocab]);
        }
    }
    worst
}

fn picture(backend: Cuda) -> Worst {
    let mut worst = Worst::default();
    let checkpoint = crate::harness::micro();
    let mut goldens = Goldens::open("data/goldens/micro/image_direct.safetensors");
    let (ids, answer) = (goldens.tokens("input_ids"), goldens.tokens("decode.tokens"));
    let limits = Limits { max_logits: 2, ..Limits::for_sequences(1, 128, ids.len(), 0) };
    let mut model = Model::load(backend, &checkpoint, limits, Options::default()).unwrap();
    let file = |name: &str| checkpoint.file(name).map(|bytes| bytes.as_slice().to_vec());
    let vision = checkpoint.config().vision.clone().unwrap();
    let (nested, flat) = (file("processor_config.json"), file("preprocessor_config.json"));
    let settings = Processors::from_files(&vision, nested.as_deref(), flat.as_deref()).unwrap();
    let png = std::fs::read(repository("data/goldens/micro/image_direct.png")).unwrap();
    let picture = RgbImage::decode(&png, DecodeLimits::default()).unwrap();
    let mut tower = VisionTower::load(model.backend(), &checkpoint).unwrap().unwrap();
    let features = tower.forward(model.backend_mut(), &settings.image.image(&picture)).unwrap();
    worst.close("vision.tokens", &features, &goldens.floats("vision.tokens").values);
    for (i, row) in features.chunks(checkpoint.config().text.hidden_size).enumerate() {
        model.set_feature(i, row).unwrap();
    }
    let mut sequence = Sequence::new(&limits, 0);
    let mut step = sequence.step(&ids, 2);
    place_features(&mut step, checkpoint.config().media.unwrap().image);
    model.forward(&step, &mut ()).unwrap();
    let golden = goldens.floats("prefill.logits");
    let last: Vec<f32> = (2 - golden.rows()..2).flat_map(|i| logits(&model, i)).collect();
    worst.close("logits", &last, &golden.values);
    let mut current = logits(&model, 1);
    for (i, &token) in answer.iter().enumerate() {
        assert_eq!(argmax(&current), token, "greedy token {i}");
        model.forward(&sequence.step(&[token], 1), &mut ()).unwrap();
        current = logits(&model, 0);
    }
    worst
}

/// The checkpoint with its routed experts rounded to INT4.
pub(crate) struct Rounded(pub(crate) Checkpoint);

impl Rounded {
    fn experts(&self, name: &str) -> Option<String> {
        let layer = format!("layers.{}.", self.0.config().text.num_hidden_layers);
        let base = name.strip_suffix("_packed").or_else(|| name.strip_suffix("_scale"))?;
        (base.contains(".mlp.experts.") && !base.contains(&layer) && self.0.has(base)).then(|| base.to_owned())
    }
}

impl Source for Rounded {
    fn config(&self) -> &Config {
        self.0.config()
    }

    fn has(&self, name: &str) -> bool {
        self.experts(name).is_some() || self.0.has(name)
    }

    fn tensor(&self, name: &str) -> glimmer_model::Result<TensorData> {
        let Some(base) = self.experts(name) else { return Ok(self.0.tensor(name)?) };
        let whole = self.0.tensor(&base)?;
        let (out, columns) = (whole.shape[0], whole.shape[1]);
        let value = |b: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
        let values: Vec<f32> = whole.bytes.as_slice().as_chunks::<2>().0.iter().map(value).collect();
        let scales: Vec<f32> = values
            .chunks_exact(128)
            .map(|g| g.iter().fold(1e-6f32, |m, v| m.max(v.abs())) / 7.0)
            .map(|s| f32::from_bits(s.to_bits() & 0xffff_0000))
            .collect();
        let (dtype, shape, bytes) = if name.ends_with("_scale") {
            let bytes = scales.iter().flat_map(|s| s.to_bits().to_le_bytes()[2..].to_vec()).collect();
            (DType::Bf16, vec![out, columns / 128], bytes)
        } else {
            let code = |i: usize| ((values[i] / scales[i / 128]).round().clamp(-8.0, 7.0) + 8.0) as u8;
            let bytes: Vec<u8> = (0..values.len() / 2).map(|i| code(2 * i) | code(2 * i + 1) << 4).collect();
            (DType::I32, vec![out, columns / 8], bytes)
        };
        Ok(TensorData { name: name.to_owned(), dtype, shape, bytes: Bytes::new(bytes) })
    }
}

/// Logits of a prompt's last rows and of greedy steps.
fn greedy<B: Backend>(backend: B, source: &dyn Source, ids: &[u32], count: usize) -> (Vec<u32>, Vec<Vec<f32>>) {
    let limits = Limits::for_sequences(1, ids.len() + count + 1, ids.len(), 0);
    let mut model = Model::load(backend, source, limits, Options::default()).unwrap();
    let mut sequence = Sequence::new(&limits, 0);
    model.forward(&sequence.step(ids, 1), &mut ()).unwrap();
    let (mut tokens, mut all) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let current = logits(&model, 0);
        tokens.push(argmax(&current));
        all.push(current);
        model.forward(&sequence.step(&tokens[tokens.len() - 1..], 1), &mut ()).unwrap();
    }
    (tokens, all)
}

fn rounded(backend: Cuda) -> Worst {
    let mut worst = Worst(0.0, String::new(), BOUND_INT4);
    let source = Rounded(crate::harness::micro());
    let ids = Goldens::open("data/goldens/micro/recall_400.safetensors").tokens("input_ids");
    let (tokens, all) = greedy(backend, &source, &ids, 64);
    let (expected, expected_all) = greedy(Cpu::new(8), &source, &ids, 64);
    assert_eq!(tokens, expected);
    for (i, (a, b)) in all.iter().zip(&expected_all).enumerate() {
        worst.close(&format!("logits {i}"), a, b);
    }
    worst
}

const TOKENS: usize = 320;

fn limits() -> Limits {
    Limits { max_logits: 280, ..Limits::for_sequences(4, TOKENS, 280, 3) }
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn rows_of(model: &Model<Cuda>, rows: std::ops::Range<usize>) -> Vec<Vec<u32>> {
    rows.map(|row| bits(&logits(model, row))).collect()
}

/// Chunks, single rows, drafts with folding and several sequences in a step against one shot, bit for bit.
fn invariance(backend: Cuda) -> Worst {
    let source = Rounded(crate::harness::micro());
    let mut goldens = Goldens::open("data/goldens/micro/recall_400.safetensors");
    let mut tokens = goldens.tokens("input_ids");
    tokens.drain(..tokens.len() - 200);
    tokens.extend(goldens.tokens("decode.tokens"));
    tokens.truncate(260);
    let mut model = Model::load(backend, &source, limits(), Options::default()).unwrap();
    let state = |model: &Model<Cuda>, slot| -> Vec<Vec<u32>> {
        (0..model.shape().kda_layers).map(|layer| bits(&model.state(layer, slot).unwrap())).collect()
    };
    let mut sequence = Sequence::new(&limits(), 0);
    model.forward(&sequence.step(&tokens, tokens.len()), &mut ()).unwrap();
    let whole = (rows_of(&model, 0..tokens.len()), state(&model, 0));

    let singles = [&[200][..], &[1; 60]].concat();
    for sizes in [&[1, 2, 3][..], &[8, 56, 64], &[61, 1, 1, 1, 1], &[100, 100], &[17, 9, 33], &singles] {
        let mut sequence = Sequence::new(&limits(), 1);
        let (mut all, mut rest) = (Vec::new(), &tokens[..]);
        for &size in sizes.iter().chain([&usize::MAX]) {
            let (chunk, after) = rest.split_at(size.min(rest.len()));
            rest = after;
            if !chunk.is_empty() {
                model.forward(&sequence.step(chunk, chunk.len()), &mut ()).unwrap();
                all.extend(rows_of(&model, 0..chunk.len()));
            }
        }
        assert!(all == whole.0, "chunks {sizes:?}: logits");
        assert!(state(&model, 1) == whole.1, "chunks {sizes:?}: states");
    }

    // Drafts: three rows a step, of which one to three are accepted in turn; two more sequences prefill and decode beside.
    let mut main = Sequence::new(&limits(), 2);
    model.forward(&main.step(&tokens[..200], 1), &mut ()).unwrap();
    let mut other = Sequence::new(&limits(), 3);
    let mut third = Sequence::new(&limits(), 0);
    let mut accepted = 1;
    while main.position + 3 <= tokens.len() {
        let mut step = Step::default();
        let at = main.position;
        if other.position < 150 {
            other.add(&mut step, other.position, &tokens[other.position..other.position + 9], 9, 0);
            other.position += 9;
        }
        let first = step.rows();
        main.add(&mut step, at, &tokens[at..at + 3], 1, 3);
        third.add(&mut step, third.position, &tokens[third.position..third.position + 1], 1, 0);
        third.position += 1;
        model.forward(&step, &mut ()).unwrap();
        assert!(first + 3 <= step.rows());
        assert!(rows_of(&model, 0..accepted) == whole.0[at..at + accepted], "drafts at {at}: logits");
        main.position += accepted;
        main.fold = accepted - 1;
        accepted = accepted % 3 + 1;
    }
    Worst::default()
}

fn speed(backend: Cuda) -> Worst {
    let source = Rounded(crate::harness::micro());
    let ids = Goldens::open("data/goldens/micro/recall_1000.safetensors").tokens("input_ids");
    let limits = Limits::for_sequences(1, ids.len() + 200, ids.len(), 0);
    let mut model = Model::load(backend, &source, limits, Options::default()).unwrap();
    let mut sequence = Sequence::new(&limits, 0);
    let start = Instant::now();
    model.forward(&sequence.step(&ids, 1), &mut ()).unwrap();
    let mut token = argmax(&logits(&model, 0));
    let first = start.elapsed();
    let mut again = Sequence::new(&limits, 0);
    let start = Instant::now();
    model.forward(&again.step(&ids, 1), &mut ()).unwrap();
    let prefill = (logits(&model, 0).len(), start.elapsed()).1;
    let launches = model.backend().kernels().launches();
    let start = Instant::now();
    for _ in 0..100 {
        model.forward(&sequence.step(&[token], 1), &mut ()).unwrap();
        token = argmax(&logits(&model, 0));
    }
    let decode = start.elapsed() / 100;
    let launches = (model.backend().kernels().launches() - launches) / 100;
    println!(
        "micro: {} tokens {first:?} (first), {prefill:?}; decode {decode:?} a token, {launches} launches",
        ids.len()
    );
    Worst::default()
}

pub(crate) fn run(
    open: &(dyn Fn() -> Cuda + std::panic::RefUnwindSafe),
    own: &(dyn Fn() -> Cuda + std::panic::RefUnwindSafe),
) -> usize {
    let mut failures = 0;
    let mut part = |name: String, body: &(dyn Fn() -> Worst + std::panic::RefUnwindSafe)| match catch_unwind(body) {
        Ok(Worst(error, place, _)) => println!("micro {name}: passed, largest error {error:.2e} {place}"),
        Err(_) => {
            println!("micro {name}: FAILED");
            failures += 1;
        }
    };
    for name in ["short_think", "short_direct", "tool_think", "image_direct", "recall_400", "recall_1000"] {
        part(name.to_owned(), &|| prompt(own(), name, BOUND));
        // As the program runs: a step of so many rows takes its products' operands as halves.
        let bound = if name == "recall_1000" { BOUND_INT4 } else { BOUND };
        part(format!("{name}, library"), &|| prompt(open(), name, bound));
    }
    part("picture".to_owned(), &|| picture(open()));
    part("INT4 experts".to_owned(), &|| rounded(open()));
    part("invariance".to_owned(), &|| invariance(own()));
    part("speed".to_owned(), &|| speed(open()));
    failures
}
