//! The MLP of a layer: one clamped SwiGLU, or routed experts beside a shared one.
//!
//! ```text
//! swiglu(x) = W_down ( silu(min(W_gate x, limit)) * clamp(W_up x, -limit, limit) )
//! s = sigmoid(W_g x);   chosen = top of (s + bias);   w = s / (sum of chosen s + 1e-20) * factor
//! moe(x)    = sum over chosen e of w[e] swiglu_e(x) + swiglu_shared(x)
//! ```
//! The bias steers the choice only; the factor applies to routed weights only. The router is true f32, its ties go to the
//! lower expert.

use glimmer_checkpoint::{TensorData, config::MlpKind};
use glimmer_tensor::{Backend, Experts, RouterRule, Swiglu};

use crate::{
    Error, Result,
    layer::Pass,
    observer::{At, Observer},
    weights::Loader,
    workspace::Workspace,
};

/// How much of an MoE layer is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parts {
    /// Everything.
    All,
    /// Everything but the experts, routed and shared.
    WithoutExperts,
}

/// The MLP of a layer.
#[derive(Debug)]
pub enum Mlp<B: Backend> {
    /// One SwiGLU for all rows, with its clamp.
    Dense {
        /// Weights, `[intermediate, hidden]` and `[hidden, intermediate]`.
        weights: Swiglu<B>,
        /// SwiGLU clamp.
        limit: f32,
    },
    /// Routed experts and a shared expert.
    Sparse(Moe<B>),
}

impl<B: Backend> Mlp<B> {
    /// Loads an MLP from below `mlp.`.
    ///
    /// # Errors
    /// As [`Loader::matrix`].
    pub(crate) fn load(loader: &Loader<'_, B>, kind: MlpKind, parts: Parts) -> Result<Self> {
        let text = &loader.config().text;
        Ok(match kind {
            MlpKind::Dense => Self::Dense {
                weights: loader.swiglu(text.hidden_size, text.intermediate_size, text.hidden_size)?,
                limit: text.swiglu_limit,
            },
            MlpKind::Sparse => Self::Sparse(Moe::load(loader, parts)?),
        })
    }

    /// `work.x` to `work.y`.
    pub(crate) fn forward<O: Observer<B>>(&self, pass: &mut Pass<'_, B, O>, layer: usize) -> Result<()> {
        match self {
            Self::Dense { weights, limit } => {
                let work = &mut *pass.work;
                pass.backend.swiglu(pass.rows, weights, *limit, &work.x, &mut work.act, &mut work.y)?;
                Ok(())
            }
            Self::Sparse(moe) => moe.forward(pass, layer),
        }
    }
}

/// A router with its experts.
#[derive(Debug)]
pub struct Moe<B: Backend> {
    gate: B::Matrix,
    bias: B::Vector,
    rule: RouterRule,
    /// None: the layer was loaded for its router alone.
    experts: Option<Experts<B>>,
}

impl<B: Backend> Moe<B> {
    /// Loads router and experts from below `mlp.`.
    ///
    /// # Errors
    /// As [`Loader::matrix`].
    pub(crate) fn load(loader: &Loader<'_, B>, parts: Parts) -> Result<Self> {
        let text = &loader.config().text;
        let moe = &text.moe;
        Ok(Self {
            gate: loader.plain_matrix("gate.weight", moe.num_experts, text.hidden_size)?,
            bias: loader.vector("gate.e_score_correction_bias", moe.num_experts)?,
            rule: RouterRule {
                top: moe.experts_per_token,
                groups: moe.num_groups,
                top_groups: moe.topk_groups,
                normalize: moe.normalize,
                scale: moe.routed_scaling_factor,
            },
            experts: match parts {
                Parts::All => Some(load_experts(loader)?),
                Parts::WithoutExperts => None,
            },
        })
    }

    /// The layer's experts as loaded; none in a layer that was loaded without them.
    pub fn experts(&self) -> Option<&Experts<B>> {
        self.experts.as_ref()
    }

    /// The experts, for `layer`'s forward pass.
    pub(crate) fn own_experts(&self, layer: usize) -> Result<&Experts<B>> {
        self.experts.as_ref().ok_or(Error::NoExperts { layer })
    }

    /// Puts `bias` `[experts]` in the place of the one that was loaded.
    pub(crate) fn set_bias(&mut self, backend: &B, bias: &TensorData) -> Result<()> {
        self.bias = backend.vector(bias)?;
        Ok(())
    }

    /// Experts a row.
    pub fn top(&self) -> usize {
        self.rule.top
    }

    /// Chooses the experts of `work.x` into `work.routing`.
    pub(crate) fn route(&self, backend: &mut B, rows: usize, work: &mut Workspace<B>) -> Result<()> {
        backend.route(rows, &self.gate, &self.bias, self.rule, &work.x, &mut work.routing)?;
        Ok(())
    }

    fn forward<O: Observer<B>>(&self, pass: &mut Pass<'_, B, O>, layer: usize) -> Result<()> {
        let rows = pass.rows;
        self.route(pass.backend, rows, pass.work)?;
        pass.observer.routing(At { backend: &mut *pass.backend, layer, rows }, &pass.work.routing);
        run_experts(pass.backend, rows, self.own_experts(layer)?, pass.work)
    }
}

/// The experts below `mlp.`: `experts.E.*` (BF16 or INT4) and `shared_experts.*`.
///
/// # Errors
/// As [`Loader::matrix`].
pub fn load_experts<B: Backend>(loader: &Loader<'_, B>) -> Result<Experts<B>> {
    let text = &loader.config().text;
    let (moe, hidden) = (&text.moe, text.hidden_size);
    let routed = (0..moe.num_experts)
        .map(|e| loader.at(&format!("experts.{e}.")).swiglu(hidden, moe.intermediate_size, hidden))
        .collect::<Result<Vec<_>>>()?;
    let shared = match moe.num_shared {
        0 => None,
        count => Some(loader.at("shared_experts.").swiglu(hidden, count * moe.intermediate_size, hidden)?),
    };
    Ok(Experts { routed, shared, limit: text.swiglu_limit })
}

/// `work.x` with `work.routing` to `work.y`.
pub(crate) fn run_experts<B: Backend>(
    backend: &mut B,
    rows: usize,
    experts: &Experts<B>,
    work: &mut Workspace<B>,
) -> Result<()> {
    backend.moe_up(rows, experts, &work.routing, &work.x, &mut work.expert_act, &mut work.shared_act)?;
    backend.moe_down(rows, experts, &work.routing, &work.expert_act, &work.shared_act, &mut work.y)?;
    Ok(())
}
