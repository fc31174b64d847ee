//! With drafts and without: the same tokens, or the same distribution of them.

use super::*;

fn sampling() -> impl Strategy<Value = Sampling> {
    let choice = (
        prop_oneof![Just(0.0f32), Just(0.7), Just(1.4)],
        prop_oneof![Just(None), Just(Some(0u32)), Just(Some(2)), Just(Some(9))],
        prop_oneof![Just(1.0f32), Just(0.8)],
        prop_oneof![Just(0.0f32), Just(0.1)],
        any::<i64>(),
    );
    let penalties = prop_oneof![Just((0.0f32, 0.0f32, 1.0f32)), (-2.0f32..2.0, -2.0f32..2.0, 0.5f32..2.0)];
    let token = 0u32..VOCABULARY as u32;
    let words = prop::collection::vec(prop::collection::vec(token.clone(), 1..4), 0..12);
    let bias = prop::collection::vec((token, -5.0f32..5.0), 0..4);
    // All but a few.
    let forbidden = prop::option::of(prop::collection::btree_set(3..VOCABULARY as u32, 1..6));
    (choice, penalties, words, bias, forbidden).prop_map(|(choice, penalties, bad_words, logit_bias, forbidden)| {
        Sampling {
            temperature: choice.0,
            top_k: choice.1,
            top_p: choice.2,
            min_p: choice.3,
            seed: Some(choice.4),
            presence_penalty: penalties.0,
            frequency_penalty: penalties.1,
            repetition_penalty: penalties.2,
            bad_words,
            logit_bias,
            allowed_tokens: forbidden.map(|f| (0..VOCABULARY as u32).filter(|token| !f.contains(token)).collect()),
        }
    })
}

