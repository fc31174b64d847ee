//! Storage of the CPU backend: aligned f32 buffers and weights that stay as the checkpoint stores them.
//!
//! A weight is never repacked: BF16 and INT4 matrices keep (and share) the checkpoint's bytes, which may be unaligned. What
//! a kernel wants in another order it takes from the activations, which are re-ordered once a row.

use bytemuck::{Pod, Zeroable};
pub(crate) use glimmer_checkpoint::int4::GROUP;
use glimmer_checkpoint::{Bytes, DType, TensorData};

use crate::{Error, MatrixSource, Result};

/// f32 lanes of one register of the widest instruction set, and of the order in which every sum is taken.
pub const LANES: usize = 16;

/// One cache line.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([f32; LANES]);

/// A growable f32 array that starts at a cache line.
#[derive(Debug, Clone, Default)]
pub struct AlignedVec {
    lines: Vec<Line>,
    len: usize,
}

impl AlignedVec {
    /// `len` zeros.
    ///
    /// # Errors
    /// [`Error::Memory`] when they cannot be had; `what` names them.
    pub fn zeroed(what: &'static str, len: usize) -> Result<Self> {
        let mut new = Self::default();
        new.grow(what, len)?;
        Ok(new)
    }

    /// Makes the array at least `len` long; new elements are zero, old ones stay.
    ///
    /// # Errors
    /// [`Error::Memory`] when the room cannot be had.
    pub fn grow(&mut self, what: &'static str, len: usize) -> Result<()> {
        let lines = len.div_ceil(LANES);
        if lines > self.lines.len() {
            let more = lines - self.lines.len();
            self.lines
                .try_reserve_exact(more)
                .map_err(|_| Error::Memory { what, bytes: lines.saturating_mul(size_of::<Line>()) })?;
            self.lines.resize(lines, Line([0.0; LANES]));
        }
        self.len = self.len.max(len);
        Ok(())
    }

    /// The elements.
    pub fn as_slice(&self) -> &[f32] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }

    /// The elements.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

/// Activations, f32 `[rows, width]`, row-major without padding between rows.
#[derive(Debug, Clone)]
pub struct CpuBuffer {
    data: AlignedVec,
    rows: usize,
    width: usize,
}

impl CpuBuffer {
    /// A zeroed buffer.
    ///
    /// # Errors
    /// [`Error::Memory`] when the room cannot be had.
    pub fn new(rows: usize, width: usize) -> Result<Self> {
        let len = rows.checked_mul(width).ok_or(Error::Memory { what: "an activation buffer", bytes: usize::MAX })?;
        Ok(Self { data: AlignedVec::zeroed("an activation buffer", len)?, rows, width })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Width of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Row `i`, `[width]`.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.data.as_slice()[i * self.width..(i + 1) * self.width]
    }

    /// Row `i`, `[width]`.
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        &mut self.data.as_mut_slice()[i * self.width..(i + 1) * self.width]
    }

    /// All rows, `[rows * width]`.
    pub fn as_slice(&self) -> &[f32] {
        self.data.as_slice()
    }

    /// All rows, `[rows * width]`.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        self.data.as_mut_slice()
    }

    /// Checks that the buffer holds `rows` rows of `width` columns at least.
    ///
    /// # Errors
    /// [`Error::Capacity`] naming `what`.
    pub fn require(&self, what: &'static str, rows: usize, width: usize) -> Result<()> {
        require(what, rows, self.rows)?;
        require(what, width, self.width)
    }
}

/// Checks `needed <= available`.
pub(crate) fn require(what: &'static str, needed: usize, available: usize) -> Result<()> {
    if needed <= available { Ok(()) } else { Err(Error::Capacity { what, needed, available }) }
}

/// Checks `needed == available`.
pub(crate) fn require_equal(what: &'static str, needed: usize, available: usize) -> Result<()> {
    if needed == available { Ok(()) } else { Err(Error::Capacity { what, needed, available }) }
}

/// A parameter vector, widened to f32.
#[derive(Debug, Clone)]
pub struct CpuVector {
    data: AlignedVec,
}

impl CpuVector {
    /// A copy of `values`.
    ///
    /// # Errors
    /// [`Error::Memory`] when the room cannot be had.
    pub fn new(values: &[f32]) -> Result<Self> {
        let mut data = AlignedVec::zeroed("a parameter vector", values.len())?;
        data.as_mut_slice().copy_from_slice(values);
        Ok(Self { data })
    }

