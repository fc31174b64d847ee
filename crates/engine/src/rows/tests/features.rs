//! Each feature by itself, at the rows of one step.

use super::*;

/// Tells an answer whose rows like the tokens of `likes` at their positions, else 5, else the lower the better.
fn liking(case: &Case, likes: &[u32], propose: impl Fn(&[u32]) -> Vec<u32>) -> Told {
    let prompt = case.request.prompt.len();
    tell_by(
        case,
        &mut |context, row| {
            row.fill(f32::NEG_INFINITY);
            row[..VOCABULARY].iter_mut().zip(0u8..).for_each(|(logit, token)| *logit = -f32::from(token) / 8.0);
            row[5] = 4.0;
            if let Some(&token) = likes.get(context.len() - prompt) {
                row[token as usize] = 8.0;
            }
        },
        &mut |output| undrawn(&propose(output)),
    )
}

/// Proposes what the rows like.
fn follow(likes: &[u32], depth: usize) -> impl Fn(&[u32]) -> Vec<u32> {
    move |output| likes.iter().skip(output.len()).take(depth).copied().collect()
}

/// Row `i` likes the `i`-th token.
fn rows_of(tokens: &[u32]) -> impl FnMut(usize, &mut [f32]) -> Result<(), EngineError> {
    move |i, row| {
        row.fill(-1.0);
        row[tokens[i] as usize] = 1.0;
        Ok(())
    }
}

fn ids(tokens: &[Token]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}

#[test]
fn ends_are_banned_at_each_row_by_its_own_index() {
    let mut case = Case::new(10);
    case.request.limits.min_tokens = 3;
    case.request.limits.stop_tokens = vec![9];
    for depth in 0..5 {
        for end in [END, OTHER_END, 9] {
            let likes = [end, 8, end, end, 8];
            let told = liking(&case, &likes, follow(&likes, depth));
            assert_eq!(told.ids(), [5, 8, 5, end], "end {end} at depth {depth}");
            let reason = if end == 9 { FinishReason::StopToken(9) } else { FinishReason::EndToken };
            assert_eq!(told.finish, reason);
        }
    }
}

#[test]
fn what_follows_the_end_is_cut_and_not_counted() {
    let case = Case::new(4);
    let (mut answer, mut judge, mut out) = (case.answer(), RowJudge::new(PADDED), Vec::new());
    let (drafts, mut rows) = (undrawn(&[8, END, 9]), rows_of(&[8, END, 9, 9]));
    let judged = answer.judge(&mut judge, &[5, 6, 7], &drafts, &mut rows, &mut out).unwrap();
    assert_eq!(judged, Judged { accepted: 2, judged: 2, finish: Some(FinishReason::EndToken) });
    assert_eq!(ids(&out), [8, END]);

    let (mut answer, mut out) = (case.answer(), Vec::new());
    assert_eq!(answer.useful_drafts(3), 3);
    let (drafts, mut rows) = (undrawn(&[8, 8, 9]), rows_of(&[8, 8, 8, 8]));
    let judged = answer.judge(&mut judge, &[5, 6, 7], &drafts, &mut rows, &mut out).unwrap();
    assert_eq!(judged, Judged { accepted: 2, judged: 3, finish: None });
    assert_eq!(answer.useful_drafts(6), 0);
    let judged = answer.judge(&mut judge, &[5, 6, 7, 8, 8, 8], &[], &mut rows_of(&[8]), &mut out).unwrap();
    assert_eq!(judged.finish, Some(FinishReason::Length));
    assert_eq!(out.len(), 4);
}

#[test]
fn the_models_own_ends_can_be_ignored_and_the_requests_not() {
    let mut case = Case::new(6);
    case.request.limits.ignore_eos = true;
    case.request.limits.stop_tokens = vec![OTHER_END];
    let likes = [END, 8, OTHER_END];
    let told = liking(&case, &likes, follow(&likes, 2));
    assert_eq!((told.ids(), told.finish), (vec![END, 8, OTHER_END], FinishReason::StopToken(OTHER_END)));
}

