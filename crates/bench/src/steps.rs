//! How long a step takes: a model with random weights, steps of one shape again and again.
//!
//! One prompt of the wanted length is computed; all sequences then go on behind it, each in a slot of its own, sharing the
//! prompt's pages. Rows of a net with random weights are much alike and would choose the same few experts; so the biases of the
//! routers are balanced first, as training does. What a step must read is counted from the inventory: all weights once, of the
//! routed experts those that the step's rows chose, and each sequence's state.

use std::{collections::BTreeMap, time::Instant};

use glimmer_checkpoint::inventory::Group;
use glimmer_model::{At, Limits, Model, Observer, Options, plan::scratch::Largest};
use glimmer_tensor::{Backend, PAGE_TOKENS, Segment, Step};
use serde::Serialize;

use crate::dummy::DummySource;
use crate::error::BenchError;

/// What is measured.
#[derive(Clone, Debug)]
pub struct StepPlan {
    /// Numbers of sequences of the decoding steps.
    pub sequences: Vec<usize>,
    /// Rows of a sequence: one and its drafts.
    pub rows: usize,
    /// Tokens before them.
    pub context: usize,
    /// Rows of a chunk of a prompt; none is measured at 0.
    pub prefill: usize,
    /// Steps of each kind.
    pub repeats: usize,
}

/// A measured step.
#[derive(Clone, Debug, Serialize)]
pub struct StepRow {
    /// Sequences; 1 for a chunk of a prompt.
    pub sequences: usize,
    /// Rows.
    pub rows: usize,
    /// Microseconds from the call until a result is there: the median and the 10th and 90th percentile.
    pub alone: [f64; 3],
    /// Microseconds a step when many follow each other without waiting.
    pub chained: f64,
    /// The same with every kernel launched by itself.
    pub eager: f64,
    /// Launches of a step.
    pub launches: u64,
    /// Whose the time is, where the backend can tell.
    pub parts: Option<Parts>,
    /// Different experts that the rows of a layer chose, the mean of the layers.
    pub experts: f64,
    /// What that would be if every row chose without regard to the others.
    pub independent: f64,
    /// Bytes that the step must read.
    pub bytes: f64,
    /// Multiplications and additions of its products with weights.
    pub flops: f64,
}

/// Whose the time of a step is. A kernel's part is what a step without it is shorter by; parts that overlap add up to less.
#[derive(Clone, Debug, Serialize)]
pub struct Parts {
    /// Microseconds of the step.
    pub whole: f64,
    /// Microseconds of the step when every launch begins behind the end of the one in front of it.
    pub apart: f64,
    /// Microseconds of as many launches that do nothing.
    pub nothing: f64,
    /// Kernels with their launches and microseconds.
    pub kernels: Vec<(String, usize, f64)>,
}

/// What only some backends know of themselves.
#[derive(Debug)]
pub struct Insight<B> {
    /// Launches so far.
    pub launches: fn(&B) -> u64,
    /// Launches every kernel by itself from now on, or repeats steps as a whole where it can.
    pub set_eager: fn(&mut B, bool),
    /// Notes the work of every step from now on, also of those that are not repeated as a whole.
    pub set_noting: fn(&mut B, bool),
    /// The parts of the step that was noted or kept last.
    pub parts: fn(&mut B) -> glimmer_tensor::Result<Option<Parts>>,
}

impl<B> Clone for Insight<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for Insight<B> {}

impl<B> Insight<B> {
    /// Of a backend that knows nothing.
    #[must_use]
    pub fn none() -> Self {
        Self { launches: |_| 0, set_eager: |_, _| (), set_noting: |_, _| (), parts: |_| Ok(None) }
    }
}

/// The model with what is counted of it.
#[derive(Debug)]
pub struct StepBench<B: Backend> {
    model: Model<B>,
    plan: StepPlan,
    /// Bytes and elements of weights that every row uses.
    dense: (f64, f64),
    /// Bytes and elements of all routed experts.
    routed: (f64, f64),
    top: usize,
    experts: usize,
    slot_bytes: f64,
    int4: bool,
    /// Bytes uploaded, how long loading took, and how long until the first step was done.
    pub loaded: (u64, [f64; 2]),
}

