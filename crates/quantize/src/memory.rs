//! How much memory a run takes, and what it is spent on.
//!
//! A run cannot do without one layer's weights, the buffers of its forward pass, and one solver (second moments, factor,
//! targets and errors of a matrix). More memory buys time in this order: every expert's second moments kept between the two
//! passes over the down projections, a solver for each thread, expert inputs in memory. Residual streams in memory instead
//! of a working file buy next to nothing, because the system caches that file as long as nobody else wants the room.
//!
//! [`Budget::Automatic`] is therefore what the first two take, and rows only where they are small; never more than half of
//! what is free. Invariant: the plan decides where values lie and how many threads make them, never what they are.

use glimmer_checkpoint::int4::GROUP;
use glimmer_checkpoint::inventory::Group;
use glimmer_checkpoint::{AttentionKind, Config, IndexerKind, Inventory};
use glimmer_model::plan::{self, Elements, Ranks, Wish};
use glimmer_model::streaming::RunnerLimits;
use glimmer_tensor::PAGE_TOKENS;

use crate::experts::PIECE;
use crate::hessian::Moments;
use crate::recipe::{DownInputs, Method, Recipe};

/// The program itself, what its allocator keeps, the ends of mapped files.
const PROGRAM: usize = 128 << 20;
/// Rows that an automatic budget holds in memory: as many as take no longer to read from a file than to forget.
const SMALL_ROWS: usize = 256 << 20;
/// Streams that are read or written at a time.
const BATCH: usize = 64 << 20;

/// Memory that a run may take, all of it: mapped weights and the program included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Budget {
    /// What makes the run faster, up to half of what is free.
    Automatic {
        /// Bytes that are free on this machine; `None` where the system does not tell.
        free_bytes: Option<u64>,
    },
    /// So many bytes, or as few as the model can do with.
    Bytes(usize),
}

/// What a run needs, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    threads: usize,
    /// At any time: program, weights of the widest layer without its experts, buffers of the forward pass, a batch, routing.
    base: usize,
    /// Beside the solvers while gate and up are made.
    gate_up: usize,
    gate_up_solver: usize,
    /// Beside the solvers while down is made.
    down: usize,
    down_solver: usize,
    /// Second moments of all experts' activations.
    moments: usize,
    /// The packed experts while the layer is finished.
    finish: usize,
    inputs: usize,
    streams: usize,
    /// Rows of streams that are read or written at a time.
    batch_rows: usize,
}

/// How a budget is spent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shares {
    /// Bytes that the run is expected to take.
    pub(crate) planned: usize,
    /// Matrices of gate and up, and of down, that are solved at a time.
    pub(crate) gate_up_solvers: usize,
    pub(crate) down_solvers: usize,
    /// Whether the activations' second moments are kept between the pool and the solvers, or made twice.
    pub(crate) keep_moments: bool,
    /// Whether expert inputs and residual streams lie in memory.
    pub(crate) inputs_in_memory: bool,
    pub(crate) streams_in_memory: bool,
    /// Rows of streams that are read or written at a time.
    pub(crate) batch_rows: usize,
}

/// A solver's bytes for a matrix `[rows, cols]`: own moments, factor, targets and errors of some rows, the weights in four
/// forms (as stored, dequantized twice, error) and codes.
fn solver(rows: usize, cols: usize) -> usize {
    /// Rows that are solved at a time, padding included.
    const SOLVED: usize = 528;
    let element = Moments::bytes(cols) / (cols * cols).max(1);
    2 * Moments::bytes(cols) + 2 * rows.min(SOLVED) * cols * element + 18 * rows * cols
}

