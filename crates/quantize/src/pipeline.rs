//! From a BF16 checkpoint to a W4A16 artifact, one layer in memory at a time.
//!
//! For each layer: attention over all calibration tokens (behind layers that are quantized already), the inputs of its
//! experts and the routing kept; experts solved and their shard written; the layer finished with the *quantized* experts,
//! read back from that shard. Tensors that stay are copied as byte ranges. config.json, without which no loader takes the
//! directory for a model, comes last.
//!
//! The artifact's bytes depend on source, calibration samples and recipe alone: not on threads, budget, or interruptions.

use std::path::{Component, Path, PathBuf};
use std::time::Instant;

use glimmer_checkpoint::manifest::{Manifest, SourceIdentity};
use glimmer_checkpoint::scheme::{Scheme, quantization_config, with_quantization_config};
use glimmer_checkpoint::shards::INDEX_FILE;
use glimmer_checkpoint::writer::{DEFAULT_SHARD_BYTES, ShardReceipt, ShardWriter, write_file, write_index};
use glimmer_checkpoint::{Checkpoint, MlpKind};
use glimmer_model::streaming::{Routes, Runner, RunnerLimits, Selections};
use glimmer_model::weights::{Loader, layer_prefix};
use glimmer_model::{Layer, load_experts};
use glimmer_tensor::Backend;
use glimmer_tensor::cpu::Pool;
use serde_json::json;

use crate::calibration::{Batch, Calibration, CalibrationSample};
use crate::copy::copy_shard;
use crate::error::{Error, Result};
use crate::experts::{LayerInputs, LayerWork, check, matrix_units};
use crate::gptq::Order;
use crate::memory::{Budget, Needs, Shares};
use crate::overlay::Overlay;
use crate::plan::{LayerShard, Plan, layer_tensors};
use crate::progress::Progress;
use crate::recipe::{Method, Recipe};
use crate::report::{LayerReport, REPORT_JSON, REPORT_PAGE, Report, Timing};
use crate::rows::RowStore;
use crate::source_files::source_files;
use crate::state::{FinishedShard, Inputs, Run, Start};

/// When the residual streams are saved besides the shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SaveStreams {
    /// When making them again would take much longer than saving them.
    #[default]
    WhenWorthwhile,
    /// After every layer.
    Always,
    /// Never: a resumed run repeats the forward pass of the finished layers.
    Never,
}

/// How to run; none of it changes the artifact.
#[derive(Debug, Clone)]
pub struct Options {
    /// The artifact's directory: new, empty, or an interrupted run.
    pub out: PathBuf,
    /// Memory that the run may take.
    pub budget: Budget,
    /// Threads of the solver.
    pub threads: usize,
    /// Whether to go on with what is in `out`.
    pub resume: bool,
    /// When streams are saved.
    pub save_streams: SaveStreams,
}

impl Options {
    /// An automatic budget, two threads, a fresh start.
    pub fn new(out: impl Into<PathBuf>) -> Self {
        Self {
            out: out.into(),
            budget: Budget::Automatic { free_bytes: None },
            threads: 2,
            resume: false,
            save_streams: SaveStreams::WhenWorthwhile,
        }
    }
}

/// What a finished run hands back.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    /// The report, as stored in the artifact.
    pub report: Report,
    /// Times of this run (a resumed one counts only itself).
    pub timing: Timing,
}

