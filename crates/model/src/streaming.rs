//! Running a model layer by layer with one layer's weights in memory.
//!
//! A quantizer walks the layers once: it needs what enters the experts of a layer, and the streams after the layer computed
//! with *other* experts. Streams live on the host between layers, `[rows, n * hidden]` f32, all rows of all sequences one
//! after another; a [`Runner`] holds the caches of a single layer and a workspace, and reuses both for every layer.
//!
//! ```text
//! embed_streams(...)                      -> streams                once
//! for each layer:
//!     let layer = Layer::load_without_experts(backend, source, l)
//!     runner.attend(&layer, lengths, &mut streams, &mut selections)      first mixer + attention, in place
//!     runner.mlp_input(&layer, &streams, &mut x, &mut routes)            second mixer: x and routing, streams unchanged
//!     runner.finish(&layer, Some(&quantized_experts), &mut streams)      MLP with these experts, in place
//! ```
//! Between `attend` and `finish` the streams are the only state: the second mixer is recomputed from them bit for bit, so
//! `mlp_input` may be called for any range of rows at any time, or not at all, and a run can be interrupted at either
//! boundary. Calls may cover all sequences at once or a few (whole) sequences at a time. Results do not depend on that, nor
//! on the sizes given to [`Runner::new`]: they equal [`crate::Model::forward`]'s bit for bit.

use glimmer_checkpoint::{DType, TextConfig};
use glimmer_tensor::{Backend, CacheShape, Experts, KdaForm, PAGE_TOKENS, Segment, Step, Swiglu};

use crate::{
    Error, Limits, Result,
    layer::{Attention, Layer, Pass},
    limits::cache_shape,
    moe::{Mlp, run_experts},
    weights::{Source, text_prefix},
    workspace::{Widths, Workspace},
};

/// Sizes of a [`Runner`]; they bound memory, not what can be run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunnerLimits {
    /// Rows computed at a time.
    pub max_rows: usize,
    /// Longest sequence.
    pub max_tokens: usize,
    /// Sequences computed at a time.
    pub slots: usize,
}

/// Selected tokens of every row, host side: what a layer without an indexer takes from the layer before it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selections {
    /// For each row, token positions in ascending order.
    pub rows: Vec<Vec<u32>>,
}

/// Chosen experts of every row, `[rows, top]`, ascending by expert within a row.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Routes {
    /// Experts a row.
    pub top: usize,
    /// Expert ids.
    pub experts: Vec<u32>,
    /// Weights, scaling factor included.
    pub weights: Vec<f32>,
}

/// Runs single layers over streams kept on the host.
#[derive(Debug)]
pub struct Runner<B: Backend> {
    backend: B,
    config: TextConfig,
    limits: RunnerLimits,
    cache: B::Cache,
    work: Workspace<B>,
    selection: B::Selection,
    form: KdaForm,
}

impl<B: Backend> Runner<B> {
    /// Allocates a workspace and the caches of one KDA and one DSA layer.
    ///
    /// # Errors
    /// Allocation errors of the backend.
    pub fn new(mut backend: B, config: &TextConfig, limits: RunnerLimits) -> Result<Self> {
        let limits = RunnerLimits {
            max_rows: limits.max_rows.max(1),
            max_tokens: limits.max_tokens.max(1),
            slots: limits.slots.max(1),
        };
        let model = Limits {
            max_rows: limits.max_rows,
            max_logits: 0,
            slots: limits.slots,
            pages: limits.slots * limits.max_tokens.div_ceil(PAGE_TOKENS),
            max_draft: 0,
            features: 0,
        };
        let shape = CacheShape { kda_layers: 1, dsa_layers: 1, ..cache_shape(config, &model) };
        backend.reserve(limits.max_rows, Widths::new(config).widest(config), limits.max_tokens)?;
        Ok(Self {
            cache: backend.cache(&shape)?,
            work: Workspace::new(&backend, config, limits.max_rows)?,
            selection: backend.selection(limits.max_rows, config.selection_width())?,
            backend,
            config: config.clone(),
            limits,
            form: KdaForm::Recurrent,
        })
    }

    /// The backend, to load layers and experts with.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The backend, to run stages of one's own.
    pub fn backend_mut(&mut self) -> &mut B {
        &mut self.backend
    }

