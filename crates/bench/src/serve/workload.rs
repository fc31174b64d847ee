//! A data set with its parameters, ready to make prompts for any seed.

use glimmer_text::ChatFormat;

use super::dataset::{
    CustomOptions, Prompt, RandomShape, RepetitionShape, custom_prompts, random_prompts, repetition_prompts,
};
use super::error::ServeBenchError;
use super::random::Mersenne;

/// Where prompts come from.
#[derive(Clone, Debug)]
pub enum Workload {
    /// Runs of consecutive tokens.
    Random(RandomShape),
    /// Few prefixes, many suffixes.
    Repetition(RepetitionShape),
    /// A file.
    Custom {
        /// Its name, for errors.
        file: String,
        /// Its text.
        text: String,
        /// How its lines become requests.
        options: CustomOptions,
    },
}

impl Workload {
    /// Prompts of a seed, and the generator that arrival times are drawn from next.
    ///
    /// # Errors
    /// What is wrong with the parameters or the file.
    pub fn prompts(
        &self,
        format: &ChatFormat,
        count: usize,
        seed: u32,
        id_prefix: &str,
    ) -> Result<(Vec<Prompt>, Mersenne), ServeBenchError> {
        if count == 0 && !matches!(self, Self::Custom { .. }) {
            return Err(ServeBenchError::flag("--num-prompts", "0 prompts are nothing to send"));
        }
        let mut generator = Mersenne::numpy(seed);
        let prompts = match self {
            Self::Random(shape) => random_prompts(format.tokenizer(), shape, count, seed, id_prefix)?,
            Self::Repetition(shape) => repetition_prompts(format.tokenizer(), shape, count, &mut generator, seed)?,
            Self::Custom { file, text, options } => {
                custom_prompts(format, file, text, options, count, seed, id_prefix)?
            }
        };
        Ok((prompts, generator))
    }

    /// Whether answers should go on behind the model's own end by default: what random prompts say has no end of its own.
    #[must_use]
    pub fn ignores_eos(&self) -> bool {
        matches!(self, Self::Random(_))
    }

    /// The same with all prompts of one length, where lengths are made.
    #[must_use]
    pub fn of_one_length(&self) -> Self {
        match self {
            Self::Random(shape) => Self::Random(RandomShape { input_ratio: 0.0, ..*shape }),
            // As many prefixes as prompts can be one only.
            Self::Repetition(shape) => Self::Repetition(RepetitionShape { prefixes: 1, ..*shape }),
            Self::Custom { .. } => self.clone(),
        }
    }

    /// Name of the data set.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Random(_) => "random",
            Self::Repetition(_) => "prefix_repetition",
            Self::Custom { .. } => "custom",
        }
    }
}
