//! The seam between the forward pass and the device: one method a *fused stage*.
//!
//! The forward pass (`glimmer-model`) is written once over [`Backend`]. A stage is what a GPU would run as one kernel (or
//! as one GEMM with its prologue and epilogue), not a tensor primitive. The CPU version of a stage is its readable
//! definition. The formulas of a block stand at the top of the file of `glimmer-model` that calls its stages.
//!
//! # Conventions
//! - An activation [`Backend::Buffer`] is `[rows, width]`, row-major; its element type is the backend's (f32 on the CPU).
//! - Weights are `[out, in]` as stored; `y = W x`.
//! - Buffers, caches and scratch are allocated before the first step; a stage allocates nothing.
//! - A row's result depends on that row, its sequence's cache and nothing else: neither on the other rows of the step nor
//!   on how a prompt was cut into chunks (batch invariance). On the CPU this holds bit for bit.
//! - [`Backend::begin`] gives the step's plan to the backend; the stages marked *plan* read it.

use glimmer_checkpoint::TensorData;

use crate::{CacheShape, Error, Finds, Samples, Step};

/// Result of a stage.
pub type Result<T> = std::result::Result<T, Error>;

/// Where a matrix `[out, in]` comes from.
#[derive(Debug, Clone, Copy)]
pub enum MatrixSource<'a> {
    /// BF16 or F32 as stored.
    Dense(&'a TensorData),
    /// INT4 group-128 symmetric: `weight_packed` I32 `[out, in/8]` and `weight_scale` BF16 `[out, in/128]`.
    Int4 {
        /// Packed codes.
        packed: &'a TensorData,
        /// Scales.
        scale: &'a TensorData,
    },
}

/// Some columns of a buffer: `start .. start + width` of every row.
#[derive(Debug)]
pub struct Columns<'a, B: Backend> {
    /// The buffer.
    pub buffer: &'a B::Buffer,
    /// First column.
    pub start: usize,
    /// Number of columns.
    pub width: usize,
}

impl<B: Backend> Clone for Columns<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Backend> Copy for Columns<'_, B> {}

/// A matrix with an optional bias.
#[derive(Debug)]
pub struct Linear<B: Backend> {
    /// `[out, in]`.
    pub weight: B::Matrix,
    /// `[out]`.
    pub bias: Option<B::Vector>,
}

/// Weights of `down(silu(min(gate x, limit)) * clamp(up x, -limit, limit))`.
#[derive(Debug)]
pub struct Swiglu<B: Backend> {
    /// `[width, in]`.
    pub gate: Linear<B>,
    /// `[width, in]`.
    pub up: Linear<B>,
    /// `[out, width]`.
    pub down: Linear<B>,
}

/// RMSNorm or LayerNorm parameters.
#[derive(Debug)]
pub struct Norm<B: Backend> {
    /// `[width]`.
    pub weight: B::Vector,
    /// `[width]`, LayerNorm only.
    pub bias: Option<B::Vector>,
    /// Epsilon under the root.
    pub eps: f32,
}

/// One hyper-connection mixer.
#[derive(Debug)]
pub struct MhcWeights<B: Backend> {
    /// `[2n + n^2, n * hidden]`.
    pub mix: B::Matrix,
    /// `[2n + n^2]`.
    pub base: B::Vector,
    /// `[3]`: pre, post, comb.
    pub scale: B::Vector,
    /// Streams `n`.
    pub streams: usize,
    /// Epsilon of the mixer's RMS (the model's `rms_norm_eps`).
    pub rms_eps: f32,
    /// Epsilon of pre, comb and the Sinkhorn sums (`hc_eps`).
    pub eps: f32,
    /// Column normalisations (row normalisations: one fewer).
    pub sinkhorn_iters: usize,
}

/// Residual streams of a step with the coefficients of the mixer that was applied last.
#[derive(Debug)]
pub struct Streams<B: Backend> {
    /// `[rows, n * hidden]`, stream-major within a row.
    pub x: B::Buffer,
    /// `[rows, n]`.
    pub post: B::Buffer,
    /// `[rows, n * n]`, `[old stream, new stream]`.
    pub comb: B::Buffer,
    /// `[rows, hidden]`: the collapsed input of the sub-block, before its norm.
    pub collapsed: B::Buffer,
}

