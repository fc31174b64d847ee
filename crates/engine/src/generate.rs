//! [`Generator`]: a model that serves several sequences at once.
//!
//! One [`Generator::step`]: admit what fits, plan rows ([`crate::plan`]), run the trunk, judge drafts and choose tokens,
//! tell the consumer, run the draft layer. Sequences join and leave between steps; what each yields depends on its own
//! request alone.

use std::{collections::VecDeque, time::Instant};

use glimmer_checkpoint::{Checkpoint, MediaTokens};
use glimmer_model::{
    HiddenSource, Limits, Model, Options,
    vision::{Patches, VisionTower},
};
use glimmer_tensor::{Backend, KdaForm, PAGE_TOKENS};
use serde::{Deserialize, Serialize};

use crate::{
    EngineError, Finish, Flow, Output, Request, SequenceId, TokenEvent,
    draft::{Drafting, propose},
    plan::{Entry, schedule},
    pools::{Pools, need},
    sampling::{History, Sampler},
    sequence::{Phase, Sequence, Trail},
    speculate::{Verdict, judge},
    stats::{DraftCounts, Stats},
};

/// Whether the rows of a draft chain share the selection of the row that began it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IndexSharing {
    /// As `index_share_for_mtp_iteration` of the configuration says.
    #[default]
    Auto,
    /// Share.
    On,
    /// Select anew for every row.
    Off,
}

/// How drafts of sampled requests are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DraftSampling {
    /// The drafter's largest logit. A request then yields the same tokens at every depth.
    #[default]
    Greedy,
    /// A draw from the drafter's distribution; the distribution of the output is the same.
    Probabilistic,
}

/// Sizes and choices of a [`Generator`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Most sequences at once.
    pub sequences: usize,
    /// Most tokens of a sequence; `None` takes the model's longest context.
    pub context: Option<usize>,
    /// Pages of the cache; `None` lets every sequence reach the full context at once.
    pub pages: Option<usize>,
    /// Most rows of a step.
    pub rows: usize,
    /// Draft depth; 0 does not load the draft layer.
    pub depth: usize,
    /// Selections of draft chains.
    pub index_sharing: IndexSharing,
    /// Drafts of sampled requests.
    pub draft_sampling: DraftSampling,
    /// Number of ids that the tokenizer knows; rows of the vocabulary beyond it are never chosen.
    pub real_vocab: Option<usize>,
    /// Form of the delta rule for prompt rows.
    #[serde(skip)]
    pub kda_form: KdaForm,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            sequences: 1,
            context: None,
            pages: None,
            rows: 256,
            depth: 0,
            index_sharing: IndexSharing::Auto,
            draft_sampling: DraftSampling::Greedy,
            real_vocab: None,
            kda_form: KdaForm::Recurrent,
        }
    }
}

/// A model with its pools and sequences.
#[derive(Debug)]
pub struct Generator<B: Backend> {
    pub(crate) model: Model<B>,
    tower: Option<VisionTower<B>>,
    media: Option<MediaTokens>,
    pub(crate) context: usize,
    /// Ids that exist.
    pub(crate) vocab: usize,
    max_rows: usize,
    depth: usize,
    drafting: Drafting,
    pub(crate) pools: Pools,
    waiting: VecDeque<(SequenceId, Request)>,
    running: Vec<Sequence>,
    next_id: u64,
    sampler: Sampler,
    /// Logits of a row, `[vocab_size]`.
    pub(crate) row: Vec<f32>,
    stats: Stats,
}

