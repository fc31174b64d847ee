//! Connections of a port: accepted, served one by one, and told when it is time to go.
//!
//! A connection is a task that does nothing but serve: with a thousand streams of which a step of the engine feeds hundreds, a
//! token waits for all that is done for the tokens before it, so whatever a task does each time that it wakes counts. HTTP is
//! hyper's; but once it has sent the head and the first frame of an answer that is produced piece by piece, the task lets the
//! answer write its chunks to the socket itself and returns to hyper for the last frame, or when the client does something.
//! The task is told of the end by a flag and one wake-up. Invariants: [`serve`] ends only after its last connection; bytes
//! are written past hyper only while hyper has written all of its own.

use std::convert::Infallible;
use std::future::{Future as _, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker, ready};

use axum::Router;
use axum::http::{Method, Request, Response, Version};
use axum::serve::Listener;
use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Notify, mpsc};

use crate::frames::{Produced, Socket};

/// Whether connections should end.
#[derive(Debug, Default)]
struct Closing {
    now: AtomicBool,
    told: Notify,
}

/// Accepts and serves until `stop` is ready, then lets open answers come to their ends.
pub(crate) async fn serve<L: Listener>(mut listener: L, router: Router, stop: impl Future<Output = ()>) {
    let closing = Arc::new(Closing::default());
    // Held by every connection, so that the channel closes with the last one.
    let (open, mut ended) = mpsc::channel::<()>(1);
    let mut stop = pin!(stop);
    loop {
        let stream = tokio::select! {
            (stream, _) = listener.accept() => stream,
            () = &mut stop => break,
        };
        let (router, closing, open) = (router.clone(), Arc::clone(&closing), open.clone());
        tokio::spawn(async move {
            connection(stream, router, &closing).await;
            drop(open);
        });
    }
    drop((listener, open));
    closing.now.store(true, Ordering::SeqCst);
    closing.told.notify_waiters();
    // Nothing is ever sent.
    let _closed = ended.recv().await;
}

async fn connection<Io>(stream: Io, router: Router, closing: &Closing)
where
    Io: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let link = Arc::new(Link::new(stream));
    let router = TowerToHyperService::new(router);
    let service = service_fn(|request| answer(Arc::clone(&link), router.clone(), request));
    let mut served = pin!(http1::Builder::new().serve_connection(TokioIo::new(End(Arc::clone(&link))), service));
    let mut told = pin!(closing.told.notified());
    let (mut doorbell, mut going, mut straight) = (None::<Doorbell>, false, None::<Produced>);
    let result = poll_fn(|context| {
        let doorbell = doorbell.get_or_insert_with(|| {
            // A task keeps its waker, so asking once is enough to be woken; the flag says why.
            let _ready_means_the_flag_is_set = told.as_mut().poll(context);
            Doorbell::new(context.waker())
        });
        if !going && closing.now.load(Ordering::SeqCst) {
            going = true;
            served.as_mut().graceful_shutdown();
            doorbell.ring();
        }
        loop {
            if doorbell.rang() {
                if let Poll::Ready(result) = served.as_mut().poll(&mut Context::from_waker(&doorbell.waker)) {
                    return Poll::Ready(result.map_err(|error| error.to_string()));
                }
                if let Some(begun) = straight.is_none().then(|| link.begun()).flatten() {
                    begun.straight(Arc::<Link<Io>>::clone(&link));
                    straight = Some(begun);
                }
            }
            let Some(produced) = &mut straight else { return Poll::Pending };
            match produced.poll(context) {
                Poll::Pending if doorbell.rings() => {}
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error.to_string())),
                Poll::Ready(Ok(last)) => {
                    straight = None;
                    *lock(&link.outlet) = Outlet::Last(last);
                    doorbell.ring();
                }
            }
        }
    });
    if let Err(error) = result.await {
        tracing::debug!(error, "a connection ended");
    }
}

/// Wakes a connection's task on behalf of hyper.
struct Doorbell {
    waker: Waker,
    bell: Arc<Bell>,
}

struct Bell {
    rung: AtomicBool,
    task: Waker,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Ordering::SeqCst);
        self.task.wake_by_ref();
    }
}

impl Doorbell {
    /// One that has been rung.
    fn new(task: &Waker) -> Self {
        let bell = Arc::new(Bell { rung: AtomicBool::new(true), task: task.clone() });
        Self { waker: Arc::clone(&bell).into(), bell }
    }

    fn ring(&self) {
        self.bell.rung.store(true, Ordering::SeqCst);
    }

    fn rings(&self) -> bool {
        self.bell.rung.load(Ordering::SeqCst)
    }

    fn rang(&self) -> bool {
        self.rings() && self.bell.rung.swap(false, Ordering::SeqCst)
    }
}

