//! Frames that wait to be written one behind the other.
//!
//! A write leads the processor through so much of the kernel that hardly anything of the server is left in its nearest caches,
//! code least of all, and the next token's way from the engine to its frame is slow again. So the streams of a thread put
//! their frames on its shelf; they are written when 32 of them lie there or nothing else is to do. Invariant: what lies on a
//! shelf is written by whoever fills it up or by a task that was made for it, or dropped with that task. A thread drives one
//! runtime at a time.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most frames that wait for each other.
const BATCH: usize = 32;

/// Most buffers that a thread keeps.
const SPARE: usize = 2 * BATCH;

/// Most bytes of a buffer that is kept.
const SPARE_BYTES: usize = 16 << 10;

/// Has a frame to write.
pub(crate) trait Waiting: Send + Sync {
    /// Writes it, as far as that does not have to wait.
    fn write(&self);
}

#[derive(Default)]
struct Shelf(Mutex<Lying>);

#[derive(Default)]
struct Lying {
    frames: Vec<Arc<dyn Waiting>>,
    /// A task will write what lies here.
    expected: bool,
}

thread_local! {
    static SHELF: Arc<Shelf> = Arc::default();
    static BUFFERS: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// Lets something write soon. For tasks alone.
pub(crate) fn put(waiting: Arc<dyn Waiting>) {
    SHELF.with(|shelf| {
        let mut lying = shelf.lying();
        lying.frames.push(waiting);
        let full = lying.frames.len() >= BATCH;
        let unexpected = !full && !std::mem::replace(&mut lying.expected, true);
        drop(lying);
        if full {
            shelf.write();
        } else if unexpected {
            let emptying = Emptying(Some(Arc::clone(shelf)));
            tokio::spawn(emptying.run());
        }
    });
}

impl Shelf {
    fn lying(&self) -> MutexGuard<'_, Lying> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Vec<Arc<dyn Waiting>> {
        std::mem::replace(&mut self.lying().frames, Vec::with_capacity(BATCH))
    }

    fn write(&self) {
        for waiting in self.take() {
            waiting.write();
        }
    }
}

/// What empties a shelf that does not fill up.
struct Emptying(Option<Arc<Shelf>>);

impl Emptying {
    async fn run(mut self) {
        // Behind everything that is ready to run.
        tokio::task::yield_now().await;
        if let Some(shelf) = self.0.take() {
            shelf.lying().expected = false;
            shelf.write();
        }
    }
}

impl Drop for Emptying {
    /// The runtime has ended before: so have the streams.
    fn drop(&mut self) {
        if let Some(shelf) = self.0.take() {
            shelf.lying().expected = false;
            drop(shelf.take());
        }
    }
}

/// An empty buffer, the one that this thread used last.
pub(crate) fn buffer() -> Vec<u8> {
    BUFFERS.with_borrow_mut(Vec::pop).unwrap_or_else(|| Vec::with_capacity(1 << 9))
}

/// Gives back a buffer that is no longer used.
pub(crate) fn give_back(mut buffer: Vec<u8>) {
    BUFFERS.with_borrow_mut(|buffers| {
        if buffers.len() < SPARE && buffer.capacity() <= SPARE_BYTES {
            buffer.clear();
            buffers.push(buffer);
        }
    });
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[derive(Default)]
    struct Counted(AtomicUsize);

    impl Waiting for Counted {
        fn write(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn put_some(count: usize) -> Arc<Counted> {
        let counted = Arc::new(Counted::default());
        (0..count).for_each(|_| put(Arc::<Counted>::clone(&counted)));
        counted
    }

    #[tokio::test]
    async fn a_full_shelf_is_written_at_once_and_another_when_nothing_else_is_to_do() {
        for (count, at_once) in [(1, 0), (BATCH - 1, 0), (BATCH, BATCH), (2 * BATCH + 5, 2 * BATCH)] {
            let counted = put_some(count);
            assert_eq!(counted.0.load(Ordering::SeqCst), at_once, "{count} frames");
            let started = std::time::Instant::now();
            while counted.0.load(Ordering::SeqCst) < count {
                assert!(started.elapsed().as_secs() < 10, "{count} frames");
                tokio::task::yield_now().await;
            }
            assert_eq!(Arc::strong_count(&counted), 1);
        }
    }

    #[test]
    fn a_runtime_that_ends_leaves_nothing_behind_and_another_writes_again() {
        for last in [false, false, true] {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let counted = runtime.block_on(async { put_some(3) });
            assert_eq!(counted.0.load(Ordering::SeqCst), 0);
            if last {
                runtime.block_on(async {
                    while counted.0.load(Ordering::SeqCst) < 3 {
                        tokio::task::yield_now().await;
                    }
                });
            }
            drop(runtime);
            assert_eq!((counted.0.load(Ordering::SeqCst), Arc::strong_count(&counted)), (if last { 3 } else { 0 }, 1));
        }
    }

    #[test]
    fn buffers_come_back_empty_unless_they_are_large() {
        let mut small = buffer();
        small.extend_from_slice(b"text");
        let place = small.as_ptr();
        give_back(small);
        let again = buffer();
        assert_eq!((again.as_ptr(), again.len()), (place, 0));
        give_back(Vec::with_capacity(SPARE_BYTES + 1));
        assert!(buffer().capacity() <= SPARE_BYTES);
    }
}
