//! The draft layer (multi-token prediction): proposes the token after next from a hidden state.
//!
//! A row at position `t` takes the embedding of token `t + 1` and the hidden state `h` of position `t` (the output of the
//! trunk's final norm, which is what the head reads) and predicts token `t + 2`:
//! ```text
//! x  = W_eh [ rmsnorm(embed(token[t+1])) | rmsnorm(h[t]) ]
//! x += dsa(rmsnorm(x));   x += moe(rmsnorm(x));   h' = rmsnorm(x);   logits = head(h')
//! ```
//! The residual is plain (no hyper-connections), the head and the embedding are the trunk's, nothing is zeroed at position
//! 0, and an image placeholder counts with its own embedding row. The layer owns the last DSA cache, indexed by the row's
//! position.
//!
//! # Chains
//! A further draft is a row one position on whose hidden state is `h'` of the row before and whose token is the draft just
//! made. Such a row either selects tokens anew (and sees itself) or shares the selection of the row that began the chain;
//! a sharing row neither reads nor writes the indexer's caches. What a chain leaves in the cache is overwritten when the
//! true rows of those positions are run.

use glimmer_checkpoint::{TextConfig, config::MlpKind};
use glimmer_tensor::{Backend, Columns, Linear, Norm, Step};

use crate::{
    Error, Result,
    layer::Pass,
    mla::{Dsa, Select},
    moe::{Mlp, Parts},
    observer::{At, Observer},
    weights::{Loader, Source, layer_prefix},
};

/// Which hidden states a draft step starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HiddenSource {
    /// Rows of the last [`crate::Model::forward`].
    Trunk,
    /// Rows of the last [`crate::Model::draft`] (a chain).
    Draft,
}

/// One step of the draft layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MtpStep {
    /// Rows: `tokens[row]` is the token *after* the row's position; segments, pages and wanted logits as in a trunk step
    /// (`fold` and `commit` do not matter, image features are not used).
    pub step: Step,
    /// Where the hidden states are.
    pub from: HiddenSource,
    /// For each row, the row of its hidden state in that step.
    pub source: Vec<u32>,
    /// For a chain that shares selections: for each row, the row of the last non-sharing draft step whose selection it uses.
    pub shared: Option<Vec<u32>>,
}

/// A step of a chain that is run without anybody looking at the step before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainStep {
    /// The step; its tokens do not matter, as long as they exist.
    pub step: MtpStep,
    /// For each row, which of the rows with logits of the step before has its token as its largest logit.
    pub taken: Vec<u32>,
}

/// Where a step's tokens come from and where those of its largest logits go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Feed<'a> {
    /// The place of the largest logits' tokens; those that are taken are at the place before.
    pub(crate) place: usize,
    /// Rows of the step before.
    pub(crate) taken: Option<&'a [u32]>,
}

impl MtpStep {
    /// Checks what [`Step::validate`] does not know.
    pub(crate) fn validate(&self, trunk_rows: usize, draft_rows: usize, selected_rows: usize) -> Result<()> {
        let rows = self.step.rows();
        let broken = |rule| Err(Error::DraftStep { rule });
        let available = match self.from {
            HiddenSource::Trunk => trunk_rows,
            HiddenSource::Draft => draft_rows,
        };
        if self.source.len() != rows {
            return broken("every row has a hidden state");
        }
        if self.source.iter().any(|&s| s as usize >= available) {
            return broken("hidden states are rows of the last step of their kind");
        }
        if let Some(shared) = &self.shared {
            if shared.len() != rows {
                return broken("every row of a sharing step names a selection");
            }
            if shared.iter().any(|&s| s as usize >= selected_rows) {
                return broken("shared selections are rows of the last draft step that selected");
            }
        }
        if !self.step.features.is_empty() {
            return broken("a draft step takes no image features");
        }
        Ok(())
    }
}

/// Weights of the draft layer.
#[derive(Debug)]
pub struct Mtp<B: Backend> {
    index: usize,
    enorm: Norm<B>,
    hnorm: Norm<B>,
    eh_proj: Linear<B>,
    input_norm: Norm<B>,
    attention: Dsa<B>,
    post_norm: Norm<B>,
    mlp: Mlp<B>,
    head_norm: Norm<B>,
}

/// Activations and results of draft steps.
#[derive(Debug)]
pub(crate) struct MtpWork<B: Backend> {
    /// `[norm(embedding) | norm(hidden)]`.
    input: B::Buffer,
    /// Plain residual, `[rows, hidden]`.
    residual: B::Buffer,
    /// `h'` of the last draft step.
    pub(crate) hidden: B::Buffer,
    /// Logits of the last draft step's wanted rows.
    pub(crate) logits: B::Buffer,
    /// Selection of the last step that selected.
    pub(crate) selected: B::Selection,
    /// Copies of selections for a sharing step.
    shared: B::Selection,
}