impl<B: Backend> StepBench<B> {
    /// Loads a model for the plan.
    ///
    /// # Errors
    /// Errors of the backend.
    pub fn load(backend: B, source: &DummySource, plan: StepPlan) -> Result<Self, BenchError> {
        let failed = |error| BenchError::model("loading", error);
        let text = &glimmer_model::weights::Source::config(source).text;
        let most = plan.sequences.iter().copied().max().unwrap_or(1);
        let shared = plan.context.max(plan.prefill).div_ceil(PAGE_TOKENS);
        let own = 2 + plan.rows.div_ceil(PAGE_TOKENS);
        let max_rows = (most * plan.rows).max(plan.prefill).max(plan.context.min(CHUNK));
        let limits = Limits {
            max_rows,
            max_logits: (most * plan.rows).max(1),
            slots: most,
            pages: shared + most * own,
            max_draft: plan.rows.saturating_sub(1),
            features: 1,
        };
        let sum = |groups: &[Group]| {
            let specs = source.inventory().tensors().iter().filter(|spec| groups.contains(&spec.group));
            let pieces = specs.map(|spec| {
                let codes = if spec.name.ends_with("weight_packed") { 8.0 } else { 1.0 };
                (spec.bytes() as f64, codes * spec.elements() as f64)
            });
            pieces.fold((0.0, 0.0), |(b, e), (bytes, elements)| (b + bytes, e + elements))
        };
        let head = 2.0 * (text.vocab_size * text.hidden_size) as f64;
        let (bytes, elements) = sum(&[Group::Layer, Group::Mhc, Group::Kda, Group::Dsa, Group::DenseMlp, Group::Moe]);
        source.make().map_err(failed)?;
        let began = Instant::now();
        let options = Options { draft_layer: false, ..Options::default() };
        let mut model = Model::load(backend, source, limits, options).map_err(failed)?;
        let routed = sum(&[Group::MoeRouted]);
        let total = (bytes + 2.0 * head + routed.0) as u64;
        let loaded = began.elapsed().as_secs_f64();
        model.forward(&decode(1, 1, 0, [0, shared, own]), &mut ()).map_err(failed)?;
        wait(&model)?;
        let kda = text.kda_layers().count() * text.kda.num_heads * text.kda.head_dim * text.kda.head_dim;
        Ok(Self {
            model,
            plan,
            dense: (bytes + head, elements + head / 2.0),
            routed,
            top: text.moe.experts_per_token,
            experts: text.moe.num_experts,
            slot_bytes: 8.0 * kda as f64,
            int4: source.inventory().tensors().iter().any(|spec| spec.name.ends_with("weight_packed")),
            loaded: (total, [loaded, began.elapsed().as_secs_f64()]),
        })
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        self.model.backend()
    }

    /// Bytes that [`glimmer_model::plan`] says the stages of a GPU take beside buffers for the largest of these steps.
    pub fn planned_scratch(&self) -> u64 {
        let plan = &self.plan;
        let most = plan.sequences.iter().copied().max().unwrap_or(1) * plan.rows;
        Largest {
            text: self.model.config(),
            vision: None,
            patches: 0,
            ranks: 1,
            rows: most.max(plan.prefill).max(plan.context.min(CHUNK)),
            logits: most,
            context: plan.context + plan.rows,
            draft_layer: false,
            int4: self.int4,
        }
        .total()
    }

    /// Measures all steps, reporting each as it is done; with their parts when `parts`.
    ///
    /// # Errors
    /// Errors of the backend.
    pub fn run(
        &mut self,
        insight: Insight<B>,
        parts: bool,
        report: &mut dyn FnMut(&StepRow),
    ) -> Result<Vec<StepRow>, BenchError> {
        let (context, rows) = (self.plan.context, self.plan.rows);
        let shared = context.max(self.plan.prefill).div_ceil(PAGE_TOKENS);
        let own = 2 + rows.div_ceil(PAGE_TOKENS);
        let mut measured = Vec::new();
        if self.plan.prefill > 0 {
            self.balance(&[chunk(0, self.plan.prefill.min(BALANCED))])?;
            let step = chunk(0, self.plan.prefill);
            let mut row = self.measure(1, &step, insight, self.plan.repeats.div_ceil(4))?;
            row.parts = self.parts(&step, insight, parts)?;
            report(&row);
            measured.push(row);
        }
        for first in (0..context).step_by(CHUNK) {
            self.forward(&chunk(first, CHUNK.min(context - first)))?;
        }
        let most = self.plan.sequences.iter().copied().max().unwrap_or(1);
        self.copy_slots(most)?;
        let decoded = |sequences, first| decode(sequences, rows, first, [context, shared, own]);
        let others = 1..=BALANCED.div_ceil(most * rows).min(16);
        self.balance(&others.map(|other| decoded(most, context + other * most * rows)).collect::<Vec<_>>())?;
        for sequences in self.plan.sequences.clone() {
            self.copy_slots(sequences)?;
            let step = decoded(sequences, context);
            let mut row = self.measure(sequences, &step, insight, self.plan.repeats)?;
            row.parts = self.parts(&step, insight, parts)?;
            report(&row);
            measured.push(row);
        }
        Ok(measured)
    }

