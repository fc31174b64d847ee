//! A small HTTP/1.1 client that keeps connections open, as load generators do.
//!
//! Bodies are read frame by frame, so that the moment is known at which bytes arrive. A connection goes back to the pool
//! when its answer was read to the end. A kept connection that the server has closed meanwhile is replaced once, silently:
//! nothing of the request can have been answered on it.

use std::fmt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::error::ServeBenchError;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Name or number of the host, IPv6 without brackets.
    host: String,
    port: u16,
    tls: bool,
    /// What stands before every path, without a slash at its end.
    base: String,
}

impl Address {
    /// Reads `http://host:port/base`.
    ///
    /// # Errors
    /// [`ServeBenchError::Flag`] naming `flag`.
    pub fn parse(flag: &'static str, url: &str) -> Result<Self, ServeBenchError> {
        let wrong = |problem: &str| {
            ServeBenchError::flag(flag, format!("{url:?} {problem}; expected a URL like http://127.0.0.1:8000"))
        };
        let (tls, rest) = match url.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            _ => return Err(wrong("does not begin with http:// or https://")),
        };
        if tls && !cfg!(feature = "tls") {
            return Err(wrong(
                "is encrypted, which this program is built without (feature tls, which needs a C compiler)",
            ));
        }
        let (authority, base) = rest.split_once('/').unwrap_or((rest, ""));
        if authority.contains('@') {
            return Err(wrong("holds a user; keys go into --header Authorization=..."));
        }
        if base.contains(['?', '#']) {
            return Err(wrong("holds a query"));
        }
        let default = if tls { 443 } else { 80 };
        let number = |text: &str| text.parse::<u16>().ok().filter(|&port| port > 0).ok_or_else(|| wrong("has no port"));
        let (host, port) = match authority.strip_prefix('[').map(|rest| rest.split_once(']')) {
            Some(Some((host, ""))) => (host, default),
            Some(Some((host, port))) => (host, number(port.strip_prefix(':').ok_or_else(|| wrong("has no port"))?)?),
            Some(None) => return Err(wrong("opens a bracket and does not close it")),
            None => match authority.rsplit_once(':') {
                Some((host, port)) => (host, number(port)?),
                None => (authority, default),
            },
        };
        if host.is_empty() || host.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return Err(wrong("has no host"));
        }
        let base = base.trim_end_matches('/');
        let base = if base.is_empty() { String::new() } else { format!("/{base}") };
        Ok(Self { host: host.to_owned(), port, tls, base })
    }

    /// The address of a host and a port without encryption.
    ///
    /// # Errors
    /// [`ServeBenchError::Flag`] if the host is not one.
    pub fn of(host: &str, port: u16) -> Result<Self, ServeBenchError> {
        let shown = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        Self::parse("--host", &format!("http://{shown}:{port}"))
    }

    fn authority(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        format!("{host}:{}", self.port)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", if self.tls { "https" } else { "http" }, self.authority(), self.base)
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection.
    #[error("cannot connect to {address}: {source}; is the server running and the address right?")]
    Connect {
        /// Host and port.
        address: String,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The connection broke, or what came was not HTTP.
    #[error("the connection to {address} broke: {problem}")]
    Broken {
        /// Host and port.
        address: String,
        /// What happened.
        problem: String,
    },
}

/// A client of one server.
#[derive(Debug)]
pub struct Client {
    address: Address,
    headers: HeaderMap,
    idle: Mutex<Vec<SendRequest<Full<Bytes>>>>,
    #[cfg(feature = "tls")]
    tls: Option<super::encrypted::Connector>,
}

/// An answer whose body is being read.
#[derive(Debug)]
pub struct Answer<'a> {
    client: &'a Client,
    sender: SendRequest<Full<Bytes>>,
    response: Response<Incoming>,
}

impl Client {
    /// A client that sends `headers` with every request.
    #[must_use]
    pub fn new(address: Address, headers: HeaderMap) -> Self {
        Self {
            #[cfg(feature = "tls")]
            tls: address.tls.then(super::encrypted::Connector::new),
            address,
            headers,
            idle: Mutex::default(),
        }
    }