    /// Form of the delta rule.
    pub fn set_kda_form(&mut self, form: KdaForm) {
        self.form = form;
    }

    /// Width of a row of streams, `n * hidden`.
    pub fn stream_width(&self) -> usize {
        self.config.mhc.streams * self.config.hidden_size
    }

    /// First mixer and attention over whole sequences of the given lengths (all from position 0), then the streams with
    /// the attention's output added, in place: `[sum of lengths, n * hidden]`.
    ///
    /// `selections` belongs to the same rows and must be handed from layer to layer: a DSA layer fills it, a layer that
    /// reuses the selection of the layer before it reads it, other layers clear it. Keep it with the streams when a run can
    /// be resumed; only models with such layers need it.
    ///
    /// # Errors
    /// [`Error::Length`] when the slices do not fit together, [`Error::Limit`] for a sequence beyond the longest.
    pub fn attend(
        &mut self,
        layer: &Layer<B>,
        lengths: &[usize],
        streams: &mut [f32],
        selections: &mut Selections,
    ) -> Result<()> {
        let width = self.stream_width();
        let total = lengths.iter().sum::<usize>();
        expect_length("streams", total * width, streams.len())?;
        if let Some(&longest) = lengths.iter().max()
            && longest > self.limits.max_tokens
        {
            let available = self.limits.max_tokens;
            return Err(Error::Limit { what: "tokens of a sequence", needed: longest, available, limit: "max_tokens" });
        }
        let reads = layer.reuses_selection();
        let writes = !reads && matches!(layer.attention(), Attention::Dsa { .. }) && self.next_reuses(layer.index());
        if reads {
            expect_length("selections", total, selections.rows.len())?;
        } else {
            selections.rows.clear();
        }

        let mut window = Window::default();
        while let Some((first, rows, step)) = window.next(lengths, &self.limits) {
            self.load_streams(streams, first, rows)?;
            self.backend.begin(&step)?;
            if reads {
                for row in 0..rows {
                    self.backend.write_selection(&mut self.selection, row, &selections.rows[first + row])?;
                }
            }
            let form = self.form;
            let mut nothing = ();
            let mut pass = self.pass(rows, &mut nothing);
            layer.attend(&mut pass, 0, form, false)?;
            layer.mix_mlp(&mut pass, true)?;
            if writes {
                selections.rows.extend((0..rows).map(|row| self.backend.read_selection(&self.selection, row)));
            }
            self.store_streams(streams, first, rows)?;
        }
        Ok(())
    }

    /// The second mixer on streams that [`Runner::attend`] left: the normed MLP input `x` `[rows, hidden]`, and for an MoE
    /// layer the routing (`routes` is replaced; empty for a dense layer). Any rows of any sequences.
    ///
    /// # Errors
    /// [`Error::Length`] when the slices do not fit together.
    pub fn mlp_input(&mut self, layer: &Layer<B>, streams: &[f32], x: &mut [f32], routes: &mut Routes) -> Result<()> {
        let rows = self.stream_rows(streams)?;
        let hidden = self.config.hidden_size;
        expect_length("MLP inputs", rows * hidden, x.len())?;
        routes.experts.clear();
        routes.weights.clear();
        routes.top = match layer.mlp() {
            Mlp::Dense { .. } => 0,
            Mlp::Sparse(moe) => moe.top(),
        };
        for (first, rows) in chunks(rows, self.limits.max_rows) {
            self.load_streams(streams, first, rows)?;
            self.mix_and_route(layer, rows)?;
            self.backend.read_rows(&self.work.x, hidden, &mut x[first * hidden..(first + rows) * hidden])?;
            if routes.top == 0 {
                continue;
            }
            for row in 0..rows {
                for (expert, weight) in self.backend.read_routing(&self.work.routing, row) {
                    routes.experts.push(expert);
                    routes.weights.push(weight);
                }
            }
        }
        Ok(())
    }

