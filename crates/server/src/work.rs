//! Work that grows with a request's text: where it is done, how much of it at once, and that it ends with its client.
//!
//! Invariant: the text of one request at a time is more than [`LARGE`]; what encoding takes beside the text is so bounded
//! whatever clients send.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::error::ApiError;

/// Bodies below are prepared on the connection's own thread: it takes less time than a change of threads is worth.
const INLINE: usize = 32 << 10;
/// Texts above are worked on one at a time.
const LARGE: usize = 1 << 20;

/// What a piece of work is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weight {
    /// It reads a body of so many bytes, which takes little beside it; where there are pictures bodies are long.
    Body(usize),
    /// It computes on a text of so many bytes.
    Text(usize),
    /// It takes long, or waits for others, whatever the size of the text of so many bytes that it has as well.
    Heavy(usize),
}

/// Set once nobody waits for the work any more.
#[derive(Debug, Default)]
struct Client(Arc<AtomicBool>);

impl Drop for Client {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs work away from the connections' threads, unless it is small. The work is told when its client has gone.
///
/// # Errors
/// The work's own, and an internal error if it panics.
pub(crate) async fn off_thread<T: Send + 'static>(
    weight: Weight,
    work: impl FnOnce(&AtomicBool) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if matches!(weight, Weight::Body(bytes) | Weight::Text(bytes) if bytes <= INLINE) {
        return work(&AtomicBool::new(false));
    }
    let permits = permits(weight).await;
    let client = Client::default();
    let gone = Arc::clone(&client.0);
    let work = move || {
        let _permits = permits;
        if gone.load(Ordering::Relaxed) { Err(ApiError::retryable()) } else { work(&gone) }
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => {
            tracing::error!(%error, "preparing a request");
            Err(ApiError::internal())
        }
    }
}

/// Waits until there is room for the work. Heavy work need not compute, so that it is not counted against the cores.
async fn permits(weight: Weight) -> [Option<SemaphorePermit<'static>>; 2] {
    static ONE: Semaphore = Semaphore::const_new(1);
    static CORES: std::sync::OnceLock<Semaphore> = std::sync::OnceLock::new();
    let (text, heavy) = match weight {
        Weight::Body(_) => (0, false),
        Weight::Text(bytes) => (bytes, false),
        Weight::Heavy(bytes) => (bytes, true),
    };
    let cores =
        CORES.get_or_init(|| Semaphore::new(std::thread::available_parallelism().map_or(1, std::num::NonZero::get)));
    // The rarer one first: who waits for it must not keep a core from the others. Neither is ever closed.
    let one = if text > LARGE { ONE.acquire().await.ok() } else { None };
    let core = if heavy { None } else { cores.acquire().await.ok() };
    [one, core]
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn large_texts_take_turns_and_small_ones_pass_them() {
        static LARGE_NOW: AtomicUsize = AtomicUsize::new(0);
        let large = |_: &AtomicBool| {
            assert_eq!(LARGE_NOW.fetch_add(1, Ordering::SeqCst), 0, "another one is being worked on");
            std::thread::sleep(Duration::from_millis(50));
            LARGE_NOW.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        };
        let small = async {
            off_thread(Weight::Text(INLINE), |_| Ok(())).await.unwrap();
            off_thread(Weight::Heavy(INLINE), |_| Ok(())).await.unwrap();
            std::time::Instant::now()
        };
        let all = async {
            let [a, b] = [Weight::Text(LARGE + 1), Weight::Heavy(LARGE + 1)].map(|weight| off_thread(weight, large));
            let (a, b) = tokio::join!(a, b);
            a.and(b).unwrap();
            std::time::Instant::now()
        };
        let (small, large) = tokio::join!(small, all);
        assert!(small < large);
    }

    #[tokio::test]
    async fn work_hears_that_its_client_has_gone() {
        let (tell, told) = std::sync::mpsc::channel();
        let work = off_thread(Weight::Text(INLINE + 1), move |gone| {
            tell.send(()).unwrap();
            while !gone.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            tell.send(()).unwrap();
            Ok(())
        });
        assert!(tokio::time::timeout(Duration::from_millis(100), work).await.is_err());
        for _ in 0..2 {
            told.recv_timeout(Duration::from_secs(10)).unwrap();
        }
    }
}
