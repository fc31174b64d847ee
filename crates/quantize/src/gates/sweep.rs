//! Work on many tensors by several threads, with results in the order of the input.

use std::{
    num::NonZero,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

/// More threads than this read from the disk, not faster.
const MAX_WORKERS: usize = 16;

/// Applies `work` to each item and returns the results in order; which thread does what has no influence on them.
pub(super) fn sweep<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let workers = workers().min(items.len()).max(1);
    let next = AtomicUsize::new(0);
    let run = || {
        let mut done = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(i) else { return done };
            done.push((i, work(item)));
        }
    };
    let mut results: Vec<(usize, R)> = thread::scope(|scope| {
        let threads: Vec<_> = (1..workers).map(|_| scope.spawn(run)).collect();
        let mut all = run();
        for thread in threads {
            match thread.join() {
                Ok(done) => all.extend(done),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        all
    });
    results.sort_by_key(|(i, _)| *i);
    results.into_iter().map(|(_, r)| r).collect()
}

/// Threads that a sweep uses at most.
pub(super) fn workers() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get).min(MAX_WORKERS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_the_order_of_the_items() {
        let items: Vec<usize> = (0..1000).collect();
        assert_eq!(sweep(&items, |i| i * i), items.iter().map(|i| i * i).collect::<Vec<_>>());
        assert!(sweep(&Vec::<usize>::new(), |i| *i).is_empty());
    }
}