#[test]
fn a_budget_is_forced_at_every_row_and_the_marker_is_not_part_of_the_shape() {
    let mut case = Case::new(12);
    case.request.starts_in_reasoning = true;
    case.request.thinking_budget = Some(2);
    case.rules.reasoning_end = Some(ReasoningEnd::with_sequence(THINK_END, vec![7, THINK_END]).unwrap());
    case.constraint = Some((3, 4));
    let plain = tell(&case, |_| Vec::new()).ids();
    assert_eq!(plain[2..4], [7, THINK_END]);
    assert!(plain.len() > 6);

    // All of it in one step: two free rows, two forced ones, then rows of the shape.
    let mut answer = case.answer();
    assert_eq!(answer.prepare(&undrawn(&plain[..6])).unwrap(), 6);
    let masks = answer.masks();
    assert_eq!(masks[..4], [RowMask::Any, RowMask::Any, RowMask::Forced(7), RowMask::Forced(THINK_END)]);
    let mut mock = Mock { seed: 3, taken: Vec::new(), length: 4 };
    for (mask, token) in masks[4..].iter().zip(&plain[4..]) {
        let mut expected = TokenMask::all(VOCABULARY);
        mock.mask(&mut expected).unwrap();
        assert_eq!(mask, &RowMask::Only(expected));
        mock.advance(*token).unwrap();
    }
    let told = tell(&case, |output| undrawn(&nearly(&plain, output.len(), 6, 0, 0)));
    assert_eq!(told.ids(), plain);
    let shaped: Vec<u32> = plain[4..].iter().copied().filter(|&token| token > OTHER_END).collect();
    assert!(told.state.contains(&format!("taken: {shaped:?}")), "{} {plain:?}", told.state);
}

#[test]
fn a_tool_call_inside_reasoning_begins_the_shape_where_the_shape_can_begin_with_it() {
    let mock = Mock { seed: 3, taken: Vec::new(), length: 4 };
    let (can, cannot): (Vec<u32>, Vec<u32>) = (3..VOCABULARY as u32).partition(|&token| mock.allows(token));
    let mut case = Case::new(8);
    case.request.starts_in_reasoning = true;
    case.constraint = Some((3, 4));

    // The shape takes the opener in as its first token, whether it was a draft or not.
    case.rules.reasoning_end = Some(ReasoningEnd::new(THINK_END).with_opener(Some(can[0])));
    let likes = [if can[0] == 3 { 4 } else { 3 }, can[0]];
    let plain = liking(&case, &likes, |_| Vec::new());
    assert_eq!(plain.ids()[..2], likes);
    assert!(plain.state.contains(&format!("taken: [{}", can[0])), "{}", plain.state);
    let drafted = liking(&case, &likes, follow(&likes, 2));
    assert_eq!((drafted.ids(), drafted.state), (plain.ids(), plain.state));

    // One that the shape cannot begin with does not come, however much the model likes it.
    case.rules.reasoning_end = Some(ReasoningEnd::new(THINK_END).with_opener(Some(cannot[0])));
    let told = liking(&case, &[cannot[0], THINK_END], follow(&[cannot[0], THINK_END], 2));
    assert!(told.ids()[0] != cannot[0], "{told:?}");
    let mut answer = case.answer();
    assert_eq!(answer.prepare(&undrawn(&[cannot[0]])).unwrap(), 0, "nor is such a draft worth a row");
}

