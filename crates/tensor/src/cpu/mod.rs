//! The CPU backend: the readable definition of every stage, and the embedded default device.
//!
//! Weights stay as stored, activations, caches and sums are f32. Every sum has one order on every instruction set
//! ([`simd`]), so a result depends neither on the machine nor on the number of threads, on the other rows of the step or on
//! how the rows were tiled.

pub mod bench;
pub mod cache;
mod dense;
mod dsa;
mod kda;
mod mhc;
mod mla;
mod moe;
pub mod pool;
pub mod simd;
pub mod types;
mod vision;

#[cfg(test)]
mod testing;

pub use cache::CpuCache;
use glimmer_checkpoint::TensorData;
pub use pool::{Chunks, Panel, Panels, Pool, Scratch};
pub use simd::Isa;
pub use types::{AlignedVec, CpuBuffer, CpuMatrix, CpuRouting, CpuSelection, CpuVector};
use types::{require, require_equal};

use crate::{
    Backend, CacheShape, Columns, DsaColumns, DsaWeights, Experts, Finds, IndexerWeights, KdaForm, KdaWeights, Linear,
    MatrixSource, MhcWeights, Norm, PatchGrid, Result, RouterRule, Samples, Step, Streams, Swiglu, TOKEN_PLACES,
    sample::largest,
};

/// Rows of a task that only copies them.
const COPIED_ROWS: usize = 16;

/// The CPU as a device: threads, an instruction set, the current step and scratch.
#[derive(Debug)]
pub struct Cpu {
    /// The threads.
    pub(crate) pool: Pool,
    /// The instruction set.
    pub(crate) isa: Isa,
    /// Plan of the current step.
    pub(crate) step: Step,
    /// Scratch of the dense stages.
    dense: dense::Workspace,
    /// Mixing products of the hyper-connections, `[rows, coefficients]`.
    mixes: AlignedVec,
    /// Index scores of one row and a copy of them, `[2, pools]`.
    index_scores: AlignedVec,
    /// Tokens that are kept between steps, by place.
    kept: [Vec<Option<u32>>; TOKEN_PLACES],
    /// What [`Backend::reserve`] was told.
    reserved: Option<Reserved>,
}

#[derive(Debug, Clone, Copy)]
struct Reserved {
    rows: usize,
}

impl Cpu {
    /// A device of `threads` threads (the calling thread among them) with the best instruction set of this machine.
    pub fn new(threads: usize) -> Self {
        Self::with_isa(threads, Isa::best())
    }

    /// A device with a given instruction set; one that this machine lacks is replaced by the best that it has.
    pub fn with_isa(threads: usize, isa: Isa) -> Self {
        let isa = if isa.is_available() { isa } else { Isa::best() };
        Self {
            pool: Pool::new(threads),
            isa,
            step: Step::default(),
            dense: dense::Workspace::default(),
            mixes: AlignedVec::default(),
            index_scores: AlignedVec::default(),
            kept: Default::default(),
            reserved: None,
        }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads, the calling one among them.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The threads, for work outside the forward pass.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }
}

impl Backend for Cpu {
    type Matrix = CpuMatrix;
    type Vector = CpuVector;
    type Buffer = CpuBuffer;
    type Selection = CpuSelection;
    type Routing = CpuRouting;
    type Cache = CpuCache;

    fn matrix(&self, source: MatrixSource<'_>) -> Result<CpuMatrix> {
        CpuMatrix::new(source)
    }

    fn vector(&self, source: &TensorData) -> Result<CpuVector> {
        CpuVector::from_tensor(source)
    }

    fn matrix_from(&self, name: &str, out: usize, values: &[f32]) -> Result<CpuMatrix> {
        CpuMatrix::from_values(name, out, values)
    }

    fn buffer(&self, rows: usize, width: usize) -> Result<CpuBuffer> {
        CpuBuffer::new(rows, width)
    }

    fn selection(&self, rows: usize, width: usize) -> Result<CpuSelection> {
        Ok(CpuSelection::new(rows, width))
    }

    fn routing(&self, rows: usize, top: usize, experts: usize) -> Result<CpuRouting> {
        Ok(CpuRouting::new(rows, top, experts))
    }