impl<B: Backend> MtpWork<B> {
    pub(crate) fn new(backend: &B, config: &TextConfig, max_rows: usize, max_logits: usize) -> Result<Self> {
        let hidden = config.hidden_size;
        let width = config.selection_width();
        Ok(Self {
            input: backend.buffer(max_rows, 2 * hidden)?,
            residual: backend.buffer(max_rows, hidden)?,
            hidden: backend.buffer(max_rows, hidden)?,
            logits: backend.buffer(max_logits, config.vocab_size)?,
            selected: backend.selection(max_rows, width)?,
            shared: backend.selection(max_rows, width)?,
        })
    }
}

impl<B: Backend> Mtp<B> {
    /// Loads the layer stored after the decoder layers.
    ///
    /// # Errors
    /// [`Error::NoDraftLayer`] when the configuration has none; otherwise as [`Loader::matrix`].
    pub fn load(backend: &B, source: &dyn Source) -> Result<Self> {
        let text = &source.config().text;
        let index = text.mtp_layer().ok_or(Error::NoDraftLayer)?;
        let loader = Loader::new(backend, source, layer_prefix(source, index));
        let (hidden, eps) = (text.hidden_size, text.rms_norm_eps);
        Ok(Self {
            index,
            enorm: loader.norm("enorm", hidden, eps)?,
            hnorm: loader.norm("hnorm", hidden, eps)?,
            eh_proj: loader.linear("eh_proj", hidden, 2 * hidden)?,
            input_norm: loader.norm("input_layernorm", hidden, eps)?,
            attention: Dsa::load(&loader.at("self_attn."), true)?,
            post_norm: loader.norm("post_attention_layernorm", hidden, eps)?,
            mlp: Mlp::load(&loader.at("mlp."), MlpKind::Sparse, Parts::All)?,
            head_norm: loader.norm("shared_head.norm", hidden, eps)?,
        })
    }

    /// Runs one step up to `h'`. `trunk` holds the trunk's hidden states, `ordinal` is the layer's place among the DSA
    /// caches; the pass's own selection is not touched.
    pub(crate) fn forward<O: Observer<B>>(
        &self,
        pass: &mut Pass<'_, B, O>,
        mtp: &mut MtpWork<B>,
        step: &MtpStep,
        embed: &B::Matrix,
        trunk: &B::Buffer,
        ordinal: usize,
    ) -> Result<()> {
        let (rows, layer, hidden) = (pass.rows, self.index, pass.hidden);
        let source = match step.from {
            HiddenSource::Trunk => trunk,
            HiddenSource::Draft => &mtp.hidden,
        };
        let backend = &mut *pass.backend;
        backend.mtp_input(embed, &self.enorm, &self.hnorm, source, &step.source, &mut mtp.input)?;
        let input = Columns { buffer: &mtp.input, start: 0, width: 2 * hidden };
        backend.linear(rows, input, &[&self.eh_proj], &mut mtp.residual, 0)?;
        pass.observer.draft_input(At { backend, layer, rows }, &mtp.residual);
        backend.add_norm(rows, None, &self.input_norm, &mut mtp.residual, &mut pass.work.x)?;

        let (selection, select) = match &step.shared {
            Some(shared) => {
                backend.copy_selection(&mtp.selected, shared, &mut mtp.shared)?;
                (&mut mtp.shared, Select::Given)
            }
            None => (&mut mtp.selected, Select::Own),
        };
        let mut pass = Pass {
            backend: &mut *pass.backend,
            cache: &mut *pass.cache,
            work: &mut *pass.work,
            selection,
            observer: &mut *pass.observer,
            rows,
            hidden,
        };
        self.attention.forward(&mut pass, layer, ordinal, select)?;
        pass.observer.attention(At { backend: &mut *pass.backend, layer, rows }, &pass.work.y);
        let work = &mut *pass.work;
        pass.backend.add_norm(rows, Some(&work.y), &self.post_norm, &mut mtp.residual, &mut work.x)?;
        self.mlp.forward(&mut pass, layer)?;
        pass.observer.mlp(At { backend: &mut *pass.backend, layer, rows }, &pass.work.y);
        pass.backend.add_norm(rows, Some(&pass.work.y), &self.head_norm, &mut mtp.residual, &mut mtp.hidden)?;
        pass.observer.hidden(At { backend: &mut *pass.backend, layer, rows }, &mtp.hidden);
        Ok(())
    }
}