    /// Trusts the authorities in a file (PEM) instead of those that browsers trust: for servers with certificates of their
    /// own.
    ///
    /// # Errors
    /// [`ServeBenchError::Flag`] naming `flag` if the address is not encrypted or the file holds no certificates.
    #[cfg_attr(not(feature = "tls"), allow(unused_mut, reason = "without encryption nobody is trusted"))]
    pub fn trusting(mut self, flag: &'static str, file: &Path) -> Result<Self, ServeBenchError> {
        if !self.address.tls {
            return Err(ServeBenchError::flag(
                flag,
                format!("{} is not encrypted; expected https://...", self.address),
            ));
        }
        #[cfg(feature = "tls")]
        {
            let wrong = |problem: String| ServeBenchError::flag(flag, format!("{}: {problem}", file.display()));
            self.tls = Some(super::encrypted::Connector::trusting(file).map_err(wrong)?);
        }
        #[cfg(not(feature = "tls"))]
        let _unreachable = file;
        Ok(self)
    }

    /// The server's address.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// `GET path`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn get(&self, path: &str) -> Result<Answer<'_>, ClientError> {
        self.send(Method::GET, path, Bytes::new(), &[]).await
    }

    /// `POST path` with a JSON body.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn post(
        &self,
        path: &str,
        body: Bytes,
        more: &[(HeaderName, HeaderValue)],
    ) -> Result<Answer<'_>, ClientError> {
        self.send(Method::POST, path, body, more).await
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        more: &[(HeaderName, HeaderValue)],
    ) -> Result<Answer<'_>, ClientError> {
        let kept = self.kept();
        let reused = kept.is_some();
        let mut sender = match kept {
            Some(sender) => sender,
            None => self.connect().await?,
        };
        let mut result = sender.send_request(self.request(&method, path, &body, more)?).await;
        if reused && result.as_ref().is_err_and(|error| error.is_canceled() || error.is_incomplete_message()) {
            sender = self.connect().await?;
            result = sender.send_request(self.request(&method, path, &body, more)?).await;
        }
        let response = result.map_err(|error| self.broken(&error))?;
        Ok(Answer { client: self, sender, response })
    }

    fn request(
        &self,
        method: &Method,
        path: &str,
        body: &Bytes,
        more: &[(HeaderName, HeaderValue)],
    ) -> Result<Request<Full<Bytes>>, ClientError> {
        let target = format!("{}{path}", self.address.base);
        let request = Request::builder().method(method).uri(&target).body(Full::new(body.clone()));
        let mut request = request.map_err(|error| self.broken(&error))?;
        let headers = request.headers_mut();
        if let Ok(host) = HeaderValue::from_str(&self.address.authority()) {
            headers.insert(HOST, host);
        }
        if !body.is_empty() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        for (name, value) in &self.headers {
            headers.insert(name, value.clone());
        }
        for (name, value) in more {
            headers.insert(name, value.clone());
        }
        Ok(request)
    }

    fn kept(&self) -> Option<SendRequest<Full<Bytes>>> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(sender) = idle.pop() {
            if sender.is_ready() {
                return Some(sender);
            }
        }
        None
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, ClientError> {
        let address = self.address.authority();
        let failed = |source| ClientError::Connect { address: address.clone(), source };
        let stream = TcpStream::connect((self.address.host.as_str(), self.address.port)).await.map_err(failed)?;
        // A failure costs time only.
        drop(stream.set_nodelay(true));
        #[cfg(feature = "tls")]
        if let Some(tls) = &self.tls {
            let stream = tls.connect(&self.address.host, stream).await.map_err(failed)?;
            return self.speak(TokioIo::new(stream)).await;
        }
        self.speak(TokioIo::new(stream)).await
    }

    async fn speak<S>(&self, stream: TokioIo<S>) -> Result<SendRequest<Full<Bytes>>, ClientError>
    where
        TokioIo<S>: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
    {
        let (sender, connection) = handshake(stream).await.map_err(|error| self.broken(&error))?;
        // Its errors come out of the requests on it, too.
        tokio::spawn(async move { drop(connection.await) });
        Ok(sender)
    }

    fn broken(&self, error: &dyn std::error::Error) -> ClientError {
        let mut problem = error.to_string();
        if let Some(cause) = error.source() {
            problem = format!("{problem}: {cause}");
        }
        ClientError::Broken { address: self.address.authority(), problem }
    }

    /// The body of a small answer to `GET path`, which must be a success.
    ///
    /// # Errors
    /// [`ServeBenchError::Server`].
    pub async fn text(&self, path: &str) -> Result<String, ServeBenchError> {
        let wrong = |problem: String| ServeBenchError::Server { url: format!("{}{path}", self.address), problem };
        let answer = self.get(path).await.map_err(|error| wrong(error.to_string()))?;
        let status = answer.status();
        let text = answer.text().await.map_err(|error| wrong(error.to_string()))?;
        if !status.is_success() {
            return Err(wrong(refusal(status, &text)));
        }
        Ok(text)
    }
}

