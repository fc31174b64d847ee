//! The vision tower: patches to features of the text model's width.
//!
//! ```text
//! x = W_patch p + b
//! blocks:  x += proj(attention(rmsnorm(x)));   x += swiglu(rmsnorm(x))        (biases everywhere, clamped SwiGLU)
//! x = rmsnorm(x);   y = b + sum over the merge block of W[:, :, r, c] x[r, c]
//! z = gelu(layer_norm(W_proj y));   feature = swiglu(z)                       (no biases)
//! ```
//! Attention is bidirectional and stays inside a frame pair, so pairs of a clip go through one after the other and memory
//! is that of a single pair. The convolution that merges a block is a matrix over the block's patches side by side,
//! re-ordered from `[out, hidden, row, column]` to `[out, (row, column, hidden)]` when it is loaded.

use glimmer_checkpoint::{DType, TensorData, VisionConfig};
use glimmer_tensor::{Backend, Columns, Linear, Norm, PatchGrid, Swiglu};

use super::Patches;
use crate::{
    Error, Result,
    weights::{Loader, Source},
};

/// Epsilon of the merger's LayerNorm.
const MERGER_EPS: f32 = 1e-5;

/// The tower's weights and its buffers.
#[derive(Debug)]
pub struct VisionTower<B: Backend> {
    config: VisionConfig,
    patch_embed: Linear<B>,
    blocks: Vec<Block<B>>,
    post_norm: Norm<B>,
    downsample: Linear<B>,
    merger_proj: Linear<B>,
    merger_norm: Norm<B>,
    merger: Swiglu<B>,
    work: Option<Work<B>>,
}

#[derive(Debug)]
struct Block<B: Backend> {
    norm1: Norm<B>,
    qkv: Linear<B>,
    q_norm: Norm<B>,
    k_norm: Norm<B>,
    proj: Linear<B>,
    norm2: Norm<B>,
    mlp: Swiglu<B>,
}

/// Buffers for frame pairs of up to `rows` patches; replaced by larger ones when a larger picture comes.
#[derive(Debug)]
struct Work<B: Backend> {
    rows: usize,
    pixels: B::Buffer,
    x: B::Buffer,
    normed: B::Buffer,
    qkv: B::Buffer,
    core: B::Buffer,
    y: B::Buffer,
    act: B::Buffer,
    grouped: B::Buffer,
    merged: B::Buffer,
    projected: B::Buffer,
    merger_act: B::Buffer,
    out: B::Buffer,
}

/// What a window into the tower shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TowerStage {
    /// Patch embedding, `[patches, hidden]`.
    PatchEmbed,
    /// Residual after a block, `[patches, hidden]`.
    Block(usize),
    /// After the last norm, `[patches, hidden]`.
    PostNorm,
    /// After merging, `[tokens, out_hidden]`.
    Downsample,
    /// The features, `[tokens, out_hidden]`.
    Features,
}

impl<B: Backend> VisionTower<B> {
    /// Loads the tower; `None` for a text-only model.
    ///
    /// # Errors
    /// [`Error::Missing`] and [`Error::Shape`] naming the tensor; [`glimmer_tensor::Error::Weight`] for another dtype.
    pub fn load(backend: &B, source: &dyn Source) -> Result<Option<Self>> {
        let Some(config) = source.config().vision.clone() else { return Ok(None) };
        let loader = Loader::new(backend, source, "model.visual.");
        let (hidden, out) = (config.hidden_size, config.out_hidden_size);
        let eps = config.rms_norm_eps;
        let side = config.spatial_merge_size;

        let patch_shape = [config.temporal_patch_size, config.patch_size, config.patch_size];
        let patch_width = config.in_channels * patch_shape.iter().product::<usize>();
        let mut shape = vec![hidden, config.in_channels];
        shape.extend(patch_shape);
        let mut patch = loader.tensor("patch_embed.proj.weight", &shape)?;
        patch.shape = vec![hidden, patch_width];
        let patch_embed = Linear {
            weight: backend.matrix(glimmer_tensor::MatrixSource::Dense(&patch))?,
            bias: Some(loader.vector("patch_embed.proj.bias", hidden)?),
        };

        let downsample = loader.tensor("downsample.weight", &[out, hidden, side, side])?;
        let downsample = Linear {
            weight: backend.matrix_from(&downsample.name, out, &merge_order(&downsample, out, hidden, side * side)?)?,
            bias: Some(loader.vector("downsample.bias", out)?),
        };

        let blocks = (0..config.depth)
            .map(|block| Block::load(&loader.at(&format!("blocks.{block}.")), &config))
            .collect::<Result<Vec<_>>>()?;
        let merger = loader.at("merger.");
        Ok(Some(Self {
            patch_embed,
            blocks,
            post_norm: loader.norm("post_layernorm", hidden, eps)?,
            downsample,
            merger_proj: merger.linear("proj", out, out)?,
            merger_norm: merger.layer_norm("post_projection_norm", out, MERGER_EPS)?,
            merger: merger.swiglu(out, config.projection_intermediate_size, out)?,
            work: None,
            config,
        }))
    }