#[test]
fn drafts_that_cannot_come_get_no_rows_and_still_count() {
    let mut case = Case::new(12);
    case.constraint = Some((3, 6));
    let plain = tell(&case, |_| Vec::new()).ids();
    let mock = Mock { seed: 3, taken: plain[..2].to_vec(), length: 6 };
    let wrong = (0..VOCABULARY as u32).find(|&token| !mock.allows(token)).unwrap();
    let drafts = undrawn(&[plain[0], plain[1], wrong, plain[3]]);
    let mut answer = case.answer();
    assert_eq!(answer.prepare(&drafts).unwrap(), 2);
    let mut out = Vec::new();
    let context = [&case.request.prompt[..], &plain[..2]].concat();
    let mut row = |i: usize, row: &mut [f32]| {
        table(case.table, &context[..3 + i], row);
        Ok::<(), EngineError>(())
    };
    let judged = answer.judge(&mut RowJudge::new(PADDED), &[5, 6, 7], &drafts, &mut row, &mut out).unwrap();
    assert_eq!(judged, Judged { accepted: 2, judged: 4, finish: None });
    assert_eq!(ids(&out), plain[..3]);

    // Masks of other drafts are not used for these.
    let other = undrawn(&[wrong, plain[1], wrong, plain[3]]);
    let (mut answer, mut out) = (case.answer(), Vec::new());
    answer.prepare(&other).unwrap();
    let judged = answer.judge(&mut RowJudge::new(PADDED), &[5, 6, 7], &drafts, &mut row, &mut out).unwrap();
    assert_eq!((judged.accepted, ids(&out)), (2, plain[..3].to_vec()));

    // A used-up budget rejects drafts the same way.
    let mut case = Case::new(12);
    case.request.starts_in_reasoning = true;
    case.request.thinking_budget = Some(1);
    assert_eq!(case.answer().prepare(&undrawn(&[8, 9, 9])).unwrap(), 1);
    assert_eq!(case.answer().prepare(&undrawn(&[8, THINK_END, 9])).unwrap(), 3);
}

#[test]
fn a_complete_shape_takes_end_tokens_alone_and_is_left_alone() {
    let mut case = Case::new(9);
    case.constraint = Some((3, 2));
    let told = tell(&case, |_| Vec::new());
    assert_eq!(told.finish, FinishReason::EndToken);
    assert!(told.tokens.len() <= 3);
    // However short: a complete shape has nothing left to say.
    case.request.limits.min_tokens = 9;
    let short = tell(&case, |_| Vec::new());
    assert_eq!((short.tokens.len(), &short.finish), (3, &FinishReason::EndToken));
    case.request.limits.min_tokens = 0;
    case.request.limits.ignore_eos = true;
    let told = tell(&case, |output| undrawn(&[END; 4][..output.len() % 5]));
    assert_eq!((told.tokens.len(), &told.finish), (9, &FinishReason::Length));
    let ids = told.ids();
    let first = ids.iter().position(|&token| token <= OTHER_END).unwrap();
    assert!(ids[first..].iter().all(|&token| token <= OTHER_END), "{ids:?}");
}

#[test]
fn bad_words_and_penalties_see_the_drafts_before_a_row() {
    let mut case = Case::new(6);
    case.request.sampling.bad_words = vec![vec![8, 9, 10], vec![11], vec![7, 8]];
    let likes = [8, 9, 10, 11, 9, 10];
    for depth in 0..6 {
        // The prompt ends with 7, which is not output: the word 7, 8 does not apply at the first token.
        assert_eq!(liking(&case, &likes, follow(&likes, depth)).ids(), [8, 9, 5, 5, 9, 10], "depth {depth}");
    }
    let mut case = Case::new(5);
    case.request.sampling.frequency_penalty = 1.5;
    for depth in 0..5 {
        // Each 8 costs 1.5: the fourth would be at 8 - 4.5 against 5 at 4.
        assert_eq!(liking(&case, &[8; 5], follow(&[8; 5], depth)).ids(), [8, 8, 8, 5, 8], "depth {depth}");
    }
}

#[test]
fn only_allowed_tokens_come() {
    let mut case = Case::new(3);
    case.request.sampling.allowed_tokens = Some(vec![9, 10]);
    assert_eq!(liking(&case, &[8, 10, 8], follow(&[8, 10, 8], 2)).ids(), [9, 10, 9]);
}