    fn cache(&self, shape: &CacheShape) -> Result<CpuCache> {
        self.pool.reserve(kda::scratch_floats(shape));
        CpuCache::new(shape)
    }

    fn reserve(&mut self, rows: usize, width: usize, tokens: usize) -> Result<()> {
        self.dense.reserve(rows, width)?;
        self.pool.reserve((8 * width.max(tokens)).max(dense::THREAD_SCRATCH));
        self.mixes.grow("mixing products", rows * mhc::MAX_COEFFICIENTS)?;
        self.index_scores.grow("index scores", 2 * tokens + width)?;
        for list in [&mut self.step.tokens, &mut self.step.logits, &mut self.step.pages] {
            list.clear();
            list.reserve(rows.max(tokens));
        }
        self.step.segments.clear();
        self.step.segments.reserve(rows);
        self.step.features.clear();
        self.step.features.reserve(rows);
        self.reserved = Some(Reserved { rows });
        Ok(())
    }

    fn write(&self, buffer: &mut CpuBuffer, row: usize, values: &[f32]) -> Result<()> {
        buffer.require("write: the buffer", row + 1, values.len())?;
        buffer.row_mut(row)[..values.len()].copy_from_slice(values);
        Ok(())
    }

    fn read(&self, buffer: &CpuBuffer, row: usize, values: &mut [f32]) -> Result<()> {
        buffer.require("read: the buffer", row + 1, values.len())?;
        values.copy_from_slice(&buffer.row(row)[..values.len()]);
        Ok(())
    }

    fn write_rows(&self, buffer: &mut CpuBuffer, width: usize, values: &[f32]) -> Result<()> {
        let (rows, stride) = (values.len().div_ceil(width.max(1)), buffer.width());
        buffer.require("write_rows: the buffer", rows, width)?;
        let target = Chunks::new(&mut buffer.as_mut_slice()[..rows * stride], COPIED_ROWS * stride);
        self.pool.split(target, |task, target, _| {
            let values = values[task * COPIED_ROWS * width..].chunks(width.max(1));
            for (to, values) in target.chunks_exact_mut(stride.max(1)).zip(values) {
                to[..values.len()].copy_from_slice(values);
            }
        });
        Ok(())
    }

    fn read_rows(&self, buffer: &CpuBuffer, width: usize, values: &mut [f32]) -> Result<()> {
        buffer.require("read_rows: the buffer", values.len().div_ceil(width.max(1)), width)?;
        self.pool.split(Chunks::new(values, COPIED_ROWS * width), |task, values, _| {
            for (i, values) in values.chunks_mut(width.max(1)).enumerate() {
                values.copy_from_slice(&buffer.row(task * COPIED_ROWS + i)[..values.len()]);
            }
        });
        Ok(())
    }

    fn read_selection(&self, selection: &CpuSelection, row: usize) -> Vec<u32> {
        selection.row(row).to_vec()
    }

    fn write_selection(&self, selection: &mut CpuSelection, row: usize, tokens: &[u32]) -> Result<()> {
        require("write_selection: rows of the selection", row + 1, selection.rows())?;
        require("write_selection: width of the selection", tokens.len(), selection.width())?;
        let (place, len) = selection.row_mut(row);
        place[..tokens.len()].copy_from_slice(tokens);
        *len = tokens.len() as u32;
        Ok(())
    }

    fn read_routing(&self, routing: &CpuRouting, row: usize) -> Vec<(u32, f32)> {
        routing.experts(row).iter().copied().zip(routing.weights(row).iter().copied()).collect()
    }

    fn copy_slot(&self, cache: &mut CpuCache, from: u32, to: u32) -> Result<()> {
        cache.copy_slot(from, to)
    }

    fn read_state(&self, cache: &CpuCache, layer: usize, slot: u32) -> Result<Vec<f32>> {
        cache.read_state(layer, slot)
    }

    fn begin(&mut self, step: &Step) -> Result<()> {
        if let Some(reserved) = self.reserved {
            require("begin: rows of the step", step.rows(), reserved.rows)?;
        }
        // Field by field: the vectors keep their memory.
        self.step.tokens.clone_from(&step.tokens);
        self.step.segments.clone_from(&step.segments);
        self.step.pages.clone_from(&step.pages);
        self.step.logits.clone_from(&step.logits);
        self.step.features.clone_from(&step.features);
        Ok(())
    }

