//! Connections of a port: accepted, served one by one, and told when it is time to go.
//!
//! A connection is a task that does nothing but serve: with a thousand streams of which a step of the engine feeds hundreds, a
//! token waits for all that is done for the tokens before it, so whatever a task does each time that it wakes counts. HTTP is
//! hyper's; but once it has sent the head and the first frame of an answer that is produced piece by piece, the task lets the
//! answer write its chunks to the socket itself and returns to hyper for the last frame, or when the client does something.
//! The task is told of the end by a flag and one wake-up; the same way it hears, from one look at all connections every few
//! seconds, that its client has kept it waiting too long ([`Patience`]), so that no answer pays for a timer. Invariants: [`serve`] ends only after its last connection; bytes
//! are written past hyper only while hyper has written all of its own, and hyper writes only behind all that was handed over
//! past it.

use std::convert::Infallible;
use std::future::{Future as _, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker, ready};
use std::time::{Duration, Instant};

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
use crate::outbox::{self, Waiting};

/// Whether connections should end.
#[derive(Debug, Default)]
struct Closing {
    now: AtomicBool,
    told: Notify,
}

/// How long clients may keep a connection waiting. An answer, running or still to be read, is not bound by it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// For all of a request's head.
    pub(crate) head: Duration,
    /// For the next request, behind an answer.
    pub(crate) next: Duration,
    /// How often connections are looked at.
    pub(crate) look: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { head: Duration::from_secs(60), next: Duration::from_secs(600), look: Duration::from_secs(5) }
    }
}

/// See [`Link::grace`].
const GRACE: Duration = Duration::from_millis(250);

/// Accepts and serves until `stop` is ready, then lets open answers come to their ends.
pub(crate) async fn serve<L: Listener>(
    mut listener: L,
    router: Router,
    patience: Patience,
    stop: impl Future<Output = ()>,
) {
    let closing = Arc::new(Closing::default());
    // Held by every connection, so that the channel closes with the last one.
    let (open, mut ended) = mpsc::channel::<()>(1);
    let mut stop = pin!(stop);
    let mut links: Vec<Weak<Link<L::Io>>> = Vec::new();
    let mut look = tokio::time::interval(patience.look);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let stream = tokio::select! {
            (stream, _) = listener.accept() => stream,
            _ = look.tick() => {
                let now = Instant::now();
                links.retain(|link| link.upgrade().is_some_and(|link| link.look(patience, now)));
                continue;
            }
            () = &mut stop => break,
        };
        let link = Arc::new(Link::new(stream));
        links.push(Arc::downgrade(&link));
        let (router, closing, open) = (router.clone(), Arc::clone(&closing), open.clone());
        tokio::spawn(async move {
            connection(link, router, &closing).await;
            drop(open);
        });
    }
    drop((listener, open));
    closing.now.store(true, Ordering::SeqCst);
    closing.told.notify_waiters();
    // Nothing is ever sent.
    let _closed = ended.recv().await;
}

