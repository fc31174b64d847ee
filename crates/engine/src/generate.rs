//! [`Generator`]: a model that serves several sequences at once.
//!
//! One [`Generator::step`]: admit what fits, plan rows ([`crate::plan`]), run the trunk, judge drafts and choose tokens,
//! tell the consumer, run the draft layer. Sequences join and leave between steps; what each yields depends on its own
//! request alone.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use glimmer_checkpoint::Checkpoint;
use glimmer_model::{
    HiddenSource, Limits, Model, Options,
    vision::{Patches, VisionTower},
};
use glimmer_tensor::{Backend, KdaForm, PAGE_TOKENS};
use serde::{Deserialize, Serialize};

use crate::{
    EngineError, Flow, SequenceId,
    constraint::Constraint,
    draft::{Drafting, propose},
    features::{FeatureCache, FeatureKey},
    plan::{Entry, schedule},
    pools::{Pools, need},
    request::{Collector, Cost, Finish, FinishReason, Media, MediaKind, Output, Request, RequestError, TokenEvent},
    rules::Rules,
    sampling::{History, Sampler},
    sequence::{Phase, Sequence, Times, Trail},
    speculate::{Verdict, judge},
    stats::{Counters, Snapshot, Stats},
    worker::Facts,
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
    /// Key of the random draws of requests without a seed of their own.
    pub seed: u64,
    /// Tokens that end an answer; `None` takes those of `config.json`.
    pub end_tokens: Option<Vec<u32>>,
    /// Bytes of features of images and clips that are kept for later requests.
    pub feature_bytes: usize,
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
            seed: 0,
            end_tokens: None,
            feature_bytes: 256 << 20,
            kda_form: KdaForm::Recurrent,
        }
    }
}

/// A model with its pools and sequences.
#[derive(Debug)]
pub struct Generator<B: Backend> {
    pub(crate) model: Model<B>,
    tower: Option<VisionTower<B>>,
    pub(crate) rules: Rules,
    max_rows: usize,
    drafting: Drafting,
    pub(crate) pools: Pools,
    waiting: VecDeque<Waiting>,
    running: Vec<Sequence>,
    next_id: u64,
    seed: u64,
    ends: Arc<[u32]>,
    features: FeatureCache,
    began: Instant,
    sampler: Sampler,
    /// Logits of a row, `[vocab_size]`.
    pub(crate) row: Vec<f32>,
    stats: Stats,
    counters: Counters,
}