    /// Gives the state of the prompt's slot to all sequences.
    fn copy_slots(&mut self, sequences: usize) -> Result<(), BenchError> {
        (1..sequences).try_for_each(|slot| {
            self.model.copy_slot(0, narrow(slot)).map_err(|error| BenchError::model("copying", error))
        })
    }

    /// Moves the routers' biases until the rows of `steps` choose all experts about equally often: up where an expert is chosen
    /// less than on average, down where more (auxiliary-loss-free balancing, DeepSeek-V3 section 2.1.2), by less and less.
    fn balance(&mut self, steps: &[Step]) -> Result<(), BenchError> {
        let failed = |error| BenchError::model("balancing the routers", error);
        let mut biases: BTreeMap<usize, Vec<f32>> = BTreeMap::new();
        let mut pace = 0.25f32;
        while pace > 1e-4 {
            let mut met = Met::new(self.experts);
            for step in steps {
                self.model.forward(step, &mut met).map_err(failed)?;
            }
            if let Some(error) = met.failed {
                return Err(BenchError::model("balancing the routers", error));
            }
            for (layer, counts) in met.counts {
                let bias = biases.entry(layer).or_insert_with(|| vec![0.0; counts.len()]);
                let all: u64 = counts.iter().sum();
                for (bias, count) in bias.iter_mut().zip(&counts) {
                    *bias -= pace * ((count * counts.len() as u64).cmp(&all) as i8) as f32;
                }
                self.model.set_router_bias(layer, bias).map_err(failed)?;
            }
            pace *= 0.85;
        }
        Ok(())
    }

    fn forward(&mut self, step: &Step) -> Result<(), BenchError> {
        self.model.forward(step, &mut ()).map_err(|error| BenchError::model("a step", error))
    }

    fn parts(&mut self, step: &Step, insight: Insight<B>, wanted: bool) -> Result<Option<Parts>, BenchError> {
        if !wanted {
            return Ok(None);
        }
        (insight.set_noting)(self.model.backend_mut(), true);
        self.forward(step)?;
        (insight.set_noting)(self.model.backend_mut(), false);
        (insight.parts)(self.model.backend_mut()).map_err(|error| BenchError::model("parts of a step", error))
    }

    /// Microseconds of a step when many follow each other.
    fn chain(&mut self, step: &Step, repeats: usize) -> Result<f64, BenchError> {
        let began = Instant::now();
        for _ in 0..repeats {
            self.forward(step)?;
        }
        wait(&self.model)?;
        Ok(began.elapsed().as_secs_f64() * 1e6 / repeats.max(1) as f64)
    }

    fn measure(
        &mut self,
        sequences: usize,
        step: &Step,
        insight: Insight<B>,
        repeats: usize,
    ) -> Result<StepRow, BenchError> {
        // Scratch grows and kernels load in the first.
        for _ in 0..3 {
            self.forward(step)?;
        }
        wait(&self.model)?;
        (insight.set_eager)(self.model.backend_mut(), true);
        let before = (insight.launches)(self.backend());
        let eager = self.chain(step, repeats)?;
        let count = ((insight.launches)(self.backend()) - before) / repeats.max(1) as u64;
        (insight.set_eager)(self.model.backend_mut(), false);
        let mut times: Vec<f64> = Vec::with_capacity(repeats);
        for _ in 0..repeats {
            let began = Instant::now();
            self.forward(step)?;
            wait(&self.model)?;
            times.push(began.elapsed().as_secs_f64() * 1e6);
        }
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
        let chained = self.chain(step, repeats)?;
        let rows = step.rows();
        let mut met = Met::new(self.experts);
        self.model.forward(step, &mut met).map_err(|error| BenchError::model("a step", error))?;
        let experts = met.distinct();
        if let Some(error) = met.failed {
            return Err(BenchError::model("a step's choices", error));
        }
        let logits = step.logits.len();
        let head = 2.0 * (self.model.config().vocab_size * self.model.config().hidden_size) as f64;
        let rest = self.dense.1 - head / 2.0;
        let routed = self.routed.1 * self.top as f64 / self.experts.max(1) as f64;
        Ok(StepRow {
            sequences,
            rows,
            alone: [at(0.5), at(0.1), at(0.9)],
            chained,
            eager,
            launches: count,
            parts: None,
            experts,
            independent: {
                let all = self.experts as f64;
                all * (1.0 - (1.0 - self.top as f64 / all.max(1.0)).powf(rows as f64))
            },
            bytes: self.dense.0
                + self.routed.0 * experts / self.experts.max(1) as f64
                + self.slot_bytes * sequences as f64,
            flops: 2.0 * (rows as f64 * (rest + routed) + logits as f64 * head / 2.0),
        })
    }
}