impl Needs {
    /// What a run over `tokens` calibration tokens needs, the forward pass within `limits`.
    pub(crate) fn new(config: &Config, recipe: &Recipe, tokens: usize, limits: &RunnerLimits, threads: usize) -> Self {
        let text = &config.text;
        let (hidden, width, experts) = (text.hidden_size, text.moe.intermediate_size, text.moe.num_experts);
        if recipe.method == Method::Rtn {
            let (base, gate_up_solver) = (PROGRAM, 18 * hidden * width);
            return Self { threads, base, gate_up_solver, ..Self::default() };
        }
        // A piece of gathered rows in f32, and in the precision of the sums where that is another.
        let piece = |cols: usize| PIECE.min(tokens) * cols * (Moments::bytes(cols) / (cols * cols).max(1) + 4);
        let matrix = hidden * width;
        let packed = matrix / 2 + 2 * matrix / GROUP;
        let kept = if recipe.down_inputs == DownInputs::Quantized { 2 * experts * packed } else { 0 };
        let row = text.mhc.streams * hidden * size_of::<f32>();
        let batch_rows = (BATCH / row.max(1)).clamp(1, 1 << 14);
        let batch = batch_rows.min(tokens).max(limits.max_tokens) * row;
        let selections = (0..text.num_hidden_layers)
            .any(|l| text.attention[l] == AttentionKind::Dsa && text.indexer.kinds[l] == IndexerKind::Shared);
        let selected = if selections { text.selection_width().min(limits.max_tokens) } else { 0 };
        let routed = text.moe.experts_per_token * 4 * size_of::<u32>();
        Self {
            threads,
            base: PROGRAM
                + layer_weights(config)
                + forward(config, limits)
                + batch
                + batch / text.mhc.streams.max(1)
                + tokens * (routed + selected * size_of::<u32>()),
            gate_up: Moments::bytes(hidden) + kept,
            gate_up_solver: solver(width, hidden) + piece(hidden),
            down: Moments::bytes(width) + kept + piece(width) + PIECE.min(tokens) * hidden * size_of::<f32>(),
            down_solver: solver(hidden, width),
            moments: experts * Moments::bytes(width),
            finish: 3 * experts * packed,
            inputs: tokens * hidden * size_of::<f32>(),
            streams: tokens * row,
            batch_rows,
        }
    }

    /// The least that a run can do with.
    pub(crate) fn least(&self) -> usize {
        let gate_up = self.gate_up + self.gate_up_solver;
        self.base + gate_up.max(self.down + self.down_solver).max(self.finish)
    }

    /// What to tell people of a budget, or a machine, with less than that.
    pub(crate) fn too_little(&self, budget: Budget) -> Option<String> {
        let gib = |bytes: usize| format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30));
        let least = self.least();
        match budget {
            Budget::Bytes(bytes) if bytes < least => Some(format!(
                "a budget of {} is less than one layer of this model takes; working with the least, about {}",
                gib(bytes),
                gib(least)
            )),
            Budget::Automatic { free_bytes: Some(free) } if free < least as u64 => Some(format!(
                "one layer of this model takes about {}, and {} of memory are free; end other programs if this run fails",
                gib(least),
                gib(usize::try_from(free).unwrap_or(usize::MAX))
            )),
            _ => None,
        }
    }

    /// What makes a run faster.
    fn wanted(&self) -> usize {
        let gate_up = self.gate_up + self.threads * self.gate_up_solver;
        let down = self.down + self.moments + self.threads * self.down_solver;
        let rows = [self.inputs + self.streams, self.inputs].into_iter().find(|&rows| rows <= SMALL_ROWS);
        self.base + gate_up.max(down).max(self.finish) + rows.unwrap_or(0)
    }

    /// Spends a budget; one that is too small counts as the least.
    pub(crate) fn spend(&self, budget: Budget) -> Shares {
        let budget = match budget {
            Budget::Bytes(bytes) => bytes,
            Budget::Automatic { free_bytes: None } => self.wanted(),
            Budget::Automatic { free_bytes: Some(free) } => {
                self.wanted().min(usize::try_from(free / 2).unwrap_or(usize::MAX))
            }
        };
        let budget = budget.max(self.least());
        let room = budget - self.base;
        let solvers =
            |beside: usize, one: usize| (room.saturating_sub(beside) / one.max(1)).clamp(1, self.threads.max(1));
        let keep_moments = self.down + self.moments + self.down_solver <= room;
        let down = self.down + if keep_moments { self.moments } else { 0 };
        let gate_up_solvers = solvers(self.gate_up, self.gate_up_solver);
        let down_solvers = solvers(down, self.down_solver);
        let used = (self.gate_up + gate_up_solvers * self.gate_up_solver)
            .max(down + down_solvers * self.down_solver)
            .max(self.finish);
        let mut planned = self.base + used;
        let mut fits = |bytes: usize| {
            let fits = bytes <= budget - planned;
            planned += if fits { bytes } else { 0 };
            fits
        };
        let (inputs_in_memory, streams_in_memory) = (fits(self.inputs), fits(self.streams));
        let batch_rows = self.batch_rows;
        Shares { planned, gate_up_solvers, down_solvers, keep_moments, inputs_in_memory, streams_in_memory, batch_rows }
    }
}