/// What hyper and the answer that is being streamed share of a connection.
struct Link<Io> {
    socket: Mutex<Shared<Io>>,
    outlet: Mutex<Outlet>,
}

struct Shared<Io> {
    io: Io,
    /// Whether hyper has nothing left to write.
    flushed: bool,
}

/// Where the answer is that is produced piece by piece, as its body at hyper sees it.
enum Outlet {
    /// It has not been asked for its first frame.
    New(Produced),
    /// Its first frame is on its way, or was not ready.
    Begun(Produced),
    /// It writes to the socket.
    Straight,
    /// It has ended with this frame.
    Last(Option<Bytes>),
}

impl<Io> Link<Io> {
    fn new(io: Io) -> Self {
        Self { socket: Mutex::new(Shared { io, flushed: false }), outlet: Mutex::new(Outlet::Last(None)) }
    }

    /// The answer that may write to the socket from now on.
    fn begun(&self) -> Option<Produced> {
        let outlet = &mut *lock(&self.outlet);
        if !matches!(outlet, Outlet::Begun(_)) || !lock(&self.socket).flushed {
            return None;
        }
        match std::mem::replace(outlet, Outlet::Straight) {
            Outlet::Begun(produced) => Some(produced),
            _ => None,
        }
    }
}

impl<Io: AsyncWrite + Send + Unpin> Socket for Link<Io> {
    fn poll_send(&self, context: &mut Context<'_>, bytes: &[u8], sent: &mut usize) -> Poll<io::Result<()>> {
        let io = &mut lock(&self.socket).io;
        while *sent < bytes.len() {
            match ready!(Pin::new(&mut *io).poll_write(context, &bytes[*sent..]))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => *sent += count,
            }
        }
        Pin::new(io).poll_flush(context)
    }
}

/// The end of a connection that hyper holds.
struct End<Io>(Arc<Link<Io>>);

impl<Io: AsyncRead + Unpin> AsyncRead for End<Io> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut lock(&self.0.socket).io).poll_read(context, buffer)
    }
}

impl<Io: AsyncWrite + Unpin> AsyncWrite for End<Io> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let shared = &mut *lock(&self.0.socket);
        shared.flushed = false;
        Pin::new(&mut shared.io).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let shared = &mut *lock(&self.0.socket);
        shared.flushed = false;
        Pin::new(&mut shared.io).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        lock(&self.0.socket).io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shared = &mut *lock(&self.0.socket);
        let flushed = Pin::new(&mut shared.io).poll_flush(context);
        // It is asked only once all that hyper had was written.
        shared.flushed = matches!(flushed, Poll::Ready(Ok(())));
        flushed
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut lock(&self.0.socket).io).poll_shutdown(context)
    }
}

/// The body of a response.
enum Outgoing<Io> {
    Whole(axum::body::Body),
    Pieces(Arc<Link<Io>>),
}

async fn answer<Io>(
    link: Arc<Link<Io>>,
    router: TowerToHyperService<Router>,
    request: Request<Incoming>,
) -> Result<Response<Outgoing<Io>>, Infallible> {
    // Chunks are of HTTP/1.1, and every answer to other methods is whole.
    let chunked = request.version() == Version::HTTP_11 && request.method() == Method::POST;
    let mut response = router.call(request).await?;
    let pieces = if chunked { Produced::of(&mut response) } else { None };
    Ok(match pieces {
        None => response.map(Outgoing::Whole),
        Some(produced) => {
            *lock(&link.outlet) = Outlet::New(produced);
            response.map(|_| Outgoing::Pieces(link))
        }
    })
}

impl<Io> Body for Outgoing<Io> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let link = match self.get_mut() {
            Self::Whole(body) => return Pin::new(body).poll_frame(context),
            Self::Pieces(link) => link,
        };
        let outlet = &mut *lock(&link.outlet);
        let frame = match std::mem::replace(outlet, Outlet::Last(None)) {
            Outlet::New(mut produced) => match produced.poll_next(context) {
                Poll::Ready(None) => None,
                Poll::Ready(frame) => {
                    *outlet = Outlet::Begun(produced);
                    frame
                }
                Poll::Pending => {
                    *outlet = Outlet::Begun(produced);
                    return Poll::Pending;
                }
            },
            other @ (Outlet::Begun(_) | Outlet::Straight) => {
                *outlet = other;
                return Poll::Pending;
            }
            Outlet::Last(frame) => frame,
        };
        Poll::Ready(frame.map(|frame| Ok(Frame::data(frame))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(body) if body.is_end_stream())
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Self::Whole(body) => body.size_hint(),
            Self::Pieces(_) => hyper::body::SizeHint::default(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