/// Counts how often rows choose each expert of each layer.
#[derive(Debug)]
struct Met {
    counts: BTreeMap<usize, Vec<u64>>,
    experts: usize,
    /// What kept choices from being read.
    failed: Option<String>,
}

impl Met {
    fn new(experts: usize) -> Self {
        Self { counts: BTreeMap::new(), experts, failed: None }
    }

    /// Different experts of a layer, the mean of the layers.
    fn distinct(&self) -> f64 {
        let distinct: usize =
            self.counts.values().map(|counts| counts.iter().filter(|&&count| count > 0).count()).sum();
        distinct as f64 / self.counts.len().max(1) as f64
    }
}

impl<B: Backend> Observer<B> for Met {
    fn routing(&mut self, at: At<'_, B>, routing: &B::Routing) {
        let counts = self.counts.entry(at.layer).or_insert_with(|| vec![0; self.experts]);
        match at.backend.read_choices(routing, at.rows) {
            Ok(choices) => {
                for expert in choices {
                    match counts.get_mut(expert as usize) {
                        Some(count) => *count += 1,
                        None => self.failed = Some(format!("expert {expert} was chosen, which does not exist")),
                    }
                }
            }
            Err(error) => self.failed = Some(error.to_string()),
        }
    }
}

/// Rows by whose choices the routers are balanced, about.
const BALANCED: usize = 512;

/// Rows of a chunk by which the prompt before the decoding steps is computed.
const CHUNK: usize = 2048;

fn narrow(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn token(i: usize) -> u32 {
    narrow(1 + i * 7919 % 2039)
}

/// Waits until everything has been computed.
fn wait<B: Backend>(model: &Model<B>) -> Result<(), BenchError> {
    let mut row = vec![0.0; model.config().hidden_size];
    model.hidden(0, &mut row).map_err(|error| BenchError::model("a step", error))?;
    if row.iter().all(|v| v.is_finite()) {
        return Ok(());
    }
    Err(BenchError::model("a step", "the hidden state is not finite: what was measured is no model's work"))
}

/// A chunk of slot 0's prompt.
fn chunk(first: usize, rows: usize) -> Step {
    let pages: Vec<u32> = (0..narrow((first + rows).div_ceil(PAGE_TOKENS))).collect();
    let segment = Segment {
        slot: 0,
        position: narrow(first),
        rows: narrow(rows),
        fold: 0,
        commit: narrow(rows),
        first_page: 0,
        pages: narrow(pages.len()),
    };
    let tokens = (first..first + rows).map(token).collect();
    Step { tokens, segments: vec![segment], pages, logits: vec![narrow(rows) - 1], features: Vec::new() }
}

/// A step of `sequences` sequences behind the prompt, whose whole pages they share; `first` says which tokens they have.
fn decode(sequences: usize, rows: usize, first: usize, [context, shared, own]: [usize; 3]) -> Step {
    let mut step = Step::default();
    let whole = context / PAGE_TOKENS;
    for sequence in 0..sequences {
        let first_page = narrow(step.pages.len());
        step.pages.extend((0..whole).map(narrow));
        let needed = (context + rows).div_ceil(PAGE_TOKENS) - whole;
        step.pages.extend((0..needed).map(|page| narrow(shared + sequence * own + page)));
        step.segments.push(Segment {
            slot: narrow(sequence),
            position: narrow(context),
            rows: narrow(rows),
            fold: 0,
            commit: 1,
            first_page,
            pages: narrow(whole + needed),
        });
        step.tokens.extend((0..rows).map(|row| token(first + sequence * rows + row)));
    }
    step.logits = (0..narrow(step.tokens.len())).collect();
    step
}

#[cfg(test)]
mod tests {
    use glimmer_tensor::Cpu;

    use super::*;

    #[test]
    fn rows_of_a_step_choose_experts_about_as_if_they_were_independent() {
        const MICRO: &str = include_str!("../../../models/micro-bf16/config.json");
        let config = MICRO.replace("\"n_routed_experts\": 8", "\"n_routed_experts\": 64");
        let source = DummySource::new(&config, Some(5), true).unwrap();
        let plan = StepPlan { sequences: vec![8, 24], rows: 2, context: 128, prefill: 64, repeats: 1 };
        let mut bench = StepBench::load(Cpu::new(1), &source, plan).unwrap();
        let rows = bench.run(Insight::none(), false, &mut |_| ()).unwrap();
        assert_eq!(rows.iter().map(|row| row.rows).collect::<Vec<_>>(), [64, 16, 48]);
        for row in rows {
            let share = row.experts / row.independent;
            assert!((0.8..1.25).contains(&share), "{} of {} experts", row.experts, row.independent);
        }
    }
}
