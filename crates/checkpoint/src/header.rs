//! The safetensors header: 8 bytes of length (little-endian), that many bytes of JSON, then the tensors' bytes.
//!
//! [`Header::parse`] accepts a file only if its tensors cover the data exactly once: no overlap, no gap, nothing after the
//! last one. The start of the data need not be aligned. Nothing in the header is trusted before it is checked, so damaged
//! bytes give a [`Damage`], never a panic.

use std::{collections::HashSet, fmt, ops::Range};

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::{Value, value::RawValue};

use crate::{
    data::DType,
    error::{Damage, Fault},
};

/// Longest header that the format allows, in bytes.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// A tensor as a header describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderEntry {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// Bytes in the file (not relative to the data's start).
    pub range: Range<usize>,
}

/// A checked header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Tensors in the order of their bytes.
    pub tensors: Vec<HeaderEntry>,
    /// The `__metadata__` strings, in file order.
    pub metadata: Vec<(String, String)>,
    /// Where the tensors' bytes begin.
    pub data_start: usize,
}

impl Header {
    /// Parses and checks the header of `bytes`, the whole content of `file` (the name is for messages).
    ///
    /// # Errors
    /// The first broken rule.
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Self, Damage> {
        let json = header_json(file, bytes)?;
        let data_start = 8 + json.len();
        let damage = |found: String| Damage::new(Fault::HeaderJson, file, "a JSON object of tensors", found);
        let text = std::str::from_utf8(json).map_err(|e| damage(e.to_string()))?;
        let Pairs(fields) = serde_json::from_str::<Pairs<&RawValue>>(text).map_err(|e| damage(e.to_string()))?;

        let mut names = HashSet::with_capacity(fields.len());
        let mut metadata = Vec::new();
        let mut tensors = Vec::with_capacity(fields.len());
        for (name, value) in &fields {
            if !names.insert(name.as_str()) {
                return Err(Damage::new(Fault::DuplicateName, file, "one entry", "at least two").of(name));
            }
            if name.chars().any(char::is_control) {
                let found = format!("`{}`", name.escape_debug());
                return Err(Damage::new(Fault::HeaderJson, file, "tensor names without control characters", found));
            }
            if name == "__metadata__" {
                metadata = parse_metadata(file, value.get())?;
            } else {
                tensors.push(parse_entry(file, name, value.get())?);
            }
        }
        tensors.sort_by_key(|tensor| (tensor.range.start, tensor.range.end));
        check_coverage(file, &tensors, bytes.len() - data_start)?;
        for tensor in &mut tensors {
            tensor.range = tensor.range.start + data_start..tensor.range.end + data_start;
        }
        Ok(Self { tensors, metadata, data_start })
    }
}

/// The JSON bytes, after the checks of the length field.
fn header_json<'a>(file: &str, bytes: &'a [u8]) -> Result<&'a [u8], Damage> {
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(Damage::new(Fault::Truncated, file, "at least 8 bytes", format!("{} bytes", bytes.len())));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        let expected = format!("a header of at most {MAX_HEADER_BYTES} bytes");
        return Err(Damage::new(Fault::HeaderLength, file, expected, format!("a length field of {length}")));
    }
    usize::try_from(length).ok().and_then(|n| rest.get(..n)).ok_or_else(|| {
        let expected = format!("a header of {length} bytes");
        Damage::new(Fault::Truncated, file, expected, format!("{} bytes after the length field", rest.len()))
    })
}

fn parse_metadata(file: &str, text: &str) -> Result<Vec<(String, String)>, Damage> {
    serde_json::from_str::<Pairs<String>>(text)
        .map(|Pairs(pairs)| pairs)
        .map_err(|e| Damage::new(Fault::HeaderJson, file, "an object of strings", e).of("__metadata__"))
}

