//! Layer by layer equals the whole model, bit for bit, however the sequences are cut; and experts can be exchanged.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod harness;

use std::collections::HashMap;

use glimmer_checkpoint::{Bytes, Checkpoint, Config, DType, TensorData};
use glimmer_model::{
    Error, Layer, Limits, Mlp, Model, Options, Result, load_experts,
    streaming::{Routes, Runner, RunnerLimits, Selections, embed_streams},
    weights::{Loader, Source, layer_prefix},
};
use glimmer_tensor::{Step, cpu::Cpu};
use harness::{Recorder, Sequence, close, load, logits, micro, tiny};

const LENGTHS: [usize; 4] = [45, 1, 30, 17];

fn tokens(checkpoint: &Checkpoint, seed: u32) -> Vec<u32> {
    let vocab = checkpoint.config().text.vocab_size as u32;
    let mut x = seed;
    let mut next = || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (x >> 8) % vocab
    };
    (0..LENGTHS.iter().sum::<usize>()).map(|_| next()).collect()
}

/// All sequences in one step of the whole model.
fn whole(checkpoint: &Checkpoint, tokens: &[u32]) -> Recorder {
    let limits = Limits::for_sequences(LENGTHS.len(), 64, tokens.len(), 0);
    let mut model = load(checkpoint, limits);
    let mut step = Step::default();
    let mut first = 0;
    for (i, &length) in LENGTHS.iter().enumerate() {
        Sequence::new(&limits, i as u32).add(&mut step, 0, &tokens[first..first + length], length, 0);
        first += length;
    }
    let mut seen = Recorder::new(checkpoint);
    model.forward(&step, &mut seen).unwrap();
    seen
}

fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

fn layers_equal_the_whole_model(checkpoint: &Checkpoint, limits: RunnerLimits) {
    let text = &checkpoint.config().text;
    let tokens = tokens(checkpoint, 5);
    let seen = whole(checkpoint, &tokens);
    let mut runner = Runner::new(Cpu::new(1), text, limits).unwrap();
    let mut streams = embed_streams(checkpoint, &tokens, &[]).unwrap();
    let mut selections = Selections::default();
    let mut routes = Routes::default();
    let mut x = vec![0.0; tokens.len() * text.hidden_size];
    for index in 0..text.num_hidden_layers {
        assert!(same(&streams, seen.get(&format!("layer{index}.streams_in"))), "streams into layer {index}");
        let layer = Layer::load(runner.backend(), checkpoint, index).unwrap();
        runner.attend(&layer, &LENGTHS, &mut streams, &mut selections).unwrap();
        runner.mlp_input(&layer, &streams, &mut x, &mut routes).unwrap();
        assert!(same(&x, seen.get(&format!("layer{index}.post_norm"))), "MLP input of layer {index}");
        if let Mlp::Sparse(moe) = layer.mlp() {
            let ours: Vec<_> = routes.experts.iter().copied().zip(routes.weights.iter().copied()).collect();
            assert_eq!(routes.top, moe.top());
            assert_eq!(ours, seen.routings[&index].concat(), "routing of layer {index}");
        }
        runner.finish(&layer, None, &mut streams).unwrap();
    }
    assert!(same(&streams, seen.get(&format!("layer{}.streams_in", text.num_hidden_layers))));
}

#[test]
fn micro_layers_equal_the_whole_model() {
    for (max_rows, slots) in [(200, 8), (7, 2), (16, 1)] {
        layers_equal_the_whole_model(&micro(), RunnerLimits { max_rows, max_tokens: 64, slots });
    }
}

#[test]
fn tiny_layers_equal_the_whole_model_though_one_reuses_a_selection() {
    for (max_rows, slots) in [(200, 8), (7, 2), (16, 1)] {
        layers_equal_the_whole_model(&tiny(), RunnerLimits { max_rows, max_tokens: 64, slots });
    }
}