    fn copy_selection(&mut self, from: &CpuSelection, rows: &[u32], out: &mut CpuSelection) -> Result<()> {
        require("copy_selection: rows of the target", rows.len(), out.rows())?;
        require_equal("copy_selection: width of the target", from.width(), out.width())?;
        for (i, &row) in rows.iter().enumerate() {
            require("copy_selection: rows of the source", row as usize + 1, from.rows())?;
            let (tokens, len) = out.row_mut(i);
            let source = from.row(row as usize);
            tokens[..source.len()].copy_from_slice(source);
            *len = source.len() as u32;
        }
        Ok(())
    }

    fn embed(
        &mut self,
        table: &Self::Matrix,
        features: &Self::Buffer,
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
        y: Option<&Self::Buffer>,
        streams: &mut Streams<Self>,
        x: &mut Self::Buffer,
    ) -> Result<()> {
        mhc::mhc(self, rows, mixer, norm, y, streams, x)
    }

    fn mhc_head(
        &mut self,
        rows: usize,
        norm: &Norm<Self>,
        y: &Self::Buffer,
        streams: &mut Streams<Self>,
        hidden: &mut Self::Buffer,
    ) -> Result<()> {
        mhc::mhc_head(self, rows, norm, y, streams, hidden)
    }

    fn linear(
        &mut self,
        rows: usize,
        x: Columns<'_, Self>,
        weights: &[&Linear<Self>],
        out: &mut Self::Buffer,
        start: usize,
    ) -> Result<()> {
        dense::linear(self, rows, x, weights, out, start)
    }

    fn kda(
        &mut self,
        weights: &KdaWeights<Self>,
        form: KdaForm,
        proj: &Self::Buffer,
        gates: &Self::Buffer,
        cache: &mut Self::Cache,
        layer: usize,
        out: &mut Self::Buffer,
    ) -> Result<()> {
        kda::kda(self, weights, form, proj, gates, cache, layer, out)
    }

    fn dsa_write(
        &mut self,
        weights: &DsaWeights<Self>,
        columns: DsaColumns,
        proj: &Self::Buffer,
        indexer: bool,
        cache: &mut Self::Cache,
        layer: usize,
        q_residual: &mut Self::Buffer,
    ) -> Result<()> {
        dsa::dsa_write(self, weights, columns, proj, indexer, cache, layer, q_residual)
    }

    fn dsa_select(
        &mut self,
        weights: &IndexerWeights<Self>,
        columns: DsaColumns,
        query: Columns<'_, Self>,
        proj: &Self::Buffer,
        cache: &Self::Cache,
        layer: usize,
        selection: &mut Self::Selection,
    ) -> Result<()> {
        dsa::dsa_select(self, weights, columns, query, proj, cache, layer, selection)
    }

    fn mla(
        &mut self,
        weights: &DsaWeights<Self>,
        query: Columns<'_, Self>,
        selection: &Self::Selection,
        cache: &Self::Cache,
        layer: usize,
        out: &mut Self::Buffer,
    ) -> Result<()> {
        mla::mla(self, weights, query, selection, cache, layer, out)
    }

