//! The whole model: embedding, decoder layers, final norm, head, and the draft layer beside them.
//!
//! ```text
//! S[i] = embed(token) for every stream i;   S through all layers;   h = rmsnorm(mean_i S[i]);   logits = W_head h
//! ```
//! [`Model`] owns the backend, the weights, the caches and every buffer. A [`Step`] names rows, slots and pages; after
//! [`Model::forward`] the results of its rows can be read until the next call. Nothing is allocated in a step.

use glimmer_checkpoint::{Bytes, DType, TensorData, TextConfig};
use glimmer_tensor::{Backend, CacheShape, Finds, KdaForm, Norm, PAGE_TOKENS, Program, Samples, Step, TOKEN_PLACES};

use crate::{
    ChainStep, Error, Limits, MtpStep, Options, Result,
    layer::{Layer, Pass},
    limits::cache_shape,
    moe::Mlp,
    mtp::{Feed, HiddenSource, Mtp, MtpWork},
    observer::{At, Observer},
    program::{TRUNK, start},
    weights::{Loader, Source, text_prefix},
    workspace::{Widths, Workspace},
};

/// A loaded model with its caches.
#[derive(Debug)]
pub struct Model<B: Backend> {
    backend: B,
    config: TextConfig,
    limits: Limits,
    options: Options,
    shape: CacheShape,
    embed: B::Matrix,
    layers: Vec<Layer<B>>,
    norm: Norm<B>,
    head: B::Matrix,
    mtp: Option<(Mtp<B>, MtpWork<B>)>,
    cache: B::Cache,
    work: Workspace<B>,
    selection: B::Selection,
    features: B::Buffer,
    hidden: B::Buffer,
    logits: B::Buffer,
    /// Rows of the last trunk step.
    rows: usize,
    /// Rows with logits of the last trunk step.
    wanted: usize,
    /// Rows of the last draft step, rows with logits, and rows of the last draft step that selected. (All zero while a step
    /// runs: one that failed has no results.)
    drafted: (usize, usize, usize),
}

impl<B: Backend> Model<B> {
    /// Loads all layers and allocates everything.
    ///
    /// # Errors
    /// [`Error::Missing`] and [`Error::Shape`] naming the tensor; allocation errors of the backend.
    pub fn load(mut backend: B, source: &dyn Source, limits: Limits, options: Options) -> Result<Self> {
        let config = source.config().text.clone();
        let shape = cache_shape(&config, &limits);
        let text = Loader::new(&backend, source, text_prefix(source));
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embed = text.plain_matrix("embed_tokens.weight", vocab, hidden)?;
        let norm = text.norm("norm", hidden, config.rms_norm_eps)?;
        let head = Loader::new(&backend, source, "").plain_matrix("lm_head.weight", vocab, hidden)?;
        let layers =
            (0..config.num_hidden_layers).map(|l| Layer::load(&backend, source, l)).collect::<Result<Vec<_>>>()?;
        let mtp = if options.draft_layer && config.mtp_layer().is_some() {
            let work = MtpWork::new(&backend, &config, limits.max_rows, limits.max_logits)?;
            Some((Mtp::load(&backend, source)?, work))
        } else {
            None
        };
        let context = config.max_position_embeddings.min(limits.pages * PAGE_TOKENS);
        backend.reserve(limits.max_rows, Widths::new(&config).widest(&config), context)?;
        Ok(Self {
            cache: backend.cache(&shape)?,
            work: Workspace::new(&backend, &config, limits.max_rows)?,
            selection: backend.selection(limits.max_rows, config.selection_width())?,
            features: backend.buffer(limits.features.max(1), hidden)?,
            hidden: backend.buffer(limits.max_rows, hidden)?,
            logits: backend.buffer(limits.max_logits, vocab)?,
            backend,
            config,
            limits,
            options,
            shape,
            embed,
            layers,
            norm,
            head,
            mtp,
            rows: 0,
            wanted: 0,
            drafted: (0, 0, 0),
        })
    }

    /// The text model's configuration.
    pub fn config(&self) -> &TextConfig {
        &self.config
    }

    /// What was allocated.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The caches, as [`Step::validate`] needs them.
    pub fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// The decoder layers.
    pub fn layers(&self) -> &[Layer<B>] {
        &self.layers
    }

