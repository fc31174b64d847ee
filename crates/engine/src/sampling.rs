//! From logits to a token.
//!
//! Order: bias, bans, penalties, temperature, min-p, top-k, top-p, draw; each step sees what the one before left. Below
//! [`GREEDY_BELOW`] the temperature means the largest logit after bias and penalties. Wherever values tie, the lower token
//! id comes first, so the outcome is a function of the logits and the request alone.

use std::collections::BTreeMap;

pub(crate) use crate::best::largest;
use crate::{
    EngineError,
    best::{Entry, by_rank, select},
    random::{Purpose, uniform},
    request::Sampling,
    softmax::Weighing,
};

/// Temperatures below this are greedy.
pub const GREEDY_BELOW: f32 = 1e-5;

/// Largest magnitude of a bias; larger ones are clamped to it.
pub const MAX_BIAS: f32 = 100.0;

impl Sampling {
    /// Key of all draws: the seed's bits, 0 without one.
    pub fn key(&self) -> u64 {
        self.seed.unwrap_or(0).cast_unsigned()
    }

    /// Whether the largest logit is taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_BELOW
    }

    /// Checks every range.
    ///
    /// # Errors
    /// [`EngineError::Parameter`] naming the field.
    pub fn validate(&self, vocab: usize) -> Result<(), EngineError> {
        let range = |field, value: f32, low: f32, high: f32| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(EngineError::parameter(field, format!("a number from {low} to {high}"), value))
            }
        };
        range("temperature", self.temperature, 0.0, 2.0)?;
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(EngineError::parameter("top_p", "a number above 0 and up to 1", self.top_p));
        }
        range("min_p", self.min_p, 0.0, 1.0)?;
        range("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            return Err(EngineError::parameter("repetition_penalty", "a number above 0", self.repetition_penalty));
        }
        for &(token, bias) in &self.logit_bias {
            if token as usize >= vocab {
                return Err(EngineError::parameter("logit_bias", format!("token ids below {vocab}"), token));
            }
            if bias.is_nan() {
                return Err(EngineError::parameter("logit_bias", "numbers", bias));
            }
        }
        let ids = |field, tokens: &[u32]| match tokens.iter().find(|&&token| token as usize >= vocab) {
            Some(token) => Err(EngineError::parameter(field, format!("token ids below {vocab}"), token)),
            None if tokens.is_empty() => Err(EngineError::parameter(field, "at least one token", "none")),
            None => Ok(()),
        };
        if let Some(allowed) = &self.allowed_tokens {
            ids("allowed_token_ids", allowed)?;
        }
        self.bad_words.iter().try_for_each(|word| ids("bad_words", word))?;
        Ok(())
    }

    fn has_penalties(&self) -> bool {
        let off = |value: f32, neutral: f32| (value - neutral).abs() < f32::EPSILON;
        !(off(self.presence_penalty, 0.0) && off(self.frequency_penalty, 0.0) && off(self.repetition_penalty, 1.0))
    }
}

/// Tokens seen so far, as the penalties count them. Empty unless the parameters have penalties.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct History {
    counts: BTreeMap<u32, Seen>,
    active: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Seen {
    output: u32,
}

impl History {
    /// The history of a prompt.
    pub fn new(params: &Sampling, prompt: &[u32]) -> Self {
        let active = params.has_penalties();
        let counts = if active { prompt.iter().map(|&t| (t, Seen::default())).collect() } else { BTreeMap::new() };
        Self { counts, active }
    }

    /// Adds a token of the output.
    pub fn push(&mut self, token: u32) {
        if self.active {
            self.counts.entry(token).or_default().output += 1;
        }
    }

    fn apply(&self, params: &Sampling, logits: &mut [f32]) {
        for (&token, seen) in &self.counts {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            let repeated = params.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / repeated } else { *logit * repeated };
            *logit -= Self::minus(params, seen.output);
        }
    }

    /// What is taken from the logit of a token that has come so often in the output.
    pub(crate) fn minus(params: &Sampling, output: u32) -> f32 {
        if output == 0 { 0.0 } else { params.frequency_penalty * output as f32 + params.presence_penalty }
    }

    /// Whether the parameters have penalties.
    pub(crate) fn is_active(&self) -> bool {
        self.active
    }

    /// Tokens seen, ascending.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = u32> + '_ {
        self.counts.keys().copied()
    }

    /// How often a token has come in the output, if it has been seen at all.
    pub(crate) fn output(&self, token: u32) -> Option<u32> {
        self.counts.get(&token).map(|seen| seen.output)
    }
}

