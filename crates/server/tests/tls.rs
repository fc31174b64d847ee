//! Encrypted connections, with a certificate made for these tests (`tls-files`, for `localhost` and nobody else).

#![cfg(feature = "tls")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use glimmer_server::loading::Loading;
use glimmer_server::port::{Port, bind};
use glimmer_server::serve::serve;
use glimmer_server::tls::{Tls, TlsFiles};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use support::Server;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

fn file(name: &str) -> String {
    format!("{}/tests/tls-files/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn files() -> TlsFiles {
    TlsFiles {
        certificates: file("certificate.pem"),
        key: file("key.pem"),
        client_authorities: None,
        clients_must: false,
    }
}

/// A client that trusts the certificate, and shows it if it should.
fn connector(shows: bool) -> TlsConnector {
    let certificate = CertificateDer::from_pem_file(file("certificate.pem")).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let builder = builder.with_root_certificates(roots);
    let config = if shows {
        let key = PrivateKeyDer::from_pem_file(file("key.pem")).unwrap();
        builder.with_client_auth_cert(vec![certificate], key).unwrap()
    } else {
        builder.with_no_client_auth()
    };
    TlsConnector::from(Arc::new(config))
}

async fn get(port: u16, path: &str, shows: bool) -> std::io::Result<String> {
    let plain = TcpStream::connect(("127.0.0.1", port)).await?;
    let mut stream = connector(shows).connect(ServerName::try_from("localhost").unwrap(), plain).await?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes()).await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    Ok(text)
}

fn port(files: &TlsFiles) -> (Port, u16) {
    let listener = bind(Some("127.0.0.1"), 0).unwrap();
    let number = listener.local_addr().unwrap().port();
    (Port::new(listener, Some(Tls::open(files).unwrap())), number)
}

#[tokio::test]
async fn the_port_is_encrypted_while_loading_and_after() {
    let (port, number) = port(&files());
    assert!(port.url().starts_with("https://"));
    let loading = Loading::start(&port).unwrap();
    assert!(get(number, "/health", false).await.unwrap().starts_with("HTTP/1.1 503"));
    loading.stop().await;
    let server = Server::saying("a</think>b");
    tokio::spawn(serve(Arc::clone(&server.app), port, std::future::pending()));
    assert!(get(number, "/health", false).await.unwrap().starts_with("HTTP/1.1 200"));
    // Somebody who does not speak TLS is sent away, and somebody who says nothing holds up nobody.
    let _silent = TcpStream::connect(("127.0.0.1", number)).await.unwrap();
    let mut plain = TcpStream::connect(("127.0.0.1", number)).await.unwrap();
    plain.write_all(b"GET /health HTTP/1.1\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(60), plain.read_to_end(&mut answer)).await.unwrap();
    assert!(read.is_err() || !answer.starts_with(b"HTTP"), "{answer:?}");
    assert!(get(number, "/v1/models", false).await.unwrap().contains("\"micro\""));
}

#[tokio::test]
async fn clients_show_a_certificate_where_they_must() {
    let files = TlsFiles { client_authorities: Some(file("certificate.pem")), clients_must: true, ..files() };
    let (port, number) = port(&files);
    let server = Server::saying("a</think>b");
    tokio::spawn(serve(Arc::clone(&server.app), port, std::future::pending()));
    assert!(get(number, "/health", false).await.is_err());
    assert!(get(number, "/health", true).await.unwrap().starts_with("HTTP/1.1 200"));
}

#[test]
fn files_that_cannot_be_used_are_named() {
    for (files, flag) in [
        (TlsFiles { certificates: "/no/such".to_owned(), ..files() }, "--ssl-certfile /no/such"),
        (TlsFiles { certificates: file("key.pem"), ..files() }, "--ssl-certfile"),
        (TlsFiles { key: file("certificate.pem"), ..files() }, "--ssl-keyfile"),
        (TlsFiles { client_authorities: Some(file("key.pem")), ..files() }, "--ssl-ca-certs"),
    ] {
        let error = Tls::open(&files).unwrap_err().to_string();
        assert!(error.starts_with("error: ") && error.contains(flag), "{error}");
    }
}

/// The rules for hosts have tests beside them; this is the last one, which looks at the address itself.
#[test]
fn an_allowed_name_with_a_private_address_is_not_connected_to() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let url = format!("https://localhost:{}/a.png", listener.local_addr().unwrap().port());
    let error = glimmer_server::fetch::image(&url, &["localhost".to_owned()], 1000).unwrap_err();
    assert!(error.contains("private address"), "{error}");
    assert!(listener.accept().is_err(), "somebody connected");
}
