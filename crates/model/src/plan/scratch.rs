//! What the stages of a GPU take beside a step's activations: planes of activations, work lists, sums on their way.
//!
//! Every piece is made when a stage first needs it and only grows, so what counts is the largest step. Pieces are named as the
//! backend names them, and a test over its sources holds the two lists to each other; a bound stands where the backend divides
//! its work into turns. `glimmer bench step` prints what a device really took beside this.

use glimmer_checkpoint::{TextConfig, VisionConfig, config::MlpKind};

/// Every piece of scratch, by the backend's names.
pub const PIECES: [&str; 36] = [
    "a matrix as halves",
    "absorbed queries",
    "absorbed queries in f32",
    "activations as planes",
    "activations as planes of halves",
    "activations in chunks",
    "activations of the experts",
    "attended latents",
    "attended latents as planes",
    "attention of parts",
    "choices by expert",
    "chunks of the delta rule",
    "counters of the delta rule",
    "counts of tiles",
    "gate and up",
    "index keys",
    "index scores",
    "keys of patches",
    "mixing products",
    "number of work items",
    "output of the shared expert",
    "outputs of the experts",
    "queries of patches",
    "router in f32",
    "router scores",
    "slots of the choices",
    "softmax of parts",
    "sums of both planes",
    "sums of runs",
    "the sampler's parts",
    "the sampler's rows that ended",
    "the step's plan",
    "tokens of the experts",
    "values of patches",
    "work items",
    "workspace of products",
];

/// The largest step.
#[derive(Debug, Clone, Copy)]
pub struct Largest<'a> {
    /// The text model.
    pub text: &'a TextConfig,
    /// The vision tower, where pictures are taken.
    pub vision: Option<&'a VisionConfig>,
    /// Patches of the largest picture.
    pub patches: usize,
    /// Ranks that share heads and inner widths.
    pub ranks: usize,
    /// Rows.
    pub rows: usize,
    /// Rows whose logits are wanted.
    pub logits: usize,
    /// Tokens of the longest sequence.
    pub context: usize,
    /// Whether the draft layer, whose experts are not quantized, is loaded.
    pub draft_layer: bool,
    /// Whether the layers' experts are INT4.
    pub int4: bool,
}

/// Bytes that the backend's sizes are rounded up to a multiple of; smaller ones become powers of two.
const LARGE: u64 = 64 << 20;

/// Bytes of a piece as the backend makes it.
fn made(bytes: u64) -> u64 {
    if bytes < LARGE { bytes.next_power_of_two() } else { bytes.next_multiple_of(LARGE) }
}