async fn connection<Io>(link: Arc<Link<Io>>, router: Router, closing: &Closing)
where
    Io: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let router = TowerToHyperService::new(router);
    let service = service_fn(|request| answer(Arc::clone(&link), router.clone(), request));
    let mut served = pin!(http1::Builder::new().serve_connection(TokioIo::new(End(Arc::clone(&link))), service));
    let mut told = pin!(closing.told.notified());
    let (mut doorbell, mut going, mut straight) = (None::<Doorbell<Io>>, false, None::<Produced>);
    let (mut grace, mut told_hyper) = (None::<Pin<Box<tokio::time::Sleep>>>, false);
    let result = poll_fn(|context| {
        let doorbell = doorbell.get_or_insert_with(|| {
            // A task keeps its waker, so asking once is enough to be woken; the flag says why.
            let _ready_means_the_flag_is_set = told.as_mut().poll(context);
            Doorbell::new(&link, context.waker())
        });
        if !going && closing.now.load(Ordering::SeqCst) {
            // The request of a client that has just come may be on its way: hyper would close without an answer.
            going = match link.grace() {
                None => true,
                Some(left) => {
                    let grace = grace.get_or_insert_with(|| Box::pin(tokio::time::sleep(left)));
                    grace.as_mut().poll(context).is_ready()
                }
            };
        }
        if going && !told_hyper {
            told_hyper = true;
            served.as_mut().graceful_shutdown();
            doorbell.ring();
        }
        loop {
            if doorbell.rang() {
                if link.expired.load(Ordering::SeqCst) {
                    return Poll::Ready(Err("no request came in time".to_owned()));
                }
                if let Poll::Ready(result) = served.as_mut().poll(&mut Context::from_waker(&doorbell.waker)) {
                    return Poll::Ready(result.map_err(|error| error.to_string()));
                }
                if let Some(begun) = straight.is_none().then(|| link.begun()).flatten() {
                    begun.straight(Arc::<Link<Io>>::clone(&link));
                    straight = Some(begun);
                }
            }
            let Some(produced) = &mut straight else { return Poll::Pending };
            let polled = match link.poll_stalled(context) {
                Poll::Ready(Ok(())) => produced.poll(context),
                Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
                Poll::Pending => Poll::Pending,
            };
            match polled {
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
    let io = lock(&link.socket).io.take();
    drop(io);
}

/// Wakes a connection's task on behalf of hyper.
struct Doorbell<Io> {
    link: Arc<Link<Io>>,
    waker: Waker,
}

impl<Io: Send + 'static> Wake for Link<Io> {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ring();
    }
}

impl<Io: Send + 'static> Doorbell<Io> {
    /// One that has been rung.
    fn new(link: &Arc<Link<Io>>, task: &Waker) -> Self {
        link.task.get_or_init(|| task.clone());
        link.rung.store(true, Ordering::SeqCst);
        Self { link: Arc::clone(link), waker: Arc::clone(link).into() }
    }

    fn ring(&self) {
        self.link.rung.store(true, Ordering::SeqCst);
    }

    fn rings(&self) -> bool {
        self.link.rung.load(Ordering::SeqCst)
    }

    fn rang(&self) -> bool {
        self.rings() && self.link.rung.swap(false, Ordering::SeqCst)
    }
}

/// What hyper and the answer that is being streamed share of a connection.
///
/// What an event touches lies together, at the beginning.
#[repr(C)]
struct Link<Io> {
    /// Hyper is to be polled.
    rung: AtomicBool,
    /// The frame could not be written from the outbox.
    stalled: AtomicBool,
    socket: Mutex<Shared<Io>>,
    /// The connection's task.
    task: OnceLock<Waker>,
    outlet: Mutex<Outlet>,
    /// The client has kept it waiting too long.
    expired: AtomicBool,
}

struct Shared<Io> {
    /// Taken at the end: the system's wakers for it hold the link, which would keep it open.
    io: Option<Io>,
    /// Whether hyper has nothing left to write.
    flushed: bool,
    /// The frame that the answer has handed over, and how much of it is written; empty when all is.
    frame: Vec<u8>,
    sent: usize,
    /// The link lies in the outbox.
    waits: bool,
    stage: Stage,
}

/// What a connection is at.
#[derive(Clone, Copy, Debug)]
enum Stage {
    /// A request's head is due; it was begun to be waited for then.
    Head(Instant),
    /// A request is being answered.
    Answer,
    /// The answer was given to hyper then; the client may send another request.
    Next(Instant),
}

impl<Io: Unpin> Shared<Io> {
    fn io(&mut self) -> io::Result<Pin<&mut Io>> {
        self.io.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl<Io: AsyncWrite + Unpin> Shared<Io> {
    /// Writes and flushes what is left of the frame.
    fn poll_frame(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.frame.is_empty() {
            return Poll::Ready(Ok(()));
        }
        // Not by the method, which would borrow the frame as well.
        let mut io = Pin::new(self.io.as_mut().ok_or(io::ErrorKind::NotConnected)?);
        while self.sent < self.frame.len() {
            match ready!(io.as_mut().poll_write(context, &self.frame[self.sent..]))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => self.sent += count,
            }
        }
        ready!(io.poll_flush(context))?;
        outbox::give_back(std::mem::take(&mut self.frame));
        Poll::Ready(Ok(()))
    }
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
        let shared = Shared {
            io: Some(io),
            flushed: false,
            frame: Vec::new(),
            sent: 0,
            waits: false,
            stage: Stage::Head(Instant::now()),
        };
        Self {
            rung: AtomicBool::new(false),
            stalled: AtomicBool::new(false),
            socket: Mutex::new(shared),
            task: OnceLock::new(),
            outlet: Mutex::new(Outlet::Last(None)),
            expired: AtomicBool::new(false),
        }
    }

