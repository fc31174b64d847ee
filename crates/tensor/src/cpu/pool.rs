//! A pool of threads for fork-join work of microseconds.
//!
//! A step has hundreds of joins, so a join must cost about as much as a cache miss: the calling thread works as well, tasks
//! are taken from a counter, and idle threads spin for a while before they park. A thread enters a call through a *gate*
//! (a bit that says whether the call is open, and the number of threads inside). The caller closes the gate when no task is
//! left and waits only for the threads inside: one that wakes late finds the gate shut and costs nothing.
//!
//! # Invariant
//! The work of a call is read only by threads inside the gate; the caller replaces it only when the gate is shut and empty.

#![allow(unsafe_code, reason = "the work of a call lives on the caller's stack")]

mod split;

use std::{
    any::Any,
    cell::{Cell, UnsafeCell},
    fmt,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

pub use split::{Chunks, Panel, Panels, Split};

use super::types::AlignedVec;

/// How long an idle thread spins before it parks.
const SPIN: Duration = Duration::from_micros(50);

/// The same when there are more threads in pools than cores.
const SHORT_SPIN: Duration = Duration::from_micros(2);

/// The gate's bit that says whether a call is open; the other bits count the threads inside.
const OPEN: usize = 1 << (usize::BITS - 1);

/// Threads of all pools of the process, callers included.
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Whether the thread is running a task.
    static WORKING: Cell<bool> = const { Cell::new(false) };
}

/// Memory of one thread of the pool, kept from task to task.
#[derive(Debug, Default)]
pub struct Scratch {
    floats: AlignedVec,
}

impl Scratch {
    fn len(&self) -> usize {
        self.floats.as_slice().len()
    }

    /// Slices of the given lengths, each starting at a cache line, with arbitrary contents. Grows the scratch only when it
    /// has never been that large.
    ///
    /// # Panics
    /// When memory cannot be had.
    pub fn floats<const N: usize>(&mut self, lens: [usize; N]) -> [&mut [f32]; N] {
        let total = lens.iter().map(|l| l.next_multiple_of(16)).sum();
        self.floats.grow("scratch of a thread", total).expect("there is memory for a thread's scratch");
        let mut rest = self.floats.as_mut_slice();
        lens.map(|len| {
            let (head, tail) = std::mem::take(&mut rest).split_at_mut(len.next_multiple_of(16));
            rest = tail;
            &mut head[..len]
        })
    }
}

type Work<'a> = dyn Fn(usize, &mut Scratch) + Sync + 'a;

/// The work of a call.
#[derive(Clone, Copy)]
struct Call {
    work: *const Work<'static>,
    tasks: usize,
}

/// What the threads of a pool share.
struct Shared {
    call: UnsafeCell<Option<Call>>,
    gate: AtomicUsize,
    /// Next task of the open call.
    next: AtomicUsize,
    /// Counts calls; a change wakes spinning threads.
    calls: AtomicUsize,
    stop: AtomicBool,
    /// Threads that have come up.
    started: AtomicUsize,
    /// Largest scratch of a thread.
    most: AtomicUsize,
    /// What the first task that panicked in the open call panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    workers: Vec<Worker>,
}

/// A thread's part of the shared state.
#[derive(Default)]
struct Worker {
    parked: AtomicBool,
    scratch: Mutex<Scratch>,
}

// SAFETY: `call` is written by the caller alone while nobody is inside the gate, and read inside the gate alone; the work it
// points to is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as for `Sync`; nothing in it belongs to a thread.
unsafe impl Send for Shared {}

