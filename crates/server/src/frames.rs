//! A response body that is produced by an `async` block.
//!
//! The block writes into [`Frames::out`] and hands over what it has written with [`Frames::send`]; each call waits until the
//! connection has taken it, so a slow client holds back its own stream only. Whoever serves the response may poll the body for
//! its frames, or take it out of the response (`Produced::of`) and let the block write to the socket itself
//! (`Produced::straight`): as chunks of HTTP/1.1, with nothing between a token and the system call. Invariant: the block
//! lives inside the body, so a closed connection drops it and everything that it owns, at whatever point it is waiting.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use axum::http::Response;
use bytes::Bytes;

use crate::outbox;

/// Where chunks can be written.
pub(crate) trait Socket: Send + Sync {
    /// Takes `bytes` from `sent` on; ready when it has. It may take some and move `sent`, or the whole vector.
    fn poll_send(
        self: Arc<Self>,
        context: &mut Context<'_>,
        bytes: &mut Vec<u8>,
        sent: &mut usize,
    ) -> Poll<io::Result<()>>;
}

/// The sending side, inside the block.
pub struct Frames {
    way: Arc<Mutex<Way>>,
    /// A copy of the way's.
    socket: Option<Arc<dyn Socket>>,
    /// Room for a chunk's length, then the frame; without the room where nothing was written.
    out: Vec<u8>,
    stage: Stage,
}

impl std::fmt::Debug for Frames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Frames({:?}, straight: {})", self.stage, self.socket.is_some())
    }
}

/// The client cannot be reached any more.
#[derive(Debug)]
pub struct Gone;

/// How far the frame in [`Frames::out`] has come.
#[derive(Debug, Clone, Copy)]
enum Stage {
    Written,
    /// Waits to be taken as a frame of the body.
    Handed,
    /// Made a chunk, and sent up to here.
    Sent(usize),
}

/// Most bytes of a chunk's length: its digits and the end of the line.
const ROOM: usize = 2 * size_of::<usize>() + 2;

/// The way of frames, seen by both sides.
#[derive(Default)]
struct Way {
    /// For whoever polls the body.
    frame: Option<Bytes>,
    socket: Option<Arc<dyn Socket>>,
    error: Option<io::Error>,
}

impl std::fmt::Debug for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Way(straight: {})", self.socket.is_some())
    }
}

/// The body, outside the block.
pub struct Produced {
    way: Arc<Mutex<Way>>,
    /// `None` once it has ended.
    block: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl std::fmt::Debug for Produced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Produced(ended: {})", self.block.is_none())
    }
}

/// The body while it can be polled or taken.
#[derive(Clone, Debug)]
struct Held(Arc<Mutex<Option<Produced>>>);

impl Produced {
    /// A body of the frames that `block` sends.
    pub fn new<F>(block: impl FnOnce(Frames) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let way = Arc::<Mutex<Way>>::default();
        let block = block(Frames { way: Arc::clone(&way), socket: None, out: Vec::new(), stage: Stage::Written });
        Self { way, block: Some(Box::pin(block)) }
    }

    /// As the body of a response.
    pub fn into_response(self) -> Response<axum::body::Body> {
        let held = Held(Arc::new(Mutex::new(Some(self))));
        let mut response = Response::new(axum::body::Body::new(held.clone()));
        response.extensions_mut().insert(held);
        response
    }

    /// Takes the body out of a response that has one.
    pub(crate) fn of<B>(response: &mut Response<B>) -> Option<Self> {
        response.extensions_mut().remove::<Held>().and_then(|held| lock(&held.0).take())
    }

    /// Lets the block write to a socket from now on. Nobody else may write to it while [`Produced::poll`] is pending.
    pub(crate) fn straight(&self, socket: Arc<dyn Socket>) {
        lock(&self.way).socket = Some(socket);
    }

    /// Drives the block, which writes to the socket; ready with its last frame, which it has not written.
    ///
    /// # Errors
    /// What the socket says.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        if let Some(block) = &mut self.block {
            ready!(block.as_mut().poll(context));
        }
        self.block = None;
        let way = &mut *lock(&self.way);
        Poll::Ready(way.error.take().map_or_else(|| Ok(way.frame.take()), Err))
    }

    /// Drives the block, which hands over its frames here.
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let Some(block) = &mut self.block else { return Poll::Ready(None) };
        let ended = block.as_mut().poll(context).is_ready();
        if ended {
            // Drop what the block owned before the last bytes are on the wire.
            self.block = None;
        }
        match lock(&self.way).frame.take() {
            Some(frame) => Poll::Ready(Some(frame)),
            None if ended => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}

impl Frames {
    /// Where the next frame is to be appended.
    pub fn out(&mut self) -> &mut Vec<u8> {
        if self.out.is_empty() {
            if self.out.capacity() == 0 {
                self.out = outbox::buffer();
            }
            self.out.resize(ROOM, 0);
        }
        &mut self.out
    }