/// Quantizes `source` into `options.out`. `backend` runs the calibration; `samples` may be empty for [`Method::Rtn`].
///
/// # Errors
/// [`Error`]; after any of them the directory can be resumed, or is as it was.
pub fn quantize<B: Backend>(
    backend: B,
    source: &Checkpoint,
    samples: &[CalibrationSample],
    recipe: &Recipe,
    options: &Options,
    progress: &mut dyn Progress,
) -> Result<Finished> {
    let began = Instant::now();
    recipe.validate()?;
    let samples = if recipe.method == Method::Rtn { &[] } else { samples };
    let calibration = Calibration::new(samples, source.config())?;
    if recipe.method == Method::Gptq && samples.is_empty() {
        return Err(Error::NoCalibration);
    }
    apart(source, &options.out)?;
    let plan = Plan::new(source, DEFAULT_SHARD_BYTES)?;
    let inputs = Inputs {
        source: SourceIdentity::of(source)?,
        calibration: if samples.is_empty() { "none".to_owned() } else { calibration.digest() },
        recipe: serde_json::to_value(recipe).map_err(|e| Error::Setting {
            field: "recipe",
            expected: "a recipe that can be stored",
            found: e.to_string(),
        })?,
    };
    let run = match Run::open(&options.out, inputs, source_files(source), options.resume)? {
        Start::Work(run) => *run,
        Start::Finished(manifest) => {
            let report = serde_json::from_value(manifest.statistics).map_err(|e| Error::NotEmpty {
                path: options.out.clone(),
                found: format!("a manifest without a report ({e})"),
            })?;
            return Ok(Finished { report, timing: Timing::default() });
        }
    };
    let limits = RunnerLimits { max_rows: 512.min(calibration.tokens()), max_tokens: calibration.longest(), slots: 16 };
    let needs = Needs::new(source.config(), recipe, calibration.tokens(), &limits, options.threads);
    if let Some(note) = needs.too_little(options.budget) {
        progress.note(&note);
    }
    let mut job = Job {
        source,
        recipe,
        options,
        threads: Pool::new(options.threads),
        calibration,
        samples: samples.len(),
        limits,
        shares: needs.spend(options.budget),
        plan,
        run,
        timing: Timing::default(),
    };
    job.announce(progress);
    job.copy(progress)?;
    match recipe.method {
        Method::Rtn => job.round(progress)?,
        Method::Gptq => job.walk(backend, progress)?,
    }
    let report = job.complete(progress)?;
    let mut timing = std::mem::take(&mut job.timing);
    timing.total = began.elapsed().as_secs_f64();
    job.run.close()?;
    Ok(Finished { report, timing })
}

/// Refuses an artifact inside its source, whose loaders would then see both, and a source inside the artifact.
fn apart(source: &Checkpoint, out: &Path) -> Result<()> {
    // A source that is no directory is nowhere.
    let Ok(inside) = Path::new(source.location()).canonicalize() else { return Ok(()) };
    let absolute = std::path::absolute(out).map_err(|e| Error::io(out, "find", e))?;
    // What exists of the way there, links followed, and what does not yet.
    let Some(there) = absolute.ancestors().find_map(|path| Some((path, path.canonicalize().ok()?))) else {
        return Ok(());
    };
    let mut place = there.1;
    for part in absolute.strip_prefix(there.0).unwrap_or(Path::new("")).components() {
        match part {
            Component::ParentDir => drop(place.pop()),
            part => place.push(part),
        }
    }
    if place.starts_with(&inside) || inside.starts_with(&place) {
        return Err(Error::Nested { path: out.to_owned(), source_path: source.location().to_owned() });
    }
    Ok(())
}

struct Job<'a> {
    source: &'a Checkpoint,
    recipe: &'a Recipe,
    options: &'a Options,
    threads: Pool,
    calibration: Calibration<'a>,
    samples: usize,
    limits: RunnerLimits,
    shares: Shares,
    plan: Plan,
    run: Run,
    timing: Timing,
}

