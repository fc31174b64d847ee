//! What the golden and invariance tests share: goldens by name, a recorder of every block, sequences and their steps.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of this module")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::{collections::HashMap, path::PathBuf};

use glimmer_checkpoint::Checkpoint;
use glimmer_model::{At, HiddenSource, Limits, Model, MtpStep, Observer, Options, SiteKind};
use glimmer_tensor::{Backend, FeatureRow, PAGE_TOKENS, Segment, Step, Streams, cpu::Cpu};

/// A path inside the repository.
pub fn repository(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path)
}

pub fn micro() -> Checkpoint {
    Checkpoint::open(repository("models/micro-bf16")).unwrap()
}

pub fn tiny() -> Checkpoint {
    Checkpoint::open(repository("data/goldens/tiny")).unwrap()
}

/// A model on one thread with every limit given.
pub fn load(checkpoint: &Checkpoint, limits: Limits) -> Model<Cpu> {
    Model::load(Cpu::new(1), checkpoint, limits, Options::default()).unwrap()
}

/// Tensors of a golden file; each is taken once, and [`Goldens::finish`] fails when one was never looked at.
pub struct Goldens {
    floats: HashMap<String, Golden>,
    integers: HashMap<String, Vec<i32>>,
}

#[derive(Clone)]
pub struct Golden {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

impl Golden {
    /// Size of the first axis.
    pub fn rows(&self) -> usize {
        self.shape[0]
    }
}

impl Goldens {
    pub fn open(path: &str) -> Self {
        let bytes = std::fs::read(repository(path)).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let (mut floats, mut integers) = (HashMap::new(), HashMap::new());
        for (name, view) in file.tensors() {
            let words = view.data().as_chunks::<4>().0;
            match view.dtype() {
                safetensors::Dtype::F32 => {
                    let values = words.iter().map(|w| f32::from_le_bytes(*w)).collect();
                    floats.insert(name, Golden { shape: view.shape().to_vec(), values });
                }
                safetensors::Dtype::I32 => {
                    integers.insert(name, words.iter().map(|w| i32::from_le_bytes(*w)).collect());
                }
                other => panic!("{name}: {other:?}"),
            }
        }
        Self { floats, integers }
    }

    pub fn floats(&mut self, name: &str) -> Golden {
        self.floats.remove(name).unwrap_or_else(|| panic!("no golden {name}"))
    }

    pub fn integers(&mut self, name: &str) -> Vec<i32> {
        self.integers.remove(name).unwrap_or_else(|| panic!("no golden {name}"))
    }

    pub fn tokens(&mut self, name: &str) -> Vec<u32> {
        self.integers(name).into_iter().map(|t| u32::try_from(t).unwrap()).collect()
    }

    pub fn names(&self, prefix: &str) -> Vec<String> {
        let mut names: Vec<String> =
            self.floats.keys().chain(self.integers.keys()).filter(|n| n.starts_with(prefix)).cloned().collect();
        names.sort();
        names
    }

    pub fn has(&self, name: &str) -> bool {
        self.floats.contains_key(name) || self.integers.contains_key(name)
    }

    /// Drops what a test deliberately leaves to others.
    pub fn leave(&mut self, unwanted: impl Fn(&str) -> bool) {
        self.floats.retain(|n, _| !unwanted(n));
        self.integers.retain(|n, _| !unwanted(n));
    }