#[test]
fn log_probabilities_are_those_of_the_raw_row_of_each_token() {
    let mut case = Case::new(6);
    case.request.logprobs = Some(2);
    case.request.sampling.logit_bias = vec![(8, 100.0)];
    case.request.sampling.temperature = 0.5;
    case.request.sampling.seed = Some(3);
    let told = tell(&case, |_| undrawn(&[8, 8]));
    assert_eq!((told.ids(), told.accepted), (vec![8; 6], 4));
    let mut context = case.request.prompt.to_vec();
    for token in &told.tokens {
        let mut row = [0.0; PADDED];
        table(case.table, &context, &mut row);
        let expected: Logprobs = Reader::default().read(&row, token.id, 2).unwrap();
        assert_eq!(token.logprobs.as_deref(), Some(&expected));
        context.push(token.id);
    }
}

#[test]
fn a_bad_row_ends_one_answer_and_keeps_what_came_before_it() {
    let mut case = Case::new(9);
    let mut out = Vec::new();
    let mut rows = |i: usize, row: &mut [f32]| {
        row.fill(0.0);
        row[8] = if i == 1 { f32::NAN } else { 1.0 };
        Ok::<(), EngineError>(())
    };
    let mut judge = RowJudge::new(PADDED);
    let judged = case.answer().judge(&mut judge, &[5, 6, 7], &undrawn(&[8, 8]), &mut rows, &mut out).unwrap();
    assert_eq!((judged.accepted, out.len()), (1, 1));
    let Some(FinishReason::Error(RequestError::Internal(text))) = judged.finish else { panic!("{judged:?}") };
    assert!(text.contains("position 4"), "{text}");

    // A mask does not hide it.
    case.request.sampling.allowed_tokens = Some(vec![9]);
    let mut rows = |_: usize, row: &mut [f32]| {
        row.fill(1.0);
        row[8] = f32::NAN;
        Ok::<(), EngineError>(())
    };
    let judged = case.answer().judge(&mut judge, &[5, 6, 7], &[], &mut rows, &mut out).unwrap();
    assert!(matches!(judged.finish, Some(FinishReason::Error(_))));

    // A sound row of which the request takes every token is the request's fault.
    let mut rows = |_: usize, row: &mut [f32]| {
        row.fill(1.0);
        row[9] = f32::NEG_INFINITY;
        Ok::<(), EngineError>(())
    };
    let judged = case.answer().judge(&mut judge, &[5, 6, 7], &[], &mut rows, &mut out).unwrap();
    assert_eq!(judged.finish, Some(FinishReason::Error(RequestError::Excluded(3))));
}

#[test]
fn errors_of_the_rows_are_passed_on() {
    let mut row = |_: usize, _: &mut [f32]| Err("no row");
    let judged = Case::new(9).answer().judge(&mut RowJudge::new(PADDED), &[5, 6, 7], &[], &mut row, &mut Vec::new());
    assert_eq!(judged, Err("no row"));
}

#[test]
fn a_shape_or_budget_needs_an_end_of_reasoning() {
    let mut case = Case::new(9);
    case.rules.reasoning_end = None;
    case.request.starts_in_reasoning = true;
    assert!(Answer::new(&case.request, &case.rules, None).is_ok());
    case.request.thinking_budget = Some(4);
    let error = Answer::new(&case.request, &case.rules, None).unwrap_err().to_string();
    assert!(error.contains("starts_in_reasoning"), "{error}");
}

#[test]
fn acceptance_by_decree_does_not_look_at_the_logits() {
    let mut case = Case::new(9000);
    case.rules.context = 10_000;
    let rates = SyntheticAcceptance::from_rates(vec![0.75, 0.25]).unwrap();
    let mut judge = RowJudge::new(PADDED).with_synthetic(rates);
    let mut answer = case.answer();
    let (mut known, mut steps, mut accepted) = (vec![5, 6, 7], 0, 0);
    while known.len() < 2000 {
        let mut out = Vec::new();
        let drafts = undrawn(&[9, 10]);
        let judged = answer.judge(&mut judge, &known, &drafts, &mut rows_of(&[8; 3]), &mut out).unwrap();
        known.extend(ids(&out));
        steps += 1;
        accepted += judged.accepted;
    }
    // 1000 steps of one draft in the mean, with a variance of 1/2: four standard deviations.
    let mean = accepted as f64 / f64::from(steps);
    assert!((mean - 1.0).abs() < 0.09, "{mean}");
}
