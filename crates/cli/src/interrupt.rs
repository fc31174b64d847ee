//! Ctrl-C as a question that long work asks, instead of the end of the program.

use std::{
    io::Write as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use anyhow::Context as _;

/// Exit code of a program that was interrupted.
const INTERRUPTED: i32 = 130;

/// Whether Ctrl-C was pressed since somebody last asked. Pressed again before anybody does, it ends the program: what is
/// at work then does not ask.
#[derive(Debug, Clone, Default)]
pub(crate) struct Interrupt {
    pressed: Arc<AtomicBool>,
}

impl Interrupt {
    /// From here on Ctrl-C no longer ends the program by itself; `notice` is what the first press answers at once.
    ///
    /// # Errors
    /// The system has no room for a thread or refuses the handler.
    pub(crate) fn watch(notice: Option<&'static str>) -> anyhow::Result<Self> {
        let interrupt = Self::default();
        let pressed = Arc::clone(&interrupt.pressed);
        let failed = "cannot watch for Ctrl-C";
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().context(failed)?;
        let mut presses = {
            let _entered = runtime.enter();
            tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt()).context(failed)?
        };
        let watch = move || {
            while runtime.block_on(presses.recv()).is_some() {
                if pressed.swap(true, Ordering::Relaxed) {
                    std::process::exit(INTERRUPTED);
                }
                if let Some(notice) = notice {
                    drop(writeln!(anstream::stderr(), "{notice}"));
                }
            }
        };
        thread::Builder::new().name("ctrl-c".to_owned()).spawn(watch).context(failed)?;
        Ok(interrupt)
    }

    /// Whether it was pressed; it is then as if it had not been.
    pub(crate) fn take(&self) -> bool {
        self.pressed.swap(false, Ordering::Relaxed)
    }

    /// Whether it was pressed.
    pub(crate) fn pressed(&self) -> bool {
        self.pressed.load(Ordering::Relaxed)
    }
}
