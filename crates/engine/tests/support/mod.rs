//! The micro model and runs of it.
#![allow(dead_code, reason = "each test program uses its part")]

use std::{collections::BTreeMap, path::PathBuf};

use glimmer_checkpoint::Checkpoint;
use glimmer_engine::{
    Flow, Generator, Output, Request, Sampling, SequenceId, Settings,
    constraint::{Constraint, ConstraintError, Grammars, TokenMask},
    request::{Collector, Structure},
};
use glimmer_model::vision::{DecodeLimits, Patches, Processors, RgbImage};
use glimmer_tensor::cpu::Cpu;
use safetensors::SafeTensors;

/// Ids of the micro model's tokenizer.
pub(crate) const REAL_VOCAB: usize = 3235;

pub(crate) fn repository(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path)
}

pub(crate) fn checkpoint() -> Checkpoint {
    Checkpoint::open(repository("models/micro-bf16")).unwrap()
}

pub(crate) fn load(settings: &Settings) -> Generator<Cpu> {
    Generator::load(Cpu::new(1), &checkpoint(), settings).unwrap()
}

pub(crate) fn settings(sequences: usize, depth: usize) -> Settings {
    Settings { sequences, depth, context: Some(2048), real_vocab: Some(REAL_VOCAB), rows: 96, ..Settings::default() }
}

/// The first tokens of documents without pictures, one after the other from the `index`-th on.
pub(crate) fn document(index: usize, tokens: usize) -> Vec<u32> {
    let text = std::fs::read_to_string(repository("data/eval/documents.jsonl")).unwrap();
    let all = text
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .filter(|v| v["images"].as_array().unwrap().is_empty())
        .skip(index)
        .flat_map(|v| {
            v["input_ids"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect::<Vec<_>>()
        });
    let all: Vec<u32> = all.take(tokens).collect();
    assert_eq!(all.len(), tokens);
    all
}

/// A prompt with a picture.
pub(crate) fn image_prompt() -> (Vec<u32>, Patches) {
    let checkpoint = checkpoint();
    let vision = checkpoint.config().vision.clone().unwrap();
    let flat = checkpoint.file("preprocessor_config.json").unwrap();
    let processors = Processors::from_files(&vision, None, Some(flat.as_slice())).unwrap();
    let png = std::fs::read(repository("data/goldens/micro/image_direct.png")).unwrap();
    let patches = processors.image.image(&RgbImage::decode(&png, DecodeLimits::default()).unwrap());
    let bytes = std::fs::read(repository("data/goldens/micro/image_direct.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let ids = file.tensor("input_ids").unwrap();
    let prompt = ids.data().as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    (prompt, patches)
}

/// Every slot and page is free or kept by nobody but the prefix cache.
pub(crate) fn everything_is_back(generator: &Generator<Cpu>) {
    let (pools, all) = (generator.pools(), generator.pools().all());
    assert_eq!((pools.free().slots, pools.free().pages + pools.idle()), (all.slots, all.pages));
}

/// Runs all requests, each submitted when so many steps have been made, and checks the order of events.
pub(crate) fn run(generator: &mut Generator<Cpu>, mut requests: Vec<(usize, Request)>) -> Vec<Output> {
    requests.reverse();
    let mut order = Vec::new();
    let mut streams: BTreeMap<SequenceId, Collector> = BTreeMap::new();
    let mut outputs: BTreeMap<SequenceId, Output> = BTreeMap::new();
    for step in 0.. {
        while requests.last().is_some_and(|(when, _)| *when <= step) {
            let request = requests.pop().unwrap().1;
            let grammars = EvenGrammars(generator.model().config().eos_token_ids.clone());
            let constraint = request.structure.as_ref().map(|structure| grammars.compile(structure).unwrap());
            order.push(generator.submit_constrained(request, constraint).unwrap());
        }
        let busy = generator
            .step(&mut |sequence, event| {
                assert!(!outputs.contains_key(&sequence), "nothing follows the end");
                assert!(!event.tokens.is_empty() || event.finish.is_some(), "no event without news");
                if let Some(output) = streams.entry(sequence).or_default().take(event) {
                    outputs.insert(sequence, output);
                }
                Flow::Continue
            })
            .unwrap();
        if !busy && requests.is_empty() {
            break;
        }
    }
    everything_is_back(generator);
    order.iter().map(|id| outputs.remove(id).unwrap()).collect()
}

/// Greedy for even numbers, sampled for odd ones.
pub(crate) fn request(prompt: Vec<u32>, new: u32, number: i64) -> Request {
    let mut request = Request::new(prompt, new).ignoring_eos();
    if number % 2 == 1 {
        request.sampling = Sampling {
            temperature: 0.9,
            top_p: 0.95,
            repetition_penalty: 1.1,
            seed: Some(number),
            ..Sampling::default()
        };
    }
    request
}

pub(crate) fn tokens(outputs: &[Output]) -> Vec<&[u32]> {
    outputs.iter().map(|output| output.tokens.as_slice()).collect()
}

/// Each by itself, in an engine that remembers nothing.
pub(crate) fn alone(requests: &[Request]) -> Vec<Output> {
    let mut generator = load(&Settings { prefix_caching: false, ..settings(1, 0) });
    requests.iter().map(|r| generator.generate(r.clone(), &mut |_| Flow::Continue).unwrap()).collect()
}

/// Tokens with even ids, then an end token.
#[derive(Debug)]
struct Even {
    left: usize,
    ends: Vec<u32>,
    taken: usize,
}

impl Constraint for Even {
    fn mask(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        mask.fill(false);
        if self.taken < self.left {
            (300..mask.tokens() as u32).step_by(2).for_each(|token| mask.allow(token));
        } else {
            self.ends.iter().for_each(|&token| mask.allow(token));
        }
        Ok(())
    }

    fn advance(&mut self, token: u32) -> Result<(), ConstraintError> {
        if self.taken >= self.left || token % 2 == 1 || token < 300 {
            return Err(ConstraintError(format!("{token} may not come")));
        }
        self.taken += 1;
        Ok(())
    }

    fn rollback(&mut self, tokens: usize) -> Result<(), ConstraintError> {
        self.taken =
            self.taken.checked_sub(tokens).ok_or_else(|| ConstraintError("nothing to take back".to_owned()))?;
        Ok(())
    }

    fn valid_prefix(&mut self, tokens: &[u32]) -> usize {
        tokens.iter().take_while(|&&token| token >= 300 && token % 2 == 0).count()
    }
}

#[derive(Debug)]
pub(crate) struct EvenGrammars(pub(crate) Vec<u32>);

impl Grammars for EvenGrammars {
    fn compile(&self, structure: &Structure) -> Result<Box<dyn Constraint>, ConstraintError> {
        let Structure::Regex(text) = structure else { return Err(ConstraintError("expected a number".to_owned())) };
        let left = text.parse().map_err(|_| ConstraintError("expected a number".to_owned()))?;
        Ok(Box::new(Even { left, ends: self.0.clone(), taken: 0 }))
    }
}