    /// A BF16 or F32 tensor of any shape, flattened.
    ///
    /// # Errors
    /// [`Error::Weight`] for another dtype or a wrong number of bytes, [`Error::Memory`] when the room cannot be had.
    pub fn from_tensor(source: &TensorData) -> Result<Self> {
        let bytes = checked_bytes(source)?;
        let mut data = AlignedVec::zeroed("a parameter vector", source.elements())?;
        let values = data.as_mut_slice();
        match source.dtype {
            DType::F32 => {
                for (v, b) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *v = f32::from_le_bytes(*b);
                }
            }
            DType::Bf16 => {
                for (v, b) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *v = widen(*b);
                }
            }
            _ => return Err(wrong(source, "BF16 or F32")),
        }
        Ok(Self { data })
    }

    /// The values.
    pub fn as_slice(&self) -> &[f32] {
        self.data.as_slice()
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A weight matrix `[out, in]`, in the checkpoint's bytes.
#[derive(Debug, Clone)]
pub enum CpuMatrix {
    /// BF16, row-major.
    Bf16 {
        /// `2 * out * in` bytes.
        bytes: Bytes,
        /// Rows.
        out: usize,
        /// Columns.
        columns: usize,
    },
    /// F32, row-major.
    F32 {
        /// `4 * out * in` bytes.
        bytes: Bytes,
        /// Rows.
        out: usize,
        /// Columns.
        columns: usize,
    },
    /// INT4 with one scale a group of 128 columns: `w = scale * (nibble - 8)`, lowest nibble = lowest column.
    Int4 {
        /// `out * in / 2` bytes: 32-bit words of eight codes.
        packed: Bytes,
        /// `2 * out * in / 128` bytes: BF16.
        scale: Bytes,
        /// Rows.
        out: usize,
        /// Columns, a multiple of 128.
        columns: usize,
    },
}

impl CpuMatrix {
    /// Takes over a matrix without copying it.
    ///
    /// # Errors
    /// [`Error::Weight`] when dtype, shape or number of bytes is not what the source says.
    pub fn new(source: MatrixSource<'_>) -> Result<Self> {
        match source {
            MatrixSource::Dense(tensor) => Self::dense(tensor),
            MatrixSource::Int4 { packed, scale } => Self::int4(packed, scale),
        }
    }

    /// A BF16 matrix of `out` rows from f32 values.
    ///
    /// # Errors
    /// [`Error::Weight`] when a value is not representable in BF16 or the values do not fill whole rows.
    pub fn from_values(name: &str, out: usize, values: &[f32]) -> Result<Self> {
        if out == 0 || !values.len().is_multiple_of(out) {
            return Err(Error::Weight {
                name: name.to_owned(),
                expected: format!("{out} rows of equal width"),
                found: format!("{} values", values.len()),
            });
        }
        let mut bytes = Vec::with_capacity(2 * values.len());
        for (i, v) in values.iter().enumerate() {
            let bits = v.to_bits();
            if bits & 0xffff != 0 {
                return Err(Error::Weight {
                    name: name.to_owned(),
                    expected: "values representable in BF16".to_owned(),
                    found: format!("{v:e} at element {i}"),
                });
            }
            bytes.extend_from_slice(&bits.to_le_bytes()[2..]);
        }
        Ok(Self::Bf16 { bytes: Bytes::new(bytes), out, columns: values.len() / out })
    }

    /// Rows.
    pub fn out(&self) -> usize {
        match self {
            Self::Bf16 { out, .. } | Self::F32 { out, .. } | Self::Int4 { out, .. } => *out,
        }
    }

    /// Columns.
    pub fn columns(&self) -> usize {
        match self {
            Self::Bf16 { columns, .. } | Self::F32 { columns, .. } | Self::Int4 { columns, .. } => *columns,
        }
    }

    /// Widens row `row` to f32, `[in]`; INT4 rows are `scale * code` without rounding.
    pub fn widen_row(&self, row: usize, values: &mut [f32]) {
        match self {
            Self::Bf16 { bytes, columns, .. } => {
                let bytes = &bytes.as_slice()[2 * row * columns..2 * (row + 1) * columns];
                for (v, b) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *v = widen(*b);
                }
            }
            Self::F32 { bytes, columns, .. } => {
                let bytes = &bytes.as_slice()[4 * row * columns..4 * (row + 1) * columns];
                for (v, b) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *v = f32::from_le_bytes(*b);
                }
            }
            Self::Int4 { packed, scale, columns, .. } => {
                let packed = &packed.as_slice()[row * columns / 2..(row + 1) * columns / 2];
                let groups = columns / GROUP;
                let scale = &scale.as_slice()[2 * row * groups..2 * (row + 1) * groups];
                let scales = scale.as_chunks::<2>().0;
                for (i, (pair, b)) in values.as_chunks_mut::<2>().0.iter_mut().zip(packed).enumerate() {
                    let s = widen(scales[2 * i / GROUP]);
                    *pair = [s * (f32::from(b & 15) - 8.0), s * (f32::from(b >> 4) - 8.0)];
                }
            }
        }
    }

    /// Bytes that one product with the matrix reads.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Bf16 { bytes, .. } | Self::F32 { bytes, .. } => bytes.as_slice().len(),
            Self::Int4 { packed, scale, .. } => packed.as_slice().len() + scale.as_slice().len(),
        }
    }

    fn dense(tensor: &TensorData) -> Result<Self> {
        checked_bytes(tensor)?;
        // A matrix stored with more axes (a convolution) is `[first axis, product of the others]`.
        let Some((&out, rest)) = tensor.shape.split_first().filter(|(_, rest)| !rest.is_empty()) else {
            return Err(wrong(tensor, "a matrix [out, in]"));
        };
        let (bytes, columns) = (tensor.bytes.clone(), rest.iter().product());
        match tensor.dtype {
            DType::Bf16 => Ok(Self::Bf16 { bytes, out, columns }),
            DType::F32 => Ok(Self::F32 { bytes, out, columns }),
            _ => Err(wrong(tensor, "BF16 or F32")),
        }
    }

    fn int4(packed: &TensorData, scale: &TensorData) -> Result<Self> {
        checked_bytes(packed)?;
        checked_bytes(scale)?;
        let &[out, words] = packed.shape.as_slice() else { return Err(wrong(packed, "a matrix I32 [out, in / 8]")) };
        if packed.dtype != DType::I32 {
            return Err(wrong(packed, "I32 [out, in / 8]"));
        }
        let columns = 8 * words;
        if !columns.is_multiple_of(GROUP) {
            return Err(wrong(packed, "rows of whole groups of 128 columns (16 words)"));
        }
        if scale.dtype != DType::Bf16 || scale.shape != [out, columns / GROUP] {
            return Err(wrong(scale, &format!("BF16 [{out}, {}]", columns / GROUP)));
        }
        Ok(Self::Int4 { packed: packed.bytes.clone(), scale: scale.bytes.clone(), out, columns })
    }
}