/// A request in the queue.
#[derive(Debug)]
struct Waiting {
    id: SequenceId,
    request: Request,
    submitted: f64,
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
            rules: Rules {
                context,
                vocabulary: settings.real_vocab.unwrap_or(text.vocab_size),
                placeholder: config.media.map(|media| media.image),
                vision: tower.is_some(),
                depth: settings.depth,
                pages,
            },
            tower,
            max_rows: settings.rows,
            drafting: Drafting { share, drawn: settings.draft_sampling == DraftSampling::Probabilistic },
            pools: Pools::new(settings.sequences, 0, pages),
            waiting: VecDeque::new(),
            running: Vec::new(),
            next_id: 0,
            seed: settings.seed,
            ends: settings.end_tokens.as_ref().unwrap_or(&text.eos_token_ids).as_slice().into(),
            features: FeatureCache::new(settings.feature_bytes),
            began: Instant::now(),
            sampler: Sampler::default(),
            row: vec![0.0; text.vocab_size],
            stats: Stats::default(),
            counters: Counters::default(),
            model,
        })
    }

    /// The model.
    pub fn model(&self) -> &Model<B> {
        &self.model
    }

    /// What requests are held against.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// The pools, to see what is free.
    pub fn pools(&self) -> &Pools {
        &self.pools
    }

    /// Most tokens of a sequence.
    pub fn context(&self) -> usize {
        self.rules.context
    }

    /// Work and time since loading or [`Generator::reset_stats`].
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// What was loaded.
    pub fn facts(&self) -> Facts {
        Facts {
            rules: self.rules,
            sequences: self.pools.all().slots,
            state_checkpoints: 0,
            rows: self.max_rows,
            page_tokens: PAGE_TOKENS,
        }
    }

    /// What is going on.
    pub fn snapshot(&self) -> Snapshot {
        let (media_queries, media_hits) = self.media_lookups();
        let (free, all) = (self.pools.free().pages, self.pools.all().pages);
        let left = |s: &Sequence| s.request.prompt.len().saturating_sub(s.computed);
        let running: usize = self.running.iter().map(left).sum();
        let waiting: usize = self.waiting.iter().map(|w| w.request.prompt.len()).sum();
        Snapshot {
            running: self.running.len(),
            waiting_capacity: self.waiting.len(),
            waiting_deferred: 0,
            page_use: (all - free) as f64 / all.max(1) as f64,
            backlog_tokens: (running + waiting) as u64,
            prefill_rate: self.stats.prefill_rate(),
            generated_tokens: self.stats.decode_tokens,
            dead: None,
            stuck: false,
            counters: Counters {
                media_queries,
                media_hits,
                drafts: self.stats.drafts.clone(),
                page_tokens: PAGE_TOKENS as u64,
                pages: all as u64,
                ..self.counters.clone()
            },
        }
    }

    /// Forgets all cached prefixes; what running sequences use stays theirs.
    pub fn reset_prefix_cache(&mut self) {}

    /// Images and clips looked up in the cache of features, and found there.
    pub fn media_lookups(&self) -> (u64, u64) {
        let counters = self.features.counters();
        (counters.queries, counters.hits)
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

    /// Features of an image or clip, `[tokens, hidden]`, for [`Generator::score`].
    ///
    /// # Errors
    /// [`EngineError::NoVision`] for a text-only model; otherwise as [`VisionTower::forward`].
    pub fn features(&mut self, patches: &Patches) -> Result<Vec<f32>, EngineError> {
        let tower = self.tower.as_mut().ok_or(EngineError::NoVision)?;
        Ok(tower.forward(self.model.backend_mut(), patches)?)
    }

    /// Joins patches with the placeholders of a prompt, in order, for [`Request::media`].
    ///
    /// # Errors
    /// [`EngineError::ImageTokens`] when the placeholders are not exactly those of the patches.
    pub fn media(&self, prompt: &[u32], patches: Vec<Patches>) -> Result<Arc<[Media]>, EngineError> {
        let places: Vec<usize> = self.rules.placeholders(prompt).collect();
        let tokens = patches.iter().map(Patches::tokens).sum();
        if places.len() != tokens {
            return Err(EngineError::ImageTokens { placeholders: places.len(), features: tokens });
        }
        let mut next = 0;
        let place = |patches: Patches| {
            let start = places.get(next).copied().unwrap_or(prompt.len());
            next += patches.tokens();
            let kind = if patches.grid.frames > 1 { MediaKind::Video } else { MediaKind::Image };
            Media::from_patches(kind, Arc::new(patches), start)
        };
        Ok(patches.into_iter().map(place).collect())
    }

    /// Checks a request and puts it in the queue.
    ///
    /// # Errors
    /// As [`Rules::check`].
    pub fn submit(&mut self, request: Request) -> Result<SequenceId, EngineError> {
        self.submit_constrained(request, None)
    }

    /// As [`Generator::submit`], with a constraint on the answer behind its reasoning.
    ///
    /// # Errors
    /// As [`Rules::check`].
    pub fn submit_constrained(
        &mut self,
        mut request: Request,
        constraint: Option<Box<dyn Constraint>>,
    ) -> Result<SequenceId, EngineError> {
        self.rules.check(&request)?;
        if let Some(constraint) = constraint {
            let expected = "none, as this engine does not constrain answers";
            return Err(EngineError::parameter("structure", expected, format!("{constraint:?}")));
        }
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        let seed = crate::random::key(self.seed, id.0).cast_signed();
        request.sampling.seed.get_or_insert(seed);
        self.waiting.push_back(Waiting { id, request, submitted: self.now() });
        Ok(id)
    }

    /// Ends a sequence, waiting or running, and gives back what it holds. `None` when it has ended already.
    pub fn abort(&mut self, id: SequenceId) -> Option<Finish> {
        let now = self.now();
        let finish = |times: Times, cost: Cost| Finish { reason: FinishReason::Abort, cost: times.cost(cost, now) };
        if let Some(at) = self.waiting.iter().position(|waiting| waiting.id == id) {
            let submitted = self.waiting.remove(at)?.submitted;
            return Some(finish(Times { submitted, ..Times::default() }, Cost::default()));
        }
        let at = self.running.iter().position(|s| s.id == id)?;
        let sequence = self.running.remove(at);
        Some(finish(sequence.times, sequence.cost))
    }

    /// One step: whether there was anything to do. `sink` takes one event for each sequence that got tokens or ended, in
    /// order of their rows; a sequence whose sink says [`Flow::Stop`] is aborted.
    ///
    /// # Errors
    /// [`EngineError::Model`] when the forward pass fails, [`EngineError::NoToken`] when its logits are unusable. Running
    /// sequences are then in an undefined place; [`Generator::abort`] them.
    pub fn step(&mut self, sink: Sink<'_>) -> Result<bool, EngineError> {
        let start = self.now();
        self.admit(start, sink);
        let plan = schedule(&self.running, self.max_rows);
        if plan.entries.is_empty() {
            return Ok(false);
        }
        let hidden = self.model.config().hidden_size;
        for (place, &(index, feature)) in plan.features.iter().enumerate() {
            let values = self.running[index].feature(feature, hidden);
            let values = values.ok_or(EngineError::Broken("every placeholder in a step has features"))?;
            self.model.set_feature(place, values)?;
        }
        self.model.forward(&plan.step, &mut ())?;
        self.counters.step(plan.step.rows());
        let kinds = plan.rows_by_kind(&self.running);
        let mut trails = Vec::with_capacity(plan.entries.len());
        for entry in &plan.entries {
            let position = self.running[entry.index].computed;
            let rows = self.advance(entry)?;
            let sequence = &self.running[entry.index];
            let drafts = sequence.phase == Phase::Prefill || sequence.useful_drafts() > 0;
            if sequence.depth > 0 && drafts && !sequence.is_finished() {
                let source = entry.row as u32;
                trails.push(Trail { index: entry.index, position, rows, source, from: HiddenSource::Trunk });
            }
        }
        propose(&mut self.model, &mut self.running, &trails, self.drafting, &mut self.sampler, &mut self.row)?;
        let now = self.now();
        self.stats.book(now - start, kinds.0, kinds.1);
        self.report(now, sink);
        Ok(true)
    }

    /// Steps until nothing is left.
    ///
    /// # Errors
    /// As [`Generator::step`].
    pub fn run(&mut self, sink: Sink<'_>) -> Result<(), EngineError> {
        while self.step(sink)? {}
        Ok(())
    }

    /// Generates from one request, calling `token` for every new token; at [`Flow::Stop`] the token just seen is the last.
    /// Sequences submitted before go on beside it, unheard.
    ///
    /// # Errors
    /// As [`Generator::submit`] and [`Generator::step`]; [`EngineError::Failed`] when the request itself failed.
    pub fn generate(&mut self, request: Request, token: &mut dyn FnMut(u32) -> Flow) -> Result<Output, EngineError> {
        let id = self.submit(request)?;
        let (mut collector, mut output, mut stopped) = (Collector::default(), None, false);
        while output.is_none() && !stopped {
            let step = self.step(&mut |sequence, mut event| {
                if sequence != id {
                    return Flow::Continue;
                }
                let reason = event.finish.as_ref().map(|finish| &finish.reason);
                let shown = match reason {
                    Some(FinishReason::EndToken | FinishReason::StopToken(_)) => event.tokens.len() - 1,
                    _ => event.tokens.len(),
                };
                if let Some(last) = event.tokens[..shown].iter().position(|t| token(t.id) == Flow::Stop) {
                    stopped = true;
                    event.tokens.truncate(last + 1);
                    let cost = event.finish.map(|finish| finish.cost).unwrap_or_default();
                    event.finish = Some(Finish { reason: FinishReason::Abort, cost });
                }
                output = collector.take(event);
                if stopped { Flow::Stop } else { Flow::Continue }
            });
            if let Err(error) = step {
                self.abort(id);
                return Err(error);
            }
        }
        match output {
            Some(Output { finish: FinishReason::Error(error), .. }) => Err(EngineError::Failed(error)),
            Some(output) => Ok(output),
            None => Err(EngineError::Broken("a sequence ends with an event")),
        }
    }

    /// Seconds since loading.
    fn now(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Starts waiting sequences, first come first served, while slots and pages last.
    fn admit(&mut self, now: f64, sink: Sink<'_>) {
        while let Some(waiting) = self.waiting.front() {
            let limit = self.rules.extent(&waiting.request);
            let Some(reservation) = self.pools.reserve(need(limit)) else { break };
            let Some(Waiting { id, request, submitted }) = self.waiting.pop_front() else { break };
            let mut times = Times { submitted, started: Some(now), first_token: None };
            let features = match self.media_features(&request.media) {
                Ok(features) => features,
                Err(error) => {
                    times.started = None;
                    let reason = FinishReason::Error(RequestError::Internal(error.to_string()));
                    let finish = Some(Finish { reason, cost: times.cost(Cost::default(), now) });
                    sink(id, TokenEvent { finish, ..TokenEvent::default() });
                    continue;
                }
            };
            self.running.push(Sequence {
                id,
                tokens: request.prompt.to_vec(),
                limit,
                computed: 0,
                fold: 0,
                drafts: Vec::new(),
                depth: request.depth.map_or(self.rules.depth, |depth| depth as usize),
                phase: Phase::Prefill,
                reservation,
                history: History::new(&request.sampling, &request.prompt),
                placeholders: self.rules.placeholders(&request.prompt).collect(),
                features,
                ends: if request.limits.ignore_eos { [].into() } else { Arc::clone(&self.ends) },
                event: TokenEvent::default(),
                cost: Cost::default(),
                times,
                request,
            });
        }
    }

    /// Features of media, from the cache where it has them.
    fn media_features(&mut self, media: &[Media]) -> Result<Vec<Arc<[f32]>>, EngineError> {
        let mut all = Vec::with_capacity(media.len());
        for item in media {
            let key = FeatureKey { digest: item.digest, kind: item.kind, tokens: item.tokens };
            let features = match self.features.find(&key) {
                Some(features) => features,
                None => {
                    let features: Arc<[f32]> = Arc::from(self.features(&item.patches)?);
                    self.features.keep(key, Arc::clone(&features));
                    features
                }
            };
            all.push(features);
        }
        Ok(all)
    }

    /// Takes in the results of a sequence's rows: judges drafts and chooses a token. Gives the number of rows that are final.
    fn advance(&mut self, entry: &Entry) -> Result<usize, EngineError> {
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
        sequence.features.clear();
        let drafts = std::mem::take(&mut sequence.drafts);
        let (mut accepted, mut judged) = (0, entry.drafts);
        for i in 0..=entry.drafts {
            self.model.logits(first + i, &mut self.row)?;
            let index = sequence.output().len();
            let position = sequence.tokens.len();
            let params = &sequence.request.sampling;
            let (row, history) = (&mut self.row, &sequence.history);
            let banned: Vec<u32> = sequence.banned(index).collect();
            let (token, stands) = match drafts.get(i) {
                Some(draft) => {
                    let choice = self.sampler.choose(row, params, history, &banned, position)?;
                    match judge(&choice, draft, params.key(), position) {
                        Verdict::Accepted => (draft.token, true),
                        Verdict::Replaced(token) => (token, false),
                    }
                }
                None => (self.sampler.next(row, params, history, &banned, position)?, false),
            };
            accepted += usize::from(stands);
            sequence.push(token, None);
            if !prefill {
                self.stats.decode_tokens += 1;
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
            sequence.cost.draft_steps += 1;
            sequence.cost.drafted += judged as u32;
            sequence.cost.accepted += accepted as u32;
        }
        let finals = entry.rows - entry.drafts + accepted;
        sequence.computed += finals;
        sequence.fold = accepted;
        Ok(finals)
    }

    /// Hands out what the step produced, and takes out the sequences that ended.
    fn report(&mut self, now: f64, sink: Sink<'_>) {
        self.running.retain_mut(|sequence| {
            let mut event = std::mem::take(&mut sequence.event);
            if !event.tokens.is_empty() {
                sequence.times.first_token.get_or_insert(now);
            }
            if let Phase::Finished(reason) = &sequence.phase {
                event.finish = Some(Finish { reason: reason.clone(), cost: sequence.times.cost(sequence.cost, now) });
            }
            if event == TokenEvent::default() {
                return true;
            }
            let flow = sink(sequence.id, event);
            flow == Flow::Continue && !sequence.is_finished()
        });
    }
}

/// Takes the events of a step.
pub type Sink<'a> = &'a mut dyn FnMut(SequenceId, TokenEvent) -> Flow;

/// Rows of logits kept for scoring, beyond what decoding needs.
const LOGIT_ROWS: usize = 64;
