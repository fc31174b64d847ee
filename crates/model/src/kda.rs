//! Kimi delta attention: a linear-attention block with a matrix state per head.
//!
//! From the block input `x`: `q | k | v` pass a causal depthwise convolution with SiLU; the decay, the write strength and
//! the output gate come from `x` itself:
//! ```text
//! g    = lower_bound sigmoid(exp(A_log) (W_fb W_fa x + dt_bias))      log-decay of each key channel, in (lower_bound, 0)
//! beta = sigmoid(W_b x)                                               one a head
//! S    = diag(exp g) S;   S += k^ (beta (v - S^T k^))^T;   o = S^T q^ q^, k^: unit length, q^ also / sqrt(dim)
//! out  = W_o ( rmsnorm_head(o) sigmoid(W_gb W_ga x) )
//! ```
//! The projections are linear stages; everything between them is one fused stage of the backend that also reads and writes
//! the slot: the state after the committed rows, records of the rest, raw convolution inputs by position.

use glimmer_tensor::{Backend, Columns, KdaForm, KdaWeights, Linear};

use crate::{
    Result,
    layer::Pass,
    observer::{At, Observer},
    weights::Loader,
};

/// Weights of a KDA block.
#[derive(Debug)]
pub struct Kda<B: Backend> {
    q: Linear<B>,
    k: Linear<B>,
    v: Linear<B>,
    b: Linear<B>,
    f_a: Linear<B>,
    g_a: Linear<B>,
    f_b: Linear<B>,
    g_b: Linear<B>,
    core: KdaWeights<B>,
    o: Linear<B>,
}

impl<B: Backend> Kda<B> {
    /// Loads a block from below `self_attn.`.
    ///
    /// # Errors
    /// As [`Loader::matrix`].
    pub(crate) fn load(loader: &Loader<'_, B>) -> Result<Self> {
        let text = &loader.config().text;
        let (heads, dim, hidden) = (text.kda.num_heads, text.kda.head_dim, text.hidden_size);
        let width = heads * dim;
        Ok(Self {
            q: loader.linear("q_proj", width, hidden)?,
            k: loader.linear("k_proj", width, hidden)?,
            v: loader.linear("v_proj", width, hidden)?,
            b: loader.linear("b_proj", heads, hidden)?,
            f_a: loader.linear("f_a_proj", dim, hidden)?,
            g_a: loader.linear("g_a_proj", dim, hidden)?,
            f_b: loader.linear("f_b_proj", width, dim)?,
            g_b: loader.linear("g_b_proj", width, dim)?,
            core: KdaWeights {
                conv: loader.stacked(
                    &["q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"],
                    width,
                    text.kda.conv_kernel,
                )?,
                a_log: loader.vector("A_log", heads)?,
                dt_bias: loader.vector("dt_bias", width)?,
                o_norm: loader.norm("o_norm", dim, text.rms_norm_eps)?,
                heads,
                dim,
                gate_lower_bound: text.kda.gate_lower_bound,
            },
            o: loader.linear("o_proj", hidden, width)?,
        })
    }

    /// `work.x` to `work.y` `[rows, hidden]`; `ordinal` counts KDA layers of the cache.
    pub(crate) fn forward<O: Observer<B>>(
        &self,
        pass: &mut Pass<'_, B, O>,
        layer: usize,
        ordinal: usize,
        form: KdaForm,
    ) -> Result<()> {
        let (rows, hidden) = (pass.rows, pass.hidden);
        let (backend, cache, work) = (&mut *pass.backend, &mut *pass.cache, &mut *pass.work);
        let (heads, dim) = (self.core.heads, self.core.dim);
        let width = heads * dim;
        let low_rank = 3 * width + heads;

        let x = Columns { buffer: &work.x, start: 0, width: hidden };
        let inputs = [&self.q, &self.k, &self.v, &self.b, &self.f_a, &self.g_a];
        backend.linear(rows, x, &inputs, &mut work.kda_proj, 0)?;
        let low = |start| Columns { buffer: &work.kda_proj, start, width: dim };
        let gates = [(low(low_rank), &self.f_b, 0), (low(low_rank + dim), &self.g_b, width)];
        backend.linear_each(rows, &gates, &mut work.kda_gates)?;
        backend.kda(&self.core, form, &work.kda_proj, &work.kda_gates, cache, ordinal, &mut work.kda_core)?;
        pass.observer.kda(At { backend, layer, rows }, &work.kda_core);
        let core = Columns { buffer: &work.kda_core, start: 0, width };
        backend.linear(rows, core, &[&self.o], &mut work.y, 0)?;
        Ok(())
    }
}