impl Job<'_> {
    /// Work of a layer in units of progress: the matrices of its experts and the forward pass.
    fn layer_units(&self, layer: usize) -> (u64, u64) {
        let text = &self.source.config().text;
        let matrices = match text.mlp[layer] {
            MlpKind::Sparse => text.expert_matrices(layer).map(|m| matrix_units(self.recipe.method, &m)).sum(),
            MlpKind::Dense => 0,
        };
        let active = (text.hidden_size * (text.hidden_size * 8 + text.moe.intermediate_size * 4)) as u64;
        (matrices, self.calibration.tokens() as u64 * active)
    }

    fn announce(&self, progress: &mut dyn Progress) {
        let total =
            (0..self.source.config().text.num_hidden_layers).map(|l| self.layer_units(l)).map(|(m, f)| m + f).sum();
        let done = self.plan.layers.iter().filter(|s| self.run.finished(&s.file).is_some());
        progress.start(total, done.map(|s| self.layer_units(s.layer).0).sum());
    }

    /// Copies what stays as it is.
    fn copy(&mut self, progress: &mut dyn Progress) -> Result<()> {
        let began = Instant::now();
        for (i, shard) in self.plan.copies.iter().enumerate() {
            if self.run.finished(&shard.file).is_some() {
                continue;
            }
            check(progress)?;
            progress.phase(&format!("copy {} of {}", i + 1, self.plan.copies.len()));
            let (receipt, non_finite) = copy_shard(self.source, self.run.directory(), shard)?;
            self.run.record(FinishedShard { receipt, layer: None, non_finite })?;
        }
        // What was looked at of every tensor (its sample, its edges) is not needed again.
        self.source.release();
        self.timing.copies = began.elapsed().as_secs_f64();
        check(progress)
    }

    fn layer_work(&self, layer: usize) -> LayerWork<'_> {
        LayerWork { source: self.source, recipe: self.recipe, layer, threads: &self.threads, shares: self.shares }
    }

    fn begin_shard(&self, shard: &LayerShard) -> Result<ShardWriter> {
        let tensors = layer_tensors(&self.layer_work(shard.layer).matrices_in_order());
        Ok(ShardWriter::create(self.run.directory(), &shard.file, tensors)?)
    }

    fn shard_of(&self, layer: usize) -> Option<usize> {
        self.plan.layers.iter().position(|s| s.layer == layer)
    }

    /// Rounds all layers to nearest.
    fn round(&mut self, progress: &mut dyn Progress) -> Result<()> {
        for i in 0..self.plan.layers.len() {
            let shard = &self.plan.layers[i];
            if self.run.finished(&shard.file).is_some() {
                continue;
            }
            let (began, layer) = (Instant::now(), shard.layer);
            progress.phase(&format!("layer {layer}"));
            let mut writer = self.begin_shard(shard)?;
            let report = self.layer_work(layer).round(&mut writer, progress)?;
            let receipt = writer.finish()?;
            self.run.record(FinishedShard { receipt, layer: Some(report), non_finite: Vec::new() })?;
            self.timing.solve += began.elapsed().as_secs_f64();
            self.timing.layers.push((layer, began.elapsed().as_secs_f64()));
            check(progress)?;
        }
        Ok(())
    }

    /// Walks the calibration tokens through the layers and quantizes the experts on the way.
    fn walk<B: Backend>(&mut self, backend: B, progress: &mut dyn Progress) -> Result<()> {
        let text = &self.source.config().text;
        if self.plan.layers.iter().all(|s| self.run.finished(&s.file).is_some()) {
            return Ok(());
        }
        let (tokens, shares) = (self.calibration.tokens(), self.shares);
        let mut runner = Runner::new(backend, text, self.limits)?;
        let (width, hidden) = (runner.stream_width(), text.hidden_size);
        let mut streams =
            RowStore::new(&self.run.working_file("streams.work"), tokens, width, shares.streams_in_memory)?;
        let mut x = RowStore::new(&self.run.working_file("inputs.work"), tokens, hidden, shares.inputs_in_memory)?;
        let batches = self.calibration.batches(shares.batch_rows);
        let mut selections: Vec<Selections> = vec![Selections::default(); batches.len()];
        let start = match self.run.streams_at() {
            Some(layer) => {
                self.run.load_streams(layer, &mut streams)?;
                layer
            }
            None => {
                for batch in &batches {
                    streams.write(batch.first, &self.calibration.embed(self.source, batch)?)?;
                }
                0
            }
        };
        let last = self.plan.layers.last().map_or(0, |s| s.layer);
        let mut unsaved = Instant::now();
        for layer in start..=last {
            let began = Instant::now();
            progress.phase(&format!("layer {layer} of {}", text.num_hidden_layers));
            check(progress)?;
            let mut pass = LayerPass {
                runner: &mut runner,
                streams: &mut streams,
                x: &mut x,
                selections: &mut selections,
                batches: &batches,
            };
            self.layer(layer, &mut pass, progress)?;
            self.source.release();
            progress.advance(self.layer_units(layer).1);
            if self.shard_of(layer).is_some() {
                self.timing.layers.push((layer, began.elapsed().as_secs_f64()));
            }
            if layer < last && self.should_save(layer, &unsaved, tokens * width * size_of::<f32>()) {
                self.run.save_streams(layer + 1, &streams)?;
                unsaved = Instant::now();
                check(progress)?;
            }
        }
        Ok(())
    }

    /// Whether the streams after `layer` are to be saved.
    fn should_save(&self, layer: usize, unsaved: &Instant, bytes: usize) -> bool {
        use glimmer_checkpoint::{AttentionKind, IndexerKind};
        /// What a disk surely writes in a second.
        const BYTES_A_SECOND: f64 = 100e6;
        let text = &self.source.config().text;
        // A layer that reuses the selection of the layer before it needs more than streams.
        let reuses = text.attention.get(layer + 1) == Some(&AttentionKind::Dsa)
            && text.indexer.kinds.get(layer + 1) == Some(&IndexerKind::Shared);
        match self.options.save_streams {
            SaveStreams::Never => false,
            SaveStreams::Always => !reuses,
            SaveStreams::WhenWorthwhile => {
                !reuses && unsaved.elapsed().as_secs_f64() > 30.0 + 20.0 * bytes as f64 / BYTES_A_SECOND
            }
        }
    }

    /// One layer: forward, experts, forward.
    fn layer<B: Backend>(
        &mut self,
        index: usize,
        pass: &mut LayerPass<'_, B>,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let began = Instant::now();
        let layer = Layer::load_without_experts(pass.runner.backend(), self.source, index)?;
        let shard = self.shard_of(index);
        let done = shard.is_some_and(|i| self.run.finished(&self.plan.layers[i].file).is_some());
        let wanted = shard.is_some() && !done;
        let routes = pass.attend(&layer, wanted)?;
        self.timing.forward += began.elapsed().as_secs_f64();
        let Some(shard) = shard.map(|i| &self.plan.layers[i]) else {
            let began = Instant::now();
            pass.finish(&layer, None)?;
            self.timing.forward += began.elapsed().as_secs_f64();
            return Ok(());
        };
        if wanted {
            let began = Instant::now();
            progress.phase(&format!("layer {index}: experts"));
            let mut writer = self.begin_shard(shard)?;
            let inputs = LayerInputs { x: pass.x, tokens: self.calibration.tokens(), routes: &routes };
            let report = self.layer_work(index).solve(pass.runner, &inputs, &mut writer, progress)?;
            let receipt = writer.finish()?;
            self.run.record(FinishedShard { receipt, layer: Some(report), non_finite: Vec::new() })?;
            self.timing.solve += began.elapsed().as_secs_f64();
            check(progress)?;
        }
        let began = Instant::now();
        let is_last = self.plan.layers.last().is_some_and(|s| s.layer == index);
        if !is_last {
            let overlay = Overlay::of_shard(self.source, self.run.directory(), &shard.file)?;
            let prefix = format!("{}mlp.", layer_prefix(self.source, index));
            let experts = load_experts(&Loader::new(pass.runner.backend(), &overlay, prefix))?;
            pass.finish(&layer, Some(&experts))?;
        }
        self.timing.forward += began.elapsed().as_secs_f64();
        Ok(())
    }

    /// The `quantization_config` of the artifact.
    fn quantization_block(&self) -> serde_json::Value {
        let scheme = Scheme {
            ignore: self.recipe.ignore_style,
            static_order: (self.recipe.method, self.recipe.order) == (Method::Gptq, Order::Static),
        };
        quantization_config(self.source.config(), scheme)
    }

    /// Writes everything besides the shards, config.json last.
    fn complete(&mut self, progress: &mut dyn Progress) -> Result<Report> {
        progress.phase("index and manifest");
        let directory = self.run.directory();
        let shards: Vec<&FinishedShard> = self
            .plan
            .copies
            .iter()
            .map(|s| &s.file)
            .chain(self.plan.layers.iter().map(|s| &s.file))
            .filter_map(|file| self.run.finished(file))
            .collect();
        let layers: Vec<LayerReport> = shards.iter().filter_map(|s| s.layer.clone()).collect();
        let report = Report {
            recipe: self.recipe.clone(),
            samples: self.samples,
            tokens: self.calibration.tokens(),
            layers,
            non_finite: shards.iter().flat_map(|s| s.non_finite.clone()).collect(),
            unexpected: self.plan.unexpected.clone(),
        };
        let unreadable =
            |e: serde_json::Error| Error::ConfigText { expected: "a report that can be stored", found: e.to_string() };
        let statistics = serde_json::to_value(&report).map_err(unreadable)?;
        let inputs = self.run.inputs();
        let mut manifest = Manifest::new(
            inputs.source.clone(),
            json!({ "recipe": inputs.recipe, "calibration_sha256": inputs.calibration }),
        );
        let receipts: Vec<ShardReceipt> = shards.iter().map(|s| s.receipt.clone()).collect();
        receipts.iter().for_each(|receipt| manifest.add_shard(receipt));

        let mut files: Vec<(String, Vec<u8>)> = Vec::new();
        for name in self.source.files() {
            if matches!(name, "config.json" | "manifest.json" | REPORT_JSON | REPORT_PAGE) || name == INDEX_FILE {
                continue;
            }
            let content = self.source.file(name).ok_or_else(|| {
                Error::io(self.source.location(), "read a companion file of", std::io::Error::other(name.to_owned()))
            })?;
            files.push((name.to_owned(), content.as_slice().to_vec()));
        }
        files.push((REPORT_JSON.to_owned(), serde_json::to_vec_pretty(&report).map_err(unreadable)?));
        files.push((REPORT_PAGE.to_owned(), report.page().into_bytes()));
        for (name, content) in &files {
            write_file(directory, name, content)?;
            manifest.add_file(name, content);
            check(progress)?;
        }
        write_index(directory, &receipts)?;
        let index_path = directory.join(INDEX_FILE);
        let index = std::fs::read(&index_path).map_err(|e| Error::io(&index_path, "read", e))?;
        manifest.add_file(INDEX_FILE, &index);
        check(progress)?;
        let source_text = self.source.file("config.json");
        let source_text = source_text.as_ref().map_or(&[][..], |bytes| bytes.as_slice());
        let source_text = std::str::from_utf8(source_text)
            .map_err(|e| Error::ConfigText { expected: "UTF-8", found: e.to_string() })?;
        let config = with_quantization_config(source_text, &self.quantization_block())?;
        manifest.add_file("config.json", config.as_bytes());
        manifest.statistics = statistics;
        manifest.write(directory)?;
        check(progress)?;
        write_file(directory, "config.json", config.as_bytes())?;
        check(progress)?;
        Ok(report)
    }
}

