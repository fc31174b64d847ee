//! Images by URL, under rules that keep a client from reaching what only this machine can reach.
//!
//! Only https, only hosts that the server's owner allowed, no redirects, and the connection goes to an address that was
//! looked at: a name that resolves to a private address is refused, however it came to do so.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Whether a URL may be fetched.
///
/// # Errors
/// Which rule forbids it.
pub fn permitted(url: &str, domains: &[String]) -> Result<(), String> {
    let parsed: axum::http::Uri = url.parse().map_err(|_| "this is no URL".to_owned())?;
    if parsed.scheme_str() != Some("https") {
        return Err("images are fetched over https only; send the image as a data: URL".to_owned());
    }
    let Some(authority) = parsed.authority() else { return Err("the URL names no host".to_owned()) };
    if authority.as_str().contains('@') {
        return Err("the URL must not hold a user name".to_owned());
    }
    let host = authority.host().to_ascii_lowercase();
    let allowed = |domain: &String| domain == "*" || domain.eq_ignore_ascii_case(&host);
    if domains.iter().any(allowed) {
        return Ok(());
    }
    Err(if domains.is_empty() {
        "this server fetches images from no host (server flag --allowed-media-domains); send the image as a data: URL"
            .to_owned()
    } else {
        format!("this server does not fetch images from {host:?}; send the image as a data: URL")
    })
}

/// Whether an address belongs to the public internet.
#[must_use]
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_broadcast()
        || address.is_documentation()
        || address.is_multicast()
        || a == 0
        // Shared by providers, protocol assignments, benchmarks, reserved.
        || (a == 100 && b & 0xc0 == 64)
        || (a == 192 && b == 0 && c == 0)
        || (a == 198 && b & 0xfe == 18)
        || a >= 240;
    !special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let s = address.segments();
    let embedded = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        is_public_v4(Ipv4Addr::new(a, b, c, d))
    };
    match s {
        // Addresses of the old internet in the new one's clothes: mapped, translated, tunnelled.
        [0, 0, 0, 0, 0, 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => embedded(high, low),
        [0x2002, high, low, ..] => embedded(high, low),
        // Everything that is global unicast today, without documentation and tunnels through others' relays.
        [first, second, ..] => first & 0xe000 == 0x2000 && !(first == 0x2001 && (second == 0xdb8 || second < 0x200)),
    }
}

/// Fetches an image of at most `most_bytes`. Blocks.
///
/// # Errors
/// What the client should know.
#[cfg(not(feature = "tls"))]
pub fn image(_url: &str, _domains: &[String], _most_bytes: usize) -> Result<Vec<u8>, String> {
    Err("this server fetches no images (it is built without the feature tls); send the image as a data: URL".to_owned())
}

/// Fetches an image of at most `most_bytes`. Blocks.
///
/// # Errors
/// What the client should know.
#[cfg(feature = "tls")]
pub fn image(url: &str, domains: &[String], most_bytes: usize) -> Result<Vec<u8>, String> {
    use std::time::Duration;

    use ureq::unversioned::transport::DefaultConnector;

    /// Time for everything.
    const PATIENCE: Duration = Duration::from_secs(10);
    permitted(url, domains)?;
    let config = ureq::Agent::config_builder()
        .https_only(true)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .http_status_as_error(false)
        .proxy(None)
        .timeout_global(Some(PATIENCE))
        .build();
    let agent = ureq::Agent::with_parts(config, DefaultConnector::default(), public::Resolver::default());
    let told = |error: ureq::Error| format!("the image could not be fetched: {error}");
    let response = agent.get(url).call().map_err(told)?;
    if response.status().as_u16() != 200 {
        return Err(format!(
            "the image could not be fetched: its host answered {} (redirects are not followed)",
            response.status()
        ));
    }
    let (_, body) = response.into_parts();
    body.into_with_config().limit(most_bytes as u64).read_to_vec().map_err(told)
}

#[cfg(feature = "tls")]
mod public {
    use ureq::config::Config;
    use ureq::http::Uri;
    use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver as Resolve};
    use ureq::unversioned::transport::NextTimeout;

    /// Resolves names to public addresses only; the connection is made to what it returns.
    #[derive(Default)]
    pub(super) struct Resolver(DefaultResolver);

    impl std::fmt::Debug for Resolver {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Resolver")
        }
    }

    impl Resolve for Resolver {
        fn resolve(
            &self,
            uri: &Uri,
            config: &Config,
            timeout: NextTimeout,
        ) -> Result<ResolvedSocketAddrs, ureq::Error> {
            let found = self.0.resolve(uri, config, timeout)?;
            // One private address among them is enough to refuse: nobody serves public images like that.
            if found.iter().all(|address| super::is_public(address.ip())) {
                return Ok(found);
            }
            let problem = "the host has a private address";
            Err(ureq::Error::Io(std::io::Error::new(std::io::ErrorKind::PermissionDenied, problem)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_https_and_only_allowed_hosts() {
        let domains = vec!["img.example".to_owned()];
        assert_eq!(permitted("https://IMG.example:8443/a.png?x=1", &domains), Ok(()));
        assert_eq!(permitted("https://anything.example/a", &["*".to_owned()]), Ok(()));
        for (url, needle) in [
            ("http://img.example/a", "https only"),
            ("ftp://img.example/a", "https only"),
            ("https://other.example/a", "not fetch images from \"other.example\""),
            ("https://img.example.evil/a", "not fetch images"),
            ("https://img.example@evil.example/a", "user name"),
            ("https://evil.example/img.example", "not fetch images"),
            ("/a.png", "https only"),
            ("https://", "no URL"),
        ] {
            let error = permitted(url, &domains).unwrap_err();
            assert!(error.contains(needle), "{url}: {error}");
        }
        assert!(permitted("https://img.example/a", &[]).unwrap_err().contains("--allowed-media-domains"));
    }

    #[test]
    fn private_addresses_are_recognised_in_every_dress() {
        for address in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "198.19.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "::7f00:1",
            "::ffff:10.0.0.1",
            "64:ff9b::a00:1",
            "2002:a00:1::",
            "2001:0:1::1",
            "2001:db8::1",
            "fc00::1",
            "fe80::1",
            "ff02::1",
        ] {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
        for address in ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "2001:4860:4860::8888"] {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
    }
}