    fn swiglu(
        &mut self,
        rows: usize,
        weights: &Swiglu<Self>,
        limit: f32,
        x: &Self::Buffer,
        act: &mut Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<()> {
        dense::swiglu(self, rows, weights, limit, x, act, out)
    }

    fn route(
        &mut self,
        rows: usize,
        gate: &Self::Matrix,
        bias: &Self::Vector,
        rule: RouterRule,
        x: &Self::Buffer,
        routing: &mut Self::Routing,
    ) -> Result<()> {
        moe::route(self, rows, gate, bias, rule, x, routing)
    }

    fn moe_up(
        &mut self,
        rows: usize,
        experts: &Experts<Self>,
        routing: &Self::Routing,
        x: &Self::Buffer,
        act: &mut Self::Buffer,
        shared_act: &mut Self::Buffer,
    ) -> Result<()> {
        moe::moe_up(self, rows, experts, routing, x, act, shared_act)
    }

    fn moe_down(
        &mut self,
        rows: usize,
        experts: &Experts<Self>,
        routing: &Self::Routing,
        act: &Self::Buffer,
        shared_act: &Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<()> {
        moe::moe_down(self, rows, experts, routing, act, shared_act, out)
    }

    fn mtp_input(
        &mut self,
        table: &Self::Matrix,
        enorm: &Norm<Self>,
        hnorm: &Norm<Self>,
        hidden: &Self::Buffer,
        source: &[u32],
        out: &mut Self::Buffer,
    ) -> Result<()> {
        dense::mtp_input(self, table, enorm, hnorm, hidden, source, out)
    }

    fn add_norm(
        &mut self,
        rows: usize,
        y: Option<&Self::Buffer>,
        norm: &Norm<Self>,
        x: &mut Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<()> {
        dense::add_norm(self, rows, y, norm, x, out)
    }

    fn head(
        &mut self,
        matrix: &Self::Matrix,
        rows: &[u32],
        hidden: &Self::Buffer,
        logits: &mut Self::Buffer,
    ) -> Result<()> {
        dense::head(self, matrix, rows, hidden, logits)
    }

    fn finds(&self) -> Finds {
        Finds::Largest
    }

    fn sample(
        &mut self,
        logits: &CpuBuffer,
        vocabulary: usize,
        asked: &Samples,
        tokens: &mut Vec<Option<u32>>,
    ) -> Result<()> {
        asked.check(logits.rows(), logits.width(), vocabulary)?;
        let mut changed = Vec::new();
        tokens.clear();
        tokens.extend(
            asked.rows.iter().map(|row| asked.token(row, &logits.row(row.row as usize)[..vocabulary], &mut changed)),
        );
        Ok(())
    }

    fn keeps_tokens(&self) -> bool {
        true
    }

    fn keep_largest(&mut self, logits: &CpuBuffer, rows: usize, vocabulary: usize, place: usize) -> Result<()> {
        require("keep_largest: places", place + 1, TOKEN_PLACES)?;
        require("keep_largest: rows of logits", rows, logits.rows())?;
        require("keep_largest: columns of the logits", vocabulary, logits.width())?;
        let kept = &mut self.kept[place];
        kept.clear();
        kept.extend((0..rows).map(|row| largest(&logits.row(row)[..vocabulary]).ok().map(|(token, _)| token)));
        Ok(())
    }

    fn take_tokens(&mut self, place: usize, rows: &[u32]) -> Result<()> {
        require("take_tokens: places", place + 1, TOKEN_PLACES)?;
        require_equal("take_tokens: rows of the step", self.step.rows(), rows.len())?;
        let kept = &self.kept[place];
        for (token, &row) in self.step.tokens.iter_mut().zip(rows) {
            require("take_tokens: kept rows", row as usize + 1, kept.len())?;
            *token = kept[row as usize].unwrap_or(0);
        }
        Ok(())
    }

    fn kept_tokens(&mut self, rows: &[usize], tokens: &mut Vec<Option<u32>>) -> Result<()> {
        require("kept_tokens: places", rows.len(), TOKEN_PLACES)?;
        tokens.clear();
        for (&rows, kept) in rows.iter().zip(&self.kept) {
            require("kept_tokens: kept rows", rows, kept.len())?;
            tokens.extend(&kept[..rows]);
        }
        Ok(())
    }

    fn vision_attention(
        &mut self,
        grid: PatchGrid,
        heads: usize,
        q_norm: &Norm<Self>,
        k_norm: &Norm<Self>,
        qkv: &Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<()> {
        vision::vision_attention(self, grid, heads, q_norm, k_norm, qkv, out)
    }

    fn group_rows(&mut self, rows: usize, group: usize, x: &Self::Buffer, out: &mut Self::Buffer) -> Result<()> {
        vision::group_rows(self, rows, group, x, out)
    }

    fn norm_gelu(&mut self, rows: usize, norm: &Norm<Self>, x: &mut Self::Buffer) -> Result<()> {
        vision::norm_gelu(self, rows, norm, x)
    }

    fn copy_row(&mut self, from: &Self::Buffer, row: usize, to: &mut Self::Buffer, target: usize) -> Result<()> {
        dense::copy_row(self, from, row, to, target)
    }
}