    pub fn finish(self) {
        let mut left: Vec<String> = self.floats.into_keys().chain(self.integers.into_keys()).collect();
        left.sort();
        assert!(left.is_empty(), "goldens never compared: {left:?}");
    }
}

/// Fails unless every value is within `bound` times the golden's largest value; the golden may hold only the last rows.
pub fn close(name: &str, ours: &[f32], golden: &[f32], bound: f32) {
    within(name, ours, golden, bound * golden.iter().fold(0.0, |m: f32, g| m.max(g.abs())));
}

/// Fails unless every value is within `bound`; the golden may hold only the last rows.
pub fn within(name: &str, ours: &[f32], golden: &[f32], bound: f32) {
    assert!(ours.len() >= golden.len(), "{name}: {} values against {}", ours.len(), golden.len());
    let ours = &ours[ours.len() - golden.len()..];
    for (i, (a, b)) in ours.iter().zip(golden).enumerate() {
        let difference = (a - b).abs();
        assert!(difference <= bound, "{name}: {a} against {b} at {i}, bound {bound:.2e}");
    }
}

/// Sets of non-negative integers, one a row of `width`.
pub fn sets(values: &[i32], width: usize) -> Vec<Vec<u32>> {
    let set = |row: &[i32]| {
        let mut set: Vec<u32> = row.iter().filter_map(|&v| u32::try_from(v).ok()).collect();
        set.sort_unstable();
        set
    };
    values.chunks(width).map(set).collect()
}

/// Position of the largest value (the first of equals).
pub fn argmax(values: &[f32]) -> u32 {
    let mut best = 0;
    for (i, v) in values.iter().enumerate() {
        if *v > values[best] {
            best = i;
        }
    }
    best as u32
}

/// Everything that an observer sees, by name.
pub struct Recorder {
    hidden: usize,
    streams: usize,
    core: [usize; 2],
    q_lora: usize,
    pub seen: HashMap<String, Vec<f32>>,
    pub selections: HashMap<usize, Vec<Vec<u32>>>,
    pub routings: HashMap<usize, Vec<Vec<(u32, f32)>>>,
}

impl Recorder {
    pub fn new(checkpoint: &Checkpoint) -> Self {
        let text = &checkpoint.config().text;
        Self {
            hidden: text.hidden_size,
            streams: text.mhc.streams,
            core: [text.kda.num_heads * text.kda.head_dim, text.mla.num_heads * text.mla.v_head_dim],
            q_lora: text.mla.q_lora_rank,
            seen: HashMap::new(),
            selections: HashMap::new(),
            routings: HashMap::new(),
        }
    }

    pub fn get(&self, name: &str) -> &[f32] {
        self.seen.get(name).unwrap_or_else(|| panic!("nothing recorded as {name}"))
    }

    fn put<B: Backend>(&mut self, at: &At<'_, B>, name: &str, buffer: &B::Buffer, width: usize) {
        let values = at.read(buffer, width).unwrap();
        self.seen.insert(format!("layer{}.{name}", at.layer), values);
    }
}

impl<B: Backend> Observer<B> for Recorder {
    fn streams(&mut self, at: At<'_, B>, streams: &Streams<B>) {
        self.put(&at, "streams_in", &streams.x, self.streams * self.hidden);
    }

    fn site(&mut self, at: At<'_, B>, site: SiteKind, streams: &Streams<B>, x: &B::Buffer) {
        let (hc, norm) = match site {
            SiteKind::Attention => ("attn_hc", "input_norm"),
            SiteKind::Mlp => ("ffn_hc", "post_norm"),
        };
        self.put(&at, &format!("{hc}.post"), &streams.post, self.streams);
        self.put(&at, &format!("{hc}.comb"), &streams.comb, self.streams * self.streams);
        self.put(&at, &format!("{hc}.collapsed"), &streams.collapsed, self.hidden);
        self.put(&at, norm, x, self.hidden);
    }

    fn kda(&mut self, at: At<'_, B>, core: &B::Buffer) {
        self.put(&at, "kda.o_norm", core, self.core[0]);
    }

    fn dsa(&mut self, at: At<'_, B>, q_residual: &B::Buffer, selection: &B::Selection, core: &B::Buffer) {
        self.put(&at, "q_resid", q_residual, self.q_lora);
        self.put(&at, "dsa.core", core, self.core[1]);
        let rows = (0..at.rows).map(|row| at.backend.read_selection(selection, row)).collect();
        self.selections.insert(at.layer, rows);
    }

    fn attention(&mut self, at: At<'_, B>, out: &B::Buffer) {
        self.put(&at, "attn_out", out, self.hidden);
    }

