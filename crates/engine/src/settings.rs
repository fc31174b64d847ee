//! Sizes and choices of a [`crate::Generator`], and what they mean for a model.

use glimmer_checkpoint::Checkpoint;
use glimmer_model::{Limits, Options};
use glimmer_tensor::{KdaForm, PAGE_TOKENS};
use serde::{Deserialize, Serialize};

use crate::{
    EngineError, depth::DepthPolicy, policy::Policy, pools::Need, rules::Rules, schedule::boot_check,
    synthetic::SyntheticAcceptance,
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

/// Sizes and choices of a [`crate::Generator`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
    /// How deep, up to `depth`, the drafts of a step are.
    pub depth_policy: DepthPolicy,
    /// Selections of draft chains.
    pub index_sharing: IndexSharing,
    /// Drafts of sampled requests.
    pub draft_sampling: DraftSampling,
    /// Lets drafts stand by decree, for benches alone: the output is no longer the model's.
    pub synthetic_acceptance: Option<SyntheticAcceptance>,
    /// Number of ids that the tokenizer knows; rows of the vocabulary beyond it are never chosen.
    pub real_vocab: Option<usize>,
    /// Key of the random draws of requests without a seed of their own.
    pub seed: u64,
    /// Tokens that end an answer; `None` takes those of `config.json`.
    pub end_tokens: Option<Vec<u32>>,
    /// The token that ends reasoning, for models that reason.
    pub think_end: Option<u32>,
    /// The token that opens a tool call, for models that make any: inside reasoning it ends that.
    pub tool_call: Option<u32>,
    /// How steps are filled.
    pub policy: Policy,
    /// Whether later requests reuse what earlier ones computed for the same beginning.
    pub prefix_caching: bool,
    /// States saved for that.
    pub state_checkpoints: usize,
    /// Bytes of features of images and clips that are kept for later requests.
    pub feature_bytes: usize,
    /// Form of the delta rule for prompt rows; the backend's own choice where nothing is said.
    #[serde(skip)]
    pub kda_form: Option<KdaForm>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            sequences: 1,
            context: None,
            pages: None,
            rows: 256,
            depth: 0,
            depth_policy: DepthPolicy::Fixed,
            index_sharing: IndexSharing::Auto,
            draft_sampling: DraftSampling::Greedy,
            synthetic_acceptance: None,
            real_vocab: None,
            seed: 0,
            end_tokens: None,
            think_end: None,
            tool_call: None,
            policy: Policy::default(),
            prefix_caching: true,
            state_checkpoints: 64,
            feature_bytes: 256 << 20,
            kda_form: None,
        }
    }
}

/// Rows of logits kept for scoring, beyond what decoding needs.
const LOGIT_ROWS: usize = 64;

impl Settings {
    /// State checkpoints that there are.
    pub fn checkpoints(&self) -> usize {
        if self.prefix_caching { self.state_checkpoints } else { 0 }
    }

    /// What a model is loaded with, and what requests are then held against.
    ///
    /// # Errors
    /// [`EngineError::Setting`] names the first setting that cannot work with this model.
    pub(crate) fn resolve(&self, checkpoint: &Checkpoint) -> Result<(Limits, Options, Rules), EngineError> {
        let text = &checkpoint.config().text;
        let bad = |setting, expected: String, found: usize| {
            Err(EngineError::Setting { setting, expected, found: found.to_string() })
        };
        let context = self.context.unwrap_or(text.max_position_embeddings);
        if context < 2 || context > text.max_position_embeddings {
            return bad("context", format!("2 to {} tokens", text.max_position_embeddings), context);
        }
        if self.sequences == 0 {
            return bad("sequences", "at least one".to_owned(), 0);
        }
        if self.rows < self.sequences {
            return bad("rows", format!("at least one for each of {} sequences", self.sequences), self.rows);
        }
        if self.depth > 0 && text.mtp_layer().is_none() {
            return bad("depth", "0, as the model has no draft layer".to_owned(), self.depth);
        }
        let whole = context.div_ceil(PAGE_TOKENS);
        let pages = self.pages.unwrap_or(self.sequences * whole);
        if boot_check(context, Need { slots: self.sequences, pages }).is_err() {
            return bad("pages", format!("at least {whole}, the pages of one full context"), pages);
        }
        if let Some(real) = self.real_vocab.filter(|&real| real == 0 || real > text.vocab_size) {
            return bad("real_vocab", format!("1 to {} ids", text.vocab_size), real);
        }
        let vocabulary = self.real_vocab.unwrap_or(text.vocab_size);
        let named = self.end_tokens.iter().flatten().map(|id| ("end_tokens", *id));
        let markers = [("think_end", self.think_end), ("tool_call", self.tool_call)];
        let markers = markers.into_iter().filter_map(|(setting, id)| Some((setting, id?)));
        let foreign = |(_, id): &(&str, u32)| *id as usize >= vocabulary;
        if let Some((setting, id)) = named.chain(markers).find(foreign) {
            return bad(setting, format!("token ids below {vocabulary}"), id as usize);
        }
        self.policy.validate()?;
        let limits = Limits {
            max_rows: self.rows,
            max_logits: (self.sequences * (self.depth + 1)).max(LOGIT_ROWS).min(self.rows),
            slots: self.sequences + self.checkpoints(),
            pages,
            max_draft: self.depth,
            features: self.rows,
        };
        let options = Options { kda_form: self.kda_form, draft_layer: self.depth > 0, real_vocab: self.real_vocab };
        let rules = Rules {
            context,
            vocabulary,
            placeholder: checkpoint.config().media.map(|media| media.image),
            vision: checkpoint.config().vision.is_some(),
            reasoning: self.think_end.is_some(),
            depth: self.depth,
            pages,
        };
        Ok((limits, options, rules))
    }
}