impl<B: Backend> Generator<B> {
    /// Loads a model and its tower and allocates everything.
    ///
    /// # Errors
    /// [`EngineError::Setting`] for settings that cannot work, [`EngineError::Model`] when the checkpoint does not hold what
    /// its configuration says.
    pub fn load(backend: B, checkpoint: &Checkpoint, settings: &Settings) -> Result<Self, EngineError> {
        let config = checkpoint.config();
        let text = &config.text;
        let bad = |setting, expected: String, found: usize| {
            Err(EngineError::Setting { setting, expected, found: found.to_string() })
        };
        let context = settings.context.unwrap_or(text.max_position_embeddings);
        if context < 2 || context > text.max_position_embeddings {
            return bad("context", format!("2 to {} tokens", text.max_position_embeddings), context);
        }
        if settings.sequences == 0 {
            return bad("sequences", "at least one".to_owned(), 0);
        }
        let least_rows = settings.sequences * (settings.depth + 1);
        if settings.rows < least_rows {
            return bad("rows", format!("at least sequences * (depth + 1) = {least_rows}"), settings.rows);
        }
        if settings.depth > 0 && text.mtp_layer().is_none() {
            return bad("depth", "0, as the model has no draft layer".to_owned(), settings.depth);
        }
        let whole = context.div_ceil(PAGE_TOKENS);
        let pages = settings.pages.unwrap_or(settings.sequences * whole);
        if pages < whole {
            return bad("pages", format!("at least {whole}, the pages of one full context"), pages);
        }
        if let Some(real) = settings.real_vocab.filter(|&real| real == 0 || real > text.vocab_size) {
            return bad("real_vocab", format!("1 to {} ids", text.vocab_size), real);
        }
        let limits = Limits {
            max_rows: settings.rows,
            max_logits: least_rows.max(settings.rows.min(LOGIT_ROWS)),
            slots: settings.sequences,
            pages,
            max_draft: settings.depth,
            features: settings.rows,
        };
        let options =
            Options { kda_form: settings.kda_form, draft_layer: settings.depth > 0, real_vocab: settings.real_vocab };
        let tower = VisionTower::load(&backend, checkpoint)?;
        let model = Model::load(backend, checkpoint, limits, options)?;
        let share = match settings.index_sharing {
            IndexSharing::Auto => text.indexer.share_for_mtp,
            IndexSharing::On => true,
            IndexSharing::Off => false,
        };
        Ok(Self {
            tower,
            media: config.media,
            context,
            vocab: settings.real_vocab.unwrap_or(text.vocab_size),
            max_rows: settings.rows,
            depth: settings.depth,
            drafting: Drafting { share, drawn: settings.draft_sampling == DraftSampling::Probabilistic },
            pools: Pools::new(settings.sequences, 0, pages),
            waiting: VecDeque::new(),
            running: Vec::new(),
            next_id: 0,
            sampler: Sampler::default(),
            row: vec![0.0; text.vocab_size],
            stats: Stats::default(),
            model,
        })
    }

    /// The model.
    pub fn model(&self) -> &Model<B> {
        &self.model
    }

    /// The pools, to see what is free.
    pub fn pools(&self) -> &Pools {
        &self.pools
    }

    /// Most tokens of a sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Work and time since loading or [`Generator::reset_stats`].
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Starts counting anew.
    pub fn reset_stats(&mut self) {
        self.stats = Stats::default();
    }

    /// Sequences that have not ended: waiting and running.
    pub fn unfinished(&self) -> (usize, usize) {
        (self.waiting.len(), self.running.len())
    }

    /// How many more requests would find a free slot. A source of many requests submits only so many at a time, so that
    /// prompts and features do not pile up in the queue.
    pub fn room(&self) -> usize {
        self.pools.free().slots.saturating_sub(self.waiting.len())
    }

    /// Features of an image or clip, `[tokens, hidden]`, for [`Request::features`].
    ///
    /// # Errors
    /// [`EngineError::NoVision`] for a text-only model; otherwise as [`VisionTower::forward`].
    pub fn features(&mut self, patches: &Patches) -> Result<Vec<f32>, EngineError> {
        let tower = self.tower.as_mut().ok_or(EngineError::NoVision)?;
        Ok(tower.forward(self.model.backend_mut(), patches)?)
    }

    /// Checks a request and puts it in the queue.
    ///
    /// # Errors
    /// Says which part of the request cannot be served: [`EngineError::EmptyPrompt`], [`EngineError::PromptTooLong`],
    /// [`EngineError::UnknownToken`], [`EngineError::ImageTokens`], [`EngineError::NoVision`],
    /// [`EngineError::Parameter`], [`EngineError::NeverFits`].
    pub fn submit(&mut self, request: Request) -> Result<SequenceId, EngineError> {
        self.check(&request)?;
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.waiting.push_back((id, request));
        Ok(id)
    }

    /// Ends a sequence, waiting or running, and gives back what it holds. `None` when it has ended already.
    pub fn abort(&mut self, id: SequenceId) -> Option<Output> {
        if let Some(at) = self.waiting.iter().position(|(waiting, _)| *waiting == id) {
            let (_, request) = self.waiting.remove(at)?;
            return Some(Output {
                tokens: Vec::new(),
                finish: Finish::Aborted,
                prompt_tokens: request.prompt.len(),
                drafts: DraftCounts::default(),
            });
        }
        let at = self.running.iter().position(|s| s.id == id)?;
        Some(self.running.remove(at).into_output(Finish::Aborted))
    }

