//! One decoder layer: mixer, attention, mixer, MLP.
//!
//! A layer leaves its MLP's output pending: the next layer's first mixer (or the end of the trunk) adds it to the streams,
//! because a backend fuses the two. A layer can be loaded alone, which is how a quantizer walks a model that does not fit
//! in memory (see [`crate::streaming`]).

use glimmer_checkpoint::config::{AttentionKind, IndexerKind};
use glimmer_tensor::{Backend, KdaForm};

use crate::{
    Error, Result,
    kda::Kda,
    mhc::Site,
    mla::{Dsa, Select},
    moe::{Mlp, Parts},
    observer::{At, Observer, SiteKind},
    weights::{Loader, Source, layer_prefix},
    workspace::Workspace,
};

/// Everything that a pass over the layers carries along.
#[derive(Debug)]
pub(crate) struct Pass<'a, B: Backend, O> {
    pub(crate) backend: &'a mut B,
    pub(crate) cache: &'a mut B::Cache,
    pub(crate) work: &'a mut Workspace<B>,
    /// Selection of the last DSA block, reused by blocks without an indexer.
    pub(crate) selection: &'a mut B::Selection,
    pub(crate) observer: &'a mut O,
    pub(crate) rows: usize,
    /// Width of a residual stream.
    pub(crate) hidden: usize,
}

/// The attention of a layer.
#[derive(Debug)]
pub enum Attention<B: Backend> {
    /// Kimi delta attention.
    Kda(Kda<B>),
    /// Sparse latent attention.
    Dsa {
        /// The block.
        block: Dsa<B>,
        /// Whether it reuses the preceding layer's selection.
        shared: bool,
    },
}

/// One decoder layer with its weights.
#[derive(Debug)]
pub struct Layer<B: Backend> {
    index: usize,
    /// Number of the layer among the layers of its kind: its place in the caches.
    ordinal: usize,
    attention_site: Site<B>,
    attention: Attention<B>,
    mlp_site: Site<B>,
    mlp: Mlp<B>,
}

impl<B: Backend> Layer<B> {
    /// Loads decoder layer `index`.
    ///
    /// # Errors
    /// [`Error::Missing`] and [`Error::Shape`] naming the tensor, [`Error::NoSelection`] when the layer has no indexer and
    /// does not follow a DSA layer, [`Error::Limit`] when there is no such layer.
    pub fn load(backend: &B, source: &dyn Source, index: usize) -> Result<Self> {
        Self::load_parts(backend, source, index, Parts::All)
    }

    /// Loads decoder layer `index` without the experts of an MoE layer: attention, mixers and router, which is what a
    /// quantizer needs that brings its own experts ([`crate::streaming::Runner::finish`]). Of a block-FP8 source, whose
    /// weights are widened when they are loaded, a layer's experts are most of the model.
    ///
    /// # Errors
    /// As [`Layer::load`].
    pub fn load_without_experts(backend: &B, source: &dyn Source, index: usize) -> Result<Self> {
        Self::load_parts(backend, source, index, Parts::WithoutExperts)
    }

    fn load_parts(backend: &B, source: &dyn Source, index: usize, parts: Parts) -> Result<Self> {
        let text = &source.config().text;
        let (Some(&attention), Some(&mlp)) = (text.attention.get(index), text.mlp.get(index)) else {
            return Err(Error::Limit {
                what: "decoder layers",
                needed: index + 1,
                available: text.num_hidden_layers,
                limit: "num_hidden_layers",
            });
        };
        let loader = Loader::new(backend, source, layer_prefix(source, index));
        let block = loader.at("self_attn.");
        let attention = match attention {
            AttentionKind::Kda => Attention::Kda(Kda::load(&block)?),
            AttentionKind::Dsa => {
                let shared = text.indexer.kinds.get(index) == Some(&IndexerKind::Shared);
                let follows = index > 0 && text.attention[index - 1] == AttentionKind::Dsa;
                if shared && !follows {
                    return Err(Error::NoSelection { layer: index });
                }
                Attention::Dsa { block: Dsa::load(&block, !shared)?, shared }
            }
        };
        Ok(Self {
            index,
            ordinal: text.attention[..index].iter().filter(|&&kind| kind == text.attention[index]).count(),
            attention_site: Site::load(&loader, SiteKind::Attention)?,
            attention,
            mlp_site: Site::load(&loader, SiteKind::Mlp)?,
            mlp: Mlp::load(&loader.at("mlp."), mlp, parts)?,
        })
    }

    /// Index of the layer in the model.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The attention block.
    pub fn attention(&self) -> &Attention<B> {
        &self.attention
    }

    /// The MLP.
    pub fn mlp(&self) -> &Mlp<B> {
        &self.mlp
    }

    /// The MLP, to change it.
    pub(crate) fn mlp_mut(&mut self) -> &mut Mlp<B> {
        &mut self.mlp
    }

    /// The mixer before the MLP.
    pub(crate) fn mlp_site(&self) -> &Site<B> {
        &self.mlp_site
    }

    /// Whether the layer reuses the selection of the layer before it.
    pub fn reuses_selection(&self) -> bool {
        matches!(self.attention, Attention::Dsa { shared: true, .. })
    }

    /// Both halves. With `pending`, `work.y` is the preceding sub-block's output; afterwards `work.y` is this layer's.
    pub(crate) fn forward<O: Observer<B>>(
        &self,
        pass: &mut Pass<'_, B, O>,
        form: KdaForm,
        pending: bool,
    ) -> Result<()> {
        self.attend(pass, self.ordinal, form, pending)?;
        self.mix_mlp(pass, true)?;
        self.mlp.forward(pass, self.index)?;
        pass.observer.mlp(At { backend: &mut *pass.backend, layer: self.index, rows: pass.rows }, &pass.work.y);
        Ok(())
    }

    /// The first mixer and attention: leaves the attention's output pending in `work.y`. `ordinal` is the layer's place in
    /// the caches of the pass.
    pub(crate) fn attend<O: Observer<B>>(
        &self,
        pass: &mut Pass<'_, B, O>,
        ordinal: usize,
        form: KdaForm,
        pending: bool,
    ) -> Result<()> {
        let rows = pass.rows;
        let work = &mut *pass.work;
        let at = At { backend: &mut *pass.backend, layer: self.index, rows };
        let y = pending.then_some(&work.y);
        self.attention_site.apply(at, y, &mut work.streams, &mut work.x, pass.observer)?;
        match &self.attention {
            Attention::Kda(block) => block.forward(pass, self.index, ordinal, form)?,
            Attention::Dsa { block, shared } => {
                let select = if *shared { Select::Given } else { Select::Own };
                block.forward(pass, self.index, ordinal, select)?;
            }
        }
        pass.observer.attention(At { backend: &mut *pass.backend, layer: self.index, rows }, &pass.work.y);
        Ok(())
    }

    /// The second mixer: with `pending`, adds the attention's output in `work.y` to the streams first. Leaves the MLP's
    /// input in `work.x`.
    pub(crate) fn mix_mlp<O: Observer<B>>(&self, pass: &mut Pass<'_, B, O>, pending: bool) -> Result<()> {
        let work = &mut *pass.work;
        let at = At { backend: &mut *pass.backend, layer: self.index, rows: pass.rows };
        let y = pending.then_some(&work.y);
        self.mlp_site.apply(at, y, &mut work.streams, &mut work.x, pass.observer)
    }
}
