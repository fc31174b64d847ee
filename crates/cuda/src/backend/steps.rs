//! Steps kept as graphs.
//!
//! A graph repeats launches with the arguments that they had. So everything that differs between steps of one [`Key`] lies
//! behind addresses that do not: the plan's block, filled by one copy before the graph runs. What a key does not fix must not
//! reach a launch; whether that holds is not taken on trust: a step is kept only if its launches and the library's products were
//! the same twice, and nothing else went into the stream (a copy).

use glimmer_tensor::{Program, Result, Step};

use super::{Cuda, transfer::Rows};
use crate::{graph::Graph, launch::Work, plan::Key, shelf::Shelf};

/// Graphs that are kept at most.
const GRAPHS: usize = 64;

/// What a step did.
#[derive(Debug, PartialEq)]
struct Noted {
    work: Vec<Work>,
    /// The logits that it left.
    logits: Option<Rows>,
}

/// A step that can be repeated.
#[derive(Debug)]
struct Kept {
    graph: Graph,
    logits: Option<Rows>,
    nodes: usize,
}

/// All of them, and the step that is under way.
#[derive(Debug)]
pub(super) struct Steps {
    eager: bool,
    /// Every step's work is noted, also of those that are never kept (for measurements).
    noting: bool,
    shelf: Shelf<Key, Noted, Kept>,
    current: Option<Key>,
    /// Work of the step that was kept or noted last (for measurements).
    last: Vec<Work>,
    /// Nodes of the last step that was repeated, and how many were.
    repeated: (usize, u64),
}

impl Steps {
    pub(super) fn new(eager: bool) -> Self {
        Self { eager, noting: false, shelf: Shelf::new(GRAPHS), current: None, last: Vec::new(), repeated: (0, 0) }
    }
}

impl Cuda {
    /// Whether steps are never kept from now on.
    pub fn set_eager(&mut self, eager: bool) {
        self.steps.eager = eager;
    }

    /// Whether the work of every step is noted from now on, for [`crate::bench::step_parts`].
    pub fn set_noting(&mut self, noting: bool) {
        self.steps.noting = noting;
    }

    /// Steps that were repeated as a graph, and the nodes of the last one.
    pub fn repeated(&self) -> (u64, usize) {
        (self.steps.repeated.1, self.steps.repeated.0)
    }

    /// Work of the step that was kept or noted last.
    pub(crate) fn last_kept(&self) -> &[Work] {
        &self.steps.last
    }

    pub(crate) fn begin_step(&mut self, step: &Step, lists: [&[u32]; 3]) -> Result<()> {
        // Notes of a step that was left in the middle.
        self.kernels.stop_noting();
        self.steps.current = None;
        // A graph begins with nothing in scratch that it could use.
        (self.halved, self.planned) = (None, None);
        self.expect(None);
        if self.plan.begin(&self.device, &self.memory, step, lists)? {
            self.forget_steps();
        }
        if self.steps.noting {
            self.kernels.note();
        }
        Ok(())
    }

    /// [`glimmer_tensor::Backend::replay`].
    pub(super) fn replay_step(&mut self, step: &Step, program: Program<'_>) -> Result<bool> {
        self.begin_step(step, [program.source, program.shared, program.taken])?;
        if self.steps.eager {
            return Ok(false);
        }
        let key = self.plan.key(program.stages);
        if let Some(kept) = self.steps.shelf.find(&key) {
            kept.graph.launch()?;
            let (logits, nodes) = (kept.logits, kept.nodes);
            self.steps.repeated = (nodes, self.steps.repeated.1 + 1);
            self.expect(logits);
            return Ok(true);
        }
        self.steps.current = Some(key);
        self.kernels.note();
        Ok(false)
    }

    /// [`glimmer_tensor::Backend::finish`].
    pub(super) fn finish_step(&mut self) -> Result<()> {
        let (work, key) = (self.kernels.stop_noting(), self.steps.current.take());
        let Some(work) = work else { return Ok(()) };
        let Some(key) = key else {
            self.steps.last = work;
            return Ok(());
        };
        let logits = self.expected();
        let (device, kernels, library, last) = (&self.device, &self.kernels, &mut self.library, &mut self.steps.last);
        self.steps.shelf.put(key, Noted { work, logits }, |noted| {
            let graph = Graph::capture(device, || kernels.repeat(&noted.work, library))?;
            last.clone_from(&noted.work);
            Ok(Kept { nodes: graph.nodes()?, graph, logits })
        })
    }

    /// Forgets all steps: an address that they know is no longer what it was.
    pub(crate) fn forget_steps(&mut self) {
        self.kernels.stop_noting();
        self.steps.shelf.clear();
        self.steps.last.clear();
    }
}