/// Weights of the fused KDA stage; the projections are [`Backend::linear`] calls.
#[derive(Debug)]
pub struct KdaWeights<B: Backend> {
    /// Convolution taps of q, k, v: `[3 * heads * dim, taps]`.
    pub conv: B::Matrix,
    /// `[heads]`.
    pub a_log: B::Vector,
    /// `[heads * dim]`.
    pub dt_bias: B::Vector,
    /// Gated norm over a head, `[dim]`.
    pub o_norm: Norm<B>,
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub dim: usize,
    /// Lower bound of the log-decay.
    pub gate_lower_bound: f32,
}

/// Which form of the delta rule [`Backend::kda`] uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KdaForm {
    /// One row at a time: the definition, bit-equal for any chunking of a prompt.
    #[default]
    Recurrent,
    /// Chunks of 64 rows anchored at multiples of 64 from position 0, for committed rows; rows outside a whole chunk are
    /// recurrent. Equal to the recurrent form to f32 rounding.
    Chunked,
}

/// Weights of the DSA write stage.
#[derive(Debug)]
pub struct DsaWeights<B: Backend> {
    /// RMSNorm of the query residual, `[q_lora]`.
    pub q_norm: Norm<B>,
    /// RMSNorm of the latent, `[latent]`.
    pub kv_norm: Norm<B>,
    /// Per head `[nope key rows | value rows]`: `[heads * (nope + v), latent]`.
    pub kv_b: B::Matrix,
    /// The indexer; absent where the layer reuses the preceding layer's selection.
    pub indexer: Option<IndexerWeights<B>>,
    /// Heads.
    pub heads: usize,
    /// Width of a head's query and key.
    pub qk_dim: usize,
    /// Width of a head's value.
    pub v_dim: usize,
}

/// Weights of the indexer's key side.
#[derive(Debug)]
pub struct IndexerWeights<B: Backend> {
    /// LayerNorm of the key, `[index_dim]`, eps 1e-6.
    pub k_norm: Norm<B>,
    /// Position-in-pool bias of the pooling softmax, `[kpool, index_dim]`.
    pub ape: B::Vector,
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub dim: usize,
    /// Tokens a pool.
    pub kpool: usize,
    /// Tokens selected from pools.
    pub topk: usize,
}

/// Columns of the joint projection that [`Backend::dsa_write`] reads, in this order:
/// `q_a [q_lora] | kv_a [latent] | index key [dim] | head weights [index heads] | pool gate [dim]`; the last three only
/// with an indexer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DsaColumns {
    /// Width of q_a.
    pub q_lora: usize,
    /// Width of kv_a.
    pub latent: usize,
}

/// The router's rule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterRule {
    /// Experts a token.
    pub top: usize,
    /// Expert groups.
    pub groups: usize,
    /// Groups kept.
    pub top_groups: usize,
    /// Whether the chosen scores are normalised to sum 1.
    pub normalize: bool,
    /// Factor on the weights.
    pub scale: f32,
}

/// A layer's experts.
#[derive(Debug)]
pub struct Experts<B: Backend> {
    /// Routed experts (BF16 or INT4).
    pub routed: Vec<Swiglu<B>>,
    /// The shared expert, always BF16.
    pub shared: Option<Swiglu<B>>,
    /// SwiGLU clamp.
    pub limit: f32,
}

/// Grid of one image or frame pair: patches are in merge-block order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PatchGrid {
    /// Attention segments (frame pairs).
    pub frames: usize,
    /// Patch rows.
    pub height: usize,
    /// Patch columns.
    pub width: usize,
}

/// Which stages a step runs, for a backend that keeps steps to repeat them.
#[derive(Debug, Clone, Copy)]
pub struct Program<'a> {
    /// Equal numbers: the same stages with the same weights, buffers and settings.
    pub stages: u32,
    /// Rows that the step gives to [`Backend::mtp_input`].
    pub source: &'a [u32],
    /// Rows that the step gives to [`Backend::copy_selection`].
    pub shared: &'a [u32],
    /// Rows that the step gives to [`Backend::take_tokens`].
    pub taken: &'a [u32],
}

