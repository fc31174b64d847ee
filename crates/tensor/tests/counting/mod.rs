//! An allocator that counts the allocations of chosen threads.

#![allow(unsafe_code, reason = "an allocator is an unsafe trait")]
#![allow(unreachable_pub, reason = "shared by test files")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::atomic::{AtomicUsize, Ordering},
};

use glimmer_tensor::Cpu;

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller vouches.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller vouches.
        unsafe { System.dealloc(pointer, layout) }
    }
}

thread_local! {
    /// Whether the thread's allocations count: those of the test harness come at times of their own.
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}

fn count() {
    if COUNTED.get() {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts the allocations of all threads of a device from now on.
pub fn count_threads(cpu: &Cpu) {
    let arrived = AtomicUsize::new(0);
    // Each task waits for the others, so every thread has one.
    cpu.pool().run(cpu.threads(), |_, _| {
        COUNTED.set(true);
        arrived.fetch_add(1, Ordering::SeqCst);
        while arrived.load(Ordering::SeqCst) < cpu.threads() {
            std::thread::yield_now();
        }
    });
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations so far.
pub fn allocations() -> usize {
    ALLOCATIONS.load(Ordering::Relaxed)
}
