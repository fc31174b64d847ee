//! A captured sequence of launches that is replayed as one.

#![allow(unsafe_code, reason = "the driver's interface is C")]

use std::{
    cell::Cell,
    sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use cudarc::driver::sys;

use crate::{
    device::{Device, check},
    error::Result,
};

/// A capture is lost when another thread frees memory of the context meanwhile, or does anything else that waits for all of its
/// streams. So captures, of which there may be several, and such calls take turns.
static TURNS: RwLock<()> = RwLock::new(());

thread_local! {
    /// Whether this thread captures.
    static CAPTURING: Cell<bool> = const { Cell::new(false) };
}

/// A capture's turn.
struct Capturing {
    _turn: RwLockReadGuard<'static, ()>,
}

impl Capturing {
    fn begin() -> Self {
        let turn = TURNS.read().unwrap_or_else(PoisonError::into_inner);
        CAPTURING.set(true);
        Self { _turn: turn }
    }
}

impl Drop for Capturing {
    fn drop(&mut self) {
        CAPTURING.set(false);
    }
}

/// The turn of a call that no capture survives, as long as it is held; none in a thread that captures itself, which would wait for
/// itself.
pub(crate) fn between_captures() -> Option<RwLockWriteGuard<'static, ()>> {
    (!CAPTURING.get()).then(|| TURNS.write().unwrap_or_else(PoisonError::into_inner))
}

/// Launches captured from the device's stream. What a kernel's arguments point to must still be there at a replay.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

// SAFETY: a graph may be launched from any thread, one at a time, which `&mut self` ensures.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures what `enqueue` gives to the stream; nothing of it runs now. It must neither wait nor allocate.
    ///
    /// # Errors
    /// What `enqueue` or the driver says.
    pub fn capture<E: From<crate::CudaError>>(
        device: &Device,
        enqueue: impl FnOnce() -> std::result::Result<(), E>,
    ) -> std::result::Result<Self, E> {
        device.bind()?;
        let stream = device.stream();
        let turn = Capturing::begin();
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and not capturing.
        unsafe { check("cuStreamBeginCapture", sys::cuStreamBeginCapture_v2(stream, mode))? };
        let enqueued = enqueue();
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: ends the capture begun above, also after a failure.
        let ended = unsafe { check("cuStreamEndCapture", sys::cuStreamEndCapture(stream, &raw mut graph)) };
        drop(turn);
        enqueued?;
        ended?;
        // SAFETY: the graph was just captured.
        let made =
            unsafe { check("cuGraphInstantiate", sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0)) };
        if let Err(error) = made {
            // SAFETY: nothing else refers to the graph.
            unsafe { sys::cuGraphDestroy(graph) };
            return Err(error.into());
        }
        Ok(Self { device: device.clone(), graph, executable })
    }

    /// Number of nodes.
    ///
    /// # Errors
    /// What the driver says.
    pub fn nodes(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: asks for the count only.
        unsafe { check("cuGraphGetNodes", sys::cuGraphGetNodes(self.graph, std::ptr::null_mut(), &raw mut count))? };
        Ok(count)
    }

    /// Enqueues all launches.
    ///
    /// # Errors
    /// What the driver says.
    pub fn launch(&mut self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the executable graph is alive.
        unsafe { check("cuGraphLaunch", sys::cuGraphLaunch(self.executable, self.device.stream())) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.synchronize().is_ok() {
            let _turn = between_captures();
            // SAFETY: the graph does not run any more.
            unsafe {
                sys::cuGraphExecDestroy(self.executable);
                sys::cuGraphDestroy(self.graph);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_no_capture_survives_waits_for_those_of_other_threads() {
        let freed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let capture = Capturing::begin();
            assert!(between_captures().is_none(), "a thread does not wait for itself");
            let waiting = scope.spawn(|| {
                let turn = between_captures();
                freed.store(true, Ordering::SeqCst);
                turn.is_some()
            });
            std::thread::sleep(Duration::from_millis(30));
            assert!(!freed.load(Ordering::SeqCst));
            drop(capture);
            assert!(waiting.join().unwrap());
        });
        assert!(between_captures().is_some());
    }
}
