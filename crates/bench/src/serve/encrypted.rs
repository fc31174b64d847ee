//! Encrypted connections (feature `tls`).

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Opens encrypted connections.
#[derive(Clone)]
pub(crate) struct Connector(TlsConnector);

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Connector")
    }
}

impl Connector {
    /// Trusts the authorities that browsers trust.
    pub(crate) fn new() -> Self {
        Self::of(RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() })
    }

    /// Trusts the authorities in a file (PEM) and nobody else.
    ///
    /// # Errors
    /// What is wrong with the file.
    pub(crate) fn trusting(file: &Path) -> Result<Self, String> {
        let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let mut roots = RootCertStore::empty();
        for certificate in read.map_err(|error| error.to_string())? {
            roots.add(certificate).map_err(|error| error.to_string())?;
        }
        if roots.is_empty() { Err("no certificate in PEM form".to_owned()) } else { Ok(Self::of(roots)) }
    }

    fn of(roots: RootCertStore) -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the provider has the default versions' suites");
        Self(TlsConnector::from(Arc::new(builder.with_root_certificates(roots).with_no_client_auth())))
    }

    /// Shakes hands.
    ///
    /// # Errors
    /// What is wrong with the name, the certificate or the connection.
    pub(crate) async fn connect(&self, host: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        self.0.connect(name, stream).await
    }
}