/// The calibration tokens on their way through a layer.
struct LayerPass<'a, B: Backend> {
    runner: &'a mut Runner<B>,
    streams: &'a mut RowStore,
    x: &'a mut RowStore,
    selections: &'a mut [Selections],
    batches: &'a [Batch],
}

impl<B: Backend> LayerPass<'_, B> {
    /// Attention over all tokens; with `keep`, also inputs and routing of the experts.
    fn attend(&mut self, layer: &Layer<B>, keep: bool) -> Result<Routes> {
        let hidden = self.x.width();
        let mut routes = Routes::default();
        for (batch, selections) in self.batches.iter().zip(self.selections.iter_mut()) {
            let (runner, x) = (&mut *self.runner, &mut *self.x);
            self.streams.update(batch.first, batch.rows(), |streams| {
                runner.attend(layer, &batch.lengths, streams, selections)?;
                if keep {
                    let mut part = Routes::default();
                    x.update(batch.first, batch.rows(), |x| {
                        debug_assert_eq!(x.len(), batch.rows() * hidden);
                        Ok(runner.mlp_input(layer, streams, x, &mut part)?)
                    })?;
                    routes.top = part.top;
                    routes.experts.append(&mut part.experts);
                    routes.weights.append(&mut part.weights);
                }
                Ok(())
            })?;
        }
        Ok(routes)
    }

    /// The rest of the layer, with other experts if given.
    fn finish(&mut self, layer: &Layer<B>, experts: Option<&glimmer_tensor::Experts<B>>) -> Result<()> {
        for batch in self.batches {
            let runner = &mut *self.runner;
            self.streams.update(batch.first, batch.rows(), |streams| Ok(runner.finish(layer, experts, streams)?))?;
        }
        Ok(())
    }
}
