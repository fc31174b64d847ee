//! A step: rows, judging, drafts, events.

use glimmer_model::HiddenSource;
use glimmer_tensor::{Backend, PAGE_TOKENS};

use super::{Generator, Sink};
use crate::{
    EngineError, Flow, SequenceId,
    draft::propose,
    logprobs::Reader,
    plan::{Entry, Plan},
    request::{Finish, FinishReason, RequestError, TokenEvent},
    sequence::{Phase, Sequence, Trail},
    speculate::Draft,
};

impl<B: Backend> Generator<B> {
    /// One step: whether there was anything to do. `sink` takes one event for each sequence that got tokens or ended; a
    /// sequence whose sink says [`Flow::Stop`] is aborted.
    ///
    /// A request that fails ends with [`FinishReason::Error`] and leaves the others alone.
    ///
    /// # Errors
    /// [`EngineError::Model`] when the forward pass fails, [`EngineError::Broken`] when an invariant does not hold. Running
    /// sequences are then in an undefined place; nothing but [`Generator::abort`] is of use for them.
    pub fn step(&mut self, sink: Sink<'_>) -> Result<bool, EngineError> {
        if self.running.is_empty() && self.waiting.is_empty() {
            return Ok(false);
        }
        let start = self.clock.read();
        let decision = self.decide(start);
        self.steps += 1;
        self.carry_out(&decision, start, sink)?;
        let plan = Plan::build(&decision, &self.running);
        if let Some(recorder) = &mut self.recorder {
            recorder.step(self.steps, &decision, &plan.step, self.clock.take());
        }
        self.check_progress(plan.step.rows())?;
        if !plan.entries.is_empty() {
            self.compute(&plan, start)?;
        }
        self.report(sink);
        if let Some(recorder) = &mut self.recorder {
            recorder.yielded(self.steps, self.clock.take());
        }
        Ok(true)
    }

    /// Runs the plan's rows and takes in what came of them.
    fn compute(&mut self, plan: &Plan, start: f64) -> Result<(), EngineError> {
        let hidden = self.model.config().hidden_size;
        for (place, &(index, feature)) in plan.features.iter().enumerate() {
            let values = self.running[index].feature(feature, hidden);
            let values = values.ok_or(EngineError::Broken("every placeholder in a step has features"))?;
            self.model.set_feature(place, values)?;
        }
        self.forward(plan)?;
        self.sample(plan)?;
        self.counters.step(plan.step.rows());
        let (prompt_rows, decode_rows) = plan.rows_by_kind(&self.running);
        let batch = self.running.iter().filter(|s| s.phase == Phase::Decode).count();
        let depth = self.depth.depth(batch.max(1), start);
        let began: Vec<usize> = plan.entries.iter().map(|entry| self.running[entry.index].computed).collect();
        let mut trails = Vec::with_capacity(plan.entries.len());
        for (entry, &position) in plan.entries.iter().zip(&began) {
            let rows = self.take_in(entry)?;
            if self.rules.depth > 0 && !self.running[entry.index].is_finished() {
                self.want_drafts(entry.index, depth);
                let source = entry.row as u32;
                trails.push(Trail { index: entry.index, position, rows, source, from: HiddenSource::Trunk });
            }
        }
        propose(&mut self.model, &mut self.running, &trails, self.drafting, &mut self.judge)?;
        for (entry, &position) in plan.entries.iter().zip(&began) {
            self.publish(entry, position)?;
        }
        if std::mem::take(&mut self.poisoned) {
            // What made a row unusable may have been computed for others as well.
            self.tree.clear();
        }
        let now = self.clock.read();
        self.stats.book(now - start, prompt_rows, decode_rows);
        self.rates.record(prompt_rows, decode_rows, now - start);
        if prompt_rows == 0 {
            self.depth.observe(batch.max(1), depth, now - start, now);
        }
        let first = |s: &&mut Sequence| !s.event.tokens.is_empty();
        self.running.iter_mut().filter(first).for_each(|s| {
            s.times.first_token.get_or_insert(now);
        });
        self.ended = now;
        Ok(())
    }