    /// One step: whether there was anything to do. `sink` sees every event in order of the sequences' rows.
    ///
    /// # Errors
    /// [`EngineError::Model`] when the forward pass fails, [`EngineError::NoToken`] when its logits are unusable. Running
    /// sequences are then in an undefined place; [`Generator::abort`] them.
    pub fn step(&mut self, sink: &mut dyn FnMut(&TokenEvent) -> Flow) -> Result<bool, EngineError> {
        let start = Instant::now();
        self.admit();
        let plan = schedule(&self.running, self.max_rows);
        if plan.entries.is_empty() {
            return Ok(false);
        }
        let hidden = self.model.config().hidden_size;
        for (place, &(index, feature)) in plan.features.iter().enumerate() {
            let values = &self.running[index].request.features[feature * hidden..(feature + 1) * hidden];
            self.model.set_feature(place, values)?;
        }
        self.model.forward(&plan.step, &mut ())?;
        let kinds = plan.rows_by_kind(&self.running);
        let mut trails = Vec::with_capacity(plan.entries.len());
        for entry in &plan.entries {
            let position = self.running[entry.index].computed;
            let rows = self.advance(entry, sink)?;
            let sequence = &self.running[entry.index];
            let drafts = sequence.phase == Phase::Prefill || sequence.useful_drafts() > 0;
            if sequence.depth > 0 && drafts && !sequence.is_finished() {
                let source = entry.row as u32;
                trails.push(Trail { index: entry.index, position, rows, source, from: HiddenSource::Trunk });
            }
        }
        propose(&mut self.model, &mut self.running, &trails, self.drafting, &mut self.sampler, &mut self.row)?;
        self.stats.book(start.elapsed().as_secs_f64(), kinds.0, kinds.1);
        self.retire(sink);
        Ok(true)
    }

    /// Steps until nothing is left.
    ///
    /// # Errors
    /// As [`Generator::step`].
    pub fn run(&mut self, sink: &mut dyn FnMut(&TokenEvent) -> Flow) -> Result<(), EngineError> {
        while self.step(sink)? {}
        Ok(())
    }

    /// Generates from one request, calling `token` for every new token. Sequences submitted before go on beside it.
    ///
    /// # Errors
    /// As [`Generator::submit`] and [`Generator::step`].
    pub fn generate(&mut self, request: Request, token: &mut dyn FnMut(u32) -> Flow) -> Result<Output, EngineError> {
        let id = self.submit(request)?;
        loop {
            let mut result = None;
            let step = self.step(&mut |event| match event {
                TokenEvent::Token { sequence, token: new, .. } if *sequence == id => token(*new),
                TokenEvent::Finished { sequence, output } if *sequence == id => {
                    result = Some(output.clone());
                    Flow::Continue
                }
                _ => Flow::Continue,
            });
            if let Some(output) = result {
                return Ok(output);
            }
            if let Err(error) = step {
                self.abort(id);
                return Err(error);
            }
        }
    }