/// A distribution over some tokens; the others have probability zero.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Distribution {
    /// Ascending.
    tokens: Vec<u32>,
    /// Not normalised.
    weights: Vec<f64>,
    total: f64,
}

impl Distribution {
    /// A distribution from (token, weight) pairs; weights need not sum to one.
    ///
    /// # Errors
    /// [`EngineError::Parameter`] when a token repeats, a weight is negative or not finite, or none is positive.
    pub fn from_weights(pairs: impl IntoIterator<Item = (u32, f64)>) -> Result<Self, EngineError> {
        let mut pairs: Vec<(u32, f64)> = pairs.into_iter().collect();
        pairs.sort_by_key(|p| p.0);
        let valid = pairs.windows(2).all(|w| w[0].0 < w[1].0) && pairs.iter().all(|p| p.1.is_finite() && p.1 >= 0.0);
        let (tokens, weights): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let total: f64 = weights.iter().sum();
        if !valid || total <= 0.0 {
            return Err(EngineError::parameter(
                "weights",
                "different tokens with finite weights of positive sum",
                total,
            ));
        }
        Ok(Self { tokens, weights, total })
    }

    /// Probability of a token.
    pub fn probability(&self, token: u32) -> f64 {
        self.tokens.binary_search(&token).map_or(0.0, |i| self.weights[i] / self.total)
    }

    /// Tokens with their probabilities, ascending by token.
    pub fn iter(&self) -> impl Iterator<Item = (u32, f64)> + '_ {
        self.tokens.iter().zip(&self.weights).map(|(&t, &w)| (t, w / self.total))
    }

    /// The token at `u` in `[0, 1)` of the cumulative distribution.
    pub fn draw(&self, u: f64) -> u32 {
        pick(self.tokens.iter().copied().zip(self.weights.iter().copied()), u * self.total)
    }

    /// The token at `u` of `max(0, self - other)`, normalised. Where rounding leaves no such mass, `self` is drawn from.
    pub fn draw_residual(&self, other: &Self, u: f64) -> u32 {
        let excess = || self.iter().map(|(t, p)| (t, (p - other.probability(t)).max(0.0)));
        let total: f64 = excess().map(|e| e.1).sum();
        if total > 0.0 { pick(excess(), u * total) } else { self.draw(u) }
    }
}

/// The first token whose cumulative weight exceeds `target`; the last one with weight when rounding exhausts the sum.
fn pick(pairs: impl Iterator<Item = (u32, f64)>, target: f64) -> u32 {
    let (mut sum, mut last) = (0.0, 0);
    for (token, weight) in pairs {
        if weight > 0.0 {
            sum += weight;
            last = token;
            if sum > target {
                break;
            }
        }
    }
    last
}

/// What a row of logits says about the next token.
#[derive(Debug)]
pub enum Choice<'a> {
    /// Greedy: this token.
    Token(u32),
    /// Otherwise a distribution.
    Among(&'a Distribution),
}

impl Choice<'_> {
    /// The token at `position`, drawn with the answer's key.
    pub fn draw(&self, seed: u64, position: usize) -> u32 {
        match self {
            Self::Token(token) => *token,
            Self::Among(distribution) => distribution.draw(uniform(seed, position, Purpose::Token)),
        }
    }
}

/// Logits to choices, with reusable scratch.
#[derive(Debug, Default)]
pub struct Sampler {
    candidates: Vec<Entry>,
    distribution: Distribution,
}