impl Largest<'_> {
    /// Bytes of all pieces as they are made, and of the vision tower's activations, which come with the first picture.
    pub fn total(&self) -> u64 {
        let pieces = self.pieces();
        // Small ones share blocks of 64 MiB.
        let (small, large): (Vec<u64>, Vec<u64>) =
            pieces.iter().map(|&(_, bytes)| made(bytes)).partition(|&bytes| bytes <= LARGE / 2);
        large.iter().sum::<u64>() + small.iter().sum::<u64>().next_multiple_of(LARGE) + self.stacks() + self.tower()
    }

    /// Bytes of small matrices of one input, copied one below the other when many rows meet them first.
    fn stacks(&self) -> u64 {
        let text = self.text;
        let kda = text.kda.num_heads.div_ceil(self.ranks.max(1)) + 2 * text.kda.head_dim;
        let dsa = text.mla.kv_lora_rank + 2 * text.indexer.head_dim + text.indexer.num_heads;
        let layers = [(text.kda_layers().count(), kda), (text.dsa_layers().count() + 1, dsa)];
        let bytes: usize = layers.into_iter().map(|(layers, outputs)| 2 * layers * outputs * text.hidden_size).sum();
        (bytes as u64).next_multiple_of(LARGE)
    }

    /// Bytes of the vision tower's activations for the largest picture.
    fn tower(&self) -> u64 {
        let Some(v) = self.vision else { return 0 };
        let pixels = v.in_channels * v.temporal_patch_size * v.patch_size * v.patch_size;
        let merged = v.spatial_merge_size * v.spatial_merge_size;
        // Pixels; residual, normed row, queries with keys and values, core and output; activation of the MLP.
        let patch = pixels + 7 * v.hidden_size + v.intermediate_size;
        let token = merged * v.hidden_size + 3 * v.out_hidden_size + v.projection_intermediate_size;
        4 * (self.patches * patch + self.patches / merged.max(1) * token) as u64
    }

    /// Bytes of every piece.
    pub fn pieces(&self) -> Vec<(&'static str, u64)> {
        PIECES.into_iter().map(|name| (name, self.piece(name))).collect()
    }

    fn piece(&self, name: &str) -> u64 {
        /// Rows that one turn of wide products takes, and rows from which their operand is one plane.
        const TURN: usize = 2048;
        const ONE_PLANE: usize = 512;
        /// Bytes of the pieces of attention, of sums of two planes and of a matrix as halves at most; index scores at most.
        const BOUND: usize = 256 << 20;
        const SCORES: usize = 16 << 20;
        let text = self.text;
        let (rows, hidden, moe, mla) = (self.rows, text.hidden_size, &text.moe, &text.mla);
        let shared = |width: usize| width.div_ceil(self.ranks.max(1));
        let heads = shared(mla.num_heads);
        let (kda, query, values) =
            (shared(text.kda.num_heads) * text.kda.head_dim, heads * mla.qk_nope_head_dim, heads * mla.v_head_dim);
        let (turn, latents) = (rows.min(TURN), heads * mla.kv_lora_rank);
        let dense = if text.mlp.contains(&MlpKind::Dense) { shared(text.intermediate_size) } else { 0 };
        let inner = shared(moe.intermediate_size);
        let (choices, experts) = (rows * moe.experts_per_token, moe.num_experts);
        // Every expert's choices begin at an eighth slot.
        let slots = (choices + 7 * experts.min(choices)).next_multiple_of(8);
        // Experts as they are stored, as the draft layer's are, leave their outputs in f32; many rows go to them in two planes.
        let stored = self.draft_layer || !self.int4;
        let in_slots = |width: usize| if self.int4 { 2 * slots * width.next_multiple_of(64) } else { 0 };
        let planes = |width: usize| if stored && rows > 128 { 4 * slots * width.next_multiple_of(64) } else { 0 };
        let joint = if self.draft_layer { 2 * hidden } else { hidden };
        let widest = [joint, kda, values, query].into_iter().max().unwrap_or(0);
        let patches = if self.vision.is_some() { self.patches } else { 0 };
        let tower = self.vision.map_or(0, |vision| vision.hidden_size);
        let pools = self.context / text.indexer.kpool.max(1);
        let bytes = match name {
            "a matrix as halves" => {
                let sizes = [widest * hidden, dense * hidden, inner * moe.num_shared * hidden, joint * hidden];
                2 * sizes.into_iter().filter(|size| 2 * size <= BOUND).max().unwrap_or(0)
            }
            "absorbed queries" => (2 * turn * latents).max(4 * rows.min(64) * latents),
            "absorbed queries in f32" => 4 * turn * latents,
            "activations as planes" => {
                let inner = self.vision.map_or(0, |vision| vision.intermediate_size.max(3 * vision.hidden_size));
                (4 * rows * widest).max(4 * patches * inner)
            }
            // Planes of up to 96 rows.
            "activations in chunks" => 4 * rows.next_multiple_of(8).clamp(32, 96) * widest.max(dense),
            // What devices without warpgroup products take.
            "activations as planes of halves" => 0,
            "activations of the experts" => in_slots(inner).max(planes(inner)),
            "attended latents" | "attended latents as planes" => 4 * turn * latents,
            "attention of parts" => BOUND.min(4 * rows.max(1) * latents * if rows <= 320 { 4 } else { 1 }),
            "choices by expert" => 4 * slots,
            "chunks of the delta rule" => 32 * 8 * 74_752,
            "counters of the delta rule" => 4 * (32 + 32 * 9),
            // Tiles of 128 rows of weights, and two tiles' sums of 96 rows for each of 132 multiprocessors.
            "counts of tiles" => 4 * shared(text.vocab_size).div_ceil(128),
            "sums of runs" => 2 * 132 * 4 * 192 * 96,
            "gate and up" => 8 * turn * dense.max(inner * moe.num_shared),
            "index keys" => 4 * rows * text.indexer.head_dim,
            "index scores" => 4 * SCORES.min(rows * pools).max(4 * pools),
            "keys of patches" | "queries of patches" | "values of patches" => 4 * patches * tower,
            "mixing products" => 4 * rows * (2 * text.mhc.streams + text.mhc.streams * text.mhc.streams),
            "number of work items" => 4,
            "output of the shared expert" => 4 * rows * hidden,
            "outputs of the experts" => in_slots(hidden).max(if stored { 4 * choices * hidden } else { 0 }),
            "router in f32" => 4 * experts * hidden,
            // Sums of slices of 512 columns; the library, which takes many rows where it is there, needs one of them.
            "router scores" => 4 * experts * rows * hidden.div_ceil(512),
            "slots of the choices" => 4 * choices,
            "softmax of parts" => 8 * turn * heads.next_multiple_of(32) * 4,
            "sums of both planes" => {
                let few = rows.min(ONE_PLANE);
                // All projections of delta attention are added at a time.
                let low_rank = shared(text.kda.num_heads) + 2 * text.kda.head_dim;
                let widest = (3 * kda + low_rank).max(query).max(dense).max(hidden);
                BOUND.min(8 * (few * widest).max(self.logits.min(few) * shared(text.vocab_size)))
            }
            // Parts of at least 2048 logits, or as many as a few rows' blocks.
            "the sampler's parts" => 8 * (self.logits * text.vocab_size.div_ceil(2048)).max(4096),
            "the sampler's rows that ended" => 4 * self.logits,
            "the step's plan" => 4 * (16 * rows + self.context),
            "tokens of the experts" => in_slots(hidden).max(planes(hidden)),
            "work items" => 12 * choices.min(experts + choices / 8),
            "workspace of products" => 32 << 20,
            _ => 0,
        };
        bytes as u64
    }
}