    /// Ends the connection if its client has kept it waiting too long; false if so.
    fn look(&self, patience: Patience, now: Instant) -> bool {
        let shared = lock(&self.socket);
        let late = match shared.stage {
            Stage::Head(since) => now.duration_since(since) > patience.head,
            Stage::Answer => false,
            // Who is still reading is not idle.
            Stage::Next(since) => shared.flushed && now.duration_since(since) > patience.next,
        };
        drop(shared);
        if late {
            self.expired.store(true, Ordering::SeqCst);
            self.ring();
        }
        !late
    }

    /// What is left of the time in which a client that has just come may send its first request although the end is near.
    fn grace(&self) -> Option<Duration> {
        match lock(&self.socket).stage {
            Stage::Head(since) => GRACE.checked_sub(since.elapsed()).filter(|left| !left.is_zero()),
            Stage::Answer | Stage::Next(_) => None,
        }
    }

    /// Wakes the connection's task and lets it poll hyper.
    fn ring(&self) {
        self.rung.store(true, Ordering::SeqCst);
        if let Some(task) = self.task.get() {
            task.wake_by_ref();
        }
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

impl<Io: AsyncWrite + Unpin> Link<Io> {
    /// Ready unless a frame is left that the outbox could not write.
    fn poll_stalled(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.stalled.load(Ordering::SeqCst) {
            ready!(lock(&self.socket).poll_frame(context))?;
            self.stalled.store(false, Ordering::SeqCst);
        }
        Poll::Ready(Ok(()))
    }
}

impl<Io: AsyncWrite + Send + Unpin + 'static> Socket for Link<Io> {
    fn poll_send(
        self: Arc<Self>,
        context: &mut Context<'_>,
        bytes: &mut Vec<u8>,
        sent: &mut usize,
    ) -> Poll<io::Result<()>> {
        let mut shared = lock(&self.socket);
        // One frame waits at most, so that a slow client holds its stream back.
        ready!(shared.poll_frame(context))?;
        std::mem::swap(&mut shared.frame, bytes);
        shared.sent = *sent;
        let waits = std::mem::replace(&mut shared.waits, true);
        // The outbox may write at once.
        drop(shared);
        if !waits {
            outbox::put(self);
        }
        Poll::Ready(Ok(()))
    }
}

impl<Io: AsyncWrite + Send + Unpin> Waiting for Link<Io> {
    fn write(&self) {
        let mut shared = lock(&self.socket);
        shared.waits = false;
        let written = shared.poll_frame(&mut Context::from_waker(Waker::noop()));
        drop(shared);
        if !matches!(written, Poll::Ready(Ok(()))) {
            // The connection's task goes on, with a waker of its own, and meets the error if there is one. Hyper is polled as
            // well: it may have waited for the same socket, which wakes nobody now.
            self.stalled.store(true, Ordering::SeqCst);
            self.ring();
        }
    }
}

/// The end of a connection that hyper holds.
struct End<Io>(Arc<Link<Io>>);

impl<Io: AsyncRead + Unpin> AsyncRead for End<Io> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let shared = &mut *lock(&self.0.socket);
        let before = buffer.filled().len();
        let polled = shared.io()?.poll_read(context, buffer);
        if matches!(shared.stage, Stage::Next(_)) && buffer.filled().len() > before {
            shared.stage = Stage::Head(Instant::now());
        }
        polled
    }
}

impl<Io: AsyncWrite + Unpin> AsyncWrite for End<Io> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let shared = &mut *lock(&self.0.socket);
        shared.flushed = false;
        ready!(shared.poll_frame(context))?;
        shared.io()?.poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let shared = &mut *lock(&self.0.socket);
        shared.flushed = false;
        ready!(shared.poll_frame(context))?;
        shared.io()?.poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        lock(&self.0.socket).io.as_ref().is_some_and(Io::is_write_vectored)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shared = &mut *lock(&self.0.socket);
        ready!(shared.poll_frame(context))?;
        let flushed = shared.io()?.poll_flush(context);
        // It is asked only once all that hyper had was written.
        shared.flushed = matches!(flushed, Poll::Ready(Ok(())));
        flushed
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shared = &mut *lock(&self.0.socket);
        ready!(shared.poll_frame(context))?;
        shared.io()?.poll_shutdown(context)
    }
}

