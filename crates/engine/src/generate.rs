//! [`Generator`]: a model that serves several sequences at once.
//!
//! Requests enter a queue ([`Generator::submit`]) and leave it by [`Generator::step`]s; what each yields depends on its own
//! request alone, whatever runs beside it, is cached, is preempted or is drafted.
//!
//! | file | part of the generator |
//! |---|---|
//! | `generate/admit.rs` | before a step: the scheduler's decision, and carrying it out |
//! | `generate/step.rs` | a step: rows, judging, drafts, events |
//! | `generate/reuse.rs` | behind a step: publishing pages and saving states for later requests |

mod admit;
mod reuse;
mod step;
#[cfg(test)]
mod tests;

use std::{collections::VecDeque, sync::Arc};

use glimmer_checkpoint::Checkpoint;
use glimmer_model::{
    Model,
    vision::{Patches, VisionTower},
    weights::Source,
};
use glimmer_tensor::{Backend, PAGE_TOKENS, Samples};
use sha2::{Digest as _, Sha256};

use crate::{
    EngineError, Flow, SequenceId, Settings,
    clock::Clock,
    constraint::Constraint,
    depth::DepthControl,
    draft::Drafting,
    features::FeatureCache,
    pools::Pools,
    prefix::{Miss, PageKeys, PrefixTree},
    rates::Rates,
    record::{Header, Recorder},
    request::{Collector, Finish, FinishReason, Media, MediaKind, Output, Request, TokenEvent},
    rows::{Answer, AnswerRules, RowJudge},
    rules::Rules,
    schedule::Waiting,
    sequence::Sequence,
    settings::{DraftSampling, IndexSharing},
    stats::{Counters, Snapshot, Stats},
    thinking::ReasoningEnd,
    worker::Facts,
};

/// Takes the events of a step.
pub type Sink<'a> = &'a mut dyn FnMut(SequenceId, TokenEvent) -> Flow;

/// A model with its pools and sequences.
#[derive(Debug)]
pub struct Generator<B: Backend> {
    pub(crate) model: Model<B>,
    tower: Option<VisionTower<B>>,
    pub(crate) rules: Rules,
    answers: AnswerRules,
    max_rows: usize,
    max_logits: usize,
    settings: Settings,
    /// SHA-256 of the model's configuration.
    config_digest: String,
    pub(crate) pools: Pools,
    pub(crate) tree: PrefixTree,
    features: FeatureCache,
    waiting: VecDeque<Sequence>,
    /// In order of admission.
    running: Vec<Sequence>,
    next_id: u64,
    steps: u64,
    /// Steps in a row that computed nothing although something waits.
    idle_steps: u32,
    clock: Clock,
    rates: Rates,
    drafting: Drafting,
    depth: DepthControl,
    pub(crate) judge: RowJudge,
    /// Rows whose tokens the backend is asked for, and the tokens of the step's rows with logits as far as it gave them.
    asked: Samples,
    given: Vec<Option<u32>>,
    stats: Stats,
    /// Tokens since loading.
    generated: u64,
    counters: Counters,
    /// What the queue waited for at the last step.
    queue: Waiting,
    /// A row of the present step was not a number.
    poisoned: bool,
    /// When the last step with rows ended.
    ended: f64,
    recorder: Option<Recorder>,
}

impl<B: Backend> Generator<B> {
    /// Loads a model and its tower and allocates everything.
    ///
    /// # Errors
    /// [`EngineError::Setting`] for settings that cannot work, [`EngineError::Model`] when the checkpoint does not hold what
    /// its configuration says.
    pub fn load(backend: B, checkpoint: &Checkpoint, settings: &Settings) -> Result<Self, EngineError> {
        Self::load_from(backend, checkpoint, checkpoint, settings)
    }

