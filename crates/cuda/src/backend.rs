//! The CUDA device as a [`Backend`].
//!
//! Activations and caches are f32, as on the CPU; products take activations as two 16-bit planes (see `kernels/gemm.rs`).
//! Stages only enqueue kernels in the device's stream; the host waits when it reads.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use glimmer_checkpoint::{Config, DType, TensorData};
use glimmer_tensor::{
    Backend, CacheShape, Columns, DsaColumns, DsaWeights, Error, Experts, IndexerWeights, KdaForm, KdaWeights, Linear,
    MatrixSource, MhcWeights, Norm, PatchGrid, Result, RouterRule, Step, Streams, Swiglu,
};

use crate::{
    cache::CudaCache,
    compile::Compiler,
    device::Device,
    error,
    kernels::{dense, dsa, experts, kda, mhc, mla, moe, vision},
    launch::{Arguments, Grid, Kernels},
    memory::{Allocator, Memory},
    plan::Plan,
    types::{
        BLOCK, CudaBuffer, CudaMatrix, CudaRouting, CudaSelection, CudaVector, Format, GROUP, INT4_BLOCK_BYTES,
        INT4_ROWS, Kind, require, unique,
    },
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
    /// Raw bytes of a matrix on their way into the device's layout.
    staging: Mutex<Option<Memory>>,
    /// Addresses of the experts' matrices, by the digest of their ids.
    pub(crate) tables: HashMap<u64, Memory>,
    /// Routing, rows and tiles of the work list in scratch.
    pub(crate) planned: Option<(u64, usize, usize)>,
    /// Planes of activations that products take.
    pub(crate) planes: usize,
    /// Caches are made of halves where there are kernels for them.
    pub(crate) half_cache: bool,
    /// Sizes of the experts' kernel other than its own choice (for measurements).
    pub(crate) tuning: Option<experts::Sizes>,
    /// Counters by which blocks of the experts' kernel wait for each other; zero between launches.
    pub(crate) flags: Option<Memory>,
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
            staging: Mutex::new(None),
            tables: HashMap::new(),
            planned: None,
            planes: if options.single_plane { 1 } else { 2 },
            half_cache: options.half_cache,
            tuning: None,
            flags: None,
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

    /// The kernels.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Address of scratch for `what`, at least `bytes` long, with any content.
    pub(crate) fn scratch(&mut self, what: &'static str, bytes: usize) -> Result<u64> {
        Ok(self.scratch_memory(what, bytes)?.address())
    }

    pub(crate) fn scratch_memory(&mut self, what: &'static str, bytes: usize) -> Result<Memory> {
        if let Some(memory) = self.scratch.get(what).filter(|memory| memory.bytes() >= bytes) {
            return Ok(memory.clone());
        }
        // Old and new do not have to fit together.
        self.scratch.remove(what);
        const LARGE: usize = 64 << 20;
        let size = if bytes < LARGE { bytes.next_power_of_two() } else { bytes.next_multiple_of(LARGE) };
        let memory = self.memory.uninitialized(what, size)?;
        self.scratch.insert(what, memory.clone());
        Ok(memory)
    }

    /// Sends row numbers to the device.
    pub(crate) fn list(&mut self, rows: &[u32]) -> Result<u64> {
        self.plan.list(&self.device, &self.memory, rows)
    }

    fn plain_matrix(&self, tensor: &TensorData) -> Result<CudaMatrix> {
        check_bytes(tensor)?;
        // A matrix stored with more axes (a convolution) is `[first axis, product of the others]`.
        let Some((&out, rest)) = tensor.shape.split_first().filter(|(_, rest)| !rest.is_empty()) else {
            return Err(wrong(tensor, "a matrix [out, in]"));
        };
        self.rows_matrix(tensor, out, rest.iter().product(), tensor.bytes.as_slice())
    }

    fn rows_matrix(&self, tensor: &TensorData, out: usize, columns: usize, bytes: &[u8]) -> Result<CudaMatrix> {
        let kind = match tensor.dtype {
            DType::Bf16 => Kind::Bf16,
            DType::F32 => Kind::F32,
            _ => return Err(wrong(tensor, "BF16 or F32")),
        };
        let pitch = if kind == Kind::Bf16 && columns >= BLOCK { columns.next_multiple_of(BLOCK) } else { columns };
        let size = tensor.dtype.size();
        let data = if pitch == columns {
            self.memory.uninitialized("a matrix", out * pitch * size)?
        } else {
            self.memory.zeroed("a matrix", out * pitch * size)?
        };
        data.write_rows(bytes, columns * size, pitch * size)?;
        Ok(CudaMatrix { kind, out, columns, pitch, data, id: unique() })
    }

    fn int4_matrix(&self, packed: &TensorData, scale: &TensorData) -> Result<CudaMatrix> {
        check_bytes(packed)?;
        check_bytes(scale)?;
        let &[out, words] = packed.shape.as_slice() else { return Err(wrong(packed, "a matrix I32 [out, in / 8]")) };
        if packed.dtype != DType::I32 {
            return Err(wrong(packed, "I32 [out, in / 8]"));
        }
        let columns = 8 * words;
        if !columns.is_multiple_of(GROUP) || !out.is_multiple_of(8) {
            return Err(wrong(packed, "rows in eights, of whole groups of 128 columns (16 words)"));
        }
        if scale.dtype != DType::Bf16 || scale.shape != [out, columns / GROUP] {
            return Err(wrong(scale, &format!("BF16 [{out}, {}]", columns / GROUP)));
        }
        let (raw, raw_scale) = (packed.bytes.as_slice(), scale.bytes.as_slice());
        experts::check_scales(raw_scale)
            .map_err(|found| wrong(scale, &format!("scales below 1 in size, not {found}")))?;
        let scale_at = raw.len().next_multiple_of(256);
        // Whole strips of rows; what lies beyond the last row is read, not used.
        let bytes = out.next_multiple_of(INT4_ROWS) / 8 * (columns / GROUP) * INT4_BLOCK_BYTES;
        let data = self.memory.zeroed("a matrix", bytes)?;
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let staged = match staging.take().filter(|s| s.bytes() >= scale_at + raw_scale.len()) {
            Some(staged) => staged,
            None => self.memory.uninitialized("staging", scale_at + raw_scale.len())?,
        };
        staged.write(0, raw)?;
        staged.write(scale_at, raw_scale)?;
        let arguments = Arguments::new()
            .with(staged.address())
            .with(staged.address() + scale_at as u64)
            .int(out)
            .int(columns)
            .with(data.address());
        let kernel = self.kernels.get(&dense::FILE, &[], "pack_int4")?;
        self.kernels.launch(kernel, Grid::new([(out * words).div_ceil(256), 1, 1], 256), arguments)?;
        *staging = Some(staged);
        Ok(CudaMatrix { kind: Kind::Int4, out, columns, pitch: columns, data, id: unique() })
    }
}

