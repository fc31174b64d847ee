//! The port that the server listens on, plain or with TLS.
//!
//! It is bound before anything is loaded, answers 503 meanwhile and is then taken over by the server: both use it through
//! [`Port::start`], so that clients meet the same protocol all the time.

use std::future::Future;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _};

use axum::Router;
use axum::serve::ListenerExt as _;
use tokio::task::JoinHandle;

use crate::connections::{self, Patience};
use crate::serve::ServeError;
use crate::tls::Tls;

/// A bound port.
#[derive(Debug)]
pub struct Port {
    listener: TcpListener,
    tls: Option<Tls>,
}

impl From<TcpListener> for Port {
    /// A port without TLS. The listener must be non-blocking, as [`bind`] makes it.
    fn from(listener: TcpListener) -> Self {
        Self { listener, tls: None }
    }
}

/// Listens on all interfaces, or on `host`.
///
/// # Errors
/// [`ServeError::Bind`].
pub fn bind(host: Option<&str>, port: u16) -> Result<TcpListener, ServeError> {
    let host = host.unwrap_or("0.0.0.0");
    let fail = |source| ServeError::Bind { host: host.to_owned(), port, source };
    let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(fail)?.collect();
    let listener = TcpListener::bind(addresses.as_slice()).map_err(fail)?;
    listener.set_nonblocking(true).map_err(fail)?;
    Ok(listener)
}

/// Whether the host can be listened on. The port is left alone: it may be free only later.
///
/// # Errors
/// [`ServeError::Bind`], as [`bind`].
pub fn try_host(host: Option<&str>, port: u16) -> Result<(), ServeError> {
    bind(host, 0).map(drop).map_err(|error| match error {
        ServeError::Bind { host, source, .. } => ServeError::Bind { host, port, source },
        other => other,
    })
}

impl Port {
    /// A port whose connections are encrypted where there is a certificate.
    #[must_use]
    pub fn new(listener: TcpListener, tls: Option<Tls>) -> Self {
        Self { listener, tls }
    }

    /// Another handle of the same port.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn second(&self) -> std::io::Result<Self> {
        Ok(Self { listener: self.listener.try_clone()?, tls: self.tls.clone() })
    }

    /// Where it listens, as a URL.
    #[must_use]
    pub fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        match self.listener.local_addr() {
            Ok(address) => format!("{scheme}://{address}"),
            Err(error) => format!("{scheme}://? ({error})"),
        }
    }

    /// Serves until `stop` is ready and then until the open answers have ended.
    ///
    /// # Errors
    /// What the operating system says of the listener.
    pub fn start(
        self,
        router: Router,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> std::io::Result<JoinHandle<()>> {
        let listener = tokio::net::TcpListener::from_std(self.listener)?.tap_io(|stream| {
            // Without it small frames wait for acknowledgements; a failure costs time only.
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, "TCP_NODELAY");
            }
        });
        Ok(match self.tls {
            None => tokio::spawn(connections::serve(listener, router, Patience::default(), stop)),
            Some(tls) => {
                let listener = tls.listener(listener)?;
                tokio::spawn(connections::serve(listener, router, Patience::default(), stop))
            }
        })
    }
}
