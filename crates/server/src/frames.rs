//! A response body that is produced by an `async` block.
//!
//! The block hands over frames with [`Frames::send`]; each call waits until the connection has taken the frame, so a slow
//! client holds back its own stream only. Invariant: the block lives inside the body, so a closed connection drops it and
//! everything that it owns, at whatever point it is waiting.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
/// The sending side, inside the block.
#[derive(Debug)]
pub struct Frames(Slot);

type Slot = Arc<Mutex<Option<Bytes>>>;

/// The body, outside the block.
pub struct Produced {
    slot: Slot,
    /// `None` once it has ended.
    block: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl std::fmt::Debug for Produced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Produced(ended: {})", self.block.is_none())
    }
}

impl Produced {
    /// A body of the frames that `block` sends.
    pub fn new<F>(block: impl FnOnce(Frames) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let slot = Slot::default();
        let block = block(Frames(Arc::clone(&slot)));
        Self { slot, block: Some(Box::pin(block)) }
    }

    /// As the body of a response.
    pub fn boxed(self) -> axum::body::Body {
        axum::body::Body::new(self)
    }
}

impl Frames {
    /// Hands a frame over; ready when it was taken. Empty frames are left out.
    pub fn send(&mut self, frame: Bytes) -> impl Future<Output = ()> + Send + '_ {
        let full = !frame.is_empty();
        if full {
            *lock(&self.0) = Some(frame);
        }
        // The body is polled again only after it has returned the frame.
        std::future::poll_fn(move |_| if full && lock(&self.0).is_some() { Poll::Pending } else { Poll::Ready(()) })
    }
}

impl http_body::Body for Produced {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        let Some(block) = &mut this.block else { return Poll::Ready(None) };
        let ended = block.as_mut().poll(context).is_ready();
        if ended {
            // Drop what the block owned before the last bytes are on the wire.
            this.block = None;
        }
        match lock(&this.slot).take() {
            Some(frame) => Poll::Ready(Some(Ok(http_body::Frame::data(frame)))),
            None if ended => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}

fn lock(slot: &Slot) -> std::sync::MutexGuard<'_, Option<Bytes>> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    #[tokio::test]
    async fn frames_come_in_order_and_singly() {
        let body = Produced::new(|mut frames| async move {
            for text in ["a", "", "b", "c"] {
                frames.send(Bytes::from_static(text.as_bytes())).await;
            }
        });
        let mut body = body.boxed();
        let mut seen = Vec::new();
        while let Some(frame) = body.frame().await {
            seen.push(frame.unwrap().into_data().unwrap());
        }
        assert_eq!(seen, ["a", "b", "c"]);
    }

    #[tokio::test]
    async fn a_dropped_body_drops_the_block_in_the_middle() {
        let owned = Arc::new(());
        let held = Arc::clone(&owned);
        let body = Produced::new(|mut frames| async move {
            frames.send(Bytes::from_static(b"a")).await;
            std::future::pending::<()>().await;
            drop(held);
        });
        let mut body = body.boxed();
        assert!(body.frame().await.is_some());
        assert_eq!(Arc::strong_count(&owned), 2);
        drop(body);
        assert_eq!(Arc::strong_count(&owned), 1);
    }
}