    /// As [`Generator::load`], with weights of another source of the same configuration.
    ///
    /// # Errors
    /// As [`Generator::load`].
    pub fn load_from(
        backend: B,
        checkpoint: &Checkpoint,
        weights: &dyn Source,
        settings: &Settings,
    ) -> Result<Self, EngineError> {
        let (limits, options, rules) = settings.resolve(checkpoint)?;
        let text = &checkpoint.config().text;
        let share = match settings.index_sharing {
            IndexSharing::Auto => text.indexer.share_for_mtp,
            IndexSharing::On => true,
            IndexSharing::Off => false,
        };
        let mut judge = RowJudge::new(text.vocab_size);
        if let Some(acceptance) = &settings.synthetic_acceptance {
            judge = judge.with_synthetic(acceptance.clone());
        }
        let pools = Pools::new(settings.sequences, settings.checkpoints(), rules.pages);
        let tower = VisionTower::load(&backend, weights)?;
        Ok(Self {
            answers: AnswerRules {
                vocabulary: rules.vocabulary,
                context: rules.context,
                end_tokens: settings.end_tokens.clone().unwrap_or_else(|| text.eos_token_ids.clone()),
                reasoning_end: settings.think_end.map(|end| ReasoningEnd::new(end).with_opener(settings.tool_call)),
            },
            rules: Rules { vision: tower.is_some(), ..rules },
            tower,
            max_rows: limits.max_rows,
            max_logits: limits.max_logits,
            settings: settings.clone(),
            config_digest: config_digest(checkpoint),
            tree: PrefixTree::new(&pools),
            pools,
            features: FeatureCache::new(settings.feature_bytes),
            waiting: VecDeque::new(),
            running: Vec::new(),
            next_id: 0,
            steps: 0,
            idle_steps: 0,
            clock: Clock::real(),
            rates: Rates::default(),
            drafting: Drafting { share, drawn: settings.draft_sampling == DraftSampling::Probabilistic },
            depth: DepthControl::new(settings.depth_policy.clone(), settings.depth)?,
            judge,
            asked: Samples::default(),
            given: Vec::new(),
            stats: Stats::default(),
            generated: 0,
            counters: Counters::default(),
            queue: Waiting::default(),
            poisoned: false,
            ended: 0.0,
            recorder: None,
            model: Model::load(backend, weights, limits, options)?,
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

    /// Starts counting anew.
    pub fn reset_stats(&mut self) {
        self.stats = Stats::default();
    }

    /// Images and clips looked up in the cache of features, and found there.
    pub fn media_lookups(&self) -> (u64, u64) {
        let counters = self.features.counters();
        (counters.queries, counters.hits)
    }

    /// What was loaded.
    pub fn facts(&self) -> Facts {
        Facts {
            rules: self.rules,
            sequences: self.pools.all().slots,
            state_checkpoints: self.pools.all_checkpoints(),
            rows: self.max_rows,
            page_tokens: PAGE_TOKENS,
        }
    }

    /// What is going on.
    pub fn snapshot(&self) -> Snapshot {
        let (media_queries, media_hits) = self.media_lookups();
        let (free, all) = (self.pools.free().pages + self.pools.idle(), self.pools.all().pages);
        let backlog = self.running.iter().chain(&self.waiting).map(Sequence::backlog).sum::<usize>();
        let deferred = (self.queue.rows + self.queue.lane).min(self.waiting.len());
        let prefix = self.tree.counters();
        Snapshot {
            running: self.running.len(),
            waiting_capacity: self.waiting.len() - deferred,
            waiting_deferred: deferred,
            page_use: (all - free) as f64 / all.max(1) as f64,
            backlog_tokens: backlog as u64,
            prefill_rate: self.rates.prefill_rate().unwrap_or(0.0),
            generated_tokens: self.generated,
            record_error: self.recorder.as_ref().and_then(|r| r.error()).map(ToOwned::to_owned),
            dead: None,
            stuck: false,
            counters: Counters {
                prefix_queries: prefix.query_tokens,
                prefix_hits: prefix.hit_tokens,
                prefix_state_hits: prefix.hits,
                prefix_misses: Miss::ALL.map(|miss| (miss.name().to_owned(), prefix.misses_by(miss))).to_vec(),
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
    pub fn reset_prefix_cache(&mut self) {
        self.tree.clear();
        if let Some(recorder) = &mut self.recorder {
            recorder.reset();
        }
    }

    /// Ids that exist, padding rows of the embedding left out.
    pub fn vocabulary(&self) -> usize {
        self.rules.vocabulary
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

    /// Features of an image or clip, `[tokens, hidden]`.
    ///
    /// # Errors
    /// [`EngineError::NoVision`] for a text-only model; otherwise as [`VisionTower::forward`].
    fn features(&mut self, patches: &Patches) -> Result<Vec<f32>, EngineError> {
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

    /// As [`Generator::submit`], with the constraint that follows [`Request::structure`].
    ///
    /// # Errors
    /// As [`Rules::check`]; [`EngineError::Parameter`] when one of structure and constraint comes without the other.
    pub fn submit_constrained(
        &mut self,
        mut request: Request,
        constraint: Option<Box<dyn Constraint>>,
    ) -> Result<SequenceId, EngineError> {
        self.rules.check(&request)?;
        if request.structure.is_some() != constraint.is_some() {
            let expected = "a constraint exactly where there is a structure";
            return Err(EngineError::parameter("structure", expected, format!("{:?}", request.structure)));
        }
        let id = SequenceId(self.next_id);
        let seed = crate::random::key(self.settings.seed, id.0).cast_signed();
        request.sampling.seed.get_or_insert(seed);
        let answer = Answer::new(&request, &self.answers, constraint)?;
        self.next_id += 1;
        let submitted = self.clock.read();
        if let Some(recorder) = &mut self.recorder {
            recorder.submit(id, &request, self.clock.take());
        }
        let mut sequence = Sequence::new(id, request, answer, submitted);
        let request = &sequence.request;
        sequence.depth = request.depth.map_or(self.rules.depth, |depth| depth as usize);
        sequence.placeholders = self.rules.placeholders(&request.prompt).collect();
        if self.settings.prefix_caching && request.prompt_logprobs.is_none() {
            sequence.keys = Some(PageKeys::new(request.cache_salt.as_deref(), spans(&request.media)));
        }
        if let Some(keys) = &mut sequence.keys {
            keys.extend(&sequence.tokens);
        }
        self.waiting.push_back(sequence);
        Ok(id)
    }

    /// Ends a sequence, waiting or running, and gives back what it holds. `None` when it has ended already.
    pub fn abort(&mut self, id: SequenceId) -> Option<Finish> {
        let waiting = self.waiting.iter().position(|s| s.id == id);
        let sequence = match waiting {
            Some(at) => self.waiting.remove(at)?,
            None => {
                let at = self.running.iter().position(|s| s.id == id)?;
                self.running.remove(at)
            }
        };
        let now = self.clock.read();
        if let Some(recorder) = &mut self.recorder {
            recorder.abort(id, self.clock.take());
        }
        Some(Finish { reason: FinishReason::Abort, cost: sequence.times.cost(sequence.cost, now) })
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
        while output.is_none() {
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
            match step {
                Ok(true) => {}
                Ok(false) if output.is_some() => {}
                Ok(false) => return Err(EngineError::Broken("a sequence ends with an event")),
                Err(error) => {
                    self.abort(id);
                    return Err(error);
                }
            }
        }
        match output {
            Some(Output { finish: FinishReason::Error(error), .. }) => Err(EngineError::Failed(error)),
            Some(output) => Ok(output),
            None => Err(EngineError::Broken("a sequence ends with an event")),
        }
    }

    /// Whether nothing has been asked of it yet.
    pub(crate) fn is_fresh(&self) -> bool {
        self.next_id == 0 && self.steps == 0
    }

    /// What a log of this engine begins with.
    pub(crate) fn header(&self) -> Header {
        Header::new(self.config_digest.clone(), self.settings.clone())
    }

    /// Writes everything that decides about later steps, and what they yield, to `recorder`.
    pub(crate) fn attach(&mut self, recorder: Recorder) {
        self.clock.keep();
        self.recorder = Some(recorder);
    }

    /// The clock, for a replay.
    pub(crate) fn clock_mut(&mut self) -> &mut Clock {
        &mut self.clock
    }

    /// Takes the recorder back.
    pub(crate) fn detach(&mut self) -> Option<Recorder> {
        self.recorder.take()
    }
}

/// SHA-256 of the configuration, in hexadecimal: of its file where there is one.
fn config_digest(checkpoint: &Checkpoint) -> String {
    let digest = match checkpoint.file("config.json") {
        Some(file) => Sha256::digest(file.as_slice()),
        None => Sha256::digest(format!("{:?}", checkpoint.config())),
    };
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Where media stand, for the names of pages.
fn spans(media: &[Media]) -> Vec<crate::prefix::MediaSpan> {
    let span =
        |m: &Media| crate::prefix::MediaSpan { digest: m.digest, kind: m.kind, start: m.start, tokens: m.tokens };
    media.iter().map(span).collect()
}
