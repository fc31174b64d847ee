//! JSON text written by hand into one buffer.
//!
//! Answers have few shapes and are written once for each token, so they are assembled from constant pieces and escaped
//! text instead of being built as a tree.

use serde_json::Value;

/// A writer that appends to a buffer; its methods chain.
#[derive(Debug)]
pub struct Json<'a>(pub(crate) &'a mut Vec<u8>);

impl<'a> Json<'a> {
    /// A writer at the end of `out`.
    pub fn new(out: &'a mut Vec<u8>) -> Self {
        Self(out)
    }

    /// JSON text as it is.
    pub fn raw(&mut self, text: &str) -> &mut Self {
        self.0.extend_from_slice(text.as_bytes());
        self
    }

    /// A string with its quotes.
    pub fn text(&mut self, text: &str) -> &mut Self {
        const HEX: &[u8; 16] = b"0123456789abcdef";
        let out = &mut *self.0;
        out.push(b'"');
        let bytes = text.as_bytes();
        let mut start = 0;
        for (at, &byte) in bytes.iter().enumerate() {
            let escape: &[u8] = match byte {
                b'"' => b"\\\"",
                b'\\' => b"\\\\",
                b'\n' => b"\\n",
                b'\r' => b"\\r",
                b'\t' => b"\\t",
                0..=0x1f => {
                    out.extend_from_slice(&bytes[start..at]);
                    let digits = [HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]];
                    out.extend_from_slice(b"\\u00");
                    out.extend_from_slice(&digits);
                    start = at + 1;
                    continue;
                }
                _ => continue,
            };
            out.extend_from_slice(&bytes[start..at]);
            out.extend_from_slice(escape);
            start = at + 1;
        }
        out.extend_from_slice(&bytes[start..]);
        out.push(b'"');
        self
    }

    /// A string, or `null`.
    pub fn optional_text(&mut self, text: Option<&str>) -> &mut Self {
        match text {
            Some(text) => self.text(text),
            None => self.raw("null"),
        }
    }

    /// A whole number.
    pub fn number(&mut self, number: u64) -> &mut Self {
        let mut digits = [0_u8; 20];
        let mut at = digits.len();
        let mut rest = number;
        loop {
            at -= 1;
            digits[at] = b'0' + u8::try_from(rest % 10).unwrap_or(0);
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        self.0.extend_from_slice(&digits[at..]);
        self
    }

    /// A fraction; infinities, which a log-probability can be, become -9999 and 9999.
    pub fn float(&mut self, number: f64) -> &mut Self {
        let number = if number.is_nan() { 0.0 } else { number.clamp(-9999.0, 9999.0) };
        let text = format!("{number}");
        self.raw(&text);
        if !text.contains(['.', 'e']) {
            self.raw(".0");
        }
        self
    }

    /// `true` or `false`.
    pub fn boolean(&mut self, value: bool) -> &mut Self {
        self.raw(if value { "true" } else { "false" })
    }

    /// Any value.
    pub fn value(&mut self, value: &Value) -> &mut Self {
        self.raw(&value.to_string())
    }

    /// A list, `item` writing each element.
    pub fn list<T>(&mut self, items: impl IntoIterator<Item = T>, mut item: impl FnMut(&mut Json<'_>, T)) -> &mut Self {
        self.raw("[");
        for (index, element) in items.into_iter().enumerate() {
            if index > 0 {
                self.raw(",");
            }
            item(self, element);
        }
        self.raw("]")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_text_reads_back(text in any::<String>()) {
            let mut out = Vec::new();
            Json::new(&mut out).text(&text);
            prop_assert_eq!(serde_json::from_slice::<String>(&out).unwrap(), text);
        }

        #[test]
        fn every_number_reads_back(whole in any::<u64>(), fraction in -9000.0_f64..9000.0) {
            let mut out = Vec::new();
            Json::new(&mut out).raw("[").number(whole).raw(",").float(fraction).raw("]");
            let (w, f): (u64, f64) = serde_json::from_slice(&out).unwrap();
            prop_assert_eq!(w, whole);
            prop_assert!((f - fraction).abs() <= fraction.abs() * 1e-12);
        }
    }

    #[test]
    fn what_json_cannot_say_becomes_a_number() {
        let mut out = Vec::new();
        Json::new(&mut out).list([f64::NEG_INFINITY, f64::NAN, 1.0], |json, v| {
            json.float(v);
        });
        assert_eq!(out, b"[-9999.0,0.0,1.0]");
    }
}