impl Sampler {
    /// Shapes `logits` `[vocab]` in place and gives the choice at `position`; `banned` tokens cannot be chosen.
    ///
    /// # Errors
    /// [`EngineError::NoToken`] when no finite logit is left or one is not a number.
    pub fn choose(
        &mut self,
        logits: &mut [f32],
        params: &Sampling,
        history: &History,
        banned: &[u32],
        position: usize,
    ) -> Result<Choice<'_>, EngineError> {
        for &(token, bias) in &params.logit_bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias.clamp(-MAX_BIAS, MAX_BIAS);
            }
        }
        history.apply(params, logits);
        for &token in banned {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        let (best, max) = largest(logits).map_err(|reason| EngineError::NoToken { position, reason })?;
        if params.is_greedy() {
            return Ok(Choice::Token(best));
        }
        self.shape(logits, params, max);
        Ok(Choice::Among(&self.distribution))
    }

    /// The next token at `position`.
    ///
    /// # Errors
    /// As [`Sampler::choose`].
    pub fn next(
        &mut self,
        logits: &mut [f32],
        params: &Sampling,
        history: &History,
        banned: &[u32],
        position: usize,
    ) -> Result<u32, EngineError> {
        Ok(self.choose(logits, params, history, banned, position)?.draw(params.key(), position))
    }

    fn shape(&mut self, logits: &[f32], params: &Sampling, max: f32) {
        let weighing = Weighing::new(max, params.temperature, params.min_p);
        let top_k = params.top_k.filter(|&k| k > 0).map(|k| k as usize);
        let entries = || logits.iter().copied().zip(0u32..).filter(|entry| weighing.keeps(entry.0));
        let Self { candidates, distribution: Distribution { tokens, weights, total } } = self;
        tokens.clear();
        weights.clear();
        if top_k.is_none() && params.top_p >= 1.0 {
            weighing.each(logits, |token, weight| {
                tokens.push(token);
                weights.push(weight);
            });
        } else {
            let top_p = f64::from(params.top_p);
            match top_k {
                Some(top_k) => select(entries(), top_k, candidates),
                None => select(entries(), WINDOW, candidates),
            }
            if params.top_p < 1.0 {
                let whole = top_k.is_some() || candidates.len() < WINDOW;
                candidates.sort_unstable_by_key(|entry| entry.1);
                let mass = if whole {
                    candidates.iter().map(|entry| weighing.weight(entry.0)).sum()
                } else {
                    weighing.mass(logits)
                };
                if !whole && candidates.iter().map(|entry| weighing.weight(entry.0)).sum::<f64>() < top_p * mass {
                    candidates.clear();
                    candidates.extend(entries());
                }
                let kept = nucleus(candidates, top_p * mass, &weighing);
                candidates.truncate(kept);
            }
            candidates.sort_unstable_by_key(|entry| entry.1);
            tokens.extend(candidates.iter().map(|entry| entry.1));
            weights.extend(candidates.iter().map(|entry| weighing.weight(entry.0)));
        }
        *total = weights.iter().sum();
    }
}

/// So many best entries are looked at before all are; most nuclei are far smaller.
const WINDOW: usize = 64;

