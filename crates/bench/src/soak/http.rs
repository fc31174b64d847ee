//! A connection that can be treated badly: bodies sent by half, answers left in the middle.
//!
//! One thread a connection, blocking, HTTP/1.1 with keep-alive. That is all a misbehaving client needs, and a library for
//! well-behaved ones would not let it misbehave.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Longest wait for a byte of an answer. Whoever waits longer has been forgotten.
pub(super) const PATIENCE: Duration = Duration::from_secs(600);

/// An open connection.
#[derive(Debug)]
pub(super) struct Connection {
    reader: BufReader<TcpStream>,
}

/// The beginning of an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) status: u16,
    body: Body,
    /// Whether the connection ends behind this answer.
    pub(super) closes: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Body {
    /// Bytes still to come.
    Length(usize),
    Chunked,
    Ended,
}

fn odd(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

impl Connection {
    pub(super) fn open(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self { reader: BufReader::new(stream) })
    }

    /// Sends a request; of the body only the first `share` bytes, although its length is promised.
    pub(super) fn send(&mut self, request: &Request<'_>, share: usize) -> io::Result<()> {
        let Request { method, path, kind, key, body } = request;
        let mut bytes = format!(
            "{method} {path} HTTP/1.1\r\nhost: soak\r\ncontent-type: {kind}\r\nauthorization: Bearer {key}\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        bytes.extend_from_slice(&body[..share.min(body.len())]);
        self.reader.get_mut().write_all(&bytes)
    }

    /// Waits at most `patience` for the answer to begin.
    pub(super) fn head_within(&mut self, patience: Duration) -> io::Result<Option<Head>> {
        self.reader.get_ref().set_read_timeout(Some(patience))?;
        let begun = loop {
            match self.reader.fill_buf() {
                Ok(_) => break true,
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    break false;
                }
                // Reads that have a time limit are interrupted when the process is stopped and goes on.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        };
        self.reader.get_ref().set_read_timeout(Some(PATIENCE))?;
        begun.then(|| self.head()).transpose()
    }

    /// Reads status and headers.
    pub(super) fn head(&mut self) -> io::Result<Head> {
        let line = self.line()?;
        let status = line.split(' ').nth(1).and_then(|code| code.parse().ok());
        let status = status.ok_or_else(|| odd(format!("a status line was expected, found {line:?}")))?;
        let mut head = Head { status, body: Body::Length(0), closes: false };
        loop {
            let line = self.line()?;
            if line.is_empty() {
                return Ok(head);
            }
            let (name, value) = line.split_once(':').ok_or_else(|| odd(format!("no header: {line:?}")))?;
            let value = value.trim();
            match name.to_ascii_lowercase().as_str() {
                "content-length" => {
                    let length = value.parse().map_err(|_| odd(format!("content-length: {value:?}")))?;
                    head.body = Body::Length(length);
                }
                "transfer-encoding" => head.body = Body::Chunked,
                "connection" => head.closes = value.eq_ignore_ascii_case("close"),
                _ => {}
            }
        }
    }

    /// The next bytes of the body; `None` at its end.
    pub(super) fn piece(&mut self, head: &mut Head) -> io::Result<Option<Vec<u8>>> {
        let length = match head.body {
            Body::Ended | Body::Length(0) => return Ok(None),
            Body::Length(length) => {
                head.body = Body::Ended;
                length
            }
            Body::Chunked => {
                let line = self.line()?;
                let size = line.split(';').next().unwrap_or_default();
                usize::from_str_radix(size.trim(), 16).map_err(|_| odd(format!("a chunk's size: {line:?}")))?
            }
        };
        let mut bytes = vec![0; length];
        self.reader.read_exact(&mut bytes)?;
        if head.body == Body::Chunked {
            let end = self.line()?;
            if !end.is_empty() {
                return Err(odd(format!("behind a chunk: {end:?}")));
            }
            if length == 0 {
                head.body = Body::Ended;
                return Ok(None);
            }
        }
        Ok(Some(bytes))
    }

    /// The rest of the body.
    pub(super) fn rest(&mut self, head: &mut Head) -> io::Result<Vec<u8>> {
        let mut all = Vec::new();
        while let Some(piece) = self.piece(head)? {
            all.extend(piece);
        }
        Ok(all)
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection"));
        }
        line.truncate(line.trim_end_matches(['\r', '\n']).len());
        Ok(line)
    }
}

/// A request as it goes over the wire.
#[derive(Debug)]
pub(super) struct Request<'a> {
    pub(super) method: &'a str,
    pub(super) path: &'a str,
    /// Media type of the body.
    pub(super) kind: &'a str,
    /// API key.
    pub(super) key: &'a str,
    pub(super) body: &'a [u8],
}

/// Sends a request on a connection of its own and reads the whole answer.
pub(super) fn exchange(address: SocketAddr, request: &Request<'_>) -> io::Result<(u16, Vec<u8>)> {
    let mut connection = Connection::open(address)?;
    connection.send(request, request.body.len())?;
    let mut head = connection.head()?;
    let body = connection.rest(&mut head)?;
    Ok((head.status, body))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// What a client makes of these bytes.
    fn read(bytes: &'static [u8]) -> io::Result<(u16, Vec<u8>)> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0; 1];
                stream.read_exact(&mut byte).expect("a request");
                request.extend(byte);
            }
            stream.write_all(bytes).expect("a reader");
        });
        let request = Request { method: "GET", path: "/", kind: "text/plain", key: "", body: b"" };
        let answer = exchange(address, &request);
        server.join().expect("no panic");
        answer
    }

    #[test]
    fn bodies_end_by_length_or_by_an_empty_chunk() {
        let (status, body) = read(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc").expect("read");
        assert_eq!((status, body.as_slice()), (200, &b"abc"[..]));
        let chunks = b"HTTP/1.1 404 x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\nA;x=1\r\n0123456789\r\n0\r\n\r\n";
        assert_eq!(read(chunks).expect("read"), (404, b"ab0123456789".to_vec()));
        assert_eq!(read(b"HTTP/1.1 503 x\r\ncontent-length: 0\r\n\r\n").expect("read"), (503, Vec::new()));
    }

    #[test]
    fn broken_answers_are_errors() {
        for bytes in [
            &b""[..],
            b"HTTP/1.1 x\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n",
        ] {
            assert!(read(bytes).is_err(), "{bytes:?}");
        }
    }
}