fn check_bytes(tensor: &TensorData) -> Result<()> {
    let expected = tensor.shape.iter().try_fold(tensor.dtype.size(), |n, &d| n.checked_mul(d));
    if expected == Some(tensor.bytes.as_slice().len()) {
        return Ok(());
    }
    Err(wrong(tensor, &format!("as many bytes as dtype and shape say, not {}", tensor.bytes.as_slice().len())))
}

fn wrong(tensor: &TensorData, expected: &str) -> Error {
    Error::Weight {
        name: tensor.name.clone(),
        expected: expected.to_owned(),
        found: format!("{} {:?}", tensor.dtype, tensor.shape),
    }
}

fn widen(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

impl Backend for Cuda {
    type Matrix = CudaMatrix;
    type Vector = CudaVector;
    type Buffer = CudaBuffer;
    type Selection = CudaSelection;
    type Routing = CudaRouting;
    type Cache = CudaCache;

    fn matrix(&self, source: MatrixSource<'_>) -> Result<CudaMatrix> {
        match source {
            MatrixSource::Dense(tensor) => self.plain_matrix(tensor),
            MatrixSource::Int4 { packed, scale } => self.int4_matrix(packed, scale),
        }
    }

    fn vector(&self, source: &TensorData) -> Result<CudaVector> {
        check_bytes(source)?;
        let bytes = source.bytes.as_slice();
        let values: Vec<f32> = match source.dtype {
            DType::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            DType::Bf16 => bytes.as_chunks::<2>().0.iter().map(|b| widen(*b)).collect(),
            _ => return Err(wrong(source, "BF16 or F32")),
        };
        Ok(CudaVector { memory: self.memory.upload("a parameter vector", &values)?, len: values.len() })
    }

    fn matrix_from(&self, name: &str, out: usize, values: &[f32]) -> Result<CudaMatrix> {
        let fail = |expected: String, found: String| Error::Weight { name: name.to_owned(), expected, found };
        if out == 0 || !values.len().is_multiple_of(out) {
            return Err(fail(format!("{out} rows of equal width"), format!("{} values", values.len())));
        }
        let mut bytes = Vec::with_capacity(2 * values.len());
        for (i, v) in values.iter().enumerate() {
            if v.to_bits() & 0xffff != 0 {
                return Err(fail("values representable in BF16".to_owned(), format!("{v:e} at element {i}")));
            }
            bytes.extend_from_slice(&v.to_bits().to_le_bytes()[2..]);
        }
        let shape = vec![out, values.len() / out];
        let bytes = glimmer_checkpoint::Bytes::new(bytes);
        self.plain_matrix(&TensorData { name: name.to_owned(), dtype: DType::Bf16, shape, bytes })
    }

    fn buffer(&self, rows: usize, width: usize) -> Result<CudaBuffer> {
        let what = "an activation buffer";
        let bytes = rows.checked_mul(width).and_then(|n| n.checked_mul(4));
        let bytes = bytes.ok_or(Error::Memory { what, bytes: usize::MAX })?;
        Ok(CudaBuffer { memory: self.memory.zeroed(what, bytes)?, rows, width, format: Format::Float })
    }

    fn selection(&self, rows: usize, width: usize) -> Result<CudaSelection> {
        let tokens = self.memory.zeroed("a selection", 4 * rows * width)?;
        Ok(CudaSelection { tokens, lens: self.memory.zeroed("a selection", 4 * rows)?, rows, width })
    }

    fn routing(&self, rows: usize, top: usize, experts: usize) -> Result<CudaRouting> {
        let piece = || self.memory.zeroed("a routing", 4 * rows * top);
        Ok(CudaRouting { experts: piece()?, weights: piece()?, rows, top, num_experts: experts, id: unique() })
    }

    fn cache(&self, shape: &CacheShape) -> Result<CudaCache> {
        let half = self.half_cache && self.device.properties().capability.0 == 9;
        CudaCache::new(&self.memory, shape, half)
    }

    fn reserve(&mut self, rows: usize, _width: usize, tokens: usize) -> Result<()> {
        self.plan.reserve(&self.device, &self.memory, rows, tokens)
    }

    fn write(&self, buffer: &mut CudaBuffer, row: usize, values: &[f32]) -> Result<()> {
        buffer.require("write: the buffer", row + 1, values.len())?;
        buffer.format = Format::Float;
        Ok(buffer.memory.write(4 * row * buffer.width, values)?)
    }

    fn read(&self, buffer: &CudaBuffer, row: usize, values: &mut [f32]) -> Result<()> {
        buffer.require("read: the buffer", row + 1, values.len())?;
        match buffer.format {
            Format::Float => buffer.memory.read(4 * row * buffer.width, values)?,
            Format::Slots { slots } => moe::read_slots(&self.scratch, slots, row, values)?,
            Format::Planes { half, rows, pitch } => {
                require("read: rows of the planes", row + 1, rows)?;
                require("read: columns of the planes", values.len(), pitch)?;
                let mut plane = vec![0u8; 2 * values.len()];
                values.fill(0.0);
                for start in [0, rows * pitch] {
                    buffer.memory.read(2 * (start + row * pitch), &mut plane)?;
                    for (v, b) in values.iter_mut().zip(plane.as_chunks::<2>().0) {
                        *v += if half { ::half::f16::from_le_bytes(*b).to_f32() } else { widen(*b) };
                    }
                }
            }
        }
        Ok(())
    }

    fn read_selection(&self, selection: &CudaSelection, row: usize) -> Vec<u32> {
        let mut len = [0u32];
        if row >= selection.rows || selection.lens.read(4 * row, &mut len).is_err() {
            return Vec::new();
        }
        let mut tokens = vec![0u32; (len[0] as usize).min(selection.width)];
        match selection.tokens.read(4 * row * selection.width, &mut tokens) {
            Ok(()) => tokens,
            Err(_) => Vec::new(),
        }
    }

    fn write_selection(&self, selection: &mut CudaSelection, row: usize, tokens: &[u32]) -> Result<()> {
        require("write_selection: rows of the selection", row + 1, selection.rows)?;
        require("write_selection: width of the selection", tokens.len(), selection.width)?;
        selection.tokens.write(4 * row * selection.width, tokens)?;
        Ok(selection.lens.write(4 * row, &[tokens.len() as u32])?)
    }

    fn read_routing(&self, routing: &CudaRouting, row: usize) -> Vec<(u32, f32)> {
        let (mut experts, mut weights) = (vec![0u32; routing.top], vec![0.0f32; routing.top]);
        let at = 4 * row * routing.top;
        if row >= routing.rows
            || routing.experts.read(at, &mut experts).is_err()
            || routing.weights.read(at, &mut weights).is_err()
        {
            return Vec::new();
        }
        experts.into_iter().zip(weights).collect()
    }

    fn copy_slot(&self, cache: &mut CudaCache, from: u32, to: u32) -> Result<()> {
        cache.copy_slot(from, to)
    }

    fn read_state(&self, cache: &CudaCache, layer: usize, slot: u32) -> Result<Vec<f32>> {
        cache.read_state(layer, slot)
    }

    fn begin(&mut self, step: &Step) -> Result<()> {
        self.plan.begin(&self.device, &self.memory, step)
    }

    fn copy_selection(&mut self, from: &CudaSelection, rows: &[u32], out: &mut CudaSelection) -> Result<()> {
        dsa::copy_selection(self, from, rows, out)
    }

    fn embed(
        &mut self,
        table: &CudaMatrix,
        features: &CudaBuffer,
        streams: &mut Streams<Self>,
        n: usize,
    ) -> Result<()> {
        dense::embed(self, table, features, streams, n)
    }

    fn mhc(
        &mut self,
        rows: usize,
        mixer: &MhcWeights<Self>,
        norm: &Norm<Self>,
        y: Option<&CudaBuffer>,
        streams: &mut Streams<Self>,
        x: &mut CudaBuffer,
    ) -> Result<()> {
        mhc::mhc(self, rows, mixer, norm, y, streams, x)
    }

    fn mhc_head(
        &mut self,
        rows: usize,
        norm: &Norm<Self>,
        y: &CudaBuffer,
        streams: &mut Streams<Self>,
        hidden: &mut CudaBuffer,
    ) -> Result<()> {
        mhc::mhc_head(self, rows, norm, y, streams, hidden)
    }

    fn linear(
        &mut self,
        rows: usize,
        x: Columns<'_, Self>,
        weights: &[&Linear<Self>],
        out: &mut CudaBuffer,
        start: usize,
    ) -> Result<()> {
        dense::linear(self, rows, x, weights, out, start)
    }

    fn kda(
        &mut self,
        weights: &KdaWeights<Self>,
        form: KdaForm,
        proj: &CudaBuffer,
        gates: &CudaBuffer,
        cache: &mut CudaCache,
        layer: usize,
        out: &mut CudaBuffer,
    ) -> Result<()> {
        kda::kda(self, weights, form, proj, gates, cache, layer, out)
    }

    fn dsa_write(
        &mut self,
        weights: &DsaWeights<Self>,
        columns: DsaColumns,
        proj: &CudaBuffer,
        indexer: bool,
        cache: &mut CudaCache,
        layer: usize,
        q_residual: &mut CudaBuffer,
    ) -> Result<()> {
        dsa::dsa_write(self, weights, columns, proj, indexer, cache, layer, q_residual)
    }

    fn dsa_select(
        &mut self,
        weights: &IndexerWeights<Self>,
        columns: DsaColumns,
        query: Columns<'_, Self>,
        proj: &CudaBuffer,
        cache: &CudaCache,
        layer: usize,
        selection: &mut CudaSelection,
    ) -> Result<()> {
        dsa::dsa_select(self, weights, columns, query, proj, cache, layer, selection)
    }

    fn mla(
        &mut self,
        weights: &DsaWeights<Self>,
        query: Columns<'_, Self>,
        selection: &CudaSelection,
        cache: &CudaCache,
        layer: usize,
        out: &mut CudaBuffer,
    ) -> Result<()> {
        mla::mla(self, weights, query, selection, cache, layer, out)
    }

    fn swiglu(
        &mut self,
        rows: usize,
        weights: &Swiglu<Self>,
        limit: f32,
        x: &CudaBuffer,
        act: &mut CudaBuffer,
        out: &mut CudaBuffer,
    ) -> Result<()> {
        dense::swiglu(self, rows, weights, limit, x, act, out)
    }

    fn route(
        &mut self,
        rows: usize,
        gate: &CudaMatrix,
        bias: &CudaVector,
        rule: RouterRule,
        x: &CudaBuffer,
        routing: &mut CudaRouting,
    ) -> Result<()> {
        moe::route(self, rows, gate, bias, rule, x, routing)
    }

    fn moe_up(
        &mut self,
        rows: usize,
        experts: &Experts<Self>,
        routing: &CudaRouting,
        x: &CudaBuffer,
        act: &mut CudaBuffer,
        shared_act: &mut CudaBuffer,
    ) -> Result<()> {
        moe::moe_up(self, rows, experts, routing, x, act, shared_act)
    }

    fn moe_down(
        &mut self,
        rows: usize,
        experts: &Experts<Self>,
        routing: &CudaRouting,
        act: &CudaBuffer,
        shared_act: &CudaBuffer,
        out: &mut CudaBuffer,
    ) -> Result<()> {
        moe::moe_down(self, rows, experts, routing, act, shared_act, out)
    }

    fn mtp_input(
        &mut self,
        table: &CudaMatrix,
        enorm: &Norm<Self>,
        hnorm: &Norm<Self>,
        hidden: &CudaBuffer,
        source: &[u32],
        out: &mut CudaBuffer,
    ) -> Result<()> {
        dense::mtp_input(self, table, enorm, hnorm, hidden, source, out)
    }

    fn add_norm(
        &mut self,
        rows: usize,
        y: Option<&CudaBuffer>,
        norm: &Norm<Self>,
        x: &mut CudaBuffer,
        out: &mut CudaBuffer,
    ) -> Result<()> {
        dense::add_norm(self, rows, y, norm, x, out)
    }

    fn head(&mut self, matrix: &CudaMatrix, rows: &[u32], hidden: &CudaBuffer, logits: &mut CudaBuffer) -> Result<()> {
        dense::head(self, matrix, rows, hidden, logits)
    }

    fn vision_attention(
        &mut self,
        grid: PatchGrid,
        heads: usize,
        q_norm: &Norm<Self>,
        k_norm: &Norm<Self>,
        qkv: &CudaBuffer,
        out: &mut CudaBuffer,
    ) -> Result<()> {
        vision::vision_attention(self, grid, heads, q_norm, k_norm, qkv, out)
    }

    fn group_rows(&mut self, rows: usize, group: usize, x: &CudaBuffer, out: &mut CudaBuffer) -> Result<()> {
        vision::group_rows(rows, group, x, out)
    }

    fn norm_gelu(&mut self, rows: usize, norm: &Norm<Self>, x: &mut CudaBuffer) -> Result<()> {
        dense::norm_gelu(self, rows, norm, x)
    }

    fn copy_row(&mut self, from: &CudaBuffer, row: usize, to: &mut CudaBuffer, target: usize) -> Result<()> {
        from.require("copy_row: the source", row + 1, 0)?;
        to.require("copy_row: the target", target + 1, 0)?;
        let width = from.width.min(to.width);
        to.format = Format::Float;
        Ok(to.memory.copy_from(4 * target * to.width, &from.memory, 4 * row * from.width, 4 * width)?)
    }
}