#[test]
fn parts_can_be_run_one_after_another() {
    let checkpoint = micro();
    let text = &checkpoint.config().text;
    let tokens = tokens(&checkpoint, 9);
    let mut runner = Runner::new(Cpu::new(1), text, RunnerLimits { max_rows: 32, max_tokens: 64, slots: 2 }).unwrap();
    let layer = Layer::load(runner.backend(), &checkpoint, 3).unwrap();
    let start = embed_streams(&checkpoint, &tokens, &[]).unwrap();
    let mut together = start.clone();
    runner.attend(&layer, &LENGTHS, &mut together, &mut Selections::default()).unwrap();
    runner.finish(&layer, None, &mut together).unwrap();
    let mut apart = start;
    let width = runner.stream_width();
    let mut first = 0;
    for length in LENGTHS {
        let part = &mut apart[first * width..(first + length) * width];
        runner.attend(&layer, &[length], part, &mut Selections::default()).unwrap();
        runner.finish(&layer, None, part).unwrap();
        first += length;
    }
    assert!(same(&together, &apart));
}

/// A checkpoint with some tensors replaced or added.
struct Overlay<'a> {
    under: &'a Checkpoint,
    over: HashMap<String, TensorData>,
}

impl Source for Overlay<'_> {
    fn config(&self) -> &Config {
        self.under.config()
    }

    fn has(&self, name: &str) -> bool {
        self.over.contains_key(name) || Source::has(self.under, name)
    }

    fn tensor(&self, name: &str) -> Result<TensorData> {
        match self.over.get(name) {
            Some(tensor) => Ok(tensor.clone()),
            None => Source::tensor(self.under, name),
        }
    }
}

/// Random codes and scales for every routed expert of the micro model's layer `layer`: once as INT4, once as the F32
/// matrices that they stand for.
fn random_experts(checkpoint: &Checkpoint, layer: usize) -> [Overlay<'_>; 2] {
    let text = &checkpoint.config().text;
    let (hidden, width) = (text.hidden_size, text.moe.intermediate_size);
    let mut x = 12_345u32;
    let mut next = move || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        x >> 8
    };
    let (mut packed, mut plain) = (HashMap::new(), HashMap::new());
    for expert in 0..text.moe.num_experts {
        for (name, out, input) in
            [("gate_proj", width, hidden), ("up_proj", width, hidden), ("down_proj", hidden, width)]
        {
            let name = format!("{}mlp.experts.{expert}.{name}", layer_prefix(checkpoint, layer));
            let scales: Vec<half::bf16> =
                (0..out * input / 128).map(|_| half::bf16::from_f32(0.005 + (next() % 100) as f32 * 1e-4)).collect();
            let codes: Vec<u32> = (0..out * input).map(|_| next() % 16).collect();
            let words = codes.chunks(8).map(|c| c.iter().enumerate().fold(0, |word, (i, code)| word | code << (4 * i)));
            let values = codes.iter().enumerate().map(|(i, &code)| scales[i / 128].to_f32() * (code as f32 - 8.0));
            let tensor = |name: String, dtype, columns, bytes| {
                (name.clone(), TensorData { name, dtype, shape: vec![out, columns], bytes: Bytes::new(bytes) })
            };
            packed.extend([
                tensor(
                    format!("{name}.weight_packed"),
                    DType::I32,
                    input / 8,
                    words.flat_map(u32::to_le_bytes).collect(),
                ),
                tensor(
                    format!("{name}.weight_scale"),
                    DType::Bf16,
                    input / 128,
                    scales.iter().flat_map(|s| s.to_le_bytes()).collect::<Vec<u8>>(),
                ),
            ]);
            plain.extend([tensor(
                format!("{name}.weight"),
                DType::F32,
                input,
                values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>(),
            )]);
        }
    }
    [packed, plain].map(|over| Overlay { under: checkpoint, over })
}