/// Bytes of the widest layer's tensors without its routed experts.
fn layer_weights(config: &Config) -> usize {
    let mut layers = vec![0u64; config.text.num_hidden_layers];
    for spec in Inventory::bf16(config).tensors().iter().filter(|spec| spec.group != Group::MoeRouted) {
        if let Some(bytes) = spec.layer.and_then(|layer| layers.get_mut(layer)) {
            *bytes += spec.bytes();
        }
    }
    usize::try_from(layers.into_iter().max().unwrap_or(0)).unwrap_or(usize::MAX)
}

/// Bytes of the buffers and caches of a [`Runner`](glimmer_model::streaming::Runner), which holds one layer of each kind.
fn forward(config: &Config, limits: &RunnerLimits) -> usize {
    let text = &config.text;
    let needs = plan::Needs::of(&Wish {
        config,
        inventory: &Inventory::bf16(config),
        ranks: Ranks { count: 1, whole_experts: false },
        draft_layer: false,
        vision: false,
        max_rows: limits.max_rows,
        max_logits: 0,
        max_draft: 0,
        elements: Elements::F32,
    });
    let (kda, dsa) = (text.kda_layers().count().max(1) as u64, text.dsa_layers().count().max(1) as u64);
    let slot = (needs.slot.total() - needs.slot.tails) / kda + needs.slot.tails / dsa;
    let pages = (limits.slots * limits.max_tokens.div_ceil(PAGE_TOKENS)) as u64;
    let bytes = needs.activations + limits.slots as u64 * slot + pages * (needs.page / dsa);
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// The configuration of the synthetic checkpoint whose peak is recorded, 12,000 tokens in samples of 500.
    fn synthetic(threads: usize) -> Needs {
        let text = include_str!("../../../benches/configs/synthetic-4gib.json");
        let config = Config::parse(text).expect("a configuration");
        let limits = RunnerLimits { max_rows: 512, max_tokens: 500, slots: 16 };
        Needs::new(&config, &Recipe::default(), 12_000, &limits, threads)
    }

    #[test]
    fn what_is_left_to_itself_takes_what_buys_time_and_no_more() {
        let needs = synthetic(2);
        let shares = needs.spend(Budget::Automatic { free_bytes: None });
        assert_eq!((shares.gate_up_solvers, shares.down_solvers, shares.keep_moments), (2, 2, true));
        assert!(shares.inputs_in_memory && !shares.streams_in_memory, "{shares:?}");
        assert!(shares.planned <= 1536 * MIB && shares.planned >= needs.least(), "{}", shares.planned / MIB);
        let little = needs.spend(Budget::Automatic { free_bytes: Some(1 << 30) });
        assert!(little.planned <= needs.least().max(512 * MIB) && !little.keep_moments, "{little:?}");
    }

    #[test]
    fn a_budget_is_kept_and_spent_on_the_dearest_first() {
        let needs = synthetic(4);
        let mut last = needs.spend(Budget::Bytes(0));
        assert_eq!((last.gate_up_solvers, last.down_solvers, last.keep_moments), (1, 1, false));
        assert_eq!(last.planned, needs.least());
        let note = needs.too_little(Budget::Bytes(MIB)).expect("too little");
        assert!(note.contains("a budget of 0.00 GiB is less than one layer"), "{note}");
        assert_eq!(needs.too_little(Budget::Bytes(needs.least())), None);
        for mib in (0..3072).step_by(16) {
            let shares = needs.spend(Budget::Bytes(mib * MIB));
            assert!(shares.planned <= needs.least().max(mib * MIB), "{mib}: {shares:?}");
            assert!(shares.keep_moments || !last.keep_moments, "{mib}: {shares:?}");
            assert!(shares.gate_up_solvers >= last.gate_up_solvers, "{mib}: {shares:?}");
            last = shares;
        }
        assert!(last.streams_in_memory && last.inputs_in_memory && last.down_solvers == 4, "{last:?}");
    }
}