    /// Puts another `bias` `[experts]` into the router of `layer`, where it steers the choice of experts only: what balances a
    /// model in training, for weights that were never trained. A backend may have kept whole steps, which know the old one: they
    /// must not be repeated.
    ///
    /// # Errors
    /// [`Error::Shape`] where the layer has no router or another number of experts, and errors of the backend.
    pub fn set_router_bias(&mut self, layer: usize, bias: &[f32]) -> Result<()> {
        let name = format!("layers.{layer}.mlp.gate.e_score_correction_bias");
        let router = self.layers.get_mut(layer).and_then(|layer| match layer.mlp_mut() {
            Mlp::Sparse(moe) => Some(moe),
            Mlp::Dense { .. } => None,
        });
        let wanted = if router.is_some() { self.config.moe.num_experts } else { 0 };
        match router {
            Some(moe) if bias.len() == wanted => {
                let bytes = Bytes::new(bias.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
                moe.set_bias(&self.backend, &TensorData { name, dtype: DType::F32, shape: vec![wanted], bytes })
            }
            _ => Err(Error::Shape { name, expected: format!("[{wanted}]"), found: format!("[{}]", bias.len()) }),
        }
    }

    /// Whether a draft layer is loaded.
    pub fn has_draft_layer(&self) -> bool {
        self.mtp.is_some()
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The backend, for stages outside the text model (the vision tower).
    pub fn backend_mut(&mut self) -> &mut B {
        &mut self.backend
    }

    /// Form of the delta rule in later steps.
    pub fn set_kda_form(&mut self, form: KdaForm) {
        self.options.kda_form = Some(form);
    }

    /// Form of the delta rule of a step: without a segment that can hold a chunk both are the same.
    fn form(&self, step: &Step) -> KdaForm {
        let chunks = step.segments.iter().any(|segment| segment.commit as usize >= PAGE_TOKENS);
        let form = self.options.kda_form.unwrap_or_else(|| self.backend.prompt_form());
        if chunks { form } else { KdaForm::Recurrent }
    }

    /// Number of ids that the tokenizer knows (see [`Options::real_vocab`]).
    pub fn set_real_vocab(&mut self, real_vocab: Option<usize>) {
        self.options.real_vocab = real_vocab;
    }

    /// Writes row `index` of the feature buffer, `[hidden]`, for [`glimmer_tensor::FeatureRow`]s of later steps.
    ///
    /// # Errors
    /// [`Error::Limit`] beyond the buffer, [`Error::Length`] for another width.
    pub fn set_feature(&mut self, index: usize, values: &[f32]) -> Result<()> {
        self.check_feature(index)?;
        expect_length("image feature", self.config.hidden_size, values.len())?;
        Ok(self.backend.write(&mut self.features, index, values)?)
    }

    /// Copies row `row` of a buffer of this backend (the vision tower's output) into row `index` of the feature buffer.
    ///
    /// # Errors
    /// [`Error::Limit`] beyond the feature buffer.
    pub fn copy_feature(&mut self, from: &B::Buffer, row: usize, index: usize) -> Result<()> {
        self.check_feature(index)?;
        Ok(self.backend.copy_row(from, row, &mut self.features, index)?)
    }

    /// Copies everything that slot `from` owns to slot `to` (state checkpoints).
    ///
    /// # Errors
    /// [`Error::Limit`] when a slot does not exist.
    pub fn copy_slot(&mut self, from: u32, to: u32) -> Result<()> {
        let slot = from.max(to) as usize;
        if slot >= self.limits.slots {
            return Err(limit("slots", slot + 1, self.limits.slots, "slots"));
        }
        Ok(self.backend.copy_slot(&mut self.cache, from, to)?)
    }

    /// State of the `ordinal`-th KDA layer of a slot, `[heads, key, value]`.
    ///
    /// # Errors
    /// What the backend says about the indices.
    pub fn state(&self, ordinal: usize, slot: u32) -> Result<Vec<f32>> {
        Ok(self.backend.read_state(&self.cache, ordinal, slot)?)
    }

    /// Runs one step.
    ///
    /// # Errors
    /// An invalid step or one beyond the limits is refused before anything is computed.
    pub fn forward(&mut self, step: &Step, observer: &mut impl Observer<B>) -> Result<()> {
        self.check(step)?;
        let (rows, layers) = (step.rows(), self.layers.len());
        (self.rows, self.wanted) = (0, 0);
        if rows == 0 {
            return Ok(());
        }
        // The chunked form launches what positions ask for.
        let program = Program { stages: TRUNK, source: &[], shared: &[], taken: &[] };
        let form = self.form(step);
        let whole = !observer.looks() && form == KdaForm::Recurrent;
        if start(&mut self.backend, step, whole.then_some(program))? {
            (self.rows, self.wanted) = (rows, step.logits.len());
            return Ok(());
        }
        self.backend.embed(&self.embed, &self.features, &mut self.work.streams, self.config.mhc.streams)?;
        let mut pass = Pass {
            backend: &mut self.backend,
            cache: &mut self.cache,
            work: &mut self.work,
            selection: &mut self.selection,
            observer,
            rows,
            hidden: self.config.hidden_size,
        };
        for layer in &self.layers {
            layer.forward(&mut pass, form, layer.index() > 0)?;
        }
        let work = &mut *pass.work;
        pass.backend.mhc_head(rows, &self.norm, &work.y, &mut work.streams, &mut self.hidden)?;
        pass.observer.streams(At { backend: &mut *pass.backend, layer: layers, rows }, &work.streams);
        pass.observer.hidden(At { backend: &mut *pass.backend, layer: layers, rows }, &self.hidden);
        if !step.logits.is_empty() {
            self.backend.head(&self.head, &step.logits, &self.hidden, &mut self.logits)?;
        }
        self.backend.finish()?;
        (self.rows, self.wanted) = (rows, step.logits.len());
        Ok(())
    }

    /// Runs one step of the draft layer. The trunk's results stay readable.
    ///
    /// # Errors
    /// [`Error::NoDraftLayer`]; otherwise as [`Model::forward`].
    pub fn draft(&mut self, draft: &MtpStep, observer: &mut impl Observer<B>) -> Result<()> {
        self.run_draft(draft, None, observer)
    }

    /// Whether [`Model::draft_chain`] is there.
    pub fn chains(&self) -> bool {
        self.backend.keeps_tokens()
    }

    /// Runs a step of the draft layer and a chain behind it, each step fed with the largest logits' tokens of the one before, which
    /// nobody waits for. `tokens` are then those of all rows with logits, step by step: `None` where [`Model::sample_drafts`]
    /// would give none; what such a row feeds is no use. Up to [`TOKEN_PLACES`] steps.
    ///
    /// # Errors
    /// As [`Model::draft`]; [`Error::Limit`] for a longer chain.
    pub fn draft_chain(&mut self, first: &MtpStep, chain: &[ChainStep], tokens: &mut Vec<Option<u32>>) -> Result<()> {
        if chain.len() >= TOKEN_PLACES {
            return Err(limit("steps of a chain", chain.len() + 1, TOKEN_PLACES, "TOKEN_PLACES"));
        }
        self.run_draft(first, Some(Feed { place: 0, taken: None }), &mut ())?;
        let mut before = first.step.logits.len();
        for (link, place) in chain.iter().zip(1..) {
            if link.taken.len() != link.step.step.rows() || link.taken.iter().any(|&row| row as usize >= before) {
                return Err(Error::DraftStep {
                    rule: "tokens of a chain are those of rows with logits of the step before",
                });
            }
            self.run_draft(&link.step, Some(Feed { place, taken: Some(&link.taken) }), &mut ())?;
            before = link.step.step.logits.len();
        }
        let rows = std::iter::once(first).chain(chain.iter().map(|link| &link.step)).map(|s| s.step.logits.len());
        let rows: Vec<usize> = rows.collect();
        Ok(self.backend.kept_tokens(&rows, tokens)?)
    }

    fn run_draft(&mut self, draft: &MtpStep, feed: Option<Feed<'_>>, observer: &mut impl Observer<B>) -> Result<()> {
        self.check(&draft.step)?;
        let vocabulary = self.vocabulary();
        let (trunk_rows, drafted) = (self.rows, self.drafted);
        let Some((mtp, mtp_work)) = &mut self.mtp else { return Err(Error::NoDraftLayer) };
        draft.validate(trunk_rows, drafted.0, drafted.2)?;
        let rows = draft.step.rows();
        let selected = if draft.shared.is_some() { drafted.2 } else { rows };
        self.drafted = (0, 0, 0);
        if rows == 0 {
            return Ok(());
        }
        let whole = (!observer.looks()).then(|| draft.program(feed));
        if start(&mut self.backend, &draft.step, whole)? {
            self.drafted = (rows, draft.step.logits.len(), selected);
            return Ok(());
        }
        let mut pass = Pass {
            backend: &mut self.backend,
            cache: &mut self.cache,
            work: &mut self.work,
            selection: &mut self.selection,
            observer,
            rows,
            hidden: self.config.hidden_size,
        };
        if let Some(Feed { place, taken: Some(rows) }) = feed {
            pass.backend.take_tokens(place - 1, rows)?;
        }
        mtp.forward(&mut pass, mtp_work, draft, &self.embed, &self.hidden, self.shape.dsa_layers - 1)?;
        if !draft.step.logits.is_empty() {
            self.backend.head(&self.head, &draft.step.logits, &mtp_work.hidden, &mut mtp_work.logits)?;
        }
        if let Some(feed) = feed {
            self.backend.keep_largest(&mtp_work.logits, draft.step.logits.len(), vocabulary, feed.place)?;
        }
        self.backend.finish()?;
        self.drafted = (rows, draft.step.logits.len(), selected);
        Ok(())
    }

    /// Logits of the `index`-th row wanted by the last step, `[vocab_size]`.
    ///
    /// # Errors
    /// [`Error::Limit`] when the step wanted fewer rows, [`Error::Length`] for another width.
    pub fn logits(&self, index: usize, values: &mut [f32]) -> Result<()> {
        if index >= self.wanted {
            return Err(limit("logit rows of the last step", index + 1, self.wanted, "Step::logits"));
        }
        self.read_logits(&self.logits, index, values)
    }

    /// Logits of the `index`-th row wanted by the last draft step, `[vocab_size]`.
    ///
    /// # Errors
    /// As [`Model::logits`].
    pub fn draft_logits(&self, index: usize, values: &mut [f32]) -> Result<()> {
        let Some((_, work)) = &self.mtp else { return Err(Error::NoDraftLayer) };
        if index >= self.drafted.1 {
            return Err(limit("logit rows of the last draft step", index + 1, self.drafted.1, "Step::logits"));
        }
        self.read_logits(&work.logits, index, values)
    }

    /// The rows for which [`Model::sample`] may give a token.
    pub fn finds(&self) -> Finds {
        self.backend.finds()
    }

    /// Tokens of rows wanted by the last step, one for each row of `asked`; `None` where [`Model::logits`] have to be read.
    ///
    /// # Errors
    /// [`Error::Limit`] when the step wanted fewer rows; what the backend says.
    pub fn sample(&mut self, asked: &Samples, tokens: &mut Vec<Option<u32>>) -> Result<()> {
        check_rows(asked, "logit rows of the last step", self.wanted)?;
        let vocabulary = self.vocabulary();
        Ok(self.backend.sample(&self.logits, vocabulary, asked, tokens)?)
    }

    /// Tokens of rows wanted by the last draft step, as [`Model::sample`].
    ///
    /// # Errors
    /// As [`Model::sample`].
    pub fn sample_drafts(&mut self, asked: &Samples, tokens: &mut Vec<Option<u32>>) -> Result<()> {
        check_rows(asked, "logit rows of the last draft step", self.drafted.1)?;
        let vocabulary = self.vocabulary();
        let Some((_, work)) = &self.mtp else { return Err(Error::NoDraftLayer) };
        Ok(self.backend.sample(&work.logits, vocabulary, asked, tokens)?)
    }

    /// Columns of logits that are tokens.
    fn vocabulary(&self) -> usize {
        self.options.real_vocab.map_or(self.config.vocab_size, |real| real.min(self.config.vocab_size))
    }

    /// Hidden state of a row of the last step after the final norm, `[hidden]`.
    ///
    /// # Errors
    /// As [`Model::logits`].
    pub fn hidden(&self, row: usize, values: &mut [f32]) -> Result<()> {
        if row >= self.rows {
            return Err(limit("rows of the last step", row + 1, self.rows, "Step::tokens"));
        }
        expect_length("hidden state", self.config.hidden_size, values.len())?;
        Ok(self.backend.read(&self.hidden, row, values)?)
    }

    /// Hidden state of a row of the last draft step, `[hidden]`.
    ///
    /// # Errors
    /// As [`Model::logits`].
    pub fn draft_hidden(&self, row: usize, values: &mut [f32]) -> Result<()> {
        let Some((_, work)) = &self.mtp else { return Err(Error::NoDraftLayer) };
        if row >= self.drafted.0 {
            return Err(limit("rows of the last draft step", row + 1, self.drafted.0, "Step::tokens"));
        }
        expect_length("hidden state", self.config.hidden_size, values.len())?;
        Ok(self.backend.read(&work.hidden, row, values)?)
    }

    /// Replaces the hidden state of a row of the last step, for drafting from a state that an earlier step computed.
    ///
    /// # Errors
    /// As [`Model::hidden`], but any row below [`Limits::max_rows`] may be written.
    pub fn set_hidden(&mut self, row: usize, values: &[f32]) -> Result<()> {
        if row >= self.limits.max_rows {
            return Err(limit("rows", row + 1, self.limits.max_rows, "max_rows"));
        }
        expect_length("hidden state", self.config.hidden_size, values.len())?;
        self.backend.write(&mut self.hidden, row, values)?;
        self.rows = self.rows.max(row + 1);
        Ok(())
    }

    /// Tokens selected for a row by the last draft step that selected, ascending.
    pub fn draft_selection(&self, row: usize) -> Vec<u32> {
        match &self.mtp {
            Some((_, work)) if row < self.drafted.2 => self.backend.read_selection(&work.selected, row),
            _ => Vec::new(),
        }
    }

    fn read_logits(&self, buffer: &B::Buffer, index: usize, values: &mut [f32]) -> Result<()> {
        expect_length("logits", self.config.vocab_size, values.len())?;
        self.backend.read(buffer, index, values)?;
        if let Some(padding) = self.options.real_vocab.and_then(|real| values.get_mut(real..)) {
            padding.fill(f32::NEG_INFINITY);
        }
        Ok(())
    }

    fn check(&self, step: &Step) -> Result<()> {
        let rows = step.rows();
        if rows > self.limits.max_rows {
            return Err(limit("rows of a step", rows, self.limits.max_rows, "max_rows"));
        }
        if step.logits.len() > self.limits.max_logits {
            return Err(limit("logit rows of a step", step.logits.len(), self.limits.max_logits, "max_logits"));
        }
        step.validate(&self.shape)?;
        let vocab = self.config.vocab_size;
        if let Some((row, &token)) = step.tokens.iter().enumerate().find(|&(_, &t)| t as usize >= vocab) {
            return Err(Error::Token { row, token, vocab });
        }
        if let Some(far) = step.segments.iter().map(|s| s.position as usize + s.rows as usize).max()
            && far > self.config.max_position_embeddings
        {
            return Err(limit(
                "tokens of a sequence",
                far,
                self.config.max_position_embeddings,
                "max_position_embeddings",
            ));
        }
        step.features.iter().try_for_each(|f| self.check_feature(f.feature as usize))
    }

    fn check_feature(&self, index: usize) -> Result<()> {
        if index >= self.limits.features {
            return Err(limit("image feature rows", index + 1, self.limits.features, "features"));
        }
        Ok(())
    }
}

impl MtpStep {
    /// A step whose rows continue from the last trunk step, row by row from `first` on.
    pub fn after_trunk(step: Step, first: u32) -> Self {
        let source = (0..step.rows()).map(|row| first + row as u32).collect();
        Self { step, from: HiddenSource::Trunk, source, shared: None }
    }
}

fn limit(what: &'static str, needed: usize, available: usize, limit: &'static str) -> Error {
    Error::Limit { what, needed, available, limit }
}

fn check_rows(asked: &Samples, what: &'static str, wanted: usize) -> Result<()> {
    match asked.rows.iter().map(|row| row.row as usize + 1).max() {
        Some(needed) if needed > wanted => Err(limit(what, needed, wanted, "Step::logits")),
        _ => Ok(()),
    }
}

fn expect_length(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::Length { what, expected, found }) }
}
