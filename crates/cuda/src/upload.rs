//! Weights from the host's memory to the device, as fast as the bus takes them.
//!
//! One thread that copies from mapped files is slower than the bus, and a copy from memory that is not pinned makes the driver
//! copy once more. So several threads each take a tensor, copy it piece by piece into pinned memory of their own and send the
//! pieces in a stream of their own; INT4 goes through the device's layout kernel there. Nothing else is launched before all has
//! arrived: [`Kernels`](crate::launch::Kernels) calls [`Uploads::settle`] in front of every launch.

#![allow(unsafe_code, reason = "the driver's interface is C")]

use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

use cudarc::driver::sys;
use glimmer_checkpoint::Bytes;

use crate::{
    device::{Device, check},
    error::{CudaError, Result},
    graph::between_captures,
    launch::{Arguments, Grid, Kernel, Launch, enqueue},
    memory::{Allocator, Memory, Pinned},
};

/// Threads at most; one more begins when each has this many tensors waiting.
const THREADS: usize = 12;
const FOR_ANOTHER: usize = 2;

/// Bytes of a piece, and pieces of a thread: one is filled while the other is sent.
const PIECE: usize = 4 << 20;
const PIECES: usize = 2;

/// Tensors that wait at most; who brings more waits.
const WAITING: usize = 64;

/// A tensor on its way.
#[derive(Debug)]
pub(crate) enum Job {
    /// Bytes as they are.
    Plain {
        /// From.
        bytes: Bytes,
        /// To, from the beginning.
        to: Memory,
    },
    /// INT4 as stored, into the layout of the products.
    Int4 {
        /// `[out, columns / 8]` words.
        codes: Bytes,
        /// `[out, columns / 128]` bf16.
        scales: Bytes,
        /// Rows and columns.
        shape: [usize; 2],
        /// The layout kernel: raw codes and scales, rows, columns, result.
        kernel: Kernel,
        /// To.
        to: Memory,
    },
}

/// The way of a device's weights.
#[derive(Debug)]
pub(crate) struct Uploads {
    device: Device,
    /// Whether anything was given since the last [`Self::settle`].
    open: AtomicBool,
    crew: Mutex<Option<Crew>>,
}

#[derive(Debug)]
struct Crew {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Jobs that have not arrived, waiting ones among them.
    under_way: usize,
    closing: bool,
    error: Option<CudaError>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

impl Uploads {
    pub(crate) fn new(device: Device) -> Self {
        Self { device, open: AtomicBool::new(false), crew: Mutex::new(None) }
    }

    /// Takes a tensor; it arrives by the next [`Self::settle`].
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub(crate) fn give(&self, job: Job) -> Result<()> {
        let mut crew = self.crew.lock().unwrap_or_else(PoisonError::into_inner);
        let crew = match &mut *crew {
            Some(crew) => crew,
            none => none.insert(Crew { shared: Arc::default(), threads: Vec::new() }),
        };
        self.open.store(true, Ordering::Relaxed);
        let mut state = crew.shared.lock();
        while state.jobs.len() >= WAITING {
            state = crew.shared.wait(state);
        }
        state.jobs.push_back(job);
        state.under_way += 1;
        let waiting = state.jobs.len();
        drop(state);
        crew.shared.changed.notify_all();
        crew.suit(waiting, &self.device)
    }

    /// Waits until all that was given has arrived.
    ///
    /// # Errors
    /// What went wrong on the way.
    pub(crate) fn settle(&self) -> Result<()> {
        if !self.open.load(Ordering::Relaxed) {
            return Ok(());
        }
        let crew = self.crew.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(crew) = &*crew else { return Ok(()) };
        let mut state = crew.shared.lock();
        while state.under_way > 0 {
            state = crew.shared.wait(state);
        }
        self.open.store(false, Ordering::Relaxed);
        state.error.take().map_or(Ok(()), Err)
    }

    /// As [`Self::settle`], and gives back threads and pinned memory; later tensors start others.
    ///
    /// # Errors
    /// As [`Self::settle`].
    pub(crate) fn end(&self) -> Result<()> {
        let settled = self.settle();
        drop(self.crew.lock().unwrap_or_else(PoisonError::into_inner).take());
        settled
    }
}

impl Crew {
    /// As many threads as so many waiting tensors are worth.
    fn suit(&mut self, waiting: usize, device: &Device) -> Result<()> {
        let most = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS);
        if self.threads.len() >= most || waiting <= FOR_ANOTHER * self.threads.len() {
            return Ok(());
        }
        let (shared, device) = (Arc::clone(&self.shared), device.clone());
        let body = move || work(&shared, &device);
        let thread = std::thread::Builder::new().name("weights".to_owned()).spawn(body);
        self.threads.push(thread.map_err(|error| CudaError::Library { what: format!("a thread: {error}") })?);
        Ok(())
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A panic of the thread has nothing left to report to.
            let _ended = thread.join();
        }
    }
}

