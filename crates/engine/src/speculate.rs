//! Which drafts stand. Exact: the tokens have the distribution that they would have without drafts.
//!
//! Row `i` of a verifying step gives the target distribution `p` of the position after the `i`-th draft. A draft `d` that
//! was drawn from `q` stands with probability `min(1, p(d) / q(d))`; in its place comes a draw from `max(0, p - q)`,
//! normalised. When all drafts stand, the last row gives one more token.
//!
//! Two cases have a stronger form. Greedy: the draft stands when it is the largest logit. A draft that was chosen without a
//! draw (`q` is one-hot): the rule above says "stands with probability `p(d)`, otherwise a draw from `p` without `d`",
//! which is what drawing `x` from `p` and comparing it with `d` does. The draw is the one that the position has without
//! drafts, so such a request yields the same tokens at every depth, not only the same distribution.

use crate::{
    random::{Purpose, uniform},
    sampling::{Choice, Distribution},
};

/// A proposed token.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    /// The token.
    pub token: u32,
    /// What it was drawn from; `None` when it was not drawn.
    pub drawn_from: Option<Distribution>,
}

/// The fate of a draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The draft stands.
    Accepted,
    /// This token comes in its place, and later drafts are void.
    Replaced(u32),
}

/// Judges one draft for `position` by the row that predicts it.
pub fn judge(choice: &Choice<'_>, draft: &Draft, seed: u64, position: usize) -> Verdict {
    let compare = |token: u32| if token == draft.token { Verdict::Accepted } else { Verdict::Replaced(token) };
    match (choice, &draft.drawn_from) {
        (Choice::Token(token), _) => compare(*token),
        (Choice::Among(p), None) => compare(p.draw(uniform(seed, position, Purpose::Token))),
        (Choice::Among(p), Some(q)) => {
            // u q < p with u in [0, 1): certain for p >= q, impossible for p = 0.
            if uniform(seed, position, Purpose::Accept) * q.probability(draft.token) < p.probability(draft.token) {
                Verdict::Accepted
            } else {
                Verdict::Replaced(p.draw_residual(q, uniform(seed, position, Purpose::Recover)))
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const VOCAB: u32 = 32;

    /// A distribution of the next token that depends on the token before; `sharpness` separates target and drafter.
    fn model(previous: u32, sharpness: f64, twist: u32) -> Distribution {
        Distribution::from_weights((0..VOCAB).map(|token| {
            let hash = (token * 7 + previous * 13 + twist * 3) % VOCAB;
            // A third of the vocabulary has no mass, so that rejections with p = 0 occur.
            let weight = if hash.is_multiple_of(3) { 0.0 } else { (-f64::from(hash) * sharpness).exp() };
            (token, weight)
        }))
        .unwrap()
    }

    /// Two tokens after `start` by speculation of the given depth, over rows that exist only as far as they are judged.
    fn two_tokens(
        seed: u64,
        depth: usize,
        drawn: bool,
        start: u32,
        targets: &[Distribution],
        drafters: &[Distribution],
    ) -> [u32; 2] {
        let mut out = Vec::new();
        let mut last = start;
        while out.len() < 2 {
            let mut drafts = Vec::new();
            let mut previous = last;
            for i in 0..depth {
                let q = &drafters[previous as usize];
                let position = 10 + out.len() + i;
                let draft = if drawn {
                    let token = q.draw(uniform(seed, position, Purpose::Draft));
                    Draft { token, drawn_from: Some(q.clone()) }
                } else {
                    let best = q.iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
                    Draft { token: best.0, drawn_from: None }
                };
                previous = draft.token;
                drafts.push(draft);
            }
            let first = 10 + out.len();
            let mut all = true;
            for (i, draft) in drafts.iter().enumerate() {
                let choice = Choice::Among(&targets[last as usize]);
                match judge(&choice, draft, seed, first + i) {
                    Verdict::Accepted => last = draft.token,
                    Verdict::Replaced(token) => {
                        last = token;
                        all = false;
                    }
                }
                out.push(last);
                if !all {
                    break;
                }
            }
            if all {
                last = targets[last as usize].draw(uniform(seed, 10 + out.len(), Purpose::Token));
                out.push(last);
            }
        }
        [out[0], out[1]]
    }

    /// Fails when counts are not those of draws with these probabilities: a chi-square beyond 4.5 standard deviations
    /// (Wilson-Hilferty), about 3e-6 for each comparison.
    pub(crate) fn assert_drawn(counts: &[f64], probabilities: &[f64], what: &str) {
        let (chi, freedom) = chi_square(counts, probabilities);
        let a = 2.0 / (9.0 * freedom);
        let bound = freedom * (1.0 - a + 4.5 * a.sqrt()).powi(3);
        assert!(chi < bound, "{what}: {chi} above {bound}");
    }

    /// Chi-square of observed counts against probabilities, with its degrees of freedom.
    fn chi_square(counts: &[f64], probabilities: &[f64]) -> (f64, f64) {
        let n: f64 = counts.iter().sum();
        let (mut chi, mut cells) = (0.0, 0.0);
        for (count, p) in counts.iter().zip(probabilities) {
            if *p > 0.0 {
                chi += (count - n * p).powi(2) / (n * p);
                cells += 1.0;
            } else {
                assert!(*count == 0.0, "a token without probability was drawn");
            }
        }
        (chi, cells - 1.0)
    }

    /// Speculation must not change the distribution: 100,000 draws of two tokens, every depth, both kinds of drafts.
    #[test]
    fn the_distribution_is_that_of_the_target() {
        let draws = 100_000;
        let start = 5;
        let targets: Vec<_> = (0..VOCAB).map(|t| model(t, 0.08, 0)).collect();
        let drafters: Vec<_> = (0..VOCAB).map(|t| model(t, 0.15, 1)).collect();
        let first: Vec<f64> = (0..VOCAB).map(|t| targets[start as usize].probability(t)).collect();
        let second: Vec<f64> =
            (0..VOCAB).map(|t| first.iter().zip(&targets).map(|(p, next)| p * next.probability(t)).sum()).collect();
        for drawn in [false, true] {
            for depth in 0..=4 {
                let mut counts = [vec![0.0; VOCAB as usize], vec![0.0; VOCAB as usize]];
                for seed in 0..draws {
                    let tokens = two_tokens(seed, depth, drawn, start, &targets, &drafters);
                    for (counts, token) in counts.iter_mut().zip(tokens) {
                        counts[token as usize] += 1.0;
                    }
                }
                for (name, counts, expected) in [("first", &counts[0], &first), ("second", &counts[1], &second)] {
                    assert_drawn(counts, expected, &format!("{name} token, depth {depth}, drawn {drawn}"));
                }
            }
        }
    }

    #[test]
    fn undrawn_drafts_leave_every_draw_as_it_is_without_drafts() {
        let targets: Vec<_> = (0..VOCAB).map(|t| model(t, 0.3, 0)).collect();
        let drafters: Vec<_> = (0..VOCAB).map(|t| model(t, 0.3, 0)).collect();
        for seed in 0..500 {
            let plain = two_tokens(seed, 0, false, 1, &targets, &drafters);
            for depth in 1..=4 {
                assert_eq!(two_tokens(seed, depth, false, 1, &targets, &drafters), plain, "seed {seed} depth {depth}");
            }
        }
    }

    #[test]
    fn greedy_accepts_the_largest_logit_only() {
        let draft = Draft { token: 4, drawn_from: Some(model(0, 0.1, 0)) };
        assert_eq!(judge(&Choice::Token(4), &draft, 0, 0), Verdict::Accepted);
        assert_eq!(judge(&Choice::Token(5), &draft, 0, 0), Verdict::Replaced(5));
    }

    #[test]
    fn a_drafter_equal_to_the_target_is_always_right() {
        let p = model(3, 0.2, 0);
        for seed in 0..1000 {
            let token = p.draw(uniform(seed, 9, Purpose::Draft));
            let draft = Draft { token, drawn_from: Some(p.clone()) };
            assert_eq!(judge(&Choice::Among(&p), &draft, seed, 9), Verdict::Accepted);
        }
    }

    #[test]
    fn a_draft_without_target_probability_never_stands() {
        let p = Distribution::from_weights([(0, 1.0), (1, 0.0), (2, 1.0)]).unwrap();
        let q = Distribution::from_weights([(1, 1.0)]).unwrap();
        for seed in 0..200 {
            let draft = Draft { token: 1, drawn_from: Some(q.clone()) };
            assert!(matches!(judge(&Choice::Among(&p), &draft, seed, 0), Verdict::Replaced(0 | 2)));
        }
    }
}