    /// The second mixer and the MLP on streams that [`Runner::attend`] left, in place: the streams after the layer. An MoE
    /// layer uses `experts` instead of its own when given; routing always comes from the layer. Any rows.
    ///
    /// # Errors
    /// [`Error::Length`] when the streams are not whole rows, [`Error::NoExperts`] when there are none, neither given nor in
    /// the layer.
    pub fn finish(&mut self, layer: &Layer<B>, experts: Option<&Experts<B>>, streams: &mut [f32]) -> Result<()> {
        let rows = self.stream_rows(streams)?;
        for (first, rows) in chunks(rows, self.limits.max_rows) {
            self.load_streams(streams, first, rows)?;
            self.mix_and_route(layer, rows)?;
            match (layer.mlp(), experts) {
                (Mlp::Sparse(moe), None) => {
                    run_experts(&mut self.backend, rows, moe.own_experts(layer.index())?, &mut self.work)?;
                }
                (Mlp::Sparse(_), Some(experts)) => run_experts(&mut self.backend, rows, experts, &mut self.work)?,
                (Mlp::Dense { .. }, _) => {
                    let mut nothing = ();
                    layer.mlp().forward(&mut self.pass(rows, &mut nothing), layer.index())?;
                }
            }
            // The end-of-trunk stage completes the streams; its norm only fills a buffer that nobody reads.
            let work = &mut self.work;
            self.backend.mhc_head(rows, layer.mlp_site().norm(), &work.y, &mut work.streams, &mut work.x)?;
            self.store_streams(streams, first, rows)?;
        }
        Ok(())
    }

    /// Activation of one expert, `silu(min(W_gate x, limit)) * clamp(W_up x, -limit, limit)`: what its down projection
    /// reads. `x` is `[rows, hidden]`, `act` `[rows, width]`.
    ///
    /// # Errors
    /// [`Error::Length`] when the slices do not fit together.
    pub fn expert_activation(&mut self, expert: &Swiglu<B>, x: &[f32], act: &mut [f32]) -> Result<()> {
        let (hidden, width) = (self.config.hidden_size, self.config.moe.intermediate_size);
        let rows = x.len() / hidden.max(1);
        expect_length("expert inputs", rows * hidden, x.len())?;
        expect_length("expert activations", rows * width, act.len())?;
        for (first, rows) in chunks(rows, self.limits.max_rows) {
            self.backend.write_rows(&mut self.work.x, hidden, &x[first * hidden..(first + rows) * hidden])?;
            let work = &mut self.work;
            let limit = self.config.swiglu_limit;
            self.backend.swiglu(rows, expert, limit, &work.x, &mut work.expert_act, &mut work.y)?;
            let act = &mut act[first * width..(first + rows) * width];
            self.backend.read_rows(&self.work.expert_act, width, act)?;
        }
        Ok(())
    }

    fn mix_and_route(&mut self, layer: &Layer<B>, rows: usize) -> Result<()> {
        let mut nothing = ();
        layer.mix_mlp(&mut self.pass(rows, &mut nothing), false)?;
        if let Mlp::Sparse(moe) = layer.mlp() {
            moe.route(&mut self.backend, rows, &mut self.work)?;
        }
        Ok(())
    }

    fn next_reuses(&self, layer: usize) -> bool {
        use glimmer_checkpoint::config::{AttentionKind, IndexerKind};
        self.config.attention.get(layer + 1) == Some(&AttentionKind::Dsa)
            && self.config.indexer.kinds.get(layer + 1) == Some(&IndexerKind::Shared)
    }

    fn pass<'a>(&'a mut self, rows: usize, nothing: &'a mut ()) -> Pass<'a, B, ()> {
        Pass {
            backend: &mut self.backend,
            cache: &mut self.cache,
            work: &mut self.work,
            selection: &mut self.selection,
            observer: nothing,
            rows,
            hidden: self.config.hidden_size,
        }
    }

    fn stream_rows(&self, streams: &[f32]) -> Result<usize> {
        let width = self.stream_width();
        let rows = streams.len() / width.max(1);
        expect_length("streams", rows * width, streams.len())?;
        Ok(rows)
    }

    fn load_streams(&mut self, streams: &[f32], first: usize, rows: usize) -> Result<()> {
        let width = self.stream_width();
        let values = &streams[first * width..(first + rows) * width];
        Ok(self.backend.write_rows(&mut self.work.streams.x, width, values)?)
    }

    fn store_streams(&self, streams: &mut [f32], first: usize, rows: usize) -> Result<()> {
        let width = self.stream_width();
        let values = &mut streams[first * width..(first + rows) * width];
        Ok(self.backend.read_rows(&self.work.streams.x, width, values)?)
    }
}

