//! Independent tasks on a few threads, results in the order of the tasks.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use glimmer_tensor::cpu::Pool;

use crate::error::Result;

/// Runs `task` for every index of `0..count` on up to `workers` threads and hands the results over in order, on the calling
/// thread, while later tasks are running. Each thread holds one task at a time and lends it `inner` threads, itself among
/// them (`None`: it is alone). What is handed over does not depend on the number of threads if the tasks do not.
///
/// # Errors
/// The error of the first task, by index, that failed, or of `consume`; tasks that have not begun are then left out.
pub(crate) fn run<T: Send>(
    count: usize,
    workers: usize,
    inner: usize,
    task: impl Fn(usize, Option<&Pool>) -> Result<T> + Sync,
    mut consume: impl FnMut(T) -> Result<()>,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let (sender, results) = mpsc::channel::<(usize, Result<T>)>();
    std::thread::scope(|scope| {
        for _ in 0..workers.clamp(1, count.max(1)) {
            let (sender, next, task) = (sender.clone(), &next, &task);
            scope.spawn(move || {
                let threads = (inner > 1).then(|| Pool::new(inner));
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= count || sender.send((i, task(i, threads.as_ref()))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        let mut early: BTreeMap<usize, Result<T>> = BTreeMap::new();
        for expected in 0..count {
            let result = loop {
                if let Some(result) = early.remove(&expected) {
                    break result;
                }
                let Ok((i, result)) = results.recv() else {
                    // Only a panic ends the threads early, and the scope passes it on.
                    return Ok(());
                };
                early.insert(i, result);
            };
            if let Err(error) = result.and_then(&mut consume) {
                next.store(count, Ordering::Relaxed);
                return Err(error);
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn results_are_in_order_and_an_error_ends_the_run() {
        for workers in [1, 2, 5] {
            let mut seen = Vec::new();
            let mut collect = |x| {
                seen.push(x);
                Ok(())
            };
            run(7, workers, 1, |i, _| Ok(i * i), &mut collect).unwrap();
            assert_eq!(seen, [0, 1, 4, 9, 16, 25, 36]);
            let mut sum = 0;
            let failed = run(
                7,
                workers,
                2,
                |i, _| if i == 3 { Err(Error::NoCalibration) } else { Ok(i) },
                |x| {
                    sum += x;
                    Ok(())
                },
            );
            assert!(matches!(failed, Err(Error::NoCalibration)) && sum == 3);
            let stopped = run(7, workers, 1, |i, _| Ok(i), |x| if x == 2 { Err(Error::Interrupted) } else { Ok(()) });
            assert!(matches!(stopped, Err(Error::Interrupted)));
        }
        run(0, 2, 1, |i, _| Ok(i), |_| Ok(())).unwrap();
    }
}