/// The body of a response.
enum Outgoing<Io> {
    Whole(axum::body::Body, Arc<Link<Io>>),
    Pieces(Arc<Link<Io>>),
}

impl<Io> Drop for Outgoing<Io> {
    fn drop(&mut self) {
        let (Self::Whole(_, link) | Self::Pieces(link)) = self;
        lock(&link.socket).stage = Stage::Next(Instant::now());
    }
}

async fn answer<Io>(
    link: Arc<Link<Io>>,
    router: TowerToHyperService<Router>,
    request: Request<Incoming>,
) -> Result<Response<Outgoing<Io>>, Infallible> {
    lock(&link.socket).stage = Stage::Answer;
    // Chunks are of HTTP/1.1, and every answer to other methods is whole.
    let chunked = request.version() == Version::HTTP_11 && request.method() == Method::POST;
    let mut response = router.call(request).await?;
    let pieces = if chunked { Produced::of(&mut response) } else { None };
    Ok(match pieces {
        None => response.map(|body| Outgoing::Whole(body, link)),
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
            Self::Whole(body, _) => return Pin::new(body).poll_frame(context),
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
        matches!(self, Self::Whole(body, _) if body.is_end_stream())
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Self::Whole(body, _) => body.size_hint(),
            Self::Pieces(_) => hyper::body::SizeHint::default(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use axum::routing::{get, post};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// A server that waits for no client longer than a moment; `/slow` takes longer than that to answer.
    async fn server() -> std::net::SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let slow = || async {
            tokio::time::sleep(Duration::from_millis(600)).await;
            "slow"
        };
        let router = Router::new().route("/", get(|| async { "here" })).route("/slow", post(slow));
        let [head, next, look] = [200, 1500, 10].map(Duration::from_millis);
        tokio::spawn(serve(listener, router, Patience { head, next, look }, std::future::pending()));
        address
    }

    /// Sends `pieces`, a moment after each other, and reads until the server closes; how long that took.
    async fn exchange<const N: usize>(address: std::net::SocketAddr, pieces: [&str; N]) -> (String, Duration) {
        let began = Instant::now();
        let mut stream = TcpStream::connect(address).await.unwrap();
        for piece in pieces {
            stream.write_all(piece.as_bytes()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(120)).await;
        }
        let mut answer = Vec::new();
        let closed = tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut answer)).await;
        closed
            .unwrap_or_else(|_| panic!("{pieces:?} is still open after {:?}", String::from_utf8_lossy(&answer)))
            .unwrap();
        (String::from_utf8(answer).unwrap(), began.elapsed())
    }

    #[tokio::test]
    async fn who_has_just_come_is_answered_though_the_end_is_near() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let router = Router::new().route("/", get(|| async { "here" }));
        let ended = tokio::spawn(serve(listener, router, Patience::default(), async { drop(stopped.await) }));
        let mut stream = TcpStream::connect(address).await.unwrap();
        let silent = TcpStream::connect(address).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        stop.send(()).unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("here"), "{answer}");
        tokio::time::timeout(Duration::from_secs(5), ended).await.expect("a silent client holds nothing up").unwrap();
        drop(silent);
    }

    #[tokio::test]
    async fn who_sends_no_whole_head_is_cut_off_and_who_waits_for_an_answer_is_not() {
        let address = server().await;
        let request = "GET / HTTP/1.1\r\nhost: x\r\n\r\n";
        let slow = "POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n";
        let (silent, torn, idle, waiting, again) = tokio::join!(
            exchange(address, []),
            exchange(address, ["GET / HT", "TP/1.1\r\na: b\r\n"]),
            exchange(address, [request]),
            exchange(address, [slow]),
            // A second request's head has its own time, which idling does not lengthen.
            exchange(address, [request, "GET / HTTP/1.1\r\n"]),
        );
        let milliseconds = |(_, took): &(String, Duration)| took.as_millis();
        for cut in [&silent, &torn] {
            assert!(cut.0.is_empty() && milliseconds(cut) >= 200, "{cut:?}");
        }
        assert!(idle.0.ends_with("here") && milliseconds(&idle) >= 1500, "{idle:?}");
        assert!(waiting.0.ends_with("slow") && milliseconds(&waiting) >= 2100, "{waiting:?}");
        assert!(again.0.matches("here").count() == 1 && again.1 < idle.1, "{again:?}");
    }
}