/// The f32 value of a little-endian BF16.
#[inline(always)]
pub(crate) fn widen(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

fn checked_bytes(tensor: &TensorData) -> Result<&[u8]> {
    let bytes = tensor.bytes.as_slice();
    let expected = tensor.shape.iter().try_fold(tensor.dtype.size(), |n, &d| n.checked_mul(d));
    if expected == Some(bytes.len()) {
        Ok(bytes)
    } else {
        Err(wrong(tensor, &format!("as many bytes as dtype and shape say, not {}", bytes.len())))
    }
}

fn wrong(tensor: &TensorData, expected: &str) -> Error {
    Error::Weight {
        name: tensor.name.clone(),
        expected: expected.to_owned(),
        found: format!("{} {:?}", tensor.dtype, tensor.shape),
    }
}

/// Selected tokens of each row, ascending, `[rows, <= width]`.
#[derive(Debug, Clone)]
pub struct CpuSelection {
    /// `[rows, width]`; the first `lens[row]` of a row are valid.
    pub(crate) tokens: Vec<u32>,
    /// `[rows]`.
    pub(crate) lens: Vec<u32>,
    width: usize,
}

impl CpuSelection {
    /// An empty selection.
    pub fn new(rows: usize, width: usize) -> Self {
        Self { tokens: vec![0; rows * width], lens: vec![0; rows], width }
    }

    /// Rows that fit.
    pub fn rows(&self) -> usize {
        self.lens.len()
    }

    /// Tokens a row that fit.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Tokens of row `i`, ascending.
    pub fn row(&self, i: usize) -> &[u32] {
        &self.tokens[i * self.width..][..self.lens[i] as usize]
    }

    /// Room of row `i` and its length.
    pub(crate) fn row_mut(&mut self, i: usize) -> (&mut [u32], &mut u32) {
        (&mut self.tokens[i * self.width..(i + 1) * self.width], &mut self.lens[i])
    }
}

/// Chosen experts of each row with their weights, and the rows of each expert.
#[derive(Debug, Clone)]
pub struct CpuRouting {
    /// `[rows, top]`, ascending in a row.
    pub(crate) experts: Vec<u32>,
    /// `[rows, top]`, factor included.
    pub(crate) weights: Vec<f32>,
    /// `[rows * top]`: choices (`row * top + k`) grouped by expert, ascending in a group.
    pub(crate) grouped: Vec<u32>,
    /// `[experts + 1]`: start of each expert's group.
    pub(crate) starts: Vec<u32>,
    top: usize,
}

impl CpuRouting {
    /// An empty routing.
    pub fn new(rows: usize, top: usize, experts: usize) -> Self {
        let choices = rows * top;
        Self {
            experts: vec![0; choices],
            weights: vec![0.0; choices],
            grouped: vec![0; choices],
            starts: vec![0; experts + 1],
            top,
        }
    }

    /// Rows that fit.
    pub fn rows(&self) -> usize {
        self.experts.len().checked_div(self.top).unwrap_or(0)
    }

    /// Experts a row.
    pub fn top(&self) -> usize {
        self.top
    }

    /// Experts to choose from.
    pub fn num_experts(&self) -> usize {
        self.starts.len() - 1
    }

    /// Chosen experts of row `i`, ascending.
    pub fn experts(&self, i: usize) -> &[u32] {
        &self.experts[i * self.top..(i + 1) * self.top]
    }

    /// Weights of row `i`, in the order of [`CpuRouting::experts`].
    pub fn weights(&self, i: usize) -> &[f32] {
        &self.weights[i * self.top..(i + 1) * self.top]
    }

    /// Choices (`row * top + k`) of `expert`, ascending.
    pub fn choices(&self, expert: usize) -> &[u32] {
        &self.grouped[self.starts[expert] as usize..self.starts[expert + 1] as usize]
    }
}
