//! Manifold-constrained hyper-connections: how a sub-block reads from and writes to the residual streams.
//!
//! A row carries `n` streams `S [n, hidden]`. Before a sub-block, a mixer derives from all streams together
//! ```text
//! m       = fn . (S / rms(S))                                   rms over all n * hidden values, eps = rms_norm_eps
//! pre[i]  = sigmoid(m[i] scale[0] + base[i]) + hc_eps           weights of the collapsed input
//! post[j] = 2 sigmoid(m[n+j] scale[1] + base[n+j])              weights of the output
//! C       = sinkhorn(softmax_j(m[2n+ni+j] scale[2] + base[2n+ni+j]) + hc_eps)
//! u       = sum_i pre[i] S[i],   y = block(norm(u)),   S'[j] = post[j] y + sum_i C[i][j] S[i]
//! ```
//! where Sinkhorn normalises columns (sums over `i`) first and last: `k` column and `k - 1` row normalisations, each
//! dividing by the sum plus `hc_eps`. `S'` needs the block's output, so a backend fuses it with the *next* mixer: one stage
//! completes the previous sub-block and begins the next one. A layer has two sites, before attention and before the MLP.

use glimmer_tensor::{Backend, MhcWeights, Norm, Streams};

use crate::{
    Result,
    observer::{At, Observer, SiteKind},
    weights::Loader,
};

/// A mixer with the norm of the sub-block that it feeds.
#[derive(Debug)]
pub struct Site<B: Backend> {
    kind: SiteKind,
    mixer: MhcWeights<B>,
    norm: Norm<B>,
}

impl<B: Backend> Site<B> {
    /// Loads `hc_attn_*` with `input_layernorm`, or `hc_ffn_*` with `post_attention_layernorm`.
    ///
    /// # Errors
    /// As [`Loader::matrix`].
    pub(crate) fn load(loader: &Loader<'_, B>, kind: SiteKind) -> Result<Self> {
        let text = &loader.config().text;
        let (mixer, norm) = match kind {
            SiteKind::Attention => ("hc_attn", "input_layernorm"),
            SiteKind::Mlp => ("hc_ffn", "post_attention_layernorm"),
        };
        let n = text.mhc.streams;
        let coefficients = 2 * n + n * n;
        Ok(Self {
            kind,
            mixer: MhcWeights {
                mix: loader.plain_matrix(&format!("{mixer}_fn"), coefficients, n * text.hidden_size)?,
                base: loader.vector(&format!("{mixer}_base"), coefficients)?,
                scale: loader.vector(&format!("{mixer}_scale"), 3)?,
                streams: n,
                rms_eps: text.rms_norm_eps,
                eps: text.mhc.eps,
                sinkhorn_iters: text.mhc.sinkhorn_iters,
            },
            norm: loader.norm(norm, text.hidden_size, text.rms_norm_eps)?,
        })
    }

    /// The norm behind the mixer.
    pub(crate) fn norm(&self) -> &Norm<B> {
        &self.norm
    }

    /// Completes the previous sub-block with its output `y` (none at the first site of a pass), then mixes: coefficients
    /// and collapsed input in `streams`, the normed input in `x`.
    pub(crate) fn apply(
        &self,
        at: At<'_, B>,
        y: Option<&B::Buffer>,
        streams: &mut Streams<B>,
        x: &mut B::Buffer,
        observer: &mut impl Observer<B>,
    ) -> Result<()> {
        let At { backend, layer, rows } = at;
        backend.mhc(rows, &self.mixer, &self.norm, y, streams, x)?;
        if self.kind == SiteKind::Attention {
            observer.streams(At { backend, layer, rows }, streams);
        }
        observer.site(At { backend, layer, rows }, self.kind, streams, x);
        Ok(())
    }
}
