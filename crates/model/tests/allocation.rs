//! A step allocates nothing once the buffers have been touched: prefill, decoding, verification and drafting.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod harness;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

use glimmer_model::{HiddenSource, Limits, Model, Options};
use glimmer_tensor::{Step, cpu::Cpu};
use harness::{Goldens, Sequence, micro};

/// Counts allocations of all threads.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

#[allow(unsafe_code, reason = "a global allocator is an unsafe trait; every call is passed on unchanged")]
// SAFETY: every method forwards to the system allocator with the arguments that it was given.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`; the pointer came from the system allocator.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `realloc`; the pointer came from the system allocator.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_step_allocates_nothing() {
    let checkpoint = micro();
    let tokens = Goldens::open("data/goldens/micro/recall_400.safetensors").tokens("input_ids");
    let limits = Limits::for_sequences(2, 256, 128, 2);
    let mut model = Model::load(Cpu::new(2), &checkpoint, limits, Options::default()).unwrap();
    let mut steps = Vec::new();
    let mut sequence = Sequence::new(&limits, 1);
    let mut vector = vec![0.0; model.config().vocab_size];
    let mut passes = [0; 2];
    for pass in &mut passes {
        sequence.position = 0;
        sequence.fold = 0;
        steps.clear();
        steps.push(sequence.step(&tokens[..128], 2));
        steps.push(sequence.step(&tokens[128..180], 1));
        steps.push(sequence.step(&tokens[180..181], 1));
        let mut verify = Step::default();
        sequence.add(&mut verify, 181, &tokens[181..184], 1, 3);
        steps.push(verify);
        let mut fold = Step::default();
        Sequence { fold: 2, ..sequence.clone() }.add(&mut fold, 184, &tokens[184..187], 1, 3);
        steps.push(fold);
        let drafts = [
            sequence.draft(0, &tokens[1..129], HiddenSource::Trunk, 0, 2),
            sequence.draft(128, &tokens[129..181], HiddenSource::Trunk, 0, 1),
            sequence.draft(180, &tokens[181..182], HiddenSource::Trunk, 0, 1),
        ];
        let mut chain = sequence.draft(181, &[7], HiddenSource::Draft, 0, 1);
        let mut shared = chain.clone();
        shared.shared = Some(vec![0]);
        chain.source[0] = 0;
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for (step, draft) in steps.iter().zip(drafts.iter().map(Some).chain([None, None])) {
            model.forward(step, &mut ()).unwrap();
            model.logits(0, &mut vector).unwrap();
            if let Some(draft) = draft {
                model.draft(draft, &mut ()).unwrap();
                model.draft_logits(0, &mut vector).unwrap();
            }
        }
        model.draft(&chain, &mut ()).unwrap();
        model.draft(&shared, &mut ()).unwrap();
        *pass = ALLOCATIONS.load(Ordering::Relaxed) - before;
    }
    assert_eq!(passes[1], 0, "the first pass allocated {} times", passes[0]);
}