/// Places of [`Backend::keep_largest`].
pub const TOKEN_PLACES: usize = 16;

/// A device.
pub trait Backend: Send + Sized + std::fmt::Debug {
    /// A weight matrix, laid out for this device.
    type Matrix: Send + Sync + std::fmt::Debug;
    /// A small f32 parameter vector.
    type Vector: Send + Sync + std::fmt::Debug;
    /// Activations `[rows, width]`.
    type Buffer: Send + std::fmt::Debug;
    /// Selected token positions of each row, `[rows, <= width]`, ascending.
    type Selection: Send + std::fmt::Debug;
    /// Chosen experts and weights of each row, `[rows, top]`.
    type Routing: Send + std::fmt::Debug;
    /// KDA slots and DSA pages of all layers.
    type Cache: Send + std::fmt::Debug;

    // ---- allocation and transfer (never inside a step) ----

    /// Takes over a matrix. BF16 and INT4 stay as stored.
    ///
    /// # Errors
    /// [`Error::Weight`] when dtype or shape is not what the source says.
    fn matrix(&self, source: MatrixSource<'_>) -> Result<Self::Matrix>;

    /// Takes over a parameter vector (BF16 or F32, any shape), widened to f32.
    ///
    /// # Errors
    /// [`Error::Weight`] for another dtype.
    fn vector(&self, source: &TensorData) -> Result<Self::Vector>;

    /// A matrix `[out, in]` from f32 values that are exactly representable in BF16 (re-ordered weights), stored as BF16.
    ///
    /// # Errors
    /// [`Error::Weight`] when a value is not representable.
    fn matrix_from(&self, name: &str, out: usize, values: &[f32]) -> Result<Self::Matrix>;

    /// A zeroed buffer.
    fn buffer(&self, rows: usize, width: usize) -> Result<Self::Buffer>;

    /// An empty selection for up to `rows` rows of up to `width` tokens.
    fn selection(&self, rows: usize, width: usize) -> Result<Self::Selection>;

    /// An empty routing for up to `rows` rows of `top` among `experts`.
    fn routing(&self, rows: usize, top: usize, experts: usize) -> Result<Self::Routing>;

    /// Caches of all layers.
    fn cache(&self, shape: &CacheShape) -> Result<Self::Cache>;

    /// Form of the delta rule that prompts take where nobody says: the recurrent one, unless chunks are worth their rounding.
    fn prompt_form(&self) -> KdaForm {
        KdaForm::Recurrent
    }

    /// Reserves scratch for steps of up to `rows` rows, inner widths up to `width` and contexts up to `tokens`.
    fn reserve(&mut self, rows: usize, width: usize, tokens: usize) -> Result<()>;

    /// Writes f32 values into row `row` of a buffer from column 0.
    fn write(&self, buffer: &mut Self::Buffer, row: usize, values: &[f32]) -> Result<()>;

    /// Reads row `row` from column 0 into `values`.
    fn read(&self, buffer: &Self::Buffer, row: usize, values: &mut [f32]) -> Result<()>;

    /// Writes `[rows, width]` f32 values into the first rows of a buffer, each from column 0.
    fn write_rows(&self, buffer: &mut Self::Buffer, width: usize, values: &[f32]) -> Result<()> {
        values.chunks(width.max(1)).enumerate().try_for_each(|(row, values)| self.write(buffer, row, values))
    }

    /// Reads the first rows of a buffer, each from column 0, into `values`, `[rows, width]`.
    fn read_rows(&self, buffer: &Self::Buffer, width: usize, values: &mut [f32]) -> Result<()> {
        values.chunks_mut(width.max(1)).enumerate().try_for_each(|(row, values)| self.read(buffer, row, values))
    }

    /// Selected tokens of a row, ascending.
    fn read_selection(&self, selection: &Self::Selection, row: usize) -> Vec<u32>;

    /// Replaces the selected tokens of a row, ascending (a selection that was kept on the host).
    ///
    /// # Errors
    /// [`Error::Capacity`] for a row or more tokens than the selection was made for.
    fn write_selection(&self, selection: &mut Self::Selection, row: usize, tokens: &[u32]) -> Result<()>;

    /// Chosen experts of a row with their weights (scaling factor included), ascending by expert.
    fn read_routing(&self, routing: &Self::Routing, row: usize) -> Vec<(u32, f32)>;

    /// Chosen experts of the first `rows` rows, one row behind the other.
    ///
    /// # Errors
    /// Errors of the device.
    fn read_choices(&self, routing: &Self::Routing, rows: usize) -> Result<Vec<u32>> {
        Ok((0..rows).flat_map(|row| self.read_routing(routing, row)).map(|(expert, _)| expert).collect())
    }

    /// Copies everything that slot `from` owns (KDA states, rings) to slot `to`.
    fn copy_slot(&self, cache: &mut Self::Cache, from: u32, to: u32) -> Result<()>;

    /// Copies the KDA state of a slot and KDA layer as f32 `[heads, key, value]` (for tests and inspection).
    fn read_state(&self, cache: &Self::Cache, layer: usize, slot: u32) -> Result<Vec<f32>>;

    /// Gives the plan of the next step. The plan has been validated.
    ///
    /// # Errors
    /// [`Error::Capacity`] when the step is larger than what was reserved.
    fn begin(&mut self, step: &Step) -> Result<()>;

    /// As [`Backend::begin`], for a step between whose stages nobody looks. True: the backend had kept the stages of such a step
    /// and has run them, none is to be called. False: the stages follow, then [`Backend::finish`].
    ///
    /// # Errors
    /// As [`Backend::begin`].
    fn replay(&mut self, step: &Step, _program: Program<'_>) -> Result<bool> {
        self.begin(step)?;
        Ok(false)
    }

    /// End of the stages of a step.
    ///
    /// # Errors
    /// When the backend cannot keep the step.
    fn finish(&mut self) -> Result<()> {
        Ok(())
    }

    // ---- text stages ----

    /// *plan* Embedding rows (or image features) copied to every stream: `x[row, i] = table[token]`.
    fn embed(
        &mut self,
        table: &Self::Matrix,
        features: &Self::Buffer,
        streams: &mut Streams<Self>,
        n: usize,
    ) -> Result<()>;

    /// One mHC site: `S'[j] = post[j] y + sum_i C[i][j] S[i]` with the coefficients in `streams` when `y` is given
    /// (the previous sub-block's output); then this mixer's coefficients, the collapsed input `u`, and `x = norm(u)`.
    fn mhc(
        &mut self,
        rows: usize,
        mixer: &MhcWeights<Self>,
        norm: &Norm<Self>,
        y: Option<&Self::Buffer>,
        streams: &mut Streams<Self>,
        x: &mut Self::Buffer,
    ) -> Result<()>;

    /// End of the trunk: the last `S'` as in [`Backend::mhc`], then `norm(mean over streams)`.
    fn mhc_head(
        &mut self,
        rows: usize,
        norm: &Norm<Self>,
        y: &Self::Buffer,
        streams: &mut Streams<Self>,
        hidden: &mut Self::Buffer,
    ) -> Result<()>;

    /// Matrices sharing one input: `out[row] = [W0 x | W1 x | ...]` from column `start` on, biases added.
    fn linear(
        &mut self,
        rows: usize,
        x: Columns<'_, Self>,
        weights: &[&Linear<Self>],
        out: &mut Self::Buffer,
        start: usize,
    ) -> Result<()>;

    /// Matrices with an input each: `out[row, start ..] = W x` for each `(x, W, start)`, biases added.
    ///
    /// # Errors
    /// As [`Backend::linear`].
    fn linear_each(
        &mut self,
        rows: usize,
        parts: &[(Columns<'_, Self>, &Linear<Self>, usize)],
        out: &mut Self::Buffer,
    ) -> Result<()> {
        parts.iter().try_for_each(|&(x, linear, start)| self.linear(rows, x, &[linear], out, start))
    }

    /// *plan* Convolution, gates, l2norm, delta rule and gated norm. `proj` is
    /// `[q | k | v | beta logits | ...]`, `gates` is `[f | z]` (`heads * dim` each). Reads and writes the slots of KDA layer
    /// `layer`. `out` is `[rows, heads * dim]`, ready for `o_proj`.
    fn kda(
        &mut self,
        weights: &KdaWeights<Self>,
        form: KdaForm,
        proj: &Self::Buffer,
        gates: &Self::Buffer,
        cache: &mut Self::Cache,
        layer: usize,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// *plan* Norms of query residual and latent, latent written to its page; index key normed, key and gate written to
    /// the tail ring, completed pools compressed and written. `layer` counts DSA layers. `indexer: false` skips
    /// the indexer part (a chained MTP row that shares the selection).
    fn dsa_write(
        &mut self,
        weights: &DsaWeights<Self>,
        columns: DsaColumns,
        proj: &Self::Buffer,
        indexer: bool,
        cache: &mut Self::Cache,
        layer: usize,
        q_residual: &mut Self::Buffer,
    ) -> Result<()>;

    /// *plan* Scores of all complete pools, top pools (ties: lower index), tail. `query` is `[index heads * dim]`
    /// columns; head weights are read from `proj` as laid out for [`Backend::dsa_write`]. True f32 throughout.
    fn dsa_select(
        &mut self,
        weights: &IndexerWeights<Self>,
        columns: DsaColumns,
        query: Columns<'_, Self>,
        proj: &Self::Buffer,
        cache: &Self::Cache,
        layer: usize,
        selection: &mut Self::Selection,
    ) -> Result<()>;

    /// `out` row `i` becomes a copy of `from` row `rows[i]` (shared selections of chained MTP rows).
    fn copy_selection(&mut self, from: &Self::Selection, rows: &[u32], out: &mut Self::Selection) -> Result<()>;

    /// *plan* Absorbed latent attention over the selection: `out` is `[rows, heads * v_dim]`, ready for `o_proj`.
    fn mla(
        &mut self,
        weights: &DsaWeights<Self>,
        query: Columns<'_, Self>,
        selection: &Self::Selection,
        cache: &Self::Cache,
        layer: usize,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// `act = silu(min(gate x, limit)) * clamp(up x, -limit, limit)`, then `out = down act`. `act` is scratch
    /// `[rows, width]`.
    fn swiglu(
        &mut self,
        rows: usize,
        weights: &Swiglu<Self>,
        limit: f32,
        x: &Self::Buffer,
        act: &mut Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// Router, true f32: sigmoid scores, bias for the choice only, ties to the lower expert. A score that is NaN comes
    /// last in the choice and makes all weights of its row NaN, so that damaged weights do not pass for an answer.
    fn route(
        &mut self,
        rows: usize,
        gate: &Self::Matrix,
        bias: &Self::Vector,
        rule: RouterRule,
        x: &Self::Buffer,
        routing: &mut Self::Routing,
    ) -> Result<()>;

    /// Routed and shared experts up to the activation: `act` is `[rows * top, width]` for the routed and `shared_act`
    /// `[rows, shared width]` for the shared expert.
    fn moe_up(
        &mut self,
        rows: usize,
        experts: &Experts<Self>,
        routing: &Self::Routing,
        x: &Self::Buffer,
        act: &mut Self::Buffer,
        shared_act: &mut Self::Buffer,
    ) -> Result<()>;

    /// `out = sum over chosen experts of weight * down act + shared down`, summed ascending by expert, shared last.
    fn moe_down(
        &mut self,
        rows: usize,
        experts: &Experts<Self>,
        routing: &Self::Routing,
        act: &Self::Buffer,
        shared_act: &Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// *plan* Input of the MTP layer: `out = [norm(embed(token)) | norm(hidden[source[row]])]`, `[rows, 2 * hidden]`.
    fn mtp_input(
        &mut self,
        table: &Self::Matrix,
        enorm: &Norm<Self>,
        hnorm: &Norm<Self>,
        hidden: &Self::Buffer,
        source: &[u32],
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// Plain residual: `x += y` when `y` is given, then `out = norm(x)` (RMSNorm; LayerNorm with a bias).
    fn add_norm(
        &mut self,
        rows: usize,
        y: Option<&Self::Buffer>,
        norm: &Norm<Self>,
        x: &mut Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// Logits of `rows` of `hidden`: `logits[i] = W hidden[rows[i]]`, all `vocab_size` columns, unmasked.
    fn head(
        &mut self,
        matrix: &Self::Matrix,
        rows: &[u32],
        hidden: &Self::Buffer,
        logits: &mut Self::Buffer,
    ) -> Result<()>;

    /// The rows for which [`Backend::sample`] may give a token.
    fn finds(&self) -> Finds {
        Finds::Nothing
    }

    /// Tokens of rows of logits, of which the first `vocabulary` columns exist: one for each row of `asked`. `None` leaves a
    /// row to the caller, who reads its logits: always without a sampler, else where a logit is not a number, the largest is
    /// infinite or nothing may come, and of rows that are drawn all that the backend cannot or does not decide for certain.
    ///
    /// # Errors
    /// [`Error::Capacity`] for rows, changes or masks that do not exist.
    fn sample(
        &mut self,
        _logits: &Self::Buffer,
        _vocabulary: usize,
        asked: &Samples,
        tokens: &mut Vec<Option<u32>>,
    ) -> Result<()> {
        tokens.clear();
        tokens.resize(asked.rows.len(), None);
        Ok(())
    }

    /// Whether the backend keeps tokens between steps, by the three methods that follow.
    fn keeps_tokens(&self) -> bool {
        false
    }

    /// Keeps the token of the largest of the first `vocabulary` logits of each of the first `rows` rows, as [`Backend::sample`]
    /// finds it, under `place`, a number below [`TOKEN_PLACES`].
    ///
    /// # Errors
    /// [`Error::Capacity`] for rows, columns or places that do not exist.
    fn keep_largest(&mut self, _logits: &Self::Buffer, _rows: usize, _vocabulary: usize, _place: usize) -> Result<()> {
        Ok(())
    }

    /// *plan* Makes the tokens of the step's rows those that are kept under `place` for `rows`, one for each; token 0 where there
    /// is none.
    ///
    /// # Errors
    /// [`Error::Capacity`] for rows or places that do not exist.
    fn take_tokens(&mut self, _place: usize, _rows: &[u32]) -> Result<()> {
        Ok(())
    }

    /// What is kept under the first places, of the first `rows[place]` rows each, one place behind the other.
    ///
    /// # Errors
    /// [`Error::Capacity`] for rows or places that do not exist.
    fn kept_tokens(&mut self, _rows: &[usize], tokens: &mut Vec<Option<u32>>) -> Result<()> {
        tokens.clear();
        Ok(())
    }

    // ---- vision stages ----

    /// q/k norm, 2-D rotary embedding and bidirectional attention inside each frame. `qkv` is `[rows, 3 * hidden]`
    /// (row order q | k | v, heads inside), `out` `[rows, hidden]`.
    fn vision_attention(
        &mut self,
        grid: PatchGrid,
        heads: usize,
        q_norm: &Norm<Self>,
        k_norm: &Norm<Self>,
        qkv: &Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// `out[i] = [x[4i] | x[4i+1] | x[4i+2] | x[4i+3]]` for `group` = 4: the input of the downsampling matrix.
    fn group_rows(&mut self, rows: usize, group: usize, x: &Self::Buffer, out: &mut Self::Buffer) -> Result<()>;

    /// `x = gelu_erf(layer_norm(x))` in place.
    fn norm_gelu(&mut self, rows: usize, norm: &Norm<Self>, x: &mut Self::Buffer) -> Result<()>;

    /// Copies row `row` of `from` to row `target` of `to` (features into the feature buffer, hidden states for drafting).
    fn copy_row(&mut self, from: &Self::Buffer, row: usize, to: &mut Self::Buffer, target: usize) -> Result<()>;
}