/// Threads that run the tasks of one call at a time.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Held by the calling thread for a call.
    caller: Mutex<Scratch>,
    /// f32 that every thread's scratch has.
    reserved: AtomicUsize,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that a panic could leave half done is kept under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// A pool of `threads` threads, the caller of [`Pool::run`] among them (0 counts as 1). Threads that the system refuses
    /// are done without.
    pub fn new(threads: usize) -> Self {
        let others = threads.max(1) - 1;
        let shared = Arc::new(Shared {
            call: UnsafeCell::new(None),
            gate: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            calls: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            started: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            panic: Mutex::new(None),
            workers: (0..others).map(|_| Worker::default()).collect(),
        });
        let threads: Vec<_> = (0..others)
            .map_while(|index| {
                let shared = Arc::clone(&shared);
                thread::Builder::new()
                    .name(format!("glimmer-cpu-{}", index + 1))
                    .spawn(move || shared.serve(index))
                    .ok()
            })
            .collect();
        THREADS.fetch_add(threads.len() + 1, Ordering::Relaxed);
        // A thread allocates while it comes up; later would be in the middle of somebody's step.
        while shared.started.load(Ordering::Acquire) < threads.len() {
            thread::yield_now();
        }
        Self { shared, threads, caller: Mutex::default(), reserved: AtomicUsize::new(0) }
    }

    /// Number of threads, the caller among them.
    pub fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Makes every thread's scratch at least `floats` large.
    pub fn reserve(&self, floats: usize) {
        lock(&self.caller).floats([floats]);
        for worker in &self.shared.workers {
            lock(&worker.scratch).floats([floats]);
        }
        self.reserved.fetch_max(floats, Ordering::Relaxed);
    }

    /// Calls `work(task, scratch)` once for each `task` in `0..tasks` and returns when all are done. Which thread runs which
    /// task is not fixed, so a task's result must not depend on it. A call from inside a task runs on that thread alone.
    ///
    /// # Panics
    /// With a task's panic, when one panics: tasks that have not begun are left out, and no thread is working any more.
    pub fn run(&self, tasks: usize, work: impl Fn(usize, &mut Scratch) + Sync) {
        if WORKING.get() {
            let mut scratch = Scratch::default();
            (0..tasks).for_each(|task| work(task, &mut scratch));
            return;
        }
        let mut scratch = lock(&self.caller);
        if self.threads.is_empty() || tasks <= 1 {
            let _working = Working::begin();
            (0..tasks).for_each(|task| work(task, &mut scratch));
            return;
        }
        let shared = &*self.shared;
        let work: &Work<'_> = &work;
        // SAFETY: only the lifetime changes. The pointer is used inside the gate alone, and the gate is shut and empty
        // before this function returns or unwinds.
        let work: *const Work<'static> = unsafe { std::mem::transmute(work) };
        // SAFETY: the gate is shut and empty between calls, and `caller` is locked, so nobody else looks at the cell.
        unsafe { *shared.call.get() = Some(Call { work, tasks }) };
        shared.next.store(0, Ordering::Relaxed);
        shared.gate.store(OPEN, Ordering::Release);
        // Sequentially consistent with the other end in `wait`: either the thread sees this call or its flag is seen here.
        shared.calls.fetch_add(1, Ordering::SeqCst);
        self.wake(tasks - 1);
        shared.work(Call { work, tasks }, &mut scratch);
        shared.gate.fetch_and(!OPEN, Ordering::Relaxed);
        let mut spins = 0_u32;
        while shared.gate.load(Ordering::Acquire) != 0 {
            spins += 1;
            if spins.is_multiple_of(1 << 10) { thread::yield_now() } else { std::hint::spin_loop() }
        }
        // What one thread has needed, another one may need next time: growing together keeps memory from being asked for
        // in the middle of later work.
        let most = shared.most.fetch_max(scratch.len(), Ordering::Relaxed).max(scratch.len());
        drop(scratch);
        if most > self.reserved.load(Ordering::Relaxed) {
            self.reserve(most);
        }
        if let Some(panic) = lock(&shared.panic).take() {
            resume_unwind(panic);
        }
    }

    /// As [`Pool::run`], with one task for each piece of `outputs`, which the task may write.
    ///
    /// # Panics
    /// When a task panics, or when the parts of a tuple differ in number.
    #[allow(clippy::needless_pass_by_value, reason = "giving the value up is what makes its pieces exclusive")]
    pub fn split<S: Split>(&self, outputs: S, work: impl Fn(usize, S::Piece, &mut Scratch) + Sync) {
        self.run(outputs.pieces(), |task, scratch| {
            // SAFETY: `run` calls each task once, so no piece is handed out twice.
            let piece = unsafe { outputs.piece(task) };
            work(task, piece, scratch);
        });
    }

    /// Unparks up to `wanted` threads.
    fn wake(&self, wanted: usize) {
        for (worker, thread) in self.shared.workers.iter().zip(&self.threads).take(wanted) {
            if worker.parked.load(Ordering::SeqCst) {
                thread.thread().unpark();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.calls.fetch_add(1, Ordering::SeqCst);
        THREADS.fetch_sub(self.threads(), Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // Tasks' panics are caught, so there is none to be had here.
            drop(thread.join());
        }
    }
}

/// Marks the thread as running tasks, until dropped.
struct Working;

impl Working {
    fn begin() -> Self {
        WORKING.set(true);
        Self
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        WORKING.set(false);
    }
}

impl Shared {
    /// Life of a thread.
    fn serve(&self, index: usize) {
        let worker = &self.workers[index];
        self.started.fetch_add(1, Ordering::Release);
        let mut seen = 0;
        loop {
            seen = self.wait(worker, seen);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            if self.enter() {
                // SAFETY: this thread is inside the gate, so the caller keeps the call as it is.
                if let Some(call) = unsafe { *self.call.get() } {
                    let mut scratch = lock(&worker.scratch);
                    self.work(call, &mut scratch);
                    self.most.fetch_max(scratch.len(), Ordering::Relaxed);
                }
                self.gate.fetch_sub(1, Ordering::Release);
            }
        }
    }

    /// Waits until the number of calls is not `seen` and gives it.
    fn wait(&self, worker: &Worker, seen: usize) -> usize {
        let crowded = THREADS.load(Ordering::Relaxed) > cores();
        let patience = if crowded { SHORT_SPIN } else { SPIN };
        let start = Instant::now();
        loop {
            for _ in 0..64 {
                let calls = self.calls.load(Ordering::Acquire);
                if calls != seen {
                    return calls;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() > patience {
                break;
            }
        }
        worker.parked.store(true, Ordering::SeqCst);
        let calls = loop {
            let calls = self.calls.load(Ordering::SeqCst);
            if calls != seen {
                break calls;
            }
            thread::park();
        };
        worker.parked.store(false, Ordering::SeqCst);
        calls
    }

    /// Goes through the gate if it is open.
    fn enter(&self) -> bool {
        let more = |gate: usize| (gate & OPEN != 0).then_some(gate + 1);
        self.gate.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).is_ok()
    }

    /// Takes tasks until none is left. A panic ends the call and is kept for the caller.
    fn work(&self, call: Call, scratch: &mut Scratch) {
        let _working = Working::begin();
        // SAFETY: the caller waits until the gate is empty, and the caller itself is running this or waiting.
        let work = unsafe { &*call.work };
        let tasks = AssertUnwindSafe(|| {
            loop {
                let task = self.next.fetch_add(1, Ordering::Relaxed);
                if task >= call.tasks {
                    return;
                }
                work(task, scratch);
            }
        });
        if let Err(panic) = catch_unwind(tasks) {
            self.next.store(call.tasks, Ordering::Relaxed);
            lock(&self.panic).get_or_insert(panic);
        }
    }
}

/// Cores that this process may use.
fn cores() -> usize {
    static CORES: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    *CORES.get_or_init(|| thread::available_parallelism().map_or(1, usize::from))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn every_task_runs_once_on_any_number_of_threads() {
        for threads in [0, 1, 2, 3, 7] {
            let pool = Pool::new(threads);
            for round in 0..300 {
                let tasks = round % 23;
                let counts: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
                pool.run(tasks, |task, _| {
                    counts[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{threads} threads, {tasks} tasks");
            }
        }
    }

    #[test]
    fn threads_that_have_parked_take_part_again() {
        let pool = Pool::new(2);
        for _ in 0..5 {
            thread::sleep(Duration::from_millis(2));
            // Each task waits for the other one, so two threads are needed to get through.
            let arrived = AtomicUsize::new(0);
            pool.run(2, |_, _| {
                arrived.fetch_add(1, Ordering::SeqCst);
                while arrived.load(Ordering::SeqCst) < 2 {
                    thread::yield_now();
                }
            });
        }
    }

    #[test]
    fn pieces_are_disjoint_and_cover_everything() {
        let pool = Pool::new(3);
        let (mut list, mut grid) = (vec![0_u32; 10], vec![0.0_f32; 4 * 9]);
        pool.split(
            (Chunks::new(&mut list, 3), Panels::new(&mut grid, 4, 9, 1, 7, 2)),
            |task, (chunk, mut panel), _| {
                assert_eq!(chunk.len(), [3, 3, 3, 1][task]);
                assert_eq!((panel.start(), panel.width()), [(0, 2), (2, 2), (4, 2), (6, 1)][task]);
                chunk.fill(task as u32 + 1);
                for row in 0..panel.rows() {
                    panel.row_mut(row).iter_mut().for_each(|v| *v += (10 * row + task + 1) as f32);
                }
            },
        );
        assert_eq!(list, [1, 1, 1, 2, 2, 2, 3, 3, 3, 4]);
        for row in 0..4 {
            let expected: Vec<u32> = [0, 1, 1, 2, 2, 3, 3, 4, 0]
                .into_iter()
                .map(|t: u32| if t == 0 { 0 } else { (10 * row as u32) + t })
                .collect();
            let found: Vec<u32> = grid[row * 9..(row + 1) * 9].iter().map(|&v| v as u32).collect();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(3);
        for bad in [0, 5, 19] {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(20, |task, _| assert_ne!(task, bad, "task {task} fails"));
            }));
            let message = caught.unwrap_err().downcast::<String>().unwrap();
            assert!(message.contains(&format!("task {bad} fails")), "{message}");
            let sum = AtomicUsize::new(0);
            pool.run(20, |task, _| {
                sum.fetch_add(task, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 190);
        }
    }

    #[test]
    fn a_call_inside_a_task_runs_on_its_thread() {
        let pool = Pool::new(2);
        let sum = AtomicUsize::new(0);
        pool.run(4, |outer, _| {
            pool.run(3, |inner, _| {
                sum.fetch_add(10 * outer + inner, Ordering::Relaxed);
            });
        });
        assert_eq!(sum.into_inner(), 3 * 60 + 4 * 3);
    }

    #[test]
    fn pools_and_callers_side_by_side_do_not_disturb_each_other() {
        let shared = Pool::new(2);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let own = Pool::new(2);
                    for round in 1..100 {
                        for pool in [&own, &shared] {
                            let sum = AtomicUsize::new(0);
                            pool.run(round, |task, _| {
                                sum.fetch_add(task + 1, Ordering::Relaxed);
                            });
                            assert_eq!(sum.into_inner(), round * (round + 1) / 2);
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn scratch_slices_start_at_cache_lines_and_do_not_overlap() {
        let mut scratch = Scratch::default();
        let [a, b, c] = scratch.floats([5, 0, 33]);
        assert_eq!((a.len(), b.len(), c.len()), (5, 0, 33));
        assert_eq!(a.as_ptr().addr() % 64, 0);
        assert_eq!(c.as_ptr().addr() % 64, 0);
        a.fill(1.0);
        c.fill(2.0);
        assert!(a.iter().all(|&v| v < 1.5));
    }
}