#[cfg(test)]
mod tests {
    use glimmer_checkpoint::Config;

    use super::*;

    fn largest(config: &Config, rows: usize, ranks: usize) -> Largest<'_> {
        Largest {
            text: &config.text,
            vision: None,
            patches: 0,
            ranks,
            rows,
            logits: 768,
            context: 1 << 18,
            draft_layer: true,
            int4: true,
        }
    }

    #[test]
    fn scratch_grows_with_rows_and_shrinks_with_ranks() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/glm-5.3-flash/config.json");
        let config = Config::from_file(path).unwrap();
        let total = |rows, ranks| largest(&config, rows, ranks).total();
        assert!(total(8192, 1) > total(1024, 1) && total(8192, 1) > total(8192, 4));
        // What a prompt of 8192 rows takes is gigabytes, not what a reserve for the driver could hold.
        assert!((3 << 30..8 << 30).contains(&total(8192, 1)), "{}", total(8192, 1));
        assert!(total(1, 1) < 1 << 30, "{}", total(1, 1));
        let drafting = largest(&config, 8192, 1);
        let plain = Largest { draft_layer: false, ..drafting };
        assert!(plain.total() < drafting.total(), "the draft layer's experts leave their outputs in f32");
    }

    #[test]
    fn pieces_are_named_once_and_in_order() {
        assert!(PIECES.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
