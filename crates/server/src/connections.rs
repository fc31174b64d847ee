//! Connections of a port: accepted, served one by one, and told when it is time to go.
//!
//! A connection is a task that does nothing but serve: with a thousand streams of which a step of the engine feeds hundreds, a
//! token waits for all that is done for the tokens before it, so whatever a task does each time that it wakes counts. It is
//! told of the end by a flag and one wake-up. Invariant: [`serve`] ends only
//! after its last connection.

use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::sync::{Notify, mpsc};

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
            connection::<L>(stream, router, &closing).await;
            drop(open);
        });
    }
    drop((listener, open));
    closing.now.store(true, Ordering::SeqCst);
    closing.told.notify_waiters();
    // Nothing is ever sent.
    let _closed = ended.recv().await;
}

async fn connection<L: Listener>(stream: L::Io, router: Router, closing: &Closing) {
    let mut served =
        pin!(http1::Builder::new().serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)));
    let mut told = pin!(closing.told.notified());
    let (mut asked, mut going) = (false, false);
    let result = poll_fn(|context| {
        // A task keeps its waker, so asking once is enough to be woken; the flag says why.
        if !asked {
            asked = true;
            let _ready_means_the_flag_is_set = told.as_mut().poll(context);
        }
        if !going && closing.now.load(Ordering::SeqCst) {
            going = true;
            served.as_mut().graceful_shutdown();
        }
        served.as_mut().poll(context)
    });
    if let Err(error) = result.await {
        tracing::debug!(%error, "a connection ended");
    }
}
