//! How a long run tells its caller where it is, and how the caller stops it.

/// Receives the course of a run. `()` ignores it.
pub trait Progress {
    /// The whole run is `total` units of work, of which `done` were found finished.
    fn start(&mut self, total: u64, done: u64) {
        let _ = (total, done);
    }

    /// `units` more are done.
    fn advance(&mut self, units: u64) {
        let _ = units;
    }

    /// What is being done from now on (`layer 5 of 42: experts`).
    fn phase(&mut self, text: &str) {
        let _ = text;
    }

    /// Something that the caller should know before the work begins.
    fn note(&mut self, text: &str) {
        let _ = text;
    }

    /// Asked between steps, and after everything that has become durable: `false` ends the run with
    /// [`Error::Interrupted`](crate::error::Error::Interrupted), leaving a directory that can be resumed.
    fn proceed(&mut self) -> bool {
        true
    }
}

impl Progress for () {}