#[test]
fn int4_experts_compute_what_their_codes_stand_for() {
    let checkpoint = micro();
    let text = &checkpoint.config().text;
    let tokens = tokens(&checkpoint, 77);
    let mut runner = Runner::new(Cpu::new(1), text, RunnerLimits { max_rows: 64, max_tokens: 64, slots: 2 }).unwrap();
    let layer = Layer::load(runner.backend(), &checkpoint, 2).unwrap();
    let mut streams = embed_streams(&checkpoint, &tokens, &[]).unwrap();
    runner.attend(&layer, &LENGTHS, &mut streams, &mut Selections::default()).unwrap();
    let own = {
        let mut streams = streams.clone();
        runner.finish(&layer, None, &mut streams).unwrap();
        streams
    };
    let [int4, plain] = random_experts(&checkpoint, 2).map(|overlay| {
        let loader = Loader::new(runner.backend(), &overlay, layer_prefix(&overlay, 2)).at("mlp.");
        let experts = load_experts(&loader).unwrap();
        let mut streams = streams.clone();
        runner.finish(&layer, Some(&experts), &mut streams).unwrap();
        // The same experts loaded with the layer itself.
        let whole = Layer::load(runner.backend(), &overlay, 2).unwrap();
        let mut again = streams.clone();
        again.copy_from_slice(&streams);
        let mut start = embed_streams(&overlay, &tokens, &[]).unwrap();
        runner.attend(&whole, &LENGTHS, &mut start, &mut Selections::default()).unwrap();
        runner.finish(&whole, None, &mut start).unwrap();
        assert!(same(&start, &streams));
        streams
    });
    close("INT4 against F32", &int4, &plain, 2e-6);
    assert!(!same(&int4, &own));
}

/// A checkpoint that must not be asked for an expert.
struct WithoutExperts<'a>(&'a Checkpoint);

impl Source for WithoutExperts<'_> {
    fn config(&self) -> &Config {
        self.0.config()
    }

    fn has(&self, name: &str) -> bool {
        self.0.has(name)
    }

    fn tensor(&self, name: &str) -> Result<TensorData> {
        assert!(!name.contains("experts."), "{name} was read");
        Source::tensor(self.0, name)
    }
}

#[test]
fn a_layer_without_experts_reads_none_and_runs_with_given_ones() {
    let checkpoint = micro();
    let text = &checkpoint.config().text;
    let tokens = tokens(&checkpoint, 31);
    let mut runner = Runner::new(Cpu::new(1), text, RunnerLimits { max_rows: 64, max_tokens: 64, slots: 2 }).unwrap();
    let whole = Layer::load(runner.backend(), &checkpoint, 2).unwrap();
    let part = Layer::load_without_experts(runner.backend(), &WithoutExperts(&checkpoint), 2).unwrap();
    let experts = load_experts(&Loader::new(runner.backend(), &checkpoint, layer_prefix(&checkpoint, 2)).at("mlp."));
    let experts = experts.unwrap();
    let start = embed_streams(&checkpoint, &tokens, &[]).unwrap();
    let [ours, theirs] = [(&part, Some(&experts)), (&whole, None)].map(|(layer, experts)| {
        let mut streams = start.clone();
        runner.attend(layer, &LENGTHS, &mut streams, &mut Selections::default()).unwrap();
        runner.finish(layer, experts, &mut streams).unwrap();
        streams
    });
    assert!(same(&ours, &theirs));
    let refused = runner.finish(&part, None, &mut { start });
    assert!(matches!(refused, Err(Error::NoExperts { layer: 2 })), "{refused:?}");
}

#[test]
fn an_expert_activation_is_the_clamped_product() {
    let checkpoint = tiny();
    let text = &checkpoint.config().text;
    let mut runner = Runner::new(Cpu::new(1), text, RunnerLimits { max_rows: 4, max_tokens: 8, slots: 1 }).unwrap();
    let layer = Layer::load(runner.backend(), &checkpoint, 1).unwrap();
    let Mlp::Sparse(moe) = layer.mlp() else { panic!("layer 1 is sparse") };
    let (hidden, width, limit) = (text.hidden_size, text.moe.intermediate_size, text.swiglu_limit);
    let x: Vec<f32> = (0..9 * hidden).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.2).collect();
    let mut act = vec![0.0; 9 * width];
    runner.expert_activation(&moe.experts().unwrap().routed[2], &x, &mut act).unwrap();
    let matrix = |name: &str| {
        let name = format!("{}mlp.experts.2.{name}.weight", layer_prefix(&checkpoint, 1));
        let tensor = checkpoint.tensor(&name).unwrap();
        let pairs = tensor.bytes.as_slice().as_chunks::<2>().0;
        pairs.iter().map(|b| f64::from(half::bf16::from_le_bytes(*b).to_f32())).collect::<Vec<f64>>()
    };
    let (gate, up) = (matrix("gate_proj"), matrix("up_proj"));
    let dot = |w: &[f64], o: usize, x: &[f32]| {
        w[o * hidden..(o + 1) * hidden].iter().zip(x).map(|(w, x)| w * f64::from(*x)).sum::<f64>()
    };
    let limit = f64::from(limit);
    let mut clamped = 0;
    let mut expected = Vec::new();
    for row in x.chunks(hidden) {
        for o in 0..width {
            let (g, u) = (dot(&gate, o, row), dot(&up, o, row));
            clamped += usize::from(g > limit) + usize::from(u.abs() > limit);
            let g = g.min(limit);
            expected.push((g / (1.0 + (-g).exp()) * u.clamp(-limit, limit)) as f32);
        }
    }
    assert!(clamped > 100, "the clamp is not exercised");
    close("activation", &act, &expected, 2e-6);
}