    fn routing(&mut self, at: At<'_, B>, routing: &B::Routing) {
        let rows = (0..at.rows).map(|row| at.backend.read_routing(routing, row)).collect();
        self.routings.insert(at.layer, rows);
    }

    fn mlp(&mut self, at: At<'_, B>, out: &B::Buffer) {
        self.put(&at, "mlp_out", out, self.hidden);
    }

    fn hidden(&mut self, at: At<'_, B>, hidden: &B::Buffer) {
        self.put(&at, "hidden", hidden, self.hidden);
    }

    fn draft_input(&mut self, at: At<'_, B>, x: &B::Buffer) {
        self.put(&at, "eh", x, self.hidden);
    }
}

/// Where a sequence lives.
#[derive(Debug, Clone)]
pub struct Sequence {
    pub slot: u32,
    pub pages: Vec<u32>,
    /// Position of the next row.
    pub position: usize,
    /// Accepted rows before `position` that are still records.
    pub fold: usize,
}

impl Sequence {
    /// A sequence in `slot` of a model whose pages are divided evenly among the slots.
    pub fn new(limits: &Limits, slot: u32) -> Self {
        let each = (limits.pages / limits.slots) as u32;
        // Backwards, so that nothing passes by mistaking a position for a page.
        Self { slot, pages: (slot * each..(slot + 1) * each).rev().collect(), position: 0, fold: 0 }
    }

    /// Adds rows of this sequence to a step; the last `wanted` of them want logits.
    pub fn add(&self, step: &mut Step, position: usize, tokens: &[u32], commit: usize, wanted: usize) {
        let first = step.tokens.len();
        let pages = (position + tokens.len()).div_ceil(PAGE_TOKENS);
        step.segments.push(Segment {
            slot: self.slot,
            position: position as u32,
            rows: tokens.len() as u32,
            fold: self.fold as u32,
            commit: commit as u32,
            first_page: step.pages.len() as u32,
            pages: pages as u32,
        });
        step.pages.extend(&self.pages[..pages]);
        step.tokens.extend(tokens);
        step.logits.extend((first + tokens.len() - wanted..first + tokens.len()).map(|row| row as u32));
    }

    /// A step of this sequence alone, all rows committed, advancing it.
    pub fn step(&mut self, tokens: &[u32], wanted: usize) -> Step {
        let mut step = Step::default();
        self.add(&mut step, self.position, tokens, tokens.len(), wanted);
        self.position += tokens.len();
        self.fold = 0;
        step
    }

    /// A draft step of this sequence alone: rows from `position` on, `tokens[i]` being the token after that row.
    pub fn draft(
        &self,
        position: usize,
        tokens: &[u32],
        from: HiddenSource,
        first_source: usize,
        wanted: usize,
    ) -> MtpStep {
        let mut step = Step::default();
        let unfolded = Self { fold: 0, ..self.clone() };
        unfolded.add(&mut step, position, tokens, tokens.len(), wanted);
        let source = (0..tokens.len()).map(|i| (first_source + i) as u32).collect();
        MtpStep { step, from, source, shared: None }
    }
}

/// Puts features at the placeholder's rows.
pub fn place_features(step: &mut Step, placeholder: u32) -> usize {
    let rows = step.tokens.iter().enumerate().filter(|&(_, &t)| t == placeholder);
    step.features = rows.enumerate().map(|(i, (row, _))| FeatureRow { row: row as u32, feature: i as u32 }).collect();
    step.features.len()
}

pub fn logits(model: &Model<Cpu>, index: usize) -> Vec<f32> {
    let mut values = vec![0.0; model.config().vocab_size];
    model.logits(index, &mut values).unwrap();
    values
}

pub fn draft_logits(model: &Model<Cpu>, index: usize) -> Vec<f32> {
    let mut values = vec![0.0; model.config().vocab_size];
    model.draft_logits(index, &mut values).unwrap();
    values
}

pub fn draft_hidden(model: &Model<Cpu>, row: usize) -> Vec<f32> {
    let mut values = vec![0.0; model.config().hidden_size];
    model.draft_hidden(row, &mut values).unwrap();
    values
}
