//! The stages, each to its kernels.

use glimmer_checkpoint::TensorData;
use glimmer_tensor::{
    Backend, CacheShape, Columns, DsaColumns, DsaWeights, Error, Experts, Finds, IndexerWeights, KdaForm, KdaWeights,
    Linear, MatrixSource, MhcWeights, Norm, PatchGrid, Program, Result, RouterRule, SampleRow, Samples, Step, Streams,
    Swiglu,
};

use super::{Cuda, transfer::Rows};
use crate::{
    cache::CudaCache,
    kernels::{dense, dsa, kda, mhc, mla, moe, router, sampler, vision},
    types::{CudaBuffer, CudaMatrix, CudaRouting, CudaSelection, CudaVector, Format, unique},
};

impl Backend for Cuda {
    type Matrix = CudaMatrix;
    type Vector = CudaVector;
    type Buffer = CudaBuffer;
    type Selection = CudaSelection;
    type Routing = CudaRouting;
    type Cache = CudaCache;

    fn matrix(&self, source: MatrixSource<'_>) -> Result<CudaMatrix> {
        self.stored_matrix(source)
    }

    fn vector(&self, source: &TensorData) -> Result<CudaVector> {
        self.stored_vector(source)
    }

    fn matrix_from(&self, name: &str, out: usize, values: &[f32]) -> Result<CudaMatrix> {
        self.matrix_of(name, out, values)
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

    fn prompt_form(&self) -> KdaForm {
        KdaForm::Chunked
    }

    fn reserve(&mut self, rows: usize, _width: usize, tokens: usize) -> Result<()> {
        // The weights are loaded: what brought them is not needed any more.
        self.kernels.uploads.end()?;
        self.plan.reserve(&self.device, &self.memory, rows, tokens)
    }

    fn write(&self, buffer: &mut CudaBuffer, row: usize, values: &[f32]) -> Result<()> {
        self.write_row(buffer, row, values)
    }

    fn read(&self, buffer: &CudaBuffer, row: usize, values: &mut [f32]) -> Result<()> {
        self.read_row(buffer, row, values)
    }

    fn read_selection(&self, selection: &CudaSelection, row: usize) -> Vec<u32> {
        self.selected(selection, row)
    }

    fn write_selection(&self, selection: &mut CudaSelection, row: usize, tokens: &[u32]) -> Result<()> {
        self.select(selection, row, tokens)
    }

    fn read_routing(&self, routing: &CudaRouting, row: usize) -> Vec<(u32, f32)> {
        self.routed(routing, row)
    }

    fn read_choices(&self, routing: &CudaRouting, rows: usize) -> Result<Vec<u32>> {
        let mut experts = vec![0u32; rows.min(routing.rows) * routing.top];
        routing.experts.read(0, &mut experts)?;
        Ok(experts)
    }

    fn copy_slot(&self, cache: &mut CudaCache, from: u32, to: u32) -> Result<()> {
        cache.copy_slot(from, to)
    }

    fn read_state(&self, cache: &CudaCache, layer: usize, slot: u32) -> Result<Vec<f32>> {
        cache.read_state(layer, slot)
    }

    fn begin(&mut self, step: &Step) -> Result<()> {
        self.begin_step(step, [&[], &[], &[]])
    }

    fn replay(&mut self, step: &Step, program: Program<'_>) -> Result<bool> {
        self.replay_step(step, program)
    }

    fn finish(&mut self) -> Result<()> {
        self.finish_step()
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

    fn linear_each(
        &mut self,
        rows: usize,
        parts: &[(Columns<'_, Self>, &Linear<Self>, usize)],
        out: &mut CudaBuffer,
    ) -> Result<()> {
        dense::linear_each(self, rows, parts, out)
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
        router::route(self, rows, gate, bias, rule, x, routing)
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
        dense::head(self, matrix, rows, hidden, logits)?;
        self.expect(Some(Rows { address: logits.at(0), rows: rows.len() }));
        Ok(())
    }

    fn finds(&self) -> Finds {
        Finds::Drawn
    }

    fn sample(
        &mut self,
        logits: &CudaBuffer,
        vocabulary: usize,
        asked: &Samples,
        tokens: &mut Vec<Option<u32>>,
    ) -> Result<()> {
        sampler::sample(self, logits, vocabulary, asked, tokens)?;
        let found = |(row, token): (&SampleRow, &Option<u32>)| token.map(|_| row.row as usize);
        self.found(logits, asked.rows.iter().zip(&*tokens).filter_map(found));
        Ok(())
    }

    fn keeps_tokens(&self) -> bool {
        true
    }

    fn keep_largest(&mut self, logits: &CudaBuffer, rows: usize, vocabulary: usize, place: usize) -> Result<()> {
        sampler::keep_largest(self, logits, rows, vocabulary, place)
    }

    fn take_tokens(&mut self, place: usize, rows: &[u32]) -> Result<()> {
        sampler::take_tokens(self, place, rows)
    }

    fn kept_tokens(&mut self, rows: &[usize], tokens: &mut Vec<Option<u32>>) -> Result<()> {
        sampler::kept_tokens(self, rows, tokens)
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
