//! Copying tensors that stay as they are, and naming those that hold NaN or infinity.
//!
//! What is copied is copied whatever it holds: it is the source's. But a source with NaN in its attention is damaged, and
//! nobody would look for the reason there once the artifact answers nonsense; so every float is looked at on its way.

use std::path::Path;

use glimmer_checkpoint::writer::{ShardReceipt, ShardWriter, TensorHeader};
use glimmer_checkpoint::{Checkpoint, DType};
use serde::{Deserialize, Serialize};

use crate::error::Result;

/// A shard of copied tensors.
#[derive(Debug)]
pub(crate) struct CopyShard {
    /// File name.
    pub(crate) file: String,
    /// Its tensors.
    pub(crate) tensors: Vec<TensorHeader>,
}

/// A copied tensor with values that are NaN or infinite.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NonFiniteTensor {
    /// Its name.
    pub name: String,
    /// Elements that are NaN or infinite.
    pub count: usize,
    /// The first of them, counted through the flattened tensor.
    pub first: usize,
}

impl std::fmt::Display for NonFiniteTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, count, first } = self;
        write!(f, "`{name}`: {count} values are NaN or infinite, the first is element {first}")
    }
}

/// Copies a shard's tensors, byte range by byte range; FP8 weights are widened on the way. Also returns the tensors that
/// hold NaN or infinity.
///
/// # Errors
/// What reading and writing can go wrong with.
pub(crate) fn copy_shard(
    source: &Checkpoint,
    directory: &Path,
    shard: &CopyShard,
) -> Result<(ShardReceipt, Vec<NonFiniteTensor>)> {
    /// Bytes handed over at a time, so that pages of the mapped source can be given back early; whole elements.
    const PIECE: usize = 16 << 20;
    let mut writer = ShardWriter::create(directory, &shard.file, shard.tensors.clone())?;
    let mut damaged = Vec::new();
    for header in &shard.tensors {
        let tensor = source.tensor(&header.name)?;
        let length = tensor.bytes.as_slice().len();
        let (mut count, mut first, mut elements) = (0, None, 0);
        for start in (0..length).step_by(PIECE) {
            let Some(piece) = tensor.bytes.slice(start..(start + PIECE).min(length)) else { continue };
            let found = non_finite(tensor.dtype, piece.as_slice());
            count += found.count;
            first = first.or(found.first.map(|i| elements + i));
            elements += found.elements;
            writer.write(piece.as_slice())?;
            piece.release();
        }
        if let Some(first) = first {
            damaged.push(NonFiniteTensor { name: header.name.clone(), count, first });
        }
    }
    Ok((writer.finish()?, damaged))
}

/// What a piece of a tensor holds.
struct Found {
    elements: usize,
    count: usize,
    first: Option<usize>,
}

/// Looks for NaN and infinity, which have all bits of the exponent set. Types without them hold none.
fn non_finite(dtype: DType, bytes: &[u8]) -> Found {
    fn find<const N: usize>(bytes: &[u8], bad: impl Fn([u8; N]) -> bool) -> Found {
        let values = bytes.as_chunks::<N>().0;
        // The plain count is a loop without branches; the place is looked for only where there is one.
        let count = values.iter().map(|&v| usize::from(bad(v))).sum();
        let first = if count > 0 { values.iter().position(|&v| bad(v)) } else { None };
        Found { elements: values.len(), count, first }
    }
    match dtype {
        DType::Bf16 => find(bytes, |v| u16::from_le_bytes(v) & 0x7f80 == 0x7f80),
        DType::F16 => find(bytes, |v| u16::from_le_bytes(v) & 0x7c00 == 0x7c00),
        DType::F32 => find(bytes, |v| !f32::from_le_bytes(v).is_finite()),
        DType::F64 => find(bytes, |v| !f64::from_le_bytes(v).is_finite()),
        _ => Found { elements: bytes.len(), count: 0, first: None },
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    #[test]
    fn every_float_type_is_looked_at() {
        let values = [1.0, f32::NAN, -2.0, f32::NEG_INFINITY, f32::MAX];
        let bytes = |f: fn(f32) -> Vec<u8>, values: &[f32]| values.iter().flat_map(|&v| f(v)).collect::<Vec<u8>>();
        let of: [(DType, fn(f32) -> Vec<u8>); 4] = [
            (DType::Bf16, |v| bf16::from_f32(v.clamp(-1e38, 1e38)).to_le_bytes().to_vec()),
            (DType::F16, |v| f16::from_f32(v.clamp(-6e4, 6e4)).to_le_bytes().to_vec()),
            (DType::F32, |v| v.to_le_bytes().to_vec()),
            (DType::F64, |v| f64::from(v).to_le_bytes().to_vec()),
        ];
        for (dtype, f) in of {
            let clean = non_finite(dtype, &bytes(f, &[1.0, -2.0, 0.0]));
            assert_eq!((clean.elements, clean.count, clean.first), (3, 0, None));
            // Clamping keeps NaN, and makes infinity the largest finite value where that is what is written.
            let infinite = matches!(dtype, DType::F32 | DType::F64);
            let found = non_finite(dtype, &bytes(f, &values));
            assert_eq!(
                (found.elements, found.count, found.first),
                (5, if infinite { 2 } else { 1 }, Some(1)),
                "{dtype}"
            );
        }
        for (dtype, infinity) in
            [(DType::Bf16, bf16::INFINITY.to_le_bytes()), (DType::F16, f16::INFINITY.to_le_bytes())]
        {
            assert_eq!(non_finite(dtype, &infinity).first, Some(0));
        }
        assert_eq!(non_finite(DType::I32, &[0xff; 8]).count, 0);
    }
}
