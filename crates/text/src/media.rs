//! Media as the text layer sees them: `data:` URLs in messages, and how many tokens each item occupies in a prompt.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};

use crate::error::TextError;

/// A decoded `data:` URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataUrl {
    /// Media type as written, for example `image/png`; may be empty.
    pub media_type: String,
    /// The decoded bytes.
    pub bytes: Vec<u8>,
}

impl DataUrl {
    /// Decodes `data:<type>;base64,<data>`. White space inside the data is ignored and padding is optional.
    ///
    /// # Errors
    /// [`TextError::DataUrl`] if the text is not such a URL.
    pub fn parse(url: &str) -> Result<Self, TextError> {
        let problem = |problem: String| TextError::DataUrl { problem };
        let is_data = url.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:"));
        let Some(rest) = url.get(5..).filter(|_| is_data) else {
            let shown: String = url.chars().take(40).collect();
            return Err(problem(format!("{shown:?} does not start with data:")));
        };
        let (head, data) = rest.split_once(',').ok_or_else(|| problem("there is no comma".to_owned()))?;
        let (media_type, encoding) = head.rsplit_once(';').unwrap_or((head, ""));
        if !encoding.eq_ignore_ascii_case("base64") {
            return Err(problem(format!("the encoding is {encoding:?}")));
        }
        let compact: Vec<u8> = data.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
        let padded = compact.ends_with(b"=");
        let decoded = if padded { STANDARD.decode(&compact) } else { STANDARD_NO_PAD.decode(&compact) };
        let bytes = decoded.map_err(|error| problem(error.to_string()))?;
        Ok(Self { media_type: media_type.to_owned(), bytes })
    }
}

/// One temporal patch of a video: two frames that share their tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct VideoFrame {
    /// Visual tokens of the patch.
    pub tokens: usize,
    /// The text that follows it, for example `3.0 seconds`.
    pub caption: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_urls_with_and_without_padding_and_line_breaks() {
        for url in ["data:image/png;base64,aGk=", "data:image/png;base64,aGk", "DATA:image/png;base64,aG\n k="] {
            let parsed = DataUrl::parse(url).unwrap();
            assert_eq!((parsed.media_type.as_str(), parsed.bytes.as_slice()), ("image/png", b"hi".as_slice()));
        }
    }

    #[test]
    fn other_urls_are_refused_with_the_reason() {
        for (url, needle) in [
            ("https://example.com/a.png", "does not start with data:"),
            ("dat", "does not start with data:"),
            ("data:image/png;base64", "no comma"),
            ("data:image/png,abc", "encoding"),
            ("data:;base64,!!!!", "data URL"),
        ] {
            let error = DataUrl::parse(url).unwrap_err().to_string();
            assert!(error.contains(needle), "{error}");
        }
    }
}
