//! Encrypted connections: the feature `tls`.
//!
//! Handshakes happen in tasks of their own, so that a client which does not finish its handshake holds up nobody. Without the
//! feature the type is there and has no values, so that nothing else needs to know.

#[cfg(feature = "tls")]
pub use with::{Tls, TlsError};
#[cfg(not(feature = "tls"))]
pub use without::Tls;

/// Files of `--ssl-certfile` and its kin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Chain of certificates, PEM, the server's own first.
    pub certificates: String,
    /// Private key, PEM.
    pub key: String,
    /// Authorities whose clients may connect, PEM.
    pub client_authorities: Option<String>,
    /// Whether clients must show a certificate of those.
    pub clients_must: bool,
}

/// What a build without the feature says.
pub const WITHOUT: &str = "this program is built without the feature tls, whose cryptography needs a C compiler; build it with \
                           --features tls, or let a proxy end TLS";

#[cfg(not(feature = "tls"))]
mod without {
    use axum::serve::Listener;

    /// Never there in this build.
    #[derive(Clone, Debug)]
    pub enum Tls {}

    impl Tls {
        pub(crate) fn listener<L: Listener>(self, _listener: L) -> std::io::Result<L> {
            match self {}
        }
    }
}

#[cfg(feature = "tls")]
mod with {
    use std::net::SocketAddr;
    use std::sync::Arc;
    use std::time::Duration;

    use axum::serve::Listener;
    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use rustls::server::WebPkiClientVerifier;
    use rustls::{RootCertStore, ServerConfig};
    use tokio::net::TcpStream;
    use tokio::sync::{Semaphore, mpsc};
    use tokio_rustls::TlsAcceptor;
    use tokio_rustls::server::TlsStream;

    use super::TlsFiles;

    /// Certificate and key, ready for use.
    #[derive(Clone)]
    pub struct Tls(TlsAcceptor);

    impl std::fmt::Debug for Tls {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Tls")
        }
    }

    /// Why certificates cannot be used.
    #[derive(Debug, thiserror::Error)]
    #[error("error: {file}: {problem}")]
    pub struct TlsError {
        /// The flag and its file.
        pub file: String,
        /// What is wrong.
        pub problem: String,
    }

    /// Time for a handshake.
    const HANDSHAKE: Duration = Duration::from_secs(10);
    /// Handshakes at once; further clients wait in the system's queue.
    const HANDSHAKES: usize = 256;

    impl Tls {
        /// Reads the files.
        ///
        /// # Errors
        /// [`TlsError`] naming the flag, the file and what is wrong with it.
        pub fn open(files: &TlsFiles) -> Result<Self, TlsError> {
            let fail = |flag: &str, path: &str, problem: String| TlsError { file: format!("--{flag} {path}"), problem };
            let certificates = |flag: &str, path: &str| {
                let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
                match read {
                    Ok(list) if list.is_empty() => Err(fail(flag, path, "no certificate in PEM form".to_owned())),
                    read => read.map_err(|error| fail(flag, path, error.to_string())),
                }
            };
            let chain = certificates("ssl-certfile", &files.certificates)?;
            let key = PrivateKeyDer::from_pem_file(&files.key)
                .map_err(|error| fail("ssl-keyfile", &files.key, error.to_string()))?;
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let versions = |error: rustls::Error| fail("ssl-certfile", &files.certificates, error.to_string());
            let builder =
                ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
            let builder = builder.map_err(versions)?;
            let builder = match &files.client_authorities {
                None => builder.with_no_client_auth(),
                Some(path) => {
                    let wrong = |problem: String| fail("ssl-ca-certs", path, problem);
                    let mut roots = RootCertStore::empty();
                    for certificate in certificates("ssl-ca-certs", path)? {
                        roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
                    }
                    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                    let verifier = if files.clients_must { verifier } else { verifier.allow_unauthenticated() };
                    builder.with_client_cert_verifier(verifier.build().map_err(|error| wrong(error.to_string()))?)
                }
            };
            let mut config = builder.with_single_cert(chain, key).map_err(versions)?;
            config.alpn_protocols = vec![b"http/1.1".to_vec()];
            Ok(Self(TlsAcceptor::from(Arc::new(config))))
        }

        /// A listener of encrypted connections over one of plain ones.
        ///
        /// # Errors
        /// When the listener has no address.
        pub(crate) fn listener<L>(self, mut plain: L) -> std::io::Result<Encrypted>
        where
            L: Listener<Io = TcpStream, Addr = SocketAddr>,
        {
            let address = plain.local_addr()?;
            let (ready, accepted) = mpsc::channel(HANDSHAKES);
            let room = Arc::new(Semaphore::new(HANDSHAKES));
            let acceptor = self.0;
            let task = tokio::spawn(async move {
                while let Ok(permit) = Arc::clone(&room).acquire_owned().await {
                    let (stream, peer) = plain.accept().await;
                    let (acceptor, ready) = (acceptor.clone(), ready.clone());
                    tokio::spawn(async move {
                        let _permit = permit;
                        match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
                            // A server that has stopped accepting drops the connection.
                            Ok(Ok(stream)) => drop(ready.send((stream, peer)).await),
                            Ok(Err(error)) => tracing::debug!(%error, %peer, "TLS handshake"),
                            Err(_) => tracing::debug!(%peer, "TLS handshake took too long"),
                        }
                    });
                }
            });
            Ok(Encrypted { accepted, address, task })
        }
    }

    /// Accepts encrypted connections. Dropped, it stops listening.
    #[derive(Debug)]
    pub(crate) struct Encrypted {
        accepted: mpsc::Receiver<(TlsStream<TcpStream>, SocketAddr)>,
        address: SocketAddr,
        task: tokio::task::JoinHandle<()>,
    }

    impl Drop for Encrypted {
        fn drop(&mut self) {
            self.task.abort();
        }
    }

    impl Listener for Encrypted {
        type Io = TlsStream<TcpStream>;
        type Addr = SocketAddr;

        async fn accept(&mut self) -> (Self::Io, Self::Addr) {
            match self.accepted.recv().await {
                Some(connection) => connection,
                // The accepting task never ends by itself.
                None => std::future::pending().await,
            }
        }

        fn local_addr(&self) -> std::io::Result<SocketAddr> {
            Ok(self.address)
        }
    }
}