/// Takes jobs until there are none, waits for its stream, reports them, and begins again.
fn work(shared: &Shared, device: &Device) {
    let mut lane = Lane::new(device);
    let mut sent = 0;
    let mut state = shared.lock();
    loop {
        if let Some(job) = state.jobs.pop_front() {
            drop(state);
            shared.changed.notify_all();
            let done = match &mut lane {
                Ok(lane) => lane.carry(&job),
                Err(_) => Ok(()),
            };
            sent += 1;
            state = shared.lock();
            if let Err(error) = done {
                state.error.get_or_insert(error);
            }
        } else if sent > 0 {
            drop(state);
            let arrived = match &lane {
                Ok(lane) => lane.arrive(),
                Err(_) => Ok(()),
            };
            state = shared.lock();
            if let Err(error) = arrived {
                state.error.get_or_insert(error);
            }
            if lane.is_err() {
                let again = std::mem::replace(&mut lane, Lane::new(device));
                state.error = state.error.take().or(again.err());
            }
            state.under_way -= std::mem::take(&mut sent);
            shared.changed.notify_all();
        } else if state.closing {
            return;
        } else {
            state = shared.wait(state);
        }
    }
}

/// What a thread has of its own.
#[derive(Debug)]
struct Lane {
    device: Device,
    stream: sys::CUstream,
    pieces: [Pinned; PIECES],
    turn: usize,
    /// INT4 as stored.
    raw: Option<Memory>,
}

impl Lane {
    fn new(device: &Device) -> Result<Self> {
        device.bind()?;
        let pieces = [Pinned::new(device, PIECE)?, Pinned::new(device, PIECE)?];
        let mut stream = std::ptr::null_mut();
        let _turn = between_captures();
        // SAFETY: a pointer to a live local; flag 1 is a stream that does not wait for the default one.
        unsafe { check("cuStreamCreate", sys::cuStreamCreate(&raw mut stream, 1))? };
        Ok(Self { device: device.clone(), stream, pieces, turn: 0, raw: None })
    }

    fn carry(&mut self, job: &Job) -> Result<()> {
        match job {
            Job::Plain { bytes, to } => self.send(bytes.as_slice(), to, 0),
            Job::Int4 { codes, scales, shape: [out, columns], kernel, to } => {
                let (codes, scales) = (codes.as_slice(), scales.as_slice());
                let scale_at = codes.len().next_multiple_of(256);
                let raw = match self.raw.take().filter(|raw| raw.bytes() >= scale_at + scales.len()) {
                    Some(raw) => raw,
                    None => Allocator::alone(&self.device, "INT4 as stored", scale_at + scales.len())?,
                };
                self.send(codes, &raw, 0)?;
                self.send(scales, &raw, scale_at)?;
                let arguments = Arguments::new()
                    .with(raw.address())
                    .with(raw.address() + scale_at as u64)
                    .int(*out)
                    .int(*columns)
                    .with(to.address());
                let grid = Grid::new([(out * columns / 8).div_ceil(256), 1, 1], 256);
                self.raw = Some(raw);
                let launch = Launch { kernel: *kernel, grid, cluster: 1, early: false, arguments };
                enqueue(&self.device, self.stream, &launch)
            }
        }
    }

    fn send(&mut self, bytes: &[u8], to: &Memory, start: usize) -> Result<()> {
        for (i, piece) in bytes.chunks(PIECE).enumerate() {
            self.turn = (self.turn + 1) % PIECES;
            self.pieces[self.turn].send_in(self.stream, piece, to, start + i * PIECE)?;
        }
        Ok(())
    }

    /// Waits for all that was sent.
    fn arrive(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the stream lives as long as `self`.
        unsafe { check("cuStreamSynchronize", sys::cuStreamSynchronize(self.stream)) }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if self.arrive().is_ok() {
            let _turn = between_captures();
            // SAFETY: nothing is under way in the stream.
            unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}
