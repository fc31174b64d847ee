//! Judging rows allocates nothing once its buffers have been touched: greedy, sampled, constrained and forced.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use glimmer_engine::{
    Answer, AnswerRules, EngineError, Request, RowJudge, Sampling,
    constraint::{Constraint, ConstraintError, TokenMask},
    speculate::Draft,
    thinking::ReasoningEnd,
};

/// Counts the allocations of the thread that asks for it.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

#[allow(unsafe_code, reason = "a global allocator is an unsafe trait; every call is passed on unchanged")]
// SAFETY: every method forwards to the system allocator with the arguments that it was given.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`; the pointer came from the system allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const VOCABULARY: usize = 20_000;
const STEPS: usize = 40;

/// Allows the even tokens.
#[derive(Debug)]
struct Even;

impl Constraint for Even {
    fn mask(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        mask.words_mut().fill(0x5555_5555_5555_5555);
        (VOCABULARY as u32..VOCABULARY as u32 + 64).for_each(|token| mask.forbid(token));
        Ok(())
    }

    fn advance(&mut self, _token: u32) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn rollback(&mut self, _tokens: usize) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn valid_prefix(&mut self, tokens: &[u32]) -> usize {
        tokens.iter().take_while(|token| token.is_multiple_of(2)).count()
    }
}

/// Allocations of all steps behind the first few.
fn allocations(request: &Request, constraint: Option<Box<dyn Constraint>>) -> usize {
    let rules = AnswerRules {
        vocabulary: VOCABULARY,
        context: 10_000,
        end_tokens: vec![],
        reasoning_end: Some(ReasoningEnd::new(3)),
    };
    let mut answer = Answer::new(request, &rules, constraint).unwrap();
    let mut judge = RowJudge::new(VOCABULARY + 64);
    let drafts: Vec<Draft> = [8, 9, 4].map(|token| Draft { token, drawn_from: None }).into();
    let (mut known, mut out) = (request.prompt.to_vec(), Vec::with_capacity(STEPS * 4));
    known.reserve(STEPS * 4);
    let mut counted = 0;
    for step in 0..STEPS {
        let before = ALLOCATIONS.get();
        answer.prepare(&drafts).unwrap();
        let first = out.len();
        let mut row = |i: usize, row: &mut [f32]| {
            row.iter_mut().enumerate().for_each(|(token, logit)| *logit = (token * 31 % 1009) as f32 / 100.0);
            row[[8, 9, 4, 7][i]] = 40.0;
            Ok::<(), EngineError>(())
        };
        answer.judge(&mut judge, &known, &drafts, &mut row, &mut out).unwrap();
        known.extend(out[first..].iter().map(|token| token.id));
        // The budget ends within the first steps, where the shape begins.
        if step >= 10 {
            counted += ALLOCATIONS.get() - before;
        }
    }
    assert!(out.len() > STEPS + STEPS / 2, "drafts stand");
    counted
}

#[test]
fn judging_rows_allocates_nothing() {
    let greedy = Request::new(vec![1, 2], 5000);
    assert_eq!(allocations(&greedy, None), 0, "greedy");
    let mut forced = greedy.clone();
    forced.starts_in_reasoning = true;
    forced.thinking_budget = Some(3);
    assert_eq!(allocations(&forced, Some(Box::new(Even))), 0, "constrained behind a budget");
    let mut banned = greedy.clone();
    banned.sampling.bad_words = vec![vec![8, 9], vec![5]];
    banned.sampling.allowed_tokens = Some((0..100).collect());
    banned.limits.min_tokens = 4000;
    assert_eq!(allocations(&banned, None), 0, "bans");
    for (top_k, top_p, min_p) in [(None, 1.0, 0.0), (Some(40), 1.0, 0.0), (None, 0.9, 0.0), (Some(500), 0.95, 0.01)] {
        let mut sampled = greedy.clone();
        sampled.sampling = Sampling { temperature: 1.0, top_k, top_p, min_p, seed: Some(1), ..Sampling::default() };
        assert_eq!(allocations(&sampled, None), 0, "top_k {top_k:?}, top_p {top_p}, min_p {min_p}");
    }
}