    fn check(&self, request: &Request) -> Result<(), EngineError> {
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Err(EngineError::EmptyPrompt);
        }
        if prompt >= self.context {
            return Err(EngineError::PromptTooLong { prompt, context: self.context });
        }
        self.check_tokens(&request.prompt)?;
        self.check_features(&request.prompt, &request.features)?;
        request.sampling.validate(self.vocab)?;
        if request.max_tokens == 0 {
            return Err(EngineError::parameter("max_tokens", "at least 1", 0));
        }
        if request.min_tokens > request.max_tokens {
            let expected = format!("at most max_tokens ({})", request.max_tokens);
            return Err(EngineError::parameter("min_tokens", expected, request.min_tokens));
        }
        if let Some(depth) = request.depth.filter(|&depth| depth > self.depth) {
            return Err(EngineError::parameter("depth", format!("at most {}", self.depth), depth));
        }
        let (need, available) = (need(self.extent(request)).pages, self.pools.all().pages);
        if need > available {
            return Err(EngineError::NeverFits { need, available });
        }
        Ok(())
    }

    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<(), EngineError> {
        match tokens.iter().enumerate().find(|&(_, &t)| t as usize >= self.vocab) {
            Some((index, &token)) => {
                Err(EngineError::UnknownToken { index, token, last: self.vocab.saturating_sub(1) as u32 })
            }
            None => Ok(()),
        }
    }

    pub(crate) fn check_features(&self, tokens: &[u32], features: &[f32]) -> Result<(), EngineError> {
        let hidden = self.model.config().hidden_size;
        let placeholders = self.placeholders(tokens).count();
        if !features.is_empty() && self.tower.is_none() {
            return Err(EngineError::NoVision);
        }
        if placeholders * hidden != features.len() {
            return Err(EngineError::ImageTokens { placeholders, features: features.len() / hidden });
        }
        Ok(())
    }

    pub(crate) fn placeholders<'a>(&self, tokens: &'a [u32]) -> impl Iterator<Item = usize> + 'a {
        let image = self.media.map(|m| m.image);
        tokens.iter().enumerate().filter(move |&(_, &t)| Some(t) == image).map(|(i, _)| i)
    }

    /// Most tokens of the request's sequence.
    fn extent(&self, request: &Request) -> usize {
        request.prompt.len().saturating_add(request.max_tokens).min(self.context)
    }

    /// Starts waiting sequences, first come first served, while slots and pages last.
    fn admit(&mut self) {
        while let Some((_, request)) = self.waiting.front() {
            let Some(reservation) = self.pools.reserve(need(self.extent(request))) else { break };
            let limit = self.extent(request);
            let Some((id, request)) = self.waiting.pop_front() else { break };
            let mut stops: std::collections::BTreeSet<u32> = request.stop_tokens.iter().copied().collect();
            if !request.ignore_eos {
                stops.extend(&self.model.config().eos_token_ids);
            }
            self.running.push(Sequence {
                id,
                tokens: request.prompt.clone(),
                limit,
                computed: 0,
                fold: 0,
                drafts: Vec::new(),
                depth: request.depth.unwrap_or(self.depth),
                phase: Phase::Prefill,
                reservation,
                history: History::new(&request.sampling, &request.prompt),
                placeholders: self.placeholders(&request.prompt).collect(),
                stop_list: stops.iter().copied().collect(),
                stops,
                counts: DraftCounts::default(),
                request,
            });
        }
    }

    /// Takes in the results of a sequence's rows: judges drafts, chooses a token, tells the consumer. Gives the number of
    /// rows that are final.
    fn advance(&mut self, entry: &Entry, sink: &mut dyn FnMut(&TokenEvent) -> Flow) -> Result<usize, EngineError> {
        let sequence = &mut self.running[entry.index];
        let prefill = sequence.phase == Phase::Prefill;
        if prefill {
            self.stats.prefill_tokens += entry.rows as u64;
        }
        let Some(first) = entry.logits else {
            sequence.computed += entry.rows;
            return Ok(entry.rows);
        };
        sequence.phase = Phase::Decode;
        let drafts = std::mem::take(&mut sequence.drafts);
        let (mut accepted, mut judged) = (0, entry.drafts);
        for i in 0..=entry.drafts {
            self.model.logits(first + i, &mut self.row)?;
            let index = sequence.output().len();
            let position = sequence.tokens.len();
            let params = &sequence.request.sampling;
            let (row, history) = (&mut self.row, &sequence.history);
            let banned = sequence.banned(index);
            let (token, stands) = match drafts.get(i) {
                Some(draft) => {
                    let choice = self.sampler.choose(row, params, history, banned, position)?;
                    match judge(&choice, draft, params.seed, position) {
                        Verdict::Accepted => (draft.token, true),
                        Verdict::Replaced(token) => (token, false),
                    }
                }
                None => (self.sampler.next(row, params, history, banned, position)?, false),
            };
            accepted += usize::from(stands);
            if sequence.push(token) {
                if !prefill {
                    self.stats.decode_tokens += 1;
                }
                let event = TokenEvent::Token { sequence: sequence.id, token, index };
                if sink(&event) == Flow::Stop && !sequence.is_finished() {
                    sequence.phase = Phase::Finished(Finish::Consumer);
                }
            }
            if stands && sequence.is_finished() {
                // Drafts behind the end are nobody's text: they count neither for nor against the drafter.
                judged = i + 1;
            }
            if !stands || sequence.is_finished() {
                break;
            }
        }
        if entry.drafts > 0 {
            self.stats.drafts.record(judged, accepted);
            sequence.counts.record(judged, accepted);
        }
        let finals = entry.rows - entry.drafts + accepted;
        sequence.computed += finals;
        sequence.fold = accepted;
        Ok(finals)
    }

    /// Takes out finished sequences and tells the consumer.
    fn retire(&mut self, sink: &mut dyn FnMut(&TokenEvent) -> Flow) {
        let mut index = 0;
        while index < self.running.len() {
            match self.running[index].phase {
                Phase::Finished(finish) => {
                    let sequence = self.running.remove(index);
                    let id = sequence.id;
                    let output = sequence.into_output(finish);
                    sink(&TokenEvent::Finished { sequence: id, output });
                }
                _ => index += 1,
            }
        }
    }
}

/// Rows of logits kept for scoring, beyond what decoding needs.
const LOGIT_ROWS: usize = 64;