/// Cuts the rows of whole sequences into steps. A sequence keeps its slot over the windows that it spans: slots go round,
/// and a window never holds more sequences than there are slots.
#[derive(Debug, Default)]
struct Window {
    sequence: usize,
    position: usize,
    row: usize,
}

impl Window {
    /// The next window: its first row, its number of rows and its step; `None` after the last row.
    fn next(&mut self, lengths: &[usize], limits: &RunnerLimits) -> Option<(usize, usize, Step)> {
        let pages_per_slot = limits.max_tokens.div_ceil(PAGE_TOKENS);
        let first = self.row;
        let mut step = Step::default();
        let mut rows = 0;
        while rows < limits.max_rows && step.segments.len() < limits.slots {
            let Some(&length) = lengths.get(self.sequence) else { break };
            if self.position == length {
                (self.sequence, self.position) = (self.sequence + 1, 0);
                continue;
            }
            let count = (length - self.position).min(limits.max_rows - rows);
            let slot = self.sequence % limits.slots;
            let pages = (self.position + count).div_ceil(PAGE_TOKENS);
            let table = (slot * pages_per_slot..).take(pages).map(|page| page as u32);
            step.segments.push(Segment {
                slot: slot as u32,
                position: self.position as u32,
                rows: count as u32,
                fold: 0,
                commit: count as u32,
                first_page: step.pages.len() as u32,
                pages: pages as u32,
            });
            step.pages.extend(table);
            step.tokens.extend(std::iter::repeat_n(0, count));
            self.position += count;
            self.row += count;
            rows += count;
        }
        (rows > 0).then_some((first, rows, step))
    }
}

/// The streams entering layer 0, `[tokens, n * hidden]`: every stream is the token's embedding row, or the image feature of
/// its row where `features` (ascending by row, each `[hidden]`) has one.
///
/// # Errors
/// [`Error::Token`] for an unknown id, [`Error::Length`] for a feature of another width, [`Error::Shape`] for an embedding
/// of another shape, or neither BF16 nor F32.
pub fn embed_streams(source: &dyn Source, tokens: &[u32], features: &[(usize, &[f32])]) -> Result<Vec<f32>> {
    let text = &source.config().text;
    let (hidden, streams, vocab) = (text.hidden_size, text.mhc.streams, text.vocab_size);
    let name = format!("{}embed_tokens.weight", text_prefix(source));
    if !source.has(&name) {
        return Err(Error::Missing { name, expected: format!("[{vocab}, {hidden}]") });
    }
    let table = source.tensor(&name)?;
    if table.shape != [vocab, hidden] {
        let (expected, found) = (format!("[{vocab}, {hidden}]"), format!("{:?}", table.shape));
        return Err(Error::Shape { name, expected, found });
    }
    let bytes = table.bytes.as_slice();
    let mut out = Vec::with_capacity(tokens.len() * streams * hidden);
    let mut features = features.iter().peekable();
    let mut values = vec![0.0f32; hidden];
    for (row, &token) in tokens.iter().enumerate() {
        if token as usize >= vocab {
            return Err(Error::Token { row, token, vocab });
        }
        if let Some((_, feature)) = features.next_if(|f| f.0 == row) {
            expect_length("image feature", hidden, feature.len())?;
            values.copy_from_slice(feature);
        } else {
            let at = token as usize * hidden;
            match table.dtype {
                DType::Bf16 => {
                    for (value, pair) in values.iter_mut().zip(bytes[2 * at..2 * (at + hidden)].chunks_exact(2)) {
                        *value = half::bf16::from_le_bytes([pair[0], pair[1]]).to_f32();
                    }
                }
                DType::F32 => {
                    for (value, word) in values.iter_mut().zip(bytes[4 * at..4 * (at + hidden)].chunks_exact(4)) {
                        *value = f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                    }
                }
                _ => {
                    let expected = format!("BF16 or F32 [{vocab}, {hidden}]");
                    return Err(Error::Shape { name, expected, found: format!("{} {:?}", table.dtype, table.shape) });
                }
            }
        }
        for _ in 0..streams {
            out.extend_from_slice(&values);
        }
    }
    Ok(out)
}

fn chunks(rows: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).step_by(size).map(move |first| (first, size.min(rows - first)))
}

fn expect_length(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::Length { what, expected, found }) }
}