/// Moves the smallest set of best entries whose weights reach `mass` to the front and gives its size. Halves the range in
/// which the set ends until that can be sorted, so that large sets cost no more than a few passes.
fn nucleus(entries: &mut [Entry], mass: f64, weighing: &Weighing) -> usize {
    let (mut low, mut high, mut before) = (0, entries.len(), 0.0);
    while high - low > WINDOW {
        let middle = (high - low) / 2;
        let range = &mut entries[low..high];
        range.select_nth_unstable_by(middle, by_rank);
        let half: f64 = range[..middle].iter().map(|entry| weighing.weight(entry.0)).sum();
        if before + half >= mass {
            high = low + middle;
        } else {
            before += half;
            low += middle;
        }
    }
    let range = &mut entries[low..high];
    range.sort_unstable_by(by_rank);
    for (i, entry) in range.iter().enumerate() {
        before += weighing.weight(entry.0);
        if before >= mass {
            return low + i + 1;
        }
    }
    high
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(logits: &[f32], params: &Sampling) -> Vec<(u32, f64)> {
        let mut sampler = Sampler::default();
        let mut logits = logits.to_vec();
        match sampler.choose(&mut logits, params, &History::default(), &[], 0).unwrap() {
            Choice::Token(token) => vec![(token, 1.0)],
            Choice::Among(distribution) => distribution.iter().collect(),
        }
    }

    fn tokens(pairs: &[(u32, f64)]) -> Vec<u32> {
        pairs.iter().map(|p| p.0).collect()
    }

    /// Logits whose softmax is 0.4, 0.3, 0.2, 0.1.
    fn ladder() -> Vec<f32> {
        [0.4f32, 0.3, 0.2, 0.1].iter().map(|p| p.ln()).collect()
    }

    fn at(temperature: f32) -> Sampling {
        Sampling { temperature, ..Sampling::greedy() }
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert_eq!(tokens(&shape(&[1.0, 3.0, 3.0, 2.0], &at(0.0))), [1]);
        assert_eq!(tokens(&shape(&[1.0, 3.0, 3.0, 2.0], &at(9e-6))), [1]);
        assert_eq!(shape(&[1.0, 3.0], &at(1e-4)).len(), 2);
    }

    #[test]
    fn temperature_scales_before_everything_else() {
        let p = shape(&ladder(), &at(1.0));
        assert!((p[0].1 - 0.4).abs() < 1e-6 && (p[3].1 - 0.1).abs() < 1e-6);
        let half = shape(&ladder(), &at(0.5));
        assert!((half[0].1 - 0.16 / 0.30).abs() < 1e-6);
        // At temperature 0.5 the largest has 0.53 of the mass: top-p 0.5 keeps it alone.
        assert_eq!(tokens(&shape(&ladder(), &Sampling { top_p: 0.5, ..at(0.5) })), [0]);
        assert_eq!(tokens(&shape(&ladder(), &Sampling { top_p: 0.5, ..at(1.0) })), [0, 1]);
    }

    #[test]
    fn top_p_keeps_the_smallest_set_that_reaches_the_mass() {
        for (top_p, kept) in [(0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.91, 4), (1.0, 4)] {
            assert_eq!(shape(&ladder(), &Sampling { top_p, ..at(1.0) }).len(), kept, "{top_p}");
        }
        assert_eq!(tokens(&shape(&[0.0; 8], &Sampling { top_p: 0.5, ..at(1.0) })), [0, 1, 2, 3], "ties");
    }

    #[test]
    fn top_k_min_p_and_their_order() {
        assert_eq!(tokens(&shape(&ladder(), &Sampling { top_k: Some(2), ..at(1.0) })), [0, 1]);
        assert_eq!(tokens(&shape(&[1.0; 6], &Sampling { top_k: Some(2), ..at(1.0) })), [0, 1], "ties");
        // 0.45 of 0.4 is 0.18: the token of 0.1 goes.
        assert_eq!(tokens(&shape(&ladder(), &Sampling { min_p: 0.45, ..at(1.0) })), [0, 1, 2]);
        // Top-p counts the mass that top-k left: 0.4 of 0.7 exceeds 0.55.
        assert_eq!(tokens(&shape(&ladder(), &Sampling { top_k: Some(2), top_p: 0.55, ..at(1.0) })), [0]);
    }

    #[test]
    fn a_nucleus_beyond_the_first_window_equals_a_full_sort() {
        let logits: Vec<f32> = (0..5000).map(|i| ((i * 7919) % 5000) as f32 / 2500.0).collect();
        let params = Sampling { top_p: 0.9, ..at(1.0) };
        let ours = shape(&logits, &params);
        let mut order: Vec<u32> = (0..5000).collect();
        order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
        let weight = |t: u32| f64::from(logits[t as usize]).exp();
        let total: f64 = order.iter().map(|&t| weight(t)).sum();
        let (mut kept, mut mass) = (Vec::new(), 0.0);
        for t in order {
            kept.push(t);
            mass += weight(t) / total;
            if mass >= 0.9 {
                break;
            }
        }
        kept.sort_unstable();
        assert!(kept.len() > 600);
        assert_eq!(tokens(&ours), kept);
    }

    #[test]
    fn bias_and_bans_come_first() {
        let params = Sampling { logit_bias: vec![(3, 1000.0), (0, -5.0)], ..at(0.0) };
        let mut logits = vec![4.0, 1.0, 0.0, -90.0];
        let token = Sampler::default().next(&mut logits, &params, &History::default(), &[], 0).unwrap();
        assert_eq!(token, 3, "a bias is clamped to 100, which lifts -90 to 10");
        let mut logits = vec![4.0, 1.0, 0.0, -90.0];
        let token = Sampler::default().next(&mut logits, &params, &History::default(), &[3], 0).unwrap();
        assert_eq!(token, 1, "a ban wins over a bias");
    }

    #[test]
    fn penalties_count_prompt_and_output_as_documented() {
        let params =
            Sampling { presence_penalty: 0.5, frequency_penalty: 0.25, repetition_penalty: 2.0, ..Sampling::greedy() };
        let mut history = History::new(&params, &[0, 1]);
        history.push(1);
        history.push(1);
        history.push(2);
        let mut logits = vec![4.0, 4.0, -4.0, 4.0];
        history.apply(&params, &mut logits);
        // Token 1: 4 / 2 - 2 * 0.25 - 0.5; token 2: -4 * 2 - 0.25 - 0.5. All exact in binary.
        let expected = [2.0f32, 1.0, -8.75, 4.0];
        assert!(logits.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{logits:?}");
        assert!(History::new(&Sampling::greedy(), &[1, 2]).counts.is_empty());
    }

    #[test]
    fn padding_rows_are_never_drawn() {
        let mut logits = ladder();
        logits.push(f32::NEG_INFINITY);
        assert_eq!(tokens(&shape(&logits, &at(2.0))), [0, 1, 2, 3]);
    }

    #[test]
    fn impossible_logits_are_errors() {
        for logits in [vec![f32::NEG_INFINITY; 3], vec![0.0, f32::NAN], vec![0.0, f32::INFINITY]] {
            let mut logits = logits;
            let error = Sampler::default().next(&mut logits, &at(1.0), &History::default(), &[], 17).unwrap_err();
            assert!(matches!(error, EngineError::NoToken { position: 17, .. }), "{error}");
        }
    }

    #[test]
    fn ranges_are_checked_by_name() {
        let bad = [
            ("temperature", at(-0.1)),
            ("temperature", at(f32::NAN)),
            ("temperature", at(2.1)),
            ("top_p", Sampling { top_p: 0.0, ..at(1.0) }),
            ("min_p", Sampling { min_p: 1.5, ..at(1.0) }),
            ("presence_penalty", Sampling { presence_penalty: 3.0, ..at(1.0) }),
            ("frequency_penalty", Sampling { frequency_penalty: -3.0, ..at(1.0) }),
            ("repetition_penalty", Sampling { repetition_penalty: 0.0, ..at(1.0) }),
            ("logit_bias", Sampling { logit_bias: vec![(10, 1.0)], ..at(1.0) }),
            ("allowed_token_ids", Sampling { allowed_tokens: Some(vec![3, 10]), ..at(1.0) }),
            ("allowed_token_ids", Sampling { allowed_tokens: Some(vec![]), ..at(1.0) }),
            ("bad_words", Sampling { bad_words: vec![vec![1], vec![1, 10]], ..at(1.0) }),
            ("bad_words", Sampling { bad_words: vec![vec![]], ..at(1.0) }),
        ];
        for (field, params) in bad {
            let error = params.validate(10).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
        Sampling::greedy().validate(10).unwrap();
    }

    #[test]
    fn draws_follow_the_weights() {
        let p = Distribution::from_weights([(2, 1.0), (5, 3.0), (9, 0.0)]).unwrap();
        assert_eq!((p.draw(0.0), p.draw(0.2499), p.draw(0.2501), p.draw(0.999_999_999)), (2, 2, 5, 5));
        let q = Distribution::from_weights([(2, 1.0), (5, 1.0)]).unwrap();
        assert_eq!((p.draw_residual(&q, 0.0), p.draw_residual(&q, 0.99)), (5, 5));
        assert_eq!(p.draw_residual(&p, 0.1), 2, "no residual mass: draw from the target");
        assert!(Distribution::from_weights([(1, 0.0)]).is_err());
        assert!(Distribution::from_weights([(1, 1.0), (1, 1.0)]).is_err());
    }
}