    /// Runs the trunk. Masks of constrained answers depend on drafts alone, so they are made meanwhile.
    fn forward(&mut self, plan: &Plan) -> Result<(), EngineError> {
        let mut newest = vec![None; self.running.len()];
        plan.entries.iter().filter(|entry| entry.newest).for_each(|entry| newest[entry.index] = Some(entry.drafts));
        let mut masked: Vec<(&mut Sequence, usize)> = Vec::new();
        for (sequence, drafts) in self.running.iter_mut().zip(newest) {
            if let Some(drafts) = drafts.filter(|_| sequence.request.structure.is_some()) {
                masked.push((sequence, drafts));
            }
        }
        let model = &mut self.model;
        if masked.is_empty() {
            return Ok(model.forward(&plan.step, &mut ())?);
        }
        std::thread::scope(|scope| {
            let masks = scope.spawn(|| {
                for (sequence, drafts) in &mut masked {
                    if let Err(error) = sequence.answer.prepare(&sequence.drafts[..*drafts]) {
                        sequence.phase = Phase::Finished(FinishReason::Error(error));
                    }
                }
            });
            let forward = model.forward(&plan.step, &mut ());
            if masks.join().is_err() {
                return Err(EngineError::Broken("a constraint does not panic"));
            }
            Ok(forward?)
        })
    }

    /// Asks the backend for the tokens of the rows whose logits nobody else has to see, as far as it finds any.
    fn sample(&mut self, plan: &Plan) -> Result<(), EngineError> {
        self.asked.clear();
        let finds = self.model.finds();
        for entry in plan.entries.iter().filter(|entry| entry.newest) {
            let sequence = &mut self.running[entry.index];
            if !sequence.is_finished() {
                let drafts = &sequence.drafts[..entry.drafts];
                sequence.answer.ask(&sequence.tokens, drafts, entry.first(), finds, &mut self.asked);
            }
        }
        self.given.clear();
        if self.asked.rows.is_empty() {
            return Ok(());
        }
        let mut tokens = Vec::new();
        self.model.sample(&self.asked, &mut tokens)?;
        self.given.resize(plan.step.logits.len(), None);
        for (row, token) in self.asked.rows.iter().zip(tokens) {
            self.given[row.row as usize] = token;
        }
        Ok(())
    }

    /// Takes in the results of a sequence's rows. Gives the number of rows that are final.
    fn take_in(&mut self, entry: &Entry) -> Result<usize, EngineError> {
        let sequence = &mut self.running[entry.index];
        let prefill = sequence.phase == Phase::Prefill;
        if prefill {
            self.stats.prefill_tokens += entry.rows as u64;
        }
        let drafts: Vec<Draft> = std::mem::take(&mut sequence.drafts);
        sequence.wanted = 0;
        if sequence.is_finished() {
            self.counters.failed += 1;
            return Ok(0);
        }
        if entry.scored {
            self.score_prompt(entry)?;
        }
        let sequence = &mut self.running[entry.index];
        let rows = entry.rows - entry.drafts;
        if !entry.newest || sequence.is_finished() {
            sequence.computed += rows;
            sequence.fold = 0;
            return Ok(rows);
        }
        sequence.phase = Phase::Decode;
        sequence.features.clear();
        let first = entry.first();
        let model = &self.model;
        let judged = sequence.answer.judge_given(
            &mut self.judge,
            &sequence.tokens,
            &drafts[..entry.drafts],
            self.given.get(first..=first + entry.drafts).unwrap_or(&[]),
            &mut |i, row: &mut [f32]| model.logits(first + i, row),
            &mut sequence.event.tokens,
        )?;
        sequence.tokens.extend(sequence.event.tokens.iter().map(|token| token.id));
        let new = sequence.event.tokens.len() as u64;
        self.generated += new;
        self.stats.decode_tokens += if prefill { 0 } else { new };
        if entry.drafts > 0 {
            self.stats.drafts.record(judged.judged, judged.accepted);
            self.depth.record(judged.judged, judged.accepted);
            sequence.cost.draft_steps += 1;
            sequence.cost.drafted += judged.judged as u32;
            sequence.cost.accepted += judged.accepted as u32;
        }
        let finals = rows + judged.accepted;
        sequence.computed += finals;
        sequence.fold = judged.accepted;
        if let Some(reason) = judged.finish {
            if matches!(reason, FinishReason::Error(_)) {
                self.counters.failed += 1;
                let (_, row) = self.judge.scratch();
                for i in 0..=entry.drafts {
                    self.model.logits(first + i, row)?;
                    self.poisoned |= row.iter().any(|logit| logit.is_nan());
                }
            }
            sequence.phase = Phase::Finished(reason);
        }
        Ok(finals)
    }

