//! Server-sent events out of chunks of bytes that may end anywhere.
//!
//! Invariant: the payloads do not depend on how the stream was cut into chunks. Lines end with LF or CR LF; comments and
//! fields other than `data` are passed over; the `data` lines of an event are joined by LF (WHATWG HTML, 9.2.6).

/// The reader of one stream.
#[derive(Debug, Default)]
pub struct EventReader {
    /// Bytes behind the last line end.
    line: Vec<u8>,
    /// Data of the event that is not complete yet.
    data: Option<Vec<u8>>,
}

impl EventReader {
    /// Takes bytes and hands every payload that they complete to `payload`.
    pub fn feed(&mut self, bytes: &[u8], mut payload: impl FnMut(&str)) {
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            let Some(end) = piece.strip_suffix(b"\n") else {
                self.line.extend_from_slice(piece);
                return;
            };
            if self.line.is_empty() {
                self.take(end, &mut payload);
            } else {
                self.line.extend_from_slice(end);
                let mut line = std::mem::take(&mut self.line);
                self.take(&line, &mut payload);
                line.clear();
                self.line = line;
            }
        }
    }

    /// The end of the stream: an event that lacks its blank line counts.
    pub fn finish(&mut self, mut payload: impl FnMut(&str)) {
        let line = std::mem::take(&mut self.line);
        self.take(&line, &mut payload);
        self.take(b"", &mut payload);
    }

    fn take(&mut self, line: &[u8], payload: &mut impl FnMut(&str)) {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            if let Some(data) = self.data.take() {
                payload(&String::from_utf8_lossy(&data));
            }
            return;
        }
        let Some(value) = line.strip_prefix(b"data") else { return };
        let value = match value {
            [] => value,
            [b':', b' ', value @ ..] | [b':', value @ ..] => value,
            _ => return,
        };
        match &mut self.data {
            Some(data) => {
                data.push(b'\n');
                data.extend_from_slice(value);
            }
            None => self.data = Some(value.to_vec()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = ": ping\n\ndata: {\"a\": \"\u{e9}\u{1f600}\"}\n\nevent: x\r\nid: 3\r\ndata:one\r\ndata: two\r\n\r\n\
                          dataset: no\n\ndata\n\ndata: [DONE]\n\ndata: tail";

    #[test]
    fn payloads_do_not_depend_on_the_cuts() {
        let wanted = ["{\"a\": \"\u{e9}\u{1f600}\"}", "one\ntwo", "", "[DONE]", "tail"];
        let bytes = STREAM.as_bytes();
        for size in 1..=bytes.len() {
            let (mut reader, mut found) = (EventReader::default(), Vec::new());
            for chunk in bytes.chunks(size) {
                reader.feed(chunk, |data| found.push(data.to_owned()));
            }
            reader.finish(|data| found.push(data.to_owned()));
            assert_eq!(found, wanted, "chunks of {size}");
        }
    }
}