    /// Features of one image or clip, `[tokens, out_hidden]`, all frame pairs in order.
    ///
    /// # Errors
    /// [`Error::Length`] when the patches are of another width or number than the tower and the grid say; errors of the
    /// backend.
    pub fn forward(&mut self, backend: &mut B, patches: &Patches) -> Result<Vec<f32>> {
        self.forward_seen(backend, patches, &mut |_, _, _, _| {})
    }

    /// [`VisionTower::forward`] with a window: `see(stage, backend, rows, buffer)` is called for every frame pair.
    ///
    /// # Errors
    /// As [`VisionTower::forward`].
    pub fn forward_seen(
        &mut self,
        backend: &mut B,
        patches: &Patches,
        see: &mut dyn FnMut(TowerStage, &B, usize, &B::Buffer),
    ) -> Result<Vec<f32>> {
        let config = &self.config;
        let width = config.in_channels * config.temporal_patch_size * config.patch_size * config.patch_size;
        expect("patch vector", width, patches.width)?;
        expect("pixel values of the patches", patches.rows() * width, patches.values.len())?;
        let grid = PatchGrid { frames: 1, ..patches.grid };
        let rows = grid.height * grid.width;
        let block = config.spatial_merge_size * config.spatial_merge_size;
        expect("patches in whole merge blocks", rows.next_multiple_of(block), rows)?;
        if rows == 0 {
            return Ok(Vec::new());
        }
        let mut work = match self.work.take() {
            Some(work) if work.rows >= rows => work,
            _ => Work::new(backend, config, width, rows)?,
        };
        let out = config.out_hidden_size;
        let mut features = vec![0.0; patches.grid.frames * rows / block * out];
        let frames = patches.values.chunks_exact(rows * width).zip(features.chunks_exact_mut(rows / block * out));
        for (values, features) in frames {
            for (row, values) in values.chunks_exact(width).enumerate() {
                backend.write(&mut work.pixels, row, values)?;
            }
            self.frame(backend, &mut work, grid, see)?;
            for (row, feature) in features.chunks_exact_mut(out).enumerate() {
                backend.read(&work.out, row, feature)?;
            }
        }
        self.work = Some(work);
        Ok(features)
    }

    fn frame(
        &self,
        backend: &mut B,
        work: &mut Work<B>,
        grid: PatchGrid,
        see: &mut dyn FnMut(TowerStage, &B, usize, &B::Buffer),
    ) -> Result<()> {
        let config = &self.config;
        let rows = grid.height * grid.width;
        let group = config.spatial_merge_size * config.spatial_merge_size;
        let tokens = rows / group;
        backend.linear(rows, all(&work.pixels, self.pixel_width()), &[&self.patch_embed], &mut work.x, 0)?;
        see(TowerStage::PatchEmbed, backend, rows, &work.x);
        for (index, block) in self.blocks.iter().enumerate() {
            let before = (index > 0).then_some(&work.y);
            backend.add_norm(rows, before, &block.norm1, &mut work.x, &mut work.normed)?;
            if index > 0 {
                see(TowerStage::Block(index - 1), backend, rows, &work.x);
            }
            backend.linear(rows, all(&work.normed, config.hidden_size), &[&block.qkv], &mut work.qkv, 0)?;
            backend.vision_attention(
                grid,
                config.num_heads,
                &block.q_norm,
                &block.k_norm,
                &work.qkv,
                &mut work.core,
            )?;
            backend.linear(rows, all(&work.core, config.hidden_size), &[&block.proj], &mut work.y, 0)?;
            backend.add_norm(rows, Some(&work.y), &block.norm2, &mut work.x, &mut work.normed)?;
            backend.swiglu(rows, &block.mlp, config.swiglu_limit, &work.normed, &mut work.act, &mut work.y)?;
        }
        let before = (!self.blocks.is_empty()).then_some(&work.y);
        backend.add_norm(rows, before, &self.post_norm, &mut work.x, &mut work.normed)?;
        if let Some(last) = self.blocks.len().checked_sub(1) {
            see(TowerStage::Block(last), backend, rows, &work.x);
        }
        see(TowerStage::PostNorm, backend, rows, &work.normed);

        let out = config.out_hidden_size;
        backend.group_rows(tokens, group, &work.normed, &mut work.grouped)?;
        let grouped = all(&work.grouped, group * config.hidden_size);
        backend.linear(tokens, grouped, &[&self.downsample], &mut work.merged, 0)?;
        see(TowerStage::Downsample, backend, tokens, &work.merged);
        backend.linear(tokens, all(&work.merged, out), &[&self.merger_proj], &mut work.projected, 0)?;
        backend.norm_gelu(tokens, &self.merger_norm, &mut work.projected)?;
        let limit = config.swiglu_limit;
        backend.swiglu(tokens, &self.merger, limit, &work.projected, &mut work.merger_act, &mut work.out)?;
        see(TowerStage::Features, backend, tokens, &work.out);
        Ok(())
    }