impl Answer<'_> {
    /// Status code.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.response.status()
    }

    /// The type of the content, empty if it is not told.
    #[must_use]
    pub fn content_type(&self) -> &str {
        self.response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// A header of the answer.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.response.headers().get(name)?.to_str().ok()
    }

    /// The next bytes; `None` at the end.
    ///
    /// # Errors
    /// [`ClientError::Broken`] if the answer is cut off.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, ClientError> {
        loop {
            match self.response.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(self.client.broken(&error)),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    /// Keeps the connection for the next request. To be called at the end of the body.
    pub fn keep(self) {
        self.client.idle.lock().unwrap_or_else(PoisonError::into_inner).push(self.sender);
    }

    /// The rest of the body as text, up to a few megabytes.
    ///
    /// # Errors
    /// [`ClientError::Broken`] if the answer is cut off.
    pub async fn text(mut self) -> Result<String, ClientError> {
        const MOST: usize = 16 << 20;
        let mut body = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            body.extend_from_slice(&chunk);
            if body.len() > MOST {
                return Ok(String::from_utf8_lossy(&body).into_owned());
            }
        }
        self.keep();
        Ok(String::from_utf8_lossy(&body).into_owned())
    }
}

/// What a server says that does not serve: the status, its own message and what helps.
#[must_use]
pub fn refusal(status: StatusCode, body: &str) -> String {
    let json: serde_json::Value = serde_json::from_str(body).unwrap_or_default();
    let message = [&json["error"]["message"], &json["message"], &json["detail"], &json["error"]]
        .into_iter()
        .find_map(serde_json::Value::as_str)
        .unwrap_or(body);
    let message = shortened(message);
    let hint = match status.as_u16() {
        401 | 403 => "; give the key by --header \"Authorization=Bearer KEY\" or in the variable OPENAI_API_KEY",
        404 => "; compare --model and --endpoint with GET /v1/models and the server's routes",
        _ => "",
    };
    let colon = if message.is_empty() { "" } else { ": " };
    format!("HTTP {status}{colon}{message}{hint}")
}

/// One line of at most a few hundred characters.
pub(crate) fn shortened(text: &str) -> String {
    const MOST: usize = 300;
    let line: String = text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).take(MOST).collect();
    if text.trim().chars().nth(MOST).is_some() { format!("{line}...") } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        let shown = |url: &str| Address::parse("--base-url", url).map(|address| address.to_string());
        assert_eq!(shown("http://localhost:8000/").unwrap(), "http://localhost:8000");
        assert_eq!(shown("http://a.example/x/y/").unwrap(), "http://a.example:80/x/y");
        assert_eq!(shown("http://[::1]:9").unwrap(), "http://[::1]:9");
        assert_eq!(Address::of("::1", 8000).unwrap().to_string(), "http://[::1]:8000");
        for wrong in [
            "localhost:8000",
            "ftp://a",
            "http://",
            "http://a:b",
            "http://a:0",
            "http://[::1",
            "http://u@h",
            "http://a/?q",
        ] {
            let error = shown(wrong).unwrap_err().to_string();
            assert!(error.starts_with("--base-url: ") && error.contains("http://127.0.0.1:8000"), "{wrong}: {error}");
        }
    }

    #[test]
    fn refusals_say_what_helps() {
        let body = r#"{"error": {"message": "no key\n", "code": 401}}"#;
        assert!(
            refusal(StatusCode::UNAUTHORIZED, body)
                .starts_with("HTTP 401 Unauthorized: no key; give the key by --header")
        );
        assert!(refusal(StatusCode::NOT_FOUND, "").starts_with("HTTP 404 Not Found; compare --model"));
        assert_eq!(
            refusal(StatusCode::BAD_GATEWAY, &"x".repeat(400)),
            format!("HTTP 502 Bad Gateway: {}...", "x".repeat(300))
        );
    }
}