fn case() -> impl Strategy<Value = Case> {
    let limits = (1u32..40, 0u32..12, any::<bool>(), prop::collection::vec(0u32..VOCABULARY as u32, 0..2));
    let opener = prop::option::of(8u32..VOCABULARY as u32);
    let reasoning = (any::<bool>(), prop::option::of(0u32..12), prop::collection::vec(3u32..8, 0..3), opener);
    let constraint = prop::option::of((any::<u64>(), 0usize..12));
    let logprobs = prop_oneof![Just(None), Just(Some(0u32)), Just(Some(3)), Just(Some(VOCABULARY as u32))];
    (sampling(), limits, reasoning, constraint, logprobs, any::<u64>()).prop_map(
        |(sampling, (max_tokens, min_tokens, ignore_eos, stop_tokens), reasoning, constraint, logprobs, table)| {
            let mut case = Case::new(max_tokens);
            case.request.sampling = sampling;
            case.request.limits.min_tokens = min_tokens;
            case.request.limits.ignore_eos = ignore_eos;
            case.request.limits.stop_tokens = stop_tokens;
            case.request.logprobs = logprobs;
            case.request.starts_in_reasoning = reasoning.0;
            case.request.thinking_budget = reasoning.1;
            let sequence = [&reasoning.2[..], &[THINK_END]].concat();
            let end = ReasoningEnd::with_sequence(THINK_END, sequence).unwrap();
            case.rules.reasoning_end = Some(end.with_opener(reasoning.3));
            case.constraint = constraint;
            case.table = table;
            case
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    /// Everything at once: tokens, log-probabilities, the end and what is left behind do not depend on drafts.
    #[test]
    fn drafts_change_nothing_but_the_number_of_steps(
        case in case(),
        depth in 1usize..8,
        wrong in prop_oneof![Just(0u64), Just(15), Just(60)],
        seed: u64,
    ) {
        let plain = tell(&case, |_| Vec::new());
        prop_assert_eq!(plain.accepted, 0);
        let ids = plain.ids();
        let told = tell(&case, |output| undrawn(&nearly(&ids, output.len(), depth, wrong, seed)));
        prop_assert_eq!(&told.tokens, &plain.tokens);
        prop_assert_eq!(&told.finish, &plain.finish);
        prop_assert_eq!(&told.state, &plain.state);
        if wrong == 0 && ids.len() > 2 {
            prop_assert!(told.accepted > 0, "right drafts stand");
        }
    }

    /// Tokens that a backend finds are those that the logits give, and nobody reads the logits then.
    #[test]
    fn tokens_found_elsewhere_change_nothing(
        case in case(),
        depth in 0usize..6,
        wrong in prop_oneof![Just(0u64), Just(15), Just(60)],
        seed: u64,
    ) {
        let mut case = case;
        if seed.is_multiple_of(4) {
            case.request.logprobs = None;
            case.request.sampling.temperature = 0.0;
        }
        let plain = tell(&case, |_| Vec::new());
        let ids = plain.ids();
        for finds in [Finds::Nothing, Finds::Largest, Finds::Drawn] {
            let mut given = 0;
            let told = tell_asking(
                &case,
                &mut |context, row| table(case.table, context, row),
                &mut |output| undrawn(&nearly(&ids, output.len(), depth, wrong, seed)),
                Some((finds, &mut given)),
            );
            prop_assert_eq!(&told.tokens, &plain.tokens);
            prop_assert_eq!(&told.finish, &plain.finish);
            prop_assert_eq!(&told.state, &plain.state);
            let may = finds >= if case.request.sampling.is_greedy() { Finds::Largest } else { Finds::Drawn };
            prop_assert!(given == 0 || may && case.request.logprobs.is_none());
        }
    }

    /// Greedy requests yield the same tokens whatever the drafts were drawn from.
    #[test]
    fn drawn_drafts_change_nothing_for_greedy_requests(case in case(), depth in 1usize..5, seed: u64) {
        let mut case = case;
        case.request.sampling.temperature = 0.0;
        let plain = tell(&case, |_| Vec::new());
        let ids = plain.ids();
        let told = tell(&case, |output| {
            let tokens = nearly(&ids, output.len(), depth, 15, seed);
            let from = |token| Distribution::from_weights([(token, 1.0), (token + 1, 1.0)]).unwrap();
            tokens.into_iter().map(|token| Draft { token, drawn_from: Some(from(token)) }).collect()
        });
        prop_assert_eq!((told.tokens, told.finish, told.state), (plain.tokens, plain.finish, plain.state));
    }
}

/// The cases above must reach every feature; a generator that only makes dull ones would prove nothing.
#[test]
fn the_random_cases_are_not_dull() {
    use proptest::{strategy::ValueTree, test_runner::TestRunner};
    let mut runner = TestRunner::deterministic();
    let mut ends = std::collections::BTreeMap::new();
    let (mut longer, mut shaped, mut left) = (0, 0, 0);
    for _ in 0..2000 {
        let case = case().new_tree(&mut runner).unwrap().current();
        let told = tell(&case, |_| Vec::new());
        let name = format!("{:?}", told.finish);
        *ends.entry(name.split('(').next().unwrap_or_default().to_owned()).or_insert(0) += 1;
        longer += usize::from(told.tokens.len() > 6);
        shaped += usize::from(case.constraint.is_some() && !told.state.contains("taken: []"));
        left += usize::from(case.request.starts_in_reasoning && told.ids().contains(&THINK_END));
    }
    assert!(["EndToken", "StopToken", "Length"].iter().all(|end| ends[*end] > 100), "{ends:?}");
    assert!(ends.get("Error").copied().unwrap_or(0) < 700, "{ends:?}");
    assert!(longer > 500 && shaped > 300 && left > 200, "{longer} {shaped} {left}");
}

const DRAWS: u64 = 100_000;
const TOKENS: usize = 32;

fn target(previous: u32) -> [f32; TOKENS] {
    std::array::from_fn(|token| ((token as u32 * 7 + previous * 13) % 32) as f32 * -0.09)
}

/// The distribution that temperature 0.8, min-p and the mask make of a row, from their definitions.
fn shaped(previous: u32, allows: impl Fn(u32) -> bool) -> Vec<f64> {
    let weights: Vec<f64> = target(previous)
        .iter()
        .zip(0u32..)
        .map(|(&logit, token)| if allows(token) { (f64::from(logit) / f64::from(0.8f32)).exp() } else { 0.0 })
        .collect();
    let best = weights.iter().copied().fold(0.0, f64::max);
    let kept: Vec<f64> = weights.iter().map(|&w| if w < 0.05 * best { 0.0 } else { w }).collect();
    let total: f64 = kept.iter().sum();
    kept.iter().map(|w| w / total).collect()
}

/// Allows two thirds of the tokens, by the last one taken in.
#[derive(Debug, Clone, Default)]
struct Thirds {
    taken: Vec<u32>,
}

fn third(last: Option<u32>, token: u32) -> bool {
    !(token + last.unwrap_or(0)).is_multiple_of(3)
}

impl Constraint for Thirds {
    fn mask(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        mask.fill(false);
        let last = self.taken.last().copied();
        (0..TOKENS as u32).filter(|&token| third(last, token)).for_each(|token| mask.allow(token));
        Ok(())
    }

    fn advance(&mut self, token: u32) -> Result<(), ConstraintError> {
        self.taken.push(token);
        Ok(())
    }

    fn rollback(&mut self, tokens: usize) -> Result<(), ConstraintError> {
        self.taken.truncate(self.taken.len() - tokens);
        Ok(())
    }

    fn valid_prefix(&mut self, _tokens: &[u32]) -> usize {
        0
    }
}

/// Two tokens of an answer by drafts from a drafter that knows nothing of the constraint.
fn two_tokens(
    request: &Request,
    rules: &AnswerRules,
    judge: &mut RowJudge,
    constrained: bool,
    depth: usize,
    drafters: Option<&[Distribution]>,
) -> [u32; 2] {
    let constraint = constrained.then(|| Box::<Thirds>::default() as Box<dyn Constraint>);
    let mut answer = Answer::new(request, rules, constraint).unwrap();
    let mut known = request.prompt.to_vec();
    let mut out = Vec::new();
    while out.len() < 2 {
        let mut drafts: Vec<Draft> = Vec::new();
        for _ in 0..depth {
            let previous = drafts.last().map_or(known[known.len() - 1], |draft| draft.token);
            let position = known.len() + drafts.len();
            drafts.push(match drafters {
                Some(drafters) => {
                    let q = drafters[previous as usize].clone();
                    Draft { token: q.draw(uniform(answer.seed(), position, Purpose::Draft)), drawn_from: Some(q) }
                }
                None => Draft { token: (previous * 5 + 3) % TOKENS as u32, drawn_from: None },
            });
        }
        answer.prepare(&drafts).unwrap();
        let mut row = |i: usize, row: &mut [f32]| {
            let previous = if i == 0 { known[known.len() - 1] } else { drafts[i - 1].token };
            row.copy_from_slice(&target(previous));
            Ok::<(), EngineError>(())
        };
        let first = out.len();
        answer.judge(judge, &known, &drafts, &mut row, &mut out).unwrap();
        known.extend(out[first..].iter().map(|token| token.id));
    }
    [out[0].id, out[1].id]
}

/// Through the whole path, constraint included: a draft that the constraint rejects before the step must still be worth
/// what a rejected draft is worth, or the tokens that the drafter likes would come too seldom.
#[test]
fn the_distribution_is_that_of_the_target_at_every_depth() {
    let rules = AnswerRules { vocabulary: TOKENS, context: 100, end_tokens: vec![], reasoning_end: None };
    let drafters: Vec<Distribution> = (0..TOKENS as u32)
        .map(|previous| {
            let weight = |token: u32| (-f64::from((token * 5 + previous * 3) % 32) * 0.15).exp();
            Distribution::from_weights((0..TOKENS as u32).map(|token| (token, weight(token)))).unwrap()
        })
        .collect();
    let mut judge = RowJudge::new(TOKENS);
    let start = 4;
    for constrained in [false, true] {
        let allows = |last: Option<u32>, token: u32| !constrained || third(last, token);
        let first = shaped(start, |token| allows(None, token));
        let mut second = vec![0.0; TOKENS];
        for (p, x) in first.iter().zip(0u32..) {
            let next = shaped(x, |token| allows(Some(x), token));
            second.iter_mut().zip(next).for_each(|(sum, q)| *sum += p * q);
        }
        for drawn in [false, true] {
            for depth in 0..=4 {
                let mut counts = [vec![0.0; TOKENS], vec![0.0; TOKENS]];
                let mut request = Request::new(vec![start], 90);
                request.sampling.temperature = 0.8;
                request.sampling.min_p = 0.05;
                for seed in 0..DRAWS {
                    request.sampling.seed = Some(seed as i64);
                    let drafters = drawn.then_some(&drafters[..]);
                    let tokens = two_tokens(&request, &rules, &mut judge, constrained, depth, drafters);
                    for (counts, token) in counts.iter_mut().zip(tokens) {
                        counts[token as usize] += 1.0;
                    }
                }
                let what = format!("depth {depth}, drawn {drawn}, constrained {constrained}");
                assert_drawn(&counts[0], &first, &format!("first token, {what}"));
                assert_drawn(&counts[1], &second, &format!("second token, {what}"));
            }
        }
    }
}