#[test]
fn image_features_replace_embedding_rows() {
    let checkpoint = micro();
    let hidden = checkpoint.config().text.hidden_size;
    let n = checkpoint.config().text.mhc.streams;
    let feature: Vec<f32> = (0..hidden).map(|i| i as f32).collect();
    let streams = embed_streams(&checkpoint, &[5, 6, 5], &[(1, &feature)]).unwrap();
    let rows: Vec<&[f32]> = streams.chunks(n * hidden).collect();
    assert_eq!(rows[0], rows[2]);
    assert!(rows[1].chunks(hidden).all(|stream| stream == feature));
    assert!(rows[0].chunks(hidden).all(|stream| stream == &rows[0][..hidden]));
}

#[test]
fn slices_that_do_not_fit_are_refused() {
    let checkpoint = micro();
    let text = &checkpoint.config().text;
    let mut runner = Runner::new(Cpu::new(1), text, RunnerLimits { max_rows: 4, max_tokens: 8, slots: 1 }).unwrap();
    let layer = Layer::load(runner.backend(), &checkpoint, 1).unwrap();
    let mut streams = vec![0.0; 3 * runner.stream_width()];
    let mut selections = Selections::default();
    assert!(
        matches!(runner.attend(&layer, &[4], &mut streams, &mut selections), Err(Error::Length { expected, .. }) if expected == 4 * 4 * text.hidden_size)
    );
    let mut long = vec![0.0; 9 * runner.stream_width()];
    assert!(matches!(
        runner.attend(&layer, &[9], &mut long, &mut selections),
        Err(Error::Limit { needed: 9, available: 8, .. })
    ));
    assert!(runner.mlp_input(&layer, &streams, &mut [0.0; 5], &mut Routes::default()).is_err());
    assert!(runner.finish(&layer, None, &mut streams[1..]).is_err());
    assert!(matches!(embed_streams(&checkpoint, &[9_999_999], &[]), Err(Error::Token { row: 0, .. })));

    let tiny = tiny();
    let mut runner =
        Runner::new(Cpu::new(1), &tiny.config().text, RunnerLimits { max_rows: 4, max_tokens: 8, slots: 1 }).unwrap();
    let sharing = Layer::load(runner.backend(), &tiny, 6).unwrap();
    let mut streams = vec![0.0; 3 * runner.stream_width()];
    assert!(matches!(
        runner.attend(&sharing, &[3], &mut streams, &mut Selections::default()),
        Err(Error::Length { what: "selections", expected: 3, found: 0 })
    ));
}

#[test]
fn a_quantized_layer_runs_inside_the_whole_model() {
    let checkpoint = micro();
    let tokens = &tokens(&checkpoint, 3)[..20];
    let limits = Limits::for_sequences(1, 64, 32, 0);
    let [int4, plain] = random_experts(&checkpoint, 5).map(|overlay| {
        let mut model = Model::load(Cpu::new(1), &overlay, limits, Options::default()).unwrap();
        model.forward(&Sequence::new(&limits, 0).step(tokens, 1), &mut ()).unwrap();
        logits(&model, 0)
    });
    close("logits", &int4, &plain, 2e-5);
}
