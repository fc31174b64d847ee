//! Servers with a certificate of their own (feature `tls`), and what is said without.

use std::path::{Path, PathBuf};

use glimmer_bench::serve::client::{Address, Client};
use hyper::header::HeaderMap;

fn certificate() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../server/tests/tls-files/certificate.pem")).to_owned()
}

fn client(url: &str) -> Client {
    Client::new(Address::parse("--base-url", url).unwrap(), HeaderMap::new())
}

#[test]
fn authorities_are_for_encrypted_addresses() {
    let error = client("http://localhost:1").trusting("--ca-file", &certificate()).unwrap_err().to_string();
    assert_eq!(error, "--ca-file: http://localhost:1 is not encrypted; expected https://...");
}

#[cfg(not(feature = "tls"))]
#[test]
fn encrypted_addresses_are_refused_with_the_reason() {
    let error = Address::parse("--base-url", "https://localhost:1").unwrap_err().to_string();
    assert!(error.contains("feature tls, which needs a C compiler"), "{error}");
}

#[cfg(feature = "tls")]
#[test]
fn a_server_with_its_own_certificate_is_trusted_where_that_is_said() {
    use std::sync::Arc;

    use glimmer_bench::serve::exchange::Api;
    use glimmer_bench::serve::load::Target;
    use glimmer_server::app::Options;

    use crate::support;

    let (port, _engine) = support::encrypted(Options::default(), |_| Ok(support::script("hello")));
    let url = format!("https://localhost:{port}");
    support::run(async {
        let stranger = client(&url);
        let error = stranger.text("/health").await.unwrap_err().to_string();
        assert!(error.contains("cannot connect") && error.contains("certificate"), "{error}");
        let trusting = client(&url).trusting("--ca-file", &certificate()).unwrap();
        let target = Target { client: Arc::new(trusting), ..support::target(port, Api::Completions) };
        let prompt = support::prompt("hi", 8);
        assert_eq!(target.warm_up(&prompt, 3, Some(2)).await, Vec::<String>::new());
        let nothing = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let error = client(&url).trusting("--ca-file", Path::new(nothing)).unwrap_err().to_string();
        assert!(error.ends_with("no certificate in PEM form"), "{error}");
    });
}
