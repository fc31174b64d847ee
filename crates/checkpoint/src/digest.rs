//! SHA-256 as the identity of files and tensors.

use std::{fmt, fs::File, io::Read, path::Path, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256};

use crate::error::Error;

/// A SHA-256; shown and stored as 64 lowercase hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The digest of a file's content.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn of_file(path: &Path) -> Result<Self, Error> {
        let mut file = File::open(path).map_err(|e| Error::io(path, "open", e))?;
        let (mut hash, mut buffer) = (Hasher::default(), vec![0; 1 << 20]);
        loop {
            match file.read(&mut buffer).map_err(|e| Error::io(path, "read", e))? {
                0 => return Ok(hash.finish()),
                n => hash.update(&buffer[..n]),
            }
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl FromStr for Digest {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let digit = |c: u8| char::from(c).to_digit(16).and_then(|d| u8::try_from(d).ok());
        let bytes = text.as_bytes();
        let mut digest = [0; 32];
        let (pairs, []) = bytes.as_chunks::<2>() else { return Err(malformed(text)) };
        if pairs.len() != digest.len() {
            return Err(malformed(text));
        }
        for (byte, &[high, low]) in digest.iter_mut().zip(pairs) {
            let (Some(high), Some(low)) = (digit(high), digit(low)) else { return Err(malformed(text)) };
            *byte = high << 4 | low;
        }
        Ok(Self(digest))
    }
}

fn malformed(text: &str) -> Error {
    let found = format!("`{}`", text.chars().take(80).collect::<String>());
    Error::invalid("SHA-256", "64 hexadecimal digits", found, "write the manifest again")
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A running digest.
#[derive(Debug, Clone, Default)]
pub struct Hasher(Sha256);

impl Hasher {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all bytes added.
    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}