/// One entry; its range is still relative to the data's start and only known to have the right length.
fn parse_entry(file: &str, name: &str, text: &str) -> Result<HeaderEntry, Damage> {
    let malformed = |found: String| {
        let expected = "an object with `dtype`, `shape` and `data_offsets`, each once";
        Damage::new(Fault::HeaderJson, file, expected, found).of(name)
    };
    let Pairs(fields) = serde_json::from_str::<Pairs<Value>>(text).map_err(|e| malformed(e.to_string()))?;
    let [mut dtype, mut shape, mut offsets] = [None, None, None];
    for (key, value) in fields {
        let slot = match key.as_str() {
            "dtype" => &mut dtype,
            "shape" => &mut shape,
            "data_offsets" => &mut offsets,
            other => return Err(malformed(format!("the key `{other}`"))),
        };
        if slot.replace(value).is_some() {
            return Err(malformed(format!("`{key}` twice")));
        }
    }
    let dtype = dtype.ok_or_else(|| malformed("no `dtype`".to_owned()))?;
    let Value::String(dtype) = dtype else { return Err(malformed(format!("dtype {dtype}"))) };
    let dtype = DType::from_name(&dtype).ok_or_else(|| {
        let expected = DType::ALL.map(DType::name).join(", ");
        Damage::new(Fault::UnknownDType, file, format!("one of {expected}"), format!("`{dtype}`")).of(name)
    })?;
    let shape =
        shape.as_ref().and_then(sizes).ok_or_else(|| malformed("a `shape` that is no list of sizes".to_owned()))?;
    let offsets = offsets.as_ref().and_then(sizes).unwrap_or_default();
    let [start, end] = offsets[..] else {
        return Err(malformed("`data_offsets` that are not two positions".to_owned()));
    };
    let size =
        shape.iter().try_fold(dtype.size(), |size, &n| size.checked_mul(n)).filter(|&n| isize::try_from(n).is_ok());
    let size = size.ok_or_else(|| {
        Damage::new(Fault::SizeOverflow, file, "a size below 2^63 bytes", format!("{dtype} {shape:?}")).of(name)
    })?;
    if end.checked_sub(start) != Some(size) {
        let expected = format!("{size} bytes for {dtype} {shape:?}");
        return Err(Damage::new(Fault::RangeLength, file, expected, format!("the range {start}..{end}")).of(name));
    }
    Ok(HeaderEntry { name: name.to_owned(), dtype, shape, range: start..end })
}

/// Tensors sorted by start must follow each other from 0 to the end of the data.
fn check_coverage(file: &str, tensors: &[HeaderEntry], data: usize) -> Result<(), Damage> {
    let mut end = 0;
    for tensor in tensors {
        let Range { start, end: tensor_end } = tensor.range;
        if tensor_end > data {
            let expected = format!("{tensor_end} bytes of data");
            return Err(Damage::new(Fault::Truncated, file, expected, format!("{data}")).of(&tensor.name));
        }
        if start != end {
            let fault = if start < end { Fault::Overlap } else { Fault::Gap };
            return Err(Damage::new(fault, file, format!("a start at {end}"), start).of(&tensor.name));
        }
        end = tensor_end;
    }
    if end == data {
        return Ok(());
    }
    Err(Damage::new(Fault::Trailing, file, format!("{end} bytes of data"), format!("{data} bytes")))
}

/// A JSON list of non-negative integers.
fn sizes(value: &Value) -> Option<Vec<usize>> {
    value.as_array()?.iter().map(|v| usize::try_from(v.as_u64()?).ok()).collect()
}

/// A JSON object as a list of pairs, so that repeated keys can be seen.
pub(crate) struct Pairs<V>(pub(crate) Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Pairs<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairVisitor<V>(std::marker::PhantomData<V>);

        impl<'de, V: Deserialize<'de>> Visitor<'de> for PairVisitor<V> {
            type Value = Pairs<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }

        deserializer.deserialize_map(PairVisitor(std::marker::PhantomData))
    }
}