    /// Whether nothing was written since the last frame.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.out.len() <= ROOM
    }

    /// Hands over what was written; ready when it was taken. Nothing is no frame.
    ///
    /// # Errors
    /// When there is nobody to take it; the block should end.
    pub fn send(&mut self) -> impl Future<Output = Result<(), Gone>> + Send + '_ {
        std::future::poll_fn(|context| self.poll_send(context))
    }

    /// Hands over the last frame.
    pub fn finish(self) {
        if !self.is_empty() {
            lock(&self.way).frame = Some(Bytes::copy_from_slice(&self.out[ROOM..]));
        }
    }

    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        if self.is_empty() {
            return Poll::Ready(Ok(()));
        }
        if self.socket.is_none() {
            ready!(self.poll_hand_over());
        }
        if let Some(socket) = &self.socket {
            if let Stage::Written = self.stage {
                self.stage = Stage::Sent(make_chunk(&mut self.out));
            }
            if let Stage::Sent(sent) = &mut self.stage
                && let Err(error) = ready!(Arc::clone(socket).poll_send(context, &mut self.out, sent))
            {
                lock(&self.way).error = Some(error);
                return Poll::Ready(Err(Gone));
            }
        }
        self.out.clear();
        self.stage = Stage::Written;
        Poll::Ready(Ok(()))
    }

    /// Gives the frame to whoever polls the body; ready when it was taken, or is to go straight.
    fn poll_hand_over(&mut self) -> Poll<()> {
        let way = &mut *lock(&self.way);
        if let Stage::Handed = self.stage {
            // The body is polled again only after it has returned the frame.
            return if way.frame.is_some() { Poll::Pending } else { Poll::Ready(()) };
        }
        self.socket = way.socket.clone();
        if self.socket.is_some() {
            return Poll::Ready(());
        }
        way.frame = Some(Bytes::copy_from_slice(&self.out[ROOM..]));
        self.stage = Stage::Handed;
        Poll::Pending
    }
}

/// Puts a chunk's length in front of a frame with [`ROOM`], and its end behind; returns where it begins.
fn make_chunk(out: &mut Vec<u8>) -> usize {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    let mut length = out.len() - ROOM;
    let mut start = ROOM - 2;
    out[start..ROOM].copy_from_slice(b"\r\n");
    while length > 0 {
        start -= 1;
        out[start] = HEX[length & 15];
        length >>= 4;
    }
    out.extend_from_slice(b"\r\n");
    start
}

impl http_body::Body for Held {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        let Some(body) = &mut *lock(&self.0) else { return Poll::Ready(None) };
        body.poll_next(context).map(|frame| frame.map(|frame| Ok(http_body::Frame::data(frame))))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    fn texts(texts: &'static [&'static str]) -> Produced {
        Produced::new(|mut frames| async move {
            for (index, text) in texts.iter().enumerate() {
                frames.out().extend_from_slice(text.as_bytes());
                if index + 1 < texts.len() && frames.send().await.is_err() {
                    return;
                }
            }
            frames.finish();
        })
    }

    #[tokio::test]
    async fn frames_come_in_order_and_singly() {
        let mut body = texts(&["a", "", "b", "c"]).into_response().into_body();
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
            frames.out().push(b'a');
            frames.send().await.unwrap();
            std::future::pending::<()>().await;
            drop(held);
        });
        let mut body = body.into_response().into_body();
        assert!(body.frame().await.is_some());
        assert_eq!(Arc::strong_count(&owned), 2);
        drop(body);
        assert_eq!(Arc::strong_count(&owned), 1);
    }

    /// Takes so many bytes at a time, every other time none, and fails when it has taken so many in all.
    #[derive(Debug)]
    struct Slow {
        taken: Mutex<(Vec<u8>, bool)>,
        step: usize,
        most: usize,
    }

    impl Socket for Slow {
        fn poll_send(
            self: Arc<Self>,
            context: &mut Context<'_>,
            bytes: &mut Vec<u8>,
            sent: &mut usize,
        ) -> Poll<io::Result<()>> {
            let (taken, busy) = &mut *lock(&self.taken);
            while *sent < bytes.len() {
                *busy = !*busy;
                if *busy {
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
                if taken.len() >= self.most {
                    return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
                }
                let count = self.step.min(bytes.len() - *sent);
                taken.extend_from_slice(&bytes[*sent..*sent + count]);
                *sent += count;
            }
            Poll::Ready(Ok(()))
        }
    }

    async fn straight(body: &mut Produced, step: usize, most: usize) -> (io::Result<Option<Bytes>>, Vec<u8>) {
        let socket = Arc::new(Slow { taken: Mutex::default(), step, most });
        body.straight(Arc::<Slow>::clone(&socket));
        let result = std::future::poll_fn(|context| body.poll(context)).await;
        let taken = std::mem::take(&mut lock(&socket.taken).0);
        (result, taken)
    }

    #[tokio::test]
    async fn a_socket_gets_chunks_however_little_it_takes() {
        for step in 1..30 {
            let mut body = texts(&["hello", "", "a chunk of 0x12 by", "last"]);
            let (last, taken) = straight(&mut body, step, 1000).await;
            assert_eq!(last.unwrap().unwrap(), "last");
            assert_eq!(String::from_utf8(taken).unwrap(), "5\r\nhello\r\n12\r\na chunk of 0x12 by\r\n");
        }
    }

    #[tokio::test]
    async fn the_first_frame_may_go_another_way() {
        let mut body = texts(&["first", "second", "last"]);
        let first = std::future::poll_fn(|context| body.poll_next(context)).await;
        assert_eq!(first.unwrap(), "first");
        let (last, taken) = straight(&mut body, 100, 1000).await;
        assert_eq!((last.unwrap().unwrap(), taken), (Bytes::from_static(b"last"), b"6\r\nsecond\r\n".to_vec()));
    }

    #[tokio::test]
    async fn a_broken_socket_is_an_error() {
        let mut body = texts(&["hello", "again", "last"]);
        let (result, taken) = straight(&mut body, 3, 7).await;
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(taken, b"5\r\nhello\r");
    }
}
