//! The CUDA device as a [`glimmer_tensor::Backend`].
//!
//! Activations and caches are f32, as on the CPU; products take activations as two 16-bit planes (see `kernels/gemm.rs`).
//! Stages only enqueue kernels in the device's stream; the host waits when it reads. What they enqueue for a step is kept as a
//! graph when it comes again (`steps.rs`).

mod stages;
mod steps;
mod transfer;
mod weights;

use std::{collections::HashMap, path::PathBuf, sync::Mutex};

use glimmer_checkpoint::Config;
use glimmer_tensor::Result;
use steps::Steps;
use transfer::Fetched;

use crate::{
    compile::Compiler,
    device::Device,
    error,
    kernels::sampler::Sampling,
    launch::Kernels,
    library::Library,
    memory::{Allocator, Memory},
    plan::{Plan, Role},
    types::CudaMatrix,
    units::{needs_warpgroups, units},
};

/// Where a device and its compiler are found.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Number of the device.
    pub ordinal: usize,
    /// The compiler library; found by the loader when absent.
    pub compiler: Option<PathBuf>,
    /// Folder of compiled kernels; without it they are compiled at every start.
    pub cache: Option<PathBuf>,
    /// Products with BF16 weights take activations as one 16-bit number instead of two: less work, an error of a product of
    /// about 2e-3.
    pub single_plane: bool,
    /// Latents and index keys are kept as halves (11 bits) instead of f32, at this model's shapes on compute capability 9.0: half
    /// the memory, and attention and index scores on tensor cores. Attention is then exact to about 2e-4 of its norm, scores
    /// to about 4e-4, so that nearly tied pools may be told apart differently.
    pub half_cache: bool,
    /// Every kernel of every step is launched by itself; no graphs are kept.
    pub eager: bool,
    /// Products of many rows are left to the crate's own kernels even where cuBLASLt is there. That is slower, but f32 goldens then
    /// hold for prompts of any length, and a row's bits do not depend on how many rows its step has, but for widths that the
    /// kernels of few rows take (whole slices of 512 columns: up to 24 rows, BF16 experts up to 128).
    pub own_products: bool,
}

/// One CUDA device.
#[derive(Debug)]
pub struct Cuda {
    pub(crate) device: Device,
    pub(crate) kernels: Kernels,
    pub(crate) memory: Allocator,
    pub(crate) plan: Plan,
    /// Scratch of the stages by use; it only grows.
    scratch: HashMap<&'static str, Memory>,
    /// Steps that are kept as graphs.
    steps: Steps,
    /// Logits on their way to the host.
    fetched: Mutex<Fetched>,
    /// Rules and tokens of sampled rows.
    pub(crate) sampling: Sampling,
    /// Addresses of the experts' matrices, by the digest of their ids.
    pub(crate) tables: HashMap<u64, Memory>,
    /// Small matrices one below the other, by the digest of their ids.
    pub(crate) stacks: HashMap<u64, CudaMatrix>,
    /// Routing, rows and tiles of the work list in scratch.
    pub(crate) planned: Option<(u64, usize, usize)>,
    /// Planes of activations that products take.
    pub(crate) planes: usize,
    /// Caches are made of halves where there are kernels for them.
    pub(crate) half_cache: bool,
    /// Products of many rows, where the library is there.
    pub(crate) library: Option<Library>,
    /// The matrix that scratch holds as halves: its id, and where.
    pub(crate) halved: Option<(u64, u64)>,
    /// Tokens of the experts' work items other than their own choice (for measurements).
    pub(crate) tuning: Option<usize>,
    /// Clusters of products with few rows that the device holds at a time, by their blocks and whether two blocks share a
    /// multiprocessor.
    pub(crate) few_groups: HashMap<(usize, bool), usize>,
    /// Rotary angles of the last picture: height, width, head width.
    pub(crate) turns: Option<((usize, usize, usize), Memory)>,
}

impl Cuda {
    /// Opens a device and loads the compiler.
    ///
    /// # Errors
    /// [`error::CudaError`] saying what is missing.
    pub fn open(options: &Options) -> error::Result<Self> {
        let device = Device::open(options.ordinal)?;
        let compiler = Compiler::load(options.compiler.as_deref(), options.cache.clone())?;
        Ok(Self {
            memory: Allocator::new(device.clone()),
            kernels: Kernels::new(device.clone(), compiler),
            device,
            plan: Plan::new(),
            scratch: HashMap::new(),
            steps: Steps::new(options.eager),
            fetched: Mutex::new(Fetched::default()),
            sampling: Sampling::default(),
            tables: HashMap::new(),
            stacks: HashMap::new(),
            planned: None,
            planes: if options.single_plane { 1 } else { 2 },
            half_cache: options.half_cache,
            library: if options.own_products { None } else { Library::load(options.compiler.as_deref()) },
            halved: None,
            tuning: None,
            few_groups: HashMap::new(),
            turns: None,
        })
    }

    /// Compiles all kernels of a model, in parallel, into the folder of compiled kernels: how many there are.
    ///
    /// # Errors
    /// [`error::CudaError::Compile`] for the first that does not compile.
    pub fn prepare(&self, config: &Config) -> error::Result<usize> {
        let mut all = units(config, false);
        let (major, _) = self.device.properties().capability;
        all.retain(|unit| major == 9 || !needs_warpgroups(unit));
        Ok(self.kernels.prepare(&all)?.len())
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether products of many rows are cuBLASLt's; without it the crate's own kernels do them, at a fraction of the rate.
    pub fn has_library(&self) -> bool {
        self.library.is_some()
    }

    /// The kernels.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Bytes of all scratch that the stages have taken so far; `glimmer_model::plan::scratch` says beforehand how many they may be.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.values().map(Memory::bytes).sum()
    }

    /// Address of scratch for `what`, at least `bytes` long, with any content.
    pub(crate) fn scratch(&mut self, what: &'static str, bytes: usize) -> Result<u64> {
        Ok(self.scratch_memory(what, bytes)?.address())
    }

    /// As [`Self::scratch`] for words that kernels leave at zero, which they are at first.
    pub(crate) fn zeroed_scratch(&mut self, what: &'static str, bytes: usize) -> Result<u64> {
        // Larger memory may begin where the smaller did.
        let place = |memory: &Memory| (memory.address(), memory.bytes());
        let held = self.scratch.get(what).map(place);
        let memory = self.scratch_memory(what, bytes)?;
        if held != Some(place(&memory)) {
            memory.fill(0)?;
        }
        Ok(memory.address())
    }

    pub(crate) fn scratch_memory(&mut self, what: &'static str, bytes: usize) -> Result<Memory> {
        if let Some(memory) = self.scratch.get(what).filter(|memory| memory.bytes() >= bytes) {
            return Ok(memory.clone());
        }
        // Old and new do not have to fit together. Graphs know the old one's address.
        if self.scratch.remove(what).is_some() {
            self.forget_steps();
        }
        const LARGE: usize = 64 << 20;
        let size = if bytes < LARGE { bytes.next_power_of_two() } else { bytes.next_multiple_of(LARGE) };
        let memory = self.memory.uninitialized(what, size)?;
        self.scratch.insert(what, memory.clone());
        Ok(memory)
    }

    /// The device's list of the rows that the current step has in a role; of others, a list that is sent now.
    pub(crate) fn list(&mut self, role: Role, rows: &[u32]) -> Result<u64> {
        if let Some(address) = self.plan.list(role, rows) {
            return Ok(address);
        }
        // A graph would read what was sent for another step.
        self.kernels.stop_noting();
        self.plan.send_list(&self.device, &self.memory, rows)
    }
}
