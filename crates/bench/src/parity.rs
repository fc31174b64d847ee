//! Greedy answers of one backend against another: equal tokens, or a near tie where the first token differs.
//!
//! Two backends round differently, so two tokens whose logits are almost equal may change places. A comparison therefore
//! looks at the first token that differs: up to there both have computed the same prompt, and the reference says how far its
//! logits of the two tokens are apart. Behind it the answers have different prompts, and nothing is compared any more.

use glimmer_checkpoint::Checkpoint;
use glimmer_engine::{Generator, Request, Sampling, Settings, request::Output};
use glimmer_tensor::Backend;
use serde::Serialize;

use crate::error::BenchError;
use crate::exactness::Case;
use crate::under_way::UnderWay;

/// Log-probabilities reported beside each token: a near tie is among the best few.
const BEST: u32 = 5;

/// Tokens of one answer, with the best ones beside each and their log-probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct Greedy {
    tokens: Vec<u32>,
    best: Vec<Vec<(u32, f32)>>,
}

/// What a backend answered differently.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Id of the prompt.
    pub id: String,
    /// New tokens that are equal.
    pub equal: usize,
    /// Next token of the reference.
    pub expected: u32,
    /// Next token of the backend under test.
    pub found: u32,
    /// Logit of the reference's token minus that of the other, as the reference computes them; none when the other token is
    /// not among its best.
    pub gap: Option<f32>,
}

/// All answers compared.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Parity {
    /// Answers compared.
    pub answers: usize,
    /// Tokens of the reference's answers.
    pub tokens: usize,
    /// Answers that are equal token for token.
    pub identical: usize,
    /// The others.
    pub differences: Vec<Difference>,
}

impl Parity {
    /// Share of answers that are equal.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.identical as f64 / self.answers.max(1) as f64
    }

    /// Whether every difference is a near tie of at most `tie`.
    #[must_use]
    pub fn all_ties(&self, tie: f32) -> bool {
        self.differences.iter().all(|d| d.gap.is_some_and(|gap| gap <= tie))
    }
}

/// Greedy answers of exactly `tokens` tokens to all cases, up to `settings.sequences` at a time.
///
/// # Errors
/// When the engine cannot be loaded or fails.
pub fn greedy<B: Backend>(
    backend: B,
    checkpoint: &Checkpoint,
    cases: &[Case],
    tokens: u32,
    settings: &Settings,
) -> Result<Vec<Greedy>, BenchError> {
    let mut generator =
        Generator::load(backend, checkpoint, settings).map_err(|error| BenchError::model("loading", error))?;
    let (mut open, mut next) = (UnderWay::default(), 0);
    let mut answers = vec![None; cases.len()];
    while next < cases.len() || !open.is_empty() {
        while next < cases.len() && generator.room() > 0 {
            let case = &cases[next];
            let mut request = Request::new(case.ids.clone(), tokens).ignoring_eos();
            request.sampling = Sampling::greedy();
            request.logprobs = Some(BEST);
            open.submit(&mut generator, next, request, case.pictures.clone())?;
            next += 1;
        }
        open.step(&mut generator, |index, output| {
            answers[index] = Some(of(output));
            Ok(())
        })?;
    }
    let missing = || BenchError::model("answering", "a prompt got no answer");
    answers.into_iter().map(|answer| answer.ok_or_else(missing)).collect()
}

fn of(output: Output) -> Greedy {
    Greedy { best: output.logprobs.into_iter().map(|l| l.top).collect(), tokens: output.tokens }
}

/// Compares answers with those of the reference.
#[must_use]
pub fn compare(cases: &[Case], reference: &[Greedy], found: &[Greedy]) -> Parity {
    let mut parity = Parity::default();
    for ((case, expected), found) in cases.iter().zip(reference).zip(found) {
        parity.answers += 1;
        parity.tokens += expected.tokens.len();
        let equal = expected.tokens.iter().zip(&found.tokens).take_while(|(a, b)| a == b).count();
        let (Some(&wanted), Some(&got)) = (expected.tokens.get(equal), found.tokens.get(equal)) else {
            parity.identical += 1;
            continue;
        };
        let best = expected.best.get(equal).map_or(&[][..], Vec::as_slice);
        let of = |token: u32| best.iter().find(|(id, _)| *id == token).map(|(_, logprob)| *logprob);
        let gap = of(wanted).zip(of(got)).map(|(wanted, got)| wanted - got);
        parity.differences.push(Difference { id: case.id.clone(), equal, expected: wanted, found: got, gap });
    }
    parity
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(tokens: &[u32], second: f32) -> Greedy {
        let best = |&t: &u32| vec![(t, -0.5), (t + 1, second)];
        Greedy { tokens: tokens.to_vec(), best: tokens.iter().map(best).collect() }
    }

    fn case(id: &str) -> Case {
        Case {
            id: id.to_owned(),
            kind: crate::exactness::CaseKind::Text,
            ids: [1].into(),
            pictures: Vec::new(),
            sampling: Sampling::greedy(),
            max_tokens: 3,
            stop_ids: Vec::new(),
            ignore_eos: true,
            turn_start: None,
        }
    }

    #[test]
    fn the_first_differing_token_is_judged_by_the_references_gap() {
        let cases = ["same", "tie", "far", "elsewhere"].map(case);
        let reference =
            [answer(&[1, 2, 3], -9.0), answer(&[1, 2, 3], -0.501), answer(&[1, 2, 3], -4.0), answer(&[1, 2], -0.5)];
        let found = [answer(&[1, 2, 3], 0.0), answer(&[1, 3, 9], 0.0), answer(&[2, 2, 3], 0.0), answer(&[1, 7], 0.0)];
        let parity = compare(&cases, &reference, &found);
        assert_eq!((parity.answers, parity.tokens, parity.identical), (4, 11, 1));
        let seen: Vec<_> = parity.differences.iter().map(|d| (d.id.as_str(), d.equal, d.expected, d.found)).collect();
        assert_eq!(seen, [("tie", 1, 2, 3), ("far", 0, 1, 2), ("elsewhere", 1, 2, 7)]);
        let gaps: Vec<_> = parity.differences.iter().map(|d| d.gap.map(|gap| (gap * 1e3).round())).collect();
        assert_eq!(gaps, [Some(1.0), Some(3500.0), None]);
        assert!(!parity.all_ties(0.01) && (parity.share() - 0.25).abs() < 1e-9);
    }
}