    fn pixel_width(&self) -> usize {
        let c = &self.config;
        c.in_channels * c.temporal_patch_size * c.patch_size * c.patch_size
    }
}

impl<B: Backend> Block<B> {
    fn load(loader: &Loader<'_, B>, config: &VisionConfig) -> Result<Self> {
        let (hidden, width) = (config.hidden_size, config.intermediate_size);
        let head = hidden / config.num_heads;
        Ok(Self {
            norm1: loader.norm("norm1", hidden, config.block_norm_eps)?,
            qkv: loader.biased_linear("attn.qkv", 3 * hidden, hidden)?,
            q_norm: loader.norm("attn.q_norm", head, config.rms_norm_eps)?,
            k_norm: loader.norm("attn.k_norm", head, config.rms_norm_eps)?,
            proj: loader.biased_linear("attn.proj", hidden, hidden)?,
            norm2: loader.norm("norm2", hidden, config.block_norm_eps)?,
            mlp: Swiglu {
                gate: loader.biased_linear("mlp.gate_proj", width, hidden)?,
                up: loader.biased_linear("mlp.up_proj", width, hidden)?,
                down: loader.biased_linear("mlp.down_proj", hidden, width)?,
            },
        })
    }
}

impl<B: Backend> Work<B> {
    fn new(backend: &B, config: &VisionConfig, pixel_width: usize, rows: usize) -> Result<Self> {
        let (hidden, out) = (config.hidden_size, config.out_hidden_size);
        let group = config.spatial_merge_size * config.spatial_merge_size;
        let tokens = rows / group;
        Ok(Self {
            rows,
            pixels: backend.buffer(rows, pixel_width)?,
            x: backend.buffer(rows, hidden)?,
            normed: backend.buffer(rows, hidden)?,
            qkv: backend.buffer(rows, 3 * hidden)?,
            core: backend.buffer(rows, hidden)?,
            y: backend.buffer(rows, hidden)?,
            act: backend.buffer(rows, config.intermediate_size)?,
            grouped: backend.buffer(tokens, group * hidden)?,
            merged: backend.buffer(tokens, out)?,
            projected: backend.buffer(tokens, out)?,
            merger_act: backend.buffer(tokens, config.projection_intermediate_size)?,
            out: backend.buffer(tokens, out)?,
        })
    }
}

fn all<B: Backend>(buffer: &B::Buffer, width: usize) -> Columns<'_, B> {
    Columns { buffer, start: 0, width }
}

fn expect(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::Length { what, expected, found }) }
}

/// `[out, hidden, taps]` in BF16 or F32 to f32 `[out, (taps, hidden)]`.
fn merge_order(tensor: &TensorData, out: usize, hidden: usize, taps: usize) -> Result<Vec<f32>> {
    let bytes = tensor.bytes.as_slice();
    let values: Vec<f32> = match tensor.dtype {
        DType::Bf16 => bytes.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect(),
        DType::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        other => {
            return Err(Error::Tensor(glimmer_tensor::Error::Weight {
                name: tensor.name.clone(),
                expected: "BF16 or F32".to_owned(),
                found: other.to_string(),
            }));
        }
    };
    expect("downsampling weights", out * hidden * taps, values.len())?;
    let mut ordered = Vec::with_capacity(values.len());
    for row in values.chunks_exact(hidden * taps) {
        for tap in 0..taps {
            ordered.extend(row.iter().skip(tap).step_by(taps));
        }
    }
    Ok(ordered)
}
