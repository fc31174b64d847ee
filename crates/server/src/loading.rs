//! The port's answer while the model is being loaded: 503 to everybody.
//!
//! A balancer that asks for `/health` learns that the server is not ready, instead of waiting on a socket that nobody reads.

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderValue, Request, header};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::error::ApiError;
use crate::port::Port;
use crate::router::dialect;

/// Answers on a port until it is stopped.
#[derive(Debug)]
pub struct Loading {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Loading {
    /// Begins to answer on (a second handle of) the port.
    ///
    /// # Errors
    /// When the system gives no second handle.
    pub fn start(port: &Port) -> std::io::Result<Self> {
        let (stop, stopped) = oneshot::channel::<()>();
        let router = Router::new().fallback(|request: Request<Body>| async move {
            let mut response = ApiError::loading().response(dialect(request.uri().path()));
            // So that no client keeps a connection to this answer.
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            response
        });
        let stopped = async {
            let _dropped_or_sent = stopped.await;
        };
        Ok(Self { stop, task: port.second()?.start(router, stopped)? })
    }

    /// Stops accepting.
    pub async fn stop(self) {
        let _already_ended = self.stop.send(());
        // Connections in the middle of an answer end by themselves; whoever holds one open does not delay the start.
        let mut task = self.task;
        if tokio::time::timeout(std::time::Duration::from_millis(200), &mut task).await.is_err() {
            task.abort();
        }
    }
}
