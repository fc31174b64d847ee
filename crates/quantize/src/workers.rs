//! Independent tasks on a few threads, results in the order of the tasks.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::Result;

/// Runs `task` for every index of `0..count` on up to `workers` threads (the calling one among them). Each thread holds one
/// task at a time. The results do not depend on the number of threads if the tasks do not.
///
/// # Errors
/// The error of the first task, by index, that failed.
pub(crate) fn run<T: Send>(count: usize, workers: usize, task: impl Fn(usize) -> Result<T> + Sync) -> Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<Result<T>>>> = (0..count).map(|_| Mutex::new(None)).collect();
    let work = || loop {
        let i = next.fetch_add(1, Ordering::Relaxed);
        let Some(slot) = results.get(i) else { break };
        let result = task(i);
        if result.is_err() {
            // Tasks that nobody has begun are pointless now.
            next.store(count, Ordering::Relaxed);
        }
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
    };
    std::thread::scope(|scope| {
        for _ in 1..workers.min(count) {
            scope.spawn(work);
        }
        work();
    });
    results.into_iter().filter_map(|slot| slot.into_inner().unwrap_or_else(PoisonError::into_inner)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn results_are_in_order_and_an_error_ends_the_run() {
        for workers in [1, 2, 5] {
            assert_eq!(run(7, workers, |i| Ok(i * i)).unwrap(), [0, 1, 4, 9, 16, 25, 36]);
            let failed = run(7, workers, |i| if i == 3 { Err(Error::Interrupted) } else { Ok(i) });
            assert!(matches!(failed, Err(Error::Interrupted)));
        }
        assert!(run(0, 2, Ok).unwrap().is_empty());
    }
}