    /// Reads the log-probabilities of prompt tokens off the rows before them.
    fn score_prompt(&mut self, entry: &Entry) -> Result<(), EngineError> {
        let sequence = &mut self.running[entry.index];
        let Some(scores) = &mut sequence.prompt_logprobs else { return Ok(()) };
        let best = sequence.request.prompt_logprobs.unwrap_or(0) as usize;
        let mut reader = Reader::default();
        let (_, row) = self.judge.scratch();
        for i in 0..entry.wanted {
            let next = sequence.computed + i + 1;
            let Some(&token) = sequence.request.prompt.get(next) else { break };
            if scores.len() != next {
                return Err(EngineError::Broken("prompts are scored in order"));
            }
            self.model.logits(entry.logits + i, row)?;
            match reader.read(row, token, best) {
                Ok(score) => scores.push(Some(score)),
                Err(reason) => {
                    let error = EngineError::NoToken { position: next, reason };
                    sequence.phase = Phase::Finished(FinishReason::Error(RequestError::Internal(error.to_string())));
                    self.counters.failed += 1;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Sets how many drafts a sequence gets behind this step, and finds the pages that their rows need.
    fn want_drafts(&mut self, index: usize, depth: usize) {
        let spare = self.pools.free().pages + self.tree.evictable_pages() > self.running.len();
        let sequence = &mut self.running[index];
        if sequence.phase != Phase::Decode {
            return;
        }
        let wanted = sequence.useful_drafts().min(depth);
        // The last draft needs no row of the draft layer, the first one comes from a row that is there.
        let rows = sequence.computed + wanted.saturating_sub(1);
        let Some(place) = &mut sequence.place else { return };
        let pages = rows.div_ceil(PAGE_TOKENS);
        if pages > place.table.len() && spare {
            self.tree.grow(&mut place.table, pages);
        }
        let room = place.table.len() * PAGE_TOKENS;
        sequence.wanted = wanted.min((room + 1).saturating_sub(sequence.computed));
    }

    /// Hands out what the step produced, and takes out the sequences that ended.
    fn report(&mut self, sink: Sink<'_>) {
        let now = self.ended;
        let mut index = 0;
        while index < self.running.len() {
            let sequence = &mut self.running[index];
            let mut event = std::mem::take(&mut sequence.event);
            if let Phase::Finished(reason) = &sequence.phase {
                event.finish = Some(Finish { reason: reason.clone(), cost: sequence.times.cost(sequence.cost, now) });
            }
            if event == TokenEvent::default() {
                index += 1;
                continue;
            }
            if !event.tokens.is_empty() {
                event.prompt_logprobs = sequence.prompt_logprobs.take();
            }
            let (id, finished) = (sequence.id, sequence.is_finished());
            if self.hand_out(id, event, sink) == Flow::Stop || finished {
                self.running.remove(index);
            } else {
                index += 1;
            }
        }
    }

    /// Hands out one event, and records it.
    pub(super) fn hand_out(&mut self, id: SequenceId, event: TokenEvent, sink: Sink<'_>) -> Flow {
        let Some(recorder) = &mut self.recorder else { return sink(id, event) };
        recorder.event(id, &event);
        let flow = sink(id, event);
        if flow == Flow::Stop {
            recorder.stop();
        }
        flow
    }
}
