//! Weights on their way into the device's layouts.

use glimmer_checkpoint::{DType, TensorData};
use glimmer_tensor::{Error, MatrixSource, Result};

use super::Cuda;
use crate::{
    kernels::{dense, experts},
    types::{BLOCK, CudaMatrix, CudaVector, GROUP, INT4_BLOCK_BYTES, INT4_ROWS, Kind, unique},
    upload::Job,
};

/// Bytes of a matrix from which on it is worth a thread's while.
const LARGE: usize = 64 << 10;

impl Cuda {
    /// [`glimmer_tensor::Backend::matrix`].
    pub(super) fn stored_matrix(&self, source: MatrixSource<'_>) -> Result<CudaMatrix> {
        match source {
            MatrixSource::Dense(tensor) => self.plain_matrix(tensor),
            MatrixSource::Int4 { packed, scale } => self.int4_matrix(packed, scale),
        }
    }

    /// [`glimmer_tensor::Backend::vector`].
    pub(super) fn stored_vector(&self, source: &TensorData) -> Result<CudaVector> {
        check_bytes(source)?;
        let bytes = source.bytes.as_slice();
        let values: Vec<f32> = match source.dtype {
            DType::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            DType::Bf16 => bytes.as_chunks::<2>().0.iter().map(|b| widen(*b)).collect(),
            _ => return Err(wrong(source, "BF16 or F32")),
        };
        Ok(CudaVector { memory: self.memory.upload("a parameter vector", &values)?, len: values.len() })
    }

    /// [`glimmer_tensor::Backend::matrix_from`].
    pub(super) fn matrix_of(&self, name: &str, out: usize, values: &[f32]) -> Result<CudaMatrix> {
        let fail = |expected: String, found: String| Error::Weight { name: name.to_owned(), expected, found };
        if out == 0 || !values.len().is_multiple_of(out) {
            return Err(fail(format!("{out} rows of equal width"), format!("{} values", values.len())));
        }
        let mut bytes = Vec::with_capacity(2 * values.len());
        for (i, v) in values.iter().enumerate() {
            if v.to_bits() & 0xffff != 0 {
                return Err(fail("values representable in BF16".to_owned(), format!("{v:e} at element {i}")));
            }
            bytes.extend_from_slice(&v.to_bits().to_le_bytes()[2..]);
        }
        let shape = vec![out, values.len() / out];
        let bytes = glimmer_checkpoint::Bytes::new(bytes);
        self.plain_matrix(&TensorData { name: name.to_owned(), dtype: DType::Bf16, shape, bytes })
    }

    fn plain_matrix(&self, tensor: &TensorData) -> Result<CudaMatrix> {
        check_bytes(tensor)?;
        // A matrix stored with more axes (a convolution) is `[first axis, product of the others]`.
        let Some((&out, rest)) = tensor.shape.split_first().filter(|(_, rest)| !rest.is_empty()) else {
            return Err(wrong(tensor, "a matrix [out, in]"));
        };
        self.rows_matrix(tensor, out, rest.iter().product())
    }

    fn rows_matrix(&self, tensor: &TensorData, out: usize, columns: usize) -> Result<CudaMatrix> {
        let bytes = &tensor.bytes;
        let kind = match tensor.dtype {
            DType::Bf16 => Kind::Bf16,
            DType::F32 => Kind::F32,
            _ => return Err(wrong(tensor, "BF16 or F32")),
        };
        let pitch = if kind == Kind::Bf16 && columns >= BLOCK { columns.next_multiple_of(BLOCK) } else { columns };
        let size = tensor.dtype.size();
        let data = if pitch == columns {
            self.memory.uninitialized("a matrix", out * pitch * size)?
        } else {
            self.memory.zeroed("a matrix", out * pitch * size)?
        };
        if pitch == columns && bytes.as_slice().len() >= LARGE {
            self.kernels.uploads.give(Job::Plain { bytes: bytes.clone(), to: data.clone() })?;
        } else {
            data.write_rows(bytes.as_slice(), columns * size, pitch * size)?;
        }
        Ok(CudaMatrix { kind, out, columns, pitch, data, id: unique() })
    }

    fn int4_matrix(&self, packed: &TensorData, scale: &TensorData) -> Result<CudaMatrix> {
        check_bytes(packed)?;
        check_bytes(scale)?;
        let &[out, words] = packed.shape.as_slice() else { return Err(wrong(packed, "a matrix I32 [out, in / 8]")) };
        if packed.dtype != DType::I32 {
            return Err(wrong(packed, "I32 [out, in / 8]"));
        }
        let columns = 8 * words;
        if !columns.is_multiple_of(GROUP) || !out.is_multiple_of(8) {
            return Err(wrong(packed, "rows in eights, of whole groups of 128 columns (16 words)"));
        }
        if scale.dtype != DType::Bf16 || scale.shape != [out, columns / GROUP] {
            return Err(wrong(scale, &format!("BF16 [{out}, {}]", columns / GROUP)));
        }
        experts::check_scales(scale.bytes.as_slice())
            .map_err(|found| wrong(scale, &format!("scales below 1 in size, not {found}")))?;
        // Whole strips of rows; what lies beyond the last row is read, not used.
        let bytes = out.next_multiple_of(INT4_ROWS) / 8 * (columns / GROUP) * INT4_BLOCK_BYTES;
        let data = self.memory.uninitialized("a matrix", bytes)?;
        let kernel = self.kernels.get(&dense::FILE, &[], "pack_int4")?;
        let (codes, scales) = (packed.bytes.clone(), scale.bytes.clone());
        self.kernels.uploads.give(Job::Int4 { codes, scales, shape: [out, columns], kernel, to: data.clone() })?;
        Ok(CudaMatrix { kind: Kind::Int4, out, columns, pitch: columns, data, id: unique() })
    }
}

fn check_bytes(tensor: &TensorData) -> Result<()> {
    let expected = tensor.shape.iter().try_fold(tensor.dtype.size(), |n, &d| n.checked_mul(d));
    if expected == Some(tensor.bytes.as_slice().len()) {
        return Ok(());
    }
    Err(wrong(tensor, &format!("as many bytes as dtype and shape say, not {}", tensor.bytes.as_slice().len())))
}

fn wrong(tensor: &TensorData, expected: &str) -> Error {
    Error::Weight {
        name: tensor.name.clone(),
        expected: expected.to_owned(),
        found: format!("{} {:?}", tensor.dtype, tensor.shape),
    }
}

pub(super) fn widen(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}
